"""Executions of services are entries: what holds of their gate and their trail on every store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.fleet.services import GATE, Executions, line_of
from holdfast.fleet.slots import Execution, ExecutionStatus
from holdfast.model.records import Entry
from holdfast.store import open_store
from holdfast.store.contract import Store
from holdfast.testing.samples import START, Stage

KEEP = 600.0


def execution(id: str, at: float = START) -> Execution:
    return Execution(id=id, service="core", runner_id=f"runner {id}", started_at=at, window_ends_at=at + 10)


def of(store: Store, app: str = "shop") -> Executions:
    return Executions(store, app, "core", KEEP)


class Gate:
    @pytest.fixture
    def stage(self, store_url: str) -> Stage:
        return Stage(lambda clock, observe: open_store(store_url, clock=clock, observe=observe))

    def test_of_many_who_come_at_once_one_passes_and_all_are_told(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            wanted = [execution(f"{n}") for n in range(8)]
            told = await asyncio.gather(*[of(store).begin(each) for each in wanted])
            (passed,) = [each for each, blocker in zip(wanted, told, strict=True) if blocker is None]
            assert {blocker for blocker in told if blocker is not None} == {passed}
            assert await of(store).begin(passed) is None, "an earlier try of the same"
            assert await of(store).trail(10) == [passed]
            assert await of(store, "another").trail(10) == []

        stage.play(scenario)

    def test_an_end_opens_the_gate_and_leaves_a_line(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            first, second = execution("a"), execution("b", START + 20)
            assert not await of(store).end(first, ExecutionStatus.COMPLETED, START + 9, ""), "it never began"
            mine = of(store)
            await mine.begin(first)
            assert await of(store).end(first, ExecutionStatus.ABANDONED, START + 9, "overrun")
            assert await of(store).end(first, ExecutionStatus.ABANDONED, START + 9, "overrun"), "again"
            assert not await mine.end(first, ExecutionStatus.COMPLETED, START + 10, ""), "somebody was faster"
            assert await mine.begin(second) is None
            assert not await of(store).end(first, ExecutionStatus.ABANDONED, START + 9, "overrun"), "long ago"
            over = replace(first, status=ExecutionStatus.ABANDONED, ended_at=START + 9, reason="overrun")
            assert await of(store).trail(10) == [second, over]
            assert await of(store).trail(1) == [second]

        stage.play(scenario)

    def test_lines_are_kept_for_their_time_and_the_gate_for_ever(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for n in range(3):
                each = execution(f"{n}", START + n)
                assert await of(store).begin(each) is None
                assert await of(store).end(each, ExecutionStatus.COMPLETED, START + n, "")
            assert [each.id for each in await of(store).trail(10)] == ["2", "1", "0"]
            await of(store).forget([execution("1"), execution("2")], 10)
            assert [each.id for each in await of(store).trail(10)] == ["2", "0"]
            assert await store.remove_expired("shop", START + KEEP, 10) <= 1  # a store with TTL may have done it
            assert [each.id for each in await of(store).trail(10)] == ["2"]

        stage.play(scenario)

    def test_a_line_is_written_once(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            lines = [replace(execution("a", START + n), status=ExecutionStatus.BLOCKED) for n in range(2)]
            told = [await store.put_entry(line_of("shop", line, KEEP, START)) for line in lines]
            assert told == [True, False]
            assert await of(store).trail(10) == lines[:1]

        stage.play(scenario)

    def test_a_gate_that_cannot_be_read_blocks_nobody(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.put_entry(Entry(app="shop", kind=GATE, name="core", body=b'{"status": "running"}'))
            assert await of(store).begin(execution("a")) is None
            assert await of(store).trail(10) == [execution("a")]
            assert [each.id for each in await store.quarantined("shop")] == ["core"]

        stage.play(scenario)


class TestMemory(Gate):
    @pytest.fixture
    def store_url(self) -> str:
        return "memory://"


class TestSqlite(Gate):
    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/store.db"


@pytest.mark.xdist_group("stores")
class TestMongo(Gate):
    @pytest.fixture
    def store_url(self, mongo_url: str) -> str:
        return mongo_url
