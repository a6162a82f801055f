"""What can be said about a schedule, at run time and in code, and the checks of it."""

from __future__ import annotations

import datetime as dt
import difflib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TypedDict, TypeVar, Unpack

import msgspec

from holdfast.clock import Duration, parse_duration
from holdfast.engine.definition import TaskSchedule
from holdfast.errors import InvalidSchedule, UsageError
from holdfast.lifecycle.decoding import EARLIEST
from holdfast.lifecycle.schedules import CatchUp, Overlap, Rules
from holdfast.schedules import Cron, Every, Once, cron, every, once
from holdfast.schedules.timing import Schedule as Timing
from holdfast.schedules.timing import instant

K = TypeVar("K", bound=StrEnum)
Moment = dt.datetime | float

_MOST_CAUGHT_UP = 10_000


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
    """And when they are."""

    cron: str
    timezone: str
    every: Duration
    at: Moment
    timing: Timing


_KNOWN = tuple(ScheduleOptions.__annotations__)
TIMING = frozenset({"cron", "timezone", "every", "at", "timing"})


def timing_of(options: ScheduleOptions, before: Timing | None = None) -> Timing:
    """Exactly one of the ways to say when. `before` is what it was: half of a cron leaves the other half as it is."""
    if isinstance(before, Cron) and options.keys() & TIMING <= {"cron", "timezone"}:
        options = {"cron": before.expression, "timezone": before.timezone} | options
    ways = [name for name in ("cron", "every", "at", "timing") if options.get(name) is not None]
    if "timezone" in options and "cron" not in ways:
        raise InvalidSchedule("timezone= belongs to cron=")
    if len(ways) != 1:
        raise InvalidSchedule(
            f"say when it is due, by one of cron=, every=, at=, timing=; given: {', '.join(ways) or 'none'}"
        )
    match ways[0]:
        case "cron":
            return cron(options["cron"], timezone=options.get("timezone", "UTC"))
        case "every":
            return every(options["every"])
        case "at":
            return once(options["at"])
    timing = options["timing"]
    if not isinstance(timing, Cron | Every | Once):
        raise InvalidSchedule(f"timing={timing!r}: expected what cron(), every() or once() make")
    return timing


def rules_of(options: RuleOptions, before: Rules) -> Rules:
    """These rules, changed by what is given."""
    changes: dict[str, Any] = {}
    if "overlap" in options:
        changes["overlap"] = _choice(Overlap, "overlap", options["overlap"])
    if "catch_up" in options:
        changes["catch_up"] = _choice(CatchUp, "catch_up", options["catch_up"])
    if "catch_up_most" in options:
        most = options["catch_up_most"]
        if type(most) is not int or not 1 <= most <= _MOST_CAUGHT_UP:
            raise InvalidSchedule(f"catch_up_most={most!r}: expected a whole number from 1 to {_MOST_CAUGHT_UP:,}")
        changes["catch_up_most"] = most
    if "jitter" in options:
        changes["jitter_seconds"] = parse_duration(options["jitter"])
    if "unique" in options:
        changes["unique"] = bool(options["unique"])
    for name, field in (("start", "starts_at"), ("end", "ends_at")):
        if name in options:
            value = options[name]  # type: ignore[literal-required]
            changes[field] = None if value is None else max(instant(value, name), EARLIEST)
    rules = msgspec.structs.replace(before, **changes)
    if "catch_up_most" in options and rules.catch_up is not CatchUp.ALL:
        raise InvalidSchedule(f"catch_up_most= is for catch_up='all'; it is '{rules.catch_up}'")
    if rules.starts_at is not None and rules.ends_at is not None and rules.ends_at < rules.starts_at:
        raise InvalidSchedule("the schedule ends before it starts")
    return rules


def _choice(kinds: type[K], name: str, value: object) -> K:
    try:
        return kinds(str(value))
    except ValueError:
        raise InvalidSchedule(f"{name}={value!r}: expected one of {', '.join(kinds)}") from None


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
    """A timing in the ``triggers=[…]`` of a task, with arguments and rules of its own::

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
    """One of the ``triggers=[…]`` of a task. Raises `InvalidSchedule`."""
    if isinstance(given, TaskSchedule):
        return given
    if isinstance(given, Cron | Every | Once):
        return TaskSchedule(timing=given)
    raise InvalidSchedule(
        f"triggers=[{given!r}]: expected what cron(), every(), scheduled(), on_event(), on_status() and the like make"
    )
