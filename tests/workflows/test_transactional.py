"""Transactional steps: what a step writes by its session happens once, with its record, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from tests.support.patience import patient

from holdfast import App, UsageError, context
from holdfast.errors import NotEncodable
from holdfast.model.log import Appended, Page
from holdfast.retries import Fixed
from holdfast.store.contract import Ability
from holdfast.store.mongo.sessions import MongoStepTransaction
from holdfast.store.sqlite.sessions import SqliteStepTransaction
from holdfast.workflows import events as e
from holdfast.workflows.events import Event

STORES = ("sqlite", "mongodb")
Until = Callable[[Callable[[], object]], None]


class Books:
    """The user's own data, beside the tables of the store."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_mongo = url.startswith("mongodb")
        if self.is_mongo:
            self._client: MongoClient[dict[str, Any]] = MongoClient(url)
            self.database = self._client.get_default_database()
            self.database.create_collection("sales")

    def prepare(self) -> None:
        if not self.is_mongo:
            with self._connected() as connection:
                connection.execute("CREATE TABLE sales (name TEXT)")

    def _connected(self) -> sqlite3.Connection:
        return sqlite3.connect(self.url.removeprefix("sqlite:///"))

    def write(self, session: Any, name: str) -> None:
        """Write with the session of a plain step."""
        if self.is_mongo:
            database = session.client.get_default_database()
            database.sales.insert_one({"name": name}, session=session)
        else:
            session.execute("INSERT INTO sales VALUES (?)", (name,))

    async def awrite(self, session: Any, name: str) -> None:
        if not self.is_mongo:
            return self.write(session, name)
        database = session.client.get_default_database()
        await database.sales.insert_one({"name": name}, session=session)

    def sales(self) -> list[str]:
        if self.is_mongo:
            return sorted(sale["name"] for sale in self.database.sales.find())
        connection = self._connected()
        try:
            return sorted(name for (name,) in connection.execute("SELECT name FROM sales"))
        finally:
            connection.close()

    def close(self) -> None:
        if self.is_mongo:
            self._client.close()


@pytest.fixture(params=STORES)
def books(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Books]:
    on_mongo = request.param == "mongodb"
    books = Books(request.getfixturevalue("mongo_url") if on_mongo else f"sqlite:///{tmp_path / 'store.db'}")
    yield books
    books.close()


@pytest.fixture
def app(books: Books) -> Iterator[App]:
    app = App(books.url, name="shop", poll_interval_seconds=0.1)
    app.prepare()
    books.prepare()
    with app:
        yield app


