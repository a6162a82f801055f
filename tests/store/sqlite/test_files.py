"""Files that are deleted in the middle of a transaction: what is not certain is not acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sqlite3
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.clock import Clock
from holdfast.errors import StoreUnavailable
from holdfast.store.contract import Observe, Store
from holdfast.store.sqlite import invocations, threads
from holdfast.store.sqlite.store import SqliteStore
from holdfast.testing.samples import Stage, ids_of, invocation

OTHER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA journal_mode = WAL")
connection.execute("CREATE TABLE IF NOT EXISTS theirs (n)")
connection.executemany("INSERT INTO theirs VALUES (?)", [(b"y" * 3000,)] * 50)
"""


def log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def deleting(file: Path, id: str) -> Callable[[sqlite3.Connection], list[bool]]:
    """A job that inserts, and loses a file before its commit."""

    def job(connection: sqlite3.Connection) -> list[bool]:
        done = invocations.insert(connection, [invocation(id)])
        os.unlink(file)
        return done

    return job


def play(stage: Stage, scenario: Callable[[SqliteStore], Any]) -> None:
    async def typed(store: Store) -> None:
        assert isinstance(store, SqliteStore)
        await scenario(store)

    stage.play(typed)


def test_a_commit_into_a_log_that_was_deleted_meanwhile_is_not_acknowledged(stage: Stage, path: Path) -> None:
    async def scenario(store: SqliteStore) -> None:
        await store.insert([invocation("before")])
        with pytest.raises(StoreUnavailable, match="not known what became of this write"):
            await store._write(deleting(log_of(path), "meanwhile"))
        assert list(await store.insert([invocation("meanwhile")])) == [True], "repeated by its operation id"
        assert ids_of(await store.get("shop", ["before", "meanwhile"])) == ["before", "meanwhile"]
        assert log_of(path).exists()
        assert not [finding for finding in await store.check(deep=True) if not finding.ok]

    play(stage, scenario)
    assert [event for event, _ in stage.reports if event != "commit"] == ["log_renewed"]


def test_a_commit_into_a_database_that_was_deleted_meanwhile_is_not_acknowledged(stage: Stage, path: Path) -> None:
    async def scenario(store: SqliteStore) -> None:
        with pytest.raises(StoreUnavailable, match="was removed or replaced"):
            await store._write(deleting(path, "meanwhile"))
        with pytest.raises(StoreUnavailable, match="was removed or replaced"):
            await store.get("shop", ["meanwhile"])

    play(stage, scenario)
    assert not path.exists()


def test_an_error_of_sqlite_after_the_log_was_deleted_is_not_the_end(stage: Stage, path: Path) -> None:
    """To SQLite it looks like a damaged disk."""
    turns: list[int] = []

    def job(connection: sqlite3.Connection) -> list[bool]:
        turns.append(1)
        if len(turns) == 1:
            log_of(path).unlink()
            raise sqlite3.OperationalError("disk I/O error")
        return invocations.insert(connection, [invocation("a")])

    async def scenario(store: SqliteStore) -> None:
        assert await store._write(job) == [True]
        assert ids_of(await store.get("shop", ["a"])) == ["a"]

    play(stage, scenario)


def test_nobody_of_a_group_is_acknowledged_if_one_of_them_was_and_then_the_log_was_deleted(
    stage: Stage, path: Path
) -> None:
    """A job that fails makes each of its group a transaction of its own."""
    began, gate, deleted = threading.Event(), threading.Event(), list[str]()

    def first(connection: sqlite3.Connection) -> None:
        began.set()
        assert gate.wait(30)

    def failing(connection: sqlite3.Connection) -> None:
        deleted.append("at its second turn")
        if len(deleted) == 2:
            log_of(path).unlink()
        raise ZeroDivisionError

    async def scenario(store: SqliteStore) -> None:
        await store.insert([invocation("before")])
        alone = asyncio.ensure_future(store._write(first))
        assert await asyncio.to_thread(began.wait, 30)
        wishes = [store.insert([invocation("a")]), store._write(failing), store.insert([invocation("b")])]
        group = [asyncio.ensure_future(wish) for wish in wishes]
        await asyncio.sleep(0)
        gate.set()
        await alone
        answers = await asyncio.gather(*group, return_exceptions=True)
        assert [type(answer) for answer in answers] == [StoreUnavailable] * 3
        assert list(await store.insert([invocation("a"), invocation("b")])) == [True, True]
        assert ids_of(await store.get("shop", ["before", "a", "b"])) == ["before", "a", "b"]

    play(stage, scenario)


def test_a_read_is_not_believed_if_the_file_was_replaced(stage: Stage, path: Path) -> None:
    async def scenario(store: SqliteStore) -> None:
        await store.insert([invocation("a")])
        os.rename(path, path.with_name("away.db"))
        with pytest.raises(StoreUnavailable, match="was removed or replaced"):
            await store.get("shop", ["a"])
        os.rename(path.with_name("away.db"), path)
        assert ids_of(await store.get("shop", ["a"])) == ["a"], "it is back"

    play(stage, scenario)


