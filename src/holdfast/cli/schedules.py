"""``holdfast schedules``: what is called again and again.

Only making a schedule, and giving one another call, need the code of the task; everything else works on the store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, cast

import typer

from holdfast.app import App
from holdfast.cli.arguments import Words, words
from holdfast.cli.arguments import arguments as arguments_of
from holdfast.cli.choosing import app_for_work, given, looked_at, subcommand
from holdfast.cli.looking import call_shown
from holdfast.cli.naming import find_task
from holdfast.cli.options import AppOption, AsJson, NameOption, UrlOption, time_given
from holdfast.cli.output import Output
from holdfast.cli.reach import time_of, with_store
from holdfast.cli.shown import length, moment
from holdfast.cli.timetable import clock_of, facts_of, how_far, last_of, next_of, state_of, told_state
from holdfast.engine.reading import get_readable
from holdfast.engine.schedule_book import ticks_within
from holdfast.errors import CorruptRecord, UsageError
from holdfast.lifecycle.names import counted
from holdfast.lifecycle.records import InvocationRecord
from holdfast.lifecycle.schedules import KIND, CatchUp, Overlap, Rules, ScheduleRecord, begins_after, from_entry
from holdfast.schedule_options import ScheduleOptions

_TITLES = ("name", "when", "task", "next", "last", "state")
_TIMES_SHOWN = 5

ScheduleName = Annotated[str, typer.Argument(metavar="NAME", help="The schedule.")]
TaskName = Annotated[str, typer.Argument(metavar="TASK", help="Its name, shop:clean, or clean if there is only one.")]
OtherTask = Annotated[str | None, typer.Argument(metavar="TASK", help="The task to call, with its arguments.")]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="As for submit. Put -- before one with a dash.")
]
Keywords = Annotated[
    list[str] | None, typer.Option("-k", metavar="NAME=JSON", help="One keyword argument; may be repeated.")
]
WholeKeywords = Annotated[str | None, typer.Option("--kwargs", metavar="JSON", help="Keyword arguments, as an object.")]
CronOption = Annotated[str | None, typer.Option("--cron", help="Due by five fields, or six with seconds first.")]
ZoneOption = Annotated[str | None, typer.Option("--timezone", help="The clock of --cron: Europe/Rome. Else UTC.")]
EveryOption = Annotated[str | None, typer.Option("--every", metavar="DURATION", help="Due every so long: 90s, 1h.")]
AtOption = Annotated[str | None, typer.Option("--at", metavar="TIME", help="Due once: 2026-11-15T08:00:00Z.")]
OverlapOption = Annotated[
    Overlap | None, typer.Option("--overlap", help="What a tick does while the one before has not ended; else allow.")
]
CatchUpOption = Annotated[
    CatchUp | None, typer.Option("--catch-up", help="Which ticks fire that nobody was there for; else last.")
]
MostOption = Annotated[int | None, typer.Option("--catch-up-most", help="With --catch-up all: the last so many.")]
JitterOption = Annotated[
    str | None, typer.Option("--jitter", metavar="DURATION", help="Spread the start of each tick over so long.")
]
StartOption = Annotated[str | None, typer.Option("--start", metavar="TIME", help="No tick before; none takes it away.")]
EndOption = Annotated[str | None, typer.Option("--end", metavar="TIME", help="No tick after; none takes it away.")]
UniqueOption = Annotated[
    bool | None,
    typer.Option("--unique/--no-unique", help="No tick while the call of another still waits to be started."),
]
QueueOption = Annotated[str | None, typer.Option("--queue", help="Another queue than the task's own.")]
PriorityOption = Annotated[int | None, typer.Option("--priority", help="From -100 to 100; higher goes first.")]
RequestOption = Annotated[
    str | None, typer.Option("--request", metavar="TEXT", help="Of your choice: with the same one, it is done once.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def schedules(
    context: typer.Context,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """List the schedules: when each is due next, and what became of its last tick; or make and change them."""
    if context.invoked_subcommand is not None:
        return
    with Output(json=json) as out, looked_at(out, app, url, name) as chosen:
        records, unreadable = _all(chosen)
        last, now = _last(chosen, records), time_of(chosen)
        if json:
            listed = [facts_of(record, last.get(record.name)) for record in records]
            return out.document({"schedules": listed, "unreadable": unreadable})
        rows = [
            (
                record.name,
                record.timing.describe(),
                record.call.task,
                next_of(record, now),
                last_of(record, last.get(record.name)),
                told_state(record),
            )
            for record in records
        ]
        out.table(_TITLES, rows, empty="no schedules; make one with: holdfast schedules create")
        for why in unreadable.values():
            out.note(why)


def show(
    context: typer.Context,
    schedule: ScheduleName,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """Tell everything about one schedule."""
    with subcommand(context, app, url, name, json) as (out, chosen):
        record = chosen.schedules.get(schedule)
        last, now = _last(chosen, [record]).get(schedule), time_of(chosen)
        call, call_facts = call_shown(chosen, record.call.task, record.call.arguments)
        times = [time.timestamp() for time in chosen.schedules.next_times(schedule, _TIMES_SHOWN)]
        if out.json:
            facts = facts_of(record, last)
            return out.document(facts | {"arguments": call_facts, "next": [moment(at) for at in times]})
        rules, progress = record.rules, record.progress
        most = f", the last {rules.catch_up_most} of them" if rules.catch_up is CatchUp.ALL else ""
        out.line(f"{record.name} is {told_state(record)}: {record.timing.describe()}")
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
                ("next", next_of(record, now)),
                ("last", last_of(record, last)),
                ("invocation", progress.last_id or ""),
                (
                    "ticks",
                    f"{progress.fired} fired, {progress.skipped} skipped, {progress.missed} missed, "
                    f"{len(progress.queued)} queued",
                ),
                ("created", moment(record.created_at)),
                ("changed", moment(record.changed_at)),
            ]
        )
        if times:
            out.line()
            _print_times(out, record, times, now)


def next_times(
    context: typer.Context,
    schedule: ScheduleName,
    count: Annotated[int, typer.Option("-n", min=1, max=10_000, help="So many.")] = _TIMES_SHOWN,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """Tell when it is due next, on its own clock and in UTC."""
    with subcommand(context, app, url, name, json) as (out, chosen):
        record = chosen.schedules.get(schedule)
        times = [time.timestamp() for time in chosen.schedules.next_times(schedule, count)]
        if out.json:
            return out.document({"name": schedule, "state": state_of(record), "next": [moment(at) for at in times]})
        if times:
            _print_times(out, record, times, time_of(chosen))
        else:
            out.line(f"nothing is to come: it is {told_state(record)}")


def create(
    context: typer.Context,
    schedule: ScheduleName,
    task: TaskName,
    arguments: Arguments = None,
    cron: CronOption = None,
    timezone: ZoneOption = None,
    every: EveryOption = None,
    at: AtOption = None,
    overlap: OverlapOption = None,
    catch_up: CatchUpOption = None,
    catch_up_most: MostOption = None,
    jitter: JitterOption = None,
    start: StartOption = None,
    end: EndOption = None,
    unique: UniqueOption = None,
    paused: Annotated[bool, typer.Option("--paused", help="It rests until resume.")] = False,
    keyword: Keywords = None,
    kwargs: WholeKeywords = None,
    queue: QueueOption = None,
    priority: PriorityOption = None,
    app: AppOption = None,
    json: AsJson = False,
) -> None:
    """Call a task again and again, by --cron, --every or --at. That fires nothing: its first tick is later than now.

    Creating it again, with the same words, does nothing.
    """
    json, app, *_ = given(context, json, app)
    with Output(json=json) as out:
        written = words(arguments or [], kwargs, keyword or [])
        options = _options(
            {"cron": cron, "timezone": timezone, "every": every, "at": at, "overlap": overlap, "catch_up": catch_up}
            | {"catch_up_most": catch_up_most, "jitter": jitter, "start": start, "end": end, "unique": unique}
        )
        if not options.keys() & {"cron", "every", "at"}:
            raise UsageError("say when it is due: --cron, --every or --at")
        with app_for_work(out, app, task) as chosen:
            wanted, args, keywords = _called(chosen, task, written, queue, priority)
            _tell(out, chosen, chosen.schedules.create(schedule, wanted, args, keywords, paused=paused, **options))


def update(
    context: typer.Context,
    schedule: ScheduleName,
    task: OtherTask = None,
    arguments: Arguments = None,
    cron: CronOption = None,
    timezone: ZoneOption = None,
    every: EveryOption = None,
    at: AtOption = None,
    overlap: OverlapOption = None,
    catch_up: CatchUpOption = None,
    catch_up_most: MostOption = None,
    jitter: JitterOption = None,
    start: StartOption = None,
    end: EndOption = None,
    unique: UniqueOption = None,
    keyword: Keywords = None,
    kwargs: WholeKeywords = None,
    queue: QueueOption = None,
    priority: PriorityOption = None,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """Change what is given and leave the rest. Another timing, start or end takes effect from now on.

    Arguments, --queue and --priority go with TASK: a new call takes the place of the old one.
    """
    json, app, url, name = given(context, json, app, url, name)
    with Output(json=json) as out:
        options = _options(
            {"cron": cron, "timezone": timezone, "every": every, "at": at, "overlap": overlap, "catch_up": catch_up}
            | {"catch_up_most": catch_up_most, "jitter": jitter, "start": start, "end": end, "unique": unique}
        )
        if task is None:
            if keyword or kwargs is not None or queue is not None or priority is not None:
                raise UsageError("give TASK with its new arguments, --queue or --priority: they make a new call")
            if not options:
                raise UsageError("say what to change; --help lists what there is")
            with looked_at(out, app, url, name) as chosen:
                return _tell_updated(out, chosen, chosen.schedules.update(schedule, **options))
        if url or name:
            raise UsageError("another call needs the code of its task: give --app, not --url and --name")
        written = words(arguments or [], kwargs, keyword or [])
        with app_for_work(out, app, task) as chosen:
            wanted, args, keywords = _called(chosen, task, written, queue, priority)
            changed = chosen.schedules.update(schedule, task=wanted, args=args, kwargs=keywords, **options)
            _tell_updated(out, chosen, changed)


def pause(
    context: typer.Context,
    schedule: ScheduleName,
    reason: Annotated[str, typer.Option(help="Why, for whoever looks.")] = "",
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """Let it rest until resume. Pausing it again keeps the first pause."""
    with subcommand(context, app, url, name, json) as (out, chosen):
        _tell(out, chosen, chosen.schedules.pause(schedule, reason=reason))


def resume(
    context: typer.Context,
    schedule: ScheduleName,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """Go on, from now. The ticks of the pause do not fire; backfill makes up for them."""
    with subcommand(context, app, url, name, json) as (out, chosen):
        _tell(out, chosen, chosen.schedules.resume(schedule))


def delete(
    context: typer.Context,
    schedule: ScheduleName,
    yes: Yes = False,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """Forget it. Invocations that it has submitted stay."""
    with subcommand(context, app, url, name, json) as (out, chosen):
        if not yes:
            out.confirm(f"Delete the schedule '{schedule}' ({_in_short(chosen, schedule)})?")
        is_declared = _is_declared(chosen, schedule)
        chosen.schedules.delete(schedule)
        if out.json:
            out.document({"name": schedule, "deleted": True})
        else:
            out.line(f"the schedule '{schedule}' is deleted")
        if is_declared:
            out.note("code declares it: a runner that starts stores it anew; to silence it for good, pause it")


def run_now(
    context: typer.Context,
    schedule: ScheduleName,
    request: RequestOption = None,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """Submit its call now, beside its ticks, and print the invocation's id."""
    with subcommand(context, app, url, name, json) as (out, chosen):
        invocation = chosen.schedules.run_now(schedule, request=request)
        if out.json:
            out.document({"name": schedule, "id": invocation.id})
        else:
            out.line(invocation.id)


