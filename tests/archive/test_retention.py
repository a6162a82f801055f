"""The services remove what need not be kept longer, in virtual time."""

from __future__ import annotations

import asyncio

from tests.support.fleet import APP, Fleet, add, virtually

from holdfast.archive.retention import AT_ONCE, remove_expired
from holdfast.model.records import SHORTEST_SECONDS, Terms
from holdfast.store.contract import Ability
from holdfast.store.memory.store import MemoryStore
from holdfast.telemetry.logs import logging_telemetry

HOUR = Terms(retention={"success": SHORTEST_SECONDS})


class Removing(MemoryStore):
    """A store that claims to remove by itself."""

    abilities = Ability.TTL


def test_a_runner_removes_what_is_over_within_a_minute() -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.started(add)
        short, long = await fleet.submit("add", 1, 2, terms=HOUR), await fleet.submit("add", 1, 2)
        ended = await fleet.end(short)
        await fleet.end(long)
        assert ended.retain_until == ended.changed_at + SHORTEST_SECONDS
        await asyncio.sleep(ended.retain_until - fleet.clock.now() - 1)
        await fleet.record(short)

        async def gone() -> bool:
            return (await fleet.store.get(APP, [short]))[0] is None

        assert await fleet.until(gone) <= 65
        await fleet.record(long)

    virtually(scenario)


def test_a_store_that_removes_by_itself_is_asked_too() -> None:
    """It does not remove what has logs: these have to go before, and a database cannot know."""

    async def scenario(fleet: Fleet) -> None:
        await fleet.started(add)
        id = await fleet.submit("add", 1, 2, terms=HOUR)
        await fleet.end(id)
        await asyncio.sleep(SHORTEST_SECONDS + 120)
        assert (await fleet.store.get(APP, [id]))[0] is None

    virtually(scenario, Removing)


def test_many_are_removed_at_one_look_and_the_rest_at_the_next() -> None:
    async def scenario(fleet: Fleet) -> None:
        calls = 0

        class Full(MemoryStore):
            async def remove_expired(self, app: str, at: float, limit: int) -> int:
                nonlocal calls
                calls += 1
                return limit

        assert await remove_expired(Full(fleet.clock), APP, logging_telemetry())
        assert 1 < calls <= 10_000 / AT_ONCE

    virtually(scenario)
