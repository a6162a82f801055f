"""Every statement that the SQLite store sends, by name.

A partial index is used only by a query that repeats its condition, so the conditions come from `schema`. Each query
names the index it runs on; a test asks SQLite for the plan of each and fails on a scan of the table or on a sort.
"""

from __future__ import annotations

from functools import lru_cache

from holdfast.lifecycle.status import FINAL, OWNED
from holdfast.store.sqlite.rows import COLUMNS, LIST, PLACES
from holdfast.store.sqlite.schema import ENDED, READY, WAITING, status_list

TABLE = "holdfast_invocations"

INSERT = f"INSERT INTO {TABLE} ({LIST}) VALUES ({PLACES}) ON CONFLICT DO NOTHING"

BY_KEY = f"SELECT {LIST} FROM {TABLE} WHERE app = ? AND task = ? AND key = ? AND key IS NOT NULL"  # holdfast_key
BY_TWIN = f"SELECT {LIST} FROM {TABLE} WHERE app = ? AND twin = ? AND twin IS NOT NULL"  # holdfast_twin
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
SELECT due_at, id, rowid, {LIST} FROM {TABLE}
WHERE app = ? AND lane = ? AND rank = ? AND due_at <= ? AND {READY}
ORDER BY due_at, id LIMIT ?
"""

# holdfast_ready
NEXT_DUE = f"""
SELECT due_at FROM {TABLE} WHERE app = ? AND lane = ? AND rank = ? AND {READY} ORDER BY due_at LIMIT 1
"""

CANDIDATES_BY_ID = (
    f"SELECT due_at, id, rowid, {LIST} FROM {TABLE} WHERE app = ? AND id IN ({{places}}) AND {READY}"  # identity
)

ROW_BY_ID = f"SELECT rowid, {LIST} FROM {TABLE} WHERE app = ? AND id = ?"  # identity

AMEND = f"""
UPDATE {TABLE} SET arguments = ?, due_at = ?, changed_at = ?, reason = ?, version = ?, history = ? WHERE rowid = ?
"""
START_BY = f"""
SELECT rowid, {LIST} FROM {TABLE} WHERE app = ? AND start_by IS NOT NULL ORDER BY start_by, id LIMIT ?
"""  # holdfast_start_by

# holdfast_slot. The slots of a key lie beside each other, and perhaps those of a key that goes on where it ends.
HOLDERS = f"""
SELECT slot, id, owner FROM {TABLE}
WHERE app = ? AND slot >= ? AND slot < ? AND slot IS NOT NULL AND +limit_key = ?
"""
SLOT_HOLDERS = f"""
SELECT {LIST} FROM {TABLE}
WHERE app = ? AND slot >= ? AND slot < ? AND slot IS NOT NULL AND +limit_key = ? ORDER BY slot
"""

# holdfast_waiting
WAITERS = f"""
SELECT rowid, {LIST} FROM {TABLE}
WHERE app = ? AND limit_key = ? AND {WAITING} AND +lane NOT IN ({{places}}) ORDER BY rank, due_at, id LIMIT ?
"""

# Which keys somebody waits for: a loose scan of holdfast_waiting that jumps from one key to the next.
WAITING_KEYS = f"""
WITH RECURSIVE keys (key) AS (
    SELECT (SELECT limit_key FROM {TABLE} WHERE app = :app AND limit_key > '' AND {WAITING} ORDER BY limit_key LIMIT 1)
    UNION ALL
    SELECT (
        SELECT limit_key FROM {TABLE} WHERE app = :app AND limit_key > keys.key AND {WAITING}
        ORDER BY limit_key LIMIT 1
    ) FROM keys WHERE keys.key IS NOT NULL
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

ENDED_BEFORE = f"""
SELECT rowid, id FROM {TABLE}
WHERE app = ? AND status IN ({status_list(FINAL)}) AND changed_at < ? AND outbox IS NULL ORDER BY id LIMIT ?
"""  # identity

# holdfast_retained
EXPIRED = f"""
SELECT rowid, id FROM {TABLE}
WHERE app = ? AND {ENDED} AND retain_until <= ? AND outbox IS NULL ORDER BY retain_until LIMIT ?
"""
UNRETAINED = f"""
SELECT rowid, status, key, terms, changed_at FROM {TABLE} WHERE app = ? AND {ENDED} AND retain_until IS NULL LIMIT ?
"""
RETAIN = f"UPDATE {TABLE} SET retain_until = ? WHERE rowid = ?"
ENDED_BY_ID = (
    f"SELECT rowid, id FROM {TABLE} WHERE app = ? AND id IN ({{places}}) AND {ENDED} AND outbox IS NULL"  # identity
)

# holdfast_outbox
OUTBOXES = f"""
SELECT rowid, {LIST} FROM {TABLE}
WHERE app = ? AND outbox IS NOT NULL AND changed_at <= ? ORDER BY changed_at, id LIMIT ?
"""
DELIVERED = f"UPDATE {TABLE} SET outbox = NULL WHERE app = ? AND id = ? AND outbox IS NOT NULL"  # identity

QUARANTINED = "SELECT app, id, at, why, raw, kind FROM holdfast_quarantine WHERE app = ? ORDER BY at"

GET = f"SELECT {LIST} FROM {TABLE} WHERE app = ? AND id IN ({{places}})"  # identity

COUNTS = f"SELECT status, count(*) FROM {TABLE} WHERE app = ? GROUP BY status"  # holdfast_status

ENROL = "INSERT OR REPLACE INTO holdfast_runners (app, id, started_at, heartbeat_at, body) VALUES (?, ?, ?, ?, ?)"
GET_RUNNER = "SELECT app, id, started_at, heartbeat_at, body FROM holdfast_runners WHERE app = ? AND id = ?"
SET_RUNNER = "UPDATE holdfast_runners SET heartbeat_at = ?, body = ? WHERE app = ? AND id = ?"
SILENT = """
SELECT app, id, started_at, heartbeat_at, body FROM holdfast_runners WHERE app = ? ORDER BY heartbeat_at, id
"""  # heartbeats
DECLARE_DEAD = "DELETE FROM holdfast_runners WHERE app = ? AND id = ? AND heartbeat_at = ?"
OWNERS = f"""
SELECT owner FROM {TABLE}
WHERE app = ? AND status IN ({status_list(OWNED)}) AND owner IS NOT NULL
"""  # holdfast_status
LEAVE = "DELETE FROM holdfast_runners WHERE app = ? AND id = ?"
ROSTER = "SELECT app, id, started_at, heartbeat_at, body FROM holdfast_runners WHERE app = ?"

STEP = ("status", "owner", "epoch", "version", "attempt", "changed_at", "reason", "claim_token", "lines")


# One statement for a whole batch, not one each: the interpreter's lock is let go and fought for around every step of a
# statement, and with a dozen threads that costs more than the statement. There are at most MOST_ROWS shapes of each.
MOST_ROWS = 50


@lru_cache(maxsize=512)
def heads_of(rows: int) -> str:
    """What changes are checked against, and whether their operations are there already, for (id, operation) pairs."""
    return f"""
    WITH wanted (id, operation) AS (VALUES {_values(rows, 2)})
    SELECT wanted.id, found.rowid, found.status, found.owner, found.epoch, found.version, found.attempt,
        instr(found.history, wanted.operation), found.slot, found.twin, found.start_by
    FROM wanted JOIN {TABLE} AS found ON found.app = ? AND found.id = wanted.id
    """


@lru_cache(maxsize=512)
def step(optional: tuple[str, ...], rows: int) -> str:
    """The update of a batch of changes that all set these optional columns, by rowid."""
    columns = ("key", *STEP, *optional)
    plain = "".join(f"{name} = step.{name}, " for name in (*STEP[:-2], *optional))
    return f"""
    WITH step ({", ".join(columns)}) AS (VALUES {_values(rows, len(columns))})
    UPDATE {TABLE} SET {plain} claim_token = coalesce(step.claim_token, {TABLE}.claim_token),
        history = history || step.lines
    FROM step WHERE {TABLE}.rowid = step.key
    """


def _values(rows: int, columns: int) -> str:
    row = f"({', '.join('?' * columns)})"
    return ", ".join([row] * rows)


ID_COLUMN, LANE_COLUMN, RANK_COLUMN = (COLUMNS.index(name) for name in ("id", "lane", "rank"))
