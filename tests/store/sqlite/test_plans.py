"""Every statement runs on an index, and a claim does not pay for other people's work."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator

import pytest

from holdfast.model.claims import Claim
from holdfast.model.status import Status
from holdfast.store.contract import EntryOrder, Filter, Order
from holdfast.store.sqlite import entries, invocations, listing, logs, queries, runners, schema
from holdfast.store.sqlite.listing import Listing
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
        f"runners.{name}": text for name, text in vars(runners).items() if name.isupper() and " " in str(text).strip()
    }
    fixed |= {
        f"entries.{name}": text for name, text in vars(entries).items() if name.isupper() and " " in str(text).strip()
    }
    fixed |= {f"logs.{name}": text for name, text in vars(logs).items() if name.isupper() and " " in str(text).strip()}
    named = {name: str(text) for name, text in fixed.items() if str(text).split()[0] in SQL_VERBS}
    made = {f"by_id({n})": queries.by_id(n) for n in (1, queries.MAX_ROWS)}
    made |= {f"step({n})": queries.step(("due_at", "result"), n) for n in (1, queries.MAX_ROWS)}
    made |= {f"insert({n})": queries.insert(n, short=short) for n in (1, queries.MAX_ROWS) for short in (True, False)}
    made |= {f"take({n})": queries.take(n, more=", twin = NULL") for n in (1, queries.MAX_ROWS)}
    ends = ((Status.SUCCESS,), frozenset({Status.RUNNING, Status.RESUMED}), 0, ("result", "retain_until"))
    made |= {f"step_of_owner({n})": queries.step_of_owner(*ends, n) for n in (1, queries.MAX_ROWS)}
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
    values = (
        {"app": "shop", "first": "", "last": "~", "most": 9} if ":app" in statement else [None] * statement.count("?")
    )
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
    wanted = Listing("shop", where, Order.NEWEST, 5)
    for driver in listing.drivers(wanted) or [None]:
        plan = plan_of(connection, listing.listing(wanted, driver)[0])
        assert complaints(plan) == []
        searches = [line for line in plan if line.startswith("SEARCH")]
        if driver is not None:
            assert len(searches) == len(driver.wanted)
            assert all(f"holdfast_{driver.column} (app=? AND {driver.column}=?" in line for line in searches)
            (counting,) = [line for line in plan_of(connection, listing.counting(driver)) if line.startswith("SEARCH")]
            assert f"COVERING INDEX holdfast_{driver.column} (app=? AND {driver.column}=?" in counting


PAIR, OTHER = ("stage", "packed"), ("color", "red")


@pytest.mark.parametrize("before", [None, "x"])
@pytest.mark.parametrize("pairs", [(PAIR,), (PAIR, OTHER)])
def test_attributes_are_found_on_their_index_and_cost_the_page(
    connection: sqlite3.Connection, pairs: tuple[tuple[str, str], ...], before: str | None
) -> None:
    where = Filter(attributes=frozenset(pairs), before_id=before)
    wanted = Listing("shop", where, Order.NEWEST, 5)
    for driver in listing.drivers(wanted):
        plan = plan_of(connection, listing.listing(wanted, driver)[0])
        assert complaints(plan) == []
        assert "holdfast_attributes USING PRIMARY KEY (app=? AND name=? AND value=?" in plan[0]
        assert "holdfast_identity (app=? AND id=?)" in plan[1]
        (counting,) = plan_of(connection, listing.counting(driver))[-1:]
        assert "SCAN" in counting or "holdfast_attributes" in counting


ENDED = [
    Filter(statuses=frozenset(statuses), since=since, before=before)
    for statuses, since, before in itertools.product([(), (Status.FAILED,)], [None, START], [None, (START, "x")])
]


@pytest.mark.parametrize("where", ENDED)
def test_the_archive_is_read_on_an_index_and_not_sorted(connection: sqlite3.Connection, where: Filter) -> None:
    wanted = Listing("shop", where, Order.LATEST_END, 5)
    (driver,) = listing.drivers(wanted)
    plan = plan_of(connection, listing.listing(wanted, driver)[0])
    assert complaints(plan) == []
    searches = [line for line in plan if line.startswith("SEARCH")]
    assert len(searches) == (len(where.statuses) or 4)
    assert all("holdfast_ended (app=? AND status=?" in line for line in searches)


def test_the_end_of_an_id_is_looked_for_in_the_keys(connection: sqlite3.Connection) -> None:
    wanted = Listing("shop", Filter(id_ends="x1", before_id="z"), Order.NEWEST, 5)
    plan = plan_of(connection, listing.listing(wanted, None)[0])
    assert complaints(plan) == []
    assert "holdfast_identity (app=? AND id<?" in plan[0]


def test_apps_are_found_from_one_to_the_next(connection: sqlite3.Connection) -> None:
    for table in queries.APP_TABLES:
        plan = plan_of(connection, queries.apps_in(table))
        searches = [line for line in plan if table in line]
        assert searches
        assert all(line.startswith("SEARCH") for line in searches), plan


def test_each_status_is_counted_in_its_part_of_the_index(connection: sqlite3.Connection) -> None:
    plan = plan_of(connection, queries.counts(Status))
    looks = [line for line in plan if "holdfast_invocations" in line]
    assert looks == ["SEARCH holdfast_invocations USING COVERING INDEX holdfast_status (app=? AND status=?)"] * len(
        Status
    )
    assert not [line for line in plan if "TEMP B-TREE" in line]


def test_what_repeats_another_is_found_by_it(connection: sqlite3.Connection) -> None:
    wanted = Listing("shop", Filter(rerun_of="a", before_id="z"), Order.NEWEST, 5)
    plan = plan_of(connection, listing.listing(wanted, None)[0])
    assert complaints(plan) == []
    assert "holdfast_rerun (app=? AND rerun_of=?" in plan[0]


@pytest.mark.parametrize(
    ("order", "where", "search"),
    [
        (Order.OUTBOX, Filter(until=START), "holdfast_outbox (app=? AND changed_at<?"),
        (Order.OUTBOX, Filter(before_id="z", rerun_of="a", parent="p"), "holdfast_outbox (app=?"),
        (Order.START_BY, Filter(), "holdfast_start_by (app=?"),
        (Order.START_BY, Filter(tasks=frozenset({"t"}), before_id="z"), "holdfast_start_by (app=?"),
        (Order.WAKE_AT, Filter(), "holdfast_wake (app=?"),
        (Order.WAKE_AT, Filter(statuses=frozenset({Status.SUSPENDED}), tasks=frozenset({"t"})), "holdfast_wake (app=?"),
        (Order.SLOT, Filter(limit_key="k"), "holdfast_slot (app=? AND slot>? AND slot<?"),
    ],
)
def test_every_order_is_that_of_its_index(
    connection: sqlite3.Connection, order: Order, where: Filter, search: str
) -> None:
    (line,) = plan_of(connection, listing.listing(Listing("shop", where, order, 5), None)[0])
    assert search in line


@pytest.mark.parametrize(
    ("statement", "search"),
    [
        (queries.EXPIRED, "holdfast_retained (app=? AND retain_until<?"),
        (queries.DELIVERED, "holdfast_identity (app=? AND id=?"),
        (logs.READ, "holdfast_log USING PRIMARY KEY (app=? AND run=? AND generation=? AND first>?"),
        (logs.READ_LATEST, "holdfast_log USING PRIMARY KEY (app=? AND run=? AND generation=? AND first>?"),
        (logs.REMOVE, "holdfast_log USING PRIMARY KEY (app=? AND run=? AND generation<?"),
        (entries.EXPIRED, "holdfast_entries_kept (app=? AND keep_until>? AND keep_until<?"),
    ],
)
def test_what_is_over_and_what_is_to_be_told_is_found_by_its_index(
    connection: sqlite3.Connection, statement: str, search: str
) -> None:
    (line,) = plan_of(connection, statement)
    assert search in line


@pytest.mark.parametrize(
    ("order", "before", "subject", "search"),
    [
        (EntryOrder.NAME, None, None, "PRIMARY KEY (app=? AND kind=?"),
        (EntryOrder.LATEST, None, None, "PRIMARY KEY (app=? AND kind=?"),
        (EntryOrder.LATEST, "n", None, "PRIMARY KEY (app=? AND kind=? AND name<?"),
        (EntryOrder.DUE, None, None, "holdfast_entries_due (app=? AND kind=?"),
        (EntryOrder.NAME, None, "i", "holdfast_entries_subject (app=? AND kind=? AND subject=?"),
        (EntryOrder.LATEST, "n", "i", "holdfast_entries_subject (app=? AND kind=? AND subject=? AND name<?"),
    ],
)
def test_entries_are_listed_by_an_index(
    connection: sqlite3.Connection, order: EntryOrder, before: str | None, subject: str | None, search: str
) -> None:
    (line,) = plan_of(connection, entries.statement("shop", "event", order, 5, before, subject)[0])
    assert search in line


def test_a_filter_is_answered_by_what_is_rarest(connection: sqlite3.Connection) -> None:
    rows = [
        to_row(invocation(f"i{n:04}", task=f"t{n % 2}", queue="rare" if n == 7 else "default")) for n in range(1500)
    ]
    connection.executemany(queries.insert(1, short=False), rows)
    seen: list[str] = []
    connection.set_trace_callback(seen.append)
    where = Filter(tasks=frozenset({"t1"}), queues=frozenset({"rare"}))
    assert len(listing.rows_of(connection, Listing("shop", where, Order.NEWEST, 5))) == 1
    assert "AND queue = 'rare'" in seen[-1]
    assert "AND +task IN" in seen[-1]


def test_the_statements_are_found() -> None:
    assert {
        "insert(1)",
        "CANDIDATES",
        "HEADS",
        "NEXT_DUE",
        "by_id(1)",
        "runners.ROSTER",
        "runners.SILENT",
        "OWNERS",
        "READY_DEPTHS",
        "entries.EXPIRED",
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
        got = invocations.claim(connection, claim)
        connection.execute("ROLLBACK")
    finally:
        connection.set_progress_handler(None, 1)
    assert ids_of(got.records) == [f"{n}" for n in range(len(got.records))]
    return next(steps)


def ours(connection: sqlite3.Connection) -> None:
    connection.executemany(queries.insert(1, short=False), [to_row(invocation(f"{n}")) for n in range(10)])


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
