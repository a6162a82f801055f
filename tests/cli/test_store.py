"""store prepare, check and what they say of a file that is damaged."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pymongo import MongoClient

if TYPE_CHECKING:
    from conftest import Command


def test_store_prepare_and_check(shop: Path, holdfast: Command) -> None:
    assert holdfast("store", "prepare", "--json").json == {"url": f"sqlite:///{shop}/shop.db", "prepared": True}
    assert (shop / "shop.db").exists()
    checked = holdfast("store", "check", "--deep", "--json")
    assert (checked.code, checked.json["ok"]) == (0, True)
    (shop / "shop.db").chmod(0o660)
    worse = holdfast("store", "check")
    assert worse.code == 1
    assert "NOT OK" in worse.out


@pytest.mark.xdist_group("mongo")
def test_check_tells_of_a_missing_index_and_prepare_makes_it(holdfast: Command, mongo_url: str) -> None:
    assert holdfast("store", "prepare", "--url", mongo_url).code == 0
    with MongoClient[dict[str, Any]](mongo_url) as client:
        client.get_default_database().holdfast_invocations.drop_index("task")
    for _ in range(2):  # to look is not to heal
        answer = holdfast("store", "check", "--url", mongo_url, "--json")
        assert (answer.code, answer.json["ok"]) == (1, False)
        (wrong,) = [finding for finding in answer.json["findings"] if not finding["ok"]]
        assert wrong["subject"] == "index holdfast_invocations.task"
        assert "missing" in wrong["detail"]
        assert wrong["advice"] == "holdfast store prepare"
    answer = holdfast("store", "check", "--url", mongo_url)
    assert [line.split() for line in answer.out.splitlines() if line.startswith("index holdfast_invocations.task")]
    (line,) = [line for line in answer.out.splitlines() if "NOT OK" in line]
    assert "missing" in line
    assert "→ holdfast store prepare" in answer.out
    assert holdfast("store", "prepare", "--url", mongo_url).code == 0
    assert holdfast("store", "check", "--url", mongo_url).code == 0


@pytest.mark.xdist_group("mongo")
def test_check_makes_nothing_where_no_store_is(holdfast: Command, mongo_url: str) -> None:
    answer = holdfast("store", "check", "--url", mongo_url)
    assert answer.code == 1
    assert "Holdfast's collections are not there" in answer.out
    with MongoClient[dict[str, Any]](mongo_url) as client:
        assert client.get_default_database().list_collection_names() == []


def test_that_others_may_read_the_file_is_a_hint(shop: Path, holdfast: Command) -> None:
    """As they may if its owner has made it, for tables of his own, before Holdfast."""
    with closing(sqlite3.connect(shop / "shop.db")) as connection, connection:
        connection.execute("CREATE TABLE own (n)")
    (shop / "shop.db").chmod(0o644)
    prepared = holdfast("store", "prepare", "--app", "shop:app")
    assert prepared.code == 0
    assert f"other users of this host can read it: chmod 600 {shop}/shop.db" in prepared.err
    checked = holdfast("store", "check", "--app", "shop:app", "--json")
    (mode,) = [each for each in checked.json["findings"] if each["subject"] == "file mode"]
    assert (checked.code, mode["ok"]) == (0, True)
    assert "can read it: chmod 600" in mode["advice"]
    (shop / "shop.db").chmod(0o660)
    checked = holdfast("store", "check", "--app", "shop:app", "--json")
    assert (checked.code, checked.json["ok"]) == (1, False), "to write is more than to read"
    for file in shop.glob("shop.db*"):
        file.chmod(0o700 if file.is_dir() else 0o600)
    assert holdfast("store", "prepare", "--app", "shop:app").err == ""


def test_check_of_a_file_without_tables_makes_none(folder: Path, holdfast: Command) -> None:
    with closing(sqlite3.connect(folder / "shop.db")) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    (folder / "shop.db").chmod(0o600)
    before = (folder / "shop.db").read_bytes()
    answer = holdfast("store", "check", "--deep", "--url", "sqlite:///shop.db", "--json")
    assert (answer.code, answer.json["ok"]) == (1, False)
    (wrong,) = [finding for finding in answer.json["findings"] if not finding["ok"]]
    assert (wrong["subject"], wrong["advice"]) == ("schema", "holdfast store prepare")
    assert (folder / "shop.db").read_bytes() == before
    assert holdfast("store", "prepare", "--url", "sqlite:///shop.db").code == 0
    assert holdfast("store", "check", "--deep", "--url", "sqlite:///shop.db").code == 0


def spoil(path: Path) -> None:
    """Destroy the first page of the invocations."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'holdfast_invocations'"
        ((page,),) = connection.execute(query).fetchall()
    content = bytearray(path.read_bytes())
    content[(page - 1) * 4096 : page * 4096] = b"\x55" * 4096
    path.write_bytes(content)


