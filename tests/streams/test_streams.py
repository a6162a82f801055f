"""What tasks, steps and bodies write to streams, and what readers see: on every store, with a runner of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.streams import studio
from tests.support.patience import patient

from holdfast import App, Invocation, UsageError, stream
from holdfast.errors import InvocationNotFound, StreamClosed
from holdfast.executors.chunks import MAX_CHUNKS
from holdfast.invocation import Chunk, StreamTail
from holdfast.store.sqlite.store import SqliteStore

SQLITE = pytest.mark.parametrize("url", ["sqlite"], indirect=True)
MEMORY = pytest.mark.parametrize("url", ["memory"], indirect=True)
BY = pytest.mark.parametrize("apart", ["", ".apart"], ids=["thread", "process"])


def submit(app: App, name: str, *args: Any) -> Invocation[Any]:
    return app.get_task(name).submit(*args)


def items(invocation: Invocation[Any], name: str = "default", **range_: Any) -> list[tuple[int, str, Any]]:
    return [(chunk.index, chunk.kind, chunk.value) for chunk in invocation.stream(name, **range_)]


# --- writing


@BY
def test_chunks_are_read_in_order_while_they_are_written(app: App, apart: str) -> None:
    with app.runner():
        call = submit(app, f"count{apart}", 2500)
        assert [chunk.value for chunk in call.stream()] == list(range(2500))
        assert call.result(patient(20)) == 2500
        assert [chunk.index for chunk in call.stream()] == list(range(2500))
        assert call.stream().tail() == StreamTail(index=2499, is_closed=True)
        (info,) = call.streams()
        assert (info.name, info.items, info.is_closed, info.is_gone) == ("default", 2500, True, False)


@BY
def test_values_come_back_as_they_were_large_ones_too(app: App, apart: str) -> None:
    with app.runner():
        call = submit(app, f"values{apart}")
        text, small, nested, large, long = list(call.stream().values())
        assert (text, small, nested) == ("text", b"\x00bytes", {"a": [1, 2.5, None]})
        assert (type(large), len(large), long) == (bytes, studio.LARGE, "x" * 100_000)


@BY
def test_coroutines_await_their_writes(app: App, apart: str) -> None:
    with app.runner():
        call = submit(app, f"tokens{apart}", "to be or not to be")
        assert list(call.stream("tokens").values()) == ["to", "be", "or", "not", "to", "be"]
        assert call.stream("tokens").tail() == StreamTail(index=5, is_closed=True)
        assert call.result(patient(20)) == 6


def test_a_flush_waits_for_the_store(app: App) -> None:
    with app.runner():
        assert submit(app, "flushed", app.name).result(patient(20)) == [0, 1, 2]


@BY
def test_an_attempt_that_runs_again_is_marked(app: App, apart: str) -> None:
    with app.runner():
        call = submit(app, f"lost_after{apart}", 2, 3)
        assert call.result(patient(20)) == 3
        read = items(call, "lost")
        assert [kind for _, kind, _ in read] == ["chunk"] * 2 + ["restart", "chunk", "chunk"] * 2
        assert [index for index, _, _ in read] == list(range(8))
        assert [value for _, kind, value in read if kind == "chunk"] == [(a, n) for a in (1, 2, 3) for n in (0, 1)]
        assert [chunk.attempt for chunk in call.stream("lost")] == [1, 1, 2, 2, 2, 3, 3, 3]
        assert items(call, "lost", attempts="last") == [(6, "chunk", (3, 0)), (7, "chunk", (3, 1))]
        assert items(call, "lost", attempts="last", start=7) == [(7, "chunk", (3, 1))]


@SQLITE
def test_an_attempt_that_writes_nothing_makes_void_what_the_one_before_wrote(app: App) -> None:
    with app.runner():
        call = submit(app, "silent_again", 2)
        call.result(patient(20))
        assert items(call, "first") == [(0, "chunk", "void"), (1, "restart", None)]
        assert items(call, "second", attempts="last") == []


@BY
def test_a_closed_stream_takes_nothing_more(app: App, apart: str) -> None:
    with app.runner():
        call = submit(app, f"closes_and_writes{apart}")
        assert "was closed by this call" in call.result(patient(20))
        assert items(call, "done") == [(0, "chunk", 1)]


# --- workflows


def test_a_body_and_its_steps_write_to_the_streams_of_the_run(app: App) -> None:
    with app.runner():
        run = submit(app, "essay", 3)
        assert run.result(patient(20)) == "done"
        assert [(info.name, info.items) for info in run.streams()] == [("draft", 3), ("notes", 1), ("progress", 2)]
        assert list(run.stream("progress").values()) == ["begun", b"drafted"]
        assert list(run.stream("draft").values()) == ["1.0", "1.1", "1.2"]
        assert [chunk.step for chunk in run.stream("draft")] == ["draft#1"] * 3
        assert [step.id for step in run.steps()] == ["draft#1"]
        opened = [event for event in run.events() if event.type == "stream_opened"]
        assert [(event.correlation, event.name) for event in opened] == [("draft#1", "draft")]


@SQLITE
def test_a_plain_body_waits_for_its_writes_and_a_step_that_runs_again_is_marked(app: App) -> None:
    with app.runner():
        run = submit(app, "plain", 2)
        assert run.result(patient(20)) == 3
        assert items(run, "notes") == [(0, "chunk", 3)]
        kinds = [kind for _, kind, _ in items(run, "draft")]
        assert kinds == ["chunk"] * 2 + ["restart", "chunk", "chunk"] * 2
        assert list(run.stream("draft", attempts="last").values()) == ["3.0", "3.1"]


@pytest.mark.parametrize("queue", ["", "far"])
def test_parallel_steps_interleave_whole_chunks_and_lose_none(app: App, queue: str) -> None:
    with app.runner(concurrency=8):
        run = submit(app, "together", 5, 300, queue)
        assert run.result(patient(30)) == 1500
        read = [chunk for chunk in run.stream("draft") if chunk.kind == "chunk"]
        assert len(read) == 1500
        for step in (f"draft#{number}" for number in range(1, 6)):
            mine = [chunk.value for chunk in read if chunk.step == step]
            assert mine == [f"1.{number}" for number in range(300)]


@SQLITE
def test_a_step_in_a_process_of_its_own_writes_to_the_streams_of_its_run(app: App) -> None:
    with app.runner():
        run = submit(app, "isolated", 3)
        run.result(patient(20))
        assert [kind for _, kind, _ in items(run, "draft")] == ["chunk"] * 3 + ["restart"] + ["chunk"] * 3
        assert list(run.stream("draft", attempts="last").values()) == [0, 1, 2]


@SQLITE
def test_what_a_body_has_closed_is_closed_for_its_steps(app: App) -> None:
    with app.runner():
        run = submit(app, "closed")
        first, second = run.result(patient(20))
        assert first == second == "the stream 'done' is closed: nothing can be written to it"
        assert items(run, "done") == []


@SQLITE
def test_a_transactional_step_writes_to_no_stream(app: App) -> None:
    with app.runner(), pytest.raises(UsageError, match="is transactional, and a stream takes no part"):
        submit(app, "banking").result(patient(20))


# --- reading


@pytest.fixture
def counted(app: App) -> Invocation[Any]:
    with app.runner():
        call = submit(app, "count", 3000)
        call.result(patient(20))
        return call


def test_a_stream_is_read_from_any_index_to_any(counted: Invocation[Any]) -> None:
    def indexes(**given: Any) -> list[int]:
        return [chunk.index for chunk in counted.stream(**given)]

    everything = list(range(3000))
    for start, stop in ((0, None), (1, 2), (0, 0), (999, 1001), (1000, 1000), (2999, None), (3000, None), (5000, None)):
        assert indexes(start=start, stop=stop) == everything[start:stop], (start, stop)
    for start in (-1, -2, -1001, -3000, -5000):
        assert indexes(start=start) == everything[start:], start
    assert indexes(start=-3, stop=2999) == [2997, 2998]
    assert indexes(start=10, stop=5) == []


def test_readers_that_await_see_the_same(counted: Invocation[Any]) -> None:
    async def read(start: int) -> list[Chunk]:
        return [chunk async for chunk in counted.stream(start=start)]

    async def main() -> list[list[Chunk]]:
        assert await counted.stream().atail() == StreamTail(index=2999, is_closed=True)
        assert [info.name for info in await counted.astreams()] == ["default"]
        return list(await asyncio.gather(*[read(start) for start in (0, 1500, -10)]))

    whole, half, last = asyncio.run(main())
    assert whole == list(counted.stream())
    assert half == whole[1500:]
    assert last == whole[-10:]


@MEMORY
def test_a_reader_does_not_block_an_event_loop(counted: Invocation[Any]) -> None:
    async def main() -> None:
        with pytest.raises(UsageError, match="'async for … in stream'"):
            list(counted.stream())

    asyncio.run(main())


def test_many_readers_follow_one_stream_each_at_its_own_pace(app: App) -> None:
    async def read(call: Invocation[Any], number: int) -> list[int]:
        seen = []
        async for chunk in call.stream():
            seen.append(chunk.value)
            if number % 5 == 0:
                await asyncio.sleep(0)
            if number == 3 and len(seen) == 10:
                break  # it leaves, and the others go on
        return seen

    async def main() -> list[list[int]]:
        call = await app.get_task("count").asubmit(2000)
        return list(await asyncio.gather(*[read(call, number) for number in range(20)]))

    with app.runner():
        seen = asyncio.run(main())
    whole = list(range(2000))
    assert [each for number, each in enumerate(seen) if number != 3] == [whole] * 19
    assert seen[3] == whole[:10]


def test_a_reader_that_comes_before_the_first_chunk_waits_for_it(app: App) -> None:
    call = submit(app, "count", 5)
    seen: list[int] = []
    reading = threading.Thread(target=lambda: seen.extend(call.stream().values()))
    reading.start()
    with app.runner():
        reading.join(20)
    assert seen == list(range(5))


@MEMORY
def test_a_stream_without_chunks_is_empty(app: App) -> None:
    with app.runner():
        call = submit(app, "count", 0)
        call.result(patient(20))
        assert items(call) == items(call, "other") == []
        assert call.streams() == []
        assert call.stream("other").tail() == StreamTail(index=-1, is_closed=True)


@MEMORY
def test_an_unknown_invocation_has_no_streams(app: App) -> None:
    nobody = app.invocation("nobody")
    for look in (lambda: items(nobody), nobody.streams, nobody.stream().tail):
        with pytest.raises(InvocationNotFound):
            look()


# --- bad input


@MEMORY
@pytest.mark.parametrize("name", ["", "a/b", "a b", "a|b", "x" * 101, "\n", None, 7])
def test_a_bad_name_is_refused(app: App, name: Any) -> None:
    for use in (stream, lambda name: app.invocation("nobody").stream(name)):
        with pytest.raises(UsageError, match="is no name for a stream"):
            use(name)


@MEMORY
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stop": -1}, "stop=-1"),
        ({"stop": 1.5}, "stop=1.5"),
        ({"start": "0"}, "start='0'"),
        ({"start": True}, "start=True"),
        ({"attempts": "first"}, "attempts='first'"),
    ],
)
def test_a_bad_range_is_refused(app: App, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        app.invocation("nobody").stream(**given)
    assert said in str(refused.value)


def test_outside_of_a_call_there_is_no_stream_to_write_to() -> None:
    for use in (lambda: stream().write(1), stream().close, stream().flush):
        with pytest.raises(UsageError, match="none runs here"):
            use()


@MEMORY
@BY
def test_a_chunk_that_cannot_be_stored_is_refused_where_it_is_written(app: App, apart: str) -> None:
    with app.runner():
        call = submit(app, f"odd{apart}")
        assert call.result(patient(20)) == "chunk['a'][1]"
        assert items(call) == [(0, "chunk", "told")]


# --- limits


def slow_appends(monkeypatch: pytest.MonkeyPatch, seconds: float, heard: Callable[[int], None]) -> None:
    """Let each write to a log take so long."""
    append = SqliteStore.append

    async def slow(self: Any, pages: Any) -> Any:
        await asyncio.sleep(seconds)
        heard(sum(page.last - page.first + 1 for page in pages))
        return await append(self, pages)

    monkeypatch.setattr(SqliteStore, "append", slow)


@SQLITE
def test_code_that_never_waits_is_stopped(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain helper on an event loop cannot wait, and must not fill the memory."""
    slow_appends(monkeypatch, 0.05, lambda count: None)

    @app.task(name="rude")
    async def rude() -> int:
        for number in range(100_000):
            stream().write(number)  # no await
        return 0

    with app.runner(), pytest.raises(UsageError, match=r"await write"):
        submit(app, "rude").result(patient(90))


