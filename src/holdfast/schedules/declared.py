"""Schedules that code declares: stored when a runner starts, retired when no living runner declares them.

A runner's entry on the roster says which schedules its code declares. A schedule that no living runner declares,
although one knows its task or another task of its module, is retired: kept with its uid and progress, and revived when
a runner declares it again. A fleet that is down, or a runner with other modules, retires nothing.

A damaged schedule that was quarantined is stored again. A schedule that a user deleted comes back when a runner starts;
a schedule that a user created under a declared name stays as it is. In a rolling deploy the schedules of the old and
the new code are both there until the last old runner is gone.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from holdfast.codec import Payload
from holdfast.errors import CorruptRecord
from holdfast.fleet.core_tasks import QUEUE, TERMS, CoreTaskRegistry
from holdfast.fleet.services import Duty
from holdfast.model.limits import limit_key
from holdfast.model.records import SCHEDULES
from holdfast.runtime.engine import Engine
from holdfast.schedules.records import KIND, CatchUp, Rules, ScheduleRecord, StoredCall
from holdfast.schedules.service import EmitTick, Scheduler, ScheduleRegistry
from holdfast.schedules.timing import Schedule as Timing
from holdfast.telemetry import events

_CLOCKS_DIFFER_SECONDS = 5.0  # the clocks of the process that quarantines, and of this one


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as code declares it."""

    timing: Timing
    call: StoredCall
    rules: Rules = Rules()
    name: str = ""
    module_tasks: tuple[str, ...] = ()  # other tasks of the declaring module
    payloads: tuple[Payload, ...] = ()  # that its call refers to


def by_name(declared: Sequence[Declaration]) -> dict[str, Declaration]:
    """Return declarations by name. The default name is the task and a digest of the timing: a deploy may change the
    rest, and has to keep the same schedule, or the old and the new one would both fire.
    """
    named: dict[str, Declaration] = {}
    for each in declared:
        if each in named.values():
            continue
        name, number = each.name, 0
        while not each.name and (not name or name in named):
            said = msgspec.json.encode((each.timing, number))
            name, number = f"{each.call.task}#{hashlib.sha256(said).hexdigest()[:8]}", number + 1
        named[name] = each
    return named


class Declarations:
    """A feature of a runner (`holdfast.fleet.services.Feature`): the schedules of its code, and those of others."""

    def __init__(self, engine: Engine, declared: Sequence[Declaration], emit: EmitTick | None = None) -> None:
        self._engine = engine
        self._emit = emit
        self._report = engine.telemetry.emit
        self._store = engine.store
        self._registry = engine.part(ScheduleRegistry)
        self._declared = by_name(declared)
        self._app = engine.app
        self._reported: set[str] = set()
        self._seen: set[str] = set()
        self._seen_at = 0.0

    @property
    def declares(self) -> tuple[str, ...]:
        return tuple(f"schedule:{name}" for name in self._declared)

    def duties(self) -> Sequence[Duty]:
        scheduler = Scheduler(self._engine, emit=self._emit)
        self._engine.hub.on(SCHEDULES, lambda hint: scheduler.look_soon())
        return (
            Duty(name="schedules", every_seconds=0.0, perform=scheduler.fire_due),
            Duty(name="declared schedules", every_seconds=60.0, perform=self.retire),
        )

    async def register(self) -> None:
        """Store new schedules, update changed ones, revive retired ones. Nothing fires by that."""
        stored = {record.name: record for record in await self._registry.all()} if self._declared else {}
        for name, each in self._declared.items():
            try:
                await self._ensure(name, each, stored.get(name))
            except CorruptRecord as error:  # a newer version may have written it; the runner works all the same
                self._report(events.DeclarationUnreadable("schedules", "so the code's own is not stored", str(error)))
        self._seen, self._seen_at = set(self._declared), self._store.now()

    async def _restore_damaged(self) -> None:
        """Store declared schedules again that were quarantined since the last look."""
        now = self._store.now()
        there = {entry.name for entry in await self._store.entries(self._app, KIND, list(self._declared))}
        gone = self._seen - there
        damaged = set()
        if gone:  # what a person has deleted is in no quarantine
            for aside in await self._store.quarantined(self._app):
                if aside.kind == KIND and aside.at >= self._seen_at - _CLOCKS_DIFFER_SECONDS:
                    damaged.add(aside.id)
        for name in sorted(gone & damaged):
            why = "it was damaged and quarantined; it is not paused now"
            self._report(events.DeclarationRestored("schedules", f"schedule '{name}'", why))
            await self._ensure(name, self._declared[name], None)
        self._seen, self._seen_at = there | (gone & damaged), now

    async def _ensure(self, name: str, declared: Declaration, there: ScheduleRecord | None) -> None:
        await self._registry.keep(declared.payloads)
        if there is None:
            fresh = self._registry.new(name, declared.timing, declared.call, declared.rules, declared=True)
            there = await self._registry.ensure(replace(fresh, module_tasks=declared.module_tasks))
        if not there.declared:  # it is what a person wanted last, perhaps since the declared one was damaged
            why = (
                f"a schedule of that name was created at run time, and fires instead ({there.call.task}, "
                f"{there.timing.describe()}). For the declared one: `holdfast schedules delete {name}`, then restart a "
                "runner; or give it another name"
            )
            self._report(events.DeclarationShadowed("schedules", f"schedule '{name}'", why))
            return
        if any(getattr(there, field) != value for field, value in _as_declared(declared, there, 0.0).items()):
            await self._registry.change(name, functools.partial(_as_declared, declared))

    async def retire(self) -> None:
        """Perform a duty: retire schedules that no code declares, and revive schedules that are declared again."""
        if self._declared:
            await self._restore_damaged()
        stored = [record for record in await self._registry.all() if record.declared]
        if not stored:
            return
        roster = await self._store.roster(self._app)
        declared = {name for runner in roster for name in runner.declares}
        known = {task for runner in roster for task in runner.tasks}
        for record in stored:
            if f"schedule:{record.name}" in declared:
                if record.retired_at is not None:
                    await self._registry.change(record.name, lambda record, now: {"retired_at": None, "through": now})
            elif record.retired_at is None and not known.isdisjoint((record.call.task, *record.module_tasks)):
                self._report(events.DeclarationRetired("schedules", f"schedule '{record.name}'"))
                await self._registry.change(record.name, lambda record, now: {"retired_at": record.retired_at or now})
            elif record.retired_at is None and record.name not in self._reported:
                # Another program's, which is down for a while; or the task is gone from the code, and calls pile up.
                self._reported.add(record.name)
                hint = "no living runner knows it, and calls wait; delete the schedule if the task is gone"
                self._report(events.TaskUnknown("schedules", f"schedule '{record.name}'", hint, record.call.task))


