"""A file is trusted only after a look at it and at where it lies."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.clock import SystemClock
from holdfast.errors import (
    ConfigurationError,
    SchemaMismatch,
    StoreError,
    StoreReadOnly,
    StoreUnavailable,
    UnsafeStore,
    UnsupportedFileSystem,
)
from holdfast.model import changes
from holdfast.model.records import RETENTION_SECONDS, Entry
from holdfast.store.contract import Filter, Order, Store, ignore
from holdfast.store.sqlite import path_of, paths, schema
from holdfast.store.sqlite.paths import create_file, file_system_of, refuse_network_file_system, side_folder
from holdfast.store.sqlite.rows import COLUMNS, to_row
from holdfast.store.sqlite.schema import SCHEMA_VERSION
from holdfast.store.sqlite.store import SqliteStore
from holdfast.testing.samples import START, Stage, ids_of, invocation, the, wish

Meddle = Callable[..., list[Any]]


def store_at(path: Path) -> SqliteStore:
    return SqliteStore(path, clock=SystemClock(), observe=ignore, synchronous="full", busy_timeout_seconds=1.0)


def open_and_close(path: Path) -> None:
    async def scenario() -> None:
        store = store_at(path)
        await store.open()
        await store.close()

    asyncio.run(scenario())


# --- versions


def test_a_fresh_file_gets_the_whole_schema(path: Path, meddle: Meddle) -> None:
    open_and_close(path)
    assert dict(meddle("SELECT key, value FROM holdfast_meta")) == {
        "schema_version": str(SCHEMA_VERSION),
        "min_reader": str(schema.MIN_READER),
    }
    open_and_close(path)  # and once more, which changes nothing


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_of_an_older_version_is_brought_up_to_date_and_goes_on(
    stage: Stage, meddle: Meddle, version: int
) -> None:
    for statement in [each for step in range(1, version + 1) for each in schema.MIGRATIONS[step]]:
        assert isinstance(statement, str)
        meddle(statement)
    meddle("INSERT INTO holdfast_meta VALUES ('schema_version', ?), ('min_reader', '1')", str(version))
    there = {row[1] for row in meddle("PRAGMA table_info(holdfast_invocations)")}
    for old in (invocation("a"), invocation("b")):
        row = {name: value for name, value in zip(COLUMNS, to_row(old), strict=True) if name in there}
        places = ", ".join("?" * len(row))
        meddle(f"INSERT INTO holdfast_invocations ({', '.join(row)}) VALUES ({places})", *row.values())

    async def scenario(store: Store) -> None:
        assert await the(store, "a") == invocation("a")
        records = (await store.claim(wish())).records
        ends = [changes.completed(r, result=b"", operation=f"end {r.id}", at=START) for r in records]
        await store.apply([ends[0], replace(ends[1], outbox=("t",))])
        assert ids_of(await store.find("shop", Filter(), 9, order=Order.OUTBOX, set_aside=True)) == ["b"]
        assert await store.put_entry(Entry(app="shop", kind="event", name="e", body=b"", keep_until=START))
        assert await store.remove_expired("shop", START + RETENTION_SECONDS, 9) == 2
        assert ids_of(await store.get("shop", ["a", "b"])) == [None, "b"]

    stage.play(scenario)
    assert meddle("SELECT value FROM holdfast_meta WHERE key = 'schema_version'") == [(str(SCHEMA_VERSION),)]


def test_the_tables_live_beside_an_applications_own(path: Path, meddle: Meddle) -> None:
    meddle("CREATE TABLE orders (id)")
    meddle("INSERT INTO orders VALUES (42)")
    open_and_close(path)
    assert meddle("SELECT id FROM orders") == [(42,)]


def test_a_schema_that_needs_a_newer_holdfast_is_refused(path: Path, meddle: Meddle) -> None:
    open_and_close(path)
    meddle("UPDATE holdfast_meta SET value = '9' WHERE key = 'schema_version'")
    meddle("UPDATE holdfast_meta SET value = ? WHERE key = 'min_reader'", str(SCHEMA_VERSION + 1))
    with pytest.raises(SchemaMismatch, match=r"schema version 9.*Upgrade Holdfast"):
        open_and_close(path)


def test_a_store_that_is_migrated_while_it_is_open_is_not_called_gone(path: Path, meddle: Meddle) -> None:
    """A new connection of a runner that went on through an upgrade: it is to upgrade, not to restore a backup."""

    async def scenario() -> None:
        store = store_at(path)
        await store.open()
        try:
            meddle("UPDATE holdfast_meta SET value = ?", str(SCHEMA_VERSION + 1))
            with pytest.raises(SchemaMismatch, match="Upgrade Holdfast here"):
                await store.transaction(is_async=False).begin()
        finally:
            await store.close()

    asyncio.run(scenario())


def test_a_newer_schema_that_we_can_read_is_accepted_and_kept(stage: Stage, meddle: Meddle) -> None:
    async def write(store: Store) -> None:
        await store.insert([invocation("a")])

    async def read(store: Store) -> None:
        assert (await the(store)).id == "a"

    stage.play(write)
    meddle("UPDATE holdfast_meta SET value = '9' WHERE key = 'schema_version'")
    meddle("ALTER TABLE holdfast_invocations ADD COLUMN from_the_future TEXT")
    stage.play(read, write)
    assert meddle("SELECT value FROM holdfast_meta WHERE key = 'schema_version'") == [("9",)]


@pytest.mark.parametrize(
    "statement", ["CREATE TABLE holdfast_invocations (x)", "CREATE VIEW holdfast_jobs AS SELECT 1"]
)
def test_names_of_ours_without_a_version_are_refused(path: Path, meddle: Meddle, statement: str) -> None:
    meddle(statement)
    with pytest.raises(SchemaMismatch, match="but no holdfast_meta"):
        open_and_close(path)
    assert meddle("SELECT count(*) FROM sqlite_master") == [(1,)]


@pytest.mark.parametrize("rows", ["", "('schema_version', '1')", "('schema_version', 'x'), ('min_reader', '1')"])
def test_a_version_that_cannot_be_read_is_refused(path: Path, meddle: Meddle, rows: str) -> None:
    meddle("CREATE TABLE holdfast_meta (key, value)")
    if rows:
        meddle(f"INSERT INTO holdfast_meta VALUES {rows}")
    with pytest.raises(SchemaMismatch, match="does not have the schema's version"):
        open_and_close(path)


def test_a_migration_that_fails_leaves_nothing(path: Path, meddle: Meddle, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [*schema.MIGRATIONS[1], "CREATE TABLE holdfast_meta (twice)"]
    monkeypatch.setitem(schema.MIGRATIONS, 1, broken)
    with pytest.raises(StoreError):
        open_and_close(path)
    assert meddle("SELECT count(*) FROM sqlite_master") == [(0,)]
    monkeypatch.undo()
    open_and_close(path)


def test_two_processes_may_prepare_a_file_at_once(path: Path) -> None:
    async def scenario() -> None:
        stores = [store_at(path) for _ in range(4)]
        await asyncio.gather(*[store.open() for store in stores])
        for number, store in enumerate(stores):
            await store.insert([invocation(f"{number}")])
        assert None not in await stores[0].get("shop", ["0", "1", "2", "3"])
        for store in stores:
            await store.close()

    asyncio.run(scenario())


# --- the file


def test_a_file_that_is_no_database_is_refused_and_kept(path: Path) -> None:
    text = b"Dear diary, " * 1000
    path.write_bytes(text)
    with pytest.raises(SchemaMismatch, match="no SQLite database"):
        open_and_close(path)
    assert path.read_bytes() == text


def test_a_missing_folder_is_said(folder: Path) -> None:
    with pytest.raises(StoreUnavailable, match="does not exist"):
        open_and_close(folder / "missing" / "store.db")


def test_a_folder_is_no_store(folder: Path) -> None:
    with pytest.raises(StoreUnavailable, match="is a folder"):
        open_and_close(folder)


@pytest.fixture
def nobody() -> Iterator[None]:
    """Root may write anywhere, so become somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_that_may_not_be_written_is_said(folder: Path, nobody: None) -> None:
    with pytest.raises(StoreReadOnly, match="cannot be written by this user"):
        create_file(Path("/etc/passwd"))


