"""Files of counters as workers of earlier times have left them, and what is there of each level."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from holdfast import App
from holdfast.model.records import Entry
from holdfast.runtime.engine import Engine
from holdfast.stats import Stats
from holdfast.stats.records import StatsFile, file_entry
from holdfast.stats.rules import LEVELS, WORKERS, Cell, key_of, name_of, start_of
from holdfast.stats.service import StatsUpkeep

T = TypeVar("T")
KEPT_SECONDS = 30 * 86_400.0
TASK = "shop:mail"


class Files:
    """What a test stores and folds. Each file has as many ended calls as it is told."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.now = self.run(self._time)

    async def _time(self, engine: Engine) -> float:
        return engine.store.now()

    def run(self, work: Callable[[Engine], Awaitable[T]]) -> T:
        async def job() -> T:
            return await work(await self.app.runtime.engine())

        return self.app.runtime.run(job())

    def entry(self, ago: float, worker: str, ended: int, seconds: float = 0.5) -> Entry:
        """The file of a worker, of a minute that many seconds ago."""
        cell = Cell(succeeded=ended)
        for _ in range(ended):
            cell.run.add(seconds)
            cell.wait.add(seconds / 10)
        name = name_of(start_of(self.now - ago, WORKERS.seconds), worker)
        file = StatsFile(cells={key_of("default", TASK): cell})
        return file_entry(self.app.name, WORKERS, name, file, kept_seconds=KEPT_SECONDS)

    def put(self, ago: float, worker: str = "w", ended: int = 1, seconds: float = 0.5) -> None:
        entry = self.entry(ago, worker, ended, seconds)

        async def put(engine: Engine) -> bool:
            return await engine.store.put_entry(entry)

        assert self.run(put)

    def fold(self) -> None:
        """Fold what is due, and what follows from that, as several looks would."""

        async def fold(engine: Engine) -> None:
            upkeep = StatsUpkeep(engine)
            upkeep.rests_seconds = 0.0
            while await upkeep.fold():
                pass

        self.run(fold)

    def entries(self) -> list[Sequence[Entry]]:
        """The files of each level, finest first."""

        async def read(engine: Engine) -> list[Sequence[Entry]]:
            return [await engine.store.entries(engine.app, level.kind) for level in LEVELS]

        return self.run(read)

    def counts(self) -> list[int]:
        """How many files there are of each level."""
        return [len(each) for each in self.entries()]

    def stats(self, hours: float = 24 * 20) -> Stats:
        return self.app.stats(hours * 3600)
