"""Cancel and rerun World runs, as other runs. A cancel is an event of the log; a rerun is a new run and a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.codec import references
from holdfast.errors import PayloadLost, StoreError, UsageError
from holdfast.ids import derived_id, is_id
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL, Status
from holdfast.runtime.engine import Engine
from holdfast.runtime.foreign import Message, MessageContent
from holdfast.runtime.runs import is_world
from holdfast.store.contract import Filter
from holdfast.world import rules, wire
from holdfast.world.errors import WorldError
from holdfast.world.looking import send_to
from holdfast.world.queue import OPEN, Messages, as_message, world_app
from holdfast.world.records import run_name
from holdfast.world.storage import WorldStorage

RERUN_OF, REQUEST = "$rerunOf", "$rerunRequest"
_TIME_CHARACTERS = 10  # of an id


class WorldRuns:
    """See `holdfast.runtime.foreign.ForeignRuns`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def app(self) -> str:
        return world_app(self._engine.app)

    def has(self, record: InvocationRecord) -> bool:
        return is_world(record)

    def name_of(self, record: InvocationRecord) -> str:
        return run_name(record.id)

    async def cancel(self, record: InvocationRecord, *, by: str, reason: str) -> InvocationRecord:
        """End a run, unless it has ended. Return its invocation then."""
        said = f"{reason} (by {by})" if reason else f"by {by}"
        event = {"eventType": rules.RUN_CANCELLED, "eventData": {"cancelReason": said[: rules.MAX_REASON]}}
        if record.status not in FINAL:
            try:
                await self._engine.part(WorldStorage).events_create(run_id=run_name(record.id), event=event)
            except WorldError as error:
                if error.status != 409:
                    raise StoreError(f"{record.task} {record.id} could not be cancelled: {error.message}") from error
        (found,) = await self._engine.store.get(record.app, [record.id])
        return record if found is None else found

    async def rerun(self, record: InvocationRecord, request: str) -> str:
        """Start a new run with the same input; return the id of its invocation. Idempotent, by the request. Raises
        `UsageError`, `PayloadLost`.
        """
        engine, storage = self._engine, self._engine.part(WorldStorage)
        try:
            run = await storage.run(run_name(record.id))
            if missing := [each for each in references(run.input) if not await self._is_there(each.digest)]:
                raise PayloadLost(f"its input is gone: the payload {missing[0].digest}")
            whole = await storage.runs_get(run_id=run.id)
            derived = derived_id("world rerun", engine.app, record.id, request)
            attributes = {RERUN_OF: run.id, REQUEST: derived}
            found = await engine.store.find(engine.app, Filter(attributes=frozenset(attributes.items())), 1)
            # The id of a new run has to be of about now, and a request need not say when it was made.
            when = request if is_id(request) else engine.ids.new()
            id = found[0].id if found else when[:_TIME_CHARACTERS] + derived[_TIME_CHARACTERS:]
            data: dict[str, Any] = {
                "deploymentId": run.deployment,
                "workflowName": run.name,
                "input": whole.get("input"),
                "executionContext": run.context,
                "attributes": attributes,
                "allowReservedAttributes": True,
            }
            event = {"eventType": rules.RUN_CREATED, "specVersion": run.spec, "eventData": data}
            operation = f"rerun {record.id} {request}"[: rules.MAX_ID]
            try:
                await storage.events_create(run_id=run_name(id), event=event, operation_id=operation)
            except WorldError as error:
                if error.status != 409:
                    raise
            await send_to(engine, await storage.run(run_name(id)), operation)
        except WorldError as error:
            raise UsageError(error.message) from error
        return id

    # --- messages

    async def messages(
        self, *, run: str | None, ended: bool, limit: int, before: str | None
    ) -> tuple[Sequence[Message], str | None]:
        """Return messages, those that wait or are under way; with `ended`, and of a run, ended ones too."""
        statuses = frozenset[Status]() if ended or run else OPEN
        found = await self._engine.part(Messages).find(run=run, statuses=statuses, limit=limit, before=before)
        after = min(each.id for each in found) if found and len(found) == limit else None
        return [as_message(each) for each in found], after

    async def message(self, id: str) -> tuple[Message, MessageContent] | None:
        messages = self._engine.part(Messages)
        record = await messages.get(id)
        if record is None:
            return None
        call = await messages.content(record)
        plain = msgspec.json.decode(call["body"]) if call else None
        return as_message(record), MessageContent(wire.decode(call["body"]) if call else None, plain)

    async def redeliver(self, id: str, request: str) -> str:
        messages = self._engine.part(Messages)
        record = await messages.get(id)
        if record is None:
            raise UsageError(f"the message {id:.80} is not stored any more")
        try:
            return await messages.redeliver(record, request)
        except WorldError as error:
            raise UsageError(error.message) from error

    async def _is_there(self, digest: str) -> bool:
        return (await self._engine.store.keep_payloads(self._engine.app, [digest]))[0]
