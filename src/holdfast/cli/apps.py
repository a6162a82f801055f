"""``holdfast apps``: the apps of a store."""

from __future__ import annotations

from holdfast.app import App
from holdfast.cli.command import Needs, command
from holdfast.cli.output import Output
from holdfast.web.reading.apps import AppReading

_TITLES = ("app", "invocations", "open", "runners")


@command(Needs.ANY_APP)
def apps(out: Output, app: App) -> None:
    """List the apps that share a store, and how much each has there."""
    found = app.runtime.run(AppReading(app.runtime).all())
    out.document(found.document())
    out.table(_TITLES, found.apps, empty="no app has anything in this store yet")
