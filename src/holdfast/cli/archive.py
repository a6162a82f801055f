"""The commands for what has ended: ``archive``, ``rerun`` and ``purge``.

Whatever changes many at once is a dry run first: it tells what it means, and does it only if that is confirmed.
"""

from __future__ import annotations

import datetime as dt
import sys
from typing import Annotated, Any, cast

import typer

from holdfast.app import App
from holdfast.archive import ArchiveFilter
from holdfast.cli.choosing import looked_at
from holdfast.cli.naming import find_id, stored_names
from holdfast.cli.options import AppOption, AsJson, NameOption, UrlOption, time_given
from holdfast.cli.output import FAILED, Output
from holdfast.cli.reach import searched, time_of
from holdfast.cli.shown import brief, length, moment
from holdfast.clock import parse_duration
from holdfast.errors import HoldfastError, UsageError
from holdfast.ids import is_id
from holdfast.lifecycle.names import counted
from holdfast.lifecycle.records import InvocationRecord

_SHOWN = 20
_TITLES = ("id", "task", "status", "ended", "attempt", "error or reason")

Statuses = Annotated[
    list[str] | None, typer.Option("--status", help="success, failed, cancelled, concurrency_controlled_final.")
]
Tasks = Annotated[list[str] | None, typer.Option("--task", help="By whole or short name; may be repeated.")]
Queues = Annotated[list[str] | None, typer.Option("--queue", help="Only these; may be repeated.")]
Tags = Annotated[list[str] | None, typer.Option("--tag", help="Only what asks for all of these tags.")]
Since = Annotated[
    str | None, typer.Option("--since", metavar="TIME", help="Ended then or later: 2026-11-15T08:00:00Z, or 2h ago.")
]
Until = Annotated[str | None, typer.Option("--until", metavar="TIME", help="Ended before: a time, or 2h ago.")]
Key = Annotated[str | None, typer.Option("--key", help="With this idempotency key.")]
Error = Annotated[str | None, typer.Option("--error", metavar="TEXT", help="With this type of error, or text in it.")]
Ids = Annotated[
    list[str] | None, typer.Argument(metavar="ID", help="Ended invocations, or the beginnings of their ids.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Do it, without asking.")]


