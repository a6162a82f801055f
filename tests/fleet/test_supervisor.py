"""A supervisor of processes that do not listen: from their first moment to the one in which they are killed."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import random
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.cli.processes import is_gone
from tests.support.engines import make_engine
from tests.support.patience import patient

from holdfast.executors.begun import BegunCalls
from holdfast.executors.child_process import CLOSED, SIGNALS, frame
from holdfast.fleet.recovery import Recovery
from holdfast.fleet.supervisor import Supervisor
from holdfast.fleet.worker_process import Done, Orders, Pauses, Ready, WorkerNews, WorkerProcess
from holdfast.model import changes
from holdfast.model.records import Cancellation, HistoryEntry, InvocationRecord, RunnerRecord, Serves, Terms
from holdfast.model.status import Status
from holdfast.runtime.claim import Permit
from holdfast.runtime.worker import Account, WorkerOptions
from holdfast.store.memory.store import MemoryStore

DRAIN = 30.0
PATIENCE_SECONDS = patient(20.0)

# What a worker says that is ready and runs something, and does not hear any more.
DEAF = f"""
import os, sys, time
fd = int(sys.argv[sys.argv.index("--fd") + 1])
os.write(fd, {frame(Ready())!r})
"""
# The same, when its work is over and its hooks hang.
WORKED = Account(started=1, ended=1)
RETIRES = frame(WorkerNews(running=0, retiring=True, account=WORKED)) + frame(Done(unfinished=False, account=WORKED))
OVER = f"{DEAF}os.write(fd, {RETIRES!r})\n"
FOR_EVER = "\ntime.sleep(600)\n"


class StillClock:
    """Time stands still until a test moves it."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


def supervisor_of(code: str, clock: StillClock) -> Supervisor:
    engine = make_engine(MemoryStore(clock), clock, random.Random(7))
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
    return Supervisor(
        command=[sys.executable, "-c", code + FOR_EVER],
        count=1,
        record=record,
        recovery=Recovery(engine),
        engine=engine,
        drain_timeout_seconds=DRAIN,
    )


async def soon(waited_for: Coroutine[Any, Any, Any]) -> Any:
    return await asyncio.wait_for(waited_for, PATIENCE_SECONDS)


async def gone(supervisor: Supervisor, pid: int) -> None:
    changed = asyncio.Event()
    supervisor.on_change(changed.set)
    while pid in {worker.pid for worker in supervisor.records()}:
        await changed.wait()
        changed.clear()
    assert is_gone(pid)


async def watched(supervisor: Supervisor) -> None:
    """Long enough for it to see what time it is, several times."""
    assert not (await asyncio.wait({asyncio.create_task(supervisor.wait())}, timeout=0.5))[0]


@pytest.mark.parametrize(("hurry", "seconds"), [(False, DRAIN + 15.0), (True, 5.0)])
def test_a_worker_that_does_not_hear_a_stop_is_killed_when_its_time_is_over(hurry: bool, seconds: float) -> None:
    async def main() -> None:
        clock = StillClock()
        supervisor = supervisor_of(DEAF, clock)
        await soon(supervisor.start("r", Permit(clock)))
        (worker,) = supervisor.records()
        supervisor.stop(hurry=hurry)
        clock.time += seconds - 0.1
        await watched(supervisor)
        assert not is_gone(worker.pid)
        clock.time += 0.2
        account = await soon(supervisor.wait())
        assert (account.deaths, is_gone(worker.pid)) == (0, True)

    asyncio.run(main())


@pytest.mark.parametrize("hurry", ["at once", "later"])
def test_a_hurry_shortens_the_time_of_a_worker_that_does_not_hear(hurry: str) -> None:
    """Nor does a stop without one lengthen it again."""

    async def main() -> None:
        clock = StillClock()
        supervisor = supervisor_of(DEAF, clock)
        await soon(supervisor.start("r", Permit(clock)))
        (worker,) = supervisor.records()
        supervisor.stop(hurry=hurry == "at once")
        ending = asyncio.create_task(supervisor.wait())
        assert not (await asyncio.wait({ending}, timeout=0.3))[0]
        supervisor.stop(hurry=hurry == "later")
        clock.time += 5.1
        account = await soon(_result(ending))
        assert (account.deaths, is_gone(worker.pid)) == (0, True)

    asyncio.run(main())


