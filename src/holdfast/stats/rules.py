"""Decisions about statistics: what a change counts as, bins of durations, errors of one kind, levels of files. Pure.

A duration is counted in a bin that is a sixteenth of an octave wide, so a percentile is off by 3 % at most, whatever
its size. Bins of any two sets of calls can be added, which no percentile can.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from holdfast.codec import ErrorRecord
from holdfast.masking import mask_url
from holdfast.model.changes import Applied, Change, Verdict
from holdfast.model.decoding import Count, Moment, Seconds
from holdfast.model.records import HistoryEntry, InvocationRecord
from holdfast.model.sealing import HIDDEN
from holdfast.model.status import Status

MINUTE, HOUR = 60, 3600

# --- durations

_PER_OCTAVE = 16
_SHORTEST = 1e-6
Bin = Annotated[int, Meta(ge=-400, le=800)]  # a millionth of a second is bin -320


def bin_of(seconds: float) -> int:
    """Return the bin of a duration."""
    mantissa, exponent = math.frexp(seconds if seconds > _SHORTEST else _SHORTEST)
    return exponent * _PER_OCTAVE + int(mantissa * 2 * _PER_OCTAVE) - _PER_OCTAVE


def bounds_of(number: int) -> tuple[float, float]:
    """Return the shortest duration of a bin, and that of the next one."""
    octave, part = divmod(number, _PER_OCTAVE)
    width = math.ldexp(1.0, octave) / (2 * _PER_OCTAVE)
    return (_PER_OCTAVE + part) * width, (_PER_OCTAVE + part + 1) * width


class Tally(msgspec.Struct, omit_defaults=True):
    """Durations, counted by bin."""

    bins: dict[Bin, Count] = {}
    total: Seconds = 0.0
    most: Seconds = 0.0

    def add(self, seconds: float) -> None:
        number = bin_of(seconds)
        self.bins[number] = self.bins.get(number, 0) + 1
        self.total += seconds
        if seconds > self.most:
            self.most = seconds

    def merge(self, other: Tally) -> None:
        if not self.bins:
            self.bins = dict(other.bins)
        else:
            for number, count in other.bins.items():
                self.bins[number] = self.bins.get(number, 0) + count
        self.total += other.total
        self.most = max(self.most, other.most)


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """How long calls took, in seconds: exact are `count`, `mean` and `most`; a percentile is off by 3 % at most."""

    bins: Mapping[int, int] = {}
    total: float = 0.0
    most: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.bins.values())

    @property
    def mean(self) -> float | None:
        """Return the mean; None without any call."""
        count = self.count
        return self.total / count if count else None

    def percentile(self, percent: float) -> float | None:
        """Return a percentile of the durations; None without any call."""
        if not 0 <= percent <= 100:
            raise ValueError(f"{percent!r} is no percentage: from 0 to 100")
        wanted, seen = max(1, math.ceil(self.count * percent / 100)), 0
        for number in sorted(self.bins):
            seen += self.bins[number]
            if seen >= wanted:
                low, high = bounds_of(number)
                return min((low + high) / 2, self.most)
        return None

    @property
    def histogram(self) -> list[tuple[float, float, int]]:
        """Return the bins that are not empty, shortest first: from, to, and how many calls."""
        return [(*bounds_of(number), self.bins[number]) for number in sorted(self.bins)]


def distribution(tally: Tally) -> Distribution:
    return Distribution(bins=tally.bins, total=tally.total, most=tally.most)


# --- errors of one kind

OTHERS = "(other errors)"
_LONGEST = 200
_LOOKED_AT = 1000
_VARIABLE = [
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "<id>"),
    (re.compile(r"\b0x[0-9a-fA-F]+\b"), "<address>"),
    (re.compile(r"[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64})+"), "<email>"),
    (re.compile(r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?)?(?:Z|[+-]\d\d:?\d\d)?"), "<time>"),
    (re.compile(r"\b(?=[0-9a-zA-Z]*\d)(?=[0-9a-zA-Z]*[a-zA-Z])[0-9a-zA-Z]{8,}\b"), "<id>"),
    (re.compile(r"(?<![A-Za-z<])\d+(?:[.,]\d+)*"), "<n>"),
]
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_NAME = re.compile(r"['\"][A-Za-z_][A-Za-z_.:-]{0,39}['\"]")
_FRAME = re.compile(r'File "([^"\n]+)", line \d+, in ([^\n]+)')


def text_of(text: str) -> str:
    """Return the first line of a text, cut, in characters that every store can hold."""
    line = text[:_LOOKED_AT].lstrip().partition("\n")[0].rstrip()
    return mask_url(line).encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")[:_LONGEST]


@functools.lru_cache(maxsize=1024)
def normalised(type_name: str, message: str) -> str:
    """Return the type and the message of an error, without what differs from call to call: numbers, ids, times,
    addresses, and quoted texts that are no plain names.
    """
    text = text_of(message)
    for pattern, mark in _VARIABLE:
        text = pattern.sub(mark, text)
    text = _QUOTED.sub(lambda found: found[0] if _NAME.fullmatch(found[0]) else "'…'", text)
    name = text_of(type_name.removeprefix("builtins:"))
    return f"{name}: {text}" if text else name


def where_of(traceback: str) -> str:
    """Return the file and the function that raised, from a traceback; empty if it does not say."""
    frames = _FRAME.findall(traceback)
    if not frames:
        return ""
    path, function = frames[-1]
    return text_of(f"{path.replace(chr(92), '/').rpartition('/')[2]} in {function}")


class Failure(msgspec.Struct, omit_defaults=True):
    """Errors of one kind: calls that ended by it (`count`), attempts that were followed by another (`retried`), and the
    latest of them.
    """

    count: Count = 0
    retried: Count = 0
    first_at: Moment = 0.0
    last_at: Moment = 0.0
    message: str = ""
    where: str = ""
    ids: list[str] = []  # latest first

    def merge(self, other: Failure) -> None:
        first, last = (self, other) if other.last_at >= self.last_at else (other, self)
        self.message, self.where = last.message, last.where
        self.ids = list(dict.fromkeys([*last.ids, *first.ids]))[:MOST_IDS]
        self.first_at = min(self.first_at, other.first_at) if self.count + self.retried else other.first_at
        self.last_at = last.last_at
        self.count += other.count
        self.retried += other.retried


MOST_IDS = 3
MOST_FAILURES = 30  # kinds of errors of one task, in one file; the rest is counted together

# --- calls that stand out

Seen = tuple[float, Moment]  # how long, or how many attempts; and when
MOST_NOTABLE = 10
NOTABLE_SECONDS = 1.0
NOTABLE_ATTEMPTS = 2


def note(there: dict[str, Seen], id: str, value: float, at: float) -> None:
    """Keep a call if it is among the largest."""
    if id in there:
        if value > there[id][0]:
            there[id] = (value, at)
    elif len(there) < MOST_NOTABLE:
        there[id] = (value, at)
    else:
        least = min(there, key=lambda each: there[each])
        if value > there[least][0]:
            del there[least]
            there[id] = (value, at)


# --- what is counted of a task in a queue


class Cell(msgspec.Struct, omit_defaults=True):
    """The counts of one task in one queue, over some time. `retried` and `lost` are attempts: after an error, and with
    their worker or runner.
    """

    succeeded: Count = 0
    failed: Count = 0
    cancelled: Count = 0
    retried: Count = 0
    lost: Count = 0
    wait: Tally = msgspec.field(default_factory=Tally)
    run: Tally = msgspec.field(default_factory=Tally)
    slow: dict[str, Seen] = {}
    delayed: dict[str, Seen] = {}
    tried: dict[str, Seen] = {}
    errors: dict[str, Failure] = {}

    def merge(self, other: Cell) -> None:
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.wait.merge(other.wait)
        self.run.merge(other.run)
        for name in NOTABLE:
            for id, (value, at) in getattr(other, name).items():
                note(getattr(self, name), id, value, at)
        for kind, failure in other.errors.items():
            self.failure(kind).merge(failure)

    def failure(self, kind: str) -> Failure:
        """Return the group of an error; that of all others if there are too many."""
        if kind not in self.errors and len(self.errors) >= MOST_FAILURES:
            kind = OTHERS
        return self.errors.setdefault(kind, Failure())


COUNTS = ("succeeded", "failed", "cancelled", "retried", "lost")
NOTABLE = ("slow", "delayed", "tried")
Cells = dict[str, Cell]
MOST_CELLS = 1000  # in one file
OTHER_TASKS = "|(other tasks)"


def cell_of(cells: Cells, key: str) -> Cell:
    """Return the cell of a key; that of all others if there are too many."""
    if (there := cells.get(key)) is not None:
        return there
    if len(cells) >= MOST_CELLS:
        key = OTHER_TASKS
    return cells.setdefault(key, Cell())


def merge_cells(cells: Cells, others: Mapping[str, Cell]) -> None:
    for key, cell in others.items():
        cell_of(cells, key).merge(cell)


def key_of(queue: str, task: str) -> str:
    return f"{queue}|{task}"  # no queue has a vertical bar in its name


def parts_of(key: str) -> tuple[str, str]:
    """Return the queue and the task of a key."""
    queue, _, task = key.partition("|")
    return queue, task


# --- what a change counts as

_OUTCOMES = {Status.SUCCESS: "succeeded", Status.FAILED: "failed", Status.CANCELLED: "cancelled"}
_LOST = frozenset({Status.RUNNING_RECOVERY, Status.KILLED})


Written = tuple[Sequence[tuple[InvocationRecord, Change]], Sequence[Verdict]]
CURRENT_SECONDS = 60.0
_PLAIN_LINES = 3  # registered, pending, running: with more of them it was held up


def without_messages(written: Written) -> Written:
    """Return changes without the messages of their errors: an app that encrypts keeps only their types in the clear."""
    wanted, verdicts = written
    return [(record, _without_message(change)) for record, change in wanted], verdicts


def _without_message(change: Change) -> Change:
    if isinstance(change.error, ErrorRecord):
        return msgspec.structs.replace(change, error=msgspec.structs.replace(change.error, message=HIDDEN))
    if isinstance(change.errors, tuple) and change.errors:
        last = change.errors[-1]
        shown = msgspec.structs.replace(last, error=msgspec.structs.replace(last.error, message=HIDDEN))
        return msgspec.structs.replace(change, errors=(*change.errors[:-1], shown))
    return change


def count_all(cells_of: Callable[[int], Cells], batches: Sequence[Written], now: float) -> None:
    """Count what was written, each change in the minute of its time. A change that waited long for the store is counted
    now: the file of its own minute may be folded.

    Most calls succeed at once. They are counted here, without a call of a function for each.
    """
    cells: Cells = {}
    minute: int | None = None
    for wanted, verdicts in batches:
        for (record, change), verdict in zip(wanted, verdicts, strict=True):
            if not isinstance(verdict, Applied):
                continue
            at = change.at if -CURRENT_SECONDS < now - change.at < CURRENT_SECONDS else now
            if minute != (start := int(at // MINUTE) * MINUTE):
                minute, cells = start, cells_of(start)
            began = record.history[-1] if 0 < len(record.history) <= _PLAIN_LINES else None
            if change.name != "completed" or record.epoch != 1 or began is None or began.status is not Status.RUNNING:
                count(cells, record, change)
                continue
            cell = cells.get(f"{record.queue}|{record.task}") or cell_of(cells, key_of(record.queue, record.task))
            cell.succeeded += 1
            due = record.due_at if record.due_at > record.created_at else record.created_at
            for tally, seconds, most in (
                (cell.run, change.at - began.at, cell.slow),
                (cell.wait, began.at - due, cell.delayed),
            ):
                mantissa, exponent = math.frexp(seconds if seconds > _SHORTEST else _SHORTEST)  # as in `bin_of`
                number = exponent * _PER_OCTAVE + int(mantissa * 2 * _PER_OCTAVE) - _PER_OCTAVE
                tally.bins[number] = tally.bins.get(number, 0) + 1
                if seconds > 0:
                    tally.total += seconds
                if seconds > tally.most:
                    tally.most = seconds
                if seconds >= NOTABLE_SECONDS:
                    note(most, record.id, seconds, change.at)


def count(cells: Cells, record: InvocationRecord, change: Change) -> None:
    """Count a change that was written to this record. Most changes count as nothing: a start, a wait, a wake."""
    if change.never_began:
        return
    outcome = _OUTCOMES.get(change.path[-1]) or ("retried" if change.name == "retried" else "")
    is_lost = not _LOST.isdisjoint(change.path)
    if not outcome and not is_lost:
        return
    cell = cell_of(cells, key_of(record.queue, record.task))
    if outcome:
        setattr(cell, outcome, getattr(cell, outcome) + 1)
    if is_lost:
        cell.lost += 1
    _count_times(cell, record, change.at)
    if record.run is None and record.attempt >= NOTABLE_ATTEMPTS:
        note(cell.tried, record.id, float(record.attempt), change.at)
    if outcome == "failed" and isinstance(change.error, ErrorRecord):
        _count_error(cell, record, change.error, change.at, "count")
    elif outcome == "retried" and isinstance(change.errors, tuple) and change.errors:
        _count_error(cell, record, change.errors[-1].error, change.at, "retried")


def _count_times(cell: Cell, record: InvocationRecord, at: float) -> None:
    began = began_at(record)
    if began is None:
        return
    start, due = began
    took = max(0.0, at - start)
    cell.run.add(took)
    if took >= NOTABLE_SECONDS:
        note(cell.slow, record.id, took, at)
    if due is not None:
        waited = max(0.0, start - due)  # a store's clock may be set back
        cell.wait.add(waited)
        if waited >= NOTABLE_SECONDS:
            note(cell.delayed, record.id, waited, at)


def began_at(record: InvocationRecord) -> tuple[float, float | None] | None:
    """Return when the attempt of this owner began, and since when it was due; None if it has not begun.

    A run is one attempt, however often it was suspended: only its first start was waited for. A call was not due before
    it was created, even if it was moved up in its queue; and an attempt after the first not before it was back there.
    An attempt that a limit or a rate has held up was due by then: a rate moves the due time to the start that it gives.
    """
    history = record.history
    if record.run is not None and record.epoch > 1:
        start = record.run.started_at
        if start is None:
            start = next((line.at for line in history if line.status is Status.RUNNING), None)
        return None if start is None else (start, None)
    for index in range(len(history) - 1, -1, -1):
        line = history[index]
        if line.status is Status.RUNNING:
            if line.epoch != record.epoch:
                return None
            due = max(record.due_at, record.created_at)
            if record.epoch > 1 and (back_at := _back_in_queue_at(history, index)) is not None:
                due = max(due, back_at)
            held_up_at = _held_up_at(history, index)
            return line.at, due if held_up_at is None else min(due, held_up_at)
    return None


def _back_in_queue_at(history: Sequence[HistoryEntry], index: int) -> float | None:
    for line in reversed(history[:index]):
        if line.status is not Status.PENDING:
            return line.at
    return None


def _held_up_at(history: Sequence[HistoryEntry], index: int) -> float | None:
    """Return when the attempt that begins there was first held up by a limit or a rate; None if it never was."""
    first = None
    for line in reversed(history[:index]):
        if line.status is Status.RUNNING:
            break
        if line.status is Status.CONCURRENCY_CONTROLLED:
            first = line.at
    return first


def _count_error(cell: Cell, record: InvocationRecord, error: ErrorRecord, at: float, what: str) -> None:
    failure = cell.failure(normalised(error.type_name, error.message[:_LOOKED_AT]))
    latest = Failure(
        first_at=at,
        last_at=at,
        message=text_of(error.message),
        where=where_of(error.traceback),
        ids=[record.id],
    )
    setattr(latest, what, 1)
    failure.merge(latest)


# --- levels of files


class Level(NamedTuple):
    """Files of one resolution: the kind of their entries, how many seconds each is about, and after how many seconds
    from their end they are folded into one of the next level.
    """

    kind: str
    seconds: int
    folds_after: float | None


LATE_SECONDS = 300.0  # from the end of its minute on, a worker writes no more to its file
WORKERS = Level("stats.worker", MINUTE, 600.0)  # one file per worker
LEVELS = (
    WORKERS,
    Level("stats.minute", MINUTE, 3.0 * HOUR),  # from here on, one file per app
    Level("stats.minutes", 10 * MINUTE, 48.0 * HOUR),
    Level("stats.hour", HOUR, None),
)
_DIGITS = 11


def start_of(at: float, seconds: int) -> int:
    return int(at // seconds) * seconds


def name_of(start: int, of: str = "") -> str:
    """Return the name of a file; names sort by time."""
    return f"{start:0{_DIGITS}d}/{of}" if of else f"{start:0{_DIGITS}d}"


def start_in(name: str) -> int | None:
    """Return when a file begins, by its name; None if that is no name of ours."""
    digits = name[:_DIGITS]
    is_ours = len(digits) == _DIGITS and digits.isascii() and digits.isdigit() and name[_DIGITS:][:1] in ("", "/")
    return int(digits) if is_ours else None


# --- points in time

_STEPS = (MINUTE, 5 * MINUTE, 10 * MINUTE, 30 * MINUTE, HOUR, 3 * HOUR, 6 * HOUR, 24 * HOUR, 168 * HOUR)
_USUAL_POINTS = 120
MOST_POINTS = 2000


def usual_step(seconds: float) -> int:
    """Return the step between points that shows so long a time best."""
    return next((step for step in _STEPS if seconds / step <= _USUAL_POINTS), _STEPS[-1])


def step_at_least(step: int, files: Iterable[int]) -> int:
    """Return the step between points: as asked, or a multiple of the coarsest file."""
    coarsest = max(files, default=MINUTE)
    return -(-max(step, coarsest) // coarsest) * coarsest


# --- deploys


class DeployMark(msgspec.Struct, frozen=True, kw_only=True):
    """A runner with a release that was not there before: when it started, and where."""

    at: Moment
    release: str
    host: str = ""


TOGETHER_SECONDS = 60.0  # runners of two releases that start at the same time mark each of them once
MOST_DEPLOYS = 500


def marked(marks: Sequence[DeployMark], mark: DeployMark, kept_seconds: float) -> Sequence[DeployMark] | None:
    """Return the marks with a new one; None if that release was marked last, or just now."""
    if marks and marks[-1].release == mark.release:
        return None
    if any(each.release == mark.release and mark.at - each.at < TOGETHER_SECONDS for each in marks):
        return None
    kept = [each for each in marks if each.at > mark.at - kept_seconds]
    return (*kept[-MOST_DEPLOYS + 1 :], mark)
