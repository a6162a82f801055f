"""What can be declared about a task, and the checks of it.

`TaskOptions` is the only list of what ``@app.task(…)`` takes. Everything that can be wrong with a declaration is found
when the module is imported, not when the first call fails.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypedDict

from holdfast.clock import Duration, format_duration, parse_duration
from holdfast.engine.concurrency import concurrency_of
from holdfast.engine.definition import (
    TaskDefinition,
    import_name,
    place_for,
    retries_of,
    signature_of,
    where_of,
)
from holdfast.errors import UsageError
from holdfast.lifecycle.records import HIGHEST_PRIORITY, LOWEST_PRIORITY
from holdfast.lifecycle.retention import OUTCOMES, SHORTEST_SECONDS
from holdfast.lifecycle.retries import Policy

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
    reroute_on_concurrency_control: bool


def definition_of(function: Callable[..., Any], options: TaskOptions) -> TaskDefinition:
    """The task that a declaration means. Raises `UsageError`."""
    refuse_unknown(options)
    if not callable(function) or inspect.isclass(function):
        raise UsageError(f"a task is made of a function, not of {function!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(f"{where_of(function)} is a generator; a task returns one result")
    signature = signature_of(function)
    at_most_once = bool(options.get("at_most_once", False))
    return TaskDefinition(
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
            options.get("registration_concurrency", "disabled"),
            keys_for("registration_concurrency", options),
            name="registration_concurrency",
        ),
        raises_on_different_twin=bool(options.get("on_diff_non_key_args_raise", False)),
    )


def retention_of(given: Duration | Mapping[str, Duration | None] | None) -> dict[str, float | None]:
    """How long ended calls are kept, by outcome; None for ever. Raises `UsageError`."""
    each = dict(given) if isinstance(given, Mapping) else dict.fromkeys(OUTCOMES, given)
    kept: dict[str, float | None] = {}
    for outcome, duration in each.items():
        if outcome not in OUTCOMES:
            raise UsageError(f"retention= for {outcome!r}: a call ends as {', '.join(OUTCOMES)}")
        kept[outcome] = seconds = None if duration is None else parse_duration(duration)
        if seconds is not None and seconds < SHORTEST_SECONDS:
            raise UsageError(
                f"retention={duration!r} is too short: what has ended is kept for at least "
                f"{format_duration(SHORTEST_SECONDS)}, so that whoever waits for it finds it"
            )
    return kept


def keys_for(name: Literal["running_concurrency", "registration_concurrency"], options: TaskOptions) -> Iterable[str]:
    """The key arguments, if that option wants them; also if none does, so that they are refused."""
    others = {"running_concurrency", "registration_concurrency"} - {name}
    wanted = options.get(name) == "keys" or not any(options.get(other) == "keys" for other in others)
    return options.get("key_arguments", ()) if wanted else ()


def refuse_unknown(options: TaskOptions) -> None:
    for name in options:
        if name not in _KNOWN:
            near = difflib.get_close_matches(name, _KNOWN, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(_KNOWN)}."
            raise UsageError(f"a task has no option {name}. {hint}")


_KNOWN = tuple(TaskOptions.__annotations__)


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


_FORBIDDEN = frozenset("|,\0\n\r\t ")


def valid_name(what: str, name: str) -> str:
    """Queue, tag and task names end up in one string (the lane) and in file and log lines, so a few characters are
    kept out.
    """
    if not isinstance(name, str) or not name or len(name) > 200 or _FORBIDDEN & set(name) or not name.isprintable():
        raise UsageError(
            f"{name!r} is no name for a {what}: 1 to 200 characters, without spaces, commas and vertical bars"
        )
    return name
