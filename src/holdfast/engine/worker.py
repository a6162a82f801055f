"""A worker: it has places, fills them with claimed work and settles what comes out.

The loop is short: look for work if there is reason to (a hint, a full batch last time, something falling due, a
polling interval gone by) and a place is free; hand what was claimed to execution; sleep until something happens.
Outcomes go to the settler, and the place is free again at once: the next claim and the previous settle are written
together.

It claims and starts only while its runner permits it: a runner that cannot reach the store might have been declared
dead, and its work given to others.

A worker that dies at any point leaves its invocations RUNNING with its name and epoch on them. Nothing it held is
lost, and nothing it writes later can be mistaken for the work of the next owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from holdfast.codec import Codec, Limits
from holdfast.crashpoints import crashpoint
from holdfast.engine.account import Account
from holdfast.engine.audit import Audit
from holdfast.engine.bell import Bell
from holdfast.engine.cancel import GRACE_SECONDS, Canceller, Ear
from holdfast.engine.claim import Claimer
from holdfast.engine.definition import TaskDefinition, limits_of
from holdfast.engine.demand import MANY, Demand
from holdfast.engine.depot import Depot
from holdfast.engine.ending import end_all
from holdfast.engine.lanes import Lanes
from holdfast.engine.limits import Limits as RunningLimits
from holdfast.engine.parked import wake_parked
from holdfast.engine.patience import Patience
from holdfast.engine.permit import Permit
from holdfast.engine.reading import get_readable
from holdfast.engine.recovery import Recovery
from holdfast.engine.reserve import Reserve
from holdfast.engine.running import Employer, Ended, MakePlaces, Running
from holdfast.engine.settle import Settler
from holdfast.engine.throughput import Throughput
from holdfast.errors import StoreError
from holdfast.execution.call import INTERRUPTED, Raised, Returned
from holdfast.ids import Ids
from holdfast.lifecycle import changes
from holdfast.lifecycle.cancelling import is_too_late
from holdfast.lifecycle.changes import Change
from holdfast.lifecycle.names import counted
from holdfast.lifecycle.records import PLAIN, Hint, InvocationRecord, Serves
from holdfast.lifecycle.status import Status
from holdfast.store.contract import Ability, Store
from holdfast.wakeup.hub import Hub

log = logging.getLogger("holdfast.worker")

DISCOVERY_SECONDS = 5.0  # how long work in a lane that a runner has never heard of may wait if its hint was lost
_WITH_HINTS = 6  # times as seldom where hints are reliable


class Worker:
    """One owner of work. Made of the store, a clock's worth of settings, and the tasks it knows.

    `around` spans its life; after `max_tasks` it retires by itself. One that `leaves_unfinished` what still runs after
    the drain timeout relies on somebody who ends its process and then gives that work back. One `for_core` tasks heeds
    no pauses, and does not look again after a full claim: what one run of a core task leaves, the next one finds.
    """

    why_ended = ""  # if it ends by itself, and leaves something behind

    def __init__(
        self,
        *,
        app: str,
        owner: str,
        concurrency: int,
        serves: Serves,
        store: Store,
        depot: Depot,
        hub: Hub,
        ids: Ids,
        rng: random.Random,
        codec: Codec,
        limits: Limits,
        definitions: Iterable[TaskDefinition],
        make_places: MakePlaces,
        permit: Permit,
        recovery: Recovery,
        poll_interval_seconds: float,
        drain_timeout_seconds: float,
        around: AbstractAsyncContextManager[None] | None = None,
        max_tasks: int | None = None,
        leaves_unfinished: bool = False,
        look_seconds: float = 2.0,
        for_core: bool = False,
        cancel_grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self.owner = owner
        self._app = app
        self._concurrency = concurrency
        self._permit = permit
        self._around = around
        self._max_tasks = max_tasks
        self._leaves_unfinished = leaves_unfinished
        self._for_core = for_core
        self._recovery = recovery
        self.account = Account()
        self._throughput = Throughput()
        self.on_apart: Callable[[], None] = lambda: None
        self._store = store
        self._hub = hub
        self._ids = ids
        self._tasks: Mapping[str, TaskDefinition] = {name: d for d in definitions for name in d.names}
        self._lanes = Lanes(serves)
        self._lanes.hear([lane for d in self._tasks.values() for lane in d.lanes])
        self._next_discovery = 0.0
        self._demand = Demand(poll_interval_seconds, doubts=not for_core)
        self._drain = drain_timeout_seconds
        self._search = Patience(rng)
        slots = RunningLimits(store, hub, ids, app=app, limits=limits_of(self._tasks.values()))
        self._claimer = Claimer(store, hub, ids, self._search, permit, app=app, owner=owner, limits=slots.known)
        self._patience = Patience(rng)
        heard = (self._started, self._stored)
        canceller = Canceller(store, recovery.ends, hub, ids, app=app, grace_seconds=cancel_grace_seconds)
        self._settler = Settler(store, depot, hub, ids, self._patience, *heard, recovery, slots, rng, canceller)
        told = (self._ended, self._began, lambda: self.on_apart())
        employer = Employer(*told, self._begin, self._hand_back, self._why_not, self._given_up)
        needs = (codec, limits, depot, self._search, make_places, employer)
        self._running = Running(self._tasks, *needs, max_crashes=recovery.max_crashes)
        self._reserve = Reserve(concurrency)
        self._ahead = bool(store.abilities & Ability.COSTLY_CLAIMS)
        self._prefetching: asyncio.Task[None] | None = None
        self._starting = 0  # places of reserved work whose start is being written
        self._bell = Bell()
        self._stopping = False
        self._fenced = False
        self._claiming = 0
        self._audit = Audit(store, recovery, app=app, owner=owner, known=self._known)
        self._ear = Ear(store, hub, app, owner, look_seconds, self._holds, self._is_to_end)
        self._drains_until = float("inf")  # by the loop's time; endless for one that retires

    # --- life

    async def run(self, ready: Callable[[], None] = lambda: None, over: Callable[[], None] = lambda: None) -> Account:
        """Work until `stop`. Returns what was done.

        `ready` is called once it looks for work, `over` when that has ended; then hooks may still take their time.
        """
        unsubscribe = self._hub.on_ready(self._hinted)
        self._permit.on_grant(self._bell.ring)
        if not self._for_core:
            self._permit.on_pause(self._heed)
            self._heed(self._permit.paused)
        try:
            async with self._around or contextlib.nullcontext():
                await self._work(ready)
                over()
        finally:
            unsubscribe()
            await self._running.close()
        return self.account

    async def _work(self, ready: Callable[[], None]) -> None:
        audit, ear = (asyncio.create_task(work) for work in (self._audit.run(), self._ear.run()))
        try:
            await self._recovery.ends.get_ready(self._app)
            await self._look_for_work(ready)
            await end_all(audit)
            if not self._fenced:
                await self._finish()
        finally:
            await end_all(audit, ear)

    async def _look_for_work(self, ready: Callable[[], None]) -> None:
        known = (self._store, self._ids, self._app, self.owner, self._tasks)
        try:
            await self._search.until_reached("waking parked work", lambda again: wake_parked(*known))
            await self._discover()
            log.info("worker %s is ready: %d places, %d tasks", self.owner, self._concurrency, len(self._tasks))
            ready()
            while not self._stopping:
                if not self._permit.holds():
                    self._hand_back(self._reserve.take(len(self._reserve)), _UNHEARD)
                    await self._bell.wait(_WITHOUT_PERMIT_SECONDS)  # a permit rings it
                    continue
                await self._fill()
                if not await self._bell.wait(self._patience_for_news()) or self._is_overdue():
                    await self._look_around()
        except StoreError:
            if not self._stopping:
                raise

    @property
    def running(self) -> int:
        """How many invocations it has begun and not ended."""
        return len(self._running)

    def ended_lately(self) -> dict[str, int]:
        """How many calls have ended over the last minutes, by queue."""
        return self._throughput.lately(self._loop_time())

    @property
    def is_stopping(self) -> bool:
        """Whether it takes no more work."""
        return self._stopping

    def retire(self) -> None:
        """Take no more work and end when what runs is done, however long that takes: somebody else carries on."""
        self._stopping = True
        self._search.give_up_in(0)
        self._bell.ring()

    async def has_lost(self) -> bool:
        """Whether something that it runs belongs to somebody else by now, or to nobody."""
        held = [record.id for record in self._running.records.values()]
        found = await get_readable(self._store, self._app, held)
        taken = {record.id for record in found if record is not None and record.owner != self.owner}
        return not taken.isdisjoint(self._running.records)

    def fence(self) -> None:
        """All that it owned was taken from it: end user code where that is possible, and write no end any more. Only
        what a claim still brings is handed back, since nobody knows of it yet.
        """
        self._fenced = self._stopping = True
        self._search.give_up_in(0)
        self._patience.give_up_in(0)
        self._running.interrupt()
        self._running.records.clear()
        self._reserve.take(len(self._reserve))
        self._bell.ring()

    def stop(self, *, hurry: bool = False) -> None:
        """Take no more work and end when what runs is done; `hurry` ends it now.

        If the store is away, looking for work ends at once, and ends that cannot be written are given up some time
        after the drain timeout: the invocations stay RUNNING with our name, and recovery takes them up.
        """
        self._stopping = True
        self._search.give_up_in(0)
        self._patience.give_up_in(_GRACE_SECONDS + (0 if hurry else self._drain + _LAST_WORDS_SECONDS))
        self._drains_until = min(self._drains_until, self._loop_time() + (0.0 if hurry else self._drain))
        self._bell.ring()

    # --- claiming

    def _heed(self, paused: frozenset[str]) -> None:
        """Take nothing from these queues. What was taken ahead of them and not begun goes back."""
        self._lanes.pause(paused)
        self._hand_back(self._reserve.of_queues(paused), _PAUSED)
        self._demand.anything()
        self._bell.ring()

    def _hinted(self, hint: Hint) -> None:
        accepted = self._lanes.hear(hint.subjects)
        if accepted or not hint.subjects:
            self._demand.heard(hint.count if accepted else MANY)
            self._bell.ring()

    async def _look_around(self) -> None:
        """Nobody said anything for a while: look for work, and now and then for lanes that nobody told us of."""
        self._demand.anything()
        if self._loop_time() >= self._next_discovery:
            await self._discover()

    async def _discover(self) -> None:
        found = await self._search.until_answered("looking for lanes", lambda again: self._store.lanes(self._app))
        self._lanes.know(found, self._loop_time())
        self._next_discovery = self._loop_time() + DISCOVERY_SECONDS * (_WITH_HINTS if self._hub.trust else 1)

    async def _fill(self) -> None:
        """Give the free places something to do: what is in reserve first, then what a claim finds."""
        self._hand_back(self._reserve.stale(self._loop_time()))
        self._start(self._reserve.take(self._free()))
        demand = self._demand
        if not demand.look or self._prefetching is not None:
            return
        ahead = self._ahead and demand.expected > self._concurrency and not demand.slot_next
        if ahead and self._reserve.room(self._loop_time()):
            self._prefetching = asyncio.create_task(self._prefetch())
        elif free := max(0, self._free()):
            records = await self._claim(free, start=True)
            demand.slot_next = len(records) == free and bool([record for record in records if record.slot])
            self._begin(records)
            if demand.look and self._lanes.turns.are_on:
                self._bell.ring()  # the next queue has its turn at once

    def _free(self) -> int:
        # A large end keeps its place until its payloads are stored: else memory could fill faster than the store takes.
        taken = len(self._running.records) + len(self._running.abandoned)
        free = self._concurrency - taken - self._starting - self._settler.storing
        if self._max_tasks is None:
            return free
        return min(free, self._max_tasks - self.account.started - self._starting - self._running.fetching)

    def _stored(self) -> None:
        self._bell.ring()

    async def _claim(self, most: int, *, start: bool, limited: bool = True) -> tuple[InvocationRecord, ...]:
        expected = self._demand.taken()
        wanted = min(most, expected)
        self._claiming += 1
        try:
            if self._lanes.turns.wants_to_know(self._loop_time()):
                await self._discover()
            ask = self._lanes.next(wanted)
            claimed = await self._claimer.claim(ask.lanes, ask.most, start=start, limited=limited)
        finally:
            self._claiming -= 1
        self._demand.learn(self._lanes.turns, ask, claimed, expected, self._loop_time())
        return claimed.records

    async def _prefetch(self) -> None:
        try:
            now = self._loop_time()
            room = self._reserve.room(now)
            claimed = await self._claim(room, start=self._reserve.begins_at_once(room, now), limited=False)
            self._reserve.add(claimed, self._loop_time())
            if self._lanes.paused:  # perhaps since the claim was sent
                self._hand_back(self._reserve.of_queues(self._lanes.paused), _PAUSED)
        except StoreError as error:
            log.debug("nothing was claimed ahead: %s", error)  # a stop; the next claim finds what this one got
        finally:
            self._prefetching = None
            self._bell.ring()

    def _start(self, reserved: list[InvocationRecord]) -> None:
        """Begin what is RUNNING already; write down that the others are, and begin them when that is durable."""
        self._begin([record for record in reserved if record.status is Status.RUNNING])
        pending = [record for record in reserved if record.status is Status.PENDING]
        self._starting += len(pending)
        self._settler.settle([(record, self._settler.start_of(record)) for record in pending])

    def _started(self, record: InvocationRecord, change: Change, ours: bool) -> None:
        """The start of reserved work is written, or it is not ours any more."""
        self._starting -= 1
        if ours:
            self._begin([changes.apply_to(change, record)])
        self._bell.ring()

    def _hand_back(
        self, reserved: list[InvocationRecord], why: str = "it lay claimed for too long", wait: float = 0.0
    ) -> None:
        if reserved:
            log.info(
                "%s hands back %s that it has not begun: %s", self.owner, counted(len(reserved), "invocation"), why
            )
            self._settler.settle([(record, self._settler.return_of(record, why, wait)) for record in reserved])

    @staticmethod
    def _loop_time() -> float:
        return asyncio.get_running_loop().time()

    def _patience_for_news(self) -> float | None:
        """Seconds to sleep before looking unasked; None when no place is free, since then only an outcome matters."""
        if self._free() <= 0 or self._prefetching is not None:
            return self._reserve.patience(self._loop_time())
        now = self._store.now() - self._store.clock_error()  # the time by which the claimer claims
        return self._demand.pause(now, self._loop_time(), self._hub.trust)

    def _is_overdue(self) -> bool:
        """Return whether a look is due that nobody asked for, however often the bell rings."""
        return not self._demand.look and self._free() > 0 and self._patience_for_news() == 0.0

    # --- running

    def _begin(self, records: Sequence[InvocationRecord]) -> None:
        """Call these. Their claim may have taken so long that they may not be begun any more."""
        if self._fenced or not self._permit.holds():
            self._hand_back(list(records), _UNHEARD)
            return
        for record in records:
            if record.terms is not PLAIN and record.terms.start_by is not None:
                records = self._in_time(records)
                break
        self._running.begin(records)

    def _in_time(self, records: Sequence[InvocationRecord]) -> list[InvocationRecord]:
        """Those that may be started. The others have just expired, and end."""
        now = self._store.now()
        late = [record for record in records if is_too_late(record, now)]
        ends = [(record, self._settler.expiry_of(record)) for record in late]
        self._settler.settle([(record, change) for record, change in ends if change is not None])
        return [record for record in records if record not in late]

    # --- being asked to end

    def _holds(self, id: str | None) -> bool:
        if id is None:
            return bool(self._running.records) or len(self._reserve) > 0
        return id in self._running.records or id in self._reserve.ids()

    def _is_to_end(self, record: InvocationRecord) -> None:
        if self._reserve.remove(record.id):
            self._settler.settle([(record, self._settler.change_for(record, INTERRUPTED, None))])
        elif record.cancellation is not None:
            self._running.cancel(record, max(0.0, record.cancellation.until - self._store.now()))

    def _why_not(self) -> str:
        if self._stopping:
            return "the runner stops"
        return "" if self._permit.holds() else _UNHEARD

    def _given_up(self, is_loop_blocked: bool) -> None:
        """Leave the work to another worker, if that helps: the end of this process ends what cannot be stopped."""
        if not self._leaves_unfinished or self._stopping:
            return
        if is_loop_blocked:
            self.why_ended = f"code that cannot be stopped blocked the event loop of its worker {self.owner}"
            log.error("%s ends: code that cannot be stopped blocks its event loop", self.owner)
            self.stop(hurry=True)
        elif len(self._running.abandoned) >= self._concurrency:
            log.error("%s ends: code that cannot be stopped has all of its %d places", self.owner, self._concurrency)
            self.retire()

    @property
    def is_unfinished(self) -> bool:
        """Whether user code runs, also such as nobody waits for any more."""
        return bool(self._running.records or self._running.abandoned)

    @property
    def apart(self) -> tuple[str, ...]:
        """The invocations that were moved into processes of their own."""
        return self._running.apart

    def _began(self, count: int) -> None:
        self.account.started += count
        if self._max_tasks is not None and self.account.started >= self._max_tasks and not self._stopping:
            log.info("%s has started its %d tasks and retires", self.owner, self._max_tasks)
            self.retire()

    def _ended(self, ended: Sequence[Ended]) -> None:
        """User code is done with these; called on the engine's loop."""
        settled, large, interrupted = [], {}, 0
        now = self._loop_time()
        counted = self._throughput.current(now)
        for record, outcome, seconds in ended:
            if self._ahead:
                self._reserve.learn(record.task, seconds, now)
            fingerprint = None if isinstance(outcome, Returned) else self._tasks[record.task].fingerprint
            change = self._settler.change_for(record, outcome, fingerprint)
            settled.append((record, change))
            interrupted += outcome is INTERRUPTED
            counted[record.queue] += outcome is not INTERRUPTED
            if isinstance(outcome, Returned | Raised) and outcome.payloads:
                large[change.operation] = outcome.payloads
        self.account.interrupted += interrupted
        self.account.ended += len(settled) - interrupted
        self._settler.settle(settled, large)
        if not self._stopping and self._permit.holds():
            self._start(self._reserve.take(self._free()))  # in the same write
        self._bell.ring()

    # --- ending

    async def _finish(self) -> None:
        """Let running work end within the drain timeout, then end it; nothing waits for a recovery after a clean
        stop.
        """
        crashpoint("handback.before")
        if self._running:
            limit = "" if self._drains_until == float("inf") else f" up to {self._drain:g} s"
            log.info("%s waits%s for %s", self.owner, limit, counted(len(self._running), "invocation"))
        if self._prefetching is not None:
            await self._prefetching
        self._hand_back(self._reserve.take(len(self._reserve)), "the runner stops")
        self._running.stop_fetching()
        await self._drained(lambda: self._drains_until)
        if self._running:
            self._running.interrupt()
            graced = self._loop_time() + _GRACE_SECONDS
            await self._drained(lambda: graced)
        if not self._leaves_unfinished:
            left = [
                (record, self._settler.change_for(record, INTERRUPTED, None))
                for record in self._running.records.values()
            ]
            if left:
                why = "a thread cannot be ended, only its process can: it may go on here while it is run elsewhere"
                count = counted(len(left), "invocation")
                log.warning("%s gives back %s whose code has not ended: %s", self.owner, count, why)
            self._running.records.clear()
            self.account.interrupted += len(left)
            self._settler.settle(left)
        await self._settler.finish()
        crashpoint("handback.after")

    async def _drained(self, until: Callable[[], float]) -> None:
        """Wait until nothing runs any more, or until that time, which somebody in a hurry may bring forward."""
        while (self._running or self._starting) and (left := until() - self._loop_time()) > 0:
            await self._bell.wait(None if left == float("inf") else left)

    # --- duties

    def _known(self) -> set[str] | None:
        return None if self._claiming else self._running.records.keys() | self._reserve.ids() | self._settler.busy


_WITHOUT_PERMIT_SECONDS = 1.0
_PAUSED = "its queue is paused"
_UNHEARD = "its runner cannot reach the store"
_GRACE_SECONDS = 1.0  # for user code that was told to end
_LAST_WORDS_SECONDS = 10.0  # for ends that wait for the store
