"""Invocations in MongoDB: inserts, changes, slots and their waiters, queues, and removal.

A change is one guarded update, and a batch of them one bulk write. The unique index `slot` gives each slot at most one
holder, so that nothing is locked or counted before a write. A waiter returns to the queue by one findOneAndUpdate,
which takes the first of the index `waiting`. The TTL index removes invocations by the field `expires_at`. It is set
with the end; for an invocation with an outbox, once that is emptied.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace
from pymongo import ASCENDING, ReturnDocument, UpdateOne
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import BulkWriteError, OperationFailure

from holdfast.errors import CorruptRecord, StoreUnavailable
from holdfast.ids import InvocationId
from holdfast.model.changes import (
    APPLIED,
    APPLIED_AGAIN,
    MISSING,
    Change,
    FieldReset,
    Lost,
    MoveUp,
    NoteUpdate,
    Push,
    RunUpdate,
    StateWrite,
    StreamMark,
    Verdict,
    WaitNote,
    applies,
    was_applied,
)
from holdfast.model.claims import released
from holdfast.model.keeping import Kept
from holdfast.model.limits import Holder, Release, dues_of
from holdfast.model.queues import QueueDepth, gathered, in_lane
from holdfast.model.records import OUTCOMES, InvocationRecord
from holdfast.model.state_writes import pushed_all, written
from holdfast.model.status import FINAL, Status
from holdfast.store.contract import ALL_KEYS
from holdfast.store.mongo import logs, queries, schema
from holdfast.store.mongo.documents import (
    Document,
    is_cleared,
    key_of,
    pipeline,
    update_of_inbox,
    update_of_note,
    update_of_place,
    update_of_state,
    update_of_time,
    updates_of,
)
from holdfast.store.mongo.quarantine import Collections, Quarantine
from holdfast.store.mongo.queries import is_moment
from holdfast.store.mongo.retry import DUPLICATE, is_about_everything, is_about_the_document, is_transient
from holdfast.store.mongo.sentinels import REAL_DUE

There = AsyncCollection[Document]

_OVER: Document = {"status": {"$in": list(OUTCOMES)}, "outbox": {"$exists": False}}
_MAX_LEFT = 100
_MAX_TRIES = 50


class Invocations:
    """Writes invocations. See `holdfast.store.contract.Store` for `insert` and `apply`."""

    def __init__(self, collection: Collections, quarantine: Quarantine) -> None:
        self._collection = collection
        self.quarantine = quarantine

    async def insert(self, records: Sequence[InvocationRecord], documents: list[Document]) -> list[bool]:
        invocations = self._collection(schema.INVOCATIONS)
        try:
            await invocations.insert_many(documents, ordered=False)
            return [True] * len(records)
        except BulkWriteError as error:
            errors = error.details.get("writeErrors", [])
            if error.details.get("writeConcernErrors") or any(item["code"] != DUPLICATE for item in errors):
                raise
            taken = {item["index"] for item in errors}
        ids = [documents[index]["_id"] for index in taken]
        found = await queries.first_operations(self._collection(schema.INVOCATIONS, majority=True), ids)
        return [
            index not in taken or found.get(documents[index]["_id"]) == record.history[0].operation
            for index, record in enumerate(records)
        ]

    async def push(self, pushes: Sequence[Push]) -> tuple[list[Verdict], InvocationRecord | None]:
        """Add to the inbox of one run. Return the verdicts, and the record after the pushes."""
        invocations = self._collection(schema.INVOCATIONS, majority=True)
        for _ in range(_MAX_TRIES):
            before = await self._run(invocations, pushes[0])
            if before is None:
                return [MISSING] * len(pushes), None
            after, verdicts = pushed_all(pushes, before)
            if after is before:
                return verdicts, None
            added = [push.entry for push, verdict in zip(pushes, verdicts, strict=True) if verdict is APPLIED]
            if (await invocations.update_one(*update_of_inbox(added, before, after))).matched_count:
                return verdicts, after
        raise StoreUnavailable(f"{pushes[0].id} is changed again and again; try again")

    async def move_up(self, moves: Sequence[MoveUp]) -> list[Verdict]:
        """Move invocations up in the queue. An invocation that does not wait there any more stays as it is."""
        invocations = self._collection(schema.INVOCATIONS)
        moved = await invocations.bulk_write([update_of_place(each) for each in moves], ordered=False)
        if moved.matched_count == len(moves):
            return [APPLIED] * len(moves)
        keys = [key_of(move.app, move.id) for move in moves]
        there = {found["_id"] for found in await queries.by_key(invocations, keys)}
        return [APPLIED if key in there else MISSING for key in keys]

    async def keep_until(self, writes: Sequence[Kept]) -> list[Verdict]:
        """Keep ended invocations until other times. An invocation that has not ended stays as it is."""
        invocations = self._collection(schema.INVOCATIONS)
        changed = await invocations.bulk_write([update_of_time(each) for each in writes], ordered=False)
        if changed.matched_count == len(writes):
            return [APPLIED] * len(writes)
        there = {
            record.id: record
            for record in await self.quarantine.readable(
                await queries.by_key(invocations, [key_of(write.app, write.id) for write in writes])
            )
        }
        return [_kept(there.get(write.id)) for write in writes]

    async def note(self, updates: Sequence[NoteUpdate]) -> list[Verdict]:
        """Replace attributes and notes of invocations, in one bulk. If some stay as they are, a read finds out why."""
        bulk = [UpdateOne(*update_of_note(update)) for update in updates]
        written = await self._collection(schema.INVOCATIONS).bulk_write(bulk, ordered=False)
        if written.modified_count == len(updates):
            return [APPLIED] * len(updates)
        return [await self.update_run(update) for update in updates]

    async def update_run(self, update: RunUpdate | NoteUpdate | StreamMark | WaitNote) -> Verdict:
        """Replace the state or the attributes of a run, mark an invocation, or say what it waits for."""
        invocations = self._collection(schema.INVOCATIONS, majority=True)
        for _ in range(_MAX_TRIES):
            before = await self._run(invocations, update)
            if before is None:
                return MISSING
            after = written(update, before)
            if not isinstance(after, InvocationRecord):
                return after
            if isinstance(update, RunUpdate):
                where, change = update_of_state(update, before, after)
            else:
                where, change = update_of_note(update)
            if (await invocations.update_one(where, change)).matched_count:
                return APPLIED
        raise StoreUnavailable(f"{update.id} is changed again and again; try again")

    async def _run(self, invocations: Any, write: StateWrite) -> InvocationRecord | None:
        found = await queries.by_key(invocations, [key_of(write.app, write.id)])
        records = await self.quarantine.readable(found)
        return records[0] if records else None

    async def apply(self, items: list[tuple[int, Change | FieldReset]], *, together: bool = True) -> dict[int, Verdict]:
        """Send one unordered bulk of guarded updates. If fewer matched than were sent, one read decides each."""
        updates = updates_of([change for _, change in items], together=together)
        failure: BulkWriteError | None = None
        try:
            result = await self._collection(schema.INVOCATIONS).bulk_write(updates, ordered=False)
            matched = result.matched_count
        except BulkWriteError as error:
            if is_transient(error):
                raise
            if len(updates) < len(items):  # a refused document stops the documents in the same update
                return await self.apply(items, together=False)
            failure, matched = error, error.details.get("nMatched", 0)
        if matched == len(items) and failure is None:
            return {index: APPLIED for index, _ in items}
        return await self._decide(items, matched, failure)

    async def _decide(
        self, items: list[tuple[int, Change | FieldReset]], matched: int, failure: BulkWriteError | None
    ) -> dict[int, Verdict]:
        ids = [key_of(change.app, change.id) for _, change in items]
        invocations = self._collection(schema.INVOCATIONS, majority=True)
        found = {document["_id"]: document for document in await queries.by_key(invocations, ids)}
        verdicts: dict[int, Verdict] = {}
        moved_on: list[tuple[int, Change | FieldReset]] = []
        for index, change in items:
            document = found.get(key_of(change.app, change.id))
            records = [] if document is None else await self.quarantine.readable([document])
            if not records:
                verdicts[index] = MISSING
            elif isinstance(change, FieldReset):
                if failure is not None and not is_cleared(change, records[0]):
                    raise failure
                verdicts[index] = APPLIED if matched else APPLIED_AGAIN
            elif was_applied(change.operation, records[0].history):
                verdicts[index] = APPLIED if matched else APPLIED_AGAIN
            elif change.version is not None and applies(change, records[0]):
                moved_on.append((index, replace(change, version=None)))
            elif failure is not None and applies(change, records[0]):
                raise failure  # no other claimer was faster: the server refuses this very write
            else:
                verdicts[index] = Lost(records[0].status, records[0].owner, records[0].epoch)
        return verdicts | (await self.apply(moved_on) if moved_on else {})

    async def release_waiters(
        self, app: str, wishes: Sequence[Release], operation: str, at: float
    ) -> list[InvocationRecord]:
        """Return the waiters that went back to the queue."""
        invocations = self._collection(schema.INVOCATIONS)
        # Waiters are rare: then one question is all. An invocation that begins to wait later looks once more itself.
        if len(wishes) == 1:
            wishes = wishes if await queries.has_waiters(invocations, app, wishes[0].limit_key) else []
        elif wishes:
            waiting = await queries.waiting_keys(invocations, app, [wish.limit_key for wish in wishes])
            wishes = [wish for wish in wishes if wish.limit_key in waiting]
        counted = [wish.limit_key for wish in wishes if wish.max_running is not None]
        held = await held_slots(invocations, app, counted) if counted else {}
        gone: list[InvocationRecord] = []
        for wish in wishes:
            free, key = wish.count, wish.limit_key
            if wish.max_running is not None:
                free = min(free, wish.max_running - len(held[key]))
            for _, due_at in zip(range(free), dues_of(wish), strict=False):
                if (found := await self._release_one(app, wish, operation, at, due_at)) is None:
                    break
                gone += await self.quarantine.readable([found])
        return gone

    async def _release_one(
        self, app: str, wish: Release, operation: str, at: float, due_at: float | None
    ) -> Document | None:
        """Let the longest waiter go back to the queue. A corrupt waiter is quarantined. A waiter that the server
        refuses for its own reason is left. Then the next waiter goes.
        """
        invocations, left = self._collection(schema.INVOCATIONS), list[str]()
        update = pipeline(released(anything(app), operation=operation, at=at, due_at=due_at))
        wanted = queries.waiting(app, wish.limit_key, wish.without)
        first: dict[str, Any] = {"sort": queries.QUEUE_ORDER, "hint": "waiting"}
        while True:
            try:
                return await invocations.find_one_and_update(
                    wanted, update, **first, return_document=ReturnDocument.AFTER
                )
            except OperationFailure as error:
                if is_about_everything(error):
                    raise
                document = await invocations.find_one(wanted, **first)
                if document is None:
                    return None
                key = document["_id"]
                if is_about_the_document(error):
                    await self.quarantine.set_aside(document, CorruptRecord(f"{key} cannot be released: {error}"))
                elif len(left) < _MAX_LEFT:
                    self.quarantine.leave(key, error)
                    left.append(key)
                    wanted["_id"] = {"$nin": left}
                else:
                    raise


def _kept(record: InvocationRecord | None) -> Verdict:
    if record is None:
        return MISSING
    return APPLIED if record.status in FINAL else Lost(record.status, record.owner, record.epoch)


def anything(app: str) -> InvocationRecord:
    """Return a record that stands for any, in changes that depend on none."""
    return InvocationRecord(id=InvocationId("*"), app=app, task="*", arguments=b"", created_at=0, due_at=0)


# --- removal


async def remove(collections: Collections, keys: Sequence[str]) -> int:
    """Remove invocations that are over, those with a log after their log."""
    invocations, wanted = collections(schema.INVOCATIONS), {"_id": {"$in": list(keys)}} | _OVER
    for having in (_RUN, _STREAMS):
        await _remove_logs(collections, await invocations.find(wanted | having, _LOG_OF).to_list())
    return (await invocations.delete_many(wanted)).deleted_count


async def remove_expired(collections: Collections, app: str, at: float, limit: int) -> int:
    """Remove ended invocations whose time is over. Index: expires; over and streamed for those with logs, which have no
    `expires_at`.
    """
    if limit <= 0:
        return 0
    invocations = collections(schema.INVOCATIONS)
    looks = (
        ({"expires_at": {"$lte": dt.datetime.fromtimestamp(at, dt.UTC)}, "app": app}, "expires", "expires_at"),
        ({"app": app, "retain_until": {"$lte": at}} | _RUN | _OVER, "over", "retain_until"),
        ({"app": app, "retain_until": {"$lte": at}} | _STREAMS | _OVER, "streamed", "retain_until"),
    )
    found: list[Document] = []
    for wanted, index, field in looks:
        cursor = invocations.find(wanted, _LOG_OF, hint=index).sort([(field, ASCENDING)])
        found += await cursor.limit(limit).to_list()
    gone = sorted({document["_id"]: document for document in found}.values(), key=_over_since)[:limit]
    await _remove_logs(collections, gone)
    keys = [document["_id"] for document in gone]
    return (await invocations.delete_many({"_id": {"$in": keys}} | _OVER)).deleted_count if keys else 0


_RUN: Document = {"run": {"$exists": True}}
_STREAMS: Document = {"has_streams": True}
_LOG_OF = dict.fromkeys(("app", "id", "retain_until", "run.generation", "has_streams"), True)


def _over_since(document: Document) -> tuple[float, str]:
    at = document.get("retain_until")
    return at if is_moment(at) else 0.0, str(document["_id"])


async def _remove_logs(collections: Collections, runs: Sequence[Document]) -> None:
    """Remove the logs of invocations that have logs. A crash after that leaves invocations that have ended, and are
    removed later.
    """
    for run in runs:
        if "run" in run or "has_streams" in run:
            app, _, id = str(run["_id"]).partition("|")
            await logs.remove_all(collections(schema.LOG), app, id)


# --- slots


async def held_slots(invocations: There, app: str, keys: Sequence[str]) -> dict[str, dict[str, Holder]]:
    """Return for each key its held slots, with their holders."""
    held: dict[str, dict[str, Holder]] = {key: {} for key in keys}
    for found in await queries.held(invocations, app, keys):
        held[found["limit_key"]][found["slot"]] = Holder(str(found.get("id")), str(found.get("owner")))
    return held


async def waiting_keys(
    invocations: There, app: str, within: Sequence[tuple[str, str]], most: int | None
) -> dict[str, int]:
    if most is None and within == ALL_KEYS:
        keys = await queries.waiting_keys(invocations, app)
    else:
        parts = [queries.waiting_keys_within(invocations, app, first, last, most) for first, last in within]
        keys = [key for part in await asyncio.gather(*parts) for key in part]
    return {key: len(slots) for key, slots in (await held_slots(invocations, app, keys)).items()} if keys else {}


# --- queues


async def depths(invocations: There, app: str, at: float) -> list[QueueDepth]:
    """Count invocations by queue. Index: due, without reading a document; status; waiting."""

    async def grouped(match: Document, group: Document, hint: str) -> list[Document]:
        stages = [{"$match": match | {"app": app}}, {"$group": group}]
        return await (await invocations.aggregate(stages, hint=hint)).to_list()

    is_due, one = {"$lte": ["$due_at", at]}, {"$sum": 1}
    by_lane = {
        "_id": "$lane",
        "waiting": {"$sum": {"$cond": [is_due, 1, 0]}},
        "scheduled": {"$sum": {"$cond": [is_due, 0, 1]}},
        "oldest": {"$min": "$due_at"},
    }
    by_queue = {"_id": "$queue", "n": one}
    owned, waiting = {"status": {"$in": queries.OWNED_STATUSES}}, {"status": Status.CONCURRENCY_CONTROLLED.value}
    parts = []
    for each in await grouped({"ready": True, "due_at": REAL_DUE}, by_lane, "due"):
        oldest = each["oldest"] if is_moment(each["oldest"]) else None
        parts.append(in_lane(str(each["_id"]), each["waiting"], each["scheduled"], oldest))
    parts += [QueueDepth(name=str(each["_id"]), running=each["n"]) for each in await grouped(owned, by_queue, "status")]
    for each in await grouped(waiting, by_queue, "waiting"):
        parts.append(QueueDepth(name=str(each["_id"]), blocked=each["n"]))
    return gathered(parts)


async def some_depths(invocations: There, app: str, at: float, most: int) -> list[QueueDepth]:
    """Count the first `most` of each lane, and as many that run or are blocked. Indexes as those of `depths`."""
    parts = []
    for lane in await queries.lanes(invocations, app):
        wanted = {"app": app, "ready": True, "lane": lane, "due_at": REAL_DUE}
        cursor = invocations.find(wanted, {"due_at": True, "_id": False}, hint="due")
        found = [each["due_at"] for each in await cursor.sort([("due_at", ASCENDING)]).limit(most).to_list()]
        due = sum(each <= at for each in found)
        oldest = found[0] if found and is_moment(found[0]) else None
        parts.append(in_lane(lane, due, len(found) - due, oldest))
    owned, waiting = {"status": {"$in": queries.OWNED_STATUSES}}, {"status": Status.CONCURRENCY_CONTROLLED.value}
    for match, hint, name in ((owned, "status", "running"), (waiting, "waiting", "blocked")):
        cursor = invocations.find(match | {"app": app}, {"queue": True, "_id": False}, hint=hint)
        for each in await cursor.limit(most).to_list():
            parts.append(QueueDepth(name=str(each.get("queue")), **{name: 1}))
    return gathered(parts)
