"""Waiting for invocations to end, without asking all the time.

Subscribe first, then read, then sleep: whatever ends after the read finds the subscription. A hint can be lost, so
everybody who waits also reads once per polling interval.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast.engine.pace import Pace
from holdfast.errors import InvocationNotFound
from holdfast.ids import InvocationId
from holdfast.lifecycle.records import InvocationRecord
from holdfast.lifecycle.status import FINAL
from holdfast.store.contract import Store
from holdfast.wakeup.hub import Hub

FIRST_READ_SECONDS = 0.02


class Watcher:
    def __init__(self, store: Store, hub: Hub, app: str, poll_interval_seconds: float) -> None:
        self._store = store
        self._hub = hub
        self._app = app
        self._poll_interval = poll_interval_seconds

    async def ends(
        self, ids: Sequence[InvocationId], timeout: float | None, *, fresh: bool = False
    ) -> dict[str, InvocationRecord]:
        """The final records of `ids`.

        Those that have not ended after `timeout` seconds are missing from the answer. Raises `InvocationNotFound`.
        """
        # `fresh`: they were submitted a moment ago, so the first read would most likely come too early.
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        ended: dict[str, InvocationRecord] = {}
        open_ids = set(ids)
        heard = {id for id in open_ids if self._hub.has_ended(id)}
        news = News(heard if fresh else open_ids)
        pace = Pace(self._poll_interval)
        pace.quicken()
        subscriptions = [self._hub.on_final(id, news.about(id)) for id in open_ids]
        try:
            if fresh and not await news.wait(FIRST_READ_SECONDS):
                news.add(open_ids)
            look_at = loop.time() + pace.pause(trust=self._hub.trust)  # at all of them: news of one do not put that off
            while open_ids:
                asked = tuple(news.take() & open_ids)
                are_all = len(asked) == len(open_ids)
                for id, record in zip(asked, await self._store.get(self._app, asked), strict=True):
                    if record is None:
                        raise InvocationNotFound(f"the store has no invocation {id} of the app '{self._app}'")
                    if record.status in FINAL:
                        ended[id] = record
                        open_ids.discard(id)
                now = loop.time()
                if open_ids and deadline is not None and now >= deadline:
                    break
                if are_all:
                    look_at = now + pace.pause(trust=self._hub.trust)
                patience = (look_at if deadline is None else min(look_at, deadline)) - now
                if open_ids and (patience <= 0 or not await news.wait(patience)):
                    news.add(open_ids)
        finally:
            for unsubscribe in subscriptions:
                unsubscribe()
        return ended


class News:
    """The subjects about which something was heard since they were last taken. At first: all of them."""

    def __init__(self, subjects: set[InvocationId]) -> None:
        self._heard = set(subjects)
        self._event = asyncio.Event()

    def about(self, subject: InvocationId) -> _Ear:
        return _Ear(self, subject)

    def add(self, subjects: set[InvocationId]) -> None:
        self._heard |= subjects
        self._event.set()

    def take(self) -> set[InvocationId]:
        taken, self._heard = self._heard, set()
        self._event.clear()
        return taken

    async def wait(self, seconds: float) -> bool:
        """True: there is news. False: there was none for so long."""
        if self._heard:
            return True
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        return True


class _Ear:
    """What is subscribed for one subject: a callable that is equal only to itself."""

    def __init__(self, news: News, subject: InvocationId) -> None:
        self._news = news
        self._subject = {subject}

    def __call__(self) -> None:
        self._news.add(self._subject)
