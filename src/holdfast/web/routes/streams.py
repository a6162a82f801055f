"""Streams over HTTP: chunks that are there, and server-sent events."""

from __future__ import annotations

from starlette.responses import Response

from holdfast.streams.rules import valid_stream
from holdfast.web.problems import about
from holdfast.web.requests import Parameter, limit_parameter
from holdfast.web.routing import ApiRoute, Asked, Render
from holdfast.web.streaming import read_stream, stream_events

LIFE_SECONDS = 900.0  # as that of the live feed: a token that was revoked reads no longer


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
    asked.streams.admit(asked.principal.name)
    return stream_events(reader, asked.streams, asked.runtime.telemetry, LIFE_SECONDS, asked.principal.name)


_START = Parameter("the first index; below 0 it counts from the end", "number", -(10**15), 10**15, default=0)
_ATTEMPTS = Parameter("all, or last: only what the last attempts have written", default="all", choices=("all", "last"))

ROUTES = (
    ApiRoute("GET", "/invocations/{id}/streams", list_streams, "list the streams of an invocation"),
    ApiRoute(
        "GET",
        "/invocations/{id}/streams/{name}",
        follow_stream,
        "follow a stream, as server-sent events",
        {"start": _START, "attempts": _ATTEMPTS},
        is_stream=True,
    ),
    ApiRoute(
        "GET",
        "/invocations/{id}/streams/{name}/chunks",
        list_chunks,
        "list the chunks of a stream that are there now",
        {"start": _START, "attempts": _ATTEMPTS, "limit": limit_parameter(100, 500)},
    ),
)
