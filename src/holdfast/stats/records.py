"""What is stored of statistics: files of counters, as entries, and the marks of deploys."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.model.decoding import ahead
from holdfast.model.records import FOREVER, Entry, entry_reader
from holdfast.stats.rules import LEVELS, Cells, DeployMark, Level, start_in

DEPLOYS = "stats.deploys"
_MARKS = "marks"


class StatsFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counters of one span of time. `sources` are the files of the level below that were folded into it last: until
    they are removed, a reader leaves them out.
    """

    cells: Cells = {}
    sources: tuple[str, ...] = ()


_readers = {level.kind: entry_reader(StatsFile, level.kind) for level in LEVELS}


def read_file(entry: Entry) -> StatsFile:
    """Return what a file says. Raises `CorruptRecord`."""
    return _readers[entry.kind](entry)


class Deploys(msgspec.Struct, frozen=True, kw_only=True):
    """The body of the entry with all marks of deploys, oldest first."""

    marks: tuple[DeployMark, ...] = ()


read_deploys = entry_reader(Deploys, DEPLOYS)


def file_entry(
    app: str,
    level: Level,
    name: str,
    file: StatsFile,
    *,
    kept_seconds: float,
    before: Entry | None = None,
    rests_until: float = 0.0,
) -> Entry:
    """Return the entry of a file, due when it is to be folded, and not before `rests_until`. Raises `ValueError` for a
    name that is not ours.
    """
    start = start_in(name)
    if start is None:
        raise ValueError(f"{name!r:.80} is no name of a file of statistics")
    end = start + level.seconds
    return Entry(
        app=app,
        kind=level.kind,
        name=name,
        body=msgspec.json.encode(file),
        version=1 if before is None else before.version + 1,
        due_at=None if level.folds_after is None else max(ahead(end, level.folds_after), rests_until),
        keep_until=min(ahead(end, kept_seconds), FOREVER),
    )


def deploys_entry(app: str, marks: Sequence[DeployMark], before: Entry | None) -> Entry:
    version = 1 if before is None else before.version + 1
    return Entry(
        app=app, kind=DEPLOYS, name=_MARKS, body=msgspec.json.encode(Deploys(marks=tuple(marks))), version=version
    )
