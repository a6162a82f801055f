"""``holdfast schedules``: tasks that are called again and again.

Only making a schedule, and giving one another call, need the code of the task; everything else works on the store.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, cast

from typer import Argument, Option

from holdfast.app import App
from holdfast.cli import reach
from holdfast.cli.arguments import CallWords
from holdfast.cli.command import Needs, Yes, command, time_given
from holdfast.cli.invocations import describe_call
from holdfast.cli.naming import find_task
from holdfast.cli.output import Output
from holdfast.errors import CorruptRecord, UsageError
from holdfast.model.names import counted
from holdfast.model.records import InvocationRecord
from holdfast.schedules.options import ScheduleOptions
from holdfast.schedules.records import CatchUp, Overlap, Rules, ScheduleRecord
from holdfast.schedules.rules import begins_after
from holdfast.schedules.service import ticks_within
from holdfast.showing import length, moment
from holdfast.web.reading.schedules import (
    ScheduleReading,
    clock_of,
    last_calls,
    schedule_document,
    state_in_words,
    state_of,
)

_TITLES = ("name", "when", "task", "next", "last", "state")
_TIMES_SHOWN = 5
_RULES = {"starts_at": "start", "ends_at": "end"}  # as options and documents call them

ScheduleName = Annotated[str, Argument(metavar="NAME", help="The schedule.")]
TaskName = Annotated[str, Argument(metavar="TASK", help="Its name, shop:clean, or clean if there is only one.")]
OtherTask = Annotated[str | None, Argument(metavar="TASK", help="The task to call, with its arguments.")]
RequestOption = Annotated[
    str | None, Option("--request", metavar="TEXT", help="Of your choice: with the same one, it is done once.")
]


@dataclasses.dataclass
class When:
    """When it is due, and how its ticks are treated."""

    cron: Annotated[str | None, Option(help="Due by five fields, or six with seconds first.")] = None
    timezone: Annotated[str | None, Option(help="The clock of --cron: Europe/Rome. Else UTC.")] = None
    every: Annotated[str | None, Option(metavar="DURATION", help="Due every so long: 90s, 1h.")] = None
    at: Annotated[str | None, Option(metavar="TIME", help="Due once: 2026-11-15T08:00:00Z.")] = None
    overlap: Annotated[
        Overlap | None, Option(help="What a tick does while the one before has not ended; else allow.")
    ] = None
    catch_up: Annotated[CatchUp | None, Option(help="Which missed ticks fire later; else last.")] = None
    catch_up_most: Annotated[int | None, Option(help="With --catch-up all: at most this many, the latest.")] = None
    jitter: Annotated[str | None, Option(metavar="DURATION", help="Spread the start of each tick over so long.")] = None
    start: Annotated[str | None, Option(metavar="TIME", help="No tick before; none takes it away.")] = None
    end: Annotated[str | None, Option(metavar="TIME", help="No tick after; none takes it away.")] = None
    unique: Annotated[
        bool | None, Option("--unique/--no-unique", help="No tick while the call of another waits to be started.")
    ] = None

    def given(self) -> ScheduleOptions:
        """Return the given options, as `app.schedules` takes them."""
        options = {option: value for option, value in vars(self).items() if value is not None}
        ways = [f"--{way}" for way in ("cron", "every", "at") if way in options]
        if len(ways) > 1:
            raise UsageError(f"{' and '.join(ways)}: a schedule is due in one way only")
        if "timezone" in options and (ways or ["--cron"]) != ["--cron"]:
            raise UsageError(f"--timezone says on which clock --cron is read, and does not go with {ways[0]}")
        for option in ("at", "start", "end"):
            if (text := options.get(option)) is not None:
                no_bound = option != "at" and text == "none"
                options[option] = None if no_bound else time_given(text, f"--{option}")
        return cast(ScheduleOptions, options)


@dataclasses.dataclass
class Where(CallWords):
    """The call of a schedule: its arguments, and where they go."""

    queue: Annotated[str | None, Option(help="Another queue than the task's own.")] = None
    priority: Annotated[int | None, Option(help="From -100 to 100; higher goes first.")] = None

    def of(self, app: App, task: str) -> tuple[Any, Any, Any]:
        """Return the task with its options, its arguments, and those by keyword."""
        wanted = find_task(app, task).options(queue=self.queue, priority=self.priority)
        return wanted, *self.values(wanted.definition)


@command()
def schedules(out: Output, app: App) -> None:
    """List the schedules; or make, change, pause or delete them.

    The list says when each is due next, and what became of its last tick.
    """
    found = app.runtime.run(ScheduleReading(app.runtime).all())
    last, now = found.last, reach.time_of(app)
    out.document(found.document())
    rows = [
        (
            *(each.name, each.timing.describe(), each.call.task),
            *(_next_of(each, now), _last_of(each, last.get(each.name)), state_in_words(each)),
        )
        for each in found.records
    ]
    out.table(_TITLES, rows, empty="no schedules; make one with: holdfast schedules create")
    for why in (*found.unreadable.values(), *found.unserved):
        out.aside(f"note: {why}")


@command()
def show(out: Output, app: App, schedule: ScheduleName) -> None:
    """Show everything about one schedule."""
    found = app.runtime.run(ScheduleReading(app.runtime).one(schedule, _TIMES_SHOWN))
    record, last, times, now = found.record, found.last, found.next, reach.time_of(app)
    call, call_facts = describe_call(app, record.call.task, record.call.arguments)
    if found.aside is not None:
        out.note(
            f"an earlier schedule of this name could not be read, and was set aside at {moment(found.aside.at)}: this "
            "one began after it, and knows neither its pause nor its count. Remove that from quarantine when it is "
            "not needed: see docs/operations/damaged-records.md"
        )
    for why in found.unserved:
        out.note(why)
    out.document(found.document(app.runtime.codec) | {"arguments": call_facts})
    rules, progress = record.rules, record.progress
    most = f", the last {rules.catch_up_most} of them" if rules.catch_up is CatchUp.ALL else ""
    ticks = f"{progress.fired} fired, {progress.skipped} skipped, {progress.missed} missed"
    out.line(f"{record.name} is {state_in_words(record)}: {record.timing.describe()}")
    out.line()
    out.facts(
        [
            ("call", call),
            ("queue", f"{record.call.queue}, priority {record.call.priority}"),
            ("overlap", rules.overlap),
            ("catch-up", f"{rules.catch_up}{most}"),
            ("jitter", f"up to {length(rules.jitter_seconds)}" if rules.jitter_seconds else ""),
            ("start", clock_of(record, rules.starts_at)),
            ("end", clock_of(record, rules.ends_at)),
            ("unique", "yes" if rules.unique else ""),
            ("declared", "in code" if record.declared else ""),
            ("paused", clock_of(record, record.pause.at if record.pause else None)),
            ("retired", clock_of(record, record.retired_at)),
            ("next", _next_of(record, now)),
            ("last", _last_of(record, last)),
            ("invocation", progress.last_id),
            ("ticks", f"{ticks}, {len(progress.queued)} queued"),
            ("created", moment(record.created_at)),
            ("changed", moment(record.changed_at)),
        ]
    )
    if times:
        out.line()
        _print_times(out, record, times, now)


@command()
def next_times(
    out: Output,
    app: App,
    schedule: ScheduleName,
    count: Annotated[int, Option("-n", min=1, max=10_000, help="So many.")] = _TIMES_SHOWN,
) -> None:
    """Show when it is due next, on its own clock and in UTC."""
    record = app.schedules.get(schedule)
    times = [time.timestamp() for time in app.schedules.next_times(schedule, count)]
    out.document({"name": schedule, "state": state_of(record), "next": [moment(at) for at in times]})
    _print_times(out, record, times, reach.time_of(app), empty=f"nothing is to come: it is {state_in_words(record)}")


@command(Needs.TASKS, action="schedule.create", target="schedule")
def create(
    out: Output,
    app: App,
    schedule: ScheduleName,
    task: TaskName,
    call: Where,
    when: When,
    paused: Annotated[bool, Option("--paused", help="It rests until resume.")] = False,
) -> None:
    """Call a task again and again, by --cron, --every or --at. That fires nothing: its first tick is later than now.

    Creating it again, with the same words, does nothing.
    """
    options = when.given()
    if not options.keys() & {"cron", "every", "at"}:
        raise UsageError("say when it is due: --cron, --every or --at")
    _report_change(out, app, app.schedules.create(schedule, *call.of(app, task), paused=paused, **options))


@command(
    lambda given: Needs.TASKS if given["task"] is not None else Needs.STORE, action="schedule.update", target="schedule"
)
def update(out: Output, app: App, schedule: ScheduleName, task: OtherTask = None, *, call: Where, when: When) -> None:
    """Change the given options and leave the rest. Another timing, start or end takes effect from now on.

    Arguments, --queue and --priority go with TASK: a new call takes the place of the old one.
    """
    options = when.given()
    if task is not None:
        wanted, args, kwargs = call.of(app, task)
        record = app.schedules.update(schedule, task=wanted, args=args, kwargs=kwargs, **options)
    elif call != Where():
        raise UsageError("give TASK with its new arguments, --queue or --priority: they make a new call")
    elif not options:
        raise UsageError("say what to change; --help lists what there is")
    else:
        record = app.schedules.update(schedule, **options)
    if record.declared:
        out.note("it is declared in code: a runner that starts makes it again what the code says")
    _report_change(out, app, record)


@command(action="schedule.pause", target="schedule")
def pause(
    out: Output,
    app: App,
    schedule: ScheduleName,
    reason: Annotated[str, Option(help="The reason; stored with the pause.")] = "",
) -> None:
    """Let it rest until resume. Pausing it again keeps the first pause."""
    _report_change(out, app, app.schedules.pause(schedule, reason=reason))


@command(action="schedule.resume", target="schedule")
def resume(out: Output, app: App, schedule: ScheduleName) -> None:
    """Go on, from now. The ticks of the pause do not fire; backfill makes up for them."""
    _report_change(out, app, app.schedules.resume(schedule))


@command(action="schedule.delete", target="schedule")
def delete(out: Output, app: App, schedule: ScheduleName, yes: Yes = False) -> None:
    """Forget it. Invocations that it has submitted stay."""
    try:
        record = app.schedules.get(schedule)
        label = f"{record.call.task}, {record.timing.describe()}"
        is_declared = record.declared and record.retired_at is None
    except CorruptRecord:
        label, is_declared = "which cannot be read", False
    if not yes:
        out.confirm(f"Delete the schedule '{schedule}' ({label})?")
    app.schedules.delete(schedule)
    out.document({"name": schedule, "deleted": True})
    out.line(f"the schedule '{schedule}' is deleted")
    if is_declared:
        out.note("code declares it: a runner that starts stores it again; to silence it for good, pause it")


@command(action="schedule.run", target="schedule")
def run_now(out: Output, app: App, schedule: ScheduleName, request: RequestOption = None) -> None:
    """Submit its call now, beside its ticks. Prints the invocation's id."""
    invocation = app.schedules.run_now(schedule, request=request)
    out.document({"name": schedule, "id": invocation.id})
    out.line(invocation.id)


