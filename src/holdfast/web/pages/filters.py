"""Filters of templates: values as text. What they return is escaped like everything else. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

from holdfast.model.status import TABLE, Status
from holdfast.showing import as_json, length, moment, plain

_TONES = {
    Status.SUCCESS: "good",
    Status.FAILED: "bad",
    Status.RUNNING: "busy",
    Status.RESUMED: "busy",
    Status.RETRY: "warn",
    Status.KILLED: "warn",
    Status.PENDING_RECOVERY: "warn",
    Status.RUNNING_RECOVERY: "warn",
    Status.CONCURRENCY_CONTROLLED_FINAL: "bad",
    Status.CANCELLING: "warn",
    Status.PARKED: "warn",
}
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def tone(status: str) -> str:
    """Return how a status is coloured: good, bad, warn, busy or idle."""
    return _TONES.get(Status(status), "idle") if status in TABLE else "idle"


def words(name: str) -> str:
    return str(name).replace("_", " ")


def ago(seconds: float) -> str:
    """Return how long ago: "3 min ago", "in 2 h"; `times.js` writes the same."""
    for unit, name in _UNITS:
        if abs(seconds) >= unit:
            text = f"{int(abs(seconds) // unit)} {name}"
            return f"{text} ago" if seconds >= 0 else f"in {text}"
    return "now"


def pretty(value: Any, longest: int = 4000) -> str:
    """Return a value as JSON on several lines, cut at a length."""
    text = json.dumps(plain(value), ensure_ascii=False, indent=2)
    return text if len(text) <= longest else f"{text[:longest]}\n… {len(text) - longest:,} more characters"


def number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def command(*words: object) -> str:
    """Return a command line: the twin of an action."""
    return shlex.join(["holdfast", *map(str, words)])


FILTERS: dict[str, Callable[..., str]] = {
    "ago": ago,
    "json": as_json,
    "length": length,
    "moment": moment,
    "number": number,
    "pretty": pretty,
    "tone": tone,
    "words": words,
}
