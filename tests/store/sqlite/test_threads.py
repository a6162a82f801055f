"""The writer thread shares commits without sharing fates; the disk may be full; turns are fair."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import StoreError, StoreFull, StoreReadOnly, StoreUnavailable
from holdfast.model.status import Status
from holdfast.store.contract import Store, ignore
from holdfast.store.sqlite import queries, schema
from holdfast.store.sqlite.rows import to_row
from holdfast.store.sqlite.threads import WriterThread, WriteTurn
from holdfast.testing.samples import Stage, ids_of, invocation, wish


@pytest.fixture
def turn(folder: Path) -> Iterator[WriteTurn]:
    turn = WriteTurn(folder, 5.0)
    yield turn
    turn.close()


def writer_on(path: Path, turn: WriteTurn, commits: list[dict[str, Any]]) -> WriterThread:
    def connect() -> sqlite3.Connection:
        return schema.connect(path, synchronous="off", busy_timeout_seconds=1.0)

    return WriterThread("test", connect, turn, lambda event, facts: commits.append({"event": event, **facts}))


def test_what_gathers_during_a_commit_shares_the_next_one(path: Path, turn: WriteTurn) -> None:
    commits: list[dict[str, Any]] = []
    gate = threading.Event()

    async def scenario() -> None:
        writer = writer_on(path, turn, commits)
        first = asyncio.ensure_future(writer.do(lambda _: gate.wait(5)))
        others = [asyncio.ensure_future(writer.do(lambda c: c.execute("SELECT 1").fetchone())) for _ in range(20)]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, *others)
        writer.stop()

    asyncio.run(scenario())
    assert sum(commit["jobs"] for commit in commits) == 21
    assert len(commits) <= 3


def test_a_failing_job_does_not_spoil_its_neighbours(path: Path, turn: WriteTurn) -> None:
    gate = threading.Event()

    def put(number: int) -> Any:
        def job(connection: sqlite3.Connection) -> int:
            connection.execute("INSERT INTO t VALUES (?)", (number,))
            if number == 3:
                raise ZeroDivisionError("a job with a bug")
            return number

        return job

    async def scenario() -> list[Any]:
        writer = writer_on(path, turn, [])
        await writer.do(lambda connection: connection.execute("CREATE TABLE t (n UNIQUE)"))
        first = asyncio.ensure_future(writer.do(lambda _: gate.wait(5)))
        jobs = [asyncio.ensure_future(writer.do(put(number))) for number in (1, 2, 3, 4, 2, 5)]
        await asyncio.sleep(0)
        gate.set()
        await first
        answers = await asyncio.gather(*jobs, return_exceptions=True)
        answers.append(await writer.do(lambda c: [row[0] for row in c.execute("SELECT n FROM t ORDER BY n")]))
        writer.stop()
        return answers

    one, two, bug, four, duplicate, five, stored = asyncio.run(scenario())
    assert (one, two, four, five) == (1, 2, 4, 5)
    assert isinstance(bug, ZeroDivisionError)
    assert isinstance(duplicate, StoreError)
    assert stored == [1, 2, 4, 5]


def test_other_threads_share_commits_and_get_their_own_answers(path: Path, turn: WriteTurn) -> None:
    writer = writer_on(path, turn, [])
    writer.do_blocking(lambda connection: connection.execute("CREATE TABLE t (n UNIQUE)"))
    answers: dict[int, Any] = {}

    def put(number: int) -> None:
        def job(connection: sqlite3.Connection) -> int:
            connection.execute("INSERT INTO t VALUES (?)", (number,))
            return 1 // (number - 3) if number == 3 else number

        try:
            answers[number] = writer.do_blocking(job)
        except ZeroDivisionError as error:
            answers[number] = error

    threads = [threading.Thread(target=put, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = writer.do_blocking(lambda connection: connection.execute("SELECT n FROM t ORDER BY n").fetchall())
    writer.stop()
    assert isinstance(answers.pop(3), ZeroDivisionError)
    assert answers == {number: number for number in (0, 1, 2, 4, 5)}
    assert found == [(0,), (1,), (2,), (4,), (5,)]


def test_a_thread_that_comes_too_late_for_a_closed_store_is_refused(path: Path, turn: WriteTurn) -> None:
    writer = writer_on(path, turn, [])
    writer.stop()
    with pytest.raises(StoreUnavailable, match="closed meanwhile"):
        writer.do_blocking(lambda connection: connection.execute("SELECT 1"))


def test_a_caller_that_gives_up_does_not_disturb_the_others(stage: Stage) -> None:
    async def scenario(store: Store) -> None:
        inserts = [asyncio.ensure_future(store.insert([invocation(f"{n}")])) for n in range(9)]
        await asyncio.sleep(0)
        inserts[4].cancel()
        answers = await asyncio.gather(*inserts, return_exceptions=True)
        assert [n for n, answer in enumerate(answers) if answer != [True]] == [4]

    stage.play(scenario)


def test_closing_finishes_what_was_accepted(stage: Stage) -> None:
    async def write(store: Store) -> None:
        inserts = [asyncio.ensure_future(store.insert([invocation(f"{n}")])) for n in range(9)]
        await asyncio.sleep(0)
        await store.close()
        assert await asyncio.gather(*inserts) == [[True]] * 9
        with pytest.raises(StoreUnavailable, match="not open"):
            await store.get("shop", ["1"])

    async def read(store: Store) -> None:
        assert None not in await store.get("shop", [f"{n}" for n in range(9)])

    stage.play(write, read)


def test_a_frozen_process_with_the_turn_does_not_stop_the_others(path: Path, folder: Path) -> None:
    frozen, turn = WriteTurn(folder), WriteTurn(folder, 0.05)

    async def scenario() -> float:
        writer = writer_on(path, turn, [])
        with frozen:  # and it never lets go
            began = time.monotonic()
            for number in range(20):
                assert await writer.do(lambda _, number=number: number) == number  # type: ignore[misc]
            waited = time.monotonic() - began
        writer.stop()
        return waited

    assert asyncio.run(scenario()) < 1.0  # one wait for the turn, not twenty
    frozen.close()
    turn.close()


class Interrupting(sqlite3.Connection):
    """Lets somebody write before each statement of a reader."""

    before: Any = None

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if Interrupting.before is not None:
            Interrupting.before()
        return super().execute(sql, *values)


def test_counts_are_taken_at_one_moment(stage: Stage, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **kw: connect(*a, **{"factory": Interrupting, **kw}))

    async def scenario(store: Store) -> None:
        await store.insert([invocation("first")])
        meddler = connect(path, isolation_level=None, check_same_thread=False)
        numbers = iter(range(100))
        Interrupting.before = lambda: meddler.execute(
            queries.insert(1, short=False), to_row(invocation(f"{next(numbers):03}"))
        )
        try:
            counted = await store.counts("shop")
        finally:
            Interrupting.before = None
            meddler.close()
        assert counted.keys() == {Status.REGISTERED}

    stage.play(scenario)


# --- a full disk, a read-only disk


def limited(monkeypatch: pytest.MonkeyPatch, *pragmas: str) -> list[sqlite3.Connection]:
    """Every connection gets these pragmas; returns the connections."""
    real, made = schema.connect, list[sqlite3.Connection]()

    def connect(path: Path, **options: Any) -> sqlite3.Connection:
        connection = real(path, **options)
        for pragma in pragmas:
            connection.execute(pragma)
        made.append(connection)
        return connection

    monkeypatch.setattr(schema, "connect", connect)
    return made


def test_a_full_disk_is_said_and_leaves_nothing_half_written(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    connections = limited(monkeypatch, "PRAGMA max_page_count = 60")

    async def scenario(store: Store) -> None:
        assert list(await store.insert([invocation("a")])) == [True]
        batch = [invocation("b"), invocation("c", arguments=b"x" * 300_000), invocation("d")]
        with pytest.raises(StoreFull, match="free some space"):
            await store.insert(batch)
        assert ids_of(await store.get("shop", ["a", "b", "c", "d"])) == ["a", None, None, None]
        assert ids_of((await store.claim(wish("op"))).records) == ["a"]
        for connection in connections:
            connection.execute("PRAGMA max_page_count = 100000")
        assert list(await store.insert(batch)) == [True, True, True]
        assert [finding.subject for finding in await store.check(deep=True) if not finding.ok] == []

    stage.play(scenario)


def test_a_full_disk_hurts_only_the_write_that_does_not_fit(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, "PRAGMA max_page_count = 60")

    async def scenario(store: Store) -> None:
        large = invocation("large", arguments=b"x" * 300_000)
        inserts = [store.insert([record]) for record in (invocation("a"), large, invocation("b"))]
        one, two, three = await asyncio.gather(*inserts, return_exceptions=True)
        assert (one, three) == ([True], [True])
        assert isinstance(two, StoreFull)

    stage.play(scenario)


def test_a_medium_that_became_read_only_is_said(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    connections = limited(monkeypatch)

    async def scenario(store: Store) -> None:
        for connection in connections:
            connection.execute("PRAGMA query_only = ON")
        with pytest.raises(StoreReadOnly, match="cannot be written"):
            await store.insert([invocation("a")])
        assert list(await store.get("shop", ["a"])) == [None]

    stage.play(scenario)


# --- turns


def somebody_is_next(folder: Path) -> bool:
    descriptor = os.open(folder / "next.lock", os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def until_somebody_is_next(folder: Path) -> None:
    while not somebody_is_next(folder):
        time.sleep(0.001)


def test_two_writers_alternate(folder: Path) -> None:
    order: list[int] = []

    def write(name: int) -> None:
        turn = WriteTurn(folder, 5.0)
        for left in reversed(range(30)):
            with turn:
                order.append(name)
                while left and order.count(1 - name) < 30 and not somebody_is_next(folder):
                    time.sleep(0.0002)
        turn.close()

    threads = [threading.Thread(target=write, args=(name,)) for name in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = order[0]
    assert order == [first, 1 - first] * 30


def test_a_forked_child_does_not_keep_its_parents_turn(folder: Path) -> None:
    held = WriteTurn(folder)
    reader, writer = os.pipe()
    with held:
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)  # until the parent has looked
            os._exit(0)
    os.close(reader)
    held.close()  # as if the parent had died
    other = WriteTurn(folder, 0.5)
    with other:
        assert other._ours
    other.close()
    os.close(writer)
    os.waitpid(child, 0)


def test_a_program_that_holds_the_lock_of_sqlite_is_told_about(path: Path, turn: WriteTurn) -> None:
    async def scenario() -> None:
        def connect() -> sqlite3.Connection:
            return schema.connect(path, synchronous="off", busy_timeout_seconds=0.01)

        writer = WriterThread("test", connect, turn, ignore)
        await writer.do(lambda connection: connection.execute("CREATE TABLE t (n)"))
        foreign = sqlite3.connect(path, isolation_level=None)
        foreign.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match=rf"sqlite_busy_timeout_seconds.*pid {os.getpid()}\b"):
            await writer.do(lambda connection: connection.execute("INSERT INTO t VALUES (1)"))
        foreign.close()
        await writer.do(lambda connection: connection.execute("INSERT INTO t VALUES (1)"))
        writer.stop()

    asyncio.run(scenario())
