"""``holdfast workflow``: look into the runs of workflows, and start new ones from the middle of old ones.

To look needs no code: steps and events are shown as they are stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from typer import Argument, Option

from holdfast.app import App
from holdfast.cli import reach
from holdfast.cli.arguments import call_given
from holdfast.cli.command import InvocationId, command
from holdfast.cli.invocations import found, value_text
from holdfast.cli.naming import find_id
from holdfast.cli.output import Output
from holdfast.errors import NotDecodable, UsageError
from holdfast.model.names import counted
from holdfast.model.records import InvocationRecord
from holdfast.runtime.converting import parsed
from holdfast.runtime.runs import HOOK, WAIT, LogEvent, StepRecord, Stored, began_at, label, span_of, started_at, took
from holdfast.showing import brief, describe, length, moment
from holdfast.web.documents import callee_of, callee_of_event, decoded
from holdfast.web.reading.model import ReadModel
from holdfast.workflows.events import HOOK_RECEIVED

_LONGEST_VALUE = 60  # of an argument or a result in a list
_STEP_TITLES = ("call", "status", "attempt", "start", "took", "what")
_EVENT_TITLES = ("cursor", "time", "event", "call", "what")

RunId = Annotated[str, Argument(metavar="ID", help="The run, or the beginning or end of its id.")]
StepId = Annotated[str, Argument(metavar="STEP", help="A call of its body: charge#2, pack@key, wait#1.")]


# --- steps


@command()
def steps(
    out: Output,
    app: App,
    id: InvocationId,
    step: Annotated[str | None, Argument(metavar="STEP", help="Only this one, with all that is known of it.")] = None,
) -> None:
    """List the steps, children, waits and hooks of a run.

    They come in the order of its log, with times since its start. A quick step is recorded when it has ended; a step
    that runs is seen after a second.
    """
    record = found(app, id)
    reading, now = ReadModel(app.runtime), reach.time_of(app)
    page = app.runtime.run(reading.steps(record) if step is None else reading.step(record, step))
    if out.json:
        return out.document(page.document(app.runtime.codec))
    calls, span = page.calls, span_of(record, page.calls, now)
    if step is not None:
        return _print_step(out, app, record, calls[0], now)
    rows = [
        (
            label(call, record.queue),
            call.status,
            call.attempt or "",
            _after(began_at(call), span.start),
            _length(took(call, span.end)),
            _what(app, call),
        )
        for call in calls
    ]
    out.table(_STEP_TITLES, rows, empty="its log has no step yet")
    _note_restart(out, record)


def _print_step(out: Output, app: App, record: InvocationRecord, call: StepRecord, now: float) -> None:
    out.line(f"{label(call, record.queue)} ({call.status})")
    out.line()
    out.facts(
        [
            ("call", _called(app, call) if call.kind not in (WAIT, HOOK) else ""),
            ("payloads", str(call.received or "")),
            ("child", call.child),
            ("place", call.where),
            ("created", _moment(call.created_at) if call.started_at is None else ""),
            ("started", _moment(call.started_at)),
            ("ended", _moment(call.ended_at)),
            ("took", _length(took(call, now))),
            ("due", _moment(call.due)),
            ("attempt", str(call.attempt or "")),
            ("result", value_text(app, call.stored_result)),
            ("error", str(call.error or "")),
            ("reason", call.why),
        ]
    )
    if call.error is not None and call.error.traceback:
        out.block(call.error.traceback)


def _what(app: App, call: StepRecord) -> str:
    """Return the arguments of a call and what came of it, in short."""
    if call.kind == WAIT:
        return f"until {_moment(call.due)}{f', {call.why}' if call.why else ''}"
    if call.kind == HOOK:
        return ", ".join([counted(call.received, "payload"), *([call.why] if call.why else [])])
    came = brief(value_text(app, call.stored_result), _LONGEST_VALUE)
    if call.error is not None:
        came = brief(str(call.error), 2 * _LONGEST_VALUE)
    elif call.why and not came:
        came = call.why
    if call.is_open and call.due is not None:
        came = f"{came}; next attempt {_moment(call.due)}".lstrip("; ")
    elif call.is_open and call.child:
        came = f"as {call.child}"
    return f"{brief(_called(app, call), _LONGEST_VALUE)}{' → ' if came else ''}{came}"


def _called(app: App, call: StepRecord) -> str:
    return _call(app, call.stored_arguments, callee_of(call.name, call.kind))


def _call(app: App, arguments: Stored | None, task: str) -> str:
    """Return the arguments of a call of a task as Python would write them."""
    if arguments is None:
        return "()"
    try:
        args, kwargs = decoded(app.runtime.codec, arguments, call_of=task)
    except NotDecodable as error:
        return f"arguments that cannot be read here: {error}"
    return f"({', '.join([*map(describe, args), *[f'{name}={describe(value)}' for name, value in kwargs.items()]])})"


# --- events


@command()
def events(
    out: Output,
    app: App,
    id: InvocationId,
    correlation: Annotated[str | None, Option(metavar="CALL", help="Only those of this call: charge#2.")] = None,
    after: Annotated[
        str | None, Option(metavar="CURSOR", help="Only those after this one: 0.17, or 17 in the present log.")
    ] = None,
    limit: Annotated[int, Option(min=1, max=10_000, help="Show at most this many events.")] = 100,
) -> None:
    """List the events of a run, in the order of its log.

    A cursor is the generation of the log and a position in it. Events of the run itself, such as run_created, are made
    from its invocation.
    """
    record = found(app, id)
    if after is not None and after.isdigit():
        after = f"{0 if record.run is None else record.run.generation}.{after}"
    page = app.runtime.run(ReadModel(app.runtime).events(record, correlation=correlation, after=after, limit=limit))
    if out.json:
        return out.document(page.document(app.runtime.codec))
    start = started_at(record)
    rows = [
        (event.cursor, _after(event.at, start), event.type, event.correlation, _event_text(app, event))
        for event in page.events
    ]
    out.table(_EVENT_TITLES, rows, empty="no events")
    if page.after is not None:
        out.aside(f"note: there may be more: --after {page.after}")


def _event_text(app: App, event: LogEvent) -> str:
    """Return what an event says beside its type, in short."""
    value = ""
    callee = callee_of_event(app.runtime.codec, event)
    if event.stored is not None and callee is not None:
        value = brief(f"{event.name}{_call(app, event.stored, callee)}", _LONGEST_VALUE)
    elif event.stored is not None:
        value = brief(value_text(app, event.stored, is_given=event.type == HOOK_RECEIVED), _LONGEST_VALUE)
    parts = [
        value or (event.name if event.correlation != "" or event.type == "patched" else ""),
        brief(str(event.error), 2 * _LONGEST_VALUE) if event.error is not None else "",
        "" if event.due is None else f"until {moment(event.due)}",
        f"as {event.child}" if event.child else "",
        event.why if event.error is None else "",
        f"attempt {event.attempt}" if event.attempt > 1 else "",
        event.where,
    ]
    return ", ".join(part for part in parts if part)


# --- fork


@command(action="workflow.fork", target="id", find=find_id)
def fork(
    out: Output,
    app: App,
    id: RunId,
    step: StepId,
    arguments: Annotated[
        str | None, Option(metavar="JSON", help="Other arguments of the new run: a list, or an object of named ones.")
    ] = None,
    result: Annotated[
        list[str] | None, Option(metavar="STEP=JSON", help="Another result of an earlier step; may be repeated.")
    ] = None,
    new_key: Annotated[
        bool, Option("--new-key", help="Give its steps new idempotency keys, so that effects are repeated.")
    ] = False,
) -> None:
    """Start a new run from the point before a step of this run. Prints its id.

    What was recorded before that step is copied, and does not run again. What was open there is left out. Steps keep
    the idempotency keys of the first run, unless --new-key.
    """
    record = found(app, id)
    given = None if arguments is None else call_given(app, record, arguments)
    fresh = app.invocation(record.id).fork(step, arguments=given, results=_results(result or ()), new_key=new_key)
    out.document({"id": fresh.id, "task": record.task, "fork_of": record.id, "step": step, "new_key": new_key})
    out.line(fresh.id)
    out.aside(f"it goes on before {step} of {record.id}")


def _results(pairs: Iterable[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        step, sign, text = pair.partition("=")
        if not sign or not step:
            raise UsageError(f"--result {pair!r} is not of the form step=value, such as charge#1='\"r-42\"'")
        found[step] = parsed(text)
    return found


def _note_restart(out: Output, record: InvocationRecord) -> None:
    if record.run is not None and record.run.generation:
        out.aside(
            f"note: the run has restarted {counted(record.run.generation, 'time')}; these events are since the last "
            f"restart. All events: holdfast workflow events {record.id}"
        )


def _moment(at: float | None) -> str:
    return "" if at is None else moment(at)


def _length(seconds: float | None) -> str:
    return "" if seconds is None else length(seconds)


def _after(at: float | None, start: float) -> str:
    if at is None:
        return ""
    return f"+{length(at - start)}" if at >= start else f"-{length(start - at)}"
