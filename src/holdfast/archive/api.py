"""The archive, ``app.archive``: search, rerun and purge ended invocations.

The store finds by outcome and time of the end; other filters are applied to those, page by page. A search stops after
20,000 records and says where to go on, so its cost does not grow with the store.

A rerun is a new invocation with the arguments, task and queue of an ended one. Its id follows from the original's id
and from the *request*: repeating a request, after a crash say, stores nothing twice. Payloads of the arguments are
shared, and kept before anything refers to them again.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, cast

import msgspec

from holdfast.clock import Duration, parse_moment
from holdfast.errors import UsageError
from holdfast.ids import InvocationId
from holdfast.invocation import Invocation, due_time
from holdfast.model.changes import APPLIED, Applied
from holdfast.model.identity import key_is_over
from holdfast.model.keeping import kept_as
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL, Status
from holdfast.runtime.app_runtime import AppRuntime, awaited, blocking
from holdfast.runtime.definition import Retention, retention_of
from holdfast.runtime.engine import Engine
from holdfast.runtime.listing import pairs
from holdfast.runtime.naming import Wanted, wanted_names
from holdfast.runtime.rerun import Rerun, Rerunner
from holdfast.runtime.wait import get_all
from holdfast.store.contract import Filter, Order
from holdfast.telemetry import events

_PAGE = 200
MAX_LOOKED = 20_000


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """Which ended invocations are meant. Empty means: any."""

    statuses: frozenset[Status] = frozenset()
    tasks: frozenset[str] = frozenset()
    queues: frozenset[str] = frozenset()
    tags: frozenset[str] = frozenset()  # all of them
    since: float | None = None  # ended then or later
    until: float | None = None  # ended before
    key: str | None = None
    error: str | None = None  # the type of its error, or a part of what it says
    attributes: frozenset[tuple[str, str]] = frozenset()  # all of them

    @property
    def looks_closer(self) -> bool:
        """Return whether it asks for something that the store has no index for."""
        closer = (self.tasks, self.queues, self.tags, self.attributes)
        return any(closer) or self.key is not None or self.error is not None

    def means(self, record: InvocationRecord) -> bool:
        return (
            (not self.tasks or record.task in self.tasks)
            and (not self.queues or record.queue in self.queues)
            and self.tags.issubset(record.tags)
            and (self.key is None or record.key == self.key)
            and (self.error is None or _failed_with(self.error, record))
            and self.attributes <= record.attributes.items()
        )


def _failed_with(wanted: str, record: InvocationRecord) -> bool:
    kind, message = (record.error.type_name, record.error.message) if record.error else ("", record.reason)
    return wanted in (kind, kind.rpartition(":")[2], kind.rpartition(".")[2]) or wanted.lower() in message.lower()


class ArchivePage(NamedTuple):
    """The matches of a search, and where to go on: end and id of the last record that was read, or None."""

    records: list[InvocationRecord]
    last: tuple[float, str] | None


async def search(engine: Engine, wanted: Search, limit: int, before: tuple[float, str] | None = None) -> ArchivePage:
    """Return a page of matches, latest end first."""
    found: list[InvocationRecord] = []
    looked = 0
    while len(found) < limit and looked < MAX_LOOKED:
        size = _PAGE if wanted.looks_closer else min(_PAGE, limit - len(found))
        where = Filter(statuses=wanted.statuses, since=wanted.since, until=wanted.until, before=before)
        page = await engine.store.find(engine.app, where, size, order=Order.LATEST_END)
        if not page:
            return ArchivePage(found, None)
        for record in page:
            before = (record.changed_at, record.id)
            looked += 1
            if wanted.means(record):
                found.append(record)
                if len(found) == limit:
                    break
    return ArchivePage(found, before)


async def _pages(
    engine: Engine, wanted: Search | None, ids: Sequence[InvocationId]
) -> AsyncIterator[list[InvocationRecord]]:
    """Yield the named invocations, or all matches page by page: what had ended when it began."""
    if named := await get_all(engine.store, engine.app, ids):
        engine.telemetry.emit(events.RecordsWalked(len(named)))
        yield named
    if wanted is None:
        return
    now, before = engine.store.now(), None
    wanted = msgspec.structs.replace(wanted, until=now if wanted.until is None else min(now, wanted.until))
    while True:
        records, before = await search(engine, wanted, _PAGE, before)
        engine.telemetry.emit(events.RecordsWalked(len(records)))
        if records:
            yield records
        if before is None:
            return


# --- the public face: app.archive


class ArchiveFilter(TypedDict, total=False):
    """Which ended invocations are meant."""

    status: str | Iterable[str]
    task: Wanted
    queue: str | Iterable[str]
    tag: str | Iterable[str]
    since: dt.datetime | float | None
    until: dt.datetime | float | None
    key: str | None
    error: str | None
    attributes: Mapping[str, str] | None


class Reruns(NamedTuple):
    """The result of a rerun. In a dry run nothing is stored, and `invocations` is empty."""

    request: str
    originals: Sequence[str]
    invocations: Sequence[Invocation[Any]]
    refused: Sequence[tuple[str, str]]  # ids, and why they were not run again


class _Again(NamedTuple):
    """When reruns are due, and whether they have new idempotency keys."""

    due: tuple[float | None, float]
    new_key: bool


class Purged(NamedTuple):
    """The result of a purge. In a dry run nothing is removed."""

    originals: Sequence[str]  # that the filter means, without the kept ones
    removed: int
    kept: Sequence[tuple[str, str]]  # ids, and why they were not removed


async def named(runtime: AppRuntime, where: ArchiveFilter) -> ArchiveFilter:
    """Return the filter with the names under which the store has work of the wanted tasks. Raises `UnknownTask`."""
    task = where.get("task", ())
    if task == ():
        return where
    engine = await runtime.engine()
    return where | {"task": await wanted_names(runtime, engine, task)}


def search_of(where: ArchiveFilter) -> Search:
    """Return the search that a filter means, whose tasks are given by name.

    Raises `UsageError`, also for a misspelt name and for an empty text: without it, the filter would match more.
    """
    for name in where:
        if name not in _KNOWN:
            raise UsageError(f"the archive has no filter {name}=; there are {', '.join(_KNOWN)}")
    since, until = where.get("since"), where.get("until")
    return Search(
        statuses=frozenset(_outcome(name) for name in _several("status", where)),
        tasks=frozenset(_several("task", where)),
        queues=frozenset(_several("queue", where)),
        tags=frozenset(_several("tag", where)),
        since=None if since is None else parse_moment(since, "since"),
        until=None if until is None else parse_moment(until, "until"),
        key=_text("key", where.get("key")),
        error=_text("error", where.get("error")),
        attributes=pairs(where.get("attributes") or {}),
    )


_KNOWN = tuple(ArchiveFilter.__annotations__)


class Retained(NamedTuple):
    """The result of a change of retention. In a dry run nothing is changed."""

    originals: Sequence[str]  # that are kept for another time now
    over: int  # of these, whose time is over by that: they are removed soon
    refused: Sequence[tuple[str, str]]  # ids, and why they stay as they are


class Archive:
    """Ended invocations: ``app.archive(status="failed")``, ``app.archive.rerun(…)``, ``app.archive.purge(…)``."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime

    # --- searching

    @blocking
    async def __call__(
        self, engine: Engine, *, limit: int = 50, before: str | None = None, **where: Unpack[ArchiveFilter]
    ) -> list[InvocationRecord]:
        """Return ended invocations, latest end first: of a `status` (success, failed, …), `task`, `queue` or with a
        `tag`, one or several of each; ended `since` and `until` (aware datetimes, or seconds since the epoch); with a
        `key`, with all of these `attributes`, or with an `error`: its type, or a part of its message. Tasks are given
        as in `App.invocations`.

        `before` is an id: the next page begins after it. A search reads at most 20,000 records.
        """
        return (await self.page(limit, before, where)).records

    asearch = awaited(__call__)

    async def page(self, limit: int, before: str | None, where: ArchiveFilter) -> ArchivePage:
        if type(limit) is not int or not 0 <= limit <= 10_000:
            raise UsageError(f"limit={limit!r}: expected a whole number from 0 to 10,000")
        wanted, engine = search_of(await named(self._runtime, where)), await self._runtime.engine()
        start = None
        if before is not None:
            (record,) = await get_all(engine.store, engine.app, [InvocationId(before)])
            start = (record.changed_at, record.id)
        return await search(engine, wanted, limit, start)

    # --- running again

    @blocking
    def rerun(
        self,
        engine: Engine,
        ids: Iterable[str] = (),
        *,
        at: dt.datetime | float | None = None,
        delay: Duration | None = None,
        dry_run: bool = False,
        request: str | None = None,
        new_key: bool = False,
        **where: Unpack[ArchiveFilter],
    ) -> Coroutine[Any, Any, Reruns]:
        """Store a new invocation for each of these ended ones, or for all that a filter means (see `archive`), with the
        same arguments, task and queue. It knows what it repeats (`rerun_of`) and has no key. Its effects have the
        idempotency keys of the first run (``context().idempotency_key``), unless `new_key`.

        With `dry_run` nothing is stored; the result lists what would be. Repeating a `request` that was cut short
        stores nothing twice.
        """
        if not isinstance(new_key, bool):
            raise UsageError(f"new_key={new_key!r}: expected True or False")
        again = _Again(due_time(at, delay), new_key)
        return self._rerun(engine, _each_once(ids), None if dry_run else again, request, where)

    arerun = awaited(rerun)

    async def _rerun(
        self,
        engine: Engine,
        ids: Sequence[InvocationId],
        again: _Again | None,
        request: str | None,
        where: ArchiveFilter,
    ) -> Reruns:
        wanted = _narrow(ids, await named(self._runtime, where), "rerun")
        request = request or engine.ids.new()
        done: list[Rerun] = []
        async for page in _pages(engine, wanted, ids):
            records = [record for record in page if not engine.part(Rerunner).is_of(request, record)]
            if again is None:
                done += [Rerun(record, None) for record in records]
                continue
            at, delay = again.due
            due_at = engine.submitter.due_after(delay) if at is None else at
            rerunner = engine.part(Rerunner)
            done += await rerunner.rerun(records, request=request, due_at=due_at, new_key=again.new_key)
        return Reruns(
            request,
            [one.original.id for one in done],
            [Invocation(self._runtime, one.id) for one in done if one.id is not None],
            [(one.original.id, one.why) for one in done if one.why],
        )

    # --- removing

    @blocking
    def purge(
        self,
        engine: Engine,
        ids: Iterable[str] = (),
        *,
        dry_run: bool = False,
        force: bool = False,
        **where: Unpack[ArchiveFilter],
    ) -> Coroutine[Any, Any, Purged]:
        """Remove these ended invocations, or all that a filter means (see `archive`). An invocation with a key that
        is still taken is kept, because the same call could be stored again; `force` removes it all the same.

        With `dry_run` nothing is removed; the result lists what would be.
        """
        return self._purge(engine, _each_once(ids), dry_run, force, where)

    apurge = awaited(purge)

    # --- keeping

    @blocking
    def retain(
        self,
        engine: Engine,
        retention: Retention,
        ids: Iterable[str] = (),
        *,
        dry_run: bool = False,
        **where: Unpack[ArchiveFilter],
    ) -> Coroutine[Any, Any, Retained]:
        """Keep these ended invocations, or all that a filter means (see `archive`), for another time, counted from
        their end: a duration, "forever", or one for each outcome, as in `App.task`. None is kept for less than an hour,
        or removed before its key is free. With `dry_run` nothing is changed; the result lists what would be.
        """
        return self._retain(engine, retention_of(retention), _each_once(ids), dry_run, where)

    aretain = awaited(retain)

    async def _retain(
        self,
        engine: Engine,
        kept: Mapping[str, float | None],
        ids: Sequence[InvocationId],
        dry_run: bool,
        where: ArchiveFilter,
    ) -> Retained:
        wanted = _narrow(ids, await named(self._runtime, where), "retain")
        changed, over, refused = list[str](), 0, list[tuple[str, str]]()
        async for page in _pages(engine, wanted, ids):
            refused += [(record.id, f"it is {record.status}") for record in page if record.status not in FINAL]
            writes = [write for record in page if (write := kept_as(record, kept)) is not None]
            verdicts: Sequence[object] = [APPLIED] * len(writes)
            if writes and not dry_run:
                verdicts = await engine.store.apply(writes)
            for write, verdict in zip(writes, verdicts, strict=True):
                if isinstance(verdict, Applied):
                    changed.append(write.id)
                    over += write.until <= engine.store.now()
                else:
                    refused.append((write.id, "it is gone"))
        return Retained(changed, over, refused)

    async def _purge(
        self, engine: Engine, ids: Sequence[InvocationId], dry_run: bool, force: bool, where: ArchiveFilter
    ) -> Purged:
        wanted = _narrow(ids, await named(self._runtime, where), "purge")
        removed, gone, kept = 0, list[str](), list[tuple[str, str]]()
        async for page in _pages(engine, wanted, ids):
            going, left = _removable(engine, page, force=force)
            kept += left
            gone += going
            if not dry_run:
                removed += await self._remove(engine, going)
        return Purged(gone, removed, kept)

    async def remove(
        self, engine: Engine, records: Sequence[InvocationRecord], *, force: bool
    ) -> Sequence[tuple[str, str]]:
        """Remove these, on the engine's loop. Return the ids of invocations that are kept, and why."""
        going, kept = _removable(engine, records, force=force)
        await self._remove(engine, going)
        return kept

    async def _remove(self, engine: Engine, ids: Sequence[InvocationId]) -> int:
        count = await engine.store.remove_ended(engine.app, ids) if ids else 0
        if count:
            engine.telemetry.emit(events.Purged(count))
        return count


