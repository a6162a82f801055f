"""Statistics for readers: ``app.stats()``, ``holdfast stats``, the HTTP API and pages.

Files are read from the finest level to the coarsest: a file that is folded meanwhile is met again, and named there.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from holdfast.clock import Duration, length_of, parse_duration
from holdfast.errors import CorruptRecord, UsageError
from holdfast.model.records import Entry
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.engine import Engine
from holdfast.runtime.listing import several
from holdfast.runtime.naming import Wanted, wanted_names
from holdfast.stats.counters import Counters
from holdfast.stats.records import DEPLOYS, read_deploys, read_file
from holdfast.stats.rules import (
    COUNTS,
    LEVELS,
    MINUTE,
    MOST_POINTS,
    NOTABLE,
    Cell,
    Cells,
    Distribution,
    Failure,
    Level,
    distribution,
    merge_cells,
    name_of,
    parts_of,
    start_in,
    start_of,
    step_at_least,
    usual_step,
)
from holdfast.store.contract import EntryOrder

_PAGE = 200
_MOST_NOTABLE = 10
_MOST_GROUPS = 200  # of errors
_FILES_AT_ONCE = 20


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What ended over some time: calls that `succeeded`, `failed` or were `cancelled`; attempts that were `retried`
    after an error, or were `lost` with their worker or runner. `wait` is from when an attempt was due until it began,
    `run` from there to its end.
    """

    seconds: float
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    lost: int = 0
    wait: Distribution = Distribution()
    run: Distribution = Distribution()

    @property
    def ended(self) -> int:
        """Return how many calls have ended."""
        return self.succeeded + self.failed + self.cancelled

    @property
    def per_second(self) -> float:
        return self.ended / self.seconds if self.seconds else 0.0


class Point(Figures, frozen=True, kw_only=True):
    """The figures of one step in time, which begins `at`."""

    at: float


class FailureGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of one kind in one task: `count` calls ended by it, `retried` attempts were followed by another. `error`
    is without what differs from call to call; `message`, `where` and `ids` are of the latest. `series` has both numbers
    together, for each point of the statistics.
    """

    task: str
    error: str
    count: int
    retried: int
    first_at: float
    last_at: float
    message: str
    where: str
    ids: Sequence[str]
    series: Sequence[int] = ()


class Notable(msgspec.Struct, frozen=True, kw_only=True):
    """A call that stands out: its `value` is seconds, or attempts, at that time."""

    id: str
    task: str
    queue: str
    value: float
    at: float


class Deploy(msgspec.Struct, frozen=True, kw_only=True):
    """Since `at`, a release ran that did not run before."""

    at: float
    release: str
    host: str


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of an app from `since` to `until`, in seconds since the epoch.

    `total` and `tasks`, by name, are over the whole time; `points` are a series in steps of `step` seconds.
    `failures` have the most frequent first; `slow`, `delayed` and `retried` are calls that ran or waited longest, or
    had most attempts.
    """

    since: float
    until: float
    step: int
    total: Figures
    tasks: Mapping[str, Figures]
    queues: Mapping[str, Figures]
    points: Sequence[Point]
    failures: Sequence[FailureGroup]
    slow: Sequence[Notable]
    delayed: Sequence[Notable]
    retried: Sequence[Notable]
    deploys: Sequence[Deploy]


Since = Duration | dt.datetime
"""A moment: a datetime with a time zone, a text such as ``2026-11-15T08:00:00Z``, or how long ago it was (``2h``)."""


class StatsQuery(NamedTuple):
    """Which statistics are wanted. Without `step`, in the one that shows the time best; without names, all."""

    since: float
    until: float
    step: int | None = None
    tasks: frozenset[str] = frozenset()
    queues: frozenset[str] = frozenset()


def question(
    now: float,
    since: Since,
    until: Since | None = None,
    *,
    step: Duration | None = None,
    task: Iterable[str] = (),
    queue: str | Iterable[str] | None = (),
) -> StatsQuery:
    """Return the question. Raises `UsageError`."""
    end = now if until is None else min(now, moment_of("until", until, now))
    start = moment_of("since", since, now)
    if not 0 <= start < end:
        raise UsageError("since= has to be before until=, and neither in the future nor before 1970")
    seconds = None if step is None else length_of("step", step)
    if seconds is not None and (seconds < MINUTE or seconds % MINUTE):
        raise UsageError(f"step={step!r:.80}: expected whole minutes, such as '1m' or '10m'")
    if seconds is not None and (end - start) / seconds > MOST_POINTS:
        raise UsageError(f"step={step!r:.80} makes over {MOST_POINTS:,} points: give a longer step")
    queues = several("queue", queue)
    return StatsQuery(start, end, None if seconds is None else int(seconds), frozenset(task), frozenset(queues))


