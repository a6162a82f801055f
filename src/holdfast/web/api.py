"""The HTTP API: one table of routes under ``/api/v1``.

A route says its method, path, parameters, and what it does in words; `docs/reference/http.md` is compared with it. An
endpoint asks the read model, and returns a function that makes the document: that may decode values, which runs user
code, so it is called on a thread.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from holdfast.codec import Codec
from holdfast.errors import InvocationNotFound, NotEncodable, PayloadDoesNotFit
from holdfast.ids import is_id
from holdfast.model.records import InvocationRecord
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.listing import filter_of
from holdfast.runtime.runs import of_run
from holdfast.streams.rules import valid_stream
from holdfast.web.documents import Document, history_of
from holdfast.web.problems import Problem, about, not_found, wrong
from holdfast.web.reading import ReadModel
from holdfast.web.requests import Parameter, document_of, limit_parameter
from holdfast.web.sse import OpenStreams
from holdfast.web.streaming import read_stream, stream_events
from holdfast.workflows.hooks_records import name_of, valid_resume_id, valid_token
from holdfast.workflows.hooks_resuming import Sent, resumed
from holdfast.workflows.hooks_resuming import not_found as not_found_hook

PREFIX = "/api/v1"


class Asked(NamedTuple):
    """A request that is allowed, with its parameters."""

    runtime: AppRuntime
    reading: ReadModel
    streams: OpenStreams
    request: Request
    path: Mapping[str, str]
    query: Mapping[str, Any]

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
    """A line of the table. ``{id}`` in a path is a part of it, ``{step:path}`` the rest."""

    method: str
    path: str
    endpoint: Endpoint
    summary: str
    query: Mapping[str, Parameter] = {}


# --- invocations


async def list_invocations(asked: Asked) -> Render:
    given = dict(asked.query)
    limit, attributes = given.pop("limit"), _attributes(given.pop("attribute"))
    with about("query.status"):
        where = filter_of(**given, attributes=attributes)
    return (await asked.runtime.arun(asked.reading.invocations(where, limit))).document


def _attributes(pairs: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not name or not sign or found.setdefault(name, value) != value:
            raise wrong("query.attribute", f"attribute={pair[:80]!r}: write name=value, and each name once")
    return found


async def show_invocation(asked: Asked) -> Render:
    whole = await asked.runtime.arun(asked.reading.whole(await asked.record()))
    return lambda: whole.document(asked.codec)


async def show_history(asked: Asked) -> Render:
    record = await asked.record()
    return lambda: history_of(record)


async def explain(asked: Asked) -> Render:
    return (await asked.runtime.arun(asked.reading.why(await asked.record()))).document


# --- runs of workflows


async def list_steps(asked: Asked) -> Render:
    record = of_run(await asked.record())
    with about("query.after"):
        page = await asked.runtime.arun(asked.reading.steps(record, **asked.query))
    return lambda: page.document(asked.codec)


async def show_step(asked: Asked) -> Render:
    page = await asked.runtime.arun(asked.reading.step(await asked.record(), asked.path["step"]))
    return lambda: page.document(asked.codec)["steps"][0]


async def list_events(asked: Asked) -> Render:
    record = of_run(await asked.record())
    with about("query.after"):
        page = await asked.runtime.arun(asked.reading.events(record, **asked.query))
    return lambda: page.document(asked.codec)


# --- streams


async def list_streams(asked: Asked) -> Render:
    return (await asked.runtime.arun(asked.reading.streams(await asked.record()))).document


async def list_chunks(asked: Asked) -> Render:
    record = await asked.record()
    with about("path.name"):
        valid_stream(asked.path["name"])
    return (await asked.runtime.arun(asked.reading.chunks(record, asked.path["name"], **asked.query))).document


async def follow_stream(asked: Asked) -> Response:
    last = asked.request.headers.get("last-event-id")
    reader = await read_stream(asked.reading, asked.id, asked.path["name"], last_event_id=last, **asked.query)
    return stream_events(reader, asked.streams, asked.runtime.telemetry)


# --- statistics


async def show_stats(asked: Asked) -> Render:
    with about("query"):
        answer = await asked.runtime.arun(asked.reading.stats(**asked.query))
    return answer.document


# --- hooks


async def list_hooks(asked: Asked) -> Render:
    return (await asked.runtime.arun(asked.reading.hooks(**asked.query))).document


async def show_hook(asked: Asked) -> Render:
    hook = await asked.runtime.arun(asked.reading.hook(asked.path["name"]))
    if hook is None:
        raise not_found_hook("")
    return hook.document


async def resume_hook(asked: Asked) -> Render:
    """Resume a hook by its name, or by the token in the body."""
    given = await document_of(asked.request, asked.runtime.settings.webhook_limit)
    by_name = "name" in asked.path
    known = ("payload", "resume_id") if by_name else ("payload", "resume_id", "token")
    for name in given:
        if name not in known:
            raise wrong(f"body.{name[:80]}", f"there is no '{name[:80]}' here; known are: {', '.join(known)}")
    resume_id = given.get("resume_id")
    with about("body.resume_id"):
        resume_id = None if resume_id is None else valid_resume_id(resume_id)
    with about("body.token"):
        name = asked.path["name"] if by_name else name_of(valid_token(given.get("token")))
    engine = await asked.runtime.aready()
    try:
        sent = await asyncio.to_thread(Sent, engine, given.get("payload"))
        hook = await asked.runtime.arun(resumed(engine, name, sent, resume_id))
    except (NotEncodable, PayloadDoesNotFit) as error:
        raise Problem(422, type(error).__name__, str(error), path=f"body.{error.path}") from error
    return lambda: {"run": hook.run, "call": hook.call, "resume_id": resume_id}


# --- the table


async def list_routes(asked: Asked) -> Render:
    return lambda: {
        "routes": [{"method": each.method, "path": PREFIX + each.path, "summary": each.summary} for each in ROUTES]
    }


_AFTER_STEP = Parameter("only after this step: the last one of the page before")
_AFTER_EVENT = Parameter("only after this event: the cursor of the last one of the page before")

_START = Parameter("the first index; below 0 it counts from the end", "number", -(10**15), 10**15, default=0)
_ATTEMPTS = Parameter("all, or last: only what the last attempts have written", default="all", choices=("all", "last"))

ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "", list_routes, "list these routes"),
    ApiRoute(
        "GET",
        "/invocations",
        list_invocations,
        "list invocations, newest first",
        {
            "status": Parameter("only of this status", is_list=True),
            "task": Parameter("only of this task, by its whole name", is_list=True),
            "queue": Parameter("only of this queue", is_list=True),
            "parent": Parameter("only the children of this invocation", "id"),
            "attribute": Parameter("only with this attribute: name=value", is_list=True),
            "before": Parameter("only older ones: the cursor of the page before", "id"),
            "limit": limit_parameter(50, 500),
        },
    ),
    ApiRoute("GET", "/invocations/{id}", show_invocation, "show everything about one invocation"),
    ApiRoute("GET", "/invocations/{id}/history", show_history, "show each status that it has had"),
    ApiRoute("GET", "/invocations/{id}/why", explain, "explain what it waits for, or how it ended"),
    ApiRoute(
        "GET",
        "/invocations/{id}/steps",
        list_steps,
        "list the steps, children and waits of a run",
        {"after": _AFTER_STEP, "limit": limit_parameter(100, 500)},
    ),
    ApiRoute("GET", "/invocations/{id}/steps/{step:path}", show_step, "show one step, such as charge#2"),
    ApiRoute(
        "GET",
        "/invocations/{id}/events",
        list_events,
        "list the events of a run, in the order of its log",
        {
            "correlation": Parameter("only those of this step"),
            "after": _AFTER_EVENT,
            "limit": limit_parameter(100, 500),
        },
    ),
    ApiRoute("GET", "/invocations/{id}/streams", list_streams, "list the streams of an invocation"),
    ApiRoute(
        "GET",
        "/invocations/{id}/streams/{name}",
        follow_stream,
        "follow a stream, as server-sent events",
        {"start": _START, "attempts": _ATTEMPTS},
    ),
    ApiRoute(
        "GET",
        "/invocations/{id}/streams/{name}/chunks",
        list_chunks,
        "list the chunks of a stream that are there now",
        {"start": _START, "attempts": _ATTEMPTS, "limit": limit_parameter(100, 500)},
    ),
    ApiRoute(
        "GET",
        "/stats",
        show_stats,
        "show how much ended, how long it waited and ran, and what failed",
        {
            "since": Parameter("from then: a time, or how long ago, such as 24h", default="1h"),
            "until": Parameter("until then: likewise; now, if it is not given"),
            "step": Parameter("between points of the series, such as 10m"),
            "task": Parameter("only of this task, by its whole name", is_list=True),
            "queue": Parameter("only of this queue", is_list=True),
        },
    ),
    ApiRoute(
        "GET",
        "/hooks",
        list_hooks,
        "list hooks",
        {
            "run": Parameter("only those of this run", "id"),
            "before": Parameter("only after this one: the cursor of the page before"),
            "limit": limit_parameter(100, 500),
        },
    ),
    ApiRoute("POST", "/hooks/resume", resume_hook, "give a payload to the hook of a token"),
    ApiRoute("GET", "/hooks/{name}", show_hook, "show one hook, by the hash of its token"),
    ApiRoute("POST", "/hooks/{name}/resume", resume_hook, "give a payload to the hook of that name"),
)


# --- finding the route


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"({\w+(?::path)?})", path)
    made = [
        f"(?P<{part[1:-1].partition(':')[0]}>{'.+' if part.endswith(':path}') else '[^/]+'})"
        if part.startswith("{")
        else re.escape(part)
        for part in parts
    ]
    return re.compile("".join(made), re.DOTALL)


_PATTERNS = [(_pattern(each.path), each) for each in ROUTES]


def route_of(method: str, path: str) -> tuple[ApiRoute, dict[str, str]]:
    """Return the route for a path below the prefix, and the parts of the path. Raises `Problem`: 404 or 405."""
    allowed: list[str] = []
    for pattern, route in _PATTERNS:
        if (found := pattern.fullmatch(path)) is None:
            continue
        if route.method == method:
            return route, found.groupdict()
        allowed.append(route.method)
    if allowed:
        ways = ", ".join(sorted(set(allowed)))
        raise Problem(405, "MethodNotAllowed", f"this address takes {ways}", headers={"allow": ways})
    raise not_found()
