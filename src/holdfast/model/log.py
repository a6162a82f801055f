"""The log of a run, or of a stream: pages of events.

An append is one page, inserted at the tail + 1. The key (app, run, generation, first position) is unique. So positions
are dense, a page is there whole or not at all, and two writers collide on the first page that differs. Stores do not
read events: a page carries them as bytes.

`judge` decides what a collision means. The stored page may be the writer's own: the reply to an earlier try was lost.
It may be that of a later owner: the writer is fenced. Or it is a page that the writer did not know.

A stream of an invocation is a log too, under the name ``ID/STREAM``: no id has a slash. Where an invocation is removed,
so are the logs whose names begin with its id and a slash. Several invocations may write to one stream, so a page names
its writer, and only a later epoch of the same writer fences it.

A damaged page stays where it is, and reading the log raises `CorruptRecord`: without the page, the log would have other
events, and its place would be free for an append.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from holdfast.errors import CorruptRecord
from holdfast.ids import InvocationId
from holdfast.model.decoding import PAGE, Count, Moment, corrupt

MAX_PAGE_EVENTS = 1000
MAX_PAGE_BYTES = 2**20
MAX_BEHIND = 1000  # pages that `Behind` has
Raw = TypeVar("Raw")


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Events of a log from position `first` to `last`, both included; positions begin at 1.

    `run` is the name of the log: that of a run, or of a stream. `epoch` is that of the writer, `operation` recognises a
    write whose reply was lost, `payloads` are the digests that the events refer to. `writer` is the invocation that
    wrote the page, if that is not the one to which the log belongs.
    """

    app: str
    run: InvocationId
    first: Count
    last: Count
    epoch: Count
    operation: str
    at: Moment
    events: bytes
    generation: Count = 0
    payloads: tuple[str, ...] = ()
    writer: str = ""


class Appended(msgspec.Struct, frozen=True):
    """The page is in the log."""


class Behind(msgspec.Struct, frozen=True):
    """The writer did not know of these pages, the first of which is where its own was to be. There may be more behind
    the last of them: at most `MAX_BEHIND` are shown, and none from a damaged page on, for which `read_log` raises.
    """

    pages: tuple[Page, ...]


class Fenced(msgspec.Struct, frozen=True):
    """A later owner of the writer's invocation has written: this writer may write no more."""

    epoch: int


AppendVerdict = Appended | Behind | Fenced
APPENDED = Appended()


def judge(page: Page, there: Sequence[Page]) -> AppendVerdict:
    """Return what became of a page, given the pages that are there from its first position on."""
    if there and there[0].operation == page.operation:
        return APPENDED
    latest = max((each.epoch for each in there if each.writer == page.writer), default=0)
    return Fenced(latest) if latest > page.epoch else Behind(tuple(there))


def stream_log(id: str, name: str) -> InvocationId:
    """Return the name of the log of a stream."""
    return InvocationId(f"{id}/{name}")


def stream_logs(id: str) -> tuple[str, str]:
    """Return between which texts the names of the logs of an invocation's streams lie: '0' comes after '/'."""
    return f"{id}/", f"{id}0"


def is_stream(log: str) -> bool:
    return "/" in log


def page_name(run: object, first: object) -> str:
    """Return what a page is called in messages: its run, and where it begins."""
    return f"{run}#{first}"


def check_page(page: Page) -> Page:
    """Return the page. Raises ValueError if it cannot be one."""
    if not 0 < page.first <= page.last:
        raise ValueError(f"it goes from {page.first} to {page.last}")
    return page


def checked(pages: Sequence[Page], *, from_start: bool = False) -> Sequence[Page]:
    """Return pages in the order of their log. Raises `CorruptRecord` if one is missing between them, or (`from_start`)
    before the first.
    """
    expected = 1 if from_start and pages else None
    for page in pages:
        if expected is not None and page.first != expected:
            error = ValueError(f"the page before it ends at {expected - 1}")
            raise corrupt(PAGE, page_name(page.run, page.first), error)
        expected = page.last + 1
    return pages


def until_damaged(found: Iterable[Raw], page_of: Callable[[Raw], Page]) -> list[Page]:
    """Return the pages before the first that cannot be read."""
    pages: list[Page] = []
    try:
        for raw in found:
            pages += checked([*pages[-1:], page_of(raw)])[-1:]
    except CorruptRecord:
        return pages
    return pages
