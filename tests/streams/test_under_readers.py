"""What lies behind a reader is removed or lost while it reads, or comes faster than it does: it is told, and holds
little.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from tests.streams.test_reading import event, with_store, write
from tests.streams.test_streams import MEMORY, items, submit
from tests.support.patience import patient

from holdfast import App, Invocation
from holdfast.errors import CorruptRecord, StreamGone
from holdfast.executors.chunks import CHUNK
from holdfast.model.log import Page, stream_log
from holdfast.store.memory.store import MemoryStore
from holdfast.streams.records import StreamEntry, StreamEvent, encode, entry_of

pytestmark = MEMORY


def lose(app: App, call: Invocation[Any], pages: slice) -> None:
    """Remove pages, past the store: as a removal that has come half way, or damage."""

    async def work(store: Any) -> None:
        del store._logs[app.name, stream_log(call.id, "default"), 0][pages]

    with_store(app, work)


@pytest.fixture
def ended(app: App) -> Invocation[Any]:
    """A call that has ended, with five pages of two chunks."""
    with app.runner():
        call = submit(app, "count", 0)
        call.result(patient(20))
    write(app, call.id, [[event(2 * page), event(2 * page + 1)] for page in range(5)])
    return call


def test_a_page_that_is_lost_between_two_reads_is_not_skipped(app: App, ended: Invocation[Any]) -> None:
    reading = iter(ended.stream())
    assert next(reading).value == 0  # it has read two pages
    lose(app, ended, slice(2, 3))
    seen = []
    with pytest.raises(CorruptRecord, match="goes on at position 7, and 5 is missing"):
        seen += [chunk.value for chunk in reading]
    lose(app, ended, slice(0, 2))
    with pytest.raises(CorruptRecord):
        items(ended, start=4)


def _retain(store: Any, call: Invocation[Any], until: float | None) -> None:
    key = next(key for key, record in store._records.items() if record.id == call.id)
    store._records[key] = msgspec.structs.replace(store._records[key], retain_until=until)


def retain_until(app: App, call: Invocation[Any], at: float) -> None:
    async def work(store: Any) -> None:
        _retain(store, call, at)

    with_store(app, work)


def test_a_removal_that_has_come_half_way_is_told_of(app: App, ended: Invocation[Any]) -> None:
    """In MongoDB pages go one after another, and their invocation later: in between its stream is not just over."""
    early, late = iter(ended.stream()), iter(ended.stream())
    assert next(early).value == next(late).value == 0
    retain_until(app, ended, 1.0)
    assert len(items(ended)) == 10, "nothing was removed yet"
    lose(app, ended, slice(0, 4))
    with pytest.raises(StreamGone, match="with its invocation"):
        list(early)
    lose(app, ended, slice(0, 9))
    with pytest.raises(StreamGone, match="with its invocation"):
        list(late)
    for given in ({}, {"start": -3}, {"start": 4}):
        with pytest.raises(StreamGone):
            items(ended, **given)
    with pytest.raises(StreamGone):
        ended.stream().tail()


async def follow(call: Invocation[Any], seen: asyncio.Queue[int], stop: int | None = None) -> None:
    async for chunk in call.stream(stop=stop):
        await seen.put(chunk.index)


def test_a_slow_reader_beside_a_quick_one_is_told_of_a_removal(app: App) -> None:
    """The quick one has seen all that the slow one misses."""

    async def main(error: type[Exception], retain_until: float | None) -> None:
        call, seen = await app.get_task("count").asubmit(0), asyncio.Queue[int]()
        await app.runtime.arun(_append(app, call, 1, *[event(number) for number in range(5)]))
        slow, quick = aiter(call.stream()), asyncio.create_task(follow(call, seen))
        assert (await anext(slow)).value == 0
        assert [await seen.get() for _ in range(5)] == list(range(5))
        await app.runtime.arun(_append(app, call, 6, event(5)))
        assert await seen.get() == 5
        await app.runtime.arun(_lose_all(app, call, retain_until))
        with pytest.raises(error):
            [chunk async for chunk in slow]
        quick.cancel()

    asyncio.run(main(StreamGone, 1.0))
    asyncio.run(main(CorruptRecord, None))


async def _lose_all(app: App, call: Invocation[Any], retain_until: float | None) -> None:
    store: Any = (await app.runtime.engine()).store
    await store.put_entry(entry_of(app.name, stream_log(call.id, "default"), StreamEntry(created_at=1.0), 1.0))
    del store._logs[app.name, stream_log(call.id, "default"), 0][:]
    _retain(store, call, retain_until)


def test_a_late_reader_holds_a_few_pages(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty pages of a megabyte come at once while readers wait at the end: each read takes few of them."""
    sizes = []
    read_log = MemoryStore.read_log

    async def counted(self: MemoryStore, *args: Any, **more: Any) -> Sequence[Page]:
        pages = await read_log(self, *args, **more)
        sizes.append(sum(len(page.events) for page in pages))
        return pages

    monkeypatch.setattr(MemoryStore, "read_log", counted)
    large = StreamEvent(CHUNK, 1.0, "", 1, app.runtime.codec.encode(b"x" * 2**20))

    async def main() -> list[list[int]]:
        call = await app.get_task("count").asubmit(0)
        seen = [asyncio.Queue[int](), asyncio.Queue[int]()]
        await app.runtime.arun(_append(app, call, 1, event(0)))
        reading = [asyncio.create_task(follow(call, each, 61)) for each in seen]
        found = [[await each.get()] for each in seen]
        await app.runtime.arun(_append(app, call, 2, *[large] * 60))
        await asyncio.gather(*reading)
        return [[*first, *[each.get_nowait() for _ in range(60)]] for first, each in zip(found, seen, strict=True)]

    assert asyncio.run(main()) == [list(range(61))] * 2
    assert max(sizes) < 4 * 2**20


async def _append(app: App, call: Invocation[Any], first: int, *events: StreamEvent) -> None:
    """Append these events at once, each as a page."""
    store = (await app.runtime.engine()).store
    for position, each in enumerate(events, first):
        facts: dict[str, Any] = {"app": app.name, "run": stream_log(call.id, "default"), "epoch": 1, "at": 1.0}
        await store.append(
            [Page(first=position, last=position, operation=f"page {position}", events=encode([each]), **facts)]
        )
