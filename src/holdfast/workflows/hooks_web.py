"""Webhooks, for a web app: from an HTTP request to a payload of a hook, and from the workflow's answer to a response.

``holdfast.web`` needs one object of this class. Every method may be awaited on any event loop: the store is used on the
engine's own, verifiers run on the caller's. Nothing here knows HTTP servers: the caller reads the request (up to
`limit` bytes, else 413), limits the rate (429), and sends the `Response` that `receive` returns.

    webhooks = Webhooks(app.runtime)
    response = await webhooks.receive(secret, WebhookRequest(method="POST", headers=…, body=…))

Unknown, ended, expired and malformed secrets take the same path: the same three reads, the same answer (`NOT_FOUND`).
Neither secrets nor bodies are logged.
"""

from __future__ import annotations

import inspect
import urllib.parse
from typing import Any

import msgspec

from holdfast.errors import CorruptRecord, PayloadDoesNotFit, StoreError, UsageError
from holdfast.ids import InvocationId, derived_id
from holdfast.model.changes import Applied, Full
from holdfast.model.records import ANSWERS, Hint
from holdfast.model.status import FINAL
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.engine import Engine
from holdfast.runtime.hints import Pace, Wakeup
from holdfast.runtime.wait import get_readable
from holdfast.workflows.hooks_records import (
    ANSWER,
    MAX_TOKEN_CHARACTERS,
    WEBHOOK,
    Response,
    answer_name,
    name_of,
    read_answer,
    read_webhook,
)
from holdfast.workflows.hooks_requests import WebhookRequest
from holdfast.workflows.hooks_resuming import Sent, give
from holdfast.workflows.hooks_store import StoredHook, find

ANSWER_SECONDS = 30.0
RETRY_SECONDS = 5
_JSON = {"content-type": "application/json"}
_TITLES = {
    401: "Unauthorised",
    404: "NotFound",
    405: "MethodNotAllowed",
    413: "TooLarge",
    422: "PayloadDoesNotFit",
    503: "Busy",
}


def _refused(status: int, why: str, *, path: str = "", allow: str = "") -> Response:
    """Return a problem document (RFC 9457)."""
    facts: dict[str, object] = {"title": _TITLES[status], "status": status, "detail": why}
    headers = {"content-type": "application/problem+json"} | ({"allow": allow} if allow else {})
    headers |= {"retry-after": str(RETRY_SECONDS)} if status == 503 else {}
    body = msgspec.json.encode(facts | {"path": path} if path else facts)
    return Response(status=status, body=body, headers=headers)


NOT_FOUND = _refused(404, "there is nothing at this address")
ACCEPTED = Response(status=202, body=b'{"status":"accepted"}', headers=_JSON)


