"""Writes events as log lines: one table from the type of an event to logger, level and message.

A message is `verb object: reason`. `docs/reference/logging.md` is made from this table.

A step that is repeated without end may fail without end, and a line for each time fills a disk. Events that expect it
name what goes on, and `LogThrottle` passes the first, then one after 10 s, 30 s, … 5 minutes. `Repeats` is for all the
others: a filter on every logger of Holdfast, in the command line and in a user's program alike. The first
lines of a series pass, then ever fewer, and each of those says how many were left out. DEBUG lines all pass.
"""

from __future__ import annotations

import logging
import string
import threading
import time
from collections.abc import Callable, Hashable
from functools import partial
from logging import DEBUG, ERROR, INFO, WARNING
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from holdfast.codec import ErrorRecord
from holdfast.errors import HoldfastError
from holdfast.showing import printable
from holdfast.telemetry import events as e
from holdfast.telemetry.events import Telemetry

_AT_FIRST = 10  # lines of a series that pass
_FIRST_PAUSE_SECONDS, _LONGER, _LONGEST_PAUSE_SECONDS = 10.0, 3, 300.0
_OVER_SECONDS = 120.0  # without such a line: the next one is news. Longer than the longest pause between two tries
_MAX_SERIES = 1000
_MAX_LETTERS = 200  # of an argument: what is longer repeats if it begins alike

NAMES = (
    *("archive", "audit", "core", "engine", "groups", "recovery", "retention", "runner"),
    *("schedules", "services", "stats", "store", "streams", "triggers", "web", "worker", "workflows", "world"),
)
"""The loggers of Holdfast, below `holdfast`. A filter on a logger does not see the records of loggers below it."""


class _Series(NamedTuple):
    lines: int
    passed_at: float
    pause: float
    seen_at: float
    left_out: int


class LogThrottle:
    """Decide which of many reports about one thing are news: the first ones, then ever fewer. `time` is monotonic."""

    def __init__(self, time: Callable[[], float], at_first: int = 1) -> None:
        self._time = time
        self._at_first = at_first
        self._lock = threading.RLock()  # a signal handler may log in the middle of it
        self._series: dict[Hashable, _Series] = {}

    def pass_one(self, key: Hashable) -> int | None:
        """Return how many were left out since the last report that passed; None if this one does not pass."""
        now = self._time()
        with self._lock:
            before = self._series.pop(key, None)  # and in again, at the end: the oldest are forgotten
            if before is None or now - before.seen_at > _OVER_SECONDS:
                passed, series = 0, _Series(1, now, _FIRST_PAUSE_SECONDS, now, 0)
            elif before.lines < self._at_first:
                passed, series = 0, before._replace(lines=before.lines + 1, passed_at=now, seen_at=now)
            elif now - before.passed_at >= before.pause:
                pause = min(before.pause * _LONGER, _LONGEST_PAUSE_SECONDS)
                passed, series = before.left_out, before._replace(passed_at=now, pause=pause, seen_at=now, left_out=0)
            else:
                passed, series = None, before._replace(seen_at=now, left_out=before.left_out + 1)
            self._series[key] = series
            if len(self._series) > _MAX_SERIES:
                del self._series[next(iter(self._series))]
        return passed

    def is_due(self, what: str) -> bool:
        return self.pass_one(what) is not None

    def is_over(self, what: str) -> bool:
        """Forget the reports about this. Return False if there were none."""
        return self._series.pop(what, None) is not None

    def forget(self) -> None:
        """Forget all reports: for tests, whose clock is another one."""
        self._series.clear()


class Repeats(logging.Filter):
    """Refuse lines that repeat too often. Lines are alike if they differ in numbers only; one about an invocation
    is like another about the same one only. `extra={"series": name}` makes all lines of that name alike.
    """

    def __init__(self, time: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._throttle = LogThrottle(time, _AT_FIRST)
        self.forget = self._throttle.forget

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG:
            return True
        left_out = self._throttle.pass_one(_series_of(record))
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out:,} more like this were left out)", ()
        return left_out is not None


