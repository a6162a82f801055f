"""Readers: pages of any size, from any index, over any number of reconnections; in other processes; by hints alone and
by looks alone; and what they get when chunks were removed or are damaged.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.streams.conftest import Processes
from tests.streams.test_streams import MEMORY, SQLITE, items, submit
from tests.support.patience import patient

from holdfast import App, Invocation
from holdfast.errors import CorruptRecord, StreamGone
from holdfast.executors.chunks import CHUNK, CLOSE, RESTART
from holdfast.model.log import APPENDED, Page, stream_log
from holdfast.runtime import hints
from holdfast.store.contract import EntryOrder, Store
from holdfast.streams.records import KIND, StreamEntry, StreamEvent, encode, entry_of, read_entry
from holdfast.streams.service import StreamUpkeep

CODEC = App("memory://").runtime.codec


def with_store(app: App, work: Callable[[Store], Any]) -> Any:
    async def job() -> Any:
        return await work((await app.runtime.engine()).store)

    return app.runtime.run(job())


def write(app: App, id: str, pages: Sequence[Sequence[StreamEvent]], name: str = "default") -> None:
    """Put pages into a stream, past its writers."""

    async def work(store: Store) -> None:
        log, tail = stream_log(id, name), 0
        await store.put_entry(entry_of(app.name, log, StreamEntry(created_at=store.now()), store.now() + 60))
        for number, events in enumerate(pages):
            first, tail = tail + 1, tail + len(events)
            facts: dict[str, Any] = {"app": app.name, "run": log, "epoch": 1, "operation": f"page {number}"}
            page = Page(first=first, last=tail, at=store.now(), events=encode(list(events)), **facts)
            assert list(await store.append([page])) == [APPENDED]

    with_store(app, work)


def event(value: int, kind: int = CHUNK, *, call: str = "", attempt: int = 1) -> StreamEvent:
    return StreamEvent(kind, 1.0, call, attempt, CODEC.encode(value) if kind == CHUNK else b"")


# --- pages of any size


CALLS = ["", "draft#1", "draft#2"]


@st.composite
def streams(draw: st.DrawFn) -> list[list[StreamEvent]]:
    """Pages of random sizes, with chunks of a few calls that begin anew now and then."""
    attempts, pages, number = dict.fromkeys(CALLS, 1), [], 0
    for size in draw(st.lists(st.integers(1, 7), max_size=12)):
        page = []
        for _ in range(size):
            call = draw(st.sampled_from(CALLS))
            if draw(st.integers(0, 9)) == 0:
                attempts[call] += 1
                page.append(event(0, RESTART, call=call, attempt=attempts[call]))
            else:
                page.append(event(number, call=call, attempt=attempts[call]))
                number += 1
        pages.append(page)
    return pages


@given(pages=streams(), data=st.data())
@settings(max_examples=40)
def test_any_start_and_any_reconnection_gives_the_list_that_was_written(
    pages: list[list[StreamEvent]], data: st.DataObject
) -> None:
    with App("memory://", name="any") as app:
        app.task(name="none")(lambda: None)
        call = submit(app, "none")
        write(app, call.id, pages)
        written = [each for page in pages for each in page]
        expected = [
            (index, "chunk" if each.kind == CHUNK else "restart", CODEC.decode(each.data) if each.data else None)
            for index, each in enumerate(written)
        ]
        start = data.draw(st.integers(-len(written) - 2, len(written) + 2))
        stop = data.draw(st.none() | st.integers(0, len(written) + 2))
        read = [(c.index, c.kind, c.value) for c in call.stream(start=start, stop=stop).stored()]
        assert read == expected[start if start >= -len(expected) else None : stop]
        assert _in_pieces(call, len(expected), data) == expected
        last = [c.value for c in call.stream(attempts="last").stored()]
        best = {each.call: max(e.attempt for e in written if e.call == each.call) for each in written}
        wanted = [each for each in written if each.kind == CHUNK and each.attempt == best[each.call]]
        assert last == [CODEC.decode(each.data) for each in wanted]


def _in_pieces(call: Invocation[Any], count: int, data: st.DataObject) -> list[tuple[int, str, Any]]:
    """Read a few items, leave, and come anew behind the last one."""
    found: list[tuple[int, str, Any]] = []
    while len(found) < count:
        some = data.draw(st.integers(1, 5))
        for chunk in call.stream(start=len(found), stop=count):
            found.append((chunk.index, chunk.kind, chunk.value))
            some -= 1
            if not some:
                break
    return found


@MEMORY
def test_a_stream_that_a_later_attempt_has_opened_again_is_read_to_its_end(app: App) -> None:
    call = submit(app, "count", 0)
    closed = [event(1), event(0, CLOSE)]
    write(app, call.id, [closed])
    assert items(call) == [(0, "chunk", 1)], "the stream is closed, though the call has not ended"
    assert call.stream().tail().index == 0
    again = [event(0, RESTART, attempt=2), event(2, attempt=2), event(0, CLOSE, attempt=2)]
    write(app, call.id, [closed, again], "again")
    kinds = ["chunk", "closed", "restart", "chunk"]
    assert [(index, kind) for index, kind, _ in items(call, "again")] == list(enumerate(kinds))
    assert items(call, "again", start=1)[0] == (1, "closed", None)
    assert list(call.stream("again", attempts="last").values()) == [2]


# --- other processes


def _numbers(call: Invocation[Any]) -> list[int]:
    return list(call.stream().values())


@pytest.mark.slow
@pytest.mark.parametrize("url", ["standalone"], indirect=True)
def test_a_reader_in_another_process_sees_the_same_bytes_without_notifications(app: App, processes: Processes) -> None:
    """A standalone MongoDB has no change streams: the reader looks."""
    call = submit(app, "count", 3000)
    processes.runner()
    assert _numbers(call) == list(range(3000))


@pytest.fixture
def _no_looks() -> Iterator[None]:
    hints.switch("off")
    yield
    hints.switch("on")


@pytest.mark.slow
@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@pytest.mark.usefixtures("_no_looks")
def test_hints_alone_are_enough(app: App, processes: Processes) -> None:
    call = submit(app, "count", 3000)
    processes.runner(HOLDFAST_TEST_FALLBACK_LOOKS="on")
    assert _numbers(call) == list(range(3000))


READ = """
import sys
from tests.streams.studio import app
seen = []
for chunk in app.invocation(sys.argv[1]).stream():
    seen.append(chunk.value)
    if len(seen) == 1:
        print("begun", flush=True)
