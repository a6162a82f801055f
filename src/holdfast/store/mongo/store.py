"""The MongoDB store: a fleet of runners on a replica set, or one process on a standalone.

What is atomic: one document per write, guarded by status and epoch in the filter. What happens on a crash between any
two commands: each command by itself is a whole change, a claim without its read-back is found again by its token or
by recovery, and nobody was told otherwise. What it costs: submit is one insert, a lone claim one findOneAndUpdate, a
batch of claims find + updateMany + find, a batch of ends one bulk write, a result one find.

Every state change is written with ``w: majority, j: true``, claims included: a claim that was rolled back would hand
out the same epoch twice. What leaves the process, and what decides an unknown outcome, is read with read concern
majority; candidates are read locally, since the guard of the write decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import bson
from msgspec.structs import replace
from pymongo import ReturnDocument, UpdateOne
from pymongo.errors import BulkWriteError, OperationFailure

from holdfast.errors import CorruptRecord, StoreError
from holdfast.lifecycle.changes import (
    APPLIED,
    APPLIED_AGAIN,
    MISSING,
    Change,
    Claim,
    Claimed,
    Lost,
    Verdict,
    applies,
    claimed,
    rounds,
    was_applied,
)
from holdfast.lifecycle.records import (
    InvocationRecord,
    Quarantined,
)
from holdfast.lifecycle.status import AVAILABLE, FINAL, Status
from holdfast.store.contract import Ability, Filter, Finding
from holdfast.store.mongo import connection, queries, schema
from holdfast.store.mongo.beside import MongoBeside
from holdfast.store.mongo.documents import (
    Document,
    from_document,
    guard,
    key_of,
    pipeline,
    quick,
    to_document,
)
from holdfast.store.mongo.inspection import inspect
from holdfast.store.mongo.retry import NOT_ABOUT_THE_DOCUMENT, is_transient

_DUPLICATE = 11000
_AVAILABLE = frozenset(status.value for status in AVAILABLE)
_CLAIMABLE: Document = {"ready": True, "status": {"$in": sorted(_AVAILABLE)}}
_MOST_BYTES = 14 * 2**20
_MOST_ENTRY_BYTES = 16 * 2**20 - 4096
_MOST_ROUNDS = 3
_WIDER = 4  # how many batches a claimer looks at when others take what it wants


class MongoStore(MongoBeside):
    """See `holdfast.store.contract.Store`."""

    abilities = Ability.MULTI_PROCESS | Ability.DURABLE | Ability.COSTLY_CLAIMS | Ability.TRANSACTIONS

    # --- insert

    async def insert(self, records: Sequence[InvocationRecord]) -> Sequence[bool]:
        if not records:
            return []
        for record in records:
            if len(record.arguments) > _MOST_BYTES:
                raise StoreError(
                    f"the arguments of {record.task} take {len(record.arguments) / 2**20:.1f} MB; a MongoDB document "
                    f"has 16 MB, and {_MOST_BYTES / 2**20:.0f} MB is the most that leaves room for its history and end."
                )
        documents = [to_document(record) for record in records]
        return await self._ask("insert", lambda again: self._insert(records, documents))

    async def _insert(self, records: Sequence[InvocationRecord], documents: list[Document]) -> list[bool]:
        invocations = self._collection(schema.INVOCATIONS)
        try:
            await invocations.insert_many(documents, ordered=False)
            return [True] * len(records)
        except BulkWriteError as error:
            errors = error.details.get("writeErrors", [])
            if error.details.get("writeConcernErrors") or any(item["code"] != _DUPLICATE for item in errors):
                raise
            taken = {item["index"] for item in errors}
        ids = [documents[index]["_id"] for index in taken]
        found = await queries.first_operations(self._collection(schema.INVOCATIONS, majority=True), ids)
        return [
            index not in taken or found.get(documents[index]["_id"]) == record.history[0].operation
            for index, record in enumerate(records)
        ]

    # --- claim

    async def lanes(self, app: str) -> Sequence[str]:
        return await self._ask("lanes", lambda again: queries.lanes(self._collection(schema.INVOCATIONS), app))

    async def claim(self, claim: Claim) -> Claimed:
        return await self._ask("claim", lambda again: self._claim(claim, again or claim.again))

    async def _claim(self, claim: Claim, again: bool) -> Claimed:
        claim = await self._narrowed(claim)
        got = await self._claimed_before(claim) if again else []
        if claim.lanes and len(got) < claim.limit:
            got = await self._take(claim, got)
        if len(got) >= claim.limit or claim.ids or not claim.lanes:
            return Claimed(tuple(got))
        return Claimed(tuple(got), await self._next_due(claim))

    async def _narrowed(self, claim: Claim) -> Claim:
        """Of very many lanes, ask only for those that have something."""
        if len(claim.lanes) <= queries.MOST_RANGES:
            return claim
        there = set(await queries.lanes(self._collection(schema.INVOCATIONS), claim.app))
        return replace(claim, lanes=tuple(lane for lane in claim.lanes if lane in there))

    async def _claimed_before(self, claim: Claim) -> list[InvocationRecord]:
        """What an earlier try of this claim got.

        That try may still be waiting for the majority, and what this read did not show would stay ours and undone.
        So a write comes first that changes nothing, and returns when the majority has all that was before it.
        """
        await self._collection(schema.META).update_one({"_id": "schema"}, {"$max": {"min_reader": 0}})
        invocations = self._collection(schema.INVOCATIONS, majority=True)
        return await self._readable(await queries.claimed_before(invocations, claim))

    async def _next_due(self, claim: Claim) -> float | None:
        invocations = self._collection(schema.INVOCATIONS)
        due = await queries.next_due(invocations, claim)
        if due is not None and due <= claim.at:
            # It is due and was not taken. Most likely it is new; but if nobody can ever take it, set it aside.
            await self._candidates(claim, claim.limit)
            due = await queries.next_due(invocations, claim)
        return due

    async def _take(self, claim: Claim, got: list[InvocationRecord]) -> list[InvocationRecord]:
        wanted = claim.limit - len(got)
        try:
            if wanted == 1 and not claim.ids and len(claim.lanes) <= queries.MOST_RANGES:
                return got + await self._take_one(claim)
            return got + await self._take_many(claim, wanted)
        except OperationFailure as error:
            if is_transient(error):
                raise
            # A document that the pipeline cannot digest stops an update of many half-way: find what it took before,
            # and look at the others one by one.
            got = await self._claimed_before(claim)
            return got + await self._take_carefully(claim, claim.limit - len(got))

    async def _take_one(self, claim: Claim) -> list[InvocationRecord]:
        """The head of the queue, in one command."""
        found = await self._collection(schema.INVOCATIONS).find_one_and_update(
            queries.ready(claim, claim.lanes) | _CLAIMABLE,
            _pipeline_of(claim),
            sort=queries.QUEUE_ORDER,
            hint="ready",
            return_document=ReturnDocument.AFTER,
        )
        return [] if found is None else await self._readable([found])

    async def _take_many(self, claim: Claim, wanted: int) -> list[InvocationRecord]:
        """Find candidates, take them with a token, read back what was taken. Repeated while others are faster."""
        invocations = self._collection(schema.INVOCATIONS)
        got: list[InvocationRecord] = []
        for _ in range(_MOST_ROUNDS):
            candidates, more = await self._candidates(claim, wanted * (_WIDER if self._crowded else 1))
            if chosen := self._choose(candidates, wanted):
                result = await invocations.update_many({"_id": {"$in": chosen}} | _CLAIMABLE, _pipeline_of(claim))
                self._crowded = result.modified_count < len(chosen)
                if result.modified_count:
                    got += await self._readable(await queries.taken(invocations, claim, chosen))
                wanted -= result.modified_count
            if wanted <= 0 or not more:
                break
        return got

    async def _candidates(self, claim: Claim, most: int) -> tuple[list[Document], bool]:
        """What a claim may take, and whether there may be more. What is marked as ready and cannot be is set aside."""
        found = await queries.candidates(self._collection(schema.INVOCATIONS), claim, most)
        sound = [one for one in found if one.get("status") in _AVAILABLE and isinstance(one.get("rank"), int | float)]
        if len(sound) < len(found):
            strange = [one["_id"] for one in found if one not in sound]
            for document in await queries.by_key(self._collection(schema.INVOCATIONS), strange):
                why = f"{document['_id']} is marked as ready with status {document.get('status')!r}"
                await self._set_aside(document, CorruptRecord(f"{why}, rank {document.get('rank')!r}"))
        return sound, len(found) == most

    def _choose(self, candidates: list[Document], wanted: int) -> list[str]:
        """Exact order while claimers do not collide. When they do: by chance among those of the same priority."""
        if self._crowded and len(candidates) > wanted:
            candidates = sorted(candidates, key=lambda found: (found["rank"], self._rng.random()))
        return [found["_id"] for found in candidates[:wanted]]

    async def _take_carefully(self, claim: Claim, wanted: int) -> list[InvocationRecord]:
        got: list[InvocationRecord] = []
        candidates, _ = await self._candidates(claim, wanted * _WIDER)
        for candidate in candidates:
            got += await self._take_if_sound(claim, candidate["_id"])
            if len(got) == wanted:
                break
        return got

    async def _take_if_sound(self, claim: Claim, key: str) -> list[InvocationRecord]:
        invocations = self._collection(schema.INVOCATIONS)
        document = await invocations.find_one({"_id": key})
        if document is None or not await self._readable([document]):
            return []
        try:
            found = await invocations.find_one_and_update(
                {"_id": key} | _CLAIMABLE, _pipeline_of(claim), return_document=ReturnDocument.AFTER
            )
        except OperationFailure as error:
            if is_transient(error) or error.code in NOT_ABOUT_THE_DOCUMENT:
                raise
            await self._set_aside(document, CorruptRecord(f"{key} cannot be claimed: {error}"))
            return []
        return [] if found is None else await self._readable([found])

    async def _readable(self, documents: Sequence[Document]) -> list[InvocationRecord]:
        """The records of documents, in queue order. Those that cannot be read are set aside."""
        records = []
        for document in documents:
            try:
                records.append(from_document(document))
            except CorruptRecord as error:
                await self._set_aside(document, error)
        return sorted(records, key=lambda record: (-record.priority, record.due_at, record.id))

    async def _set_aside(self, document: Document, error: CorruptRecord) -> None:
        """Move a document to quarantine:

        first the copy, then the deletion, so that a crash in between loses nothing. One that has no room for the few
        words of a quarantine entry stays where it is, out of the queue.
        """
        key = document["_id"]
        app, _, id = str(key).rpartition("|")
        entry = {"app": app, "id": id, "at": self.now(), "why": str(error), "document": document}
        quarantine, invocations = self._collection(schema.QUARANTINE), self._collection(schema.INVOCATIONS)
        if len(bson.encode(entry)) < _MOST_ENTRY_BYTES:
            await quarantine.replace_one({"_id": key}, entry, upsert=True)
            await invocations.delete_one({"_id": key})
        else:
            entry["document"] = f"too large to move: it stays in {schema.INVOCATIONS}"
            await quarantine.replace_one({"_id": key}, entry, upsert=True)
            await invocations.update_one({"_id": key}, {"$unset": {"ready": "", "owned": ""}})
        self._observe("quarantine", {"id": id, "why": str(error)})

    # --- apply

    async def apply(self, changes: Sequence[Change]) -> Sequence[Verdict]:
        verdicts: dict[int, Verdict] = {}
        for this_round in rounds(changes):
            verdicts.update(await self._ask("apply", lambda again: self._apply(this_round)))  # noqa: B023
        return [verdicts[index] for index in range(len(changes))]

    async def _apply(self, items: list[tuple[int, Change]]) -> dict[int, Verdict]:
        """One unordered bulk of guarded updates. If fewer matched than were sent, one read decides each."""
        updates = [UpdateOne(*(quick(change) or (guard(change), pipeline(change)))) for _, change in items]
        failure: BulkWriteError | None = None
        try:
            result = await self._collection(schema.INVOCATIONS).bulk_write(updates, ordered=False)
            matched = result.matched_count
        except BulkWriteError as error:
            if is_transient(error):
                raise
            failure, matched = error, error.details.get("nMatched", 0)
        if matched == len(items) and failure is None:
            return {index: APPLIED for index, _ in items}
        return await self._decide(items, matched, failure)

    async def _decide(
        self, items: list[tuple[int, Change]], matched: int, failure: BulkWriteError | None
    ) -> dict[int, Verdict]:
        ids = [key_of(change.app, change.id) for _, change in items]
        invocations = self._collection(schema.INVOCATIONS, majority=True)
        found = {document["_id"]: document for document in await queries.by_key(invocations, ids)}
        verdicts: dict[int, Verdict] = {}
        moved_on: list[tuple[int, Change]] = []
        for index, change in items:
            document = found.get(key_of(change.app, change.id))
            records = [] if document is None else await self._readable([document])
            if not records:
                verdicts[index] = MISSING
            elif was_applied(change.operation, records[0].history):
                verdicts[index] = APPLIED if matched else APPLIED_AGAIN
            elif change.version is not None and applies(change, records[0]):
                moved_on.append((index, replace(change, version=None)))
            elif failure is not None and applies(change, records[0]):
                raise failure  # nobody else was faster: the server refuses this very write
            else:
                verdicts[index] = Lost(records[0].status, records[0].owner, records[0].epoch)
        return verdicts | (await self._apply(moved_on) if moved_on else {})

    # --- reading

    async def get(self, app: str, ids: Sequence[str]) -> Sequence[InvocationRecord | None]:
        keys = [key_of(app, id) for id in ids]
        invocations = self._collection(schema.INVOCATIONS, majority=True)
        documents = await self._ask("get", lambda again: queries.by_key(invocations, keys))
        found = {document["_id"]: from_document(document) for document in documents}
        return [found.get(key) for key in keys]

    async def find(self, app: str, where: Filter, limit: int) -> Sequence[InvocationRecord]:
        invocations = self._collection(schema.INVOCATIONS, majority=True)
        documents = await self._ask("find", lambda again: queries.listing(invocations, app, where, limit))
        records = []
        for document in documents:
            try:
                records.append(from_document(document))
            except CorruptRecord as error:
                self._observe("unreadable", {"id": document.get("id"), "why": str(error)})
        return records

    async def counts(self, app: str) -> Mapping[Status, int]:
        found = await self._ask("counts", lambda again: queries.counts(self._collection(schema.INVOCATIONS), app))
        return {Status(name): count for name, count in found.items() if name in _KNOWN}

    async def remove_final(self, app: str, before: float, limit: int) -> int:
        return await self._ask("remove final", lambda again: self._remove_final(app, before, limit))

    async def _remove_final(self, app: str, before: float, limit: int) -> int:
        invocations = self._collection(schema.INVOCATIONS)
        keys = await queries.ended_before(invocations, app, before, limit) if limit > 0 else []
        if keys:
            final = [status.value for status in FINAL]
            await invocations.delete_many({"_id": {"$in": keys}, "status": {"$in": final}})
        return len(keys)

    async def quarantined(self, app: str) -> Sequence[Quarantined]:
        quarantine = self._collection(schema.QUARANTINE)
        documents = await self._ask("quarantined", lambda again: queries.quarantined(quarantine, app))
        return [
            Quarantined(**{name: found[name] for name in ("app", "id", "at", "why")}, raw=repr(found["document"]))
            for found in documents
        ]

    async def check(self, *, deep: bool = False) -> Sequence[Finding]:
        async with connection.borrowed(self._url) as client:
            database = self._database_of(client)
            return await self._ask("check", lambda again: inspect(database, self._clock, deep=deep))


_KNOWN = frozenset(status.value for status in Status)


def _pipeline_of(claim: Claim) -> list[Document]:
    """What a claim does to any invocation: it depends on none of them, so one pipeline serves a whole batch."""
    nobody = InvocationRecord(id="*", app=claim.app, task="*", arguments=b"", created_at=0, due_at=0)
    return pipeline(claimed(claim, nobody))