def _series_of(record: logging.LogRecord) -> tuple[object, ...]:
    series = getattr(record, "series", None)
    if series is not None:
        return record.name, record.levelno, series
    given = record.args if isinstance(record.args, tuple) else (record.args,)
    texts = tuple(_text(each)[:_MAX_LETTERS] for each in given if not isinstance(each, int | float))
    return record.name, record.levelno, record.msg, texts, getattr(record, "invocation", None)


def _text(argument: object) -> str:
    try:
        return argument if isinstance(argument, str) else repr(argument)
    except Exception:  # of a user's object
        return type(argument).__name__


REPEATS = Repeats()


def limit_repeats() -> None:
    """Have the filter on every logger of Holdfast. Called when the package is imported."""
    for name in NAMES:
        logging.getLogger(f"holdfast.{name}").addFilter(REPEATS)


FIELDS = ("invocation", "task", "attempt", "runner", "epoch", "worker", "schedule", "trigger", "queue")
"""What a line carries beside its message, if its event has it."""


class If(NamedTuple):
    """One level if this attribute of the event is true, another if it is not."""

    condition: str
    then: int
    otherwise: Level


Level: TypeAlias = int | If


class Row(NamedTuple):
    """The line of an event. `logger` is below `holdfast`; empty: the event's own `area`.

    While the thing that `throttle_key` names goes on, it is logged now and then, else at DEBUG. `ends` names a thing
    that is over, which is no news if its beginning was not logged. Lines of one `series` are alike, whatever they say.
    """

    logger: str
    level: Level
    message: str
    throttle_key: str = ""
    ends: str = ""
    series: str = ""


_RETRY = "could not reach {where}: {what}, try {tries:d} failed, next in {seconds:.2f} s: {why}"
_GAVE_UP = "gave up on {where}: {what}, {tries:d} tries failed in {seconds:.1f} s: {why}"
_AWAITED = "could not reach the store for {what}, next try in {seconds:.2f} s: {why}"
_NOT_TAKEN = "could not take back the work of {worker}: {why}"
_OF_A_DUTY = If("is_defect", ERROR, If("is_owed", WARNING, DEBUG))

