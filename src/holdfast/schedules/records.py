"""A schedule as it is stored: when, what, and how far it has come.

Which instants are ticks follows from the timing alone. Progress is one number, `through`: every
tick up to it has been decided, and fired or not. It only grows, whatever happens to the schedule, so no tick is decided
twice; `next_at`, the first tick after it, is kept beside it because the store searches for it.

The `uid` is made once, when a schedule is first stored under its name. A tick's invocation has an id made of the uid
and the instant: the first insert fires the tick, and inserting it again does nothing.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

import msgspec

from holdfast.codec import Payload
from holdfast.ids import InvocationId
from holdfast.model.decoding import Count, Moment, Seconds
from holdfast.model.records import Entry, digests_in, entry_reader
from holdfast.model.records import StoredCall as StoredCall  # of every tick
from holdfast.model.records import call_like as call_like
from holdfast.model.records import invocation_of as invocation_of
from holdfast.schedules.timing import Cron, cron
from holdfast.schedules.timing import Schedule as Timing


class Overlap(StrEnum):
    """What a tick does while the invocation of the previous tick has not ended."""

    ALLOW = "allow"
    SKIP = "skip"
    QUEUE = "queue"
    CANCEL = "cancel"


class CatchUp(StrEnum):
    """Which ticks of a time without a runner are fired afterwards."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


class PreparedCall(NamedTuple):
    """A call to be stored with a schedule, and the large arguments that it refers to: they are kept before it."""

    call: StoredCall
    payloads: tuple[Payload, ...] = ()


class Rules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How ticks are treated."""

    overlap: Overlap = Overlap.ALLOW
    catch_up: CatchUp = CatchUp.LAST
    catch_up_most: Count = 100  # with ALL: the last ticks that are kept
    jitter_seconds: Seconds = 0.0
    starts_at: Moment | None = None
    ends_at: Moment | None = None
    unique: bool = False  # no tick while the invocation of another still waits for its first start


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    at: Moment
    by: str = ""
    why: str = ""


class Progress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outcome of the ticks so far. For people; decisions use only `last_id`, for the overlap."""

    last_tick: Moment | None = None
    last_id: InvocationId | None = None
    fired: Count = 0
    skipped: Count = 0  # because of the overlap
    missed: Count = 0  # without a runner, and not to be caught up
    queued: tuple[Moment, ...] = ()  # ticks that wait for the end of the one before


class ScheduleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as it is stored. `timing` says when, `call` what, `rules` how, `progress` the outcome so far."""

    app: str
    name: str
    uid: str
    timing: Timing
    call: StoredCall
    through: Moment
    next_at: Moment | None  # None: nothing will come, or not now (paused, retired, over)
    rules: Rules = Rules()
    declared: bool = False  # in code, so that it is retired when no code declares it any more
    module_tasks: tuple[str, ...] = msgspec.field(
        default=(), name="beside"
    )  # other tasks of the declaring module: a runner that knows one has the module
    pause: Pause | None = None
    retired_at: Moment | None = None
    progress: Progress = Progress()
    created_at: Moment = 0.0
    changed_at: Moment = 0.0
    version: Count = 1

    @property
    def is_active(self) -> bool:
        return self.pause is None and self.retired_at is None


KIND = "schedule"
_QUEUE_SECONDS = 1.0  # between looks whether the invocation of the tick before has ended


def to_entry(record: ScheduleRecord) -> Entry:
    due_at = record.next_at
    if record.progress.queued and record.is_active:
        due_at = min(record.changed_at + _QUEUE_SECONDS, math.inf if due_at is None else due_at)
    body = msgspec.json.encode(record)
    payloads = digests_in(record.call.arguments)
    return Entry(
        app=record.app,
        kind=KIND,
        name=record.name,
        body=body,
        version=record.version,
        due_at=due_at,
        payloads=payloads,
    )


def _check(record: ScheduleRecord) -> None:
    if isinstance(record.timing, Cron):  # a newer host may know more zones, and a newer version more expressions
        cron(record.timing.expression, timezone=record.timing.timezone)


from_entry = entry_reader(ScheduleRecord, KIND, check=_check)
