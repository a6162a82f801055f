"""What lies beside the invocations in MongoDB: payloads, the roster, executions of services, pauses of queues."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
from pymongo import ReturnDocument
from pymongo.asynchronous.collection import AsyncCollection

from holdfast.errors import CorruptRecord
from holdfast.lifecycle.queues import QueueDepth, QueuePause
from holdfast.lifecycle.records import (
    Collected,
    Entry,
    Piece,
    RunnerRecord,
    StoredPayload,
    WorkerRecord,
)
from holdfast.lifecycle.slots import Execution, ExecutionStatus
from holdfast.store.mongo import entries, executions, payloads, queries, queues, roster, schema
from holdfast.store.mongo.base import MongoBase
from holdfast.store.mongo.documents import (
    Document,
    key_of,
    runner_document,
    runner_of,
)

T = TypeVar("T")

_MOST_PASSES = 100


class MongoBeside(MongoBase):
    """The part of `holdfast.store.contract.Store` that is not about invocations."""

    # --- payloads

    async def keep_payloads(self, app: str, digests: Sequence[str]) -> Sequence[bool]:
        there = self._collection(schema.PAYLOADS, majority=True)
        return await self._ask("keep payloads", lambda again: payloads.keep(there, app, digests, self.now()))

    async def put_piece(self, app: str, digest: str, number: int, piece: Piece) -> None:
        pieces = self._collection(schema.PIECES)
        await self._ask("put piece", lambda again: payloads.put_piece(pieces, app, digest, number, piece, self.now()))

    async def put_payloads(self, app: str, stored: Sequence[StoredPayload]) -> None:
        there = self._collection(schema.PAYLOADS)
        await self._ask("put payloads", lambda again: payloads.put(there, app, stored, self.now()))

    async def get_payload(self, app: str, digest: str) -> StoredPayload | None:
        found = await self._ask(
            "get payload",
            lambda again: self._one(schema.PAYLOADS, lambda there: payloads.get(there, app, digest)),
        )
        try:
            return None if found is None else payloads.payload_of(found)
        except CorruptRecord as error:  # who wants to store the same value stores it anew
            await self._put_aside(schema.PAYLOADS, found, error)
            raise

    async def get_piece(self, app: str, digest: str, number: int) -> Piece | None:
        found = await self._ask(
            "get piece",
            lambda again: self._one(schema.PIECES, lambda there: payloads.get_piece(there, app, digest, number)),
        )
        try:
            return None if found is None else payloads.piece_of(found)
        except CorruptRecord as error:
            await self._put_aside(schema.PIECES, found, error)
            there = self._collection(schema.PAYLOADS)
            whole = await self._ask("get payload", lambda again: payloads.get(there, app, digest))
            await self._put_aside(schema.PAYLOADS, whole, error)
            raise

    async def _one(
        self, name: str, read: Callable[[AsyncCollection[Document]], Awaitable[Document | None]]
    ) -> Document | None:
        """What is durable, and if nothing is there: whether that is certain."""
        found = await read(self._collection(name, majority=True))
        return await self._certainly(name, read) if found is None else found

    # --- what cannot be read

    async def _put_aside(self, name: str, document: Document | None, error: CorruptRecord) -> None:
        """Move a document of a collection to quarantine, if this user may."""
        if document is not None:
            await self._ask("set aside", lambda again: self._quarantine.set_aside(document, error, name))

    async def _tended(
        self,
        what: str,
        name: str,
        read: Callable[[], Awaitable[Sequence[Document]]],
        decode: Callable[[Document], T],
    ) -> list[T]:
        """Read documents of a collection. Those that cannot be read are set aside, and make room for the next."""

        async def attempt(again: bool) -> list[T]:
            found: list[T] = []
            for _ in range(_MOST_PASSES):
                found, moved = await self._quarantine.sorted_out(name, await read(), decode)
                if not moved:
                    break
            return found

        return await self._ask(what, attempt)

    async def collect_payloads(self, app: str, before: float, limit: int) -> Collected:
        return await self._ask("collect payloads", lambda again: self._collect(app, before, limit))

    async def _collect(self, app: str, before: float, limit: int) -> Collected:
        there, pieces = self._collection(schema.PAYLOADS), self._collection(schema.PIECES)
        referring = (self._collection(schema.INVOCATIONS), self._collection(schema.QUARANTINE))
        removed = 0
        found = await payloads.unwanted(there, app, before, limit)
        for digest in found:
            if await payloads.is_referred_to(*referring, app, digest):
                await payloads.keep(there, app, [digest], self.now())
            else:
                removed += await payloads.remove(there, pieces, app, digest, before)
        orphans = await payloads.remove_orphans(there, pieces, app, before, limit, self.now())
        return Collected(removed, more=max(len(found), orphans) >= limit)

    # --- the roster

    async def enrol(self, runner: RunnerRecord) -> None:
        document = runner_document(runner)
        runners = self._collection(schema.RUNNERS)
        await self._ask("enrol", lambda again: runners.replace_one({"_id": document["_id"]}, document, upsert=True))

    async def heartbeat(
        self,
        app: str,
        runner_id: str,
        workers: Sequence[WorkerRecord] = (),
        *,
        ticks: bool = True,
        draining: bool = False,
    ) -> RunnerRecord | None:
        facts = {
            "workers": msgspec.to_builtins(list(workers)),
            "can_run_atomic_service": ticks,
            "draining": draining,
        }
        found = await self._ask("heartbeat", lambda again: self._beat(key_of(app, runner_id), facts))
        try:
            return None if found is None else runner_of(found)
        except CorruptRecord as error:  # it begins anew, as one that was declared dead
            await self._put_aside(schema.RUNNERS, found, error)
            return None

    async def _beat(self, key: str, facts: Document) -> Document | None:
        """The server stamps the time, so a runner with a wrong clock neither looks dead nor lives for ever; its
        answer tells us the difference.
        """
        asked = self._clock.monotonic()
        now: Document = {"$divide": [{"$toLong": "$$NOW"}, 1000]}
        found = await self._collection(schema.RUNNERS).find_one_and_update(
            {"_id": key},
            [{"$set": {"heartbeat_at": now} | {name: {"$literal": fact} for name, fact in facts.items()}}],
            return_document=ReturnDocument.AFTER,
        )
        if found is not None:
            self._time.learn(found["heartbeat_at"], asked)
        return found

    async def silent(self, app: str) -> Sequence[tuple[RunnerRecord, float]]:
        runners = self._collection(schema.RUNNERS)
        return await self._tended(
            *("silent", schema.RUNNERS, lambda: roster.silent(runners, app, self.now())),
            lambda found: (runner_of(found), float(found["silent"])),
        )

    async def declare_dead(self, runner: RunnerRecord) -> bool:
        return await self._ask("declare dead", lambda again: self._declare_dead(runner, again))

    async def _declare_dead(self, runner: RunnerRecord, again: bool) -> bool:
        runners, key = self._collection(schema.RUNNERS), key_of(runner.app, runner.id)
        result = await runners.delete_one({"_id": key, "heartbeat_at": runner.heartbeat_at})
        # If an earlier try may have done it, better two who see to its work than nobody.
        return result.deleted_count > 0 or (again and await runners.find_one({"_id": key}, {"_id": True}) is None)

    async def ask_runner(
        self, app: str, runner_id: str, *, wish: str | None = None, sits_out_until: float | None = None
    ) -> bool:
        asked = {"wish": wish, "sits_out_until": sits_out_until}
        facts = {name: value for name, value in asked.items() if value is not None}
        runners, key = self._collection(schema.RUNNERS), key_of(app, runner_id)
        result = await self._ask("ask runner", lambda again: runners.update_one({"_id": key}, {"$set": facts}))
        return result.matched_count > 0

    async def owners(self, app: str) -> Sequence[str]:
        return await self._ask("owners", lambda again: queries.owners(self._collection(schema.INVOCATIONS), app))

    async def leave(self, app: str, runner_id: str) -> None:
        runners = self._collection(schema.RUNNERS)
        await self._ask("leave", lambda again: runners.delete_one({"_id": key_of(app, runner_id)}))

    async def roster(self, app: str) -> Sequence[RunnerRecord]:
        runners = self._collection(schema.RUNNERS, majority=True)
        return await self._tended("roster", schema.RUNNERS, lambda: queries.roster(runners, app), runner_of)

    # --- services

    async def put_execution(self, app: str, execution: Execution) -> Execution | None:
        there = self._collection(schema.EXECUTIONS, majority=True)
        while True:
            other = await self._ask("put execution", lambda again: executions.put(there, app, execution))
            try:
                return None if other is None else executions.execution_of(other)
            except CorruptRecord as error:
                await self._move_away(schema.EXECUTIONS, other, error)

    async def end_execution(self, app: str, id: str, status: ExecutionStatus, at: float, reason: str) -> bool:
        there = self._collection(schema.EXECUTIONS, majority=True)
        return await self._ask("end execution", lambda again: executions.end(there, app, id, status, at, reason))

    async def executions(self, app: str, service: str, limit: int) -> Sequence[Execution]:
        there = self._collection(schema.EXECUTIONS, majority=True)
        return await self._tended(
            *("executions", schema.EXECUTIONS),
            *(lambda: executions.listing(there, app, service, limit), executions.execution_of),
        )

    async def forget_executions(self, app: str, ids: Sequence[str]) -> None:
        there = self._collection(schema.EXECUTIONS)
        await self._ask("forget executions", lambda again: executions.forget(there, app, ids))

    # --- queues

    async def queue_depths(self, app: str, at: float) -> Sequence[QueueDepth]:
        invocations = self._collection(schema.INVOCATIONS)
        return await self._ask("queue depths", lambda again: queues.depths(invocations, app, at))

    async def pause_queue(self, pause: QueuePause) -> QueuePause | None:
        there = self._collection(schema.QUEUES, majority=True)
        while True:
            found = await self._ask("pause queue", lambda again: queues.pause(there, pause))
            try:
                return None if found is None else queues.pause_of(found)
            except CorruptRecord as error:
                await self._move_away(schema.QUEUES, found, error)

    async def _move_away(self, name: str, document: Document | None, error: CorruptRecord) -> None:
        """Set aside a document that is in the way of a write. Raises the error where this user may not."""
        assert document is not None
        if not await self._ask("set aside", lambda again: self._quarantine.set_aside(document, error, name)):
            raise error

    async def resume_queue(self, app: str, name: str, operation: str) -> bool:
        there = self._collection(schema.QUEUES, majority=True)
        return await self._ask("resume queue", lambda again: queues.resume(there, app, name, operation))

    async def pauses(self, app: str) -> Sequence[QueuePause]:
        there = self._collection(schema.QUEUES, majority=True)
        found = await self._tended("pauses", schema.QUEUES, lambda: queues.pauses(there, app), queues.pause_of)
        return [pause for pause in found if pause is not None]

    # --- entries

    async def put_entry(self, entry: Entry, over: Entry | None = None) -> bool:
        there = self._collection(schema.ENTRIES, majority=True)
        while True:
            if await self._ask("put entry", lambda again: entries.put(there, entry, over)):
                return True
            found = await self._ask("put entry", lambda again: entries.get(there, entry))
            try:
                return found is not None and entries.entry_of(found) == entry
            except CorruptRecord as error:
                await self._move_away(schema.ENTRIES, found, error)

    async def entries(self, app: str, kind: str, names: Sequence[str] | None = None) -> Sequence[Entry]:
        there = self._collection(schema.ENTRIES, majority=True)
        found = await self._tended(
            "entries", schema.ENTRIES, lambda: entries.listing(there, app, kind, names), entries.entry_of
        )
        return sorted(found, key=lambda entry: entry.name)

    async def due_entries(self, app: str, kind: str, limit: int) -> Sequence[Entry]:
        there = self._collection(schema.ENTRIES, majority=True)
        return await self._tended(
            "due entries", schema.ENTRIES, lambda: entries.due(there, app, kind, limit), entries.entry_of
        )

    async def latest_entries(self, app: str, kind: str, limit: int, before: str | None = None) -> Sequence[Entry]:
        there = self._collection(schema.ENTRIES, majority=True)
        return await self._tended(
            *("latest entries", schema.ENTRIES),
            *(lambda: entries.latest(there, app, kind, limit, before), entries.entry_of),
        )

    async def quarantine_entry(self, entry: Entry, error: CorruptRecord) -> bool:
        there = self._collection(schema.ENTRIES)
        found = await self._ask("quarantine entry", lambda again: entries.get(there, entry))
        if found is None or (found.get("version"), found.get("body")) != (entry.version, entry.body):
            return False
        return await self._ask("set aside", lambda again: self._quarantine.set_aside(found, error, schema.ENTRIES))

    async def remove_entry(self, entry: Entry) -> bool:
        there = self._collection(schema.ENTRIES)
        return await self._ask("remove entry", lambda again: entries.remove(there, entry))
