"""A change is legal when it is made, and applies to exactly what it was made for."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.errors import InvocationStatusOwnershipError, InvocationStatusTransitionError
from holdfast.model import cancellation as cancelling
from holdfast.model import changes, claims, run_changes, waits
from holdfast.model.changes import Change, applies, apply_to, entries, was_applied
from holdfast.model.claims import Claim, claimed
from holdfast.model.records import InvocationRecord
from holdfast.model.status import AVAILABLE, FINAL, OWNED, TABLE, Status, validate_ownership, walk
from holdfast.testing.samples import BY_NAME, ERROR, START, fields_for, invocation, wish

S = Status


def made(**fields: Any) -> Change:
    """A change that is legal unless `fields` say otherwise: RUNNING → SUCCESS by the owner."""
    given: dict[str, Any] = {
        "name": "test",
        "app": "shop",
        "id": "a",
        "path": (S.SUCCESS,),
        "sources": frozenset({S.RUNNING}),
        "epoch": 1,
        "operation": "op",
        "at": START,
        "actor": "runner/1",
    }
    given |= fields
    if given["path"] and given["path"][-1] in FINAL:
        given.setdefault("retain_until", START + 1)
    return Change(**given)


def running(**fields: Any) -> InvocationRecord:
    record = invocation("a", **fields)
    return apply_to(claimed(wish("claim"), record), record)


# --- by name


def test_every_named_change_is_in_the_samples_that_every_store_is_tried_with() -> None:
    named = {
        name
        for module in (changes, claims, cancelling, run_changes, waits)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if not name.startswith("_")
        and inspect.signature(function).return_annotation == "Change"
        and name not in ("claimed", "owned", "change_of", "asked_to_compensate")  # the last is a "cancelling"
    }
    asked = {"cancelled", "cancelling", "expired"}  # by functions that may have nothing to ask
    assert named | asked == {name.partition(",")[0] for name in BY_NAME}


@pytest.mark.parametrize("name", BY_NAME)
def test_every_named_change_is_legal_from_each_of_its_sources(name: str) -> None:
    source, build = BY_NAME[name]
    change = build(replace(running(**fields_for(name)), status=source))
    assert change.name == name.partition(",")[0]
    assert source in change.sources
    for status in change.sources:
        owner = "runner/1" if status in OWNED else None
        last, _ = walk(status, change.path, owner, change.actor)
        assert last is change.target


@pytest.mark.parametrize("name", BY_NAME)
def test_every_named_change_holds_only_for_the_epoch_it_was_made_for(name: str) -> None:
    source, build = BY_NAME[name]
    record = replace(running(**fields_for(name)), status=source)
    change = build(record)
    assert change.epoch == record.epoch
    assert applies(change, record)
    assert not applies(change, replace(record, epoch=record.epoch + 1))
    assert not applies(change, replace(record, status=S.SUCCESS))


def test_what_a_change_carries() -> None:
    record = running()
    assert changes.completed(record, result=b"r", operation="op", at=1.0).result == b"r"
    assert changes.failed(record, error=ERROR, operation="op", at=1.0).error == ERROR
    assert changes.killed(record, operation="op", at=1.0, why="").path == (S.KILLED, S.REROUTED)
    woken = changes.woken(replace(record, status=S.PARKED), operation="op", at=9.0, why="")
    assert (woken.due_at, woken.fingerprint) == (9.0, None)


def test_a_claim_may_take_only_what_is_available() -> None:
    change = claimed(wish("op"), invocation("a"))
    assert change.sources == AVAILABLE
    assert change.path == (S.PENDING, S.RUNNING)
    assert claimed(wish("op", start=False), invocation("a")).path == (S.PENDING,)


# --- refused


@pytest.mark.parametrize("twice", [1, 2])
@pytest.mark.parametrize(
    "fields",
    [
        {"path": ()},
        {"sources": frozenset()},
        {"path": (S.REGISTERED,)},
        {"path": (S.RUNNING,)},
        {"sources": frozenset({S.RUNNING, S.SUCCESS})},
        {"path": (S.SUCCESS, S.REROUTED)},
        {"path": (S.KILLED, S.RUNNING)},
        {"path": (S.PENDING,), "sources": frozenset({S.PARKED})},
    ],
)
def test_a_change_that_the_table_does_not_allow_is_refused(fields: dict[str, Any], twice: int) -> None:
    for _ in range(twice):
        with pytest.raises(InvocationStatusTransitionError):
            made(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"epoch": None},
        {"epoch": None, "path": (S.KILLED, S.REROUTED)},
        {"epoch": None, "path": (S.CANCELLED,), "sources": frozenset({S.CANCELLING})},
        {"path": (S.PENDING,), "sources": frozenset({S.REROUTED}), "actor": None},
        {"actor": None},
        {"actor": ""},
        {"path": (S.KILLED, S.REROUTED), "actor": None},
        {"path": (S.CANCELLING, S.CANCELLED), "actor": None},
        {"path": (S.REROUTED,), "sources": frozenset({S.PENDING, S.SUSPENDED})},
    ],
)
def test_a_change_that_only_an_owner_may_make_is_refused_without_one(fields: dict[str, Any]) -> None:
    with pytest.raises(InvocationStatusOwnershipError):
        made(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"epoch": None, "path": (S.CANCELLING,)},
        {"epoch": None, "path": (S.RUNNING_RECOVERY, S.REROUTED), "actor": None},
        {"epoch": None, "path": (S.PENDING, S.RUNNING), "sources": AVAILABLE},
        {"epoch": None, "path": (S.REROUTED,), "sources": frozenset({S.SUSPENDED}), "actor": None},
    ],
)
def test_a_change_that_needs_no_owner_needs_no_epoch(fields: dict[str, Any]) -> None:
    change = made(**fields)
    assert applies(change, replace(running(), status=min(change.sources), epoch=99))


def test_a_refused_change_is_refused_although_its_like_with_an_epoch_was_fine() -> None:
    made()
    with pytest.raises(InvocationStatusOwnershipError):
        made(epoch=None)


@pytest.mark.parametrize("path", [path for status in sorted(OWNED) for path in [(status, *sorted(TABLE[status].next))]])
def test_ownership_is_asked_for_wherever_the_table_asks_for_it(path: tuple[Status, ...]) -> None:
    source, *targets = path
    record = replace(running(), status=source)
    for target in targets:
        for actor in ("runner/1", "runner", "runner/2", "stranger/1", "runne", "runner/"):
            change = made(path=(target,), sources=frozenset({source}), actor=actor)
            try:
                validate_ownership(source, target, record.owner, actor)
            except InvocationStatusOwnershipError:
                assert not applies(change, record)
            else:
                assert applies(change, record)


def test_a_walk_through_an_owned_status_needs_its_owner() -> None:
    """CANCELLING may be entered by anybody, and left only by the owner: in one change as well as in two."""
    stranger = made(path=(S.CANCELLING, S.CANCELLED), actor="stranger/1")
    assert stranger.needs_owner
    assert not applies(stranger, running())
    assert applies(replace(stranger, actor="runner/1"), running())


# --- what it does


def test_every_edge_is_in_the_history_and_the_reason_stands_at_its_end() -> None:
    lines = entries(made(path=(S.KILLED, S.REROUTED), why="stop"), version=3, epoch=1, owner="runner/1")
    assert [(line.version, line.status, line.owner, line.why) for line in lines] == [
        (4, S.KILLED, None, ""),
        (5, S.REROUTED, None, "stop"),
    ]


def test_a_recovery_names_who_performed_it_and_why_at_each_of_its_edges() -> None:
    change = changes.recovered(running(), by="r2", operation="op", at=START, why="its owner is dead")
    lines = entries(change, version=3, epoch=1, owner="runner/1")
    assert [(line.status, line.by, line.why) for line in lines] == [
        (S.RUNNING_RECOVERY, "r2", "its owner is dead"),
        (S.REROUTED, "r2", "its owner is dead"),
    ]
    assert [line.by for line in apply_to(made(), running()).history] == [None] * 4


def test_an_owner_is_kept_where_the_table_says_so() -> None:
    cancelling = made(epoch=None, path=(S.CANCELLING,), actor="a person")
    assert apply_to(cancelling, running()).owner == "runner/1"
    assert apply_to(made(), running()).owner is None


def test_only_what_a_change_names_is_set() -> None:
    record = replace(running(), result=b"old", error=ERROR, fingerprint="f", due_at=5.0)
    after = apply_to(made(), record)
    assert (after.result, after.error, after.fingerprint, after.due_at) == (b"old", ERROR, "f", 5.0)
    after = apply_to(made(result=None, error=None, fingerprint=None, due_at=9.0), record)
    assert (after.result, after.error, after.fingerprint, after.due_at) == (None, None, None, 9.0)


def test_a_write_is_recognised_by_its_operation() -> None:
    history = apply_to(made(operation="mine"), running()).history
    assert was_applied("mine", history)
    assert was_applied("claim", history)
    assert not was_applied("min", history)


@given(st.data())
def test_a_record_stays_consistent_whatever_is_done_to_it(data: st.DataObject) -> None:
    record = invocation("a")
    for number in range(data.draw(st.integers(0, 8), "edges")):
        following = sorted(TABLE[record.status].next)
        if not following:
            break
        target = data.draw(st.sampled_from(following))
        change = made(
            path=(target,),
            sources=frozenset({record.status}),
            epoch=record.epoch,
            operation=f"op {number}",
            actor=data.draw(st.sampled_from(["runner/1", "runner/2"])),
            at=START + number,
            why=f"why {number}",
        )
        before, record = record, apply_to(change, record)
        assert record.history[: len(before.history)] == before.history
    versions = [line.version for line in record.history]
    assert versions == list(range(1, len(versions) + 1))
    last = record.history[-1]
    assert (record.version, record.status, record.owner, record.epoch) == (
        last.version,
        last.status,
        last.owner,
        last.epoch,
    )
    walked = [line.status for line in record.history]
    assert record.epoch == walked.count(S.PENDING)
    assert record.attempt == walked.count(S.RUNNING)
    assert (record.owner is not None) == (record.status in OWNED)
    assert record.reason == last.why
    claims = [line.operation for line in record.history if line.status is S.PENDING]
    assert record.claim_token == (claims[-1] if claims else None)


def test_a_claim_knows_its_path() -> None:
    claim = Claim(app="shop", lanes=(), limit=1, owner="o", operation="op", at=0.0)
    assert claim.path == (S.PENDING, S.RUNNING)
    assert replace(claim, start=False).path == (S.PENDING,)
