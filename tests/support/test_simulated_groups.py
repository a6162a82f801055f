"""Simulated chains and groups: seeds hold, and planted bugs do not survive them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.simulation import Weather, dying_parties, parties_of, simulate
from tests.support.test_simulation import caught

from holdfast.groups import rules, service
from holdfast.groups.calling import Caller
from holdfast.groups.service import Groups, GroupWatch
from holdfast.ids import derived_id
from holdfast.model import changes
from holdfast.model.status import Status


@pytest.mark.parametrize("first", range(0, 20, 10))
def test_seeds_hold(first: int) -> None:
    for seed in range(first, first + 10):
        run = simulate(parties_of(seed))
        assert not run.violations, str(run)


def test_parties_on_dying_runners_hold() -> None:
    for seed in range(4):
        run = simulate(dying_parties(seed))
        assert not run.violations, str(run)


def test_callbacks_come_at_once_if_nothing_is_in_the_way() -> None:
    """The duty would find a done group after 10 s: the ends of members, and the submit, are to tell it at once."""
    for seed in range(8):
        slow = Weather(slow=0.2, slow_seconds=0.3)  # members may have ended before their group is whole
        fair = replace(parties_of(seed), strikes=(), weather=slow, skew=0.0, own_clocks=0.0)
        dump = simulate(fair).evidence.dump
        called = {record.id: record.created_at for record in dump.records}
        for group in dump.groups:
            ended = [record.changed_at for record in dump.records if record.terms.group == group.id]
            assert called[rules.done_id(group.id)] <= max(group.created_at, *ended) + 4.0, f"seed {seed}"


def test_the_seeds_meet_what_may_happen_to_a_group() -> None:
    runs = [simulate(parties_of(seed)) for seed in range(8)]
    groups = [group for run in runs for group in run.evidence.dump.groups]
    assert {group.failed is None for group in groups} == {True, False}
    ends = {record.status for run in runs for record in run.evidence.dump.records if record.terms.group is not None}
    assert ends >= {Status.SUCCESS, Status.FAILED, Status.CANCELLED}


def test_the_same_seed_gives_the_same_run() -> None:
    assert simulate(parties_of(3)).trace == simulate(parties_of(3)).trace


def a_callback_has_a_new_id(patch: pytest.MonkeyPatch) -> None:
    """Several processes that see the end of a group submit several callbacks."""
    numbers = iter(range(10**6))
    patch.setattr(rules, "done_id", lambda group: derived_id("done", group, str(next(numbers)), at=0.0))


def the_end_is_counted(patch: pytest.MonkeyPatch) -> None:
    """Ends are counted in memory, instead of read: what another process has seen is not counted."""

    async def check(self: Any, id: Any, known: Sequence[str] = ()) -> None:
        counts = self.__dict__.setdefault("counts", {})
        counts[id] = counts.get(id, 0) + len(known)
        record = await self.get(id)
        if record is not None and record.is_whole and record.done_at is None and counts[id] >= record.size:
            await self._done(record)

    patch.setattr(Groups, "check", check)


def an_end_that_was_read_before_is_believed(patch: pytest.MonkeyPatch) -> None:
    """The group is done when its last member is: the others may still run."""

    async def walk(self: Any, record: Any, floor: int, known: Any) -> int:
        (last,) = rules.member_ids(record.id, record.size - 1, record.size)
        (found,) = await self._store.get(self._app, [last])
        return record.size if found is not None and found.status in service.FINAL else floor

    patch.setattr(Groups, "_walk", walk)


def no_outbox_names_what_follows(patch: pytest.MonkeyPatch) -> None:
    """A process that dies right after an end takes with it what was to follow."""
    change_of = changes.change_of

    def forgetful(name: str, record: Any, *rest: Any, **facts: Any) -> Any:
        terms = replace(record.terms, follow=None, group=None)
        return change_of(name, replace(record, terms=terms), *rest, **facts)

    patch.setattr(changes, "change_of", forgetful)
    patch.setattr(GroupWatch, "duties", lambda self: ())


def nobody_looks_when_all_are_stored(patch: pytest.MonkeyPatch) -> None:
    """All members may have ended before the group is marked as whole: either an end finds it whole, or its submit looks
    when it has marked it.
    """
    check = Groups.check

    async def only_ends(self: Any, id: Any, known: Sequence[str] = ()) -> None:
        if known:
            await check(self, id, known)

    async def unknown(self: Any, record: Any) -> bool:
        return False

    patch.setattr(Groups, "check", only_ends)
    patch.setattr(Groups, "_all_there", unknown)


def a_failed_link_is_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Caller, "_failed", lambda self, record, follow: [])


PLANTED: list[tuple[Callable[[pytest.MonkeyPatch], None], str, Any]] = [
    (a_callback_has_a_new_id, "I21", dying_parties),
    (the_end_is_counted, "I21", parties_of),
    (an_end_that_was_read_before_is_believed, "I21", parties_of),
    (no_outbox_names_what_follows, "I21", parties_of),
    (nobody_looks_when_all_are_stored, "I21", parties_of),
    (a_failed_link_is_the_end, "I21", parties_of),
]


@pytest.mark.parametrize(("plant", "expected", "plan"), PLANTED, ids=[plant.__name__ for plant, _, _ in PLANTED])
def test_a_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], expected: str, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    caught(expected, range(40), plan)
