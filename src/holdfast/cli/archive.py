"""The commands for ended invocations: ``archive``, ``rerun`` and ``purge``.

A command that changes many invocations shows them first, and changes them only when the user confirms.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import sys
from collections.abc import Sequence
from typing import Annotated, cast

import typer
from typer import Argument, Option

from holdfast.app import App
from holdfast.archive.api import ArchiveFilter
from holdfast.cli import reach
from holdfast.cli.arguments import call_given
from holdfast.cli.command import Before, Yes, command, page_given, time_given
from holdfast.cli.completion import ids as ids_offered
from holdfast.cli.naming import attributes_of, explain_empty, find_id, stored_names
from holdfast.cli.output import FAILED, Output
from holdfast.cli.progress import walking
from holdfast.cli.searched import Search, act_on_all, wanted_by
from holdfast.clock import parse_duration
from holdfast.errors import HoldfastError, UsageError
from holdfast.model.names import counted
from holdfast.model.records import InvocationRecord
from holdfast.showing import brief, length
from holdfast.web.reading.archive import ArchiveReading

_SHOWN = 20
_TITLES = ("id", "task", "status", "ended", "attempt", "error or reason")

Ids = Annotated[
    list[str] | None,
    Argument(
        metavar="ID", help="Ended invocations; the beginning or the end of an id will do.", autocompletion=ids_offered
    ),
]


@dataclasses.dataclass
class FilterOptions:
    """Which ended invocations are meant."""

    status: Annotated[list[str] | None, Option(help="success, failed, cancelled, concurrency_controlled_final.")] = None
    task: Annotated[list[str] | None, Option(help="By whole or short name; may be repeated.")] = None
    queue: Annotated[list[str] | None, Option(help="Only these; may be repeated.")] = None
    tag: Annotated[list[str] | None, Option(help="Only what asks for all of these tags.")] = None
    since: Annotated[str | None, Option(metavar="TIME", help="Ended since: 2026-11-15T08:00:00Z, or 2h ago.")] = None
    until: Annotated[str | None, Option(metavar="TIME", help="Ended before: a time, or 2h ago.")] = None
    key: Annotated[str | None, Option(help="With this idempotency key.")] = None
    error: Annotated[str | None, Option(metavar="TEXT", help="With this type of error, or text in it.")] = None
    attribute: Annotated[
        list[str] | None, Option(metavar="NAME=VALUE", help="Only with this attribute; may be repeated.")
    ] = None

    def where(self, app: App) -> ArchiveFilter:
        """Return the given options, as the app takes them."""
        found = {name: value for name, value in vars(self).items() if name != "attribute"}
        found |= {"task": stored_names(app, self.task or ()), "attributes": attributes_of(self.attribute or ())}
        found |= {
            name: past_time(app, found[name], f"--{name}") for name in ("since", "until") if found[name] is not None
        }
        return cast(ArchiveFilter, {name: value for name, value in found.items() if value not in (None, [], (), {})})

    def until_now(self, app: App) -> ArchiveFilter:
        """Leave out what ends from now on, since the user has not seen it. An empty filter stays empty."""
        where = self.where(app)
        now, until = reach.time_of(app), where.get("until")
        if where and (until is None or (until.timestamp() if isinstance(until, dt.datetime) else until) > now):
            where["until"] = now
        return where


@command()
def archive(
    out: Output,
    app: App,
    filter: FilterOptions,
    limit: Annotated[int, Option(min=1, max=10_000, help="Show at most this many invocations.")] = 50,
    before: Before = None,
) -> None:
    """Search ended invocations: latest end first, with reasons."""
    page = ArchiveReading(app.runtime).page(filter.where(app), limit=limit, before=page_given(before))
    found = app.runtime.run(page)
    records, last = found.records, found.before
    out.document(found.document())
    _table(out, app, records)
    if not records:
        explain_empty(out, app, filter.task)
    if last is not None and len(records) < limit:
        out.aside(f"note: it has looked at as much as it does at a time; to go on: --before {last}")
    elif last is not None:
        out.aside(f"note: there may be more: --before {last}")


@dataclasses.dataclass
class RerunFlags:
    """How invocations are run again."""

    at: Annotated[str | None, Option(metavar="TIME", help="Not before then: 2026-11-15T08:00:00Z.")] = None
    delay: Annotated[str | None, Option(metavar="DURATION", help="Not before this has passed: 5m.")] = None
    request: Annotated[
        str | None, Option(metavar="ID", help="Repeat a rerun that was cut short; nothing is stored twice.")
    ] = None
    arguments: Annotated[
        str | None, Option(metavar="JSON", help="Other arguments for one of them: a list, or an object of named ones.")
    ] = None
    new_key: Annotated[bool, Option("--new-key", help="Give them new idempotency keys: effects are repeated.")] = False


@command(action="archive.rerun", target="ids", find=find_id)
def rerun(
    out: Output,
    app: App,
    filter: FilterOptions,
    options: RerunFlags,
    ids: Ids = None,
    search: Search = None,
    yes: Yes = False,
) -> None:
    """Run ended invocations again: by id, or all that match a filter.

    Each becomes a new invocation with the same arguments, task and queue. With a filter, they are listed first; --yes,
    or an answer, does it. Effects keep the idempotency keys of the first run, unless --new-key.
    """
    named, where = [find_id(app, id) for id in ids or ()], filter.until_now(app)
    due = None if options.at is None else time_given(options.at, "--at")
    request = options.request
    if search is not None:
        _refuse_more(named, where, others=options.arguments or options.at or options.delay)
        wanted = wanted_by(app, search, request=request or "", new_key=options.new_key)
        return act_on_all(out, app, "rerun", wanted, yes=yes)
    if options.arguments is not None:
        return _rerun_edited(out, app, named, options, due)
    if not named:
        with walking(out, app, "looking"):
            plan = app.rerun(dry_run=True, request=request, **where)
        if not _confirmed(out, app, where, len(plan.originals), "run again", yes):
            return out.document({"dry_run": True, "matched": len(plan.originals), "ids": plan.originals})
        request = plan.request
        out.aside(f"request {request}; if this is cut short, repeat it with --request {request}")
    out.agreed()
    with walking(out, app, "running again", len(named) or len(plan.originals)):
        done = app.rerun(named, at=due, delay=options.delay, request=request, new_key=options.new_key, **where)
    refused = dict(done.refused)
    pairs = list(zip([id for id in done.originals if id not in refused], done.invocations, strict=True))
    reruns = [{"id": new.id, "rerun_of": old} for old, new in pairs]
    out.document({"request": done.request, "refused": refused, "reruns": reruns})
    for old, new in pairs:
        out.line(f"{new.id} is a rerun of {old}")
    for id, why in refused.items():
        out.line(f"{id} was not run again: {why}")
    if refused:
        raise typer.Exit(FAILED)


def _rerun_edited(out: Output, app: App, named: list[str], options: RerunFlags, due: dt.datetime | None) -> None:
    if len(named) != 1 or options.arguments is None:
        raise UsageError("--arguments are those of one invocation: give its id")
    out.agreed()
    record = app.invocation(named[0]).record()
    fresh = app.invocation(record.id).rerun(
        at=due,
        delay=options.delay,
        request=options.request,
        new_key=options.new_key,
        arguments=call_given(app, record, options.arguments),
    )
    out.document({"request": options.request, "refused": {}, "reruns": [{"id": fresh.id, "rerun_of": record.id}]})
    out.line(f"{fresh.id} is a rerun of {record.id}")


@command(action="archive.purge", target="ids", find=find_id)
def purge(
    out: Output,
    app: App,
    filter: FilterOptions,
    ids: Ids = None,
    search: Search = None,
    force: Annotated[bool, Option("--force", help="Also invocations whose key is still taken.")] = False,
    yes: Yes = False,
) -> None:
    """Remove ended invocations: by id, or all that match a filter.

    They are listed first; --yes, or an answer, does it. An invocation with an idempotency key that is still taken is
    kept, because the same call could be stored once more.
    """
    named, where = [find_id(app, id) for id in ids or ()], filter.until_now(app)
    if search is not None:
        _refuse_more(named, where)
        return act_on_all(out, app, "purge", wanted_by(app, search, force=force), yes=yes)
    with walking(out, app, "looking"):
        plan = app.purge(named, dry_run=True, force=force, **where)
    sure = _confirmed(out, app, None if named else where, len(plan.originals), "be removed", yes)
    if sure:
        out.agreed()
    with walking(out, app, "removing", len(plan.originals)):
        done = app.purge(named, force=force, **where) if sure else plan
    matched = {"dry_run": not sure, "matched": len(plan.originals)}
    out.document(matched | {"removed": done.removed, "kept": dict(done.kept)})
    for id, why in done.kept[:_SHOWN]:
        out.line(f"{id} is kept: {why}")
    if len(done.kept) > _SHOWN:
        out.line(f"and {len(done.kept) - _SHOWN} more are kept")
    if sure:
        out.line(f"{counted(done.removed, 'invocation')} removed")
    if named and done.kept:
        raise typer.Exit(FAILED)


@command(action="archive.retain", target="ids", find=find_id)
def retain(
    out: Output,
    app: App,
    filter: FilterOptions,
    retention: Annotated[str, Argument(metavar="DURATION", help="From their end: 30d; or forever.")],
    ids: Ids = None,
    yes: Yes = False,
) -> None:
    """Keep ended invocations for another time: by id, or all that match a filter.

    The time counts from their end, and is an hour at least. Without --yes, or an answer, nothing is changed. New calls
    are kept as their task declares.
    """
    named, where = [find_id(app, id) for id in ids or ()], filter.until_now(app)
    with walking(out, app, "looking"):
        plan = app.archive.retain(retention, named, dry_run=True, **where)
    sure = _confirmed(out, app, None if named else where, len(plan.originals), "be kept for another time", yes)
    if sure:
        out.agreed()
    with walking(out, app, "keeping", len(plan.originals)):
        done = app.archive.retain(retention, named, **where) if sure else plan
    facts = {"dry_run": not sure, "matched": len(plan.originals), "over": plan.over, "refused": dict(done.refused)}
    out.document(facts | {"ids": done.originals})
    if plan.over:
        out.line(f"{counted(plan.over, 'invocation')} of them {'is' if plan.over == 1 else 'are'} then removed soon")
    for id, why in done.refused[:_SHOWN]:
        out.line(f"{id} stays as it is: {why}")
    if sure:
        out.line(f"{counted(len(done.originals), 'invocation')} kept for another time")
    if named and done.refused:
        raise typer.Exit(FAILED)


COMMANDS = {"retain": retain}


def _refuse_more(named: list[str], where: ArchiveFilter, others: object = None) -> None:
    if named or where or others:
        raise UsageError("--search says which ones; give it without ids, filters, --arguments, --at and --delay")


def past_time(app: App, text: str, option: str) -> float:
    """Return the time that a text means, or how long ago it was."""
    try:
        ago = parse_duration(text.strip().removesuffix("ago"))
    except HoldfastError:
        return time_given(text, option, ", or 2h for two hours ago").timestamp()
    return max(0.0, reach.time_of(app) - ago)


def _confirmed(out: Output, app: App, where: ArchiveFilter | None, count: int, what: str, yes: bool) -> bool:
    """Show what would be done. Return True if it is to be done."""
    if where is not None and not out.json:
        _table(out, app, app.archive(limit=_SHOWN, **where))
        if count > _SHOWN:
            out.line(f"and {count - _SHOWN} more")
    if not count or yes:
        return yes
    if out.json or not sys.stdin.isatty():
        out.note(f"{counted(count, 'invocation')} would {what}; nothing was done. To do it, add --yes")
        return False
    return bool(typer.confirm(f"{counted(count, 'invocation')} would {what}. Go on?"))


def _table(out: Output, app: App, records: Sequence[InvocationRecord]) -> None:
    now = reach.time_of(app)
    rows = [
        (r.id, r.task, r.status.value, f"{length(now - r.changed_at)} ago", r.attempt, brief(_why(r))) for r in records
    ]
    out.table(_TITLES, rows, empty="no ended invocation matches")


def _why(record: InvocationRecord) -> str:
    """Return the error of an invocation, and its reason unless that says the same."""
    error, reason = record.error, record.reason
    if error is None:
        return reason
    if error.message in reason or (reason.partition(": ")[2] or reason) in error.message:  # the same, and maybe more
        return reason or str(error)
    return f"{error} ({reason})"