def test_a_file_on_a_read_only_medium_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "mknod", refuse)
        with pytest.raises(StoreReadOnly, match="Read-only file system"):
            create_file(path)


def test_a_folder_that_may_not_be_written_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    with pytest.raises(StoreReadOnly, match="keeps its log beside the file"):
        create_file(path)


def test_the_files_are_for_their_owner_alone(path: Path) -> None:
    async def scenario() -> dict[str, int]:
        store = store_at(path)
        await store.open()
        await store.insert([invocation("a")])
        names = [path, *path.parent.glob("store.db-*"), *side_folder(path).iterdir()]
        modes = {name.name: stat.S_IMODE(name.stat().st_mode) for name in names}
        await store.close()
        return modes

    before = os.umask(0)
    try:
        modes = asyncio.run(scenario())
    finally:
        os.umask(before)
    assert {"store.db", "store.db-wal", "store.db-shm", "store.db-holdfast"} <= modes.keys()
    assert modes.pop("store.db-holdfast") == 0o700
    assert set(modes.values()) == {0o600}


def test_a_file_that_others_may_read_is_reported(stage: Stage, path: Path) -> None:
    async def scenario(store: Store) -> None:
        os.chmod(path, 0o644)
        (mode,) = [finding for finding in await store.check() if finding.subject == "file mode"]
        assert (mode.ok, mode.advice) == (True, f"other users of this host can read it: chmod 600 {path}")
        os.chmod(f"{path}-wal", 0o660)
        (mode,) = [finding for finding in await store.check() if not finding.ok]
        assert (mode.subject, mode.advice.partition(": ")[2]) == ("file mode", f"chmod 600 {path} {path}-wal")

    stage.play(scenario)


