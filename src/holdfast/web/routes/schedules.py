"""Schedules and triggers over HTTP."""

from __future__ import annotations

from typing import Any

from holdfast.model.names import counted
from holdfast.runtime.naming import declared, find_definition
from holdfast.schedules.api import Schedules
from holdfast.schedules.records import Rules, ScheduleRecord
from holdfast.schedules.rules import begins_after
from holdfast.schedules.service import ticks_within
from holdfast.showing import moment
from holdfast.web.actions import touched
from holdfast.web.principals import Role
from holdfast.web.problems import about
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


class CreateSchedule(Act):
    """The body of a new schedule: a task with its arguments, and one of `cron`, `every` and `at`."""

    name: str
    task: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    cron: str | None = None
    timezone: str | None = None
    every: str | None = None
    at: str | None = None
    overlap: str | None = None
    catch_up: str | None = None
    jitter: str | None = None
    paused: bool = False


async def list_schedules(asked: Asked) -> Render:
    return (await asked.runtime.arun(ScheduleReading(asked.runtime).all())).document


async def show_schedule(asked: Asked) -> Render:
    whole = await asked.runtime.arun(ScheduleReading(asked.runtime).one(asked.path["name"], asked.query["count"]))
    return lambda: whole.document(asked.codec)


async def list_triggers(asked: Asked) -> Render:
    return (await asked.runtime.arun(ScheduleReading(asked.runtime).triggers())).document


async def create_schedule(asked: Asked) -> Render:
    body: CreateSchedule = asked.body
    with about("body.task"):
        task = asked.runtime.tasks[find_definition(declared(asked.runtime), body.task, "").name]
    given = {name: getattr(body, name) for name in ("cron", "timezone", "every", "overlap", "catch_up", "jitter")}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if body.at is not None:
        options["at"] = time_of("body.at", body.at)
    if body.preview:
        return lambda: touched(f"'{body.name}' calls {task.definition.name}. That fires nothing now.")
    record = await Schedules(asked.runtime).acreate(
        body.name, task, body.args, body.kwargs, paused=body.paused, **options
    )
    return lambda: touched(
        f"{record.name} is {state_in_words(record)}: {record.timing.describe()}",
        name=record.name,
        schedule=schedule_document(record, None),
    )


async def _record(asked: Asked) -> ScheduleRecord:
    return await Schedules(asked.runtime).aget(asked.path["name"])


def _told(record: ScheduleRecord) -> Render:
    next_at = "" if record.next_at is None else f"; next: {clock_of(record, record.next_at)}"
    return lambda: touched(f"'{record.name}' is {state_in_words(record)}{next_at}", name=record.name)


async def pause_schedule(asked: Asked) -> Render:
    record = await _record(asked)
    if asked.body.preview:
        return lambda: touched(f"'{record.name}' ({record.timing.describe()}) fires nothing until it is resumed.")
    reason, by = asked.body.reason, asked.principal.name
    return _told(await Schedules(asked.runtime).apause(record.name, reason=reason, by=by))


async def resume_schedule(asked: Asked) -> Render:
    record = await _record(asked)
    if asked.body.preview:
        return lambda: touched(f"'{record.name}' goes on from now. The ticks of the pause do not fire.")
    return _told(await Schedules(asked.runtime).aresume(record.name))


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
        again = " Code declares it, so a runner that starts stores it anew." if record.declared else ""
        return lambda: touched(f"'{name}' is forgotten. Calls that it has submitted stay.{again}")
    await Schedules(asked.runtime).adelete(name)
    return lambda: touched(f"the schedule '{name}' is deleted", name=name)


_TIMES = {"count": Parameter("how many of the next times", "number", low=0, high=1000, default=5)}
_AT = "/schedules/{name}"
ROUTES = (
    ApiRoute("GET", "/schedules", list_schedules, "list schedules"),
    action("/schedules", create_schedule, "call a task again and again", "schedule.create", CreateSchedule),
    ApiRoute("GET", _AT, show_schedule, "show one schedule with its next and last ticks", _TIMES),
    action(f"{_AT}/pause", pause_schedule, "let a schedule rest", "schedule.pause"),
    action(f"{_AT}/resume", resume_schedule, "let a schedule go on, from now", "schedule.resume"),
    action(f"{_AT}/run", run_schedule, "submit the call of a schedule now", "schedule.run", RunNow),
    action(f"{_AT}/backfill", backfill_schedule, "submit a call for each tick", "schedule.backfill", Backfill),
    action(f"{_AT}/delete", delete_schedule, "forget a schedule", "schedule.delete", role=Role.ADMIN),
    ApiRoute("GET", "/triggers", list_triggers, "list triggers: what calls which task"),
)