ROWS: dict[type[e.Event], Row] = {
    # the path of an invocation
    e.Settled: Row("engine", DEBUG, "settled {record.task}: {change.target}"),
    e.Failed: Row("engine", ERROR, "failed {record.task}: {change.why}"),
    e.Retried: Row("engine", WARNING, "will retry {record.task}: {change.why}"),
    e.Parked: Row("engine", ERROR, "parked {record.task}: {change.why}"),
    e.Killed: Row("engine", WARNING, "interrupted {record.task}: {change.why}"),
    e.Recovered: Row("recovery", WARNING, "recovered {record.task} ({record.status} → {change.target}): {change.why}"),
    e.ChangeLost: Row("engine", WARNING, "dropped '{change}' of {record.task}: {why}"),
    e.ChangeNotWritten: Row("engine", ERROR, "could not write '{change}' of {record.task}: {why}"),
    e.Unstoppable: Row("worker", ERROR, "could not stop {record.task}: its code holds its slot until it ends"),
    e.ChildrenNotCancelled: Row("engine", WARNING, "could not cancel the children of {record.task}: {why}"),
    e.Woken: Row("worker", INFO, "woke {record.task}: its code has changed since it was parked"),
    e.WorkflowWarning: Row("workflows", WARNING, "noticed {record.task}: {why}"),
    e.RunSuspended: Row("workflows", DEBUG, "suspended {record.task}: {change.why}"),
    e.NotCalled: Row("triggers", ERROR, "did not call {record.task}: {why}"),
    e.InvocationsExpired: Row("engine", WARNING, "failed {invocations}, not started in time: {why}"),
    e.HandedBack: Row("worker", If("has_begun", WARNING, INFO), "handed back {invocations} of {worker}: {why}"),
    e.LeftToRecovery: Row("worker", WARNING, "left {invocations} of {worker} to recovery: {why}"),
    e.WaitersReleased: Row("engine", INFO, "released {invocations}: slots of their limits were free"),
    e.WaitersNotReleased: Row("engine", INFO, "could not release waiters of {limits}, the sweep will retry: {why}"),
    e.StreamsRemoved: Row("streams", INFO, "removed the chunks of {count:d} streams: their retention is over"),
    e.ChunksRefused: Row("streams", WARNING, "could not write {count:d} chunks to the stream {stream}: {why}"),
    e.Removed: Row("retention", INFO, "removed {count:d} invocations and entries: their retention is over"),
    e.Purged: Row("archive", INFO, "purged {invocations}: a user asked for it"),
    # runners and workers
    e.RunnerJoined: Row("runner", INFO, "joined the roster: runner {runner}"),
    e.RunnerLeft: Row("runner", If("why", WARNING, INFO), "left the roster: runner {runner}{why}"),
    e.RunnerAsked: Row("runner", WARNING, "stopping runner {runner}: a user asks it to {why}"),
    e.RunnerDeclaredDead: Row("runner", WARNING, "declared runner {runner} dead: {why}"),
    e.RunnerFenced: Row("", ERROR, "fenced {what}: declared dead, other runners have its work"),
    e.RunnerBroke: Row("runner", ERROR, "stopped the runner, nothing it served runs here any more: {error}"),
    e.OutageBegan: Row("runner", WARNING, "could not reach the store: runner {runner} {why}"),
    e.OutageEnded: Row("runner", INFO, "reached the store: runner {runner} wrote a heartbeat again, after {why}"),
    e.QueuePaused: Row("runner", INFO, "paused queue '{queue}': a user asked for it"),
    e.QueueResumed: Row("runner", INFO, "resumed queue '{queue}': a user asked for it"),
    e.SlotSkipped: Row("services", WARNING, "excluded runner {runner} from the services: it left its slot unused"),
    e.ExecutionAbandoned: Row("services", If("is_own", INFO, WARNING), "reaped services of runner {runner}: {why}"),
    e.DutyFailed: Row("", _OF_A_DUTY, "could not {duty}: {error}", throttle_key="{duty} {error}"),
    e.WorkerStarted: Row("worker", INFO, "started worker {worker}: {why}"),
    e.WorkerNotStarted: Row("runner", ERROR, "could not start a worker: {why}", series="no start"),
    e.WorkerBroke: Row("worker", ERROR, "stopped this worker: {why}"),
    e.StopAsked: Row("runner", INFO, "stopping the runner: {why}"),
    e.RestartDue: Row("runner", ERROR, "restarting the runner in {seconds:g} s, unless this changes: {why}"),
    e.WorkerDied: Row("runner", ERROR, "lost worker {worker}, which died: {why}", series="deaths"),
    e.WorkerKilled: Row("runner", ERROR, "killed worker {worker}: {why}"),
    e.WorkerUnresponsive: Row("runner", WARNING, "found worker {worker} unresponsive: {why}"),
    e.WorkerAnswers: Row("runner", INFO, "reached worker {worker} again: {why}"),
    e.WorkerRetires: Row("worker", If("is_too_large", WARNING, INFO), "retired worker {worker}: {why}"),
    e.WorkerEnds: Row("worker", ERROR, "stopped worker {worker}: {why}"),
    e.WorkerDrains: Row("worker", INFO, "draining worker {worker}: {why}"),
    e.WorkNotTakenBack: Row("runner", If("is_left", ERROR, WARNING), _NOT_TAKEN),
    e.ListenerFailed: Row("engine", ERROR, "listener {listener} failed at '{stage}': {why}"),
    e.ListenersBehind: Row("engine", WARNING, "listeners are behind: {why}"),
    e.HookFailed: Row("worker", ERROR, "gave up {hook}: {why}"),
    e.LoopDisturbed: Row("engine", WARNING, "kept event loop {loop} running: user code tried to end it: {error!r}"),
    e.LoopBroken: Row("engine", logging.CRITICAL, "lost event loop {loop}: {why}"),
    e.TaskLogsLost: Row("worker", WARNING, "dropped {count:d} log records of {task}: its process logs too fast"),
    # schedules and triggers
    e.ScheduleFired: Row("schedules", DEBUG, "fired schedule '{schedule}': {ids}"),
    e.TicksMissed: Row("schedules", If("is_wanted", INFO, WARNING), "missed ticks of '{schedule}': {why}"),
    e.TriggerFired: Row("triggers", DEBUG, "fired trigger '{trigger}': {task}"),
    e.TriggersLoop: Row("triggers", WARNING, "found triggers in a circle, each round is one more invocation: {why}"),
    e.PutOff: Row("", ERROR, "put off {what}: {why}", throttle_key="{what}"),
    e.DispatchedLater: Row("triggers", WARNING, "put off triggers of {what}, the services will call them: {why}"),
    e.DeclarationUnreadable: Row("", ERROR, "could not read a record, {what}: {why}", throttle_key="{why}"),
    e.DeclarationRestored: Row("", WARNING, "stored {what} again: {why}"),
    e.DeclarationRetired: Row("", WARNING, "retired {what}: no code declares it any more"),
    e.DeclarationShadowed: Row("", ERROR, "did not store the declared {what}: {why}"),
    e.ChangedMeanwhile: Row("", DEBUG, "kept {what}: another process has written it meanwhile"),
    e.TaskUnknown: Row("", If("is_likely_wrong", WARNING, INFO), "found {what} for the unknown task {task}: {why}"),
    e.TriggersNotPublished: Row("triggers", INFO, "left the triggers of this program to runners: {why}"),
    e.RecordsWalked: Row("engine", DEBUG, "walked over stored records: {count:d} more"),
    # the web app
    e.WebServing: Row("web", INFO, "serving {address}: a user asked for it"),
    e.WebRequestServed: Row("web", DEBUG, "answered {method} {route}: {status:d} in {milliseconds:.1f} ms"),
    e.WebRequestFailed: Row("web", ERROR, "could not answer {method} {route}: {why}"),
    # the store
    e.StoreRetry: Row("store", WARNING, _RETRY, throttle_key="{what}"),
    e.StoreGaveUp: Row("store", WARNING, _GAVE_UP, throttle_key="{what}"),
    e.StoreAnswers: Row("store", INFO, "reached {where} again: {what}", ends="{what}"),
    e.StoreAwaited: Row("engine", WARNING, _AWAITED, throttle_key="await {what}"),
    e.StoreReached: Row("engine", INFO, "reached the store again: {what}", ends="await {what}"),
    e.RecordQuarantined: Row("store", ERROR, "quarantined a record, `holdfast store check` counts them: {why}"),
    e.RecordUnreadable: Row("store", ERROR, "left a record out: {why}", throttle_key="{id}"),
    e.RecordRefused: Row("store", ERROR, "could not quarantine a record: {why}"),
    e.StoreDamaged: Row("store", ERROR, "found the store damaged: {why}"),
    e.StoreRepaired: Row("store", WARNING, "repaired the store: {why}"),
    e.StoreExposed: Row("store", WARNING, "found the store open to others: {why}"),
    e.HintsInterrupted: Row("store", WARNING, "lost the change stream, polling instead: {why}", throttle_key="hints"),
    e.HintsRestored: Row("store", INFO, "opened the change stream again: hints arrive", ends="hints"),
    e.HintLost: Row("store", If("is_usual", DEBUG, WARNING), "lost a hint: {why}"),
    e.PollingInstead: Row("store", INFO, "found no change streams, polling instead: {why}"),
}