def test_a_damaged_file_that_was_left_open_is_refused_and_not_touched(stage: Stage, path: Path, folder: Path) -> None:
    """The first start after a crash looks at the file before it writes to it."""

    async def write(store: Store) -> None:
        await store.insert([invocation(f"{n}", arguments=b"x" * 5000) for n in range(50)])

    stage.play(write)
    damaged = bytearray(path.read_bytes())
    for page in range(8, 40):
        damaged[page * 4096 : page * 4096 + 16] = b"\xa5" * 16
    path.write_bytes(damaged)
    path.with_name("store.db-wal").write_bytes(b"\0" * 32)  # as a process that died would leave it
    with pytest.raises(StoreError, match=r"damaged|malformed"):
        open_and_close(path)
    assert path.read_bytes() == damaged


# --- where it lies

MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
server:/home /home nfs4 rw,vers=4.2 0 0
/dev/sdb1 /home/local ext4 rw 0 0
//nas/share /mnt/nas cifs rw 0 0
me@host: /mnt/ssh fuse.sshfs rw 0 0
//nas/x /mnt/my\\040files\\134old cifs rw 0 0
tmpfs /over tmpfs rw 0 0
server:/over /over nfs rw 0 0
server:/file /srv/store.db nfs rw 0 0
half a-line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/shop.db", "ext4"),
        ("/home/me/shop.db", "nfs4"),
        ("/home/local/shop.db", "ext4"),
        ("/home/localised/shop.db", "nfs4"),
        ("/homestead/shop.db", "ext4"),
        ("/mnt/nas/a/b/shop.db", "cifs"),
        ("/mnt/ssh/shop.db", "fuse.sshfs"),
        ("/mnt/my files\\old/shop.db", "cifs"),
        ("/over/shop.db", "nfs"),
        ("/srv/store.db", "nfs"),
        ("/srv/store.db2", "ext4"),
    ],
)
def test_the_nearest_mount_tells_the_file_system(path: str, kind: str) -> None:
    assert file_system_of(Path(path), MOUNTS) == kind


