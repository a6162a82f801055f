"""What `holdfast store check` looks at in a SQLite file. It changes nothing."""

from __future__ import annotations

import functools
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from holdfast.errors import SchemaMismatch
from holdfast.lifecycle.decoding import shown
from holdfast.store import findings
from holdfast.store.contract import Finding
from holdfast.store.sqlite import aside, schema
from holdfast.store.sqlite.rows import entry_of, execution_of, from_row, pause_of, payload_of, piece_of, runner_of


def connect_to_look(path: Path, busy_timeout_seconds: float) -> sqlite3.Connection:
    """A connection that cannot change the file. Nor does it write back and remove a log that a crash has left:

    from that the next opening sees that it has to look closer.
    """
    return sqlite3.connect(
        f"{path.as_uri()}?mode=ro",
        uri=True,
        timeout=busy_timeout_seconds,
        isolation_level=None,
        check_same_thread=False,
    )


def inspect(connection: sqlite3.Connection, path: Path, synchronous: str, *, deep: bool) -> list[Finding]:
    version = _version(connection)
    surroundings = [_file_mode(path), *_names(path), _durability(synchronous)]
    if not version.ok:
        return [version, *surroundings]  # the tables are others than those that are known here, or not there
    return [
        version,
        *_indexes(connection),
        *surroundings,
        _quarantine(connection),
        *(_deep(connection) if deep else ()),
    ]


def _version(connection: sqlite3.Connection) -> Finding:
    try:
        found = schema.stored_version(connection)
    except SchemaMismatch as error:
        return Finding(subject="schema", ok=False, detail=str(error))
    if found is None:
        return Finding(
            subject="schema", ok=False, detail="Holdfast's tables are not there", advice="holdfast store prepare"
        )
    version, reader = found
    detail = f"version {version}, readable from version {reader}; this Holdfast knows {schema.SCHEMA_VERSION}"
    if version < schema.SCHEMA_VERSION:
        advice = "holdfast store prepare; else the first use brings it up to date"
        return Finding(subject="schema", ok=False, detail=detail, advice=advice)
    return Finding(
        subject="schema",
        ok=reader <= schema.SCHEMA_VERSION,
        detail=detail,
        advice="" if version <= schema.SCHEMA_VERSION else "a newer Holdfast wrote here; upgrade this one soon",
    )


def _indexes(connection: sqlite3.Connection) -> Iterator[Finding]:
    """Compare the indexes with those that the migrations make, in a database of their own."""
    expected = _expected_indexes()
    there = _index_definitions(connection)
    for name, definition in expected.items():
        if name not in there:
            advice = f"queries will be slow; run: {definition}"
            yield Finding(subject=f"index {name}", ok=False, detail="missing", advice=advice)
        elif there[name] != definition:
            yield Finding(
                subject=f"index {name}", ok=False, detail="differs from ours", advice=f"drop it and run: {definition}"
            )
    for name in there.keys() - expected.keys():
        yield Finding(subject=f"index {name}", ok=True, detail="not ours; every write pays for it")
    if expected.items() <= there.items():
        yield Finding(subject="indexes", ok=True, detail=f"{len(expected)} of {len(expected)} are there")


def _expected_indexes() -> dict[str, str]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as fresh:
        schema.prepare(fresh)
        return _index_definitions(fresh)


def _index_definitions(connection: sqlite3.Connection) -> dict[str, str]:
    query = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND tbl_name LIKE 'holdfast%' AND sql IS NOT NULL"
    return {name: " ".join(sql.split()) for name, sql in connection.execute(query)}


def _file_mode(path: Path) -> Finding:
    mode = stat.S_IMODE(os.stat(path).st_mode)
    private = not mode & 0o077
    what = "write it, and runners execute what they find" if mode & 0o022 else "read it"
    return Finding(
        subject="file mode",
        ok=private,
        detail=f"{path} is {mode:04o}",
        advice="" if private else f"other users of this host can {what}: chmod 600 {path}",
    )


def _names(path: Path) -> Iterator[Finding]:
    count = os.stat(path).st_nlink
    if count > 1:
        advice = "a process that opens it by another name has another log, and the two destroy it; remove the others"
        yield Finding(subject="hard links", ok=False, detail=f"{path} has {count} names", advice=advice)


def _durability(synchronous: str) -> Finding:
    full = synchronous == "full"
    return Finding(
        subject="durability",
        ok=True,
        detail=f"synchronous={synchronous}: "
        + (
            "survives a power cut" if full else "survives a crash of the process; a power cut may lose the last moments"
        ),
    )


def _quarantine(connection: sqlite3.Connection) -> Finding:
    kinds = dict(connection.execute("SELECT kind, count(*) FROM holdfast_quarantine GROUP BY kind").fetchall())
    latest = connection.execute("SELECT why FROM holdfast_quarantine ORDER BY at DESC LIMIT ?", (findings.SHOWN,))
    named = {shown(kind): count for kind, count in kinds.items()}
    return findings.set_aside(named, [shown(why) for (why,) in latest], "the table holdfast_quarantine")


def _deep(connection: sqlite3.Connection) -> Iterator[Finding]:
    try:
        problems = [row[0] for row in connection.execute("PRAGMA integrity_check(10)")]
    except sqlite3.DatabaseError as error:  # some damage ends even that
        problems = [str(error)]
    intact = problems == ["ok"]
    yield Finding(
        subject="integrity",
        ok=intact,
        detail="every page was read" if intact else "; ".join(problems),
        advice="" if intact else "keep a copy of the file and restore a backup",
    )
    if not intact:
        return  # to read on would end in an error, and what is known would not be told
    reading = findings.Reading()
    for table, decode in _DECODERS:
        for row in connection.execute(f"SELECT {', '.join(table.columns)} FROM {table.name}"):
            reading.read(functools.partial(decode, row))
    yield reading.finding()


def _entry(row: Sequence[Any]) -> None:
    findings.read_body(entry_of(row))


def _payload(row: Sequence[Any]) -> None:
    _, digest, size, pieces, _ = row
    payload_of(digest, size, pieces, b"", 0)


def _queue(row: Sequence[Any]) -> None:
    app, name, paused_at, *rest = row
    pause_of(app, (name, 0.0 if paused_at is None else paused_at, *rest))


_DECODERS: Sequence[tuple[aside.Table, Callable[[Sequence[Any]], object]]] = (
    (aside.INVOCATIONS, lambda row: from_row(row[1:])),
    (aside.RUNNERS, runner_of),
    (aside.ENTRIES, _entry),
    (aside.EXECUTIONS, lambda row: execution_of(row[1:])),
    (aside.QUEUES, _queue),
    (aside.PAYLOADS, _payload),
    (aside.PIECES, lambda row: piece_of(row[1], row[5], row[4])),
)
