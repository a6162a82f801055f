"""The memory store: the reference that the others have to agree with.

It keeps records in a dictionary and applies `holdfast.lifecycle.changes` directly, so it can be read as the meaning
of the contract. It is right rather than fast: a claim looks at everything. It lives as long as its app and serves one
process, for tests and for trying things out.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec.structs import replace

from holdfast.clock import Clock
from holdfast.errors import CorruptRecord, UsageError
from holdfast.ids import InvocationId
from holdfast.lifecycle.changes import (
    APPLIED,
    APPLIED_AGAIN,
    MISSING,
    Change,
    Lost,
    Verdict,
    applies,
    apply_to,
    was_applied,
)
from holdfast.lifecycle.claims import Claim, Claimed, claimed, released, turned_away
from holdfast.lifecycle.limits import Held, Holder, Release, allot
from holdfast.lifecycle.queues import QueueDepth, gathered
from holdfast.lifecycle.records import Collected, Entry, InvocationRecord, Quarantined, runner_of
from holdfast.lifecycle.status import AVAILABLE, FINAL, OWNED, Status
from holdfast.store.contract import Ability, Ended, Filter, Finding, Observe, Transaction, ignore
from holdfast.store.memory_beside import MemoryBeside

_Place = tuple[int, float, str]


class MemoryStore(MemoryBeside):
    """See `holdfast.store.contract.Store`."""

    abilities = Ability.SHARED_CLOCK
    schema_version = 0

    def __init__(self, clock: Clock, observe: Observe = ignore) -> None:
        super().__init__(clock)
        self._observe = observe
        self._quarantine: list[Quarantined] = []
        self._records: dict[tuple[str, str], InvocationRecord] = {}
        self._named: dict[tuple[str, str, str], InvocationId] = {}  # by app, kind of name and name: what has it
        self._ready: dict[tuple[str, str], list[_Place]] = {}  # by app and lane
        self._waiting: dict[tuple[str, str], list[_Place]] = {}  # by app and limit key
        self._slots: dict[tuple[str, str], dict[str, InvocationId]] = {}  # by app and limit key: slot, holder

    async def open(self, beside: object = None) -> None:
        pass

    async def close(self) -> None:
        pass

    async def insert(self, records: Sequence[InvocationRecord]) -> Sequence[bool]:
        with self._lock:
            return [self._insert(record) for record in records]

    def _insert(self, record: InvocationRecord) -> bool:
        there = self._in_the_way(record)
        if there is None:
            self._put(record)
            return True
        return there.id == record.id and there.history[0].operation == record.history[0].operation

    def _in_the_way(self, record: InvocationRecord) -> InvocationRecord | None:
        names = [("id", record.id), ("key", f"{record.task}|{record.key}"), ("twin", record.twin or "")]
        wanted = [True, record.key is not None, record.twin is not None]
        for name in itertools.compress(names, wanted):
            if (id := self._named.get((record.app, *name))) is not None:
                return self._records[record.app, id]
        return None

    async def in_the_way(self, records: Sequence[InvocationRecord]) -> Sequence[InvocationRecord | None]:
        with self._lock:
            return [self._in_the_way(record) for record in records]

    async def free_key(self, app: str, id: str, key: str) -> None:
        with self._lock:
            there = self._records.get((app, id))
            if there is not None and there.key == key:
                self._put(replace(there, key=None))

    async def claim(self, claim: Claim) -> Claimed:
        with self._lock:
            before = self._of(claim.app) if claim.again else []
            mine = [r for r in before if r.claim_token == claim.operation and r.status is claim.path[-1]]
            wanted = max(0, claim.limit - len(mine))
            queues = [self._ready.get((claim.app, lane), []) for lane in dict.fromkeys(claim.lanes)]
            due = (key for key in heapq.merge(*queues) if key[1] <= claim.at and (not claim.ids or key[2] in claim.ids))
            candidates = (self._records[claim.app, id] for _, _, id in due)
            held = Held(lambda key: self._holders(claim.app, key))
            found = allot(candidates, wanted, limits=claim.limits, limited=claim.limited, held=held, owner=claim.owner)
            got = [self._put(apply_to(claimed(claim, record, slot), record)) for record, slot in found.taken]
            for record, change in turned_away(claim, found, held):
                self._put(apply_to(change, record))
            satisfied = claim.ids or found.cut or len(mine) + len(got) >= claim.limit
            left = None if satisfied else min((key[1] for queue in queues for key in queue), default=None)
            everything = tuple(sorted(mine, key=_queue_order) + got)
            return Claimed(everything, left, refused=tuple(record.id for record in found.refused), cut=found.cut)

    async def release_waiters(
        self, app: str, wishes: Sequence[Release], *, operation: str, at: float
    ) -> Sequence[InvocationRecord]:
        with self._lock:
            found = []
            for wish in wishes:
                held = len(self._slots.get((app, wish.limit_key), ()))
                count = wish.count if wish.most is None else min(wish.count, wish.most - held)
                queue = (self._records[app, id] for _, _, id in self._waiting.get((app, wish.limit_key), ()))
                first = list(islice((record for record in queue if record.lane not in wish.without), max(0, count)))
                found += [self._put(apply_to(released(record, operation=operation, at=at), record)) for record in first]
            return found

    async def waiting_keys(self, app: str) -> Mapping[str, int]:
        with self._lock:
            keys = [key for (owner, key), queue in self._waiting.items() if owner == app and queue]
            return {key: len(self._slots.get((app, key), ())) for key in keys}

    async def slot_holders(self, app: str, limit_key: str) -> Sequence[InvocationRecord]:
        with self._lock:
            held = self._slots.get((app, limit_key), {})
            return [self._records[app, id] for _, id in sorted(held.items())]

    async def start_limits(self, app: str, limit: int) -> Sequence[InvocationRecord]:
        with self._lock:
            found = [(record.start_by, record.id, record) for record in self._of(app) if record.start_by is not None]
            return [record for _, _, record in sorted(found)[:limit]]

    async def lanes(self, app: str) -> Sequence[str]:
        with self._lock:
            return sorted(lane for (owner, lane), queue in self._ready.items() if owner == app and queue)

    async def apply(self, changes: Sequence[Change]) -> Sequence[Verdict]:
        with self._lock:
            return [self._apply(change) for change in changes]

    def _apply(self, change: Change) -> Verdict:
        record = self._records.get((change.app, change.id))
        if record is None:
            return MISSING
        if was_applied(change.operation, record.history):
            return APPLIED_AGAIN
        if not applies(change, record):
            return Lost(record.status, record.owner, record.epoch)
        self._put(apply_to(change, record))
        return APPLIED

    async def get(self, app: str, ids: Sequence[InvocationId]) -> Sequence[InvocationRecord | None]:
        with self._lock:
            return [self._records.get((app, id)) for id in ids]

    async def find(self, app: str, where: Filter, limit: int, *, set_aside: bool = False) -> Sequence[InvocationRecord]:
        with self._lock:
            found = [record for record in self._of(app) if _matches(where, record)]
            return sorted(found, key=lambda record: record.id, reverse=True)[:limit]

    async def counts(self, app: str) -> Mapping[Status, int]:
        with self._lock:
            return Counter(record.status for record in self._of(app))

    async def queue_depths(self, app: str, at: float) -> Sequence[QueueDepth]:
        with self._lock:
            return gathered(_depth(record, at) for record in self._of(app) if record.status not in FINAL)

    async def collect_payloads(self, app: str, before: float, limit: int) -> Collected:
        with self._lock:
            wanted = {digest for record in self._of(app) for digest in record.payloads}
            old = sorted((at, key) for key, (at, _) in self._payloads.items() if key[0] == app and at < before)
            gone = [key for _, key in old[:limit] if key[1] not in wanted]
            for _, key in old[:limit]:
                self._payloads[key] = (self.now(), self._payloads[key][1])
            for key in gone:
                del self._payloads[key]
            orphans = [
                key
                for key, (at, _) in self._pieces.items()
                if key[0] == app and at < before and key[:2] not in self._payloads
            ]
            for orphan in orphans:
                del self._pieces[orphan]
            return Collected(len(gone), more=len(old) >= limit)

    async def owners(self, app: str) -> Sequence[str]:
        with self._lock:
            return sorted({record.owner for record in self._of(app) if record.owner is not None})

    async def outboxes(self, app: str, before: float, limit: int) -> Sequence[InvocationRecord]:
        with self._lock:
            found = [record for record in self._of(app) if record.outbox and record.changed_at <= before]
            return sorted(found, key=lambda record: (record.changed_at, record.id))[:limit]

    async def delivered(self, app: str, ids: Sequence[InvocationId]) -> None:
        with self._lock:
            for id in ids:
                if (record := self._records.get((app, id))) is not None and record.outbox:
                    self._put(replace(record, outbox=()))

    async def remove_final(self, app: str, before: float, limit: int) -> int:
        with self._lock:
            old = [r for r in self._of(app) if _is_over(r) and r.changed_at < before]
            return self._remove(sorted(old, key=lambda record: record.id)[:limit])

    def _remove(self, gone: Sequence[InvocationRecord]) -> int:
        for record in gone:
            del self._records[record.app, record.id]
            for name in _names_of(record):
                del self._named[name]
        return len(gone)

    async def ended(self, app: str, where: Ended, limit: int) -> Sequence[InvocationRecord]:
        with self._lock:
            found = [record for record in self._of(app) if record.status in FINAL and _is_wanted(where, record)]
            return sorted(found, key=lambda record: (record.changed_at, record.id), reverse=True)[:limit]

    async def remove_ended(self, app: str, ids: Sequence[InvocationId]) -> int:
        with self._lock:
            there = [self._records.get((app, id)) for id in dict.fromkeys(ids)]
            return self._remove([record for record in there if record is not None and _is_over(record)])

    async def remove_expired(self, app: str, at: float, limit: int) -> int:
        with self._lock:
            over = [(r.retain_until, r.id) for r in self._of(app) if _is_over(r) and r.retain_until is not None]
            gone = sorted(each for each in over if each[0] <= at)[:limit]
            removed = self._remove([self._records[app, id] for _, id in gone])
            return removed + self._remove_expired_entries(app, at, limit - removed)

    async def retain_old(self, app: str, after: str, limit: int) -> str | None:
        return None  # it is never older than this code

    async def quarantined(self, app: str) -> Sequence[Quarantined]:
        return [each for each in self._quarantine if each.app == app]

    async def quarantine_entry(self, entry: Entry, error: CorruptRecord) -> bool:
        if not await self.remove_entry(entry):
            return False
        aside = Quarantined(
            app=entry.app, id=entry.name, kind=entry.kind, at=self.now(), why=str(error), raw=repr(entry.body)
        )
        self._quarantine.append(aside)
        self._observe("quarantine", {"kind": entry.kind, "id": entry.name, "why": str(error)})
        return True

    async def quarantine_hidden(self, app: str) -> int:
        return 0

    async def check(self, *, deep: bool = False) -> Sequence[Finding]:
        return [Finding(subject="memory", ok=True, detail=f"{len(self._records)} invocations in this process")]

    def joined(self, session: object) -> Transaction:
        raise UsageError("a store in memory has no transactions; session= needs SQLite or MongoDB")

    def hints(self) -> None:
        return None

    def _holders(self, app: str, limit_key: str) -> dict[str, Holder]:
        held = self._slots.get((app, limit_key), {})
        return {slot: Holder(id, self._records[app, id].owner) for slot, id in held.items()}

    def _of(self, app: str) -> list[InvocationRecord]:
        return [record for record in self._records.values() if record.app == app]

    def _put(self, record: InvocationRecord) -> InvocationRecord:
        before = self._records.get((record.app, record.id))
        for name in _names_of(before):
            del self._named[name]
        self._named.update(dict.fromkeys(_names_of(record), record.id))
        if before is not None:
            if (queue := self._queue_of(before)) is not None:
                del queue[bisect_left(queue, _queue_order(before))]
            if before.slot is not None:
                del self._slots[record.app, before.limit_key or ""][before.slot]
        if (queue := self._queue_of(record)) is not None:
            insort(queue, _queue_order(record))
        if record.slot is not None:
            slots = self._slots.setdefault((record.app, record.limit_key or ""), {})
            if slots.setdefault(record.slot, record.id) != record.id:
                raise AssertionError(f"the slot {record.slot} has two holders: {slots[record.slot]} and {record.id}")
        self._records[record.app, record.id] = record
        return record

    def _queue_of(self, record: InvocationRecord) -> list[_Place] | None:
        """Where the record stands in line: for a runner, for a slot, or nowhere."""
        if record.status in AVAILABLE:
            return self._ready.setdefault((record.app, record.lane), [])
        if record.status is Status.CONCURRENCY_CONTROLLED and record.limit_key is not None:
            return self._waiting.setdefault((record.app, record.limit_key), [])
        return None


def _names_of(record: InvocationRecord | None) -> list[tuple[str, str, str]]:
    """The names that no other record may have."""
    if record is None:
        return []
    names: list[tuple[str, str, str]] = [(record.app, "id", record.id)]
    if record.key is not None:
        names.append((record.app, "key", f"{record.task}|{record.key}"))
    if record.twin is not None:
        names.append((record.app, "twin", record.twin))
    return names


def _queue_order(record: InvocationRecord) -> _Place:
    return (-record.priority, record.due_at, record.id)


def _depth(record: InvocationRecord, at: float) -> QueueDepth:
    ready = record.status in AVAILABLE
    waits = ready and record.due_at <= at
    return QueueDepth(
        name=record.queue,
        waiting=waits,
        scheduled=ready and not waits,
        blocked=record.status is Status.CONCURRENCY_CONTROLLED,
        running=record.status in OWNED,
        oldest_due_at=record.due_at if waits else None,
    )


def _matches(where: Filter, record: InvocationRecord) -> bool:
    return (
        (not where.statuses or record.status in where.statuses)
        and (not where.tasks or record.task in where.tasks)
        and (not where.queues or record.queue in where.queues)
        and (where.runner is None or runner_of(record.owner) == where.runner)
        and (where.parent is None or record.parent_id == where.parent)
        and (where.before_id is None or record.id < where.before_id)
        and (where.rerun_of is None or record.rerun_of == where.rerun_of)
    )


def _is_over(record: InvocationRecord) -> bool:
    """Whether it may be removed: it has ended, and nobody is left to be told."""
    return record.status in FINAL and not record.outbox


def _is_wanted(where: Ended, record: InvocationRecord) -> bool:
    return (
        (not where.statuses or record.status in where.statuses)
        and (where.since is None or record.changed_at >= where.since)
        and (where.until is None or record.changed_at < where.until)
        and (where.before is None or (record.changed_at, record.id) < where.before)
    )


def open_memory(url: str, *, clock: Clock, observe: Observe, options: Mapping[str, Any]) -> MemoryStore:
    return MemoryStore(clock, observe)
