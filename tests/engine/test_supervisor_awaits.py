"""Something happens at every await of a runner with worker processes, and of its workers.

The processes are tasks of this one: `create_subprocess_exec` is replaced by one that runs a real `Attached` worker at
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
from tests.engine.fleet import APP, DUTIES, Member
from tests.engine.test_worker_awaits import PLACES, SMALL, SlowAnswers, Workshop, audit_for
from tests.support.awaits import LONGEST_SECONDS, Stage, every_await, within

from holdfast.engine import worker_process
from holdfast.engine.attached import Attached
from holdfast.engine.definition import Place
from holdfast.engine.messages import Orders
from holdfast.engine.permit import Permit
from holdfast.engine.process_crew import ProcessCrew
from holdfast.engine.recovery import Recovery
from holdfast.engine.worker import Worker
from holdfast.execution.places import Deliver, InlinePlaces
from holdfast.lifecycle.records import RunnerRecord, Serves
from holdfast.testing.virtual import VirtualClock, run_virtual

WATCHED = [f"engine.{name}." for name in ("process_crew", "worker_process", "attached", "answering")]
MOST = 2
START_SECONDS = 0.2  # of an interpreter and its imports
PROMPT_SECONDS = 3.0  # tasks take milliseconds; a worker that does not hear a stop is killed after 45 s


class Process:
    """A worker process, without a process."""

    pids = iter(range(10**6, 10**9))

    def __init__(self, shop: Supervised, stream: socket.socket) -> None:
        self.pid = next(self.pids)
        self.returncode: int | None = None
        self._shop = shop
        self._ended = asyncio.Event()
        self.line = SlowAnswers(shop.fleet.store)
        self.engine = shop.fleet.engine(self.line)  # type: ignore[arg-type]
        self.engine.limits = SMALL
        self.orders: Orders | None = None
        self.worker: Worker | None = None
        self._stream = stream
        self._places: list[InlinePlaces] = []
        self.life = asyncio.create_task(self._live())

    async def _live(self) -> None:
        reader, writer = await asyncio.open_connection(sock=self._stream)
        try:
            await asyncio.sleep(START_SECONDS)
            attached = Attached(reader, writer, self._shop.stage.clock)
            if self._shop.told_early:
                attached.stop()
            await attached.run(self._make_worker)
        finally:
            writer.close()
            self._end(0)

    def close(self) -> None:
        """After the test: whatever it left open."""
        self._stream.close()

    def _make_worker(self, orders: Orders, permit: Permit) -> Worker:
        shop, tasks = self._shop, self._shop.tasks
        self.orders = orders
        self.worker = self.engine.worker(
            tasks,
            shop.fleet.codec,
            owner=orders.owner,
            serves=Serves(tasks=frozenset(task.name for task in tasks)),
            concurrency=orders.concurrency,
            permit=permit,
            recovery=self.engine.recovery(APP, DUTIES),
            drain_timeout_seconds=orders.drain_timeout_seconds,
            make_places=self._make_places,
            max_tasks=orders.max_tasks,
            leaves_unfinished=True,
            look_seconds=2.0,
        )
        return self.worker

    def _make_places(self, place: Place, deliver: Deliver) -> InlinePlaces:
        self._places.append(InlinePlaces(deliver))
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

    def __init__(self, stage: Stage, monkeypatch: pytest.MonkeyPatch, max_tasks: int | None = None) -> None:
        self.started: list[Process] = []
        self.failing_starts = 0
        self.told_early = False
        self.on_start: Callable[[], None] = lambda: None
        self._max_tasks = max_tasks
        self.places = 2 * PLACES * (1 if max_tasks is None else 2)  # those that retire have successors beside them
        super().__init__(stage)
        monkeypatch.setattr(worker_process.asyncio, "create_subprocess_exec", self._exec)
        monkeypatch.setattr(worker_process.os, "killpg", self._killpg)
        monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: set())

    async def _exec(self, *command: str, pass_fds: list[int], **more: Any) -> Process:
        if self.failing_starts:
            self.failing_starts -= 1
            raise OSError("no more processes")
        stream = socket.socket(fileno=os.dup(pass_fds[0]))
        await asyncio.sleep(0.01)
        self.on_start()
        process = Process(self, stream)
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

        def crew(record: RunnerRecord, recovery: Recovery) -> ProcessCrew:
            return ProcessCrew(
                command=["worker"],
                count=2,
                record=record,
                recovery=recovery,
                clock=self.stage.clock,
                now=self.fleet.store.now,
                drain_timeout_seconds=30.0,
                max_tasks=self._max_tasks,
            )

        member = self.fleet.member(*self.tasks, concurrency=PLACES, make_line=SlowAnswers, make_crew=crew)
        member.engine.limits = SMALL
        return member

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
        paused = {pause.name for pause in await self.fleet.store.pauses(APP)}
        for process in self.started:
            if process.returncode is None and process.worker is not None:
                assert process.worker._lanes.paused == paused

    async def two_workers_live(self) -> None:
        async def live() -> bool:
            ready = [each for each in self.started if each.returncode is None and each.worker is not None]
            return len(ready) == 2

        await self.fleet.until(live, 60.0)

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


def virtually(play: Callable[[Supervised], Coroutine[Any, Any, None]], max_tasks: int | None = None) -> None:
    async def main(clock: VirtualClock) -> None:
        with pytest.MonkeyPatch.context() as patched:
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
