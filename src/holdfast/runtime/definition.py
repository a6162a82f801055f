"""Describe a task to the engine: its function, where it runs, its limits, retries, retention and time limits."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from holdfast.clock import Duration, format_duration, length_of
from holdfast.errors import UsageError
from holdfast.executors.declared import MAINS, why_unreachable
from holdfast.executors.injection import InjectedParameter, wanted_by, without
from holdfast.model.limits import Limit, limit_key
from holdfast.model.pacing import Pacing
from holdfast.model.rates import Rate, rate_key
from holdfast.model.records import (
    OUTCOMES,
    PLAIN,
    RETENTION_SECONDS,
    SHORTEST_SECONDS,
    Terms,
    agreed_retention,
    lane_of,
)
from holdfast.model.retries import Never, Policy, as_policy, dump_policy, queues_of

ALL_ARGUMENTS = ("*",)
Retention = Duration | Mapping[str, Duration | None] | None
"""How long ended calls are kept: a time, "forever" or None, or one for each outcome."""


class TimeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """In seconds; None where there is no limit, or for the grace what the settings say."""

    timeout: float | None = None
    soft_timeout: float | None = None
    expires: float | None = None
    cancel_grace: float | None = None
    cancel_children: bool = True

    def __post_init__(self) -> None:
        if self.timeout is not None and self.soft_timeout is not None and self.soft_timeout >= self.timeout:
            soft, hard = format_duration(self.soft_timeout), format_duration(self.timeout)
            raise UsageError(f"soft_timeout={soft} is not before timeout={hard}, so it would never take effect")

    def changed(self, given: Mapping[str, Any]) -> TimeLimits:
        """Return these limits, changed by the options that are given."""
        fields: dict[str, Any] = {}
        for name, check in _TIME_CHECKS.items():
            if (value := given.get(name)) is not None:
                fields[name] = check(name, value)
        return msgspec.structs.replace(self, **fields)

    def added_to(self, terms: Terms) -> Terms:
        agreed = msgspec.structs.replace(
            terms,
            timeout=self.timeout,
            soft_timeout=self.soft_timeout,
            cancel_grace=self.cancel_grace,
            cancel_children=self.cancel_children,
        )
        return PLAIN if agreed == PLAIN else agreed


def limit_of(name: str, limit: Duration) -> float:
    if not (seconds := length_of(name, limit)):
        raise UsageError(f"{name}=0 leaves no time at all; leave it out for no limit")
    return seconds


def flag(name: str, value: bool) -> bool:
    """Return the flag. Raises `UsageError` for other values: Python would take "no" for True."""
    if not isinstance(value, bool):
        raise UsageError(f"{name}={value!r:.80}: expected True or False")
    return value


_TIME_CHECKS: dict[str, Callable[[str, Any], float | bool]] = {
    **dict.fromkeys(("timeout", "soft_timeout", "expires"), limit_of),
    "cancel_grace": length_of,
    "cancel_children": flag,
}


class ExecutorKind(StrEnum):
    """Which executor runs the calls of a task."""

    THREAD = "thread"
    LOOP = "loop"
    PROCESS = "process"
    WORKFLOW = "workflow"  # a body that is replayed from its log
    ISOLATED = "isolated"  # a process for one call: for work that is suspected of crashing


class TaskDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A task as declared in code. Its `fingerprint` changes when its signature or its options do."""

    name: str
    function: Callable[..., Any]
    signature: inspect.Signature
    executor: ExecutorKind
    queue: str = "default"
    tags: tuple[str, ...] = ()
    priority: int = 0
    aliases: tuple[str, ...] = ()
    at_most_once: bool = False
    limit: Limit | None = None  # how many calls run at once
    limit_by: tuple[str, ...] = ()  # calls with equal values of these arguments share a limit
    rate: Rate | None = None  # how many calls start in a time
    rate_by: tuple[str, ...] = ()  # calls with equal values of these arguments share a rate
    rate_name: str | None = None  # tasks with the same name share a rate
    unique: bool = False  # one call of a kind waits for its start; also of a task with debounce or throttle
    unique_by: tuple[str, ...] = ()  # calls with equal values of these arguments are of a kind
    raises_when_different: bool = False
    spelled: Mapping[str, str] = msgspec.field(default_factory=dict)  # options that were given by an older name
    pacing: Pacing | None = None
    retries: Policy = Never()
    retention: Mapping[str, float | None] = msgspec.field(default_factory=dict)  # by outcome; None: for ever
    time: TimeLimits = TimeLimits()
    validate: str | None = None  # "submit", "off"; None: as the app says
    schedules: tuple[Any, ...] = ()  # `holdfast.schedules.options.TaskSchedule`
    triggers: tuple[Any, ...] = ()  # `holdfast.triggers.conditions.Trigger`
    wanted: tuple[InjectedParameter, ...] = ()  # parameters that a worker fills in
    check: Callable[..., object] | None = None  # raises `UsageError` for arguments that are not to be stored
    is_hidden: bool = False  # ours, not a user's: it decides for a trigger, or is a step that was sent elsewhere
    body: str = ""  # of a workflow: the fingerprint of its code
    log_lines: int = 0  # how many of the last lines that a call logs are kept with it

    @property
    def fingerprint(self) -> str:
        # In the form of earlier versions: a parked call with another fingerprint would be tried again.
        limit = self.limit or Limit(1)
        mode = {(): "task", ALL_ARGUMENTS: "arguments"}.get(self.limit_by, "keys") if self.limit else "disabled"
        options = (
            mode,
            str(self.limit_by if mode == "keys" else ()),
            f"Limit(most={limit.max_running}, waits={limit.waits})",
        )
        facts: tuple[str, ...] = (
            str(self.signature),
            self.executor,
            self.queue,
            ",".join(self.tags),
            str(self.priority),
            *options,
        )
        if self.body:
            facts = (*facts, self.body)
        return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]

    @property
    def is_workflow(self) -> bool:
        return self.executor is ExecutorKind.WORKFLOW

    def terms(
        self,
        retention_seconds: float = RETENTION_SECONDS,
        *,
        retries: Policy | None = None,
        kept: Mapping[str, float | None] | None = None,
    ) -> Terms:
        """Return the terms of each call; `retention_seconds` is for a task without its own retention. `retries` and
        `kept`, by outcome, are of a single call.
        """
        chosen = self.retries if retries is None else retries
        policy = None if isinstance(chosen, Never) else dump_policy(chosen)
        retention = agreed_retention({**self.retention, **(kept or {})}, retention_seconds)
        terms = PLAIN if policy is None and retention is None else Terms(retries=policy, retention=retention)
        if self.rate is not None:
            terms = msgspec.structs.replace(terms, rate_key=self.rate_key())
        return self.time.added_to(terms)

    def rate_key(self, digest: str = "") -> str:
        """Return the key of the rate of its calls, or of those with this digest."""
        return rate_key(self.rate_name or self.name, digest)

    def waits_under(self, digest: str = "") -> str | None:
        """Return the key under which its calls, or those with this digest, wait for a slot or for a start."""
        if self.limit is not None:
            return limit_key(self.name, digest)
        return None if self.rate is None else self.rate_key(digest)

    def shared(self, by: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of these arguments of a call, with defaults: equal for calls that belong together."""
        if not by:
            return {}
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return {name: bound.arguments[name] for name in (bound.arguments if by == ALL_ARGUMENTS else by)}

    def spelling(self, option: str) -> str:
        """Return the name by which the declaration gives this option."""
        return self.spelled.get(option, option)

    @property
    def is_coroutine(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names under which stored invocations may call for it."""
        return (self.name, *self.aliases)

    @property
    def queues(self) -> frozenset[str]:
        """Return its own queue, and the queues that its retries move calls to."""
        return queues_of(self.retries) | {self.queue}

    @property
    def lanes(self) -> tuple[str, ...]:
        return tuple(lane_of(self.queue, name, self.tags) for name in self.names)


def retries_of(retries: Policy | int | None, at_most_once: bool) -> Policy:
    """Return the policy of a declaration. Raises `UsageError`."""
    policy = as_policy(retries)
    if at_most_once and not isinstance(policy, Never):
        raise UsageError("at_most_once=True and retries= contradict each other: one of them is too much")
    return policy


def retention_of(given: Retention) -> dict[str, float | None]:
    """Return how long ended calls are kept, by outcome; None for ever. Raises `UsageError`."""
    each = dict(given) if isinstance(given, Mapping) else dict.fromkeys(OUTCOMES, given)
    kept: dict[str, float | None] = {}
    for outcome, duration in each.items():
        if outcome not in OUTCOMES:
            raise UsageError(f"retention= for {outcome!r}: a call ends as {', '.join(OUTCOMES)}")
        kept[outcome] = seconds = None if duration in (None, "forever") else length_of("retention", duration)
        if seconds is not None and seconds < SHORTEST_SECONDS:
            raise UsageError(
                f"retention={duration!r} is too short: an ended invocation is kept for at least "
                f"{format_duration(SHORTEST_SECONDS)}, so that waiting callers find it"
            )
    return kept


def names_of(definitions: Iterable[TaskDefinition]) -> tuple[str, ...]:
    return tuple(sorted(name for task in definitions for name in task.names))


def limits_of(definitions: Iterable[TaskDefinition]) -> dict[str, Limit | None]:
    """Return the limit of each task, or None, by each of its names."""
    return {name: task.limit for task in definitions for name in task.names}


def rates_of(definitions: Iterable[TaskDefinition]) -> dict[str, tuple[str, Rate] | None]:
    """Return the rate of each task, with the name under which it can be changed, or None, by each of its names."""
    return {
        name: None if task.rate is None else (task.rate_name or task.name, task.rate)
        for task in definitions
        for name in task.names
    }


def executor_for(function: Callable[..., Any], executor: str | None) -> ExecutorKind:
    """Return where a function runs: a plain one on a thread, a coroutine function on the loop, or as asked for.

    Raises `UsageError`.
    """
    usual = ExecutorKind.LOOP if inspect.iscoroutinefunction(function) else ExecutorKind.THREAD
    if executor is None or executor == usual:
        return usual
    if executor != ExecutorKind.PROCESS:
        kind = "a coroutine function" if usual is ExecutorKind.LOOP else "a plain function"
        raise UsageError(f"executor={executor!r}: {kind} runs in '{usual}', where it runs anyway, or in 'process'")
    if why := why_unreachable(function):
        raise UsageError(f'executor="process" needs a function at the top level of a module: {why}')
    return ExecutorKind.PROCESS


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the parameters that a call gives; a worker fills in the others."""
    try:
        return without(inspect.signature(function), wanted_by(function))
    except ValueError:
        raise UsageError(f"{function!r} shows no parameters; wrap it in a function that does") from None


def import_name(function: Callable[..., Any]) -> str:
    """Return ``module:function``. A module that is run as a program goes by the name that others import it by."""
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
    """Return whether a notebook or a prompt has run the same cell again: the new function replaces the old one."""
    interactive = not hasattr(sys.modules["__main__"], "__file__")
    names = [(getattr(d.function, "__module__", None), getattr(d.function, "__qualname__", "")) for d in (old, new)]
    return interactive and names[0] == names[1] and names[0][0] == "__main__"


def where_of(function: Callable[..., Any]) -> str:
    """Return file and line."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)
