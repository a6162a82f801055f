"""The part of the conformance suite about ownership: the table's rules hold for every write."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.model import changes
from holdfast.model.changes import APPLIED, Change, Lost, apply_to
from holdfast.model.records import runner_of
from holdfast.model.status import OWNED, SOURCES, Status
from holdfast.store.contract import Store
from holdfast.testing.samples import (
    BY_NAME,
    START,
    Stage,
    fields_for,
    in_status,
    invocation,
    owned,
    raw_change,
    the,
    wish,
)

_BY_OWNERS = [name for name, (status, _) in BY_NAME.items() if status in OWNED and not name.startswith("recovered")]
_STRANGERS = ["stranger/1", "runner/2", "runner/10", "runner/", "runne", "runner2", "RUNNER/1", "stranger"]
_OWNER = "run'ner.*/$1"


def _as(actor: str, change: Change) -> Change:
    return replace(change, actor=actor, version=None, operation=f"as {actor}")


class OwnershipConformance:
    def test_a_stranger_with_the_epoch_cannot_write_as_the_owner(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store)
            end = changes.completed(record, result=b"r", operation="end", at=START)
            forged = [_as(actor, end) for actor in _STRANGERS]
            assert list(await store.apply(forged)) == [Lost(Status.RUNNING, "runner/1", 1)] * len(forged)
            quick = [replace(end, actor=actor, operation=f"quick {actor}") for actor in _STRANGERS]
            assert list(await store.apply(quick)) == [Lost(Status.RUNNING, "runner/1", 1)] * len(quick)
            assert await the(store) == record
            assert list(await store.apply([end])) == [APPLIED]

        stage.play(scenario)

    @pytest.mark.parametrize("name", _BY_OWNERS)
    def test_only_a_change_that_overrides_the_owner_is_open_to_strangers(self, stage: Stage, name: str) -> None:
        async def scenario(store: Store) -> None:
            status, build = BY_NAME[name]
            record = await in_status(store, status, **fields_for(name))
            change = build(record)
            (verdict,) = await store.apply([_as("stranger/1", change)])
            lost = Lost(status, record.owner, record.epoch)
            assert verdict == (lost if change.needs_owner else APPLIED)
            assert change.needs_owner == (change.path[0] is not Status.CANCELLING)

        stage.play(scenario)

    def test_a_supervisor_acts_for_its_own_workers_and_for_no_others(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store, owner=_OWNER)
            other = await owned(store, "b", owner="run'ner/1")
            ended = changes.killed(record, by=runner_of(_OWNER), operation="end", at=START, why="stopped")
            foreign = changes.killed(other, by=runner_of(_OWNER), operation="foreign", at=START, why="stopped")
            lost = Lost(Status.RUNNING, "run'ner/1", 1)
            assert list(await store.apply([ended, foreign])) == [APPLIED, lost]
            after = await the(store)
            assert after == apply_to(ended, record)
            assert [line.by for line in after.history[-2:]] == [runner_of(_OWNER)] * 2

        stage.play(scenario)

    @pytest.mark.parametrize("version", [True, False])
    def test_a_change_by_its_supervisor_leaves_the_owner_as_it_is(self, stage: Stage, version: bool) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store)
            known = record.version if version else None
            pause = raw_change(record, Status.PAUSED, operation="pause", epoch=1, actor="runner", version=known)
            assert list(await store.apply([pause])) == [APPLIED]
            after = await the(store)
            assert after == apply_to(pause, record)
            assert (after.owner, after.history[-1].owner, after.history[-1].by) == ("runner/1", "runner/1", "runner")

        stage.play(scenario)

    @pytest.mark.parametrize("version", [True, False])
    def test_a_recovery_names_the_runner_that_performed_it_and_the_reason(self, stage: Stage, version: bool) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store)
            change = changes.recovered(record, by="helper", operation="op", at=START, why="its owner is dead")
            assert list(await store.apply([change if version else replace(change, version=None)])) == [APPLIED]
            after = await the(store)
            assert after == apply_to(change, record)
            lines = [(line.status, line.owner, line.by, line.why) for line in after.history[-2:]]
            assert lines == [
                (Status.RUNNING_RECOVERY, None, "helper", "its owner is dead"),
                (Status.REROUTED, None, "helper", "its owner is dead"),
            ]

        stage.play(scenario)

    def test_a_change_by_the_owner_names_no_other_runner(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store)
            await store.apply([changes.completed(record, result=b"r", operation="end", at=START)])
            assert [line.by for line in (await the(store)).history] == [None] * 4

        stage.play(scenario)

    def test_a_former_owner_is_a_stranger(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            first = await owned(store, owner="runner/2")
            await store.apply([changes.killed(first, operation="kill", at=START, why="")])
            (heir,) = (await store.claim(wish("next"))).records
            late = changes.completed(replace(first, epoch=heir.epoch), result=b"r", operation="late", at=START)
            assert list(await store.apply([late])) == [Lost(Status.RUNNING, "runner/1", 2)]

        stage.play(scenario)

    def test_an_unowned_invocation_takes_the_change_of_any_actor(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([record := invocation("a")])
            wait = raw_change(record, Status.CONCURRENCY_CONTROLLED, operation="wait", actor="anybody")
            assert Status.REGISTERED in SOURCES[Status.CONCURRENCY_CONTROLLED]
            assert list(await store.apply([wait])) == [APPLIED]
            assert (await the(store)).history[-1].by == "anybody"

        stage.play(scenario)
