"""Events from the user's side: emitted before any runner ever ran, and inside the user's own transaction."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import OperationFailure
from tests.support.patience import eventually, patient

from holdfast import App, UsageError, on_event
from holdfast.errors import StoreUnavailable
from holdfast.triggers.conditions import from_event
from holdfast.triggers.subscriptions import Subscriptions

mongo = pytest.mark.xdist_group("mongo")
STORES = ["sqlite", "mongodb"]


def shop(url: str, **more: Any) -> App:
    app = App(url, name="shop", poll_interval_seconds=0.05, **more)

    @app.task(name="ship", triggers=[on_event("order", arguments={"order": from_event("order")})])
    def ship(order: int) -> int:
        return order

    return app


class Own:
    """A user's own transactions on the store of the app: begin, then commit or roll back."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_sqlite = url.startswith("sqlite")
        self._stack = contextlib.ExitStack()
        if self.is_sqlite:
            path = Path(url.removeprefix("sqlite:///"))
            self.session: Any = self._stack.enter_context(contextlib.closing(sqlite3.connect(path)))
            self.session.execute("CREATE TABLE orders (id INTEGER)")
        else:
            self.client = self._stack.enter_context(MongoClient[dict[str, Any]](url))
            self.client.get_default_database().create_collection("orders")
            self.session = self._stack.enter_context(self.client.start_session())

    def begin(self) -> Any:
        """Begin one, and write something of the user's into it."""
        if self.is_sqlite:
            self.session.execute("INSERT INTO orders VALUES (7)")
        else:
            self.session.start_transaction()
            self.client.get_default_database().orders.insert_one({"order": 7}, session=self.session)
        return self.session

    def commit(self) -> None:
        (self.session.commit if self.is_sqlite else self.session.commit_transaction)()

    def roll_back(self) -> None:
        (self.session.rollback if self.is_sqlite else self.session.abort_transaction)()

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/shop.db" if request.param == "sqlite" else request.getfixturevalue("mongo_url")


@pytest.fixture
def app(url: str) -> Iterator[App]:
    with shop(url) as app:
        app.invocations()  # the store is there
        yield app


@pytest.fixture
def own(app: App, url: str) -> Iterator[Own]:
    own = Own(url)
    yield own
    own.close()


def calls(app: App) -> list[Any]:
    return [record.task for record in app.invocations()]


# --- before any runner ever ran


