"""The commands about invocations: ``ps``, ``show``, ``why``, ``history``, ``wake`` and ``cancel``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

from typer import Argument, Option

from holdfast.app import App
from holdfast.cli import live, reach, timeline
from holdfast.cli.archive import past_time
from holdfast.cli.command import Before, InvocationId, Yes, command, page_given
from holdfast.cli.completion import ids as ids_offered
from holdfast.cli.events import origin_of
from holdfast.cli.naming import attributes_of, explain_empty, find_id, stored_names
from holdfast.cli.output import Output, terminal_width
from holdfast.cli.searched import Search, act_on_all, wanted_by
from holdfast.errors import EventNotFound, InvocationNotFound, NotDecodable, UsageError
from holdfast.groups.looking import Family, drawn
from holdfast.ids import InvocationId as WholeId
from holdfast.ids import is_id
from holdfast.model.names import core_app, counted
from holdfast.model.notes import NO_NOTES
from holdfast.model.policies import describe_policy
from holdfast.model.records import FOREVER, HistoryEntry, InvocationRecord, left_out
from holdfast.model.status import AVAILABLE, FINAL, OWNED, Status
from holdfast.runtime.listing import MAX_LOOKED, Keep, filter_of, is_allowed, with_key
from holdfast.runtime.naming import declared
from holdfast.runtime.runs import WORLD_QUEUE, StepRecord, Stored, kind_of, span_of
from holdfast.showing import brief, describe, fields, length, moment
from holdfast.store.contract import Filter
from holdfast.web.documents import decoded, history_of
from holdfast.web.reading.model import InvocationPage, ReadModel
from holdfast.web.reading.search import parse

_HISTORY_TITLES = ("version", "time", "delta", "status", "epoch", "owner", "why")
_HISTORY_SHOWN = 8


class InvocationKind(StrEnum):
    """What an invocation is of."""

    TASK = "task"
    WORKFLOW = "workflow"
    WORLD = "world"


@dataclasses.dataclass
class ListFilter:
    """Which invocations are listed."""

    status: Annotated[list[str] | None, Option(help="Only these; may be repeated.")] = None
    task: Annotated[list[str] | None, Option(help="Only these, by whole or short name; may be repeated.")] = None
    queue: Annotated[list[str] | None, Option(help="Only these; may be repeated.")] = None
    parent: Annotated[str | None, Option(metavar="ID", help="Only the children of this one.")] = None
    attribute: Annotated[
        list[str] | None, Option(metavar="NAME=VALUE", help="Only with this attribute; may be repeated.")
    ] = None
    workflows: Annotated[bool, Option("--workflows", help="Only runs of workflows.")] = False
    key: Annotated[str | None, Option(help="With this idempotency key.")] = None
    kind: Annotated[InvocationKind | None, Option(help="Only these; world: of Workflow DevKit.")] = None
    since: Annotated[str | None, Option(metavar="TIME", help="Created since: 2026-11-15T08:00:00Z, or 2h ago.")] = None
    until: Annotated[str | None, Option(metavar="TIME", help="Created before: a time, or 2h ago.")] = None

    def where(self, app: App) -> dict[str, Any]:
        """Return what the store finds by."""
        return {
            "status": self.status or (),
            "queue": [WORLD_QUEUE] if self.kind is InvocationKind.WORLD and not self.queue else self.queue or (),
            "parent": None if self.parent is None else find_id(app, self.parent),
            "attributes": attributes_of(self.attribute or ()),
        }

    def keep(self, app: App) -> Keep | None:
        """Return a predicate that selects invocations among those found by the store; None if all are selected."""
        kind = self.kind
        by_queue = kind is None or (kind is InvocationKind.WORLD and not self.queue)
        if by_queue and not self.workflows and self.since is None and self.until is None and self.key is None:
            return None
        since, until = (
            None if text is None else past_time(app, text, option)
            for text, option in ((self.since, "--since"), (self.until, "--until"))
        )
        return lambda record: (
            (kind is None or kind == kind_of(record))
            and (record.run is not None or not self.workflows)
            and (self.key is None or record.key == self.key)
            and (since is None or record.created_at >= since)
            and (until is None or record.created_at < until)
        )


@command()
def ps(
    out: Output,
    app: App,
    filter: ListFilter,
    limit: Annotated[int, Option(min=1, help="Show at most this many invocations.")] = 50,
    before: Before = None,
    search: Annotated[
        str | None, Argument(metavar="SEARCH", help="Such as 'task:charge status:failed since:1h customer:c-17'.")
    ] = None,
    core: Annotated[bool, Option("--core", help="Holdfast's own tasks, such as recovery, instead of yours.")] = False,
    watch: Annotated[bool, Option("--watch", "-w", help="Go on until Ctrl-C.")] = False,
) -> None:
    """List invocations, newest first. What runs shows its progress.

    A search has terms such as status:failed, -queue:mail or error:Timeout; any other name is an attribute, and a word
    alone is looked for in texts.
    """
    query = parse(search or "")
    names = (filter.task or ()) if core else stored_names(app, filter.task or ())
    where = filter_of(task=names, **filter.where(app), before=page_given(before))
    keep = filter.keep(app)

    def look() -> InvocationPage:
        if query:
            page = ReadModel(app.runtime).searching.page(
                query, limit, also=where, keep=keep, core=core, most=MAX_LOOKED
            )
            return InvocationPage(*app.runtime.run(page)[:2])
        if core:
            return app.runtime.run(ReadModel(app.runtime).invocations(where, limit, keep, core=True))
        return app.runtime.run(_page(app, where, names, filter.key, keep, limit))

    def once() -> None:
        page = look()
        _list(out, app, page, is_line=watch)
        if not page.records and not watch:
            explain_empty(out, app, filter.task)

    live.repeated(out, once, watch=watch)


def _list(out: Output, app: App, page: InvocationPage, *, is_line: bool) -> None:
    (out.document_line if is_line else out.document)(page.document())
    now = reach.time_of(app)
    rows = [
        (r.id, r.task, r.status.value, length(now - r.created_at), r.attempt, brief(_detail(r, now)))
        for r in page.records
    ]
    out.table(("id", "task", "status", "age", "attempt", "due, owner or reason"), rows, empty="no invocations")
    if page.before is not None:
        out.aside(f"note: there may be more: --before {page.before}")


async def _page(
    app: App, where: Filter, tasks: Sequence[str], key: str | None, keep: Keep | None, limit: int
) -> InvocationPage:
    """Return a page of invocations. One with a key is looked up, where its task is known."""
    tasks = tasks or [name for definition in declared(app.runtime) for name in definition.names]
    if key is None or not tasks:
        return await ReadModel(app.runtime).invocations(where, limit, keep)
    found = await with_key(await app.runtime.engine(), tasks, key)
    wanted = [each for each in found if is_allowed(where, each) and (keep is None or keep(each))]
    return InvocationPage(wanted[:limit], None)


@command()
def show(
    out: Output,
    app: App,
    id: InvocationId,
    follow: Annotated[bool, Option("--follow", "-f", help="Go on until it has ended.")] = False,
) -> None:
    """Show everything about one invocation.

    With --follow, print each change first: its status, its progress, its log lines. With --json and --follow each is a
    document on its own line.
    """
    record = found(app, id)
    if follow:
        live.follow(out, app, record.id)
        if out.json:
            return
        record = found(app, record.id)
    whole = app.runtime.run(ReadModel(app.runtime).whole(record))
    error, calls, now = record.error, whole.calls, reach.time_of(app)
    family = app.runtime.run(ReadModel(app.runtime).family(record))
    if out.json:
        relatives = [fields(each, *each.__struct_fields__) for each in family.lines]
        return out.document(whole.document(app.runtime.codec) | {"family": relatives})
    out.line(f"{record.task} ({record.status}): {whole.why.text}")
    out.line()
    out.facts(
        [
            ("id", record.id),
            ("call", describe_call(app, record.task, record.arguments)[0]),
            ("key", record.key),
            ("queue", f"{record.queue}, priority {record.priority}"),
            ("tags", ", ".join(record.tags)),
            ("attributes", ", ".join(f"{name}={value}" for name, value in sorted(record.attributes.items()))),
            ("progress", live.progress_text(record, now)),
            ("checkpoint", _checkpoint(app, record, now)),
            ("parent", record.parent_id),
            ("root", record.root_id if record.root_id != record.parent_id else None),
            ("triggered by", origin_of(record)),
            ("rerun of", record.rerun_of),
            *[("rerun as", f"{again.id}, {again.status}") for again in whole.reruns],
            ("created", f"{moment(record.created_at)}, {length(now - record.created_at)} ago"),
            ("due", moment(record.due_at)),
            ("owner", record.owner),
            ("cancelled", _cancelled(record)),
            ("limits of time", _times(record)),
            ("limit key", record.limit_key),
            ("slot", record.slot),
            ("attempt", f"{record.attempt}, epoch {record.epoch}"),
            ("reason", record.reason),
            ("result", _result(app, record)),
            ("error", str(error) if error else ""),
            ("retries", describe_policy(record.terms.retries)),
            ("kept", _kept(record, now)),
            *[(f"failure {one.number}", f"{moment(one.at)}: {one.error}") for one in record.errors],
        ]
    )
    if error and error.traceback:
        out.block(error.traceback)
    if record.notes and record.notes.log and not follow:
        out.line()
        out.line(f"the last {counted(len(record.notes.log), 'line')} that it has logged:")
        for line in record.notes.log:
            out.line(live.text_of(line))
    out.line()
    if not family.is_alone:
        _print_family(out, family)
    if calls:
        _print_time_line(out, record, calls, now)
    _print_history(out, record, _HISTORY_SHOWN)


@command()
def why(out: Output, app: App, id: InvocationId) -> None:
    """Explain what an invocation waits for, or how it ended. It names what would release it."""
    record = found(app, id)
    said = app.runtime.run(ReadModel(app.runtime).why(record))
    out.document(said.document())
    out.line(f"{record.task} {record.id} ({record.status}): {said.why.text}")


@command()
def history(out: Output, app: App, id: InvocationId) -> None:
    """Show each status of an invocation: when, by which runner, why."""
    record = found(app, id)
    out.document(history_of(record))
    _print_history(out, record, len(record.history) + 1)
    if origin := origin_of(record):
        out.line(f"triggered by {origin}")
    for again in app.runtime.run(ReadModel(app.runtime).reruns(record.id)):
        out.line(f"rerun as {again.id} at {moment(again.created_at)}, {again.status}")


@command(action="invocation.wake", target="id", find=find_id)
def wake(out: Output, app: App, id: InvocationId) -> None:
    """Give a parked invocation another try; end sleeps of a workflow.

    A workflow that sleeps goes on at once, and so does a step that waits for its next attempt. A run that waits for a
    child or for a step elsewhere cannot be woken: see holdfast why ID.
    """
    id = find_id(app, id)
    app.invocation(id).wake()
    out.document({"id": id, "woken": True})
    out.line(f"{id} is back in the queue")


def _checkpoint(app: App, record: InvocationRecord, now: float) -> str:
    notes = record.notes or NO_NOTES
    if notes.checkpoint is None:
        return ""
    value = value_text(app, Stored(notes.checkpoint, app.runtime.codec))
    return f"{value}, made {length(max(0.0, now - (notes.checkpoint_at or now)))} ago"


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


# --- finding


def found(app: App, id: str) -> InvocationRecord:
    """Return the record; of Holdfast's own tasks too."""
    id = find_id(app, id)
    try:
        return app.invocation(id).record()
    except InvocationNotFound:
        if is_id(id) and any(each.id == id for each in app.groups(before=f"{id}{{", limit=1)):
            raise InvocationNotFound(f"{id} is a group: holdfast groups show {id}") from None
        (core,) = reach.with_store(app, lambda store: store.get(core_app(app.name), [WholeId(id)]))
        if core is not None:
            return core
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
        return f"{live.said(record)}, on {record.owner}".removeprefix(", ")
    if record.error is not None and not record.reason:
        return str(record.error)
    return record.reason


