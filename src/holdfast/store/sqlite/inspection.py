"""What `holdfast store check` looks at in a SQLite file. It changes nothing."""

from __future__ import annotations

import functools
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from holdfast.errors import SchemaMismatch
from holdfast.model.decoding import shown
from holdfast.model.records import read_body
from holdfast.store import findings
from holdfast.store.contract import Finding, Observe
from holdfast.store.sqlite import quarantine, schema
from holdfast.store.sqlite.logs import page_of
from holdfast.store.sqlite.paths import mode_of
from holdfast.store.sqlite.rows import entry_of, from_row, payload_of, piece_of, runner_of

QUICK_BYTES = 64 * 2**20  # takes less than a second to read


def connect_to_look(path: Path, busy_timeout_seconds: float) -> sqlite3.Connection:
    """Return a connection that cannot change the file. Nor does it write back and remove a log that a crash has left:

    from that the next opening sees that it has to look closer.
    """
    more = {"uri": True, "timeout": busy_timeout_seconds, "isolation_level": None, "check_same_thread": False}
    return sqlite3.connect(f"{path.as_uri()}?mode=ro", **more)  # type: ignore[arg-type]


def _finding(subject: str, ok: bool, detail: str, advice: str = "") -> Finding:
    return Finding(subject=subject, ok=ok, detail=detail, advice=advice)


def inspect(
    connection: sqlite3.Connection, path: Path, synchronous: str, *, deep: bool, observe: Observe
) -> list[Finding]:
    version, pages = _version(connection), _pages(connection, deep=deep)
    library = _finding("SQLite", True, f"library {sqlite3.sqlite_version}")
    around = [library, _file_mode(path), *_names(path), _durability(synchronous)]
    if not version.ok or not pages.ok:
        # Tables are unknown or missing, or cannot be read.
        return [version, *around, pages]
    records = [_records(connection, observe)] if deep else []
    return [version, *_indexes(connection), *around, _quarantine(connection), pages, *records]


def _version(connection: sqlite3.Connection) -> Finding:
    try:
        found = schema.stored_version(connection)
    except SchemaMismatch as error:
        return _finding("schema", False, str(error))
    if found is None:
        return _finding("schema", False, "Holdfast's tables are not there", "holdfast store prepare")
    (version, reader), known = found, schema.SCHEMA_VERSION
    detail = f"version {version}, readable from version {reader}; this Holdfast knows {known}"
    if version < known:
        return _finding("schema", False, detail, "holdfast store prepare; else the first use brings it up to date")
    newer = "a newer Holdfast wrote here; upgrade this one soon"
    return _finding("schema", reader <= known, detail, "" if version <= known else newer)


def _indexes(connection: sqlite3.Connection) -> Iterator[Finding]:
    """Compare the indexes with those that the migrations make, in their own database."""
    expected = _expected_indexes()
    there = _index_definitions(connection)
    for name, definition in expected.items():
        if name not in there:
            yield _finding(f"index {name}", False, "missing", f"queries will be slow; run: {definition}")
        elif there[name] != definition:
            yield _finding(f"index {name}", False, "differs from ours", f"drop it and run: {definition}")
    for name in there.keys() - expected.keys():
        yield _finding(f"index {name}", True, "not ours; every write pays for it")
    if expected.items() <= there.items():
        yield _finding("indexes", True, f"{len(expected)} of {len(expected)} are there")


def _expected_indexes() -> dict[str, str]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as fresh:
        schema.prepare(fresh)
        return _index_definitions(fresh)


def _index_definitions(connection: sqlite3.Connection) -> dict[str, str]:
    query = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND tbl_name LIKE 'holdfast%' AND sql IS NOT NULL"
    return {name: " ".join(sql.split()) for name, sql in connection.execute(query)}


