"""A resume at every await of a run that makes hooks, waits, suspends, disposes and ends: delivered once, or refused.

As in `test_run_awaits`, the real executor of runs works on a memory store in virtual time. The intrusion comes at each
await of the executor, of the hooks' own writes, and of those who write ends and cancels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.runtime.test_worker_awaits import SlowAnswers
from tests.support import checker
from tests.support.awaits import Stage, every_await
from tests.support.checker import Bounds, Fault, FaultKind, Faults, Ledgers
from tests.support.fleet import APP, Fleet
from tests.support.wire import Wire
from tests.support.witness import Event, What, digest_of

from holdfast import App, hook
from holdfast.errors import HookNotFound
from holdfast.fleet.recovery import Recovery
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL, Status
from holdfast.workflows import events as e
from holdfast.workflows.hooks_records import HOOK, WEBHOOK, name_of
from holdfast.workflows.hooks_resuming import Sent, resumed

WATCHED = ["workflows.", "runtime.settle.", "triggers.outbox."]
LINGER_SECONDS = 0.02
TOKEN = "numbers"


class Watch:
    """A runner with a workflow that gets numbers by a hook, disposes of it, and makes another one with its token."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.fleet = Fleet(stage.clock)
        self.fleet.settings = {"workflow_linger_seconds": LINGER_SECONDS, "public_url": "https://shop.example"}
        Wire(self.fleet)
        self.app = self._declared()
        self.definitions = [task.definition for task in self.app.runtime.tasks.values()]
        self.member = self.fleet.member(*self.definitions, make_line=SlowAnswers)
        self.client = self.fleet.engine(self.fleet.store)
        self.events: list[Event] = []
        self.sent = 0
        self.id = ""
        self.is_cancelled = self.is_recovered = False

    def _declared(self) -> App:
        app = App("memory://", name=APP)

        @app.step(name="note")
        async def note(url: str) -> None: ...

        @app.workflow(name="watch")
        async def watch() -> list[int]:
            numbers = hook(TOKEN, int)
            await note(numbers.url)
            heard = [await numbers]
            await asyncio.sleep(0.3)
            heard.append(await numbers)
            numbers.dispose()
            async with hook(TOKEN, int) as numbers:
                heard.append(await numbers)
            return heard

        return app

    async def begin(self, happen: Callable[[], Awaitable[None]]) -> None:
        await self.member.start()
        record, payloads = self.app.tasks["watch"].prepared(self.client, (), {})
        self.id = record.id
        self.stage.begin(happen)
        await self.client.submitter.submit([record], payloads)

    # --- resuming

    async def send(self, name: str, number: int) -> bool:
        facts = {"key": TOKEN, "idempotency_key": name, "digest": digest_of(number), "span": name, "pid": 1}
        clock = self.stage.clock
        self.events.append(Event(what=What.RESUME_INVOKE, at=clock.monotonic(), **facts))
        try:
            await resumed(self.client, name_of(TOKEN), Sent(self.client, number), name)
        except HookNotFound:
            self.events.append(Event(what=What.RESUME_FAIL, at=clock.monotonic(), **facts))
            return False
        self.events.append(Event(what=What.RESUME_OK, at=clock.monotonic(), **facts))
        return True

    async def send_until_it_ends(self) -> InvocationRecord:
        """Send numbers as long as the run goes on: what comes while it disposes of the hook is not read."""
        while (record := await self.fleet.record(self.id)).status not in FINAL:
            self.sent += await self.send(f"own {self.sent}", self.sent)
            await asyncio.sleep(0.25)
        return record

    # --- what happens meanwhile

    async def resume(self) -> None:
        await self.send("intruder", 100)

    async def resume_twice(self) -> None:
        await asyncio.gather(self.send("intruder", 100), self.send("intruder", 100))

    async def cancel(self) -> None:
        self.is_cancelled = True
        await self.client.canceller.cancel([self.id], by="a test")

    async def stop(self) -> None:
        another = self.fleet.member(*self.definitions, make_line=SlowAnswers)
        await another.start()
        self.member.runner.stop()

    async def cut(self) -> None:
        self.member.line.cut = True
        await asyncio.sleep(1.0)
        self.member.line.cut = False

    async def lose_replies(self) -> None:
        self.member.line.lost.update(["append", "apply", "put_entry", "remove_entry", "entries"])

    async def declare_dead(self) -> None:
        self.is_recovered = True
        for record in await self.fleet.store.roster(APP):
            assert await self.fleet.store.remove_runner(record.app, record.id, heartbeat_at=record.heartbeat_at)
        await Recovery(self.client).running()

    # --- what must hold afterwards

    async def check(self, record: InvocationRecord) -> None:
        async def nothing_is_left() -> bool:
            entries = [await self.fleet.store.entries(APP, kind) for kind in (HOOK, WEBHOOK)]
            records = self.fleet.store._of(APP)
            return not any(entries) and all(each.status in FINAL and not each.outbox for each in records)

        await self.fleet.until(nothing_is_left, 60.0)
        found = await checker.dump(self.fleet.store, APP, clock=self.stage.clock)
        faults = [Fault(kind=FaultKind.FREEZE, at=0.0, until=1e9, ids=(self.id,))] * 2 if self.is_recovered else []
        bodies = {"watch": self.app.tasks["watch"].definition.function}
        bounds = Bounds(final_seconds=None)
        wrong = checker.check(found, Ledgers(tuple(self.events)), Faults(tuple(faults)), bounds, bodies)
        assert not wrong, "\n".join(map(str, wrong))
        log = [line.event for line in found.logs[self.id]]
        if record.status is Status.CANCELLED:
            assert self.is_cancelled
            assert any(event.type == e.CANCEL_REQUESTED for event in log) or not log
        else:
            assert record.status is Status.SUCCESS  # the body may have returned before it could be asked
            heard = self.fleet.codec.decode(record.result or b"")
            assert len(heard) == len(set(heard)) == 3


