"""The commands about invocations: ``ps``, ``show``, ``why``, ``history``, ``wake`` and ``cancel``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Annotated, Any

from typer import Argument, Option

from holdfast.app import App
from holdfast.cli import reach
from holdfast.cli.command import Before, InvocationId, command, page_given
from holdfast.cli.events import origin_facts, origin_of
from holdfast.cli.naming import find_id, stored_names
from holdfast.cli.output import Output, brief, describe, fields, length, moment
from holdfast.cli.policies import describe_policy
from holdfast.codec import Codec, ErrorRecord
from holdfast.codec.data import without_classes
from holdfast.errors import EventNotFound, InvocationNotFound, NotDecodable
from holdfast.model.names import counted
from holdfast.model.records import HistoryEntry, InvocationRecord, left_out
from holdfast.model.retention import FOREVER
from holdfast.model.status import AVAILABLE, OWNED, Status
from holdfast.triggers.rules import DATA

_HISTORY_TITLES = ("version", "time", "delta", "status", "epoch", "owner", "why")
_HISTORY_SHOWN = 8


@command()
def ps(
    out: Output,
    app: App,
    status: Annotated[list[str] | None, Option(help="Only these; may be repeated.")] = None,
    task: Annotated[list[str] | None, Option(help="Only these, by whole or short name; may be repeated.")] = None,
    queue: Annotated[list[str] | None, Option(help="Only these; may be repeated.")] = None,
    parent: Annotated[str | None, Option(metavar="ID", help="Only the children of this one.")] = None,
    limit: Annotated[int, Option(min=1, help="At most so many.")] = 50,
    before: Before = None,
) -> None:
    """List invocations, newest first."""
    records = app.invocations(
        status=status or (),
        task=stored_names(app, task or ()),
        queue=queue or (),
        parent=None if parent is None else find_id(app, parent),
        limit=limit,
        before=page_given(before),
    )
    out.document({"invocations": [_facts(record) for record in records]})
    now = reach.time_of(app)
    rows = [
        (r.id, r.task, r.status.value, length(now - r.created_at), r.attempt, brief(_detail(r, now))) for r in records
    ]
    out.table(("id", "task", "status", "age", "attempt", "due, owner or reason"), rows, empty="no invocations")
    if len(records) == limit:
        out.aside(f"note: there may be more: --before {records[-1].id}")


@command()
def show(out: Output, app: App, id: InvocationId) -> None:
    """Show everything about one invocation."""
    record = _found(app, id)
    why, now = app.runtime.run(app.runtime.explain(record)).text, reach.time_of(app)
    call, call_facts = describe_call(app, record.task, record.arguments)
    result, result_facts = _result(app, record)
    error, reruns = record.error, reach.reruns_of(app, record.id)
    facts = _facts(record) | {"explanation": why, "arguments": call_facts, "result": result_facts}
    facts["error"] = error and _error_facts(error)
    facts["errors"] = [fields(one, "number", "attempt", "at") | _error_facts(one.error) for one in record.errors]
    facts |= {"retries": record.terms.retries, "reruns": [again.id for again in reruns]}
    facts["origin"] = origin_facts(record.origin)
    out.document(facts | {"history": _history_facts(record)})
    out.line(f"{record.task} ({record.status}): {why}")
    out.line()
    out.facts(
        [
            ("id", record.id),
            ("call", call),
            ("key", record.key),
            ("queue", f"{record.queue}, priority {record.priority}"),
            ("tags", ", ".join(record.tags)),
            ("parent", record.parent_id),
            ("triggered by", origin_of(record)),
            ("rerun of", record.rerun_of),
            *[("rerun as", f"{again.id}, {again.status}") for again in reruns],
            ("created", f"{moment(record.created_at)}, {length(now - record.created_at)} ago"),
            ("due", moment(record.due_at)),
            ("owner", record.owner),
            ("cancelled", _cancelled(record)),
            ("limits of time", _times(record)),
            ("limit key", record.limit_key),
            ("slot", record.slot),
            ("attempt", f"{record.attempt}, epoch {record.epoch}"),
            ("reason", record.reason),
            ("result", result),
            ("error", str(error) if error else ""),
            ("retries", describe_policy(record.terms.retries)),
            ("kept", _kept(record, now)),
            *[(f"failure {one.number}", f"{moment(one.at)}: {one.error}") for one in record.errors],
        ]
    )
    if error and error.traceback:
        out.block(error.traceback)
    out.line()
    _print_history(out, record, _HISTORY_SHOWN)


@command()
def why(out: Output, app: App, id: InvocationId) -> None:
    """Explain what an invocation waits for and what would release it, or how it ended."""
    record = _found(app, id)
    found = app.runtime.run(app.runtime.explain(record))
    facts = fields(record, "id", "task", "status", "queue")
    out.document(facts | {"reasons": list(found.reasons), "explanation": found.text})
    out.line(f"{record.task} {record.id} ({record.status}): {found.text}")


@command()
def history(out: Output, app: App, id: InvocationId) -> None:
    """Show every status that an invocation has had: when, by which runner and why."""
    record = _found(app, id)
    out.document({"id": record.id, "origin": origin_facts(record.origin), "history": _history_facts(record)})
    _print_history(out, record, len(record.history) + 1)
    if origin := origin_of(record):
        out.line(f"triggered by {origin}")
    for again in reach.reruns_of(app, record.id):
        out.line(f"rerun as {again.id} at {moment(again.created_at)}, {again.status}")


@command()
def wake(out: Output, app: App, id: InvocationId) -> None:
    """Give a parked invocation another try."""
    id = find_id(app, id)
    app.invocation(id).wake()
    out.document({"id": id, "woken": True})
    out.line(f"{id} is back in the queue")


def _kept(record: InvocationRecord, now: float) -> str:
    until = record.retain_until
    if until is None:
        return ""
    return "for ever" if until >= FOREVER else f"until {moment(until)}, {length(max(0.0, until - now))} from now"


def _cancelled(record: InvocationRecord) -> str:
    asked = record.cancellation
    return "" if asked is None else f"{moment(asked.at)}: {asked}"


def _times(record: InvocationRecord) -> str:
    terms = record.terms
    each = [
        f"{name} {length(seconds)}"
        for name, seconds in (("timeout", terms.timeout), ("soft timeout", terms.soft_timeout))
        if seconds is not None
    ]
    return ", ".join([*each, *([] if terms.start_by is None else [f"expires {moment(terms.start_by)}"])])


def _error_facts(error: ErrorRecord) -> dict[str, str]:
    return {"type": error.type_name, "message": error.message, "traceback": error.traceback}


# --- finding


def _found(app: App, id: str) -> InvocationRecord:
    """Return the record."""
    try:
        return app.invocation(find_id(app, id)).record()
    except InvocationNotFound:
        with contextlib.suppress(EventNotFound):
            raise InvocationNotFound(
                f"{id} is the event '{reach.event_of(app, id).name}': holdfast events show {id}"
            ) from None
        raise


# --- saying


def _detail(record: InvocationRecord, now: float) -> str:
    """Return what matters most beside the status: when it is due, its owner, or the reason."""
    if record.status in AVAILABLE and record.due_at > now:
        return f"due in {length(record.due_at - now)}"
    if record.status in OWNED and record.owner:
        return f"on {record.owner}"
    if record.error is not None and not record.reason:
        return str(record.error)
    return record.reason


def describe_call(app: App, task: str, arguments: bytes) -> tuple[str, dict[str, Any]]:
    """Return the call as Python would write it, and as data."""
    try:
        args, kwargs = _readable(app, lambda codec: codec.decode_call(arguments, describe=True))
    except NotDecodable as error:
        return f"its {counted(len(arguments), 'byte')} of arguments cannot be read here: {error}", {
            "unreadable": str(error)
        }
    parts = [describe(value) for value in args] + [f"{name}={describe(value)}" for name, value in kwargs.items()]
    return f"{task}({', '.join(parts)})", {"args": list(args), "kwargs": kwargs}


def _result(app: App, record: InvocationRecord) -> tuple[str, object]:
    stored = record.result
    if stored is None:
        return "", None
    try:
        value = _readable(app, lambda codec: codec.decode(stored, describe=True))
    except NotDecodable as error:
        return f"{counted(len(stored), 'byte')} that cannot be read here: {error}", {"unreadable": str(error)}
    return describe(value), {"value": value}


def _readable(app: App, decode: Callable[[Codec], Any]) -> Any:
    """Decode to values; to data without classes, if their code was not imported."""
    try:
        return decode(app.runtime.codec)
    except NotDecodable:
        with contextlib.suppress(NotDecodable):
            return without_classes(decode(DATA))
        raise


def _print_history(out: Output, record: InvocationRecord, most: int) -> None:
    entries = record.history
    before = [entries[0].at, *(entry.at for entry in entries)] if entries else []
    rows: list[tuple[object, ...]] = [
        (e.version, moment(e.at), f"+{length(e.at - then)}", e.status.value, e.epoch, e.owner, _why(e))
        for e, then in zip(entries, before, strict=False)
    ]
    if missing := left_out(entries):
        rows.insert(1, ("…", "", "", "", "", "", f"{counted(missing, 'line')} left out of a long history"))
    out.table(_HISTORY_TITLES, rows[-most:], empty="no history")
    if len(rows) > most:
        out.line(f"the last {most} of {len(rows)}; all of them: holdfast history {record.id}")


def _why(entry: HistoryEntry) -> str:
    """Return the reason, and the runner that acted if that was not the owner."""
    return entry.why if entry.by is None else f"{entry.why} (by {entry.by})".lstrip()


def _facts(record: InvocationRecord) -> dict[str, Any]:
    asked, terms = record.cancellation, record.terms
    first = ("id", "app", "task", "status", "queue", "tags", "priority", "created_at", "due_at", "changed_at", "owner")
    more = ("epoch", "attempt", "reason", "parent_id", "key", "retain_until", "rerun_of", "limit_key", "slot")
    return fields(record, *first, *more) | {
        "timeout": terms.timeout,
        "soft_timeout": terms.soft_timeout,
        "expires_at": None if terms.start_by is None else moment(terms.start_by),
        "cancellation": asked and fields(asked, "by", "reason", "at", "until"),
    }


def _history_facts(record: InvocationRecord) -> list[dict[str, Any]]:
    return [fields(entry, "version", "at", "status", "owner", "epoch", "by", "why") for entry in record.history]


# --- cancelling

_SAID = {Status.CANCELLED: "is cancelled", Status.CANCELLING: "is asked to end"}


@command()
def cancel(
    out: Output,
    app: App,
    ids: Annotated[list[str], Argument(metavar="ID", help="Invocations; the beginning of an id will do.")],
    reason: Annotated[str, Option(help="Why; kept with them.")] = "",
    by: Annotated[str | None, Option(help="The user; else this user and host.")] = None,
    children: Annotated[
        bool | None, Option("--children/--no-children", help="And what they submitted; else as they declare.")
    ] = None,
) -> None:
    """End invocations: waiting ones at once, running ones after they have cleaned up. Safe to repeat."""
    found = [find_id(app, id) for id in ids]
    ends = {id: app.invocation(id).cancel(reason, by=by, children=children) for id in found}
    out.document({"invocations": [{"id": id, "status": status.value} for id, status in ends.items()]})
    for id, status in ends.items():
        out.line(f"{id} {_SAID.get(status, f'had ended before: {status}')}")
