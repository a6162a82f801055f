"""Payloads that Python gives to hooks of World runs: ``app.resume_hook`` serves both."""

from __future__ import annotations

from typing import Any

from holdfast.errors import PayloadDoesNotFit, StoreError, StoreUnavailable
from holdfast.ids import InvocationId, derived_id
from holdfast.model.changes import APPLIED, MISSING, Verdict
from holdfast.runtime.engine import Engine
from holdfast.world import devl
from holdfast.world.delivery import Addresses
from holdfast.world.errors import WorldError
from holdfast.world.queue import Messages, queue_for
from holdfast.world.records import run_name
from holdfast.world.rules import HOOK_RECEIVED, LEGACY_SPEC
from holdfast.world.storage import WorldStorage


async def give_payload(engine: Engine, id: InvocationId, hook: str, payload: Any, resume_id: str) -> Verdict:
    """Write `hook_received`, then send the message that wakes the run. See `holdfast.runtime.engine.ReceivePayload`.

    Raises `PayloadDoesNotFit`. After a crash between the two, upkeep sends the message.
    """
    storage, run_id = engine.part(WorldStorage), run_name(id)
    operation = derived_id("resume", run_id, hook, resume_id)
    try:
        run = await storage.run(run_id)
        data = {"payload": payload if run.spec <= LEGACY_SPEC else devl.dumps(payload)}
        event = {"eventType": HOOK_RECEIVED, "correlationId": hook, "specVersion": run.spec, "eventData": data}
        params = {"resumeId": resume_id}
        await storage.events_create(run_id=run_id, event=event, params=params, operation_id=operation)
        address = await engine.part(Addresses).last()
        await engine.part(Messages).send(
            queue_name=queue_for(run.name),
            message={"runId": run_id},
            operation_id=operation,
            base_url=None if address is None else str(address),
        )
    except WorldError as error:
        if error.status == 503:
            raise StoreUnavailable(error.message) from error
        if error.status in (404, 409, 410):
            return MISSING
        raise StoreError(error.message) from error
    except ValueError as error:
        raise PayloadDoesNotFit(str(error), path="payload") from error
    return APPLIED