def _file_mode(path: Path) -> Finding:
    """Report whether other users can write the file. Reading alone is a warning. SQLite gives its log the same mode."""
    modes = {f"{path}{name}": mode_of(f"{path}{name}") for name in ("", "-wal", "-shm")}
    exposed = [name for name, mode in modes.items() if mode & 0o066]
    can_write = any(mode & 0o022 for mode in modes.values())
    what = "write it, and runners execute what they find" if can_write else "read it"
    advice = f"other users of this host can {what}: chmod 600 {' '.join(exposed)}" if exposed else ""
    return _finding("file mode", not can_write, f"{path} is {modes[f'{path}']:04o}", advice)


def _names(path: Path) -> Iterator[Finding]:
    if (count := os.stat(path).st_nlink) > 1:
        advice = "a process that opens it by another name has another log, and the two destroy it; remove the others"
        yield _finding("hard links", False, f"{path} has {count} names", advice)


def _durability(synchronous: str) -> Finding:
    less = "survives a crash of the process; a power cut may lose the last moments"
    return _finding(
        "durability", True, f"synchronous={synchronous}: {'survives a power cut' if synchronous == 'full' else less}"
    )


def _quarantine(connection: sqlite3.Connection) -> Finding:
    kinds = dict(connection.execute("SELECT kind, count(*) FROM holdfast_quarantine GROUP BY kind").fetchall())
    latest = connection.execute("SELECT why FROM holdfast_quarantine ORDER BY at DESC LIMIT ?", (findings.SHOWN,))
    named = {shown(kind): count for kind, count in kinds.items()}
    return findings.set_aside(named, [shown(why) for (why,) in latest], "the table holdfast_quarantine")


def _pages(connection: sqlite3.Connection, *, deep: bool) -> Finding:
    """Read every page, if that is asked for or takes a moment only."""
    ((count,),), ((page,),) = (connection.execute(f"PRAGMA {name}").fetchall() for name in ("page_count", "page_size"))
    if not deep and count * page > QUICK_BYTES:
        detail = f"the pages of the file, {count * page // 2**20:,} MB, were not read"
        return replace(_finding("integrity", True, detail, "holdfast store check --deep"), checked=False)
    try:
        problems = [row[0] for row in connection.execute(f"PRAGMA {'integrity' if deep else 'quick'}_check(10)")]
    except sqlite3.DatabaseError as error:  # some damage ends even that
        problems = [str(error)]
    intact = problems == ["ok"]
    compared = "" if deep else "; indexes were not compared with their tables, which --deep does"
    if intact:
        return _finding("integrity", True, f"every page was read{compared}")
    found = "; ".join(line for problem in problems for line in problem.splitlines())
    return _finding("integrity", False, found, "keep a copy of the file and restore a backup")


def _records(connection: sqlite3.Connection, observe: Observe) -> Finding:
    reading = findings.Reading(lambda count: observe("walked", {"count": count}))
    for table, decode in _DECODERS:
        columns, key = ", ".join(table.columns), ", ".join(table.key)
        for row in connection.execute(f"SELECT {columns} FROM {table.name} ORDER BY {key}"):
            reading.read(functools.partial(decode, row))
    for page, expected in reading.after_gaps:
        reading.count_gap(page, expected)
    return reading.finding()


def _entry(row: Sequence[Any]) -> None:
    read_body(entry_of(row))


def _payload(row: Sequence[Any]) -> None:
    _, digest, size, pieces, _ = row
    payload_of(digest, size, pieces, b"", 0)


_DECODERS: Sequence[tuple[quarantine.Table, Callable[[Sequence[Any]], object]]] = (
    (quarantine.INVOCATIONS, lambda row: from_row(row[1:])),
    (quarantine.RUNNERS, runner_of),
    (quarantine.ENTRIES, _entry),
    (quarantine.LOG, page_of),
    (quarantine.PAYLOADS, _payload),
    (quarantine.PIECES, lambda row: piece_of(row[1], row[5], row[4])),
)
