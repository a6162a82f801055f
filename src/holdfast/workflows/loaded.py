"""A run as its new owner finds it, and what names the owner's life and code."""

from __future__ import annotations

import msgspec

from holdfast.model import parking
from holdfast.model.records import InvocationRecord
from holdfast.runtime.definition import TaskDefinition
from holdfast.workflows.events import Event


class Loaded(msgspec.Struct, kw_only=True):
    """A run as its new owner found it."""

    record: InvocationRecord
    events: list[Event]
    tail: int  # the last position of the log
    started_at: float  # of this log: what a body takes for the time at its beginning
    first_started_at: float  # of the run, also before its restarts
    is_suspect: bool = False  # its owners have died again and again: its steps run in processes of their own
    progress_epoch: int = 0  # in which it last came further


def code_of(task: TaskDefinition) -> str:
    """Return the Python version and the fingerprint of the code that runs a workflow here."""
    return f"{parking.PYTHON} {task.fingerprint}"


def life_of(record: InvocationRecord) -> str:
    """Return the address of a run while this owner has it: the same worker may own its next life soon."""
    return f"{record.id}/{record.epoch}"