@pytest.mark.parametrize("path", ["/home/me/shop.db", "/mnt/nas/shop.db", "/mnt/ssh/shop.db", "/over/shop.db"])
def test_a_network_file_system_is_refused(path: str) -> None:
    with pytest.raises(UnsupportedFileSystem, match=r"network file system.*MongoDB"):
        refuse_network_file_system(Path(path), MOUNTS)


@pytest.mark.parametrize("mounts", ["", MOUNTS, "nonsense", "/dev/x / strangefs rw 0 0"])
def test_a_local_or_unknown_file_system_is_fine(mounts: str) -> None:
    refuse_network_file_system(Path("/var/lib/shop.db"), mounts)


def test_a_store_on_a_network_file_system_creates_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_read_mounts", lambda: f"server:/x {path.parent} nfs rw 0 0")
    with pytest.raises(UnsupportedFileSystem):
        open_and_close(path)
    assert not path.exists()


def test_the_mounts_of_this_host_can_be_read() -> None:
    assert file_system_of(Path("/proc/self/mounts").resolve(), paths._read_mounts()) in ("proc", "")


def test_a_long_path_keeps_its_locks_and_sockets_in_the_temporary_folder(folder: Path) -> None:
    deep = folder / ("d" * 60) / "store.db"
    deep.parent.mkdir()
    open_and_close(deep)
    assert [item.name for item in deep.parent.iterdir()] == ["store.db"]
    aside = side_folder(deep)
    assert aside.parent == folder
    assert stat.S_IMODE(aside.stat().st_mode) == 0o700
    assert side_folder(deep) != side_folder(deep.with_name("other.db"))
    assert side_folder(folder / "s.db") == folder / "s.db-holdfast"


def test_a_folder_of_somebody_else_is_not_used(folder: Path) -> None:
    """Anybody may create folders in the temporary folder, also one with the name that we are going to want."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    deep = folder / ("d" * 60) / "store.db"
    deep.parent.mkdir()
    side_folder(deep).mkdir()
    os.chown(side_folder(deep), 65534, 65534)
    with pytest.raises(UnsafeStore, match="belongs to another user"):
        open_and_close(deep)


# --- URLs


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:////var/lib/shop.db", "/var/lib/shop.db"),
        ("sqlite:///shop.db", "{cwd}/shop.db"),
        ("sqlite:///a/../shop.db", "{cwd}/shop.db"),
        ("sqlite:////var/my%20files/a%3Fb.db", "/var/my files/a?b.db"),
    ],
)
def test_a_url_names_a_file(url: str, path: str) -> None:
    assert str(path_of(url)) == path.format(cwd=Path.cwd().resolve())


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///", "sqlite://shop.db", "sqlite:///:memory:", "sqlite:///a?b=1"]
)
def test_a_url_that_names_no_file_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"sqlite|memory://"):
        path_of(url)


def test_an_old_sqlite_is_refused(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    from holdfast.store.sqlite import open_sqlite

    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 36, 0))
    with pytest.raises(StoreUnavailable, match=r"3\.37\.0 or newer"):
        open_sqlite(f"sqlite:///{path}", clock=SystemClock(), observe=ignore, options={})


def test_what_was_written_before_a_crash_is_read_after_it(stage: Stage, path: Path, folder: Path) -> None:
    """A copy of the files while they are open is what a crash leaves."""

    async def crash(store: Store) -> None:
        await store.insert([invocation("a")])
        for name in ("store.db", "store.db-wal"):
            (folder / f"crashed-{name}").write_bytes((folder / name).read_bytes())

    stage.play(crash)
    left = folder / "left.db"
    (folder / "crashed-store.db").rename(left)
    (folder / "crashed-store.db-wal").rename(folder / "left.db-wal")

    async def recover() -> None:
        store = store_at(left)
        await store.open()
        assert ids_of(await store.get("shop", ["a"])) == ["a"]
        await store.close()

    asyncio.run(recover())


@pytest.mark.parametrize(("setting", "pragma"), [("full", 2), ("normal", 1)])
def test_the_setting_decides_what_a_power_cut_may_take(path: Path, setting: str, pragma: int) -> None:
    with closing(schema.connect(path, synchronous=setting, busy_timeout_seconds=1.0)) as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (pragma,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