def test_an_index_that_others_go_on_without_is_given_up(stage: Stage, path: Path) -> None:
    """By an index of its own each would write over what the other wrote to the log."""

    async def scenario(store: SqliteStore) -> None:
        await store.insert([invocation("before")])
        path.with_name(path.name + "-shm").unlink()
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", OTHER, str(path))
        assert await process.wait() == 0
        assert list(await store.insert([invocation("after")])) == [True]
        assert ids_of(await store.get("shop", ["before", "after"])) == ["before", "after"]
        assert await store._read(lambda c: c.execute("SELECT count(*) FROM theirs").fetchone()) == (50,)
        assert not [finding for finding in await store.check(deep=True) if not finding.ok]

    play(stage, scenario)
    assert [event for event, _ in stage.reports if event != "commit"] == ["log_renewed"]


def test_a_new_log_is_not_read_by_the_old_index_of_the_users_connection(path: Path) -> None:
    """The user reads, so that not all of the old log can be written back."""

    async def scenario(store: SqliteStore) -> None:
        theirs = sqlite3.connect(path, isolation_level=None)
        theirs.execute("BEGIN")
        assert theirs.execute("SELECT count(*) FROM holdfast_invocations").fetchone() == (0,)
        await store.insert([invocation("a", arguments=b"x" * 50_000)])
        for name in ("-wal", "-shm"):
            path.with_name(path.name + name).unlink()
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=r"other connections of this process"):
                await store.insert([invocation("b")])
            assert not os.path.exists(log_of(path))  # noqa: ASYNC240
        theirs.close()  # SQLite itself writes back the log that it has open
        assert list(await store.insert([invocation("b")])) == [True]
        assert ids_of(await store.get("shop", ["a", "b"])) == ["a", "b"]

    def open_store(clock: Clock, observe: Observe) -> SqliteStore:
        return SqliteStore(path, clock=clock, observe=observe, synchronous="normal", busy_timeout_seconds=0.2)

    play(Stage(open_store), scenario)


def test_tables_that_are_gone_with_the_log_are_said(stage: Stage, path: Path) -> None:
    async def scenario(store: SqliteStore) -> None:
        await store.insert([invocation("a")])
        for name in ("-wal", "-shm"):
            path.with_name(path.name + name).unlink()
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", OTHER, str(path))
        assert await process.wait() == 0
        with pytest.raises(StoreUnavailable, match=r"tables .* are gone.*Restore a backup"):
            await store.insert([invocation("b")])

    play(stage, scenario)


def test_a_log_that_others_go_on_without_is_not_written_back(stage: Stage, path: Path) -> None:
    """Somebody else has begun a new log meanwhile. To write the old one back would destroy his pages."""

    async def scenario(store: SqliteStore) -> None:
        await store._read(lambda connection: connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall())
        await store.insert([invocation("lost with its log", arguments=b"x" * 50_000)])
        for name in ("-wal", "-shm"):
            path.with_name(path.name + name).unlink()
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", OTHER, str(path))
        assert await process.wait() == 0
        assert list(await store.insert([invocation("after")])) == [True]
        assert ids_of(await store.get("shop", ["after"])) == ["after"]
        assert await store._read(lambda c: c.execute("SELECT count(*) FROM theirs").fetchone()) == (50,)
        assert not [finding for finding in await store.check(deep=True) if not finding.ok]

    play(stage, scenario)
    assert [event for event, _ in stage.reports if event != "commit"] == ["log_lost"]


# --- a database that has changed since its log was deleted: by a checkpoint, or by a restore

CHECKPOINT = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
for mode in sys.argv[2].split():
    connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
    if mode == "RESTART":
        connection.execute("CREATE TABLE IF NOT EXISTS theirs (n)")
        connection.execute("INSERT INTO theirs VALUES (?)", [b"y" * 9000])
