"""Which ticks of a schedule fire now: one pure function.

On time are the ticks of the last minute; it takes a fleet half of that to notice that the runner that had the services
is gone. Earlier ones were missed, and the schedule says what becomes of those: none is fired, the last one, or all of
them up to a number. Ticks are looked for backwards from now, in windows that double, so that a schedule by the second
that slept for a year costs no more than one that did not.
"""

from __future__ import annotations

import hashlib
import math

import msgspec

from holdfast.ids import InvocationId, derived_id
from holdfast.lifecycle.decoding import ahead
from holdfast.lifecycle.schedules import CatchUp, Rules, ScheduleRecord, begins_after
from holdfast.schedules.timing import Schedule as Timing

ON_TIME_SECONDS = 60.0
STALE_SECONDS = 30.0
"""A decision that is older is thrown away: its invocations may have been removed since somebody else made it too."""

_FIRST_WINDOW_SECONDS = 60.0
_MOST_ON_TIME = 100


class Due(msgspec.Struct, frozen=True):
    """The ticks to fire, in order, and how many of those up to now are not fired (at least so many, if `more`)."""

    ticks: tuple[float, ...]
    missed: int
    more: bool


def due(record: ScheduleRecord, now: float) -> Due:
    """What of (through, now] fires."""
    if record.next_at is None or record.next_at > now:
        return Due((), 0, False)
    rules = record.rules
    most = max(rules.catch_up_most, 1) if rules.catch_up is CatchUp.ALL else 0
    ticks, more = _last_ticks(record.timing, rules, record.through, now, most + _MOST_ON_TIME)
    on_time = [tick for tick in ticks if tick > now - ON_TIME_SECONDS]
    late = ticks[: len(ticks) - len(on_time)]
    if rules.catch_up is CatchUp.LAST and not on_time:
        most = 1
    fires = late[len(late) - most :] if most < len(late) else late
    return Due((*fires, *on_time), len(late) - len(fires), more)


def _last_ticks(timing: Timing, rules: Rules, through: float, now: float, most: int) -> tuple[list[float], bool]:
    """The last ticks of (through, now], at most so many, and whether there are more before them."""
    until = now if rules.ends_at is None else min(now, rules.ends_at)
    bound = begins_after(rules, through)
    window = _FIRST_WINDOW_SECONDS
    while True:
        after = max(bound, until - window)
        ticks = list(timing.ticks(after, until))
        if len(ticks) >= most or after <= bound:
            return ticks[-most:], len(ticks) > most or after > bound
        window *= 2 if ticks else 8


def invocation_id(record: ScheduleRecord, tick: float) -> InvocationId:
    return derived_id("tick", record.uid, repr(float(tick)), at=tick)


def due_at(record: ScheduleRecord, tick: float) -> float:
    """When the invocation of a tick is due: the jitter depends on schedule and tick alone, so all agree on it."""
    if not record.rules.jitter_seconds:
        return tick
    digest = hashlib.sha256(f"{record.uid}:{tick!r}".encode()).digest()
    share = int.from_bytes(digest[:6], "big") / math.ldexp(1, 48)
    return ahead(tick, share * record.rules.jitter_seconds)
