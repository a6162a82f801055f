"""``store backup``: a copy of a SQLite store, made while it is used."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.cli.processes import Command, Process
from tests.support.patience import patient

from holdfast import App
from holdfast.cli.reach import check_store
from holdfast.model.status import Status
from holdfast.store.sqlite.schema import SCHEMA_VERSION

COPIES = 4


@pytest.fixture
def stored(shop: Path) -> Path:
    with App(f"sqlite:///{shop / 'shop.db'}") as app:
        app.task(name="shop:add")(lambda a, b=0: a + b).map([(n, 1) for n in range(50)])
    return shop


def ids_in(copy: Path) -> dict[str, Status]:
    """What is in a copy, every invocation read whole, after it has been looked over."""
    with App(f"sqlite:///{copy}") as app:
        assert all(finding.ok for finding in check_store(app, deep=True))
        return {record.id: record.status for record in app.invocations(limit=100_000)}


def test_a_copy_is_whole_private_and_one_file(stored: Path, holdfast: Command) -> None:
    done = holdfast("store", "backup", "copy.db", "--json")
    assert done.code == 0, done.err
    copy = stored / "copy.db"
    facts = {"path": str(copy), "size": copy.stat().st_size, "invocations": 50, "schema_version": SCHEMA_VERSION}
    assert done.json == facts
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert sorted(each.name for each in stored.iterdir() if "copy" in each.name) == ["copy.db"]
    assert len(ids_in(copy)) == 50
    assert "50 invocations" in holdfast("store", "backup", "other.db").out


def test_what_is_there_is_not_touched_unless_asked(stored: Path, holdfast: Command) -> None:
    copy = stored / "copy.db"
    copy.write_text("precious")
    refused = holdfast("store", "backup", "copy.db")
    assert refused.code == 2
    assert "is there already and was not touched" in refused.err
    assert copy.read_text() == "precious"
    assert holdfast("store", "backup", "copy.db", "--overwrite").code == 0
    assert len(ids_in(copy)) == 50
    assert holdfast("store", "backup", "shop.db", "--overwrite").code == 2
    assert holdfast("store", "backup", "missing/copy.db").code == 2
    assert holdfast("store", "backup", ".").code == 2
    (stored / "third.db-wal").write_text("of somebody")
    assert "there is a log beside" in holdfast("store", "backup", "third.db").err
    assert not [each.name for each in stored.iterdir() if each.name.endswith(".part")]


def test_a_damaged_store_gives_no_copy(stored: Path, holdfast: Command) -> None:
    with closing(sqlite3.connect(stored / "shop.db")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = os.path.getsize(stored / "shop.db")
    with open(stored / "shop.db", "r+b") as file:
        for page in range(3, size // 4096):
            file.seek(page * 4096)
            file.write(b"\xff" * 2048)
    assert holdfast("store", "backup", "copy.db").code == 1
    assert not [each.name for each in stored.iterdir() if "copy" in each.name]


def test_other_stores_are_not_backed_up_here(folder: Path, holdfast: Command, mongo_url: str) -> None:
    refused = holdfast("store", "backup", "copy.db", "--url", mongo_url)
    assert refused.code == 2
    assert "docs/operations/mongodb.md" in refused.err
    assert holdfast("store", "backup", "copy.db", "--url", "sqlite:///none.db").code == 1
    assert list(folder.glob("*.db")) == []


@pytest.mark.slow
def test_a_copy_that_is_made_under_load_has_all_that_was_acknowledged(
    stored: Path, holdfast: Command, start: Callable[..., Process]
) -> None:
    start("run", "--workers", "1")
    acknowledged: list[str] = []
    ended = threading.Event()
    with App(f"sqlite:///{stored / 'shop.db'}") as app:
        add = app.task(name="shop:add")(lambda a, b=0: a + b)

        def submit() -> None:
            while not ended.is_set():
                acknowledged.append(add.submit(1).id)

        thread = threading.Thread(target=submit)
        thread.start()
        try:
            for number in range(COPIES):
                add.submit(number).result(timeout=patient(60))  # the runner works
                before = list(acknowledged)
                done = holdfast("store", "backup", f"copy{number}.db")
                assert done.code == 0, done.err
                there = ids_in(stored / f"copy{number}.db")
                assert set(before) <= set(there)
                assert Status.SUCCESS in there.values()
        finally:
            ended.set()
            thread.join()
    assert acknowledged
