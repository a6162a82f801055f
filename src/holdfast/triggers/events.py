"""Events as they are stored: emitted by users, kept for a while with what they caused.

An event is stored with the names of its triggers (`outbox`), in one write. The emitter dispatches them at once, or else
the services; what they caused is written into the event. An event with a key is first stored under that key, so that
emitting it again finds it.
"""

from __future__ import annotations

import msgspec

from holdfast.ids import InvocationId
from holdfast.model.decoding import Count, Moment
from holdfast.model.records import Entry, Source, entry_reader
from holdfast.triggers.rules import DATA, EVENT, Facts

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
    outbox: tuple[str, ...] = ()  # triggers that are yet to be dispatched
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
    """Return the entry that reserves the event's key."""
    name = f"{event.name}|{event.key}"  # no event's name has that sign
    body = msgspec.json.encode(event)
    return Entry(app=event.app, kind=KEY_KIND, name=name, body=body, keep_until=event.keep_until)


from_entry = entry_reader(EventRecord, KIND, KEY_KIND)