"""


async def run_python(code: str, *words: str) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, *words)
    assert await process.wait() == 0


@pytest.mark.parametrize(
    "mode", ["PASSIVE", "RESTART", "RESTART PASSIVE", "RESTART RESTART", "RESTART RESTART PASSIVE"]
)
def test_a_deleted_log_is_written_back_after_another_process_made_a_checkpoint(
    stage: Stage, path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The store has not looked since the checkpoint, so it sees a database that has changed."""
    monkeypatch.setattr(threads, "_IDLE_SECONDS", 1e6)

    async def scenario(store: SqliteStore) -> None:
        await store.insert([invocation("before")])
        await store.insert([invocation("large", arguments=b"x" * 50_000)])
        await run_python(CHECKPOINT, str(path), mode)
        log_of(path).unlink()
        assert list(await store.insert([invocation("after")])) == [True]
        assert ids_of(await store.get("shop", ["before", "after"])) == ["before", "after"]
        theirs = await store._read(lambda c: c.execute("SELECT 1 FROM sqlite_master WHERE name = 'theirs'").fetchall())
        assert len(theirs) == ("RESTART" in mode)
        assert not [finding for finding in await store.check(deep=True) if not finding.ok]

    play(stage, scenario)
    assert [event for event, _ in stage.reports if event != "commit"] == ["log_renewed"]


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("names", [["-wal"], ["-wal", "-shm"]], ids="+".join)
def test_a_deleted_log_is_not_written_into_a_restored_database(
    stage: Stage, path: Path, tmp_path: Path, names: list[str], is_checkpointed: bool
) -> None:
    """As ``rm shop.db-wal; cp backup.db shop.db`` does under a running process: the file keeps its inode."""
    backup = tmp_path / "backup.db"

    async def scenario(store: SqliteStore) -> None:
        await store.insert([invocation("kept")])
        await store.backup(backup)
        await store.insert([invocation(f"{number:03}", arguments=b"x" * 5000) for number in range(100)])
        if is_checkpointed:
            await store._read(lambda connection: connection.execute("PRAGMA wal_checkpoint").fetchall())
            await store.insert([invocation("the last")])
        for name in names:
            path.with_name(path.name + name).unlink()
        with path.open("r+b") as restored:
            restored.write(backup.read_bytes())
            restored.truncate()
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="was removed or replaced"):
                await store.insert([invocation("refused")])
        assert "was replaced" in store.needs_restart()

    play(stage, scenario)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("SELECT id FROM holdfast_invocations").fetchall() == [("kept",)]


# --- a folder that cannot be entered for a while: a mount that is away, rights that are changed


def test_a_folder_that_is_away_for_a_while_is_a_store_that_is_away(folder: Path) -> None:
    """The system says neither that the files are there nor that they are not. Nothing was lost, so it goes on."""
    data, elsewhere = folder / "data", folder / "elsewhere"
    data.mkdir()

    async def scenario(store: SqliteStore) -> None:
        await store.insert([invocation("before")])
        data.rename(elsewhere)
        data.touch()  # NotADirectoryError: what is below it
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="cannot be reached: Not a directory"):
                await store.insert([invocation("meanwhile")])
            with pytest.raises(StoreUnavailable, match="cannot be reached: Not a directory"):
                await store.get("shop", ["before"])
        with pytest.raises(StoreUnavailable, match="cannot be reached: Not a directory"):
            store.joined(sqlite3.connect(elsewhere / "store.db"))
        data.unlink()
        elsewhere.rename(data)
        assert list(await store.insert([invocation("after")])) == [True]
        assert ids_of(await store.get("shop", ["before", "meanwhile", "after"])) == ["before", None, "after"]

    play(Stage(opening(data / "store.db")), scenario)


def test_a_store_is_closed_while_its_folder_is_away(folder: Path) -> None:
    data, elsewhere = folder / "data", folder / "elsewhere"
    data.mkdir()

    async def scenario(store: SqliteStore) -> None:
        await store.insert([invocation("before")])
        data.rename(elsewhere)
        data.touch()
        await store.close()
        data.unlink()
        elsewhere.rename(data)
        await store.open()
        assert ids_of(await store.get("shop", ["before"])) == ["before"]

    play(Stage(opening(data / "store.db")), scenario)


def test_a_commit_after_which_the_folder_is_away_is_not_acknowledged(folder: Path) -> None:
    data, elsewhere = folder / "data", folder / "elsewhere"
    data.mkdir()

    def job(connection: sqlite3.Connection) -> list[bool]:
        done = invocations.insert(connection, [invocation("meanwhile")])
        data.rename(elsewhere)
        data.touch()
        return done

    async def scenario(store: SqliteStore) -> None:
        with pytest.raises(StoreUnavailable, match="not known what became of this write"):
            await store._write(job)
        data.unlink()
        elsewhere.rename(data)
        assert await store.insert([invocation("meanwhile")])
        assert ids_of(await store.get("shop", ["meanwhile"])) == ["meanwhile"]

    play(Stage(opening(data / "store.db")), scenario)


def test_an_error_of_the_system_in_a_thread_of_the_store_is_one_of_the_store(stage: Stage) -> None:
    """As of a lock beside the database, on a disk that fails."""

    def job(connection: sqlite3.Connection) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async def scenario(store: SqliteStore) -> None:
        for ask in (store._write, store._read):
            with pytest.raises(StoreUnavailable, match="Input/output error"):
                await ask(job)

    play(stage, scenario)


def opening(path: Path) -> Callable[[Clock, Observe], SqliteStore]:
    return lambda clock, observe: SqliteStore(
        path, clock=clock, observe=observe, synchronous="normal", busy_timeout_seconds=0.2
    )