@SQLITE
def test_a_writer_waits_while_a_thousand_chunks_wait_for_the_disk(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded: chunks that are not durable are counted when a page is written."""
    written, most = list[int](), [0]

    def heard(count: int) -> None:
        most[0] = max(most[0], len(written) - count)
        del written[:count]

    slow_appends(monkeypatch, 0.01, heard)

    @app.task(name="fast")
    def fast() -> None:
        for number in range(10 * MAX_CHUNKS):
            written.append(number)
            stream().write(number)

    with app.runner():
        call = submit(app, "fast")
        call.result(patient(30))
        assert most[0] <= 2 * MAX_CHUNKS
        assert list(call.stream().values()) == list(range(10 * MAX_CHUNKS))


@MEMORY
def test_a_thread_that_goes_on_after_its_call_is_refused(app: App) -> None:
    said, over = list[str](), threading.Event()

    @app.task(name="leaves")
    def leaves() -> None:
        import contextvars

        here = contextvars.copy_context()

        def later() -> None:
            over.wait(20)
            try:
                stream().write("late")
            except StreamClosed as error:
                said.append(str(error))

        threading.Thread(target=lambda: here.run(later)).start()
        stream().write("in time")

    with app.runner():
        call = submit(app, "leaves")
        call.result(patient(20))
        over.set()
        for thread in threading.enumerate():
            if thread.name.startswith("Thread-"):
                thread.join(5)
        assert len(said) == 1
        assert list(call.stream().values()) == ["in time"]
