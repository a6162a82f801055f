"""What is stored of a stream: pages of events in its own log, and an entry that says that there is one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from holdfast.errors import CorruptRecord
from holdfast.executors.chunks import CHUNK, CLOSE, RESTART
from holdfast.model.decoding import Count, Moment
from holdfast.model.log import Page
from holdfast.model.records import Entry, digests_in, entry_reader

KIND = "stream"  # of entries
_KINDS = (CHUNK, RESTART, CLOSE)


class StreamEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A chunk, that a call starts over (RESTART), or that a stream is closed (CLOSE).

    `call` is the step of a workflow that wrote it, empty for a body or a task, and `attempt` its attempt.
    """

    kind: int
    at: Moment
    call: str = ""
    attempt: Count = 1
    data: bytes = b""  # of a chunk: its encoded value, which may refer to payloads


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[StreamEvent])


def encode(events: Sequence[StreamEvent]) -> bytes:
    return _encoder.encode(events)


def decode(page: Page) -> list[StreamEvent]:
    """Return the events of a page. Raises `CorruptRecord` for damage, and for an event of a newer version."""
    where = f"the stream {page.run}, position {page.first}"
    try:
        events = _decoder.decode(page.events)
    except (msgspec.DecodeError, RecursionError, MemoryError) as error:
        raise CorruptRecord(f"{where}, cannot be read: {error}", kind="page", id=page.run) from error
    if len(events) != page.last - page.first + 1:
        why = f"{where}, is to go to {page.last}, and has {len(events)} events"
        raise CorruptRecord(why, kind="page", id=page.run)
    for event in events:
        if event.kind not in _KINDS:
            raise CorruptRecord(
                f"{where}, has an event of kind {event.kind}, which this version of Holdfast does not know; read it "
                "with the version that wrote it, or a newer one",
                kind="page",
                id=page.run,
            )
    return events


def payloads_of(events: Iterable[StreamEvent]) -> tuple[str, ...]:
    """Return the digests that these events refer to."""
    return digests_in(*[event.data for event in events])


class StreamEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Says that an invocation has a stream. `gone`: its chunks were removed, of which there were `last`."""

    created_at: Moment
    gone: bool = False
    last: Count = 0


read_entry = entry_reader(StreamEntry, KIND)


def entry_of(app: str, log: str, record: StreamEntry, due_at: float, version: int = 1) -> Entry:
    """Return the entry of a stream, by the name of its log. It is to be looked at again at `due_at`."""
    return Entry(
        app=app,
        kind=KIND,
        name=log,
        body=msgspec.json.encode(record),
        version=version,
        due_at=due_at,
        subject=log.partition("/")[0],
    )
