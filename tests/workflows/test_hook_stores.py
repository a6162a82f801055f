"""Hooks on SQLite and MongoDB: several processes resume at once, replies are lost, roles refuse."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.store.mongo.tools import database_of
from tests.support.patience import patient
from tests.support.proxy import Proxy

from holdfast import App, Status, hook
from holdfast.errors import HookConflict, HookNotFound
from holdfast.model.records import RunState
from holdfast.workflows.hooks_records import HOOK, WEBHOOK

ROOT = Path(__file__).resolve().parents[2]
RESUMER = """
import sys, time
from pathlib import Path
from holdfast import App
from holdfast.errors import HookNotFound
url, name, go, prefix, count = sys.argv[1:]
with App(url, name=name) as app:
    app.hooks(limit=1)  # it is open
    print("ready", flush=True)
    while not Path(go).exists():
        time.sleep(0.002)
    for number in range(int(count)):
        app.resume_hook("numbers", number, resume_id=f"{prefix}{number}")
"""


def make_app(url: str, **settings: Any) -> App:
    return App(url, name="hooks", poll_interval_seconds=0.1, **settings)


def entries_of(app: App, kind: str) -> list[Any]:
    async def read() -> list[Any]:
        return list(await (await app.runtime.engine()).store.entries(app.name, kind))

    return app.runtime.run(read())


def declare_adder(app: App, count: int) -> Any:
    @app.workflow(name="adder")
    async def adder() -> list[int]:
        numbers = hook("numbers", int)
        return [await numbers for _ in range(count)]

    return adder


def resume_in_processes(app: App, folder: Path, *prefixes: str, count: int) -> None:
    """Have a process for each prefix send numbers, all at once."""
    go = folder / "go"
    command = [sys.executable, "-c", RESUMER, app.url, app.name, str(go)]
    started = [
        subprocess.Popen(
            [*command, prefix, str(count)], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        for prefix in prefixes
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        go.touch()
        assert [process.wait(60) for process in started] == [0] * len(started)
    finally:
        for process in started:
            process.kill()
            process.communicate()


def received(run: Any) -> list[Any]:
    return [event.value for event in run.events() if event.type == "hook_received"]


def until_hooked(app: App, run: Any) -> None:
    """Wait until the log has the hook: by then its entries are there, that of its webhook too."""
    deadline = time.monotonic() + patient(20)
    while not any(event.type == "hook_created" for event in run.events()):
        assert time.monotonic() < deadline, run.explain()
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("prefixes", "times"), [(("a", "a"), 1), (("a", "b"), 2)], ids=["one id", "two ids"])
def test_two_processes_resume_at_once(url: str, tmp_path: Path, prefixes: tuple[str, ...], times: int) -> None:
    app = make_app(url, workflow_linger_seconds=0.05)
    adder = declare_adder(app, 10 * times + 1)
    with app, app.runner():
        run = adder.submit()
        until_hooked(app, run)
        resume_in_processes(app, tmp_path, *prefixes, count=10)
        app.resume_hook("numbers", -1)
        result = run.result(patient(30))
        assert sorted(result) == sorted([*range(10)] * times + [-1])
        assert received(run) == result  # in one order, which is that of the log
        assert result[-1] == -1
        assert entries_of(app, HOOK) == [] or run.record().outbox


def test_a_resume_wakes_a_suspended_run_and_reaches_one_in_memory(url: str) -> None:
    for linger in (0.0, 5.0):
        app = make_app(url, workflow_linger_seconds=linger)
        adder = declare_adder(app, 2)
        with app, app.runner():
            run = adder.submit()
            until_hooked(app, run)
            deadline = time.monotonic() + patient(20)
            while not linger and run.status is not Status.SUSPENDED:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            for number in range(2):
                app.resume_hook("numbers", number)
            assert run.result(patient(20)) == [0, 1]


def test_a_run_that_is_submitted_with_its_payload(url: str) -> None:
    app = make_app(url)

    @app.workflow(name="room")
    async def room(name: str) -> list[Any]:
        words = hook(f"room:{name}", str)
        return [name, await words, len(await words)]

    with app:
        run = app.resume_or_submit("room:1", "a", room, "1")
        assert app.resume_or_submit("room:1", "x" * 100_000, room, "1", resume_id="large") == run
        state = run.record().run
        assert isinstance(state, RunState)
        assert len(state.inbox) == 2
        with app.runner():
            assert run.result(patient(20)) == ["1", "a", 100_000]
            assert app.resume_or_submit("room:1", "b", room, "1") != run


def test_tokens_are_claimed_kept_and_freed(url: str) -> None:
    app = make_app(url, public_url="https://shop.example")

    @app.workflow(name="claims")
    async def claims(keep: str | None) -> str:
        try:
            return str(await hook("x", keep_token=keep))
        except HookConflict as error:
            return error.owner

    with app, app.runner():
        first = claims.submit(None)
        until_hooked(app, first)
        assert len(entries_of(app, WEBHOOK)) == 1
        assert claims.submit(None).result(patient(20)) == first.id
        app.resume_hook("x", "yes")
        assert first.result(patient(20)) == "yes"
        second = claims.submit("1d")
        until_hooked(app, second)
        app.resume_hook("x", "kept")
        assert second.result(patient(20)) == "kept"
        assert claims.submit(None).result(patient(20)) == second.id
        with pytest.raises(HookNotFound):
            app.resume_hook("x", "no")


# --- lost replies


@pytest.fixture
def proxy(replica_set: str) -> Iterator[Proxy]:
    hosts = replica_set.partition("://")[2].partition("/")[0].rpartition("@")[2]
    with Proxy(hosts.partition(",")[0]) as proxy:
        yield proxy


@pytest.fixture
def through_proxy(proxy: Proxy, mongo_url: str) -> str:
    options = "directConnection=true&retryWrites=false&retryReads=false&serverMonitoringMode=poll"
    return f"mongodb://{proxy.address}/{database_of(mongo_url)}?{options}"


LOST = {
    "the claim": ("insert", "holdfast_entries"),
    "the push": ("update", "holdfast_invocations"),
    "the removal": ("delete", "holdfast_entries"),
    "a page": ("insert", "holdfast_log"),
}


@pytest.mark.parametrize("what", LOST)
def test_a_lost_reply_changes_nothing(through_proxy: str, mongo_url: str, proxy: Proxy, what: str) -> None:
    command, collection = LOST[what]
    quick = {"retry_base_delay": 0.01, "use_change_streams": False}
    app = make_app(through_proxy, public_url="https://shop.example", **quick)
    client = make_app(through_proxy if what == "the push" else mongo_url, **quick)

    @app.workflow(name="asks")
    async def asks() -> list[int]:
        async with hook("x", int) as numbers:
            return [await numbers, await numbers]

    with app, client, app.runner():
        if what != "the push":
            proxy.lose_replies(command, collection, 2)
        run = asks.submit()
        until_hooked(client, run)
        if what == "the push":
            proxy.lose_replies(command, collection, 2)
        for number in range(2):
            client.resume_hook("x", number)
        assert run.result(patient(30)) == [0, 1]
        assert received(run) == [0, 1]
        assert entries_of(client, HOOK) == entries_of(client, WEBHOOK) == []
        assert proxy.lost == 2
