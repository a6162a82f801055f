"""Events: what the log of a run holds, and how pages carry them.

Names are those of the Workflow contract (`step_created`, `wait_completed`, …), plus `takeover`, `cancel_requested`,
`patched`, `data_set` and `woken`. Events of the run itself (created, started, completed) are rendered from its
invocation and never written. A reader that meets an unknown name refuses it: to skip an event would change what a body
sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from holdfast.codec import ErrorRecord
from holdfast.errors import NotDecodable
from holdfast.model.decoding import Count, Moment
from holdfast.model.log import MAX_PAGE_BYTES, MAX_PAGE_EVENTS, Page
from holdfast.model.records import digests_in

STEP_CREATED = "step_created"
STEP_STARTED = "step_started"
STEP_RETRYING = "step_retrying"
STEP_COMPLETED = "step_completed"
STEP_FAILED = "step_failed"
WAIT_CREATED = "wait_created"
WAIT_COMPLETED = "wait_completed"
ATTRIBUTES_SET = "attr_set"
TAKEOVER = "takeover"
CANCEL_REQUESTED = "cancel_requested"
PATCHED = "patched"
DATA_SET = "data_set"
WOKEN = "woken"
HOOK_CREATED = "hook_created"
HOOK_RECEIVED = "hook_received"
HOOK_DISPOSED = "hook_disposed"
HOOK_CONFLICT = "hook_conflict"
STREAM_OPENED = "stream_opened"
STREAM_WRITTEN = "stream_written"

ENDS = frozenset({STEP_COMPLETED, STEP_FAILED, WAIT_COMPLETED, HOOK_DISPOSED, HOOK_CONFLICT, STREAM_WRITTEN})
"""Events that end one of the calls of a body."""
KEEPS_OPEN = frozenset({HOOK_CREATED, HOOK_RECEIVED})
"""Events that a body gets, and whose call goes on."""
HOOKS = KEEPS_OPEN | {HOOK_DISPOSED, HOOK_CONFLICT}
CARRIED = frozenset({ATTRIBUTES_SET, DATA_SET})
"""Events that come with the end of a step: what it has set for the run."""
DELIVERED = (ENDS - {HOOK_DISPOSED}) | KEEPS_OPEN | {CANCEL_REQUESTED}
KNOWN = DELIVERED | {
    HOOK_DISPOSED,
    *(STEP_CREATED, STEP_STARTED, STEP_RETRYING, WAIT_CREATED, ATTRIBUTES_SET, TAKEOVER, PATCHED, DATA_SET, WOKEN),
    STREAM_OPENED,
}
GIVEN_UP = "the body gave it up"
"""Why a wait has ended that no body waits for any more. It is for people: a replay drops it."""
WITHOUT_PROGRESS = frozenset({TAKEOVER, STEP_CREATED, STEP_STARTED, STEP_RETRYING, WOKEN, STREAM_OPENED})
"""Events that may come again and again while a run crashes."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One line of a log. `call` names the call of the body that it is about (``charge#2``)."""

    type: str
    at: Moment
    call: str = ""
    name: str = ""  # of the step or workflow, with step_created; of a hook's entry, patch or stream; the kind of a wait
    where: str = ""  # file and line of the call in the body
    data: bytes = b""  # encoded arguments, result or values; may refer to payloads
    error: ErrorRecord | None = None
    due: Moment | None = None  # of a wait; of the next attempt
    seconds: float | None = None  # how long a wait was to be when the body began it
    attempt: Count = 0
    epoch: Count = 0  # of a takeover
    index: Count = 0  # of what the body has written to a stream
    entry: str = ""  # the inbox entry that it was made of
    child: str = ""  # the invocation that performs the call
    code: str = ""  # Python version and fingerprint of the code that wrote this event and those after it
    why: str = ""
    secret: str = ""  # tokens that no page or command shows


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Event])


def encode(events: Sequence[Event]) -> bytes:
    return _encoder.encode(events)


def decode(page: Page) -> list[Event]:
    """Return the events of a page. Raises `NotDecodable` for damage, and for an event of a newer version."""
    try:
        events = _decoder.decode(page.events)
    except (msgspec.DecodeError, RecursionError, MemoryError) as error:
        where = f"the log of {page.run}, generation {page.generation}, position {page.first}"
        raise NotDecodable(f"{where}, cannot be read: {error}") from error
    if len(events) != page.last - page.first + 1:
        raise NotDecodable(
            f"the log of {page.run} says that it goes from {page.first} to {page.last}, and has {len(events)} events"
        )
    for position, event in enumerate(events, page.first):
        if event.type not in KNOWN:
            raise NotDecodable(
                f"the log of {page.run} has an event '{event.type}' at position {position}, which this version of "
                "Holdfast does not know; run it with the version that wrote it, or a newer one"
            )
    return events


def size_of(event: Event) -> int:
    error = 0 if event.error is None else len(event.error.message) + len(event.error.traceback or "") + 64
    return len(event.data) + error + len(event.where) + 96


def payloads_of(events: Iterable[Event]) -> tuple[str, ...]:
    """Return the digests that these events refer to."""
    found = [digest for event in events for digest in digests_in(event.data, event.error)]
    return tuple(dict.fromkeys(found))


def portion(events: Sequence[Event]) -> int:
    """Return how many of these events fit into one page; at least one."""
    size = 0
    for count, event in enumerate(events[:MAX_PAGE_EVENTS]):
        size += size_of(event)
        if size > MAX_PAGE_BYTES and count:
            return count
    return min(len(events), MAX_PAGE_EVENTS)


def is_progress(events: Iterable[Event]) -> bool:
    """Return whether a run has come further with these events: a crash after that is the first in a row."""
    return any(event.type not in WITHOUT_PROGRESS for event in events)
