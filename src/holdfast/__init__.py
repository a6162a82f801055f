"""Durable background tasks and workflows for Python: nothing lost, nothing stuck, everything explained.

The names here are for every day. Retry policies are in `holdfast.retries`, arguments and records of triggers in
`holdfast.triggers`, records of schedules in `holdfast.schedules`, rare errors in `holdfast.errors`.
"""

import logging

from holdfast._version import __version__
from holdfast.app import App
from holdfast.codec.secret import Secret
from holdfast.errors import (
    Fatal,
    HoldfastError,
    InvocationCancelled,
    ResultTimeout,
    RetryLater,
    SoftTimeout,
    TaskFailed,
    TimedOut,
    UsageError,
)
from holdfast.executors.context import Context, context
from holdfast.groups.calls import chain, group
from holdfast.groups.handles import InvocationGroup
from holdfast.invocation import Invocation
from holdfast.model.status import Status
from holdfast.retries import Retries
from holdfast.schedules import cron, every, once
from holdfast.schedules.options import scheduled
from holdfast.streams.api import stream
from holdfast.task import AsyncTask, Task
from holdfast.telemetry.logs import limit_repeats as _limit_repeats
from holdfast.triggers import all_of, any_of, on_event, on_exception, on_result, on_status, trigger
from holdfast.workflows.api import patched, sleep
from holdfast.workflows.hooks import hook

__all__ = [
    "App",
    "AsyncTask",
    "Context",
    "Fatal",
    "HoldfastError",
    "Invocation",
    "InvocationCancelled",
    "InvocationGroup",
    "ResultTimeout",
    "Retries",
    "RetryLater",
    "Secret",
    "SoftTimeout",
    "Status",
    "Task",
    "TaskFailed",
    "TimedOut",
    "UsageError",
    "__version__",
    "all_of",
    "any_of",
    "chain",
    "context",
    "cron",
    "every",
    "group",
    "hook",
    "on_event",
    "on_exception",
    "on_result",
    "on_status",
    "once",
    "patched",
    "scheduled",
    "sleep",
    "stream",
    "trigger",
]

_MOVED = {
    "holdfast.app": "EmbeddedRunner",
    "holdfast.errors": "BlockingCall EventNotFound Expired InvalidSchedule InvalidTrigger InvocationNotFound "
    "InvocationRefused KeyTaken ScheduleExists StoreError TriggerFailed UnknownSchedule",
    "holdfast.invocation": "HistoryEntry InvocationRecord",
    "holdfast.retries": "Exponential FirstMatch Fixed Forever MoveTo Never Only Timetable",
    "holdfast.schedules": "ScheduleRecord",
    "holdfast.triggers": "Cause EventRecord Trigger from_arguments from_cause from_event from_exception from_result",
}


def __getattr__(name: str) -> object:
    """Say where a name lives now that was at the top of the package before.

    An ImportError, since ``from holdfast import Fixed`` would replace the text of an AttributeError by its own.
    """
    for module, names in _MOVED.items():
        if name in names.split():
            raise ImportError(f"{name} is in {module} now; write: from {module} import {name}")
    if name == "chord":
        raise ImportError(
            "chord(header)(callback) is group(header).then(callback) here; write: from holdfast import group"
        )
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")


# A library does not decide where its log goes: without this, Python prints warnings to stderr by itself.
logging.getLogger("holdfast").addHandler(logging.NullHandler())
_limit_repeats()
