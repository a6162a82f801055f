"""A World for Vercel's Python SDK (`vercel-workflow`): its workflows run on the store of an app.

::

    app = App("mongodb://localhost:27017/shop")
    use(app, "http://127.0.0.1:8000")  # before the module with the workflows is imported

    from flows import workflows # its own module: the SDK imports it again, in its sandbox

    asgi = endpoint(workflows)  # to be served at that address: uvicorn shop:asgi --port 8000

Beside it runs ``holdfast world serve shop:app``, which delivers messages. The SDK has no public way to set a World:
this module relies on `vercel.workflow._internal.world` of the versions 0.12.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from holdfast.errors import MissingExtra
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.world import wire
from holdfast.world.asgi import AppWithWorld
from holdfast.world.delivery import Addresses
from holdfast.world.errors import CONFLICT, HOOK_NOT_FOUND, RUN_EXPIRED, THROTTLE, TOO_EARLY, WorldError
from holdfast.world.queue import Messages
from holdfast.world.storage import WorldStorage

ENDPOINT = "/.well-known/workflow/v1/flow"
_SDK = "vercel.workflow._internal.world"


def use(app: AppWithWorld, base_url: str) -> Any:
    """Make the SDK use the World of an app, and return it. `base_url` is where `endpoint` is served.

    Raises `MissingExtra`.
    """
    sdk = _sdk()
    world = type("HoldfastWorld", (StoreWorld, sdk.World), {})(app.runtime, base_url, sdk)
    sdk.set_world(world)
    return world


def _sdk() -> Any:
    try:
        return import_module(_SDK)
    except ModuleNotFoundError as error:
        raise MissingExtra("this needs the SDK: pip install 'vercel-workflow==0.12.*'") from error


class StoreWorld:
    """The methods of the SDK's World. They may be called on any event loop."""

    def __init__(self, runtime: AppRuntime, base_url: str, sdk: Any) -> None:
        self._runtime, self._base_url, self._sdk = runtime, base_url, sdk
        self._is_registered = False

    async def _asked(self, method: str, **fields: Any) -> Any:
        """Call the storage, on the engine's loop. Raises the SDK's errors."""
        storage = (await self._runtime.aready()).part(WorldStorage)
        try:
            return await self._runtime.arun(getattr(storage, method)(**fields))
        except WorldError as error:
            raise self._error(error, fields) from error

    def _error(self, error: WorldError, fields: Mapping[str, Any]) -> Exception:
        sdk, text = self._sdk, error.message
        seconds = None if error.retry_after is None else math.ceil(error.retry_after)
        found: Exception
        if error.name == CONFLICT:
            found = sdk.EntityConflictError(text)
        elif error.name == HOOK_NOT_FOUND:
            call = fields.get("event", {}).get("correlationId")
            found = sdk.HookNotFoundError(hook_id=call, token=fields.get("token"))
        elif error.name == TOO_EARLY:
            found = sdk.TooEarlyError(text, seconds)
        elif error.name == RUN_EXPIRED:
            found = sdk.RunExpiredError(text, status=error.status)
        elif error.name == THROTTLE:
            found = sdk.ThrottleError(text, status=error.status, retry_after=seconds)
        else:
            found = sdk.WorkflowWorldError(text, status=error.status, code=error.name)
        return found

    # --- runs and events

    async def get_deployment_id(self) -> str:
        return os.environ.get("DEPLOYMENT_ID", "holdfast")

    async def runs_get(self, run_id: str) -> Any:
        return self._sdk.WorkflowRunAdaptor.from_wire(await self._asked("runs_get", run_id=run_id))

    async def steps_get(self, run_id: str, step_id: str) -> Any:
        found = await self._asked("steps_get", run_id=run_id, step_id=step_id)
        return self._sdk.WorkflowStepAdaptor.from_wire(found)

    async def hooks_get_by_token(self, token: str) -> Any:
        return self._sdk.Hook.from_wire(await self._asked("hooks_get_by_token", token=token))

    async def events_create(self, run_id: str | None, data: Any) -> Any:
        resume = getattr(data, "_queue_input", None)
        params = {} if resume is None else {"resumeId": resume.resume_id}
        answer = await self._asked("events_create", run_id=run_id, event=data.model_dump(), params=params)
        return self._sdk.EventResult.from_wire(answer)

    async def events_list(self, run_id: str, *, pagination: Any = None) -> Any:
        page = None if pagination is None else pagination.model_dump()
        answer = await self._asked("events_list", run_id=run_id, pagination=page)
        events = [self._sdk.EventAdaptor.from_wire(event) for event in answer["data"]]
        return self._sdk.PaginatedResult(data=events, cursor=answer["cursor"], has_more=answer["hasMore"])

    # --- messages

    async def queue(
        self,
        queue_name: str,
        message: Any,
        *,
        deployment_id: str | None = None,
        idempotency_key: str | None = None,
        delay_seconds: float | None = None,
        **others: Any,
    ) -> str:
        engine = await self._runtime.aready()

        async def send() -> str:
            if not self._is_registered:
                await engine.part(Addresses).register(self._base_url)
                self._is_registered = True
            sent = await engine.part(Messages).send(
                queue_name=queue_name,
                message=message.model_dump(),
                operation_id=engine.ids.operation(),
                idempotency_key=idempotency_key,
                delay_seconds=delay_seconds,
                base_url=self._base_url,
            )
            return str(sent["messageId"])

        try:
            return await self._runtime.arun(send())
        except WorldError as error:
            raise self._error(error, {}) from error

    def create_queue_handler(
        self, queue_name_prefix: str, handler: Callable[..., Awaitable[Any]]
    ) -> Callable[[Any], Awaitable[Any]]:
        """Return what answers deliveries of messages whose queue begins so."""
        respond = self._sdk.HTTPResponse.json

        async def deliver(request: Any) -> Any:
            headers = {name.lower(): value for name, value in request.headers.items()}
            queue = headers.get("x-vqs-queue-name", "")
            if not queue.startswith(queue_name_prefix):
                return respond({"error": f"the queue {queue!r:.80} is not served here"}, status=400)
            try:
                message = wire.decode(b"".join([part async for part in request.aiter_bytes()]))
            except WorldError as error:
                return respond({"error": error.message}, status=400)
            again = await handler(
                message,
                queue_name=queue,
                attempt=int(headers.get("x-vqs-message-attempt", "1")),
                message_id=headers.get("x-vqs-message-id", ""),
            )
            return respond({} if again is None else {"timeoutSeconds": max(0.0, again.delay_seconds)})

        return deliver

    # --- streams

    async def streams_write(self, run_id: str, name: str, chunk: bytes) -> None:
        await self.streams_write_multi(run_id, name, [chunk])

    async def streams_write_multi(self, run_id: str, name: str, chunks: Sequence[bytes]) -> None:
        await self._asked("streams_write", run_id=run_id, name=name, chunks=list(chunks))

    async def streams_close(self, run_id: str, name: str) -> None:
        await self._asked("streams_close", run_id=run_id, name=name)

    async def streams_get(self, run_id: str, name: str, start_index: int | None = None) -> AsyncIterator[bytes]:
        _, chunks = await self._asked("streams_read", run_id=run_id, name=name, start=start_index or 0)

        async def following() -> bytes | None:
            return await anext(chunks, None)

        try:
            while (chunk := await self._runtime.arun(following())) is not None:
                yield chunk
        except WorldError as error:
            raise self._error(error, {}) from error
        finally:
            with contextlib.suppress(RuntimeError):  # it is being read at this moment
                await self._runtime.arun(_closed(chunks))

    async def streams_list(self, run_id: str) -> list[str]:
        names: list[str] = (await self._asked("streams_list", run_id=run_id))["names"]
        return names

    async def streams_get_chunks(
        self, run_id: str, name: str, *, limit: int | None = None, cursor: str | None = None
    ) -> Any:
        page = await self._asked("streams_get_chunks", run_id=run_id, name=name, limit=limit, cursor=cursor)
        return self._sdk.StreamChunksPage.from_wire(page)

    async def streams_get_info(self, run_id: str, name: str) -> Any:
        return self._sdk.StreamInfo.from_wire(await self._asked("streams_get_info", run_id=run_id, name=name))


async def _closed(chunks: Any) -> None:
    await chunks.aclose()


# --- serving deliveries


class _Request:
    """A request as the SDK reads it, of an ASGI scope."""

    def __init__(self, scope: Mapping[str, Any], receive: Callable[[], Awaitable[Any]]) -> None:
        self.method, self.url = scope["method"], scope["path"]
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self._receive = receive

    async def aiter_bytes(self, chunk_size: int | None = None) -> AsyncIterator[bytes]:
        while True:
            event = await self._receive()
            yield event.get("body", b"")
            if not event.get("more_body"):
                return


def endpoint(workflows: Any) -> Callable[..., Awaitable[None]]:
    """Return an ASGI application that takes the deliveries for these `Workflows`."""

    async def application(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        status, body, headers = 404, b"", dict[str, str]()
        if scope["path"] == ENDPOINT:
            try:
                answer = await workflows.http_handler(_Request(scope, receive))
                status, body, headers = answer.status, answer.body, answer.headers
            except Exception as error:
                status, body = 500, f"{type(error).__name__}: {error}".encode()[:2000]
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": body})

    return application