print(seen == list(range(int(sys.argv[2]))), flush=True)
"""


@pytest.mark.slow
@SQLITE
def test_a_frozen_reader_holds_up_nobody_and_reads_on_when_it_wakes(app: App, processes: Processes, url: str) -> None:
    with app.runner():
        call = submit(app, "paced", 40, 0.02)
        reader = processes.start("-c", READ, call.id, "40")
        log = processes.log(reader)
        _until(lambda: "begun" in log.read_text(), "the reader has a chunk")
        reader.send_signal(signal.SIGSTOP)
        assert _numbers(call) == list(range(40))
        assert call.result(patient(20)) == 40
        reader.send_signal(signal.SIGCONT)
        assert reader.wait(30) == 0
    assert log.read_text().splitlines()[-1] == "True"


def _until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + patient(30)
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


# --- retention


def _sweep(app: App) -> None:
    async def job() -> None:
        await StreamUpkeep(await app.runtime.engine()).sweep()

    app.runtime.run(job())


def _make_due(app: App) -> None:
    """Let the entries of all streams be due."""

    async def work(store: Store) -> None:
        for entry in await store.entries(app.name, KIND):
            due = entry_of(app.name, entry.name, read_entry(entry), store.now() - 1, entry.version + 1)
            assert await store.put_entry(due)

    with_store(app, work)


@pytest.fixture
def forgetful(url: str) -> Iterator[App]:
    from tests.streams import studio

    with App(url, name="studio", poll_interval_seconds=0.1, stream_retention_seconds=60.0) as app:
        studio.declare(app)
        yield app


class Later:
    """A store whose time is ahead."""

    def __init__(self, store: Store, seconds: float) -> None:
        self._store, self._seconds = store, seconds

    def now(self) -> float:
        return self._store.now() + self._seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _sweep_later(app: App, seconds: float) -> None:
    async def job() -> None:
        upkeep = StreamUpkeep(await app.runtime.engine())
        upkeep._store = Later(upkeep._store, seconds)  # type: ignore[assignment]
        await upkeep.sweep()

    app.runtime.run(job())


def test_chunks_whose_time_is_over_are_gone_and_readers_are_told(forgetful: App) -> None:
    app = forgetful
    with app.runner():
        call = submit(app, "count", 10)
        call.result(patient(20))
    _sweep_later(app, 700)
    with pytest.raises(StreamGone, match="from index 0 to 9"):
        items(call)
    with pytest.raises(StreamGone):
        items(call, start=-1)
    with pytest.raises(StreamGone, match="from index 5"):
        items(call, start=5)
    assert items(call, start=10) == []
    (info,) = call.streams()
    assert (info.items, info.is_gone, info.is_closed) == (10, True, True)
    assert call.result() == 10, "the invocation is kept"
    _sweep_later(app, 700)
    assert len(call.streams()) == 1


def test_a_stream_that_may_be_kept_longer_stays(forgetful: App) -> None:
    with forgetful.runner():
        call = submit(forgetful, "count", 10)
        call.result(patient(20))
    _make_due(forgetful)
    _sweep(forgetful)
    assert list(call.stream().values()) == list(range(10))
    later = with_store(forgetful, lambda store: store.entries("studio", KIND, order=EntryOrder.DUE))
    assert later[0].due_at >= call.record().changed_at + 60


def test_the_entry_of_a_stream_goes_when_its_invocation_is_gone(app: App) -> None:
    with app.runner():
        call, other = submit(app, "count", 3), submit(app, "count", 3)
        assert (call.result(patient(20)), other.result(patient(20))) == (3, 3)
    assert with_store(app, lambda store: store.remove_ended(app.name, [call.id])) == 1
    assert with_store(app, lambda store: store.read_log(app.name, stream_log(call.id, "default"), limit=1)) == []
    _make_due(app)
    _sweep(app)
    left = with_store(app, lambda store: store.entries(app.name, KIND))
    assert [entry.name for entry in left] == [stream_log(other.id, "default")]
    assert list(other.stream().values()) == [0, 1, 2]


@MEMORY
def test_a_crash_between_the_mark_and_the_removal_is_made_up_for(forgetful: App) -> None:
    app = forgetful
    with app.runner():
        call = submit(app, "count", 10)
        call.result(patient(20))

    async def crash() -> None:
        upkeep = StreamUpkeep(await app.runtime.engine())
        upkeep._store = Later(upkeep._store, 700)  # type: ignore[assignment]
        upkeep._store.remove_log = _fails  # type: ignore[method-assign]
        with pytest.raises(OSError, match="the process dies"):
            await upkeep.sweep()

    app.runtime.run(crash())
    assert [info.is_gone for info in call.streams()] == [True]
    assert len(with_store(app, lambda store: store.read_log(app.name, stream_log(call.id, "default"), limit=9))) > 0
    _sweep_later(app, 700)
    assert with_store(app, lambda store: store.read_log(app.name, stream_log(call.id, "default"), limit=9)) == []


async def _fails(*args: Any, **more: Any) -> int:
    raise OSError("the process dies")


# --- damage


@MEMORY
def test_a_damaged_page_is_told_of_and_stops_neither_writers_of_others_nor_readers_before_it(app: App) -> None:
    call = submit(app, "count", 0)
    write(app, call.id, [[event(1)], [event(2)], [event(3)]])

    async def damage(store: Any) -> None:
        log = store._logs[app.name, stream_log(call.id, "default"), 0]
        log[1] = Page(**{name: getattr(log[1], name) for name in Page.__struct_fields__} | {"events": b"\xff"})

    with_store(app, damage)
    assert items(call, stop=1) == [(0, "chunk", 1)]
    with pytest.raises(CorruptRecord, match="position 2, cannot be read"):
        items(call)
    assert items(call, start=2, stop=3) == [(2, "chunk", 3)]


@MEMORY
def test_a_writer_finds_the_end_of_a_damaged_stream_and_fails(app: App) -> None:
    @app.task(name="again", retries=1)
    def again() -> None:
        from holdfast import stream

        stream().write(1)

    call = app.get_task("again").submit()
    write(app, call.id, [[event(1)]])

    async def damage(store: Any) -> None:
        log = store._logs[app.name, stream_log(call.id, "default"), 0]
        log[0] = Page(**{name: getattr(log[0], name) for name in Page.__struct_fields__} | {"events": b"\xff"})

    with_store(app, damage)
    with app.runner(), pytest.raises(CorruptRecord, match="cannot be read"):
        call.result(patient(20))


def test_a_reader_that_is_cancelled_touches_no_other(app: App) -> None:
    async def read(call: Invocation[Any]) -> list[int]:
        return [chunk.value async for chunk in call.stream()]

    async def main() -> list[int]:
        call = await app.get_task("paced").asubmit(20, 0.01)
        first, second = (asyncio.create_task(read(call)) for _ in range(2))
        async for _ in call.stream():
            break
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await second

    with app.runner():
        assert asyncio.run(main()) == list(range(20))
