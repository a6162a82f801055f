"""Claim: a worker takes invocations for its free slots.

One conditional write gives the work to this owner and marks it RUNNING before any user code starts (`Claimer`). If the
answer is lost, the claim is repeated with its own operation id, so that work which was given once is found again.

**Permit.** A runner that cannot write its heartbeat may be dead in the eyes of the others, which then give its work
away. So its workers start nothing when two thirds of the dead-after time have passed since the last heartbeat that was
written, by a clock that counts suspension. Running work goes on: if it was taken, its end is refused. Work of a paused
queue is not started either.

**Demand.** Whether to look. Hints say how many may wait; after a claim that got less than it asked for, nothing is due
until its `next_due_at`. A claim that got all it asked for proves nothing: a submitter that died before its hint leaves
work that no hint counted. So a full claim always looks again: at once if more was announced, else after a second
without another claim, and after two in any case. A lone task costs no look of its own, and many share one. Looks are
due by a clock that is never set, counted from the last look that found less than it asked for.

**Lanes and turns.** Which lanes to ask for: those that the worker serves, without paused queues. Within a queue, order
is by priority, then by due time. Among queues there is none: a worker with more to do than slots takes from each queue
in turn, as many as its weight says. As long as all that waits finds a slot, or a worker knows of one queue only, a
claim is for all lanes at once, and turns cost nothing. After a full claim with more to be had, turns begin: the worker
asks once a second which lanes have work, and each claim is for the queue that has got least so far, at most
four shares to a claim. A queue that has no more to give is left out until there is news of it; an empty one has
saved nothing up. With the first claim for all lanes that gets less than it wanted, turns are over.

**Reserve.** Where a claim costs several round trips, a worker claims ahead: PENDING, or RUNNING if it begins in a
moment. No other worker can run reserved work. So the reserve holds only calls that are expected to start within a
second, by the duration of earlier calls. It gives back work that was reserved for too long.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from holdfast.clock import Clock
from holdfast.crashpoints import crashpoint
from holdfast.errors import StoreError, StoreUnavailable
from holdfast.executors.begun import BegunCalls
from holdfast.ids import InvocationId
from holdfast.model.claims import Claim, Claimed
from holdfast.model.eligibility import Offer, open_lanes
from holdfast.model.limits import Limit
from holdfast.model.queues import queue_in
from holdfast.model.rates import Rate
from holdfast.model.records import ENDED, READY, Hint, InvocationRecord, Serves
from holdfast.runtime.engine import Engine
from holdfast.runtime.hints import Pace
from holdfast.runtime.outage import Outage
from holdfast.runtime.wait import get_readable
from holdfast.telemetry import events

if TYPE_CHECKING:
    from holdfast.runtime.limits import Limits

MANY = 1 << 30
DOUBT_SECONDS = 1.0  # after a claim that got exactly what was announced
MAX_DOUBT_SECONDS = 2.0  # after the first of several
ASK_AGAIN_SECONDS = 1.0
MAX_SHARES = 4
AHEAD_SECONDS = 1.0
AT_ONCE_SECONDS = 0.1
MAX_TIMES = 10  # as many times the slots of the runner
BATCH_SECONDS = 0.05  # of work ahead where a claim is cheap: more would put off calls of a higher priority
KEEP_BATCH_SECONDS = 0.25
KEEP_SECONDS = 2.5  # half of the time after which a claim that does not start counts as lost
_WEIGHT = 0.2  # of the newest call in the average
_MEMORY_SECONDS = 60.0  # a task that has not been seen for so long says nothing about the next claim


class Permit:
    """Allow starts until a moment, by the monotonic clock, except in paused queues, unless the runner revokes it."""

    paused: frozenset[str] = frozenset()
    begun: BegunCalls | None = None  # of a worker process: its runner may revoke what has not begun

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until = float("-inf")
        self._on_grant: list[Callable[[], None]] = []
        self._each: list[Callable[[float], None]] = []
        self._on_pause: list[Callable[[frozenset[str]], None]] = []

    def grant(self, until: float) -> None:
        held = self.holds()
        self._until = max(self._until, until)
        for pass_on in self._each:
            pass_on(self._until)
        if not held and self.holds():
            for callback in self._on_grant:
                callback()

    def pause(self, queues: frozenset[str]) -> None:
        """Pause these queues, and no others."""
        if queues != self.paused:
            self.paused = queues
            for callback in self._on_pause:
                callback(queues)

    def on_pause(self, callback: Callable[[frozenset[str]], None]) -> None:
        """Call this with the paused queues, whenever they change."""
        self._on_pause.append(callback)

    def holds(self) -> bool:
        return self.is_granted() and (self.begun is None or not self.begun.is_revoked)

    def is_granted(self) -> bool:
        """Return whether the runner has lately reached the store. It may have revoked what has not begun."""
        return self._clock.monotonic() < self._until

    def on_grant(self, callback: Callable[[], None]) -> None:
        """Call this when starts are allowed again."""
        self._on_grant.append(callback)

    def on_each_grant(self, pass_on: Callable[[float], None]) -> None:
        """Call this with the moment of each grant."""
        self._each.append(pass_on)


class Unlimited(Permit):
    """A permit without an end: in tests, and for a store that no other process uses."""

    def __init__(self) -> None:
        pass

    def grant(self, until: float) -> None:
        pass

    def holds(self) -> bool:
        return True

    def on_grant(self, callback: Callable[[], None]) -> None:
        pass

    def on_pause(self, callback: Callable[[frozenset[str]], None]) -> None:
        pass


class Claimer:
    """Claim for one owner, under the limits and rates of its tasks."""

    def __init__(self, engine: Engine, outage: Outage, permit: Permit, *, owner: str, limits: Limits) -> None:
        self._engine = engine
        self._store = engine.store
        self._outage = outage
        self._permit = permit
        self._owner = owner
        self.is_bounded = limits.is_bounded
        self._limits = limits if limits.is_bounded else None

    def _now(self) -> float:
        """Return the time that has certainly come: an invocation due by then is not early, whatever
        the clock's error.
        """
        return self._store.now() - self._store.clock_error()

    async def claim(self, lanes: Iterable[str], limit: int, *, start: bool = True, limited: bool = True) -> Claimed:
        """Claim up to `limit` invocations, RUNNING (PENDING, without `start`); without `limited`, only those before the
        first that needs a slot. Waits while the store is away.
        """
        if self._limits is not None and self._permit.holds():
            with contextlib.suppress(StoreError):  # what was known last holds
                await self._limits.refresh()
        claim = Claim(
            app=self._engine.app,
            lanes=tuple(lanes),
            limit=limit,
            owner=self._owner,
            operation=self._engine.ids.operation(),
            at=self._now(),
            start=start,
            limits=self._limits.known if self._limits else {},
            rates=self._limits.rates if self._limits else {},
            limited=limited,
        )

        bounds: list[tuple[str, Limit | Rate]] = [*claim.limits.items(), *claim.rates.items()]
        refusing = [task for task, bound in bounds if not bound.waits]
        away = ""

        async def attempt(again: bool) -> Claimed:
            nonlocal away
            if again and not self._permit.holds():
                raise StoreUnavailable(f"nothing is claimed until the store answers a heartbeat again. {away}")
            wanted = replace(claim, at=self._now(), again=True) if again else claim
            if refusing:
                wanted = replace(wanted, refusal_outboxes=await self._engine.outbox.refusal_outboxes(refusing))
            crashpoint("claim.before")
            try:
                claimed = await self._store.claim(wanted)
            except StoreError as error:
                away = str(error)
                raise
            crashpoint("claim.after")
            return claimed

        claimed = await self._outage.until_answered("looking for work", attempt)
        if claimed.refused or claimed.released:
            hinted = ((ENDED, claimed.refused), (READY, claimed.released))
            self._engine.hub.send(
                *[Hint(kind, tuple(dict.fromkeys(names)), len(names)) for kind, names in hinted if names]
            )
        if claimed.refused:
            self._engine.outbox.ended(claimed.refused)  # a parent may wait for one of them, and triggers
        telemetry = self._engine.telemetry
        if claimed.records and telemetry.wants(events.Claimed):
            telemetry.emit(events.Claimed(self._owner, claimed.records))
        if claimed.refused and telemetry.wants(events.Refused):
            await self._emit_refused(claimed.refused)
        return claimed

    async def _emit_refused(self, ids: Sequence[InvocationId]) -> None:
        """Read and report the invocations that a claim has refused. The claim stands if that fails."""
        try:
            found = await get_readable(self._store, self._engine.app, ids)
        except StoreError as error:
            self._engine.telemetry.emit(events.DutyFailed("worker", "read what was refused", error))
        else:
            refused = tuple(record for record in found if record is not None)
            self._engine.telemetry.emit(events.Refused(refused))


class Demand:
    """Know how many invocations may wait, and when to look. `elapsed` is the loop's time, `now` the store's."""

    def __init__(self, poll_interval_seconds: float, *, doubts: bool = True) -> None:
        self._doubts = doubts
        self._pace = Pace(poll_interval_seconds)
        self.look = True
        self.expected = MANY  # how many invocations are waiting, by the hints
        self.slot_next = False  # what comes next in the queue needs a slot, and is not claimed ahead
        self._next_due: float | None = None
        self._found_all_at = float("-inf")  # when a claim last got less than it asked for
        self._in_doubt: tuple[float, float] | None = None  # the first and the last claim after that, which were full
        self._pause: tuple[int, float] | None = None  # until the next look, and with which trust

    def announce(self, count: int = MANY) -> None:
        """Note that `count` more invocations may be waiting."""
        self.expected += count
        self.look = True

    def anything(self) -> None:
        """Look at the next occasion: how many are waiting is unknown."""
        self.look, self.expected = True, MANY

    def taken(self) -> int:
        """Begin a claim, which sees all that was announced until now. Return how many that is."""
        expected, self.expected, self.look = self.expected, 0, False
        return expected

    def learn(self, turns: Turns, ask: Ask, claimed: Claimed, expected: int, elapsed: float) -> None:
        """Draw conclusions from a claim for the next one."""
        got, wanted = len(claimed.records), ask.max_count
        if claimed.cut:
            self.slot_next = True
            self.announce(max(1, expected - got))
        elif ask.turn is not None:  # of one queue nothing follows for the others, and turns are on since they are full
            turns.took(ask.turn, got)
            self.anything()
        elif got < wanted:
            self._next_due = claimed.next_due_at
            self._found_all_at, self._in_doubt = elapsed, None
            turns.end()
        elif expected > wanted:
            self.announce(expected - wanted)  # there may be more; perhaps a slot has to become free first
            turns.begin()
        else:
            self._in_doubt = (elapsed if self._in_doubt is None else self._in_doubt[0], elapsed)
            turns.end()
        if claimed.start_at is not None:
            self._next_due = min(claimed.start_at, self._next_due or claimed.start_at)
        if got:
            self._pace.quicken()
        self._pause = None

    def pause(self, now: float, elapsed: float, trust: int) -> float:
        """Return the seconds until an unasked look is worthwhile."""
        if self.look:
            return 0.0
        if self._pause is None or self._pause[0] != trust:
            self._pause = (trust, self._pace.pause(trust=trust))
        look_at = self._found_all_at + self._pause[1]
        if self._in_doubt is not None and self._doubts:
            first, last = self._in_doubt
            look_at = min(look_at, first + MAX_DOUBT_SECONDS, last + DOUBT_SECONDS)
        pause = look_at - elapsed
        return max(0.0, pause if self._next_due is None else min(pause, self._next_due - now))


class Ask(NamedTuple):
    """The request of the next claim: up to so many of these lanes, which are one queue's if it is that queue's turn."""

    lanes: Collection[str]
    max_count: int
    turn: Turn | None = None


class Lanes:
    def __init__(self, serves: Serves) -> None:
        self._offer = Offer(serves=serves)
        self._known: set[str] = set()
        self.turns = Turns(serves.weights)

    @property
    def paused(self) -> frozenset[str]:
        return self._offer.paused

    def pause(self, queues: frozenset[str]) -> None:
        """Pause these queues, and no others."""
        self._offer = replace(self._offer, paused=queues)

    def note_work(self, lanes: Iterable[str]) -> list[str]:
        """Note that there may be work in these lanes. Return the lanes from which it may be taken."""
        served = open_lanes(lanes, replace(self._offer, paused=frozenset()) if self._offer.paused else self._offer)
        if not self._known.issuperset(served):
            self._known.update(served)
            self.turns.queues = {queue_in(lane) for lane in self._known}
        accepted = open_lanes(served, self._offer) if self._offer.paused else served
        if self.turns.are_on:
            for lane in accepted:
                self.turns.add(queue_in(lane))
        return accepted

    def know(self, lanes: Iterable[str], now: float) -> None:
        """Note that these lanes have work, and no others."""
        self.turns.know({queue_in(lane) for lane in self.note_work(lanes)}, now)

    def next(self, wanted: int) -> Ask:
        lanes: Collection[str] = open_lanes(self._known, self._offer) if self._offer.paused else self._known
        turn = self.turns.next(wanted)
        if turn is None:
            return Ask(lanes, wanted)
        return Ask([lane for lane in lanes if queue_in(lane) == turn.queue], turn.max_count, turn)


class Turn(NamedTuple):
    """The queue that is next, and how many it may give."""

    queue: str
    max_count: int


class Turns:
    """Let queues take turns. `weights` are those of queues that have another weight than 1."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        self._weights = weights
        self.queues: set[str] = set()  # that are known
        self.are_on = False
        self._got: dict[str, float] = {}  # by queues that have work: how much of it was taken, for its weight
        self._ask_at = 0.0

    def begin(self) -> None:
        """Begin turns: there was more work than could be taken."""
        if not self.are_on and len(self.queues) > 1:
            self.are_on, self._got, self._ask_at = True, {}, float("-inf")

    def end(self) -> None:
        self.are_on = False

    def wants_to_know(self, now: float) -> bool:
        """Return whether to find out which queues have work."""
        return self.are_on and now >= self._ask_at

    def know(self, queues: Collection[str], now: float) -> None:
        """Note that these queues have work, and no others."""
        self._ask_at = now + ASK_AGAIN_SECONDS
        self._got = {queue: got for queue, got in self._got.items() if queue in queues}
        for queue in queues:
            self.add(queue)

    def add(self, queue: str) -> None:
        """Note that there is news of this queue."""
        if self.are_on and queue not in self._got:
            self._got[queue] = min(self._got.values(), default=0.0)

    def next(self, wanted: int) -> Turn | None:
        """Return the next turn; None: claim from all queues."""
        if not self.are_on or len(self._got) < 2:
            return None
        queue = min(self._got, key=lambda queue: (self._got[queue], queue))
        whole = sum(self._weight(each) for each in self._got)
        share = wanted * max(self._weight(queue) / whole, 1 / MAX_SHARES)
        behind = (max(self._got.values()) - self._got[queue]) * self._weight(queue)
        return Turn(queue, min(wanted, max(1, round(share), round(behind))))

    def took(self, turn: Turn, got: int) -> None:
        """Note what came of a turn. A queue that gave less than was asked for has no more."""
        self._got[turn.queue] = self._got.get(turn.queue, 0.0) + got / self._weight(turn.queue)
        if got < turn.max_count:
            del self._got[turn.queue]

    def _weight(self, queue: str) -> int:
        return self._weights.get(queue, 1)


