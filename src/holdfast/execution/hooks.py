"""What users want done around the life of a worker: open pools before its first task, close them after its last.

All of it runs on the loop of user coroutines, where pools made there can be used; plain functions block it for a
moment, and nothing else runs there yet, or any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

from holdfast.execution.loop import LoopThread


class Hooks:
    """Functions to call when a worker starts and stops, and contexts that span its life. May be empty."""

    def __init__(self) -> None:
        self.starts: list[Callable[[], Any]] = []
        self.stops: list[Callable[[], Any]] = []
        self.spans: list[Callable[[], Any]] = []

    def __bool__(self) -> bool:
        return bool(self.starts or self.stops or self.spans)

    @contextlib.asynccontextmanager
    async def around(self, thread: LoopThread) -> AsyncIterator[None]:
        """Enter in the order of declaration, leave in the reverse order. What a start raises, this raises."""
        stack = contextlib.AsyncExitStack()
        try:
            await _on(thread, self.enter(stack))
            yield
        finally:
            try:
                await _on(thread, stack.aclose())
            finally:
                thread.end(wait=False)

    async def enter(self, stack: contextlib.AsyncExitStack) -> None:
        """On the present loop."""
        for span in self.spans:
            context = span()
            if hasattr(context, "__aenter__"):
                await stack.enter_async_context(context)
            else:
                stack.enter_context(context)
        for stop in self.stops:
            stack.push_async_callback(_call, stop)
        for start in self.starts:
            await _call(start)


async def _call(function: Callable[[], Any]) -> None:
    answer = function()
    if inspect.isawaitable(answer):
        await answer


async def _on(thread: LoopThread, work: Any) -> None:
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, thread.loop))