@pytest.mark.parametrize("where", ["memory", *STORES])
def test_an_event_reaches_the_triggers_of_the_program_that_emits_it(
    where: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    urls = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/shop.db"}
    with shop(urls.get(where) or request.getfixturevalue("mongo_url")) as app:
        event = app.emit("order", {"order": 7})
        assert [each.trigger for each in event.caused] == ["ship"] or event.caused[0].trigger.startswith("ship")
        assert calls(app) == ["ship"]
        with app.runner(concurrency=1):
            assert app.invocation(event.caused[0].invocation).result(patient(20)) == 7
        assert calls(app) == ["ship"], "once"


def test_to_declare_costs_something_once(app: App) -> None:
    counts: Counter[str] = Counter()
    store = app.runtime.ready().store

    def counted(name: str) -> Any:
        real = getattr(store, name)

        async def call(*args: Any, **named: Any) -> Any:
            counts[name] += 1
            return await real(*args, **named)

        return call

    app.emit("order", {"order": 1})
    for name in ("entries", "put_entry", "insert", "get", "roster"):
        setattr(store, name, counted(name))
    app.emit("order", {"order": 2})
    assert counts == {"put_entry": 2, "insert": 1}, "the event, what it caused, and the call"
    app.task(name="bill", triggers=[on_event("order", arguments={"order": from_event("order")})])(lambda order: None)
    app.emit("order", {"order": 3})
    assert sorted(calls(app)) == ["bill", "ship", "ship", "ship"], "a task that is declared later counts too"


def test_what_a_runner_has_let_rest_stays_so(app: App) -> None:
    app.emit("order", {"order": 1})
    engine = app.runtime.ready()
    (trigger,) = app.runtime.run(engine.part(Subscriptions).all())
    from msgspec.structs import replace

    from holdfast.triggers.rules import to_entry

    assert app.runtime.run(engine.store.put_entry(to_entry(replace(trigger, version=2, retired_at=1.0))))
    app.runtime.run(engine.part(Subscriptions).publish())
    with shop(app.url) as other:
        assert other.emit("order", {"order": 2}).caused == ()
    assert calls(app) == ["ship"]


# --- in the user's own transaction


@mongo
def test_an_event_in_a_transaction_is_there_when_it_commits_and_its_triggers_are_told_then(app: App, own: Own) -> None:
    event = app.emit("order", {"order": 7}, session=own.begin())
    assert app.events() == []
    assert calls(app) == []
    own.commit()
    eventually(lambda: calls(app), "the triggers are told promptly, by nobody but this process", 1.5)
    assert [each.id for each in app.events()] == [event.id]
    eventually(lambda: app.events()[0].caused, "and that is written down")
    (caused,) = app.events()[0].caused
    with app.runner(concurrency=1):
        assert app.invocation(caused.invocation).result(patient(20)) == 7
    assert calls(app) == ["ship"]


@mongo
def test_an_event_in_a_transaction_that_is_rolled_back_never_was(app: App, own: Own) -> None:
    app.emit("order", {"order": 7}, key="order 7", session=own.begin())
    own.roll_back()
    assert (app.events(), calls(app)) == ([], [])
    event = app.emit("order", {"order": 8}, key="order 7")  # its key is free
    assert event.facts.payload == {"order": 8}
    assert calls(app) == ["ship"]


@mongo
def test_a_key_is_one_event_inside_and_outside_of_transactions(app: App, own: Own) -> None:
    first = app.emit("order", {"order": 7}, key="order 7")
    again = app.emit("order", {"order": 8}, key="order 7", session=own.begin())
    other = app.emit("order", {"order": 9}, key="order 9", session=own.session)
    assert app.emit("order", {"order": 10}, key="order 9", session=own.session).id == other.id
    own.commit()
    assert (again.id, again.facts.payload) == (first.id, {"order": 7})
    assert app.emit("order", {"order": 11}, key="order 9").id == other.id
    eventually(lambda: len(calls(app)) == 2, "one call for each")
    eventually(lambda: all(event.caused for event in app.events()), "both are told")
    assert len(app.events()) == 2


@mongo
def test_a_call_and_an_event_share_a_transaction(app: App, own: Own) -> None:
    session = own.begin()
    app.get_task("ship").options(session=session).submit(1)
    app.emit("order", {"order": 2}, session=session)
    app.emit("nobody.cares", session=session)
    own.commit()
    eventually(lambda: calls(app) == ["ship", "ship"], "both")
    assert len(app.events()) == 2


class Committing(sqlite3.Connection):
    """A connection whose commit takes its time, as on a busy disk: SQLite says from its beginning that it is over."""

    is_committing = False

    @property
    def in_transaction(self) -> bool:  # type: ignore[override]
        return not self.is_committing and bool(super().in_transaction)


@pytest.mark.skipif(sys.platform != "linux", reason="no other system shows which process has the lock")
def test_a_commit_that_takes_its_time_is_not_over_before_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, longest = tmp_path / "shop.db", "holdfast.store.sqlite.transaction._LONGEST_FLUSH_SECONDS"
    monkeypatch.setattr(longest, 600.0)
    with shop(f"sqlite:///{path}") as app:
        app.invocations()
        with contextlib.closing(sqlite3.connect(path, factory=Committing)) as connection:
            app.get_task("ship").options(session=connection).submit(1)
            app.emit("order", {"order": 2}, session=connection)
            transaction = app.runtime.ready().store.joined(connection)
            connection.is_committing = True
            for _ in range(50):  # those who wait for it look meanwhile
                assert not transaction.is_over
                assert calls(app) == []
            connection.commit()
            assert transaction.is_over
            with contextlib.closing(sqlite3.connect(path)) as other:  # which has the lock all the time
                other.execute("CREATE TABLE theirs (n)")
                other.execute("BEGIN IMMEDIATE")
                monkeypatch.setattr(longest, 0.05)
                eventually(lambda: transaction.is_over, "it is not waited for without end")
        eventually(lambda: calls(app) == ["ship", "ship"], "the event is told of when it can be read")


@mongo
def test_an_asynchronous_session_is_awaited(mongo_url: str) -> None:
    async def main() -> None:
        async with AsyncMongoClient[dict[str, Any]](mongo_url) as client, client.start_session() as session:
            with shop(mongo_url) as app:
                await app.ainvocations()
                async with await session.start_transaction():
                    with pytest.raises(UsageError, match="aemit"):
                        app.emit("order", {"order": 1}, session=session)
                    event = await app.aemit("order", {"order": 1}, key="k", session=session)
                    assert (await app.aemit("order", {"order": 2}, key="k", session=session)).id == event.id
                    assert await app.aevents() == []
                deadline = time.monotonic() + 20
                while not await app.ainvocations():
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def test_on_sqlite_an_event_is_awaited_too(tmp_path: Path) -> None:
    async def main() -> None:
        with shop(f"sqlite:///{tmp_path}/shop.db") as app:
            await app.ainvocations()
            with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
                await app.aemit("order", {"order": 1}, session=connection)
                connection.commit()
                assert len(await app.aevents()) == 1

    asyncio.run(main())


PROGRAM = """
import contextlib, os, sqlite3, sys
from pymongo import MongoClient
from holdfast import App, on_event
from holdfast.triggers import from_event

url = sys.argv[1]
app = App(url, name="shop")

@app.task(name="ship", triggers=[on_event("order", arguments={"order": from_event("order")})])
def ship(order: int) -> int:
    return order

app.invocations()
if url.startswith("sqlite"):
    session = sqlite3.connect(url.removeprefix("sqlite:///"))
else:
    session = MongoClient(url).start_session()
    session.start_transaction()
app.runtime.run = (lambda run: lambda work: run(work) if work.__name__ != "announce" else work.close())(app.runtime.run)
print(app.emit("order", {"order": 7}, session=session).id, flush=True)
(session.commit if url.startswith("sqlite") else session.commit_transaction)()
os._exit(0)  # before anybody was told
"""


@mongo
@pytest.mark.slow
@pytest.mark.parametrize("url", ["sqlite", pytest.param("mongodb", marks=pytest.mark.faults)], indirect=True)
def test_what_was_committed_is_told_by_the_services_if_its_process_dies_right_then(app: App, url: str) -> None:
    program = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), url],
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=True,
    )
    assert [event.id for event in app.events()] == program.stdout.split()
    assert calls(app) == []
    with app.runner(concurrency=1):
        eventually(lambda: calls(app), "the services tell of it")
        assert app.invocation(app.invocations()[0].id).result(patient(20)) == 7


