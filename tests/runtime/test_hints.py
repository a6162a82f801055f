"""Every kind of hint, from each part of the engine that sends it, with fallback looks switched off.

Polling hides a hint that is never sent: everything happens all the same, a little later. So each case runs twice. With
its hint, what waits for it happens at once; without it (the hub drops that kind from the moment of the act) it does
not happen at all, which shows that the case is about the hint.

Hints travel over a wire between the hubs of several engines, as they do between processes. The real wires are tested
between real processes, in the same way, by tests/cli/test_hints.py.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from typing import cast as as_store
from unittest import mock

import pytest
from msgspec.structs import replace
from tests.runtime.test_meanwhile import SlowClaims
from tests.support.fleet import APP, Fleet, Line, Member, add, definition, virtually
from tests.support.runs import Declared, call_of
from tests.support.wire import Wire

from holdfast.fleet.recovery import Recovery
from holdfast.fleet.services import SERVICE, Executions
from holdfast.fleet.slots import ExecutionStatus
from holdfast.ids import InvocationId
from holdfast.model import changes, records
from holdfast.model.changes import Push
from holdfast.model.claims import Claim, Claimed
from holdfast.model.limits import Limit
from holdfast.model.queues import QueuePause
from holdfast.model.records import (
    CANCEL,
    ENDED,
    INBOX,
    PAUSES,
    READY,
    ROSTER,
    SCHEDULES,
    WAITS,
    Hint,
    InboxEntry,
    InvocationRecord,
    Terms,
)
from holdfast.model.retries import Fixed, MoveTo, dump_policy
from holdfast.model.status import FINAL, Status
from holdfast.runtime import hints as fallback
from holdfast.runtime.claim import Claimer, Unlimited
from holdfast.runtime.hints import Hub
from holdfast.runtime.limits import Limits
from holdfast.runtime.outage import Outage
from holdfast.runtime.pauses import pause_queue, resume_queue
from holdfast.schedules import every
from holdfast.schedules.records import Rules, StoredCall
from holdfast.schedules.service import ScheduleRegistry
from holdfast.store.contract import Store
from holdfast.workflows import service
from holdfast.workflows.api import sleep
from holdfast.workflows.children import WAKE

BOUND_SECONDS = 3.0


class Cast:
    """A fleet whose hubs are on one wire, and a client beside it."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        Wire(fleet)
        self.client, self.other = fleet.engine(fleet.store), fleet.engine(fleet.store)
        self.acting = False
        self.gate = asyncio.Event()
        self.began: list[str] = []

    async def runner(self, *functions: Any, **options: Any) -> Member:
        member = self.fleet.member(*functions, **options)
        await member.start()
        await asyncio.sleep(1.0)  # it has looked once, and waits
        return member

    async def submit(self, task: str, *args: Any, **facts: Any) -> InvocationRecord:
        record = self.fleet.new(task, *args, **facts)
        await self.client.submitter.submit([record])
        return record

    async def runs(self, id: str) -> None:
        await self.fleet.until_status(id, Status.RUNNING)
        await asyncio.sleep(0.5)  # whatever its start leads to has happened

    async def is_soon(self, id: str, *statuses: Status) -> bool:
        return await self.soon(lambda: self._status(id, statuses))

    async def _status(self, id: str, statuses: Sequence[Status]) -> bool:
        return (await self.fleet.record(id)).status in statuses

    async def soon(self, holds: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
        deadline = self.fleet.clock.now() + BOUND_SECONDS
        while not await holds():
            if self.fleet.clock.now() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    async def hears_of_the_end(self, id: str) -> bool:
        """A client elsewhere that waits for its end is told."""
        began = self.fleet.clock.now()
        await self.client.watcher.ends([id], 2 * BOUND_SECONDS)  # it looks once more at the end of its patience
        return self.fleet.clock.now() - began < BOUND_SECONDS

    def hold(self) -> Any:
        async def held(name: str) -> str:
            self.began.append(name)
            await self.gate.wait()
            return name

        return held


Case = Callable[[Cast], Coroutine[Any, Any, bool]]
CASES: dict[str, tuple[str, Case]] = {}


def case(kind: str) -> Callable[[Case], Case]:
    def add_case(function: Case) -> Case:
        CASES[function.__name__] = (kind, function)
        return function

    return add_case


# --- work is ready


@case(READY)
async def a_submit(cast: Cast) -> bool:
    await cast.runner(add)
    cast.acting = True
    return await cast.is_soon((await cast.submit("add", 1, 1)).id, Status.SUCCESS)


@case(READY)
async def a_submit_whose_key_is_free_again(cast: Cast) -> bool:
    await cast.runner(add)
    over = Terms(key_until=cast.fleet.clock.now())
    await cast.submit("add", 1, 1, key="k", terms=over, due_at=cast.fleet.clock.now() + 1e5)
    await asyncio.sleep(0.5)
    cast.acting = True
    return await cast.is_soon((await cast.submit("add", 2, 2, key="k")).id, Status.SUCCESS)


@case(READY)
async def a_retry_that_moves_to_another_queue(cast: Cast) -> bool:
    async def patient() -> None:
        if len(cast.began) < 1:
            cast.began.append("once")
            raise ValueError("no")

    task = replace(definition(patient), retries=MoveTo("slow", Fixed(2, 0.0)))
    await cast.runner(task, queues=["default"])
    await cast.runner(task, queues=["slow"])
    cast.acting = True
    policy = Terms(retries=dump_policy(MoveTo("slow", Fixed(2, 0.0))))
    record = cast.fleet.new("patient", terms=policy)
    await cast.fleet.store.insert([record])
    for member in cast.fleet.members:  # it begins, hint or not
        member.engine.hub._receive(Hint(READY, (record.lane,)))
    return await cast.is_soon(record.id, Status.SUCCESS)


@case(READY)
async def a_runner_that_hands_back(cast: Cast) -> bool:
    one = await cast.runner(cast.hold(), drain=0.0)
    record = await cast.submit("held", "x")
    await cast.runs(record.id)
    await cast.runner(cast.hold())
    cast.acting = True
    one.runner.stop(hurry=True)
    return await cast.soon(lambda: _length(cast.began, 2))


@case(READY)
async def a_slot_that_is_free(cast: Cast) -> bool:
    limited = replace(definition(cast.hold()), limit=Limit(1))
    await cast.runner(limited, queues=["default"])
    await cast.runner(limited, queues=["other"])
    first = await cast.submit("held", "a", limit_key="k")
    await cast.runs(first.id)
    waiting = await cast.submit("held", "b", limit_key="k", queue="other")
    await cast.fleet.until_status(waiting.id, Status.CONCURRENCY_CONTROLLED)
    cast.acting = True
    cast.gate.set()
    return await cast.is_soon(waiting.id, Status.SUCCESS)


@case(READY)
async def work_that_is_recovered(cast: Cast) -> bool:
    one = await cast.runner(cast.hold())
    record = await cast.submit("held", "a")
    await cast.runs(record.id)
    await cast.runner(cast.hold())
    one.crash()
    cast.acting = True
    found = await cast.fleet.record(record.id)
    await Recovery(cast.client).recover([found], "a test")
    return await cast.soon(lambda: _length(cast.began, 2))


@case(READY)
async def parked_work_that_is_woken(cast: Cast) -> bool:
    await cast.runner(add)
    record = cast.fleet.new("add", 1, 1)
    claimed = await _parked(cast, record)
    cast.acting = True
    change = changes.woken(claimed, operation="w", at=cast.fleet.clock.now(), why="a test")
    await cast.client.outbox.apply([(claimed, change)])
    cast.client.hub.send(Hint(READY, (claimed.lane,)))
    return await cast.is_soon(record.id, Status.SUCCESS)


# --- something has ended


@case(ENDED)
async def a_success(cast: Cast) -> bool:
    await cast.runner(cast.hold())
    record = await cast.submit("held", "a")
    await cast.runs(record.id)
    cast.acting = True
    asyncio.get_running_loop().call_later(0.5, cast.gate.set)
    return await cast.hears_of_the_end(record.id)


@case(ENDED)
async def a_cancel_of_what_nobody_runs(cast: Cast) -> bool:
    record = await cast.submit("add", 1, 1)
    cast.acting = True
    waiting = asyncio.create_task(cast.hears_of_the_end(record.id))
    await asyncio.sleep(0.5)
    await cast.other.canceller.cancel([record.id], by="a test")
    return await waiting


@case(ENDED)
async def an_expiry(cast: Cast) -> bool:
    await cast.runner(add)
    start_by = cast.fleet.clock.now() + 7.0
    record = await cast.submit("of nobody here", start_by=start_by, terms=Terms(start_by=start_by))
    await asyncio.sleep(6.0)  # the sweep knows of it
    cast.acting = True
    return await cast.hears_of_the_end(record.id)


@case(ENDED)
async def a_limit_that_refuses(cast: Cast) -> bool:
    limited = replace(definition(cast.hold()), limit=Limit(1, waits=False))
    await cast.runner(limited)
    first = await cast.submit("held", "a", limit_key="k")
    await cast.runs(first.id)
    cast.acting = True
    second = cast.fleet.new("held", "b", limit_key="k")
    waiting = asyncio.create_task(cast.hears_of_the_end(second.id))
    await cast.fleet.store.insert([second])
    cast.fleet.members[0].engine.hub._receive(Hint(READY, (second.lane,)))
    return await waiting


@case(ENDED)
async def a_crash_too_many(cast: Cast) -> bool:
    one = await cast.runner(replace(definition(cast.hold()), at_most_once=True))
    record = await cast.submit("held", "a", at_most_once=True)
    await cast.runs(record.id)
    one.crash()
    cast.acting = True
    waiting = asyncio.create_task(cast.hears_of_the_end(record.id))
    await asyncio.sleep(0.5)
    found = await cast.fleet.record(record.id)
    await Recovery(cast.other).recover([found], "a test")
    return await waiting


# --- something is to end, a queue is paused, a schedule is new, a runner is gone


@case(CANCEL)
async def a_cancel_of_what_runs(cast: Cast) -> bool:
    await cast.runner(cast.hold())
    record = await cast.submit("held", "a")
    await cast.runs(record.id)
    cast.acting = True
    await cast.client.canceller.cancel([record.id], by="a test")
    return await cast.is_soon(record.id, Status.CANCELLED)


@case(CANCEL)
async def a_cancel_of_several_of_which_one_is_claimed_meanwhile(cast: Cast) -> bool:
    """It is asked for once more, for that one alone."""
    await cast.runner(cast.hold())
    running, waiting = await cast.submit("held", "a"), await cast.submit("of nobody here")
    await cast.runs(running.id)
    line = Line(cast.fleet.store)

    def claimed() -> None:
        found = cast.fleet.store._records[APP, waiting.id]
        line.before.clear()
        cast.fleet.store._put(replace(found, status=Status.RUNNING, owner="r/1", epoch=found.epoch + 1))

    line.before["apply"] = claimed
    cast.acting = True
    await cast.fleet.engine(as_store(Store, line)).canceller.cancel([running.id, waiting.id], by="a test")
    return await cast.is_soon(running.id, Status.CANCELLED)


@case(CANCEL)
async def a_cancel_before_the_answer_to_the_claim(cast: Cast) -> bool:
    """Others see that it runs, while its worker does not know of it yet."""
    member = await cast.runner(cast.hold(), make_line=SlowClaims)
    assert isinstance(member.line, SlowClaims)
    member.line.seconds = 1.0
    record = await cast.submit("held", "a")
    await cast.fleet.until_status(record.id, Status.RUNNING)
    cast.acting = True
    await cast.client.canceller.cancel([record.id], by="a test")
    return await cast.is_soon(record.id, Status.CANCELLED)


@case(PAUSES)
async def a_queue_that_is_resumed(cast: Cast) -> bool:
    pause = QueuePause(app=APP, name="default", at=0.0, by="a test", reason="", operation="p")
    await pause_queue(cast.fleet.store, pause)
    await cast.runner(add)
    record = await cast.submit("add", 1, 1)
    await asyncio.sleep(1.0)
    cast.acting = True
    await resume_queue(cast.fleet.store, APP, "default", "r")
    cast.client.hub.send(Hint(PAUSES, ("default",)))
    return await cast.is_soon(record.id, Status.SUCCESS)


@case(SCHEDULES)
async def a_new_schedule(cast: Cast) -> bool:
    await cast.runner(add)
    await asyncio.sleep(2.0)
    cast.acting = True
    book = cast.client.part(ScheduleRegistry)
    call = StoredCall(task="add", arguments=cast.fleet.codec.encode_call((1, 1), {}))
    await book.create(book.new("soon", every("1s"), call, Rules()))
    return await cast.soon(lambda: _any_of(cast, "add"))


@case(SCHEDULES)
async def a_schedule_that_is_changed(cast: Cast) -> bool:
    book = cast.client.part(ScheduleRegistry)
    call = StoredCall(task="add", arguments=cast.fleet.codec.encode_call((1, 1), {}))
    await book.create(book.new("soon", every("1d"), call, Rules()))
    await cast.runner(add)
    await asyncio.sleep(2.0)
    cast.acting = True
    await book.change("soon", lambda record, now: {"timing": every("1s"), "through": now})
    return await cast.soon(lambda: _any_of(cast, "add"))


@case(ROSTER)
async def a_runner_that_leaves(cast: Cast) -> bool:
    """Whose turn it is at the services changes at once: what the one before would have fired is not late."""
    one = await cast.runner(add)
    two = await cast.runner(add)
    first, second = sorted((one, two), key=lambda member: member.id)
    # The first has the first half of the minute, the second the other one.
    into = cast.fleet.clock.now() % 60.0
    await asyncio.sleep(60.0 - into + 5.0)
    assert cast.fleet.clock.now() % 60.0 < 10.0
    cast.acting = True
    await first.stop()

    async def performs() -> bool:
        trail = await Executions(cast.fleet.store, APP, SERVICE, 0).trail(10)
        return any(
            execution.runner_id == second.id and execution.status is ExecutionStatus.RUNNING for execution in trail
        )

    return await cast.soon(performs)


# --- a run has a message, or is to be woken


class Shop:
    """Runs that wait: for a child in another queue, or for a time."""

    def __init__(self, cast: Cast) -> None:
        declared = Declared()
        self.declared = declared

        @declared.app.step(name="pack")
        async def pack() -> str:
            cast.began.append("pack")
            await cast.gate.wait()
            return "packed"

        @declared.app.workflow(name="child", queue="other")
        async def child() -> str:
            return await pack()

        @declared.app.workflow(name="parent")
        async def parent() -> str:
            return await child()

        @declared.app.workflow(name="sleeper")
        async def sleeper(seconds: float) -> str:
            await sleep(seconds)
            return "rested"

        self.parent, self.sleeper = parent, sleeper


async def _with_runs(cast: Cast, *queues: str, linger: float) -> Shop:
    """Hire a runner for each queue; runs linger so long before they are suspended."""
    cast.fleet.settings["workflow_linger_seconds"] = linger
    shop = Shop(cast)
    fallback.switch("off")  # a new app reads the environment
    for queue in queues:
        await cast.runner(*shop.declared.tasks, queues=[queue])
    return shop


async def _begin_run(cast: Cast, workflow: Any, *args: Any) -> str:
    record = call_of(cast.client, workflow, *args)
    await cast.client.submitter.submit([record])
    return record.id


@case(INBOX)
async def a_child_of_a_run_that_ends(cast: Cast) -> bool:
    shop = await _with_runs(cast, "default", "other", linger=3600.0)
    parent = await _begin_run(cast, shop.parent)
    await cast.fleet.until(lambda: _length(cast.began, 1))
    cast.acting = True
    cast.gate.set()
    return await cast.is_soon(parent, Status.SUCCESS)


@case(WAITS)
async def a_run_that_is_suspended_for_seconds(cast: Cast) -> bool:
    """Where no run sleeps, the services look now and then; here once a minute."""
    with mock.patch.object(service, "QUIET_SECONDS", 60.0):
        shop = await _with_runs(cast, "default", linger=0.1)
    await asyncio.sleep(5.0)
    cast.acting = True
    id = await _begin_run(cast, shop.sleeper, 5.0)
    await asyncio.sleep(5.0)
    return await cast.is_soon(id, Status.SUCCESS)


@case(READY)
async def a_run_whose_time_has_come(cast: Cast) -> bool:
    shop = await _with_runs(cast, "default", linger=0.1)
    id = await _begin_run(cast, shop.sleeper, 5.0)
    await cast.fleet.until_status(id, Status.SUSPENDED)
    await asyncio.sleep(4.0)
    cast.acting = True
    return await cast.is_soon(id, Status.SUCCESS)


@case(READY)
async def a_message_for_a_run_that_is_suspended(cast: Cast) -> bool:
    shop = await _with_runs(cast, "default", "other", linger=0.1)
    parent = await _begin_run(cast, shop.parent)
    await cast.fleet.until_status(parent, Status.SUSPENDED)
    await cast.fleet.until(lambda: _length(cast.began, 1))
    await asyncio.sleep(3.0)  # the look that follows each claim is over
    cast.acting = True
    cast.gate.set()
    return await cast.is_soon(parent, Status.SUCCESS)


@case(READY)
async def a_run_that_is_handed_over(cast: Cast) -> bool:
    shop = await _with_runs(cast, "default", linger=3600.0)
    id = await _begin_run(cast, shop.sleeper, 60.0)
    await cast.runs(id)
    second = await cast.runner(*shop.declared.tasks)
    cast.acting = True
    cast.fleet.members[0].runner.stop()

    async def goes_on() -> bool:
        return ((await cast.fleet.record(id)).owner or "").startswith(second.id)

    return await cast.soon(goes_on)


@case(READY)
async def a_cancel_of_a_run_that_is_suspended(cast: Cast) -> bool:
    """Its body may compensate, so a runner has to take it up."""
    shop = await _with_runs(cast, "default", linger=0.1)
    id = await _begin_run(cast, shop.sleeper, 600.0)
    await cast.fleet.until_status(id, Status.SUSPENDED)
    await asyncio.sleep(3.0)
    cast.acting = True
    await cast.client.canceller.cancel([InvocationId(id)], by="a test")
    return await cast.is_soon(id, Status.CANCELLED)


async def _length(things: Sequence[object], count: int) -> bool:
    return len(things) >= count


async def _any_of(cast: Cast, task: str) -> bool:
    return any(record.task == task and record.status in FINAL for record in cast.fleet.store._of(APP))


async def _parked(cast: Cast, record: InvocationRecord) -> InvocationRecord:
    """Store it as a runner has left it that could not bind its arguments."""
    parked = replace(record, status=Status.PARKED)
    await cast.fleet.store.insert([parked])
    return parked


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dropped", [False, True], ids=["sent", "dropped"])
def test_a_hint_is_enough_and_is_needed(name: str, dropped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, play = CASES[name]
    fallback.switch("off")
    send = Hub.send
    found: list[Cast] = []

    def dropping(hub: Hub, *hints: Hint, **how: bool) -> None:
        acting = bool(found) and found[0].acting and dropped
        send(hub, *[hint for hint in hints if not (acting and hint.kind == kind)], **how)

    monkeypatch.setattr(Hub, "send", dropping)

    async def scenario(fleet: Fleet) -> None:
        found.append(Cast(fleet))
        try:
            assert await play(found[0]) is not dropped
        finally:
            found[0].acting = False
            found[0].gate.set()

    try:
        virtually(scenario)
    finally:
        fallback.switch(None)


# Kinds of features above the runtime. tests/streams/test_reading.py has the case of streams. Answers to webhooks have
# none: whether a web process finds an answer without its hint is only as quick as its looks.
ELSEWHERE = {"stream", "answers"}


def test_every_kind_of_hint_has_a_case() -> None:
    """The kinds are what `holdfast.model.records` declares: its only public constants that are texts."""
    declared = [
        statement.value.value
        for statement in ast.parse(inspect.getsource(records)).body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    ]
    assert READY in declared
    assert set(declared) == {kind for kind, _ in CASES.values()} | ELSEWHERE


def test_a_claim_that_lets_waiters_go_on_sends_a_hint_of_their_lanes() -> None:
    """As a claim on MongoDB does that finds a free slot; on the other stores, only ends free slots."""

    async def scenario(fleet: Fleet) -> None:
        heard: list[Hint] = []
        claim = fleet.store.claim

        async def claim_and_release(wanted: Claim) -> Claimed:
            return replace(await claim(wanted), refused=(InvocationId("x"),), released=("a lane", "b", "a lane"))

        fleet.store.claim = claim_and_release  # type: ignore[method-assign]
        engine = fleet.engine(fleet.store)
        engine.hub.on(READY, heard.append)
        engine.hub.on(ENDED, heard.append)
        claimer = Claimer(engine, Outage(engine.rng, engine.telemetry), Unlimited(), owner="r/1", limits=Limits(engine))
        await claimer.claim(["a lane"], 1)
        assert heard == [Hint(ENDED, ("x",), 1), Hint(READY, ("a lane", "b"), 3)]

    virtually(scenario)


def test_a_hint_that_names_nobody_is_about_any_number() -> None:
    """A channel sends it when hints may have been lost."""

    async def scenario(fleet: Fleet) -> None:
        cast = Cast(fleet)
        member = await cast.runner(cast.hold(), concurrency=8)
        await fleet.store.insert([fleet.new("held", str(number)) for number in range(8)])
        member.engine.hub._receive(Hint(READY, ()))
        await asyncio.sleep(0.1)
        assert len(cast.began) == 8
        cast.gate.set()

    fallback.switch("off")
    try:
        virtually(scenario)
    finally:
        fallback.switch(None)


@pytest.mark.parametrize("kind", [CANCEL, ENDED, INBOX, PAUSES, SCHEDULES])
def test_a_hint_that_names_nobody_is_about_anybody(kind: str) -> None:
    """What was changed without a word is found all the same."""

    async def scenario(fleet: Fleet) -> None:
        cast = Cast(fleet)
        member = await cast.runner(cast.hold(), add)
        running = await cast.submit("held", "a")
        await cast.runs(running.id)
        silent = Fleet(fleet.clock, fleet.store).engine(fleet.store)  # on no wire
        hub, book = member.engine.hub, silent.part(ScheduleRegistry)
        if kind == CANCEL:
            await silent.canceller.cancel([running.id], by="a test")
            hub._receive(Hint(kind, ()))
            assert await cast.is_soon(running.id, Status.CANCELLED)
        elif kind == ENDED:
            record = fleet.new("nobody's")
            await fleet.store.insert([record])
            waiting = asyncio.create_task(cast.hears_of_the_end(record.id))
            await asyncio.sleep(0.5)
            await silent.canceller.cancel([record.id], by="a test")
            cast.client.hub._receive(Hint(kind, ()))
            assert await waiting
        elif kind == INBOX:
            run = await _begin_run(cast, (await _with_runs(cast, "default", linger=3600.0)).sleeper, 600.0)
            await cast.runs(run)
            now = fleet.clock.now()
            entry = InboxEntry(id="wake", kind=WAKE, at=now)
            await fleet.store.apply([Push(app=APP, id=InvocationId(run), entry=entry, operation="w", at=now)])
            fleet.members[-1].engine.hub._receive(Hint(kind, ()))
            assert await cast.is_soon(run, Status.SUCCESS)
        elif kind == PAUSES:
            pause = QueuePause(app=APP, name="default", at=0.0, by="a test", reason="", operation="p")
            await pause_queue(fleet.store, pause)
            hub._receive(Hint(kind, ()))
            await asyncio.sleep(0.5)
            assert member.runner._permit is not None
            assert member.runner._permit.paused == {"default"}
        else:
            call = StoredCall(task="add", arguments=fleet.codec.encode_call((1, 1), {}))
            await book.create(book.new("soon", every("1s"), call, Rules()))
            hub._receive(Hint(kind, ()))
            assert await cast.soon(lambda: _any_of(cast, "add"))
        cast.gate.set()

    fallback.switch("off")
    try:
        virtually(scenario)
    finally:
        fallback.switch(None)
