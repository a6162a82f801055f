"""When a schedule is due next, and which of its ticks fire now: pure functions.

Ticks of the last minute are on time: a fleet needs half of that to notice that the runner with the services is gone.
Earlier ticks were missed, and the schedule says whether none of them is fired, the last one, or all up to a number.
Ticks are searched backwards from now, in windows that double, so a schedule by the second that slept for a year costs
no more than others.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgspec
from msgspec.structs import replace

from holdfast.ids import InvocationId, derived_id
from holdfast.model.decoding import ahead
from holdfast.schedules.records import CatchUp, Rules, ScheduleRecord
from holdfast.schedules.timing import Schedule as Timing

ON_TIME_SECONDS = 60.0
STALE_SECONDS = 30.0
"""A decision that is older is thrown away: its invocations may have been removed since another runner made it too."""

_FIRST_WINDOW_SECONDS = 60.0
_MAX_ON_TIME = 100


def tick_after(timing: Timing, rules: Rules, through: float) -> float | None:
    """Return the first tick that is later than `through`, within the time that the schedule is for."""
    tick = timing.next_after(begins_after(rules, through))
    if tick is None or (rules.ends_at is not None and tick > rules.ends_at):
        return None
    return tick


def begins_after(rules: Rules, through: float) -> float:
    """Return `through`, but not before the schedule's start; a tick at the very start counts."""
    return through if rules.starts_at is None else max(through, math.nextafter(rules.starts_at, -math.inf))


def moved(record: ScheduleRecord, now: float, **fields: Any) -> ScheduleRecord:
    """Return the record after a change, with the tick that comes next. `through` never goes back."""
    changed = replace(record, **fields)
    changed = replace(changed, version=record.version + 1, changed_at=now, through=max(record.through, changed.through))
    comes = tick_after(changed.timing, changed.rules, changed.through) if changed.is_active else None
    return replace(changed, next_at=comes)


class Due(msgspec.Struct, frozen=True):
    """The ticks to fire, in order, and the number of skipped ticks up to now (a lower bound, if `more`)."""

    ticks: tuple[float, ...]
    missed: int
    more: bool


def due(record: ScheduleRecord, now: float) -> Due:
    """Decide which ticks of (through, now] fire."""
    if record.next_at is None or record.next_at > now:
        return Due((), 0, False)
    rules = record.rules
    max_ticks = max(rules.catch_up_most, 1) if rules.catch_up is CatchUp.ALL else 0
    ticks, more = _last_ticks(record.timing, rules, record.through, now, max_ticks + _MAX_ON_TIME)
    on_time = [tick for tick in ticks if tick > now - ON_TIME_SECONDS]
    late = ticks[: len(ticks) - len(on_time)]
    if rules.catch_up is CatchUp.LAST and not on_time:
        max_ticks = 1
    fires = late[len(late) - max_ticks :] if max_ticks < len(late) else late
    return Due((*fires, *on_time), len(late) - len(fires), more)


def _last_ticks(timing: Timing, rules: Rules, through: float, now: float, max_ticks: int) -> tuple[list[float], bool]:
    """Return the last ticks of (through, now], up to a number, and whether there are more before them."""
    until = now if rules.ends_at is None else min(now, rules.ends_at)
    bound = begins_after(rules, through)
    window = _FIRST_WINDOW_SECONDS
    while True:
        after = max(bound, until - window)
        ticks = list(timing.ticks(after, until))
        if len(ticks) >= max_ticks or after <= bound:
            return ticks[-max_ticks:], len(ticks) > max_ticks or after > bound
        window *= 2 if ticks else 8


def invocation_id(record: ScheduleRecord, tick: float) -> InvocationId:
    return derived_id("tick", record.uid, repr(float(tick)), at=tick)


def due_at(record: ScheduleRecord, tick: float) -> float:
    """Return when the invocation of a tick is due. The jitter follows from schedule and tick, so all runners agree."""
    if not record.rules.jitter_seconds:
        return tick
    digest = hashlib.sha256(f"{record.uid}:{tick!r}".encode()).digest()
    share = int.from_bytes(digest[:6], "big") / math.ldexp(1, 48)
    return ahead(tick, share * record.rules.jitter_seconds)
