"""What an app can do with what has ended: search it, run it again, remove it."""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack

from holdfast.clock import Duration, parse_moment
from holdfast.engine.archive import Page, Rerun, Search
from holdfast.errors import InvocationNotFound, UsageError
from holdfast.ids import InvocationId
from holdfast.invocation import Invocation, due_time
from holdfast.lifecycle.records import InvocationRecord
from holdfast.lifecycle.status import FINAL, Status

if TYPE_CHECKING:
    from holdfast.engine.core import Engine

T = TypeVar("T")


class ArchiveFilter(TypedDict, total=False):
    """Which ended invocations are meant."""

    status: str | Iterable[str]
    task: str | Iterable[str]
    queue: str | Iterable[str]
    tag: str | Iterable[str]
    since: dt.datetime | float | None
    until: dt.datetime | float | None
    key: str | None
    error: str | None


class Reruns(NamedTuple):
    """What a rerun came to. In a dry run nothing is stored, and `invocations` is empty."""

    request: str
    originals: Sequence[str]
    invocations: Sequence[Invocation[Any]]
    refused: Sequence[tuple[str, str]]  # ids, and why they were not run again


class Purged(NamedTuple):
    """What a purge came to. In a dry run nothing is removed."""

    originals: Sequence[str]  # those that the filter means, without those that were kept
    removed: int
    kept: Sequence[tuple[str, str]]  # ids, and why they were not removed