class TestTogether:
    def test_async_and_plain_steps_commit_with_their_record(self, app: App, books: Books) -> None:
        @app.step(transactional=True)
        async def sell(name: str) -> str:
            await books.awrite(context().session, name)
            context().data["sold"] = name
            context().set(stage="sold")
            return f"sold {name}"

        @app.step(transactional=True)
        def count(name: str) -> str:
            books.write(context().session, name)
            return f"{context().data['sold']} and {name}"

        @app.workflow
        async def trade() -> list[str]:
            return [await sell("a"), await count("b")]

        with app.runner():
            run = trade.submit()
            assert run.result(patient(30)) == ["sold a", "a and b"]
        assert books.sales() == ["a", "b"]
        types = [event.type for event in run.events()]
        start = ["step_created", "step_started"]
        expected = [*start, "data_set", "attr_set", "step_completed", *start, "step_completed"]
        assert types == ["run_created", "run_started", *expected, "run_completed"]

    def test_a_step_that_raises_leaves_nothing(self, app: App, books: Books) -> None:
        @app.step(transactional=True)
        async def sell(name: str) -> None:
            await books.awrite(context().session, name)
            context().data["sold"] = name
            raise ValueError("out of stock")

        @app.step(transactional=True)
        def count(name: str) -> None:
            books.write(context().session, name)
            raise ValueError("cannot count")

        @app.workflow
        async def trade() -> list[str]:
            told = []
            for step in (sell, count):
                try:
                    await step("a")
                except ValueError as error:
                    told.append(str(error))
            return [*told, *context().data]

        with app.runner():
            assert trade.submit().result(patient(30)) == ["out of stock", "cannot count"]
        assert books.sales() == []

    @pytest.mark.parametrize("is_async", [True, False])
    def test_a_retry_begins_a_new_transaction(self, app: App, books: Books, is_async: bool) -> None:
        @app.step(transactional=True, retries=Fixed(3, "10ms"))
        async def sell() -> int:
            await books.awrite(context().session, f"attempt {context().attempt}")
            if context().attempt < 3:
                raise OSError("no")
            return context().attempt

        @app.step(transactional=True, retries=Fixed(3, "10ms"))
        def count() -> int:
            books.write(context().session, f"attempt {context().attempt}")
            if context().attempt < 3:
                raise OSError("no")
            return context().attempt

        @app.workflow
        async def trade() -> int:
            return await (sell() if is_async else count())  # type: ignore[misc, no-any-return]

        with app.runner():
            run = trade.submit()
            assert run.result(patient(30)) == 3
        assert books.sales() == ["attempt 3"]
        types = [event.type for event in run.events() if event.correlation]
        retry = ["step_started", "step_retrying"]
        assert types == ["step_created", *retry, *retry, "step_started", "step_completed"]

    def test_large_results_and_many_steps_at_once(self, app: App, books: Books) -> None:
        @app.step(transactional=True)
        async def sell(name: str) -> bytes:
            await books.awrite(context().session, name)
            return b"x" * 600_000

        @app.step(transactional=True)
        def count(name: str) -> bytes:
            books.write(context().session, name)
            return b"x" * 600_000

        @app.step
        async def pack(number: int) -> int:
            await asyncio.sleep(0.001 * number)
            return number

        @app.step(repeatable=True)
        async def look(number: int) -> int:
            await asyncio.sleep(0.001 * number)
            return number

        @app.workflow
        async def trade() -> int:
            calls = [call for number in range(5) for call in (pack(number), look(number))]
            sold = [call for number in range(5) for call in (sell(f"a{number}"), count(f"b{number}"))]
            found = await asyncio.gather(*sold, *calls)
            return sum(len(each) if isinstance(each, bytes) else each for each in found)

        with app.runner():
            assert trade.submit().result(patient(60)) == 6_000_020
        assert books.sales() == [f"{kind}{number}" for kind in "ab" for number in range(5)]

    def test_submit_joins_the_transaction(self, app: App, books: Books, until: Until) -> None:
        @app.task
        def confirm(name: str) -> str:
            return f"confirmed {name}"

        @app.step(transactional=True)
        async def sell(name: str) -> str:
            await books.awrite(context().session, name)
            confirmed = await confirm.options(session=context().session).asubmit(name)
            if name == "bad":
                raise ValueError("no")
            return confirmed.id

        @app.step(transactional=True)
        def count(name: str) -> str:
            return confirm.options(session=context().session).submit(name).id

        @app.workflow
        async def trade() -> list[str]:
            with contextlib.suppress(ValueError):
                await sell("bad")
            return [await sell("a"), await count("b")]

        with app.runner():
            ids = trade.submit().result(patient(30))
            assert [app.invocation(id).result(patient(30)) for id in ids] == ["confirmed a", "confirmed b"]
        assert len(app.invocations(task=confirm.name)) == 2
        assert books.sales() == ["a"]

    def test_a_plain_body_has_transactional_steps_too(self, app: App, books: Books) -> None:
        @app.step(transactional=True)
        def count(name: str) -> str:
            books.write(context().session, name)
            return name

        @app.workflow
        def trade() -> str:
            return count("a") + count("b")

        with app.runner():
            assert trade.submit().result(patient(30)) == "ab"
        assert books.sales() == ["a", "b"]


class TestRefused:
    def test_the_step_may_not_end_the_transaction(self, app: App, books: Books) -> None:
        @app.step(transactional=True)
        def count(how: str) -> None:
            session = context().session
            books.write(session, how)
            if how == "sql":
                session.execute("COMMIT")
            getattr(session, how)()

        @app.workflow
        async def trade(how: str) -> None:
            await count(how)

        names = ("commit_transaction", "abort_transaction", "end_session")
        with app.runner():
            for how in names if books.is_mongo else ("commit", "rollback", "close", "__enter__", "sql"):
                with pytest.raises(UsageError, match="Holdfast commits the transaction of a step"):
                    trade.submit(how).result(patient(30))
        assert books.sales() == []

    def test_a_session_is_for_transactional_steps(self, app: App, books: Books) -> None:
        @app.step
        async def pack() -> None:
            context().session  # noqa: B018

        @app.workflow
        async def trade(in_step: bool) -> None:
            if in_step:
                await pack()
            context().session  # noqa: B018

        with app.runner():
            with pytest.raises(UsageError, match="declare it with"):
                trade.submit(True).result(patient(30))
            with pytest.raises(UsageError, match="transactional=True"):
                trade.submit(False).result(patient(30))

    def test_a_timed_out_step_is_rolled_back(self, app: App, books: Books) -> None:
        @app.step(transactional=True, timeout=0.3)
        async def sell() -> None:
            await books.awrite(context().session, "late")
            await asyncio.sleep(20)

        @app.workflow
        async def trade() -> None:
            await sell()

        with app.runner(), pytest.raises(TimeoutError, match=r"timed out after 0.3 s"):
            trade.submit().result(patient(30))
        assert books.sales() == []


