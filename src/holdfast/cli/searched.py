"""Commands that act on all that a search means: ``cancel``, ``rerun`` and ``purge`` with ``--search``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer import Option

from holdfast.app import App
from holdfast.cli.output import FAILED, Output
from holdfast.errors import UsageError
from holdfast.invocation import asking
from holdfast.model.names import counted
from holdfast.model.records import InvocationRecord
from holdfast.web.bulk import DEEDS, BulkActions, BulkWanted
from holdfast.web.reading.search import parse

_SHOWN = 10

Search = Annotated[
    str | None, Option(metavar="SEARCH", help="All that this search means, as in ps; they are listed first.")
]


def wanted_by(app: App, search: str, **how: bool | str) -> BulkWanted:
    """Return what a search means at this moment."""
    query, engine = parse(search), app.runtime.ready()
    if not query:
        raise UsageError("--search '' means everything; say which ones: --search 'status:failed since:1h'")
    by = str(how.pop("by", "") or asking())
    return BulkWanted(query, engine.store.now(), str(how.pop("request", "") or engine.ids.new()), by=by)._replace(**how)  # type: ignore[arg-type]


def act_on_all(out: Output, app: App, name: str, wanted: BulkWanted, *, yes: bool) -> None:
    """Show what a search means, and act on it if the user confirms."""
    actions, deed = BulkActions(app.runtime), DEEDS[name]
    number, first = app.runtime.run(actions.preview(name, wanted, _SHOWN))
    many = "1 invocation" if number.text == "1" else f"{number.text} invocations"
    if not out.json:
        _list(out, first)
        if number.number > len(first):
            out.line("and more")
    if number.number and not yes:
        if out.json or not sys.stdin.isatty():
            out.note(f"{many} {deed.would}; nothing was done. To do it, add --yes")
        else:
            yes = bool(typer.confirm(f"{many} {deed.would}. Go on?"))
    if not yes or not number.number:
        return out.document({"dry_run": True, "matched": number.number, "more": number.more})
    out.agreed()
    done, left = app.runtime.run(_all(actions, name, wanted))
    out.document({"dry_run": False, "matched": number.number, "done": done, "left": left, "request": wanted.request})
    for id, why in list(left.items())[:_SHOWN]:
        out.line(f"{id} is left as it is: {why}")
    out.line(f"{counted(done, 'invocation')} {deed.done}")
    if left:
        raise typer.Exit(FAILED)


async def _all(actions: BulkActions, name: str, wanted: BulkWanted) -> tuple[int, dict[str, str]]:
    done, left = 0, dict[str, str]()
    async for batch in actions.batches(name, wanted):
        done += len(batch.done)
        left |= batch.left
    return done, left


def _list(out: Output, records: Sequence[InvocationRecord]) -> None:
    rows = [(record.id, record.task, record.status.value) for record in records]
    out.table(("id", "task", "status"), rows, empty="no invocation matches")
