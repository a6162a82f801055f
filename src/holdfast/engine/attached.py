"""The other end of the stream: a worker process attached to its runner.

It claims while it is permitted, tells what it does, and ends when it is told to, when it has done its share of tasks,
or when the stream ends: then its runner is gone, and what it holds is handed back rather than left to recovery. If the
stream is there and the runner is silent, frozen say, until others have declared it dead, the worker ends as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from msgspec.structs import replace

from holdfast.clock import Clock
from holdfast.crashpoints import crashpoint
from holdfast.engine.crew import Working
from holdfast.engine.messages import Done, Grant, News, Orders, Pauses, Ping, Pong, Ready, Retire, Stop, receive, send
from holdfast.engine.permit import Permit
from holdfast.engine.worker import Worker
from holdfast.errors import StoreError

log = logging.getLogger("holdfast.worker")

_NEWS_SECONDS = 0.5
_MIND_SECONDS = 1.0

MakeWorker = Callable[[Orders, Permit], Worker]


class Attached:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, clock: Clock) -> None:
        self._reader = reader
        self._writer = writer
        self._permit = Permit(clock)
        self._working: Working | None = None
        self._was_told_to_stop = False
        self._said_done = False
        self._news: News | None = None

    async def run(self, make_worker: MakeWorker) -> bool:
        """Work until the end. True: user code still runs, and only the end of this process ends it."""
        orders = await receive(self._reader)
        if not isinstance(orders, Orders):
            return False
        self._permit.pause(frozenset(orders.paused))
        worker = make_worker(orders, self._permit)
        self._working = Working(worker, lambda: send(self._writer, Ready()), self._say_done)
        if self._was_told_to_stop:
            self.stop()
        duties = [asyncio.create_task(work) for work in (self._listen(), self._tell(worker), self._mind(worker))]
        try:
            await self._working.ended()
        finally:
            for duty in duties:
                duty.cancel()
        self._say_done()
        if not self._writer.is_closing():
            with contextlib.suppress(OSError):  # nobody is there to hear it
                await self._writer.drain()
        return worker.is_unfinished

    def stop(self, *, hurry: bool = False) -> None:
        self._was_told_to_stop = True
        if self._working is not None:
            self._working.stop(hurry=hurry)

    def _say_done(self) -> None:
        """Before the hooks: whatever these do, the work is done, or left to the runner."""
        if self._working is not None and not self._said_done:
            self._said_done = True
            worker = self._working.worker
            done = Done(account=replace(worker.account), unfinished=worker.is_unfinished, why=worker.why_ended)
            send(self._writer, done)

    async def _listen(self) -> None:
        while (message := await receive(self._reader)) is not None:
            match message:
                case Grant(until):
                    self._permit.grant(until)
                    crashpoint("worker.permitted")
                case Ping():
                    send(self._writer, Pong())
                case Pauses(queues):
                    self._permit.pause(frozenset(queues))
                case Stop(hurry):
                    self.stop(hurry=hurry)
                case Retire() if self._working is not None:
                    self._working.worker.retire()
        log.warning("the runner is gone; this worker hands back what it holds and ends")
        self.stop(hurry=True)

    async def _mind(self, worker: Worker) -> None:
        """While its runner is silent, look whether that was declared dead: then what runs here runs elsewhere too."""
        while True:
            await asyncio.sleep(_MIND_SECONDS)
            if self._permit.holds() or not worker.running:
                continue
            with contextlib.suppress(StoreError):
                if await worker.has_lost() and not self._permit.holds():
                    log.error("the runner was declared dead, and this worker's work was given to others; it ends")
                    worker.fence()

    async def _tell(self, worker: Worker) -> None:
        worker.on_apart = lambda: self._say_news(worker)
        while True:
            self._say_news(worker)
            await asyncio.sleep(_NEWS_SECONDS)

    def _say_news(self, worker: Worker) -> None:
        news = News(
            running=worker.running,
            account=replace(worker.account),
            retiring=worker.is_stopping,
            apart=worker.apart,
            ended=worker.ended_lately(),
        )
        if news != self._news:
            self._news = news
            send(self._writer, news)
