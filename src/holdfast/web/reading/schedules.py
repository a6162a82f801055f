"""Questions about schedules and triggers: when each is due, what became of its ticks, and what calls what."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import CorruptRecord
from holdfast.model.explain import living
from holdfast.model.names import unversioned
from holdfast.model.records import InvocationRecord, Quarantined, RunnerRecord
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.engine import Engine
from holdfast.runtime.runs import Stored
from holdfast.runtime.wait import get_readable
from holdfast.schedules.api import Schedules
from holdfast.schedules.records import KIND, ScheduleRecord, from_entry
from holdfast.schedules.rules import invocation_id
from holdfast.schedules.service import set_aside
from holdfast.schedules.timing import Cron
from holdfast.schedules.zones import find_zone
from holdfast.showing import fields, length, moment
from holdfast.triggers import rules as trigger_rules
from holdfast.triggers.rules import OnEnd, OnEvent, TriggerRecord
from holdfast.web.documents import Document, stored_document

_RULES = {"starts_at": "start", "ends_at": "end"}  # as options and documents call them
_STRIP = 20  # last ticks with what became of them
_LOOKED_BACK = 2000  # ticks, to find the last ones


class ScheduleList(NamedTuple):
    """The schedules of an app by name, with the invocations of their last ticks that are still kept."""

    records: Sequence[ScheduleRecord]
    unreadable: Mapping[str, str]
    last: Mapping[str, InvocationRecord]
    unserved: Sequence[str]
    now: float

    def document(self) -> Document:
        found = [schedule_document(each, self.last.get(each.name)) for each in self.records]
        return {"schedules": found, "unreadable": dict(self.unreadable)}


class PastTick(NamedTuple):
    """A tick that has been due, and the invocation that it submitted, if that is still kept."""

    at: float
    record: InvocationRecord | None


class WholeSchedule(NamedTuple):
    """Everything about one schedule. `past` are its last ticks, oldest first; `aside` is an earlier schedule of its
    name that could not be read.
    """

    record: ScheduleRecord
    last: InvocationRecord | None
    next: Sequence[float]
    past: Sequence[PastTick]
    unserved: Sequence[str]
    aside: Quarantined | None
    now: float

    def document(self, codec: Any) -> Document:
        past = [
            {
                "tick": moment(tick.at),
                "id": tick.record and tick.record.id,
                "status": tick.record and tick.record.status,
            }
            for tick in self.past
        ]
        call = self.record.call
        return schedule_document(self.record, self.last) | {
            "arguments": stored_document(codec, Stored(call.arguments, codec), call_of=call.task),
            "next": [moment(at) for at in self.next],
            "past": past,
            "notes": list(self.unserved),
        }


class TriggerList(NamedTuple):
    """The triggers of an app, by name."""

    records: Sequence[TriggerRecord]
    unreadable: Mapping[str, str]

    def document(self) -> Document:
        return {"triggers": [trigger_document(each) for each in self.records], "unreadable": dict(self.unreadable)}


class ScheduleReading:
    """Ask for schedules and triggers. Each method runs on the engine's loop."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime

    async def all(self) -> ScheduleList:
        engine = await self._runtime.engine()
        records, unreadable = [], {}
        for entry in await engine.store.entries(engine.app, KIND):
            try:
                records.append(from_entry(entry))
            except CorruptRecord as error:
                unreadable[entry.name] = str(error)
        last, unserved = await last_calls(engine, records), await self._unserved(engine, records)
        return ScheduleList(records, unreadable, last, unserved, engine.store.now())

    async def one(self, name: str, count: int = 5) -> WholeSchedule:
        """Return one schedule with its next and last ticks. Raises `UnknownSchedule`."""
        engine = await self._runtime.engine()
        record = await Schedules(self._runtime).aget(name)
        times = [at.timestamp() for at in await Schedules(self._runtime).anext_times(name, count)]
        return WholeSchedule(
            record,
            (await last_calls(engine, [record])).get(name),
            times,
            await self._past(engine, record),
            await self._unserved(engine, [record]),
            await set_aside(engine.store, engine.app, name),
            engine.store.now(),
        )

    async def triggers(self) -> TriggerList:
        engine = await self._runtime.engine()
        records, unreadable = [], {}
        for entry in await engine.store.entries(engine.app, trigger_rules.KIND):
            try:
                records.append(trigger_rules.from_entry(entry))
            except CorruptRecord as error:
                unreadable[entry.name] = str(error)
        return TriggerList(records, unreadable)

    async def _past(self, engine: Engine, record: ScheduleRecord) -> Sequence[PastTick]:
        """Return the last ticks that are decided. The times follow from the timing, and the ids from these."""
        last = record.progress.last_tick
        if last is None:
            return ()
        ticks = _last_ticks(record, last)
        found = await get_readable(engine.store, engine.app, [invocation_id(record, at) for at in ticks])
        return [PastTick(at, each) for at, each in zip(ticks, found, strict=True)]

    async def _unserved(self, engine: Engine, records: Sequence[ScheduleRecord]) -> Sequence[str]:
        roster = await engine.store.roster(engine.app)
        alive = living(roster, engine.store.now(), self._runtime.settings.dead_after_seconds)
        return unserved(records, alive)


