"""Ends what runs for too long, and what somebody has cancelled, as far as that is possible.

Whoever is cancelled is asked first: coroutines by a CancelledError, all others by their context. When the grace is
over, or the timeout of an attempt, the call is ended by force: a process is killed, a coroutine is cancelled (once
more), an exception is raised in a thread. What still runs a moment later cannot be stopped: it is given up, its record
says so, and its place stays taken until it comes to an end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.clock import format_duration
from holdfast.codec import Codec
from holdfast.errors import TimedOut
from holdfast.execution import context
from holdfast.execution.call import Interrupted, Outcome, Raised
from holdfast.lifecycle.records import InvocationRecord
from holdfast.lifecycle.retries import exception_names

STUBBORN_SECONDS = 1.0  # for what is ended by force
_GAVE_WAY = frozenset(
    {
        "asyncio.exceptions:CancelledError",
        "concurrent.futures._base:CancelledError",
        "holdfast.errors:InvocationCancelled",
        "holdfast.execution.throwing:Stopped",
    }
)

Tell = Callable[[str, str], None]
GiveUp = Callable[[str, Outcome], None]


class Stopping:
    """`tell` says one of "cancel", "soften", "force" to the place of an invocation; `give_up` goes on without it."""

    def __init__(self, tell: Tell, give_up: GiveUp) -> None:
        self._tell = tell
        self._give_up = give_up
        self._codec = Codec()
        self._late: set[str] = set()
        self._forced: set[str] = set()
        self._asked: set[str] = set()
        self.watched: dict[str, list[asyncio.TimerHandle]] = {}

    def watch(self, record: InvocationRecord) -> None:
        """It begins."""
        terms, id = record.terms, record.id
        if terms.soft_timeout is not None:
            self._later(id, terms.soft_timeout, lambda: self._tell("soften", id))
        if terms.timeout is not None:
            self._later(id, terms.timeout, lambda: self._time_out(record))

    def cancel(self, record: InvocationRecord, grace_seconds: float) -> None:
        """It runs, and is asked to end within that time."""
        id = record.id
        self._silence(id)
        self._asked.add(id)
        context.cancelled.add(id)
        self._tell("cancel", id)
        self._later(id, grace_seconds, lambda: self._force(id, Interrupted(_STILL_RUNS)))

    def _time_out(self, record: InvocationRecord) -> None:
        self._late.add(record.id)
        self._force(record.id, self._timed_out(record, f"; {_STILL_RUNS}"))

    def _force(self, id: str, in_the_end: Outcome) -> None:
        self._forced.add(id)
        self._tell("force", id)
        self._later(id, STUBBORN_SECONDS, lambda: self._give_up(id, in_the_end))

    def _later(self, id: str, seconds: float, what: Callable[[], None]) -> None:
        timer = asyncio.get_running_loop().call_later(seconds, what)
        self.watched.setdefault(id, []).append(timer)

    def _silence(self, id: str) -> None:
        for timer in self.watched.pop(id, ()):
            timer.cancel()

    def ended(self, record: InvocationRecord, outcome: Outcome) -> Outcome:
        """What the outcome of something that was watched means."""
        id = record.id
        is_late, is_forced, is_asked = id in self._late, id in self._forced, id in self._asked
        self.forget(id)
        context.cancelled.discard(id)
        stopped = is_forced or (isinstance(outcome, Raised) and not _GAVE_WAY.isdisjoint(outcome.kinds))
        if is_asked and isinstance(outcome, Raised) and stopped:
            return Interrupted(_FORCED if is_forced else "")
        if is_asked and isinstance(outcome, Interrupted) and not outcome.how:
            return Interrupted(_FORCED if is_forced else "the runner stopped")
        if is_late and not is_asked and isinstance(outcome, Interrupted | Raised):
            return self._timed_out(record)
        return outcome

    def forget(self, id: str) -> None:
        self._silence(id)
        self._late.discard(id)
        self._forced.discard(id)
        self._asked.discard(id)

    def close(self) -> None:
        for id in tuple(self.watched):
            self.forget(id)

    def _timed_out(self, record: InvocationRecord, more: str = "") -> Raised:
        return timed_out(record, self._codec, more)


def timed_out(record: InvocationRecord, codec: Codec, more: str = "") -> Raised:
    """Return what it means that the time of an attempt was over."""
    why = f"timed out after {format_duration(record.terms.timeout or 0.0)}{more}"
    error = codec.encode_error(TimedOut(f"{record.task} {record.id} {why}", invocation_id=record.id))
    return Raised(error, f"TimedOut: {why}", kinds=exception_names(TimedOut))


_STILL_RUNS = "its code could not be stopped and still runs"
_FORCED = "its code did not end by itself and was stopped"