# --- a store that is not there yet


def test_a_store_that_cannot_be_made_beside_a_transaction_says_so_at_once(tmp_path: Path) -> None:
    """With default settings, in which a lock is waited for 10 s."""
    for _ in range(2):  # and nothing is spoilt by that
        with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS orders (id INTEGER)")
            connection.execute("INSERT INTO orders VALUES (7)")
            for call in (
                lambda app: app.get_task("ship").options(session=connection).submit(7),
                lambda app: app.emit("order", {"order": 7}, session=connection),
                lambda app: asyncio.run(app.aemit("order", {"order": 7}, session=connection)),
            ):
                began = time.monotonic()
                with shop(f"sqlite:///{tmp_path}/shop.db") as app:
                    with pytest.raises(StoreUnavailable, match="holdfast store prepare"):
                        call(app)
                assert time.monotonic() - began < 3.0
            connection.commit()
    with shop(f"sqlite:///{tmp_path}/shop.db") as app:
        with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
            connection.execute("BEGIN")  # which holds no lock yet: the store is made beside it
            app.get_task("ship").options(session=connection).submit(7)
            connection.commit()
        assert calls(app) == ["ship"]


def test_a_lock_is_waited_for_once_when_a_store_is_opened(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER)")
        connection.execute("INSERT INTO orders VALUES (7)")
        began = time.monotonic()
        with shop(f"sqlite:///{tmp_path}/shop.db", sqlite_busy_timeout_seconds=0.5) as app:
            with pytest.raises(StoreUnavailable):
                app.invocations()
        assert time.monotonic() - began < 1.2


