"""Services: duties that one runner performs at a time, in its slot.

`holdfast.fleet.slots` decides from the roster and the store's time which runner has its turn. The gate in the store
lets one execution through; an execution without a living owner is reaped first. An execution spans its slot: claimed
once, it looks every second which duties are due, to the end of the window. Every write of a duty is conditional by
itself, so even two runners that both believe it is their turn do no harm.

A crash leaves an execution that is RUNNING; the next one in turn reaps it when its owner is declared dead or its window
is over. A loop that hangs while its runner's heartbeats go on is reported by them (`is_ticking`), and its runner shares
no cycle until it moves again.

Executions are entries of the store. The gate of a service is one entry: its body is the execution that is RUNNING, or
the last one. To begin is to put the next version over what was read, so at most one is RUNNING. A runner that replaces
an ended execution first writes it down as a line of the audit trail, its own entry, so no crash loses one: the trail is
the lines and the gate.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from holdfast.clock import moment
from holdfast.crashpoints import crashpoint
from holdfast.errors import CorruptRecord, StoreError
from holdfast.fleet.slots import (
    NO_MARGIN,
    AtomicServiceClaim,
    Execution,
    ExecutionStatus,
    Member,
    decide_atomic_service_claim,
    enough_margin,
    next_change_at,
    reap,
    sharing,
    sitting_out,
    surplus,
)
from holdfast.ids import derived_id
from holdfast.model.decoding import EXECUTION, ahead
from holdfast.model.records import Entry, RunnerRecord, entry_reader
from holdfast.runtime.claim import Permit
from holdfast.runtime.engine import Engine
from holdfast.runtime.hints import Wakeup, look_after
from holdfast.store.contract import EntryOrder, Store
from holdfast.telemetry.events import DutyFailed, ExecutionAbandoned, SlotSkipped

GATE, LINE = "service", "execution"  # kinds of entries


execution_of = entry_reader(Execution, GATE, LINE, named=EXECUTION)

SERVICE = "core"
_STALE_ROSTER_SECONDS = 10.0  # how long a change of the roster may go unnoticed if the hint of it is lost
_HUNG_SECONDS = 10.0
_SOONEST_SECONDS = 0.01  # whatever a look says: a loop that fails at once must not spin
_TRAIL = 100  # executions that are read to judge the present


def line_of(app: str, execution: Execution, keep_seconds: float, at: float | None = None) -> Entry:
    """Return the line of the trail of an ended execution. Its name sorts by its start, or by `at`."""
    since = execution.started_at if at is None else at
    keep_until = ahead(execution.ended_at or since, keep_seconds)
    name = f"{execution.service}|{since:018.6f}|{execution.id}"
    return Entry(app=app, kind=LINE, name=name, body=msgspec.json.encode(execution), keep_until=keep_until)


def gate_of(app: str, execution: Execution, before: Entry | None) -> Entry:
    """Return the gate with this execution, as the version that follows the one before."""
    version = 1 if before is None else before.version + 1
    return Entry(app=app, kind=GATE, name=execution.service, body=msgspec.json.encode(execution), version=version)


class Executions:
    """Read and write the gate and the trail of one service. Remembers the gate as it was last seen, to save a read."""

    def __init__(self, store: Store, app: str, service: str, keep_seconds: float) -> None:
        self._store = store
        self._app = app
        self._service = service
        self._keep_seconds = keep_seconds  # how long a line of the trail is kept
        self._gate: Entry | None = None

    async def begin(self, wanted: Execution) -> Execution | None:
        """Record that an execution is RUNNING. Return None if it is, by this call or an earlier try of it; else the
        execution that is RUNNING already.
        """
        there = None if self._gate is None else execution_of(self._gate)
        if there is not None and there.status is ExecutionStatus.RUNNING:
            there = await self._read_gate()
        while there is None or there.id != wanted.id:
            if there is not None:
                if there.status is ExecutionStatus.RUNNING:
                    return there
                await self._store.put_entry(line_of(self._app, there, self._keep_seconds))
            if await self._put(wanted):
                return None
            there = await self._read_gate()
        return None

    async def end(self, running: Execution, status: ExecutionStatus, at: float, reason: str) -> bool:
        """Write the end of an execution. Return False if it is not RUNNING: another runner has ended it."""
        ended = replace(running, status=status, ended_at=at, reason=reason)
        while True:
            there = None if self._gate is None else execution_of(self._gate)
            if there == running and await self._put(ended):
                return True
            there = await self._read_gate()
            if there is None or there.id != running.id or there.status is not ExecutionStatus.RUNNING:
                return there == ended
            running = there

    async def trail(self, limit: int) -> list[Execution]:
        """Return the latest executions, latest start first."""
        lines = await self._lines(limit)
        gate = await self._read_gate()
        found = {execution.id: execution for _, execution in lines} | ({} if gate is None else {gate.id: gate})
        mine = [each for each in found.values() if each.service == self._service]
        return sorted(mine, key=lambda each: (each.started_at, each.id), reverse=True)[:limit]

    async def forget(self, gone: Sequence[Execution], limit: int) -> None:
        """Remove the lines of these executions, which are among the latest `limit`. The execution in the gate stays."""
        ids = {execution.id for execution in gone}
        for entry, execution in await self._lines(limit):
            if execution.id in ids:
                await self._store.remove_entry(entry)

    async def _put(self, execution: Execution) -> bool:
        wanted = gate_of(self._app, execution, self._gate)
        done = await self._store.put_entry(wanted, self._gate)
        if done:
            self._gate = wanted
        return done

    async def _read_gate(self) -> Execution | None:
        self._gate = None
        for entry in await self._store.entries(self._app, GATE, [self._service]):
            try:
                execution = execution_of(entry)
            except CorruptRecord as error:  # it makes room, unless this user may not move it
                if not await self._store.quarantine_entry(entry, error):
                    raise
            else:
                self._gate = entry
                return execution
        return None

    async def _lines(self, limit: int) -> list[tuple[Entry, Execution]]:
        """Return the latest lines of the trail. Unreadable lines are quarantined."""
        found = []
        for entry in await self._store.entries(self._app, LINE, order=EntryOrder.LATEST, limit=limit):
            try:
                found.append((entry, execution_of(entry)))
            except CorruptRecord as error:
                await self._store.quarantine_entry(entry, error)
        return found


class Duty(msgspec.Struct, frozen=True, kw_only=True):
    """Something to do every so often. If it returns True there is more to do, and it is due again at the next check."""

    name: str
    every_seconds: float
    perform: Callable[[], Awaitable[object]]


class Feature(Protocol):
    """The part of a feature (schedules, triggers, archive) in a runner."""

    @property
    def declares(self) -> tuple[str, ...]:
        """Return the declarations of this runner's code, for its entry on the roster."""
        ...

    async def register(self) -> None:
        """Store the declarations of the code, when a runner starts."""
        ...

    def duties(self) -> Sequence[Duty]: ...


