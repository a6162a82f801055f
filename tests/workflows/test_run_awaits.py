"""Something happens at every await around a run that suspends, wakes and waits: it is never stuck, and hears once.

The real executor of runs works on a memory store in virtual time. A message, the end of a child, a cancel or a wake
comes at each await of the executor, of the duty that wakes runs, and of those who write ends and cancels.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from tests.runtime.test_worker_awaits import SlowAnswers
from tests.support import checker
from tests.support.awaits import Stage, every_await
from tests.support.checker import Bounds, Fault, FaultKind, Faults, Ledgers
from tests.support.fleet import APP, Fleet
from tests.support.wire import Wire

from holdfast import App
from holdfast.fleet.recovery import Recovery
from holdfast.model.changes import Push
from holdfast.model.records import InboxEntry, InvocationRecord
from holdfast.model.status import FINAL, OWNED, Status
from holdfast.workflows import events as e
from holdfast.workflows.children import WAKE, push_all
from holdfast.workflows.events import Event

WATCHED = ["workflows.", "runtime.cancel.", "runtime.settle.", "triggers.outbox."]
LINGER_SECONDS = 0.02
NIGHT_SECONDS = 1.5
_RECOVERIES = {Status.RUNNING_RECOVERY, Status.PENDING_RECOVERY, Status.KILLED}


class Watch:
    """A fleet of one runner with a workflow that sleeps, waits for a child, and undoes what it did if cancelled."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.fleet = Fleet(stage.clock)
        self.fleet.settings = {"workflow_linger_seconds": LINGER_SECONDS}
        Wire(self.fleet)
        self.steps: Counter[str] = Counter()
        self.gate = asyncio.Event()
        self.app = self._declared()
        definitions = [task.definition for task in self.app.tasks.values()]
        self.member = self.fleet.member(*definitions, make_line=SlowAnswers)
        self.client = self.fleet.engine(self.fleet.store)
        self.id = ""
        self.cancelled: InvocationRecord | None = None
        self.is_recovered = False

    def _declared(self) -> App:
        app = App("memory://", name=APP)

        @app.step(name="note")
        async def note(what: str) -> str:
            self.steps[what] += 1
            return what

        @app.task(name="guest")
        async def guest() -> str:
            await self.gate.wait()
            return "a guest"

        @app.workflow(name="watch")
        async def watch() -> list[str]:
            heard = [await note("dusk")]
            try:
                await asyncio.sleep(NIGHT_SECONDS)
                heard.append(await note("midnight"))
                heard.append(await guest.submit())
                heard.append(await note("dawn"))
            except asyncio.CancelledError:
                await note("undone")
                raise
            return heard

        return app

    async def begin(self, happen: Callable[[], Awaitable[None]]) -> None:
        await self.member.start()
        record, payloads = self.app.tasks["watch"].prepared(self.client, (), {})
        self.id = record.id
        self.stage.begin(happen)
        await self.client.submitter.submit([record], payloads)

    # --- what happens meanwhile

    async def child_ends(self) -> None:
        self.gate.set()
        await asyncio.sleep(0.01)

    async def message(self) -> None:
        """A message for a call that the body has not made: it is dropped."""
        await self._push(InboxEntry(id="child:stranger", kind="child_completed", at=self.stage.clock.now(), call="x#1"))

    async def wake(self) -> None:
        """End its sleep, if it sleeps."""
        await self._push(InboxEntry(id="wake:1", kind=WAKE, at=self.stage.clock.now()))

    async def _push(self, entry: InboxEntry) -> None:
        ids = self.client.ids
        push = Push(app=APP, id=self.id, entry=entry, operation=ids.operation(), at=entry.at, why="a test")
        await push_all(self.client, [push])

    async def cancel(self) -> None:
        (self.cancelled,) = await self.client.canceller.cancel([self.id], by="a test")

    async def stop(self) -> None:
        """Its runner ends and hands it over to another one."""
        another = self.fleet.member(*[task.definition for task in self.app.tasks.values()], make_line=SlowAnswers)
        await another.start()
        self.member.runner.stop()

    async def cut(self) -> None:
        """The store is away for a second."""
        self.member.line.cut = True
        await asyncio.sleep(1.0)
        self.member.line.cut = False

    async def lose_replies(self) -> None:
        self.member.line.lost.update(["append", "apply", "insert", "read_log"])

    async def stall(self) -> None:
        """This one await takes very long, and everything else goes on."""
        await asyncio.sleep(6.0)

    async def declare_dead(self) -> None:
        """Others take its runner for dead and take its work; the runner finds out and begins anew."""
        self.is_recovered = True
        for record in await self.fleet.store.roster(APP):
            assert await self.fleet.store.remove_runner(record.app, record.id, heartbeat_at=record.heartbeat_at)
        await Recovery(self.client).running()

    # --- what must hold afterwards

    async def ends(self) -> InvocationRecord:
        record = await self.fleet.end(self.id, 60.0)

        async def all_ended() -> bool:
            return all(each.status in FINAL and not each.outbox for each in self.fleet.store._of(APP))

        await self.fleet.until(all_ended, 60.0)
        return record

    async def check(self, record: InvocationRecord) -> None:
        story = [str(entry.status) for entry in record.history]
        assert self.is_recovered or not _RECOVERIES.intersection(story), story
        assert max(self.steps.values(), default=0) <= 1 + self.is_recovered, (self.steps, story)
        found = await checker.dump(self.fleet.store, APP, clock=self.stage.clock)
        bodies = {"watch": self.app.tasks["watch"].definition.function}
        ids = tuple(each.id for each in found.records)
        faults = [Fault(kind=FaultKind.FREEZE, at=0.0, until=1e9, ids=ids)] * 2 if self.is_recovered else []
        bounds = Bounds(final_seconds=None)
        wrong = checker.check(found, Ledgers(), Faults(tuple(faults)), bounds, bodies)
        assert not wrong, "\n".join(map(str, wrong))
        log = [line.event for line in found.logs[self.id]]
        was_asked = any(event.type == e.CANCEL_REQUESTED for event in log)
        was_done = any(event.type == e.STEP_COMPLETED and event.call == "note#3" for event in log)
        if self.cancelled is None or (was_done and not was_asked):
            assert record.status is Status.SUCCESS, story
            result = self.fleet.codec.decode(record.result or b"")
            assert result == ["dusk", "midnight", "a guest", "dawn"]
        else:
            assert record.status is Status.CANCELLED, story
            assert self.steps["undone"] == _was_in_the_night(log), (self.steps, story)
        assert not [each for each in self.fleet.store._of(APP) if each.status in OWNED]