Kinds: TypeAlias = frozenset[type[e.Event]]

SILENT: Kinds = frozenset({e.Submitted, e.Claimed, e.Started, e.StartedHere, e.Refused, e.RanHere, e.ChangesWritten})
"""Events that have no line: they are many, or only for listeners."""

RETRIES: Kinds = frozenset({e.StoreRetry, e.StoreGaveUp, e.StoreAnswers})
"""What a store reports while it retries by itself."""


class Line(NamedTuple):
    """A row, ready for use: a message in the form that `logging` takes, and what is put into it."""

    row: Row
    message: str
    values: tuple[Callable[[Any], object], ...]


def _line(row: Row) -> Line:
    message, values = "", []
    for literal, name, spec, conversion in string.Formatter().parse(row.message):
        message += literal.replace("%", "%%")
        if name is not None:
            message += f"%{spec or conversion or 's'}"
            values.append(attrgetter(name))
    return Line(row, message, tuple(values))


_LINES = {kind: _line(row) for kind, row in ROWS.items()}


def levels(level: Level) -> list[int]:
    return [level] if isinstance(level, int) else [level.then, *levels(level.otherwise)]


_LOUDEST = {
    kind: (logging.getLogger(f"holdfast.{row.logger or 'engine'}"), max(levels(row.level)))
    for kind, row in ROWS.items()
}


