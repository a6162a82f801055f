"""The options of tasks and of calls, and their checks.

`TaskOptions` is the only list of what ``@app.task(…)`` takes, `CallOptions` of what ``task.options(…)`` takes. A wrong
declaration is refused when its module is imported, not when the first call fails.
"""

from __future__ import annotations

import datetime as dt
import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypedDict, cast

import msgspec

from holdfast.clock import Duration, format_duration, length_of, parse_moment
from holdfast.errors import InvalidSchedule, UsageError
from holdfast.executors.injection import wanted_by
from holdfast.groups import words
from holdfast.model.limits import Limit
from holdfast.model.names import valid_key, valid_name
from holdfast.model.notes import MAX_LINES, check_attributes
from holdfast.model.pacing import Debounce, Pacing, Throttle
from holdfast.model.rates import MAX_LIMIT, rate_of
from holdfast.model.records import HIGHEST_PRIORITY, KEY_SECONDS, LOWEST_PRIORITY
from holdfast.model.retries import Policy
from holdfast.runtime.definition import (
    ALL_ARGUMENTS,
    ExecutorKind,
    Retention,
    TaskDefinition,
    TimeLimits,
    executor_for,
    flag,
    import_name,
    retention_of,
    retries_of,
    signature_of,
    where_of,
)
from holdfast.schedules.options import TaskSchedule, task_schedule
from holdfast.schedules.timing import Cron, Every, Once
from holdfast.triggers.conditions import Trigger, TriggerBuilder, task_trigger
from holdfast.workflows.declaring import GRACE_SECONDS, body_fingerprint, check_body, refuse_options

Executor = Literal["thread", "loop", "process"]
ConcurrencyMode = Literal["disabled", "task", "arguments", "keys"]
_MODES = ("disabled", "task", "arguments", "keys")


class SharedOptions(TypedDict, total=False):
    """Options of a task and of a single call."""

    debounce: Duration | None
    debounce_max_wait: Duration | None
    throttle: Duration | None
    timeout: Duration | None
    soft_timeout: Duration | None
    cancel_grace: Duration | None


class TaskOptions(SharedOptions, total=False):
    """The options of a task; `App.task` says what they mean."""

    name: str | None
    aliases: Iterable[str]
    queue: str
    tags: Iterable[str]
    priority: int
    executor: Executor | None
    at_most_once: bool
    retries: Policy | int | None
    retention: Retention
    limit: int | None
    limit_by: str | Iterable[str] | None
    rate: str | None
    burst: int | None
    rate_by: str | Iterable[str] | None
    rate_name: str | None
    when_full: Literal["wait", "refuse"]
    unique: bool | None
    unique_by: str | Iterable[str] | None
    when_different: Literal["keep", "raise"]
    expires: Duration | None
    cancel_children: bool
    validate: Literal["submit", "off"] | None
    log_lines: int | None
    triggers: Iterable[Cron | Every | Once | TaskSchedule | Trigger | TriggerBuilder]

    # older names, which `present_names` translates
    running_concurrency: ConcurrencyMode
    key_arguments: Iterable[str]
    concurrency_limit: int
    reroute_on_concurrency_control: bool
    registration_concurrency: ConcurrencyMode
    on_diff_non_key_args_raise: bool


class WorkflowOptions(TaskOptions, total=False):
    """The options of a workflow; `App.workflow` says what they mean."""

    version: str | None
    check: bool


class DirectOptions(TaskOptions, total=False):
    """The options of a direct task; `App.direct_task` says what they mean."""

    fan_out: Callable[..., Iterable[Any]]
    aggregate: Callable[[list[Any]], Any]


class CallOptions(SharedOptions, total=False):
    """The options of a call; `Task.options` says what they mean. None leaves an option as it is."""

    delay: Duration | None
    at: dt.datetime | float | None
    priority: int | None
    queue: str | None
    key: str | None
    key_for: Duration | None
    debounce_key: str | None
    throttle_key: str | None
    session: Any
    expires: Duration | dt.datetime | None
    cancel_children: bool | None
    retries: Policy | int | None
    retention: Retention
    attributes: Mapping[str, str] | None
    on_parent_end: Literal["cancel", "continue"] | None


class SubmitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How one call differs from what its task declares."""

    delay_seconds: float = 0.0
    at: float | None = None
    priority: int | None = None
    queue: str | None = None
    key: str | None = None
    key_seconds: float = KEY_SECONDS
    pacing: Pacing | None = None
    session: Any = None
    expires_at: float | None = None
    time: TimeLimits | None = None
    retries: Policy | None = None
    retention: Mapping[str, float | None] | None = None
    on_parent_end: str | None = None  # for calls in the body of a workflow
    attributes: Mapping[str, str] | None = None


OLDER_NAMES: dict[str, tuple[str, ...]] = {
    "running_concurrency": ("limit", "limit_by"),
    "key_arguments": ("limit_by", "unique_by"),
    "concurrency_limit": ("limit",),
    "reroute_on_concurrency_control": ("when_full",),
    "registration_concurrency": ("unique", "unique_by"),
    "on_diff_non_key_args_raise": ("when_different",),
}
_RENAMED = frozenset(new for names in OLDER_NAMES.values() for new in names)


def definition_of(function: Callable[..., Any], options: TaskOptions) -> TaskDefinition:
    """Return the task that a declaration means. Raises `UsageError`."""
    refuse_unknown(options)
    if not callable(function) or inspect.isclass(function):
        raise UsageError(f"a task is made of a function, not of {function!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(f"{where_of(function)} is a generator; a task returns one result")
    signature = signature_of(function)
    at_most_once = flag("at_most_once", options.get("at_most_once", False))
    schedules, triggers = _called_by(signature, options)
    pacing = pacing_of(options)
    definition = TaskDefinition(
        name=valid_name("task", options.get("name") or import_name(function)),
        function=function,
        signature=signature,
        wanted=wanted_by(function),
        executor=executor_for(function, options.get("executor")),
        queue=valid_name("queue", options.get("queue", "default")),
        tags=tuple(sorted(valid_name("tag", tag) for tag in names(options.get("tags", ())))),
        priority=valid_priority(options.get("priority", 0)),
        aliases=tuple(valid_name("task", alias) for alias in names(options.get("aliases", ()))),
        at_most_once=at_most_once,
        retries=retries_of(options.get("retries"), at_most_once),
        retention=retention_of(options["retention"]) if "retention" in options else {},
        **_shared_calls(signature, options),
        schedules=schedules,
        triggers=triggers,
        pacing=pacing,
        time=TimeLimits().changed(options),
        validate=_validation(options.get("validate")),
        log_lines=_log_lines(options.get("log_lines")),
    )
    refuse_with_pacing(pacing, None, definition)
    return definition


def workflow_definition(function: Callable[..., Any], options: WorkflowOptions) -> TaskDefinition:
    """Return the workflow that a declaration means. Raises `UsageError`."""
    refuse_options(options)
    given: dict[str, Any] = dict(options)
    version, check = given.pop("version", None), flag("check", given.pop("check", True))
    definition = definition_of(function, cast(TaskOptions, given))
    if definition.wanted:
        raise UsageError(f"the body of a workflow gets nothing injected ({definition.wanted[0]}): give it to its steps")
    if version is not None:
        name = f"{definition.name}@{valid_name('version', version)}"
        definition = msgspec.structs.replace(definition, name=name)
    if check:
        check_body(function)
    time = definition.time
    if time.cancel_grace is None:
        time = msgspec.structs.replace(time, cancel_grace=GRACE_SECONDS)
    return msgspec.structs.replace(
        definition, executor=ExecutorKind.WORKFLOW, body=body_fingerprint(function), time=time
    )


def present_names(options: TaskOptions) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options by their present names, and which of them the user gave by an older name.

    Raises `UsageError` for an option that is given by both of its names.
    """
    given: dict[str, Any] = {
        name: value for name, value in options.items() if value is not None or name not in _RENAMED
    }
    for old, news in OLDER_NAMES.items():
        if old in given and (both := [new for new in news if new in given]):
            raise UsageError(f"{old}= and {both[0]}= are the same option, {old}= by its older name; give one of them")
    if not OLDER_NAMES.keys() & given.keys():
        return given, {}
    keys = given.pop("key_arguments", ())
    if isinstance(keys, str):
        raise UsageError(f"key_arguments={keys!r}: expected names in a list, such as [{keys!r}]")
    _check_names("key_arguments", keys)
    keys, spelled, paced = tuple(keys), {}, any(given.get(name) is not None for name in ("debounce", "throttle"))
    wanted = ["unique_by"] if paced else []
    max_running, waits = given.pop("concurrency_limit", 1), given.pop("reroute_on_concurrency_control", True)
    flag("reroute_on_concurrency_control", waits)
    _check_limit("concurrency_limit", max_running)
    for old, switch, by in (
        ("running_concurrency", "limit", "limit_by"),
        ("registration_concurrency", "unique", "unique_by"),
    ):
        mode = given.pop(old, "disabled")
        if mode not in _MODES:
            raise UsageError(f"{old}={mode!r}: expected one of {', '.join(map(repr, _MODES))}")
        if mode == "disabled":
            continue
        given[switch], spelled[switch] = max_running if switch == "limit" else True, old
        if mode == "arguments":
            given[by], spelled[by] = ALL_ARGUMENTS, old
        elif mode == "keys" and not keys:
            raise UsageError(f'{old}="keys" needs key_arguments=[…], which say what is compared')
        elif mode == "keys":
            wanted.append(by)
    if keys and not wanted:
        raise UsageError(
            'key_arguments=[…] alone changes nothing: they say what is compared for running_concurrency="keys", '
            'registration_concurrency="keys", debounce= and throttle='
        )
    for by in wanted if keys else ():
        given[by], spelled[by] = keys, "key_arguments"
    if "limit_by" in given:
        given.setdefault("limit", max_running)
    if not waits:
        given["when_full"] = "refuse"
    if "limit" not in given and (max_running != 1 or not waits):
        raise UsageError(
            "concurrency_limit= and reroute_on_concurrency_control= need running_concurrency=, which says what calls "
            'share the limit: "task", "arguments" or "keys"'
        )
    if "on_diff_non_key_args_raise" in given:
        spelled["when_different"] = name = "on_diff_non_key_args_raise"
        given["when_different"] = "raise" if flag(name, given.pop(name)) else "keep"
    return given, spelled


