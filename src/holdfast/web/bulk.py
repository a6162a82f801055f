"""Actions on all invocations of a search or of a list of ids: cancel, rerun, purge. For commands, the HTTP API and
pages.

A call acts on a bounded number and returns where to continue. Only invocations that matched at one moment, `until`, are
changed: the moment of the preview. So a repetition changes nothing twice, and nothing that came later. The id of a
rerun follows from `request` and the original.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from holdfast.archive.api import Archive
from holdfast.ids import InvocationId
from holdfast.invocation import cancelled_all
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL, Status
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.listing import Keep
from holdfast.runtime.rerun import Rerunner
from holdfast.runtime.wait import get_readable
from holdfast.web.reading.search import Query
from holdfast.web.reading.searching import Count, Searching, statuses_of

_AT_ONCE = 200


class BulkWanted(NamedTuple):
    """The selection of a bulk action: a search or ids, as of `until`."""

    query: Query
    until: float
    request: str
    ids: Sequence[str] = ()
    by: str = ""
    reason: str = ""
    new_key: bool = False
    force: bool = False


class Batch(NamedTuple):
    """The outcome of one call: the changed invocations, the reasons for the others, and where to continue."""

    done: Sequence[InvocationRecord]
    left: Mapping[str, str]
    before: str | None


class Deed(NamedTuple):
    """An action on invocations, in words, and whether it is for ended invocations."""

    of_ended: bool
    would: str
    done: str


DEEDS = {
    "cancel": Deed(False, "would be cancelled", "cancelled"),
    "rerun": Deed(True, "would be run again", "run again"),
    "purge": Deed(True, "would be removed", "removed"),
}


class BulkActions:
    """Performs bulk actions. Each method runs on the engine's loop, and takes the name of an action."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime
        self._searching = Searching(runtime)
        self._do: dict[str, Callable[[BulkWanted, Sequence[InvocationRecord]], Awaitable[Mapping[str, str]]]] = {
            "cancel": self._cancel,
            "rerun": self._rerun,
            "purge": self._purge,
        }

    async def preview(self, name: str, wanted: BulkWanted, first: int) -> tuple[Count, Sequence[InvocationRecord]]:
        """Return the number of selected invocations, and the first of them."""
        if wanted.ids:
            records, _ = await self._meant(name, wanted, None)
            return Count(len(records), False), records[:first]
        keep = _matched(wanted, DEEDS[name])
        number = await self._searching.count(wanted.query, until=wanted.until, keep=keep)
        page = await self._searching.page(wanted.query, first, until=wanted.until, keep=keep)
        return number, page.records

    async def act(self, name: str, wanted: BulkWanted, before: str | None = None) -> Batch:
        """Act on some of them, from `before` on."""
        records, following = await self._meant(name, wanted, before)
        left = await self._do[name](wanted, records) if records else {}
        return Batch([record for record in records if record.id not in left], left, following)

    async def batches(self, name: str, wanted: BulkWanted) -> AsyncIterator[Batch]:
        """Act on all of them."""
        before = None
        while True:
            batch = await self.act(name, wanted, before)
            yield batch
            before = batch.before
            if before is None:
                return

    async def _meant(
        self, name: str, wanted: BulkWanted, before: str | None
    ) -> tuple[Sequence[InvocationRecord], str | None]:
        keep = _matched(wanted, DEEDS[name])
        if wanted.ids:
            engine = await self._runtime.engine()
            ids = [InvocationId(id) for id in dict.fromkeys(wanted.ids)]
            found = await get_readable(engine.store, engine.app, ids)
            return [record for record in found if record is not None and keep(record)], None
        page = await self._searching.page(wanted.query, _AT_ONCE, before, until=wanted.until, keep=keep)
        return page.records, page.before

    async def _cancel(self, wanted: BulkWanted, records: Sequence[InvocationRecord]) -> Mapping[str, str]:
        engine = await self._runtime.engine()
        await cancelled_all(engine, [record.id for record in records], wanted.reason, wanted.by, None)
        return {}

    async def _rerun(self, wanted: BulkWanted, records: Sequence[InvocationRecord]) -> Mapping[str, str]:
        engine = await self._runtime.engine()
        rerunner, due_at = engine.part(Rerunner), engine.submitter.due_after(0.0)
        fresh = [record for record in records if not rerunner.is_of(wanted.request, record)]
        done = await rerunner.rerun(fresh, request=wanted.request, due_at=due_at, new_key=wanted.new_key)
        return {each.original.id: each.why for each in done if each.why}

    async def _purge(self, wanted: BulkWanted, records: Sequence[InvocationRecord]) -> Mapping[str, str]:
        return dict(await Archive(self._runtime).remove(await self._runtime.engine(), records, force=wanted.force))


def _matched(wanted: BulkWanted, deed: Deed) -> Keep:
    """Return the test whether an invocation matched at that moment, as far as its status goes, and matches now."""
    statuses = statuses_of(wanted.query)

    def keep(record: InvocationRecord) -> bool:
        if (record.status in FINAL) is not deed.of_ended or record.created_at >= wanted.until:
            return False
        if deed.of_ended:
            return record.changed_at < wanted.until
        return not statuses or _status_at(record, wanted.until) in statuses

    return keep


def _status_at(record: InvocationRecord, at: float) -> Status:
    return next((entry.status for entry in reversed(record.history) if entry.at <= at), record.status)
