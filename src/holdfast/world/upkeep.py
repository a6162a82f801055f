"""Upkeep of a World: runs with a spent message end as failed, and runs without a message on its way get one.

The write that ends a message as failed names its receiver, so that no crash can come between the two. The receiver
writes `run_failed`, at once or by a sweep. The run's log refuses to have it twice. A sender may have died between an
event and its message: a run without a message gets one if its log has grown since its last delivery, or its wait is
due. The id of that message follows from the message before it, so two servers that look at once store the same one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from holdfast.crashpoints import crashpoint
from holdfast.errors import StoreError
from holdfast.fleet.services import Duty
from holdfast.model.changes import Applied, Change, Verdict, delivered
from holdfast.model.records import InvocationRecord
from holdfast.model.status import Status
from holdfast.runtime.engine import Engine, Outbox
from holdfast.runtime.outage import cancel_tasks
from holdfast.runtime.wait import get_readable, pages
from holdfast.store.contract import Filter, Order
from holdfast.telemetry.events import DutyFailed, PutOff
from holdfast.world import devl
from holdfast.world.delivery import Addresses
from holdfast.world.errors import WorldError
from holdfast.world.queue import OPEN, PREFIX, QUEUE, RUN, Messages, queue_for
from holdfast.world.rules import (
    DEFAULT_SPEC,
    RUN_FAILED,
    STRUCTURED_SPEC,
    LastDelivery,
    WorldRun,
    needs_delivery,
)
from holdfast.world.storage import WorldStorage

RECEIVER = "@world"  # in an outbox: the run whose message is spent
MAX_DELIVERIES_EXCEEDED = "MAX_DELIVERIES_EXCEEDED"
LOOK_SECONDS = 60.0
_OUTBOX_SECONDS = 5.0
_GRACE_SECONDS = 10.0  # for a sender between its event and its message
_LAST_SECONDS = 2.0
_PUT_OFF_SECONDS = 3600.0  # for a run that cannot get a message, unless it changes
_AT_ONCE = 100
_PAGE = 1000


class MessageOutbox(Outbox):
    """Writes the ends of messages. A failed message ends its run."""

    def __init__(self, messages: Messages) -> None:
        super().__init__(messages.engine.store)
        self._engine = messages.engine
        self._runs = messages.of_runs
        self._under_way: set[asyncio.Task[None]] = set()

    async def apply(self, wanted: Sequence[tuple[InvocationRecord, Change]]) -> Sequence[Verdict]:
        changes = [_addressed(record, change) for record, change in wanted]
        verdicts = await self._store.apply(changes)
        failed = [
            change.id
            for change, verdict in zip(changes, verdicts, strict=True)
            if change.outbox and isinstance(verdict, Applied)
        ]
        if failed:
            crashpoint("outbox.written")
            found = await get_readable(self._store, self._engine.app, failed)
            work = self._dispatch_soon([record for record in found if record is not None])
            self._under_way.add(task := asyncio.get_running_loop().create_task(work))
            task.add_done_callback(self._under_way.discard)
        return verdicts

    async def _dispatch_soon(self, records: Sequence[InvocationRecord]) -> None:
        try:
            await self.dispatch(records)
        except Exception as error:
            self._engine.telemetry.emit(DutyFailed("world", "end runs whose messages are spent", error, True))

    async def dispatch(self, records: Sequence[InvocationRecord]) -> None:
        """End the runs of these messages, then empty the outboxes."""
        for record in records:
            if RECEIVER in record.outbox:
                await self._end_run(record)
                await self._store.apply([delivered(record)])
                crashpoint("outbox.delivered")

    async def _end_run(self, record: InvocationRecord) -> None:
        run, storage = record.attributes.get(RUN, ""), self._runs.part(WorldStorage)
        if not run:
            return
        said = "" if record.error is None else f": {record.error.message}"
        try:
            await storage.events_create(
                run_id=run,
                event=await self._failure(run, f"the message {PREFIX}{record.id} could not be delivered{said}"),
                operation_id=f"spent {record.id}",
            )
        except WorldError as error:
            if error.status == 503:
                raise  # a later sweep does it
            # It has ended, or is not there.

    async def _failure(self, run_id: str, message: str) -> dict[str, Any]:
        """Return the event that ends a run whose message is spent."""
        run = await run_at(self._runs, run_id)
        spec = DEFAULT_SPEC if run is None else run.spec
        facts: dict[str, Any] = {"name": "WorkflowRuntimeError", "message": message}
        error: Any = facts | {"code": MAX_DELIVERIES_EXCEEDED}
        if spec >= STRUCTURED_SPEC:
            error = devl.dumps(facts)
        data = {"error": error, "errorCode": MAX_DELIVERIES_EXCEEDED}
        return {"eventType": RUN_FAILED, "specVersion": spec, "eventData": data}

    async def finish(self) -> None:
        if self._under_way:
            await asyncio.wait(set(self._under_way), timeout=_LAST_SECONDS)
        await cancel_tasks(*self._under_way)


def _addressed(record: InvocationRecord, change: Change) -> Change:
    if change.target is not Status.FAILED or not record.attributes.get(RUN):
        return change
    return replace(change, outbox=(*(change.outbox or ()), RECEIVER))


async def run_at(engine: Engine, run_id: str) -> WorldRun | None:
    """Return a run as its log has it; None if there is none. Raises `WorldError` if the log cannot be read."""
    try:
        return await engine.part(WorldStorage).run(run_id)
    except WorldError as error:
        if error.status != 404:
            raise
        return None


class Quiet(NamedTuple):
    """A run that needs no message until then, unless it changes."""

    changed_at: float
    until: float


class WorldUpkeep:
    """A feature of the runner of messages: see `holdfast.fleet.services.Feature`."""

    declares = ()

    def __init__(self, messages: Messages, outbox: MessageOutbox, addresses: Addresses) -> None:
        self._messages = messages
        self._outbox = outbox
        self._addresses = addresses
        self._storage = messages.of_runs.part(WorldStorage)
        self._store = messages.engine.store
        self._emit = messages.engine.telemetry.emit
        self._quiet: dict[str, Quiet] = {}

    async def register(self) -> None:
        """Do nothing: no code declares anything here."""

    def duties(self) -> Sequence[Duty]:
        return (
            Duty(name="spent messages", every_seconds=_OUTBOX_SECONDS, perform=self.dispatch),
            Duty(name="open runs", every_seconds=LOOK_SECONDS, perform=self.look),
            Duty(name="projections", every_seconds=LOOK_SECONDS, perform=self._storage.sweep),
        )

    async def dispatch(self) -> bool:
        """End the runs of spent messages whose server died before it did. Return True if there may be more."""
        app = self._messages.engine.app
        found = await self._store.find(app, Filter(), _AT_ONCE, order=Order.OUTBOX, set_aside=True)
        for record in found:
            try:
                await self._outbox.dispatch([record])
            except (StoreError, WorldError) as error:
                self._emit(PutOff("world", f"the end of the run of {PREFIX}{record.id}", str(error), error))
                return False
        return len(found) == _AT_ONCE

    async def look(self) -> int:
        """Send a message for each open run without one. Return how many."""
        on_the_way = await self._runs_with_message()
        count, cursor, quiet = 0, None, dict[str, Quiet]()
        while True:
            pagination = {"limit": _PAGE, "cursor": cursor}
            page = await self._storage.runs_list(
                status=["pending", "running"], pagination=pagination, resolve_data="none"
            )
            for run in page["data"]:
                id, changed_at = run["runId"], run["updatedAt"].timestamp()
                before = self._quiet.get(id)
                if id in on_the_way:
                    continue
                if before is not None and before.changed_at == changed_at and before.until > self._store.now():
                    quiet[id] = before
                elif (found := await self._send_again_if_possible(id, changed_at)) is None:
                    count += 1
                else:
                    quiet[id] = found
            cursor = page.get("cursor")
            if not page.get("hasMore") or cursor is None:
                self._quiet = quiet
                return count

    async def _runs_with_message(self) -> set[str]:
        found: set[str] = set()
        async for page in pages(self._store, self._messages.engine.app, Filter(statuses=OPEN)):
            found |= {record.attributes[RUN] for record in page if RUN in record.attributes}
        return found

    async def _send_again_if_possible(self, run_id: str, changed_at: float) -> Quiet | None:
        """Do as `_send_again`. A run that cannot get a message is logged, and the other runs get theirs."""
        try:
            return await self._send_again(run_id)
        except WorldError as error:
            if error.status == 503:
                raise
            self._emit(PutOff("world", f"a message for the run {run_id}", str(error), error))
            return Quiet(changed_at, self._store.now() + _PUT_OFF_SECONDS)

    async def _send_again(self, run_id: str) -> Quiet | None:
        """Send a message for a run that nothing else would continue; else return until when it needs none."""
        run, now = await run_at(self._messages.of_runs, run_id), self._store.now()
        if run is None:
            return Quiet(0.0, 0.0)
        if now - run.updated_at < _GRACE_SECONDS:
            return Quiet(run.updated_at, 0.0)
        last = await self._messages.last_ended(run_id)
        if not needs_delivery(run, None if last is None else _delivery(last), now):
            due = [wait.resume_at for wait in run.open_waits if wait.resume_at is not None]
            return Quiet(run.updated_at, min(due, default=float("inf")))
        address = await self._addresses.last()
        await self._messages.send(
            queue_name=queue_for(run.name, None if last is None else last.attributes.get(QUEUE)),
            message={"runId": run_id},
            operation_id=f"open {run_id} {run.tail} {'' if last is None else last.id}",
            base_url=None if address is None else str(address),
        )
        return None


def _delivery(record: InvocationRecord) -> LastDelivery:
    """Return when a message that has ended was last delivered."""
    began = (line.at for line in reversed(record.history) if line.status is Status.PENDING)
    return LastDelivery(next(began, record.changed_at), record.changed_at)
