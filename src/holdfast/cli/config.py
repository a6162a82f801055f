"""``holdfast config``: every setting, and where its value comes from."""

from __future__ import annotations

from holdfast.app import App
from holdfast.cli.command import Needs, command
from holdfast.cli.output import Output
from holdfast.web.reading.apps import AppReading


@command(Needs.APP)
def config(out: Output, app: App) -> None:
    """Show every setting, and where its value comes from.

    It knows the app's own settings too, unless a URL is given in its place.
    """
    found = AppReading(app.runtime).settings()
    out.document(found.document())
    rows = [(row.name, row.shown, row.source, row.doc) for row in found.settings]
    out.table(("name", "value", "source", "meaning"), rows)
    out.line(f"so the app '{found.name}' is on {found.url}")
