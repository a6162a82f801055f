"""What an app holds while it is in use."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

from holdfast._bridge import Bridge
from holdfast.engine.core import Engine


class Inside:
    """What an app holds while it is in use: its loop thread and its engine. Belongs to the process that made it."""

    def __init__(self, make_engine: Callable[[], Engine], bridge: Bridge | None = None) -> None:
        self.pid = os.getpid()
        self.bridge = bridge or Bridge()
        self._make_engine = make_engine
        self._engine: Engine | None = None
        self._opening: asyncio.Lock | None = None
        self._closed = False

    @property
    def opened(self) -> Engine | None:
        return self._engine

    async def engine(self, beside: object = None) -> Engine:
        """The engine, opened on first use, perhaps beside a user's own transaction. A failed opening is not remembered:
        the next call tries again.
        """
        if self._engine is None:
            self._opening = self._opening or asyncio.Lock()
            async with self._opening:
                if self._engine is None:
                    engine = self._make_engine()
                    await engine.open(beside)
                    self._engine = engine
        return self._engine

    def abandon(self) -> None:
        """Close it without waiting: nobody is left who could use it."""
        if self.pid == os.getpid():
            threading.Thread(target=self.close, name="holdfast-close", daemon=True).start()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.bridge.close(self._end)

    async def _end(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()
