"""holdfast doctor: each thing that it finds, made for real, and that it changes nothing."""

from __future__ import annotations

import base64
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pymongo import MongoClient
from tests.cli.processes import eventually
from tests.cli.roster import enrol

from holdfast import App, sleep
from holdfast._version import __version__
from holdfast.cli.reach import with_store
from holdfast.model.records import WorkerRecord
from holdfast.settings import Settings
from holdfast.web.reading.diagnosis import of_settings

if TYPE_CHECKING:
    from conftest import Command

Found = Callable[..., dict[str, Any]]
LONG = "a0b1c2d3e4f5g6h7i8j9k0l1m2n3o4p5"


@pytest.fixture
def app(shop: Path) -> Iterator[App]:
    with App("sqlite:///shop.db", name="default") as found:
        found.prepare()
        yield found


@pytest.fixture
def finding(holdfast: Command) -> Found:
    """Ask the doctor, and return the finding about a subject, which has this state."""

    def ask(subject: str, state: str, *, code: int | None = None) -> dict[str, Any]:
        answer = holdfast("doctor", "--app", "shop:app", "--json")
        found = [each for each in answer.json["findings"] if each["subject"].startswith(subject)]
        assert [each["state"] for each in found] == [state], answer.json
        assert answer.code == (int(not answer.json["ok"]) if code is None else code)
        assert state == "ok" or found[0]["advice"]
        return dict(found[0])

    return ask


def rewrite(folder: Path, statement: str, *values: object) -> None:
    """Change what is stored behind the back of everything."""
    with closing(sqlite3.connect(folder / "shop.db")) as connection, connection:
        assert connection.execute(statement, values).rowcount > 0


def stored(folder: Path) -> list[str]:
    with closing(sqlite3.connect(folder / "shop.db")) as connection:
        return list(connection.iterdump())


def test_a_sound_app_has_nothing_wrong_and_is_not_changed(shop: Path, app: App, holdfast: Command) -> None:
    before = stored(shop)
    enrol(app, "r1", heartbeat_at=time.time(), version=__version__)
    answer = holdfast("doctor", "--app", "shop:app")
    assert answer.code == 0, answer.out
    assert "0 wrong, 0 to think about" in answer.out
    for subject in ("versions", "schema", "indexes", "SQLite", "clock", "runners", "stuck work"):
        assert f"ok     {subject}" in answer.out
    with_store(app, lambda store: store.remove_runner(app.name, "r1"))
    assert stored(shop) == before


def test_a_damaged_record_that_it_meets_is_set_aside_whole_and_told(
    shop: Path, app: App, finding: Found, holdfast: Command
) -> None:
    enrol(app, "r1", heartbeat_at=time.time(), version=__version__)
    rewrite(shop, "UPDATE holdfast_runners SET body = '{nonsense' WHERE id = 'r1'")
    told = finding("runner r1", "wrong")
    assert "nothing of it is lost" in told["detail"]
    assert "damaged-records" in told["advice"]
    assert any("{nonsense" in row for row in stored(shop) if "INTO holdfast_quarantine " in row.replace('"', ""))
    second = holdfast("doctor", "--app", "shop:app", "--json").json["findings"]
    assert [each["subject"] for each in second if each["state"] == "wrong"] == ["quarantine"]


def test_a_missing_store_is_not_made(shop: Path, finding: Found) -> None:
    assert finding("store", "wrong", code=1)["advice"] == "holdfast store prepare"
    assert not (shop / "shop.db").exists()


def test_a_file_that_is_no_store_is_told(shop: Path, finding: Found) -> None:
    (shop / "shop.db").write_bytes(b"nonsense" * 1000)
    (shop / "shop.db").chmod(0o600)
    assert "database" in finding("store", "wrong", code=1)["detail"]


def test_a_missing_index_is_told_and_not_made(shop: Path, app: App, finding: Found) -> None:
    app.close()
    with closing(sqlite3.connect(shop / "shop.db")) as connection:
        connection.execute("DROP INDEX holdfast_ended")
    before = stored(shop)
    assert finding("index holdfast_ended", "wrong", code=1)["detail"] == "missing"
    assert finding("work", "not checked")["advice"]
    assert stored(shop) == before


