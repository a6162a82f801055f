"""``session=`` in a test: what is handed over with the user's own transaction is there if that commits."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient, MongoClient

from holdfast import App, UsageError, on_event
from holdfast.testing import testing_app
from holdfast.testing.harness import Harness
from holdfast.triggers import from_event

mongo = pytest.mark.xdist_group("mongo")


@pytest.fixture
def t() -> Iterator[Harness]:
    app = App("sqlite:///never-opened.db", name="shop")

    @app.task(name="ship", triggers=[on_event("paid", arguments={"order": from_event("id")})])
    def ship(order: int, label: str = "") -> int:
        return order

    with testing_app(app) as t:
        yield t


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(tmp_path / "own.db")) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER)")
        yield connection


def calls(t: Harness) -> list[tuple[Any, ...]]:
    return [each.args or tuple(each.kwargs.values()) for each in t.submitted()]


def test_on_sqlite_a_call_is_there_after_the_commit(t: Harness, connection: sqlite3.Connection) -> None:
    ship = t.app.get_task("ship")
    connection.execute("INSERT INTO orders VALUES (1)")
    invocation = ship.options(session=connection).submit(1, label="x" * 200_000)
    assert (calls(t), t.app.invocations(), len(t.drain())) == ([], [], 0)
    connection.commit()
    t.assert_submitted(ship, 1, "x" * 200_000)
    assert [ran.call.startswith("ship(1") for ran in t.drain(check=True).ran] == [True]
    assert invocation.result() == 1


def test_on_sqlite_a_call_is_never_there_after_a_rollback(t: Harness, connection: sqlite3.Connection) -> None:
    ship = t.app.get_task("ship").options(key="order 1")
    ship.options(session=connection).submit(1)
    connection.rollback()
    assert (calls(t), len(t.drain())) == ([], 0)
    first = ship.submit(2)
    assert ship.options(session=connection).submit(2) == first, "its key was free, and now it is taken"
    connection.commit()
    assert calls(t) == [(2,)]


def test_on_sqlite_it_does_not_matter_that_the_connection_is_closed_by_then(t: Harness, tmp_path: Path) -> None:
    ship = t.app.get_task("ship")
    for order, commits in enumerate((True, False)):
        connection = sqlite3.connect(tmp_path / "own.db")
        ship.options(session=connection).submit(order)
        if commits:
            connection.commit()
            connection.execute("SELECT 1")
        connection.close()
    assert calls(t) == [(0,)]


def test_on_sqlite_a_connection_of_another_thread_counts_too(t: Harness, tmp_path: Path) -> None:
    def work() -> None:
        with contextlib.closing(sqlite3.connect(tmp_path / "own.db")) as connection, connection:
            t.app.get_task("ship").options(session=connection).submit(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert calls(t) == [(1,)]


def test_on_sqlite_events_follow_the_transaction(t: Harness, connection: sqlite3.Connection) -> None:
    t.app.emit("paid", {"id": 1}, session=connection)
    connection.rollback()
    event = t.app.emit("paid", {"id": 2}, key="order 2", session=connection)
    assert t.app.emit("paid", {"id": 3}, key="order 2", session=connection).id == event.id
    assert (t.app.events(), calls(t)) == ([], [])
    connection.commit()
    assert calls(t) == [(2,)]
    t.drain(check=True)
    (told,) = t.app.events()
    assert [each.trigger.partition("#")[0] for each in told.caused] == ["ship"]
    assert t.app.emit("paid", {"id": 4}, key="order 2").id == event.id


def test_on_sqlite_a_connection_that_begins_nothing_is_refused(t: Harness, connection: sqlite3.Connection) -> None:
    connection.isolation_level = None
    with pytest.raises(UsageError, match="BEGIN"):
        t.app.get_task("ship").options(session=connection).submit(1)


def test_a_stand_in_counts_as_committed(t: Harness) -> None:
    t.app.get_task("ship").options(session=object()).submit(1)
    assert calls(t) == [(1,)]


@mongo
def test_on_mongodb_the_same(t: Harness, mongo_url: str) -> None:
    ship = t.app.get_task("ship")
    with MongoClient[dict[str, Any]](mongo_url) as client, client.start_session() as session:
        with pytest.raises(UsageError, match="no transaction"):
            ship.options(session=session).submit(0)
        with session.start_transaction():
            ship.options(session=session).submit(1)
            t.app.emit("paid", {"id": 2}, session=session)
            assert calls(t) == []
        with contextlib.suppress(ZeroDivisionError), session.start_transaction():
            ship.options(session=session).submit(3)
            raise ZeroDivisionError
        session.with_transaction(lambda session: ship.options(session=session).submit(4))
        assert not {"commit_transaction", "abort_transaction"} & session.__dict__.keys(), "it is as it was"
        session.start_transaction()
        ship.options(session=session).submit(5)
    assert sorted(calls(t)) == [(1,), (2,), (4,)], "what was not committed when its session ended is not there"


@mongo
def test_on_mongodb_a_session_that_is_awaited(t: Harness, mongo_url: str) -> None:
    async def main() -> None:
        ship = t.app.get_task("ship")
        async with AsyncMongoClient[dict[str, Any]](mongo_url) as client, client.start_session() as session:
            async with await session.start_transaction():
                with pytest.raises(UsageError, match="asubmit"):
                    ship.options(session=session).submit(0)
                await ship.options(session=session).asubmit(1)
                await t.app.aemit("paid", {"id": 2}, session=session)
            await session.start_transaction()
            await ship.options(session=session).asubmit(3)
            await session.abort_transaction()
        assert len(await t.adrain(check=True)) == 2

    asyncio.run(main())
    assert sorted(calls(t)) == [(1,), (2,)]