class LogLines:
    """The subscriber that logs. `monotonic` is the time by which repeated events are throttled; events of the types
    `without` have no line.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, without: Kinds = frozenset()) -> None:
        self._throttle = LogThrottle(monotonic)
        self._lines = {kind: line for kind, line in _LINES.items() if kind not in without}

    def wants(self, kind: type[e.Event]) -> bool:
        check = self.check_for(kind)
        return check is not None and check()

    def check_for(self, kind: type[e.Event]) -> Callable[[], bool] | None:
        """Return the question whether a line of such an event would be written now; None for events without a line."""
        loudest = _LOUDEST.get(kind)
        return None if loudest is None else partial(loudest[0].isEnabledFor, loudest[1])

    def __call__(self, event: e.Event) -> None:
        line = self._lines.get(type(event))
        if line is None:
            return
        row, level = line.row, _level(line.row.level, event)
        logger = logging.getLogger(f"holdfast.{row.logger or getattr(event, 'area', 'engine')}")
        if row.ends and not self._throttle.is_over(_key(row.ends, event)):
            return
        if row.throttle_key and level > DEBUG and not self._throttle.is_due(_key(row.throttle_key, event)):
            level = DEBUG
        if logger.isEnabledFor(level):
            values = [_harmless(value(event)) for value in line.values]
            logger.log(level, line.message, *values, exc_info=_trace(event), extra=_extra(event, row))


def _harmless(value: object) -> object:
    """Return a value whose text is one line, without what acts on a terminal: users' texts are among them."""
    return value if isinstance(value, int | float) else printable(value)


def _key(template: str, event: e.Event) -> str:
    return template.format_map({name: getattr(event, name) for name in event.__struct_fields__})


def _extra(event: Any, row: Row) -> dict[str, object]:
    """Return the fields of a line."""
    found = {name: getattr(event, name, None) for name in FIELDS}
    if (record := getattr(event, "record", None)) is not None:
        known = (record.id, record.task, record.attempt or None, record.owner, record.epoch)
        found |= dict(zip(FIELDS, known, strict=False))
    if isinstance(event, e.RecordQuarantined):
        found[event.kind if event.kind in FIELDS else "record"] = event.id
    if isinstance(event, e.Settled):
        error = event.change.errors[-1].error if event.change.errors else event.change.error
        found["remote_traceback"] = error.traceback if isinstance(error, ErrorRecord) else None
    return {name: value for name, value in (found | {"series": row.series}).items() if value not in (None, "")}


def _level(level: Level, event: e.Event) -> int:
    while isinstance(level, If):
        level = level.then if getattr(event, level.condition) else level.otherwise
    return level


def _trace(event: e.Event) -> BaseException | None:
    """Return the exception whose traceback says more than its message: a defect of ours, or of user code in a hook."""
    if not isinstance(event, _WITH_TRACES):
        return None
    return None if isinstance(event.error, HoldfastError) else event.error


_WITH_TRACES = (
    *(e.DutyFailed, e.RunnerBroke, e.WorkerBroke, e.PutOff),
    *(e.HookFailed, e.ListenerFailed, e.WebRequestFailed),
)


def logging_telemetry(monotonic: Callable[[], float] = time.monotonic, without: Kinds = frozenset()) -> Telemetry:
    """Return a bus whose events are logged, except those of the types `without`."""
    return Telemetry(LogLines(monotonic, without))