def test_places_that_others_may_write(shop: Path, app: App, finding: Found) -> None:
    (shop / "shop.db").chmod(0o660)
    finding("file mode", "wrong")
    (shop / "shop.db").chmod(0o600)
    mode = shop.stat().st_mode
    shop.chmod(0o777)
    assert "chmod o-w" in finding("folder", "wrong")["advice"]
    shop.chmod(0o1777)
    finding("folder", "hint", code=0)
    shop.chmod(mode)


@pytest.mark.parametrize(
    ("settings", "url", "subject", "state"),
    [
        ({"public_url": "http://shop.example"}, "", "public_url", "wrong"),
        ({"world_service_url": "http://shop.example"}, "", "world_service_url", "wrong"),
        ({"api_token": "0123456789abcdef"}, "", "api_token", "wrong"),
        ({"api_token": "ab" * 20}, "", "api_token", "wrong"),
        ({"api_token": LONG, "world_token": LONG}, "", "api_token", "hint"),
        ({"hook_secret": LONG, "hook_secret_previous": LONG}, "", "hook_secret", "hint"),
        ({"world_hosts": "*"}, "", "world_hosts", "hint"),
        ({"stats_retention_seconds": 0}, "", "stats", "hint"),
        ({"cancel_grace_seconds": 60, "drain_timeout_seconds": 5}, "", "cancel_grace_seconds", "hint"),
        ({}, "mongodb://u:p@db.example/shop", "url", "wrong"),
        ({}, "mongodb://db.example,other.example:27018/shop?tls=true", "url", "wrong"),
        ({}, "mongodb://u:p@db.example/shop?tls=false&appName=tls=true", "url", "wrong"),
        ({}, "mongodb+srv://u:p@db.example/shop?tls=false", "url", "wrong"),
        ({}, "mongodb+srv://u:p@db.example/shop?tlsInsecure=true", "url", "wrong"),
        ({}, "mongodb://localhost/shop?tls=true&tlsAllowInvalidCertificates=true", "url", "wrong"),
        ({}, "mongodb://u:p@db.example/shop?tls=true", "settings", "ok"),
        ({}, "mongodb://u:p@db.example/shop?tlsCAFile=/ca.pem&tlsInsecure=false", "settings", "ok"),
        ({}, "mongodb+srv://u:p@db.example/shop", "settings", "ok"),
        ({}, "mongodb://u:p[x@db.example/shop", "url", "wrong"),
        ({}, "mongodb://u:p]x[@db.example/shop?tls=true", "settings", "ok"),
        ({}, "mongodb://u:p#x@db.example,[::1/shop?tls=true", "settings", "ok"),
        ({}, "mongodb://u:p[x@localhost:27017,[::1]:27018/shop", "settings", "ok"),
        ({"public_url": "http://[shop"}, "", "public_url", "wrong"),
        ({}, "mongodb://127.0.0.1:27017,[::1]/shop", "settings", "ok"),
        ({"public_url": "http://10.0.0.7:80", "api_token": LONG}, "", "settings", "ok"),
        ({"public_url": "https://shop.example"}, "", "settings", "ok"),
    ],
)
def test_settings_that_are_unsafe_or_contradict_each_other(
    settings: dict[str, Any], url: str, subject: str, state: str
) -> None:
    assert [(each.subject, each.state) for each in of_settings(Settings(**settings), url)] == [(subject, state)]


