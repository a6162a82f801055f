"""``holdfast events``: events with their effects."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from holdfast.app import App
from holdfast.cli import reach
from holdfast.cli.command import Before, command, page_given
from holdfast.cli.naming import find_event
from holdfast.cli.output import Output
from holdfast.errors import UsageError
from holdfast.model.names import counted
from holdfast.model.records import InvocationRecord
from holdfast.runtime.converting import strictly
from holdfast.showing import brief, describe, length, moment, value_line
from holdfast.triggers.dispatch import describe_source
from holdfast.triggers.events import Caused, EventRecord
from holdfast.web.reading.events import EventReading, Outcome, happening_document, payload_of

_LONGEST_SHOWN = 60  # of a payload in the list

EventName = Annotated[str, Argument(metavar="NAME", help="The event: order.created.")]
EventId = Annotated[str, Argument(metavar="ID", help="The event, or the beginning or end of its id.")]


@command()
def events(
    out: Output,
    app: App,
    only: Annotated[str, Option("--event", metavar="NAME", help="Only those of this name.")] = "",
    limit: Annotated[int, Option(min=1, max=10_000, help="Show at most this many events.")] = 50,
    before: Before = None,
) -> None:
    """List the events that are kept; or show or emit one.

    The newest is first, with the calls that it has caused.
    """
    found = app.events(name=only, limit=limit, before=page_given(before))
    out.document({"events": [happening_document(event) for event in found]})
    rows = [
        (moment(e.at), e.name, e.id, brief(value_line(payload_of(e)), _LONGEST_SHOWN), _caused_by(e)) for e in found
    ]
    titles = ("time", "name", "id", "payload", "caused")
    out.table(titles, rows, empty="no events; emit one with: holdfast events emit")
    if len(found) == limit:
        out.aside(f"note: there may be more: --before {found[-1].id}")


@command()
def show(out: Output, app: App, id: EventId) -> None:
    """Show one event: payload, emitter, and what triggers made of it."""
    whole = app.runtime.run(EventReading(app.runtime).one(find_event(app, id)))
    event, became, now = whole.event, whole.became, reach.time_of(app)
    out.document(whole.document())
    out.line(f"the event '{event.name}' {event.id}")
    out.line()
    out.facts(
        [
            ("time", f"{moment(event.at)}, {length(max(0.0, now - event.at))} ago"),
            ("payload", value_line(payload_of(event))),
            ("key", event.key),
            ("emitted by", _emitter(app, event)),
            ("triggers before it", f"{event.depth}: {' → '.join(event.path)}" if event.depth else ""),
            ("to be called", ", ".join(event.outbox)),
            ("kept", f"until {moment(event.keep_until)}, {length(max(0.0, event.keep_until - now))} from now"),
        ]
    )
    out.line()
    ends = [(each, became.get(each.invocation, Outcome("", None))) for each in event.caused]
    rows = [(each.trigger, each.invocation, end.status, _why(each, end.called)) for each, end in ends]
    empty = "its triggers are not called yet" if event.outbox else "no trigger is subscribed to it"
    out.table(("trigger", "invocation", "status", "why"), rows, empty=empty)


@command(action="event.emit", target="event")
def emit(
    out: Output,
    app: App,
    event: EventName,
    payload: Annotated[str, Argument(metavar="JSON", help="What it carries; else nothing (null).")] = "null",
    key: Annotated[str | None, Option(help="One event of this name and key is kept.")] = None,
) -> None:
    """Emit an event: tasks with a trigger for it are called. Prints the event's id.

    With a key that was used before, no second event is stored, and the id of the first one is printed.
    """
    try:
        value, began = strictly(payload), reach.time_of(app)
    except ValueError as error:  # a text that is no JSON would be a mistake more often than a word
        raise UsageError(
            f"the payload {describe(payload[:80])} is no JSON ({error}); write an object like '{{\"id\": 42}}', or a "
            "text like '\"hello\"'"
        ) from None
    made = app.emit(event, value, key=key)
    fresh = made.at >= began
    out.document(happening_document(made) | {"fresh": fresh})
    out.line(made.id)
    out.aside(f"it caused: {_caused_by(made)}" if fresh else f"it was emitted before, at {moment(made.at)}")


# --- what was triggered, for other commands


def origin_of(record: InvocationRecord) -> str:
    """Return what triggered an invocation, and by which trigger; nothing if it was submitted."""
    origin = record.origin
    if origin is None or not origin.sources:
        return ""
    sources = " and ".join(describe_source(each) for each in origin.sources)
    if not origin.trigger or [each.name for each in origin.sources] == [origin.trigger]:  # a chain; a schedule
        return sources
    return f"{sources}, by the trigger '{origin.trigger}'"


# --- what came of an event


def _caused_by(event: EventRecord) -> str:
    """Return what an event has caused, in short."""
    parts = [
        f"{each.invocation or 'nothing'} by {each.trigger}" + (f" ({each.why})" if each.why else "")
        for each in event.caused
    ]
    if event.outbox:
        parts.append(f"{counted(len(event.outbox), 'trigger')} yet to be called")
    return ", ".join(parts) or "nothing"


def _why(each: Caused, called: list[str] | None) -> str:
    if called is None:
        return each.why
    return f"its code has called: {', '.join(called)}" if called else "its code has called nothing"


def _emitter(app: App, event: EventRecord) -> str:
    if not event.emitted_by:
        return ""
    (record,) = reach.with_store(app, lambda store: store.get(app.name, [event.emitted_by]))
    return f"{record.task} {record.id}, {record.status}" if record else f"{event.emitted_by}, not kept any more"
