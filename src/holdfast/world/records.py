"""What a World stores, and what it answers: ids, pages of events, and the wire forms of entities as plain dicts.

A run is an invocation: the run `wrun_01JD…` is the invocation `01jd…`, and its log is that of the invocation. An event
id is the position in that log, so ids are dense. Payloads in wire forms are `Encoded` until they are fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from holdfast.errors import CorruptRecord
from holdfast.ids import ALPHABET, InvocationId, is_id
from holdfast.model.log import Page
from holdfast.model.records import digests_in
from holdfast.runtime.runs import WORLD_QUEUE, WORLD_TASK
from holdfast.world.rules import (
    DUE_FIELDS,
    KNOWN,
    PAYLOAD_FIELDS,
    STRUCTURED_SPEC,
    PlacedEvent,
    WorldEvent,
    WorldHook,
    WorldRun,
    WorldStep,
    WorldWait,
)

Answer = dict[str, Any]

QUEUE, TASK = WORLD_QUEUE, WORLD_TASK
_RUN, _EVENT, _DIGITS = "wrun_", "evnt_", 26
_NOT_IN_NAMES = str.maketrans(dict.fromkeys("|, \0\n\r\t", "_"))
_MAX_TASK = 190


# --- ids


def run_name(id: str) -> str:
    """Return the run id of an invocation."""
    return _RUN + id.upper()


def invocation_of(run: object) -> InvocationId | None:
    """Return the invocation of a run id; None if it is no run id."""
    if not isinstance(run, str) or not run.startswith(_RUN):
        return None
    id = run[len(_RUN) :].lower()
    return InvocationId(id) if is_id(id) and id[0] in "01234567" and run == run_name(id) else None


def made_at(id: InvocationId) -> float:
    """Return when an id was made, in seconds."""
    number = 0
    for character in id[:10]:
        number = number * 32 + ALPHABET.index(character)
    return number / 1000


def event_name(position: int) -> str:
    return f"{_EVENT}{position:0{_DIGITS}d}"


def position_of(event: object) -> int | None:
    """Return the position that an event id names; None if it is no event id."""
    if not isinstance(event, str) or not event.startswith(_EVENT):
        return None
    digits = event[len(_EVENT) :]
    return int(digits) if len(digits) == _DIGITS and digits.isascii() and digits.isdigit() else None


def task_of(workflow: str) -> str:
    """Return the task of a workflow's runs: by its short name, ``world:checkout``."""
    return TASK + workflow.rpartition("//")[2].translate(_NOT_IN_NAMES)[:_MAX_TASK]


def time_of(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(round(seconds, 3), UTC)


# --- pages

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[WorldEvent])


def encode(events: Sequence[WorldEvent]) -> bytes:
    return _encoder.encode(events)


def decode(page: Page) -> list[WorldEvent]:
    """Return the events of a page. Raises `CorruptRecord` for damage, and for an event of a newer version."""
    where = f"the log of {run_name(page.run)}, position {page.first},"
    try:
        events = _decoder.decode(page.events)
    except (msgspec.DecodeError, RecursionError, MemoryError) as error:
        raise _damaged(page, f"{where} cannot be read: {error}") from error
    if len(events) != page.last - page.first + 1:
        raise _damaged(page, f"{where} is to go to {page.last}, and has {len(events)} events")
    for event in events:
        if event.type not in KNOWN:
            raise _damaged(page, f"{where} has an event '{event.type:.40}', which this version does not know")
    return events


def _damaged(page: Page, message: str) -> CorruptRecord:
    return CorruptRecord(message, kind="page", id=page.run)


def payloads_of(events: Iterable[WorldEvent]) -> tuple[str, ...]:
    """Return the digests that these events refer to."""
    return digests_in(*[event.data for event in events])


def size_of(event: WorldEvent) -> int:
    """Return about how many bytes an event takes in memory."""
    return len(event.data) + sum(len(str(fact)) for fact in event.facts.values()) + 500


# --- wire forms


class Encoded(msgspec.Struct, frozen=True):
    """A payload in an answer that is not fetched yet. `stack` and `code`: it is an error of the old form."""

    data: bytes
    is_error: bool = False
    stack: str = ""
    code: str = ""


def _given(fields: Mapping[str, Any]) -> Answer:
    return {name: value for name, value in fields.items() if value is not None}


def _payload(data: bytes, with_data: bool) -> Encoded | None:
    return Encoded(data) if data and with_data else None