@command(action="schedule.backfill", target="schedule")
def backfill(
    out: Output,
    app: App,
    schedule: ScheduleName,
    since: Annotated[str, Option("--from", metavar="TIME", help="The first tick may be at 2026-11-01T00:00Z.")],
    until: Annotated[str, Option("--to", metavar="TIME", help="The last tick may be then.")],
    dry_run: Annotated[bool, Option("--dry-run", help="Only show the ticks.")] = False,
    request: RequestOption = None,
    yes: Yes = False,
) -> None:
    """Submit its call for each tick of a time.

    Both ends are included, and ticks that have fired too. Prints the ids of the invocations.
    """
    first, last = time_given(since, "--from"), time_given(until, "--to")
    record = app.schedules.get(schedule)
    after = begins_after(Rules(starts_at=first.timestamp()), float("-inf"))
    ticks = ticks_within(record, after, last.timestamp())
    if dry_run:
        out.document({"name": schedule, "count": len(ticks), "ticks": [moment(tick) for tick in ticks]})
        return _print_times(out, record, ticks, reach.time_of(app), empty="no tick is due in that time")
    if ticks and not yes:
        out.confirm(
            f"Submit {counted(len(ticks), 'call')} of {record.call.task}, for the ticks from "
            f"{clock_of(record, ticks[0])} to {clock_of(record, ticks[-1])}?"
        )
    made = app.schedules.backfill(schedule, first, last, request=request) if ticks else []
    out.document({"name": schedule, "count": len(made), "ids": [each.id for each in made]})
    for each in made:
        out.line(each.id)
    out.aside(f"submitted {counted(len(made), 'call')}")


