"""The engine of one app in one process: what its parts share.

Each part is made from the engine and takes what it needs from it. The engine does not know the app; a feature adds its
own parts (`part`) and may put its own outbox in place. It is built and used on one event loop.

What the end of an invocation causes elsewhere is named in the write of that end: every change is written through the
`Outbox`. Without a feature that listens to ends, that is all; the triggers put their own in place.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from holdfast.clock import Clock
from holdfast.codec import Codec, SizeLimits
from holdfast.ids import Ids, InvocationId
from holdfast.model.changes import Change, Verdict
from holdfast.model.explain import RunWait
from holdfast.model.names import core_app, is_core
from holdfast.model.records import InvocationRecord
from holdfast.model.status import Status
from holdfast.runtime.cancel import Canceller
from holdfast.runtime.hints import Hub
from holdfast.runtime.measures import MeasurePort
from holdfast.runtime.payloads import PayloadCache, PayloadStore
from holdfast.runtime.quota import Quota
from holdfast.runtime.streams import ChunkPort
from holdfast.runtime.submit import Submitter
from holdfast.runtime.wait import Watcher
from holdfast.settings import Settings
from holdfast.store.contract import Store
from holdfast.telemetry import Telemetry
from holdfast.tracing import Tracer

Receive = Callable[[Sequence[InvocationRecord]], Awaitable[Collection[str]]]
"""Takes ended invocations; returns the ids of those whose receiver takes no more now."""


Written = tuple[Sequence[tuple[InvocationRecord, Change]], Sequence[Verdict]]
COUNTED_AT_ONCE = 32  # writes of an outbox; the first after that is announced, too


class Outbox:
    """Writes changes. `receivers` get the ends whose outbox has their name, which begins with ``@``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.receivers: dict[str, Receive] = {}
        self.written: list[Written] | None = None  # for statistics: what was written and is not counted yet
        self.on_written: Callable[[int], None] = lambda so_many: None  # called now and then: see `COUNTED_AT_ONCE`

    async def apply(self, wanted: Sequence[tuple[InvocationRecord, Change]]) -> Sequence[Verdict]:
        """Apply these changes, each to its record; return the verdicts of `Store.apply`."""
        return await self._store.apply([change for _, change in wanted])

    def of_end(self, task: str, status: Status) -> tuple[str, ...]:
        """Return the known triggers that subscribe to such an end."""
        return ()

    async def refusal_outboxes(self, tasks: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
        """Return the outbox for calls that a limit refuses, by task."""
        return {}

    def ended(self, ids: Sequence[InvocationId]) -> None:
        """Deliver soon what the outboxes of these invocations name, which the store has ended by itself."""

    async def get_ready(self) -> None:
        """Read the subscriptions, so that the first end need not wait for that."""

    async def finish(self) -> None:
        """Give deliveries that are under way a moment; a service makes up for the others."""


P = TypeVar("P")
MakeRunExecutor = Callable[["Engine", Any, Any, Any], Any]
"""Makes the executor of workflows from the engine, the worker, its `Deliver` and the loop of its coroutines."""

ReceivePayload = Callable[[InvocationId, str, Any, str], Awaitable[Verdict]]
"""Gives a payload, of JSON types, dates and bytes, to a hook of a run that has no inbox. It takes the run, the hook's
id in the run, the payload, and an id under which it is given once.
"""

ReadProgress = Callable[["Engine", InvocationRecord], Awaitable[int]]
"""Returns the epoch in which a run last came further, by its log; 0: never."""

ReadWaits = Callable[["Engine", InvocationRecord], Awaitable[Sequence[RunWait]]]
"""Returns what a run waits for, by its log."""


class Engine:
    def __init__(
        self,
        *,
        app: str,
        store: Store,
        clock: Clock,
        ids: Ids,
        rng: random.Random,
        telemetry: Telemetry,
        codec: Codec | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.store = store
        self.clock = clock
        self.ids = ids
        self.rng = rng
        self.codec = codec or Codec()
        self.settings = settings or Settings()
        self.telemetry = telemetry
        self.measures: MeasurePort | None = None  # if metrics are on
        self.tracer: Tracer | None = None  # if tracing is on
        self.hub = Hub(telemetry)
        self.make_run_executor: MakeRunExecutor | None = None
        self.read_progress: ReadProgress | None = None
        self.read_waits: ReadWaits | None = None
        self.hook_receivers: dict[str, ReceivePayload] = {}
        self.chunks: ChunkPort | None = None  # writes the chunks of streams
        self.foreign: Any = None  # `holdfast.runtime.foreign.ForeignRuns`
        self.payload_cache = PayloadCache(self.settings.payload_cache)
        self.limits = SizeLimits(self.settings.inline_limit, self.settings.payload_limit)
        self._serve(app)

    def _serve(self, app: str) -> None:
        self.app, self.is_core = app, is_core(app)
        threshold, cache = self.settings.chunk_threshold, self.payload_cache
        self.payloads = PayloadStore(self.store, app=app, chunk_threshold=threshold, cache=cache)
        self.outbox = Outbox(self.store)
        self.quota = Quota(self)
        self.submitter = Submitter(self)
        self.canceller = Canceller(self)
        self.watcher = Watcher(self)
        self._parts: dict[type, Any] = {}
        self._core: Engine | None = None

    def part(self, kind: type[P]) -> P:
        """Return the part of that class, which is made from the engine when it is first asked for."""
        if kind not in self._parts:
            self._parts[kind] = kind(self)  # type: ignore[call-arg]
        part: P = self._parts[kind]
        return part

    def put_part(self, kind: type[P], part: P) -> None:
        """Replace a part before it is first used: for tests."""
        self._parts[kind] = part

    @property
    def core(self) -> Engine:
        """Return the engine for core tasks, which lie in their own app on the same store."""
        if self._core is None:
            self._core = self.beside(core_app(self.app))
        return self._core

    def beside(self, app: str, settings: Settings | None = None) -> Engine:
        """Return an engine for another app on the same store, with the same connections, without streams."""
        other = copy.copy(self)
        other.settings = settings or self.settings
        other._serve(app)
        other.chunks = None
        return other

    async def open(self, session: object = None) -> None:
        """Open the store. `session`: see `holdfast.store.contract.Store.open`."""
        await (self.store.open() if session is None else self.store.open(session))
        self.hub.connect(self.store.hints())
        if self.measures is not None:
            self.measures.begin()

    async def close(self) -> None:
        if self.measures is not None:
            self.measures.end()
        await self.outbox.finish()
        for part in [*self._parts.values(), self.submitter]:
            if hasattr(part, "close"):
                await part.close()
        self.hub.connect(None)
        await self.store.close()