def test_settings_are_those_of_the_environment(app: App, finding: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_API_TOKEN", "0123456789abcdef")
    found = finding("api_token", "wrong", code=1)
    assert "openssl rand -hex 32" in found["advice"]
    assert "0123456789abcdef" not in str(found)


@pytest.mark.parametrize("keys", ["", f"k1:{base64.b64encode(b'1' * 32).decode()}"])
def test_secrets_that_are_stored_without_encryption(
    shop: Path, app: App, holdfast: Command, monkeypatch: pytest.MonkeyPatch, keys: str
) -> None:
    with (shop / "shop.py").open("a") as code:
        code.write("from holdfast import Secret\n@app.task\ndef charge(card: Secret[str], amount: int) -> None: ...\n")
    monkeypatch.setenv("HOLDFAST_ENCRYPTION_KEYS", keys)
    answer = holdfast("doctor", "--app", "shop:app", "--json")
    found = [each for each in answer.json["findings"] if each["subject"] == "encryption_keys"]
    assert answer.code == 0
    assert [each["state"] for each in found] == ([] if keys else ["hint"])
    assert keys or found[0]["detail"].startswith("parameters of shop:charge are Secret")


def test_runners_that_differ(shop: Path, app: App, finding: Found) -> None:
    now = time.time()
    enrol(app, "old", heartbeat_at=now)  # of version 9.9
    assert "runs Holdfast 9.9" in finding("runner old", "hint", code=0)["detail"]
    enrol(app, "old", heartbeat_at=now, dead_after_seconds=99.0)
    with_store(app, lambda store: store.remove_runner(app.name, "old"))
    enrol(app, "bare", started_at=now - 60, heartbeat_at=now, supervises=True, version=__version__)
    assert "none of its worker processes" in finding("runner bare", "wrong", code=1)["detail"]
    with_store(app, lambda store: store.remove_runner(app.name, "bare"))
    worker = WorkerRecord(id="1", pid=1, started_at=now, unresponsive_since=now - 20)
    enrol(app, "mute", heartbeat_at=now, workers=(worker,))
    rewrite(shop, "UPDATE holdfast_runners SET body = replace(body, '9.9', ?)", __version__)
    assert "did not answer" in finding("runner mute", "wrong", code=1)["detail"]
    with_store(app, lambda store: store.remove_runner(app.name, "mute"))
    enrol(app, "other", heartbeat_at=now, dead_after_seconds=99.0)
    rewrite(shop, "UPDATE holdfast_runners SET body = replace(body, '9.9', ?)", __version__)
    assert "1m39s there and 15s here" in finding("runner other", "hint")["detail"]
    rewrite(shop, "UPDATE holdfast_runners SET heartbeat_at = ?", now + 3600)
    rewrite(shop, "UPDATE holdfast_runners SET body = replace(body, '99.0', '15.0')")
    assert "ahead of the store" in finding("runner other", "wrong", code=1)["detail"]
    rewrite(shop, "UPDATE holdfast_runners SET heartbeat_at = ?", now - 3600)
    assert "silent for" in finding("runner other", "hint")["detail"]


def test_work_that_no_runner_takes(shop: Path, app: App, finding: Found) -> None:
    task = app.task(name="shop:unknown", tags=["gpu"])(lambda: None)
    waiting = task.submit()
    assert "no runner is alive" in finding("lane", "wrong", code=1)["detail"]
    enrol(app, "r1", heartbeat_at=time.time())
    assert "knows the task" in finding("lane", "wrong", code=1)["detail"]
    rewrite(shop, "UPDATE holdfast_runners SET body = replace(body, 'shop:add', 'shop:unknown')")
    assert "tags" in finding("lane", "wrong")["detail"]
    waiting.cancel()
    app.task(name="shop:add")(lambda: None).options(queue="mail").submit()
    enrol(app, "r1", heartbeat_at=time.time(), queues=("default",))
    assert "--queues mail" in finding("lane", "wrong")["advice"]
    enrol(app, "r1", heartbeat_at=time.time(), draining=True)
    assert "draining" in finding("lane", "wrong")["detail"]


def test_work_of_dead_owners(shop: Path, app: App, finding: Found) -> None:
    began, may_end = threading.Event(), threading.Event()

    @app.task(name="shop:hold")
    def hold() -> None:
        began.set()
        may_end.wait(30)

    with app.runner(concurrency=1):
        held = hold.submit()
        assert began.wait(30)
        rewrite(shop, "DELETE FROM holdfast_runners")
        found = finding("owners", "wrong", code=1)
        may_end.set()
    assert held.id in found["detail"]
    assert "recovers them" in found["advice"]


def test_slots_that_ended_calls_hold(shop: Path, app: App, holdfast: Command) -> None:
    began, may_end = threading.Event(), threading.Event()

    @app.task(name="shop:one", limit=1)
    def one(is_quick: bool) -> None:
        if not is_quick:
            began.set()
            may_end.wait(30)

    with app.runner(concurrency=2):
        ended = one.submit(True)
        ended.result(30)
        first, second = one.submit(False), one.submit(False)
        assert began.wait(30)
        eventually(lambda: second.status == "concurrency_controlled", "the second one waits for the slot")
        assert holdfast("store", "backup", "copy.db", "--app", "shop:app").code == 0
        may_end.set()
    # In a copy, since the services of the runner would mend it: the ended call has the slot of the running one.
    with closing(sqlite3.connect(shop / "copy.db")) as connection, connection:
        slot, key = connection.execute(
            "SELECT slot, limit_key FROM holdfast_invocations WHERE id = ?", (first.id,)
        ).fetchone()
        connection.execute("UPDATE holdfast_invocations SET slot = NULL WHERE id = ?", (first.id,))
        given = "UPDATE holdfast_invocations SET slot = ?, limit_key = ? WHERE id = ?"
        connection.execute(given, (slot, key, ended.id))
    answer = holdfast("doctor", "--url", "sqlite:///copy.db", "--json")
    (found,) = [each for each in answer.json["findings"] if each["subject"] == "limit shop:one"]
    assert (answer.code, found["state"]) == (1, "wrong")
    assert ended.id in found["detail"]


def test_queues_that_are_paused_or_late(shop: Path, app: App, finding: Found) -> None:
    enrol(app, "r1", heartbeat_at=time.time(), version=__version__)
    app.task(name="shop:add")(lambda: None).submit()
    rewrite(shop, "UPDATE holdfast_invocations SET due_at = due_at - 3600")
    assert "the oldest for" in finding("queue default", "hint", code=0)["detail"]
    app.queues.pause("default", reason="the bank is away", by="kai")
    found = finding("queue default", "hint", code=0)
    assert "paused by kai" in found["detail"]
    assert "the bank is away" in found["detail"]
    assert found["advice"] == "holdfast queues resume default"


def test_services_that_are_late(shop: Path, app: App, finding: Found) -> None:
    enrol(app, "r1", heartbeat_at=time.time())
    task = app.task(name="shop:add")(lambda: None)
    app.schedules.create("hourly", task, every="1h")
    assert finding("stuck work", "ok")
    rewrite(shop, "UPDATE holdfast_entries SET due_at = due_at - 7200 WHERE kind = 'schedule'")
    assert "'hourly' is past its tick" in finding("services", "wrong", code=1)["detail"]
    app.schedules.delete("hourly")
    expiring = task.options(expires="1h").submit()
    rewrite(shop, "UPDATE holdfast_invocations SET start_by = start_by - 7200 WHERE start_by IS NOT NULL")
    assert f"{expiring.id} has expired" in finding("services", "wrong")["detail"]
    expiring.cancel()
    ended = task.submit()
    ended.cancel()
    rewrite(
        shop,
        "UPDATE holdfast_invocations SET outbox = '[\"t\"]', changed_at = changed_at - 600 WHERE id = ?",
        ended.id,
    )
    assert f"the end of {ended.id}" in finding("services", "wrong")["detail"]


def test_a_run_that_sleeps_past_its_time(shop: Path, app: App, finding: Found) -> None:
    @app.workflow(name="shop:nap")
    async def nap() -> None:
        await sleep("2h")

    with app.runner(concurrency=1):
        run = nap.submit()
        eventually(lambda: run.status == "suspended", "the run sleeps")
    rewrite(shop, "UPDATE holdfast_invocations SET wake_at = wake_at - 20000 WHERE wake_at IS NOT NULL")
    assert f"the run {run.id} sleeps past" in finding("services", "wrong", code=1)["detail"]


@pytest.mark.xdist_group("mongo")
def test_on_mongodb(holdfast: Command, mongo_url: str) -> None:
    missing = holdfast("doctor", "--url", mongo_url, "--json")
    assert (missing.code, missing.json["ok"]) == (1, False)
    with MongoClient[dict[str, Any]](mongo_url) as client:
        assert client.get_default_database().list_collection_names() == [], "to look is not to make"
    assert holdfast("store", "prepare", "--url", mongo_url).code == 0
    answer = holdfast("doctor", "--url", mongo_url)
    assert answer.code == 0, answer.out
    for line in ("ok     schema", "ok     MongoDB", "ok     clock", "ok     stuck work"):
        assert line in answer.out
