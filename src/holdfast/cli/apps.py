"""``holdfast apps``: the apps of a store."""

from __future__ import annotations

from holdfast.app import App
from holdfast.cli import reach
from holdfast.cli.command import Needs, command
from holdfast.cli.output import Output
from holdfast.model.explain import living
from holdfast.model.status import FINAL
from holdfast.store.contract import Store

_TITLES = ("app", "invocations", "open", "runners")


@command(Needs.ANY_APP)
def apps(out: Output, app: App) -> None:
    """List the apps that share a store, and how much each has there."""
    found = reach.with_store(app, lambda store: _counted(store, app.settings.dead_after_seconds))
    out.document({"apps": [dict(zip(("name", "invocations", "open", "runners"), row, strict=True)) for row in found]})
    out.table(_TITLES, found, empty="no app has anything in this store yet")


async def _counted(store: Store, dead_after_seconds: float) -> list[tuple[str, int, int, int]]:
    rows = []
    for name in await reach.names_in(store):
        counts = await store.counts(name)
        alive = living(await store.roster(name), store.now(), dead_after_seconds)
        still_open = sum(number for status, number in counts.items() if status not in FINAL)
        rows.append((name, sum(counts.values()), still_open, len(alive)))
    return rows
