"""The invocations of runs, for lists, triggers and waiters. The log is the truth, and an invocation follows it.

A run that waits for its first delivery is REGISTERED, one that has begun is SUSPENDED, and its end is that of an
invocation. Each change walks all its edges in one write. An invocation that lags behind its log is
repaired by the writer, a reader, or the sweep.
"""

from __future__ import annotations

import contextlib

import msgspec

from holdfast.codec import ErrorRecord
from holdfast.crashpoints import crashpoint
from holdfast.errors import CorruptRecord, StoreError
from holdfast.ids import InvocationId
from holdfast.model.changes import Applied, Change, ChangeFacts, apply_to, change_of
from holdfast.model.records import (
    ENDED,
    PLAIN,
    Cancellation,
    Hint,
    InvocationRecord,
    RunState,
    Terms,
    agreed_retention,
    registered,
)
from holdfast.model.status import FINAL, Status
from holdfast.runtime.engine import Engine
from holdfast.runtime.runs import is_world
from holdfast.runtime.wait import get_readable
from holdfast.store.contract import Filter
from holdfast.telemetry.events import DutyFailed
from holdfast.world import devl, rules
from holdfast.world.errors import conflict
from holdfast.world.hooks import WorldHooks
from holdfast.world.logs import RunLog, WarmLogs
from holdfast.world.records import QUEUE, task_of
from holdfast.world.rules import WorldEvent, WorldRun

ACTOR = "world/server"
STATUSES = {
    "pending": Status.REGISTERED,
    "running": Status.SUSPENDED,
    "completed": Status.SUCCESS,
    "failed": Status.FAILED,
    "cancelled": Status.CANCELLED,
}
OPEN = frozenset(Status) - FINAL
PROJECTED = rules.OF_RUNS
"""The events that change the invocation."""
_WAITING = frozenset({Status.REGISTERED, Status.REROUTED})
_RETURNING = frozenset({Status.SUSPENDED, Status.PARKED, Status.KILLED})
_TRIES = 20
_EMPTY_SECONDS = rules.PAST_SECONDS + rules.FUTURE_SECONDS  # then no client can create the run any more


class Projection:
    def __init__(self, engine: Engine, logs: WarmLogs, hooks: WorldHooks) -> None:
        self._engine = engine
        self._store = engine.store
        self._logs = logs
        self._hooks = hooks
        self._before: str | None = None
        self._looked: dict[str, int] = {}  # the tail of a log when the sweep last saw it

    # --- one run

    async def insert(self, log: RunLog, event: WorldEvent, operation: str) -> None:
        """Store the invocation of a new run; it may be there. Raises `WorldError` if the id belongs to another one."""
        engine = self._engine
        retention = agreed_retention({}, engine.settings.archive_retention_seconds)
        record = InvocationRecord(
            id=log.id,
            app=engine.app,
            task=task_of(str(event.facts["workflowName"])),
            arguments=engine.codec.encode_call((), {}, ()),
            created_at=event.at,
            due_at=event.at,
            queue=QUEUE,
            terms=PLAIN if retention is None else Terms(retention=retention),
            run=RunState(),
            attributes={key: str(value) for key, value in (event.facts.get("attributes") or {}).items()},
        )
        record = registered(record, operation=operation, at=event.at)
        (is_new,) = await self._store.insert([record])
        crashpoint("world.inserted")
        if is_new:
            log.record = record
            return
        log.record = await self._read(log.id)
        if log.record is not None and not is_world(log.record):
            raise conflict(f"the id of {log.run.id} belongs to an invocation of {log.record.task}")

    async def bring(self, log: RunLog) -> None:
        """Bring the invocation of a run to where its log is. Raises `StoreError`."""
        if not log.run.exists:
            return
        for _ in range(_TRIES):
            tail = log.tail
            if log.record is None:
                log.record = await self._read(log.id)
            record = log.record
            if record is None or not is_world(record) or record.status in FINAL:
                break
            change = change_to(record, log.run, self._engine)
            if change is None:
                log.projected = tail
                return
            (verdict,) = await self._engine.outbox.apply([(record, change)])
            crashpoint("world.projected")
            if not isinstance(verdict, Applied):
                log.record = None
                continue
            log.record = apply_to(change, record)
            if log.record.status in FINAL:
                self._engine.hub.send(Hint(ENDED, (log.id,), 1))
        log.projected = log.tail
        if log.run.is_ended and log.run.hooks:
            await self._hooks.end(log.id)

    async def bring_if_possible(self, log: RunLog) -> None:
        """Do the same; if the store cannot, a reader or the sweep will."""
        try:
            await self.bring(log)
        except StoreError as error:
            log.record = None
            self._engine.telemetry.emit(DutyFailed("world", f"update the invocation {log.id} after its log", error))

    async def _read(self, id: InvocationId) -> InvocationRecord | None:
        (record,) = await get_readable(self._store, self._engine.app, [id])
        return record

    # --- all runs

    async def sweep(self, limit: int) -> bool:
        """Look at the next open runs, whether they lag, and at the entries of hooks. Return True if there may be more
        runs in this round.
        """
        where = Filter(queues=frozenset({QUEUE}), statuses=OPEN, before_id=self._before)
        records = await self._store.find(self._engine.app, where, limit)
        has_more = len(records) == limit
        self._before = records[-1].id if has_more else None
        for record in records:
            try:
                if is_world(record):
                    await self._look(record)
            except CorruptRecord as error:
                self._engine.telemetry.emit(DutyFailed("world", f"read the log of {record.id}", error))
        if not has_more:
            await self._hooks.sweep(limit)
            self._looked = {id: tail for id, tail in self._looked.items() if len(self._looked) < _MOST_LOOKED}
        return has_more

    async def _look(self, record: InvocationRecord) -> None:
        pages = await self._store.read_log(self._engine.app, record.id, limit=1, latest=True)
        tail = pages[0].last if pages else 0
        if not tail:
            await self._drop_if_old(record)
        elif self._looked.get(record.id) != tail:
            log = await self._logs.fresh(record.id)
            log.record = record
            await self.bring(log)
            self._looked[record.id] = tail

    async def _drop_if_old(self, record: InvocationRecord) -> None:
        """End an invocation whose run was never created: its server died between the two writes."""
        now = self._store.now()
        if now - record.created_at <= _EMPTY_SECONDS or record.status is not Status.REGISTERED:
            return
        facts: ChangeFacts = {"operation": self._engine.ids.operation(), "at": now, "why": "its run was never created"}
        facts["cancellation"] = Cancellation(by="the World", at=now, until=now, reason=facts["why"], children=False)
        change = change_of("cancelled", record, (Status.CANCELLED,), frozenset({record.status}), **facts)
        await self._engine.outbox.apply([(record, change)])


