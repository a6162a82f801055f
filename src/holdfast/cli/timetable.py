"""A schedule as people and programs get to see it."""

from __future__ import annotations

import datetime as dt
from typing import Any

import msgspec

from holdfast.cli.shown import length, moment
from holdfast.lifecycle.records import InvocationRecord
from holdfast.lifecycle.schedules import ScheduleRecord
from holdfast.schedules import Cron
from holdfast.schedules.zones import find_zone


def state_of(record: ScheduleRecord) -> str:
    if record.retired_at is not None:
        return "retired"
    if record.pause is not None:
        return "paused"
    return "over" if record.next_at is None and not record.progress.queued else "active"


def told_state(record: ScheduleRecord) -> str:
    """The state, and of a pause by whom and why."""
    state = state_of(record)
    if state != "paused" or record.pause is None:
        return state
    by = f" by {record.pause.by}" if record.pause.by else ""
    return f"paused{by}" + (f" because {record.pause.why}" if record.pause.why else "")


def clock_of(record: ScheduleRecord, at: float | None) -> str:
    """The time on the schedule's own clock: that of its zone, else UTC."""
    if at is None:
        return ""
    zone = find_zone(record.timing.timezone) if isinstance(record.timing, Cron) else dt.UTC
    return dt.datetime.fromtimestamp(at, zone).strftime("%a %Y-%m-%d %H:%M:%S %Z")


def how_far(at: float, now: float) -> str:
    return f"in {length(at - now)}" if at > now else f"{length(now - at)} ago"


def next_of(record: ScheduleRecord, now: float) -> str:
    if record.next_at is None:
        return ""
    far = how_far(record.next_at, now) if record.next_at > now else f"due for {length(now - record.next_at)}"
    return f"{clock_of(record, record.next_at)}, {far}"


def last_of(record: ScheduleRecord, invocation: InvocationRecord | None) -> str:
    """The last tick that fired, and what has become of its invocation."""
    if record.progress.last_tick is None:
        return ""
    became = "not kept any more" if invocation is None else invocation.status.value
    return f"{clock_of(record, record.progress.last_tick)}: {became}"


def facts_of(record: ScheduleRecord, invocation: InvocationRecord | None) -> dict[str, Any]:
    rules, pause, progress = record.rules, record.pause, record.progress
    return {
        "name": record.name,
        "app": record.app,
        "state": state_of(record),
        "when": record.timing.describe(),
        "timing": msgspec.to_builtins(record.timing),
        "task": record.call.task,
        "queue": record.call.queue,
        "priority": record.call.priority,
        "rules": {
            "overlap": rules.overlap.value,
            "catch_up": rules.catch_up.value,
            "catch_up_most": rules.catch_up_most,
            "jitter_seconds": rules.jitter_seconds,
            "start": _moment(rules.starts_at),
            "end": _moment(rules.ends_at),
            "unique": rules.unique,
        },
        "pause": pause and {"at": moment(pause.at), "by": pause.by, "why": pause.why},
        "declared": record.declared,
        "retired_at": _moment(record.retired_at),
        "next_at": _moment(record.next_at),
        "last": None
        if progress.last_tick is None
        else {
            "tick": moment(progress.last_tick),
            "id": progress.last_id,
            "status": invocation and invocation.status.value,
        },
        "ticks": {
            "fired": progress.fired,
            "skipped": progress.skipped,
            "missed": progress.missed,
            "queued": [moment(tick) for tick in progress.queued],
        },
        "created_at": moment(record.created_at),
        "changed_at": moment(record.changed_at),
        "uid": record.uid,
    }


def _moment(at: float | None) -> str | None:
    return None if at is None else moment(at)