class Webhooks:
    """Receives webhooks of one app."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime

    @property
    def limit(self) -> int:
        """Return how many bytes a body may have: the setting `webhook_limit`."""
        return self._runtime.settings.webhook_limit

    async def receive(
        self, secret: str, request: WebhookRequest, *, answer_seconds: float = ANSWER_SECONDS
    ) -> Response:
        """Deliver a request to the hook of this secret, and return the response to send.

        404: no open hook has this secret. 405: the hook does not take the method. 401: its signature is wrong. 413: the
        body is too large. 422: the body does not fit the type of the hook; the JSON names the path. 503 with
        Retry-After: the run is a thousand payloads behind, the store is away, or this process does not declare the
        verifier. Else 202, the fixed answer of the hook, or what the workflow answers within `answer_seconds`.

        A repeated request (see `resume_id=` of `hook`, and verifiers) delivers nothing, and gets the same response.
        """
        try:
            engine = await self._runtime.aready()
            found = await self._runtime.arun(look_up(engine, secret))
            if found is None:
                return NOT_FOUND
            return await self._deliver(engine, found, request, answer_seconds)
        except StoreError:
            return _refused(503, "the store is away; try again later")

    async def _deliver(
        self, engine: Engine, found: StoredHook, request: WebhookRequest, answer_seconds: float
    ) -> Response:
        hook, name = found.hook, found.entry.name
        if request.method not in hook.methods:
            return _refused(405, "method not allowed", allow=", ".join(hook.methods))
        if len(request.body) > self.limit:
            return _refused(413, f"the body has more than {self.limit} bytes")
        headers = {each.lower(): value for each, value in request.headers.items()}
        request = msgspec.structs.replace(request, headers=headers, received_at=engine.store.now())
        genuine = await self._verified(hook.verify, request) if hook.verify else True
        if isinstance(genuine, Response):
            return genuine
        resume_id = _resume_id(genuine, headers.get(hook.resume_header, "")) or engine.ids.operation()
        try:
            sent = Sent(engine, request if hook.is_request else _payload(request))
            verdict = await self._runtime.arun(give(engine, found, sent, resume_id))
        except PayloadDoesNotFit as error:
            return _refused(422, str(error), path=error.path)
        except UsageError as error:
            return _refused(422, str(error))
        if isinstance(verdict, Full):
            return _refused(503, "the workflow is too far behind; try again later")
        if not isinstance(verdict, Applied):
            return NOT_FOUND
        if hook.answer is not None or not hook.is_request:
            return hook.answer or ACCEPTED
        answer = answered(engine, answer_name(name, resume_id), hook.run, answer_seconds)
        return await self._runtime.arun(answer) or ACCEPTED

    async def _verified(self, name: str, request: WebhookRequest) -> bool | str | Response:
        """Ask the verifier of that name; return the refusal if the request is not genuine."""
        verify = self._runtime.verifiers.get(name)
        if verify is None:
            return _refused(503, f"this process does not declare the verifier '{name}'")
        try:
            genuine: Any = verify(request)
            if inspect.isawaitable(genuine):
                genuine = await genuine
        except Exception:  # a request that it does not understand; its words may hold what was sent
            genuine = False
        if genuine is True or (isinstance(genuine, str) and genuine):
            return genuine
        return _refused(401, "the signature is wrong, or too old")


# --- on the engine's loop


async def look_up(engine: Engine, secret: str) -> StoredHook | None:
    """Return the open hook whose URL has this secret. Three reads, whatever the secret is."""
    name = name_of(secret)
    hook_name, run, call = name_of(name), derived_id("nothing", name), ""
    for entry in await engine.store.entries(engine.app, WEBHOOK, [name]):
        try:
            known = read_webhook(entry)
        except CorruptRecord as error:
            await engine.store.quarantine_entry(entry, error)
        else:
            hook_name, run, call = known.hook, known.run, known.call
    found = await find(engine, hook_name)
    (record,) = await get_readable(engine.store, engine.app, [run])
    if found is None or record is None or record.status in FINAL or found.hook.ended_at is not None:
        return None
    is_its_own = (found.hook.webhook, found.hook.run, found.hook.call) == (name, run, call)
    return found if is_its_own else None


async def answered(engine: Engine, name: str, run: InvocationId, seconds: float) -> Response | None:
    """Wait for the answer of a workflow; None if there is none in time, or its run has ended without one."""
    wakeup, pace = Wakeup(), Pace(engine.settings.poll_interval_seconds)
    deadline = engine.clock.monotonic() + seconds

    def hinted(hint: Hint) -> None:
        if not hint.subjects or name in hint.subjects:
            wakeup.notify()

    unsubscribe = engine.hub.on(ANSWERS, hinted)
    pace.quicken()
    try:
        while True:
            (record,) = await get_readable(engine.store, engine.app, [run])  # before the look: it may answer and end
            for entry in await engine.store.entries(engine.app, ANSWER, [name]):
                return read_answer(entry)
            left = deadline - engine.clock.monotonic()
            if left <= 0 or record is None or record.status in FINAL:
                return None
            await wakeup.wait(min(left, pace.pause(trust=engine.hub.trust)))
    finally:
        unsubscribe()


# --- pure


def _resume_id(genuine: bool | str, header: str) -> str:
    """Return the name of a delivery: the one that the signature covers, else that of the header; empty: none."""
    given = genuine if isinstance(genuine, str) else header
    return given if len(given) <= MAX_TOKEN_CHARACTERS and given.isprintable() else name_of(given)


def _payload(request: WebhookRequest) -> Any:
    """Return the values of a request: its JSON body, the fields of a form, or those of the query of a GET."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "GET" or kind == "application/x-www-form-urlencoded":
        text = request.query if request.method == "GET" else request.body.decode("utf-8", "replace")
        try:
            return dict(urllib.parse.parse_qsl(text, keep_blank_values=True, max_num_fields=1000))
        except ValueError:
            raise PayloadDoesNotFit("payload has too many fields", path="payload") from None
    if not request.body:
        return None
    try:
        return msgspec.json.decode(request.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise PayloadDoesNotFit("payload is no JSON", path="payload") from None