COMMANDS: dict[str, Callable[..., None]] = {
    "show": show,
    "next": next_times,
    "create": create,
    "update": update,
    "pause": pause,
    "resume": resume,
    "delete": delete,
    "run": run_now,
    "backfill": backfill,
}


# --- a schedule as people and programs get to see it


def _report_change(out: Output, app: App, record: ScheduleRecord) -> None:
    """Show a schedule after a change."""
    if record.retired_at is not None:
        out.note("it is retired: no code declares it any more, so nothing fires until some does; or delete it")
    last = reach.with_engine(app, lambda engine: last_calls(engine, [record]))
    out.document(schedule_document(record, last.get(record.name)))
    out.line(f"{record.name} is {state_in_words(record)}: {record.timing.describe()}")
    if record.next_at is not None:
        out.line(f"next: {_next_of(record, reach.time_of(app))}")


def _print_times(out: Output, record: ScheduleRecord, times: Sequence[float], now: float, *, empty: str = "") -> None:
    rows = [(clock_of(record, at), moment(at), _how_far(at, now)) for at in times]
    out.table(("on its clock", "UTC", "when"), rows, empty=empty)


def _how_far(at: float, now: float) -> str:
    return f"in {length(at - now)}" if at > now else f"{length(now - at)} ago"


def _next_of(record: ScheduleRecord, now: float) -> str:
    if record.next_at is None:
        return ""
    far = _how_far(record.next_at, now) if record.next_at > now else f"due for {length(now - record.next_at)}"
    return f"{clock_of(record, record.next_at)}, {far}"


def _last_of(record: ScheduleRecord, invocation: InvocationRecord | None) -> str:
    """Return the last tick that fired, and the status of its invocation."""
    if record.progress.last_tick is None:
        return ""
    became = "not kept any more" if invocation is None else invocation.status.value
    return f"{clock_of(record, record.progress.last_tick)}: {became}"
