"""Invocations in SQLite. Each function here is a job of one of the threads, inside one open transaction.

Rows are fetched all at once: a cursor that an error leaves in the middle would keep its snapshot for later reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from msgspec import UNSET

from holdfast.codec import MARK
from holdfast.crashpoints import crashpoint
from holdfast.errors import CorruptRecord
from holdfast.ids import InvocationId
from holdfast.model import changes as model
from holdfast.model.changes import (
    APPLIED,
    APPLIED_AGAIN,
    MISSING,
    OPTIONAL,
    Change,
    FieldReset,
    Lost,
    Push,
    StateWrite,
    Verdict,
    Write,
    apply_to,
)
from holdfast.model.claims import Claim, Claimed, Taking, bounds_of, next_starts, released, turned_away
from holdfast.model.decoding import EARLIEST, LATEST, RATE
from holdfast.model.limits import MAX_BLOCKED, Held, Holder, Release, allot, dues_of, slot_range
from holdfast.model.queues import QueueDepth, gathered, in_lane
from holdfast.model.rates import RateBuckets
from holdfast.model.records import LONGEST, Entry, InvocationRecord, cut, digests_in, is_cut_at
from holdfast.model.state_writes import pushed_all, written
from holdfast.model.status import Status
from holdfast.store.contract import ALL_KEYS
from holdfast.store.sqlite import entries, queries
from holdfast.store.sqlite.logs import remove_logs
from holdfast.store.sqlite.payloads import forget, forget_streams, refer
from holdfast.store.sqlite.quarantine import INVOCATIONS, StoreConnection
from holdfast.store.sqlite.rows import (
    SIMPLE,
    STATUSES,
    TEXTS,
    column_value,
    from_row,
    history_of,
    history_text,
    to_row,
    to_short_row,
)

_IDS_PER_QUERY = 500
_WINDOW = 50  # how many candidates are looked at where some of them may be blocked

T = TypeVar("T")
Row = Sequence[Any]  # the rowid, then the columns
Found = dict[str, tuple[int, InvocationRecord]]  # rowid and record by id


def insert(connection: StoreConnection, records: Sequence[InvocationRecord]) -> list[bool]:
    rows = [row for record in records if (row := to_short_row(record)) is not None]
    if not (short := len(rows) == len(records)):
        rows = [to_row(record) for record in records]
    stored = 0
    for part in _parts(rows, queries.MAX_ROWS):
        values = list(chain.from_iterable(part))
        stored += connection.execute(queries.insert(len(part), short=short), values).rowcount
    are_ours = [stored == len(records) or _is_stored(connection, record) for record in records]
    for record, is_ours in zip(records, are_ours, strict=True):
        if is_ours and record.arguments[:1] == MARK:
            refer(connection, record.app, record.id, record.payloads)
    return are_ours


def _is_stored(connection: StoreConnection, record: InvocationRecord) -> bool:
    there = connection.execute(queries.FIRST_HISTORY, (record.app, record.id)).fetchone()
    try:
        return there is not None and history_of(there[0])[0].operation == record.history[0].operation
    except Exception:
        return False  # an unreadable row has the id


def find_conflicts(connection: StoreConnection, records: Sequence[InvocationRecord]) -> list[InvocationRecord | None]:
    return [find_conflict(connection, record) for record in records]


def find_conflict(connection: StoreConnection, record: InvocationRecord) -> InvocationRecord | None:
    """Return the invocation that conflicts by id, key or dedup key.

    Unreadable rows are set aside; one with the same id raises `CorruptRecord`.
    """
    looks: list[tuple[str, tuple[object, ...]]] = [(queries.by_id(1), (record.app, record.id))]
    if record.key is not None:
        looks.append((queries.BY_KEY, (record.app, record.task, record.key)))
    if record.dedup_key is not None:
        looks.append((queries.BY_DEDUP_KEY, (record.app, record.dedup_key)))
    for query, values in looks:
        if (row := connection.execute(query, values).fetchone()) is None:
            continue
        try:
            return from_row(row[1:])
        except CorruptRecord as error:
            if row[queries.ID] == record.id:
                raise
            connection.set_aside(INVOCATIONS, row, error)
    return None


# --- claim


def claim(connection: StoreConnection, claim: Claim) -> Claimed:
    got = _claimed_before(connection, claim) if claim.again else []
    heads = [] if claim.ids else _heads(connection, claim)
    held = Held(lambda key: _holders(connection, claim.app, key)) if claim.limits or claim.rates else None
    buckets = RateBuckets(claim.app, claim.at, lambda key: _bucket(connection, claim.app, key)) if held else None
    blocked, refused, lanes, is_cut = 0, list[InvocationId](), list[str](), False
    while len(got) < claim.limit and blocked < MAX_BLOCKED and not is_cut:
        wanted = claim.limit - len(got)
        window = wanted if held is None else max(wanted, _WINDOW)
        candidates = _named(connection, claim) if claim.ids else _candidates(connection, claim, heads, window)
        found = _decoded(connection, candidates[:window])
        if held is None or buckets is None:
            got += _take(connection, claim, [(record, None) for _, record in found.values()], found)
        else:
            records = [record for _, record in found.values()]
            given = allot(records, wanted, bounds_of(claim, held, buckets))
            got += _take(connection, claim, given.taken, found)
            away = [(record, apply_to(change, record)) for record, change in turned_away(claim, given)]
            _write(connection, [(found[record.id][0], record, after) for record, after in away])
            blocked += len(away)
            refused += [record.id for record, _ in given.refused]
            lanes += [record.lane for record, _, _ in given.deferred]
            is_cut = given.cut
        if len(candidates) < window:
            break
    start_at = None
    if claim.rates and buckets is not None:
        lanes += _write_buckets(connection, claim, buckets)
        start_at = buckets.next_at()
    next_due = None if is_cut or len(got) >= claim.limit else _next_due(connection, claim, heads)
    ends, go_on = tuple(refused), tuple(lanes)
    return Claimed(tuple(got), next_due, refused=ends, released=go_on, cut=is_cut, start_at=start_at)


def _bucket(connection: StoreConnection, app: str, key: str) -> Entry | None:
    found = entries.entries(connection, app, RATE, [key])
    return found[0] if found else None


def _write_buckets(connection: StoreConnection, claim: Claim, buckets: RateBuckets) -> list[str]:
    """Store the buckets of a claim. Return the lanes of the waiters that go on, each when it gets its start."""
    lanes: list[str] = []
    if wishes := next_starts(buckets):
        crashpoint("rate.claimed")
    for wish in wishes:
        gone = _release(connection, claim.app, wish, operation=claim.operation, at=claim.at)
        buckets.released(wish.limit_key, wish.dues, len(gone))
        lanes += [record.lane for record in gone]
    changed = buckets.changed()
    for entry, _ in changed:
        entries.put_entry(connection, entry)
    if changed:
        crashpoint("rate.taken")
    return lanes


def _claimed_before(connection: StoreConnection, claim: Claim) -> list[InvocationRecord]:
    values = (claim.app, claim.path[-1].value, claim.operation)
    found = _decoded(connection, connection.execute(queries.CLAIMED_BEFORE, values).fetchall()).values()
    return sorted([record for _, record in found], key=lambda record: (-record.priority, record.due_at, record.id))


def _heads(connection: StoreConnection, claim: Claim) -> list[tuple[int, str]]:
    """Return the (rank, lane) pairs with work for this claim, highest priority first."""
    lanes = frozenset(claim.lanes)
    found = connection.execute(queries.HEADS, {"app": claim.app}).fetchall()
    return sorted((rank, lane) for lane, rank in found if lane in lanes)


def _candidates(connection: StoreConnection, claim: Claim, heads: list[tuple[int, str]], wanted: int) -> list[Row]:
    """Return the first `wanted` due invocations in queue order. Lanes of one rank are merged by due time."""
    found: list[Row] = []
    for rank in dict.fromkeys(rank for rank, _ in heads):
        lanes = [lane for each, lane in heads if each == rank]
        merged: list[Row] = []
        for lane in lanes:
            merged += connection.execute(queries.CANDIDATES, (claim.app, lane, rank, claim.at, wanted - len(found)))
        if len(lanes) > 1:
            merged.sort(key=lambda row: (row[queries.DUE], row[queries.ID]))
        found += merged[: wanted - len(found)]
        if len(found) >= wanted:
            break
    return found


def _named(connection: StoreConnection, claim: Claim) -> list[Row]:
    """Return the due invocations among the claim's `ids`, in queue order."""
    query, lanes = queries.CANDIDATES_BY_ID.format(places=", ".join("?" * len(claim.ids))), frozenset(claim.lanes)
    found = connection.execute(query, (claim.app, *claim.ids)).fetchall()
    due = [row for row in found if row[queries.LANE] in lanes and row[queries.DUE] <= claim.at]
    return sorted(due, key=lambda row: (row[queries.RANK], row[queries.DUE], row[queries.ID]))