def describe_call(app: App, task: str, arguments: bytes) -> tuple[str, dict[str, Any]]:
    """Return the call as Python would write it, and as data."""
    try:
        args, kwargs = decoded(app.runtime.codec, Stored(arguments, app.runtime.codec), call_of=task)
    except NotDecodable as error:
        return f"its {counted(len(arguments), 'byte')} of arguments cannot be read here: {error}", {
            "unreadable": str(error)
        }
    parts = [describe(value) for value in args] + [f"{name}={describe(value)}" for name, value in kwargs.items()]
    return f"{task}({', '.join(parts)})", {"args": list(args), "kwargs": kwargs}


def _result(app: App, record: InvocationRecord) -> str:
    return "" if record.result is None else value_text(app, Stored(record.result, app.runtime.codec))


def value_text(app: App, stored: Stored | None, *, is_given: bool = False) -> str:
    if stored is None:
        return ""
    try:
        return describe(decoded(app.runtime.codec, stored, is_given=is_given))
    except NotDecodable as error:
        return f"{counted(len(stored.data), 'byte')} that cannot be read here: {error}"


def _print_history(out: Output, record: InvocationRecord, max_lines: int) -> None:
    entries = record.history
    before = [entries[0].at, *(entry.at for entry in entries)] if entries else []
    rows: list[tuple[object, ...]] = [
        (e.version, moment(e.at), f"+{length(e.at - then)}", e.status.value, e.epoch, e.owner, _why(e))
        for e, then in zip(entries, before, strict=False)
    ]
    if missing := left_out(entries):
        rows.insert(1, ("…", "", "", "", "", "", f"{counted(missing, 'line')} left out of a long history"))
    out.table(_HISTORY_TITLES, rows[-max_lines:], empty="no history")
    if len(rows) > max_lines:
        out.line(f"the last {max_lines} of {len(rows)}; all of them: holdfast history {record.id}")


