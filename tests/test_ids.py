"""Ids sort by the time they were made, and derived ones follow from their parts alone."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.clock import SystemClock
from holdfast.ids import LENGTH, Ids, derived_id, is_id
from holdfast.testing import FakeClock


def maker(clock: FakeClock, seed: int = 0) -> Ids:
    return Ids(clock, random.Random(seed))


def test_ids_of_one_millisecond_increase() -> None:
    ids = maker(FakeClock())
    made = [ids.new() for _ in range(10_000)]
    assert made == sorted(set(made))
    assert all(is_id(each) for each in made)


def test_ids_of_several_processes_sort_by_time() -> None:
    clock = FakeClock()
    makers = [maker(clock, seed) for seed in range(5)]
    made = []
    for _ in range(50):
        made.append({each.new() for each in makers})
        clock.advance(0.002)
    for earlier, later in itertools.pairwise(made):
        assert max(earlier) < min(later)


def test_ids_increase_although_the_clock_was_set_back() -> None:
    clock = FakeClock()
    ids = maker(clock)
    before = ids.new()
    clock.set(clock.now() - 3600)
    after = [ids.new() for _ in range(100)]
    assert [before, *after] == sorted({before, *after})
    clock.set(clock.now() + 7200)
    assert ids.new() > after[-1]


def test_ids_are_unique_over_threads() -> None:
    ids = Ids(SystemClock(), random.Random(1))
    with ThreadPoolExecutor(8) as pool:
        batches = list(pool.map(lambda _: [ids.new() for _ in range(2000)], range(8)))
    assert len({each for batch in batches for each in batch}) == 16_000
    assert all(batch == sorted(batch) for batch in batches)


def test_two_processes_do_not_make_the_same_ids() -> None:
    clock = FakeClock()
    one, two = maker(clock, 1), maker(clock, 2)
    assert not {one.new() for _ in range(1000)} & {two.new() for _ in range(1000)}


def test_ids_hold_for_many_centuries() -> None:
    assert [len(maker(FakeClock(start)).new()) for start in (0.0, 1.7e9, 2.5e11)] == [LENGTH] * 3
    assert maker(FakeClock(0.0)).new() < maker(FakeClock(1.7e9)).new() < maker(FakeClock(2.5e11)).new()


def test_operations_are_short_and_unique() -> None:
    ids = maker(FakeClock())
    made = [ids.operation() for _ in range(5000)]
    assert len(set(made)) == 5000
    assert {len(each) for each in made} == {16}


def test_a_derived_id_follows_from_its_parts_alone() -> None:
    assert derived_id("schedule", "2026-01-01") == derived_id("schedule", "2026-01-01")
    assert is_id(derived_id("schedule", "2026-01-01"))
    assert derived_id("a", "b") != derived_id("b", "a")


def test_a_derived_id_with_a_time_sorts_by_it() -> None:
    clock = FakeClock()
    before = maker(clock).new()
    clock.set(clock.now() + 1)
    made = derived_id("tick", "u", at=clock.now())
    assert made == derived_id("tick", "u", at=clock.now())
    assert made not in (derived_id("tick", "v", at=clock.now()), derived_id("tick", "u"))
    assert is_id(made)
    clock.set(clock.now() + 1)
    assert before < made < maker(clock).new()
    assert is_id(derived_id("tick", "u", at=-5.0)), "as good as it gets"


PARTS = st.lists(st.text(st.sampled_from("ab\0:1"), max_size=4), max_size=3)


@given(PARTS, PARTS)
def test_different_parts_give_different_ids(one: list[str], two: list[str]) -> None:
    assert (derived_id(*one) == derived_id(*two)) == (one == two)


@pytest.mark.parametrize("text", ["", "a" * 25, "a" * 27, "A" * 26, "l" * 26, "é" * 26])
def test_not_everything_is_an_id(text: str) -> None:
    assert not is_id(text)
