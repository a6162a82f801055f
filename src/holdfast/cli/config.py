"""``holdfast config``: every setting, and where its value comes from."""

from __future__ import annotations

from holdfast.app import App
from holdfast.cli.command import Needs, command
from holdfast.cli.output import Output
from holdfast.masking import mask_url


@command(Needs.APP)
def config(out: Output, app: App) -> None:
    """Show every setting, and where its value comes from.

    It knows the app's own settings too, unless a URL is given in its place.
    """
    rows = app.settings.explain()
    where = {"name": app.name, "url": mask_url(app.url)}
    out.document({"app": where, "settings": [row._asdict() for row in rows]})
    out.table(("name", "value", "source", "meaning"), [(r.name, r.shown, r.source, r.doc) for r in rows])
    out.line(f"so the app '{where['name']}' is on {where['url']}")
