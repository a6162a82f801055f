"""Services: duties that one runner performs at a time, in its slot.

Whose turn it is, `holdfast.lifecycle.slots` decides from the roster and the store's time. The gate in the store lets
one execution through; what nobody will end is reaped first. An execution spans its slot: claimed once, it looks every
second which duties are due, to the end of the window. Every write of a duty is conditional by itself, so even two
runners that both believe it is their turn do no harm.

A crash leaves an execution that is RUNNING; the next one in turn reaps it when its owner is declared dead or its window
is over. A loop that hangs while its runner's heart beats is told by the heartbeat (`is_ticking`), and its runner shares
no cycle until it moves again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from holdfast.clock import Clock
from holdfast.crashpoints import crashpoint
from holdfast.engine.bell import Bell
from holdfast.engine.outages import Seldom, repeated
from holdfast.engine.permit import Permit
from holdfast.engine.schedules import moment
from holdfast.errors import StoreError
from holdfast.ids import Ids, derived_id
from holdfast.lifecycle.records import RunnerRecord
from holdfast.lifecycle.slots import (
    NO_MARGIN,
    AtomicServiceClaim,
    Execution,
    ExecutionStatus,
    Member,
    SlotSettings,
    decide_atomic_service_claim,
    enough_margin,
    next_change_at,
    reap,
    sharing,
    sitting_out,
    surplus,
)
from holdfast.store.contract import Store
from holdfast.wakeup.fallback import look_after

log = logging.getLogger("holdfast.services")

SERVICE = "core"
_STALE_ROSTER_SECONDS = 10.0  # how long a change of the roster may go unnoticed if the hint of it is lost
_HUNG_SECONDS = 10.0
_SOONEST_SECONDS = 0.01  # whatever a look says: a loop that fails at once must not spin
_TRAIL = 100  # executions that are read to judge the present


class Duty(msgspec.Struct, frozen=True, kw_only=True):
    """Something to do every so often. If it returns True there is more to do, and it is due again at the next check."""

    name: str
    every_seconds: float
    perform: Callable[[], Awaitable[object]]


def members_of(roster: Sequence[RunnerRecord]) -> list[Member]:
    """Who may take turns. Where a newer version has joined, those that do not know its schema leave it to the others:
    what they would tidy up may not be what they take it for.
    """
    newest = max((runner.schema for runner in roster), default=0)
    return [
        Member(
            runner_id=runner.id,
            joined_at=runner.started_at,
            can_run_atomic_service=runner.can_run_atomic_service and not runner.draining and runner.schema == newest,
            sits_out_until=runner.sits_out_until,
        )
        for runner in roster
    ]


class Services:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        ids: Ids,
        permit: Permit,
        *,
        app: str,
        runner_id: str,
        settings: SlotSettings,
        duties: Sequence[Duty],
    ) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids
        self._permit = permit
        self._app = app
        self._runner_id = runner_id
        self._settings = settings
        self._duties = duties
        self._next: dict[str, float] = {}  # by the monotonic clock: the store's may be set
        self._seldom = Seldom(clock.monotonic)
        self._moved = clock.monotonic()
        self._sharing: list[str] = []
        self._same_members_since = 0.0
        self._writable_since = store.now()
        self._bell = Bell()

    def look_soon(self) -> None:
        """The members have changed: whose turn it is may have, too."""
        self._bell.ring()

    def takes_turns(self, runner_id: str) -> bool:
        """Whether that runner was among the members when we last looked."""
        return runner_id in self._sharing

    def is_ticking(self) -> bool:
        """Whether the loop moves."""
        return self._clock.monotonic() - self._moved < max(_HUNG_SECONDS, 5 * self._settings.check_interval_seconds)

    async def run(self) -> None:
        while True:
            wait = self._settings.check_interval_seconds
            try:
                with repeated():
                    wait = await self._look()
            except StoreError as error:
                self._writable_since = self._store.now()
                log.debug("services: %s", error)
            except Exception:
                log.exception("services")
            await self._sleep(max(wait, _SOONEST_SECONDS))

    async def _sleep(self, seconds: float) -> None:
        """In steps, so that a long wait does not look like a loop that hangs; and until the members change."""
        deadline = self._clock.monotonic() + seconds
        while (left := deadline - self._clock.monotonic()) > 0:
            self._moved = self._clock.monotonic()
            if await self._bell.wait(min(left, _HUNG_SECONDS / 4)):
                break
        self._moved = self._clock.monotonic()

    async def _look(self) -> float:
        """Perform the services if it is our turn; the seconds until the next look."""
        if not self._permit.holds():
            return self._settings.check_interval_seconds
        active = members_of(await self._store.roster(self._app))
        now = self._store.now()
        shared = [member.runner_id for member in sharing(active, now, self._settings)]
        if shared != self._sharing:
            self._sharing, self._same_members_since = shared, now
        claim = decide_atomic_service_claim(self._runner_id, active, now, self._settings)
        if claim.window is not None:
            return await self._execute(claim, active)
        later = next_change_at(self._runner_id, active, now, self._settings) - now
        return min(later, look_after(max(_STALE_ROSTER_SECONDS, self._settings.check_interval_seconds)))

    async def _execute(self, claim: AtomicServiceClaim, active: list[Member]) -> float:
        assert claim.window is not None
        trail = await self._store.executions(self._app, SERVICE, _TRAIL)
        for execution, reason in reap(trail, {member.runner_id for member in active}, self._store.now()):
            at = self._store.now()
            if await self._store.end_execution(self._app, execution.id, ExecutionStatus.ABANDONED, at, reason):
                level = logging.INFO if execution.runner_id == self._runner_id else logging.WARNING
                log.log(level, "the services of runner %s were abandoned: %s", execution.runner_id, reason)
        mine = Execution(
            id=self._ids.new(),
            service=SERVICE,
            runner_id=self._runner_id,
            started_at=self._store.now(),
            window_ends_at=claim.window.ends_at,
        )
        blocker = await self._store.put_execution(self._app, mine)
        if blocker is not None and blocker.runner_id == self._runner_id and blocker.window_ends_at > self._store.now():
            mine, blocker = blocker, None  # ours: the reply to its start was lost, or its end could not be written
        if blocker is not None:
            return await self._blocked(mine, claim, blocker, active)
        crashpoint("service.recorded")
        if not enough_margin(claim, self._store.now(), self._settings):
            await self._end(mine, ExecutionStatus.ABANDONED, NO_MARGIN)
            return self._settings.check_interval_seconds
        await self._sit_out(claim, active, trail)
        status, reason = ExecutionStatus.ABANDONED, "the runner stopped"
        try:
            await self._perform(min(claim.window.ends_at, mine.window_ends_at))
            status, reason = ExecutionStatus.COMPLETED, ""
        finally:
            await self._end(mine, status, reason)
        return 0.0

    async def _blocked(
        self, mine: Execution, claim: AtomicServiceClaim, blocker: Execution, active: list[Member]
    ) -> float:
        """Leave a line in the trail, once for each slot."""
        assert claim.window is not None
        now = self._store.now()
        for execution, why in reap([blocker], [member.runner_id for member in active], now):
            await self._store.end_execution(self._app, execution.id, ExecutionStatus.ABANDONED, now, why)
            return 0.0
        slot = derived_id("blocked", self._app, self._runner_id, f"{claim.window.cycle}", f"{claim.window.slot}")
        reason = f"runner {blocker.runner_id} has been at it since {moment(blocker.started_at)}"
        line = msgspec.structs.replace(
            mine, id=slot, status=ExecutionStatus.BLOCKED, ended_at=mine.started_at, reason=reason
        )
        await self._store.put_execution(self._app, line)
        return self._settings.check_interval_seconds

    async def _sit_out(self, claim: AtomicServiceClaim, active: list[Member], trail: Sequence[Execution]) -> None:
        idle = sitting_out(
            claim,
            active,
            trail,
            self._store.now(),
            self._settings,
            same_members_since=self._same_members_since,
            writable_since=self._writable_since,
        )
        if idle is not None:
            log.warning("runner %s left its slot unused and sits out", idle.runner_id)
            await self._store.ask_runner(self._app, idle.runner_id, sits_out_until=idle.until)

    async def _end(self, execution: Execution, status: ExecutionStatus, reason: str) -> None:
        crashpoint("service.performed")
        try:
            await self._store.end_execution(self._app, execution.id, status, self._store.now(), reason)
            crashpoint("service.ended")
        except StoreError as error:
            log.warning("the end of the services was not written, and will be reaped: %s", error)

    async def _perform(self, until: float) -> None:
        """See to the duties that are due, once per check interval, to the window's end.

        If somebody reaps us meanwhile (we were declared dead, or seem to overrun) the next one may begin before we
        notice. That does no harm: every write of a duty is conditional, and the permit ends before a death is declared.
        """
        while self._store.now() < until and self._permit.holds():
            for duty in self._duties:
                if self._clock.monotonic() >= self._next.get(duty.name, 0.0):
                    more = await self._see_to(duty)
                    self._next[duty.name] = self._clock.monotonic() + (0.0 if more else duty.every_seconds)
            await self._sleep(min(self._settings.check_interval_seconds, max(0.0, until - self._store.now())))

    async def _see_to(self, duty: Duty) -> bool:
        self._moved = self._clock.monotonic()
        try:
            return await duty.perform() is True
        except StoreError as error:
            self._writable_since = self._store.now()
            level = logging.WARNING if self._seldom.is_due(duty.name) else logging.DEBUG
            log.log(level, "%s: %s", duty.name, error)
        except Exception:
            log.exception("the duty '%s' failed; the others go on", duty.name)
        return False

    async def forget_old(self) -> None:
        """Keep the trail within its limits of age and number."""
        most = self._settings.execution_max_records
        trail = await self._store.executions(self._app, SERVICE, most + _TRAIL)
        gone = surplus(trail, self._store.now(), self._settings)
        if gone:
            await self._store.forget_executions(self._app, [execution.id for execution in gone])
