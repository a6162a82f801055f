"""Low-water marks: where a look into the queue begins.

MongoDB keeps removed index entries for minutes, and a cursor steps over each of them. A look from the head of a lane
would step over all entries that were claimed there. So a process remembers, by lane and rank, the due time before which
it found nothing, and begins there.

A mark never hides work for long. A write of this process lowers the marks at once, and so does a hint, which names the
oldest due time of its invocations. Work may arrive behind a mark without either: a submitter died before its hint, an
insert took long, a clock was wrong. A look at the whole lane finds it: every `FRESH_SECONDS` while claims go on, and
once after the last of them.

Marks stay `SLACK_SECONDS` behind the time of a claim, so that the usual differences between submitters do not matter. A
look that is under way during a write keeps the mark below it: see `Look`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from holdfast.model.records import READY, Hint, InvocationRecord

SLACK_SECONDS = 0.5
FRESH_SECONDS = 1.5  # how long a look at the whole lane serves
_MAX_RANKS = 4  # of one lane; with more of them the whole lane is looked at
_FIRST = float("-inf")
_PLAIN_RANK = 0.0  # that of the default priority


class Range(NamedTuple):
    """The part of a lane to look at: one rank from a due time on, or all of it."""

    lane: str
    rank: float | None
    since: float


class Seen(NamedTuple):
    """The place of a document in the queue."""

    lane: str
    rank: float
    due_at: float


class Look:
    """A look under way, and concurrent writes that it may have missed."""

    def __init__(self, app: str, ranges: Sequence[Range], began: float) -> None:
        self.app = app
        self.ranges = ranges
        self.began = began
        self.lowered: dict[tuple[str, float], float] = {}
        self.forgotten: set[str] = set()
        self.is_void = False

    def lower(self, lane: str, rank: float, due_at: float) -> None:
        key = (lane, rank)
        self.lowered[key] = min(due_at, self.lowered.get(key, due_at))


class _Result:
    """The marks that follow from a look."""

    def __init__(self, look: Look, seen: Sequence[Seen], limit: int, at: float) -> None:
        self._look = look
        self._at = at
        self._last = seen[-1] if len(seen) >= limit else None  # the look ended there
        self._first: dict[tuple[str, float], float] = {}
        self.is_cut = self._last is not None
        for each in seen:
            self._first.setdefault((each.lane, each.rank), each.due_at)

    def of_lane(self, lane: str, before: Mapping[float, float], unmarked: set[float]) -> dict[float, float]:
        """Return the marks of a lane after a look at all of it. Ranks without a due invocation are forgotten only when
        there are many: a look sees nothing that is not due yet.
        """
        ranks = {rank for where, rank in (*self._first, *self._look.lowered) if where == lane} | {_PLAIN_RANK}
        if len(ranks | before.keys() | unmarked) <= _MAX_RANKS:
            ranks |= before.keys() | unmarked
        return {rank: self.mark(lane, rank, before.get(rank, _FIRST)) for rank in ranks}

    def mark(self, lane: str, rank: float, before: float) -> float:
        """Return the due time before which nothing lies in a lane and rank."""
        key, last = (lane, rank), self._last
        if key in self._first:
            mark = self._first[key]
        elif last is None or rank < last.rank:
            mark = self._at
        elif rank == last.rank:
            mark = last.due_at
        else:
            mark = before  # the look did not get there
        return min(mark, self._at - SLACK_SECONDS, self._look.lowered.get(key, self._at))

    def pass_on(self, lane: str, other: Look) -> None:
        """Keep the marks of a look under way below the documents that this look saw."""
        for (where, rank), due_at in self._first.items():
            if where == lane and other.app == self._look.app:
                other.lower(lane, rank, due_at)


class _Lane:
    """The marks of a lane by rank, and when all of it was looked at."""

    def __init__(self) -> None:
        self.marks: dict[float, float] = {}
        self.ranks: set[float] = set()  # seen while there were no marks: work that is not due yet is not seen by looks
        self.whole_at = _FIRST
        self.has_all_ranks = False  # the last look at the whole lane was not cut short


_UNKNOWN = _Lane()


class Marks:
    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.now = monotonic
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._looks: set[Look] = set()
        self._news: dict[str, set[str]] = {}  # by app, since its lanes were asked for: those that something came to

    def _of(self, app: str, lane: str) -> _Lane:
        """Return the state of a lane, for reading only."""
        return self._lanes.get((app, lane), _UNKNOWN)

    # --- looking

    def begin(self, app: str, lanes: Iterable[str], *, whole: bool = False) -> Look:
        """Return a look at these lanes from their marks on, or at all of them. It is over with `end`."""
        ranges: list[Range] = []
        for lane in lanes:
            marks = {} if whole else self._of(app, lane).marks
            ranges += [Range(lane, rank, since) for rank, since in marks.items()] or [Range(lane, None, _FIRST)]
        look = Look(app, ranges, self.now())
        self._looks.add(look)
        return look

    def ranges(self, app: str, lanes: Iterable[str]) -> int:
        """Return how many ranges a look at these lanes has."""
        return sum(max(1, len(self._of(app, lane).marks)) for lane in lanes)

    def known(self, app: str, lanes: Iterable[str]) -> list[tuple[str, float]]:
        """Return the lanes and ranks that have a mark."""
        return [(lane, rank) for lane in lanes for rank in self._of(app, lane).marks]

    def end(self, look: Look, seen: Sequence[Seen] | None, limit: int, at: float) -> None:
        """Set the marks from the documents of a look, in queue order, up to `limit` that were due at `at`. None: the
        look failed, or did not see everything.
        """
        self._looks.discard(look)
        if seen is None or look.is_void:
            return
        result = _Result(look, seen, limit, at)
        for lane, rank, since in look.ranges:
            if lane in look.forgotten:
                continue
            known = self._lanes.setdefault((look.app, lane), _Lane())
            if rank is None:
                known.marks, known.whole_at = result.of_lane(lane, known.marks, known.ranks), look.began
                known.ranks = set()
                known.has_all_ranks = not result.is_cut
                for other in self._looks:  # a claim that began at a higher mark has not seen these
                    result.pass_on(lane, other)
            elif rank in known.marks:
                known.marks[rank] = result.mark(lane, rank, since)
            if len(known.marks) > _MAX_RANKS:
                known.marks = {}

    def may_hide_ranks(self, app: str, lanes: Iterable[str]) -> bool:
        """Return whether some lane may have ranks that no look got to."""
        return not all(self._of(app, lane).has_all_ranks for lane in lanes)

    def ask_for_lanes(self, app: str) -> None:
        """Remember from now on which lanes of the app get work."""
        self._news[app] = set()

    def news(self, app: str) -> set[str] | None:
        """Return the lanes that got work since they were asked for; None: unknown."""
        return self._news.get(app)

    def is_stale(self, app: str, lanes: Iterable[str]) -> bool:
        """Return whether some lane was not looked at as a whole for long."""
        return self.fresh_for(app, lanes) <= 0

    def fresh_for(self, app: str, lanes: Iterable[str]) -> float:
        """Return the seconds until some lane has to be looked at as a whole."""
        now = self.now()
        return min([self.whole_at(app, lane) for lane in lanes], default=now) + FRESH_SECONDS - now

    def whole_at(self, app: str, lane: str) -> float:
        """Return when the last look at the whole lane began."""
        return self._of(app, lane).whole_at

    def is_behind(self, app: str, seen: Seen) -> bool:
        """Return whether a look from the marks on would not have seen this."""
        marks = self._of(app, seen.lane).marks
        return bool(marks) and seen.due_at < marks.get(seen.rank, float("inf"))

    def lowest(self, app: str, lanes: Iterable[str]) -> float:
        """Return the due time before which nothing was seen in any of these lanes."""
        return min((min(self._of(app, lane).marks.values(), default=_FIRST) for lane in lanes), default=_FIRST)

    # --- news

    def lower(self, app: str, lane: str, rank: float, due_at: float) -> None:
        """Lower the mark of a lane and rank: an invocation is due there at that time."""
        if app in self._news:
            self._news[app].add(lane)
        for look in self._looks:
            if look.app == app:
                look.lower(lane, rank, due_at)
        known = self._lanes.get((app, lane)) or self._lanes.setdefault((app, lane), _Lane())
        if known.marks:
            # Of a rank that no look got to, it is unknown what is there already.
            unknown = due_at if known.has_all_ranks else _FIRST
            known.marks[rank] = min(due_at, known.marks.get(rank, unknown))
        elif len(known.ranks) < _MAX_RANKS:
            known.ranks.add(rank)

    def lower_for(self, records: Iterable[InvocationRecord]) -> None:
        """Lower the marks for these invocations."""
        for record in records:
            self.lower(record.app, record.lane, -record.priority, record.due_at)

    def lower_all(self, app: str, due_at: float) -> None:
        """Lower the marks of all known lanes and ranks: an invocation of an unknown lane is due at that time."""
        for (each, lane), known in self._lanes.items():
            if each == app:
                for rank in tuple(known.marks):
                    self.lower(app, lane, rank, due_at)

    def forget(self, app: str | None = None, lanes: Iterable[str] | None = None) -> None:
        """Look at these lanes (None: at all) from their heads: an invocation of unknown age is there."""
        names = None if lanes is None else set(lanes)
        for each in tuple(self._news):
            if app in (None, each):
                if names is None:
                    del self._news[each]
                else:
                    self._news[each] |= names
        for look in self._looks:
            if app in (None, look.app):
                if names is None:
                    look.is_void = True
                else:
                    look.forgotten |= names
        for (each, lane), known in self._lanes.items():
            if app in (None, each) and (names is None or lane in names):
                known.ranks |= known.marks.keys()
                known.marks, known.whole_at = {}, _FIRST

    def take_hint(self, hint: Hint) -> None:
        """Lower the marks by a hint that lanes got work."""
        if hint.kind != READY:
            return
        if hint.since is None or not hint.subjects or not hint.priorities:
            self.forget(lanes=hint.subjects or None)
            return
        names = set(hint.subjects)
        apps = (
            {look.app for look in self._looks} | self._news.keys() | {app for app, lane in self._lanes if lane in names}
        )
        for app in apps:
            for lane in hint.subjects:
                for priority in hint.priorities:
                    self.lower(app, lane, -priority, hint.since)
