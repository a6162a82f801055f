"""Triggers: which happenings call a task, and with what. All of it is data, so any process with the store can decide.

Something happens: an event, the end of an invocation, a schedule's tick. It has `Facts`. A trigger fires if one of its
clauses holds: a clause has members, all of which something must have happened for; a member has conditions, one of
which must hold. A clause with one member fires for each happening. Happenings for one with several are kept until there
is one for each member (see `joins`).

What calls for code, a predicate or a function that makes the arguments, is not decided here: such a trigger names a
task that only runners with that code know (`evaluator`), and each happening is a call of that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.codec import DataCodec, ErrorRecord
from holdfast.codec.data import MISSING, at_path, fields_of, is_same, is_within
from holdfast.codec.values import Opaque
from holdfast.ids import InvocationId, derived_id
from holdfast.model.decoding import Count, Moment, Seconds
from holdfast.model.records import Entry, Source, entry_reader
from holdfast.model.status import FINAL, Status
from holdfast.schedules.records import StoredCall

KIND = "trigger"
EVENT, END, TICK = "event", "end", "tick"
DATA = DataCodec()
WITHIN_SECONDS = 86_400.0
LONGEST_PATH = 10
LONGEST_MESSAGE = 4096  # of an error, that is searched: others write it, and every writer of ends searches


class OnEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="event"):
    """An event of this name, whose payload has these values (`where`, encoded, by path)."""

    name: str
    where: bytes = b""
    correlate: str = ""  # path in the payload

    def holds(self, facts: Facts) -> bool:
        return (
            facts.source.kind in (EVENT, TICK)
            and facts.source.name == self.name
            and (not self.where or is_within(DATA.decode(self.where), facts.payload))
        )

    def correlation(self, facts: Facts) -> Any:
        return at_path(facts.payload, self.correlate)

    def __str__(self) -> str:
        if self.name.startswith(TICKS):
            return f"a tick of the schedule '{self.name.removeprefix(TICKS)}'"
        return f"the event '{self.name}'" + _with("", self.where)


class OnEnd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="end"):
    """An invocation of this task ends so: as one of these statuses, called with, returning, raising."""

    tasks: tuple[str, ...]  # its name, and older ones under which stored work may still run
    statuses: tuple[Status, ...]
    called_with: bytes = b""  # values of arguments, by path
    where: bytes = b""  # values in the result, by path
    equals: bytes = b""  # the whole result
    errors: tuple[str, ...] = ()  # names of classes, one of which it is
    message: str = ""  # a regular expression that is found in the error's text
    parameters: tuple[str, ...] = ()  # of the task, by position
    defaults: bytes = b""  # of its parameters
    correlate: str = ""  # path in the arguments

    def holds(self, facts: Facts) -> bool:
        return (
            facts.source.kind == END
            and facts.source.name in self.tasks
            and facts.status in self.statuses
            and (not self.called_with or is_within(DATA.decode(self.called_with), self.arguments(facts)))
            and (not self.where or is_within(DATA.decode(self.where), facts.result))
            and (not self.equals or is_same(DATA.decode(self.equals), facts.result))
            and self._raised(facts.error)
        )

    def _raised(self, error: ErrorRecord | None) -> bool:
        if not self.errors and not self.message:
            return True
        if error is None:
            return False
        known = {error.type_name, *error.bases}
        names = known | {name.rpartition(":")[2] for name in known} | {name.replace(":", ".") for name in known}
        return (not self.errors or not names.isdisjoint(self.errors)) and (
            not self.message or re.search(self.message, error.message[:LONGEST_MESSAGE]) is not None
        )

    def arguments(self, facts: Facts) -> dict[str, Any]:
        """Return the arguments of the ended task by name, with the defaults."""
        named = DATA.decode(self.defaults) if self.defaults else {}
        return {**named, **dict(zip(self.parameters, facts.args, strict=False)), **facts.kwargs}

    def correlation(self, facts: Facts) -> Any:
        found = at_path(self.arguments(facts), self.correlate)
        return at_path(facts.result, self.correlate) if found is MISSING else found

    def __str__(self) -> str:
        raised = f" with {' or '.join(self.errors)}" if self.errors else ""
        said = f" saying /{self.message}/" if self.message else ""
        returned = f" with {DATA.decode(self.equals)!r}" if self.equals else _with("", self.where)
        called = _with(", called", self.called_with)
        return f"{self.tasks[0]} ends as {' or '.join(self.statuses)}{returned}{raised}{said}{called}"


def _with(before: str, where: bytes) -> str:
    if not where:
        return ""
    return f"{before} with " + ", ".join(f"{path}={value!r}" for path, value in DATA.decode(where).items())


Condition = OnEvent | OnEnd
Member = tuple[Condition, ...]
Clause = tuple[Member, ...]
TICKS = "schedule:"
"""What the name of a tick begins with, where a tick is one of several things that have to happen."""


class Argument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where an argument of the call is taken from; without a `name`, all that is there goes by its own names."""

    name: str = ""
    value: bytes | None = None  # this one, encoded
    part: str = ""  # event, arguments, result, error or cause
    path: str = ""
    of: str = ""  # which event or task, if several happenings are put together


class TriggerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger as it is stored."""

    app: str
    name: str
    clauses: tuple[Clause, ...]
    call: StoredCall
    arguments: tuple[Argument, ...] = ()
    takes: tuple[str, ...] | None = None  # the parameters of the task; None: any
    within_seconds: Seconds = WITHIN_SECONDS  # between the first and the last happening of a firing
    evaluator: str = ""  # the task that decides, if code is called for
    module_tasks: tuple[str, ...] = msgspec.field(
        default=(), name="beside"
    )  # other tasks of the declaring module: a runner that knows one has the module
    retired_at: Moment | None = None
    created_at: Moment = 0.0
    version: Count = 1

    @property
    def conditions(self) -> tuple[Condition, ...]:
        return tuple(each for clause in self.clauses for member in clause for each in member)

    def wants(self, event: str) -> bool:
        """Return whether a condition is about events of this name."""
        return any(isinstance(each, OnEvent) and each.name == event for each in self.conditions)

    def __str__(self) -> str:
        clauses = [
            " and ".join(_either([str(condition) for condition in member], len(clause) > 1) for member in clause)
            for clause in self.clauses
        ]
        return _either(clauses, False)


def _either(parts: Sequence[str], apart: bool) -> str:
    text = " or ".join(parts)
    return f"({text})" if apart and len(parts) > 1 else text


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened, and what can be asked about it."""

    source: Source
    at: float
    depth: int = 0
    path: tuple[str, ...] = ()
    payload: Any = None
    status: Status | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    result: Any = None
    error: ErrorRecord | None = None

    def part(self, argument: Argument, conditions: Sequence[Condition]) -> Any:
        """Return the value for an argument; `MISSING` if it is not there, or comes from another happening."""
        if argument.of and argument.of != self.source.name:
            return MISSING
        arguments = next(
            (each.arguments(self) for each in conditions if isinstance(each, OnEnd) and self.source.name in each.tasks),
            dict(self.kwargs),
        )
        is_event = self.source.kind != END
        error = self.error
        match argument.part:
            case "event":
                return at_path(self.payload, argument.path) if is_event else MISSING
            case "arguments":
                return MISSING if is_event else at_path(arguments, argument.path)
            case "result":
                return at_path(self.result, argument.path) if self.status is Status.SUCCESS else MISSING
            case "error":
                return MISSING if error is None else at_path(error_fields(error), argument.path)
        return at_path(self.as_data(arguments), argument.path)

    def as_data(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return all facts as data."""
        known = {"kind": self.source.kind, "id": self.source.id, "name": self.source.name, "at": self.at}
        if self.source.kind != END:
            return known | {"payload": self.payload}
        ended = known | {"status": str(self.status), "arguments": dict(arguments)}
        return ended | ({"result": self.result} if self.error is None else {"error": error_fields(self.error)})


def error_fields(error: ErrorRecord) -> dict[str, str]:
    return {"type": error.type_name, "message": error.message, "traceback": error.traceback}


def picked(trigger: TriggerRecord, facts: Facts) -> dict[str, Any]:
    """Return what this happening gives to the arguments of the call."""
    found: dict[str, Any] = {}
    for each in trigger.arguments:
        if each.value is not None:
            continue
        value = facts.part(each, trigger.conditions)
        if each.name and value is not MISSING:
            found[each.name] = value
        elif not each.name and isinstance(value, Mapping | Opaque):
            fields = fields_of(value) if isinstance(value, Opaque) else value
            takes = [name for name in fields if isinstance(name, str)] if trigger.takes is None else trigger.takes
            found |= {name: fields[name] for name in takes if name in fields}
    return found


def combine(trigger: TriggerRecord, parts: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of the call, and the names of missing ones."""
    fixed = {each.name: DATA.decode(each.value) for each in trigger.arguments if each.value is not None}
    found = {name: value for part in reversed(parts) for name, value in part.items()} | fixed
    wanted = [each.name for each in trigger.arguments if each.name]
    return found, [name for name in wanted if name not in found]


def fired_id(trigger: TriggerRecord, clause: int, sources: Sequence[Source], at: float) -> InvocationId:
    """Return the id of a firing's invocation; for a single source it does not depend on the clause."""
    where = "" if len(sources) == 1 else str(clause)
    return derived_id("fired", trigger.app, trigger.name, where, *[f"{s.kind}:{s.id}" for s in sources], at=at)


def evaluation_id(trigger: TriggerRecord, source: Source, at: float) -> InvocationId:
    return derived_id("evaluated", trigger.app, trigger.name, f"{source.kind}:{source.id}", at=at)


def longer(path: Sequence[str], task: str) -> tuple[str, ...]:
    return (*path, task)[-LONGEST_PATH:]


def to_entry(record: TriggerRecord) -> Entry:
    body = msgspec.json.encode(record)
    return Entry(app=record.app, kind=KIND, name=record.name, body=body, version=record.version)


def _check(record: TriggerRecord) -> None:
    for each in record.conditions:
        if isinstance(each, OnEnd):
            re.compile(each.message)
        str(each)  # decodes its values


from_entry = entry_reader(TriggerRecord, KIND, check=_check)


def cycles(triggers: Sequence[TriggerRecord]) -> list[tuple[str, ...]]:
    """Return the circles of tasks whose ends trigger each other, each once."""
    leads: dict[str, set[str]] = {}
    for trigger in triggers:
        for each in trigger.conditions:
            if isinstance(each, OnEnd):
                leads.setdefault(each.tasks[0], set()).add(trigger.call.task)
    found: dict[frozenset[str], tuple[str, ...]] = {}

    steps = iter(range(_MAX_STEPS))

    def walk(path: tuple[str, ...]) -> None:
        for after in sorted(leads.get(path[-1], ())):
            if next(steps, None) is None:
                return
            if after in path:
                circle = path[path.index(after) :]
                found.setdefault(frozenset(circle), (*circle, after))
            elif len(path) < _LONGEST_CIRCLE:
                walk((*path, after))

    for task in sorted(leads):
        walk((task,))
    return list(found.values())


_LONGEST_CIRCLE = 8
_MAX_STEPS = 10_000  # where everything leads to everything, a few circles say enough
ENDS = tuple(status for status in Status if status in FINAL)
