"""Decisions about streams: names, portions, which writer may go on, where a reader begins. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.errors import StreamClosed, UsageError
from holdfast.executors.chunks import CLOSE, RESTART
from holdfast.model.log import MAX_PAGE_BYTES, MAX_PAGE_EVENTS, Page
from holdfast.model.names import valid_name
from holdfast.streams.records import StreamEvent

DEFAULT = "default"
MAX_NAME = 100
LOOK_AGAIN_SECONDS = 86_400.0  # at the entry of a stream, whether its invocation is gone
SOONEST_SECONDS = 600.0
FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.02, 1.0
FEWEST_PAGES, MOST_PAGES, READ_BYTES = 2, 100, 2**20  # of one read
ALL, LAST = "all", "last"


def valid_stream(name: str) -> str:
    """Return the name of a stream. Raises `UsageError`."""
    valid_name("stream", name)
    if "/" in name or len(name) > MAX_NAME:
        raise UsageError(f"{name!r:.120} is no name for a stream: 1 to {MAX_NAME} characters, without a slash")
    return name


def look_again_after(kept_seconds: float) -> float:
    """Return after how many seconds to look at a stream whose invocation has not ended."""
    return min(LOOK_AGAIN_SECONDS, max(SOONEST_SECONDS, kept_seconds))


def check_range(start: object, stop: object, attempts: object) -> None:
    """Raise `UsageError` unless a stream can be read so."""
    if type(start) is not int:
        raise UsageError(f"start={start!r:.80}: expected an index, a whole number; below 0 it counts from the end")
    if stop is not None and (type(stop) is not int or stop < 0):
        raise UsageError(f"stop={stop!r:.80}: expected an index, a whole number from 0 on, or None")
    if attempts not in (ALL, LAST):
        raise UsageError(f"attempts={attempts!r:.80}: expected '{ALL}' or '{LAST}'")


def first_index(start: int, items: int) -> int:
    """Return where to begin in a stream of so many items; `start` below 0 counts from the end."""
    return start if start >= 0 else max(0, items + start)


def pages_at_once(pages: Sequence[Page]) -> int:
    """Return how many pages to read next, going by the size of the last ones: about a megabyte."""
    size = sum(len(page.events) for page in pages)
    return min(MOST_PAGES, max(1, READ_BYTES * len(pages) // max(1, size)))


def portion(sizes: Sequence[int]) -> int:
    """Return how many of these chunks fit into one page; at least one."""
    total = 0
    for count, size in enumerate(sizes[:MAX_PAGE_EVENTS]):
        total += size
        if total > MAX_PAGE_BYTES and count:
            return count
    return min(len(sizes), MAX_PAGE_EVENTS)


def refusal(name: str, last: StreamEvent | None, written_by: str, event: StreamEvent, writer: str) -> Exception | None:
    """Return why nothing may follow the last event of a stream; None if it may. A stream that is closed stays closed,
    unless a later attempt of the call that closed it starts over.
    """
    if last is None or last.kind != CLOSE:
        return None
    if (written_by, last.call) == (writer, event.call) and event.attempt > last.attempt:
        return None
    by = f" by {last.call}" if last.call else ""
    return StreamClosed(f"the stream '{name}' is closed{by}: nothing can be written to it")


Caller = tuple[str, str]
"""The writer of a page, and the call of an event: what attempts are counted for."""


def restarts(first: int, writer: str, events: Iterable[StreamEvent]) -> dict[Caller, int]:
    """Return the position of the last restart of each caller in a page that begins there."""
    return {(writer, each.call): position for position, each in enumerate(events, first) if each.kind == RESTART}