_MOST_LOOKED = 100_000


def change_to(record: InvocationRecord, run: WorldRun, engine: Engine) -> Change | None:
    """Return the change that brings an invocation to where its run is; None if it is there."""
    target, sources = STATUSES[run.status], frozenset({record.status})
    is_there = record.status in _WAITING if run.status == "pending" else record.status is target
    if is_there and dict(record.attributes) == run.attributes:
        return None
    if target is Status.REGISTERED:
        target = Status.REROUTED  # where it waits as well, and can be brought to
    at = max(engine.store.now(), record.changed_at)
    facts: ChangeFacts = {"operation": engine.ids.operation(), "at": at, "attributes": run.attributes}
    facts["why"] = _why(run)
    if target is Status.CANCELLED:
        by = Cancellation(by="the World", at=at, until=at, reason=run.cancel_reason, children=False)
        facts |= {"cancellation": by, "why": str(by)}
        return change_of("cancelled", _ending(record, run), (target,), sources, **facts)
    before = (Status.REROUTED,) if record.status in _RETURNING else ()
    path = (*before, Status.PENDING, Status.RUNNING, target)
    facts |= {"actor": ACTOR, "never_began": record.attempt > 0}
    if target is Status.REROUTED:
        path, facts["never_began"] = (*before, Status.PENDING, target), False
    if target is Status.SUCCESS:
        facts["result"] = run.output or engine.codec.encode(None)
    elif target is Status.FAILED:
        facts["error"] = _error(run, engine)
    return change_of(f"world_{run.status}", _ending(record, run), path, sources, **facts)


def _ending(record: InvocationRecord, run: WorldRun) -> InvocationRecord:
    """Return the record as its change needs it: it says that there are hooks, which end with the run."""
    if not run.hooks or record.run is None:
        return record
    return msgspec.structs.replace(record, run=msgspec.structs.replace(record.run, has_hooks=True))


def _why(run: WorldRun) -> str:
    if run.is_ended:
        return run.cancel_reason
    return "its workflow runs when a message is delivered"


def _error(run: WorldRun, engine: Engine) -> ErrorRecord:
    """Return the error of a failed run, as far as it can be read."""
    name, message, stack = run.error_code or "WorkflowFailed", "", run.stack
    try:
        value = engine.codec.decode(run.error, describe=True) if run.error else None
    except Exception:
        value = None
    if isinstance(value, bytes):
        with contextlib.suppress(ValueError):
            value = devl.loads(value)
    if isinstance(value, dict):
        message, stack = str(value.get("message", "")), str(value.get("stack") or stack)
        name = str(value.get("name") or name)
    elif value is not None and not isinstance(value, bytes):
        message = str(value)
    return ErrorRecord(type_name=f"workflow:{name}", message=message, traceback=stack, data=None)
