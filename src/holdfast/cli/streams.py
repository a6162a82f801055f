"""``holdfast streams``: the streams of an invocation, and their chunks, also while they are written.

To read needs no code: values of classes that are not imported are shown as the data that they hold.
"""

from __future__ import annotations

import sys
from typing import Annotated

from typer import Argument, Option

from holdfast.app import App
from holdfast.cli.command import InvocationId, command
from holdfast.cli.invocations import found
from holdfast.cli.output import Output
from holdfast.errors import UsageError
from holdfast.model.records import InvocationRecord
from holdfast.runtime.streams import CHUNK, RESTART, Chunk
from holdfast.showing import fields, moment
from holdfast.streams.reader import LogReader
from holdfast.streams.rules import ALL, LAST
from holdfast.web.documents import chunk_document
from holdfast.web.reading.model import ReadModel


@command()
def streams(
    out: Output,
    app: App,
    id: InvocationId,
    stream: Annotated[str | None, Argument(metavar="STREAM", help="Its chunks; else the streams are listed.")] = None,
    follow: Annotated[bool, Option("--follow", "-f", help="Go on until the stream ends.")] = False,
    start: Annotated[int, Option(metavar="INDEX", help="The first item; below 0 it counts from the end.")] = 0,
    stop: Annotated[int | None, Option(metavar="INDEX", help="The item behind the last.")] = None,
    last: Annotated[bool, Option("--last", help="Only what the last attempts have written.")] = False,
) -> None:
    """List the streams of an invocation, or print the chunks of one.

    A text is printed as it is, any other value as JSON. With --json and --follow each item is a document on its own
    line.
    """
    record = found(app, id)
    if stream is None:
        if follow or start or stop is not None or last:
            raise UsageError("--follow, --start, --stop and --last are about one stream: name it")
        return _list(out, app, record)

    attempts = LAST if last else ALL
    reader = ReadModel(app.runtime).stream(record.id, stream, start, stop, attempts)
    reader = reader if follow else reader.stored()
    _print(out, record, reader, follow=follow)


def _list(out: Output, app: App, record: InvocationRecord) -> None:
    listed = app.runtime.run(ReadModel(app.runtime).streams(record))
    out.document(listed.document())
    rows = [
        (
            each.name,
            each.items,
            "removed" if each.is_gone else "closed" if each.is_closed else "open",
            moment(each.created_at),
        )
        for each in listed.streams
    ]
    out.table(("stream", "items", "state", "since"), rows, empty="it has no streams")


def _print(out: Output, record: InvocationRecord, reader: LogReader, *, follow: bool) -> None:
    items = []
    for chunk in reader:
        if out.json and follow:
            out.document_line(chunk_document(chunk))
        elif out.json:
            items.append(chunk_document(chunk))
        elif chunk.kind == CHUNK:
            out.value(chunk.value)
        else:
            out.aside(_marker(chunk))
        if follow:
            sys.stdout.flush()  # a reader of a pipe wants to see it now
    if not follow:
        out.document(fields(record, "id", "task", "status") | {"stream": reader.name, "items": items})


def _marker(chunk: Chunk) -> str:
    """Say what an item means that is no chunk."""
    by = chunk.step or "the call"
    if chunk.kind == RESTART:
        return f"note: {by} starts over here, with attempt {chunk.attempt}"
    return f"note: {by} had closed the stream here, and goes on"
