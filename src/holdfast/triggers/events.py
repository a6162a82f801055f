"""Events as they are stored: emitted by users, kept for a while with what they caused.

A payload that is too large for a record is stored apart, as an argument is; the entry of the event refers to it.

An event is stored with the names of its triggers (`outbox`), in one write. The emitter dispatches them at once, or else
the services; what they caused is written into the event. An event with a key is first stored under that key, so that
emitting it again finds it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.codec import Payloads
from holdfast.ids import InvocationId
from holdfast.model.decoding import Count, Moment
from holdfast.model.records import Entry, Source, digests_in, entry_reader
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
    """An event as it is stored. Its payload as a value is `facts.payload`; of a large one, `facts_with` what was
    fetched, else a text says that it is not at hand.
    """

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
        return self._facts(DATA.decode(self.payload, describe=True))

    def facts_with(self, payloads: Payloads) -> Facts:
        return self._facts(DATA.decode(self.payload, payloads))

    def _facts(self, payload: Any) -> Facts:
        source = Source(kind=self.kind, id=self.id, name=self.name)
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
        payloads=digests_in(event.payload),
    )


def key_entry(event: EventRecord) -> Entry:
    """Return the entry that reserves the event's key."""
    name = f"{event.name}|{event.key}"  # no event's name has that sign
    body, payloads = msgspec.json.encode(event), digests_in(event.payload)
    return Entry(app=event.app, kind=KEY_KIND, name=name, body=body, keep_until=event.keep_until, payloads=payloads)


from_entry = entry_reader(EventRecord, KIND, KEY_KIND)
