"""The runner that delivers the messages of a World, inside this process. It belongs to the server, or to a mounted app.

It is a runner as any other: it is on the roster of the app of messages, has heartbeats, recovers the messages of dead
servers, and takes its turn at the services. So several servers share one store without knowing of each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from holdfast._version import __version__
from holdfast.executors.local import InlineExecutor
from holdfast.fleet.core_tasks import CoreTaskRegistry
from holdfast.fleet.runner import Runner, RunnerOptions
from holdfast.fleet.services import Feature
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.engine import Engine
from holdfast.runtime.hints import first_of
from holdfast.runtime.worker import Account
from holdfast.telemetry.events import RunnerBroke
from holdfast.world.delivery import Addresses, Deliverer, Post
from holdfast.world.http_client import post
from holdfast.world.queue import Messages
from holdfast.world.upkeep import MessageOutbox, WorldUpkeep

DRAIN_SECONDS = 30.0  # for deliveries under way, when the server stops; then they are released


BasicFeatures = Callable[[Engine, CoreTaskRegistry], Sequence[Feature]]


def runner_of_messages(engine: Engine, basic_features: BasicFeatures, *, post: Post = post) -> Runner:
    """Return a runner for the messages of an app, whose engine this is."""
    messages, addresses = engine.part(Messages), engine.part(Addresses)
    of_messages = messages.engine
    of_messages.outbox = outbox = MessageOutbox(messages)
    upkeep = WorldUpkeep(messages, outbox, addresses)

    def features(core: CoreTaskRegistry) -> Sequence[Feature]:
        return *basic_features(of_messages, core), upkeep

    options = RunnerOptions(
        version=__version__, concurrency=engine.settings.world_concurrency, drain_timeout_seconds=DRAIN_SECONDS
    )
    definitions = [Deliverer(of_messages, addresses, post).definition]
    return Runner(
        of_messages, definitions, options, features, make_executor=lambda kind, deliver: InlineExecutor(deliver)
    )


class Deliveries:
    """Delivers messages from `start` to `stop`. Used on the engine's loop, but for `end`."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime
        self._runner: Runner | None = None
        self._done: asyncio.Task[Account] | None = None
        self._is_over = asyncio.Event()
        self._is_stopped = False

    async def start(self) -> None:
        """Begin to deliver. Raises what keeps the runner from starting."""
        if self._done is not None or self._is_stopped:
            return
        engine = await self._runtime.engine()
        self._runner = runner = runner_of_messages(engine, self._runtime.basic_features)
        ready = asyncio.Event()
        self._done = done = asyncio.create_task(runner.run(ready.set))
        self._runtime.runners.add(self)
        await first_of(ready, done)
        if done.done():
            self._forget()
            done.result()
        else:
            done.add_done_callback(self._report)

    def stop(self, *, hurry: bool = False) -> None:
        """Ask it to stop. Deliveries under way have their time, unless there is a `hurry`."""
        self._is_stopped = True
        if self._runner is not None:
            self._runner.stop(hurry=hurry)
        else:
            self._is_over.set()

    async def stopped(self) -> None:
        """Stop, and wait until that is done."""
        self.stop()
        await self.ended()

    async def ended(self) -> None:
        """Wait until it has stopped, or the runner has broken. Raises the error of that."""
        await self._is_over.wait()
        if self._done is not None:
            self._done.result()

    def end(self) -> None:
        """End now, from another thread than the engine's: when the app is closed."""
        self._runtime.run(self._end())

    async def _end(self) -> None:
        self.stop(hurry=True)
        await self._is_over.wait()

    @property
    def is_running(self) -> bool:
        return self._done is not None and not self._done.done()

    def _forget(self) -> None:
        self._is_over.set()
        self._runtime.runners.discard(self)

    def _report(self, done: asyncio.Task[Account]) -> None:
        self._forget()
        if not done.cancelled() and (error := done.exception()) is not None:
            self._runtime.telemetry.emit(RunnerBroke(error))
