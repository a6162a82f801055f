"""The MongoDB store: a fleet of runners on a replica set, or one process on a standalone.

What is atomic: one document per write, guarded by status and epoch in the filter. What happens on a crash between any
two commands: each command by itself is a whole change, a claim without its read-back is found again by its token or
by recovery, and nobody was told otherwise. What it costs: submit is one insert, a lone claim one findOneAndUpdate, a
batch of claims find + updateMany + find, a batch of ends one bulk write, a result one find.

Every state change is written with ``w: majority, j: true``, claims included: a claim that was rolled back would hand
out the same epoch twice. What leaves the process, and what decides an unknown outcome, is read with read concern
majority, and what such a read does not find is looked for once more, for certain; candidates are read locally, since
the guard of the write decides.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from msgspec.structs import replace
from pymongo import UpdateOne
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import BulkWriteError

from holdfast.errors import CorruptRecord, StoreError
from holdfast.ids import InvocationId
from holdfast.lifecycle.changes import (
    APPLIED,
    APPLIED_AGAIN,
    MISSING,
    Change,
    Lost,
    Verdict,
    applies,
    rounds,
    was_applied,
)
from holdfast.lifecycle.claims import Claim, Claimed
from holdfast.lifecycle.decoding import EARLIEST, INVOCATION, LATEST, corrupt, shown
from holdfast.lifecycle.identity import in_the_way
from holdfast.lifecycle.limits import Release
from holdfast.lifecycle.records import (
    InvocationRecord,
    Quarantined,
)
from holdfast.lifecycle.status import AVAILABLE, Status
from holdfast.store.contract import Ability, Ended, Filter, Finding
from holdfast.store.mongo import archive, connection, entries, limits, queries, schema
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
from holdfast.store.mongo.retry import DUPLICATE, is_transient

_MOST_BYTES = 14 * 2**20


class MongoStore(MongoBeside):
    """See `holdfast.store.contract.Store`."""

    abilities = (
        Ability.MULTI_PROCESS
        | Ability.DURABLE
        | Ability.COSTLY_CLAIMS
        | Ability.TRANSACTIONS
        | Ability.TTL
        | Ability.SHARED_CLOCK
    )
    schema_version = schema.SCHEMA_VERSION

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
        try:
            return await self._ask("insert", lambda again: self._insert(records, documents))
        finally:
            self._behind.marks.lower_for(records)  # whatever the answer was: they may be there

    async def _insert(self, records: Sequence[InvocationRecord], documents: list[Document]) -> list[bool]:
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

    async def in_the_way(self, records: Sequence[InvocationRecord]) -> Sequence[InvocationRecord | None]:
        if not records:
            return []
        app, names = records[0].app, queries.names_of(records)
        keys = [key_of(app, record.id) for record in records]
        invocations = self._collection(schema.INVOCATIONS, majority=True)
        documents = await self._ask("in the way", lambda again: queries.in_the_way(invocations, app, keys, names))
        found = []
        for document in documents:
            try:
                found.append(from_document(document))
            except CorruptRecord as error:
                await self._out_of_the_way(document, keys, error)
        return [in_the_way(record, found) for record in records]

    async def _out_of_the_way(self, document: Document, keys: Sequence[str], error: CorruptRecord) -> None:
        """Set a document aside that has the key or twin of another. One with its id stays, and is told of."""
        if document["_id"] in keys:
            raise error
        await self._move_away(schema.INVOCATIONS, document, error)

    async def free_key(self, app: str, id: str, key: str) -> None:
        invocations = self._collection(schema.INVOCATIONS)
        wanted = {"_id": key_of(app, id), "key": key}
        await self._ask("free key", lambda again: invocations.update_one(wanted, {"$unset": {"key": ""}}))

    # --- claim

    async def lanes(self, app: str) -> Sequence[str]:
        return await self._ask("lanes", lambda again: queries.lanes(self._collection(schema.INVOCATIONS), app))

    async def claim(self, claim: Claim) -> Claimed:
        return await self._ask("claim", lambda again: self._claims.claim(claim, again or claim.again))

    async def release_waiters(
        self, app: str, wishes: Sequence[Release], *, operation: str, at: float
    ) -> Sequence[InvocationRecord]:
        invocations = self._collection(schema.INVOCATIONS)
        records = await self._ask(
            "release waiters",
            lambda again: limits.release_waiters(invocations, self._quarantine, app, wishes, operation, at),
        )
        self._behind.marks.lower_for(records)
        return records

    async def waiting_keys(self, app: str) -> Mapping[str, int]:
        invocations = self._collection(schema.INVOCATIONS)
        return await self._ask("waiting keys", lambda again: limits.waiting_keys(invocations, app))

    async def slot_holders(self, app: str, limit_key: str) -> Sequence[InvocationRecord]:
        invocations = self._collection(schema.INVOCATIONS, majority=True)
        found = await self._ask("slot holders", lambda again: queries.slot_holders(invocations, app, limit_key))
        return self._listed(found)

    async def start_limits(self, app: str, limit: int) -> Sequence[InvocationRecord]:
        invocations = self._collection(schema.INVOCATIONS, majority=True)
        return await self._tended(
            *("start limits", schema.INVOCATIONS),
            *(lambda: queries.start_limits(invocations, app, limit), from_document),
        )

    # --- apply

    async def apply(self, changes: Sequence[Change]) -> Sequence[Verdict]:
        verdicts: dict[int, Verdict] = {}
        try:
            for this_round in rounds(changes):
                verdicts.update(await self._ask("apply", lambda again: self._apply(this_round)))  # noqa: B023
        finally:
            self._behind.heed(changes)
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
            records = [] if document is None else await self._quarantine.readable([document])
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

    async def get(self, app: str, ids: Sequence[InvocationId]) -> Sequence[InvocationRecord | None]:
        keys = [key_of(app, id) for id in ids]
        documents = await self._ask("get", lambda again: self._get(keys))
        found = {document["_id"]: from_document(document) for document in documents}
        return [found.get(key) for key in keys]

    async def _get(self, keys: Sequence[str]) -> list[Document]:
        found = await queries.by_key(self._collection(schema.INVOCATIONS, majority=True), keys)
        if not (missing := set(keys) - {document["_id"] for document in found}):
            return found
        return found + await self._certainly(schema.INVOCATIONS, lambda there: queries.by_key(there, sorted(missing)))

    async def find(self, app: str, where: Filter, limit: int, *, set_aside: bool = False) -> Sequence[InvocationRecord]:
        invocations = self._collection(schema.INVOCATIONS, majority=True)
        if set_aside:
            return await self._tended(
                "find", schema.INVOCATIONS, lambda: queries.listing(invocations, app, where, limit), from_document
            )
        found: list[InvocationRecord] = []
        while len(found) < limit:
            wanted = limit - len(found)
            documents = await self._ask("find", lambda again: queries.listing(invocations, app, where, wanted))  # noqa: B023
            found += (some := self._listed(documents))
            ids = [str(document["_id"]).rpartition("|")[2] for document in documents]
            if len(some) == len(documents) or not ids:
                break
            where = replace(where, before_id=ids[-1])
        return found

    def _listed(self, documents: Sequence[Document]) -> list[InvocationRecord]:
        """Their records. Those that cannot be read are left out."""
        records = []
        for document in documents:
            try:
                records.append(from_document(document))
            except CorruptRecord as error:
                self._observe("unreadable", {"kind": error.kind, "id": error.id, "why": str(error)})
        return records

    async def counts(self, app: str) -> Mapping[Status, int]:
        found = await self._ask("counts", lambda again: queries.counts(self._collection(schema.INVOCATIONS), app))
        return {Status(name): count for name, count in found.items() if name in _KNOWN}

    async def remove_final(self, app: str, before: float, limit: int) -> int:
        invocations = self._collection(schema.INVOCATIONS)
        return await self._ask("remove final", lambda again: archive.remove_final(invocations, app, before, limit))

    async def outboxes(self, app: str, before: float, limit: int) -> Sequence[InvocationRecord]:
        invocations = self._collection(schema.INVOCATIONS, majority=True)
        return await self._tended(
            *("outboxes", schema.INVOCATIONS),
            *(lambda: archive.outboxes(invocations, app, before, limit), from_document),
        )

    async def delivered(self, app: str, ids: Sequence[InvocationId]) -> None:
        invocations, keys = self._collection(schema.INVOCATIONS), [key_of(app, id) for id in ids]
        await self._ask("delivered", lambda again: archive.deliver(invocations, keys))

    async def ended(self, app: str, where: Ended, limit: int) -> Sequence[InvocationRecord]:
        invocations = self._collection(schema.INVOCATIONS, majority=True)
        return self._listed(await self._ask("ended", lambda again: archive.ended(invocations, app, where, limit)))

    async def remove_ended(self, app: str, ids: Sequence[InvocationId]) -> int:
        invocations, keys = self._collection(schema.INVOCATIONS), [key_of(app, id) for id in ids]
        return await self._ask("remove ended", lambda again: archive.remove(invocations, keys))

    async def remove_expired(self, app: str, at: float, limit: int) -> int:
        return await self._ask("remove expired", lambda again: self._remove_expired(app, at, limit))

    async def _remove_expired(self, app: str, at: float, limit: int) -> int:
        removed = await archive.remove_expired(self._collection(schema.INVOCATIONS), app, at, limit)
        return removed + await entries.remove_expired(self._collection(schema.ENTRIES), app, at, limit - removed)

    async def retain_old(self, app: str, after: str, limit: int) -> str | None:
        invocations = self._collection(schema.INVOCATIONS)
        return await self._ask("retain old", lambda again: archive.retain_old(invocations, app, after, limit))

    async def quarantined(self, app: str) -> Sequence[Quarantined]:
        quarantine = self._collection(schema.QUARANTINE)
        documents = await self._ask("quarantined", lambda again: queries.quarantined(quarantine, app))
        return [_quarantined(found) for found in documents]

    async def quarantine_hidden(self, app: str) -> int:
        invocations, count = self._collection(schema.INVOCATIONS), 0
        looks: Sequence[tuple[Look, Callable[[Document], object]]] = (
            (queries.of_unknown_status, from_document),
            (queries.without_owner, _nobody_owns),
            (queries.all_slot_holders, from_document),
        )
        for look, decode in looks:

            async def attempt(again: bool, look: Look = look, decode: Callable[[Document], object] = decode) -> int:
                found = await look(invocations, app)
                return (await self._quarantine.sorted_out(schema.INVOCATIONS, found, decode))[1]

            count += await self._ask("quarantine hidden", attempt)
        for status in sorted(AVAILABLE):
            count += await self._ask("quarantine hidden", lambda again: self._walk(app, status))  # noqa: B023
        return count

    async def _walk(self, app: str, status: Status) -> int:
        """Set aside those of a status that wait, and that no claim would find."""
        invocations, after = self._collection(schema.INVOCATIONS), self._walked.get((app, status), "")
        found, following = await queries.waiting_after(invocations, app, status.value, after)
        moved = (await self._quarantine.sorted_out(schema.INVOCATIONS, found, from_document))[1]
        self._walked[app, status] = following
        return moved

    async def exists(self) -> bool:
        """Whether a store was ever made here. To look, not to make one: it need not be open."""
        async with connection.borrowed(self._url) as client:
            meta = self._database_of(client)[schema.META]
            return await self._ask("exists", lambda again: meta.find_one({"_id": "schema"})) is not None

    async def check(self, *, deep: bool = False) -> Sequence[Finding]:
        async with connection.borrowed(self._url) as client:
            database = self._database_of(client)
            return await self._ask("check", lambda again: self._inspect(database, deep))

    async def _inspect(self, database: AsyncDatabase[Document], deep: bool) -> list[Finding]:
        return await inspect(database, self._clock, deep=deep, signal_seconds=self._signal_seconds)


Look = Callable[[AsyncCollection[Document], str], Awaitable[list[Document]]]


def _nobody_owns(document: Document) -> None:
    told = f"its owner is {shown(document.get('owner'))}, whose work nobody could recover"
    raise corrupt(INVOCATION, str(document["_id"]).rpartition("|")[2], ValueError(told))


def _quarantined(found: Document) -> Quarantined:
    """What was set aside, as far as that itself can be read."""
    at = found.get("at")
    texts = {name: str(found.get(name, "")) for name in ("app", "id", "why")}
    moment = float(at) if isinstance(at, int | float) and EARLIEST <= at <= LATEST else 0.0
    return Quarantined(**texts, at=moment, raw=repr(found.get("document")), kind=str(found.get("kind") or INVOCATION))


_KNOWN = frozenset(status.value for status in Status)
