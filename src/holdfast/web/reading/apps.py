"""Questions about the apps of a store, the settings of this one, and the statuses of invocations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.masking import mask_url
from holdfast.model.diagram import Format, render
from holdfast.model.explain import living
from holdfast.model.names import is_core
from holdfast.model.status import FINAL, TABLE
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.runs import WORLD_APP
from holdfast.settings import SettingRow
from holdfast.store.contract import Store
from holdfast.web.documents import Document

MOST_COUNTED = 10_000  # calls of an app


class AppFigures(NamedTuple):
    """How much an app has in a store."""

    name: str
    invocations: int
    open: int
    runners: int


class AppList(NamedTuple):
    """The apps that share a store, by name."""

    apps: Sequence[AppFigures]

    def document(self) -> Document:
        return {"apps": [each._asdict() for each in self.apps]}


class SettingList(NamedTuple):
    """Every setting without secrets, and where its value comes from."""

    name: str
    url: str
    settings: Sequence[SettingRow]

    def document(self) -> Document:
        return {"app": {"name": self.name, "url": self.url}, "settings": [row._asdict() for row in self.settings]}


class AppReading:
    """Ask for apps. Each method runs on the engine's loop."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime

    async def all(self, most: int | None = None) -> AppList:
        """Return the apps of the store, with what each has there. With `most`, a number from there on is a lower bound,
        and the cost does not grow with what is stored.
        """
        store = (await self._runtime.engine()).store
        return AppList([await self._figures(store, name, most) for name in await names_in(store)])

    async def some(self) -> AppList:
        """Return the same. A number over `MOST_COUNTED` is a lower bound."""
        return await self.all(MOST_COUNTED + 1)

    async def _figures(self, store: Store, name: str, most: int | None) -> AppFigures:
        counts = await store.counts(name, most)
        alive = living(await store.roster(name), store.now(), self._runtime.settings.dead_after_seconds)
        still_open = sum(number for status, number in counts.items() if status not in FINAL)
        return AppFigures(name, sum(counts.values()), still_open, len(alive))

    def settings(self) -> SettingList:
        runtime = self._runtime
        return SettingList(runtime.name, mask_url(runtime.url), runtime.settings.explain())


async def names_in(store: Store) -> Sequence[str]:
    """Return the apps of a store, without those of Holdfast's own tasks and of messages of a World."""
    return [name for name in await store.apps() if not is_hidden(name)]


def is_hidden(name: str) -> bool:
    """Return whether an app is one of Holdfast's own tasks, or of the messages of a World."""
    return is_core(name) or name.endswith(WORLD_APP)


def statuses_document(format: Format = "mermaid") -> Document:
    """Return the state machine: each status with what may follow it, and the drawing."""
    found = [
        {
            "name": status.value,
            "meaning": rule.meaning,
            "is_final": rule.is_final,
            "next": sorted(each.value for each in rule.next),
            "rescued_by": None if rule.rescued_by is None else rule.rescued_by.value,
        }
        for status, rule in TABLE.items()
    ]
    return {"statuses": found, "format": format, "text": render(format)}