class Reserve:
    def __init__(self, slots: int, *, is_small: bool = False) -> None:
        self._slots = slots
        self._ahead_seconds = BATCH_SECONDS if is_small else AHEAD_SECONDS
        self._keep_seconds = KEEP_BATCH_SECONDS if is_small else KEEP_SECONDS
        self._waiting: deque[tuple[float, InvocationRecord]] = deque()
        self._averages: dict[str, tuple[float, float]] = {}  # of each task: seconds, and when it last ended

    def __len__(self) -> int:
        return len(self._waiting)

    def learn(self, task: str, seconds: float, now: float) -> None:
        """Note how long a call of this task took, from its start to its outcome."""
        before, _ = self._averages.get(task, (seconds, now))
        self._averages[task] = (before + _WEIGHT * (seconds - before), now)

    def _slowest(self, now: float) -> float | None:
        """Return the average of the slowest recent task: the next claim may bring nothing but calls of that one."""
        for task, (_, ended) in tuple(self._averages.items()):
            if now - ended > _MEMORY_SECONDS:
                del self._averages[task]
        return max((average for average, _ in self._averages.values()), default=None)

    def room(self, now: float, bounded: int = 0) -> int:
        """Return how many more may be claimed ahead: 0 before the first call has ended, since nothing is known yet.

        `bounded` slots are those of calls under limits and rates, for which what lies here may wait for long.
        """
        slowest, slots = self._slowest(now), self._slots - bounded
        if slowest is None or slots <= 0:
            return 0
        soon = slots * self._ahead_seconds / max(slowest, 0.001)
        capacity = min(int(soon), slots * MAX_TIMES)
        room = capacity - len(self._waiting)
        return room if room > slots and room * 2 >= capacity else 0  # less would not be worth the round trips

    def begins_at_once(self, count: int, now: float, bounded: int = 0) -> bool:
        """Return whether `count` calls are short enough to be marked as RUNNING before their slot is free.

        The last of them waits for less than a tenth of a second, and its start needs no further write.
        """
        slowest, slots = self._slowest(now), self._slots - bounded
        return slowest is not None and slots > 0 and (len(self._waiting) + count) * slowest / slots < AT_ONCE_SECONDS

    def ids(self) -> set[str]:
        return {record.id for _, record in self._waiting}

    def add(self, records: tuple[InvocationRecord, ...], now: float) -> None:
        self._waiting.extend((now, record) for record in records)

    def take(self, count: int) -> list[InvocationRecord]:
        """Take the oldest invocations out, to be started."""
        return [self._waiting.popleft()[1] for _ in range(min(count, len(self._waiting)))]

    def remove(self, id: str) -> InvocationRecord | None:
        """Take an invocation out. Return None if it is not here."""
        found = next((record for _, record in self._waiting if record.id == id), None)
        if found is not None:
            self._waiting = deque(item for item in self._waiting if item[1].id != id)
        return found

    def of_queues(self, queues: frozenset[str]) -> list[InvocationRecord]:
        """Take out the invocations of these queues, to be handed back."""
        taken = [record for _, record in self._waiting if record.queue in queues]
        if taken:
            self._waiting = deque(item for item in self._waiting if item[1].queue not in queues)
        return taken

    def stale(self, now: float) -> list[InvocationRecord]:
        """Take out the invocations that lay too long, to be handed back.

        The guess was wrong, so nothing of the like is claimed ahead until calls prove it.
        """
        taken = []
        while self._waiting and now - self._waiting[0][0] >= self._keep_seconds:
            taken.append(self._waiting.popleft()[1])
        for record in taken:
            average, _ = self._averages.get(record.task, (0.0, now))
            self._averages[record.task] = (max(average, self._keep_seconds), now)
        return taken

    def patience(self, now: float) -> float | None:
        """Return the seconds until an invocation has lain too long."""
        return max(0.0, self._waiting[0][0] + self._keep_seconds - now) if self._waiting else None
