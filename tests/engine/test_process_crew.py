"""A crew of processes that do not listen: from their first moment to the one in which they are killed."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.cli.processes import is_gone
from tests.engine.fleet import DUTIES

from holdfast.engine.core import Engine
from holdfast.engine.messages import Orders
from holdfast.engine.permit import Permit
from holdfast.engine.process_crew import ProcessCrew
from holdfast.engine.worker_process import SIGNALS, WorkerProcess
from holdfast.ids import Ids
from holdfast.lifecycle.records import RunnerRecord
from holdfast.store.memory import MemoryStore

DRAIN = 30.0
PATIENCE_SECONDS = 20.0

# What a worker says that is ready and runs something, and does not hear any more.
DEAF = """
import os, sys, time
fd = int(sys.argv[sys.argv.index("--fd") + 1])
os.write(fd, b'{"type":"ready"}\\n')
"""
# The same, when its work is over and its hooks hang.
OVER = (
    DEAF
    + """
account = b'{"started":1,"ended":1}'
os.write(fd, b'{"type":"news","running":0,"retiring":true,"account":' + account + b'}\\n')
os.write(fd, b'{"type":"done","unfinished":false,"account":' + account + b'}\\n')
"""
)
FOR_EVER = "\ntime.sleep(600)\n"


class StillClock:
    """Time stands still until a test moves it."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


def crew_of(code: str, clock: StillClock) -> ProcessCrew:
    rng = random.Random(7)
    ids = Ids(clock, rng)
    store = MemoryStore(clock)
    engine = Engine(app="app", store=store, clock=clock, ids=ids, rng=rng, poll_interval_seconds=1.0)
    record = RunnerRecord(
        id="r",
        app="app",
        host="here",
        pid=1,
        version="test",
        started_at=0.0,
        heartbeat_at=0.0,
        concurrency=1,
        queues=None,
        tags=(),
        tasks=(),
    )
    return ProcessCrew(
        command=[sys.executable, "-c", code + FOR_EVER],
        count=1,
        record=record,
        recovery=engine.recovery("app", DUTIES),
        clock=clock,
        now=store.now,
        drain_timeout_seconds=DRAIN,
    )


async def soon(waited_for: Coroutine[Any, Any, Any]) -> Any:
    return await asyncio.wait_for(waited_for, PATIENCE_SECONDS)


async def gone(crew: ProcessCrew, pid: int) -> None:
    changed = asyncio.Event()
    crew.on_change(changed.set)
    while pid in {worker.pid for worker in crew.workers()}:
        await changed.wait()
        changed.clear()
    assert is_gone(pid)


async def watched(crew: ProcessCrew) -> None:
    """Long enough for it to see what time it is, several times."""
    assert not (await asyncio.wait({asyncio.create_task(crew.wait())}, timeout=0.5))[0]


@pytest.mark.parametrize(("hurry", "seconds"), [(False, DRAIN + 15.0), (True, 5.0)])
def test_a_worker_that_does_not_hear_a_stop_is_killed_when_its_time_is_over(hurry: bool, seconds: float) -> None:
    async def main() -> None:
        clock = StillClock()
        crew = crew_of(DEAF, clock)
        await soon(crew.start("r", Permit(clock)))
        (worker,) = crew.workers()
        crew.stop(hurry=hurry)
        clock.time += seconds - 0.1
        await watched(crew)
        assert not is_gone(worker.pid)
        clock.time += 0.2
        account = await soon(crew.wait())
        assert (account.deaths, is_gone(worker.pid)) == (0, True)

    asyncio.run(main())


def test_a_worker_whose_work_is_over_and_that_does_not_end_is_killed_and_no_longer_counts() -> None:
    async def main() -> None:
        clock = StillClock()
        crew = crew_of(OVER, clock)
        await soon(crew.start("r", Permit(clock)))
        first = crew.workers()[0]
        watching = asyncio.create_task(crew.wait())
        clock.time += 14.9
        await asyncio.wait({watching}, timeout=0.5)
        assert not is_gone(first.pid)
        clock.time += 15.2
        await soon(gone(crew, first.pid))
        crew.stop(hurry=True)
        clock.time += 6.0
        assert (await soon(crew.wait())).deaths == 0
        watching.cancel()

    asyncio.run(main())


def test_a_new_process_is_deaf_to_signals_until_it_has_learned_to_hear(tmp_path: Path) -> None:
    mask = tmp_path / "mask"
    code = f"import signal; open({str(mask)!r}, 'w').write(repr(sorted(signal.pthread_sigmask(0, []))))"
    orders = Orders(owner="r/1", concurrency=1, queues=None, tags=(), drain_timeout_seconds=1.0, max_tasks=None)

    async def main() -> None:
        workers = [WorkerProcess.start([sys.executable, "-c", code], orders, 0.0) for _ in range(2)]
        for worker in await soon(asyncio.gather(*workers)):  # type: ignore[arg-type]
            await soon(worker.ended())
            await soon(worker.close())

    asyncio.run(main())
    assert mask.read_text() == repr(sorted(SIGNALS))
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(SIGNALS), "who starts it goes on hearing them"
