"""Every statement runs on an index, and a claim does not pay for other people's work."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator

import pytest

from holdfast.lifecycle.claims import Claim
from holdfast.lifecycle.status import Status
from holdfast.store.contract import Ended, Filter
from holdfast.store.sqlite import archive, entries, jobs, listing, queries, queues, schema
from holdfast.store.sqlite.rows import COLUMNS, to_row
from holdfast.testing.samples import LANE, START, ids_of, invocation, wish

# What may be read whole, and why.
SMALL = {
    "holdfast_quarantine": "empty in a healthy store; `quarantined` reads and sorts all of it",
    "wanted": "the values of the statement itself",
    "step": "the values of the statement itself",
    "heads": "the pairs of lane and rank that were found",
    "keys": "the limit keys that were found",
    "(subquery-1)": "a single row, by its LIMIT",
    "CONSTANT": "the values of the statement itself",
}


SQL_VERBS = {"SELECT", "INSERT", "UPDATE", "DELETE", "WITH"}


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    schema.prepare(connection)
    yield connection
    connection.close()


def statements() -> dict[str, str]:
    fixed = {name: text for name, text in vars(queries).items() if name.isupper() and " " in str(text).strip()}
    fixed |= {
        f"queues.{name}": text for name, text in vars(queues).items() if name.isupper() and " " in str(text).strip()
    }
    fixed |= {
        f"entries.{name}": text for name, text in vars(entries).items() if name.isupper() and " " in str(text).strip()
    }
    named = {name: str(text) for name, text in fixed.items() if str(text).split()[0] in SQL_VERBS}
    made = {f"heads_of({n})": queries.heads_of(n) for n in (1, queries.MOST_ROWS)}
    made |= {f"step({n})": queries.step(("due_at", "result"), n) for n in (1, queries.MOST_ROWS)}
    return named | made


FILTERS = [
    Filter(
        statuses=frozenset(statuses), tasks=frozenset(tasks), queues=frozenset(queue), before_id=before, parent=parent
    )
    for statuses, tasks, queue, before, parent in itertools.product(
        [(), (Status.FAILED,), (Status.FAILED, Status.RUNNING, Status.RETRY), (Status.SUCCESS,), tuple(Status)],
        [(), ("a",), ("a", "b")],
        [(), ("q", "r")],
        [None, "x"],
        [None, "p"],
    )
]


def plan_of(connection: sqlite3.Connection, statement: str) -> list[str]:
    statement = statement.replace("{places}", "?, ?")
    values = {"app": "shop"} if ":app" in statement else [None] * statement.count("?")
    return [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", values)]


def complaints(plan: list[str]) -> list[str]:
    scans = [line for line in plan if line.startswith("SCAN") and not any(name in line.split() for name in SMALL)]
    sorts = [line for line in plan if "TEMP B-TREE" in line and not any("holdfast_quarantine" in each for each in plan)]
    return scans + sorts + [line for line in plan if "AUTOMATIC" in line]


@pytest.mark.parametrize("name", statements())
def test_every_statement_runs_on_an_index_and_sorts_nothing(connection: sqlite3.Connection, name: str) -> None:
    assert complaints(plan_of(connection, statements()[name])) == []


@pytest.mark.parametrize("where", FILTERS)
def test_every_listing_runs_on_an_index_and_sorts_nothing(connection: sqlite3.Connection, where: Filter) -> None:
    for driver in listing.drivers(where) or [None]:
        plan = plan_of(connection, listing.listing("shop", where, 5, driver)[0])
        assert complaints(plan) == []
        searches = [line for line in plan if line.startswith("SEARCH")]
        if driver is not None:
            assert len(searches) == len(driver.wanted)
            assert all(f"holdfast_{driver.column} (app=? AND {driver.column}=?" in line for line in searches)
            (counting,) = [line for line in plan_of(connection, listing.counting(driver)) if line.startswith("SEARCH")]
            assert f"COVERING INDEX holdfast_{driver.column} (app=? AND {driver.column}=?" in counting


ENDED = [
    Ended(statuses=frozenset(statuses), since=since, before=before)
    for statuses, since, before in itertools.product([(), (Status.FAILED,)], [None, START], [None, (START, "x")])
]


@pytest.mark.parametrize("where", ENDED)
def test_the_archive_is_read_on_an_index_and_not_sorted(connection: sqlite3.Connection, where: Ended) -> None:
    plan = plan_of(connection, archive.listing("shop", where, 5)[0])
    assert complaints(plan) == []
    searches = [line for line in plan if line.startswith("SEARCH")]
    assert len(searches) == (len(where.statuses) or 4)
    assert all("holdfast_ended (app=? AND status=?" in line for line in searches)


def test_what_repeats_another_is_found_by_it(connection: sqlite3.Connection) -> None:
    plan = plan_of(connection, listing.listing("shop", Filter(rerun_of="a", before_id="z"), 5, None)[0])
    assert complaints(plan) == []
    assert "holdfast_rerun (app=? AND rerun_of=?" in plan[0]


@pytest.mark.parametrize(
    ("statement", "search"),
    [
        (queries.OUTBOXES, "holdfast_outbox (app=? AND changed_at<?"),
        (queries.EXPIRED, "holdfast_retained (app=? AND retain_until<?"),
        (queries.DELIVERED, "holdfast_identity (app=? AND id=?"),
        (entries.EXPIRED, "holdfast_entries_kept (app=? AND keep_until>? AND keep_until<?"),
        (entries.LATEST_BEFORE, "PRIMARY KEY (app=? AND kind=? AND name<?"),
    ],
)
def test_what_is_over_and_what_is_to_be_told_is_found_by_its_index(
    connection: sqlite3.Connection, statement: str, search: str
) -> None:
    (line,) = plan_of(connection, statement)
    assert search in line


def test_a_filter_is_answered_by_what_is_rarest(connection: sqlite3.Connection) -> None:
    rows = [
        to_row(invocation(f"i{n:04}", task=f"t{n % 2}", queue="rare" if n == 7 else "default")) for n in range(1500)
    ]
    connection.executemany(queries.INSERT, rows)
    seen: list[str] = []
    connection.set_trace_callback(seen.append)
    where = Filter(tasks=frozenset({"t1"}), queues=frozenset({"rare"}))
    assert len(listing.find(connection, "shop", where, 5)) == 1
    assert "AND queue = 'rare'" in seen[-1]
    assert "AND +task IN" in seen[-1]


def test_the_statements_are_found() -> None:
    assert {
        "INSERT",
        "CANDIDATES",
        "HEADS",
        "NEXT_DUE",
        "GET",
        "ROSTER",
        "SILENT",
        "OWNERS",
        "queues.READY_DEPTHS",
        "entries.EXPIRED",
        "OUTBOXES",
    } <= statements().keys()


@pytest.mark.parametrize(
    "statement",
    [
        f"SELECT 1 FROM {queries.TABLE} WHERE owner = 'x'",
        f"SELECT 1 FROM {queries.TABLE} WHERE app = 'a' ORDER BY changed_at",
        f"SELECT 1 FROM {queries.TABLE} AS a JOIN {queries.TABLE} AS b ON a.owner = b.owner",
    ],
)
def test_the_check_catches_a_bad_plan(connection: sqlite3.Connection, statement: str) -> None:
    assert complaints(plan_of(connection, statement)) != []


# --- what a claim costs

FOREIGN = 200_000


def fill(
    connection: sqlite3.Connection, count: int, *, lanes: int = 1, due_at: float = START - 1e6, lane: str = ""
) -> None:
    """`count` ready invocations of highest priority, in lanes that sort before and after ours."""
    values = dict(zip(COLUMNS, to_row(invocation("x", priority=50)), strict=True)) | {"due_at": due_at}
    columns = {name: f":{name}" for name in COLUMNS} | {"id": "printf('f%08d', n)"}
    columns["lane"] = ":lane" if lane else "printf('%s|f%d', CASE n % 2 WHEN 0 THEN 'a' ELSE 'z' END, n % :lanes)"
    connection.execute(
        f"""
        WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < :count)
        INSERT INTO {queries.TABLE} ({", ".join(columns)}) SELECT {", ".join(columns.values())} FROM numbers
        """,
        values | {"count": count, "lanes": lanes, "lane": lane},
    )


def steps_of_a_claim(connection: sqlite3.Connection, claim: Claim) -> int:
    """How many instructions SQLite's machine takes for it: the same on every computer."""
    steps = itertools.count()
    connection.set_progress_handler(lambda: next(steps) < 0, 1)
    try:
        connection.execute("BEGIN IMMEDIATE")
        got = jobs.claim(connection, claim, lambda *_: pytest.fail("nothing is damaged"))
        connection.execute("ROLLBACK")
    finally:
        connection.set_progress_handler(None, 1)
    assert ids_of(got.records) == [f"{n}" for n in range(len(got.records))]
    return next(steps)


