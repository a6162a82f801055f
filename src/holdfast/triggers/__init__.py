"""Triggers and events: what calls a task when something happens. See docs/guides/triggers.md."""

from holdfast.triggers.conditions import (
    Trigger,
    TriggerBuilder,
    all_of,
    any_of,
    from_arguments,
    from_cause,
    from_event,
    from_exception,
    from_result,
    on_event,
    on_exception,
    on_result,
    on_status,
    trigger,
)
from holdfast.triggers.evaluation import Cause
from holdfast.triggers.events import EventRecord

__all__ = [
    "Cause",
    "EventRecord",
    "Trigger",
    "TriggerBuilder",
    "all_of",
    "any_of",
    "from_arguments",
    "from_cause",
    "from_event",
    "from_exception",
    "from_result",
    "on_event",
    "on_exception",
    "on_result",
    "on_status",
    "trigger",
]