def _print_family(out: Output, family: Family) -> None:
    for branch, each in drawn(family.lines):
        this = "  ◀ this" if each.is_self else ""
        out.line(f"{branch}{each.task} {each.id} {each.status}  {each.role}".rstrip() + this)
    out.line()


def _print_time_line(out: Output, record: InvocationRecord, calls: Sequence[StepRecord], now: float) -> None:
    """Draw the steps, children and waits of a run."""
    span = span_of(record, calls, now)
    rows = list(timeline.rows(calls, record.queue, span, terminal_width()))
    out.table((*timeline.TITLES[:-1], f"{length(span.seconds)} in all"), rows)
    out.line(timeline.LEGEND)
    if len(rows) < len(calls):
        out.line(f"{len(rows)} of {len(calls)}; all of them: holdfast workflow steps {record.id}")
    out.line()


def _why(entry: HistoryEntry) -> str:
    """Return the reason, and the runner that acted if that was not the owner."""
    return entry.why if entry.by is None else f"{entry.why} (by {entry.by})".lstrip()


# --- cancelling

_SAID = {Status.CANCELLED: "is cancelled", Status.CANCELLING: "is asked to end"}


@command(action="invocation.cancel", target="ids", find=find_id)
def cancel(
    out: Output,
    app: App,
    ids: Annotated[
        list[str] | None,
        Argument(
            metavar="ID", help="Invocations; the beginning or the end of an id will do.", autocompletion=ids_offered
        ),
    ] = None,
    reason: Annotated[str, Option(help="Why; kept with them.")] = "",
    by: Annotated[str | None, Option(help="The user; else this user and host.")] = None,
    children: Annotated[
        bool | None, Option("--children/--no-children", help="And what they submitted; else as they declare.")
    ] = None,
    search: Search = None,
    yes: Yes = False,
) -> None:
    """End invocations that wait or run.

    By id, or all that a search means. Waiting ones end at once, running ones after they have cleaned up. Safe to
    repeat.
    """
    if bool(ids) is (search is not None):
        raise UsageError("say which ones: by ids, or by --search 'task:charge status:registered'")
    if search is not None:
        if children is not None:
            raise UsageError("--children is for ids; with --search, children end as they declare")
        return act_on_all(out, app, "cancel", wanted_by(app, search, by=by or "", reason=reason), yes=yes)
    out.agreed()
    ids = ids or []
    named = [find_id(app, id) for id in ids]
    ends = {id: app.invocation(id).cancel(reason, by=by, children=children) for id in named}
    out.document({"invocations": [{"id": id, "status": status.value} for id, status in ends.items()]})
    for id, status in ends.items():
        otherwise = f"had ended before: {status}" if status in FINAL else "is asked to end by its next owner"
        out.line(f"{id} {_SAID.get(status, otherwise)}")
