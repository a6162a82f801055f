"""What can be declared about a task, and the checks of it.

`TaskOptions` is the only list of what ``@app.task(…)`` takes. Everything that can be wrong with a declaration is found
when the module is imported, not when the first call fails.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, TypedDict

from holdfast.clock import Duration, format_duration, length_of
from holdfast.engine.concurrency import RunningConcurrency, concurrency_of
from holdfast.engine.definition import (
    TaskDefinition,
    TaskSchedule,
    TaskTrigger,
    import_name,
    place_for,
    retries_of,
    signature_of,
    where_of,
)
from holdfast.engine.time_limits import TimeLimits, flag, limit_of, seconds_of
from holdfast.errors import InvalidSchedule, UsageError
from holdfast.lifecycle.names import valid_name
from holdfast.lifecycle.pacing import Debounce, Pacing, Throttle
from holdfast.lifecycle.records import HIGHEST_PRIORITY, LOWEST_PRIORITY
from holdfast.lifecycle.retention import OUTCOMES, SHORTEST_SECONDS
from holdfast.lifecycle.retries import Policy
from holdfast.schedule_options import task_schedule
from holdfast.schedules import Cron, Every, Once
from holdfast.triggers import Trigger, TriggerBuilder, task_trigger

Executor = Literal["thread", "loop", "process"]
ConcurrencyMode = Literal["disabled", "task", "arguments", "keys"]


class TaskOptions(TypedDict, total=False):
    """The options of a task; `App.task` says what they mean."""

    name: str | None
    aliases: Iterable[str]
    queue: str
    tags: Iterable[str]
    priority: int
    executor: Executor | None
    at_most_once: bool
    retries: Policy | int | None
    retention: Duration | Mapping[str, Duration | None] | None
    running_concurrency: ConcurrencyMode
    key_arguments: Iterable[str]
    concurrency_limit: int
    registration_concurrency: ConcurrencyMode
    on_diff_non_key_args_raise: bool
    debounce: Duration | None
    debounce_max_wait: Duration | None
    throttle: Duration | None
    reroute_on_concurrency_control: bool
    timeout: Duration | None
    soft_timeout: Duration | None
    expires: Duration | None
    cancel_grace: Duration | None
    cancel_children: bool
    triggers: Iterable[Cron | Every | Once | TaskSchedule | Trigger | TriggerBuilder]


def definition_of(function: Callable[..., Any], options: TaskOptions) -> TaskDefinition:
    """The task that a declaration means. Raises `UsageError`."""
    refuse_unknown(options)
    if not callable(function) or inspect.isclass(function):
        raise UsageError(f"a task is made of a function, not of {function!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(f"{where_of(function)} is a generator; a task returns one result")
    signature = signature_of(function)
    at_most_once = flag("at_most_once", options.get("at_most_once", False))
    schedules, triggers = _called_by(signature, options)
    pacing = pacing_of(options.get("debounce"), options.get("debounce_max_wait"), None, options.get("throttle"), None)
    definition = TaskDefinition(
        name=valid_name("task", options.get("name") or import_name(function)),
        function=function,
        signature=signature,
        place=place_for(function, options.get("executor")),
        queue=valid_name("queue", options.get("queue", "default")),
        tags=tuple(sorted(valid_name("tag", tag) for tag in names(options.get("tags", ())))),
        priority=valid_priority(options.get("priority", 0)),
        aliases=tuple(valid_name("task", alias) for alias in names(options.get("aliases", ()))),
        at_most_once=at_most_once,
        retries=retries_of(options.get("retries"), at_most_once),
        retention=retention_of(options["retention"]) if "retention" in options else {},
        concurrency=concurrency_of(
            signature,
            options.get("running_concurrency", "disabled"),
            keys_for("running_concurrency", options),
            options.get("concurrency_limit", 1),
            options.get("reroute_on_concurrency_control", True),
        ),
        registration=concurrency_of(
            signature,
            options.get("registration_concurrency", "disabled") if pacing is None else kind_of(options),
            keys_for("registration_concurrency", options),
            name="registration_concurrency",
        ),
        schedules=schedules,
        triggers=triggers,
        raises_on_different_twin=flag("on_diff_non_key_args_raise", options.get("on_diff_non_key_args_raise", False)),
        pacing=pacing,
        time=TimeLimits(
            timeout=limit_of("timeout", options.get("timeout")),
            soft_timeout=limit_of("soft_timeout", options.get("soft_timeout")),
            expires=limit_of("expires", options.get("expires")),
            cancel_grace=seconds_of("cancel_grace", options.get("cancel_grace")),
            cancel_children=flag("cancel_children", options.get("cancel_children", True)),
        ),
    )
    if definition.raises_on_different_twin and definition.registration.mode is RunningConcurrency.DISABLED:
        raise UsageError(
            "on_diff_non_key_args_raise=True is about calls of a kind: say which with registration_concurrency="
        )
    if pacing is not None and options.get("registration_concurrency", "disabled") != "disabled":
        raise UsageError(
            "registration_concurrency= contradicts debounce= and throttle=, which say themselves what becomes of a "
            "second call; of which arguments they go by, key_arguments= says"
        )
    refuse_with_pacing(pacing, None, definition)
    return definition


def kind_of(options: TaskOptions) -> str:
    """Which calls debounce and throttle take for one: those with the same key arguments, if there are any."""
    return "keys" if options.get("key_arguments") else "task"


def pacing_of(
    debounce: Duration | None,
    debounce_max_wait: Duration | None,
    debounce_key: str | None,
    throttle: Duration | None,
    throttle_key: str | None,
) -> Pacing | None:
    """What was said about calls that come too often. Raises `UsageError`."""
    if debounce is not None and throttle is not None:
        raise UsageError("debounce= and throttle= contradict each other: the one waits, the other does not")
    for name, value, needed in (
        ("debounce_max_wait", debounce_max_wait, debounce),
        ("debounce_key", debounce_key, debounce),
        ("throttle_key", throttle_key, throttle),
    ):
        if value is not None and needed is None:
            raise UsageError(f"{name}= needs {name.partition('_')[0]}= as well, which says for how long")
    for name, key in (("debounce_key", debounce_key), ("throttle_key", throttle_key)):
        if key is not None:
            valid_key(name, key)
    if throttle is not None:
        return Throttle(seconds=_positive("throttle", throttle), key=throttle_key)
    if debounce is None:
        return None
    most = None if debounce_max_wait is None else _positive("debounce_max_wait", debounce_max_wait)
    seconds = _positive("debounce", debounce)
    if most is not None and most < seconds:
        raise UsageError(
            f"debounce_max_wait={format_duration(most)} is shorter than debounce={format_duration(seconds)}, so that "
            "no call would ever wait for so long; give the shorter time as debounce="
        )
    return Debounce(seconds=seconds, most_seconds=most, key=debounce_key)


def _positive(name: str, length: Duration) -> float:
    if not (seconds := length_of(name, length)):
        raise UsageError(f"{name}={length!r}: expected a length of time")
    return seconds


class CallOptions(Protocol):
    """What a call may differ in that has to do with its time and identity."""

    @property
    def key(self) -> str | None: ...
    @property
    def at(self) -> float | None: ...
    @property
    def delay_seconds(self) -> float: ...
    @property
    def session(self) -> Any: ...


def refuse_with_pacing(pacing: Pacing | None, options: CallOptions | None, task: TaskDefinition) -> None:
    """Raise `UsageError` if something contradicts debounce or throttle."""
    if pacing is None:
        return
    name = "debounce" if isinstance(pacing, Debounce) else "throttle"
    if task.raises_on_different_twin:
        raise UsageError(f"{name}= contradicts on_diff_non_key_args_raise=: a later call may well have other arguments")
    if task.pacing is None and task.registration.mode is not RunningConcurrency.DISABLED:
        raise UsageError(f"{name}= contradicts the registration_concurrency= of {task.name}: both name its twin")
    same = pacing.key is None and task.concurrency.key_arguments == task.registration.key_arguments
    by_task = task.concurrency.mode in (RunningConcurrency.DISABLED, RunningConcurrency.TASK)
    if isinstance(pacing, Debounce) and not by_task and not (same and task.concurrency.key_arguments):
        raise UsageError(
            f"debounce= replaces arguments, and running_concurrency='{task.concurrency.mode}' goes by them: the limit "
            "that a call is under would change while it waits"
        )
    if options is None:
        return
    if options.key is not None:
        raise UsageError(f"{name}= and key= contradict each other: both say when a call is the same as another")
    if isinstance(pacing, Debounce) and (options.delay_seconds or options.at is not None):
        raise UsageError("debounce= says itself when the call is due; leave delay= and at= out")
    if isinstance(pacing, Debounce) and options.session is not None:
        raise UsageError("debounce= may have to change a call that is stored already, so it cannot be part of session=")


def retention_of(given: Duration | Mapping[str, Duration | None] | None) -> dict[str, float | None]:
    """How long ended calls are kept, by outcome; None for ever. Raises `UsageError`."""
    each = dict(given) if isinstance(given, Mapping) else dict.fromkeys(OUTCOMES, given)
    kept: dict[str, float | None] = {}
    for outcome, duration in each.items():
        if outcome not in OUTCOMES:
            raise UsageError(f"retention= for {outcome!r}: a call ends as {', '.join(OUTCOMES)}")
        kept[outcome] = seconds = None if duration is None else length_of("retention", duration)
        if seconds is not None and seconds < SHORTEST_SECONDS:
            raise UsageError(
                f"retention={duration!r} is too short: what has ended is kept for at least "
                f"{format_duration(SHORTEST_SECONDS)}, so that whoever waits for it finds it"
            )
    return kept


def _called_by(
    signature: inspect.Signature, options: TaskOptions
) -> tuple[tuple[TaskSchedule, ...], tuple[TaskTrigger, ...]]:
    """What calls the task by itself: schedules, and triggers."""
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


def keys_for(name: Literal["running_concurrency", "registration_concurrency"], options: TaskOptions) -> Iterable[str]:
    """The key arguments, if that option wants them; also if none does, so that they are refused."""
    paced = options.get("debounce") is not None or options.get("throttle") is not None
    wanted = {
        "running_concurrency": options.get("running_concurrency") == "keys",
        "registration_concurrency": paced or options.get("registration_concurrency") == "keys",
    }
    return options.get("key_arguments", ()) if wanted[name] or not any(wanted.values()) else ()


def refuse_unknown(options: TaskOptions) -> None:
    for name in options:
        if name not in _KNOWN:
            near = difflib.get_close_matches(name, _KNOWN, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(_KNOWN)}."
            raise UsageError(f"a task has no option {name}. {hint}")


_KNOWN = tuple(TaskOptions.__annotations__)


def refuse_for_call(task: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise `UsageError` for what is no option of a call."""
    for name in given:
        near = difflib.get_close_matches(name, known, n=1)
        if name in _KNOWN:
            hint = f"It is declared for all of them: @app.task({name}=…)."
        else:
            hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known)}."
        raise UsageError(f"a single call of {task} has no option {name}. {hint}")


def names(given: Iterable[str]) -> Iterable[str]:
    """Names in a list. A lone string would be read as its letters."""
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


HEAVIEST = 1000


def valid_weights(queues: Iterable[str] | Mapping[str, int]) -> dict[str, int]:
    """The queues of a runner, with how many are taken of each in its turn: 1, if nothing is said."""
    weights = queues if isinstance(queues, Mapping) else dict.fromkeys(names(queues), 1)
    for queue, weight in weights.items():
        valid_name("queue", queue)
        if type(weight) is not int or not 1 <= weight <= HEAVIEST:
            raise UsageError(
                f"the weight {weight!r} of the queue {queue!r}: expected a whole number from 1 to {HEAVIEST}"
            )
    return dict(weights)


def valid_key(name: str, key: str) -> str:
    """A name that a caller gives to calls that are one. It has to be a text that every store can hold."""
    if not isinstance(key, str) or not 0 < len(key) <= 1000:
        raise UsageError(f"{name}={key!r:.80}: expected a text of 1 to 1,000 characters")
    if any("\ud800" <= character <= "\udfff" for character in key):
        raise UsageError(f"{name}={key!r:.80}: it contains a lone surrogate, which UTF-8 cannot hold")
    return key