def _shared_calls(signature: inspect.Signature, options: TaskOptions) -> dict[str, Any]:
    """Return the fields of `TaskDefinition` that say which calls share a limit, or a waiting call."""
    given, spelled = present_names(options)
    limit, unique = given.get("limit"), given.get("unique")
    by = {name: _argument_names(signature, name, given, spelled) for name in ("limit_by", "unique_by", "rate_by")}
    limit_by, unique_by = by["limit_by"], by["unique_by"]
    waits = _choice("when_full", given, "wait", "refuse") == "wait"
    raises = _choice("when_different", given, "keep", "raise") == "raise"
    if limit is None and limit_by is not None:
        limit = 1
    if limit is not None:
        _check_limit("limit", limit)
    elif not waits and given.get("rate") is None:
        raise UsageError('when_full="refuse" needs limit=, limit_by= or rate=, which say how many calls may run')
    if unique is not None and not flag("unique", unique) and unique_by is not None:
        raise UsageError("unique=False and unique_by= contradict each other; leave unique= out")
    paced = given.get("debounce") is not None or given.get("throttle") is not None
    if raises and not (unique or unique_by is not None or paced):
        older = spelled.get("when_different")
        raise UsageError(
            f"{older or 'when_different'}= needs a dedup key, by which calls count as the same: give "
            f"{'registration_concurrency=' if older else 'unique= or unique_by='}"
        )
    if paced and unique:
        name = spelled.get("unique", "unique")
        raise UsageError(
            f"{name}= contradicts debounce= and throttle=, which decide about a second call themselves; leave it out, "
            f"and name the arguments that they compare with {'unique_by' if name == 'unique' else 'key_arguments'}="
        )
    return {
        "limit": None if limit is None else Limit(limit, waits),
        "limit_by": limit_by or (),
        **_rate(given, by["rate_by"], waits),
        "unique": bool(unique or unique_by is not None or paced),
        "unique_by": unique_by or (),
        "raises_when_different": raises,
        "spelled": spelled,
    }


