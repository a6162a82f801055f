"""The web app itself: an ASGI application that any server can run, and FastAPI, Starlette or Django can mount.

One request is one call: find out whether it is for the API or for a webhook, answer it, and turn what goes wrong into a
problem document. Paths are not logged, since the path of a webhook is a secret; the name of a route is.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.runtime.app_runtime import AppRuntime
from holdfast.showing import as_json
from holdfast.telemetry.events import WebRequestFailed, WebRequestServed
from holdfast.web import api, webhooks
from holdfast.web.problems import SAFE_HEADERS, Problem, internal_error, not_found, problem_of
from holdfast.web.reading import ReadModel
from holdfast.web.requests import query_of
from holdfast.web.rules import refuse
from holdfast.web.sse import OpenStreams


class ServedApp(Protocol):
    """An app, as far as the web app knows it."""

    @property
    def runtime(self) -> AppRuntime: ...


class WebApp:
    """Serve one app over HTTP. `is_local` is for the server of ``holdfast monitor`` on a loopback address only: there,
    the API answers programs of this machine without a token.
    """

    def __init__(self, app: ServedApp, *, is_local: bool = False) -> None:
        self._runtime = app.runtime
        self._is_local = is_local
        self._reading = ReadModel(app.runtime)
        self._webhooks = webhooks.WebhookEndpoint(app.runtime)
        self.streams = OpenStreams()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await _live(receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1000})
        request, began = Request(scope, receive), self._runtime.clock.monotonic()
        route, response = await self._answered(request)
        if response is None:
            return
        try:
            await response(scope, receive, send)
        except OSError:
            pass  # the client is gone
        finally:
            if self._runtime.telemetry.wants(WebRequestServed):
                seconds = self._runtime.clock.monotonic() - began
                self._runtime.telemetry.emit(
                    WebRequestServed(request.method, route, response.status_code, seconds * 1000)
                )

    async def _answered(self, request: Request) -> tuple[str, Response | None]:
        """Return the name of the route, and the response; None if the client is gone."""
        route = "nothing"
        try:
            path = path_of(request.scope)
            if path == api.PREFIX or path.startswith(f"{api.PREFIX}/"):
                route = api.PREFIX
                refusal = refuse(request.headers, token=self._runtime.settings.api_token, is_local=self._is_local)
                if refusal is not None:
                    raise _refused(refusal.status, refusal.why)
                found, parts = api.route_of(request.method, path.removeprefix(api.PREFIX))
                route += found.path
                return route, await self._api(request, found, parts)
            if path.startswith(webhooks.PREFIX):
                route = webhooks.HIDDEN
                return route, await self._webhooks.answer(request, path.removeprefix(webhooks.PREFIX))
            raise not_found()
        except ClientDisconnect:
            return route, None
        except Exception as error:
            problem = problem_of(error)
            if problem is None or problem.status == 500:
                quoted = (webhooks.place_of(error), None) if route == webhooks.HIDDEN else (repr(error), error)
                self._runtime.telemetry.emit(WebRequestFailed(request.method, route, *quoted))
            return route, (problem or internal_error()).response()

    async def _api(self, request: Request, route: api.ApiRoute, parts: dict[str, str]) -> Response:
        asked = api.Asked(self._runtime, self._reading, self.streams, request, parts, query_of(request, route.query))
        answer = await route.endpoint(asked)
        if isinstance(answer, Response):
            return answer
        text = await asyncio.to_thread(_rendered, answer)
        return Response(text, media_type="application/json", headers=SAFE_HEADERS)


def _rendered(render: api.Render) -> str:
    return as_json(render())


def _refused(status: int, why: str) -> Problem:
    if status == 401:
        return Problem(401, "Unauthorised", why, headers={"www-authenticate": 'Bearer realm="holdfast"'})
    return Problem(status, "Forbidden", why)


def path_of(scope: Scope) -> str:
    """Return the path below the place where this app is mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


async def _live(receive: Receive, send: Send) -> None:
    """Answer a server that runs this app alone. The app's engine is opened by its first use."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
