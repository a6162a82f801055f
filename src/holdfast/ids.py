"""Identifiers: sortable where they are made, deterministic where a duplicate must be impossible.

An id is 26 lower-case characters of Crockford's base 32: 48 bits of milliseconds, then 80 bits that grow by a random
step within one millisecond. So ids of one process are strictly increasing, and ids of several processes sort by time to
the millisecond. That keeps a queue first-in-first-out without a counter in the store. `derived_id` has the same shape
but depends only on its arguments: two processes that decide the same thing insert the same id, and the insert is the
claim.
"""

from __future__ import annotations

import hashlib
import random
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, NewType

from holdfast.clock import Clock

if TYPE_CHECKING:
    InvocationId = NewType("InvocationId", str)
    """The id of an invocation. A text is a sequence of texts, so where many ids are expected, a lone one would pass for
    its letters. It is no sequence of `InvocationId`, so mypy refuses it there.
    """
else:
    InvocationId = str  # a name for readers and for mypy; at run time it costs nothing

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [high + low for high in ALPHABET for low in ALPHABET]
_FORTY_BITS = (1 << 40) - 1
_RANDOM_BITS = 80
_MAX_STEP_BITS = 48  # leaves 2^32 ids in one millisecond before the random part could overflow
LENGTH = 26
_PATIENCE_SECONDS = 1.0


def _encode(number: int) -> InvocationId:
    """Return a 130-bit number as 26 characters, most significant first."""
    high, low = number >> 40 & _FORTY_BITS, number & _FORTY_BITS  # small numbers are shifted faster
    return InvocationId(f"{_time_part(number >> _RANDOM_BITS)}{_eight(high)}{_eight(low)}")


def _eight(number: int) -> str:
    return _PAIRS[number >> 30] + _PAIRS[number >> 20 & 1023] + _PAIRS[number >> 10 & 1023] + _PAIRS[number & 1023]


@lru_cache(maxsize=4)
def _time_part(milliseconds: int) -> str:
    """Return the first 10 characters, which many ids share."""
    return _PAIRS[milliseconds >> 40 & 1023] + _eight(milliseconds & _FORTY_BITS)


class Ids:
    """Makes ids. One per app; safe to call from any thread."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._last = 0
        self._lock = threading.Lock()

    def new(self) -> InvocationId:
        """Return a new id, greater than every id made here before, even if the clock was set back."""
        milliseconds = int(self._clock.now() * 1000)
        # The lock is for the order only: if a signal handler keeps a thread from letting go of it, others go on.
        locked = self._lock.acquire(False) or self._lock.acquire(timeout=_PATIENCE_SECONDS)
        try:
            fresh = (milliseconds << _RANDOM_BITS) | self._rng.getrandbits(_RANDOM_BITS - 1)
            self._last = last = max(fresh, self._last + 1 + self._rng.getrandbits(_MAX_STEP_BITS))
        finally:
            if locked:
                self._lock.release()
        return _encode(last)

    def operation(self) -> str:
        """Return an operation id: unique, not sortable, short, because every history entry carries one."""
        return f"{self._rng.getrandbits(64):016x}"


def derived_id(*parts: str, at: float | None = None) -> InvocationId:
    """Return the id that follows from `parts` alone. The lengths keep ("a", "b") and ("ab",) apart.

    With `at`, the id sorts among the ids that were made at that time.
    """
    digest = hashlib.sha256("".join(f"{len(part)}:{part}" for part in parts).encode()).digest()
    number = int.from_bytes(digest[:16], "big")
    if at is not None:
        milliseconds = min(max(int(at * 1000), 0), (1 << 48) - 1)
        number = (milliseconds << _RANDOM_BITS) | (number & ((1 << _RANDOM_BITS) - 1))
    return _encode(number)


_NUMBER_LENGTH = 6
MOST_NUMBERED = 1 << 30
_MILLISECONDS_LENGTH = 10


def numbered_id(group: str, number: int) -> InvocationId:
    """Return the id of a member of a group, which sorts by its number. The group's own id has the number 0."""
    high, low = number >> 20 & 1023, number & (1 << 20) - 1
    return InvocationId(group[:-_NUMBER_LENGTH] + _PAIRS[high] + _PAIRS[low >> 10] + _PAIRS[low & 1023])


def number_of(id: str) -> int:
    """Return the number that a member of a group with this id has."""
    return _decode(id[-_NUMBER_LENGTH:]) if is_id(id) else 0


def _decode(text: str) -> int:
    number = 0
    for character in text:
        number = number << 5 | ALPHABET.index(character)
    return number


def made_at(id: str) -> float:
    """Return the time that the id sorts at, seconds since the epoch; 0 for what is no id."""
    return _decode(id[:_MILLISECONDS_LENGTH]) / 1000 if is_id(id) else 0.0


def first_at(at: float) -> InvocationId:
    """Return the id before all that sort at that time or later."""
    return _encode(min(max(int(at * 1000), 0), (1 << 48) - 1) << _RANDOM_BITS)


def is_id(text: str) -> bool:
    return len(text) == LENGTH and all(character in ALPHABET for character in text)
