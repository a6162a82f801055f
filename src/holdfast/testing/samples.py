"""Sample records for the store tests, as the engine makes them, and a stage for scenarios."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.clock import Clock, SystemClock
from holdfast.codec import ErrorRecord
from holdfast.ids import InvocationId
from holdfast.model import cancellation as cancelling
from holdfast.model import changes, claims, run_changes
from holdfast.model.changes import Change, FieldReset, Push
from holdfast.model.claims import Claim
from holdfast.model.log import Page
from holdfast.model.notes import CallProgress, LogLine, Notes
from holdfast.model.records import (
    Cancellation,
    InboxEntry,
    InvocationRecord,
    ReplyTo,
    RunnerRecord,
    RunState,
    Terms,
    Waiting,
    lane_of,
    registered,
)
from holdfast.model.status import Status
from holdfast.model.waits import paused, resumed
from holdfast.store import open_store as open_by_url
from holdfast.store.contract import Ability, Observe, Store
from holdfast.testing.clock import FakeClock

START = 1_700_000_000.0
TASK = "shop:send"
LANE = lane_of("default", TASK)
ERROR = ErrorRecord(
    type_name="ValueError", message='a "quoted"\nline \0 😀 \\', traceback="Traceback …", data=b"\x00\xff"
)
ODD_TEXTS = [
    "",
    "two\nlines\r\n",
    "nul \0 inside",
    "quotes ' \" ` ;--",
    "back\\slash %s {x} $set",
    "日本 😀 é é",
    "x" * 70_000,
]
ODD_NAMES = ["O'Brien", 'say"hi"', "a\\b", "日本:😀", "%", "$where", "a.b", "UPPER", "upper"]

RUN = RunState(generation=1, tail=7, started_at=START)
ATTRIBUTES = {"stage": "packed", "a.b": "$set", "日本": "😀=1"}
REPLY_TO = ReplyTo(
    run=InvocationId("parent"),
    call="child#1",
    generation=2,
    root=InvocationId("root"),
    ends_with_run=True,
    effects_key="parent/child#1",
)

NOTES = Notes(
    progress=CallProgress(current=40, total=99.5, message="日本 $rows", at=1000.5, attempt=2),
    checkpoint=b"\x00\xff checkpoint",
    checkpoint_at=1001.0,
    log=(
        LogLine(at=1000.0, level="INFO", text='{"a": 1}\n$x', logger="shop.rows"),
        LogLine(at=1000.5, level="ERROR", text="日本", attempt=2),
    ),
)
WAITING = Waiting(ids=(InvocationId("b"), InvocationId("日本")), epoch=1, more=2)

OpenStore = Callable[[Clock, Observe], Store]
Scenario = Callable[[Store], Awaitable[None]]


def invocation(
    id: str, *, app: str = "shop", operation: str = "", at: float = START, **fields: Any
) -> InvocationRecord:
    """Make a record as `submit` does."""
    given: dict[str, Any] = {"task": TASK, "arguments": b"\x90", "created_at": at, "due_at": at} | fields
    return registered(
        InvocationRecord(id=InvocationId(id), app=app, **given), operation=operation or f"insert {id}", at=at
    )


def wish(operation: str = "claim", **fields: Any) -> Claim:
    """Make a claim for the lane of `invocation`."""
    given: dict[str, Any] = {"app": "shop", "lanes": (LANE,), "limit": 10, "owner": "runner/1", "at": START} | fields
    return Claim(operation=operation, **given)


def runner(id: str, *, app: str = "shop", started_at: float = START, **fields: Any) -> RunnerRecord:
    given: dict[str, Any] = {
        "host": "h",
        "pid": 1,
        "version": "0",
        "concurrency": 4,
        "queues": ("default",),
        "tasks": (TASK,),
        "heartbeat_at": started_at,
    } | fields
    return RunnerRecord(id=id, app=app, started_at=started_at, **given)


def ids(*names: str) -> list[InvocationId]:
    """Return these names as ids."""
    return [InvocationId(name) for name in names]


def ids_of(records: Iterable[InvocationRecord | None]) -> list[str | None]:
    return [record.id if record else None for record in records]


async def the(store: Store, id: str = "a", app: str = "shop") -> InvocationRecord:
    """Return the record, which has to be there."""
    (record,) = await store.get(app, ids(id))
    assert record is not None
    return record


async def owned(
    store: Store, id: str = "a", *, start: bool = True, owner: str = "runner/1", **fields: Any
) -> InvocationRecord:
    """Insert an invocation and claim it for `owner`."""
    await store.insert([invocation(id, **fields)])
    (record,) = (await store.claim(wish(f"claim {id}", ids=(id,), start=start, owner=owner))).records
    return record


def raw_change(
    record: InvocationRecord, *path: Status, operation: str, epoch: int | None = None, **more: Any
) -> Change:
    """Make a legal change that has no name yet, for edges of later features."""
    given: dict[str, Any] = {"name": "raw", "at": START + 5, "actor": record.owner, "why": "", **more}
    given["retain_until"] = changes.kept_until(record, path[-1], given["at"])
    where: dict[str, Any] = {"app": record.app, "id": record.id, "sources": frozenset({record.status})}
    return Change(path=path, epoch=epoch, operation=operation, **where, **given)


def again(record: InvocationRecord, queue: str | None = None, error: ErrorRecord = ERROR) -> Change:
    """Change an invocation after a failed attempt that is followed by another."""
    facts: dict[str, Any] = {"operation": "op", "at": START + 1, "why": "attempt 1 of 3 failed; next in 30s"}
    return changes.retried(record, error=error, due_at=START + 31, queue=queue, **facts)


CANCELLATION = Cancellation(by="a person", reason="no longer wanted", at=START + 1, until=START + 11)


def cancelled(record: InvocationRecord) -> Change:
    """Change an invocation that a user cancels, whatever its status. A run that would get a push gives way."""
    asked = cancelling.cancel(record, CANCELLATION, operation="op")
    return asked if isinstance(asked, Change) else cancelling.gave_way(record, operation="op", at=START + 1)


def expired(record: InvocationRecord) -> Change:
    """Change an invocation that was not started in time."""
    late = replace(record, terms=Terms(start_by=START))
    change = cancelling.expired(late, error=ERROR, operation="op", at=START + 1)
    return change or cancelled(record)


BY_NAME: dict[str, tuple[Status, Callable[[InvocationRecord], Change]]] = {
    "started": (Status.PENDING, lambda r: changes.started(r, operation="op", at=START + 1)),
    "handed_back": (Status.PENDING, lambda r: changes.handed_back(r, operation="op", at=START + 1, why="leaving")),
    "completed": (Status.RUNNING, lambda r: changes.completed(r, result=b"\x01", operation="op", at=START + 1)),
    "failed": (Status.RUNNING, lambda r: changes.failed(r, error=ERROR, operation="op", at=START + 1, why="no")),
    "retried": (Status.RUNNING, lambda r: again(r)),
    "retried, elsewhere": (Status.RUNNING, lambda r: again(r, queue="slow")),
    "deferred": (
        Status.RUNNING,
        lambda r: replace(
            changes.deferred(r, due_at=START + 61, operation="op", at=START + 1, why="again"),
            attributes={"failures": "2"},
        ),
    ),
    "parked": (Status.RUNNING, lambda r: changes.parked(r, fingerprint="f1", operation="op", at=START + 1, why="?")),
    "parked, reserved": (
        Status.PENDING,
        lambda r: changes.parked(r, fingerprint=None, operation="op", at=START + 1, why="?"),
    ),
    "handed_back, marked as running": (
        Status.RUNNING,
        lambda r: changes.handed_back(r, operation="op", at=START + 1, why="leaving"),
    ),
    "killed": (Status.RUNNING, lambda r: changes.killed(r, operation="op", at=START + 1, why="stop")),
    "killed, reserved": (Status.PENDING, lambda r: changes.killed(r, operation="op", at=START + 1, why="stop")),
    "killed, at most once": (
        Status.RUNNING,
        lambda r: changes.killed(r, operation="op", at=START + 1, why="stop", error=ERROR),
    ),
    "killed, being cancelled": (
        Status.CANCELLING,
        lambda r: changes.killed(r, operation="op", at=START + 1, why="stop", error=ERROR),
    ),
    "paused": (Status.RUNNING, lambda r: paused(r, WAITING, operation="op", at=START + 1, why="it waits for b")),
    "resumed": (Status.PAUSED, lambda r: resumed(r, operation="op", at=START + 1)),
    "completed, paused": (Status.PAUSED, lambda r: changes.completed(r, result=b"", operation="op", at=START + 1)),
    "failed, paused": (Status.PAUSED, lambda r: changes.failed(r, error=ERROR, operation="op", at=START + 1)),
    "retried, paused": (Status.PAUSED, lambda r: again(r)),
    "killed, paused": (Status.PAUSED, lambda r: changes.killed(r, operation="op", at=START + 1, why="stop")),
    "cancelling, paused": (Status.PAUSED, cancelled),
    "recovered, paused": (
        Status.PAUSED,
        lambda r: changes.recovered(r, by="runner", operation="op", at=START + 1, why="dead"),
    ),
    "recovered": (
        Status.RUNNING,
        lambda r: changes.recovered(r, by="runner", operation="op", at=START + 1, why="dead"),
    ),
    "recovered, reserved": (
        Status.PENDING,
        lambda r: changes.recovered(r, by="runner", operation="op", at=START + 1, why="dead"),
    ),
    "recovered, once too often": (
        Status.RUNNING,
        lambda r: changes.recovered(r, by="runner", operation="op", at=START + 1, why="dead", error=ERROR),
    ),
    "recovered, being cancelled": (
        Status.CANCELLING,
        lambda r: changes.recovered(r, by="runner", operation="op", at=START + 1, why="dead"),
    ),
    "rescued": (
        Status.KILLED,
        lambda r: changes.rescued(r, by="runner", operation="op", at=START + 1, why="left behind"),
    ),
    "blocked": (Status.REGISTERED, lambda r: claims.blocked(r, operation="op", at=START + 1, why="no slot")),
    "put_off": (
        Status.REGISTERED,
        lambda r: claims.put_off(r, operation="op", at=START + 1, why="no start", due_at=START + 9),
    ),
    "refused": (Status.REGISTERED, lambda r: claims.refused(r, operation="op", at=START + 1, why="no slot")),
    "released": (Status.CONCURRENCY_CONTROLLED, lambda r: claims.released(r, operation="op", at=START + 1)),
    "cancelled": (Status.REGISTERED, cancelled),
    "cancelled, again": (Status.RETRY, cancelled),
    "cancelled, without a slot": (Status.CONCURRENCY_CONTROLLED, cancelled),
    "cancelled, parked": (Status.PARKED, cancelled),
    "cancelled, on its way back": (Status.KILLED, cancelled),
    "cancelling, reserved": (Status.PENDING, cancelled),
    "cancelling": (Status.RUNNING, cancelled),
    "gave_way": (Status.CANCELLING, cancelled),
    "expired": (Status.REGISTERED, expired),
    "expired, reserved": (Status.PENDING, expired),
    "expired, marked as running": (Status.RUNNING, expired),
    "woken": (Status.PARKED, lambda r: changes.woken(r, operation="op", at=START + 60, why="new code")),
    "suspended, of a run": (Status.RUNNING, lambda r: suspended(r)),
    "suspended, of a run, until a push": (Status.RUNNING, lambda r: suspended(r, wake_at=None)),
    "handed_over, of a run": (
        Status.RUNNING,
        lambda r: run_changes.handed_over(r, r.run or RunState(), operation="op", at=START + 1, why="drained"),
    ),
    "restarted, of a run": (
        Status.RUNNING,
        lambda r: run_changes.restarted(r, r.run or RunState(), arguments=b"other", operation="op", at=START + 1),
    ),
    "awakened, of a run": (
        Status.SUSPENDED,
        lambda r: changes.awakened(r, operation="op", at=START + 60, why="its time has come"),
    ),
    "cancelling, of a run, by its next owner": (
        Status.RUNNING,
        lambda r: cancelling.asked_to_compensate(r, operation="op", at=START + 1),
    ),
    "killed, of a run, being cancelled": (
        Status.CANCELLING,
        lambda r: changes.killed(r, operation="op", at=START + 1, why="stop"),
    ),
    "recovered, of a run, being cancelled": (
        Status.CANCELLING,
        lambda r: changes.recovered(r, by="runner", operation="op", at=START + 1, why="dead"),
    ),
    "completed, of a run": (Status.RUNNING, lambda r: changes.completed(r, result=b"r", operation="op", at=START + 1)),
    "failed, of a run": (Status.RUNNING, lambda r: changes.failed(r, error=ERROR, operation="op", at=START + 1)),
    "failed, of a child": (Status.RUNNING, lambda r: changes.failed(r, error=ERROR, operation="op", at=START + 1)),
    "refused, of a child": (Status.REGISTERED, lambda r: claims.refused(r, operation="op", at=START + 1, why="no")),
    "cancelled, of a child": (Status.REGISTERED, cancelled),
}
"""Every named change, with the status to try it from. `fields_for` says what its invocation needs."""


def fields_for(name: str) -> dict[str, Any]:
    """Return the fields of an invocation that this named change is tried on."""
    if ", of a run" in name:
        return {"run": RUN}
    return {"reply_to": REPLY_TO} if ", of a child" in name else {}


def suspended(record: InvocationRecord, wake_at: float | None = START + 60, *, operation: str = "op") -> Change:
    """Change a run that waits."""
    run = record.run or RunState()
    return run_changes.suspended(record, run, wake_at=wake_at, operation=operation, at=START + 1, why="sleeps")


async def in_status(store: Store, status: Status, id: str = "a", **fields: Any) -> InvocationRecord:
    if status in (Status.REGISTERED, Status.CONCURRENCY_CONTROLLED):
        await store.insert([record := invocation(id, **fields)])
        if status is not Status.REGISTERED:
            await store.apply([raw_change(record, status, operation=f"to {id}")])
        return await the(store, id)
    record = await owned(store, id, start=status is not Status.PENDING, **fields)
    if status is Status.SUSPENDED:
        await store.apply([suspended(record, operation=f"suspend {id}")])
    if status is Status.PARKED:
        await store.apply([changes.parked(record, fingerprint="f0", operation=f"park {id}", at=START, why="stuck")])
    if status in (Status.KILLED, Status.CANCELLING):
        await store.apply([raw_change(record, status, operation=f"to {id}", epoch=record.epoch)])
    if status is Status.PAUSED:
        await store.apply([paused(record, WAITING, operation=f"pause {id}", at=START, why="it waits for b")])
    if status is Status.RETRY:
        await store.apply([replace(again(record), operation=f"again {id}")])
    return await the(store, id)


class Stage:
    """Hold the store and the clock of one test, and what the store has observed."""

    def __init__(self, open_store: OpenStore) -> None:
        self.clock = FakeClock(START)
        self.reports: list[tuple[str, Mapping[str, Any]]] = []
        self._open_store = open_store

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Store]:
        store = self._open_store(self.clock, lambda event, facts: self.reports.append((event, facts)))
        await store.open()
        try:
            yield store
        finally:
            await store.close()

    def play(self, *scenarios: Scenario, needs: Ability = Ability.NONE) -> None:
        """Run each scenario on the store, opened again for each."""
        if needs not in self._open_store(self.clock, lambda event, facts: None).abilities:
            pytest.skip(f"the store does not offer {needs}")

        async def all_of_them() -> None:
            for scenario in scenarios:
                async with self.opened() as store:
                    await scenario(store)

        asyncio.run(all_of_them())


def claim_until_empty(url: str, owner: str) -> list[str]:
    """Claim one by one until nothing is left, in its own process."""

    async def work() -> list[str]:
        store = open_by_url(url, clock=SystemClock())
        await store.open()
        got: list[str] = []
        while batch := (await store.claim(wish(f"{owner} {len(got)}", limit=1, owner=owner))).records:
            got += [record.id for record in batch]
        await store.close()
        return got

    return asyncio.run(work())


def pushing(id: str, entry: str = "e1", *, app: str = "shop", kind: str = "wake", **fields: Any) -> Push:
    """Make the write that adds an entry to the inbox of a run. Other fields are those of the entry."""
    given: dict[str, Any] = {"at": START + 2, "operation": f"push {entry}"}
    given |= {name: fields.pop(name) for name in ("operation", "cancellation", "why") if name in fields}
    added = InboxEntry(id=entry, kind=kind, **{"at": START, **fields})
    return Push(app=app, id=InvocationId(id), entry=added, **given)


def page(first: int, last: int | None = None, *, run: str = "a", app: str = "shop", **fields: Any) -> Page:
    """Make a page of a log."""
    given: dict[str, Any] = {"epoch": 1, "at": START + first, "events": b"\x90\x00\xff %d" % first}
    given |= {"operation": f"append {run} {first}"} | fields
    return Page(app=app, run=InvocationId(run), first=first, last=first if last is None else last, **given)


def delivery(*names: str, app: str = "shop") -> list[FieldReset]:
    """Make the change that empties the outboxes of these."""
    return [FieldReset(name="delivered", app=app, id=InvocationId(name)) for name in names]


def freeing(name: str, key: str, app: str = "shop") -> FieldReset:
    """Make the change that frees a key, if that invocation has it."""
    return FieldReset(name="key_freed", app=app, id=InvocationId(name), key=key)
