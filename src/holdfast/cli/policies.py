"""A stored retry policy in words, for ``show``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, assert_never

from holdfast.clock import format_duration
from holdfast.errors import NotDecodable
from holdfast.lifecycle.names import counted
from holdfast.lifecycle.retries import (
    Exponential,
    FirstMatch,
    Fixed,
    Forever,
    MoveTo,
    Never,
    Only,
    Policy,
    Timetable,
    load_policy,
)


def policy_shown(stored: Mapping[str, Any] | None) -> str:
    """One that this version does not know stays as it is stored."""
    if not stored:
        return ""
    try:
        return _told(load_policy(stored))
    except NotDecodable:
        return json.dumps(stored)


def _told(policy: Policy) -> str:
    match policy:
        case Never():
            return "none"
        case Fixed() | Exponential():
            return f"{counted(policy.attempts, 'more attempt')}, {_waits(policy)}"
        case Timetable():
            return f"{_waits(policy)}, then none"
        case Forever():
            return f"for ever, {_waits(policy.wait)}"
        case Only():
            return f"for {_exceptions(policy.exceptions)}: {_told(policy.policy)}; for others none"
        case FirstMatch():
            rules = [f"for {_exceptions(exceptions)}: {_told(rule)}" for exceptions, rule in policy.rules]
            return "; ".join([*rules, "for others none"])
        case MoveTo():
            return f"{_told(policy.policy)}, on the queue '{policy.queue}'"
    assert_never(policy)


def _waits(policy: Fixed | Exponential | Timetable) -> str:
    match policy:
        case Fixed():
            return f"{format_duration(policy.wait_seconds)} apart"
        case Exponential():
            first, cap = format_duration(policy.first_seconds), format_duration(policy.cap_seconds)
            about = "about " if policy.jitter else ""
            return f"after {about}{first}, then {policy.factor:g} times as long each time, up to {cap}"
        case Timetable():
            rows = [
                f"every {format_duration(wait)} up to an age of {format_duration(age)}" for age, wait in policy.rows
            ]
            return ", ".join(rows)
    assert_never(policy)


def _exceptions(names: Iterable[str]) -> str:
    return " or ".join(name.removeprefix("builtins:") for name in names)
