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
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from holdfast.codec import Payload
from holdfast.ids import InvocationId
from holdfast.model.decoding import Count, Moment, Number, Seconds, ahead
from holdfast.model.records import (
    PLAIN,
    Entry,
    InvocationRecord,
    RunState,
    Terms,
    digests_in,
    entry_reader,
    registered,
)
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


class StoredCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What every tick submits."""

    task: str
    arguments: bytes
    queue: str = "default"
    tags: tuple[str, ...] = ()
    priority: Number = 0
    at_most_once: bool = False
    limit_key: str | None = None
    dedup_key: str | None = msgspec.field(default=None, name="twin")
    expires_seconds: Seconds | None = None  # in its terms there is no moment, since every tick has another
    terms: Terms = PLAIN
    is_run: bool = False  # of a workflow
    event: str = ""  # instead of a task: an event of that name, for a trigger that wants more than the tick


class PreparedCall(NamedTuple):
    """A call to be stored with a schedule, and the large arguments that it refers to: they are kept before it."""

    call: StoredCall
    payloads: tuple[Payload, ...] = ()


def call_like(record: InvocationRecord, expires_seconds: float | None) -> StoredCall:
    """Return the call that makes invocations like this one."""
    shared = {name: getattr(record, name) for name in _SHARED}
    return StoredCall(**shared, expires_seconds=expires_seconds, is_run=record.run is not None)


def invocation_of(call: StoredCall, *, operation: str, why: str, **fields: Any) -> InvocationRecord:
    """Return a new invocation that makes this call. `fields` are what the call does not say, and what it says
    differently.
    """
    run = {"run": RunState()} if call.is_run else {}
    record = InvocationRecord(**{name: getattr(call, name) for name in _SHARED} | run | fields)
    if call.expires_seconds is not None:
        start_by = ahead(max(record.created_at, record.due_at), call.expires_seconds)
        record = replace(record, start_by=start_by, terms=replace(record.terms, start_by=start_by))
    return registered(record, operation=operation, at=record.created_at, why=why)


# What calls and invocations have in common.
_SHARED = ("task", "arguments", "queue", "tags", "priority", "at_most_once", "limit_key", "dedup_key", "terms")


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