def search_of(where: ArchiveFilter) -> Search:
    """The search that a filter means.

    Raises `UsageError`, also for a name that is misspelt and for an empty text: to leave out what was meant to narrow
    a filter would widen it.
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
    )


_KNOWN = tuple(ArchiveFilter.__annotations__)


class Archived:
    """The part of an app that is about what has ended."""

    if TYPE_CHECKING:
        name: str

        def _run(self, work: Coroutine[Any, Any, T]) -> T: ...
        async def _arun(self, work: Coroutine[Any, Any, T]) -> T: ...
        async def _engine(self) -> Engine: ...

    # --- searching

    def archive(
        self, *, limit: int = 50, before: str | None = None, **where: Unpack[ArchiveFilter]
    ) -> list[InvocationRecord]:
        """Ended invocations, latest end first: of a `status` (success, failed, …), `task`, `queue` or with a `tag` (one
        or several of each), ended `since` and `until` (aware datetimes, or seconds since the epoch), with that `key`,
        or with an `error`: its type, or a part of its message.

        `before` is an id: the next page begins after it. What is not found among the 20,000 that ended last before it
        is not looked for further.
        """
        return self._run(self._archive(limit, before, where)).records

    async def aarchive(
        self, *, limit: int = 50, before: str | None = None, **where: Unpack[ArchiveFilter]
    ) -> list[InvocationRecord]:
        return (await self._arun(self._archive(limit, before, where))).records

    async def _archive(self, limit: int, before: str | None, where: ArchiveFilter) -> Page:
        if type(limit) is not int or not 0 <= limit <= 10_000:
            raise UsageError(f"limit={limit!r}: expected a whole number from 0 to 10,000")
        wanted, engine = search_of(where), await self._engine()
        start = None
        if before is not None:
            (record,) = await self._found([InvocationId(before)])
            start = (record.changed_at, record.id)
        return await engine.archive.search(wanted, limit, start)

    async def _found(self, ids: Sequence[InvocationId]) -> list[InvocationRecord]:
        engine, records = await self._engine(), []
        for id, record in zip(ids, await engine.store.get(self.name, ids), strict=True):
            if record is None:
                raise InvocationNotFound(f"the store has no invocation {id} of the app '{self.name}'")
            records.append(record)
        return records

    # --- running again

    def rerun(
        self,
        ids: Iterable[str] = (),
        *,
        at: dt.datetime | float | None = None,
        delay: Duration | None = None,
        dry_run: bool = False,
        request: str | None = None,
        **where: Unpack[ArchiveFilter],
    ) -> Reruns:
        """Store a new invocation for each of these ended ones, or for all that a filter means (see `archive`), with the
        same arguments, task and queue. It knows what it repeats (`rerun_of`) and has no key.

        With `dry_run` nothing is stored, and one sees what would be. To repeat a `request` that was cut short stores
        nothing twice.
        """
        return self._run(self._rerun(_each_once(ids), due_time(at, delay), dry_run, request, where))

    async def arerun(
        self,
        ids: Iterable[str] = (),
        *,
        at: dt.datetime | float | None = None,
        delay: Duration | None = None,
        dry_run: bool = False,
        request: str | None = None,
        **where: Unpack[ArchiveFilter],
    ) -> Reruns:
        return await self._arun(self._rerun(_each_once(ids), due_time(at, delay), dry_run, request, where))

    async def _rerun(
        self,
        ids: Sequence[InvocationId],
        due: tuple[float | None, float],
        dry_run: bool,
        request: str | None,
        where: ArchiveFilter,
    ) -> Reruns:
        wanted, engine = _narrow(ids, where, "rerun"), await self._engine()
        request = request or engine.ids.new()
        done: list[Rerun] = []
        async for page in _pages(engine, wanted, await self._found(ids)):
            records = [record for record in page if not engine.archive.is_of(request, record)]
            if dry_run:
                done += [Rerun(record, None) for record in records]
                continue
            at, delay = due
            due_at = engine.due_after(delay) if at is None else at
            done += await engine.archive.rerun(records, request=request, due_at=due_at)
        return Reruns(
            request,
            [one.original.id for one in done],
            [Invocation(self, one.id) for one in done if one.id is not None],  # type: ignore[arg-type]
            [(one.original.id, one.why) for one in done if one.why],
        )

    # --- removing

    def purge(
        self,
        ids: Iterable[str] = (),
        *,
        dry_run: bool = False,
        force: bool = False,
        **where: Unpack[ArchiveFilter],
    ) -> Purged:
        """Remove these ended invocations, or all that a filter means (see `archive`). One whose key is still taken is
        kept, because the same call could be stored again then; `force` removes it all the same.

        With `dry_run` nothing is removed, and one sees what would be.
        """
        return self._run(self._purge(_each_once(ids), dry_run, force, where))

    async def apurge(
        self,
        ids: Iterable[str] = (),
        *,
        dry_run: bool = False,
        force: bool = False,
        **where: Unpack[ArchiveFilter],
    ) -> Purged:
        return await self._arun(self._purge(_each_once(ids), dry_run, force, where))

    async def _purge(self, ids: Sequence[InvocationId], dry_run: bool, force: bool, where: ArchiveFilter) -> Purged:
        wanted, engine = _narrow(ids, where, "purge"), await self._engine()
        removed, gone, kept = 0, list[str](), list[tuple[str, str]]()
        async for page in _pages(engine, wanted, await self._found(ids)):
            going = []
            for record in page:
                if record.status not in FINAL:
                    kept.append((record.id, f"it is {record.status}; only what has ended can be removed"))
                elif record.outbox:
                    kept.append((record.id, "a trigger is yet to be told of its end"))
                elif not force and engine.archive.holds_its_key(record):
                    kept.append((record.id, f"its key {record.key!r} is still taken"))
                else:
                    going.append(record)
            gone += [record.id for record in going]
            removed += 0 if dry_run else await engine.archive.remove(going)
        return Purged(gone, removed, kept)


async def _pages(
    engine: Engine, wanted: Search | None, named: list[InvocationRecord]
) -> AsyncIterator[list[InvocationRecord]]:
    if named:
        yield named
    if wanted is not None:
        async for page in engine.archive.everything(wanted):
            yield page


def _each_once(ids: Iterable[str]) -> list[InvocationId]:
    """The ids that a user means. Raises `UsageError` for a lone text, whose letters would be taken for ids."""
    if isinstance(ids, str):
        raise UsageError(f"ids={ids!r:.80}: expected several ids; for one, write [{ids!r:.80}]")
    return [InvocationId(id) for id in dict.fromkeys(ids)]


def _narrow(ids: Sequence[InvocationId], where: ArchiveFilter, what: str) -> Search | None:
    """The search, None for none. Raises `UsageError`: everything at once is too much to be meant by saying nothing."""
    wanted = search_of(where)
    if ids and wanted != Search():
        raise UsageError(f"{what}: give either ids or a filter, not both")
    if not ids and wanted == Search():
        raise UsageError(f"{what}: say what is meant, by ids or by a filter such as status='failed'")
    return None if ids else wanted


def _several(name: Literal["status", "task", "queue", "tag"], where: ArchiveFilter) -> list[str]:
    given = where.get(name, ())
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