async def _result(task: asyncio.Task[Account]) -> Account:
    return await task


def test_a_worker_whose_work_is_over_and_that_does_not_end_is_killed_and_no_longer_counts() -> None:
    async def main() -> None:
        clock = StillClock()
        supervisor = supervisor_of(OVER, clock)
        await soon(supervisor.start("r", Permit(clock)))
        first = supervisor.records()[0]
        watching = asyncio.create_task(supervisor.wait())
        clock.time += 14.9
        await asyncio.wait({watching}, timeout=0.5)
        assert not is_gone(first.pid)
        clock.time += 15.2
        await soon(gone(supervisor, first.pid))
        supervisor.stop(hurry=True)
        clock.time += 6.0
        assert (await soon(supervisor.wait())).deaths == 0
        watching.cancel()

    asyncio.run(main())


def test_a_new_process_is_deaf_to_signals_until_it_has_learned_to_hear(tmp_path: Path) -> None:
    mask = tmp_path / "mask"
    code = f"import signal; open({str(mask)!r}, 'w').write(repr(sorted(signal.pthread_sigmask(0, []))))"
    options = WorkerOptions(owner="r/1", serves=Serves(tasks=frozenset()), concurrency=1)
    orders = Orders(options=options)

    async def main() -> None:
        workers = [WorkerProcess.start([sys.executable, "-c", code], orders, 0.0) for _ in range(2)]
        for worker in await soon(asyncio.gather(*workers)):  # type: ignore[arg-type]
            await soon(worker.ended())
            await soon(worker.close())

    asyncio.run(main())
    assert mask.read_text() == repr(sorted(SIGNALS))
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(SIGNALS), "who starts it goes on hearing them"


# --- workers that do not answer


def owned_by_the_worker(status: Status, **terms: Any) -> InvocationRecord:
    began = {Status.PENDING: (Status.PENDING,)}.get(status, (Status.PENDING, Status.RUNNING))
    history = [
        HistoryEntry(version=n, status=each, at=1000.0, operation=f"{n}", owner="r/1", epoch=1)
        for n, each in enumerate((Status.REGISTERED, *began), 1)
    ]
    return InvocationRecord(
        id=f"{status.value}{len(terms)}{'-'.join(terms)}",
        app="app",
        task="t",
        arguments=b"",
        created_at=1000.0,
        due_at=1000.0,
        changed_at=1000.0,
        status=status,
        owner="r/1",
        epoch=1,
        attempt=len(began) - 1,
        history=tuple(history),
        terms=Terms(**terms),
    )


async def deaf_worker(clock: StillClock, *held: InvocationRecord) -> tuple[Supervisor, WorkerProcess, MemoryStore]:
    supervisor = supervisor_of(DEAF, clock)
    store = supervisor._recovery._store
    assert isinstance(store, MemoryStore)
    await store.insert(list(held))
    await soon(supervisor.start("r", Permit(clock)))
    return supervisor, supervisor._alive["r/1"], store


async def looked(supervisor: Supervisor, worker: WorkerProcess, clock: StillClock, seconds: float) -> None:
    """Look each second for so long."""
    for _ in range(round(seconds)):
        clock.time += 1.0
        await supervisor._watchdog.look(worker, 1.0)


async def until(holds: Callable[[], Any]) -> None:
    for _ in range(round(PATIENCE_SECONDS / 0.01)):
        held = holds()
        if await held if inspect.isawaitable(held) else held:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to that")


async def ended(supervisor: Supervisor, clock: StillClock) -> None:
    supervisor.stop(hurry=True)
    clock.time += 6.0
    await soon(supervisor.wait())