def moment_of(name: str, given: Since, now: float) -> float:
    """Return a moment in seconds since the epoch. Raises `UsageError`."""
    try:
        if isinstance(given, str):
            try:
                return now - parse_duration(given.strip().removesuffix("ago"))
            except UsageError:
                given = dt.datetime.fromisoformat(given.strip())
        if isinstance(given, dt.datetime):
            if given.tzinfo is None:
                raise UsageError(f"{name}={given.isoformat()!r} has no time zone; write it like 2026-11-15T08:00:00Z")
            return given.timestamp()
        return now - length_of(name, given)
    except (ValueError, OverflowError):
        raise UsageError(
            f"{name}={given!r:.80} is no time: write 2026-11-15T08:00:00Z, or 2h for two hours ago"
        ) from None


# --- reading


class _Read(NamedTuple):
    """The counts of one span."""

    start: int
    seconds: int
    cells: Cells


async def stats_of(
    runtime: AppRuntime,
    engine: Engine,
    since: Since = "1h",
    until: Since | None = None,
    *,
    step: Duration | None = None,
    task: Wanted = (),
    queue: str | Iterable[str] | None = (),
) -> Stats:
    """Answer what `App.stats` asks. Raises `UsageError`; `UnknownTask` for a name that nothing was counted under, nor
    is declared or stored.
    """
    now = engine.store.now()

    def asked(names: Iterable[str]) -> StatsQuery:
        return question(now, since, until, step=step, task=names, queue=queue)

    async def is_counted(name: str) -> bool:
        return name in (await read_stats(engine, asked([name]))).tasks

    asked(())  # what is wrong with the rest of the question is said first
    return await read_stats(engine, asked(await wanted_names(runtime, engine, task, is_counted)))


async def read_stats(engine: Engine, wanted: StatsQuery) -> Stats:
    """Answer a question. What this process has counted is stored first; other processes store every 10 s."""
    await engine.part(Counters).flush()
    step = wanted.step or usual_step(wanted.until - wanted.since)
    files = await _files(engine, wanted._replace(since=float(start_of(wanted.since, step))))
    if (longer := step_at_least(step, [file.seconds for file in files])) != step:
        step = longer  # the first step begins earlier, then
        files = await _files(engine, wanted._replace(since=float(start_of(wanted.since, step))))
    since = start_of(wanted.since, step)
    spans: dict[int, Cells] = {at: {} for at in range(since, _ceil(wanted.until), step)}
    for number, file in enumerate(files):
        if number % _FILES_AT_ONCE == 0:
            await asyncio.sleep(0)  # others use this loop, too: a month takes half a second
        at = start_of(max(file.start, since), step)
        if at in spans:
            merge_cells(spans[at], _chosen(file.cells, wanted))
    whole: Cells = {}
    for cells in spans.values():
        merge_cells(whole, cells)
    kept = engine.settings.stats_retention_seconds
    deploys = [each for each in await _deploys(engine) if since <= each.at <= wanted.until] if kept else []
    seconds = wanted.until - since
    return Stats(
        since=float(since),
        until=wanted.until,
        step=step,
        total=_figures(whole.values(), seconds),
        tasks=_by(whole, 1, seconds),
        queues=_by(whole, 0, seconds),
        points=[_point(at, cells, min(float(step), wanted.until - at)) for at, cells in spans.items()],
        failures=_failures(list(spans.values())),
        **{_NAMES[name]: _notable(whole, name) for name in NOTABLE},
        deploys=deploys,
    )


_NAMES = {"slow": "slow", "delayed": "delayed", "tried": "retried"}


