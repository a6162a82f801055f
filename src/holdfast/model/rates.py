"""Rates: how many calls of a key start in a time.

Each key has a bucket, an entry of the store. It holds `burst` starts and gets one more each interval. A claim takes a
start with each call, and a call that finds none waits until one is there. The calls of the next second, at least one
call, wait in the queue, each due when its start comes; the others wait outside it. See decision 0016.

The code at hand, or a change made at run time, says how large the rate is. A bucket counts used starts, so under a
changed rate they are refilled at the new pace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from holdfast.clock import format_duration, length_of
from holdfast.errors import CorruptRecord, UsageError
from holdfast.model.decoding import LATEST, RATE, Count, Moment
from holdfast.model.records import Entry, InvocationRecord, entry_reader
from holdfast.model.status import Status

AHEAD_SECONDS = 1.0  # how much of what waits is in the queue, each call due at its start
GUARD_SECONDS = 0.05  # between a claim and the start of its code, for which starts are kept apart
MAX_LIMIT = 10_000
MAX_COUNT = 1_000_000
MAX_BURST = 100_000
LONGEST_SECONDS = 366 * 86_400.0
KEEP_SECONDS = 3600.0  # that a bucket is kept after it is full again
_MARK = "|"  # keys of limits begin with the name of a task, which has no vertical bar
_MAX_LAST = 3
_MAX_RELEASED = 100  # by one claim, of one key
_SHORT = {"s": "1s", "m": "1m", "h": "1h", "d": "1d"}


class Rate(msgspec.Struct, frozen=True):
    """At most `count` starts in `seconds`, evenly, and up to `burst` of them at once. A burst that `is_given` stays
    when the rate is changed at run time; another follows the rate.
    """

    count: int
    seconds: float
    burst: int
    waits: bool = True
    is_given: bool = False

    @property
    def interval(self) -> float:
        return self.seconds / self.count

    @property
    def guard(self) -> float:
        return min(GUARD_SECONDS, self.burst * self.interval / 4)

    def __str__(self) -> str:
        unit = next((short for short, length in _SHORT.items() if length_of("rate", length) == self.seconds), None)
        return f"{self.count}/{unit or format_duration(self.seconds)}"


def rate_of(text: object, burst: object = None, *, waits: bool = True) -> Rate:
    """Return the rate that a text such as "100/m" or "5/10s" means. Raises `UsageError`."""
    found = re.fullmatch(r"\s*([0-9]{1,9})\s*/\s*(\S.*?)\s*", text) if isinstance(text, str) else None
    if found is None:
        raise UsageError(f'rate={text!r:.80}: expected calls and a time, such as "100/m", "5/10s" or "1000/h"')
    try:
        count, seconds = int(found[1]), length_of("rate", _SHORT.get(found[2], found[2]))
    except UsageError as error:
        raise UsageError(f'rate={text!r:.80}: {found[2]!r:.40} is no time; write it like "100/m" or "5/10s"') from error
    if not 1 <= count <= MAX_COUNT or not 0.001 <= seconds <= LONGEST_SECONDS:
        raise UsageError(f"rate={text!r:.80}: expected 1 to {MAX_COUNT:,} calls in a time from 1ms to 366d")
    is_given = burst is not None
    if burst is None:
        burst = max(1, min(MAX_BURST, -int(-count // max(seconds, 1.0))))  # what one second brings
    if type(burst) is not int or not 1 <= burst <= MAX_BURST:
        raise UsageError(f"burst={burst!r:.80}: expected a whole number from 1 to {MAX_BURST:,}")
    return Rate(count, seconds, burst, waits, is_given)


def rate_key(name: str, digest: str = "") -> str:
    """Return the key of a rate: of a task, or of a name that tasks share, or of its calls with this digest."""
    return f"{_MARK}{name}|{digest}" if digest else f"{_MARK}{name}"


def is_rate_key(key: str) -> bool:
    return key.startswith(_MARK)


def name_of_rate(key: str) -> str:
    """Return the task, or the shared name, of a rate's key."""
    return key[1:].partition("|")[0]


def rate_for(record: InvocationRecord, rates: Mapping[str, Rate]) -> Rate | None:
    """Return the rate that the next claim of an invocation is under. A run that has started goes on as it is."""
    if record.terms.rate_key is None or (record.run is not None and record.epoch > 0):
        return None
    return rates.get(record.task)


# --- buckets


