"""The commands that look at what is stored: ``ps``, ``show``, ``why`` and ``history``."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from holdfast.app import App
from holdfast.cli.choosing import looked_at
from holdfast.cli.events import origin_facts, origin_of
from holdfast.cli.naming import find_id, stored_names
from holdfast.cli.options import AppOption, AsJson, InvocationId, NameOption, UrlOption
from holdfast.cli.output import Output
from holdfast.cli.policies import policy_shown
from holdfast.cli.reach import codec_of, event_of, explained, reruns_of, time_of, with_store
from holdfast.cli.shown import brief, described, length, moment
from holdfast.codec import ErrorRecord
from holdfast.errors import CorruptRecord, EventNotFound, InvocationNotFound, NotDecodable, UsageError
from holdfast.ids import is_id
from holdfast.lifecycle.decoding import INVOCATION
from holdfast.lifecycle.history import left_out
from holdfast.lifecycle.names import counted
from holdfast.lifecycle.records import HistoryEntry, InvocationRecord
from holdfast.lifecycle.retention import FOREVER
from holdfast.lifecycle.status import AVAILABLE, OWNED

_HISTORY_TITLES = ("version", "time", "delta", "status", "owner", "epoch", "why")
_HISTORY_SHOWN = 8


def ps(
    status: Annotated[list[str] | None, typer.Option(help="Only these; may be repeated.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Only these, by whole or short name; may be repeated.")] = None,
    queue: Annotated[list[str] | None, typer.Option(help="Only these; may be repeated.")] = None,
    parent: Annotated[str | None, typer.Option(metavar="ID", help="Only what this one has submitted.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    before: Annotated[str | None, typer.Option(metavar="ID", help="Only older ones: the last id of a page.")] = None,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """List invocations, newest first."""
    with Output(json=json) as out, looked_at(out, app, url, name) as chosen:
        if before is not None and not is_id(before):
            raise UsageError(f"--before {before!r} is no id; give the last id of the page before")
        tasks = stored_names(chosen, task or ())
        above = None if parent is None else find_id(chosen, parent)
        records = chosen.invocations(
            status=status or (), task=tasks, queue=queue or (), parent=above, limit=limit, before=before
        )
        if json:
            return out.document({"invocations": [_facts(record) for record in records]})
        now = time_of(chosen)
        rows = [
            (r.id, r.task, r.status.value, length(now - r.created_at), r.attempt, brief(_held_by(r, now)))
            for r in records
        ]
        out.table(("id", "task", "status", "age", "attempt", "due, owner or reason"), rows, empty="no invocations")
        if len(records) == limit:
            out.note(f"there may be more: --before {records[-1].id}")


def show(
    id: InvocationId, app: AppOption = None, url: UrlOption = None, name: NameOption = None, json: AsJson = False
) -> None:
    """Tell everything about one invocation."""
    with Output(json=json) as out, looked_at(out, app, url, name) as chosen:
        record = _found(chosen, id)
        why, now = explained(chosen, record).text, time_of(chosen)
        call, call_facts = call_shown(chosen, record.task, record.arguments)
        result, result_facts = _result(chosen, record)
        error, reruns = record.error, reruns_of(chosen, record.id)
        if json:
            facts = _facts(record) | {"explanation": why, "arguments": call_facts, "result": result_facts}
            facts["error"] = error and _error_facts(error)
            facts["errors"] = [
                {"number": failed.number, "attempt": failed.attempt, "at": moment(failed.at)}
                | _error_facts(failed.error)
                for failed in record.errors
            ]
            facts |= {"retries": record.terms.retries, "reruns": [again.id for again in reruns]}
            facts["origin"] = origin_facts(record.origin)
            return out.document(facts | {"history": [_entry_facts(entry) for entry in record.history]})
        out.line(f"{record.task} ({record.status}): {why}")
        out.line()
        out.facts(
            [
                ("id", record.id),
                ("call", call),
                ("key", record.key or ""),
                ("queue", f"{record.queue}, priority {record.priority}"),
                ("tags", ", ".join(record.tags)),
                ("parent", record.parent_id or ""),
                ("triggered by", origin_of(record)),
                ("rerun of", record.rerun_of or ""),
                *[("rerun as", f"{again.id}, {again.status}") for again in reruns],
                ("created", f"{moment(record.created_at)}, {length(now - record.created_at)} ago"),
                ("due", moment(record.due_at)),
                ("owner", record.owner or ""),
                ("cancelled", _cancelled(record)),
                ("limits of time", _times(record)),
                ("limit key", record.limit_key or ""),
                ("slot", record.slot or ""),
                ("attempt", f"{record.attempt}, epoch {record.epoch}"),
                ("reason", record.reason),
                ("result", result),
                ("error", str(error) if error else ""),
                ("retries", policy_shown(record.terms.retries)),
                ("kept", _kept(record, now)),
                *[(f"failure {one.number}", f"{moment(one.at)}: {one.error}") for one in record.errors],
            ]
        )
        if error and error.traceback:
            out.block(error.traceback)
        out.line()
        _print_history(out, record, _HISTORY_SHOWN)


def why(
    id: InvocationId, app: AppOption = None, url: UrlOption = None, name: NameOption = None, json: AsJson = False
) -> None:
    """Tell what holds an invocation back and what would release it, or how it ended."""
    with Output(json=json) as out, looked_at(out, app, url, name) as chosen:
        record = _found(chosen, id)
        found = explained(chosen, record)
        if json:
            facts = {"id": record.id, "task": record.task, "status": record.status.value, "queue": record.queue}
            return out.document(facts | {"reasons": list(found.reasons), "explanation": found.text})
        out.line(f"{record.task} {record.id} ({record.status}): {found.text}")


def history(
    id: InvocationId, app: AppOption = None, url: UrlOption = None, name: NameOption = None, json: AsJson = False
) -> None:
    """Tell every status that an invocation has had: when, by whom and why."""
    with Output(json=json) as out, looked_at(out, app, url, name) as chosen:
        record = _found(chosen, id)
        if json:
            facts = {"id": record.id, "origin": origin_facts(record.origin)}
            return out.document(facts | {"history": [_entry_facts(entry) for entry in record.history]})
        _print_history(out, record, len(record.history) + 1)
        if origin := origin_of(record):
            out.line(f"triggered by {origin}")
        for again in reruns_of(chosen, record.id):
            out.line(f"rerun as {again.id} at {moment(again.created_at)}, {again.status}")


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
    """The record, or why there is none: it may have been set aside because it could not be read."""
    try:
        return app.invocation(find_id(app, id)).record()
    except InvocationNotFound:
        for bad in with_store(app, lambda store: store.quarantined(app.name)):
            is_meant = bad.id == id or (len(id) > 5 and bad.id.startswith(id))
            if bad.kind == INVOCATION and is_meant:
                raise CorruptRecord(
                    f"{bad.id} was set aside at {moment(bad.at)} because it could not be read: {bad.why}. "
                    f"It is kept as it was: {bad.raw[:500]}"
                ) from None
        with contextlib.suppress(EventNotFound):
            raise InvocationNotFound(
                f"{id} is the event '{event_of(app, id).name}': holdfast events show {id}"
            ) from None
        raise


# --- saying


def _held_by(record: InvocationRecord, now: float) -> str:
    """The one thing that one wants to know beside the status."""
    if record.status in AVAILABLE and record.due_at > now:
        return f"due in {length(record.due_at - now)}"
    if record.status in OWNED and record.owner:
        return f"on {record.owner}"
    if record.error is not None and not record.reason:
        return str(record.error)
    return record.reason


def call_shown(app: App, task: str, arguments: bytes) -> tuple[str, dict[str, Any]]:
    """The call as Python would write it, and as facts."""
    try:
        args, kwargs = codec_of(app).decode_call(arguments, describe=True)
    except NotDecodable as error:
        return f"its {counted(len(arguments), 'byte')} of arguments cannot be read here: {error}", {
            "unreadable": str(error)
        }
    parts = [described(value) for value in args] + [f"{name}={described(value)}" for name, value in kwargs.items()]
    return f"{task}({', '.join(parts)})", {"args": list(args), "kwargs": kwargs}


def _result(app: App, record: InvocationRecord) -> tuple[str, object]:
    if record.result is None:
        return "", None
    try:
        value = codec_of(app).decode(record.result, describe=True)
    except NotDecodable as error:
        return f"{counted(len(record.result), 'byte')} that cannot be read here: {error}", {"unreadable": str(error)}
    return described(value), {"value": value}


def _print_history(out: Output, record: InvocationRecord, most: int) -> None:
    entries = record.history
    before = [entries[0].at, *(entry.at for entry in entries)] if entries else []
    rows: list[tuple[object, ...]] = [
        (e.version, moment(e.at), f"+{length(e.at - then)}", e.status.value, e.owner, e.epoch, _why(e))
        for e, then in zip(entries, before, strict=False)
    ]
    if missing := left_out(entries):
        rows.insert(1, ("…", "", "", "", "", "", f"{counted(missing, 'line')} left out of a long history"))
    out.table(_HISTORY_TITLES, rows[-most:], empty="no history")
    if len(rows) > most:
        out.line(f"the last {most} of {len(rows)}; all of them: holdfast history {record.id}")


def _why(entry: HistoryEntry) -> str:
    """The reason, and who saw to it if that was not the owner."""
    return entry.why if entry.by is None else f"{entry.why} (by {entry.by})".lstrip()


def _facts(record: InvocationRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "app": record.app,
        "task": record.task,
        "status": record.status.value,
        "queue": record.queue,
        "tags": list(record.tags),
        "priority": record.priority,
        "created_at": moment(record.created_at),
        "due_at": moment(record.due_at),
        "changed_at": moment(record.changed_at),
        "owner": record.owner,
        "epoch": record.epoch,
        "attempt": record.attempt,
        "reason": record.reason,
        "parent_id": record.parent_id,
        "key": record.key,
        "retain_until": None if record.retain_until is None else moment(record.retain_until),
        "rerun_of": record.rerun_of,
        "limit_key": record.limit_key,
        "slot": record.slot,
        "timeout": record.terms.timeout,
        "soft_timeout": record.terms.soft_timeout,
        "expires_at": None if record.terms.start_by is None else moment(record.terms.start_by),
        "cancellation": record.cancellation
        and {
            "by": record.cancellation.by,
            "reason": record.cancellation.reason,
            "at": moment(record.cancellation.at),
            "until": moment(record.cancellation.until),
        },
    }


def _entry_facts(entry: HistoryEntry) -> dict[str, Any]:
    return {
        "version": entry.version,
        "at": moment(entry.at),
        "status": entry.status.value,
        "owner": entry.owner,
        "epoch": entry.epoch,
        "by": entry.by,
        "why": entry.why,
    }


__all__: Sequence[str] = ["call_shown", "history", "ps", "show"]
