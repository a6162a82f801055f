"""The commands about groups: ``groups`` with ``show`` and ``cancel``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from typer import Argument, Option

from holdfast.app import App
from holdfast.cli import reach
from holdfast.cli.command import Before, command, page_given
from holdfast.cli.naming import find_group
from holdfast.cli.output import Output
from holdfast.groups.looking import callback_id, state_of
from holdfast.groups.records import GroupRecord
from holdfast.model.status import Status
from holdfast.showing import length, moment
from holdfast.web.reading.groups import GroupReading

GroupId = Annotated[str, Argument(metavar="ID", help="The group, or the beginning or end of its id.")]


@command()
def groups(
    out: Output,
    app: App,
    limit: Annotated[int, Option(min=1, help="Show at most this many groups.")] = 50,
    before: Before = None,
) -> None:
    """List groups, newest first; or show or cancel one.

    "ended" is how many members were seen to have ended, from the first on. It is not counted where nothing follows.
    """
    page = app.runtime.run(GroupReading(app.runtime).page(limit=limit, before=page_given(before)))
    found, now = page.groups, reach.time_of(app)
    out.document(page.document())
    rows = [
        (
            each.id,
            f"{each.size:,}",
            state_of(each),
            f"{each.floor:,}" if each.is_watched else "",
            length(now - each.created_at),
            _callback(each),
        )
        for each in found
    ]
    out.table(("id", "calls", "state", "ended", "age", "callback"), rows, empty="no groups")


@command()
def show(out: Output, app: App, id: GroupId) -> None:
    """Show a group: its members by status, and what follows it."""
    found = app.runtime.run(GroupReading(app.runtime).one(find_group(app, id)))
    record, counts, now = found.record, found.counts, reach.time_of(app)
    out.document(found.document())
    out.line(f"group {record.id} of {record.size:,}: {state_of(record)}")
    out.facts(
        [
            ("members", _in_words(counts)),
            ("first, last", f"{found.first}, {found.last}" if record.size else ""),
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
    """End the members of a group that wait or run. Its callback gets that as of other failures."""
    whole = find_group(app, id)
    statuses = app.group(whole).cancel(reason, by=by)
    counts = {status: statuses.count(status) for status in dict.fromkeys(statuses)}
    out.document({"id": whole, "counts": {status.value: count for status, count in counts.items()}})
    out.line(f"group {whole}: {_in_words(counts)}")


def _callback(record: GroupRecord) -> str:
    links = [(name, link) for name, link in (("then", record.then), ("on_error", record.on_error)) if link is not None]
    tasks = ", ".join(f"{name} {link.call.task}" for name, link in links)
    return f"{tasks}: {callback_id(record)}" if tasks else ""


def _in_words(counts: Mapping[Status, int]) -> str:
    return ", ".join(f"{count:,} {status.value}" for status, count in sorted(counts.items())) or "none"