class Bucket(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is left of a rate. `full_at` is when no start is missing; it may be over. `since` is when it was last full.

    `ahead` is the latest start that was given to a call in the queue; `waiting`: more calls wait outside the queue.
    """

    full_at: Moment
    at: Moment  # of the last start
    since: Moment
    interval: Annotated[float, Meta(gt=0, le=LONGEST_SECONDS)]
    burst: Annotated[int, Meta(ge=1, le=MAX_BURST)]
    text: str = ""
    taken: Count = 0
    ahead: Moment | None = None
    waiting: bool = False
    last: tuple[tuple[str, Moment], ...] = ()  # the last calls that took a start, and when

    def under(self, rate: Rate) -> Bucket:
        """Return the bucket under a rate: the starts that were used come back at the pace of that rate.

        A larger burst begins without its new starts. Else two runners that know different rates, as during a deploy,
        would fill the bucket each time they take turns.
        """
        if (rate.interval, rate.burst) == (self.interval, self.burst):
            return self
        missing = max(0.0, self.full_at - self.at) / self.interval
        if self.taken:
            missing += max(0, rate.burst - self.burst)
        full_at = min(self.at + min(missing, rate.burst) * rate.interval, LATEST)
        ahead = None if self.ahead is None else min(self.ahead, self.at + rate.interval)
        since = self.since if self.full_at <= self.at else min(self.since, full_at)
        return replace(
            self, full_at=full_at, interval=rate.interval, burst=rate.burst, text=str(rate), ahead=ahead, since=since
        )

    @property
    def guard(self) -> float:
        return min(GUARD_SECONDS, self.burst * self.interval / 4)

    def next_at(self) -> float:
        """Return from when on the next start is allowed; it may be over."""
        earliest = self.full_at - (self.burst - 1) * self.interval
        return earliest if earliest <= self.since + _ROUNDING else earliest + self.guard

    def left(self, at: float) -> int:
        """Return how many starts are allowed at once."""
        if at + _ROUNDING < self.next_at():
            return 0
        return max(1, min(self.burst, int((at - self.full_at) / self.interval + self.burst + 1e-6)))

    def start(self, id: str, at: float, *, is_expected: bool = True) -> Bucket | None:
        """Return the bucket after a start at this time; None if none is left. A call that was never put off (not
        `is_expected`) takes no start that a queued call is due for. It takes none while others wait.
        """
        if at + _ROUNDING < self.next_at():
            return None
        ahead = self.ahead
        if not is_expected and not self.has_nobody():
            ahead = self.spot()
        if not is_expected and (self.waiting or at + _ROUNDING < (ahead or at)):
            return None
        is_full = self.full_at + self.guard <= at or self.taken == 0
        return replace(
            self,
            full_at=min(max(self.full_at, at) + self.interval, LATEST),
            at=max(self.at, at),
            since=at if is_full else self.since,
            taken=self.taken + 1,
            ahead=ahead,
            last=((id, at), *self.last)[:_MAX_LAST],
        )

    def spot(self) -> float:
        """Return the next start that no call in the queue is due for."""
        free = self.next_at()
        return free if self.ahead is None or self.ahead + _ROUNDING < free else self.ahead + self.interval

    def has_nobody(self) -> bool:
        """Return whether no call in the queue is due for the next start."""
        return self.ahead is None or self.ahead + _ROUNDING < self.next_at()

    def stalled_at(self) -> float:
        """Return from when on a waiter should long be on its way, if nothing has happened since."""
        return max(self.next_at(), self.ahead or self.at) + AHEAD_SECONDS


_ROUNDING = 1e-6  # of moments, in seconds: a call is due at its very start
bucket_of = entry_reader(Bucket, RATE, named="rate")


def new_bucket(rate: Rate, at: float) -> Bucket:
    return Bucket(full_at=at, at=at, since=at, interval=rate.interval, burst=rate.burst, text=str(rate))


def _empty(rate: Rate, at: float) -> Bucket:
    """Return the bucket in the place of a damaged one: as if all starts had just been used."""
    full = new_bucket(rate, at)
    return replace(full, full_at=at + rate.burst * rate.interval, since=at - rate.interval, taken=1, waiting=True)


class RateBuckets:
    """The buckets that a claim looks at, looked up once for each key, then kept up to date.

    `look` returns the entry of a key; a store that reads many at once fills `entries` before.
    """

    def __init__(self, app: str, at: float, look: Callable[[str], Entry | None]) -> None:
        self._app = app
        self._at = at
        self._look = look
        self._entries: dict[str, Entry | None] = {}
        self._before: dict[str, Bucket] = {}
        self._now: dict[str, Bucket] = {}
        self.short: set[str] = set()  # keys that had a call without a start

    def of(self, key: str, rate: Rate) -> Bucket:
        if key not in self._now:
            entry = self._entries[key] = self._look(key)
            try:
                bucket = new_bucket(rate, self._at) if entry is None else bucket_of(entry)
            except CorruptRecord:
                bucket = _empty(rate, self._at)
            self._before[key], self._now[key] = bucket, bucket.under(rate)
        return self._now[key]

    def start(self, key: str, rate: Rate, record: InvocationRecord) -> bool:
        """Take a start for a call, if one is left."""
        after = self.of(key, rate).start(record.id, self._at, is_expected=record.status is Status.REROUTED)
        if after is not None:
            self._now[key] = after
        return after is not None

    def due_at(self, key: str, rate: Rate) -> float | None:
        """Return when a call that finds no start left falls due; None: it waits outside the queue."""
        bucket = self.of(key, rate)
        spot = bucket.spot()
        self.short.add(key)
        if not bucket.waiting and (bucket.has_nobody() or spot <= self._at + AHEAD_SECONDS):
            self._now[key] = replace(bucket, ahead=min(spot, LATEST))
            return min(spot, LATEST)
        self._now[key] = replace(bucket, waiting=True)
        return None

    def free_spots(self) -> list[tuple[str, tuple[float, ...]]]:
        """Return by key when waiters that now go back to the queue fall due."""
        found = []
        for key, bucket in self._now.items():
            dues: list[float] = []
            while bucket.waiting and len(dues) < _MAX_RELEASED:
                spot = bucket.spot()
                if spot > self._at + AHEAD_SECONDS and not bucket.has_nobody():
                    break
                bucket = replace(bucket, ahead=min(spot, LATEST))
                dues.append(min(spot, LATEST))
            if dues:
                found.append((key, tuple(dues)))
        return found

    def released(self, key: str, dues: Sequence[float], gone: int) -> None:
        """Note how many waiters have `gone` back to the queue: fewer than `dues`, if no more wait."""
        bucket = self._now[key]
        self._now[key] = replace(bucket, ahead=dues[gone - 1] if gone else bucket.ahead, waiting=gone == len(dues))
        if gone:
            self.short.add(key)

    def next_at(self) -> float | None:
        """Return when the first of the calls is due that found no start left, or were let go on."""
        return min([self._now[key].next_at() for key in self.short], default=None)

    def changed(self) -> list[tuple[Entry, Entry | None]]:
        """Return the entries to write, each with the version that it replaces."""
        found = []
        for key, bucket in self._now.items():
            if bucket != self._before[key]:
                found.append((entry_of_bucket(self._app, key, bucket, self._entries[key]), self._entries[key]))
        return found

    def forget(self, keys: Iterable[str]) -> None:
        """Forget these buckets: another claimer has written them since they were read."""
        for key in keys:
            self.short.discard(key)
            for known in (self._entries, self._before, self._now):
                known.pop(key, None)

    def has(self, key: str | None) -> bool:
        return key in self._now

    def wrote(self, entries: Iterable[Entry]) -> None:
        """Note that these entries are stored: what follows builds on them."""
        for entry in entries:
            self._entries[entry.name], self._before[entry.name] = entry, self._now[entry.name]


def entry_of_bucket(app: str, key: str, bucket: Bucket, before: Entry | None) -> Entry:
    return Entry(
        app=app,
        kind=RATE,
        name=key,
        body=msgspec.json.encode(bucket),
        version=1 if before is None else before.version + 1,
        keep_until=min(max(bucket.full_at, bucket.ahead or 0.0) + KEEP_SECONDS, LATEST),
    )


# --- changes at run time


CHANGE = "limit"


class LimitChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What holds for a task, or for the name of a shared rate, instead of what is declared, until it is cleared."""

    at: Moment
    by: str
    reason: str = ""
    limit: Annotated[int, Meta(ge=1, le=MAX_LIMIT)] | None = None
    rate: str | None = None
    burst: Annotated[int, Meta(ge=1, le=MAX_BURST)] | None = None

    def rate_after(self, declared: Rate) -> Rate:
        """Return the rate that this change makes of the declared one."""
        if self.rate is None and self.burst is None:
            return declared
        if self.rate is None:
            return replace(declared, burst=self.burst or declared.burst)
        burst = declared.burst if self.burst is None and declared.is_given else self.burst
        return rate_of(self.rate, burst, waits=declared.waits)


def _check_change(change: LimitChange) -> None:
    if change.rate is not None:
        rate_of(change.rate, change.burst)


change_in = entry_reader(LimitChange, CHANGE, named="limit change", check=_check_change)


# --- words


def shown_key(key: str) -> str:
    """Return the key of a limit or rate for people: the name, and the beginning of the digest if it has one."""
    name, _, digest = key.removeprefix(_MARK).partition("|")
    return f"{name}|{digest[:8]}" if digest else name


WAITS_FOR_START = "it waits for a start"


def why_waits(key: str, rate: Rate) -> str:
    return f"{WAITS_FOR_START} under the rate {rate} of {shown_key(key)}"


def why_over(key: str, rate: Rate) -> str:
    return f"the rate {rate} of {shown_key(key)} has no start left, and it is not to wait"
