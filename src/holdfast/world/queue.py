"""The queue of a World: a message is an invocation of the hidden task `deliver`, in its own app.

So a message has what each invocation has: a key, a due time, attempts that count crashes, an owner with a heartbeat,
recovery, retention and a history. Its key is free again once it has ended. Its attributes say which run and queue it is
of, and how its deliveries went; they are part of the write that puts it off.

The id of a message follows from the operation id of its sender. If a sender repeats itself, since its answer was lost,
the same message is found.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any

from holdfast.codec import references
from holdfast.errors import NotDecodable, PayloadLost, StoreFull, StoreUnavailable
from holdfast.ids import InvocationId, derived_id, is_id
from holdfast.model.crashes import crashes_in_a_row
from holdfast.model.records import OUTCOMES, InvocationRecord, Terms, agreed_retention, first_history
from holdfast.model.status import FINAL, OWNED, Status
from holdfast.runtime.engine import Engine
from holdfast.runtime.foreign import Message
from holdfast.runtime.runs import WORLD_APP
from holdfast.store.contract import Filter, Order
from holdfast.world import wire
from holdfast.world.errors import WORLD_ERROR, WorldError, bad_request
from holdfast.world.http_client import HttpAddress, address_of, is_header
from holdfast.world.records import invocation_of

TASK, LANE_QUEUE = "holdfast:deliver", "world"
PREFIX = "msg_"
RUN, QUEUE, FAILURES, REFUSALS, HTTP_STATUS, SENT_TO = "run", "queue", "failures", "refusals", "http-status", "sent-to"
_CRASHES = 50  # in a row; more than there are deliveries, so it is these that end a message
_QUEUE_NAME = re.compile(r"__(?:[A-Za-z0-9-]+_)?wkf_(?P<kind>workflow|step)_(?P<name>.+)", re.DOTALL)
_RESERVED = re.compile(r"(?i)x-vqs-.*|host|connection|content-length|content-type|transfer-encoding|authorization")
_LONGEST_KEY, _LONGEST_QUEUE, _MAX_HEADERS = 900, 1500, 50
_LONGEST_DELAY_SECONDS = 3_153_600_000.0
_TIME_CHARACTERS = 10  # of an id
_ULID = re.compile(r"[0-7][0-9a-hjkmnp-tv-z]{25}")
OPEN = frozenset(Status) - FINAL
_AT_ONCE = 500


class Messages:
    """A part of the engine of the app with the runs: ``engine.part(Messages)``."""

    def __init__(self, engine: Engine) -> None:
        settings = dataclasses.replace(engine.settings, max_crash_recoveries=_CRASHES)
        self.of_runs = engine
        self.engine = engine.beside(engine.app + WORLD_APP, settings)
        self._store = engine.store

    # --- sending

    async def send(
        self,
        *,
        queue_name: str,
        message: Any,
        operation_id: str,
        idempotency_key: str | None = None,
        delay_seconds: float | None = None,
        headers: Mapping[str, str] | None = None,
        base_url: str | None = None,
    ) -> dict[str, Any]:
        """Store a message; return ``{"messageId": …}``. With an idempotency key, return the id of the message that has
        the key, as long as that has not ended.
        """
        delay = _delay(delay_seconds)
        call = {
            "queue": _queue_name(queue_name),
            "body": wire.encode(message, keeps_null=True),
            "headers": _headers(headers),
            "base_url": None if base_url is None else str(valid_address(base_url)),
        }
        id = self._id(_operation(operation_id))
        key = None if idempotency_key is None else _key(queue_name, idempotency_key)
        stored = await self._store_call(call, id=id, key=key, delay=delay, run=run_of(message), operation=operation_id)
        return {"messageId": PREFIX + stored}

    async def _store_call(
        self, call: dict[str, Any], *, id: InvocationId, key: str | None, delay: float, run: str, operation: str
    ) -> InvocationId:
        """Store the message unless it is there. Return its id, or the id of the message that has its key."""
        engine, now = self.engine, self._store.now()
        packed = engine.codec.pack_call((), call, (), engine.limits)
        record = InvocationRecord(
            id=id,
            app=engine.app,
            task=TASK,
            arguments=packed.data,
            queue=LANE_QUEUE,
            key=key,
            terms=self._terms,
            attributes={QUEUE: call["queue"]} | ({RUN: run} if run else {}),
            created_at=now,
            changed_at=now,
            due_at=engine.submitter.due_after(delay, now),
            history=first_history(derived_id("world send", engine.app, operation)[:16], now),
        )
        try:
            (holder,) = await engine.submitter.submit([record], list(packed.payloads))
        except StoreUnavailable as error:
            raise WorldError(WORLD_ERROR, 503, f"the message may not be stored: {error}") from error
        except StoreFull as error:
            raise WorldError(WORLD_ERROR, 503, f"the message is not stored: {error}") from error
        return record.id if holder is None else holder.id

    @property
    def _terms(self) -> Terms:
        kept = self.of_runs.settings.world_message_retention_seconds
        return Terms(key_seconds=0.0, retention=agreed_retention(dict.fromkeys(OUTCOMES, kept), kept))

    def _id(self, operation: str) -> InvocationId:
        """Return the id that follows from an operation; it sorts by time if the operation id is a ULID."""
        derived = derived_id("world message", self.engine.app, operation)
        low = operation.lower()
        return InvocationId(low[:_TIME_CHARACTERS] + derived[_TIME_CHARACTERS:]) if _ULID.fullmatch(low) else derived

    # --- looking

    async def get(self, message_id: str) -> InvocationRecord | None:
        id = message_id.removeprefix(PREFIX).lower()
        if not is_id(id):
            return None
        (found,) = await self._store.get(self.engine.app, [InvocationId(id)])
        return found

    async def find(
        self,
        *,
        run: str | None = None,
        statuses: frozenset[Status] = frozenset(),
        limit: int = _AT_ONCE,
        before: str | None = None,
    ) -> list[InvocationRecord]:
        """Return messages, newest first, as far as one page goes. The next page has the ids `before` its lowest one."""
        attributes = frozenset({(RUN, run)}) if run is not None else frozenset()
        where = Filter(statuses=statuses, attributes=attributes, before_id=before)  # the app has no other task
        found = await self._store.find(self.engine.app, where, limit)
        return sorted(found, key=lambda record: (record.created_at, record.id), reverse=True)

    async def last_ended(self, run: str) -> InvocationRecord | None:
        """Return the message of a run that has ended last."""
        where = Filter(attributes=frozenset({(RUN, run)}))
        found = await self._store.find(self.engine.app, where, 1, order=Order.LATEST_END)
        return found[0] if found else None

    async def content(self, record: InvocationRecord) -> dict[str, Any]:
        """Return the delivery: `queue`, `body`, `headers`, `base_url`; empty if it cannot be read any more."""
        try:
            payloads = await self.engine.payloads.fetch(references(record.arguments))
            _, call = self.engine.codec.decode_call(record.arguments, payloads)
        except (NotDecodable, PayloadLost):
            return {}
        return call

    # --- delivering again

    async def redeliver(self, record: InvocationRecord, request: str) -> str:
        """Have a message delivered at once; return the id of the message that is. An ended message is sent once more. A
        waiting message is replaced, and its attempts count from 1. Idempotent, by the request.
        """
        if record.status in OWNED:
            raise bad_request(f"{PREFIX}{record.id} is being delivered; if that fails, it is tried again by itself")
        if not (call := await self.content(record)):
            raise bad_request(f"{PREFIX}{record.id} cannot be delivered again: its content cannot be read any more")
        operation = f"again {record.id} {request}"
        made = derived_id("world message", self.engine.app, operation)
        id = InvocationId(request[:_TIME_CHARACTERS] + made[_TIME_CHARACTERS:]) if is_id(request) else made
        run = record.attributes.get(RUN, "")
        await self._store_call(call, id=id, key=None, delay=0.0, run=run, operation=operation)
        if record.status not in FINAL:
            why = f"delivered again as {PREFIX}{id}"
            await self.engine.canceller.cancel([record.id], by="redeliver", reason=why, children=False)
        return PREFIX + id


def run_of(message: Any) -> str:
    """Return the run of a message; empty if it has none."""
    if isinstance(message, dict):
        for name in ("runId", "workflowRunId"):
            if isinstance(found := message.get(name), str) and 0 < len(found) <= 200 and found.isprintable():
                return found
    return ""


def route_of(queue: str) -> str:
    """Return the last part of the path of deliveries: "step" for queues of steps."""
    found = _QUEUE_NAME.fullmatch(queue)
    return "step" if found is not None and found["kind"] == "step" else "flow"


def queue_for(workflow_name: str, like: str | None = None) -> str:
    """Return the queue of a workflow; `like` is a queue of an earlier message, whose namespace is kept."""
    namespace = ""
    if like is not None and (found := re.match(r"__(?P<namespace>[A-Za-z0-9-]+_)?wkf_", like)) is not None:
        namespace = found["namespace"] or ""
    return f"__{namespace}wkf_workflow_{workflow_name}"


def world_app(app: str) -> str:
    """Return the app that the messages of an app lie in."""
    return app + WORLD_APP


def as_message(record: InvocationRecord) -> Message:
    """Return a message for people."""
    noted, is_owned = record.attributes, record.status in OWNED
    status = _STATUSES[record.status] if record.status in FINAL else "delivering" if is_owned else "waiting"
    error = record.error if record.error is not None else (record.errors[-1].error if record.errors else None)
    since = next((line.at for line in reversed(record.history) if line.status is Status.PENDING), None)
    return Message(
        id=PREFIX + record.id,
        queue=noted.get(QUEUE, ""),
        run=noted.get(RUN, ""),
        invocation=invocation_of(noted.get(RUN)),
        status=status,
        attempt=attempt_of(record),
        created_at=record.created_at,
        due_at=record.due_at,
        ended_at=record.changed_at if record.status in FINAL else None,
        owner=record.owner,
        owned_at=since if is_owned else None,
        key=record.key or "",
        error="" if error is None else error.message,
        http_status=int(noted[HTTP_STATUS]) if noted.get(HTTP_STATUS, "").isdigit() else None,
        refusals=count_of(noted, REFUSALS),
        sent_to=noted.get(SENT_TO, ""),
        reason=record.reason,
    )


_STATUSES = {Status.SUCCESS: "done", Status.FAILED: "failed", Status.CANCELLED: "cancelled"}


def attempt_of(record: InvocationRecord) -> int:
    """Return the number of the delivery that is next, or under way: deliveries that reached the application and failed
    count, and so do crashes of a server, since the application last took the message.
    """
    return count_of(record.attributes, FAILURES) + crashes_in_a_row(record.history) + 1


def count_of(attributes: Mapping[str, str], name: str) -> int:
    text = attributes.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0


# --- requests


def valid_address(base_url: Any) -> HttpAddress:
    """Return the address of a base URL. Raises `WorldError`."""
    if not isinstance(base_url, str):
        raise bad_request("baseUrl: expected a text")
    try:
        return address_of(base_url)
    except ValueError as error:
        raise bad_request(f"baseUrl: {error}") from None


def _queue_name(name: Any) -> str:
    if not isinstance(name, str) or len(name) > _LONGEST_QUEUE or not _QUEUE_NAME.fullmatch(name):
        raise bad_request(f"queueName {name!r:.80}: expected __wkf_workflow_NAME or __wkf_step_NAME")
    if not is_header("x-vqs-queue-name", name):
        raise bad_request(f"queueName {name!r:.80}: it has characters that no header may have")
    return name


def _operation(operation: Any) -> str:
    if not isinstance(operation, str) or not 0 < len(operation) <= 200:
        raise bad_request("operationId: expected a text of 1 to 200 characters")
    return operation


def _key(queue: str, key: Any) -> str:
    """Return the key of a message: it is of its queue. A long one is stored as its hash."""
    if not isinstance(key, str) or not key:
        raise bad_request("idempotencyKey: expected a text")
    whole = f"{queue}:{key}"
    is_plain = len(whole) <= _LONGEST_KEY and whole.isprintable()
    return whole if is_plain else f"sha256:{hashlib.sha256(whole.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _delay(seconds: Any) -> float:
    if seconds is None:
        return 0.0
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds < math.inf:
        raise bad_request(f"delaySeconds {seconds!r:.40}: expected a number of seconds")
    return float(min(seconds, _LONGEST_DELAY_SECONDS))


def _headers(headers: Any) -> dict[str, str]:
    """Return headers that are sent with each delivery. Those of HTTP itself, and our own, stay ours."""
    if headers is None:
        return {}
    if not isinstance(headers, Mapping) or len(headers) > _MAX_HEADERS:
        raise bad_request(f"headers: expected an object of up to {_MAX_HEADERS} texts")
    for name, value in headers.items():
        if not isinstance(value, str) or not is_header(name, value):
            raise bad_request(f"headers: {name!r:.60} cannot be sent as a header")
    return {name.lower(): value for name, value in headers.items() if not _RESERVED.fullmatch(name)}
