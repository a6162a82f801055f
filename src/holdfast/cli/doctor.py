"""``holdfast doctor``: what is wrong, and what to do."""

from __future__ import annotations

from pathlib import Path

import typer

from holdfast.app import App
from holdfast.cli import reach
from holdfast.cli.command import Needs, command
from holdfast.cli.discovery import shared
from holdfast.cli.output import FAILED, Output
from holdfast.masking import mask_url
from holdfast.web.reading.diagnosis import HINT, OK, WRONG, DiagnosisReading


@command(Needs.APP)
def doctor(out: Output, app: App) -> None:
    """Say what is wrong with an app, and what to do.

    It looks at the store, clocks, versions, settings, runners and stuck work. It changes nothing, except that it
    quarantines damaged records that it reads, as every reader does. It exits with 0 if nothing is wrong, hints aside,
    with 1 if something is, and with 2 if it was called in a wrong way.
    """
    with reach.brief_retries(shared(app)):
        found = DiagnosisReading(app.runtime, _file_of(app)).diagnose()
    out.document({"url": mask_url(app.url), **found.document()})
    rows = [
        (each.state.upper() if each.state == WRONG else each.state, each.subject, each.detail + _arrow(each.advice))
        for each in found.symptoms
    ]
    out.table(("state", "subject", "finding"), rows)
    wrong, hints = (sum(each.state == state for each in found.symptoms) for state in (WRONG, HINT))
    well = sum(each.state == OK for each in found.symptoms)
    out.line()
    out.line(f"{wrong} wrong, {hints} to think about, {well} well")
    if not found.is_well:
        raise typer.Exit(FAILED)


def _file_of(app: App) -> Path | None:
    if not app.url.startswith("sqlite"):
        return None
    from holdfast.store.sqlite import path_of  # here, because it loads sqlite3, and --help does not need that

    return path_of(app.url)


def _arrow(advice: str) -> str:
    return f" → {advice}" if advice else ""
