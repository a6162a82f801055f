"""``holdfast audit``: who did what, when, from where and why."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from holdfast.app import App
from holdfast.cli.command import Before, command, page_given
from holdfast.cli.output import Output
from holdfast.showing import moment
from holdfast.web.reading.model import ReadModel


@command()
def audit(
    out: Output,
    app: App,
    who: Annotated[str | None, Option(help="Only by this user or token.")] = None,
    action: Annotated[str | None, Option(help="Only this one: queue.pause; or all of queue.")] = None,
    target: Annotated[str | None, Option(help="Only what changed this: an id or a name, whole.")] = None,
    since: Annotated[str | None, Option(metavar="TIME", help="From then: 2026-11-15T08:00:00Z, or 2h ago.")] = None,
    limit: Annotated[int, Option(min=1, max=10_000, help="Show at most this many records.")] = 50,
    before: Before = None,
) -> None:
    """List who did what and why, newest first.

    It has the actions of commands, pages and the HTTP API.
    "begun" is an action without an outcome: its process ended in between, and it may have been done.
    """
    reading = ReadModel(app.runtime)
    page = app.runtime.run(
        reading.audit(who=who, action=action, target=target, since=since, limit=limit, before=page_given(before))
    )
    out.document(page.document())
    rows = [
        (
            moment(each.at),
            each.who,
            each.action,
            each.target,
            each.outcome,
            "; ".join(filter(None, [each.reason, each.detail, f"{each.via} from {each.source}"])),
        )
        for each in page.records
    ]
    out.table(("at", "who", "action", "target", "outcome", "why and how"), rows, empty="nothing was done that is kept")
    if page.before is not None:
        out.aside(f"note: there may be more: --before {page.before}")
