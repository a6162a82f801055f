"""What the engine has to know about a task."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from holdfast.engine.concurrency import Concurrency, RunningConcurrency
from holdfast.engine.time_limits import TimeLimits
from holdfast.errors import UsageError
from holdfast.execution.declared import MAINS, why_unreachable
from holdfast.lifecycle.limits import Limit
from holdfast.lifecycle.pacing import Pacing
from holdfast.lifecycle.records import PLAIN, Terms, lane_of
from holdfast.lifecycle.retention import RETENTION_SECONDS, agreed
from holdfast.lifecycle.retries import Never, Policy, as_policy, dump_policy, queues_of
from holdfast.lifecycle.schedules import Rules
from holdfast.lifecycle.triggers import WITHIN_SECONDS, Argument, Condition
from holdfast.schedules.timing import Schedule as Timing


class Place(StrEnum):
    """What kind of place a task runs in."""

    THREAD = "thread"
    LOOP = "loop"
    PROCESS = "process"
    APART = "apart"  # a process for one call: for work that is suspected of crashing


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A condition as code declares it: what of it is data, what is code, and a timing if it is about time."""

    condition: Condition | None = None
    where: Callable[[Any], bool] | None = None  # of the payload or the result
    called_with: Callable[[Any], bool] | None = None  # of the arguments of what ended
    timing: Timing | None = None


class TaskTrigger(msgspec.Struct, frozen=True, kw_only=True):
    """What calls a task when something happens, as code declares it. Each part is as in `TriggerRecord`."""

    clauses: tuple[tuple[tuple[Asked, ...], ...], ...]
    arguments: tuple[Argument, ...] = ()
    provider: Callable[..., Mapping[str, Any]] | None = None  # makes the arguments, of all that has happened
    within_seconds: float = WITHIN_SECONDS
    name: str = ""

    @property
    def asked(self) -> tuple[Asked, ...]:
        return tuple(each for clause in self.clauses for member in clause for each in member)


class TaskSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """When a task is called by itself, and with what."""

    timing: Timing
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    rules: Rules = Rules()
    name: str = ""


class TaskDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A task as declared in code. Its `fingerprint` changes when its signature or its options do."""

    name: str
    function: Callable[..., Any]
    signature: inspect.Signature
    place: Place
    queue: str = "default"
    tags: tuple[str, ...] = ()
    priority: int = 0
    aliases: tuple[str, ...] = ()
    at_most_once: bool = False
    concurrency: Concurrency = Concurrency()
    registration: Concurrency = Concurrency()  # of which calls only one waits for its start
    raises_on_different_twin: bool = False
    pacing: Pacing | None = None
    retries: Policy = Never()
    retention: Mapping[str, float | None] = msgspec.field(default_factory=dict)  # by outcome; None: for ever
    time: TimeLimits = TimeLimits()
    schedules: tuple[TaskSchedule, ...] = ()
    triggers: tuple[TaskTrigger, ...] = ()
    is_hidden: bool = False  # ours, not a user's: it decides for a trigger

    @property
    def fingerprint(self) -> str:
        options = map(str, msgspec.structs.astuple(self.concurrency))
        facts = (str(self.signature), self.place, self.queue, ",".join(self.tags), str(self.priority), *options)
        return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]

    def terms(self, retention_seconds: float = RETENTION_SECONDS) -> Terms:
        """What is agreed with each call; `retention_seconds` is how long it is kept if the task does not say."""
        policy = None if isinstance(self.retries, Never) else dump_policy(self.retries)
        retention = agreed(self.retention, retention_seconds)
        terms = PLAIN if policy is None and retention is None else Terms(retries=policy, retention=retention)
        return self.time.added_to(terms)

    @property
    def limit(self) -> Limit | None:
        """How many may run at once under one key, if that is limited."""
        return None if self.concurrency.mode is RunningConcurrency.DISABLED else self.concurrency.limit

    @property
    def is_coroutine(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which stored invocations may call for it."""
        return (self.name, *self.aliases)

    @property
    def queues(self) -> frozenset[str]:
        """Where its calls are unless they say otherwise: its own queue, and those that its retries move them to."""
        return queues_of(self.retries) | {self.queue}

    @property
    def lanes(self) -> tuple[str, ...]:
        return tuple(lane_of(self.queue, name, self.tags) for name in self.names)


def retries_of(retries: Policy | int | None, at_most_once: bool) -> Policy:
    """The policy of a declaration. Raises `UsageError`."""
    policy = as_policy(retries)
    if at_most_once and not isinstance(policy, Never):
        raise UsageError("at_most_once=True and retries= contradict each other: one of them is too much")
    return policy


def names_of(definitions: Iterable[TaskDefinition]) -> tuple[str, ...]:
    return tuple(sorted(name for task in definitions for name in task.names))


def limits_of(definitions: Iterable[TaskDefinition]) -> dict[str, Limit | None]:
    """The limit of each task, or None if it has none, by every name under which it is called for."""
    return {name: task.limit for task in definitions for name in task.names}


def place_for(function: Callable[..., Any], executor: str | None) -> Place:
    """Where a function runs: plain ones on a thread and coroutine functions on the loop, unless something else is
    asked for. Raises `UsageError`.
    """
    usual = Place.LOOP if inspect.iscoroutinefunction(function) else Place.THREAD
    if executor is None or executor == usual:
        return usual
    if executor != Place.PROCESS:
        kind = "a coroutine function" if usual is Place.LOOP else "a plain function"
        raise UsageError(f"executor={executor!r}: {kind} runs in '{usual}', where it runs anyway, or in 'process'")
    if why := why_unreachable(function):
        raise UsageError(f'executor="process" needs a function at the top level of a module: {why}')
    return Place.PROCESS


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:
        raise UsageError(f"{function!r} does not tell its parameters; wrap it in a function that does") from None


def import_name(function: Callable[..., Any]) -> str:
    """How a task is called:

    ``module:function``. A module that is run as a program is called by the name under which others import it.
    """
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module is None or qualname is None:
        raise UsageError(f"{function!r} has no name to find it by again; give name='…'")
    if "<lambda>" in qualname:
        raise UsageError("a lambda has no name to find it by again; use a named function, or give name='…'")
    if module in MAINS:
        main = sys.modules.get(module)
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        if spec is not None:
            module = spec.name
        elif file is not None:
            module = Path(file).stem
    module = module.removesuffix(".__main__")
    return f"{module}:{qualname.replace('<locals>.', '')}"


def is_redefined(old: TaskDefinition, new: TaskDefinition) -> bool:
    """Whether a notebook or a prompt has run the same cell again: the new function then takes the old one's place."""
    interactive = not hasattr(sys.modules["__main__"], "__file__")
    names = [(getattr(d.function, "__module__", None), getattr(d.function, "__qualname__", "")) for d in (old, new)]
    return interactive and names[0] == names[1] and names[0][0] == "__main__"


def where_of(function: Callable[..., Any]) -> str:
    """File and line."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)