def _rate(given: Mapping[str, Any], by: tuple[str, ...] | None, waits: bool) -> dict[str, Any]:
    """Return the fields of `TaskDefinition` that say how many calls start in a time."""
    if given.get("rate") is None:
        if said := next((name for name in ("burst", "rate_by", "rate_name") if given.get(name) is not None), None):
            raise UsageError(f'{said}= needs rate= as well, such as rate="100/m"')
        return {}
    name = given.get("rate_name")
    return {
        "rate": rate_of(given["rate"], given.get("burst"), waits=waits),
        "rate_by": by or (),
        "rate_name": None if name is None else valid_name("rate", name),
    }


def refuse_other_rate(new: TaskDefinition, others: Iterable[TaskDefinition]) -> None:
    """Raise `UsageError` if another task declares another rate under the same name, which may be that of a task."""
    for other in others:
        if new.rate is None or other.rate is None or new.name == other.name:
            continue
        if (new.rate_name or new.name) == (other.rate_name or other.name):
            if str(other.rate) != str(new.rate):
                raise UsageError(f"{_differs(new, other)}: tasks that share a rate declare the same one")
            if other.rate != new.rate:
                raise UsageError(f"{_differs(new, other)} with another burst or when_full; declare the same")


def _differs(new: TaskDefinition, other: TaskDefinition) -> str:
    name = new.rate_name or other.rate_name
    return f"rate_name={name!r}: {new.name} declares rate='{new.rate}', and {other.name} '{other.rate}'"


def _check_limit(name: str, limit: object) -> None:
    if type(limit) is not int or not 1 <= limit <= MAX_LIMIT:
        raise UsageError(f"{name}={limit!r}: expected a whole number from 1 to {MAX_LIMIT:,}")


def _choice(name: str, given: Mapping[str, Any], default: str, other: str) -> str:
    chosen: str = given.get(name, default)
    if chosen not in (default, other):
        raise UsageError(f"{name}={chosen!r}: expected '{default}' or '{other}'")
    return chosen


def _argument_names(
    signature: inspect.Signature, name: str, given: Mapping[str, Any], spelled: Mapping[str, str]
) -> tuple[str, ...] | None:
    """Return the names of the arguments that a limit, or a kind of calls, goes by; None if none are given."""
    value, said = given.get(name), spelled.get(name, name)
    if value is None or value is ALL_ARGUMENTS:
        return value
    _check_names(said, value)
    listed = (value,) if isinstance(value, str) else tuple(sorted(set(value)))
    if not listed:
        raise UsageError(f"{said}=[] names no argument; leave it out, or give the name of one, or '*' for all")
    if "*" in listed and said == name:
        if listed != ALL_ARGUMENTS:
            raise UsageError(f"{name}={value!r}: '*' means all arguments; leave the others out")
        return ALL_ARGUMENTS
    if unknown := [each for each in listed if each not in signature.parameters]:
        names = ", ".join(signature.parameters) or "none"
        raise UsageError(f"{said}: the task has no parameter {unknown[0]!r}; it has: {names}")
    return listed


