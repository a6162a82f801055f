"""What has ended on SQLite is removed by upkeep, in batches."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

from holdfast.archive.retention import AT_ONCE, remove_expired
from holdfast.model.records import RETENTION_SECONDS, Terms
from holdfast.store import open_store
from holdfast.store.contract import Filter, Store, ignore
from holdfast.telemetry.logs import logging_telemetry
from holdfast.testing.clock import FakeClock
from holdfast.testing.conformance_archive import DAY, end
from holdfast.testing.samples import START, invocation, the


def store_at(path: Path, clock: FakeClock) -> Store:
    return open_store(f"sqlite:///{path}", clock=clock, observe=ignore)


def test_what_an_older_version_has_ended_is_told_how_long_it_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"

    async def scenario() -> None:
        store = store_at(path, FakeClock(START))
        await store.open()
        for number in range(5):
            await end(store, f"{number}", terms=Terms(retention={"success": DAY}) if number == 3 else Terms())
        await store.insert([invocation("live")])

        def forget() -> None:
            with closing(sqlite3.connect(path)) as connection:
                connection.execute("UPDATE holdfast_invocations SET retain_until = NULL")
                connection.execute("UPDATE holdfast_meta SET value = '4' WHERE key = 'schema_version'")
                connection.execute("DROP TABLE holdfast_log")  # version 6 makes it, and these
                connection.execute("DROP INDEX holdfast_wake")
                connection.execute("DROP INDEX holdfast_entries_subject")
                for trigger in ("new", "gone", "set"):  # version 8
                    connection.execute(f"DROP TRIGGER holdfast_entries_payloads_{trigger}")
                connection.execute("ALTER TABLE holdfast_entries DROP COLUMN subject")
                connection.execute("ALTER TABLE holdfast_entries DROP COLUMN payloads")
                for trigger in ("new", "gone", "set"):
                    connection.execute(f"DROP TRIGGER holdfast_attributes_{trigger}")
                connection.execute("DROP TABLE holdfast_attributes")
                for column in ("reply_to", "run", "wake_at", "attributes", "has_streams", "waiting", "notes"):
                    connection.execute(f"ALTER TABLE holdfast_invocations DROP COLUMN {column}")
                connection.commit()

        await store.close()
        forget()
        await store.open()
        kept = [(await the(store, f"{number}")).retain_until for number in range(5)]
        assert kept == [START + (DAY if number == 3 else RETENTION_SECONDS) for number in range(5)]
        assert (await the(store, "live")).retain_until is None
        await store.close()

    asyncio.run(scenario())


def test_upkeep_removes_what_is_over_in_bounded_writes(tmp_path: Path) -> None:
    clock = FakeClock(START)
    commits: list[int] = []

    async def scenario() -> None:
        store = open_store(
            f"sqlite:///{tmp_path / 'shop.db'}",
            clock=clock,
            observe=lambda event, facts: commits.append(facts["rows"]) if event == "commit" else None,
        )
        await store.open()
        await end(store, "a")
        await end(store, "live", at=START + DAY)
        with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
            columns = [row[1] for row in connection.execute("PRAGMA table_info(holdfast_invocations)")]
            copied = ", ".join(f"printf('a%05d', n) AS {name}" if name == "id" else name for name in columns)
            connection.execute(
                f"WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {2 * AT_ONCE})"
                f" INSERT INTO holdfast_invocations ({', '.join(columns)})"
                f" SELECT {copied} FROM numbers, holdfast_invocations WHERE id = 'a'"
            )
            connection.commit()
        assert not await remove_expired(store, "shop", logging_telemetry())
        assert (await store.counts("shop"))["success"] == 2 * AT_ONCE + 2  # type: ignore[index]
        clock.advance(RETENTION_SECONDS + 1)
        commits.clear()
        assert not await remove_expired(store, "shop", logging_telemetry())
        assert [rows for rows in commits if rows] == [AT_ONCE, AT_ONCE, 1]
        assert [record.id for record in await store.find("shop", Filter(), 10)] == ["live"]
        await store.close()

    asyncio.run(scenario())
