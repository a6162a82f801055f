"""Lists of a World: pages with cursors that name a place, not a number, so they are right while things change.

The cursor of events, steps and hooks of a run is a position in its log, which never changes. That of runs is the id of
the last one, which sorts by the time of its creation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from msgspec.structs import replace

from holdfast.errors import CorruptRecord
from holdfast.ids import InvocationId
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL, Status
from holdfast.runtime.engine import Engine
from holdfast.runtime.runs import is_world
from holdfast.store.contract import Filter
from holdfast.telemetry.events import DutyFailed
from holdfast.world.errors import bad_request
from holdfast.world.hooks import WorldHooks
from holdfast.world.logs import RunLog, WarmLogs
from holdfast.world.projection import OPEN, STATUSES, Projection
from holdfast.world.records import (
    QUEUE,
    Answer,
    event_fields,
    hook_fields,
    invocation_of,
    run_fields,
    run_name,
    task_of,
)
from holdfast.world.requests import MAX_LIMIT, Paging, position
from holdfast.world.rules import PlacedEvent

_AT_ONCE = 20  # logs that are read side by side


class WorldLists:
    def __init__(self, engine: Engine, logs: WarmLogs, projection: Projection) -> None:
        self._engine = engine
        self._logs = logs
        self._projection = projection

    # --- within a run

    def page(self, items: Sequence[tuple[int, Answer]], page: Paging) -> Answer:
        """Return a page of items with their positions, given in that order."""
        after = position(page.cursor) if page.cursor else None
        if page.is_ascending:
            rest = [item for item in items if after is None or item[0] > after]
        else:
            rest = [item for item in reversed(items) if after is None or item[0] < after]
        shown = rest[: page.limit]
        return _page([item for _, item in shown], str(shown[-1][0]) if shown else None, len(rest) > len(shown))

    def events_of_run(self, log: RunLog, page: Paging, all_data: bool) -> Answer:
        """Return a page of all events of a run. Its cost grows with the page, not with the log."""
        cursor = position(page.cursor) if page.cursor else None
        if page.is_ascending:
            start = min(cursor or 0, log.tail)
            shown = log.placed(start, start + page.limit)
            has_more = start + len(shown) < log.tail
        else:
            end = log.tail if cursor is None else max(0, min(cursor - 1, log.tail))
            shown = log.placed(max(0, end - page.limit), end)[::-1]
            has_more = end > len(shown)
        fields = [event_fields(log.run.id, placed, all_data) for placed in shown]
        return _page(fields, str(shown[-1].position) if shown else None, has_more)

    def events(self, log: RunLog, events: Sequence[PlacedEvent], page: Paging, all_data: bool) -> Answer:
        after = position(page.cursor) if page.cursor else None
        if page.is_ascending:
            rest = [placed for placed in events if after is None or placed.position > after]
        else:
            rest = [placed for placed in reversed(events) if after is None or placed.position < after]
        shown = rest[: page.limit]
        found = [event_fields(log.run.id, placed, all_data) for placed in shown]
        return _page(found, str(shown[-1].position) if shown else None, len(rest) > len(shown))

    # --- of all runs

    async def runs(self, name: str | None, status: object, page: Paging, all_data: bool) -> Answer:
        statuses = _statuses(status)
        if statuses is not None and not statuses:
            return _page([], None, False)
        where = _where(statuses, None if name is None else task_of(name))
        found: list[RunLog] = []
        async for log in self._logs_of(where, page):
            if (name is None or log.run.name == name) and (statuses is None or log.run.status in statuses):
                found.append(log)
                if len(found) > page.limit:
                    break
        shown = found[: page.limit]
        fields = [run_fields(log.run, all_data) for log in shown]
        return _page(fields, shown[-1].run.id if shown else None, len(found) > len(shown))

    async def _logs_of(self, where: Filter, page: Paging) -> AsyncIterator[RunLog]:
        """Yield the logs of runs behind the cursor, in the order of the page. Invocations that lag are repaired."""
        async for records in self._records(where, page):
            for start in range(0, len(records), _AT_ONCE):
                some = [record for record in records[start : start + _AT_ONCE] if is_world(record)]
                for log in await asyncio.gather(*[self._log(record) for record in some]):
                    if log is not None and log.run.exists:
                        yield log

    async def _records(self, where: Filter, page: Paging) -> AsyncIterator[Sequence[InvocationRecord]]:
        cursor = _cursor(page.cursor)
        store, app, limit = self._engine.store, self._engine.app, min(page.limit + 1, MAX_LIMIT)
        if not page.is_ascending:
            where = replace(where, before_id=cursor)
            while True:
                records = await store.find(app, where, limit)
                yield records
                if len(records) < limit:
                    return
                where = replace(where, before_id=records[-1].id)
        ids: list[InvocationId] = []  # stores list newest first
        while records := await store.find(app, where, MAX_LIMIT):
            ids += [record.id for record in records if cursor is None or record.id > cursor]
            if len(records) < MAX_LIMIT or (cursor is not None and records[-1].id <= cursor):
                break
            where = replace(where, before_id=records[-1].id)
        ids.reverse()
        for start in range(0, len(ids), limit):
            found = await store.get(app, ids[start : start + limit])
            yield [record for record in found if record is not None]

    async def _log(self, record: InvocationRecord) -> RunLog | None:
        """Return the log of a run; None if it is damaged: lists go on without it."""
        try:
            log = await self._logs.fresh(record.id)
        except CorruptRecord as error:
            self._engine.telemetry.emit(DutyFailed("world", f"list the run {run_name(record.id)}", error))
            return None
        if record.status not in FINAL:
            log.record = record
            await self._projection.bring_if_possible(log)
        return log

    async def events_of_call(self, call: str, page: Paging, all_data: bool) -> Answer:
        """Return events of all runs with this correlation id: run by run, in the order of the page."""
        run, _, place = page.cursor.partition(":")
        found: list[tuple[RunLog, PlacedEvent]] = []
        after = position(place) if place else None
        first = replace(page, cursor="", limit=MAX_LIMIT)
        cursor = _cursor(run)
        async for log in self._logs_of(_where(None, None), first):
            if cursor is not None and (log.id < cursor if page.is_ascending else log.id > cursor):
                continue
            events = [each for each in log.placed() if each.event.call == call]
            for each in events if page.is_ascending else reversed(events):
                if log.id != cursor or after is None or _follows(each.position, after, page):
                    found.append((log, each))
            if len(found) > page.limit:
                break
        shown = found[: page.limit]
        fields = [event_fields(log.run.id, placed, all_data) for log, placed in shown]
        last = f"{shown[-1][0].run.id}:{shown[-1][1].position}" if shown else None
        return _page(fields, last, len(found) > len(shown))

    async def run_of_step(self, id: str) -> RunLog | None:
        """Return the latest run with a step of that id."""
        async for log in self._logs_of(_where(None, None), Paging(MAX_LIMIT, "", False)):
            if id in log.run.steps:
                return log
        return None

    async def hooks(self, hooks: WorldHooks, page: Paging, all_data: bool) -> Answer:
        """Return open hooks of all runs, by their ids."""
        found: list[tuple[str, Any]] = []
        if page.is_ascending:
            before: str | None = None
            while some := await hooks.page(MAX_LIMIT, before):
                found += [(name, item) for name, *item in some if name > page.cursor]
                before = some[-1][0]
                if before <= page.cursor:
                    break
            found.reverse()
        else:
            before = page.cursor or None
            while len(found) <= page.limit and (some := await hooks.page(page.limit + 1, before)):
                found += [(name, item) for name, *item in some]
                before = some[-1][0]
        shown = found[: page.limit]
        fields = [hook_fields(log.run, hook, self._engine.app, all_data) for _, (log, hook) in shown]
        return _page(fields, shown[-1][0] if shown else None, len(found) > len(shown))


def _follows(number: int, after: int, page: Paging) -> bool:
    return number > after if page.is_ascending else number < after


def _page(data: list[Answer], cursor: str | None, has_more: bool) -> Answer:
    return {"data": data, "cursor": cursor, "hasMore": has_more}


def _cursor(run: str) -> InvocationId | None:
    if not run:
        return None
    id = invocation_of(run)
    if id is None:
        raise bad_request(f"cursor={run!r:.80}: expected a cursor that this World has given")
    return id


def _statuses(status: object) -> frozenset[str] | None:
    if status is None:
        return None
    given = [status] if isinstance(status, str) else status
    if not isinstance(given, Sequence) or any(not isinstance(each, str) or each not in STATUSES for each in given):
        raise bad_request(f"status={status!r:.80}: expected {', '.join(STATUSES)}, or a list of them")
    return frozenset(given)


def _where(statuses: frozenset[str] | None, task: str | None) -> Filter:
    """Return which invocations may be runs with these statuses."""
    wanted: set[Status] = set()
    for status in statuses or ():
        if status in ("pending", "running"):
            wanted |= {Status.REGISTERED, Status.REROUTED} if status == "pending" else OPEN - {Status.REGISTERED}
        else:
            wanted.add(STATUSES[status])
    tasks = frozenset() if task is None else frozenset({task})
    return Filter(queues=frozenset({QUEUE}), statuses=frozenset(wanted), tasks=tasks)
