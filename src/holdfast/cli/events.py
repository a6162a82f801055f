"""``holdfast events`` and ``holdfast triggers``: what has happened, what came of it, and what would.

None of it needs code: triggers are told by what is stored of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from holdfast.app import App
from holdfast.cli.arguments import strictly
from holdfast.cli.choosing import looked_at, subcommand
from holdfast.cli.naming import find_event
from holdfast.cli.options import AppOption, AsJson, NameOption, UrlOption
from holdfast.cli.output import Output
from holdfast.cli.reach import event_of, time_of, with_store
from holdfast.cli.shown import described, length, moment, value_line
from holdfast.engine.reading import get_readable
from holdfast.engine.telling import told
from holdfast.errors import CorruptRecord, NotDecodable, UsageError
from holdfast.ids import is_id
from holdfast.lifecycle.events import Caused, EventRecord
from holdfast.lifecycle.names import counted
from holdfast.lifecycle.records import InvocationRecord, Origin
from holdfast.lifecycle.triggers import DATA, KIND, TriggerRecord, from_entry
from holdfast.triggering import EVALUATES

_TITLES = ("time", "name", "id", "payload", "caused")
_LONGEST_SHOWN = 60  # of a payload in the list

EventName = Annotated[str, typer.Argument(metavar="NAME", help="The event: order.created.")]
EventId = Annotated[str, typer.Argument(metavar="ID", help="The event, or the beginning of its id.")]


def events(
    context: typer.Context,
    only: Annotated[str, typer.Option("--event", metavar="NAME", help="Only those of this name.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 50,
    before: Annotated[str | None, typer.Option(metavar="ID", help="Only older ones: the last id of a page.")] = None,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """List the events that are kept, newest first, with what each has caused; or look at one, or emit one."""
    if context.invoked_subcommand is not None:
        return
    with Output(json=json) as out, looked_at(out, app, url, name) as chosen:
        if before is not None and not is_id(before):
            raise UsageError(f"--before {before!r} is no id; give the last id of the page before")
        found = chosen.events(name=only, limit=limit, before=before)
        if json:
            return out.document({"events": [event_facts(event) for event in found]})
        rows = [(moment(e.at), e.name, e.id, _shortened(e), caused_by(e)) for e in found]
        out.table(_TITLES, rows, empty="no events; emit one with: holdfast events emit")
        if len(found) == limit:
            out.note(f"there may be more: --before {found[-1].id}")


def show(
    context: typer.Context,
    id: EventId,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """Tell everything about one event: its payload, who emitted it, and what each trigger made of it."""
    with subcommand(context, app, url, name, json) as (out, chosen):
        event = event_of(chosen, find_event(chosen, id))
        became = _became(chosen, event)
        if out.json:
            return out.document(event_facts(event, became))
        now = time_of(chosen)
        out.line(f"the event '{event.name}' {event.id}")
        out.line()
        out.facts(
            [
                ("time", f"{moment(event.at)}, {length(max(0.0, now - event.at))} ago"),
                ("payload", value_line(_payload(event))),
                ("key", event.key),
                ("emitted by", _emitter(chosen, event)),
                ("triggers before it", f"{event.depth}: {' → '.join(event.path)}" if event.depth else ""),
                ("yet to be told", ", ".join(event.outbox)),
                ("kept", f"until {moment(event.keep_until)}, {length(max(0.0, event.keep_until - now))} from now"),
            ]
        )
        out.line()
        rows = [(e.trigger, e.invocation, _status(e, became), _why(e, became)) for e in event.caused]
        empty = "its triggers are not told yet" if event.outbox else "no trigger wanted to hear of it"
        out.table(("trigger", "invocation", "status", "why"), rows, empty=empty)


def emit(
    context: typer.Context,
    event: EventName,
    payload: Annotated[str, typer.Argument(metavar="JSON", help="What it carries; else nothing (null).")] = "null",
    key: Annotated[str | None, typer.Option("--key", help="One event of this name and key is kept.")] = None,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """Tell that something has happened: tasks with a trigger for it are called. Prints the event's id.

    With a key that was used before, that of the event of that time; no second one is stored.
    """
    with subcommand(context, app, url, name, json) as (out, chosen):
        value, began = _parsed(payload), time_of(chosen)
        made = chosen.emit(event, value, key=key)
        fresh = made.at >= began
        if out.json:
            return out.document(event_facts(made) | {"fresh": fresh})
        out.line(made.id)
        out.aside(f"it caused: {caused_by(made)}" if fresh else f"it was emitted before, at {moment(made.at)}")


def triggers(
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """List the triggers: which task each calls, and when.

    Runners store them when they start. "decided by" is data if any process can tell whether one fires, and code if
    that takes an invocation of its own, which runners that have the trigger run. A retired one is no longer in any
    code, and hears of nothing.
    """
    with Output(json=json) as out, looked_at(out, app, url, name) as chosen:
        records, unreadable = _all(chosen)
        if json:
            return out.document({"triggers": [_trigger_facts(each) for each in records], "unreadable": unreadable})
        rows = [(each.name, each.call.task, _state(each), _decided_by(each), _when(each)) for each in records]
        out.table(
            ("name", "task", "state", "decided by", "when"),
            rows,
            empty="no triggers; a runner stores those that its tasks declare, when it starts",
        )
        for why in unreadable.values():
            out.note(why)


# --- what was triggered, for other commands


def origin_of(record: InvocationRecord) -> str:
    """What an invocation was triggered by, and by which trigger; nothing, if somebody submitted it."""
    origin = record.origin
    if origin is None or not origin.sources:
        return ""
    sources = " and ".join(told(each) for each in origin.sources)
    if [each.name for each in origin.sources] == [origin.trigger]:  # a schedule, which is its own trigger
        return sources
    return f"{sources}, by the trigger '{origin.trigger}'"


def origin_facts(origin: Origin | None) -> dict[str, Any] | None:
    if origin is None:
        return None
    sources = [{"kind": each.kind, "id": each.id, "name": each.name} for each in origin.sources]
    return {"trigger": origin.trigger, "sources": sources, "depth": origin.depth, "path": list(origin.path)}


# --- events


class Became(NamedTuple):
    """What has become of an invocation: its status, and of one that decides, what it called."""

    status: str = "not kept any more"
    called: list[str] | None = None


def event_facts(event: EventRecord, became: Mapping[str, Became] | None = None) -> dict[str, Any]:
    return {
        "id": event.id,
        "app": event.app,
        "name": event.name,
        "kind": event.kind,
        "at": moment(event.at),
        "payload": _payload(event),
        "key": event.key or None,
        "emitted_by": event.emitted_by or None,
        "depth": event.depth,
        "path": list(event.path),
        "keep_until": moment(event.keep_until),
        "to_be_told": list(event.outbox),
        "caused": [_caused_facts(each, became) for each in event.caused],
    }


def _caused_facts(each: Caused, became: Mapping[str, Became] | None) -> dict[str, Any]:
    facts = {"trigger": each.trigger, "invocation": each.invocation or None, "why": each.why}
    if became is None:
        return facts
    known = became.get(each.invocation)
    return facts | {"status": known and known.status, "called": known and known.called}


def caused_by(event: EventRecord) -> str:
    """What has become of an event, in short."""
    parts = [_in_short(each) for each in event.caused]
    if event.outbox:
        parts.append(f"{counted(len(event.outbox), 'trigger')} yet to be told")
    return ", ".join(parts) or "nothing"


def _in_short(each: Caused) -> str:
    if not each.invocation:
        return f"nothing by {each.trigger} ({each.why})"
    why = f" ({each.why})" if each.why else ""
    return f"{each.invocation} by {each.trigger}{why}"


def _payload(event: EventRecord) -> Any:
    try:
        return DATA.decode(event.payload)
    except NotDecodable as error:
        return f"{counted(len(event.payload), 'byte')} that cannot be read here: {error}"


def _shortened(event: EventRecord) -> str:
    text = value_line(_payload(event))
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"


def _became(app: App, event: EventRecord) -> dict[str, Became]:
    """The invocations that it caused, by id."""
    ids = [each.invocation for each in event.caused if each.invocation]
    found = with_store(app, lambda store: get_readable(store, app.name, ids)) if ids else ()
    there = {record.id: Became(record.status.value, _called(record)) for record in found if record is not None}
    return {id: there.get(id, Became()) for id in ids}


def _called(record: InvocationRecord) -> list[str] | None:
    """What an invocation that decides for a trigger has called; None if it has not decided, or is no such one."""
    if not record.task.startswith(EVALUATES) or record.result is None:
        return None
    try:
        return [str(id) for id in DATA.decode(record.result)]
    except (NotDecodable, TypeError):
        return None


def _status(each: Caused, became: Mapping[str, Became]) -> str:
    return became[each.invocation].status if each.invocation else ""


def _why(each: Caused, became: Mapping[str, Became]) -> str:
    called = became[each.invocation].called if each.invocation else None
    if called is None:
        return each.why
    return f"its code has called: {', '.join(called)}" if called else "its code has called nothing"


def _emitter(app: App, event: EventRecord) -> str:
    if not event.emitted_by:
        return ""
    (record,) = with_store(app, lambda store: store.get(app.name, [event.emitted_by]))
    return f"{record.task} {record.id}, {record.status}" if record else f"{event.emitted_by}, not kept any more"


def _parsed(text: str) -> Any:
    """A payload is JSON and nothing else: a text that is none would be a mistake more often than a word."""
    try:
        return strictly(text)
    except ValueError as error:
        raise UsageError(
            f"the payload {described(text[:80])} is no JSON ({error}); write an object like '{{\"id\": 42}}', or a "
            "text like '\"hello\"'"
        ) from None


# --- triggers


def _all(app: App) -> tuple[list[TriggerRecord], dict[str, str]]:
    """By name; and why others cannot be read."""
    records, unreadable = [], {}
    for entry in with_store(app, lambda store: store.entries(app.name, KIND)):
        try:
            records.append(from_entry(entry))
        except CorruptRecord as error:
            unreadable[entry.name] = str(error)
    return records, unreadable


def _state(record: TriggerRecord) -> str:
    return "active" if record.retired_at is None else "retired"


def _decided_by(record: TriggerRecord) -> str:
    return "code" if record.evaluator else "data"


def _when(record: TriggerRecord) -> str:
    if all(len(clause) == 1 for clause in record.clauses):
        return str(record)
    paths = dict.fromkeys(each.correlate for each in record.conditions if each.correlate)
    alike = f" of the same {' or '.join(paths)}" if paths else ""
    return f"{record},{alike} within {length(record.within_seconds)}"


def _trigger_facts(record: TriggerRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "app": record.app,
        "task": record.call.task,
        "queue": record.call.queue,
        "when": _when(record),
        "state": _state(record),
        "decided_by": _decided_by(record),
        "evaluator": record.evaluator or None,
        "within_seconds": record.within_seconds,
        "created_at": moment(record.created_at),
        "retired_at": None if record.retired_at is None else moment(record.retired_at),
    }


# --- what they share


COMMANDS: dict[str, Callable[..., None]] = {"show": show, "emit": emit}
__all__: Sequence[str] = ["COMMANDS", "events", "origin_facts", "origin_of", "triggers"]