def changed_options(task: TaskDefinition, before: SubmitOptions, options: CallOptions) -> SubmitOptions:
    """Return the options of a call with these changes. Raises `UsageError`."""
    for name in options:
        if name not in _OF_CALLS:
            hint = f"It is declared for all of them: @app.task({name}=…)." if name in _OF_TASKS else ""
            hint = hint or words.of_option(task.name, name, "The option") or _hint(name, _OF_CALLS)
            raise UsageError(f"a single call of {task.name} has no option {name}. {hint}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if "key_for" in given and "key" not in given and before.key is None:
        raise UsageError("key_for= says how long a key is taken; give key= as well")
    if "delay" in given and "at" in given:
        raise UsageError("give either delay= or at=, not both")
    fields = {name: check(given[name]) for name, check in _CALL_CHECKS.items() if name in given}
    if "delay" in given:
        fields |= {"delay_seconds": length_of("delay", given["delay"]), "at": None}
    if "at" in given:
        fields |= {"delay_seconds": 0.0}
    if "key_for" in given:
        fields["key_seconds"] = length_of("key_for", given["key_for"])
    if "expires" in given:
        is_moment = isinstance(given["expires"], dt.datetime)
        fields["expires_at"] = parse_moment(given.pop("expires"), "expires") if is_moment else None
    if "retries" in given:
        if task.is_workflow:
            refuse_options({"retries": True})
        fields["retries"] = retries_of(given["retries"], task.at_most_once)
    if "retention" in given:
        fields["retention"] = {**(before.retention or {}), **retention_of(given["retention"])}
    if "attributes" in given:
        fields["attributes"] = _attributes(given["attributes"], before.attributes)
    fields["pacing"] = pacing_of(given) or before.pacing
    fields["time"] = (before.time or task.time).changed(given)
    changed = msgspec.structs.replace(before, **fields)
    refuse_with_pacing(changed.pacing or task.pacing, changed, task)
    return changed


def pacing_of(options: Mapping[str, Any]) -> Pacing | None:
    """Return what the options say about calls that come too often. Raises `UsageError`."""
    debounce, debounce_max_wait, debounce_key, throttle, throttle_key = map(options.get, _PACING)
    if debounce is not None and throttle is not None:
        raise UsageError("debounce= and throttle= contradict each other: the one waits, the other does not")
    for name in ("debounce_max_wait", "debounce_key", "throttle_key"):
        if options.get(name) is not None and options.get(needed := name.partition("_")[0]) is None:
            raise UsageError(f"{name}= needs {needed}= as well, which says for how long")
        if options.get(name) is not None and name.endswith("_key"):
            valid_key(name, options[name])
    if throttle is not None:
        return Throttle(seconds=_positive("throttle", throttle), key=throttle_key)
    if debounce is None:
        return None
    max_seconds = None if debounce_max_wait is None else _positive("debounce_max_wait", debounce_max_wait)
    seconds = _positive("debounce", debounce)
    if max_seconds is not None and max_seconds < seconds:
        raise UsageError(
            f"debounce_max_wait={format_duration(max_seconds)} is shorter than debounce={format_duration(seconds)}, "
            "so that no call would ever wait for so long; give the shorter time as debounce="
        )
    return Debounce(seconds=seconds, max_seconds=max_seconds, key=debounce_key)


def _positive(name: str, length: Duration) -> float:
    if not (seconds := length_of(name, length)):
        raise UsageError(f"{name}={length!r}: expected a length of time")
    return seconds


_PACING = ("debounce", "debounce_max_wait", "debounce_key", "throttle", "throttle_key")


def refuse_with_pacing(pacing: Pacing | None, options: SubmitOptions | None, task: TaskDefinition) -> None:
    """Raise `UsageError` if something contradicts debounce or throttle."""
    if pacing is None:
        return
    name = "debounce" if isinstance(pacing, Debounce) else "throttle"
    if task.raises_when_different:
        option = task.spelling("when_different")
        raise UsageError(f"{name}= contradicts {option}=: a later call may well have other arguments")
    if task.pacing is None and task.unique:
        raise UsageError(f"{name}= contradicts the {task.spelling('unique')}= of {task.name}: both set its dedup key")
    if isinstance(pacing, Debounce) and task.limit_by and (pacing.key is not None or task.limit_by != task.unique_by):
        raise UsageError(
            f"debounce= replaces arguments, and {task.spelling('limit_by')}= goes by them: the limit that a call is "
            "under would change while it waits"
        )
    if isinstance(pacing, Debounce) and task.rate_by:
        raise UsageError("debounce= replaces arguments, and rate_by= goes by them: the rate of a call would change")
    if options is None:
        return
    if options.key is not None:
        raise UsageError(f"{name}= and key= contradict each other: both say when a call is the same as another")
    if isinstance(pacing, Debounce) and (options.delay_seconds or options.at is not None):
        raise UsageError("debounce= says itself when the call is due; leave delay= and at= out")
    if isinstance(pacing, Debounce) and options.session is not None:
        raise UsageError("debounce= may have to change a call that is stored already, so it cannot be part of session=")


def _validation(given: str | None) -> str | None:
    if given not in (None, "submit", "off"):
        raise UsageError(f"validate={given!r:.80}: expected 'submit', 'off', or None for what the app says")
    return given


def _called_by(
    signature: inspect.Signature, options: TaskOptions
) -> tuple[tuple[TaskSchedule, ...], tuple[Trigger, ...]]:
    """Return the schedules and triggers of the option `triggers`."""
    given = options.get("triggers", ())
    if not isinstance(given, Iterable):
        raise InvalidSchedule(f"triggers={given!r}: expected a list, such as [cron('0 3 * * *')]")
    listed = list(given)
    triggers = [task_trigger(each, signature) for each in listed if isinstance(each, Trigger | TriggerBuilder)]
    for trigger in triggers:
        if trigger.name:
            valid_name("trigger", trigger.name)
    schedules = [task_schedule(each) for each in listed if not isinstance(each, Trigger | TriggerBuilder)]
    for each in schedules:
        if each.name:
            valid_name("schedule", each.name)
        try:
            signature.bind(*each.args, **each.kwargs)
        except TypeError as error:
            raise InvalidSchedule(
                f"the task cannot be called {each.timing.describe()}: {error}. Its arguments stand in "
                "scheduled(timing, args, kwargs)"
            ) from None
    return tuple(schedules), tuple(triggers)


def refuse_unknown(options: TaskOptions | DirectOptions, known: type = TaskOptions) -> None:
    there = tuple(typing.get_type_hints(known))
    for name in options:
        if name not in there:
            raise UsageError(f"a task has no option {name}. {words.of_task_option(name) or _hint(name, there)}")


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    listed = ", ".join(each for each in known if each not in OLDER_NAMES)
    return f"Did you mean {near[0]}?" if near else f"There are: {listed}."


_OF_TASKS = tuple(typing.get_type_hints(TaskOptions))
_OF_CALLS = tuple(typing.get_type_hints(CallOptions))


def _check_names(option: str, given: Any) -> None:
    """Raise `UsageError` unless this is the name of an argument, or several in a list or the like."""
    is_several = isinstance(given, Iterable) and not isinstance(given, bytes | Mapping)
    if not isinstance(given, str) and not (is_several and all(isinstance(name, str) for name in given)):
        raise UsageError(f"{option}={given!r:.80}: expected names of arguments, such as ['customer']")


def names(given: Iterable[str]) -> Iterable[str]:
    """Return names that are given as a list. A lone string would be read as its letters."""
    if isinstance(given, str):
        raise UsageError(f"{given!r}: expected a list of names, such as [{given!r}]")
    return given


def valid_priority(priority: int) -> int:
    if (
        not isinstance(priority, int)
        or isinstance(priority, bool)
        or not LOWEST_PRIORITY <= priority <= HIGHEST_PRIORITY
    ):
        raise UsageError(f"priority={priority!r}: expected a whole number from {LOWEST_PRIORITY} to {HIGHEST_PRIORITY}")
    return priority


_CALL_CHECKS: dict[str, Callable[[Any], Any]] = {
    "at": parse_moment,
    "priority": valid_priority,
    "queue": functools.partial(valid_name, "queue"),
    "key": functools.partial(valid_key, "key"),
    "session": lambda session: session,
    "on_parent_end": lambda given: _on_parent_end(given),
}
HEAVIEST = 1000


def _log_lines(given: int | None) -> int:
    if given is None:
        return 0
    if type(given) is not int or not 0 <= given <= MAX_LINES:
        raise UsageError(f"log_lines={given!r:.80}: expected a whole number up to {MAX_LINES}")
    return given


def _attributes(given: object, before: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return the attributes of a call: those given before, and these. Raises `UsageError`, `NotEncodable`."""
    if not isinstance(given, Mapping):
        raise UsageError(f"attributes={given!r:.80}: expected names and texts, such as {{'customer': 'c-17'}}")
    check_attributes(before or {}, given)
    return {**(before or {}), **given}


def _on_parent_end(given: object) -> object:
    if given not in ("cancel", "continue"):
        raise UsageError(f"on_parent_end={given!r}: expected 'cancel' or 'continue'")
    return given


def valid_weights(queues: Iterable[str] | Mapping[str, int]) -> dict[str, int]:
    """Return the queues of a runner with their weights: how many calls each gives in its turn, 1 by default."""
    weights = queues if isinstance(queues, Mapping) else dict.fromkeys(names(queues), 1)
    for queue, weight in weights.items():
        valid_name("queue", queue)
        if type(weight) is not int or not 1 <= weight <= HEAVIEST:
            raise UsageError(
                f"the weight {weight!r} of the queue {queue!r}: expected a whole number from 1 to {HEAVIEST}"
            )
    return dict(weights)
