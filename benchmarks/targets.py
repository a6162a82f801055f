"""The stores that are measured. To measure another one, add it to `TARGETS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.clock import SystemClock
from holdfast.store import open_store
from holdfast.store.contract import Ability


@dataclass(frozen=True)
class Target:
    """A store: what to call it, and the URL of an empty one, given an empty folder that is removed afterwards."""

    name: str
    url: Callable[[Path], str]

    def abilities(self, folder: Path) -> Ability:
        """What the store says of itself. Nothing is connected for it."""
        return open_store(self.url(folder), clock=SystemClock()).abilities


TARGETS = {
    target.name: target
    for target in [
        Target("memory", lambda folder: "memory://"),
        Target("sqlite", lambda folder: f"sqlite:///{folder / 'benchmark.db'}"),
    ]
}