def backfill(
    context: typer.Context,
    schedule: ScheduleName,
    since: Annotated[str, typer.Option("--from", metavar="TIME", help="The first tick may be at 2026-11-01T00:00Z.")],
    until: Annotated[str, typer.Option("--to", metavar="TIME", help="The last tick may be then.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell the ticks.")] = False,
    request: RequestOption = None,
    yes: Yes = False,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """Submit its call for each tick of a time, both ends included, whether it has fired or not. Prints their ids."""
    with subcommand(context, app, url, name, json) as (out, chosen):
        first, last = time_given(since, "--from"), time_given(until, "--to")
        record = chosen.schedules.get(schedule)
        after = begins_after(Rules(starts_at=first.timestamp()), float("-inf"))
        ticks = ticks_within(record, after, last.timestamp())
        if dry_run:
            if out.json:
                return out.document({"name": schedule, "count": len(ticks), "ticks": [moment(tick) for tick in ticks]})
            return _print_times(out, record, ticks, time_of(chosen), empty="no tick is due in that time")
        if ticks and not yes:
            out.confirm(
                f"Submit {counted(len(ticks), 'call')} of {record.call.task}, for the ticks from "
                f"{clock_of(record, ticks[0])} to {clock_of(record, ticks[-1])}?"
            )
        made = chosen.schedules.backfill(schedule, first, last, request=request) if ticks else []
        if out.json:
            return out.document({"name": schedule, "count": len(made), "ids": [each.id for each in made]})
        for each in made:
            out.line(each.id)
        out.aside(f"submitted {counted(len(made), 'call')}")


# --- what they share


def _options(given: dict[str, Any]) -> ScheduleOptions:
    """What was given, as `app.schedules` takes it."""
    options = {option: value for option, value in given.items() if value is not None}
    ways = [f"--{way}" for way in ("cron", "every", "at") if way in options]
    if len(ways) > 1:
        raise UsageError(f"{' and '.join(ways)}: a schedule is due in one way only")
    if "timezone" in options and (ways or ["--cron"]) != ["--cron"]:
        raise UsageError(f"--timezone says on which clock --cron is read, and does not go with {ways[0]}")
    for option in ("at", "start", "end"):
        if option in options:
            text = options[option]
            no_bound = option != "at" and text == "none"
            options[option] = None if no_bound else time_given(text, f"--{option}")
    return cast(ScheduleOptions, options)


def _is_declared(app: App, name: str) -> bool:
    try:
        record = app.schedules.get(name)
    except CorruptRecord:
        return False
    return record.declared and record.retired_at is None


def _in_short(app: App, name: str) -> str:
    try:
        record = app.schedules.get(name)
    except CorruptRecord:
        return "which cannot be read"
    return f"{record.call.task}, {record.timing.describe()}"


def _called(app: App, task: str, given: Words, queue: str | None, priority: int | None) -> tuple[Any, Any, Any]:
    """The task with its options, its arguments, and those by keyword."""
    wanted = find_task(app, task).options(queue=queue, priority=priority)
    return wanted, *arguments_of(wanted.definition, given)


def _all(app: App) -> tuple[list[ScheduleRecord], dict[str, str]]:
    """By name; and why others cannot be read."""
    records, unreadable = [], {}
    for entry in with_store(app, lambda store: store.entries(app.name, KIND)):
        try:
            records.append(from_entry(entry))
        except CorruptRecord as error:
            unreadable[entry.name] = str(error)
    return records, unreadable


def _last(app: App, records: Sequence[ScheduleRecord]) -> dict[str, InvocationRecord]:
    """The invocations of their last ticks, as far as they are kept, by the schedule's name."""
    names = {record.progress.last_id: record.name for record in records if record.progress.last_id is not None}
    found = with_store(app, lambda store: get_readable(store, app.name, list(names))) if names else ()
    return {names[invocation.id]: invocation for invocation in found if invocation is not None}


def _tell(out: Output, app: App, record: ScheduleRecord) -> None:
    """What a change has led to."""
    if record.retired_at is not None:
        out.note("it is retired: no code declares it any more, so nothing fires until some does; or delete it")
    if out.json:
        return out.document(facts_of(record, _last(app, [record]).get(record.name)))
    out.line(f"{record.name} is {told_state(record)}: {record.timing.describe()}")
    if record.next_at is not None:
        out.line(f"next: {next_of(record, time_of(app))}")


def _tell_updated(out: Output, app: App, record: ScheduleRecord) -> None:
    if record.declared:
        out.note("it is declared in code: a runner that starts makes it again what the code says")
    _tell(out, app, record)


def _print_times(out: Output, record: ScheduleRecord, times: Sequence[float], now: float, *, empty: str = "") -> None:
    rows = [(clock_of(record, at), moment(at), how_far(at, now)) for at in times]
    out.table(("on its clock", "UTC", "when"), rows, empty=empty)


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
