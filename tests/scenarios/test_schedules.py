"""Schedules as people make them, on every store, fired by a real runner."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from tests.support.patience import eventually, patient

from holdfast import App, UsageError, scheduled
from holdfast.cli.reach import with_store
from holdfast.errors import CorruptRecord, InvalidSchedule, NotEncodable, ScheduleExists, UnknownSchedule
from holdfast.schedules import Cron, cron, every
from holdfast.schedules.records import to_entry

LATER = dt.datetime(2090, 1, 1, tzinfo=dt.UTC)


@pytest.fixture(params=["memory", "sqlite", "mongodb"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    url = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/shop.db"}.get(request.param)
    with App(url or request.getfixturevalue("mongo_url"), poll_interval_seconds=0.2) as app:
        yield app


@pytest.fixture
def here() -> Iterator[App]:
    with App("memory://") as app:
        yield app


def echo(app: App) -> Any:
    @app.task(name="echo")
    def echo(x: int = 0, *, y: str = "") -> str:
        return f"{x}{y}"

    return echo


def test_a_schedule_is_made_found_changed_and_forgotten(app: App) -> None:
    made = app.schedules.create("nightly", echo(app), [7], {"y": "!"}, cron="0 3 * * *", timezone="Europe/Rome")
    assert app.schedules.get("nightly") == made
    assert [record.name for record in app.schedules.list()] == ["nightly"]
    rome = ZoneInfo("Europe/Rome")
    assert {moment.astimezone(rome).hour for moment in app.schedules.next_times("nightly", 400)} == {3}
    changed = app.schedules.update("nightly", every="90s", overlap="skip")
    assert (changed.timing, changed.rules.overlap, changed.call) == (every("90s"), "skip", made.call)
    assert changed.uid == made.uid
    app.schedules.delete("nightly")
    assert app.schedules.list() == []
    with pytest.raises(UnknownSchedule, match="no schedule 'nightly'"):
        app.schedules.get("nightly")


def test_its_ticks_are_submitted_with_its_arguments(app: App) -> None:
    task = echo(app)
    with app.runner():
        made = app.schedules.create("often", task.options(priority=9), [7], {"y": "!"}, every="1s")
        eventually(lambda: app.schedules.get("often").progress.fired >= 2, "two ticks")
    found = [record for record in app.invocations() if record.task == "echo"]
    assert len(found) >= 2
    ticks = sorted(record.due_at for record in found)
    assert ticks == list(made.timing.ticks(made.through, ticks[-1])), "none was missed and none invented"
    first = min(found, key=lambda record: record.due_at)
    assert app.invocation(first.id).result(patient(10)) == "7!"
    assert first.priority == 9
    assert first.history[0].why.endswith("of the schedule 'often'")


def test_creating_it_again_does_nothing_unless_it_says_something_else(app: App) -> None:
    task = echo(app)
    made = app.schedules.create("nightly", task, cron="0 3 * * *")
    assert app.schedules.create("nightly", task, cron="0  3 * * *") == made
    with pytest.raises(ScheduleExists, match="Change it with update"):
        app.schedules.create("nightly", task, cron="0 4 * * *")
    assert app.schedules.get("nightly") == made


def test_a_pause_is_kept_and_says_who_and_why(app: App) -> None:
    app.schedules.create("nightly", echo(app), every="1h")
    paused = app.schedules.pause("nightly", reason="the disk is full", by="ann")
    assert paused.pause is not None
    assert (paused.pause.by, paused.pause.why) == ("ann", "the disk is full")
    assert app.schedules.next_times("nightly") == []
    assert app.schedules.pause("nightly", reason="again").pause == paused.pause
    resumed = app.schedules.resume("nightly")
    assert resumed.pause is None
    assert resumed.next_at is not None
    assert app.schedules.resume("nightly") == resumed


def test_run_now_is_beside_the_ticks_and_once_for_a_request(app: App) -> None:
    app.schedules.create("nightly", echo(app), [1], at=LATER)
    first, again = (app.schedules.run_now("nightly", request="ticket 7") for _ in range(2))
    other = app.schedules.run_now("nightly")
    assert first == again
    assert first != other
    assert first.history()[0].why == "the schedule 'nightly' was asked to run now"
    assert app.schedules.get("nightly").progress.fired == 0


def test_a_backfill_makes_up_for_a_range_of_ticks(app: App) -> None:
    app.schedules.create("daily", echo(app), cron="0 0 * * *")
    start, end = dt.datetime(2026, 3, 1, tzinfo=dt.UTC), dt.datetime(2026, 3, 4, tzinfo=dt.UTC)
    made = app.schedules.backfill("daily", start, end, request="march")
    assert [each.history()[0].why[5:15] for each in made] == ["2026-03-01", "2026-03-02", "2026-03-03", "2026-03-04"]
    assert app.schedules.backfill("daily", start, end, request="march") == made
    with pytest.raises(UsageError, match="the range is empty"):
        app.schedules.backfill("daily", end, start)
    with pytest.raises(UsageError, match="more than 10,000 ticks"):
        app.schedules.backfill("daily", dt.datetime(1970, 1, 1, tzinfo=dt.UTC), dt.datetime(2026, 1, 1, tzinfo=dt.UTC))


def test_the_async_sisters_do_the_same(app: App) -> None:
    task = echo(app)

    async def scenario() -> None:
        made = await app.schedules.acreate("nightly", task, every="1h")
        assert await app.schedules.aget("nightly") == made
        assert await app.schedules.alist() == [made]
        assert (await app.schedules.aupdate("nightly", jitter="5s")).rules.jitter_seconds == 5
        await app.schedules.apause("nightly")
        await app.schedules.aresume("nightly")
        assert len(await app.schedules.anext_times("nightly", 2)) == 2
        now = await app.schedules.arun_now("nightly")
        assert (await now.arecord()).task == "echo"
        day = dt.timedelta(days=1)
        assert len(await app.schedules.abackfill("nightly", LATER - day, LATER)) == 25
        await app.schedules.adelete("nightly")

    asyncio.run(scenario())


def test_one_that_is_made_while_the_services_rest_is_noticed(app: App) -> None:
    with app.runner():
        app.schedules.create("once", echo(app), at=time.time() + 1.5)
        eventually(lambda: app.schedules.get("once").progress.fired == 1, "its only tick")
        assert app.schedules.get("once").next_at is None


def test_one_whose_time_is_over_is_refused_unless_it_is_there(app: App) -> None:
    past, task = dt.datetime(2020, 1, 1, tzinfo=dt.UTC), echo(app)
    for options in ({"at": past}, {"every": "1h", "end": past}):
        with pytest.raises(InvalidSchedule, match="would never be due"):
            app.schedules.create("late", task, paused=True, **options)  # type: ignore[misc]
    assert app.schedules.list() == []
    with app.runner():
        at = time.time() + 1.5
        made = app.schedules.create("late", task, at=at)
        eventually(lambda: app.schedules.get("late").progress.fired == 1, "its only tick")
    assert app.schedules.create("late", task, at=at).uid == made.uid


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "say when it is due"),
        ({"cron": "* * * * *", "every": "5s"}, "by one of"),
        ({"cron": "0 0 31 2 *"}, "31"),
        ({"cron": "61 * * * *"}, "61"),
        ({"cron": "0 0 * * *", "timezone": "Europe/Roma"}, "Europe/Rome"),
        ({"every": "5s", "timezone": "UTC"}, "belongs to cron"),
        ({"every": "0.1s"}, "at least a second"),
        ({"at": dt.datetime(2030, 1, 1)}, "no time zone"),
        ({"timing": "daily"}, "expected what cron"),
        ({"every": "5s", "overlap": "sometimes"}, "allow, skip, queue, cancel"),
        ({"every": "5s", "catch_up": True}, "none, last, all"),
        ({"every": "5s", "catch_up_most": 0}, "from 1 to"),
        ({"every": "5s", "start": 2e9, "end": 1e9}, "ends before it starts"),
    ],
)
def test_what_makes_no_sense_is_refused(here: App, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSchedule, match=message):
        here.schedules.create("nightly", echo(here), **options)
    assert here.schedules.list() == []


def test_a_call_that_does_not_fit_is_refused(here: App) -> None:
    task: Any = echo(here)
    with pytest.raises(UsageError, match="z"):
        here.schedules.create("nightly", task, kwargs={"z": 1}, every="5s")
    with pytest.raises(UsageError, match="expected a list"):
        here.schedules.create("nightly", task, "abc", every="5s")
    with pytest.raises(UsageError, match="calls a task"):
        here.schedules.create("nightly", print, every="5s")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is no name"):
        here.schedules.create("a|b", task, every="5s")
    with pytest.raises(UsageError, match=r"no option corn\. Did you mean cron"):
        here.schedules.create("nightly", task, corn="* * * * *")  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="give task="):
        here.schedules.update("nightly", args=[1])


def test_what_schedules_submit_is_listed_newest_first_among_the_others(here: App) -> None:
    task = echo(here)
    first = task.submit(0)
    here.schedules.create("often", task, [7], every="1s")
    with here.runner():
        eventually(lambda: here.schedules.get("often").progress.fired >= 2, "two ticks")
    now = here.schedules.run_now("often")
    last = task.submit(1)
    listed = [record for record in here.invocations() if record.task == "echo"]
    assert [listed[0].id, listed[1].id, listed[-1].id] == [last.id, now.id, first.id]
    assert [record.due_at for record in listed[2:-1]] == sorted((r.due_at for r in listed[2:-1]), reverse=True)


# --- what is stored by others, or was long ago


def rewritten(app: App, name: str, **fields: Any) -> None:
    """The schedule as if it had come to be so."""
    record = app.schedules.get(name)
    changed = msgspec.structs.replace(record, version=record.version + 1, **fields)
    assert with_store(app, methodcaller("put_entry", to_entry(changed)))


def test_one_that_cannot_be_read_here_does_not_keep_the_others_from_firing(here: App) -> None:
    """Such as one in a time zone that only a newer host knows."""
    task = echo(here)
    here.schedules.create("good", task, every="1s")
    here.schedules.create("bad", task, cron="* * * * * *")
    rewritten(here, "bad", timing=Cron("* * * * * *", "Mars/Phobos"), next_at=time.time() - 5)
    with here.runner():
        eventually(lambda: here.schedules.get("good").progress.fired, "its tick")
    with pytest.raises(CorruptRecord, match="'bad' cannot be read: Unknown time zone 'Mars/Phobos'"):
        here.schedules.get("bad")
    here.schedules.delete("bad")
    with pytest.raises(UnknownSchedule):
        here.schedules.delete("bad")


@pytest.mark.parametrize("bound", ["start", "end"])
def test_another_start_or_end_brings_no_tick_of_the_past(here: App, bound: str) -> None:
    now = time.time()
    moment = {"start": now + 3600, "end": now - 3600}[bound]
    here.schedules.create("hourly", echo(here), every="60s", catch_up="all")
    here.schedules.update("hourly", **{bound: moment})  # type: ignore[misc]
    rewritten(here, "hourly", through=now - 86400, next_at={"start": moment, "end": None}[bound])
    changed = here.schedules.update("hourly", **{bound: None})  # type: ignore[misc]
    assert changed.next_at is not None
    assert now < changed.next_at < now + 120


def test_another_end_loses_no_tick_that_is_due(here: App) -> None:
    now = time.time()
    here.schedules.create("hourly", echo(here), every="60s", catch_up="all", start=now - 200)
    rewritten(here, "hourly", through=now - 86400, next_at=now - 150)
    changed = here.schedules.update("hourly", start=None, end=LATER)
    assert changed.next_at is not None
    assert now - 200 <= changed.next_at < now - 100, "nor is there one before the old start"


def test_the_last_tick_and_the_last_invocation_belong_together(here: App) -> None:
    here.schedules.create("often", echo(here).options(queue="nobody's"), every="1s", unique=True, catch_up="all")
    now = time.time()
    rewritten(here, "often", through=now - 5, next_at=now - 4)
    with here.runner(queues=["default"]):
        eventually(lambda: here.schedules.get("often").progress.skipped >= 3, "several ticks at once; one is enough")
    (waiting,) = here.invocations(queue="nobody's")
    progress = here.schedules.get("often").progress
    assert (progress.fired, progress.last_id, progress.last_tick) == (1, waiting.id, waiting.due_at)


def test_options_that_a_schedule_cannot_keep_are_refused(here: App) -> None:
    task = echo(here)
    for options in ({"key": "x"}, {"delay": "5m"}, {"at": LATER}, {"session": object()}):
        with pytest.raises(UsageError, match=f"{next(iter(options))}="):
            here.schedules.create("nightly", task.options(**options), every="1h")


def test_a_name_is_one_schedule(here: App) -> None:
    """Of two, one would silently take the place of the other, at each start of a runner."""

    @here.task(name="one", triggers=[scheduled(every("1h"), name="same")])
    def one() -> None: ...

    def other() -> None: ...

    with pytest.raises(InvalidSchedule, match="two schedules are named 'same': of one and of other"):
        here.task(name="other", triggers=[scheduled(every("2h"), name="same")])(other)
    with pytest.raises(InvalidSchedule, match="two schedules are named 'x': of other and of other"):
        here.task(name="other", triggers=[scheduled(every(f"{hours}h"), name="x") for hours in (1, 2)])(other)


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"every": "2h"}, "it is not due every 2h"),
        ({"every": "1h", "kwargs": {"y": "!"}}, "it has other arguments"),
        ({"every": "1h", "overlap": "skip", "jitter": "1m"}, "it has another overlap, jitter"),
    ],
)
def test_one_that_is_there_says_what_differs(here: App, options: dict[str, Any], difference: str) -> None:
    here.schedules.create("often", task := echo(here), every="1h")
    with pytest.raises(ScheduleExists, match=rf"\(every 1h, echo\), and it says something else: {difference}\. Change"):
        here.schedules.create("often", task, **options)


def test_a_name_that_is_not_there_suggests_one_that_is(here: App) -> None:
    task = echo(here)
    for name in ("shop:report#95e9f65d", "nightly"):
        here.schedules.create(name, task, every="1h")
    for wrong, right in (("shop:report", "shop:report#95e9f65d"), ("nightli", "nightly")):
        with pytest.raises(UnknownSchedule, match=f"no schedule '{wrong}'. Did you mean '{right}'"):
            here.schedules.get(wrong)


def test_a_declared_call_that_cannot_be_stored_is_named(here: App) -> None:
    @here.task(name="one", triggers=[scheduled(every("1h"), [object()])])
    def one(x: object) -> None: ...

    with pytest.raises(NotEncodable) as error, here.runner():
        pass
    assert error.value.__notes__ == ["That is what one is to be called with, every 1h."]


def test_another_expression_is_read_on_the_same_clock(here: App) -> None:
    """What is not given stays as it is, and that is true of half a timing, too."""
    here.schedules.create("nightly", echo(here), cron="0 3 * * *", timezone="Europe/Rome")
    assert here.schedules.update("nightly", cron="0 4 * * *").timing == cron("0 4 * * *", timezone="Europe/Rome")
    assert here.schedules.update("nightly", timezone="Asia/Tokyo").timing == cron("0 4 * * *", timezone="Asia/Tokyo")
    here.schedules.update("nightly", every="1h")
    assert here.schedules.update("nightly", cron="0 5 * * *").timing == cron("0 5 * * *")
    here.schedules.update("nightly", every="1h")
    with pytest.raises(InvalidSchedule, match="timezone= belongs to cron="):
        here.schedules.update("nightly", timezone="Asia/Tokyo")


def deployed(url: str, *, task: bool, schedule: bool) -> App:
    """A version of the program: with a task, or without, and with its schedule, or without."""
    app = App(url)
    if task:
        given = [scheduled(every("1h"), [7], name="hourly", overlap="skip")] if schedule else []
        app.task(name="echo", triggers=given)(lambda x: x)
    return app


def test_what_code_declares_is_as_declared_and_rests_when_it_does_not(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    with deployed(url, task=True, schedule=True) as app:
        with app.runner():
            made = app.schedules.get("hourly")
        assert (made.declared, made.rules.overlap, made.next_at is not None) == (True, "skip", True)
        app.schedules.update("hourly", every="5h")
        app.schedules.pause("hourly", reason="why not")
        with app.runner():
            again = app.schedules.get("hourly")
        assert (again.timing, again.uid, again.pause is not None) == (made.timing, made.uid, True)
        app.schedules.resume("hourly")
    with deployed(url, task=True, schedule=False) as app, app.runner():
        eventually(lambda: app.schedules.get("hourly").retired_at is not None, "it rests")
        assert app.schedules.next_times("hourly") == []
    with deployed(url, task=True, schedule=True) as app, app.runner():
        woken = app.schedules.get("hourly")
        assert (woken.retired_at, woken.uid, woken.next_at is not None) == (None, made.uid, True)


def test_one_whose_task_nobody_knows_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may be the task of another program, which is down for a while; or it is gone, and calls pile up."""
    url = f"sqlite:///{tmp_path}/shop.db"
    with deployed(url, task=True, schedule=True) as app, app.runner():
        pass
    with deployed(url, task=False, schedule=False) as app, app.runner():
        eventually(
            lambda: "schedule 'hourly' for the unknown task echo: no living runner knows" in caplog.text,
            "a warning",
        )
        assert app.schedules.get("hourly").retired_at is None


