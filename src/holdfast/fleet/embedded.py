"""A runner inside the present process: what `app.runner()` gives."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from holdfast._version import __version__
from holdfast.errors import UsageError
from holdfast.fleet.core_tasks import CoreTaskRegistry
from holdfast.fleet.runner import MakeWorkers, Runner, RunnerOptions
from holdfast.fleet.services import Feature
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.engine import Engine
from holdfast.runtime.hints import first_of
from holdfast.runtime.worker import Account
from holdfast.telemetry.events import RunnerBroke


class EmbeddedRunner:
    """A runner inside this process, for scripts, tests and small services.

    Its heartbeat comes from the engine's thread: user code that holds the interpreter lock for longer than the
    dead-after time makes the runner look dead. A separate runner (`holdfast run`) does not have this weakness.
    """

    def __init__(
        self,
        runtime: AppRuntime,
        *,
        concurrency: int,
        queues: Mapping[str, int] | None,
        tags: tuple[str, ...],
        drain_timeout_seconds: float,
        features: Callable[[Engine, CoreTaskRegistry], Sequence[Feature]],
    ) -> None:
        if type(concurrency) is not int or not 1 <= concurrency <= 10_000:
            raise UsageError(f"concurrency={concurrency!r}: a runner has from 1 to 10,000 slots")
        self._runtime = runtime
        self._options = RunnerOptions(
            version=__version__,
            concurrency=concurrency,
            queues=None if queues is None else tuple(queues),
            weights={name: weight for name, weight in (queues or {}).items() if weight != 1},
            tags=tags,
            drain_timeout_seconds=drain_timeout_seconds,
        )
        self._features = features
        self._make_workers: MakeWorkers | None = None
        self._runner: Runner | None = None
        self._done: asyncio.Task[Account] | None = None
        self._pid = os.getpid()  # a forked child has a copy of it, but none of what it consists of

    @property
    def id(self) -> str | None:
        """Return the runner's id on the roster, while it runs."""
        return None if self._runner is None or self._runner.record is None else self._runner.record.id

    @property
    def drain_timeout_seconds(self) -> float:
        return self._options.drain_timeout_seconds

    @property
    def is_connected(self) -> bool:
        """Return whether the store has answered its heartbeat lately."""
        return self._runner is not None and self._runner.is_connected

    @property
    def heartbeat_age(self) -> float | None:
        """Return the seconds since it sent a heartbeat that was answered; None while it does not run."""
        return None if (runner := self._runner) is None else runner.heartbeat_age

    @property
    def why_disconnected(self) -> str:
        """Return the store's error to its last heartbeat; empty if that was answered."""
        return "" if (runner := self._runner) is None else runner.why_disconnected

    @property
    def needs_restart(self) -> str:
        """Return why only a new process can use the store; empty if this one can."""
        return "" if (runner := self._runner) is None else runner.needs_restart

    def supervise(self, make_workers: MakeWorkers) -> None:
        """Let worker processes run the tasks, and only supervise them."""
        self._make_workers = make_workers

    def start(self) -> Self:
        self._runtime.import_modules()
        self._runtime.run(self._start(self._runtime.ready()))
        return self

    async def _start(self, engine: Engine) -> None:
        if self._done is not None and self._pid == os.getpid():
            raise UsageError("this runner is running already; app.runner() makes another one")
        features = functools.partial(self._features, engine)
        made = (engine, self._runtime.definitions, self._options, features)
        self._runner = Runner(*made, make_workers=self._make_workers, hooks=self._runtime.hooks)
        ready = asyncio.Event()
        self._pid = os.getpid()
        self._runtime.runners.add(self)
        self._done = asyncio.create_task(self._runner.run(ready.set))
        await first_of(ready, self._done)
        if self._done.done():
            await self._wait()  # it could not start, and this says why
        else:
            self._done.add_done_callback(self._report)

    def request_stop(self, *, hurry: bool = False) -> None:
        """Ask it to stop, from any thread or signal handler, without waiting."""
        if self._runner is not None and self._pid == os.getpid():
            runner = self._runner
            self._runtime.opened().bridge.call(lambda: runner.stop(hurry=hurry))

    def kill_workers(self) -> None:
        """Kill the processes that it supervises: for a process that is about to kill itself."""
        if (runner := self._runner) is not None:
            runner.kill_workers()

    def stop(self) -> Account:
        """Finish what runs within the drain timeout and end. Returns an account of what was done."""
        return self._runtime.run(self._stop())

    def end(self) -> Account:
        """End now: unfinished work goes back to the queue."""
        self.request_stop(hurry=True)
        return self.wait()

    def wait(self) -> Account:
        """Wait until it is stopped."""
        return self._runtime.run(self._wait())

    def _report(self, done: asyncio.Task[Account]) -> None:
        """Report the error that ended the runner: perhaps no caller waits for it."""
        if not done.cancelled() and (error := done.exception()) is not None:
            self._runtime.telemetry.emit(RunnerBroke(error))

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
                self._runtime.runners.discard(self)

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
        self._runtime.import_modules()
        await self._runtime.arun(self._start(await self._runtime.aready()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._runtime.arun(self._stop())
