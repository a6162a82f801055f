"""Queues as their users meet them, on every store, with real threads."""

from __future__ import annotations

import asyncio
import datetime as dt
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.patience import eventually, patient

from holdfast import App, ResultTimeout, Status, UsageError

PATIENCE = patient(30.0)
STORES = ["memory", "sqlite", pytest.param("mongo", marks=pytest.mark.xdist_group("mongo"))]
DURABLE = STORES[1:]


def url_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    if kind == "mongo":
        return str(request.getfixturevalue("mongo_url"))
    return "memory://" if kind == "memory" else f"sqlite:///{folder}/shop.db"


def shop(url: str) -> App:
    app = App(url, name="shop", poll_interval_seconds=0.2)

    @app.task(name="mail", queue="mail")
    def mail(number: int) -> int:
        return number

    @app.task(name="add")
    def add(a: int, b: int) -> int:
        return a + b

    @app.task(name="render", tags=["gpu"])
    def render(number: int) -> int:
        return number

    return app


@pytest.fixture(params=STORES)
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    with shop(url_of(request.param, request, tmp_path)) as app:
        yield app


@pytest.fixture(params=DURABLE)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(request.param, request, tmp_path)


def until_runners_know_of(app: App, paused: str) -> None:
    """Wait for the runner of this app: a pause reaches it by a hint, or at its next look."""
    runner = next(iter(app.runtime.runners))._runner
    assert runner is not None
    eventually(lambda: runner._permit is not None and paused in runner._permit.paused, "the runner knows of the pause")


# --- pausing


def test_a_paused_queue_takes_work_and_gives_none_until_it_is_resumed(app: App) -> None:
    mail, add = app.get_task("mail"), app.get_task("add")
    with app.runner(concurrency=4):
        assert mail.submit(1).result(PATIENCE) == 1
        pause = app.queues.pause("mail", reason="the relay is down", by="ann")
        assert (pause.name, pause.by, pause.reason) == ("mail", "ann", "the relay is down")
        assert app.queues.pause("mail", by="bob") == pause
        until_runners_know_of(app, "mail")
        waiting = mail.map(range(3))
        assert add.submit(1, 2).result(PATIENCE) == 3
        with pytest.raises(ResultTimeout, match="the queue 'mail' was paused by ann") as told:
            waiting[0].result(0.5)
        assert "(the relay is down). To let it go on: holdfast queues resume mail." in str(told.value)
        assert waiting[0].explain() in str(told.value) or "ago" in waiting[0].explain()
        assert [invocation.status for invocation in waiting] == [Status.REGISTERED] * 3
        assert app.queues.resume("mail")
        assert waiting.results(PATIENCE) == [0, 1, 2]
        assert not app.queues.resume("mail")


def test_a_pause_reaches_the_runners_of_other_processes(url: str) -> None:
    """Each app has its own store and its own hints, as a process has."""
    with shop(url) as first, shop(url) as second, first.runner():
        assert first.get_task("mail").submit(1).result(PATIENCE) == 1
        second.queues.pause("mail")
        until_runners_know_of(first, "mail")
        waiting = second.get_task("mail").submit(2)
        assert first.get_task("add").submit(1, 1).result(PATIENCE) == 2
        assert waiting.status is Status.REGISTERED
        second.queues.resume("mail")
        assert waiting.result(PATIENCE) == 2


def test_queues_are_paused_and_listed_in_async_code(app: App) -> None:
    async def scenario() -> None:
        await app.queues.apause("mail")
        assert [queue.name for queue in await app.queues.alist() if queue.pause] == ["mail"]
        assert await app.queues.aresume("mail")
        assert not [queue for queue in await app.queues.alist() if queue.pause]

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["", "a b", "a|b", "a,b", "x" * 201, None, 7])
def test_what_is_no_name_of_a_queue_is_refused(name: Any) -> None:
    with App("memory://") as app:
        with pytest.raises(UsageError, match="no name for a queue"):
            app.queues.pause(name)
        with pytest.raises(UsageError, match="no name for a queue"):
            app.queues.resume(name)


# --- listing


