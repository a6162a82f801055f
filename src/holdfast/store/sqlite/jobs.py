"""What the SQLite store does inside one open write transaction. Each function here is a job of the writer thread."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from holdfast.codec import MARK
from holdfast.errors import CorruptRecord
from holdfast.ids import InvocationId
from holdfast.lifecycle.changes import (
    APPLIED,
    APPLIED_AGAIN,
    MISSING,
    OPTIONAL,
    Change,
    Lost,
    Verdict,
    applies,
    apply_to,
    entries,
    rounds,
    was_applied,
)
from holdfast.lifecycle.claims import Claim, Claimed, claimed, released, turned_away
from holdfast.lifecycle.history import LONGEST, cut, is_cut_at
from holdfast.lifecycle.limits import MOST_BLOCKED, Allotment, Held, Holder, Release, allot, slot_range
from holdfast.lifecycle.records import InvocationRecord, RunnerRecord
from holdfast.lifecycle.status import Status, acts_for
from holdfast.store.sqlite import queries
from holdfast.store.sqlite.aside import INVOCATIONS, RUNNERS, SetAside
from holdfast.store.sqlite.payloads import forget, refer
from holdfast.store.sqlite.rows import (
    cancellation_text,
    error_text,
    errors_text,
    from_row,
    history_of,
    history_text,
    operation_text,
    outbox_text,
    runner_of,
    runner_row,
    to_row,
)

_IDS_PER_QUERY = 500
_WINDOW = 50  # how many candidates are looked at where some of them may be blocked

T = TypeVar("T")


def insert(connection: sqlite3.Connection, record: InvocationRecord) -> bool:
    if connection.execute(queries.INSERT, to_row(record)).rowcount:
        if record.arguments[:1] == MARK:
            refer(connection, record.app, record.id, record.payloads)
        return True
    there = connection.execute(queries.FIRST_HISTORY, (record.app, record.id)).fetchone()
    try:
        return there is not None and history_of(there[0])[0].operation == record.history[0].operation
    except Exception:
        return False  # what is there cannot be read, but the id is taken


def in_the_way(
    connection: sqlite3.Connection, record: InvocationRecord, set_aside: SetAside | None = None
) -> InvocationRecord | None:
    """Who that is. One that cannot be read is set aside, if it can be; with the same id it stays, and is told of."""
    looks: list[tuple[str, tuple[object, ...]]] = [(queries.GET.format(places="?"), (record.app, record.id))]
    if record.key is not None:
        looks.append((queries.BY_KEY, (record.app, record.task, record.key)))
    if record.twin is not None:
        looks.append((queries.BY_TWIN, (record.app, record.twin)))
    for query, values in looks:
        if (row := connection.execute(query, values).fetchone()) is None:
            continue
        try:
            return from_row(row)
        except CorruptRecord as error:
            id = row[queries.ID_COLUMN]
            if set_aside is None or id == record.id:
                raise
            rowid, *whole = connection.execute(queries.ROW_BY_ID, (record.app, id)).fetchone()
            set_aside(connection, INVOCATIONS, (rowid, *whole), error)
    return None


# --- claim


def claim(connection: sqlite3.Connection, claim: Claim, set_aside: SetAside) -> Claimed:
    got = _claimed_before(connection, claim, set_aside) if claim.again else []
    heads = [] if claim.ids else _heads(connection, claim)
    held = Held(lambda key: holders(connection, claim.app, key))
    turned, refused, cut = 0, list[InvocationId](), False
    while len(got) < claim.limit and turned < MOST_BLOCKED and not cut:
        wanted = claim.limit - len(got)
        window = max(wanted, _WINDOW) if claim.limits else wanted
        candidates = _named(connection, claim) if claim.ids else _candidates(connection, claim, heads, window)
        found = _read(connection, candidates[:window], set_aside)
        allotment = _allotment(claim, found, wanted, held)
        got += _take(connection, claim, allotment, found)
        turned += _turn_away(connection, claim, allotment, held, found)
        refused += [record.id for record in allotment.refused]
        cut = allotment.cut
        if len(candidates) < window:
            break
    next_due = None if cut or len(got) >= claim.limit else _next_due(connection, claim, heads)
    return Claimed(tuple(got), next_due, refused=tuple(refused), cut=cut)


def _claimed_before(connection: sqlite3.Connection, claim: Claim, set_aside: SetAside) -> list[InvocationRecord]:
    values = (claim.app, claim.path[-1].value, claim.operation)
    found = []
    for rowid, *row in connection.execute(queries.CLAIMED_BEFORE, values).fetchall():
        try:
            found.append(from_row(row))
        except CorruptRecord as error:
            set_aside(connection, INVOCATIONS, (rowid, *row), error)
    return sorted(found, key=lambda record: (-record.priority, record.due_at, record.id))


def _heads(connection: sqlite3.Connection, claim: Claim) -> list[tuple[int, str]]:
    """The (rank, lane) pairs with work for this claim, highest priority first."""
    lanes = frozenset(claim.lanes)
    found = connection.execute(queries.HEADS, {"app": claim.app})
    return sorted((rank, lane) for lane, rank in found if lane in lanes)


Candidate = tuple[Any, ...]  # due_at, id, rowid, then the row


def _candidates(
    connection: sqlite3.Connection, claim: Claim, heads: list[tuple[int, str]], wanted: int
) -> list[Candidate]:
    """The first `wanted` due invocations in queue order. Lanes of one rank are merged by due time."""
    found: list[Candidate] = []
    for rank in dict.fromkeys(rank for rank, _ in heads):
        merged: list[Candidate] = []
        for _, lane in [head for head in heads if head[0] == rank]:
            values = (claim.app, lane, rank, claim.at, wanted - len(found))
            merged += connection.execute(queries.CANDIDATES, values)
        merged.sort(key=lambda row: row[:2])
        found += merged[: wanted - len(found)]
        if len(found) >= wanted:
            break
    return found


def _named(connection: sqlite3.Connection, claim: Claim) -> list[Candidate]:
    """The due ones among the invocations that the claim names, in queue order."""
    query = queries.CANDIDATES_BY_ID.format(places=", ".join("?" * len(claim.ids)))
    lanes, lane, rank = frozenset(claim.lanes), 3 + queries.LANE_COLUMN, 3 + queries.RANK_COLUMN
    found = connection.execute(query, (claim.app, *claim.ids)).fetchall()
    due = [row for row in found if row[lane] in lanes and row[0] <= claim.at]
    return sorted(due, key=lambda row: (row[rank], row[0], row[1]))


Found = dict[str, tuple[int, InvocationRecord]]  # by id: where a record is, and the record


def _read(connection: sqlite3.Connection, candidates: list[Candidate], set_aside: SetAside) -> Found:
    found: Found = {}
    for _, id, rowid, *row in candidates:
        try:
            found[id] = (rowid, from_row(row))
        except CorruptRecord as error:
            set_aside(connection, INVOCATIONS, (rowid, *row), error)
    return found


def _allotment(claim: Claim, found: Found, wanted: int, held: Held) -> Allotment[InvocationRecord]:
    records = [record for _, record in found.values()]
    if not claim.limits:
        return Allotment([(record, None) for record in records], [], [])
    return allot(records, wanted, limits=claim.limits, limited=claim.limited, held=held, owner=claim.owner)


def _take(
    connection: sqlite3.Connection, claim: Claim, allotment: Allotment[InvocationRecord], found: Found
) -> list[InvocationRecord]:
    got, steps = [], dict[tuple[str, ...], list[tuple[object, ...]]]()
    for record, slot in allotment.taken:
        change = claimed(claim, record, slot)
        taken = apply_to(change, record)
        more: list[tuple[str, str | None]] = [] if slot is None else [("slot", slot)]
        more += [] if record.twin is None else [("twin", None)]
        more += [] if record.start_by is None or not change.has_started else [("start_by", None)]
        step = _after(found[record.id][0], change, record, taken)
        columns = tuple([name for name, _ in more])
        steps.setdefault(columns, []).append((*step, *[value for _, value in more]))
        got.append(taken)
    for columns, batch in steps.items():
        _write(connection, columns, batch)
    return got


_NAMED = ("twin", "start_by", "retain_until")


def _turn_away(
    connection: sqlite3.Connection, claim: Claim, allotment: Allotment[InvocationRecord], held: Held, found: Found
) -> int:
    """Move those for whom there is no slot out of the way, and tell how many they are."""
    changed = list(turned_away(claim, allotment, held))
    steps = dict[tuple[str, ...], list[tuple[object, ...]]]()
    for record, change in changed:
        after = apply_to(change, record)
        step = _after(found[record.id][0], change, record, after)
        columns = tuple([name for name in _NAMED if getattr(record, name) != getattr(after, name)])
        steps.setdefault(columns, []).append((*step, *[getattr(after, name) for name in columns]))
    for columns, batch in steps.items():
        _write(connection, columns, batch)
    return len(changed)


def _after(rowid: int, change: Change, before: InvocationRecord, after: InvocationRecord) -> tuple[object, ...]:
    """The step from a record to the one that a change makes of it."""
    lines = history_text(after.history[-len(change.path) :])
    return _step(rowid, change, after.owner, after.epoch, after.version, after.attempt, lines)


def _next_due(connection: sqlite3.Connection, claim: Claim, heads: list[tuple[int, str]]) -> float | None:
    found = [connection.execute(queries.NEXT_DUE, (claim.app, lane, rank)).fetchone() for rank, lane in heads]
    return min((row[0] for row in found if row), default=None)


# --- limits


def holders(connection: sqlite3.Connection, app: str, key: str) -> dict[str, Holder]:
    found = connection.execute(queries.HOLDERS, (app, *slot_range(key), key))
    return {slot: Holder(id, owner) for slot, id, owner in found}


def release_waiters(
    connection: sqlite3.Connection, app: str, wish: Release, operation: str, at: float, set_aside: SetAside
) -> list[InvocationRecord]:
    free = (
        wish.count if wish.most is None else min(wish.count, wish.most - len(holders(connection, app, wish.limit_key)))
    )
    query = queries.WAITERS.format(places=", ".join("?" * len(wish.without)))
    gone: list[InvocationRecord] = []
    while free > len(gone):
        values = (app, wish.limit_key, *sorted(wish.without), free - len(gone))
        rows = connection.execute(query, values).fetchall()
        steps = []
        for rowid, record in _read(
            connection, [(None, row[1 + queries.ID_COLUMN], *row) for row in rows], set_aside
        ).values():
            change = released(record, operation=operation, at=at)
            gone.append(apply_to(change, record))
            steps.append(_after(rowid, change, record, gone[-1]))
        _write(connection, (), steps)
        if len(rows) == len(steps):
            break
    return gone


# --- apply


def apply(connection: sqlite3.Connection, changes: Sequence[Change], set_aside: SetAside) -> list[Verdict]:
    """Verdicts in the order of the changes. Two changes of one invocation go into different rounds, in their order."""
    verdicts: dict[int, Verdict] = {}
    for this_round in rounds(changes):
        if amends := [item for item in this_round if item[1].arguments is not UNSET]:
            verdicts.update((index, _amend(connection, change, set_aside)) for index, change in amends)
            this_round = [item for item in this_round if item[1].arguments is UNSET]
        for part in _parts(this_round, queries.MOST_ROWS):
            verdicts.update(_apply_part(connection, part, set_aside))
    return [verdicts[index] for index in range(len(changes))]


def _apply_part(
    connection: sqlite3.Connection, part: Sequence[tuple[int, Change]], set_aside: SetAside
) -> Iterator[tuple[int, Verdict]]:
    """Changes of different invocations: one query, one update for each set of columns that they touch."""
    found: dict[tuple[str, str], Sequence[Any]] = {}
    for app in {change.app for _, change in part}:
        mine = [change for _, change in part if change.app == app]
        values = [value for change in mine for value in (change.id, operation_text(change.operation))]
        found |= {(app, row[0]): row for row in connection.execute(queries.heads_of(len(mine)), (*values, app))}
    steps: dict[tuple[str, ...], list[tuple[object, ...]]] = {}
    for index, change in part:
        head = found.get((change.app, change.id))
        verdict = MISSING if head is None else _judge(connection, change, head, set_aside)
        if verdict is APPLIED and head is not None:
            optional, step = _step_of(change, head)
            steps.setdefault(optional, []).append(step)
            if _may_refer(change):
                refer(connection, change.app, change.id, change.payloads)
        yield index, verdict
    for optional, batch in steps.items():
        _write(connection, optional, batch)


def _amend(connection: sqlite3.Connection, change: Change, set_aside: SetAside) -> Verdict:
    """It comes seldom, and rewrites the history: the whole record is read, and what changes of it is written."""
    found = connection.execute(queries.ROW_BY_ID, (change.app, change.id)).fetchone()
    if found is None:
        return MISSING
    rowid, *row = found
    try:
        record = from_row(row)
    except CorruptRecord as error:
        set_aside(connection, INVOCATIONS, (rowid, *row), error)
        return MISSING
    if was_applied(change.operation, record.history):
        return APPLIED_AGAIN
    if not applies(change, record):
        return Lost(record.status, record.owner, record.epoch)
    after = apply_to(change, record)
    values = (after.arguments, after.due_at, after.changed_at, after.reason, after.version, history_text(after.history))
    connection.execute(queries.AMEND, (*values, rowid))
    forget(connection, change.app, [change.id])
    refer(connection, change.app, change.id, after.payloads)
    return APPLIED


def _judge(connection: sqlite3.Connection, change: Change, head: Sequence[Any], set_aside: SetAside) -> Verdict:
    _, _, status, owner, epoch, _, _, seen, *_ = head
    if seen:
        return APPLIED_AGAIN
    if (
        status in change.sources
        and (change.epoch is None or epoch == change.epoch)
        and (owner == change.actor or not change.needs_owner or acts_for(change.actor, owner))
    ):
        return APPLIED
    rowid, *row = connection.execute(queries.ROW_BY_ID, (change.app, change.id)).fetchone()
    try:
        from_row(row)
    except CorruptRecord as error:
        set_aside(connection, INVOCATIONS, (rowid, *row), error)
        return MISSING
    return Lost(Status(status), owner, epoch)


def _step_of(change: Change, head: Sequence[Any]) -> tuple[tuple[str, ...], tuple[object, ...]]:
    _, rowid, _, owner, epoch, version, attempt, _, slot, twin, start_by = head
    lines = entries(change, version=version, epoch=epoch, owner=owner)
    last = lines[-1]
    attempt += change.attempts
    step = _step(rowid, change, last.owner, last.epoch, last.version, attempt, history_text(lines))
    optional = tuple([name for name in OPTIONAL if getattr(change, name) is not UNSET])
    step += tuple([_column(name, getattr(change, name)) for name in optional])
    if slot is None and twin is None and start_by is None:
        return optional, step
    gone = _cleared(change, slot, twin, start_by)
    return (*optional, *gone), (*step, *[None] * len(gone))


def _cleared(change: Change, slot: str | None, twin: str | None, start_by: float | None) -> tuple[str, ...]:
    """Which of these columns the change empties."""
    freed = (
        ("slot", slot is not None and change.frees),
        ("twin", twin is not None and change.frees_twin),
        ("start_by", start_by is not None and change.has_started),
    )
    return tuple([name for name, is_so in freed if is_so])


def _may_refer(change: Change) -> bool:
    """Whether it is worth looking for payloads: most changes have none."""
    failed = change.error is not UNSET or change.errors is not UNSET
    return failed or (type(change.result) is bytes and change.result[:1] == MARK)


def _column(name: str, value: Any) -> object:
    if name == "error":
        return error_text(value)
    if name == "cancellation":
        return cancellation_text(value)
    if name == "outbox":
        return outbox_text(value)
    return errors_text(value) if name == "errors" else value


# --- writing


def _step(
    rowid: int, change: Change, owner: str | None, epoch: int, version: int, attempt: int, lines: str
) -> tuple[object, ...]:
    """The values of `queries.STEP`, behind the rowid that they are for."""
    token = change.operation if Status.PENDING in change.path else None
    return (rowid, change.path[-1].value, owner, epoch, version, attempt, change.at, change.why, token, lines)


def _write(connection: sqlite3.Connection, optional: tuple[str, ...], steps: list[tuple[object, ...]]) -> None:
    for part in _parts(steps, queries.MOST_ROWS):
        values = [value for step in part for value in step]
        connection.execute(queries.step(optional, len(part)), values)
        for rowid, *rest in part:
            version: Any = rest[_VERSION]
            if version > LONGEST and is_cut_at(version):
                _cut(connection, rowid)


_VERSION = queries.STEP.index("version")


def _cut(connection: sqlite3.Connection, rowid: object) -> None:
    """Shorten a history that got long: now and then, so that a change need not read it."""
    (text,) = connection.execute(queries.HISTORY, (rowid,)).fetchone()
    try:
        connection.execute(queries.SET_HISTORY, (history_text(cut(history_of(text))), rowid))
    except Exception:
        return  # whoever reads the whole row finds out


def _parts(items: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    if len(items) <= size:
        return (items,) if items else ()
    return (items[start : start + size] for start in range(0, len(items), size))


# --- the roster


def alter_runner(
    connection: sqlite3.Connection, app: str, id: str, facts: Mapping[str, object], set_aside: SetAside
) -> RunnerRecord | None:
    """The roster entry with these facts changed, or None if there is none. One that cannot be read is set aside."""
    row = connection.execute(queries.GET_RUNNER, (app, id)).fetchone()
    if row is None:
        return None
    try:
        before = runner_of(row)
    except CorruptRecord as error:
        set_aside(connection, RUNNERS, row, error)
        return None
    runner = msgspec.structs.replace(before, **facts)
    if "heartbeat_at" in facts and runner.heartbeat_at == before.heartbeat_at:  # even if its clock stands still
        runner = msgspec.structs.replace(runner, heartbeat_at=math.nextafter(before.heartbeat_at, math.inf))
    _, _, _, heartbeat_at, body = runner_row(runner)
    connection.execute(queries.SET_RUNNER, (heartbeat_at, body, app, id))
    return runner


# --- reading


def rows_by_id(connection: sqlite3.Connection, app: str, ids: Sequence[InvocationId]) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = []
    for part in _parts(ids, _IDS_PER_QUERY):
        rows += connection.execute(queries.GET.format(places=", ".join("?" * len(part))), (app, *part)).fetchall()
    return rows