def test_a_plain_check_finds_destroyed_pages_or_says_that_it_did_not_look(
    shop: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast("submit", "shop:add", "1")
    whole = holdfast("store", "check")
    assert (whole.code, "every page was read" in whole.out) == (0, True)
    spoil(shop / "shop.db")
    answer = holdfast("store", "check", "--json")
    assert (answer.code, answer.json["ok"]) == (1, False)
    assert [finding["subject"] for finding in answer.json["findings"] if not finding["ok"]] == ["integrity"]
    monkeypatch.setattr("holdfast.store.sqlite.inspection.QUICK_BYTES", 4096)  # as if it were large
    answer = holdfast("store", "check")
    assert answer.code == 0
    (line,) = [line for line in answer.out.splitlines() if line.startswith("integrity")]
    assert line.split()[1:3] == ["not", "checked"]
    assert "holdfast store check --deep" in answer.out
    assert [f["checked"] for f in holdfast("store", "check", "--json").json["findings"]].count(False) == 1
    assert holdfast("store", "check", "--deep").code == 1


def test_the_problems_of_a_file_are_on_one_line(shop: Path, holdfast: Command) -> None:
    holdfast("submit", "shop:add", "1")
    content = bytearray((shop / "shop.db").read_bytes())
    content[4 * 4096 : 7 * 4096] = b"\x55" * 3 * 4096
    (shop / "shop.db").write_bytes(content)
    (found,) = [finding for finding in holdfast("store", "check", "--json").json["findings"] if not finding["ok"]]
    assert "Page 6" in found["detail"]
    assert "\n" not in found["detail"]


def test_the_lines_of_a_check_fit_80_columns_or_the_terminal(
    shop: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast("store", "prepare")
    with closing(sqlite3.connect(shop / "shop.db")) as connection, connection:
        put = "INSERT INTO holdfast_quarantine (app, id, at, why, raw, kind) VALUES (?, ?, 0, ?, '', 'invocation')"
        connection.executemany(put, [("shop", f"{n}", f"the stored invocation {n} cannot be read") for n in range(9)])
        connection.execute("DROP INDEX holdfast_ready")
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", f"{columns}")
        answer = holdfast("store", "check")
        assert answer.code == 1
        unfolded = " ".join(answer.out.split())
        assert "9 records were set aside (9 invocations)" in unfolded
        assert "see docs/operations/damaged-records.md for how to look, repair and remove" in unfolded
        assert "index holdfast_ready" in answer.out
        lines = [line for line in answer.out.splitlines() if "/" not in line]  # a path stays whole
        assert max(map(len, lines)) <= columns


def test_a_damaged_file_that_was_left_open_can_be_looked_at(shop: Path, holdfast: Command) -> None:
    """Opening it is refused, with the advice to look with this very command. To look changes nothing."""
    for n in range(20):
        holdfast("submit", "shop:add", str(n))
    left_open = f"""
import os, sqlite3
connection = sqlite3.connect({str(shop / "shop.db")!r}, isolation_level=None)
connection.execute("CREATE TABLE theirs (x)")
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", left_open], check=True)
    spoil(shop / "shop.db")
    content = (shop / "shop.db").read_bytes()
    log = (shop / "shop.db-wal").read_bytes()
    answer = holdfast("store", "check", "--deep", "--json")
    assert answer.code == 1
    assert [finding["subject"] for finding in answer.json["findings"] if not finding["ok"]] == ["integrity"]
    assert (shop / "shop.db-wal").read_bytes() == log, "what the next opening has to see is gone"
    assert (shop / "shop.db").read_bytes() == content
    opened = holdfast("ps")
    assert opened.code == 1
    assert "holdfast store check" in opened.err


def test_a_store_that_cannot_be_opened_is_one_clear_error(folder: Path, holdfast: Command) -> None:
    (folder / "text.db").write_text("this is no database, but it is long enough to be taken for one " * 20)
    answer = holdfast("store", "check", "--url", "sqlite:///text.db")
    assert answer.code == 1
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1