def _last_ticks(record: ScheduleRecord, last: float) -> Sequence[float]:
    """Return the last ticks up to this one: those of a span, which is widened until it has enough of them."""
    begun = max(record.created_at, record.rules.starts_at or -math.inf)
    span, ticks = 60.0, [last]
    while len(ticks) < _STRIP:
        found = list(record.timing.ticks(max(last - span, begun - 1.0), last, _LOOKED_BACK))
        if not found or found[-1] != last:
            break
        ticks = found[-_STRIP:]
        if last - span <= begun:
            break
        span *= 4
    return ticks


async def last_calls(engine: Engine, records: Sequence[ScheduleRecord]) -> dict[str, InvocationRecord]:
    """Return the invocations of their last ticks that are still kept, by the schedule's name."""
    names = {record.progress.last_id: record.name for record in records if record.progress.last_id is not None}
    found = await get_readable(engine.store, engine.app, list(names)) if names else ()
    return {names[invocation.id]: invocation for invocation in found if invocation is not None}


def unserved(records: Sequence[ScheduleRecord], alive: Sequence[RunnerRecord]) -> list[str]:
    """Say of which schedules the calls pile up: runners live, and none of them knows the task."""
    known = {task for runner in alive for task in runner.tasks}
    active = [each for each in records if state_of(each) == "active" and not each.call.event]
    found = []
    for each in active if alive else ():
        if (task := each.call.task) not in known:
            others = sorted(name for name in known if unversioned(name) == unversioned(task))
            helps = f"holdfast schedules update {each.name} {others[-1]}" if others else "start one that does"
            found.append(f"'{each.name}' calls {task}, which no living runner knows, so its calls wait: {helps}")
    return found


# --- a schedule in words and as a document


def state_of(record: ScheduleRecord) -> str:
    if record.retired_at is not None:
        return "retired"
    if record.pause is not None:
        return "paused"
    return "over" if record.next_at is None and not record.progress.queued else "active"


def state_in_words(record: ScheduleRecord) -> str:
    """Return the state; of a pause, also its user and reason."""
    state = state_of(record)
    if state != "paused" or record.pause is None:
        return state
    by = f" by {record.pause.by}" if record.pause.by else ""
    return f"paused{by}" + (f" because {record.pause.why}" if record.pause.why else "")


def clock_of(record: ScheduleRecord, at: float | None) -> str:
    """Return the time on the schedule's own clock: that of its zone, else UTC."""
    if at is None:
        return ""
    zone = find_zone(record.timing.timezone) if isinstance(record.timing, Cron) else dt.UTC
    return dt.datetime.fromtimestamp(at, zone).strftime("%a %Y-%m-%d %H:%M:%S %Z")


def schedule_document(record: ScheduleRecord, invocation: InvocationRecord | None) -> Document:
    progress = record.progress
    last = {"tick": moment(progress.last_tick), "id": progress.last_id} if progress.last_tick is not None else None
    return fields(record, "name", "app", "declared", "retired_at", "next_at", "created_at", "changed_at", "uid") | {
        "state": state_of(record),
        "when": record.timing.describe(),
        "timing": msgspec.to_builtins(record.timing),
        **fields(record.call, "task", "queue", "priority"),
        "rules": {_RULES.get(name, name): value for name, value in fields(record.rules).items()},
        "pause": record.pause and fields(record.pause),
        "last": last and last | {"status": invocation and invocation.status.value},
        "ticks": fields(progress, "fired", "skipped", "missed")
        | {"queued": [moment(tick) for tick in progress.queued]},
    }


# --- triggers


def trigger_document(record: TriggerRecord) -> Document:
    return fields(record, "name", "app", "within_seconds", "created_at", "retired_at") | {
        "task": record.call.task,
        "queue": record.call.queue,
        "when": _when(record),
        "causes": sorted({cause_of(each) for each in record.conditions}),
        "state": "active" if record.retired_at is None else "retired",
        "decided_by": "code" if record.evaluator else "data",
        "evaluator": record.evaluator or None,
    }


def cause_of(condition: OnEvent | OnEnd) -> str:
    """Return what calls: an event by its name, a task by its own, a schedule."""
    if isinstance(condition, OnEnd):
        return f"the end of {condition.tasks[0]}"
    if condition.name.startswith(trigger_rules.TICKS):
        return f"the schedule {condition.name.removeprefix(trigger_rules.TICKS)}"
    return f"the event {condition.name}"


def _when(record: TriggerRecord) -> str:
    if all(len(clause) == 1 for clause in record.clauses):
        return str(record)
    paths = dict.fromkeys(each.correlate for each in record.conditions if each.correlate)
    alike = f" of the same {' or '.join(paths)}" if paths else ""
    return f"{record},{alike} within {length(record.within_seconds)}"
