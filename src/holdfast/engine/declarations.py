"""Schedules and triggers that are declared in code: stored when a runner starts, retired when nobody declares them.

A runner tells with its entry on the roster which its code declares. One that nobody declares, although
somebody alive knows its task, or another task that was in the same module, is no longer in the code, and rests from
then on; it is kept, with its uid and its count, and goes on from the moment somebody declares it again. A fleet that is
down, or a runner with other modules, retires nothing. One that was damaged, and set aside, is stored anew, and counts
from then; one that a person deleted comes back when a runner starts. In a rolling deploy the old and the new
code's schedules are both there until the last old runner is gone.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from holdfast.engine.schedule_book import ScheduleBook
from holdfast.engine.triggers import TriggerBook
from holdfast.errors import CorruptRecord, UsageError
from holdfast.lifecycle.schedules import KIND, Call, Rules, ScheduleRecord
from holdfast.schedules import Schedule as Timing
from holdfast.store.contract import Store

log = logging.getLogger("holdfast.schedules")

_CLOCKS_DIFFER_SECONDS = 5.0  # of whoever sets something aside, and of whoever looks


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as code declares it."""

    timing: Timing
    call: Call
    rules: Rules = Rules()
    name: str = ""
    beside: tuple[str, ...] = ()


def by_name(declared: Sequence[Declaration]) -> dict[str, Declaration]:
    """One without a name is called by its task and a digest of its timing. What else is said about it, and about its
    task, may be changed by a deploy, and it has to stay the same schedule: else the old and the new would both fire.
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
    def __init__(
        self,
        store: Store,
        book: ScheduleBook,
        declared: Sequence[Declaration],
        *,
        app: str,
        triggers: TriggerBook | None = None,
    ) -> None:
        self._store = store
        self._triggers = triggers
        self._book = book
        self._declared = by_name(declared)
        self._app = app
        self._told_of: set[str] = set()
        self._seen: set[str] = set()
        self._seen_at = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        schedules = [f"schedule:{name}" for name in self._declared]
        return tuple(sorted([*schedules, *(self._triggers.names if self._triggers else ())]))

    async def register(self) -> None:
        """Store what is new, change what says something else now, wake what was retired. Nothing fires by that."""
        stored = {record.name: record for record in await self._book.all()} if self._declared else {}
        for name, each in self._declared.items():
            try:
                await self._ensure(name, each, stored.get(name))
            except CorruptRecord as error:  # a newer version may have written it; the runner works all the same
                log.error("%s; as it is declared here, it is not stored", error)
        self._seen, self._seen_at = set(self._declared), self._store.now()
        if self._triggers is not None:
            await self._triggers.register()

    async def _make_up(self) -> None:
        """Store anew what this code declares and what was set aside since the last look."""
        now = self._store.now()
        there = {entry.name for entry in await self._store.entries(self._app, KIND, list(self._declared))}
        gone = self._seen - there
        damaged = set()
        if gone:  # what a person has deleted is in no quarantine
            for aside in await self._store.quarantined(self._app):
                if aside.kind == KIND and aside.at >= self._seen_at - _CLOCKS_DIFFER_SECONDS:
                    damaged.add(aside.id)
        for name in sorted(gone & damaged):
            log.warning("store the schedule '%s' anew: it was damaged, and set aside. It is not paused", name)
            await self._ensure(name, self._declared[name], None)
        self._seen, self._seen_at = there | (gone & damaged), now

    async def _ensure(self, name: str, declared: Declaration, there: ScheduleRecord | None) -> None:
        if there is None:
            fresh = self._book.new(name, declared.timing, declared.call, declared.rules, declared=True)
            there = await self._book.ensure(replace(fresh, beside=declared.beside))
        if not there.declared:
            raise UsageError(
                f"the schedule '{name}' is declared in code, and one of that name was created at run time; "
                "delete that, or give the declared one another name"
            )
        if any(getattr(there, field) != value for field, value in _as_declared(declared, there, 0.0).items()):
            await self._book.change(name, functools.partial(_as_declared, declared))

    async def retire(self) -> None:
        """A duty: let rest what no code declares any more, and wake what some code declares again."""
        if self._triggers is not None:
            await self._triggers.retire()
        if self._declared:
            await self._make_up()
        stored = [record for record in await self._book.all() if record.declared]
        if not stored:
            return
        roster = await self._store.roster(self._app)
        declared = {name for runner in roster for name in runner.declares}
        known = {task for runner in roster for task in runner.tasks}
        for record in stored:
            if f"schedule:{record.name}" in declared:
                if record.retired_at is not None:
                    await self._book.change(record.name, lambda record, now: {"retired_at": None, "through": now})
            elif record.retired_at is None and not known.isdisjoint((record.call.task, *record.beside)):
                log.warning("schedule '%s' is no longer declared by any code, and rests", record.name)
                await self._book.change(record.name, lambda record, now: {"retired_at": record.retired_at or now})
            elif record.retired_at is None and record.name not in self._told_of:
                # Another program's, which is down for a while; or the task is gone from the code, and calls pile up.
                self._told_of.add(record.name)
                log.warning(
                    "schedule '%s' calls %s, which no living runner knows: its calls wait. Delete it if that is gone",
                    record.name,
                    record.call.task,
                )


def _as_declared(declared: Declaration, record: ScheduleRecord, now: float) -> dict[str, object]:
    """What of a stored schedule has to be changed. Another timing counts from now on, and so does a revival."""
    fields: dict[str, object] = {"call": declared.call, "rules": declared.rules, "beside": declared.beside}
    if record.timing != declared.timing or record.retired_at is not None:
        fields |= {"timing": declared.timing, "retired_at": None, "through": now}
    return fields
