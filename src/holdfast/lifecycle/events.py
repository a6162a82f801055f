"""Events: something that users tell of, kept for a while with what it caused.

An event is stored with the names of the triggers that are to be told (`outbox`), in one write. They are told at once
by whoever emitted it, and else by the services; what they made of it is written into the event. With a key, an event
is first stored under that, so that whoever emits it again finds it.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from holdfast.ids import InvocationId
from holdfast.lifecycle.decoding import Count, JsonDecoder, Moment, corrupt
from holdfast.lifecycle.records import Entry, Source
from holdfast.lifecycle.triggers import DATA, EVENT, Facts

KIND = "event"
KEY_KIND = "event-key"
SWEPT_AFTER_SECONDS = 2.0


class Caused(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a trigger made of an event: an invocation, or nothing, and why."""

    trigger: str
    invocation: InvocationId = InvocationId("")
    why: str = ""


class EventRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event as it is stored. Its payload as a value is `facts.payload`."""

    app: str
    id: str
    name: str
    payload: bytes
    at: Moment
    keep_until: Moment
    kind: str = EVENT  # or a tick, for triggers that want more than that
    emitted_by: InvocationId = InvocationId("")  # the invocation that did
    key: str = ""
    depth: Count = 0
    path: tuple[str, ...] = ()
    outbox: tuple[str, ...] = ()  # triggers that are yet to be told
    caused: tuple[Caused, ...] = ()
    version: Count = 1

    @property
    def facts(self) -> Facts:
        source = Source(kind=self.kind, id=self.id, name=self.name)
        payload = DATA.decode(self.payload)
        return Facts(source=source, at=self.at, depth=self.depth, path=self.path, payload=payload)


def to_entry(event: EventRecord) -> Entry:
    return Entry(
        app=event.app,
        kind=KIND,
        name=event.id,
        body=msgspec.json.encode(event),
        version=event.version,
        due_at=event.at + SWEPT_AFTER_SECONDS if event.outbox else None,
        keep_until=None if event.outbox else event.keep_until,
    )


def key_entry(event: EventRecord) -> Entry:
    """Under this name nobody stores another."""
    name = f"{event.name}|{event.key}"  # no event's name has that sign
    body = msgspec.json.encode(event)
    return Entry(app=event.app, kind=KEY_KIND, name=name, body=body, keep_until=event.keep_until)


def from_entry(entry: Entry) -> EventRecord:
    """Raises `CorruptRecord` for what cannot be read."""
    try:
        return replace(_decoder.decode(entry.body), version=entry.version)
    except Exception as error:
        raise corrupt(KIND, entry.name, error) from error


_decoder = JsonDecoder[EventRecord](EventRecord)
