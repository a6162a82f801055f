"""Streams in the tests of users: `holdfast.testing`."""

from __future__ import annotations

import asyncio

from tests.streams import studio

from holdfast import App, stream
from holdfast.testing import testing_app


def test_a_test_sees_what_was_written() -> None:
    with testing_app(studio.declare(App("memory://", name="studio"))) as t:
        run = t.app.get_task("essay").submit(3)
        assert t.stream(run, "draft") == []
        t.drain(check=True)
        assert [chunk.value for chunk in t.stream(run, "draft")] == ["1.0", "1.1", "1.2"]
        assert [chunk.value for chunk in t.stream(run, "progress")] == ["begun", b"drafted"]
        assert [info.name for info in run.streams()] == ["draft", "notes", "progress"]


def test_to_read_a_stream_runs_what_writes_it() -> None:
    with testing_app(studio.declare(App("memory://", name="studio"))) as t:
        call = t.app.get_task("count").submit(2500)
        assert list(call.stream().values()) == list(range(2500))
        again = t.app.get_task("lost_after").submit(1, 2)
        assert [chunk.kind for chunk in again.stream("lost")] == ["chunk", "restart", "chunk"]
        assert [chunk.value for chunk in t.stream(again, "lost", attempts="last")] == [(2, 0)]


def test_the_same_in_a_test_that_awaits() -> None:
    app = App("memory://", name="awaiting")

    @app.task
    async def spell(word: str) -> None:
        for letter in word:
            await stream().write(letter)
        await stream().flush()

    async def main() -> None:
        async with testing_app(app) as t:
            call = await spell.asubmit("abc")
            await t.adrain(check=True)
            assert [chunk.value for chunk in await t.astream(call)] == ["a", "b", "c"]
            assert [chunk.value async for chunk in call.stream()] == ["a", "b", "c"]

    asyncio.run(main())
