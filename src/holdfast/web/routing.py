"""Routes of the HTTP API, and how one is found for a request.

A route says everything about itself: method, path, parameters, body, least role, and what it does in words. An
endpoint asks the read model, and returns a function that makes the document: that may decode values, which runs user
code, so it is called on a thread. A route that changes something names its action; the web app writes the audit record.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from holdfast.codec import Codec
from holdfast.errors import InvocationNotFound
from holdfast.ids import is_id
from holdfast.model.records import InvocationRecord
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.web.documents import Document
from holdfast.web.live import LiveFeed
from holdfast.web.principals import Principal, Role
from holdfast.web.problems import Problem, not_found
from holdfast.web.reading.model import ReadModel
from holdfast.web.requests import Parameter
from holdfast.web.sse import OpenStreams

PREFIX = "/api/v1"


class Act(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of an action. With `preview`, the answer says what would be touched, and nothing is."""

    reason: str = ""
    preview: bool = False


class Asked(NamedTuple):
    """A request that is allowed, with its parameters."""

    runtime: AppRuntime
    reading: ReadModel
    streams: OpenStreams
    request: Request
    path: Mapping[str, str]
    query: Mapping[str, Any]
    principal: Principal
    body: Any = None  # of the route's type
    feed: LiveFeed | None = None

    @property
    def codec(self) -> Codec:
        return self.runtime.codec

    @property
    def id(self) -> str:
        """Return the id of an invocation that is in the path. Raises `InvocationNotFound`."""
        id = self.path["id"]
        if not is_id(id):
            raise InvocationNotFound(f"there is no invocation '{id[:80]}': an id is 26 characters, and not shortened")
        return id

    async def record(self) -> InvocationRecord:
        """Return the invocation of the path. Raises `InvocationNotFound`."""
        return await self.runtime.arun(self.reading.record(self.id))


Render = Callable[[], Document]
Endpoint = Callable[[Asked], Awaitable[Render | Response]]


class ApiRoute(NamedTuple):
    """A line of a table. ``{id}`` in a path is a part of it, ``{step:path}`` the rest."""

    method: str
    path: str
    endpoint: Endpoint
    summary: str
    query: Mapping[str, Parameter] = {}
    role: Role = Role.VIEWER
    action: str = ""  # what it changes, for the audit record: invocation.cancel; empty: it changes nothing
    body: type[msgspec.Struct] | None = None  # an `Act`, if it is an action
    twin: str = ""  # the command that does the same: "holdfast queues pause {name}", with parts of the path or {target}
    reads: type[msgspec.Struct] | None = None  # a body that the endpoint reads itself, for the description
    is_stream: bool = False  # the answer is server-sent events


def action(
    path: str,
    endpoint: Endpoint,
    summary: str,
    name: str,
    body: type[Act] = Act,
    role: Role = Role.OPERATOR,
    twin: str = "",
) -> ApiRoute:
    """Return the route of an action; `name` is that of the audit record."""
    return ApiRoute("POST", path, endpoint, summary, role=role, action=name, body=body, twin=twin)


# --- finding the route


def pattern_of(path: str) -> re.Pattern[str]:
    parts = re.split(r"({\w+(?::path)?})", path)
    made = [
        f"(?P<{part[1:-1].partition(':')[0]}>{'.+' if part.endswith(':path}') else '[^/]+'})"
        if part.startswith("{")
        else re.escape(part)
        for part in parts
    ]
    return re.compile("".join(made), re.DOTALL)


def parts_of(found: re.Match[str]) -> dict[str, str]:
    """Return the parts of a path that was matched as it is sent, without escapes."""
    return {name: unquote(value) for name, value in found.groupdict().items()}


class RouteTable:
    """Find the route for a request. The first line that fits a path is taken."""

    def __init__(self, routes: Sequence[ApiRoute]) -> None:
        self._patterns = [(pattern_of(each.path), each) for each in routes]

    def find(self, method: str, path: str) -> tuple[ApiRoute, dict[str, str]]:
        """Return the route for a path below the prefix, and the parts of the path. Raises `Problem`: 404 or 405."""
        allowed: list[str] = []
        for pattern, route in self._patterns:
            if (found := pattern.fullmatch(path)) is None:
                continue
            if route.method == method:
                return route, parts_of(found)
            allowed.append(route.method)
        if allowed:
            ways = ", ".join(sorted(set(allowed)))
            raise Problem(405, "MethodNotAllowed", f"this address takes {ways}", headers={"allow": ways})
        raise not_found()
