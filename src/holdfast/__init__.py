"""Durable background tasks and workflows for Python: nothing lost, nothing stuck, everything explained."""

import logging

from holdfast._version import __version__
from holdfast.app import App
from holdfast.embedded import EmbeddedRunner
from holdfast.errors import (
    BlockingCall,
    EventNotFound,
    Expired,
    Fatal,
    HoldfastError,
    InvalidSchedule,
    InvalidTrigger,
    InvocationCancelled,
    InvocationNotFound,
    InvocationRefused,
    KeyTaken,
    ResultTimeout,
    RetryLater,
    ScheduleExists,
    SoftTimeout,
    StoreError,
    TaskFailed,
    TimedOut,
    TriggerFailed,
    UnknownSchedule,
    UsageError,
)
from holdfast.execution.context import Context, context
from holdfast.invocation import Invocation, InvocationGroup
from holdfast.lifecycle.events import EventRecord
from holdfast.lifecycle.records import HistoryEntry, InvocationRecord
from holdfast.lifecycle.retries import (
    Exponential,
    FirstMatch,
    Fixed,
    Forever,
    MoveTo,
    Never,
    Only,
    Retries,
    Timetable,
)
from holdfast.lifecycle.schedules import ScheduleRecord
from holdfast.lifecycle.status import Status
from holdfast.loglines import limit_repeats as _limit_repeats
from holdfast.schedule_options import scheduled
from holdfast.schedules import cron, every, once
from holdfast.task import AsyncTask, Task
from holdfast.triggering import Cause
from holdfast.triggers import (
    Trigger,
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

__all__ = [
    "App",
    "AsyncTask",
    "BlockingCall",
    "Cause",
    "Context",
    "EmbeddedRunner",
    "EventNotFound",
    "EventRecord",
    "Expired",
    "Exponential",
    "Fatal",
    "FirstMatch",
    "Fixed",
    "Forever",
    "HistoryEntry",
    "HoldfastError",
    "InvalidSchedule",
    "InvalidTrigger",
    "Invocation",
    "InvocationCancelled",
    "InvocationGroup",
    "InvocationNotFound",
    "InvocationRecord",
    "InvocationRefused",
    "KeyTaken",
    "MoveTo",
    "Never",
    "Only",
    "ResultTimeout",
    "Retries",
    "RetryLater",
    "ScheduleExists",
    "ScheduleRecord",
    "SoftTimeout",
    "Status",
    "StoreError",
    "Task",
    "TaskFailed",
    "TimedOut",
    "Timetable",
    "Trigger",
    "TriggerFailed",
    "UnknownSchedule",
    "UsageError",
    "__version__",
    "all_of",
    "any_of",
    "context",
    "cron",
    "every",
    "from_arguments",
    "from_cause",
    "from_event",
    "from_exception",
    "from_result",
    "on_event",
    "on_exception",
    "on_result",
    "on_status",
    "once",
    "scheduled",
    "trigger",
]

# A library does not decide where its log goes: without this, Python prints warnings to stderr by itself.
logging.getLogger("holdfast").addHandler(logging.NullHandler())
_limit_repeats()
