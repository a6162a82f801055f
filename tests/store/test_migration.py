"""Stores that version 0.1 left behind are opened, found whole, and worked on. See tests/fixtures/README.md."""

from __future__ import annotations

import asyncio
import datetime as dt
import gzip
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from bson import json_util
from pymongo import IndexModel, MongoClient
from tests.support.patience import patient

from holdfast import App
from holdfast.clock import SystemClock
from holdfast.errors import SchemaMismatch
from holdfast.fleet.services import Executions
from holdfast.fleet.slots import ExecutionStatus
from holdfast.model.changes import APPLIED
from holdfast.model.log import APPENDED
from holdfast.model.records import RunState
from holdfast.model.status import Status
from holdfast.runtime.pauses import pause_queue, pauses_of, resume_queue
from holdfast.store import open_store
from holdfast.store.contract import Filter, Order, Store
from holdfast.store.mongo import schema as mongo_schema
from holdfast.store.sqlite import schema as sqlite_schema
from holdfast.testing.samples import ids_of, invocation, page, pushing, suspended, wish
from holdfast.triggers import joins
from holdfast.triggers import rules as triggers

BEFORE = Path(__file__).parent.parent / "fixtures" / "before_house"
LONGER = 100_000_000.0  # seconds that what has ended is kept beyond its time, so that it does not age in a fixture
_ENTRIES = "holdfast_entries"