@pytest.mark.parametrize("kind", ["memory", "standalone"])
def test_a_store_without_transactions_refuses(kind: str, request: pytest.FixtureRequest) -> None:
    url = "memory://" if kind == "memory" else request.getfixturevalue("standalone")
    app = App(url, name="shop")
    ran = []

    @app.step(transactional=True, retries=3)
    async def sell() -> None:
        ran.append("sell")

    @app.workflow
    async def trade() -> None:
        await sell()

    with app, app.runner():
        run = trade.submit()
        with pytest.raises(UsageError, match="has no transactions; a transactional step needs"):
            run.result(patient(30))
        assert [step.attempt for step in run.steps()] == [1]
        assert Ability.TRANSACTIONS not in app._runtime.ready().store.abilities
    assert ran == []


class TestTheLimitOfSqlite:
    @pytest.fixture
    def books(self, tmp_path: Path) -> Books:
        return Books(f"sqlite:///{tmp_path / 'store.db'}")

    @pytest.mark.parametrize("is_async", [True, False])
    def test_it_is_rolled_back_after_two_seconds_and_others_can_write(
        self, app: App, books: Books, is_async: bool
    ) -> None:
        began, waits = threading.Event(), []

        def then(session: Any) -> None:
            with pytest.raises(sqlite3.OperationalError, match="readonly"):
                books.write(session, "later")

        @app.step(transactional=True)
        async def sell() -> None:
            await books.awrite(context().session, "a")
            began.set()
            await asyncio.sleep(3)
            then(context().session)

        @app.step(transactional=True)
        def count() -> None:
            books.write(context().session, "a")
            began.set()
            time.sleep(3)
            then(context().session)

        @app.task
        def other() -> None: ...

        @app.workflow
        async def trade() -> None:
            await (sell() if is_async else count())  # type: ignore[func-returns-value, misc]

        with app.runner():
            run = trade.submit()
            assert began.wait(20)
            before = time.monotonic()
            other.submit()
            waits.append(time.monotonic() - before)
            with pytest.raises(TimeoutError, match=r"open for more than 2 s and was rolled back"):
                run.result(patient(30))
        assert 0.5 < waits[0] < 2.8
        assert books.sales() == []


def test_failures_are_told(app: App, books: Books) -> None:
    @app.step(transactional=True)
    def count() -> object:
        books.write(context().session, "a")
        return object()

    @app.workflow
    async def trade() -> None:
        await count()

    with app.runner(), pytest.raises(NotEncodable, match="object"):
        trade.submit().result(patient(30))
    assert books.sales() == []


# --- zombies, conflicts, and commits without an answer


def kind_of(books: Books) -> Any:
    return MongoStepTransaction if books.is_mongo else SqliteStepTransaction


def take_over(app: App, id: str) -> None:
    """Write the takeover of a later owner behind the log of a run, as another process does."""

    engine = app._runtime.ready()

    async def write() -> None:
        pages = await engine.store.read_log("shop", id, limit=100)  # type: ignore[arg-type]
        tail = pages[-1].last if pages else 0
        now = engine.store.now()
        page = Page(
            app="shop",
            run=id,  # type: ignore[arg-type]
            first=tail + 1,
            last=tail + 1,
            epoch=9,
            operation="takeover",
            at=now,
            events=e.encode([Event(type=e.TAKEOVER, at=now, epoch=9)]),
        )
        assert await engine.store.append([page]) == [Appended()]

    app._runtime.opened().bridge.run(write())


