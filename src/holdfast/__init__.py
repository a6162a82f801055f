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
    InvocationCancelled,
    InvocationNotFound,
    InvocationRefused,
    KeyTaken,
    ResultTimeout,
    RetryLater,
    SoftTimeout,
    StoreError,
    TaskFailed,
    TimedOut,
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
from holdfast.lifecycle.status import Status
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
    "SoftTimeout",
    "Status",
    "StoreError",
    "Task",
    "TaskFailed",
    "TimedOut",
    "Timetable",
    "UsageError",
    "__version__",
    "context",
]

# A library does not decide where its log goes: without this, Python prints warnings to stderr by itself.
logging.getLogger("holdfast").addHandler(logging.NullHandler())