def test_the_list_tells_what_waits_runs_and_has_ended(app: App) -> None:
    gate = threading.Event()

    @app.task(name="hold", queue="slow")
    def hold() -> None:
        gate.wait(PATIENCE)

    assert {queue.name: queue.waiting for queue in app.queues.list()} == {"default": 0, "mail": 0, "slow": 0}
    app.get_task("mail").options(delay="1h").submit(1)
    app.queues.pause("mail")
    app.get_task("mail").map(range(3))
    with app.runner(queues=["slow", "extra"]):
        held = hold.submit()
        eventually(lambda: held.status is Status.RUNNING, "it runs")
        found = {queue.name: queue for queue in app.queues.list()}
        mail, slow = found["mail"], found["slow"]
        assert (mail.waiting, mail.scheduled, mail.running, mail.runners) == (3, 1, 0, 0)
        assert mail.pause is not None
        assert mail.oldest_seconds is not None
        assert 0 <= mail.oldest_seconds < PATIENCE
        assert (slow.waiting, slow.running, slow.runners, slow.oldest_seconds) == (0, 1, 1, None)
        assert found["extra"].runners == 1
        gate.set()
        held.result(PATIENCE)
        eventually(lambda: {q.name: q.per_minute for q in app.queues.list()}["slow"] > 0, "the rate is told")


# --- when and where


def test_a_runner_serves_its_queues_and_tags(app: App) -> None:
    mail, add, render = (app.get_task(name) for name in ("mail", "add", "render"))
    with app.runner(queues=["mail"]):
        other = add.submit(1, 1)
        assert mail.submit(1).result(PATIENCE) == 1
        assert "no live runner serves the queue 'default'" in other.explain()
        assert add.options(queue="mail").submit(2, 2).result(PATIENCE) == 4
    picture = render.submit(7)
    with app.runner():
        assert other.result(PATIENCE) == 2
        assert "with the tag gpu" in picture.explain()
    with app.runner(tags=["gpu"]):
        assert picture.result(PATIENCE) == 7


FAR = dt.datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=dt.UTC)


