"""Payloads in SQLite and MongoDB: what the contract leaves to each."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
from tests.runtime.payloads.tools import raw_mongo, raw_sqlite
from tests.store.sqlite.test_plans import SQL_VERBS, complaints, plan_of

from holdfast.model.records import Piece, StoredPayload
from holdfast.store import open_store
from holdfast.store.contract import Store
from holdfast.store.sqlite import payloads, schema
from holdfast.store.sqlite.quarantine import StoreConnection
from holdfast.testing.clock import FakeClock
from holdfast.testing.conformance_payloads import large, put, there
from holdfast.testing.samples import invocation, wish


def test_what_was_set_aside_keeps_its_payloads(url: str) -> None:
    """Somebody may mend it, and put it back."""

    async def scenario(store: Store) -> None:
        await put(store, 1, 2)
        await store.insert([invocation("a", arguments=large(1).data)])
        if url.startswith("sqlite"):
            with raw_sqlite(url) as connection:
                connection.execute("UPDATE holdfast_invocations SET history = '?'")
        else:
            with raw_mongo(url) as database:
                database.holdfast_invocations.update_one({}, {"$set": {"history": "?"}})
        assert (await store.claim(wish())).records == ()
        assert [found.id for found in await store.quarantined("shop")] == ["a"]
        assert await store.collect_payloads("shop", store.now() + 1, 10) == (1, False)
        assert await there(store, [1, 2]) == [1]

    async def main() -> None:
        store = open_store(url, clock=FakeClock())
        await store.open()
        try:
            await scenario(store)
        finally:
            await store.close()

    asyncio.run(main())


# --- SQLite


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    schema.prepare(connection)
    yield connection
    connection.close()


STATEMENTS = {
    name: text
    for name, text in vars(payloads).items()
    if name.isupper() and isinstance(text, str) and text.split()[0] in SQL_VERBS
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_every_statement_runs_on_an_index_and_sorts_nothing(connection: sqlite3.Connection, name: str) -> None:
    assert complaints(plan_of(connection, STATEMENTS[name])) == []


def test_the_statements_are_found() -> None:
    assert {"KEEP", "PUT", "GET", "GET_PIECE", "UNWANTED", "ORPHANS", "REMOVE_PIECES", "REFER"} <= STATEMENTS.keys()


def at(now: float, connection: sqlite3.Connection) -> StoreConnection:
    return StoreConnection(connection, now, lambda *_: pytest.fail("nothing is damaged"), may_write=True)


def steps_of_a_collection(connection: sqlite3.Connection) -> int:
    """How many instructions SQLite's machine takes for it: the same on every computer."""
    steps = itertools.count()
    connection.set_progress_handler(lambda: next(steps) < 0, 1)
    try:
        payloads.collect_payloads(at(60.0, connection), "shop", before=50.0, limit=10)
    finally:
        connection.set_progress_handler(None, 1)
    return next(steps)


def test_a_collection_does_not_pay_for_payloads_in_one_piece(connection: sqlite3.Connection) -> None:
    """They are the many. It holds the file's only write lock meanwhile."""

    def fill(count: int, wanted_at: float) -> None:
        first = Piece(b"x")
        many = [StoredPayload(digest=f"{wanted_at}{n}", size=1, pieces=1, first=first) for n in range(count)]
        payloads.put_payloads(at(10.0, connection), "shop", many)
        values: tuple[Any, ...] = (wanted_at, f"{wanted_at}%")
        connection.execute("UPDATE holdfast_payloads SET wanted_at = ? WHERE digest LIKE ?", values)

    fill(20, 55.0)
    few = steps_of_a_collection(connection)
    fill(2000, 56.0)
    assert steps_of_a_collection(connection) == few
