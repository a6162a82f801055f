"""Following streams: one look of a process serves all of its readers of a stream.

Readers of stored chunks read by themselves, each at its own pace. A reader that has come to the end waits at the
`LiveTail` of the stream, which reads new pages once and gives them to all that wait. It keeps the last of them for
readers that are a little late. A reader that is later reads by itself again, so a slow reader costs the others nothing.

A hint wakes it. A hint may be lost, so it also looks: 20 ms after a chunk, then less and less often, down to once a
second.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from holdfast.ids import InvocationId
from holdfast.model.log import Page, stream_log
from holdfast.model.records import STREAM, Hint
from holdfast.model.status import FINAL
from holdfast.runtime.engine import Engine
from holdfast.runtime.hints import Wakeup, look_after
from holdfast.runtime.outage import cancel_tasks
from holdfast.runtime.wait import get_all
from holdfast.streams.rules import FEWEST_PAGES, FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS, pages_at_once

_KEPT_BYTES = 2**20
_IDLE_SECONDS = 5.0  # after the last reader, in which hints are still heard
_STATUS_SECONDS = 0.3  # without a chunk, then it looks whether the invocation has ended


class LiveTails:
    """The streams that readers of this process follow. A part of the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tails: dict[str, LiveTail] = {}
        self._unsubscribe: Callable[[], None] | None = None

    def of(self, id: InvocationId, name: str) -> LiveTail:
        log = stream_log(id, name)
        if self._unsubscribe is None:
            self._unsubscribe = self._engine.hub.on(STREAM, self._hinted)
        if log not in self._tails:
            self._tails[log] = LiveTail(self._engine, id, log, lambda: self._tails.pop(log, None))
        return self._tails[log]

    def _hinted(self, hint: Hint) -> None:
        for log in hint.subjects or tuple(self._tails):
            if (tail := self._tails.get(log)) is not None:
                tail.notify()

    async def close(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
        await cancel_tasks(*[tail.task for tail in self._tails.values() if tail.task is not None])


class LiveTail:
    """The end of one stream, for the readers of this process."""

    def __init__(self, engine: Engine, id: InvocationId, log: InvocationId, forget: Callable[[], object]) -> None:
        self._engine = engine
        self._id, self._log = id, log
        self._forget = forget
        self._pages: deque[Page] = deque()  # the last ones
        self._known = 0  # the last position that a look has found
        self._limit = FEWEST_PAGES  # pages of one look
        self._waiting: list[tuple[int, asyncio.Future[Sequence[Page] | None]]] = []
        self._wakeup = Wakeup()
        self._has_news = True
        self._pause = FIRST_LOOK_SECONDS
        self._may_have_ended, self._is_over = True, False
        self.task: asyncio.Task[None] | None = None

    def notify(self) -> None:
        """Look soon: there may be chunks, or an end."""
        self._has_news = True
        self._wakeup.notify()

    def _ended(self) -> None:
        self._may_have_ended = True
        self.notify()

    async def after(self, position: int, limit: int) -> Sequence[Page] | None:
        """Return pages behind this position, which is the end of a page; wait for them. None: there will be none.

        A reader that is late gets so many (`limit`) at once; none, if they were removed meanwhile. Raises what reading
        the store raises, and `InvocationNotFound`.
        """
        if position < self._known:
            found = [page for page in self._pages if page.first > position]
            if found and found[0].first == position + 1:
                return found
            return await self._engine.store.read_log(self._engine.app, self._log, after=position, limit=limit)
        answer: asyncio.Future[Sequence[Page] | None] = asyncio.get_running_loop().create_future()
        if self._has_news or not self._waiting:
            self._wakeup.notify()
        self._waiting.append((position, answer))
        if self.task is None or self.task.done():
            self.task = asyncio.get_running_loop().create_task(self._serve())
        try:
            return await answer
        finally:
            self._waiting = [each for each in self._waiting if each[1] is not answer]

    async def _serve(self) -> None:
        unsubscribe = self._engine.hub.on_final(self._id, self._ended)
        try:
            while self._waiting or await self._wakeup.wait(_IDLE_SECONDS) or self._waiting:
                try:
                    if self._waiting:
                        await self._look()
                except Exception as error:
                    self._answer(lambda future, error=error: future.set_exception(error))  # type: ignore[misc]
        finally:
            unsubscribe()
            self._forget()

    async def _look(self) -> None:
        """Look once, answer the readers that wait, and sleep."""
        self._has_news = False
        if not await self._read():
            is_to_ask = self._is_over or self._may_have_ended or self._pause >= _STATUS_SECONDS
            if is_to_ask and await self._has_ended():
                if not await self._read():  # what was written before the end is durable now
                    self._answer(lambda future: future.set_result(None))
                return
            if not await self._wakeup.wait(look_after(self._pause)):
                self._pause = min(self._pause * 2, LONGEST_LOOK_SECONDS)

    async def _read(self) -> bool:
        """Read new pages, and give them to the readers. Return whether there were any."""
        first = min(position for position, _ in self._waiting)
        pages = await self._engine.store.read_log(self._engine.app, self._log, after=first, limit=self._limit)
        if not pages:
            return False
        self._limit = pages_at_once(pages)
        self._pause = FIRST_LOOK_SECONDS
        if not self._pages or self._pages[-1].last + 1 != pages[0].first:
            self._pages.clear()
        self._pages.extend(pages)
        self._known = max(self._known, pages[-1].last)
        while sum(len(page.events) for page in self._pages) > _KEPT_BYTES and len(self._pages) > 1:
            self._pages.popleft()
        waiting, self._waiting = self._waiting, []
        for position, future in waiting:
            mine = [page for page in pages if page.first > position]
            if not mine:
                self._waiting.append((position, future))
            elif not future.done():
                future.set_result(mine)
        return True

    async def _has_ended(self) -> bool:
        self._may_have_ended = False
        if not self._is_over:
            (record,) = await get_all(self._engine.store, self._engine.app, [self._id])
            self._is_over = record.status in FINAL
        return self._is_over

    def _answer(self, answer: Callable[[asyncio.Future[Sequence[Page] | None]], None]) -> None:
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if not future.done():
                answer(future)