def _as_declared(declared: Declaration, record: ScheduleRecord, now: float) -> dict[str, object]:
    """Return the fields to change in a stored schedule. A new timing, or a revival, counts from now on."""
    fields: dict[str, object] = {"call": declared.call, "rules": declared.rules, "module_tasks": declared.module_tasks}
    if record.timing != declared.timing or record.retired_at is not None:
        fields |= {"timing": declared.timing, "retired_at": None, "through": now}
    return fields


_LOOK_SECONDS = 10.0  # the set is fixed, and due times are known
_CHECK_SECONDS = 60.0  # between two looks whether a schedule is further than the clock


class CoreSchedules:
    """A feature of a runner: see `holdfast.fleet.services.Feature`."""

    declares = ()

    def __init__(self, core: CoreTaskRegistry) -> None:
        self._core = core
        self._store = core.engine.store
        self._scheduler = Scheduler(core.engine, look_seconds=_LOOK_SECONDS)
        self._monotonic = core.engine.clock.monotonic
        self._check_at = self._monotonic() + _CHECK_SECONDS

    def duties(self) -> Sequence[Duty]:
        return (Duty(name="core tasks", every_seconds=0.0, perform=self.fire_due),)

    async def register(self) -> None:
        """Store the schedules of the core tasks. A changed cron takes effect from now on."""
        declared = [
            Declaration(
                name=task.name,
                timing=task.cron,
                call=StoredCall(
                    task=task.name,
                    arguments=self._core.no_arguments,
                    queue=QUEUE,
                    limit_key=limit_key(task.name),
                    terms=TERMS,
                ),
                rules=Rules(unique=True, catch_up=CatchUp.NONE),
            )
            for task in self._core.tasks.values()
        ]
        await Declarations(self._core.engine, declared).register()

    async def fire_due(self) -> bool:
        more = await self._scheduler.fire_due()
        if self._monotonic() >= self._check_at:
            self._check_at = self._monotonic() + _CHECK_SECONDS
            await self._fire_overdue()
        return more

    async def _fire_overdue(self) -> None:
        """Store quarantined schedules again. Fire tasks with a schedule that is ahead of the clock: the clock was set
        back, or was ahead on the runner with the services. A user's schedule rests then; a duty must not.
        """
        now = self._store.now()
        entries = await self._store.entries(self._core.app, KIND, list(self._core.tasks))
        if len(entries) < len(self._core.tasks):
            gone = len(self._core.tasks) - len(entries)
            emit = self._core.engine.telemetry.emit
            emit(events.DeclarationRestored("core", "schedules of core tasks", f"{gone} are gone"))
            await self.register()
        for entry in entries:
            next_two = list(self._core.tasks[entry.name].cron.ticks(now, limit=2))
            if (math.inf if entry.due_at is None else entry.due_at) > max(next_two, default=math.inf):
                await self._core.fire(entry.name, f"its schedule is ahead of the clock at {now:.0f}")
