"""The duty `stats`: files of counters are folded into coarser ones; and the mark of a deploy, when a runner starts.

A file names the files that were folded into it last. It is written before they are removed, and they are removed before
it names others. So whatever crashes in between, each count is there once: a reader leaves out what is named, and the
next fold removes it. Two folds at once are decided by the version of the file. Retention needs no duty: every file has
a time to be kept.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence

from msgspec.structs import replace

from holdfast.crashpoints import crashpoint
from holdfast.errors import CorruptRecord
from holdfast.fleet.services import Duty
from holdfast.model.records import Entry
from holdfast.runtime.engine import Engine
from holdfast.stats.records import DEPLOYS, StatsFile, deploys_entry, file_entry, read_deploys, read_file
from holdfast.stats.rules import (
    LATE_SECONDS,
    LEVELS,
    DeployMark,
    Level,
    marked,
    merge_cells,
    name_of,
    start_in,
    start_of,
)
from holdfast.store.contract import EntryOrder

EVERY_SECONDS = 60.0
_AT_ONCE = 200
_TRIES = 5


class StatsUpkeep:
    """A feature of a runner: see `holdfast.fleet.services.Feature`. `release` names the code that the runner runs."""

    declares = ()
    rests_seconds = (
        60.0  # between two folds of the same counts: a reader that began before the first must not be fooled
    )

    def __init__(self, engine: Engine, release: str = "") -> None:
        self._engine = engine
        self._store = engine.store
        self._app = engine.app
        self._kept_seconds = engine.settings.stats_retention_seconds
        self._release = release
        self._next_look = dict.fromkeys(LEVELS, 0.0)

    async def register(self) -> None:
        """Mark a deploy, if this release was not there before."""
        if not (self._release and self._kept_seconds):
            return
        mark = DeployMark(at=self._store.now(), release=self._release, host=socket.gethostname())
        for _ in range(_TRIES):
            before = await self._deploys()
            marks = () if before is None else read_deploys(before).marks
            after = marked(marks, mark, self._kept_seconds)
            if after is None or await self._store.put_entry(deploys_entry(self._app, after, before), before):
                return

    async def _deploys(self) -> Entry | None:
        """Return the entry of marks, if it can be read. A corrupt one is quarantined."""
        for entry in await self._store.entries(self._app, DEPLOYS):
            try:
                read_deploys(entry)
                return entry
            except CorruptRecord as error:
                await self._store.quarantine_entry(entry, error)
        return None

    def duties(self) -> Sequence[Duty]:
        return (Duty(name="stats", every_seconds=EVERY_SECONDS, perform=self.fold),)

    async def fold(self) -> bool:
        """Fold the files that are due. Return True if there may be more."""
        more = False
        for level, target in itertools.pairwise(LEVELS):
            if self._store.now() >= self._next_look[level]:
                more = await self._fold_level(level, target) or more
        return more

    async def _fold_level(self, level: Level, target: Level) -> bool:
        now = self._store.now()
        found = await self._store.entries(self._app, level.kind, order=EntryOrder.DUE, limit=_AT_ONCE)
        due = [entry for entry in found if entry.due_at is not None and entry.due_at <= now]
        groups: dict[str, list[str]] = {}
        for entry in due:
            if (start := start_in(entry.name)) is None:
                error = ValueError(f"{entry.name!r:.80} is no name of a file of statistics")
                await self._store.quarantine_entry(entry, CorruptRecord(str(error), kind=entry.kind, id=entry.name))
            else:
                groups.setdefault(name_of(start_of(start, target.seconds)), []).append(entry.name)
        for name, sources in groups.items():
            await self._fold(level, target, name, sources)
        if len(due) == _AT_ONCE:
            return True
        # What is stored from now on is not due before that.
        later = [entry.due_at for entry in found if entry.due_at is not None and entry.due_at > now]
        self._next_look[level] = min([*later, now + LATE_SECONDS])
        return False

    async def _fold(self, level: Level, target: Level, name: str, names: Sequence[str]) -> None:
        """Fold these files into one of the next level.

        The target is read before the files: a file that is there after that was not folded into an earlier version of
        the target, else it would have been removed before this version was written.
        """
        before, there = await self._target(target, name)
        sources = await self._files(level, sorted({*names, *there.sources}))
        fresh = {entry.name: (entry, file) for entry, file in sources if entry.name not in there.sources}
        for entry, _ in sources:
            if entry.name in there.sources:
                await self._store.remove_entry(entry)
        if not fresh:
            return
        cells = there.cells
        for _, file in fresh.values():
            merge_cells(cells, file.cells)
        wanted = file_entry(
            self._app,
            target,
            name,
            StatsFile(cells=cells, sources=tuple(fresh)),
            kept_seconds=self._kept_seconds,
            before=before,
            rests_until=self._store.now() + self.rests_seconds,
        )
        if not await self._store.put_entry(wanted, before):
            return  # another runner folds, too
        crashpoint("stats.folded")
        for entry, _ in fresh.values():
            await self._store.remove_entry(entry)

    async def _target(self, target: Level, name: str) -> tuple[Entry | None, StatsFile]:
        for entry, file in await self._files(target, [name]):
            return entry, replace(file)
        return None, StatsFile()

    async def _files(self, level: Level, names: Sequence[str]) -> list[tuple[Entry, StatsFile]]:
        """Return these files. Corrupt ones are quarantined."""
        found = []
        for entry in await self._store.entries(self._app, level.kind, names):
            try:
                found.append((entry, read_file(entry)))
            except CorruptRecord as error:
                await self._store.quarantine_entry(entry, error)
        return found
