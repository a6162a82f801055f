"""Something happens at every await of a runner with worker processes, and of its workers.

The processes are tasks of this one: `create_subprocess_exec` is replaced by one that runs a real `AttachedWorker` at
the other end of a real socket pair, so that time is virtual and a run takes milliseconds. Real processes:
tests/cli/test_supervisor.py, tests/cli/test_worker_lives.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any

import pytest
from msgspec.structs import replace
from tests.runtime.test_worker_awaits import PLACES, SMALL, SlowAnswers, Workshop, audit_for
from tests.support.awaits import LONGEST_SECONDS, Stage, every_await, within
from tests.support.engines import make_worker
from tests.support.fleet import APP, Member
from tests.support.patience import patient

from holdfast.errors import StoreUnavailable
from holdfast.executors.child_process import AsyncChannel
from holdfast.executors.local import Deliver, InlineExecutor
from holdfast.fleet.recovery import Recovery
from holdfast.fleet.supervisor import Supervisor
from holdfast.fleet.worker_process import AttachedWorker, FromRunner, Orders
from holdfast.model.records import RunnerRecord, Serves
from holdfast.model.status import Status
from holdfast.runtime.claim import Permit
from holdfast.runtime.definition import ExecutorKind
from holdfast.runtime.pauses import pauses_of
from holdfast.runtime.worker import Worker, WorkerOptions
from holdfast.telemetry.logs import logging_telemetry
from holdfast.testing.virtual import VirtualClock, run_virtual

WATCHED = [f"fleet.{name}." for name in ("supervisor", "worker_process")]
MOST = 2
START_SECONDS = 0.2  # of an interpreter and its imports
PROMPT_SECONDS = patient(3.0)  # tasks take milliseconds; a worker that does not hear a stop is killed after 45 s


class Process:
    """A worker process, without a process."""

    pids = iter(range(10**6, 10**9))

    def __init__(self, shop: Supervised, stream: socket.socket, begun: int) -> None:
        self.pid = next(self.pids)
        self.returncode: int | None = None
        self._shop = shop
        self._ended = asyncio.Event()
        self.line = SlowAnswers(shop.fleet.store)
        self.engine = shop.fleet.engine(self.line)  # type: ignore[arg-type]
        self.engine.limits = SMALL
        self.worker: Worker | None = None
        self._stream = stream
        self._begun = begun
        self._permit: Permit | None = None
        self._places: list[InlineExecutor] = []
        self.life = asyncio.create_task(self._live())

    async def _live(self) -> None:
        channel: AsyncChannel[FromRunner] = await AsyncChannel.open(self._stream, FromRunner)
        receive = channel.receive

        async def receive_here() -> FromRunner | None:
            message = await receive()
            return replace(message, begun=self._begun) if isinstance(message, Orders) else message

        channel.receive = receive_here  # type: ignore[method-assign]
        try:
            await asyncio.sleep(START_SECONDS)
            attached = AttachedWorker(channel, self._shop.stage.clock, logging_telemetry())
            if self._shop.told_early:
                attached.stop()
            await attached.run(self._make_worker)
        finally:
            channel.close()
            self._end(0)

    def close(self) -> None:
        """After the test: whatever it left open."""
        self._stream.close()

    def _make_worker(self, options: WorkerOptions, permit: Permit) -> Worker:
        tasks = self._shop.tasks
        self._permit = permit
        self.worker = make_worker(
            self.engine,
            tasks,
            owner=options.owner,
            serves=Serves(tasks=frozenset(task.name for task in tasks)),
            concurrency=options.concurrency,
            permit=permit,
            drain_timeout_seconds=options.drain_timeout_seconds,
            make_executor=self._make_executor,
            max_tasks=options.max_tasks,
            leaves_unfinished=True,
            look_seconds=2.0,
        )
        return self.worker

    def _make_executor(self, place: ExecutorKind, deliver: Deliver) -> InlineExecutor:
        assert self._permit is not None
        self._places.append(InlineExecutor(deliver, begun=self._permit.begun))
        return self._places[-1]

    def _end(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
            self._ended.set()

    def die(self) -> None:
        """As `kill -9` does it: nothing that it does reaches anybody, and its end of the stream is closed."""
        if self.returncode is None:
            self._end(-signal.SIGKILL)
            self.line.freeze()
            for places in self._places:
                places.interrupt(list(places._tasks))
            if self._stream.fileno() != -1:
                self._stream.shutdown(socket.SHUT_RDWR)
            self.life.cancel()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


class Supervised(Workshop):
    """A runner with two worker processes."""

    make_line: type[SlowAnswers] = SlowAnswers

    def __init__(self, stage: Stage, monkeypatch: pytest.MonkeyPatch, max_tasks: int | None = None) -> None:
        self.started: list[Process] = []
        self.failing_starts = 0
        self.told_early = False
        self.on_start: Callable[[], None] = lambda: None
        self._max_tasks = max_tasks
        self.places = 2 * PLACES * (1 if max_tasks is None else 2)  # those that retire have successors beside them
        super().__init__(stage)
        monkeypatch.setattr(asyncio, "create_subprocess_exec", self._exec)
        monkeypatch.setattr(os, "killpg", self._killpg)
        monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: set())

    async def _exec(self, *command: str, pass_fds: list[int], **more: Any) -> Process:
        if self.failing_starts:
            self.failing_starts -= 1
            raise OSError("no more processes")
        stream = socket.socket(fileno=os.dup(pass_fds[0]))
        begun = os.dup(pass_fds[1])  # another process would have it by its number
        await asyncio.sleep(0.01)
        self.on_start()
        process = Process(self, stream, begun)
        self.started.append(process)
        return process

    def _killpg(self, pid: int, number: int) -> None:
        assert number == signal.SIGKILL
        found = [process for process in self.started if process.pid == pid and process.returncode is None]
        if not found:
            raise ProcessLookupError
        found[0].die()

    def hire(self) -> Member:
        self.tasks = self._tasks()

        def make_workers(record: RunnerRecord, recovery: Recovery) -> Supervisor:
            return Supervisor(
                command=["worker"],
                count=2,
                record=record,
                recovery=recovery,
                engine=member.engine,
                drain_timeout_seconds=30.0,
                max_tasks=self._max_tasks,
            )

        member = self.fleet.member(*self.tasks, concurrency=PLACES, make_line=self.make_line, make_workers=make_workers)
        member.engine.limits = SMALL
        return member

    def pids_on_the_roster(self) -> set[int]:
        return {worker.pid for runner in self.fleet.store._runners.values() for worker in runner.workers}

    # --- what happens meanwhile

    async def kill_a_worker(self) -> None:
        living = [process for process in self.started if process.returncode is None]
        if living:
            living[0].die()

    async def kill_all_workers(self) -> None:
        for process in self.started:
            process.die()

    # --- what must hold afterwards

    async def workers_know_the_pauses(self) -> None:
        """The last word about pauses has reached every worker that lives."""
        paused = {pause.name for pause in await pauses_of(self.fleet.store, APP)}
        for process in self.started:
            if process.returncode is None and process.worker is not None:
                assert process.worker._lanes.paused == paused

    async def two_workers_live(self) -> None:
        async def live() -> bool:
            ready = [each for each in self.started if each.returncode is None and each.worker is not None]
            return len(ready) == 2

        await self.fleet.until(live, 60.0)

    async def two_workers_wait(self) -> None:
        """And can be told to stop at once."""

        async def wait() -> bool:
            living = [each.worker for each in self.started if each.returncode is None and each.worker is not None]
            return sum(not worker.running and not worker.is_stopping for worker in living) == 2

        await self.fleet.until(wait, 60.0)

    async def leaves_in(self, seconds: float) -> None:
        assert self.member.life is not None
        began = self.stage.clock.now()
        await self.member.life
        assert self.stage.clock.now() - began < seconds

    def no_process_is_left(self) -> None:
        assert [process.pid for process in self.started if process.returncode is None] == []

    async def end(self) -> None:
        await self.fleet.stop()
        await asyncio.gather(*[process.life for process in self.started], return_exceptions=True)
        for process in self.started:
            process.close()


GOES_ON: dict[str, Callable[[Supervised], Callable[[], Coroutine[Any, Any, None]]]] = {
    "a pause": lambda shop: shop.pause_mail,
    "a short pause": lambda shop: shop.blink,
    "a cancel": lambda shop: shop.cancel,
    "a stall": lambda shop: shop.stall,
    "an outage": lambda shop: shop.cut,
    "a death": lambda shop: shop.kill_a_worker,
    "all workers die": lambda shop: shop.kill_all_workers,
}


def some(whats: Iterable[str], always: Collection[str]) -> list[Any]:
    """Return parameters of which only some are for every run."""
    return [what if what in always else pytest.param(what, marks=pytest.mark.faults) for what in whats]


@pytest.mark.parametrize("what", some(GOES_ON, ["a pause", "a death"]))
@pytest.mark.parametrize("max_tasks", [None, pytest.param(4, marks=pytest.mark.faults)], ids=["", "that retire"])
def test_what_happens_at_any_await_of_a_supervisor_loses_nothing(
    what: str, max_tasks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit_for(what, monkeypatch)

    async def scene(stage: Stage) -> None:
        with pytest.MonkeyPatch.context() as patched:
            shop = Supervised(stage, patched, max_tasks)
            try:
                stage.begin(GOES_ON[what](shop))
                await shop.member.start()
                await shop.submit_all()
                await asyncio.sleep(1.5)
                await stage.intruded()
                await asyncio.sleep(0.5)
                await shop.workers_know_the_pauses()
                await shop.resume_mail()
                await shop.all_ended()
                stage.end()
                await shop.check(recoveries="die" in what or "death" in what)
                await shop.two_workers_live()
                await shop.member.stop()
                shop.no_process_is_left()
                await shop.nothing_is_owned()
            finally:
                await shop.end()

    assert sum(1 for _ in every_await(scene, WATCHED, most=MOST)) > 10


@pytest.mark.parametrize("what", some(["a stop", "a stop in a hurry", "a death that is none"], ["a stop"]))
def test_whatever_a_supervisor_awaits_when_it_has_to_end_nothing_is_left_behind(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit_for(what, monkeypatch)

    async def scene(stage: Stage) -> None:
        with pytest.MonkeyPatch.context() as patched:
            shop = Supervised(stage, patched)
            ends = {"a stop": shop.stop, "a stop in a hurry": shop.stop_now, "a death that is none": shop.declare_dead}
            try:
                stage.begin(ends[what])
                await shop.member.start()
                await shop.submit_all()
                await asyncio.sleep(1.5)
                await stage.intruded()
                if what != "a death that is none":
                    began = stage.clock.now()
                    await shop.leaves()
                    assert stage.clock.now() - began < PROMPT_SECONDS, "a worker was not told, and had to be killed"
                    shop.no_process_is_left()
                    await shop.nothing_is_owned()
                    shop.member = await shop.hire().start()
                await shop.all_ended()
                stage.end()
                await shop.check(recoveries=what == "a death that is none", interrupted=what == "a stop in a hurry")
                await shop.member.stop()
                shop.no_process_is_left()
                await shop.nothing_is_owned()
            finally:
                await shop.end()

    assert sum(1 for _ in every_await(scene, WATCHED, most=MOST)) > 10


def virtually(
    play: Callable[[Supervised], Coroutine[Any, Any, None]],
    max_tasks: int | None = None,
    make_line: type[SlowAnswers] = SlowAnswers,
) -> None:
    async def main(clock: VirtualClock) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Supervised, "make_line", make_line)
            shop = Supervised(Stage(clock, (), 0, None), patched, max_tasks)

            async def whole() -> None:
                try:
                    await play(shop)
                finally:
                    await shop.end()

            await within(LONGEST_SECONDS, whole())

    run_virtual(main)


def test_a_stop_is_heard_by_a_worker_that_takes_the_place_of_a_dead_one() -> None:
    async def play(shop: Supervised) -> None:
        await shop.member.start()
        await shop.two_workers_live()
        shop.on_start = shop.member.runner.stop
        await shop.kill_a_worker()
        await shop.leaves_in(PROMPT_SECONDS)
        assert len(shop.started) == 3
        shop.no_process_is_left()

    virtually(play)


def test_a_worker_that_is_being_started_is_killed_with_the_others() -> None:
    """As by a third signal: the runner ends its workers and then itself, without a word to anybody."""

    async def play(shop: Supervised) -> None:
        await shop.member.start()
        await shop.two_workers_live()

        def kill_once() -> None:
            shop.on_start = lambda: None
            shop.member.runner.kill_workers()

        shop.on_start = kill_once
        await shop.kill_a_worker()

        async def killed() -> bool:
            return len(shop.started) > 2 and shop.started[2].returncode == -signal.SIGKILL

        await shop.fleet.until(killed, PROMPT_SECONDS)
        assert {process.worker for process in shop.started[2:]} == {None}  # before it knew what to do

    virtually(play)


def test_starts_that_fail_take_no_room_from_those_that_follow() -> None:
    async def play(shop: Supervised) -> None:
        shop.failing_starts = 10  # more than there is room for
        await shop.member.start()
        await shop.two_workers_live()
        await shop.submit_all()
        await shop.all_ended()
        await shop.member.stop()
        shop.no_process_is_left()

    virtually(play)


def test_a_stop_is_heard_while_successors_wait_for_room() -> None:
    """Each process has retired and is not done, and nothing may start: the stop ends all of them."""

    async def play(shop: Supervised) -> None:
        await shop.member.start()
        await shop.submit(**{name: shop.make("held", name) for name in map(str, range(8))})

        async def full() -> bool:
            return len(shop.started) == 4 and len(shop.running) == 4

        await shop.fleet.until(full, 30.0)
        await asyncio.sleep(5.0)
        shop.member.runner.stop()
        shop.gate.set()
        await shop.leaves_in(PROMPT_SECONDS)
        shop.no_process_is_left()

    virtually(play, max_tasks=1)


def test_a_worker_knows_the_pauses_that_were_there_before_it() -> None:
    async def play(shop: Supervised) -> None:
        await shop.pause_mail()
        await shop.member.start()
        await shop.two_workers_live()
        await shop.workers_know_the_pauses()
        await shop.submit_all()
        await asyncio.sleep(3.0)
        assert shop.mails == 0
        await shop.resume_mail()
        await shop.all_ended()
        await shop.member.stop()

    virtually(play)


def test_a_worker_that_is_told_to_end_before_it_has_its_orders_takes_nothing() -> None:
    """By a signal, say: it comes while the process imports the app."""

    async def play(shop: Supervised) -> None:
        shop.told_early = True
        await shop.submit_all()
        shop.member.life = asyncio.create_task(shop.member.runner.run())
        await asyncio.sleep(2.0)
        assert not shop.calls
        shop.told_early = False
        await shop.all_ended()
        await shop.member.stop()

    virtually(play)


class LateBeats(SlowAnswers):
    """Heartbeats are written at once, and told so later."""

    seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        there = super().__getattr__(name)
        if name != "heartbeat":
            return there

        async def heartbeat(*args: Any, **named: Any) -> Any:
            answer = await there(*args, **named)
            await asyncio.sleep(self.seconds)
            return answer

        return heartbeat


def test_a_worker_is_not_permitted_to_work_by_a_heartbeat_that_does_not_tell_of_it() -> None:
    """Its predecessors died after that was sent, and those that follow get lost: recovery does not know of it."""

    async def play(shop: Supervised) -> None:
        line = shop.member.line
        await shop.member.start()
        await shop.two_workers_live()
        assert isinstance(line, LateBeats)
        line.seconds = 1.0
        written = line.count("heartbeat")

        async def beats() -> bool:
            return line.count("heartbeat") > written

        await shop.fleet.until(beats, 5.0)
        await asyncio.sleep(0.01)
        line.swallowed["heartbeat"] = 1000
        await shop.kill_all_workers()
        await shop.submit_all()
        await shop.two_workers_live()
        await asyncio.sleep(3.0)  # the answer has come
        assert not shop.calls
        line.swallowed["heartbeat"] = 0
        await shop.all_ended()
        assert not shop.begun_wrongly
        await shop.member.stop()

    virtually(play, make_line=LateBeats)


def test_a_worker_that_is_permitted_again_while_it_looks_what_it_has_lost_goes_on() -> None:
    """Its runner was silent, and is not dead: one of its invocations is another's all the same."""

    async def play(shop: Supervised) -> None:
        await shop.member.start()
        await shop.two_workers_live()
        names = [f"held {number}" for number in range(4)]
        await shop.submit(**{name: shop.make("held", name) for name in names})

        async def all_run() -> bool:
            return len(shop.running) == 4

        await shop.fleet.until(all_run, 10.0)
        taken = await shop.fleet.record(shop.ids["held 0"])
        shop.fleet.store._put(replace(taken, owner="other/0", epoch=taken.epoch + 1))
        for process in shop.started:
            process.line.before["get"] = process.line.freeze  # the answer waits
        shop.member.line.errors["heartbeat"] = StoreUnavailable("not heard")

        async def both_look() -> bool:
            return all(process.line.is_frozen for process in shop.started)

        await shop.fleet.until(both_look, 15.0)  # when their permits are over
        del shop.member.line.errors["heartbeat"]

        async def heard() -> bool:
            return all(process.worker is not None and process.worker._permit.holds() for process in shop.started)

        await shop.fleet.until(heard, 5.0)
        for process in shop.started:
            process.line.before.clear()
            process.line.thaw()
        await asyncio.sleep(0.5)
        shop.gate.set()
        await asyncio.sleep(0.5)
        for name in names[1:]:
            assert (await shop.fleet.record(shop.ids[name])).status is Status.SUCCESS
            assert shop.calls[name] == 1
        await shop.member.stop()

    virtually(play)


