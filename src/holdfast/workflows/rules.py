"""Replay: match the recorded events of a run with the calls that its body makes. Pure: no clock, no I/O.

A body makes calls (steps, waits, children), each with an id: ``charge#2`` is the second call of `charge`, and
``charge@x`` the call with ``key="x"``. A recorded event names the call that it answers. Events are taken in the order
of the log, one at a time, and the body runs until it is quiet after each; so it makes the same calls as when the log
was written, unless its code has changed.

- An event that answers an open call is delivered.
- An event of a call that the body has given up is dropped: two events of one page are delivered one after the other,
  and the body may have cancelled the second call after the first.
- An event that no open call asked for is a mismatch, which names both calls. Calls with a key are the exception: they
  may be added, moved and removed. If the next event fits no open call and a keyed call is open, the keyed call is
  answered first: from its place further down in the log, or by running it (`Perform`).
- Other arguments than the recorded ones are a mismatch if the code is the same: the order of a set, say, has changed
  with the hash seed. If the code has changed, the recorded result counts, and a warning says so.
- Timers are compared by kind and by deadline or length: numbers alone would let a new timeout take the place of a
  recorded sleep. The recorded deadline counts: a keyed step that was added, moved or removed moves the body's time.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from holdfast.clock import format_duration
from holdfast.model.explain import moment_in_words
from holdfast.model.names import unversioned
from holdfast.workflows.events import (
    CANCEL_REQUESTED,
    CARRIED,
    DELIVERED,
    ENDS,
    GIVEN_UP,
    HOOK_CONFLICT,
    HOOK_CREATED,
    HOOK_DISPOSED,
    KEEPS_OPEN,
    PATCHED,
    STEP_CREATED,
    STEP_RETRYING,
    STEP_STARTED,
    STREAM_OPENED,
    STREAM_WRITTEN,
    WAIT_COMPLETED,
    WAIT_CREATED,
    WOKEN,
    Event,
)

COPIED, DERIVED = "copied", "derived"  # what the creation of a hook says about itself (`why`)
SameArguments = Callable[[bytes, bytes], bool]
_MOST_NAMED = 3  # of open calls
_CLOCK_SECONDS = 1e-3  # deadlines are computed from recorded times, so they are the same but for rounding


class OpenCall(msgspec.Struct, kw_only=True):
    """A call of the body that has no answer yet."""

    id: str
    name: str
    where: str = ""
    data: bytes = b""  # encoded arguments; the name of a hook
    due: float | None = None  # of a wait
    seconds: float | None = None  # from the body's time at the call to `due`
    is_keyed: bool = False
    older_names: tuple[str, ...] = ()  # of what is called

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        wait = "" if self.due is None else f" ({_wait(self.name, self.due, self.seconds)})"
        return f"{self.id}{wait}{place}"


class Past(msgspec.Struct):
    """What the log says about a call that is still open when the log ends."""

    created: bool = False
    started_at: float | None = None  # first attempt
    attempts: int = 0  # that were recorded as begun
    failures: int = 0
    retry_at: float | None = None
    child: str = ""
    is_copied: bool = False  # from the log of another run, which this one has forked
    streams: set[str] = msgspec.field(default_factory=set)  # that its attempts have written to


class Deliver(msgspec.Struct, frozen=True):
    """Give this event to the body."""

    event: Event
    keeps_clock: bool = False  # waits are recorded between here and its place, whose deadlines follow from the clock


class Perform(msgspec.Struct, frozen=True):
    """Run this keyed call before replay goes on: the log does not have it."""

    call: str
    keeps_clock: bool = False  # when it ends


class Finished(msgspec.Struct, frozen=True):
    """The log has no more events."""


class Mismatch(msgspec.Struct, frozen=True):
    """The code does not fit the log."""

    why: str


Next = Deliver | Perform | Finished | Mismatch
FINISHED = Finished()


class Replay:
    """The recorded events of a run, and the calls that its body has made so far."""

    def __init__(self, events: Sequence[Event], *, code: str, same: SameArguments) -> None:
        self._events = deque(events)
        self._code = code  # of this runner
        self._same = same
        self._recorded_code = ""
        self.open: dict[str, OpenCall] = {}
        self.past: dict[str, Past] = {}
        self.warnings: list[str] = []
        self.patches: set[str] = {event.name for event in events if event.type == PATCHED}
        self.entries = {event.entry for event in events if event.entry}
        self.children = {event.call: event for event in events if event.type == STEP_CREATED and event.child}
        self._given_up: set[str] = set()
        self.settled: set[str] = set()  # calls that the body gave up, whose end is recorded
        self._early: set[str] = set()  # keyed calls that were answered before their place in the log
        self._keyed_ends = {event.call: event for event in events if event.type in ENDS and "@" in event.call}
        self._keyed_carried = [event for event in events if event.type in CARRIED and "@" in event.call]
        self._said = Counter((event.type, event.data) for event in events if event.type in CARRIED and not event.call)
        self._held: Event | None = None  # an event that waits for a keyed call to be performed
        self._counts: Counter[str] = Counter()
        self._calls_left = sum(1 for event in events if _is_about_call(event))
        self.hooks = {event.call: event for event in events if event.type == HOOK_CREATED}
        self.has_cancel = any(event.type == CANCEL_REQUESTED for event in events)
        self.carried: dict[str, list[Event]] = {}  # what steps have set, by call

    @property
    def is_over(self) -> bool:
        """Return whether nothing is left that a body could get. Takeovers may follow."""
        return not self._calls_left and self._held is None

    @property
    def recorded_code(self) -> str:
        """Return the Python version and fingerprint of the code that wrote the last event that was taken."""
        return self._recorded_code

    @property
    def unsaid(self) -> list[str]:
        """Return the kinds of recorded events that the body has not said again."""
        return sorted(kind for (kind, _), count in self._said.items() if count > 0)

    @property
    def recorded_python(self) -> str:
        return self._recorded_code.partition(" ")[0]

    def number(self, name: str) -> str:
        """Return the id of the next call of that name."""
        self._counts[name] += 1
        return f"{name}#{self._counts[name]}"

    def number_of(self, names: Sequence[str]) -> str:
        """Return the id of the next call that submits the task of these names, the present one first. A version is no
        part of it. If the log has the call under an older name, it has that id.
        """
        known = set(map(unversioned, names))
        for short in [unversioned(name).rpartition(":")[2] for name in names[1:]]:
            made = self.children.get(f"{short}#{self._counts[short] + 1}")
            if made is not None and unversioned(made.name) in known:
                return self.number(short)
        return self.number(unversioned(names[0]).rpartition(":")[2])

    def ahead(self, count: int) -> Iterator[Event]:
        """Return the next events, at most so many."""
        return itertools.islice(self._events, count)

    def opened(self, call: OpenCall) -> None:
        self.open[call.id] = call

    def gave_up(self, id: str) -> None:
        """Note that the body does not wait for this call any more."""
        if self.open.pop(id, None) is not None:
            self._given_up.add(id)

    def has_said(self, event: Event) -> bool:
        """Return whether the log has what the body says now. Each recorded event counts once."""
        known = (event.type, event.data)
        if not self._said[known]:
            return False
        self._said[known] -= 1
        return True

    def answered(self, event: Event) -> None:
        """Note that a live event was delivered."""
        if event.type not in KEEPS_OPEN:
            self.open.pop(event.call, None)

    def next(self) -> Next:
        """Return what comes next. The body is quiet."""
        while self._held is not None or self._events:
            event, self._held = self._pop(), None
            if event.code:
                self._recorded_code = event.code
            if event.type == CANCEL_REQUESTED:
                return Deliver(event)
            if event.type == WOKEN:
                self._woken()
            if event.type == WAIT_COMPLETED and event.why == GIVEN_UP:
                self.settled.add(event.call)
                continue
            if event.call in self._given_up:
                self._note_given_up(event)
                continue
            if not event.call or event.call in self._early:
                continue
            if (call := self.open.get(event.call)) is None:
                if "@" in event.call:
                    self._remember(event)  # of a keyed call that was removed, or is made later
                    continue
                return self._without_call(event)
            if problem := self._compare(call, event):
                return Mismatch(problem + self._on_python())
            self._remember(event)
            if event.type in DELIVERED:
                self.answered(event)
                self._keyed_ends.pop(event.call, None)
                return Deliver(event)
        late = next((call for call in self.open.values() if call.is_keyed and call.id in self._keyed_ends), None)
        if late is not None:  # it was moved behind its place in the log
            return self._answer_early(late)
        return FINISHED

    def _pop(self) -> Event:
        if self._held is not None:
            return self._held
        event = self._events.popleft()
        self._calls_left -= _is_about_call(event)
        return event

    def _without_call(self, event: Event) -> Next:
        self._held = event
        keyed = next((call for call in self.open.values() if call.is_keyed), None)
        if keyed is None:
            return Mismatch(self._nobody_asked(event))
        if keyed.id in self._keyed_ends:
            return self._answer_early(keyed)
        if keyed.id not in self._early:  # an earlier owner may have begun it: behind the events that are left
            self._early.add(keyed.id)
            for later in self._events:
                if later.call == keyed.id:
                    self._remember(later)
        return Perform(keyed.id, self._waits_until(None))

    def _answer_early(self, call: OpenCall) -> Next:
        event = self._keyed_ends.pop(call.id)
        keeps_clock = self._waits_until(event)
        self._early.add(call.id)
        self.carried[call.id] = [carried for carried in self._keyed_carried if carried.call == call.id]
        del self.open[call.id]
        return Deliver(event, keeps_clock)

    def _waits_until(self, end: Event | None) -> bool:
        """Return whether waits are recorded between here and that event, or the end of the log."""
        if self._held is None or (end is not None and not any(event is end for event in self._events)):
            return False  # its place is behind
        ahead = itertools.takewhile(lambda event: event is not end, (self._held, *self._events))
        return any(event.type in (WAIT_CREATED, WAIT_COMPLETED) for event in ahead)

    def _note_given_up(self, event: Event) -> None:
        if event.type in ENDS:
            self.settled.add(event.call)
        else:
            self._remember(event)

    def _woken(self) -> None:
        """Note that the next attempts of steps were not to wait any longer."""
        for past in self.past.values():
            past.retry_at = None

    def _remember(self, event: Event) -> None:
        past = self.past.setdefault(event.call, Past())
        if event.type == STEP_CREATED:
            past.created, past.child = True, event.child
        elif event.type == STEP_STARTED:
            past.started_at = event.at if past.started_at is None else past.started_at
            past.attempts = max(past.attempts + 1, event.attempt)
            past.retry_at = None
        elif event.type == STEP_RETRYING:
            past.failures += 1
            past.retry_at = event.due
        elif event.type == WAIT_CREATED:
            past.created = True
        elif event.type == HOOK_CREATED:
            past.created, past.is_copied = True, event.why == COPIED
        elif event.type == STREAM_OPENED:
            past.streams.add(event.name)
        elif event.type in CARRIED:
            self.carried.setdefault(event.call, []).append(event)

    def _compare(self, call: OpenCall, event: Event) -> str:
        """Return how the recorded call differs from the one that the body has made; empty if it does not."""
        if event.type in (WAIT_CREATED, WAIT_COMPLETED):
            recorded, made = event.due or 0.0, call.due or 0.0
            if event.name == call.name and (_is_same(recorded, made) or _is_same(event.seconds, call.seconds)):
                call.due = event.due  # a keyed step that was added or removed before it has moved the body's time
                return ""
            wait = _wait(event.name, recorded, event.seconds)
            return f"the log has {_described(event)}, a {wait}; the code waits for {call}"
        if event.type in (HOOK_CREATED, HOOK_CONFLICT, HOOK_DISPOSED):
            return _compare_hook(call, event)
        if event.type not in (STEP_CREATED, STREAM_WRITTEN):
            return ""
        if unversioned(event.name) not in map(unversioned, (call.name, *call.older_names)):
            return f"the log has {_described(event)}, a call of {event.name}; the code calls {call.name} as {call}"
        if event.data == call.data or self._same(event.data, call.data):
            return ""
        what = f"{_described(event)} was recorded with other arguments than those of {call}"
        if self._recorded_code == self._code:
            unrecorded = "the order of a set, say, or a function that it calls"
            return f"{what}, by the same body: what it depends on is not recorded ({unrecorded})"
        self.warnings.append(f"{what}; the recorded result counts")
        return ""

    def _nobody_asked(self, event: Event) -> str:
        named = [str(call) for call in itertools.islice(self.open.values(), _MOST_NAMED)]
        more = f" and {len(self.open) - _MOST_NAMED} more" if len(self.open) > _MOST_NAMED else ""
        waits = f"{', '.join(named)}{more}" or "nothing"
        return (
            f"the log has {_described(event)} next ({event.type}), and the code waits for {waits}" + self._on_python()
        )

    def _on_python(self) -> str:
        python = self._code.partition(" ")[0]
        if not self.recorded_python or self.recorded_python == python:
            return ""
        return f"; the log was written on Python {self.recorded_python}, and this is {python}"


def _compare_hook(call: OpenCall, event: Event) -> str:
    if event.type == HOOK_DISPOSED:
        return f"the log disposes of {_described(event)} next, and the code keeps {call}"
    if event.name.encode() == call.data:
        return ""
    what = f"the log has {_described(event)} with another token than {call}"
    if event.type == HOOK_CREATED and event.why == DERIVED:
        return f"{what}: it follows from another hook_secret. Set hook_secret_previous to that, and wake the run"
    return what


def _wait(kind: str, due: float, seconds: float | None) -> str:
    length = "" if seconds is None else f" of {format_duration(seconds)}"
    return f"{kind}{length} until {moment_in_words(due)}"


def _is_same(recorded: float | None, made: float | None) -> bool:
    return recorded is not None and made is not None and abs(recorded - made) <= _CLOCK_SECONDS


def _is_about_call(event: Event) -> bool:
    return bool(event.call) or event.type == CANCEL_REQUESTED


def _described(event: Event) -> str:
    return f"{event.call} at {event.where}" if event.where else event.call