@pytest.mark.parametrize("at", [FAR, dt.datetime(2100, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=5.5))), 4e9 + 0.25])
def test_a_call_may_be_due_in_any_year_and_costs_no_memory(app: App, at: dt.datetime | float) -> None:
    moment = at.timestamp() if isinstance(at, dt.datetime) else at
    far = app.get_task("add").options(at=at).submit(1, 2)
    with app.runner() as runner:
        assert app.get_task("add").submit(1, 1).result(PATIENCE) == 2
        assert far.record().due_at == moment
        assert "not due for another" in far.explain()
        inner = runner._runner
        assert inner is not None
        (worker,) = [inner._workers._running_worker.worker]  # type: ignore[union-attr]
        assert (len(worker._reserve), worker._running.records) == (0, {})  # type: ignore[union-attr]
    assert far.status is Status.REGISTERED


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"at": dt.datetime(2030, 1, 1)}, "no time zone"),
        ({"at": float("nan")}, "expected an aware datetime or seconds"),
        ({"at": float("inf")}, "expected an aware datetime or seconds"),
        ({"at": -1}, "expected an aware datetime or seconds"),
        ({"at": True}, "expected an aware datetime or seconds"),
        ({"at": "tomorrow"}, "expected an aware datetime or seconds"),
        ({"at": 253_402_300_800}, "expected an aware datetime or seconds"),
        ({"at": dt.datetime(1969, 1, 1, tzinfo=dt.UTC)}, "before 1970"),
        (
            {"at": dt.datetime(9999, 12, 31, tzinfo=dt.timezone(dt.timedelta(hours=-23))).replace(hour=23)},
            "^at=.*beyond",
        ),
        ({"delay": -1}, "^delay=-1 .*negative"),
        ({"delay": "-5m"}, "^delay='-5m' .*negative"),
        ({"delay": ""}, "^delay='' .*empty"),
        ({"cancel_grace": -1}, "^cancel_grace=-1 .*negative"),
        ({"key": "k", "key_for": -1}, "^key_for=-1 .*negative"),
        ({"timeout": "5 apples"}, "^timeout='5 apples': unknown unit"),
        ({"soft_timeout": -1}, "^soft_timeout=-1 "),
        ({"expires": -1}, "^expires=-1 "),
        ({"debounce": -1}, "^debounce=-1 "),
        ({"debounce": "5s", "debounce_max_wait": "1s"}, "debounce_max_wait=1s is shorter than debounce=5s"),
        ({"throttle": -1}, "^throttle=-1 "),
        ({"cancel_children": "no"}, "cancel_children='no': expected True or False"),
        ({"tags": ["gpu"]}, r"a single call of add has no option tags. It is declared .*@app.task\(tags=…\)"),
        ({"log_lines": 3}, r"has no option log_lines. It is declared for all of them: @app.task\(log_lines=…\)"),
        ({"prioritty": 3}, "has no option prioritty. Did you mean priority"),
        ({"zzz": 3}, "There are: .*delay, at, priority, .*, cancel_children"),
        ({"debounce": 1e12}, "^debounce=11574074d1h46m40s leads beyond the year 9999"),
        ({"throttle": 1e12}, "^throttle=.* beyond the year 9999"),
        ({"expires": 1e12}, "^expires=.* beyond the year 9999"),
        ({"delay": float("nan")}, "not a number"),
        ({"delay": float("inf")}, "too long"),
        ({"delay": True}, "not a length of time"),
        ({"delay": dt.timedelta(days=-1)}, "negative"),
        ({"delay": 1e12}, "beyond the year 9999"),
        ({"delay": "5m", "at": 4e9}, "not both"),
        ({"priority": 101}, "from -100 to 100"),
        ({"priority": -101}, "from -100 to 100"),
        ({"priority": True}, "from -100 to 100"),
        ({"priority": 1.0}, "from -100 to 100"),
        ({"priority": "high"}, "from -100 to 100"),
        ({"queue": "a b"}, "no name for a queue"),
        ({"queue": ""}, "no name for a queue"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_stored(options: dict[str, Any], says: str) -> None:
    with shop("memory://") as app:
        with pytest.raises(UsageError, match=says):
            app.get_task("add").options(**options).submit(1, 2)
        assert app.invocations() == []


# --- fairness


def test_a_flood_in_one_queue_keeps_no_other_waiting(app: App) -> None:
    """The flood is older, and more urgent; and there is more of it than could be done while the test waits."""

    @app.task(name="flood", queue="flood", priority=100)
    def flood(number: int) -> None:
        time.sleep(0.05)

    flood.map(range(2000))
    with app.runner(concurrency=2, drain_timeout=0):
        mail = app.get_task("mail").submit(1)
        assert mail.result(PATIENCE) == 1
        assert app.get_task("mail").map(range(5)).results(PATIENCE) == [0, 1, 2, 3, 4]
        assert next(queue for queue in app.queues.list() if queue.name == "flood").waiting > 1000


@pytest.mark.parametrize(
    "queues", [{"mail": 0}, {"mail": True}, {"mail": 1.5}, {"mail": 1001}, {"a b": 1}, "mail", [7]]
)
def test_queues_of_a_runner_that_make_no_sense_are_refused(queues: Any) -> None:
    with App("memory://") as app, pytest.raises(UsageError):
        app.runner(queues=queues)


def test_the_roster_tells_the_weights(app: App) -> None:
    with app.runner(queues={"mail": 3, "default": 1}):
        (runner,) = app.runners()
        assert (runner.queues, runner.weights) == (("default", "mail"), {"mail": 3})
        assert runner.serves.weights == {"mail": 3}


def test_one_that_waits_for_its_child_says_so_and_what_holds_that_one_up(app: App) -> None:
    mail = app.get_task("mail")
    app.queues.pause("mail", by="ann")

    @app.task(name="letter")
    def letter() -> object:
        return mail.submit(7).result(PATIENCE)

    with app.runner(concurrency=2):
        parent = letter.submit()
        eventually(lambda: parent.status == "paused", "the parent waits")
        (child,) = app.invocations(parent=parent.id)
        says = parent.explain()
        assert f"It waits for {child.id} (mail, registered)" in says
        assert f"{child.id}: the queue 'mail' was paused by ann" in says
        app.queues.resume("mail")
        assert parent.result(PATIENCE) == 7
        assert parent.explain() == "ended with a result."
