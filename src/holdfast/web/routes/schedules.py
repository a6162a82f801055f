"""Schedules and triggers over HTTP."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from holdfast.model.names import counted
from holdfast.runtime.naming import declared, find_definition
from holdfast.schedules.api import Schedules
from holdfast.schedules.options import TIMING, ScheduleOptions, rules_of, timing_of
from holdfast.schedules.records import Rules, ScheduleRecord
from holdfast.schedules.rules import begins_after
from holdfast.schedules.service import ticks_within
from holdfast.showing import moment
from holdfast.web.actions import touched
from holdfast.web.documents import Document
from holdfast.web.principals import Role
from holdfast.web.problems import about, wrong
from holdfast.web.reading.schedules import ScheduleReading, clock_of, schedule_document, state_in_words
from holdfast.web.requests import Parameter, time_of
from holdfast.web.routing import Act, ApiRoute, Asked, Render, action


class RunNow(Act):
    """The body of a call beside the ticks. With the same `request`, a text of your choice, it is done once."""

    request: str | None = None


class Backfill(Act):
    """The body of calls for the ticks from one time to another, both included."""

    start: str
    end: str
    request: str | None = None


class ScheduleTerms(Act, kw_only=True):
    """When a schedule is due, and how its ticks are treated. With `start` or `end` null there is no such bound."""

    cron: str | None = None
    timezone: str | None = None
    every: str | None = None
    at: str | None = None
    overlap: str | None = None
    catch_up: str | None = None
    catch_up_most: int | None = None
    jitter: str | None = None
    start: str | msgspec.UnsetType | None = msgspec.UNSET
    end: str | msgspec.UnsetType | None = msgspec.UNSET
    unique: bool | None = None

    def options(self) -> ScheduleOptions:
        """Return what is given, as `Schedules.create` takes it. Raises `Problem`."""
        names = ("cron", "timezone", "every", "overlap", "catch_up", "catch_up_most", "jitter", "unique")
        found: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.at is not None:
            found["at"] = time_of("body.at", self.at)
        for name in ("start", "end"):
            if (text := getattr(self, name)) is not msgspec.UNSET:
                found[name] = None if text is None else time_of(f"body.{name}", text)
        return cast(ScheduleOptions, found)


class CreateSchedule(ScheduleTerms, kw_only=True):
    """The body of a new schedule: a task with its arguments, and one of `cron`, `every` and `at`."""

    name: str
    task: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    queue: str | None = None
    priority: int | None = None
    paused: bool = False


class UpdateSchedule(ScheduleTerms, kw_only=True):
    """The body of a change: what is not given stays. With a `task`, its arguments take the place of the old ones."""

    task: str | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    queue: str | None = None
    priority: int | None = None


async def list_schedules(asked: Asked) -> Render:
    return (await asked.runtime.arun(ScheduleReading(asked.runtime).all())).document


async def show_schedule(asked: Asked) -> Render:
    whole = await asked.runtime.arun(ScheduleReading(asked.runtime).one(asked.path["name"], asked.query["count"]))
    return lambda: whole.document(asked.codec)


async def list_triggers(asked: Asked) -> Render:
    return (await asked.runtime.arun(ScheduleReading(asked.runtime).triggers())).document


def _task(asked: Asked, body: CreateSchedule | UpdateSchedule) -> Any:
    """Return the task of a body, with its options. Raises `UnknownTask`, `Problem`."""
    with about("body.task"):
        task: Any = asked.runtime.tasks[find_definition(declared(asked.runtime), body.task or "", "").name]
    with about("body"):
        return task.options(queue=body.queue, priority=body.priority)


async def create_schedule(asked: Asked) -> Render:
    body: CreateSchedule = asked.body
    task, options = _task(asked, body), body.options()
    if body.preview:
        with about("body"):
            timing = timing_of(options)
            rules_of(options, Rules())
        said = f"'{body.name}' calls {task.definition.name}, {timing.describe()}. That fires nothing now."
        return lambda: touched(said)
    record = await Schedules(asked.runtime).acreate(
        body.name, task, body.args, body.kwargs, paused=body.paused, **options
    )
    return lambda: _changed(record)


def _changed(record: ScheduleRecord) -> Document:
    said = f"{record.name} is {state_in_words(record)}: {record.timing.describe()}"
    return touched(said, name=record.name, schedule=schedule_document(record, None))


async def update_schedule(asked: Asked) -> Render:
    body: UpdateSchedule = asked.body
    record, given = await _record(asked), body.options()
    options: dict[str, Any] = dict(given)
    if body.task is not None:
        options |= {"task": _task(asked, body), "args": body.args, "kwargs": body.kwargs}
    elif body.args or body.kwargs or body.queue is not None or body.priority is not None:
        raise wrong("body.task", "give the task with its new arguments, queue or priority: they make a new call")
    elif not options:
        raise wrong("body", "say what to change")
    again = " Code declares it, so a runner that starts makes it again what the code says." if record.declared else ""
    if body.preview:
        with about("body"):
            timing = timing_of(given, record.timing) if TIMING & given.keys() else record.timing
            rules_of(given, record.rules)
        said = f"'{record.name}' is then due {timing.describe()}, with other {', '.join(sorted(options))}.{again}"
        return lambda: touched(said)
    changed = await Schedules(asked.runtime).aupdate(record.name, **options)
    return lambda: _changed(changed)


async def _record(asked: Asked) -> ScheduleRecord:
    return await Schedules(asked.runtime).aget(asked.path["name"])


def _stored(record: ScheduleRecord) -> Render:
    next_at = "" if record.next_at is None else f"; next: {clock_of(record, record.next_at)}"
    return lambda: touched(f"'{record.name}' is {state_in_words(record)}{next_at}", name=record.name)


async def pause_schedule(asked: Asked) -> Render:
    record = await _record(asked)
    if asked.body.preview:
        return lambda: touched(f"'{record.name}' ({record.timing.describe()}) fires nothing until it is resumed.")
    reason, by = asked.body.reason, asked.principal.name
    return _stored(await Schedules(asked.runtime).apause(record.name, reason=reason, by=by))


async def resume_schedule(asked: Asked) -> Render:
    record = await _record(asked)
    if asked.body.preview:
        return lambda: touched(f"'{record.name}' goes on from now. The ticks of the pause do not fire.")
    return _stored(await Schedules(asked.runtime).aresume(record.name))


async def run_schedule(asked: Asked) -> Render:
    record = await _record(asked)
    if asked.body.preview:
        return lambda: touched(f"One call of {record.call.task} is submitted now, beside the ticks.", 1)
    made = await Schedules(asked.runtime).arun_now(record.name, request=asked.body.request)
    return lambda: touched(f"submitted {made.id}", 1, [made.id], id=made.id)


async def backfill_schedule(asked: Asked) -> Render:
    record, body = await _record(asked), asked.body
    first, last = time_of("body.start", body.start), time_of("body.end", body.end)
    after = begins_after(Rules(starts_at=first.timestamp()), float("-inf"))
    ticks = ticks_within(record, after, last.timestamp())
    if body.preview or not ticks:
        calls = f"{counted(len(ticks), 'call')} of {record.call.task}"
        return lambda: touched(f"{calls}, one for each tick.", len(ticks), map(moment, ticks))
    made = await Schedules(asked.runtime).abackfill(record.name, first, last, request=body.request)
    ids = [each.id for each in made]
    return lambda: touched(f"submitted {counted(len(ids), 'call')}", len(ids), ids, ids=ids)


async def delete_schedule(asked: Asked) -> Render:
    name = asked.path["name"]
    if asked.body.preview:
        record = await _record(asked)
        again = " Code declares it, so a runner that starts stores it again." if record.declared else ""
        return lambda: touched(f"'{name}' is forgotten. Calls that it has submitted stay.{again}")
    await Schedules(asked.runtime).adelete(name)
    return lambda: touched(f"the schedule '{name}' is deleted", name=name)


_TIMES = {"count": Parameter("how many of the next times", "number", low=0, high=1000, default=5)}
_AT = "/schedules/{name}"
ROUTES = (
    ApiRoute("GET", "/schedules", list_schedules, "list schedules"),
    action("/schedules", create_schedule, "call a task again and again", "schedule.create", CreateSchedule),
    ApiRoute("GET", _AT, show_schedule, "show one schedule with its next and last ticks", _TIMES),
    action(f"{_AT}/update", update_schedule, "change a schedule", "schedule.update", UpdateSchedule),
    action(f"{_AT}/pause", pause_schedule, "let a schedule rest", "schedule.pause"),
    action(f"{_AT}/resume", resume_schedule, "let a schedule go on, from now", "schedule.resume"),
    action(f"{_AT}/run", run_schedule, "submit the call of a schedule now", "schedule.run", RunNow),
    action(f"{_AT}/backfill", backfill_schedule, "submit a call for each tick", "schedule.backfill", Backfill),
    action(f"{_AT}/delete", delete_schedule, "forget a schedule", "schedule.delete", role=Role.ADMIN),
    ApiRoute("GET", "/triggers", list_triggers, "list triggers: what calls which task"),
)