def ours(connection: sqlite3.Connection) -> None:
    connection.executemany(queries.INSERT, [to_row(invocation(f"{n}")) for n in range(10)])


@pytest.mark.slow
def test_a_claim_does_not_pay_for_200_000_foreign_invocations_at_the_head(connection: sqlite3.Connection) -> None:
    ours(connection)
    fill(connection, 40, lanes=20)
    few = {limit: steps_of_a_claim(connection, wish("op", limit=limit)) for limit in (1, 10, 20)}
    connection.execute(f"DELETE FROM {queries.TABLE} WHERE id LIKE 'f%'")
    fill(connection, FOREIGN, lanes=20)
    many = {limit: steps_of_a_claim(connection, wish("op", limit=limit)) for limit in (1, 10, 20)}
    assert many == few


def test_a_claim_does_not_pay_for_the_lanes_of_another_app(connection: sqlite3.Connection) -> None:
    ours(connection)
    alone = steps_of_a_claim(connection, wish("op", limit=20))
    fill(connection, 500, lanes=500)
    connection.execute(f"UPDATE {queries.TABLE} SET app = 'zoo' WHERE id LIKE 'f%'")
    assert steps_of_a_claim(connection, wish("op", limit=20)) <= alone + 10


@pytest.mark.slow
def test_a_claim_does_not_pay_for_200_000_of_its_own_that_are_not_due(connection: sqlite3.Connection) -> None:
    ours(connection)
    fill(connection, 10, lane=LANE, due_at=START + 60)
    few = steps_of_a_claim(connection, wish("op", limit=20))
    connection.execute(f"DELETE FROM {queries.TABLE} WHERE id LIKE 'f%'")
    fill(connection, FOREIGN, lane=LANE, due_at=START + 60)
    assert steps_of_a_claim(connection, wish("op", limit=20)) == few
