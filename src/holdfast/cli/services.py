"""``holdfast services``: which runner has its turn, why others wait, and the last executions."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from holdfast.app import App
from holdfast.cli.command import command
from holdfast.cli.output import Output
from holdfast.fleet import slots
from holdfast.model.names import counted
from holdfast.showing import length, moment
from holdfast.web.reading.model import ReadModel
from holdfast.web.reading.services import ServiceView


@command()
def services(
    out: Output, app: App, limit: Annotated[int, Option(min=1, help="Show at most this many executions.")] = 10
) -> None:
    """Show which runner performs the services.

    It says why the others do not, and lists the last executions. The slots follow from the
    roster, the store's time and the settings that this command sees.
    """
    view = app.runtime.run(ReadModel(app.runtime).runners.services(limit))
    out.document(view.document())
    _print(out, view)


def _print(out: Output, view: ServiceView) -> None:
    if not view.roster:
        out.line("no runners; start one with: holdfast run")
    else:
        start, end = view.cycle
        turns = f"{len(view.windows)} of {counted(len(view.roster), 'runner')} in turn"
        cycle = f"{moment(start)} to {moment(end)}"
        out.facts([("time", moment(view.now)), ("cycle", cycle), ("slots", turns)])
        out.line()
        rows = [
            (window.slot, member.runner_id, _span(window), _when(window, view.now)) for member, window in view.windows
        ]
        out.table(("slot", "runner", "from", "when"), rows, empty="no runner has a slot")
        out.line()
        decisions = [(id, view.decision(id), view.why(id)) for id in view.claims]
        out.table(("runner", "decision", "why"), decisions)
    out.line()
    titles = ("started", "runner", "status", "for", "reason")
    lines = [
        (moment(one.started_at), one.runner_id, one.status.value, length(view.seconds(one)), one.reason)
        for one in view.trail
    ]
    out.table(titles, lines, empty="the services have not been performed yet")


def _when(window: slots.Window, now: float) -> str:
    if now < window.starts_at:
        return f"in {length(window.starts_at - now)}"
    return "over" if now >= window.ends_at else "now"


def _span(window: slots.Window) -> str:
    """Return the times of a window without their date, so that a line fits a terminal."""
    return f"{moment(window.starts_at)[11:23]} to {moment(window.ends_at)[11:]}"
