"""The runner that delivers the messages of a World, inside this process. It belongs to the server, or to a mounted app.

It is a runner as any other: it is on the roster of the app of messages, has heartbeats, recovers the messages of dead
servers, and takes its turn at the services. So several servers share one store without knowing of each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

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
from holdfast.world.delivery import Addresses, Deliverer
from holdfast.world.queue import Messages
from holdfast.world.upkeep import MessageOutbox, WorldUpkeep

DRAIN_SECONDS = 30.0  # for deliveries under way, when the server stops; then they are released


class Deliveries:
    """Delivers messages from `start` to `stop`. Used on the engine's loop, but for `end`."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime
        self._runner: Runner | None = None
        self._done: asyncio.Task[Account] | None = None

    async def start(self) -> None:
        """Begin to deliver. Raises what keeps the runner from starting."""
        if self._done is not None:
            return
        engine = await self._runtime.engine()
        self._runner = runner = self._made(engine)
        ready = asyncio.Event()
        self._done = done = asyncio.create_task(runner.run(ready.set))
        self._runtime.runners.add(self)
        await first_of(ready, done)
        if done.done():
            await self.wait()
        else:
            done.add_done_callback(self._report)

    def _made(self, engine: Engine) -> Runner:
        messages, addresses = engine.part(Messages), engine.part(Addresses)
        of_messages = messages.engine
        outbox = MessageOutbox(messages)
        of_messages.outbox = outbox
        upkeep = WorldUpkeep(messages, outbox, addresses)

        def features(core: CoreTaskRegistry) -> Sequence[Feature]:
            return *self._runtime.basic_features(of_messages, core), upkeep

        options = RunnerOptions(
            version=__version__,
            concurrency=self._runtime.settings.world_concurrency,
            drain_timeout_seconds=DRAIN_SECONDS,
        )
        definitions = [Deliverer(of_messages, addresses).definition]
        return Runner(
            of_messages, definitions, options, features, make_executor=lambda kind, deliver: InlineExecutor(deliver)
        )

    def stop(self, *, hurry: bool = False) -> None:
        """Ask it to stop. Deliveries under way have their time, unless there is a `hurry`."""
        if self._runner is not None:
            self._runner.stop(hurry=hurry)

    async def wait(self) -> Account:
        """Wait until it has stopped. Raises the error that ended it."""
        if self._done is None:
            return Account()
        try:
            return await asyncio.shield(self._done)
        finally:
            if self._done is not None and self._done.done():
                self._done = self._runner = None
                self._runtime.runners.discard(self)

    def end(self) -> Account:
        """End now, from another thread than the engine's: when the app is closed."""
        return self._runtime.run(self._end())

    async def _end(self) -> Account:
        self.stop(hurry=True)
        return await self.wait()

    @property
    def is_running(self) -> bool:
        return self._done is not None and not self._done.done()

    def _report(self, done: asyncio.Task[Account]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            self._runtime.telemetry.emit(RunnerBroke(error))