def _decoded(connection: StoreConnection, rows: Iterable[Row]) -> Found:
    found: Found = {}
    for row in rows:
        try:
            record = from_row(row[1:])
            found[record.id] = (row[0], record)
        except CorruptRecord as error:
            connection.set_aside(INVOCATIONS, row, error)
    return found


def _take(
    connection: StoreConnection,
    claim: Claim,
    wanted: Iterable[tuple[InvocationRecord, str | None]],
    found: Found,
) -> list[InvocationRecord]:
    """Write the claim of records, with their slots: one update for all of one version and epoch."""
    got, taking, alike = [], Taking(claim), dict[tuple[Any, ...], list[int]]()
    for record, slot in wanted:
        taken, lines = taking.take(record, slot)
        got.append(taken)
        more = "" if record.dedup_key is None else ", twin = NULL"
        more += "" if record.start_by is taken.start_by else ", start_by = NULL"
        alike.setdefault((lines, slot, more), []).append(found[record.id][0])
    for (lines, slot, more), rowids in alike.items():
        last = lines[-1]
        values = [TEXTS[last.status], last.owner, last.epoch, last.version, claim.start, claim.at, claim.operation]
        values.append(history_text(lines))
        if slot is not None:
            values.append(slot)
            more = f", slot = ?{more}"
        for part in _parts(rowids, _IDS_PER_QUERY):
            connection.execute(queries.take(len(part), more=more), (*values, *part))
        if is_cut_at(last.version):
            for rowid in rowids:
                _cut(connection, rowid)
    return got


