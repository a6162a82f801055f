"""Requests to a World, checked: what is no request raises a `WorldError`, and nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from holdfast.codec import Codec, Payload, SizeLimits
from holdfast.errors import NotEncodable
from holdfast.ids import InvocationId
from holdfast.model.decoding import EARLIEST, LATEST
from holdfast.world import rules
from holdfast.world.errors import WorldError, bad_request, run_not_found, too_large
from holdfast.world.records import invocation_of, made_at
from holdfast.world.rules import WorldEvent

Fields = Mapping[str, Any]

MAX_LIMIT, USUAL_LIMIT = 1000, 100
MAX_FACTS_BYTES = 256 * 1024

_TEXTS: Mapping[str, int] = {
    "deploymentId": rules.MAX_NAME,
    "workflowName": rules.MAX_NAME,
    "stepName": rules.MAX_NAME,
    "token": rules.MAX_TOKEN,
    "errorCode": rules.MAX_ID,
    "cancelReason": rules.MAX_REASON,
    "encryptionPublicKey": rules.MAX_NAME,
}
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    rules.RUN_CREATED: ("deploymentId", "workflowName"),
    rules.STEP_CREATED: ("stepName",),
    rules.HOOK_CREATED: ("token",),
    rules.WAIT_CREATED: ("resumeAt",),
    rules.ATTR_SET: ("changes",),
}
_FLAGS = ("isWebhook", "isSystem")


class Wanted(msgspec.Struct, frozen=True):
    """An event that is asked for. Its time is still 0. `payloads` have to be kept before it is written."""

    event: WorldEvent
    payloads: tuple[Payload, ...]
    with_data: bool
    params: Fields


class Paging(msgspec.Struct, frozen=True):
    limit: int
    cursor: str
    is_ascending: bool


def valid_run(run: object) -> InvocationId:
    """Return the invocation of a run that is to be there."""
    if run is None:
        raise bad_request("runId is required")
    if not isinstance(run, str):
        raise bad_request(f"runId={run!r:.80}: expected a text")
    id = invocation_of(run)
    if id is None:
        raise run_not_found(run)
    return id


def valid_new_run(run: str) -> InvocationId:
    """Return the invocation of a run whose id a client has made: it has to be a ULID."""
    id = invocation_of(run)
    if id is None:
        raise bad_request(f"runId={run!r:.80}: expected 'wrun_' and a ULID")
    return id


def why_not_of_now(run: str, id: InvocationId, now: float) -> WorldError | None:
    """Return why a run with this id cannot be created now; None if it can."""
    age = now - made_at(id)
    if -rules.FUTURE_SECONDS <= age <= rules.PAST_SECONDS:
        return None
    return bad_request(
        f"runId={run!r:.80}: its time is {age:.0f} s before now; a day before is allowed, or 5 min after"
    )


def with_data(resolve: object) -> bool:
    if resolve not in ("all", "none", None):
        raise bad_request(f"resolveData={resolve!r:.40}: expected 'all' or 'none'")
    return resolve != "none"


def text(name: str, value: object, longest: int) -> str:
    """Return a text that is required."""
    if not isinstance(value, str) or not 0 < len(value) <= longest:
        raise bad_request(f"{name}={value!r:.80}: expected a text of 1 to {longest:,} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise bad_request(f"{name}={value!r:.80}: it contains a lone surrogate, which UTF-8 cannot hold") from None
    return value


def fields(name: str, value: object) -> Fields:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise bad_request(f"{name}={value!r:.80}: expected an object")
    return value


def paging(given: object, *, ascending: bool = False, usual: int = USUAL_LIMIT) -> Paging:
    """Return checked pagination."""
    pagination = fields("pagination", given)
    limit, cursor, order = (pagination.get(name) for name in ("limit", "cursor", "sortOrder"))
    limit = usual if limit is None else limit
    if type(limit) is not int or limit < 1:
        raise bad_request(f"limit={limit!r:.40}: expected a whole number from 1 to {MAX_LIMIT:,}")
    if order not in (None, "asc", "desc"):
        raise bad_request(f"sortOrder={order!r:.40}: expected 'asc' or 'desc'")
    if cursor is not None and not isinstance(cursor, str):
        raise bad_request(f"cursor={cursor!r:.80}: expected a text")
    return Paging(min(limit, MAX_LIMIT), cursor or "", ascending if order is None else order == "asc")


def position(cursor: str) -> int:
    """Return the position that a cursor names."""
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 17):
        raise bad_request(f"cursor={cursor!r:.80}: expected a cursor that this World has given")
    return int(cursor)


def moment(name: str, value: object) -> float:
    """Return a time in seconds: given as a datetime, as milliseconds, or as a text in ISO 8601."""
    seconds: float | None = None
    try:
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            seconds = (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        elif isinstance(value, int | float) and not isinstance(value, bool):
            seconds = value / 1000
    except (ValueError, OverflowError):
        pass
    if seconds is None or not EARLIEST <= seconds <= LATEST:
        raise bad_request(f"{name}={value!r:.80}: expected a time")
    return round(seconds, 3)


def wanted(event: object, params: object, codec: Codec, limits: SizeLimits) -> Wanted:
    """Return a checked event. Raises `WorldError`."""
    if event is None:
        raise bad_request("event is required")
    event, params = fields("event", event), fields("params", params)
    kind = event.get("eventType")
    if not isinstance(kind, str) or kind not in rules.CREATABLE:
        raise bad_request(f"eventType={kind!r:.80}: expected one of {', '.join(sorted(rules.CREATABLE))}")
    call = _call(kind, event.get("correlationId"))
    details = dict(fields("eventData", event.get("eventData")))
    payload_field, due_field = rules.PAYLOAD_FIELDS.get(kind), rules.DUE_FIELDS.get(kind)
    has_payload = payload_field is not None and payload_field in details
    payload = details.pop(payload_field, None) if payload_field else None
    facts = {name: value for name, value in details.items() if value is not None}
    _check_facts(kind, facts)
    _check_place(params)
    due = facts.pop(due_field, None) if due_field else None
    resume = params.get("resumeId") if kind == rules.HOOK_RECEIVED else None
    occurred = params.get("occurredAt")
    data, payloads = _packed(payload, codec, limits) if has_payload else (b"", ())
    checked = WorldEvent(
        type=kind,
        at=0.0,
        call=call,
        spec=_spec(kind, event.get("specVersion")),
        facts=_plain(facts),
        data=data,
        due=None if due is None else moment(str(due_field), due),
        occurred_at=None if occurred is None else moment("occurredAt", occurred),
        resume="" if resume is None else text("resumeId", resume, rules.MAX_ID),
    )
    return Wanted(checked, payloads, with_data(params.get("resolveData")), params)


def _call(kind: str, call: object) -> str:
    if call is None and kind in rules.OF_RUNS:
        return ""
    if call is None:
        raise bad_request(f"correlationId is required for {kind}")
    return text("correlationId", call, rules.MAX_ID)


def _spec(kind: str, spec: object) -> int:
    if spec is None:
        return rules.LEGACY_SPEC if kind == rules.RUN_CREATED else 0
    if type(spec) is not int or not 0 <= spec <= 1_000_000:
        raise bad_request(f"specVersion={spec!r:.40}: expected a whole number")
    return spec


def _check_place(params: Fields) -> None:
    """Check what the writer knows of the log: the answer depends on it, and comes after the event is written."""
    since, count = params.get("sinceCursor"), params.get("eventCount")
    if since is not None and since != "":
        position(text("sinceCursor", since, rules.MAX_ID))
    if count is not None and (type(count) is not int or count < 0):
        raise bad_request(f"eventCount={count!r:.40}: expected a whole number")


def _check_facts(kind: str, facts: Fields) -> None:
    for name in _REQUIRED.get(kind, ()):
        if name not in facts:
            raise bad_request(f"eventData.{name} is required for {kind}")
    for name, longest in _TEXTS.items():
        if name in facts:
            text(f"eventData.{name}", facts[name], longest)
    for name in _FLAGS:
        if name in facts and not isinstance(facts[name], bool):
            raise bad_request(f"eventData.{name}={facts[name]!r:.40}: expected true or false")
    fields("eventData.executionContext", facts.get("executionContext"))
    fields("eventData.attributes", facts.get("attributes"))
    if kind == rules.ATTR_SET:
        changes = facts["changes"]
        if not isinstance(changes, Sequence) or isinstance(changes, str | bytes):
            raise bad_request(f"eventData.changes={changes!r:.80}: expected a list")
        for change in changes:
            if "key" not in fields("eventData.changes", change):
                raise bad_request(f"eventData.changes: {change!r:.80} has no key")


def _plain(facts: Fields) -> dict[str, Any]:
    """Return facts as they will be read again. Raises `WorldError` for what cannot be stored."""
    try:
        encoded = msgspec.msgpack.encode(facts)
        if len(encoded) > MAX_FACTS_BYTES:
            raise too_large(
                f"eventData has {len(encoded):,} bytes besides its payload; {MAX_FACTS_BYTES:,} are allowed"
            )
        plain: dict[str, Any] = msgspec.msgpack.decode(encoded)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise bad_request(f"eventData cannot be stored: {error}") from error
    return plain


def _packed(value: object, codec: Codec, limits: SizeLimits) -> tuple[bytes, tuple[Payload, ...]]:
    if isinstance(value, bytes) and len(value) > limits.max_bytes:
        raise too_large(f"a payload has {len(value):,} bytes; payload_limit allows {limits.max_bytes:,}")
    try:
        packed = codec.pack(value, limits, at="payload")
    except (NotEncodable, RecursionError) as error:
        raise bad_request(f"eventData cannot be stored: {error}") from error
    return packed.data, packed.payloads
