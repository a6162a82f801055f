"""Requests: the payload of a hook that takes a whole HTTP request, and the workflow's answer to it.

The answer is an entry of kind `answer`, which the web process waits for. The first answer counts: another one to the
same request changes nothing. In a body, `respond` is recorded as a step is, so that no replay answers again.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Mapping
from typing import Any, cast

import msgspec

from holdfast.crashpoints import crashpoint
from holdfast.errors import UsageError
from holdfast.executors.chunks import NothingToAwait
from holdfast.model.records import ANSWERS, Hint
from holdfast.runtime.app_runtime import AppRuntime, runtime_here
from holdfast.runtime.definition import ExecutorKind
from holdfast.runtime.engine import Engine
from holdfast.workflows.api import AsyncStep
from holdfast.workflows.hooks_records import Response, answer_entry
from holdfast.workflows.life import PlainLife, current_life
from holdfast.workflows.steps import StepDefinition

MAX_ANSWER_BYTES = 1024 * 1024


class WebhookRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An HTTP request to a webhook. Names of headers are in lower case."""

    method: str
    headers: Mapping[str, str]
    body: bytes = b""
    query: str = ""
    received_at: float = 0.0  # seconds since the epoch; this and the next are set when it is delivered
    answer_to: str = ""  # names the answer

    def json(self) -> Any:
        """Return the body as JSON. Raises `ValueError`."""
        return msgspec.json.decode(self.body)

    def respond(
        self, status: int = 200, body: object = b"", headers: Mapping[str, str] | None = None
    ) -> Awaitable[None]:
        """Answer the request: ``await said.respond(200, {"ok": True})``, in the body of the workflow or in a step.

        `body` is bytes, a text, or a value that is sent as JSON. A plain function calls it without ``await``. The
        sender gets the first answer, if it comes within 30 seconds.
        """
        answer = response(status, body, headers)
        life = current_life()
        if life is not None:
            return _answer_in_body(self.answer_to, answer, is_plain=isinstance(life, PlainLife))
        runtime = runtime_here()
        if runtime is None:
            raise UsageError("respond() answers a request in the body of a workflow, or in a step or task")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            runtime.run(put_answer(runtime, self.answer_to, answer))
            return NothingToAwait()
        return runtime.arun(put_answer(runtime, self.answer_to, answer))


def response(status: int, body: object, headers: Mapping[str, str] | None) -> Response:
    """Return a response. Raises `UsageError`."""
    if type(status) is not int or not 200 <= status <= 599:
        raise UsageError(f"respond({status!r:.80}): expected a status from 200 to 599")
    named = {str(name).lower(): str(value) for name, value in (headers or {}).items()}
    if bad := [name for name, value in named.items() if "\n" in name + value or "\r" in name + value]:
        raise UsageError(f"headers={{{bad[0]!r:.80}: …}}: a header has no line breaks")
    kind, data = "application/octet-stream", body
    if isinstance(body, str):
        kind, data = "text/plain; charset=utf-8", body.encode()
    elif not isinstance(body, bytes):
        try:
            kind, data = "application/json", msgspec.json.encode(body)
        except Exception as error:
            raise UsageError(
                f"respond(…, {body!r:.80}): neither bytes, nor a text, nor a JSON value: {error}"
            ) from None
    assert isinstance(data, bytes)
    if len(data) > MAX_ANSWER_BYTES:
        raise UsageError(f"respond(…): a body of {len(data):,} bytes; {MAX_ANSWER_BYTES:,} are allowed")
    return Response(status=status, body=data, headers={"content-type": kind} | named if data else named)


async def put_answer(runtime: AppRuntime, name: str, answer: Response) -> None:
    """Store an answer, and notify the web process that waits for it. A request of a test has no name, and no waiter."""
    engine: Engine = await runtime.engine()
    if name:
        await engine.store.put_entry(answer_entry(engine.app, name, answer, engine.store.now()))
        crashpoint("hook.answered")
        engine.hub.send(Hint(ANSWERS, (name,)))


async def respond(name: str, status: int, body: bytes, headers: dict[str, str]) -> None:
    """Answer a request, as a step of a body."""
    runtime = runtime_here()
    if runtime is None:
        raise UsageError("the app of this workflow is not known here")
    await runtime.arun(put_answer(runtime, name, Response(status=status, body=body, headers=headers)))


_STEP = StepDefinition(
    name="respond",
    task="step:respond",
    function=respond,
    signature=inspect.signature(respond),
    executor=ExecutorKind.LOOP,
)


def _answer_in_body(name: str, answer: Response, *, is_plain: bool) -> Awaitable[None]:
    step: AsyncStep[..., None] = AsyncStep(cast(Any, None), _STEP)
    called = step(name, answer.status, answer.body, dict(answer.headers))
    return NothingToAwait() if is_plain else called