def _next_due(connection: StoreConnection, claim: Claim, heads: list[tuple[int, str]]) -> float | None:
    found = [connection.execute(queries.NEXT_DUE, (claim.app, lane, rank)).fetchone() for rank, lane in heads]
    return min((row[0] for row in found if row), default=None)


# --- limits


def _holders(connection: StoreConnection, app: str, key: str) -> dict[str, Holder]:
    found = connection.execute(queries.HOLDERS, (app, *slot_range(key), key)).fetchall()
    return {slot: Holder(id, owner) for slot, id, owner in found}


def release_waiters(
    connection: StoreConnection, app: str, wishes: Sequence[Release], *, operation: str, at: float
) -> list[InvocationRecord]:
    return [record for wish in wishes for record in _release(connection, app, wish, operation=operation, at=at)]


def _release(
    connection: StoreConnection, app: str, wish: Release, *, operation: str, at: float
) -> list[InvocationRecord]:
    free = wish.count
    if wish.max_running is not None:
        free = min(free, wish.max_running - len(_holders(connection, app, wish.limit_key)))
    query = queries.WAITERS.format(places=", ".join("?" * len(wish.without)))
    gone, dues = list[InvocationRecord](), dues_of(wish)
    while free > len(gone):
        values = (app, wish.limit_key, *sorted(wish.without), free - len(gone))
        rows = connection.execute(query, values).fetchall()
        steps = [
            (rowid, record, apply_to(released(record, operation=operation, at=at, due_at=next(dues)), record))
            for rowid, record in _decoded(connection, rows).values()
        ]
        _write(connection, steps)
        gone += [after for _, _, after in steps]
        if len(rows) == len(steps):
            break
    return gone


