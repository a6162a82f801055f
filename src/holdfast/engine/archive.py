"""The archive: searching what has ended, running it again, removing it.

The store finds by outcome and time of the end; what else is asked for is looked for among those, page by page,
and a search gives up after so many and says where to go on. So it costs about the same however much is stored.

A rerun is a new invocation with the arguments, task and queue of an ended one. Its id follows from that one and from
the *request*: whoever repeats a request, after a crash say, stores nothing twice. What the arguments have apart is
shared, and is kept before anything refers to it again.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import msgspec

from holdfast.codec import Reference, references
from holdfast.engine.depot import Depot
from holdfast.engine.submit import Submitter
from holdfast.errors import PayloadLost
from holdfast.ids import InvocationId, derived_id, is_id
from holdfast.lifecycle.identity import key_is_over
from holdfast.lifecycle.names import counted
from holdfast.lifecycle.records import KEY_SECONDS, InvocationRecord, registered
from holdfast.lifecycle.status import FINAL, Status
from holdfast.store.contract import Ended, Store

log = logging.getLogger("holdfast.archive")

_PAGE = 200
MOST_LOOKED = 20_000
_TIME_CHARACTERS = 10  # of an id: they tell the millisecond


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

    @property
    def looks_closer(self) -> bool:
        """Whether it asks for something that the store has no index for."""
        return bool(self.tasks or self.queues or self.tags or self.key is not None or self.error is not None)

    def means(self, record: InvocationRecord) -> bool:
        return (
            (not self.tasks or record.task in self.tasks)
            and (not self.queues or record.queue in self.queues)
            and self.tags.issubset(record.tags)
            and (self.key is None or record.key == self.key)
            and (self.error is None or _failed_with(self.error, record))
        )


def _failed_with(wanted: str, record: InvocationRecord) -> bool:
    kind, message = (record.error.type_name, record.error.message) if record.error else ("", record.reason)
    return wanted in (kind, kind.rpartition(":")[2], kind.rpartition(".")[2]) or wanted.lower() in message.lower()


class Page(NamedTuple):
    """What a search has found, and where to go on: the end and the id of the last one that it looked at, or None."""

    records: list[InvocationRecord]
    last: tuple[float, str] | None


class Rerun(NamedTuple):
    """An ended invocation, and the one that repeats it; or why there is none."""

    original: InvocationRecord
    id: str | None
    why: str = ""


class Archive:
    def __init__(self, store: Store, submitter: Submitter, depot: Depot, *, app: str) -> None:
        self._store = store
        self._submitter = submitter
        self._depot = depot
        self._app = app

    # --- searching

    async def search(self, wanted: Search, limit: int, before: tuple[float, str] | None = None) -> Page:
        """Latest end first."""
        found: list[InvocationRecord] = []
        looked = 0
        while len(found) < limit and looked < MOST_LOOKED:
            size = _PAGE if wanted.looks_closer else min(_PAGE, limit - len(found))
            where = Ended(statuses=wanted.statuses, since=wanted.since, until=wanted.until, before=before)
            page = await self._store.ended(self._app, where, size)
            if not page:
                return Page(found, None)
            for record in page:
                before = (record.changed_at, record.id)
                looked += 1
                if wanted.means(record):
                    found.append(record)
                    if len(found) == limit:
                        break
        return Page(found, before)

    async def everything(self, wanted: Search) -> AsyncIterator[list[InvocationRecord]]:
        """All that is meant, page by page: what had ended when it began."""
        now = self._store.now()
        wanted = msgspec.structs.replace(wanted, until=now if wanted.until is None else min(now, wanted.until))
        before = None
        while True:
            page = await self.search(wanted, _PAGE, before)
            if page.records:
                yield page.records
            before = page.last
            if before is None:
                return

    # --- running again

    def is_of(self, request: str, record: InvocationRecord) -> bool:
        """Whether this request has made that one: it is not to be repeated by the same."""
        return record.rerun_of is not None and record.id == self._id(record.rerun_of, request)

    def _id(self, original: str, request: str) -> InvocationId:
        """It sorts by the time of the request, if that tells one."""
        derived = derived_id("rerun", self._app, original, request)
        return InvocationId(request[:_TIME_CHARACTERS] + derived[_TIME_CHARACTERS:]) if is_id(request) else derived

    async def rerun(self, originals: Sequence[InvocationRecord], *, request: str, due_at: float) -> list[Rerun]:
        """Store a new invocation for each of these, or say why not. Idempotent, by the request."""
        damage: dict[str, str] = {}  # by digest, as several may share one
        refusals = {record.id: why for record in originals if (why := await self._why_not(record, damage))}
        fresh = [self._repeated(record, request, due_at) for record in originals if record.id not in refusals]
        for new, there in zip(fresh, await self._submitter.submit(fresh), strict=True):
            if there is not None and there.rerun_of != new.rerun_of:
                refusals[new.rerun_of or new.id] = f"its new id {new.id} is taken by something else"
        return [
            Rerun(record, None, refusals[record.id])
            if record.id in refusals
            else Rerun(record, self._id(record.id, request))
            for record in originals
        ]

    async def _why_not(self, record: InvocationRecord, damage: dict[str, str]) -> str:
        """Why it cannot be run again, if so. What its arguments have apart is kept for a day from now."""
        if record.status not in FINAL:
            return f"it is {record.status}; only what has ended can be run again"
        for reference in references(record.arguments):
            if reference.digest not in damage:
                damage[reference.digest] = await self._damage(reference)
            if why := damage[reference.digest]:
                return f"its arguments cannot be read: {why}"
        return ""

    async def _damage(self, reference: Reference) -> str:
        await self._store.keep_payloads(self._app, [reference.digest])
        try:
            await self._depot.fetch([reference])
        except PayloadLost as error:
            return str(error)
        return ""

    def _repeated(self, record: InvocationRecord, request: str, due_at: float) -> InvocationRecord:
        now = self._store.now()
        fresh = InvocationRecord(
            id=self._id(record.id, request),
            app=record.app,
            task=record.task,
            arguments=record.arguments,
            queue=record.queue,
            tags=record.tags,
            priority=record.priority,
            at_most_once=record.at_most_once,
            limit_key=record.limit_key,
            terms=msgspec.structs.replace(record.terms, key_seconds=KEY_SECONDS, key_until=None, start_by=None),
            rerun_of=record.id,
            created_at=now,
            due_at=due_at,
        )
        operation = derived_id("rerun operation", self._app, record.id, request)
        return registered(fresh, operation=operation, at=now, why=f"rerun of {record.id}")

    # --- removing

    def holds_its_key(self, record: InvocationRecord) -> bool:
        """Whether to remove it would free its key before its time."""
        return record.key is not None and not key_is_over(record, self._store.now())

    async def remove(self, records: Sequence[InvocationRecord]) -> int:
        removed = await self._store.remove_ended(self._app, [record.id for record in records])
        if removed:
            log.info("purged %s of the app '%s'", counted(removed, "ended invocation"), self._app)
        return removed
