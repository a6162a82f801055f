"""Hooks as they go wrong: the start ends with what is wrong, the end ends in any case."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from holdfast.executors import lifespan as module
from holdfast.executors.lifespan import Hooks
from holdfast.executors.loop import LoopThread
from holdfast.telemetry.logs import logging_telemetry


def around(hooks: Hooks, work: Callable[[LoopThread], None] = lambda _: None) -> None:
    async def main() -> None:
        thread = LoopThread("user-coroutines", logging_telemetry())
        async with hooks.around(thread):
            work(thread)

    asyncio.run(asyncio.wait_for(main(), 20))


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.ERROR]


def test_what_spans_a_life_is_entered_and_left_in_one_task_and_in_order() -> None:
    hooks, told, tasks = Hooks(), [], set()

    @asynccontextmanager
    async def pool() -> AsyncIterator[None]:
        tasks.add(asyncio.current_task())
        async with asyncio.TaskGroup() as group:  # has to be left by the task that entered it
            keeper = group.create_task(asyncio.sleep(600))
            told.append("opened")
            yield
            keeper.cancel()
        tasks.add(asyncio.current_task())
        told.append("closed")

    @contextmanager
    def plain() -> Iterator[None]:
        told.append("in")
        yield
        told.append("out")

    async def stop() -> None:
        told.append("stopped")

    hooks.spans += [pool, plain]
    hooks.starts.append(lambda: told.append("started"))
    hooks.stops.append(stop)
    around(hooks, lambda _: told.append("worked"))
    assert told == ["opened", "in", "started", "worked", "stopped", "out", "closed"]
    assert len(tasks) == 1


def test_what_a_start_raises_ends_it_and_what_was_opened_is_closed() -> None:
    hooks, told = Hooks(), []

    @contextmanager
    def pool() -> Iterator[None]:
        yield
        told.append("closed")

    def start() -> None:
        raise ConnectionRefusedError("no pool")

    hooks.spans.append(pool)
    hooks.starts.append(start)
    with pytest.raises(ConnectionRefusedError, match="no pool"):
        around(hooks, lambda _: told.append("worked"))
    assert told == ["closed"]


@pytest.mark.parametrize("blocks", [False, True])
def test_a_start_that_takes_too_long_ends_it_by_name(monkeypatch: pytest.MonkeyPatch, blocks: bool) -> None:
    monkeypatch.setattr(module, "ENTER_SECONDS", 0.2)
    monkeypatch.setattr(module, "TURN_SECONDS", 0.2)
    hooks, go = Hooks(), threading.Event()

    def load_the_model() -> object:
        return go.wait(60) if blocks else asyncio.sleep(60)

    hooks.starts.append(load_the_model)
    with pytest.raises(TimeoutError, match=r"the start hook .*load_the_model was not done after 0.2 s"):
        around(hooks)
    go.set()


def test_an_end_that_raises_or_hangs_is_logged_by_name_and_the_others_have_their_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LEAVE_ONE_SECONDS", 0.2)
    hooks, told = Hooks(), []

    async def hang() -> None:
        await asyncio.sleep(60)

    def fail() -> None:
        raise RuntimeError("no luck")

    def leave() -> None:
        raise SystemExit(3)

    hooks.stops += [lambda: told.append("stopped"), hang, fail, leave]
    around(hooks)
    assert told == ["stopped"]
    gone, failed, hung = complaints(caplog)
    assert "leave: it failed" in gone
    assert "fail: it failed" in failed
    assert "hang: it was not done after 0.2 s" in hung


def test_an_end_that_blocks_or_a_blocked_loop_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "TURN_SECONDS", 0.2)
    monkeypatch.setattr(module, "LEAVE_SECONDS", 0.2)
    go = threading.Event()

    def block() -> None:
        go.wait(60)

    hooks = Hooks()
    hooks.stops.append(block)
    around(hooks)
    around(hooks, lambda thread: thread.loop.call_soon_threadsafe(block) and None)
    ended, blocked = complaints(caplog)
    assert "block: it is not done after 0.2 s" in ended
    assert "the event loop is blocked" in blocked
    go.set()
