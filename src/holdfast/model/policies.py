"""A stored retry policy in words, for ``show``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, assert_never

from holdfast.clock import format_duration
from holdfast.errors import NotDecodable
from holdfast.model import retries
from holdfast.model.names import counted


def describe_policy(stored: Mapping[str, Any] | None) -> str:
    """Describe a retry policy. A policy of a newer version is returned as it is stored."""
    if not stored:
        return ""
    try:
        return _in_words(retries.load_policy(stored))
    except NotDecodable:
        return json.dumps(stored)


def _in_words(policy: retries.Policy) -> str:
    match policy:
        case retries.Never():
            return "none"
        case retries.Fixed() | retries.Exponential():
            return f"{counted(policy.attempts, 'more attempt')}, {_waits(policy)}"
        case retries.Timetable():
            return f"{_waits(policy)}, then none"
        case retries.Forever():
            return f"for ever, {_waits(policy.wait)}"
        case retries.Only():
            return f"for {_exceptions(policy.exceptions)}: {_in_words(policy.policy)}; for others none"
        case retries.FirstMatch():
            rules = [f"for {_exceptions(exceptions)}: {_in_words(rule)}" for exceptions, rule in policy.rules]
            return "; ".join([*rules, "for others none"])
        case retries.MoveTo():
            return f"{_in_words(policy.policy)}, on the queue '{policy.queue}'"
    assert_never(policy)


def _waits(policy: retries.Fixed | retries.Exponential | retries.Timetable) -> str:
    match policy:
        case retries.Fixed():
            return f"{format_duration(policy.wait_seconds)} apart"
        case retries.Exponential():
            first, cap = format_duration(policy.first_seconds), format_duration(policy.cap_seconds)
            about = "about " if policy.jitter else ""
            return f"after {about}{first}, then {policy.factor:g} times as long each time, up to {cap}"
        case retries.Timetable():
            ages = [(format_duration(age), format_duration(wait)) for age, wait in policy.rows]
            return ", ".join(f"every {wait} up to an age of {age}" for age, wait in ages)
    assert_never(policy)


def _exceptions(names: Iterable[str]) -> str:
    return " or ".join(name.removeprefix("builtins:") for name in names)