def test_a_runner_does_not_leave_before_those_that_have_retired() -> None:
    async def play(shop: Supervised) -> None:
        await shop.member.start()
        await shop.submit(**{f"held {number}": shop.make("held", f"held {number}") for number in range(2)})

        async def have_retired() -> bool:
            return len(shop.running) == 2 and len(shop.started) == 4

        await shop.fleet.until(have_retired, 10.0)
        await shop.two_workers_wait()
        shop.member.runner.stop()
        asyncio.get_running_loop().call_later(5.0, shop.gate.set)
        await shop.leaves_in(5.0 + PROMPT_SECONDS)
        await shop.nothing_is_owned()
        assert all(shop.calls[name] == 1 for name in shop.ids)
        shop.no_process_is_left()

    virtually(play, max_tasks=1)


def test_a_heartbeat_tells_at_once_of_workers_that_come_and_go() -> None:
    """Those that come may not work before, and nobody waits for the next beat that would be due."""

    async def play(shop: Supervised) -> None:
        await shop.member.start()
        await shop.two_workers_live()
        for _ in range(3):
            await asyncio.sleep(0.1)
            living = [process for process in shop.started if process.returncode is None]
            assert all(process.worker is not None and process.worker._permit.holds() for process in living)
            assert {process.pid for process in living} == shop.pids_on_the_roster()
            await asyncio.sleep(0.73)  # at another moment between two beats
            await shop.kill_all_workers()
            await asyncio.sleep(0.05)
            assert not shop.pids_on_the_roster()
            await shop.two_workers_live()
        await shop.member.stop()

    virtually(play)


