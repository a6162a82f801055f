"""The options of a schedule, at run time and in code, and their checks."""

from __future__ import annotations

import datetime as dt
import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypedDict, Unpack

import msgspec

from holdfast.clock import Duration, parse_duration
from holdfast.errors import InvalidSchedule, UsageError
from holdfast.model.decoding import EARLIEST
from holdfast.schedules.records import CatchUp, Overlap, Rules
from holdfast.schedules.timing import Cron, Every, Once, cron, every, instant, once
from holdfast.schedules.timing import Schedule as Timing


class TaskSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule of a task as code declares it: the timing, the arguments and the rules."""

    timing: Timing
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    rules: Rules = Rules()
    name: str = ""


Moment = dt.datetime | float

_MAX_CAUGHT_UP = 10_000


class RuleOptions(TypedDict, total=False):
    """How ticks are treated; `Schedules.create` says what they mean."""

    overlap: str
    catch_up: str
    catch_up_most: int
    jitter: Duration
    start: Moment | None
    end: Moment | None
    unique: bool


class ScheduleOptions(RuleOptions, total=False):
    """The rules, and the timing."""

    cron: str
    timezone: str
    every: Duration
    at: Moment
    timing: Timing


_KNOWN = tuple(ScheduleOptions.__annotations__)
TIMING = frozenset({"cron", "timezone", "every", "at", "timing"})


def timing_of(options: ScheduleOptions, before: Timing | None = None) -> Timing:
    """Return the timing that the options say, in exactly one way. Half of a cron keeps the other half of `before`."""
    if isinstance(before, Cron) and options.keys() & TIMING <= {"cron", "timezone"}:
        options = {"cron": before.expression, "timezone": before.timezone} | options
    ways = [name for name in ("cron", "every", "at", "timing") if options.get(name) is not None]
    if "timezone" in options and "cron" not in ways:
        raise InvalidSchedule("timezone= belongs to cron=")
    if len(ways) != 1:
        raise InvalidSchedule(
            f"say when it is due, by one of cron=, every=, at=, timing=; given: {', '.join(ways) or 'none'}"
        )
    if ways == ["cron"]:
        return cron(options["cron"], timezone=options.get("timezone", "UTC"))
    if ways == ["every"]:
        return every(options["every"])
    timing = once(options["at"]) if ways == ["at"] else options["timing"]
    if not isinstance(timing, Cron | Every | Once):
        raise InvalidSchedule(f"timing={timing!r}: expected what cron(), every() or once() make")
    return timing


def rules_of(options: RuleOptions, before: Rules) -> Rules:
    """Return these rules with the given changes."""
    given: Mapping[str, Any] = options
    changes = {field: read(name, given[name]) for name, (field, read) in _RULES.items() if name in given}
    rules = msgspec.structs.replace(before, **changes)
    if "catch_up_most" in options and rules.catch_up is not CatchUp.ALL:
        raise InvalidSchedule(f"catch_up_most= is for catch_up='all'; it is '{rules.catch_up}'")
    if rules.starts_at is not None and rules.ends_at is not None and rules.ends_at < rules.starts_at:
        raise InvalidSchedule("the schedule ends before it starts")
    return rules


def _choice(kinds: type[StrEnum], name: str, value: object) -> StrEnum:
    try:
        return kinds(str(value))
    except ValueError:
        raise InvalidSchedule(f"{name}={value!r}: expected one of {', '.join(kinds)}") from None


def _number(name: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_CAUGHT_UP:
        raise InvalidSchedule(f"{name}={value!r}: expected a whole number from 1 to {_MAX_CAUGHT_UP:,}")
    return value


def _bound(name: str, value: Moment | None) -> float | None:
    return None if value is None else max(instant(value, name), EARLIEST)


# Options by name: the field of `Rules`, and the function that reads the value.
_RULES: dict[str, tuple[str, Callable[[str, Any], object]]] = {
    "overlap": ("overlap", functools.partial(_choice, Overlap)),
    "catch_up": ("catch_up", functools.partial(_choice, CatchUp)),
    "catch_up_most": ("catch_up_most", _number),
    "jitter": ("jitter_seconds", lambda _, value: parse_duration(value)),
    "unique": ("unique", lambda _, value: bool(value)),
    "start": ("starts_at", _bound),
    "end": ("ends_at", _bound),
}


def refuse_unknown(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in _KNOWN:
            near = difflib.get_close_matches(name, _KNOWN, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(_KNOWN)}."
            raise UsageError(f"a schedule has no option {name}. {hint}")


def scheduled(
    timing: Timing,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    **options: Unpack[RuleOptions],
) -> TaskSchedule:
    """Make a timing for the ``triggers=[…]`` of a task, with arguments and rules of its own::

    triggers=[scheduled(cron("0 3 * * *"), [30], overlap="skip", catch_up="none")]
    """
    refuse_unknown(options)
    if TIMING & options.keys():
        raise InvalidSchedule("the timing comes first: scheduled(cron('0 3 * * *'), …)")
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise UsageError(f"args={args!r}: expected a list of arguments, such as [{args!r}]")
    timing = timing_of({"timing": timing})
    return TaskSchedule(
        timing=timing, args=tuple(args), kwargs=dict(kwargs or {}), rules=rules_of(options, Rules()), name=name
    )


def task_schedule(given: object) -> TaskSchedule:
    """Return the schedule of an item of ``triggers=[…]``. Raises `InvalidSchedule`."""
    if isinstance(given, TaskSchedule):
        return given
    if isinstance(given, Cron | Every | Once):
        return TaskSchedule(timing=given)
    raise InvalidSchedule(
        f"triggers=[{given!r}]: expected what cron(), every(), scheduled(), on_event(), on_status() and the like make"
    )
