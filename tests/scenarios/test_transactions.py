"""Submit inside a user's own transaction: there if it commits, never there if not, and no word of it before."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import OperationFailure, PyMongoError
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent
from tests.support.patience import patient

from holdfast import App, UsageError
from holdfast.errors import InvocationNotFound, KeyTaken, StoreUnavailable
from holdfast.store.mongo import schema

mongo = pytest.mark.xdist_group("mongo")
shows_locks = pytest.mark.skipif(not Path("/proc/locks").exists(), reason="the system does not show who holds a lock")
BIG = bytes(range(256)) * 1000


def shop(url: str, **more: Any) -> App:
    app = App(url, name="shop", poll_interval_seconds=0.05, **more)

    @app.task(name="ship")
    def ship(order: int, label: bytes = b"") -> int:
        return order + len(label)

    return app


@pytest.fixture
def app(mongo_url: str) -> Iterator[App]:
    with shop(mongo_url) as app:
        app.invocations()  # now the collections are there; a transaction cannot see those made after it began
        yield app


@pytest.fixture
def client(mongo_url: str) -> Iterator[MongoClient[dict[str, Any]]]:
    with MongoClient[dict[str, Any]](mongo_url) as client:
        client.get_default_database().create_collection("orders")
        yield client


def orders(client: MongoClient[dict[str, Any]]) -> Any:
    return client.get_default_database().orders


# --- MongoDB


@mongo
def test_what_is_submitted_in_a_transaction_is_there_when_it_commits(app: App, client: MongoClient[Any]) -> None:
    ship = app.get_task("ship")
    with client.start_session() as session:
        with session.start_transaction():
            orders(client).insert_one({"_id": 7}, session=session)
            invocation = ship.options(session=session).submit(7, label=BIG)
            assert app.invocations() == []
            with pytest.raises(InvocationNotFound):
                invocation.record()
        assert [record.id for record in app.invocations()] == [invocation.id]
    with app.runner(concurrency=1):
        assert invocation.result(patient(20)) == 7 + len(BIG)


@mongo
def test_what_is_submitted_in_a_transaction_that_aborts_never_was(app: App, client: MongoClient[Any]) -> None:
    ship = app.get_task("ship").options(key="order 7")
    with client.start_session() as session:
        session.start_transaction()
        orders(client).insert_one({"_id": 7}, session=session)
        ship.options(session=session).submit(7)
        session.abort_transaction()
    assert app.invocations() == []
    assert orders(client).count_documents({}) == 0
    assert ship.submit(8).id  # the key is free


@mongo
def test_many_are_submitted_in_one_transaction(app: App, client: MongoClient[Any]) -> None:
    with client.start_session() as session, session.start_transaction():
        group = app.get_task("ship").options(session=session).map(range(50))
    assert len(app.invocations()) == 50
    with app.runner():
        assert group.results(patient(20)) == list(range(50))


@mongo
def test_an_asynchronous_session_is_awaited(app: App, mongo_url: str) -> None:
    async def main() -> None:
        ship = app.get_task("ship")
        async with AsyncMongoClient[dict[str, Any]](mongo_url) as client, client.start_session() as session:
            async with await session.start_transaction():
                with pytest.raises(UsageError, match="asubmit"):
                    ship.options(session=session).submit(1)
                invocation = await ship.options(session=session).asubmit(1)
                assert await app.ainvocations() == []
            assert len(await app.ainvocations()) == 1
            await session.start_transaction()
            await ship.options(session=session).asubmit(2)
            await session.abort_transaction()
            assert [record.id for record in await app.ainvocations()] == [invocation.id]

    asyncio.run(main())


@mongo
def test_a_race_for_a_key_is_a_transient_transaction_error(app: App, client: MongoClient[Any]) -> None:
    ship = app.get_task("ship").options(key="order 7")
    with client.start_session() as one, client.start_session() as two:
        one.start_transaction()
        two.start_transaction()
        first = ship.options(session=one).submit(7)
        with pytest.raises(OperationFailure) as caught:
            ship.options(session=two).submit(7)
        assert caught.value.has_error_label("TransientTransactionError")
        two.abort_transaction()
        one.commit_transaction()
        second = two.with_transaction(lambda session: ship.options(session=session).submit(7))
        assert second == first
        with pytest.raises(KeyTaken, match="order 7"), two.start_transaction():
            ship.options(session=two).submit(8)
    assert len(app.invocations()) == 1


@mongo
def test_a_race_with_a_submit_outside_is_a_transient_transaction_error(app: App, client: MongoClient[Any]) -> None:
    ship = app.get_task("ship").options(key="order 7")
    with client.start_session() as session:
        session.start_transaction()
        orders(client).find_one({}, session=session)  # the snapshot is taken here
        outside = ship.submit(7)
        with pytest.raises(OperationFailure) as caught:
            ship.options(session=session).submit(7)
        assert caught.value.has_error_label("TransientTransactionError")
        session.abort_transaction()
        assert session.with_transaction(lambda own: ship.options(session=own).submit(7)) == outside


class Commands(CommandListener):
    def __init__(self) -> None:
        self.names: list[str] = []

    def started(self, event: CommandStartedEvent) -> None:
        self.names.append(event.command_name)

    def succeeded(self, event: CommandSucceededEvent) -> None:
        pass

    def failed(self, event: CommandFailedEvent) -> None:
        pass


@mongo
def test_errors_pass_through_and_nothing_is_tried_again(app: App, mongo_url: str) -> None:
    commands = Commands()
    with MongoClient[dict[str, Any]](mongo_url, event_listeners=[commands], appname="mine") as client:
        app.get_task("ship").submit(0)
        fail = {"failCommands": ["insert"], "errorCode": 112, "appName": "mine"}
        client.admin.command({"configureFailPoint": "failCommand", "mode": {"times": 1}, "data": fail})
        with client.start_session() as session:
            session.start_transaction()
            with pytest.raises(PyMongoError) as caught:
                app.get_task("ship").options(session=session).submit(1)
            assert caught.value.has_error_label("TransientTransactionError")
        assert commands.names.count("insert") == 1


@mongo
def test_no_hint_is_written_before_the_transaction_is_over(app: App, client: MongoClient[Any]) -> None:
    signals = client.get_default_database()[schema.SIGNALS]
    with client.start_session() as session:
        session.start_transaction()
        app.get_task("ship").options(session=session).submit(1)
        app.invocations()  # the engine has had its turn
        assert signals.count_documents({}) == 0
        session.commit_transaction()
    with app.runner(concurrency=1), shop(app.url) as other:
        assert other.invocation(app.invocations()[0].id).result(patient(20)) == 1
    assert signals.count_documents({}) > 0


@mongo
def test_a_hint_follows_the_commit(mongo_url: str, client: MongoClient[Any]) -> None:
    """The runner polls every minute, so only a hint can wake it so soon."""
    with App(mongo_url, name="shop", poll_interval_seconds=60) as app:

        @app.task(name="ship")
        def ship(order: int) -> int:
            return order

        with app.runner(concurrency=1), client.start_session() as session:
            with session.start_transaction():
                invocation = ship.options(session=session).submit(1)
            assert invocation.result(patient(20)) == 1


@mongo
def test_a_session_without_a_transaction_is_refused(app: App, client: MongoClient[Any]) -> None:
    with client.start_session() as session, pytest.raises(UsageError, match="no transaction"):
        app.get_task("ship").options(session=session).submit(1)
    with pytest.raises(UsageError, match="not int"):
        app.get_task("ship").options(session=7).submit(1)


@mongo
def test_a_session_of_another_server_is_refused(app: App, standalone: str) -> None:
    with MongoClient[dict[str, Any]](standalone) as other, other.start_session() as session:
        session.start_transaction()
        with pytest.raises(UsageError, match="another MongoDB"):
            app.get_task("ship").options(session=session).submit(1)
    assert app.invocations() == []


@mongo
def test_a_client_that_reached_one_app_is_not_trusted_with_another(
    app: App, client: MongoClient[Any], standalone: str
) -> None:
    with client.start_session() as session, session.start_transaction():
        app.get_task("ship").options(session=session).submit(1)
    elsewhere = standalone.replace("/test", f"/{client.get_default_database().name}")
    with shop(elsewhere) as other, client.start_session() as session:
        other.invocations()
        session.start_transaction()
        with pytest.raises(UsageError, match="another MongoDB"):
            other.get_task("ship").options(session=session).submit(2)
    assert len(app.invocations()) == 1


# --- SQLite


@pytest.fixture
def file_app(tmp_path: Path) -> Iterator[App]:
    with shop(f"sqlite:///{tmp_path / 'shop.db'}") as app:
        app.invocations()
        yield app


@pytest.fixture
def connection(tmp_path: Path, file_app: App) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(tmp_path / "shop.db")
    connection.execute("CREATE TABLE orders (id INTEGER)")
    yield connection
    connection.close()


def test_on_sqlite_it_is_there_when_the_users_connection_commits(file_app: App, connection: sqlite3.Connection) -> None:
    connection.row_factory, connection.text_factory = sqlite3.Row, bytes
    connection.execute("INSERT INTO orders VALUES (7)")
    ship = file_app.get_task("ship").options(session=connection)
    invocation = ship.submit(7, label=BIG)  # large values go the same way: our own writer would wait for this lock
    again = ship.submit(8, label=BIG)
    assert connection.row_factory is sqlite3.Row
    assert connection.text_factory is bytes
    assert file_app.invocations() == []
    connection.commit()
    assert {record.id for record in file_app.invocations()} == {invocation.id, again.id}
    with file_app.runner(concurrency=1):
        assert invocation.result(patient(20)) == 7 + len(BIG)


def test_on_sqlite_it_never_was_when_the_users_connection_rolls_back(
    file_app: App, connection: sqlite3.Connection
) -> None:
    ship = file_app.get_task("ship").options(key="order 7")
    connection.execute("INSERT INTO orders VALUES (7)")
    ship.options(session=connection).submit(7, label=BIG)
    connection.rollback()
    assert file_app.invocations() == []
    assert connection.execute("SELECT count(*) FROM holdfast_payloads").fetchone() == (0,)
    first = ship.submit(8)
    assert ship.options(session=connection).submit(8) == first
    with pytest.raises(KeyTaken):
        ship.options(session=connection).submit(9)
    connection.rollback()


def test_on_sqlite_a_conflict_is_the_drivers_error(
    file_app: App, connection: sqlite3.Connection, tmp_path: Path
) -> None:
    other = sqlite3.connect(tmp_path / "shop.db", timeout=0)
    connection.execute("INSERT INTO orders VALUES (7)")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        file_app.get_task("ship").options(session=other).submit(7)
    connection.commit()
    file_app.get_task("ship").options(session=other).submit(7)
    other.commit()
    other.close()
    assert len(file_app.invocations()) == 1


def test_on_sqlite_all_of_a_map_is_stored_or_none(file_app: App, connection: sqlite3.Connection) -> None:
    connection.execute(
        "CREATE TRIGGER full BEFORE INSERT ON holdfast_invocations "
        "WHEN (SELECT count(*) FROM holdfast_invocations) >= 2 BEGIN SELECT raise(ABORT, 'full'); END"
    )
    connection.execute("INSERT INTO orders VALUES (7)")
    with pytest.raises(sqlite3.IntegrityError, match="full"):
        file_app.get_task("ship").options(session=connection).map([1, 2, 3])
    connection.commit()
    assert file_app.invocations() == []
    assert connection.execute("SELECT count(*) FROM orders").fetchone() == (1,)


def test_on_sqlite_asubmit_joins_too(file_app: App, connection: sqlite3.Connection) -> None:
    async def main() -> None:
        await file_app.get_task("ship").options(session=connection).asubmit(1)
        assert await file_app.ainvocations() == []
        connection.commit()
        assert len(await file_app.ainvocations()) == 1

    asyncio.run(main())


def test_on_sqlite_only_a_transaction_on_the_same_file_can_be_joined(
    file_app: App, connection: sqlite3.Connection, tmp_path: Path
) -> None:
    ship = file_app.get_task("ship")
    elsewhere = sqlite3.connect(tmp_path / "else.db")
    with pytest.raises(UsageError, match=r"else\.db"):
        ship.options(session=elsewhere).submit(1)
    in_memory = sqlite3.connect(":memory:")
    with pytest.raises(UsageError, match="in memory"):
        ship.options(session=in_memory).submit(1)
    connection.isolation_level = None
    with pytest.raises(UsageError, match="BEGIN"):
        ship.options(session=connection).submit(1)
    connection.execute("BEGIN")
    ship.options(session=connection).submit(1)
    connection.execute("COMMIT")
    assert len(file_app.invocations()) == 1
    for one in (elsewhere, in_memory):
        one.close()


def test_in_memory_there_are_no_transactions() -> None:
    with shop("memory://") as app, pytest.raises(UsageError, match="no transactions"):
        app.get_task("ship").options(session=object()).submit(1)


def test_the_first_use_of_an_app_may_be_inside_a_transaction(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with shop(f"sqlite:///{path}") as app:
        assert app.invocations() == []
    with contextlib.closing(sqlite3.connect(path)) as connection:
        with shop(f"sqlite:///{path}", sqlite_busy_timeout_seconds=0.5) as app, connection:
            connection.execute("CREATE TABLE orders (id INTEGER)")
            connection.execute("INSERT INTO orders VALUES (1)")
            app.get_task("ship").options(session=connection).submit(1)
        with shop(f"sqlite:///{path}") as app, app.runner(concurrency=1):
            assert app.invocations()[0].id
            assert app.invocation(app.invocations()[0].id).result(patient(20)) == 1


def test_a_store_that_is_not_there_yet_cannot_be_made_inside_a_transaction(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        with shop(f"sqlite:///{path}", sqlite_busy_timeout_seconds=0.2) as app:
            connection.execute("CREATE TABLE orders (id INTEGER)")
            connection.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailable, match="a transaction, most likely your own, holds the") as told:
                app.get_task("ship").options(session=connection).submit(1)
            assert "sqlite_busy_timeout_seconds" not in str(told.value)
            assert "call app.prepare() before the transaction begins" in str(told.value)


def test_an_app_that_was_prepared_may_be_used_inside_a_transaction_at_once(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with shop(f"sqlite:///{path}") as app, contextlib.closing(sqlite3.connect(path)) as connection, connection:
        app.prepare()
        asyncio.run(app.aprepare())  # again is safe
        connection.execute("CREATE TABLE orders (id INTEGER)")
        app.get_task("ship").options(session=connection).submit(1)
        connection.commit()
        assert len(app.invocations()) == 1


@shows_locks
def test_a_submit_beside_your_own_transaction_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with shop(f"sqlite:///{path}", sqlite_busy_timeout_seconds=0.2, max_retries=0) as app:
        app.prepare()
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailable, match=rf"transaction of this process \(pid {os.getpid()}\)") as told:
                app.get_task("ship").submit(1)
            assert "Commit your transaction before you submit, or pass its connection" in str(told.value)
            connection.execute("COMMIT")
        app.get_task("ship").submit(1)


@shows_locks
def test_a_lock_of_another_process_is_said_to_be_that_of_another_process(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with shop(f"sqlite:///{path}", sqlite_busy_timeout_seconds=0.2, max_retries=0) as app:
        app.prepare()
        with subprocess.Popen(
            [sys.executable, "-c", _HOLDS_THE_LOCK, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            assert other.stdout is not None
            assert other.stdin is not None
            other.stdout.readline()
            with pytest.raises(StoreUnavailable, match=rf"Process {other.pid} has the file's write lock") as told:
                app.get_task("ship").submit(1)
            assert "your" not in str(told.value)
            other.stdin.close()


_HOLDS_THE_LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
"""


# --- keys without a transaction


@pytest.mark.parametrize("url", ["memory://", "sqlite:///{}/k.db"])
def test_one_key_is_one_invocation(url: str, tmp_path: Path) -> None:
    with shop(url.format(tmp_path)) as app:
        ship = app.get_task("ship").options(key="order 7")
        first = ship.submit(7, label=BIG)
        assert ship.submit(7, label=BIG) == first
        assert ship.submit(7, BIG) == first
        assert ship.submit(label=BIG, order=7) == first
        plain = app.get_task("ship").options(key="order 9")
        assert plain.submit(9) == plain.submit(9, label=b"")
        with pytest.raises(KeyTaken):
            ship.submit(8, label=BIG)
        with pytest.raises(KeyTaken):
            ship.submit(7, label=BIG + b"!")
        with pytest.raises(UsageError, match="one call"):
            ship.map([1, 2])
        with app.runner(concurrency=1):
            assert first.result(patient(20)) == 7 + len(BIG)
        assert ship.submit(7, label=BIG).result(patient(20)) == 7 + len(BIG)
        assert len(app.invocations()) == 2