@mongo
def test_on_mongodb_the_store_is_made_outside_of_the_transaction_which_is_then_run_again(mongo_url: str) -> None:
    own = Own(mongo_url)
    try:
        for number, call in enumerate(
            (
                lambda app, session: app.get_task("ship").options(session=session).submit(7),
                lambda app, session: app.emit("order", {"order": 7}, session=session),
            )
        ):
            with shop(mongo_url) as app:
                session, began = own.begin(), time.monotonic()
                if number == 0:
                    with pytest.raises(OperationFailure, match="holdfast store prepare") as caught:
                        call(app, session)
                    assert caught.value.has_error_label("TransientTransactionError")
                    assert time.monotonic() - began < 10.0
                    own.roll_back()
                    own.session.with_transaction(lambda session: call(app, session))  # noqa: B023
                else:
                    call(app, session)
                    own.commit()
                eventually(lambda: len(calls(app)) == number + 1, "it is there")  # noqa: B023
    finally:
        own.close()


# --- large payloads

LARGE = "x" * 200_000


def collected(app: App) -> int:
    """Collect the payloads that nothing refers to, however lately they were wanted; return how many there were."""
    engine = app.runtime.ready()
    return app.runtime.run(engine.store.collect_payloads(engine.app, engine.store.now() + 10, 100)).removed


@pytest.mark.parametrize("where", ["memory", *STORES])
def test_a_large_payload_is_kept_with_its_event_and_reaches_its_tasks(
    where: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    urls = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/shop.db"}
    with shop(urls.get(where) or request.getfixturevalue("mongo_url")) as app:
        event = app.emit("order", {"order": 7, "label": LARGE}, key="order 7")
        (caused,) = event.caused
        assert len(event.payload) < 200
        assert app.emit("order", {"order": 8}, key="order 7").id == event.id
        assert app.emit("order", {"order": 8, "label": LARGE + "y"}, key="order 7").id == event.id
        assert collected(app) == 1  # what the second one has brought
        with app.runner(concurrency=1):
            assert app.invocation(caused.invocation).result(patient(20)) == 7
        assert "<payload of 200,0" in str(app.events()[0].facts.payload)
        assert collected(app) == 0
        store = app.runtime.ready().store
        for kind in ("event", "event-key"):
            (entry,) = app.runtime.run(store.entries("shop", kind))
            assert app.runtime.run(store.remove_entry(entry))
        assert collected(app) == 1


@mongo
def test_a_large_payload_is_part_of_the_transaction(app: App, own: Own) -> None:
    app.emit("order", {"order": 7, "label": LARGE}, session=own.begin())
    own.roll_back()
    collected(app)
    app.emit("order", {"order": 8, "label": LARGE}, session=own.begin())
    own.commit()
    eventually(lambda: app.events() and app.events()[0].caused, "it is told")
    assert collected(app) == 0
    with app.runner(concurrency=1):
        assert app.invocation(app.events()[0].caused[0].invocation).result(patient(20)) == 8