HAPPENINGS: dict[str, Callable[[Watch], Callable[[], Awaitable[None]]]] = {
    "a resume": lambda watch: watch.resume,
    "two resumes with one id": lambda watch: watch.resume_twice,
    "a cancel": lambda watch: watch.cancel,
    "a stop": lambda watch: watch.stop,
    "an outage": lambda watch: watch.cut,
    "lost replies": lambda watch: watch.lose_replies,
    "a death that is none": lambda watch: watch.declare_dead,
}
PAIRS = (
    ("a resume", "a cancel"),
    ("a cancel", "a resume"),
    ("a resume", "a stop"),
    ("a stop", "a resume"),
    ("a resume", "a death that is none"),
    ("lost replies", "a resume"),
)


def check_every_await(*happenings: str, most: int) -> int:
    async def scene(stage: Stage) -> None:
        watch = Watch(stage)

        async def happen() -> None:
            for each in happenings:
                await HAPPENINGS[each](watch)()

        try:
            await watch.begin(happen)
            record = await watch.send_until_it_ends()
            await stage.intruded()
            stage.end()
            await watch.check(record)
        finally:
            await watch.fleet.stop()

    return sum(1 for _ in every_await(scene, WATCHED, most=most))


@pytest.mark.parametrize("happening", HAPPENINGS)
def test_a_payload_is_delivered_once_or_refused_and_nothing_is_stuck(happening: str) -> None:
    assert check_every_await(happening, most=1) > 10


@pytest.mark.faults
@pytest.mark.parametrize("happening", HAPPENINGS)
def test_the_same_at_any_time(happening: str) -> None:
    assert check_every_await(happening, most=5) > 25


@pytest.mark.faults
@pytest.mark.parametrize("happenings", PAIRS, ids=" and ".join)
def test_two_things_happen_at_once(happenings: tuple[str, str]) -> None:
    assert check_every_await(*happenings, most=2) > 15
