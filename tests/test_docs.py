"""The papers say what is: their code runs, their links lead somewhere, their tables are those of the code.

The code of a page is marked by the first line of its block:

    ```python            runs. The blocks of a page follow one another, as one program named shop.py
    ```python mongodb    runs too, as a program of its own, against a MongoDB in the place of `LOCAL`
    ```python fragment   only has to be Python: it needs what a page cannot have
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from msgspec.structs import replace
from pymongo import MongoClient
from pymongo.database import Database
from tests.mongo.tools import play

from holdfast import App, Fixed, crashpoints
from holdfast.cli import program as cli
from holdfast.lifecycle import changes
from holdfast.lifecycle.records import Entry, Origin, Source
from holdfast.settings import PREFIX, SPECS, Settings
from holdfast.store.mongo import schema
from holdfast.store.mongo.sentinels import NO_SENTINEL
from holdfast.store.mongo.store import MongoStore
from holdfast.testing.samples import START, invocation, wish

ROOT = Path(__file__).parent.parent
PAPERS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES = [path for path in PAPERS if path.parent.name != "decisions"]
LOCAL = "mongodb://localhost/shop?replicaSet=rs0"
# What a page takes for granted, where it does not make an app itself.
GRANTED = {"runners.md": 'from contextlib import asynccontextmanager; from holdfast import App; app = App("memory://")'}


class Block(NamedTuple):
    page: Path
    line: int
    mark: str
    code: str


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in re.finditer(r"^```python(?: (\w+))?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield Block(page, text.count("\n", 0, found.start(2)), found[1] or "", found[2])


def program(page: Path, mark: str) -> str:
    """The blocks of a page with that mark, each at its own line, so that a traceback leads to the page."""
    lines = [GRANTED.get(page.name, "")]
    for block in blocks_of(page):
        if block.mark == mark:
            lines += [""] * (block.line - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n"


def run(code: str, folder: Path) -> None:
    (folder / "shop.py").write_text(code)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    environment["PYTHONPATH"] = str(ROOT / "src")
    command = [sys.executable, "-W", "error", "shop.py"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def pages_with(mark: str) -> list[Path]:
    return [page for page in PAGES if any(block.mark == mark for block in blocks_of(page))]


# --- code


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with(""), ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    run(program(page, ""), tmp_path)


@pytest.mark.slow
@pytest.mark.xdist_group("mongo")
@pytest.mark.parametrize("page", pages_with("mongodb"), ids=lambda page: page.name)
def test_the_code_of_a_page_runs_on_mongodb(page: Path, tmp_path: Path, mongo_url: str) -> None:
    code = program(page, "mongodb")
    assert LOCAL in code
    run(code.replace(LOCAL, mongo_url), tmp_path)


def test_most_code_runs_and_the_rest_is_python() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page)]
    for block in blocks:
        assert block.mark in ("", "mongodb", "fragment"), f"{block.page.name}:{block.line}"
        compile(block.code, f"{block.page.name}:{block.line}", "exec")
    fragments = [block for block in blocks if block.mark == "fragment"]
    assert len(fragments) < len(blocks) / 4


# --- links


def anchors(paper: Path) -> set[str]:
    """The names by which the headings of a paper can be linked to."""
    headings = re.findall(r"^#+ (.+)$", paper.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_links_lead_somewhere(paper: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", paper.read_text()):
        there = paper.parent / target if target else paper
        assert there.exists(), f"{paper.name} links to {target}"
        if anchor:
            assert anchor in anchors(there), f"{paper.name} links to {target}#{anchor}"


def test_every_page_can_be_found_from_the_readme() -> None:
    linked = set(re.findall(r"\]\((docs/[^)#]+\.md)\)", (ROOT / "README.md").read_text().partition("## More")[2]))
    assert linked == {str(page.relative_to(ROOT)) for page in ROOT.glob("docs/*.md")}


def test_the_architecture_names_files_that_exist() -> None:
    """A name without a folder lies where the one before it in the same row does."""
    _, _, table = (ROOT / "ARCHITECTURE.md").read_text().partition("## Where things are")
    for row in table.partition("\n## ")[0].splitlines():
        folder = ""
        for name in re.findall(r"`([\w/*]+(?:\.py|/))`", row):
            folder = f"{name.rpartition('/')[0]}/" if "/" in name else folder
            within = ROOT if name.startswith("tests/") else ROOT / "src" / "holdfast"
            assert list(within.glob(f"{folder}{name.rpartition('/')[2]}".rstrip("/"))), name


# --- tables


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    _, found, rest = (ROOT / "docs" / page).read_text().partition(f"\n{heading}\n")
    assert found, f"{page} has no heading '{heading}'"
    table = re.search(r"(?:^\|.*\n)+", rest.partition("\n#")[0], re.MULTILINE)
    assert table, f"{page} has no table under '{heading}'"
    lines = table[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def told(page: str, heading: str) -> set[str]:
    """What the first column of a table names, each once."""
    found = [name for row in rows(page, heading) for name in names(row[0])]
    assert len(found) == len(set(found)), f"{page}, {heading}: something is there twice"
    return set(found)


def condition(options: Mapping[str, Any]) -> str:
    """What the options of an index say, in words."""
    words = ["unique"] if options.get("unique") else []
    for name, wanted in options.get("partialFilterExpression", {}).items():
        exists = isinstance(wanted, dict)
        words.append(f"where there is `{name}`" if exists or wanted is True else f"where `{name}` is `{wanted}`")
    if (seconds := options.get("expireAfterSeconds")) is not None:
        words.append(f"TTL {seconds} s")
    return ", ".join(words)


def index_row(index: schema.Index) -> list[str]:
    keys = ", ".join(f"`{name}`" for name, _ in index.keys)
    return [f"`{index.collection}`", f"`{index.name}`", keys, condition(index.options), index.serves]


def test_the_page_on_mongodb_has_every_collection() -> None:
    assert told("mongodb.md", "## Collections") == set(schema.COLLECTIONS)


def test_the_page_on_mongodb_has_every_index() -> None:
    there = rows("mongodb.md", "## Indexes, and the queries they serve")
    wanted = [index_row(index) for name in schema.COLLECTIONS for index in schema.INDEXES if index.collection == name]
    assert there == wanted, "it should be:\n" + "\n".join(f"| {' | '.join(row)} |" for row in wanted)


def fields_of(document: Mapping[str, Any], *, whole: str = "document") -> set[str]:
    """Its fields; those of documents inside with a dot. What is set aside is a whole, whatever is in it."""
    found = set()
    for name, value in document.items():
        inside = value if isinstance(value, list) else [value]
        parts = [part for part in inside if isinstance(part, dict)] if name != whole else []
        found |= {f"{name}.{field}" for part in parts for field in part} or {name}
    return found


class Seen:
    """The fields that the documents of each collection were seen to have."""

    def __init__(self, database: Database[dict[str, Any]]) -> None:
        self._database = database
        self._fields: dict[str, set[str]] = {name: set() for name in schema.COLLECTIONS}

    def look(self) -> dict[str, set[str]]:
        for name, fields in self._fields.items():
            for document in self._database[name].find(NO_SENTINEL):
                fields |= fields_of(document)
        return {
            name: {field for field in fields if not any(other.startswith(f"{field}.") for other in fields)}
            for name, fields in self._fields.items()
        }


async def triggered(store: MongoStore) -> None:
    """What only triggers write."""
    source = Source(kind="end", id="b", name="pay")
    origin = Origin(trigger="paid", sources=(source,), depth=1, path=("pay",))
    await store.insert([invocation("a", origin=origin)])
    (record,) = (await store.claim(wish())).records
    end = changes.completed(record, result=b"", operation="end", at=START)
    await store.apply([replace(end, outbox=("paid",))])
    await store.put_entry(Entry(app="shop", kind="event", name="e", body=b"{}", keep_until=store.now() + 3600))


@pytest.mark.slow
@pytest.mark.xdist_group("mongo")
def test_the_page_on_mongodb_has_every_field(mongo_url: str) -> None:
    """A small run leaves at least one document of each kind, and nothing that the page does not have."""
    wanted = {name: told("mongodb.md", f"### {name}") for name in schema.COLLECTIONS}
    gate = threading.Event()
    with (
        MongoClient[dict[str, Any]](mongo_url) as client,
        App(mongo_url, inline_limit=1024, chunk_threshold=1024) as app,
    ):
        database = client.get_default_database()

        @app.task(name="fails", at_most_once=True, running_concurrency="task", retention="1d")
        def fails(data: bytes) -> None:
            gate.wait(60)
            raise KeyError(len(data))

        @app.task(name="again", retries=Fixed(1, 3600), registration_concurrency="task")
        def again() -> None:
            raise KeyError

        limits: dict[str, Any] = {"timeout": 60, "soft_timeout": 30, "cancel_grace": 1, "cancel_children": False}

        @app.task(name="parent", **limits)
        def parent() -> None:
            doomed = again.options(delay="1h", expires="2h").submit()
            doomed.cancel("no longer wanted", children=False)

        app.invocations()  # now the collections are there
        fails.map([b"small", os.urandom(3 * 2**20)])  # beyond a piece of 1 MB
        bad = database[schema.INVOCATIONS].find_one({"payloads": {"$exists": False}})
        assert bad is not None
        database[schema.INVOCATIONS].update_one({"_id": bad["_id"]}, {"$set": {"history": "gone"}})
        play(mongo_url, triggered)
        seen, deadline = Seen(database), time.monotonic() + 30
        again.options(key="once").submit()
        again.submit()
        parent.options(expires="2h").submit()
        app.queues.pause("later")
        app.schedules.create("nightly", again, cron="0 3 * * *")
        seen.look()  # while they are ready
        with app.runner():
            while (there := seen.look()) != wanted and time.monotonic() < deadline:
                if "slot" in there[schema.INVOCATIONS]:
                    gate.set()
                if gate.is_set() and "rerun_of" not in there[schema.INVOCATIONS]:
                    app.rerun(status="failed")
                time.sleep(0.05)
    assert there == wanted


@pytest.fixture
def file(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """A fresh SQLite store."""
    with App(f"sqlite:///{tmp_path / 'shop.db'}") as app:
        app.invocations()
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        yield connection


def test_the_page_on_sqlite_has_every_table_and_column(file: sqlite3.Connection) -> None:
    tables = [name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    page = (ROOT / "docs" / "sqlite.md").read_text()
    assert set(re.findall(r"^### (holdfast_\w+)$", page, re.MULTILINE)) == set(tables)
    for table in tables:
        columns = {row[1] for row in file.execute(f"PRAGMA table_info({table})")}
        assert told("sqlite.md", f"### {table}") == columns, table


def test_the_page_on_sqlite_has_every_index(file: sqlite3.Connection) -> None:
    there = {}
    for table, index in file.execute("SELECT tbl_name, name FROM sqlite_master WHERE type = 'index' AND sql NOT NULL"):
        (facts,) = [row for row in file.execute(f"PRAGMA index_list({table})") if row[1] == index]
        columns = [row[2] for row in file.execute(f"PRAGMA index_info({index})")]
        there[index] = ([table], columns, bool(facts[2]), bool(facts[4]))
    page = rows("sqlite.md", "## Indexes, and the queries they serve")
    assert there == {
        names(index)[0]: (names(table), names(columns), "unique" in condition, "where" in condition)
        for table, index, columns, condition, _ in page
    }


# --- settings


def allowed(name: str) -> str:
    return SPECS[name].allowed().partition(", or a duration")[0]  # the page says that once for all


def settings_page() -> str:
    """docs/settings.md, from the declarations."""
    rows = [
        f"| `{row.name}` | {row.shown.replace('(empty)', '')} | {allowed(row.name)} | {row.doc} |"
        for row in Settings().explain()
    ]
    return "\n".join([*SETTINGS_HEAD.splitlines(), *rows, ""])


SETTINGS_HEAD = """\
# Settings

