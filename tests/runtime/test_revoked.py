"""What a worker has claimed and not begun, while its runner takes it back: it is handed back before calls begin again.

The runner may have given it to others. Over real processes: tests/cli/test_unresponsive.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from msgspec.structs import replace
from tests.runtime.test_meanwhile import SlowClaims, SlowPayloads, SlowStarts, worker_of
from tests.runtime.test_worker_awaits import EarlyMemory
from tests.support.fleet import APP, Fleet, Line, virtually

from holdfast.codec import SizeLimits
from holdfast.executors.begun import BegunTable
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL, OWNED, Status
from holdfast.runtime.worker import Worker

PLACES = 2
LINES: dict[str, type[Line]] = {
    "a claim": SlowClaims,
    "a claim ahead": SlowClaims,
    "starts": SlowStarts,
    "arguments": SlowPayloads,
}


def is_under_way(what: str, worker: Worker) -> bool:
    match what:
        case "a claim":
            return worker._claiming > 0
        case "a claim ahead":
            return worker._prefetching is not None
        case "starts":
            return worker._starting == PLACES and not worker._running
        case _:
            return worker._running.fetching > 0


@pytest.mark.parametrize("what", LINES)
def test_what_is_under_way_when_it_is_revoked_is_handed_back_and_begins_once(what: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        calls: Counter[int] = Counter()

        async def work(number: int, load: str = "") -> None:
            calls[number] += 1
            await asyncio.sleep(0.012)

        member = await fleet.started(work, concurrency=PLACES, make_line=LINES[what])
        worker, client = worker_of(member), fleet.engine(fleet.store)
        table = BegunTable(worker.begun._memory, -1)  # type: ignore[arg-type]
        worker._permit.begun = worker.begun  # as a worker process has it
        count = 1 if what in ("a claim", "arguments") else 60
        load, small = "x" * 500 if what == "arguments" else "", SizeLimits(inline=64, max_bytes=2**20)
        if isinstance(member.line, SlowClaims) and what == "a claim":
            member.line.seconds = 0.3
        for number in range(count):
            packed = fleet.codec.pack_call((number, load), {}, (), small, {})
            await client.submitter.submit([replace(fleet.new("work"), arguments=packed.data)], packed.payloads)
        if isinstance(member.line, SlowClaims | SlowStarts):
            member.line.seconds = 0.3

        async def under_way() -> bool:
            return is_under_way(what, worker) and bool(idle(fleet, table))

        await fleet.until(under_way, 5.0)
        table.revoke()
        held = idle(fleet, table)
        worker._wakeup.notify()

        async def has_ended() -> bool:
            return all(record.status in FINAL for record in fleet.store._of(APP))

        await fleet.until(has_ended, 30.0)
        assert not table.is_revoked, "the worker has accepted it, and works on"
        assert set(calls.values()) == {1}
        for record in held:
            story = await fleet.story(record.id)
            assert Status.REROUTED in story, f"it began by a claim of before: {story}"

    virtually(scenario, EarlyMemory)


def idle(fleet: Fleet, table: BegunTable) -> list[InvocationRecord]:
    """Return what has an owner and has not begun."""
    marks = table.marks() or {}
    owned = [record for record in fleet.store._of(APP) if record.status in OWNED]
    return [record for record in owned if f"{record.id}~{record.epoch}" not in marks]