def _removable(
    engine: Engine, records: Sequence[InvocationRecord], *, force: bool
) -> tuple[list[InvocationId], list[tuple[str, str]]]:
    """Return the ids of invocations that can be removed, and the reasons for the others."""
    going, kept = list[InvocationId](), list[tuple[str, str]]()
    for record in records:
        if record.status not in FINAL:
            kept.append((record.id, f"it is {record.status}; only ended invocations can be removed"))
        elif record.outbox:
            kept.append((record.id, "a trigger is yet to be called for its end"))
        elif not force and record.key is not None and not key_is_over(record, engine.store.now()):
            kept.append((record.id, f"its key {record.key!r} is still taken"))
        else:
            going.append(record.id)
    return going, kept


def _each_once(ids: Iterable[str]) -> list[InvocationId]:
    """Return each id once. Raises `UsageError` for a lone text: its letters would be taken for ids."""
    if isinstance(ids, str):
        raise UsageError(f"ids={ids!r:.80}: expected several ids; for one, write [{ids!r:.80}]")
    return [InvocationId(id) for id in dict.fromkeys(ids)]


def _narrow(ids: Sequence[InvocationId], where: ArchiveFilter, what: str) -> Search | None:
    """Return the search, None for ids. Raises `UsageError` without either: that would mean everything at once."""
    wanted = search_of(where)
    if ids and wanted != Search():
        raise UsageError(f"{what}: give either ids or a filter, not both")
    if not ids and wanted == Search():
        raise UsageError(f"{what}: name invocations by ids or by a filter such as status='failed'")
    return None if ids else wanted


def _several(name: Literal["status", "task", "queue", "tag"], where: ArchiveFilter) -> list[str]:
    given = cast("str | Iterable[str]", where.get(name, ()))
    return [str(_text(name, value)) for value in ([given] if isinstance(given, str) else given)]


def _text(name: str, value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise UsageError(f"{name}={value!r}: expected a text that is not empty; leave it out to mean any")
    return value


def _outcome(name: str) -> Status:
    if name.lower() not in {status.value for status in FINAL}:
        ends = ", ".join(sorted(FINAL))
        raise UsageError(f"status={name!r}: the archive has what ended, as {ends}")
    return Status(name.lower())