def waiting_keys(
    connection: StoreConnection, app: str, within: Sequence[tuple[str, str]] = ALL_KEYS, most: int | None = None
) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for first, last in within:
        given = {"app": app, "first": first, "last": last, "most": -1 if most is None else most}  # -1: all
        rows = connection.execute(queries.WAITING_KEYS, given).fetchall()
        found |= {key: held for key, held in rows if type(key) is str}
    return found


# --- apply


def apply(connection: StoreConnection, changes: Sequence[Write]) -> list[Verdict]:
    """Return verdicts in the order of the changes. Each round has at most one change of an invocation."""
    verdicts: dict[int, Verdict] = {}
    if (runs := model.pushes_by_run(changes)) is not None:
        for indexes in runs:
            together = [push for index in indexes if isinstance(push := changes[index], Push)]
            verdicts.update(zip(indexes, _push(connection, together), strict=True))
        return [verdicts[index] for index in range(len(changes))]
    for this_round in model.rounds(changes):
        steps: list[tuple[int, Change]] = []
        for index, change in this_round:
            if isinstance(change, Change):
                steps.append((index, change))
            elif isinstance(change, FieldReset):
                verdicts[index] = _clear(connection, change)
            else:
                verdicts[index] = _write_state(connection, change)
        for part in _parts(steps, queries.MAX_ROWS):
            applied = _apply_unread(connection, part)
            verdicts.update(dict.fromkeys(applied, APPLIED))
            if left := [each for each in part if each[0] not in applied]:
                verdicts.update(_apply_read(connection, left))
    return [verdicts[index] for index in range(len(changes))]


def _apply_unread(connection: StoreConnection, part: Sequence[tuple[int, Change]]) -> set[int]:
    """Apply changes of owners to invocations that are still as these have read them, without reading them again.

    Return the numbers of these changes. The others may be lost, or their invocation has changed meanwhile.
    """
    alike: dict[tuple[Any, ...], dict[str, tuple[int, Change]]] = {}
    for index, change in part:
        version, path = change.version, change.path
        if version is None or version + len(path) > LONGEST or Status.PENDING in path or change.arguments is not UNSET:
            continue
        if change.inbox_seen is not None:
            continue
        optional = tuple([name for name in OPTIONAL if getattr(change, name) is not UNSET])
        alike.setdefault((change.app, path, change.sources, change.attempts, optional), {})[change.id] = (index, change)
    applied: set[int] = set()
    for (app, path, sources, attempts, optional), changes in alike.items():
        values: list[object] = []
        for _, c in changes.values():
            lines = model.entries(c, version=c.version or 0, epoch=c.epoch or 0, owner=c.actor)
            values += (c.id, c.version, c.epoch, c.actor, c.at, c.why, history_text(lines))
            given = [getattr(c, name) for name in optional]
            values += [value if type(value) in SIMPLE else column_value(value) for value in given]
        query = queries.step_of_owner(path, sources, attempts, optional, len(changes))
        for (id,) in connection.execute(query, (*values, app)).fetchall():
            index, change = changes[id]
            applied.add(index)
            _refer(connection, change)
    return applied


def _apply_read(connection: StoreConnection, part: Sequence[tuple[int, Change]]) -> Iterator[tuple[int, Verdict]]:
    """Read the invocations of these changes, and apply the changes that still apply."""
    found: dict[tuple[str, str], tuple[int, InvocationRecord]] = {}
    for app in {change.app for _, change in part}:
        ids = [change.id for _, change in part if change.app == app]
        rows = connection.execute(queries.by_id(len(ids)), (app, *ids)).fetchall()
        found |= {(app, id): each for id, each in _decoded(connection, rows).items()}
    steps: list[tuple[int, InvocationRecord, InvocationRecord]] = []
    for index, change in part:
        rowid, record = found.get((change.app, change.id), (0, None))
        if record is None:
            yield index, MISSING
        elif model.was_applied(change.operation, record.history):
            yield index, APPLIED_AGAIN
        elif not model.applies(change, record):
            yield index, Lost(record.status, record.owner, record.epoch)
        else:
            after = apply_to(change, record)
            steps.append((rowid, record, after))
            if change.amends:
                forget(connection, change.app, [change.id])
                refer(connection, change.app, change.id, after.payloads)  # an inbox may have some, too
            _refer(connection, change)
            yield index, APPLIED
    _write(connection, steps)


