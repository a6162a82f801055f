"""Circles of waits, on graphs that Hypothesis makes up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.ids import InvocationId
from holdfast.model.records import InvocationRecord, Waiting
from holdfast.model.status import Status
from holdfast.model.waits import Need, find_circle, path_in_words

NAMES = [InvocationId(name) for name in "abcdef"]
SOME = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True).map(tuple)
CALLS = st.builds(Need, task=st.just("t"), awaited=SOME)
WAITERS = st.builds(Need, task=st.just("t"), holders=SOME, limit_key=st.just("k"))
NEEDS = st.one_of(CALLS, WAITERS)


def need(*awaited: str, holders: str = "") -> Need:
    others = tuple(map(InvocationId, holders))
    return Need(task="t", awaited=tuple(map(InvocationId, awaited)), holders=others, limit_key="k" if holders else None)


def circle(start: str, **needs: Need) -> list[str]:
    known = {InvocationId(id): each for id, each in needs.items()}
    return [link.id for link in find_circle(InvocationId(start), known)]


def test_circles() -> None:
    assert circle("a", a=need("a")) == ["a"]
    assert circle("a", a=need("b"), b=need("a")) == ["a", "b"]
    assert circle("a", a=need("x", "b"), b=need("c"), c=need("a")) == ["a", "b", "c"]
    assert circle("a", a=need("b"), b=need("c"), c=need("b")) == [], "it stands behind one, and is in none"
    assert circle("a", a=need("b"), b=need("c")) == []


def test_one_holder_that_can_go_on_is_enough() -> None:
    assert circle("a", a=need("b"), b=need(holders="a")) == ["a", "b"]
    assert circle("a", a=need("b"), b=need(holders="ax")) == []
    assert circle("a", a=need("b"), b=need(holders="ac"), c=need("d"), d=need(holders="ac")) == ["a", "b"]
    assert circle("a", a=need("b"), b=need(holders="ac"), c=need("d")) == []


def test_the_way_round_is_told() -> None:
    needs = {"a": need("b"), "b": need(holders="a")}
    found = find_circle(InvocationId("a"), {InvocationId(id): each for id, each in needs.items()})
    assert path_in_words(found) == "a (t) → b (t), for a slot of k, held by → a"


def can_end(id: InvocationId, needs: dict[InvocationId, Need]) -> bool:
    """Whether it can, by playing it through: whatever can go on does, and is gone."""
    left = dict(needs)
    for _ in needs:
        for each in list(left):
            awaited, holders = left[each].awaited, left[each].holders
            if all(other not in left for other in awaited) if awaited else any(other not in left for other in holders):
                del left[each]
    return id not in left


@given(start=st.sampled_from(NAMES), needs=st.dictionaries(st.sampled_from(NAMES), NEEDS))
def test_what_is_refused_could_never_end(start: InvocationId, needs: dict[InvocationId, Need]) -> None:
    links = [link.id for link in find_circle(start, needs)]
    if not links:
        return
    assert links[0] == start
    assert not any(can_end(id, needs) for id in links)
    for id, following in zip(links, [*links[1:], start], strict=True):
        assert following in needs[id].others


@given(needs=st.dictionaries(st.sampled_from(NAMES), NEEDS))
def test_of_those_that_can_never_end_some_are_refused(needs: dict[InvocationId, Need]) -> None:
    stuck = [id for id in needs if not can_end(id, needs)]
    assert not stuck or any(find_circle(id, needs) for id in stuck)


def test_only_an_owner_waits_and_only_in_its_own_epoch() -> None:
    waiting = Waiting(ids=(InvocationId("b"),), epoch=1)
    record = InvocationRecord(
        id=InvocationId("a"),
        app="app",
        task="t",
        arguments=b"",
        created_at=0.0,
        due_at=0.0,
        epoch=1,
        status=Status.PAUSED,
        waiting=waiting,
    )
    assert record.awaited == replace(record, status=Status.RUNNING).awaited == waiting
    assert replace(record, epoch=2).awaited is None
    assert replace(record, status=Status.SUCCESS).awaited is None
