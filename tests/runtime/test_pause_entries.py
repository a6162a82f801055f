"""Pauses of queues are entries: what holds of them on every store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.errors import CorruptRecord
from holdfast.model.decoding import PAUSE
from holdfast.model.queues import MAX_OPERATIONS, QueuePause, state_of
from holdfast.model.records import Entry
from holdfast.runtime.pauses import pause_queue, pauses_of, resume_queue
from holdfast.store import open_store
from holdfast.store.contract import Ability, Store
from holdfast.testing.samples import ODD_NAMES, START, Stage, ids_of, invocation, wish


def paused(
    name: str = "mail", operation: str = "p1", app: str = "shop", reason: str = "the relay is down"
) -> QueuePause:
    return QueuePause(app=app, name=name, at=START + 1, by="ann@host", reason=reason, operation=operation)


class Pauses:
    @pytest.fixture
    def stage(self, store_url: str) -> Stage:
        return Stage(lambda clock, observe: open_store(store_url, clock=clock, observe=observe))

    def test_a_queue_is_paused_once_and_by_the_first(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            assert await pauses_of(store, "shop") == []
            first = paused()
            assert await pause_queue(store, first) == first
            assert await pause_queue(store, first) == first  # an earlier try of the same
            assert await pause_queue(store, paused(operation="p2", reason="another")) == first
            assert await pauses_of(store, "shop") == [first]
            assert await resume_queue(store, "shop", "mail", "r1")
            assert await pauses_of(store, "shop") == []

        stage.play(scenario)

    def test_a_repeated_operation_undoes_nothing_that_came_after_it(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            assert not await resume_queue(store, "shop", "mail", "r0")  # it was not paused
            await pause_queue(store, paused())
            assert await resume_queue(store, "shop", "mail", "r1")
            assert await resume_queue(store, "shop", "mail", "r1")
            assert await pause_queue(store, paused()) is None
            assert await pauses_of(store, "shop") == []
            second = paused(operation="p2")
            assert await pause_queue(store, second) == second
            assert await resume_queue(store, "shop", "mail", "r1")  # it was done, before
            assert await pauses_of(store, "shop") == [second]
            assert await resume_queue(store, "shop", "mail", "r2")
            assert not await resume_queue(store, "shop", "mail", "r3")

        stage.play(scenario)

    def test_a_queue_that_is_paused_often_does_not_grow(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for n in range(MAX_OPERATIONS + 4):
                assert await pause_queue(store, last := paused(operation=f"p{n}")) == last
                assert await resume_queue(store, "shop", "mail", f"r{n}")
                assert await pause_queue(store, last) is None

        stage.play(scenario)

    def test_pauses_are_of_one_app_and_in_the_order_of_their_names(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for app in ("shop", *ODD_NAMES):
                for name in reversed(ODD_NAMES):
                    await pause_queue(store, paused(name, app=app))
            for app in ("shop", *ODD_NAMES):
                assert await pauses_of(store, app) == [paused(name, app=app) for name in sorted(ODD_NAMES)]
            assert await resume_queue(store, "shop", "%", "r1")
            assert len(await pauses_of(store, "shop")) == len(ODD_NAMES) - 1
            assert len(await pauses_of(store, "%")) == len(ODD_NAMES)

        stage.play(scenario)

    def test_of_many_who_pause_at_once_one_does_and_all_are_told(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            wanted = [paused(operation=f"p{n}", reason=f"reason {n}") for n in range(8)]
            told = await asyncio.gather(*[pause_queue(store, each) for each in wanted])
            assert len(set(told)) == 1
            assert told[0] in wanted
            assert await pauses_of(store, "shop") == [told[0]]

        stage.play(scenario)

    def test_a_pause_outlives_the_process(self, stage: Stage) -> None:
        async def pause(store: Store) -> None:
            await pause_queue(store, paused())

        async def look(store: Store) -> None:
            assert await pauses_of(store, "shop") == [paused()]

        stage.play(pause, look, needs=Ability.DURABLE)

    def test_a_paused_queue_is_a_matter_of_runners_and_a_store_still_takes_and_gives(self, stage: Stage) -> None:
        """Who claims decides which lanes to ask for: see `holdfast.model.eligibility`."""

        async def scenario(store: Store) -> None:
            await pause_queue(store, paused("default"))
            assert list(await store.insert([invocation("a")])) == [True]
            assert ids_of((await store.claim(wish())).records) == ["a"]

        stage.play(scenario)

    def test_a_pause_that_cannot_be_read_is_set_aside_and_the_queue_is_not_paused(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            bad = [Entry(app="shop", kind=PAUSE, name=name, body=b'{"paused_at": "?"}') for name in ("mail", "slow")]
            for entry in bad:
                await store.put_entry(entry)
                with pytest.raises(CorruptRecord):
                    state_of(entry)
            assert await pause_queue(store, paused()) == paused()
            assert await pauses_of(store, "shop") == [paused()]
            assert {each.id for each in await store.quarantined("shop")} == {"mail", "slow"}

        stage.play(scenario)


class TestMemory(Pauses):
    @pytest.fixture
    def store_url(self) -> str:
        return "memory://"


class TestSqlite(Pauses):
    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/store.db"


@pytest.mark.xdist_group("stores")
class TestMongo(Pauses):
    @pytest.fixture
    def store_url(self, mongo_url: str) -> str:
        return mongo_url
