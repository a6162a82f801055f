"""Every statement that the SQLite store sends, by name.

A partial index is used only by a query that repeats its condition, so the conditions come from `schema`. Each query
names the index it runs on; a test asks SQLite for the plan of each and fails on a scan of the table or on a sort.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from holdfast.model.status import OWNED, RELEASING, Status
from holdfast.store.sqlite.rows import COLUMNS, LIST, SHORT
from holdfast.store.sqlite.schema import ENDED, READY, WAITING, status_list

TABLE = "holdfast_invocations"

BY_KEY = f"SELECT rowid, {LIST} FROM {TABLE} WHERE app = ? AND task = ? AND key = ? AND key IS NOT NULL"  # holdfast_key
BY_DEDUP_KEY = f"SELECT rowid, {LIST} FROM {TABLE} WHERE app = ? AND twin = ? AND twin IS NOT NULL"  # holdfast_twin
FREE_KEY = f"UPDATE {TABLE} SET key = NULL WHERE app = ? AND id = ? AND key = ?"  # identity

FIRST_HISTORY = f"SELECT history FROM {TABLE} WHERE app = ? AND id = ?"  # identity

# Which lanes have work, and in which ranks: a loose scan of holdfast_ready that jumps from one (lane, rank) to the
# next; a lane or rank that is none is stepped over. Its cost is the number of such pairs, not of invocations behind
# them, so another runner's backlog costs nothing.
# (Two searches, not one comparison of pairs: with a pair SQLite searches by the lane alone and walks all of its rows.)
HEADS = f"""
WITH RECURSIVE heads (lane, rank) AS (
    SELECT lane, rank FROM (
        SELECT lane, rank FROM {TABLE} WHERE app = :app AND {READY} AND lane > '' AND rank IS NOT NULL
        ORDER BY lane, rank LIMIT 1
    )
    UNION ALL
    SELECT following.lane, following.rank FROM heads JOIN {TABLE} AS following ON following.rowid = coalesce(
        (
            SELECT rowid FROM {TABLE}
            WHERE app = :app AND {READY} AND lane = heads.lane AND rank > heads.rank
            ORDER BY rank LIMIT 1
        ),
        (
            SELECT rowid FROM {TABLE}
            WHERE app = :app AND {READY} AND lane > heads.lane AND rank IS NOT NULL
            ORDER BY lane, rank LIMIT 1
        )
    )
)
SELECT lane, rank FROM heads
"""

# holdfast_ready
CANDIDATES = f"""
SELECT rowid, {LIST} FROM {TABLE}
WHERE app = ? AND lane = ? AND rank = ? AND due_at <= ? AND {READY}
ORDER BY due_at, id LIMIT ?
"""

# holdfast_ready
NEXT_DUE = f"""
SELECT due_at FROM {TABLE} WHERE app = ? AND lane = ? AND rank = ? AND {READY} ORDER BY due_at LIMIT 1
"""

CANDIDATES_BY_ID = f"SELECT rowid, {LIST} FROM {TABLE} WHERE app = ? AND id IN ({{places}}) AND {READY}"  # identity

# holdfast_slot. The slots of a key lie beside each other, and perhaps those of a key that goes on where it ends.
HOLDERS = f"""
SELECT slot, id, owner FROM {TABLE}
WHERE app = ? AND slot >= ? AND slot < ? AND slot IS NOT NULL AND +limit_key = ?
"""
# holdfast_waiting
WAITERS = f"""
SELECT rowid, {LIST} FROM {TABLE}
WHERE app = ? AND limit_key = ? AND {WAITING} AND +lane NOT IN ({{places}}) ORDER BY rank, due_at, id LIMIT ?
"""

# The keys that invocations wait for: a loose scan of holdfast_waiting that jumps from one key to the next.
WAITING_KEYS = f"""
WITH RECURSIVE keys (key) AS (
    SELECT (
        SELECT limit_key FROM {TABLE} WHERE app = :app AND limit_key >= :first AND limit_key < :last AND {WAITING}
            AND +limit_key > ''
        ORDER BY limit_key LIMIT 1
    )
    UNION ALL
    SELECT (
        SELECT limit_key FROM {TABLE} WHERE app = :app AND limit_key > keys.key AND limit_key < :last AND {WAITING}
        ORDER BY limit_key LIMIT 1
    ) FROM keys WHERE keys.key IS NOT NULL
    LIMIT :most
)
SELECT keys.key, (
    SELECT count(*) FROM {TABLE} AS held
    WHERE held.app = :app AND held.slot >= keys.key || '#' AND held.slot < keys.key || '$'
        AND held.slot IS NOT NULL AND +held.limit_key = keys.key
) FROM keys WHERE keys.key IS NOT NULL
"""

# holdfast_status. It reads everything that runs, which is why it is asked only after a lost answer.
CLAIMED_BEFORE = f"""
SELECT rowid, {LIST} FROM {TABLE} WHERE app = ? AND status = ? AND claim_token = ?
"""

HISTORY = f"SELECT history FROM {TABLE} WHERE rowid = ?"
SET_HISTORY = f"UPDATE {TABLE} SET history = ? WHERE rowid = ?"

DELETE = f"DELETE FROM {TABLE} WHERE rowid = ?"

# holdfast_retained
EXPIRED = f"""
SELECT rowid, id FROM {TABLE}
WHERE app = ? AND {ENDED} AND retain_until <= ? AND outbox IS NULL ORDER BY retain_until LIMIT ?
"""
ENDED_BY_ID = (
    f"SELECT rowid, id FROM {TABLE} WHERE app = ? AND id IN ({{places}}) AND {ENDED} AND outbox IS NULL"  # identity
)

DELIVERED = f"UPDATE {TABLE} SET outbox = NULL WHERE app = ? AND id = ? AND outbox IS NOT NULL"  # identity

# What lies in each queue.
READY_DEPTHS = f"""
SELECT lane, sum(due_at <= ?), sum(due_at > ?), min(due_at) FROM {TABLE} WHERE app = ? AND {READY} GROUP BY lane
"""  # holdfast_ready, without reading a row
# holdfast_ready, likewise: of a lane and rank of HEADS, earliest due first, so many at most.
SOME_READY_DEPTHS = f"""
SELECT count(*), sum(due_at <= ?), min(due_at) FROM (
    SELECT due_at FROM {TABLE} WHERE app = ? AND {READY} AND lane = ? AND rank = ? ORDER BY due_at LIMIT ?
)
"""
OWNED_QUEUES = f"SELECT queue FROM {TABLE} WHERE app = ? AND status IN ({status_list(OWNED)})"  # holdfast_status
BLOCKED_QUEUES = f"SELECT queue FROM {TABLE} WHERE app = ? AND {WAITING}"  # holdfast_waiting or holdfast_status

APP_TABLES = (TABLE, "holdfast_entries", "holdfast_runners")


def apps_in(table: str) -> str:
    """Return the query that goes from app to app: by holdfast_identity, or the primary key of entries or runners."""
    return f"""
    WITH RECURSIVE each (app) AS (
        SELECT min(app) FROM {table}
        UNION ALL
        SELECT (SELECT min(app) FROM {table} WHERE app > each.app) FROM each WHERE each.app IS NOT NULL
    )
    SELECT app FROM each WHERE app IS NOT NULL
    """


def counts(among: Iterable[Status]) -> str:
    """Return what counts each of these statuses, up to a number. Index: holdfast_status."""
    return " UNION ALL ".join(
        f"SELECT '{status.value}', count(*) FROM "
        f"(SELECT 1 FROM {TABLE} WHERE app = :app AND status = '{status.value}' LIMIT :most)"
        for status in among
    )


OWNERS = f"""
SELECT owner FROM {TABLE}
WHERE app = ? AND status IN ({status_list(OWNED)}) AND owner IS NOT NULL
"""  # holdfast_status

STEP = ("status", "owner", "epoch", "version", "attempt", "changed_at", "reason", "lines")


# One statement for a whole batch, not one each: the interpreter's lock is let go and fought for around every step of a
# statement, and with a dozen threads that costs more than the statement. There are at most MAX_ROWS shapes of each.
MAX_ROWS = 50


@lru_cache(maxsize=512)
def insert(rows: int, *, short: bool) -> str:
    columns = SHORT if short else COLUMNS
    return f"INSERT INTO {TABLE} ({', '.join(columns)}) VALUES {_values(rows, len(columns))} ON CONFLICT DO NOTHING"


@lru_cache(maxsize=512)
def take(rows: int, *, more: str) -> str:
    """Return the update of a claim, for records of one version and epoch: the same values for all, then the rowids."""
    return f"""
    UPDATE {TABLE} SET status = ?, owner = ?, epoch = ?, version = ?, attempt = attempt + ?, changed_at = ?,
        reason = '', claim_token = ?, history = history || ?{more}
    WHERE rowid IN ({", ".join("?" * rows)})
    """


@lru_cache(maxsize=512)
def step_of_owner(
    path: tuple[Status, ...], sources: frozenset[Status], attempts: int, optional: tuple[str, ...], rows: int
) -> str:
    """Return the update of a batch of changes by owners, of invocations that are still as the owners have read them."""
    columns = ("id", "version", "epoch", "owner", "changed_at", "reason", "lines", *optional)
    freed = ["owner = NULL", "slot = NULL"] if not RELEASING.isdisjoint(path) else []
    sets = [*freed, *(f"{name} = step.{name}" for name in ("changed_at", "reason", *optional))]
    return f"""
    WITH step ({", ".join(columns)}) AS (VALUES {_values(rows, len(columns))})
    UPDATE {TABLE} SET status = '{path[-1]}', version = step.version + {len(path)}, attempt = attempt + {attempts},
        history = history || step.lines, {", ".join(sets)}
    FROM step WHERE {TABLE}.app = ? AND {TABLE}.id = step.id AND {TABLE}.version = step.version
        AND {TABLE}.epoch = step.epoch AND {TABLE}.owner = step.owner AND {TABLE}.status IN ({status_list(sources)})
        AND {TABLE}.twin IS NULL AND {TABLE}.start_by IS NULL
    RETURNING id
    """


@lru_cache(maxsize=512)
def by_id(rows: int) -> str:
    return f"SELECT rowid, {LIST} FROM {TABLE} WHERE app = ? AND id IN ({', '.join('?' * rows)})"  # identity


@lru_cache(maxsize=512)
def step(more: tuple[str, ...], rows: int) -> str:
    """Return the update of a batch of changes that all set these columns too, by rowid."""
    columns = ("key", *STEP, *more)
    plain = "".join(f"{name} = step.{name}, " for name in (*STEP[:-1], *more))
    return f"""
    WITH step ({", ".join(columns)}) AS (VALUES {_values(rows, len(columns))})
    UPDATE {TABLE} SET {plain} history = history || step.lines FROM step WHERE {TABLE}.rowid = step.key
    """


def _values(rows: int, columns: int) -> str:
    row = f"({', '.join('?' * columns)})"
    return ", ".join([row] * rows)


# Where these lie in a row that begins with the rowid.
ID, LANE, RANK, DUE = (1 + COLUMNS.index(name) for name in ("id", "lane", "rank", "due_at"))
