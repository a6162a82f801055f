"""The web app itself: an ASGI application that any server can run, and FastAPI, Starlette or Django can mount.

One request is one call: find out whether it is for the API, a page or a webhook, answer it, and turn what goes wrong
into a problem document. Paths are not logged, since the path of a webhook is a secret; the name of a route is.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Protocol
from urllib.parse import quote, unquote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.runtime.app_runtime import AppRuntime
from holdfast.showing import as_json
from holdfast.telemetry.events import WebRequestFailed, WebRequestServed
from holdfast.web import api, health, logins, webhooks
from holdfast.web.auditing import action_of, audited
from holdfast.web.authentication import Authentication, HostUser
from holdfast.web.live import LiveFeed
from holdfast.web.pages import table as pages
from holdfast.web.pages.page import WebPage
from holdfast.web.pages.rendering import PageRenderer, wants_page
from holdfast.web.principals import Principal, Role
from holdfast.web.problems import SAFE_HEADERS, Problem, internal_error, problem_of
from holdfast.web.reading.model import ReadModel
from holdfast.web.requests import body_as, query_of
from holdfast.web.routing import PREFIX, ApiRoute, Asked, Render
from holdfast.web.sse import OpenStreams


class ServedApp(Protocol):
    """An app, as far as the web app knows it."""

    @property
    def runtime(self) -> AppRuntime: ...


class WebApp:
    """Serve one app over HTTP. `is_local` is for the server of ``holdfast monitor`` on a loopback address only: there,
    programs of this machine are answered without a token, as long as there is none. `user` names the user of a request
    to a host.
    """

    def __init__(self, app: ServedApp, *, is_local: bool = False, user: HostUser | None = None) -> None:
        self._runtime = app.runtime
        self._reading = ReadModel(app.runtime)
        self._pages = PageRenderer(app.runtime)
        self._authentication = Authentication(app.runtime, is_local=is_local, user=user)
        self._logins = logins.Logins(app.runtime, self._authentication, self._pages)
        self._webhooks = webhooks.WebhookEndpoint(app.runtime, self._authentication.source)
        self._health = health.HealthChecks(app.runtime, is_local=is_local)
        self.streams = OpenStreams()
        self._feed = LiveFeed(app.runtime)
        self.monotonic = app.runtime.clock.monotonic

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
        route, is_known = "nothing", False
        try:
            path = path_of(request.scope)
            if path == PREFIX or path.startswith(f"{PREFIX}/"):
                route = PREFIX
                principal = await self._authentication.principal(request)
                is_known = True
                found, parts = api.TABLE.find(request.method, path.removeprefix(PREFIX))
                route += found.path
                require(principal, found.role)
                return route, await self._api(request, principal, found, parts)
            if path in health.PATHS:
                route = path
                return route, _plain(await self._health.answer(request.method, path, request.headers))
            if path.startswith(webhooks.PREFIX):
                route = webhooks.HIDDEN
                return route, await self._webhooks.answer(request, unquote(path.removeprefix(webhooks.PREFIX)))
            if path.startswith(pages.STATIC):
                route = pages.STATIC
                return route, self._pages.static(request, path.removeprefix(pages.STATIC))
            if path in logins.PATHS:
                route = path
                return route, await self._logins.answer(request, path)
            page, parts = pages.TABLE.find(request.method, path)
            route = page.path
            try:
                principal = await self._authentication.principal(request, is_page=True)
            except Problem as refusal:
                if refusal.status != 401:
                    raise
                return route, logins.to_login(request, path)
            is_known = True
            return route, await self._page(request, principal, page, parts)
        except ClientDisconnect:
            return route, None
        except Exception as error:
            problem = problem_of(error)
            if problem is None or problem.status == 500:
                quoted = (webhooks.place_of(error), None) if route == webhooks.HIDDEN else (repr(error), error)
                self._runtime.telemetry.emit(WebRequestFailed(request.method, route, *quoted))
            found_problem = problem or internal_error()
            if not is_known and not isinstance(error, Problem):
                found_problem = found_problem.for_strangers()
            if wants_page(request) and not route.startswith((PREFIX, webhooks.HIDDEN)):
                return route, await self._pages.problem(request, found_problem)
            return route, found_problem.response()

    async def _api(self, request: Request, principal: Principal, route: ApiRoute, parts: dict[str, str]) -> Response:
        asked = Asked(
            self._runtime, self._reading, self.streams, request, parts, query_of(request, route.query), principal
        )._replace(feed=self._feed)
        if route.body is not None:
            asked = asked._replace(body=await body_as(request, route.body, self._runtime.settings.webhook_limit))
        action = action_of(route, asked)
        work = functools.partial(route.endpoint, asked)
        answer = await (work() if action is None else audited(asked, action, work))
        if isinstance(answer, Response):
            return answer
        text = await asyncio.to_thread(_rendered, answer)
        return Response(text, media_type="application/json", headers=SAFE_HEADERS)

    async def _page(self, request: Request, principal: Principal, page: WebPage, parts: dict[str, str]) -> Response:
        require(principal, page.role)
        asked = Asked(
            self._runtime, self._reading, self.streams, request, parts, query_of(request, page.query), principal
        )
        return await self._pages.answer(page, asked)


def _rendered(render: Render) -> str:
    return as_json(render())


def require(principal: Principal, role: Role) -> None:
    """Raise `Problem` if the role of a principal is too low."""
    if principal.role < role:
        needed, there = role.name.lower(), principal.role.name.lower()
        raise Problem(403, "Forbidden", f"this needs the role {needed}, and {principal.name} has the role {there}")


def _plain(answer: health.HealthAnswer) -> Response:
    return Response(answer.body, answer.status, SAFE_HEADERS, answer.media_type)


def path_of(scope: Scope) -> str:
    """Return the path below the place where this app is mounted, still escaped: a name in it may have a slash."""
    raw = scope.get("raw_path")
    path = raw.decode("latin-1").partition("?")[0] if raw else quote(str(scope["path"]))
    root = quote(str(scope.get("root_path", "")).rstrip("/"))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


async def _live(receive: Receive, send: Send) -> None:
    """Answer a server that runs this app alone. The app's engine is opened by its first use."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