def _was_in_the_night(log: list[Event]) -> bool:
    """Whether the body had the first note when it was cancelled. If that note still ran, the cancel is raised at its
    call, before there is anything to undo.
    """
    before = itertools.takewhile(lambda event: event.type != e.CANCEL_REQUESTED, log)
    return any(event.type == e.STEP_COMPLETED and event.call == "note#1" for event in before)


GOES_ON: dict[str, Callable[[Watch], Callable[[], Awaitable[None]]]] = {
    "a message": lambda watch: watch.message,
    "a wake": lambda watch: watch.wake,
    "the end of a child": lambda watch: watch.child_ends,
    "a cancel": lambda watch: watch.cancel,
    "a stop": lambda watch: watch.stop,
    "a stall": lambda watch: watch.stall,
    "an outage": lambda watch: watch.cut,
    "lost replies": lambda watch: watch.lose_replies,
    "a death that is none": lambda watch: watch.declare_dead,
}
PAIRS = (
    ("a wake", "a cancel"),
    ("the end of a child", "a cancel"),
    ("a cancel", "the end of a child"),
    ("a message", "the end of a child"),
    ("a wake", "a stop"),
    ("a stop", "a cancel"),
)


def check_every_await(*happenings: str, most: int) -> int:
    """Let these things happen, one after the other, at every await. Return how many awaits that were."""

    async def scene(stage: Stage) -> None:
        watch = Watch(stage)

        async def happen() -> None:
            for each in happenings:
                await GOES_ON[each](watch)()

        try:
            await watch.begin(happen)

            async def child_is_there() -> bool:
                return any(each.reply_to is not None for each in watch.fleet.store._of(APP)) or (
                    (await watch.fleet.record(watch.id)).status in FINAL
                )

            await watch.fleet.until(child_is_there, 60.0)
            await asyncio.sleep(0.3)
            await watch.child_ends()
            record = await watch.ends()
            await stage.intruded()
            stage.end()
            await watch.check(record)
        finally:
            await watch.fleet.stop()

    return sum(1 for _ in every_await(scene, WATCHED, most=most))


@pytest.mark.parametrize("happening", GOES_ON)
def test_a_run_is_never_stuck_and_hears_once(happening: str) -> None:
    assert check_every_await(happening, most=1) > 10


@pytest.mark.faults
@pytest.mark.parametrize("happening", GOES_ON)
def test_a_run_is_never_stuck_and_hears_once_at_any_time(happening: str) -> None:
    assert check_every_await(happening, most=4) > 25


@pytest.mark.parametrize("happenings", PAIRS, ids=" and ".join)
def test_two_things_happen_at_once(happenings: tuple[str, str]) -> None:
    assert check_every_await(*happenings, most=1) > 10