<!-- Made by `python -m tests.test_docs` from holdfast/settings.py. -->

A keyword (`App(url, concurrency=20)`) beats the environment (`HOLDFAST_CONCURRENCY=20`), which beats the nearest \
pyproject.toml, which beats the default:

```toml
[tool.holdfast]
app = "shop:app"
concurrency = 20
drain_timeout_seconds = "1m"
```

`holdfast config` shows each value and where it came from. A length of time is a number in the unit of its name (in \
seconds, if that tells none) or a duration such as `"90s"`, `"2m"`, `"1h30m"`. An unknown name is an error that \
suggests the right one.

| setting | default | allowed | meaning |
|---|---|---|---|"""


def test_the_page_on_settings_is_current() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page == settings_page(), "make it anew: python -m tests.test_docs"


@pytest.mark.parametrize("paper", PAGES, ids=lambda paper: paper.name)
def test_what_a_paper_names_exists(paper: Path) -> None:
    """Settings, options, fields: what is written as code and looks like a name is a name in the code."""
    text = paper.read_text()
    for variable in set(re.findall(r"\bHOLDFAST_[A-Z_]+\b", text)) - {crashpoints.VARIABLE}:
        assert variable.removeprefix(PREFIX).lower() in SPECS, variable
    code = set(re.findall(r"\w+", "".join(path.read_text() for path in ROOT.glob("src/**/*.py"))))
    named = {name for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", text) if "__" not in name}
    assert named <= code


@pytest.mark.parametrize("paper", PAGES, ids=lambda paper: paper.name)
def test_commands_that_a_paper_names_exist(paper: Path) -> None:
    program: Any = typer.main.get_command(cli._make())
    for words in re.findall(r"(?:`|^\$ |^)holdfast ((?:[\w:./-]+ ?)+)", paper.read_text(), re.MULTILINE):
        command, *rest = words.split()
        if command.startswith("-"):
            continue
        assert command in program.commands, words
        found = program.commands[command]
        if hasattr(found, "commands") and rest and not rest[0].startswith("-"):
            assert rest[0] in found.commands, words
            found = found.commands[rest[0]]
        options = {option for parameter in found.params for option in parameter.opts}
        assert {word for word in rest if word.startswith("--")} <= options, words


if __name__ == "__main__":
    (ROOT / "docs" / "settings.md").write_text(settings_page())