def _refer(connection: StoreConnection, change: Change) -> None:
    """Write the references of a change to payloads; most changes have none."""
    large = change.result if change.arguments is UNSET else change.arguments
    if change.error is not UNSET or change.errors is not UNSET or (type(large) is bytes and large[:1] == MARK):
        refer(connection, change.app, change.id, change.payloads)


def _clear(connection: StoreConnection, reset: FieldReset) -> Verdict:
    identity = (reset.app, reset.id)
    if reset.key is None:
        cleared = connection.execute(queries.DELIVERED, identity).rowcount
    else:
        cleared = connection.execute(queries.FREE_KEY, (*identity, reset.key)).rowcount
    if cleared:
        return APPLIED
    return APPLIED_AGAIN if connection.execute(queries.FIRST_HISTORY, identity).fetchone() else MISSING


def _push(connection: StoreConnection, pushes: Sequence[Push]) -> list[Verdict]:
    """Add to the inbox of one run."""
    app, id = pushes[0].app, pushes[0].id
    rows = connection.execute(queries.by_id(1), (app, id)).fetchall()
    rowid, record = _decoded(connection, rows).get(id, (0, None))
    if record is None:
        return [MISSING] * len(pushes)
    after, verdicts = pushed_all(pushes, record)
    if after is not record:
        _write(connection, [(rowid, record, after)])
        written = [push.entry.body for push, verdict in zip(pushes, verdicts, strict=True) if verdict is APPLIED]
        refer(connection, app, id, digests_in(*written))
    return verdicts


def _write_state(connection: StoreConnection, write: StateWrite) -> Verdict:
    """Write to an invocation what is no step of the status table."""
    if isinstance(write, Push):
        return _push(connection, [write])[0]
    rows = connection.execute(queries.by_id(1), (write.app, write.id)).fetchall()
    rowid, record = _decoded(connection, rows).get(write.id, (0, None))
    if record is None:
        return MISSING
    after = written(write, record)
    if not isinstance(after, InvocationRecord):
        return after
    _write(connection, [(rowid, record, after)])
    return APPLIED


# Columns that a change may set, beside those that every change sets, and the fields of records.
_CHANGING = {name: name for name in (*OPTIONAL, "slot", "claim_token", "arguments", "has_streams")}
_CHANGING |= {"twin": "dedup_key"}


def _write(connection: StoreConnection, steps: Sequence[tuple[int, InvocationRecord, InvocationRecord]]) -> None:
    """Write what changes have made of records: rowid, before, after. One update for all that differ in one way."""
    alike: dict[tuple[str, ...], list[tuple[object, ...]]] = {}
    for rowid, before, after in steps:
        differs = [name for name, field in _CHANGING.items() if getattr(before, field) != getattr(after, field)]
        walked = after.version - before.version
        lines = history_text(after.history[-walked:]) if walked else ""
        step = (rowid, TEXTS[after.status], after.owner, after.epoch, after.version, after.attempt, after.changed_at)
        values = [column_value(getattr(after, _CHANGING[name])) for name in differs]
        alike.setdefault(tuple(differs), []).append((*step, after.reason, lines, *values))
    for columns, batch in alike.items():
        for part in _parts(batch, queries.MAX_ROWS):
            connection.execute(queries.step(columns, len(part)), list(chain.from_iterable(part)))
    for rowid, _, after in steps:
        if is_cut_at(after.version):
            _cut(connection, rowid)


def _cut(connection: StoreConnection, rowid: int) -> None:
    """Shorten a long history: now and then, so that most changes need not read it."""
    (text,) = connection.execute(queries.HISTORY, (rowid,)).fetchone()
    try:
        connection.execute(queries.SET_HISTORY, (history_text(cut(history_of(text))), rowid))
    except Exception:
        return  # the next reader of the whole row finds the damage


