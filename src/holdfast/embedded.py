"""A runner inside the present process: what `app.runner()` gives."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from holdfast._version import __version__
from holdfast.engine.account import Account
from holdfast.engine.core import Engine
from holdfast.engine.crew import Crew
from holdfast.engine.declarations import Declaration
from holdfast.engine.recovery import Recovery
from holdfast.engine.runner import Runner
from holdfast.errors import HoldfastError, UsageError
from holdfast.lifecycle.records import RunnerRecord

if TYPE_CHECKING:
    from holdfast.app import App


log = logging.getLogger("holdfast.runner")


def _complain(done: asyncio.Task[Account]) -> None:
    """A runner that ends by an error must not do so in silence: perhaps nobody waits for it."""
    if not done.cancelled() and (error := done.exception()) is not None:
        known = isinstance(error, HoldfastError)  # then its message says what happened, and where in our code does not
        why, trace = (f": {error}", None) if known else ("", error)
        log.error("the runner has ended by an error; nothing it served is run here any more%s", why, exc_info=trace)


class EmbeddedRunner:
    """A runner inside this process, for scripts, tests and small services.

    Its heartbeat comes from the engine's thread: user code that holds the interpreter lock for longer than the
    dead-after time makes the runner look dead. A runner of its own (`holdfast run`) does not have this weakness.
    """

    def __init__(
        self,
        app: App,
        *,
        concurrency: int,
        queues: Mapping[str, int] | None,
        tags: tuple[str, ...],
        drain_timeout_seconds: float,
        make_crew: Callable[[RunnerRecord, Recovery], Crew] | None = None,
    ) -> None:
        if type(concurrency) is not int or not 1 <= concurrency <= 10_000:
            raise UsageError(f"concurrency={concurrency!r}: a runner has from 1 to 10,000 places")
        self._app = app
        self._concurrency = concurrency
        self._queues = queues
        self._tags = tags
        self._drain = drain_timeout_seconds
        self._make_crew = make_crew
        self._runner: Runner | None = None
        self._done: asyncio.Task[Account] | None = None
        self._pid = os.getpid()  # a forked child has a copy of it, but none of what it consists of

    @property
    def id(self) -> str | None:
        """The runner's id on the roster, while it runs."""
        return None if self._runner is None or self._runner.record is None else self._runner.record.id

    @property
    def drain_timeout_seconds(self) -> float:
        return self._drain

    @property
    def is_heard(self) -> bool:
        """Whether the store has heard its heartbeat lately."""
        return self._runner is not None and self._runner.is_heard

    def supervise(self, make_crew: Callable[[RunnerRecord, Recovery], Crew]) -> None:
        """Let others run the tasks, and only supervise them."""
        self._make_crew = make_crew

    def start(self) -> Self:
        self._app._import_modules()
        engine = self._app._ready()
        self._app._run(self._start(engine, self._app._declarations(engine)))
        return self

    async def _start(self, engine: Engine, declared: Sequence[Declaration]) -> None:
        if self._done is not None and self._pid == os.getpid():
            raise UsageError("this runner is running already; app.runner() makes another one")
        self._runner = engine.runner(
            self._app._definitions,
            self._app._codec,
            version=__version__,
            concurrency=self._concurrency,
            queues=self._queues,
            weights={name: weight for name, weight in (self._queues or {}).items() if weight != 1},
            tags=self._tags,
            duties=self._app._duties,
            drain_timeout_seconds=self._drain,
            make_crew=self._make_crew,
            hooks=self._app._hooks,
            declared=declared,
            triggers=self._app._triggers(),
        )
        ready = asyncio.Event()
        self._pid = os.getpid()
        self._app._runners.add(self)
        self._done = asyncio.create_task(self._runner.run(ready.set))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({waiting, self._done}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._done.done():
            await self._wait()  # it could not start, and this says why
        else:
            self._done.add_done_callback(_complain)

    def request_stop(self, *, hurry: bool = False) -> None:
        """Ask it to stop, from any thread or signal handler, without waiting."""
        if self._runner is not None and self._pid == os.getpid():
            runner = self._runner
            self._app._opened().bridge.call(lambda: runner.stop(hurry=hurry))

    def kill_workers(self) -> None:
        """End the processes that it supervises, without a word; for one that is about to end itself so."""
        if (runner := self._runner) is not None:
            runner.kill_workers()

    def stop(self) -> Account:
        """Finish what runs within the drain timeout and end. Returns an account of what was done."""
        return self._app._run(self._stop())

    def end(self) -> Account:
        """End now: what is not done goes back to the queue."""
        self.request_stop(hurry=True)
        return self.wait()

    def wait(self) -> Account:
        """Wait until somebody stops it."""
        return self._app._run(self._wait())

    async def _stop(self) -> Account:
        if self._runner is not None and self._pid == os.getpid():
            self._runner.stop()
        return await self._wait()

    async def _wait(self) -> Account:
        if self._done is None or self._pid != os.getpid():
            return Account()
        try:
            return await asyncio.shield(self._done)
        finally:
            if self._done.done():
                self._done = self._runner = None
                self._app._runners.discard(self)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except KeyboardInterrupt:  # a second one: do not wait for what runs, but hand it back
            self.end()
            raise

    async def __aenter__(self) -> Self:
        self._app._import_modules()
        engine = await self._app._aready()
        await self._app._arun(self._start(engine, self._app._declarations(engine)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._app._arun(self._stop())
