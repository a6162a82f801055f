"""Topics of the live feed: for each, a value that is equal as long as nothing has changed that a page shows.

The cost of a value does not grow with what is stored: the newest of a kind, those that run, the runners.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from holdfast.errors import CorruptRecord
from holdfast.ids import InvocationId, is_id
from holdfast.model.decoding import PAUSE
from holdfast.model.explain import living
from holdfast.model.rates import CHANGE
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL, OWNED, Status
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.engine import Engine
from holdfast.runtime.runs import WORLD_QUEUE
from holdfast.runtime.wait import get_readable
from holdfast.schedules.records import KIND as SCHEDULE
from holdfast.stats.records import DEPLOYS
from holdfast.stats.rules import LEVELS
from holdfast.store.contract import EntryOrder, Filter, Order
from holdfast.triggers.events import KIND as EVENT
from holdfast.workflows.hooks_records import HOOK

INVOCATION = "invocation:"
_NEWEST = 50  # as many as the first page of a list
_RUNNING = 20
_ENTRIES = 100
_HEARD_SECONDS = 10.0  # heartbeats within that time look the same


async def _invocations(engine: Engine) -> object:
    find, app = engine.store.find, engine.app
    found = [
        await find(app, Filter(), _NEWEST),
        await find(app, Filter(statuses=OWNED), _RUNNING),
        await find(app, Filter(), 1, order=Order.LATEST_END),
    ]
    return [(each.id, each.version) for records in found for each in records]


async def _runners(engine: Engine) -> object:
    roster, now = await engine.store.roster(engine.app), engine.store.now()
    alive = {runner.id for runner in living(roster, now, engine.settings.dead_after_seconds)}
    return [
        (
            *(runner.id, runner.id in alive, runner.draining, runner.wish, runner.can_run_atomic_service),
            *(runner.sits_out_until, runner.heartbeat_at // _HEARD_SECONDS),
            tuple((each.id, each.running, each.unresponsive_since is None) for each in runner.workers),
        )
        for runner in roster
    ]


async def _queues(engine: Engine) -> object:
    changes = [await _versions(engine, kind, EntryOrder.NAME) for kind in (PAUSE, CHANGE)]
    return changes, await engine.store.lanes(engine.app)


async def _schedules(engine: Engine) -> object:
    return [await _versions(engine, SCHEDULE, order) for order in (EntryOrder.DUE, EntryOrder.NAME)]


async def _hooks(engine: Engine) -> object:
    return await _versions(engine, HOOK, EntryOrder.NAME)


async def _events(engine: Engine) -> object:
    return await _versions(engine, EVENT, EntryOrder.LATEST)


async def _stats(engine: Engine) -> object:
    files = [await _versions(engine, level.kind, EntryOrder.LATEST, 1) for level in LEVELS]
    return files, await _versions(engine, DEPLOYS, EntryOrder.NAME)


async def _store(engine: Engine) -> object:
    return [(each.id, each.at) for each in await engine.store.quarantined(engine.app, latest=1)]


async def _world(engine: Engine) -> object:
    find, messages = engine.store.find, engine.foreign.app
    found = [
        await find(engine.app, Filter(queues=frozenset({WORLD_QUEUE})), _NEWEST),
        await find(messages, Filter(statuses=frozenset(Status) - FINAL), _NEWEST),
        await find(messages, Filter(), 1, order=Order.LATEST_END),
    ]
    heard = [(each.id, each.heartbeat_at // _HEARD_SECONDS) for each in await engine.store.roster(messages)]
    return heard, [(each.id, each.version) for records in found for each in records]


async def _versions(engine: Engine, kind: str, order: EntryOrder, limit: int = _ENTRIES) -> object:
    found = await engine.store.entries(engine.app, kind, order=order, limit=limit)
    return [(each.name, each.version) for each in found]


_QUESTIONS: Mapping[str, Callable[[Engine], Awaitable[object]]] = {
    "invocations": _invocations,
    "runners": _runners,
    "queues": _queues,
    "schedules": _schedules,
    "hooks": _hooks,
    "events": _events,
    "stats": _stats,
    "store": _store,
    "world": _world,
}
TOPICS = tuple(_QUESTIONS)
_OF_CALLS_TOO = ("queues", "hooks")  # they change with the invocations


def is_topic(name: str) -> bool:
    """Return whether a topic has that name: one of `TOPICS`, or ``invocation:ID``."""
    return name in _QUESTIONS or (name.startswith(INVOCATION) and is_id(name.removeprefix(INVOCATION)))


class TopicReading:
    """Ask how topics stand."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime

    async def values(self, topics: Collection[str]) -> dict[str, Any]:
        """Return the value of each topic."""
        engine = await self._runtime.engine()
        found: dict[str, Any] = {name: await _QUESTIONS[name](engine) for name in topics if name in _QUESTIONS}
        if others := [name for name in topics if name in _OF_CALLS_TOO]:
            calls = found["invocations"] if "invocations" in found else await _invocations(engine)
            found |= {name: (found[name], calls) for name in others}
        ids = [InvocationId(name.removeprefix(INVOCATION)) for name in topics if name.startswith(INVOCATION)]
        records = await get_readable(engine.store, engine.app, ids) if ids else []
        for id, record in zip(ids, records, strict=True):
            found[f"{INVOCATION}{id}"] = await _of_invocation(engine, record)
        return found


async def _of_invocation(engine: Engine, record: InvocationRecord | None) -> object:
    if record is None:
        return None
    last = 0
    if record.run is not None:
        try:
            generation = record.run.generation
            pages = await engine.store.read_log(engine.app, record.id, generation=generation, limit=1, latest=True)
            last = pages[0].last if pages else 0
        except CorruptRecord:
            last = -1
    inbox = 0 if record.run is None else record.run.pushed
    return (record.version, record.notes, dict(record.attributes), inbox, record.has_streams, last)