def test_texts_that_are_none_are_refused_before_they_are_stored(here: App) -> None:
    here.schedules.create("hourly", echo(here), every="1h")
    for call in (
        lambda: here.schedules.pause("hourly", reason=5),  # type: ignore[arg-type]
        lambda: here.schedules.pause("hourly", by=5),  # type: ignore[arg-type]
        lambda: here.schedules.run_now("hourly", request=5),  # type: ignore[arg-type]
        lambda: here.schedules.run_now("hourly", request=""),
        lambda: here.schedules.backfill("hourly", 0.0, 1.0, request=5),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError, match="expected"):
            call()
    assert here.schedules.get("hourly").pause is None


def test_large_arguments_are_kept_with_their_schedule(app: App) -> None:
    @app.task(name="measure")
    def measure(data: str) -> int:
        return len(data)

    def collected() -> int:
        engine = app.runtime.ready()
        return app.runtime.run(engine.store.collect_payloads(engine.app, engine.store.now() + 10, 100)).removed

    large, larger = "x" * 200_000, "x" * 200_001
    record = app.schedules.create("often", measure, [large], every="1s")
    assert app.schedules.create("often", measure, [large], every="1s") == record
    assert len(record.call.arguments) < 200
    with pytest.raises(ScheduleExists, match="it has other arguments"):
        app.schedules.create("often", measure, [larger], every="1s")
    assert collected() == 1
    with app.runner():
        asked = app.schedules.run_now("often")
        assert asked.result(timeout=patient(20)) == 200_000
        eventually(lambda: len(app.invocations(task="measure", status="success")) > 1, "it is called")
        app.schedules.update("often", task=measure, args=[larger])
        assert app.schedules.run_now("often").result(timeout=patient(20)) == 200_001
    app.schedules.delete("often")
    app.purge(task="measure", force=True)
    for open_one in app.invocations(task="measure"):
        app.invocation(open_one.id).cancel()
    app.purge(task="measure", force=True)
    assert collected() == 2


def test_code_declares_large_arguments(app: App) -> None:
    @app.task(name="measure", triggers=[scheduled(every("1s"), ["x" * 200_000])])
    def measure(data: str) -> int:
        return len(data)

    with app.runner():
        eventually(lambda: app.invocations(task="measure", status="success"), "it is called")
    (done, *_) = app.invocations(task="measure", status="success")
    assert app.invocation(done.id).result(timeout=patient(20)) == 200_000