def members_of(roster: Sequence[RunnerRecord]) -> list[Member]:
    """Return the runners that may take turns. Where a newer version has joined, runners that do not know its schema
    leave the services to the others: they might misread what they tidy up.
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
        engine: Engine,
        permit: Permit,
        runner_id: str,
        duties: Sequence[Duty],
    ) -> None:
        self._store = engine.store
        self._clock = engine.clock
        self._emit = engine.telemetry.emit
        self._ids = engine.ids
        self._app = engine.app
        self._settings = engine.settings.slots
        self._permit = permit
        self._runner_id = runner_id
        self._duties = duties
        self._next: dict[str, float] = {}  # by the monotonic clock: the store's may be set
        self._moved = engine.clock.monotonic()
        self._sharing: list[str] = []
        self._same_members_since = 0.0
        self._writable_since = engine.store.now()
        self._wakeup = Wakeup()
        slots = engine.settings.slots
        self._keep_seconds = max(slots.execution_retention_seconds, 2 * slots.interval_seconds)
        self._executions = Executions(engine.store, engine.app, SERVICE, self._keep_seconds)

    def look_soon(self) -> None:
        """Look again soon: the members have changed, and so may the turn."""
        self._wakeup.notify()

    def takes_turns(self, runner_id: str) -> bool:
        """Return whether that runner was among the members at the last look."""
        return runner_id in self._sharing

    def is_ticking(self) -> bool:
        """Return whether the loop moves."""
        return self._clock.monotonic() - self._moved < max(_HUNG_SECONDS, 5 * self._settings.check_interval_seconds)

    async def run(self) -> None:
        while True:
            wait = self._settings.check_interval_seconds
            try:
                wait = await self._look()
            except Exception as error:
                self._failed("take a turn at the services", error)
            await self._sleep(max(wait, _SOONEST_SECONDS))

    async def _sleep(self, seconds: float) -> None:
        """Sleep in steps, so that a long wait does not look like a loop that hangs; and until the members change."""
        deadline = self._clock.monotonic() + seconds
        while (left := deadline - self._clock.monotonic()) > 0:
            self._moved = self._clock.monotonic()
            if await self._wakeup.wait(min(left, _HUNG_SECONDS / 4)):
                break
        self._moved = self._clock.monotonic()

    async def _look(self) -> float:
        """Perform the services if it is our turn. Return the seconds until the next look."""
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
        trail = await self._executions.trail(_TRAIL)
        if reap(trail, {member.runner_id for member in active}, self._store.now()):
            active = members_of(await self._store.roster(self._app))  # an owner may have joined since the first read
            await self._reap(trail, active)
        if not self._permit.holds():  # this process stood still: other runners may have declared it dead
            return self._settings.check_interval_seconds
        mine = Execution(
            id=self._ids.new(),
            service=SERVICE,
            runner_id=self._runner_id,
            started_at=self._store.now(),
            window_ends_at=claim.window.ends_at,
        )
        blocker = await self._executions.begin(mine)
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

    async def _reap(self, trail: Sequence[Execution], active: Sequence[Member]) -> None:
        """End executions without a living owner, and those past their window. `active` was read after `trail`."""
        for execution, reason in reap(trail, {member.runner_id for member in active}, self._store.now()):
            if not self._permit.holds():
                return
            if await self._executions.end(execution, ExecutionStatus.ABANDONED, self._store.now(), reason):
                is_own = execution.runner_id == self._runner_id
                self._emit(ExecutionAbandoned(execution.runner_id, reason, is_own))

    async def _blocked(
        self, mine: Execution, claim: AtomicServiceClaim, blocker: Execution, active: list[Member]
    ) -> float:
        """Leave a line in the trail, once for each slot."""
        assert claim.window is not None
        now = self._store.now()
        if reap([blocker], [member.runner_id for member in active], now):
            return 0.0
        slot = derived_id("blocked", self._app, self._runner_id, f"{claim.window.cycle}", f"{claim.window.slot}")
        reason = f"runner {blocker.runner_id} has been at it since {moment(blocker.started_at)}"
        line = msgspec.structs.replace(
            mine, id=slot, status=ExecutionStatus.BLOCKED, ended_at=mine.started_at, reason=reason
        )
        entry = line_of(self._app, line, self._keep_seconds, claim.window.starts_at)
        await self._store.put_entry(entry)
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
            self._emit(SlotSkipped(idle.runner_id))
            await self._store.ask_runner(self._app, idle.runner_id, sits_out_until=idle.until)

    async def _end(self, execution: Execution, status: ExecutionStatus, reason: str) -> None:
        crashpoint("service.performed")
        try:
            await self._executions.end(execution, status, self._store.now(), reason)
            crashpoint("service.ended")
        except StoreError as error:
            self._failed("write the end of the services, which will be reaped", error, is_owed=True)

    async def _perform(self, until: float) -> None:
        """Perform the duties that are due, once per check interval, to the window's end.

        If another runner reaps us meanwhile (we were declared dead, or seem to overrun) the next one may begin before
        we notice. That does no harm: every write of a duty is conditional, and the permit ends before a death is
        declared.
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
        except Exception as error:
            self._failed(f"perform the duty '{duty.name}'", error, is_owed=True)
        return False

    def _failed(self, what: str, error: Exception, *, is_owed: bool = False) -> None:
        if isinstance(error, StoreError):
            self._writable_since = self._store.now()
        self._emit(DutyFailed("services", what, error, is_owed))

    async def forget_old(self) -> None:
        """Keep the trail within its limits of age and number."""
        max_records = self._settings.execution_max_records
        trail = await self._executions.trail(max_records + _TRAIL)
        gone = surplus(trail, self._store.now(), self._settings)
        if gone:
            await self._executions.forget(gone, max_records + _TRAIL)
