"""The engine of one app in one process: a store, the hints, and the services over them.

Its parts get what they need as arguments; nobody here knows the app. It is built and used on one event loop.
"""

from __future__ import annotations

import logging
import os
import random
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.clock import Clock
from holdfast.codec import Codec, Limits
from holdfast.engine.definition import Place, TaskDefinition
from holdfast.engine.depot import Depot
from holdfast.engine.runner import MakePlaces, Runner
from holdfast.engine.submit import Submitter
from holdfast.engine.watch import Watcher
from holdfast.execution.declared import refuse_while_importing
from holdfast.execution.places import Deliver, Execution, LoopPlaces, ThreadPlaces
from holdfast.execution.processes import ProcessPlaces
from holdfast.ids import Ids
from holdfast.lifecycle.records import RunnerRecord
from holdfast.store.contract import Store
from holdfast.wakeup.hub import Hub

log = logging.getLogger("holdfast.store")

LIMITS = Limits(inline=64 * 2**10, most=512 * 2**20)
CHUNK_THRESHOLD = 15 * 2**20


class Engine:
    def __init__(
        self,
        *,
        app: str,
        store: Store,
        clock: Clock,
        ids: Ids,
        rng: random.Random,
        poll_interval_seconds: float,
        limits: Limits = LIMITS,
        chunk_threshold: int = CHUNK_THRESHOLD,
    ) -> None:
        self.app = app
        self.store = store
        self.ids = ids
        self._clock = clock
        self._rng = rng
        self._poll = poll_interval_seconds
        self.hub = Hub()
        self.limits = limits
        self.depot = Depot(store, clock, app=app, chunk_threshold=chunk_threshold)
        self.submitter = Submitter(store, self.depot, self.hub)
        self.watcher = Watcher(store, self.hub, app, poll_interval_seconds)

    async def open(self) -> None:
        await self.store.open()
        self.hub.connect(self.store.hints())

    async def close(self) -> None:
        self.hub.connect(None)
        await self.store.close()

    def runner(
        self,
        definitions: Iterable[TaskDefinition],
        codec: Codec,
        *,
        version: str,
        concurrency: int,
        queues: Iterable[str] | None = None,
        tags: Iterable[str] = (),
        heartbeat_seconds: float,
        drain_timeout_seconds: float,
        make_places: MakePlaces | None = None,
    ) -> Runner:
        """A runner of these tasks, not started yet."""
        refuse_while_importing()
        known = list(definitions)
        now = self.store.now()
        record = RunnerRecord(
            id=self.ids.new(),
            app=self.app,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=version,
            started_at=now,
            heartbeat_at=now,
            concurrency=concurrency,
            queues=None if queues is None else tuple(sorted(queues)),
            tags=tuple(sorted(tags)),
            tasks=tuple(sorted(name for task in known for name in task.names)),
        )

        def places(place: Place, deliver: Deliver) -> Execution:
            match place:
                case Place.THREAD:
                    return ThreadPlaces(concurrency, deliver)
                case Place.LOOP:
                    return LoopPlaces(deliver)
                case Place.PROCESS:
                    return ProcessPlaces(concurrency, deliver)

        return Runner(
            record=record,
            store=self.store,
            depot=self.depot,
            hub=self.hub,
            ids=self.ids,
            rng=self._rng,
            codec=codec,
            limits=self.limits,
            definitions=known,
            make_places=make_places or places,
            poll_interval_seconds=self._poll,
            heartbeat_seconds=heartbeat_seconds,
            drain_timeout_seconds=drain_timeout_seconds,
        )


def log_store_event(event: str, facts: Mapping[str, Any]) -> None:
    """What a store reports, as log lines. Most of it interests nobody."""
    match event:
        case "quarantine":
            log.error("a record that cannot be read was set aside: %s", facts["why"], extra={"invocation": facts["id"]})
        case "unreadable":
            log.error("a record cannot be read: %s", facts["why"], extra={"invocation": facts["id"]})
        case "retry":
            message = "%s: no answer, try %d failed, next in %.2f s: %s"
            log.warning(message, facts["what"], facts["try"], facts["delay"], facts["why"])
        case "gave_up":
            message = "%s: given up after %d tries in %.1f s: %s"
            log.error(message, facts["what"], facts["tries"], facts["seconds"], facts["why"])
        case "recovered":
            log.info("%s: answered again", facts.get("what", "the store"))
        case "change_stream_broken":
            log.warning("hints stop coming, polling instead: %s", facts["why"])
        case "no_change_streams":
            log.info("no change streams here, polling instead: %s", facts["why"])