class OldStore:
    """A store of that version, and what a test has to find in it again."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url
        self.facts: dict[str, Any] = json.loads((BEFORE / f"{kind}-facts.json").read_text())

    def id(self, name: str) -> str:
        return str(self.facts[name]["id"])

    def opened(self) -> Store:
        return open_store(self.url, clock=SystemClock())

    def version(self) -> tuple[int, int]:
        if self.kind == "sqlite":
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as connection:
                meta = dict(connection.execute("SELECT key, value FROM holdfast_meta").fetchall())
        else:
            with MongoClient[dict[str, Any]](self.url) as client:
                meta = client.get_default_database().holdfast_meta.find_one({"_id": "schema"}) or {}
        return int(meta["schema_version"]), int(meta["min_reader"])

    def tables(self) -> set[str]:
        if self.kind == "sqlite":
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as connection:
                found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
                return {name for (name,) in found}
        with MongoClient[dict[str, Any]](self.url) as client:
            return set(client.get_default_database().list_collection_names())

    def entries(self) -> int:
        if self.kind == "sqlite":
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as connection:
                return int(connection.execute(f"SELECT count(*) FROM {_ENTRIES}").fetchone()[0])
        with MongoClient[dict[str, Any]](self.url) as client:
            return client.get_default_database()[_ENTRIES].count_documents({})

    def python(self, code: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a program of today that opens the store."""
        given = {**os.environ, "URL": self.url, "PYTHONPATH": os.pathsep.join(sys.path), **more}
        return subprocess.run(
            [sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=patient(60), check=False
        )


def restored_file(path: Path) -> str:
    path.write_bytes(gzip.decompress((BEFORE / "shop.db.gz").read_bytes()))
    path.chmod(0o600)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE holdfast_invocations SET retain_until = retain_until + ?", [LONGER])
        connection.execute("UPDATE holdfast_entries SET keep_until = keep_until + ?", [LONGER])
        connection.commit()
    return f"sqlite:///{path}"


def restore_database(url: str) -> None:
    content = json_util.loads(gzip.decompress((BEFORE / "shop.json.gz").read_bytes()).decode())
    with MongoClient[dict[str, Any]](url) as client:
        database = client.get_default_database()
        for name, found in content.items():
            for document in found["documents"]:
                for field in ("retain_until", "keep_until"):
                    if field in document:
                        document[field] += LONGER
                if "expires_at" in document:
                    document["expires_at"] += dt.timedelta(seconds=LONGER)
            if found["documents"]:
                database[name].insert_many(found["documents"])
            indexes = [
                IndexModel(
                    [(key, int(order)) for key, order in about.pop("key")],
                    name=index,
                    **{option: value for option, value in about.items() if option not in ("v", "ns")},
                )
                for index, about in found["indexes"].items()
                if index != "_id_"
            ]
            if indexes:
                database[name].create_indexes(indexes)


@pytest.fixture(
    params=["sqlite", pytest.param("mongo", marks=pytest.mark.xdist_group("stores"))],
)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> OldStore:
    if request.param == "sqlite":
        return OldStore("sqlite", restored_file(tmp_path / "shop.db"))
    url = request.getfixturevalue("mongo_url")
    restore_database(url)
    return OldStore("mongo", url)


def play(old: OldStore, scenario: Callable[[Store], Any]) -> None:
    async def run() -> None:
        store = old.opened()
        await store.open()
        try:
            await scenario(store)
        finally:
            await store.close()

    asyncio.run(run())


NEW = {"sqlite": (sqlite_schema.SCHEMA_VERSION, 6), "mongo": (mongo_schema.SCHEMA_VERSION, 6)}


def is_migrated(old: OldStore) -> bool:
    gone = {"holdfast_queues", "holdfast_executions"}
    return old.version() == NEW[old.kind] and not gone & old.tables() and old.entries() == 13


# --- everything is found again


def test_every_invocation_is_found_as_it_was(old: OldStore) -> None:
    async def scenario(store: Store) -> None:
        assert is_migrated(old)
        assert len(await store.find("shop", Filter(), 100)) == old.facts["count"]
        named = {name: fact for name, fact in old.facts.items() if isinstance(fact, dict)}
        found = await store.get("shop", [fact["id"] for fact in named.values()])
        assert [str(each and each.status) for each in found] == [fact["status"] for fact in named.values()]
        assert all(each.retain_until for each in found if each and each.status in ("success", "failed", "cancelled"))
        (runner,) = await store.roster("shop")
        assert await store.owners("shop") == [f"{runner.id}/1"]
        assert await store.quarantined("shop") == []

    play(old, scenario)


def test_results_errors_and_payloads_are_found(old: OldStore) -> None:
    app = App(old.url, name="shop")
    try:
        assert app.invocation(old.id("done")).result(timeout=0) == 3
        assert app.invocation(old.id("large")).result(timeout=0) == "x" * 200_000
        with pytest.raises(ValueError, match="no stock"):
            app.invocation(old.id("failing")).result(timeout=0)

        @app.task(name="shop:add")
        def add(a: int, b: int) -> int:
            return a + b

        assert add.options(key="order 42").submit(40, 2).id == old.id("keyed"), "its key is still taken"
    finally:
        app.close()


def test_schedules_pauses_executions_triggers_and_half_a_join_are_found(old: OldStore) -> None:
    app = App(old.url, name="shop")
    try:
        schedules = {schedule.name: schedule for schedule in app.schedules.list()}
        assert sorted(schedules) == old.facts["schedules"]
        assert schedules["paused"].pause is not None
        assert schedules["paused"].pause.why == "stock-taking"
        assert schedules["nightly"].pause is None
    finally:
        app.close()

    async def scenario(store: Store) -> None:
        (pause,) = await pauses_of(store, "shop")
        assert (pause.name, pause.reason) == ("mail", "provider is down")
        assert pause.by
        assert await pause_queue(store, pause) == pause, "an earlier try of the same"
        assert await resume_queue(store, "shop", "mail", "r")
        assert await pause_queue(store, pause) is None, "its operation is remembered"
        (execution,) = await Executions(store, "shop", "core", 60).trail(10)
        assert execution.status is ExecutionStatus.RUNNING
        assert execution.runner_id == (await store.roster("shop"))[0].id
        rules = [triggers.from_entry(entry).name for entry in await store.entries("shop", triggers.KIND)]
        assert [name.partition("#")[0] for name in rules] == ["shop:both", "shop:on_order"]
        (half,) = [joins.from_entry(entry) for entry in await store.entries("shop", joins.KIND)]
        assert half.trigger.startswith("shop:both")

    play(old, scenario)


# --- work goes on


@contextmanager
def runner_of_today(url: str) -> Iterator[None]:
    given = {
        **os.environ,
        "HOLDFAST_URL": url,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HOLDFAST_RECOVER_RUNNING_INVOCATIONS_CRON": "* * * * * *",
        "HOLDFAST_RUNNER_HEARTBEAT_SECONDS": "0.3",
        "HOLDFAST_RUNNER_CONSIDERED_DEAD_AFTER_MINUTES": "0.02",
    }
    command = [sys.executable, "-m", "holdfast", "run", "tests.fixtures.shop:app", "--concurrency", "4"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=given, stderr=quiet, stdout=quiet, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # one of its tasks would not end by itself
        process.wait()


@pytest.mark.slow
def test_work_goes_on_and_that_of_the_killed_runner_is_recovered(old: OldStore) -> None:
    app = App(old.url, name="shop")
    holder, mail = app.invocation(old.id("holder")), app.invocation(old.id("mail"))
    try:
        with runner_of_today(old.url):
            assert app.invocation(old.id("waiting")).result(timeout=patient(60)) == 7
            deadline = time.monotonic() + 60
            while holder.status != Status.RUNNING or holder.record().attempt == 1:
                assert time.monotonic() < deadline, holder.status
                time.sleep(0.1)
            blocked = app.invocation(old.id("blocked"))  # it looks again for the slot that recovery freed, in vain
            while blocked.status != Status.CONCURRENCY_CONTROLLED:
                assert time.monotonic() < deadline, blocked.status
                time.sleep(0.1)
            assert mail.status == Status.REGISTERED, "its queue is paused"
            app.queues.resume("mail")
            assert mail.result(timeout=patient(60)) == "a@example.org"
            assert app.invocation(old.id("later")).status == Status.REGISTERED
            assert app.invocation(old.id("retrying")).status == Status.RETRY
    finally:
        app.close()


# --- a migration that is interrupted, or done by two

_DIES = """
import asyncio, os, signal
from holdfast.clock import SystemClock
from holdfast.store import open_store
from holdfast.store.mongo import schema as mongo_schema
from holdfast.store.sqlite import schema

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

schema.MIGRATIONS[5].insert(int(os.environ["AFTER"]), die)
mongo_schema._retain_old = die
asyncio.run(open_store(os.environ["URL"], clock=SystemClock()).open())
"""


@pytest.mark.parametrize("after", [1, 4])
def test_a_migration_that_was_killed_is_finished_by_the_next(old: OldStore, after: int) -> None:
    if old.kind == "mongo" and after != 1:
        pytest.skip("it dies at one place")
    before = old.version()
    assert old.python(_DIES, AFTER=str(after)).returncode == -signal.SIGKILL
    assert old.version() == before
    assert old.entries() == (11 if old.kind == "sqlite" else 13), "on SQLite it is one transaction"
    test_every_invocation_is_found_as_it_was(old)
    test_schedules_pauses_executions_triggers_and_half_a_join_are_found(old)


def test_two_at_once_migrate_it_once(old: OldStore) -> None:
    async def run() -> None:
        stores = [old.opened() for _ in range(2)]
        await asyncio.gather(*[store.open() for store in stores])
        try:
            assert is_migrated(old)
            for store in stores:
                assert [pause.name for pause in await pauses_of(store, "shop")] == ["mail"]
        finally:
            await asyncio.gather(*[store.close() for store in stores])

    asyncio.run(run())


def test_a_program_of_the_old_version_is_refused(old: OldStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(store: Store) -> None:
        pass

    known = old.version()[0]
    play(old, nothing)
    monkeypatch.setattr(sqlite_schema, "SCHEMA_VERSION", known)
    monkeypatch.setattr(mongo_schema, "SCHEMA_VERSION", known)
    with pytest.raises(SchemaMismatch, match=rf"needs a Holdfast that knows version 6; this one knows {known}\. Upgra"):
        play(old, nothing)


# --- from version 5, which knew no runs


@pytest.fixture
def fifth(old: OldStore, monkeypatch: pytest.MonkeyPatch) -> OldStore:
    """The store as version 5 left it."""

    async def nothing(store: Store) -> None:
        pass

    with monkeypatch.context() as before:
        for module in (sqlite_schema, mongo_schema):
            before.setattr(module, "SCHEMA_VERSION", 5)
            before.setattr(module, "MIN_READER", 5)
        known = [index for index in mongo_schema.INDEXES if index.collection != mongo_schema.LOG]
        new = ("wake", "over", "attributes")
        before.setattr(mongo_schema, "INDEXES", tuple(index for index in known if index.name not in new))
        play(old, nothing)
    assert old.version() == (5, 5)
    assert "holdfast_log" not in old.tables()
    return old


def test_a_store_of_version_5_is_found_as_it_was_and_takes_runs(fifth: OldStore) -> None:
    test_every_invocation_is_found_as_it_was(fifth)

    async def scenario(store: Store) -> None:
        await store.insert([invocation("run", run=RunState(), attributes={"a": "b"})])
        assert ids_of(await store.find("shop", Filter(attributes=frozenset({("a", "b")})), 9)) == ["run"]
        assert list(await store.append([page(1, run="run")])) == [APPENDED]
        (record,) = (await store.claim(wish(ids=("run",)))).records
        assert list(await store.apply([suspended(record)])) == [APPLIED]
        assert ids_of(await store.find("shop", Filter(), 9, order=Order.WAKE_AT)) == ["run"]
        assert list(await store.apply([pushing("run")])) == [APPLIED]
        assert await store.read_log("shop", record.id, limit=9) == [page(1, run="run")]
        assert [finding.subject for finding in await store.check(deep=True) if not finding.ok] == []

    play(fifth, scenario)


def test_an_ended_call_of_version_5_is_neither_read_nor_written_by_the_migration(fifth: OldStore) -> None:
    """It has its time already; on MongoDB a look for others would read the whole collection."""
    if fifth.kind == "sqlite":
        pytest.skip("its migration adds columns and tables, and reads no row")
    with MongoClient[dict[str, Any]](fifth.url) as client:
        calls = client.get_default_database().holdfast_invocations
        calls.update_one({"status": "success"}, {"$unset": {"retain_until": ""}})
        play(fifth, _nothing)
        assert calls.count_documents({"status": "success", "retain_until": {"$exists": False}}) == 1


async def _nothing(store: Store) -> None:
    pass


def test_a_program_that_knows_version_5_is_refused(fifth: OldStore, monkeypatch: pytest.MonkeyPatch) -> None:
    play(fifth, _nothing)
    monkeypatch.setattr(sqlite_schema, "SCHEMA_VERSION", 5)
    monkeypatch.setattr(mongo_schema, "SCHEMA_VERSION", 5)
    with pytest.raises(SchemaMismatch, match=r"needs a Holdfast that knows version 6; this one knows 5\. Upgra"):
        play(fifth, _nothing)
