"""Changes of runs by their owner: a run lets go of its worker, to wait, to go on elsewhere, or to start over."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.model.changes import WORKING, Change, ChangeFacts, owned
from holdfast.model.records import InvocationRecord, RunState
from holdfast.model.status import Status


def suspended(
    record: InvocationRecord,
    run: RunState,
    *,
    wake_at: float | None,
    operation: str,
    at: float,
    why: str,
    attributes: Mapping[str, str] | UnsetType = UNSET,
) -> Change:
    """Let go of a run that waits, unless its inbox has moved since `run` was read."""
    seen = run.pushed
    facts: ChangeFacts = {"operation": operation, "at": at, "why": why, "wake_at": wake_at, "inbox_seen": seen}
    facts["run"] = msgspec.structs.replace(run, suspended_in=record.epoch)
    facts["attributes"] = attributes
    return owned("suspended", record, (Status.SUSPENDED,), WORKING, **facts)


def handed_over(
    record: InvocationRecord,
    run: RunState,
    *,
    operation: str,
    at: float,
    why: str,
    attributes: Mapping[str, str] | UnsetType = UNSET,
) -> Change:
    """Return a run to the queue between two of its steps, unless its inbox has moved since `run` was read."""
    seen = run.pushed
    facts: ChangeFacts = {"operation": operation, "at": at, "why": why, "due_at": at, "inbox_seen": seen}
    facts["run"] = msgspec.structs.replace(run, suspended_in=record.epoch)
    facts["attributes"] = attributes
    return owned("handed_over", record, (Status.SUSPENDED, Status.REROUTED), WORKING, **facts)


def restarted(
    record: InvocationRecord,
    run: RunState,
    *,
    arguments: bytes,
    operation: str,
    at: float,
    attributes: Mapping[str, str] | UnsetType = UNSET,
) -> Change:
    """Return a run to the queue with other arguments and a fresh log, unless its inbox has moved since."""
    why = f"restarted, with a fresh log (generation {run.generation + 1})"
    facts: ChangeFacts = {"operation": operation, "at": at, "why": why, "due_at": at, "inbox_seen": run.pushed}
    facts["run"] = msgspec.structs.replace(
        run,
        generation=run.generation + 1,
        suspended_in=record.epoch,
        tail=0,
        started_at=None,
        first_started_at=run.started_at if run.first_started_at is None else run.first_started_at,
    )
    facts["arguments"], facts["attributes"] = arguments, attributes
    return owned("restarted", record, (Status.SUSPENDED, Status.REROUTED), WORKING, **facts)
