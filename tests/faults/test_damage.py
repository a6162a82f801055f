"""One damaged record stops nobody: work, recovery, schedules, triggers and every command go on beside it.

`make test` damages a sample of all fields, `make faults` every one of them with every value.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from pymongo import MongoClient
from tests.faults import damage
from tests.faults.damage import APP, ID, NARROW, QUICK, STEADY, Case
from tests.faults.settings import SETTINGS
from tests.faults.stores import on
from tests.store.mongo.tools import database_of
from tests.support.patience import eventually, patient

from holdfast import App, every, on_event
from holdfast.cli import program
from holdfast.clock import SystemClock
from holdfast.errors import KeyTaken
from holdfast.model.status import FINAL, Status
from holdfast.store import open_store
from holdfast.store.contract import Store

SAMPLE = 250
AT_ONCE = 800
PATIENCE_SECONDS = patient(30.0)
MOST_LINES = 3  # about the same damage, in a life of seconds: each runner and reader may tell it once
Record = dict[str, Any]

pytestmark = [pytest.mark.xdist_group("mongo"), pytest.mark.slow]


class Place:
    """A store, behind its back."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_mongo = url.startswith("mongodb")
        self.path = Path(url.removeprefix("sqlite:///"))

    def furnish(self) -> dict[str, list[Record]]:
        """Make the store, with a sound record of each kind, and tell what is there."""
        self.run(damage.furnish)
        if not self.is_mongo:
            damage.loosen(self.path)
            with closing(sqlite3.connect(self.path)) as connection:
                aside = (APP, "q", 0.0, "why", "{}", "event")
                connection.execute("INSERT INTO holdfast_quarantine VALUES (?, ?, ?, ?, ?, ?)", aside)
                connection.execute("INSERT INTO holdfast_payload_references VALUES (?, 'd', 'ready')", (APP,))
                connection.commit()
            return damage.sqlite_models(self.path)
        with self.client() as client:
            there = client[database_of(self.url)]
            there.holdfast_quarantine.insert_one(
                {"_id": "q", "app": APP, "id": "q", "at": 0.0, "why": "w", "document": {}}
            )
            hints = [{"kind": "ready", "subjects": ["a"], "count": 1}]
            there.holdfast_signals.insert_one({"_id": "some process", "hints": hints, "n": 1})
            return damage.mongo_models(client, database_of(self.url))

    def client(self) -> MongoClient[Record]:
        return MongoClient(self.url)

    def cases(self, models: dict[str, list[Record]]) -> list[Case]:
        return list((damage.mongo_cases if self.is_mongo else damage.sqlite_cases)(models))

    def damage(self, cases: Sequence[Case]) -> None:
        """Damage all of these at once. One of them has the slot that a sound invocation had."""
        holder = next((case for case in cases if case.kind == "held" and "slot" not in case.field), None)
        if holder is not None and holder.field != "limit_key":
            holder.record.update({"limit_key": NARROW, "slot": f"{NARROW}#0"})
        if self.is_mongo:
            with self.client() as client:
                if holder is not None:
                    client[database_of(self.url)].holdfast_invocations.delete_one({"id": ID["held"]})
                damage.damage_mongo(client, database_of(self.url), cases)
            return
        if holder is not None:
            with closing(sqlite3.connect(self.path)) as connection:
                connection.execute("DELETE FROM holdfast_invocations WHERE id = ?", (ID["held"],))
                connection.commit()
        damage.damage_sqlite(self.path, cases)

    def run(self, scenario: Callable[[Store], Any]) -> Any:
        async def play() -> Any:
            store = open_store(self.url, clock=SystemClock())
            await store.open()
            try:
                return await scenario(store)
            finally:
                await store.close()

        return asyncio.run(play())

    def invocations(self) -> set[str]:
        """The ids of those that are stored, and of those that were set aside."""
        if self.is_mongo:
            with self.client() as client:
                there = client[database_of(self.url)]
                stored = there.holdfast_invocations.find({}, {"_id": True})
                aside = there.holdfast_quarantine.find({}, {"_id": True})
                return {str(each["_id"]).rpartition("|")[2] for each in (*stored, *aside)}
        with closing(sqlite3.connect(self.path)) as connection:
            connection.text_factory = lambda raw: raw.decode(errors="replace")
            stored = connection.execute("SELECT id FROM holdfast_invocations").fetchall()
            return {str(id) for (id,) in [*stored, *connection.execute("SELECT id FROM holdfast_quarantine")]}


