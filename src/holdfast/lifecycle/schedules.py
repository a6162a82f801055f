"""A schedule as it is stored: when, what, and how far it has come.

Which instants are ticks follows from the timing alone. What is stored about progress is one number, `through`: every
tick up to it has been decided, and fired or not. It only grows, whatever happens to the schedule, so no tick is decided
twice; `next_at`, the first tick after it, is kept beside it because the store searches for it.

The `uid` is made once, when a schedule is first stored under its name. A tick's invocation has an id made of the uid
and the instant: whoever inserts it first has fired it, and inserting it again does nothing.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import msgspec
from msgspec.structs import replace

from holdfast.ids import InvocationId
from holdfast.lifecycle.decoding import Count, JsonDecoder, Moment, Number, Seconds, corrupt
from holdfast.lifecycle.records import PLAIN, Entry, Terms
from holdfast.schedules.timing import Cron, cron
from holdfast.schedules.timing import Schedule as Timing


class Overlap(StrEnum):
    """What a tick does when the invocation of the one before has not ended."""

    ALLOW = "allow"
    SKIP = "skip"
    QUEUE = "queue"
    CANCEL = "cancel"


class CatchUp(StrEnum):
    """Which ticks of a time without a runner are fired afterwards."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What every tick submits."""

    task: str
    arguments: bytes
    queue: str = "default"
    tags: tuple[str, ...] = ()
    priority: Number = 0
    at_most_once: bool = False
    limit_key: str | None = None
    twin: str | None = None
    expires_seconds: Seconds | None = None  # in its terms there is no moment, since every tick has another
    terms: Terms = PLAIN
    event: str = ""  # instead of a task: an event of that name, for a trigger that wants more than the tick


class Rules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How ticks are treated."""

    overlap: Overlap = Overlap.ALLOW
    catch_up: CatchUp = CatchUp.LAST
    catch_up_most: Count = 100  # with ALL: of so many ticks, the last ones
    jitter_seconds: Seconds = 0.0
    starts_at: Moment | None = None
    ends_at: Moment | None = None
    unique: bool = False  # no tick while the invocation of another still waits for its first start


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    at: Moment
    by: str = ""
    why: str = ""


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What has become of the ticks so far. For people; nothing is decided by it but `last_id`, for the overlap."""

    last_tick: Moment | None = None
    last_id: InvocationId | None = None
    fired: Count = 0
    skipped: Count = 0  # because of the overlap
    missed: Count = 0  # because nobody was there, and they are not to be caught up
    queued: tuple[Moment, ...] = ()  # ticks that wait for the end of the one before


class ScheduleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as it is stored. `timing` says when, `call` what, `rules` how, `progress` what has become of it."""

    app: str
    name: str
    uid: str
    timing: Timing
    call: Call
    through: Moment
    next_at: Moment | None  # None: nothing will come, or not now (paused, retired, over)
    rules: Rules = Rules()
    declared: bool = False  # in code, so that it is retired when no code declares it any more
    beside: tuple[str, ...] = ()  # other tasks of the module that declares it: who knows one of them has that module
    pause: Pause | None = None
    retired_at: Moment | None = None
    progress: Progress = Progress()
    created_at: Moment = 0.0
    changed_at: Moment = 0.0
    version: Count = 1

    @property
    def is_active(self) -> bool:
        return self.pause is None and self.retired_at is None


def tick_after(timing: Timing, rules: Rules, through: float) -> float | None:
    """The first tick that is later than `through`, within the time that the schedule is for."""
    tick = timing.next_after(begins_after(rules, through))
    if tick is None or (rules.ends_at is not None and tick > rules.ends_at):
        return None
    return tick


def begins_after(rules: Rules, through: float) -> float:
    """`through`, but not before the schedule's start; a tick at the very start counts."""
    return through if rules.starts_at is None else max(through, math.nextafter(rules.starts_at, -math.inf))


KIND = "schedule"
_QUEUE_SECONDS = 1.0  # how often somebody looks whether the invocation of the tick before has ended


def to_entry(record: ScheduleRecord) -> Entry:
    due_at = record.next_at
    if record.progress.queued and record.is_active:
        due_at = min(record.changed_at + _QUEUE_SECONDS, math.inf if due_at is None else due_at)
    body = msgspec.json.encode(record)
    return Entry(app=record.app, kind=KIND, name=record.name, body=body, version=record.version, due_at=due_at)


def from_entry(entry: Entry) -> ScheduleRecord:
    """Raises `CorruptRecord` for what cannot be read, perhaps because a newer version wrote it."""
    try:
        record = _decoder.decode(entry.body)
        if isinstance(record.timing, Cron):  # a newer host may know more zones, and a newer version more expressions
            cron(record.timing.expression, timezone=record.timing.timezone)
        return replace(record, version=entry.version)
    except Exception as error:
        raise corrupt(KIND, entry.name, error) from error


_decoder = JsonDecoder[ScheduleRecord](ScheduleRecord)


def moved(record: ScheduleRecord, now: float, **fields: Any) -> ScheduleRecord:
    """The record after a change, with the tick that comes next. `through` never goes back."""
    changed = replace(record, **fields)
    changed = replace(changed, version=record.version + 1, changed_at=now, through=max(record.through, changed.through))
    comes = tick_after(changed.timing, changed.rules, changed.through) if changed.is_active else None
    return replace(changed, next_at=comes)