def _ceil(at: float) -> int:
    return int(-(-at // 1))


async def _files(engine: Engine, wanted: StatsQuery) -> list[_Read]:
    """Return the files of that time, without files that a coarser file replaces."""
    found: list[_Read] = []
    finer: dict[str, _Read] = {}
    for level in LEVELS:
        here, folded = {}, set[str]()
        for number, entry in enumerate(await _entries(engine, level, wanted)):
            if number % _FILES_AT_ONCE == 0:
                await asyncio.sleep(0)
            start = start_in(entry.name)
            try:
                file = read_file(entry)
            except CorruptRecord:
                continue  # the next fold quarantines it
            if start is not None:
                here[entry.name] = _Read(start, level.seconds, file.cells)
                folded.update(file.sources)
        found += [read for name, read in finer.items() if name not in folded]
        finer = here
    return [*found, *finer.values()]


async def _entries(engine: Engine, level: Level, wanted: StatsQuery) -> list[Entry]:
    """Return the entries of a level that are, or may be, of that time: by pages, latest first."""
    first = name_of(max(0, start_of(wanted.since, level.seconds)))
    before = name_of(_ceil(wanted.until))
    found: list[Entry] = []
    while True:
        page = await engine.store.entries(engine.app, level.kind, order=EntryOrder.LATEST, limit=_PAGE, before=before)
        found += [entry for entry in page if entry.name >= first]
        if len(page) < _PAGE or page[-1].name < first:
            return found
        before = page[-1].name


async def _deploys(engine: Engine) -> list[Deploy]:
    for entry in await engine.store.entries(engine.app, DEPLOYS):
        try:
            return [Deploy(at=mark.at, release=mark.release, host=mark.host) for mark in read_deploys(entry).marks]
        except CorruptRecord:
            pass  # the next runner that starts quarantines it
    return []


# --- making answers


def _chosen(cells: Cells, wanted: StatsQuery) -> Cells:
    if not wanted.tasks and not wanted.queues:
        return cells
    return {key: cell for key, cell in cells.items() if _is_wanted(*parts_of(key), wanted)}


def _is_wanted(queue: str, task: str, wanted: StatsQuery) -> bool:
    return (not wanted.tasks or task in wanted.tasks) and (not wanted.queues or queue in wanted.queues)


def _merged(cells: Sequence[Cell]) -> Cell:
    merged = Cell()
    for cell in cells:
        merged.merge(cell)
    return merged


def _figures(cells: object, seconds: float) -> Figures:
    merged = _merged(list(cells))  # type: ignore[call-overload]
    counts = {name: getattr(merged, name) for name in COUNTS}
    return Figures(seconds=seconds, **counts, wait=distribution(merged.wait), run=distribution(merged.run))


def _point(at: int, cells: Cells, seconds: float) -> Point:
    figures = _figures(cells.values(), seconds)
    return Point(at=float(at), **{name: getattr(figures, name) for name in figures.__struct_fields__})


def _by(cells: Cells, part: int, seconds: float) -> dict[str, Figures]:
    groups: dict[str, list[Cell]] = {}
    for key, cell in cells.items():
        groups.setdefault(parts_of(key)[part], []).append(cell)
    return {name: _figures(groups[name], seconds) for name in sorted(groups)}


def _failures(spans: Sequence[Cells]) -> list[FailureGroup]:
    groups: dict[tuple[str, str], Failure] = {}
    series: dict[tuple[str, str], list[int]] = {}
    for number, cells in enumerate(spans):
        for key, cell in cells.items():
            for kind, failure in cell.errors.items():
                name = parts_of(key)[1], kind
                groups.setdefault(name, Failure()).merge(failure)
                series.setdefault(name, [0] * len(spans))[number] += failure.count + failure.retried
    order = sorted(groups, key=lambda each: (-groups[each].count, -groups[each].retried, each))[:_MOST_GROUPS]
    return [
        FailureGroup(
            task=name[0],
            error=name[1],
            **{field: getattr(groups[name], field) for field in Failure.__struct_fields__},
            series=series[name],
        )
        for name in order
    ]


def _notable(cells: Cells, name: str) -> list[Notable]:
    found = [
        Notable(id=id, task=parts_of(key)[1], queue=parts_of(key)[0], value=value, at=at)
        for key, cell in cells.items()
        for id, (value, at) in getattr(cell, name).items()
    ]
    best: dict[str, Notable] = {}
    for each in found:
        if each.id not in best or each.value > best[each.id].value:
            best[each.id] = each
    return sorted(best.values(), key=lambda each: (-each.value, each.id))[:_MOST_NOTABLE]
