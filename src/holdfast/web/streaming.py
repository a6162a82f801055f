"""Streams as server-sent events: the id of each event is the index of its chunk, so a reader that reconnects continues
there.

The data of an event is the value of a chunk, as JSON. Bytes are events `bytes`, in Base64. An item that is no chunk is
an event of its kind (`restart`, `closed`). The last event is `end`; or `problem`, if the stream cannot be read on.
"""

from __future__ import annotations

import base64
from contextlib import aclosing

from starlette.responses import Response

from holdfast.errors import HoldfastError, UsageError
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.streams import CHUNK, Chunk
from holdfast.showing import as_json
from holdfast.streams.reader import LogReader
from holdfast.telemetry import Telemetry
from holdfast.telemetry.events import WebRequestFailed
from holdfast.web.documents import chunk_document
from holdfast.web.problems import Problem, about, internal_error, problem_of, wrong
from holdfast.web.reading.model import ReadModel
from holdfast.web.sse import Batches, EventStreamResponse, OpenStreams, ServerEvent

END = "end"


async def read_stream(
    reading: ReadModel, id: str, name: str, *, start: int = 0, last_event_id: str | None = None, attempts: str = "all"
) -> LogReader | None:
    """Return a reader from an index on, or from behind the last event that the client has; None if it has all.

    Raises `Problem`, `InvocationNotFound`, `StreamGone`.
    """
    if last_event_id == END:
        return None
    if last_event_id is not None:
        if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) <= 18):
            raise wrong("headers.last-event-id", f"Last-Event-ID {last_event_id[:80]!r}: expected the id of an event")
        start = int(last_event_id) + 1
    with about("path.name"):
        reader = reading.stream(id, name, start, attempts=attempts)
    await reader.atail()  # what cannot be read is said before the answer begins
    return reader


async def answer_stream(runtime: AppRuntime, id: str, name: str, *, start: int, last_event_id: str | None) -> Response:
    """Return the response for a route of the user's own. Raises errors of Holdfast, and no `Problem`."""
    try:
        reader = await read_stream(ReadModel(runtime), id, name, start=start, last_event_id=last_event_id)
    except Problem as problem:
        raise UsageError(problem.detail) from None
    return stream_events(reader, OpenStreams(), runtime.telemetry)


def stream_events(
    reader: LogReader | None,
    streams: OpenStreams,
    telemetry: Telemetry,
    life_seconds: float | None = None,
    who: str = "",
) -> Response:
    """Return the response for a reader; 204, after which a browser does not reconnect, if there is nothing to read."""
    if reader is None:
        return Response(status_code=204)
    return EventStreamResponse(_events(reader, telemetry), streams, life_seconds=life_seconds, who=who)


async def _events(reader: LogReader, telemetry: Telemetry) -> Batches:
    try:
        async with aclosing(reader.batches()) as batches:
            async for batch in batches:
                yield [event_of(chunk) for chunk in batch]
        yield [ServerEvent(as_json({"stream": reader.name}), id=END, name=END)]
    except Exception as error:
        if not isinstance(error, HoldfastError):
            telemetry.emit(WebRequestFailed("GET", "a stream", repr(error), error))
        yield [_problem(problem_of(error) or internal_error())]


def event_of(chunk: Chunk) -> ServerEvent:
    if chunk.kind != CHUNK:
        return ServerEvent(as_json(chunk_document(chunk)), id=f"{chunk.index}", name=chunk.kind)
    if isinstance(chunk.value, bytes):
        return ServerEvent(base64.b64encode(chunk.value).decode(), id=f"{chunk.index}", name="bytes")
    return ServerEvent(as_json(chunk.value), id=f"{chunk.index}")


def _problem(problem: Problem) -> ServerEvent:
    return ServerEvent(as_json(problem.document()), name="problem")