def archive(
    status: Statuses = None,
    task: Tasks = None,
    queue: Queues = None,
    tag: Tags = None,
    since: Since = None,
    until: Until = None,
    key: Key = None,
    error: Error = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 50,
    before: Annotated[str | None, typer.Option(metavar="ID", help="Only what ended before this one did.")] = None,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """Search what has ended, latest end first, with the reason of each failure."""
    with Output(json=json) as out, looked_at(out, app, url, name) as chosen:
        if before is not None and not is_id(before):
            raise UsageError(f"--before {before!r} is no id; give the last id of the page before")
        where = _filter(chosen, status, task, queue, tag, since, until, key, error)
        records, last = searched(chosen, limit, before, where)
        if json:
            return out.document({"invocations": [_facts(record) for record in records], "before": last})
        _table(out, chosen, records, "nothing that has ended is like that")
        if last is not None and len(records) < limit:
            out.note(f"it has looked at as much as it does at a time; to go on: --before {last}")
        elif last is not None:
            out.note(f"there may be more: --before {last}")


def rerun(
    ids: Ids = None,
    status: Statuses = None,
    task: Tasks = None,
    queue: Queues = None,
    tag: Tags = None,
    since: Since = None,
    until: Until = None,
    key: Key = None,
    error: Error = None,
    at: Annotated[str | None, typer.Option(metavar="TIME", help="Not before then: 2026-11-15T08:00:00Z.")] = None,
    delay: Annotated[str | None, typer.Option(metavar="DURATION", help="Not before this has passed: 5m.")] = None,
    request: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Repeat this request, which was cut short: nothing is stored twice."),
    ] = None,
    yes: Yes = False,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """Run ended invocations again: those named, or all that match a filter.

    Each becomes a new invocation with the same arguments, task and queue. With a filter it is told first what would be
    run again; --yes, or an answer, does it.
    """
    with Output(json=json) as out, looked_at(out, app, url, name) as chosen:
        named = [find_id(chosen, id) for id in ids or ()]
        where = _told_before(chosen, _filter(chosen, status, task, queue, tag, since, until, key, error))
        more: dict[str, Any] = {
            "at": None if at is None else time_given(at, "--at"),
            "delay": delay,
            "request": request,
        }
        if not named:
            plan = chosen.rerun(dry_run=True, request=request, **where)
            if not _confirmed(out, chosen, where, len(plan.originals), "run again", yes):
                facts = {"dry_run": True, "matched": len(plan.originals), "ids": list(plan.originals)}
                return out.document(facts) if json else None
            more["request"] = plan.request
            out.aside(f"request {plan.request}; if this is cut short, repeat it with --request {plan.request}")
        done = chosen.rerun(named, **more, **where)
        refused = dict(done.refused)
        pairs = list(zip([id for id in done.originals if id not in refused], done.invocations, strict=True))
        if json:
            facts = {"request": done.request, "refused": refused}
            out.document(facts | {"reruns": [{"id": new.id, "rerun_of": old} for old, new in pairs]})
        else:
            for old, new in pairs:
                out.line(f"{new.id} is a rerun of {old}")
            for id, why in refused.items():
                out.line(f"{id} was not run again: {why}")
        if refused:
            raise typer.Exit(FAILED)


def purge(
    ids: Ids = None,
    status: Statuses = None,
    task: Tasks = None,
    queue: Queues = None,
    tag: Tags = None,
    since: Since = None,
    until: Until = None,
    key: Key = None,
    error: Error = None,
    force: Annotated[bool, typer.Option("--force", help="Also those whose key is still taken.")] = False,
    yes: Yes = False,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """Remove ended invocations before their time: those named, or all that match a filter.

    It is told first what would be removed; --yes, or an answer, does it. One whose idempotency key is still taken is
    kept, because the same call could be stored once more.
    """
    with Output(json=json) as out, looked_at(out, app, url, name) as chosen:
        named = [find_id(chosen, id) for id in ids or ()]
        where = _told_before(chosen, _filter(chosen, status, task, queue, tag, since, until, key, error))
        plan = chosen.purge(named, dry_run=True, force=force, **where)
        sure = _confirmed(out, chosen, None if named else where, len(plan.originals), "be removed", yes)
        done = chosen.purge(named, force=force, **where) if sure else plan
        if json:
            facts = {"dry_run": not sure, "matched": len(plan.originals), "removed": done.removed}
            out.document(facts | {"kept": dict(done.kept)})
        else:
            for id, why in done.kept[:_SHOWN]:
                out.line(f"{id} is kept: {why}")
            if len(done.kept) > _SHOWN:
                out.line(f"and {len(done.kept) - _SHOWN} more are kept")
            if sure:
                out.line(f"{counted(done.removed, 'invocation')} removed")
        if named and done.kept:
            raise typer.Exit(FAILED)


# --- what is meant


def _filter(
    app: App,
    status: list[str] | None,
    task: list[str] | None,
    queue: list[str] | None,
    tag: list[str] | None,
    since: str | None,
    until: str | None,
    key: str | None,
    error: str | None,
) -> ArchiveFilter:
    where: dict[str, Any] = {
        "status": status,
        "task": stored_names(app, task or ()),
        "queue": queue,
        "tag": tag,
        "since": None if since is None else _past(app, since, "--since"),
        "until": None if until is None else _past(app, until, "--until"),
        "key": key,
        "error": error,
    }
    return cast(ArchiveFilter, {name: value for name, value in where.items() if value not in (None, [], ())})


def _told_before(app: App, where: ArchiveFilter) -> ArchiveFilter:
    """Return the filter without what ends from now on: its user was not told of that. An empty one stays empty."""
    if not where:
        return where
    now, until = time_of(app), where.get("until")
    if until is None or (until.timestamp() if isinstance(until, dt.datetime) else until) > now:
        until = now
    return {**where, "until": until}


def _past(app: App, text: str, option: str) -> float | dt.datetime:
    """A time, or how long ago it was."""
    try:
        ago = parse_duration(text.strip().removesuffix("ago"))
    except HoldfastError:
        return time_given(text, option, ", or 2h for two hours ago")
    return max(0.0, time_of(app) - ago)


# --- asking and telling


def _confirmed(out: Output, app: App, where: ArchiveFilter | None, count: int, what: str, yes: bool) -> bool:
    """Tell what would be done, and whether to do it."""
    if where is not None and not out.json:
        _table(out, app, app.archive(limit=_SHOWN, **where), "nothing that has ended is like that")
        if count > _SHOWN:
            out.line(f"and {count - _SHOWN} more")
    if not count or yes:
        return yes
    if out.json or not sys.stdin.isatty():
        out.note(f"{counted(count, 'invocation')} would {what}; nothing was done. To do it, add --yes")
        return False
    return bool(typer.confirm(f"{counted(count, 'invocation')} would {what}. Go on?"))


def _table(out: Output, app: App, records: list[InvocationRecord], empty: str) -> None:
    now = time_of(app)
    rows = [
        (r.id, r.task, r.status.value, f"{length(now - r.changed_at)} ago", r.attempt, brief(_why(r))) for r in records
    ]
    out.table(_TITLES, rows, empty=empty)


def _why(record: InvocationRecord) -> str:
    """What it raised, and what is said beyond that."""
    error, reason = record.error, record.reason
    if error is None:
        return reason
    if error.message in reason or (reason.partition(": ")[2] or reason) in error.message:  # the same, and maybe more
        return reason or str(error)
    return f"{error} ({reason})"


def _facts(record: InvocationRecord) -> dict[str, Any]:
    error = record.error
    return {
        "id": record.id,
        "task": record.task,
        "status": record.status.value,
        "queue": record.queue,
        "tags": list(record.tags),
        "key": record.key,
        "created_at": moment(record.created_at),
        "ended_at": moment(record.changed_at),
        "retain_until": None if record.retain_until is None else moment(record.retain_until),
        "attempt": record.attempt,
        "error": None if error is None else {"type": error.type_name, "message": error.message},
        "reason": record.reason,
        "rerun_of": record.rerun_of,
    }
