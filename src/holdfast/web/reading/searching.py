"""Search: the invocations that match a query, their counts and times, and completions of a query.

A status, task, queue, parent or attribute is found by an index of the store, and so is a time, since an id begins with
it: an id derived from another, such as that of a later link of a chain, has the time of the first. Everything else is
compared in the records that these find, up to a number of records for each page. Then the page has the cursor for the
next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from holdfast.errors import UnknownTask
from holdfast.ids import InvocationId, first_at, is_id
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL, Status
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.listing import Keep, is_allowed, listed, with_key
from holdfast.runtime.naming import declared, short, wanted_names
from holdfast.runtime.runs import WORLD_QUEUE, kind_of
from holdfast.showing import brief, printable
from holdfast.stats.api import StatsQuery, read_stats
from holdfast.store.contract import Filter
from holdfast.web.documents import Document, invocation_document
from holdfast.web.reading.finding import IdFinder
from holdfast.web.reading.search import (
    ATTRIBUTE,
    TEXT,
    Query,
    being_written,
    moment_of,
    suggestions,
    values_of,
)

MOST_LOOKED = 2_000  # records, for a page
MOST_COUNTED = 10_000
_SLACK_SECONDS = 60.0  # by which clocks of programs that make ids may differ
_USUAL_SPAN = "24h"


class FoundPage(NamedTuple):
    """Invocations that a search means, newest first. `before` is the cursor of the next page; None if there is none."""

    records: Sequence[InvocationRecord]
    before: str | None
    limit: int

    @property
    def is_cut(self) -> bool:
        """Return whether the search has stopped before the page was full."""
        return self.before is not None and len(self.records) < self.limit

    def document(self) -> Document:
        return {
            "invocations": [invocation_document(each) | {"said": said_by(each)} for each in self.records],
            "before": self.before,
            "is_cut": self.is_cut,
        }


def said_by(record: InvocationRecord) -> str:
    """Return the error of an invocation, or the reason of its status, in short."""
    return brief(printable(record.error if record.error is not None and not record.reason else record.reason))


class Count(NamedTuple):
    """The number of invocations that match a search; `more` if it has stopped counting."""

    number: int
    more: bool

    @property
    def text(self) -> str:
        return f"{self.number:,}{'+' if self.more else ''}"

    def document(self) -> Document:
        return {"count": self.number, "more": self.more, "text": self.text}


class Column(NamedTuple):
    """The numbers of calls in a part of the time, by their names in the legend."""

    at: float
    counts: dict[str, int]


class Times(NamedTuple):
    """Calls over time: ended calls, from stored counters; or the calls of a page, if it is not `ended`."""

    columns: Sequence[Column]
    until: float
    is_of_ended: bool


class Plan(NamedTuple):
    """The plan of a search: the filter of the store, and the conditions that are checked on its answers."""

    where: Filter
    keep: Keep | None = None
    oldest: str | None = None
    key: str | None = None

    def means(self, record: InvocationRecord) -> bool:
        return is_allowed(self.where, record) and (self.keep is None or self.keep(record))


class Searching:
    """Answer searches. Each method runs on the engine's loop."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime
        self._ids = IdFinder(runtime)

    # --- planning

    async def plan(self, query: Query, *, before: str | None = None, until: float | None = None) -> Plan:
        """Return the plan of a search; with `until`, only for invocations submitted before. Raises `UsageError`,
        `UnknownTask`, `InvocationNotFound`.
        """
        engine = await self._runtime.engine()
        now = engine.store.now()
        first, last = (
            next((moment_of(text, now) for text in values_of(query, field)), None) for field in ("since", "until")
        )
        if until is not None:
            last = until if last is None else min(last, until)
        where = Filter(
            statuses=statuses_of(query),
            tasks=frozenset(await self._tasks(values_of(query, "task"))),
            queues=frozenset(values_of(query, "queue")),
            attributes=frozenset(
                (term.name, term.value) for term in query if term.field == ATTRIBUTE and not term.negative
            ),
        )
        for text in values_of(query, "parent"):
            where = replace(where, parent=str(await self._ids.find(text)))
        for text in values_of(query, "rerun"):
            where = replace(where, rerun_of=await self._ids.find(text))
        bounds = [before, None if last is None else first_at(last + _SLACK_SECONDS)]
        checks = [*await self._negatives(query), *_texts(query), *_within(first, last)]
        oldest: str | None = None if first is None else first_at(first - _SLACK_SECONDS)
        if kind := values_of(query, "kind"):
            if kind[0] == "world":
                where = replace(where, queues=where.queues or frozenset({WORLD_QUEUE}))
            checks.append(_only(kind[0], kind_of))
        for text in values_of(query, "id"):
            whole = await self._ids.find(text)
            bounds.append(f"{whole}{{")
            oldest = max(oldest or "", whole)
            checks.append(_only(whole, _getter("id")))
        key = next(iter(values_of(query, "key")), None)
        if key is not None:
            checks.append(_only(key, _getter("key")))
        lowest = min((each for each in bounds if each is not None), default=None)
        keep: Keep | None = (lambda record: all(check(record) for check in checks)) if checks else None
        return Plan(replace(where, before_id=lowest), keep, oldest, key)

    async def _tasks(self, given: Sequence[str]) -> list[str]:
        return await wanted_names(self._runtime, await self._runtime.engine(), given) if given else []

    async def _negatives(self, query: Query) -> list[Keep]:
        found: list[Keep] = []
        for term in query:
            if not term.negative or term.field == "status":
                continue
            match term.field:
                case "task":
                    found.append(_not_of(set(await self._negative_tasks(term.value)), lambda record: record.task))
                case "queue":
                    found.append(_not_of({term.value}, lambda record: record.queue))
                case "parent" | "rerun":
                    field = "parent_id" if term.field == "parent" else "rerun_of"
                    found.append(_not_of({await self._ids.find(term.value)}, _getter(field)))
                case "id":
                    found.append(_not_of({await self._ids.find(term.value)}, lambda record: record.id))
                case "key":
                    found.append(_not_of({term.value}, lambda record: record.key))
                case "kind":
                    found.append(_not_of({term.value}, kind_of))
                case "attribute":
                    found.append(_not_of({term.value}, _attribute(term.name)))
        return found

    async def _negative_tasks(self, name: str) -> list[str]:
        try:
            return await self._tasks([name])
        except UnknownTask:
            return [name]

    # --- answering

    async def page(
        self,
        query: Query,
        limit: int,
        before: str | None = None,
        *,
        also: Filter | None = None,
        keep: Keep | None = None,
        core: bool = False,
        most: int = MOST_LOOKED,
        until: float | None = None,
    ) -> FoundPage:
        """Return a page of invocations that match the search, the filter `also` and `keep`. With `core`, of Holdfast's
        own tasks.
        """
        engine = await self._runtime.engine()
        plan = _narrowed(await self.plan(query, before=before, until=until), also, keep)
        if core:
            return FoundPage(*await listed(engine.core, plan.where, limit, plan.keep, oldest=plan.oldest), limit)
        tasks = list(plan.where.tasks) or [name for each in declared(self._runtime) for name in each.names]
        if plan.key is not None and tasks:
            found = await with_key(engine, tasks, plan.key)
            return FoundPage([record for record in found if plan.means(record)][:limit], None, limit)
        found_page = await listed(engine, plan.where, limit, plan.keep, oldest=plan.oldest, most=most)
        return FoundPage(*found_page, limit)

    async def count(self, query: Query, *, until: float | None = None, keep: Keep | None = None) -> Count:
        """Count the invocations that match a search, up to 10,000, with a bounded number of reads."""
        number, before = 0, None
        for _ in range(MOST_COUNTED // MOST_LOOKED):
            page = await self.page(query, MOST_LOOKED, before, until=until, keep=keep or (lambda record: True))
            number, before = number + len(page.records), page.before
            if before is None:
                break
        return Count(number, before is not None)

    async def times(self, query: Query, page: FoundPage) -> Times:
        """Return the calls over time: from kept counters if it is a search for tasks, queues and times alone; else the
        calls of the page.
        """
        engine = await self._runtime.engine()
        now = engine.store.now()
        if all(term.field in ("task", "queue", "since", "until") and not term.negative for term in query):
            since, until = (next(iter(values_of(query, field)), None) for field in ("since", "until"))
            last = now if until is None else moment_of(until, now)
            first = moment_of(since or _USUAL_SPAN, now)
            if first < last:
                tasks = await self._tasks(values_of(query, "task"))
                queues = frozenset(values_of(query, "queue"))
                points = (await read_stats(engine, StatsQuery(first, last, None, frozenset(tasks), queues))).points
                columns = [
                    Column(each.at, {"succeeded": each.succeeded, "failed": each.failed, "cancelled": each.cancelled})
                    for each in points
                ]
                return Times(columns, last, True)
        return _times_of(page.records, now)

    async def complete(self, text: str, at: int) -> Document:
        """Return completions at a place of a search, and the part of the text that they replace."""
        part = being_written(text, at)
        values = {"task": await self._task_names(), "queue": await self._queues()}
        return {"start": part.start, "end": part.end, "items": suggestions(part, values)}

    async def _task_names(self) -> list[str]:
        """Return the names of tasks: the declared ones, else those of calls of the last day."""
        names = [each.name for each in declared(self._runtime)]
        if not names:
            engine = await self._runtime.engine()
            now = engine.store.now()
            names = list((await read_stats(engine, StatsQuery(moment_of(_USUAL_SPAN, now), now))).tasks)
        every = {each for name in names for each in (short(name) or name, name)}
        return sorted(every, key=lambda name: (":" in name, name))

    async def _queues(self) -> list[str]:
        engine = await self._runtime.engine()
        waiting = [lane.partition("|")[0] for lane in await engine.store.lanes(engine.app)]
        return sorted({*waiting, *(each.queue for each in declared(self._runtime))})


def statuses_of(query: Query) -> frozenset[Status]:
    """Return the statuses that a search allows; empty: all."""
    wanted = {Status(text) for text in values_of(query, "status")}
    refused = {Status(text) for text in values_of(query, "status", negative=True)}
    return frozenset((wanted or set(Status)) - refused) if wanted or refused else frozenset()


def _only(value: str, get: Callable[[InvocationRecord], str | None]) -> Keep:
    return lambda record: get(record) == value


def _not_of(values: set[str], get: Callable[[InvocationRecord], str | None]) -> Keep:
    return lambda record: get(record) not in values


def _getter(field: str) -> Callable[[InvocationRecord], str | None]:
    return lambda record: getattr(record, field)


def _attribute(name: str) -> Callable[[InvocationRecord], str | None]:
    return lambda record: record.attributes.get(name)


def _texts(query: Query) -> list[Keep]:
    """Return the condition for errors and texts."""
    found: list[Keep] = []
    for term in query:
        if term.field in ("error", TEXT):
            means = _fails_with if term.field == "error" else _mentions
            found.append(_text_check(means, term.value, term.negative))
    return found


def _text_check(means: Callable[[str, InvocationRecord], bool], value: str, negative: bool) -> Keep:
    return lambda record: means(value, record) is not negative


def _fails_with(wanted: str, record: InvocationRecord) -> bool:
    """Return whether an invocation has an error of that type, or with that text."""
    errors = [record.error, *(each.error for each in record.errors)]
    texts = [f"{error.type_name}: {error.message}" for error in errors if error is not None]
    if record.status in FINAL or record.error is None:
        texts.append(record.reason)
    return any(wanted.lower() in text.lower() for text in texts)


def _mentions(wanted: str, record: InvocationRecord) -> bool:
    texts = [record.id, record.task, record.queue, record.key or "", record.reason, *record.attributes.values()]
    return any(wanted.lower() in text.lower() for text in texts) or _fails_with(wanted, record)


def _within(first: float | None, last: float | None) -> list[Keep]:
    if first is None and last is None:
        return []
    return [lambda record: (first is None or record.created_at >= first) and (last is None or record.created_at < last)]


def _narrowed(plan: Plan, also: Filter | None, keep: Keep | None) -> Plan:
    """Return the plan that also satisfies a filter and another condition. A field that only one of them has is left to
    the store.
    """
    checks = [each for each in (plan.keep, keep) if each is not None]
    where = plan.where
    if also is not None and also != Filter():
        names = ("statuses", "tasks", "queues", "parent", "attributes")
        where = replace(where, **{name: getattr(where, name) or getattr(also, name) for name in names})
        if also.before_id is not None:
            where = replace(where, before_id=min(where.before_id or also.before_id, also.before_id))
        if any(getattr(also, name) and getattr(also, name) != getattr(where, name) for name in names):
            checks.append(lambda record: is_allowed(also, record))
    if not checks:
        return plan._replace(where=where)
    return plan._replace(where=where, keep=lambda record: all(check(record) for check in checks))


_COLUMNS = 24


def _times_of(records: Sequence[InvocationRecord], now: float) -> Times:
    """Return the times at which records of a page were submitted."""
    if not records:
        return Times((), now, False)
    first, last = min(each.created_at for each in records), max(each.created_at for each in records) + 0.001
    step = max((last - first) / _COLUMNS, 0.001)
    columns = [Column(first + number * step, {}) for number in range(_COLUMNS)]
    for record in records:
        counts = columns[min(int((record.created_at - first) / step), _COLUMNS - 1)].counts
        name = "failed" if record.status is Status.FAILED else "others"
        counts[name] = counts.get(name, 0) + 1
    return Times(columns, last, False)


def whole_id(query: Query) -> InvocationId | None:
    """Return the id if a search is nothing but one."""
    if len(query) == 1 and query[0].field in (TEXT, "id") and not query[0].negative and is_id(query[0].value):
        return InvocationId(query[0].value)
    return None