class Lines(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def tracebacks(self) -> list[str]:
        return [f"{each.getMessage()}: {each.exc_info[1]!r}" for each in self.records if each.exc_info]

    def repeated(self) -> list[tuple[str, int]]:
        counts = Counter(message for each in self.records if "cannot be read" in (message := each.getMessage()))
        return [(message, count) for message, count in counts.items() if count > MOST_LINES]


@pytest.fixture(autouse=True)
def _audited_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.fleet.recovery.AUDIT_SECONDS", 1.0)


@pytest.fixture
def lines() -> Iterator[Lines]:
    root, handler = logging.getLogger(), Lines()
    handlers, level = list(root.handlers), root.level
    ours = logging.getLogger("holdfast")
    ours.addHandler(handler)
    yield handler
    ours.removeHandler(handler)
    root.handlers[:] = handlers
    root.setLevel(level)


def make_app(url: str) -> App:
    app = App(url, name=APP, **SETTINGS)

    @app.task(name=QUICK)
    def quick(number: int) -> int:
        return number

    @app.task(name=NARROW, limit=1)
    def narrow(number: int) -> int:
        return number

    @app.task(name=STEADY, triggers=[every("1s"), on_event("order.created")])
    def steady() -> str:
        return "steady"

    return app


def live(place: Place, cases: Sequence[Case], lines: Lines) -> None:
    """Everything that has to go on."""
    app = make_app(place.url)
    quick, narrow = app.runtime.tasks[QUICK], app.runtime.tasks[NARROW]
    with app, app.runner(concurrency=4):
        calls = [quick.submit(number) for number in range(5)]
        limited = [narrow.submit(number) for number in range(2)]
        app.emit("order.created", {"id": 1})
        for case in [case for case in cases if case.kind == "ready" and isinstance(case.record.get("key"), str)][:3]:
            with contextlib.suppress(KeyTaken):
                quick.options(key=case.record["key"].replace("\0", "")[:50] or "k").submit(1)
        assert [call.result(timeout=PATIENCE_SECONDS) for call in calls] == list(range(5))
        assert [call.result(timeout=PATIENCE_SECONDS) for call in limited] == [0, 1], "a slot is held for ever"
        orphan = app.invocation(ID["orphan"])
        eventually(lambda: orphan.status in FINAL, "work of a dead runner is not recovered")
        assert orphan.status is Status.SUCCESS
        eventually(lambda: _kinds(app) >= {"tick", "event"}, "no tick, or no event, calls anything")
        assert lines.repeated() == [], "somebody meets the same damage at every look"
        look(place, [calls[0].id, orphan.id, *[str(case.record.get("id")) for case in cases[:: len(cases) // 5 or 1]]])


def _kinds(app: App) -> set[str]:
    found = app.invocations(task=STEADY, limit=500)
    return {source.kind for record in found if record.origin is not None for source in record.origin.sources}


LOOKS = [
    ["ps"],
    ["ps", "--status", "failed"],
    ["ps", "--parent", ID["held"]],
    ["archive"],
    ["runners"],
    ["services"],
    ["queues"],
    ["schedules"],
    ["schedules", "show", "model"],
    ["schedules", "next", "model"],
    ["events"],
    ["events", "show", ID["event"]],
    ["triggers"],
    ["rerun", "--status", "success", "--status", "failed"],  # without --yes, they list what they would do
    ["purge", "--status", "success", "--status", "failed"],
    ["store", "check"],
    ["store", "check", "--deep"],
]


def look(place: Place, ids: Sequence[str]) -> None:
    """Give every command that looks. None may end with an exception."""
    for arguments in [*LOOKS, *([name, id] for name in ("show", "why", "history") for id in dict.fromkeys(ids))]:
        said = io.StringIO()
        no_terminal = mock.patch("sys.stdin", io.StringIO())  # so that nothing is asked
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), no_terminal:
            for form in ([], ["--json"]):
                words = [word.replace("\0", "").encode("utf-8", "replace").decode()[:80] or "x" for word in arguments]
                code = program._obey([*words, *form, "--url", place.url, "--name", APP])
                assert code in (0, 1, 2, 4), (arguments, said.getvalue())
        assert "Traceback" not in said.getvalue(), (arguments, said.getvalue())


def suffer(url: str, cases: Sequence[Case], lines: Lines) -> None:
    place = Place(url)
    place.damage(cases)
    stored = place.invocations()  # of two that claim one slot or key, one is
    live(place, cases, lines)
    assert lines.tracebacks() == []
    dated = ("id", "retain_until", "expires_at")  # what need not be kept longer is removed, rightly
    kept = [case for case in cases if case.where == "holdfast_invocations" and case.field not in dated]
    names = {case.record.get("id") for case in kept}
    wanted = {name for name in names if isinstance(name, str)} & stored
    assert wanted <= place.invocations(), "a damaged invocation is lost"


@on("sqlite", "mongodb")
def test_a_sample_of_all_damage_stops_nobody(url: str, lines: Lines, request: pytest.FixtureRequest) -> None:
    place = Place(_own(url, request))
    suffer(place.url, damage.spread(place.cases(place.furnish()), SAMPLE), lines)


@pytest.mark.faults
@on("sqlite", "mongodb")
def test_no_damage_stops_anybody(url: str, lines: Lines, request: pytest.FixtureRequest) -> None:
    place = Place(_own(url, request))
    models = place.furnish()
    cases = place.cases(models)
    rounds = -(-len(cases) // AT_ONCE)
    for number in range(rounds):
        mine = cases[number::rounds]
        if number:
            place = Place(_own(url, request, number))
            place.furnish()
        lines.records.clear()
        suffer(place.url, mine, lines)


def _own(url: str, request: pytest.FixtureRequest, number: int = 0) -> str:
    """A store of its own for each round."""
    if not url.startswith("mongodb"):
        return url.replace("store.db", f"store{number}.db")
    before, _, options = url.partition("?")
    base = before.rpartition("/")[0]
    name = f"hf_damage_{os.getpid()}_{abs(hash(request.node.name)) % 10**6}_{number}"
    own = f"{base}/{name}?{options}"

    def drop() -> None:
        with MongoClient(own) as client:
            client.drop_database(name)

    request.addfinalizer(drop)
    return own