def _parts(items: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    if len(items) <= size:
        return (items,) if items else ()
    return (items[start : start + size] for start in range(0, len(items), size))


# --- removal, of a bounded number of rows


def remove_expired(connection: StoreConnection, app: str, at: float, limit: int) -> int:
    removed = _remove(connection, app, connection.execute(queries.EXPIRED, (app, at, limit)).fetchall())
    return removed + entries.remove_expired(connection, app, at, limit - removed)


def remove_ended(connection: StoreConnection, app: str, ids: Sequence[InvocationId]) -> int:
    query = queries.ENDED_BY_ID.format(places=", ".join("?" * len(ids)))
    return _remove(connection, app, connection.execute(query, (app, *ids)).fetchall())


def _remove(connection: StoreConnection, app: str, gone: Sequence[tuple[int, InvocationId]]) -> int:
    connection.executemany(queries.DELETE, [(rowid,) for rowid, _ in gone])
    ids = [id for _, id in gone if type(id) is str]
    forget(connection, app, ids)
    forget_streams(connection, app, ids)
    remove_logs(connection, app, ids)
    return len(gone)


# --- reading


def get(connection: StoreConnection, app: str, ids: Sequence[InvocationId]) -> list[InvocationRecord | None]:
    found: dict[str, InvocationRecord] = {}
    for part in _parts(ids, _IDS_PER_QUERY):
        rows = connection.execute(queries.by_id(len(part)), (app, *part)).fetchall()
        found |= {row[queries.ID]: from_row(row[1:]) for row in rows}
    return [found.get(id) for id in ids]


def lanes(connection: StoreConnection, app: str) -> list[str]:
    rows = connection.execute(queries.HEADS, {"app": app}).fetchall()
    return sorted({lane for lane, _ in rows if type(lane) is str})


def owners(connection: StoreConnection, app: str) -> list[str]:
    rows = connection.execute(queries.OWNERS, (app,)).fetchall()
    return sorted({owner for (owner,) in rows if type(owner) is str})


def apps(connection: StoreConnection) -> list[str]:
    found = [connection.execute(queries.apps_in(table)).fetchall() for table in queries.APP_TABLES]
    return sorted({app for rows in found for (app,) in rows if type(app) is str})


def counts(
    connection: StoreConnection, app: str, most: int | None = None, among: Iterable[Status] = tuple(Status)
) -> Mapping[Status, int]:
    given = {"app": app, "most": -1 if most is None else most}  # -1: all
    rows = connection.execute(queries.counts(among), given).fetchall()
    return {STATUSES[name]: count for name, count in rows if count and name in STATUSES}


def queue_depths(connection: StoreConnection, app: str, at: float, most: int | None = None) -> list[QueueDepth]:
    if most is None:
        rows = connection.execute(queries.READY_DEPTHS, (at, at, app)).fetchall()
    else:
        rows = list(_some_depths(connection, app, at, most))
    parts = [in_lane(lane, now, later, _moment(oldest)) for lane, now, later, oldest in rows if type(lane) is str]
    limit = -1 if most is None else most  # -1: all
    running = connection.execute(f"{queries.OWNED_QUEUES} LIMIT ?", (app, limit)).fetchall()
    blocked = connection.execute(f"{queries.BLOCKED_QUEUES} LIMIT ?", (app, limit)).fetchall()
    parts += [QueueDepth(name=queue, running=1) for (queue,) in running if type(queue) is str]
    parts += [QueueDepth(name=queue, blocked=1) for (queue,) in blocked if type(queue) is str]
    return gathered(parts)


def _some_depths(
    connection: StoreConnection, app: str, at: float, most: int
) -> Iterable[tuple[object, int, int, object]]:
    """Yield depths of each lane and rank, of their first `most` rows."""
    for lane, rank in connection.execute(queries.HEADS, {"app": app}).fetchall():
        found = connection.execute(queries.SOME_READY_DEPTHS, (at, app, lane, rank, most)).fetchone()
        count, due, oldest = found[0], found[1] or 0, found[2]
        yield lane, due, count - due, oldest


def _moment(value: object) -> float | None:
    return value if type(value) is float and EARLIEST <= value <= LATEST else None