def test_a_worker_that_does_not_answer_is_told_of_once_and_relieved_of_what_it_has_not_started(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        clock = StillClock()
        reserved, running = owned_by_the_worker(Status.PENDING), owned_by_the_worker(Status.RUNNING)
        supervisor, worker, store = await deaf_worker(clock, reserved, running)
        await looked(supervisor, worker, clock, 10)  # the first asks, nine go by without an answer
        assert supervisor.records()[0].unresponsive_since is None
        assert supervisor.records()[0].running == 1, "the store knows what it could not tell any more"
        await looked(supervisor, worker, clock, 5)
        assert supervisor.records()[0].unresponsive_since == 1001.0
        assert [line for line in caplog.messages if "unresponsive" in line or "has not answered" in line] == [
            f"found worker r/1 unresponsive: no answer from pid {worker.pid} for 10 s",
            *[line for line in caplog.messages if "had not started it" in line],
        ]
        given_back, left = await store.get("app", [reserved.id, running.id])
        assert given_back is not None
        assert left is not None
        assert (given_back.status, given_back.owner) == (Status.REROUTED, None)
        assert "has not answered for 10 s, and had not started it" in given_back.reason
        assert left.status is Status.RUNNING
        assert not is_gone(worker.pid), "it holds nothing that is past its time"
        changes: list[float | None] = []
        supervisor.on_change(lambda: changes.append(supervisor.records()[0].unresponsive_since))
        worker._has_answered = True
        await looked(supervisor, worker, clock, 2)
        assert changes == [None], "the roster is written at once, and once"
        supervisor.on_change(lambda: None)
        await ended(supervisor, clock)

    asyncio.run(main())


def test_a_worker_is_killed_for_a_call_past_its_time_only_if_it_does_not_answer() -> None:
    async def main() -> None:
        clock = StillClock()
        late = owned_by_the_worker(Status.RUNNING, timeout=3.0)
        beside, reserved = owned_by_the_worker(Status.RUNNING), owned_by_the_worker(Status.PENDING)
        apart = owned_by_the_worker(Status.RUNNING, key_seconds=1.0, cancel_grace=1.0)
        supervisor, worker, store = await deaf_worker(clock, late, beside, reserved, apart)
        worker.isolated = (apart.id,)
        clock.time += 100.0  # it is long past its time, but who says that the worker does not see to that?
        for _ in range(5):
            worker._has_answered = True
            await supervisor._watchdog.look(worker, 1.0)
        assert not worker.overdue
        await looked(supervisor, worker, clock, 3)
        assert worker.overdue == {late.id: 1}
        await soon(gone(supervisor, worker.pid))

        async def has_failed() -> bool:
            (record,) = await store.get("app", [late.id])
            return record is not None and record.status is Status.FAILED

        await until(has_failed)
        timed_out, other = await store.get("app", [late.id, beside.id])
        assert timed_out is not None
        assert other is not None
        assert timed_out.error is not None
        assert timed_out.error.type_name == "holdfast.errors:TimedOut"
        assert [entry.status for entry in other.history][-2:] == [Status.KILLED, Status.REROUTED]
        died = f"its worker r/1 died: it has not answered for 3 s while t {late.id} was past its time, and was killed"
        assert other.reason == f"{died}; it ran beside that, and is not charged"
        given_back, alone = await store.get("app", [reserved.id, apart.id])
        assert given_back is not None
        assert alone is not None
        assert (given_back.status, given_back.reason) == (Status.REROUTED, died), "it had not begun"
        why = f"{died}; it ran in an isolated process, and is not charged"
        assert (alone.status, alone.reason) == (Status.REROUTED, why)
        zombie = changes.completed(late, result=b"\xc0", operation="late", at=clock.time)
        (verdict,) = await store.apply([zombie])
        assert isinstance(verdict, changes.Lost), "a result that comes after that is refused"
        await ended(supervisor, clock)

    asyncio.run(main())


def test_what_a_silent_worker_has_not_begun_is_given_back_and_never_past_its_time() -> None:
    """It is RUNNING in the store: the worker has claimed ahead."""

    async def main() -> None:
        clock = StillClock()
        idle, cancelled = owned_by_the_worker(Status.RUNNING, timeout=3.0), to_be_cancelled()
        begun, over = (
            owned_by_the_worker(Status.RUNNING),
            owned_by_the_worker(Status.RUNNING, timeout=3.0, key_seconds=1.0),
        )
        supervisor, worker, store = await deaf_worker(clock, idle, cancelled, begun, over)
        table = BegunCalls(worker.begun._memory)
        assert table.begin(f"{begun.id}~1", table.ticket)
        assert table.begin(f"{over.id}~1", table.ticket)
        table.over(f"{over.id}~1")
        await looked(supervisor, worker, clock, 11)
        assert not worker.overdue
        assert (worker.record.running, worker.record.begun) == (1, tuple(sorted([begun.id, over.id])))
        assert table.is_revoked, "from now on nothing begins"
        assert [record.status for record in await found(store, idle, cancelled)] == [Status.RUNNING, Status.CANCELLING]
        await looked(supervisor, worker, clock, 1)
        given_back, ended_, left, done = await found(store, idle, cancelled, begun, over)
        assert (given_back.status, given_back.attempt, given_back.owner) == (Status.REROUTED, 0, None)
        assert given_back.reason == "its worker r/1 has not answered for 11 s; it had not begun, and is not charged"
        assert ended_.status is Status.CANCELLED
        assert (left.status, done.status) == (Status.RUNNING, Status.RUNNING)
        assert not is_gone(worker.pid)
        await ended(supervisor, clock)

    asyncio.run(main())


def test_what_a_worker_had_not_begun_when_it_died_is_not_charged() -> None:
    async def main() -> None:
        clock = StillClock()
        begun, idle = owned_by_the_worker(Status.RUNNING), owned_by_the_worker(Status.RUNNING, timeout=3.0)
        supervisor, worker, store = await deaf_worker(clock, begun, idle)
        table = BegunCalls(worker.begun._memory)
        assert table.begin(f"{begun.id}~1", table.ticket)
        os.kill(worker.pid, signal.SIGKILL)

        async def is_back() -> bool:
            return {record.status for record in await found(store, begun, idle)} == {Status.REROUTED}

        await until(is_back)
        charged, given_back = await found(store, begun, idle)
        assert [entry.status for entry in charged.history][-2:] == [Status.RUNNING_RECOVERY, Status.REROUTED]
        assert [entry.status for entry in given_back.history][-2:] == [Status.KILLED, Status.REROUTED]
        assert given_back.attempt == 0
        assert given_back.reason.endswith("; it had not begun, and is not charged")
        await ended(supervisor, clock)

    asyncio.run(main())


def to_be_cancelled() -> InvocationRecord:
    asked = Cancellation(by="a user", at=1000.0, until=1001.0)
    record = owned_by_the_worker(Status.RUNNING, key_seconds=2.0, start_by=1.0)
    return replace(record, status=Status.CANCELLING, cancellation=asked)


async def found(store: MemoryStore, *records: InvocationRecord) -> list[InvocationRecord]:
    return [record for record in await store.get("app", [each.id for each in records]) if record is not None]


def test_a_worker_that_answers_while_its_runner_reads_what_it_holds_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store takes its time, and the worker goes on before that is over: it ends by itself what is past its time."""

    async def main() -> None:
        clock = StillClock()
        wakes = tmp_path / "wakes"
        code = f"while not os.path.exists({str(wakes)!r}): time.sleep(0.01)\nos.write(fd, {frame(Ready())!r})\n"
        supervisor = supervisor_of(DEAF + code, clock)
        recovery = supervisor._recovery
        await recovery._store.insert([owned_by_the_worker(Status.RUNNING, timeout=3.0)])
        await soon(supervisor.start("r", Permit(clock)))
        worker = supervisor._alive["r/1"]
        read = recovery.held_by

        async def read_slowly(owner: str) -> list[InvocationRecord]:
            held = await read(owner)
            wakes.touch()
            await until(lambda: worker._has_answered)
            return held

        monkeypatch.setattr(recovery, "held_by", read_slowly)
        clock.time += 100.0
        await looked(supervisor, worker, clock, 4)
        assert wakes.exists(), "it was silent for long enough"
        assert not worker.overdue
        assert not is_gone(worker.pid)
        await looked(supervisor, worker, clock, 1)
        assert worker.silence == 0.0, "it is asked anew"
        await ended(supervisor, clock)

    asyncio.run(main())


def test_a_worker_that_dies_while_its_runner_reads_what_it_holds_has_died_and_was_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        clock = StillClock()
        dies = tmp_path / "dies"
        code = f"{DEAF}while not os.path.exists({str(dies)!r}): time.sleep(0.01)\nos._exit(3)\n"
        supervisor = supervisor_of(code, clock)
        recovery = supervisor._recovery
        running = owned_by_the_worker(Status.RUNNING, timeout=3.0)
        await recovery._store.insert([running])
        await soon(supervisor.start("r", Permit(clock)))
        worker = supervisor._alive["r/1"]
        read = recovery.held_by

        async def read_slowly(owner: str) -> list[InvocationRecord]:
            held = await read(owner)
            dies.touch()
            await soon(worker.closed.wait())
            return held

        monkeypatch.setattr(recovery, "held_by", read_slowly)
        clock.time += 100.0
        await looked(supervisor, worker, clock, 4)
        assert not worker.overdue

        async def is_back() -> bool:
            (record,) = await recovery._store.get("app", [running.id])
            return record is not None and record.status is Status.REROUTED

        await until(is_back)
        (record,) = await recovery._store.get("app", [running.id])
        assert record is not None
        assert record.reason == "its worker r/1 died: exit code 3"
        await ended(supervisor, clock)

    asyncio.run(main())


def test_a_late_look_counts_as_one() -> None:
    """This process was stopped, or the machine slept."""

    async def main() -> None:
        clock = StillClock()
        supervisor, worker, _ = await deaf_worker(clock, owned_by_the_worker(Status.RUNNING, timeout=1.0))
        supervisor._watchdog._every = 0.1
        watching = asyncio.create_task(supervisor._watchdog.run())
        clock.time += 3600.0
        await until(lambda: worker._was_asked)
        clock.time += 3600.0
        await until(lambda: worker.silence)
        watching.cancel()
        assert worker.silence <= 0.2
        assert not worker.overdue
        await ended(supervisor, clock)

    asyncio.run(main())


def test_a_worker_whose_stream_has_ended_is_killed_and_has_died() -> None:
    async def main() -> None:
        clock = StillClock()
        supervisor = supervisor_of(DEAF + "os.read(fd, 65536), os.read(fd, 65536), os.close(fd)\n", clock)
        await soon(supervisor.start("r", Permit(clock)))
        worker = supervisor._alive["r/1"]
        worker.post(Pauses(()))  # after its orders, that is the second thing that it is told
        watching = asyncio.create_task(supervisor.wait())
        await soon(gone(supervisor, worker.pid))
        assert worker.exit == f"it lost its connection to its runner ({CLOSED}), and was killed"
        assert not worker.ended_as_asked
        await ended(supervisor, clock)
        assert (await soon(watching)).deaths >= 1  # type: ignore[arg-type]

    asyncio.run(main())


def test_what_a_dead_worker_held_is_taken_back_whatever_goes_wrong_at_first() -> None:
    async def main() -> None:
        clock = StillClock()
        supervisor = supervisor_of(DEAF + "os._exit(1)\n", clock)
        tries, taken, take_back = list[str](), asyncio.Event(), supervisor._recovery.of_owner

        async def of_owner(owner: str, *args: Any, **named: Any) -> int:
            if owner != "r/1":
                return await take_back(owner, *args, **named)
            tries.append(owner)
            if len(tries) < 3:
                raise NotADirectoryError(20, "Not a directory")
            taken.set()
            return await take_back(owner, *args, **named)

        supervisor._recovery.of_owner = of_owner  # type: ignore[method-assign]
        await soon(supervisor.start("r", Permit(clock)))
        await soon(taken.wait())
        await ended(supervisor, clock)

    asyncio.run(main())


# It starts a program of its own, tells its number, and ends when it is told anything else than its orders.
PARENT = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open({path!r} + ".all", "a") as file: file.write(f"{{child.pid}}\\n")
with open({path!r} + "~", "w") as file: file.write(str(child.pid))
os.rename({path!r} + "~", {path!r})
"""


def done(*, unfinished: bool) -> str:
    return f"os.write(fd, {frame(Done(unfinished=unfinished, account=WORKED))!r})\nos._exit(0)\n"


@pytest.mark.parametrize(
    ("end", "is_left"),
    [
        ("os._exit(3)\n", False),
        (done(unfinished=True), False),
        (done(unfinished=False), True),
    ],
    ids=["it dies", "it ends and is not done", "it is done"],
)
def test_programs_of_a_worker_end_with_it_unless_its_work_was_done(end: str, is_left: bool, tmp_path: Path) -> None:
    async def main() -> None:
        clock, path = StillClock(), tmp_path / "child"
        supervisor = supervisor_of(DEAF + PARENT.format(path=str(path)) + end, clock)
        await soon(supervisor.start("r", Permit(clock)))
        await until(path.exists)
        child = int(path.read_text())
        supervisor.stop(hurry=True)
        await soon(supervisor.wait())
        try:
            if is_left:
                assert not is_gone(child)
            else:
                await until(lambda: is_gone(child))
        finally:
            for left in (tmp_path / "child.all").read_text().split():  # also those of the next workers
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(left), signal.SIGKILL)

    asyncio.run(main())
