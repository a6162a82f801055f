"""Something happens at every await of a worker: nothing is lost, no slot is kept, nothing is judged too early."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from itertools import permutations
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.awaits import Stage, every_await
from tests.support.fleet import APP, LATENCY, PLAIN, Fleet, Line, Member, definition
from tests.support.wire import Wire

from holdfast.codec import Payload, SizeLimits
from holdfast.fleet.recovery import Recovery
from holdfast.model.limits import Limit
from holdfast.model.queues import QueuePause
from holdfast.model.records import PAUSES, READY, Hint, InvocationRecord, Terms
from holdfast.model.retries import Fixed, dump_policy
from holdfast.model.status import FINAL, OWNED, Status
from holdfast.runtime import worker_duties as audit
from holdfast.runtime.definition import TaskDefinition
from holdfast.runtime.pauses import pause_queue, resume_queue
from holdfast.store.contract import Ability
from holdfast.store.memory.store import MemoryStore

WATCHED = [f"runtime.{name}." for name in ("worker", "worker_duties", "settle", "execute", "cancel", "limits")]
PLACES = 2
MAIL = "mail"
MOST = 4  # times at each await: twice before what it asks for is done, twice after
SMALL = SizeLimits(inline=64, max_bytes=2**20)


class SlowAnswers(Line):
    """An answer takes its time as well: what it says may be over when it arrives."""

    def __getattr__(self, name: str) -> Any:
        there = super().__getattr__(name)
        if name in PLAIN:
            return there

        async def call(*args: Any, **named: Any) -> Any:
            answer = await there(*args, **named)
            await asyncio.sleep(LATENCY)
            return answer

        return call


class EarlyMemory(MemoryStore):
    """A store whose claims count as costly, so that workers claim ahead."""

    abilities = MemoryStore.abilities | Ability.COSTLY_CLAIMS


class Workshop:
    """A fleet of one runner, and what its tasks did."""

    places = PLACES

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.fleet = Fleet(stage.clock, EarlyMemory(stage.clock))
        Wire(self.fleet)
        self.calls: Counter[str] = Counter()
        self.running: set[str] = set()
        self.most_at_once = 0
        self.gate = asyncio.Event()
        self.member = self.hire()
        self.client = self.fleet.engine(self.fleet.store)
        self.ids: dict[str, str] = {}
        self.cancelled: set[str] = set()
        self.begun_wrongly: list[str] = []
        self.mails_when_paused: int | None = None

    def hire(self) -> Member:
        member = self.fleet.member(*self._tasks(), concurrency=PLACES, make_line=SlowAnswers)
        member.engine.limits = SMALL
        return member

    def why_not(self, name: str) -> str:
        """Return why this may not be running, if so."""
        (found,) = [record for record in self.fleet.store._of(APP) if record.id == self.ids[name]]
        if found.status not in (Status.RUNNING, Status.CANCELLING):
            return found.status.value
        return "" if found.owner in self.owners_on_the_roster() else f"{found.owner} is not on the roster"

    def owners_on_the_roster(self) -> set[str]:
        """Return those whom recovery takes for alive."""
        roster = self.fleet.store._runners.values()
        return {f"{runner.id}/{worker.id}" for runner in roster for worker in runner.workers} | {
            f"{runner.id}/0" for runner in roster if not runner.workers
        }

    @property
    def mails(self) -> int:
        return sum(count for name, count in self.calls.items() if name.startswith(MAIL))

    async def _act(self, name: str, *, held: bool = False) -> str:
        self.calls[name] += 1
        if name in self.ids and (why := self.why_not(name)):
            self.begun_wrongly.append(f"{name}: {why}")
        self.running.add(name)
        self.most_at_once = max(self.most_at_once, len(self.running))
        try:
            if held:
                await self.gate.wait()
            else:
                await asyncio.sleep(0.012)  # so long that a batch claimed ahead is left PENDING
        finally:
            self.running.discard(name)
        return name

    def _tasks(self) -> list[TaskDefinition]:
        async def quick(name: str) -> str:
            return await self._act(name)

        async def flaky(name: str) -> str:
            await self._act(name)
            if self.calls[name] == 1:
                raise ValueError("once")
            return name

        async def alone(name: str) -> str:
            return await self._act(name)

        async def weighty(name: str, load: str) -> str:
            await self._act(name)
            return load

        async def held(name: str) -> str:
            return await self._act(name, held=True)

        return [
            definition(quick),
            definition(flaky),
            replace(definition(alone), limit=Limit(1)),
            definition(weighty),
            definition(held),
        ]

    def make(self, task: str, name: str, *more: str, **facts: Any) -> tuple[InvocationRecord, Sequence[Payload]]:
        packed = self.fleet.codec.pack_call((name, *more), {}, (), SMALL, {})
        return replace(self.fleet.new(task, name, *more, **facts), arguments=packed.data), packed.payloads

    async def submit(self, **made: tuple[InvocationRecord, Sequence[Payload]]) -> None:
        records = [record for record, _ in made.values()]
        await self.client.submitter.submit(records, [payload for _, large in made.values() for payload in large])
        self.ids |= {name: record.id for name, (record, _) in made.items()}

    async def submit_all(self) -> None:
        again = Terms(retries=dump_policy(Fixed(3, 0.01)))
        made = {}
        for number in range(8):
            made[f"quick {number}"] = self.make("quick", f"quick {number}")
            made[f"mail {number}"] = self.make("quick", f"mail {number}", queue=MAIL)
        await self.submit(**made)
        made = {f"alone {number}": self.make("alone", f"alone {number}", limit_key="alone") for number in range(3)}
        made["flaky"] = self.make("flaky", "flaky", terms=again)
        made["weighty"] = self.make("weighty", "weighty", "x" * 500)
        await self.submit(**made)

    # --- what happens meanwhile

    async def pause_mail(self) -> None:
        pause = QueuePause(app=APP, name=MAIL, at=self.stage.clock.now(), by="a test", reason="", operation="p")
        await pause_queue(self.fleet.store, pause)
        self.client.hub.send(Hint(PAUSES, (MAIL,)))
        await asyncio.sleep(0.01)  # it is heard of
        self.mails_when_paused = self.mails

    async def resume_mail(self) -> None:
        await resume_queue(self.fleet.store, APP, MAIL, "r")
        self.client.hub.send(Hint(PAUSES, (MAIL,)))

    async def blink(self) -> None:
        """A pause that is over before everybody has heard of it."""
        await self.pause_mail()
        await self.resume_mail()

    async def cancel(self) -> None:
        waiting = [name for name in self.ids if name.endswith(("2", "y"))]
        self.cancelled.update(waiting)
        await self.client.canceller.cancel([self.ids[name] for name in waiting], by="a test")

    async def submit_more(self) -> None:
        await self.submit(late=self.make("quick", "late"))

    async def hint(self) -> None:
        self.client.hub.send(Hint(READY, ()))

    async def cut(self) -> None:
        """The store is away for a second."""
        self.member.line.cut = True
        await asyncio.sleep(1.0)
        self.member.line.cut = False

    async def lose_replies(self) -> None:
        self.member.line.lost.update(["claim", "apply"])

    async def stall(self) -> None:
        """This one await takes very long, and everything else goes on."""
        await asyncio.sleep(6.0)

    async def stop(self) -> None:
        self.member.runner.stop()

    async def stop_now(self) -> None:
        self.member.runner.stop(hurry=True)

    async def declare_dead(self) -> None:
        """Others take it for dead and take its work; it finds out and begins anew."""
        (record,) = await self.fleet.store.roster(APP)
        assert await self.fleet.store.remove_runner(record.app, record.id, heartbeat_at=record.heartbeat_at)
        await Recovery(self.client).running()

    async def leaves(self) -> None:
        """The runner has ended, or has not been told to."""
        assert self.member.life is not None
        if not self.stage.has_intruded:
            self.member.runner.stop()
        await self.member.life

    # --- what must hold afterwards

    async def all_ended(self) -> None:
        async def ended() -> bool:
            found = await self.fleet.store.get(APP, list(self.ids.values()))
            return all(record is not None and record.status in FINAL for record in found)

        try:
            await self.fleet.until(ended, 60.0)
        except AssertionError as error:
            for name, id in self.ids.items():
                record = await self.fleet.record(id)
                if record.status not in FINAL:
                    error.add_note(f"{name}: {' '.join(entry.status for entry in record.history)}")
            raise

    async def check(self, *, recoveries: bool = False, interrupted: bool = False) -> None:
        for name, id in self.ids.items():
            record = await self.fleet.record(id)
            story = [str(entry.status) for entry in record.history]
            if name in self.cancelled:
                assert record.status in (Status.CANCELLED, Status.SUCCESS), (name, story)
            else:
                assert record.status is Status.SUCCESS, (name, story)
                assert recoveries or not _RECOVERIES.intersection(story), (name, story)
                again = recoveries or interrupted
                assert again or self.calls[name] == 1 + (name == "flaky"), (name, story)
        assert self.most_at_once <= self.places
        assert recoveries or not self.begun_wrongly

    async def every_place_is_free(self) -> None:
        """As many as there are places run at once, the limited one among them."""
        self.running.clear()
        await self.submit(**{name: self.make("held", name) for name in ("held 0", "held 1")})

        async def all_run() -> bool:
            return len(self.running) == PLACES

        await self.fleet.until(all_run, 30.0)
        self.gate.set()
        await self.all_ended()

    async def nothing_is_owned(self) -> None:
        owned = [record for record in self.fleet.store._of(APP) if record.status in OWNED]
        assert not owned, owned


_RECOVERIES = {Status.RUNNING_RECOVERY, Status.PENDING_RECOVERY}

Play = Callable[[Workshop], Callable[[], Coroutine[Any, Any, None]]]

GOES_ON: dict[str, Play] = {
    "a pause": lambda shop: shop.pause_mail,
    "a short pause": lambda shop: shop.blink,
    "a cancel": lambda shop: shop.cancel,
    "a submit": lambda shop: shop.submit_more,
    "a hint": lambda shop: shop.hint,
    "a stall": lambda shop: shop.stall,
    "an outage": lambda shop: shop.cut,
    "lost replies": lambda shop: shop.lose_replies,
}


# Where audits come every few milliseconds, one judges in the midst of everything. Where none comes, none repairs what
# a worker forgets.
OFTEN = frozenset({"a stall", "an outage", "lost replies", "a stop in a hurry", "a death that is none"})


def audit_for(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AUDIT_SECONDS", "AGAIN_SECONDS"):
        monkeypatch.setattr(audit, name, 0.005 if what in OFTEN else 1e6)


def check_every_await(*happenings: str, most: int = MOST) -> None:
    """Let these things happen, one after the other, at every await."""

    async def scene(stage: Stage) -> None:
        shop = Workshop(stage)

        async def happen() -> None:
            for each in happenings:
                await GOES_ON[each](shop)()

        try:
            await shop.member.start()
            stage.begin(happen)
            await shop.submit_all()
            await asyncio.sleep(1.5)
            await stage.intruded()
            if shop.mails_when_paused is not None and happenings == ("a pause",):
                await asyncio.sleep(2.0)
                assert shop.mails - shop.mails_when_paused <= PLACES, "more than a claim under way brought was begun"
            await shop.resume_mail()
            await shop.all_ended()
            stage.end()
            await shop.check()
            await shop.every_place_is_free()
            await shop.member.stop()
            await shop.nothing_is_owned()
        finally:
            await shop.fleet.stop()

    assert sum(1 for _ in every_await(scene, WATCHED, most=most)) > 10


@pytest.mark.parametrize("what", GOES_ON)
def test_what_happens_at_any_await_of_a_worker_loses_nothing(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    audit_for(what, monkeypatch)
    check_every_await(what)


@pytest.mark.faults
@pytest.mark.parametrize(("one", "other"), [pair for pair in permutations(GOES_ON, 2) if "a hint" not in pair])
def test_two_things_at_once_lose_nothing_either(one: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    audit_for(one, monkeypatch)
    check_every_await(one, other, most=2)


@pytest.mark.parametrize("what", ["a stop", "a stop in a hurry", "a death that is none"])
def test_whatever_a_worker_awaits_when_it_has_to_end_others_do_the_rest(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit_for(what, monkeypatch)

    async def scene(stage: Stage) -> None:
        shop = Workshop(stage)
        ENDS = {"a stop": shop.stop, "a stop in a hurry": shop.stop_now, "a death that is none": shop.declare_dead}
        try:
            await shop.member.start()
            stage.begin(ENDS[what])
            await shop.submit_all()
            await asyncio.sleep(1.5)
            if what != "a death that is none":
                await shop.leaves()
                await shop.nothing_is_owned()
                shop.member = await shop.hire().start()
            await shop.all_ended()
            stage.end()
            await shop.check(recoveries=what == "a death that is none", interrupted=what == "a stop in a hurry")
            await shop.every_place_is_free()
            await shop.member.stop()
            await shop.nothing_is_owned()
        finally:
            await shop.fleet.stop()

    assert sum(1 for _ in every_await(scene, WATCHED, most=MOST)) > 15