def _error(data: bytes, with_data: bool, spec: int, stack: str, code: str = "") -> Encoded | None:
    if not (data and with_data):
        return None
    return Encoded(data, is_error=spec < STRUCTURED_SPEC, stack=stack, code=code)


def run_fields(run: WorldRun, with_data: bool = True) -> Answer:
    """Return the wire form of a run."""
    return _given(
        {
            "runId": run.id,
            "status": run.status,
            "deploymentId": run.deployment,
            "workflowName": run.name,
            "specVersion": run.spec,
            "executionContext": run.context,
            "input": _payload(run.input, with_data),
            "output": _payload(run.output, with_data),
            "error": _error(run.error, with_data, run.spec, run.stack, run.error_code),
            "errorCode": run.error_code or None,
            "attributes": dict(run.attributes),
            "encryptionPublicKey": run.public_key or None,
            "startedAt": time_of(run.started_at),
            "completedAt": time_of(run.completed_at),
            "createdAt": time_of(run.created_at),
            "updatedAt": time_of(run.updated_at),
        }
    )


def step_fields(run: WorldRun, step: WorldStep, with_data: bool = True) -> Answer:
    return _given(
        {
            "runId": run.id,
            "stepId": step.id,
            "stepName": step.name,
            "status": step.status,
            "input": _payload(step.input, with_data),
            "output": _payload(step.output, with_data),
            "error": _error(step.error, with_data, run.spec, step.stack),
            "attempt": step.attempt,
            "startedAt": time_of(step.started_at),
            "completedAt": time_of(step.completed_at),
            "createdAt": time_of(step.created_at),
            "updatedAt": time_of(step.updated_at),
            "retryAfter": time_of(step.retry_after),
            "specVersion": step.spec or None,
        }
    )


def hook_fields(run: WorldRun, hook: WorldHook, app: str, with_data: bool = True) -> Answer:
    """Return the wire form of a hook. Its `resumeContext` is what a client needs of the run to resume it."""
    context = run.context if isinstance(run.context, dict) else {}
    carried = {name: context.get(name) for name in ("workflowCoreVersion", "traceCarrier", "hookResumeInputVersion")}
    resume = {"deploymentId": run.deployment, "workflowName": run.name, "runSpecVersion": run.spec, **carried}
    return _given(
        {
            "runId": run.id,
            "hookId": hook.id,
            "token": hook.token,
            "ownerId": "holdfast",
            "projectId": app,
            "environment": run.deployment,
            "metadata": _payload(hook.metadata, with_data),
            "createdAt": time_of(hook.created_at),
            "specVersion": hook.spec or None,
            "isWebhook": hook.is_webhook,
            "isSystem": hook.is_system,
            "resumeContext": _given({**resume, "encryptionPublicKey": run.public_key or None}),
        }
    )


def wait_fields(run: WorldRun, wait: WorldWait) -> Answer:
    return _given(
        {
            "waitId": wait.id,
            "runId": run.id,
            "status": "waiting" if wait.completed_at is None else "completed",
            "resumeAt": time_of(wait.resume_at),
            "completedAt": time_of(wait.completed_at),
            "createdAt": time_of(wait.created_at),
            "updatedAt": time_of(wait.updated_at),
            "specVersion": wait.spec or None,
        }
    )


def event_fields(run: str, placed: PlacedEvent, with_data: bool = True) -> Answer:
    """Return the wire form of an event of the run with this run id."""
    event = placed.event
    details: Answer = dict(event.facts)
    if event.due is not None:
        details[DUE_FIELDS[event.type]] = time_of(event.due)
    if event.data and with_data:
        details[PAYLOAD_FIELDS[event.type]] = Encoded(event.data)
    return _given(
        {
            "eventId": event_name(placed.position),
            "runId": run,
            "eventType": event.type,
            "correlationId": event.call or None,
            "eventData": details or None,
            "specVersion": event.spec or None,
            "createdAt": time_of(event.at),
            "occurredAt": time_of(event.occurred_at),
            "resumeId": event.resume or None,
        }
    )


def error_fields(value: Any, stack: str, code: str) -> Any:
    """Return an error as cores before spec version 5 read it: message, stack and code. Bytes stay as they are."""
    if isinstance(value, bytes):
        return value
    given = value if isinstance(value, dict) else {"message": value if isinstance(value, str) else str(value)}
    message = given.get("message")
    message = message if isinstance(message, str) else str(message if message is not None else value)
    return _given({"message": message, "stack": given.get("stack") or stack or None, "code": code or given.get("code")})