def test_what_the_workers_held_is_left_to_those_who_have_declared_their_runner_dead() -> None:
    async def play(shop: Supervised) -> None:
        await shop.member.start()
        names = ["held 0", "held 1"]
        await shop.submit(**{name: shop.make("held", name) for name in names})

        async def all_run() -> bool:
            return len(shop.running) == 2

        await shop.fleet.until(all_run, 10.0)
        before = {name: await shop.fleet.record(shop.ids[name]) for name in names}
        (entry,) = await shop.fleet.store.roster(APP)
        assert await shop.fleet.store.remove_runner(APP, entry.id, heartbeat_at=entry.heartbeat_at)

        async def are_killed() -> bool:
            return all(process.returncode == -signal.SIGKILL for process in shop.started[:2])

        await shop.fleet.until(are_killed, 5.0)
        await asyncio.sleep(0.05)
        assert {name: await shop.fleet.record(shop.ids[name]) for name in names} == before
        shop.gate.set()
        await shop.all_ended()

    virtually(play)


def test_a_worker_that_cannot_use_the_store_for_a_moment_now_and_then_is_not_replaced() -> None:
    async def play(shop: Supervised) -> None:
        await shop.member.start()
        await shop.two_workers_live()
        store, why = shop.fleet.store, "its tasks keep a deleted log"
        with pytest.MonkeyPatch.context() as patched:
            for _ in range(5):
                patched.setattr(store, "needs_restart", lambda **_: why)
                await asyncio.sleep(2.0)
                patched.setattr(store, "needs_restart", lambda **_: "")
                await asyncio.sleep(2.0)
            assert [process.returncode for process in shop.started] == [None, None]
            patched.setattr(store, "needs_restart", lambda **_: why)

            async def are_replaced() -> bool:
                return len(shop.started) == 4

            await shop.fleet.until(are_replaced, 10.0)

    virtually(play)
