"""The memory store: the reference that the others have to agree with.

It keeps records in a dictionary and applies `holdfast.model.changes` directly, so it can be read as the meaning
of the contract. It is right rather than fast: a claim looks at everything. It lives as long as its app and serves one
process, for tests and for trying things out.
"""

from __future__ import annotations

import functools
import heapq
import inspect
import itertools
import threading
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, TypeVar

from msgspec.structs import replace

from holdfast.clock import Clock
from holdfast.errors import CorruptRecord, UsageError
from holdfast.ids import InvocationId
from holdfast.model.changes import (
    APPLIED,
    APPLIED_AGAIN,
    MISSING,
    Change,
    FieldReset,
    Lost,
    Verdict,
    Write,
    applies,
    apply_to,
    was_applied,
)
from holdfast.model.claims import Claim, Claimed, bounds_of, claimed, next_starts, released, turned_away
from holdfast.model.decoding import RATE
from holdfast.model.limits import Held, Holder, Release, allot, dues_of
from holdfast.model.log import APPENDED, MAX_BEHIND, AppendVerdict, Page, checked, judge, stream_logs
from holdfast.model.queues import QueueDepth, gathered
from holdfast.model.rates import RateBuckets
from holdfast.model.records import (
    Collected,
    Entry,
    InvocationRecord,
    Piece,
    Quarantined,
    RunnerRecord,
    StoredPayload,
    WorkerRecord,
    runner_of,
)
from holdfast.model.state_writes import written
from holdfast.model.status import AVAILABLE, FINAL, OWNED, Status
from holdfast.store.contract import (
    ALL_KEYS,
    Ability,
    EntryOrder,
    Filter,
    Finding,
    Observe,
    Order,
    StepTransaction,
    Transaction,
    ignore,
)

_Place = tuple[int, float, str]
_first = attrgetter("first")  # of pages
S = TypeVar("S", bound=type)
T = TypeVar("T")


def _locked(store: S) -> S:
    """Let each operation hold the lock: an app has one loop, but two apps may share a store in a test."""
    for name, method in inspect.getmembers(store, inspect.iscoroutinefunction):
        setattr(store, name, _holding_lock(method))
    return store


