"""Durable background tasks and workflows for Python: nothing lost, nothing stuck, everything explained."""

import logging

from holdfast._version import __version__
from holdfast.app import App
from holdfast.embedded import EmbeddedRunner
from holdfast.errors import (
    BlockingCall,
    Fatal,
    HoldfastError,
    InvocationCancelled,
    InvocationNotFound,
    InvocationRefused,
    KeyTaken,
    ResultTimeout,
    RetryLater,
    StoreError,
    TaskFailed,
    UsageError,
)
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
    "EmbeddedRunner",
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
    "Status",
    "StoreError",
    "Task",
    "TaskFailed",
    "Timetable",
    "UsageError",
    "__version__",
]

# A library does not decide where its log goes: without this, Python prints warnings to stderr by itself.
logging.getLogger("holdfast").addHandler(logging.NullHandler())
