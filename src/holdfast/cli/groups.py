"""The commands about groups: ``groups`` with ``show`` and ``cancel``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from typer import Argument, Option

from holdfast.app import App
from holdfast.cli import reach
from holdfast.cli.command import Before, command, page_given
from holdfast.cli.output import Output
from holdfast.errors import InvocationNotFound, UsageError
from holdfast.groups.handles import InvocationGroup
from holdfast.groups.looking import callback_id, state_of
from holdfast.groups.records import GroupRecord
from holdfast.ids import LENGTH, is_id
from holdfast.model.status import Status
from holdfast.showing import fields, length, moment

GroupId = Annotated[str, Argument(metavar="ID", help="The group, or the beginning of its id.")]


@command()
def groups(
    out: Output,
    app: App,
    limit: Annotated[int, Option(min=1, help="At most so many.")] = 50,
    before: Before = None,
) -> None:
    """List groups, newest first; or show or cancel one.

    "ended" is how many members were seen to have ended, from the first on.
    """
    found, now = app.groups(limit=limit, before=page_given(before)), reach.time_of(app)
    out.document({"groups": [_facts(each) for each in found]})
    rows = [
        (each.id, f"{each.size:,}", state_of(each), f"{each.floor:,}", length(now - each.created_at), _callback(each))
        for each in found
    ]
    out.table(("id", "calls", "state", "ended", "age", "callback"), rows, empty="no groups")


@command()
def show(out: Output, app: App, id: GroupId) -> None:
    """Show a group: its members by status, and what follows it."""
    record, group = _found(app, id)
    counts, now = group.counts(), reach.time_of(app)
    out.document(_facts(record) | {"counts": {status.value: count for status, count in counts.items()}})
    out.line(f"group {record.id} of {record.size:,}: {state_of(record)}")
    out.facts(
        [
            ("members", _in_words(counts)),
            ("first, last", f"{group.ids[0]}, {group.ids[-1]}" if record.size else ""),
            ("parent", record.parent_id),
            ("created", f"{moment(record.created_at)}, {length(now - record.created_at)} ago"),
            ("done", "" if record.done_at is None else moment(record.done_at)),
            ("callback", _callback(record)),
            ("on a failure", "the other members are cancelled" if record.cancels else ""),
            ("failed first", record.failed),
        ]
    )


@command(action="group.cancel", target="id")
def cancel(
    out: Output,
    app: App,
    id: GroupId,
    reason: Annotated[str, Option(help="Why; kept with them.")] = "",
    by: Annotated[str | None, Option(help="The user; else this user and host.")] = None,
) -> None:
    """End the members of a group that wait or run. Its callback hears of that as of other failures."""
    record, group = _found(app, id)
    statuses = group.cancel(reason, by=by)
    counts = {status: statuses.count(status) for status in dict.fromkeys(statuses)}
    out.document({"id": record.id, "counts": {status.value: count for status, count in counts.items()}})
    out.line(f"group {record.id}: {_in_words(counts)}")


def _found(app: App, text: str) -> tuple[GroupRecord, InvocationGroup[Any]]:
    """Find a group by the beginning of its id."""
    if not is_id(text):
        if not is_id(text[:LENGTH].ljust(LENGTH, "0")) or len(text) < 6:
            raise UsageError(f"'{text}' is no beginning of an id: write 6 characters or more")
        found = [each.id for each in app.groups(before=f"{text}{{", limit=2) if each.id.startswith(text)]
        if len(found) != 1:
            raise InvocationNotFound(f"{len(found) or 'no'} groups of the app '{app.name}' begin with '{text}'")
        text = found[0]
    group = app.group(text)
    (record,) = [each for each in app.groups(before=f"{text}{{", limit=1) if each.id == text]
    return record, group


def _callback(record: GroupRecord) -> str:
    links = [(name, link) for name, link in (("then", record.then), ("on_error", record.on_error)) if link is not None]
    tasks = ", ".join(f"{name} {link.call.task}" for name, link in links)
    return f"{tasks}: {callback_id(record)}" if tasks else ""


def _facts(record: GroupRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "size": record.size,
        "state": state_of(record),
        "ended": record.floor,
        **fields(record, "created_at", "done_at"),
        "parent_id": record.parent_id,
        "then": None if record.then is None else record.then.call.task,
        "on_error": None if record.on_error is None else record.on_error.call.task,
        "on_failure": "cancel" if record.cancels else "continue",
        "callback": callback_id(record),
    }


def _in_words(counts: Mapping[Status, int]) -> str:
    return ", ".join(f"{count:,} {status.value}" for status, count in sorted(counts.items())) or "none"