def _holding_lock(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    @functools.wraps(method)
    async def operation(self: MemoryStore, *args: Any, **more: Any) -> T:
        with self._lock:
            return await method(self, *args, **more)  # no operation ever suspends

    return operation


@_locked
class MemoryStore:
    """See `holdfast.store.contract.Store`."""

    abilities = Ability.SHARED_CLOCK
    schema_version = 0

    def __init__(self, clock: Clock, observe: Observe = ignore) -> None:
        self._clock = clock
        self._observe = observe
        self._lock = threading.RLock()
        self._runners: dict[tuple[str, str], RunnerRecord] = {}
        self._entries: dict[tuple[str, str, str], Entry] = {}
        self._payloads: dict[tuple[str, str], tuple[float, StoredPayload]] = {}
        self._pieces: dict[tuple[str, str, int], tuple[float, Piece]] = {}
        self._quarantine: list[Quarantined] = []
        self._records: dict[tuple[str, str], InvocationRecord] = {}
        self._named: dict[tuple[str, str, str], InvocationId] = {}  # by app, kind of name and name: what has it
        self._ready: dict[tuple[str, str], list[_Place]] = {}  # by app and lane
        self._waiting: dict[tuple[str, str], list[_Place]] = {}  # by app and limit key
        self._logs: dict[tuple[str, str, int], list[Page]] = {}  # by app, run and generation
        self._slots: dict[tuple[str, str], dict[str, InvocationId]] = {}  # by app and limit key: slot, holder

    def now(self) -> float:
        return self._clock.now()

    def clock_error(self) -> float:
        return 0.0

    def needs_restart(self, *, by_children: bool = False) -> str:
        return ""

    async def open(self, session: object = None) -> None:
        pass

    async def close(self) -> None:
        pass

    # --- invocations

    async def insert(self, records: Sequence[InvocationRecord]) -> Sequence[bool]:
        return [self._insert(record) for record in records]

    def _insert(self, record: InvocationRecord) -> bool:
        there = self._find_conflict(record)
        if there is None:
            self._put(record)
            return True
        return there.id == record.id and there.history[0].operation == record.history[0].operation

    def _find_conflict(self, record: InvocationRecord) -> InvocationRecord | None:
        found = (self._named.get(name) for name in _names_of(record))
        return next((self._records[record.app, id] for id in found if id is not None), None)

    async def find_conflicts(self, records: Sequence[InvocationRecord]) -> Sequence[InvocationRecord | None]:
        return [self._find_conflict(record) for record in records]

    async def claim(self, claim: Claim) -> Claimed:
        before = self._of(claim.app) if claim.again else []
        mine = [r for r in before if r.claim_token == claim.operation and r.status is claim.path[-1]]
        wanted = max(0, claim.limit - len(mine))
        queues = [self._ready.get((claim.app, lane), []) for lane in dict.fromkeys(claim.lanes)]
        due = (key for key in heapq.merge(*queues) if key[1] <= claim.at and (not claim.ids or key[2] in claim.ids))
        candidates = (self._records[claim.app, id] for _, _, id in due)
        held = Held(lambda key: self._holders(claim.app, key))
        buckets = RateBuckets(claim.app, claim.at, lambda key: self._entries.get((claim.app, RATE, key)))
        found = allot(candidates, wanted, bounds_of(claim, held, buckets))
        got = [self._put(apply_to(claimed(claim, record, slot), record)) for record, slot in found.taken]
        for record, change in turned_away(claim, found):
            self._put(apply_to(change, record))
        lanes = [record.lane for record, _, _ in found.deferred]
        for wish in next_starts(buckets):
            gone = self._release(claim.app, wish, claim.operation, claim.at)
            buckets.released(wish.limit_key, wish.dues, len(gone))
            lanes += [record.lane for record in gone]
        for entry, _ in buckets.changed():
            self._entries[entry.app, entry.kind, entry.name] = entry
        satisfied = claim.ids or found.cut or len(mine) + len(got) >= claim.limit
        left = None if satisfied else min((key[1] for queue in queues for key in queue), default=None)
        everything = tuple(sorted(mine, key=_queue_order) + got)
        refused, start_at = tuple(record.id for record, _ in found.refused), buckets.next_at()
        return Claimed(everything, left, refused=refused, released=tuple(lanes), cut=found.cut, start_at=start_at)

    async def release_waiters(
        self, app: str, wishes: Sequence[Release], *, operation: str, at: float
    ) -> Sequence[InvocationRecord]:
        return [record for wish in wishes for record in self._release(app, wish, operation, at)]

    def _release(self, app: str, wish: Release, operation: str, at: float) -> list[InvocationRecord]:
        held = len(self._slots.get((app, wish.limit_key), ()))
        count = wish.count if wish.max_running is None else min(wish.count, wish.max_running - held)
        queue = (self._records[app, id] for _, _, id in self._waiting.get((app, wish.limit_key), ()))
        first = list(islice((record for record in queue if record.lane not in wish.without), max(0, count)))
        steps = [
            released(r, operation=operation, at=at, due_at=due) for r, due in zip(first, dues_of(wish), strict=False)
        ]
        return [self._put(apply_to(change, record)) for change, record in zip(steps, first, strict=True)]

    async def waiting_keys(
        self, app: str, within: Sequence[tuple[str, str]] = ALL_KEYS, most: int | None = None
    ) -> Mapping[str, int]:
        there = sorted(key for (owner, key), queue in self._waiting.items() if owner == app and queue)
        keys = [key for first, last in within for key in [each for each in there if first <= each < last][:most]]
        return {key: len(self._slots.get((app, key), ())) for key in keys}

    async def lanes(self, app: str) -> Sequence[str]:
        return sorted(lane for (owner, lane), queue in self._ready.items() if owner == app and queue)

    async def apply(self, changes: Sequence[Write]) -> Sequence[Verdict]:
        return [self._write(change) for change in changes]

    def _write(self, change: Write) -> Verdict:
        if isinstance(change, Change):
            return self._apply(change)
        if isinstance(change, FieldReset):
            return self._clear(change)
        record = self._records.get((change.app, change.id))
        if record is None:
            return MISSING
        after = written(change, record)
        if not isinstance(after, InvocationRecord):
            return after
        self._put(after)
        return APPLIED

    def _clear(self, reset: FieldReset) -> Verdict:
        record = self._records.get((reset.app, reset.id))
        if record is None:
            return MISSING
        after = replace(record, outbox=()) if reset.key is None else record
        if reset.key is not None and record.key == reset.key:
            after = replace(record, key=None)
        if after == record:
            return APPLIED_AGAIN
        self._put(after)
        return APPLIED

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
        return [self._records.get((app, id)) for id in ids]

    async def find(
        self, app: str, where: Filter, limit: int, *, order: Order = Order.NEWEST, set_aside: bool = False
    ) -> Sequence[InvocationRecord]:
        place, backwards = _ORDERS[order]
        found = [(place(record), record) for record in self._of(app) if _matches(where, record)]
        listed = sorted([each for each in found if each[0] is not None], key=lambda each: each[0], reverse=backwards)
        return [record for _, record in listed[:limit]]

    async def apps(self) -> Sequence[str]:
        return sorted({app for app, *_ in (*self._records, *self._entries, *self._runners)})

    async def counts(self, app: str) -> Mapping[Status, int]:
        return Counter(record.status for record in self._of(app))

    async def queue_depths(self, app: str, at: float, most: int | None = None) -> Sequence[QueueDepth]:
        return gathered(_depth(record, at) for record in self._of(app) if record.status in _QUEUED)

    async def owners(self, app: str) -> Sequence[str]:
        return sorted({record.owner for record in self._of(app) if record.owner is not None})

    def _remove(self, gone: Sequence[InvocationRecord]) -> int:
        for record in gone:
            first, behind = stream_logs(record.id)
            for log in [log for log in self._logs if log[0] == record.app]:
                if log[1] == record.id or first < log[1] < behind:
                    del self._logs[log]
            del self._records[record.app, record.id]
            for name in _names_of(record):
                del self._named[name]
        return len(gone)

    async def remove_ended(self, app: str, ids: Sequence[InvocationId]) -> int:
        there = [self._records.get((app, id)) for id in dict.fromkeys(ids)]
        return self._remove([record for record in there if record is not None and _is_over(record)])

    async def remove_expired(self, app: str, at: float, limit: int) -> int:
        over = [(r.retain_until, r.id) for r in self._of(app) if _is_over(r) and r.retain_until is not None]
        gone = sorted(each for each in over if each[0] <= at)[:limit]
        removed = self._remove([self._records[app, id] for _, id in gone])
        return removed + self._remove_expired_entries(app, at, limit - removed)

    # --- logs

    async def append(self, pages: Sequence[Page]) -> Sequence[AppendVerdict]:
        return [self._append(page) for page in pages]

    def _append(self, page: Page) -> AppendVerdict:
        log = self._logs.setdefault((page.app, page.run, page.generation), [])
        place = bisect_right(log, page.first - 1, key=_first)
        if place < len(log) and log[place].first == page.first:
            return judge(page, log[place : place + MAX_BEHIND])
        log.insert(place, page)
        return APPENDED

    async def read_log(
        self,
        app: str,
        run: InvocationId,
        *,
        generation: int = 0,
        after: int = 0,
        until: int | None = None,
        limit: int,
        latest: bool = False,
    ) -> Sequence[Page]:
        there = self._logs.get((app, run, generation), [])
        first = bisect_right(there, after, key=_first)
        log = there[first : None if until is None else bisect_right(there, until, key=_first)]
        found = log[-limit:] if latest and limit else log[:limit]
        checked(found, from_start=after == 0 and not latest)
        return found[::-1] if latest else found

    async def remove_log(self, app: str, run: InvocationId, *, before: int) -> int:
        gone = [log for log in self._logs if log[:2] == (app, run) and log[2] < before]
        return sum(len(self._logs.pop(log)) for log in gone)

    # --- entries

    async def put_entry(self, entry: Entry, over: Entry | None = None) -> bool:
        name = entry.app, entry.kind, entry.name
        there = self._entries.get(name)
        is_other = over is not None and there is not None and there.body != over.body
        if (there.version if there else 0) == entry.version - 1 and not is_other:
            self._entries[name] = entry
        return self._entries.get(name) == entry

    async def entries(
        self,
        app: str,
        kind: str,
        names: Sequence[str] | None = None,
        *,
        order: EntryOrder = EntryOrder.NAME,
        limit: int | None = None,
        before: str | None = None,
        subject: str | None = None,
    ) -> Sequence[Entry]:
        found = [entry for entry in self._entries.values() if (entry.app, entry.kind) == (app, kind)]
        if names is not None:
            return sorted((entry for entry in found if entry.name in names), key=lambda entry: entry.name)
        if subject is not None:
            found = [entry for entry in found if entry.subject == subject]
        if order is EntryOrder.DUE:
            dated = [(entry.due_at, entry.name, entry) for entry in found if entry.due_at is not None]
            return [entry for _, _, entry in sorted(dated, key=lambda each: each[:2])][:limit]
        if before is not None:
            found = [entry for entry in found if entry.name < before]
        return sorted(found, key=lambda entry: entry.name, reverse=order is EntryOrder.LATEST)[:limit]

    def _remove_expired_entries(self, app: str, at: float, limit: int) -> int:
        dated = [(e.keep_until, name) for name, e in self._entries.items() if e.app == app and e.keep_until is not None]
        gone = sorted(each for each in dated if each[0] <= at)[:limit]
        for _, name in gone:
            del self._entries[name]
        return len(gone)

    async def remove_entry(self, entry: Entry) -> bool:
        name = entry.app, entry.kind, entry.name
        there = self._entries.get(name)
        if there is None or (there.version, there.body) != (entry.version, entry.body):
            return False
        del self._entries[name]
        return True

    # --- payloads

    async def keep_payloads(self, app: str, digests: Sequence[str]) -> Sequence[bool]:
        there = [(app, digest) in self._payloads for digest in digests]
        for digest in itertools.compress(digests, there):
            self._payloads[app, digest] = (self.now(), self._payloads[app, digest][1])
        return there

    async def put_piece(self, app: str, digest: str, number: int, piece: Piece) -> None:
        self._pieces[app, digest, number] = (self.now(), piece)

    async def put_payloads(self, app: str, payloads: Sequence[StoredPayload]) -> None:
        self._payloads.update({(app, payload.digest): (self.now(), payload) for payload in payloads})

    async def get_payload(self, app: str, digest: str) -> StoredPayload | None:
        return self._payloads.get((app, digest), (0.0, None))[1]

    async def get_piece(self, app: str, digest: str, number: int) -> Piece | None:
        return self._pieces.get((app, digest, number), (0.0, None))[1]

    async def collect_payloads(self, app: str, before: float, limit: int) -> Collected:
        wanted = {digest for record in self._of(app) for digest in record.payloads}
        wanted |= {digest for entry in self._entries.values() if entry.app == app for digest in entry.payloads}
        wanted |= {digest for log in self._logs.values() for page in log if page.app == app for digest in page.payloads}
        old = sorted((at, key) for key, (at, _) in self._payloads.items() if key[0] == app and at < before)
        gone = [key for _, key in old[:limit] if key[1] not in wanted]
        for _, key in old[:limit]:
            self._payloads[key] = (self.now(), self._payloads[key][1])
        for key in gone:
            del self._payloads[key]
        for piece in [key for key, (at, _) in self._pieces.items() if key[0] == app and at < before]:
            if piece[:2] not in self._payloads:
                del self._pieces[piece]
        return Collected(len(gone), more=len(old) >= limit)

    # --- runners

    async def enrol(self, runner: RunnerRecord) -> None:
        self._runners[runner.app, runner.id] = runner

    async def heartbeat(
        self,
        app: str,
        runner_id: str,
        workers: Sequence[WorkerRecord] = (),
        *,
        ticks: bool = True,
        draining: bool = False,
    ) -> RunnerRecord | None:
        runner = self._runners.get((app, runner_id))
        if runner is None:
            return None
        known = replace(runner, heartbeat_at=self.now(), workers=tuple(workers))
        self._runners[app, runner_id] = replace(known, can_run_atomic_service=ticks, draining=draining)
        return self._runners[app, runner_id]

    async def silent(self, app: str) -> Sequence[tuple[RunnerRecord, float]]:
        mine = sorted(await self.roster(app), key=lambda runner: (runner.heartbeat_at, runner.id))
        ages = [(runner, self.now() - runner.heartbeat_at) for runner in mine]
        return ages[:1] + [each for each in ages[1:] if each[1] < -1.0]

    async def remove_runner(self, app: str, runner_id: str, *, heartbeat_at: float | None = None) -> bool:
        there = self._runners.get((app, runner_id))
        if there is None or heartbeat_at not in (None, there.heartbeat_at):
            return False
        del self._runners[app, runner_id]
        return True

    async def ask_runner(
        self, app: str, runner_id: str, *, wish: str | None = None, sits_out_until: float | None = None
    ) -> bool:
        runner = self._runners.get((app, runner_id))
        if runner is None:
            return False
        asked = {"wish": wish, "sits_out_until": sits_out_until}
        facts = {name: value for name, value in asked.items() if value is not None}
        self._runners[app, runner_id] = replace(runner, **facts)
        return True

    async def roster(self, app: str) -> Sequence[RunnerRecord]:
        mine = [runner for runner in self._runners.values() if runner.app == app]
        return sorted(mine, key=lambda runner: (runner.started_at, runner.id))

    # --- what cannot be read, and the rest

    async def quarantined(self, app: str, id: str | None = None, *, latest: int | None = None) -> Sequence[Quarantined]:
        found = [each for each in self._quarantine if each.app == app and id in (None, each.id)]
        return found if latest is None else found[::-1][:latest]

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

    def transaction(self, *, is_async: bool, owner: str = "") -> StepTransaction:
        raise UsageError("a store in memory has no transactions; a transactional step needs SQLite or MongoDB")

    async def abort_transactions(self, owners: Collection[str]) -> int:
        return 0

    def hints(self) -> None:
        return None

    def _holders(self, app: str, limit_key: str) -> dict[str, Holder]:
        held = self._slots.get((app, limit_key), {})
        return {slot: Holder(id, self._records[app, id].owner) for slot, id in held.items()}

    def _of(self, app: str) -> list[InvocationRecord]:
        return [record for record in self._records.values() if record.app == app]

    def has_all(self, app: str, ids: Sequence[InvocationId]) -> bool:
        with self._lock:
            return all((app, id) in self._records for id in ids)

    def unfinished(self, app: str, ids: Sequence[InvocationId] | None = None) -> list[InvocationRecord]:
        """Return the invocations that have not ended, of these ids or all. Not of the contract: for tests."""
        found = self._of(app) if ids is None else [self._records.get((app, id)) for id in ids]
        return [record for record in found if record is not None and record.status not in FINAL]

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
        """Return the queue of a record: that of its lane, that of its limit key, or None."""
        if record.status in AVAILABLE:
            return self._ready.setdefault((record.app, record.lane), [])
        if record.status is Status.CONCURRENCY_CONTROLLED and record.limit_key is not None:
            return self._waiting.setdefault((record.app, record.limit_key), [])
        return None


def _names_of(record: InvocationRecord | None) -> list[tuple[str, str, str]]:
    """Return the names that no other record may have."""
    if record is None:
        return []
    names: list[tuple[str, str, str]] = [(record.app, "id", record.id)]
    if record.key is not None:
        names.append((record.app, "key", f"{record.task}|{record.key}"))
    if record.dedup_key is not None:
        names.append((record.app, "dedup_key", record.dedup_key))
    return names


def _queue_order(record: InvocationRecord) -> _Place:
    return (-record.priority, record.due_at, record.id)


_QUEUED = AVAILABLE | OWNED | {Status.CONCURRENCY_CONTROLLED}


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
        and (where.id_ends is None or record.id.endswith(where.id_ends))
        and (where.rerun_of is None or record.rerun_of == where.rerun_of)
        and (where.limit_key is None or record.limit_key == where.limit_key)
        and (where.since is None or record.changed_at >= where.since)
        and (where.until is None or record.changed_at < where.until)
        and (where.before is None or (record.changed_at, record.id) < where.before)
        and (not where.attributes or where.attributes <= record.attributes.items())
    )


# The place of a record in each order, None if it has none; and whether the largest place comes first.
_ORDERS: Mapping[Order, tuple[Callable[[InvocationRecord], Any], bool]] = {
    Order.NEWEST: (lambda record: record.id, True),
    Order.LATEST_END: (lambda record: (record.changed_at, record.id) if record.status in FINAL else None, True),
    Order.OUTBOX: (lambda record: (record.changed_at, record.id) if record.outbox else None, False),
    Order.START_BY: (lambda record: None if record.start_by is None else (record.start_by, record.id), False),
    Order.SLOT: (lambda record: record.slot, False),
    Order.WAKE_AT: (
        lambda record: (
            None if record.wake_at is None or record.status is not Status.SUSPENDED else (record.wake_at, record.id)
        ),
        False,
    ),
}


def _is_over(record: InvocationRecord) -> bool:
    """Return whether a record may be removed: it has ended, and its outbox is empty."""
    return record.status in FINAL and not record.outbox


def open_memory(url: str, *, clock: Clock, observe: Observe, options: Mapping[str, Any]) -> MemoryStore:
    return MemoryStore(clock, observe)
