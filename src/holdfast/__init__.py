"""Durable background tasks and workflows for Python: nothing lost, nothing stuck, everything explained."""

import logging

from holdfast._version import __version__
from holdfast.app import App
from holdfast.embedded import EmbeddedRunner
from holdfast.errors import (
    BlockingCall,
    Expired,
    Fatal,
    HoldfastError,
    InvalidSchedule,
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
    UnknownSchedule,
    UsageError,
)
from holdfast.execution.context import Context, context
from holdfast.invocation import Invocation, InvocationGroup
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
from holdfast.schedule_options import scheduled
from holdfast.schedules import cron, every, once
from holdfast.task import AsyncTask, Task

__all__ = [
    "App",
    "AsyncTask",
    "BlockingCall",
    "Context",
    "EmbeddedRunner",
    "Expired",
    "Exponential",
    "Fatal",
    "FirstMatch",
    "Fixed",
    "Forever",
    "HistoryEntry",
    "HoldfastError",
    "InvalidSchedule",
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
    "UnknownSchedule",
    "UsageError",
    "__version__",
    "context",
    "cron",
    "every",
    "once",
    "scheduled",
]

# A library does not decide where its log goes: without this, Python prints warnings to stderr by itself.
logging.getLogger("holdfast").addHandler(logging.NullHandler())