class TestZombies:
    @pytest.mark.parametrize("is_async", [True, False])
    def test_the_effects_of_a_zombie_are_rolled_back(
        self, app: App, books: Books, is_async: bool, monkeypatch: pytest.MonkeyPatch, until: Until
    ) -> None:
        begin, ids = kind_of(books).begin, []
        ran = []

        async def begin_late(self: Any) -> None:
            if not ran:  # on SQLite nobody can write later than this
                thread = threading.Thread(target=take_over, args=(app, ids[0]))
                thread.start()
                await asyncio.to_thread(thread.join) if is_async else thread.join()
            await begin(self)

        @app.step(transactional=True)
        async def sell() -> None:
            await books.awrite(context().session, "a")
            ran.append("sell")

        @app.step(transactional=True)
        def count() -> None:
            books.write(context().session, "a")
            ran.append("count")

        @app.workflow
        async def trade() -> None:
            ids.append(context().invocation_id)
            await (sell() if is_async else count())  # type: ignore[func-returns-value, misc]

        monkeypatch.setattr(kind_of(books), "begin", begin_late)
        with app.runner():
            run = trade.submit()
            until(lambda: ran)
            time.sleep(0.3)
            store = app._runtime.ready().store
            pages = app._runtime.opened().bridge.run(_pages(store, run.id))
            assert [page.operation for page in pages] == ["takeover"]
            assert books.sales() == []
            assert len(ran) == 1


async def _pages(store: Any, id: str) -> Any:
    return await store.read_log("shop", id, limit=100)


class TestCommits:
    @pytest.mark.parametrize("is_async", [True, False])
    def test_the_page_tells_whether_a_commit_without_an_answer_was_carried_out(
        self, app: App, books: Books, is_async: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commit, fates = kind_of(books).commit, ["before", "after"]

        async def commit_and_fail(self: Any) -> None:
            fate = fates.pop(0) if fates else ""
            if fate == "before":
                await self.rollback()
            else:
                await commit(self)
            if fate:
                raise ConnectionError(f"no answer, {fate} the commit")

        @app.step(transactional=True, retries=Fixed(3, "10ms"))
        async def sell() -> int:
            await books.awrite(context().session, f"attempt {context().attempt}")
            return context().attempt

        @app.step(transactional=True, retries=Fixed(3, "10ms"))
        def count() -> int:
            books.write(context().session, f"attempt {context().attempt}")
            return context().attempt

        @app.workflow
        async def trade() -> int:
            return await (sell() if is_async else count())  # type: ignore[misc, no-any-return]

        monkeypatch.setattr(kind_of(books), "commit", commit_and_fail)
        with app.runner():
            run = trade.submit()
            assert run.result(patient(30)) == 2
        assert books.sales() == ["attempt 2"]
        types = [event.type for event in run.events() if event.correlation]
        assert types == ["step_created", "step_started", "step_retrying", "step_started", "step_completed"]


class TestConflicts:
    """MongoDB has transactions that meet each other."""

    @pytest.fixture
    def books(self, mongo_url: str) -> Iterator[Books]:
        books = Books(mongo_url)
        yield books
        books.close()

    def test_steps_that_change_the_same_document_are_run_again(self, app: App, books: Books) -> None:
        books.database.stock.insert_one({"_id": "apples", "count": 0})

        @app.step(transactional=True)
        async def sell() -> int:
            stock = context().session.client.get_default_database().stock
            found = await stock.find_one({"_id": "apples"}, session=context().session)
            await asyncio.sleep(0.01)
            update = {"$set": {"count": found["count"] + 1}}
            await stock.update_one({"_id": "apples"}, update, session=context().session)
            return context().attempt

        @app.step(transactional=True)
        def count() -> int:
            stock = context().session.client.get_default_database().stock
            found = stock.find_one({"_id": "apples"}, session=context().session)
            time.sleep(0.01)
            update = {"$set": {"count": found["count"] + 1}}
            stock.update_one({"_id": "apples"}, update, session=context().session)
            return context().attempt

        @app.workflow
        async def trade() -> list[int]:
            return await asyncio.gather(*[step() for step in (sell, count) for _ in range(4)])

        with app.runner():
            runs = [trade.submit() for _ in range(2)]
            assert [run.result(patient(60)) for run in runs] == [[1] * 8] * 2  # no attempt has failed
        found = books.database.stock.find_one({"_id": "apples"})
        assert found is not None
        assert found["count"] == 16

    @pytest.mark.parametrize("label", ["TransientTransactionError", "UnknownTransactionCommitResult"])
    def test_a_commit_that_fails_is_tried_again(self, app: App, books: Books, label: str) -> None:
        ran = []

        @app.step(transactional=True)
        def count() -> None:
            books.write(context().session, "a")
            ran.append(1)

        @app.workflow
        async def trade() -> None:
            await count()

        code = {"errorCode": 251, "errorLabels": [label]}
        fail = {"failCommands": ["commitTransaction"], **code}
        admin = books.database.client.admin
        admin.command({"configureFailPoint": "failCommand", "mode": {"times": 2}, "data": fail})
        with app.runner():
            trade.submit().result(patient(30))
        assert books.sales() == ["a"]
        assert len(ran) == (3 if label.startswith("Transient") else 1)
