"""Stored records as documents: dicts that become JSON. Pure.

``--json`` of the commands and the HTTP API give the same documents, so a program can change from one to the other.
"""

from __future__ import annotations

import base64
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.access.audit import AuditRecord
from holdfast.codec import Codec, ErrorRecord, Payloads
from holdfast.codec.data import without_classes
from holdfast.codec.payloads import Placeholder
from holdfast.codec.secret import Secret
from holdfast.errors import NotDecodable, UsageError
from holdfast.executors.context import STEP as STEP_TASK
from holdfast.model.notes import NO_NOTES, LogLine
from holdfast.model.records import HistoryEntry, InvocationRecord, Origin
from holdfast.runtime.runs import CHILD, HOOK, STEP, LogEvent, StepRecord, Stored, started_at, took
from holdfast.runtime.streams import Chunk
from holdfast.showing import call_without_named, fields, leaves, moment, without_named
from holdfast.stats import Distribution, Figures, Stats
from holdfast.triggers.rules import DATA
from holdfast.workflows.events import HOOK_RECEIVED
from holdfast.workflows.hooks_resuming import HookRecord

Document = dict[str, Any]


# --- the audit record


def audit_document(record: AuditRecord) -> Document:
    return fields(record)


# --- invocations


def invocation_document(record: InvocationRecord) -> Document:
    """Return an invocation as lists have it: without arguments, result, error and history."""
    asked, terms = record.cancellation, record.terms
    first = ("id", "app", "task", "status", "queue", "tags", "priority", "created_at", "due_at", "changed_at", "owner")
    more = ("epoch", "attempt", "reason", "parent_id", "key", "retain_until", "rerun_of", "limit_key", "slot")
    return fields(record, *first, *more) | {
        "attributes": dict(record.attributes),
        "progress": progress_document(record),
        "root_id": record.root_id,
        "timeout": terms.timeout,
        "soft_timeout": terms.soft_timeout,
        "expires_at": None if terms.start_by is None else moment(terms.start_by),
        "cancellation": asked and fields(asked, "by", "reason", "at", "until"),
    }


def progress_document(record: InvocationRecord) -> Document | None:
    """Return how far the code of an invocation has come, as it says."""
    progress = (record.notes or NO_NOTES).progress
    if progress is None:
        return None
    return fields(progress, "current", "total", "message", "attempt", "at") | {"fraction": progress.fraction}


def line_document(line: LogLine) -> Document:
    return fields(line, "at", "level", "logger", "text", "attempt")


def notes_document(codec: Codec, record: InvocationRecord) -> Document:
    """Return what the code of an invocation has said besides: its last log lines, and its last checkpoint."""
    notes = record.notes or NO_NOTES
    stored = None if notes.checkpoint is None else Stored(notes.checkpoint, codec)
    return {
        "log": [line_document(line) for line in notes.log],
        "checkpoint": stored_document(codec, stored),
        "checkpoint_at": None if notes.checkpoint_at is None else moment(notes.checkpoint_at),
    }


def history_document(history: Sequence[HistoryEntry]) -> list[Document]:
    return [fields(entry, "version", "at", "status", "owner", "epoch", "by", "why") for entry in history]


def history_of(record: InvocationRecord) -> Document:
    """Return each status of an invocation, and what triggered it."""
    return {"id": record.id, "origin": origin_document(record.origin), "history": history_document(record.history)}


def origin_document(origin: Origin | None) -> Document | None:
    if origin is None:
        return None
    sources = [fields(each, "kind", "id", "name") for each in origin.sources]
    return fields(origin, "trigger", "depth", "path") | {"sources": sources}


def error_document(error: ErrorRecord | None) -> Document | None:
    if error is None:
        return None
    return {"type": error.type_name, "message": error.message, "traceback": error.traceback}


def errors_document(record: InvocationRecord) -> list[Document]:
    """Return the failures of all attempts."""
    return [fields(one, "number", "attempt", "at") | (error_document(one.error) or {}) for one in record.errors]


# --- runs of workflows


def run_document(record: InvocationRecord, calls: Sequence[StepRecord]) -> Document | None:
    """Return the state of a run; None for a task."""
    run = record.run
    if run is None:
        return None
    counts = Counter(call.status for call in calls)
    return {
        "generation": run.generation,
        "started_at": moment(started_at(record)),
        "wake_at": None if record.wake_at is None else moment(record.wake_at),
        "inbox": len(run.inbox),
        "steps": {status: counts[status] for status in sorted(counts)},
        "waits_for": [call.id for call in calls if call.is_open],
    }


def step_document(codec: Codec, call: StepRecord) -> Document:
    """Return a call of a body: a step, a child, or a wait."""
    first = ("id", "kind", "name", "status", "attempt", "created_at", "started_at", "ended_at")
    return fields(call, *first) | {
        "due_at": None if call.due is None else moment(call.due),
        "seconds": None if call.ended_at is None else took(call, call.ended_at),
        "queue": call.queue or None,
        "child": call.child or None,
        "where": call.where,
        "why": call.why,
        "received": call.received if call.kind == HOOK else None,
        "arguments": stored_document(codec, call.stored_arguments, call_of=callee_of(call.name, call.kind)),
        "result": stored_document(codec, call.stored_result),
        "error": error_document(call.error),
    }


def callee_of(name: str, kind: str) -> str:
    """Return the task that a call of a body calls, by its whole name; that of a step has a prefix."""
    return name if kind == CHILD else f"{STEP_TASK}{name}"


def callee_of_event(codec: Codec, event: LogEvent) -> str | None:
    """Return the task that an event has the arguments for; None for other events."""
    if event.type == "step_created":  # also of a child
        is_child = bool(event.child) and event.name in codec.parameters
        return callee_of(event.name, CHILD if is_child else STEP)
    return event.name if event.type == "run_created" else None


def event_document(codec: Codec, event: LogEvent) -> Document:
    """Return an event of a run."""
    callee = callee_of_event(codec, event)
    names = ("cursor", "type", "at", "generation", "position", "correlation", "name", "where", "attempt")
    return fields(event, *names) | {
        "due_at": None if event.due is None else moment(event.due),
        "child": event.child or None,
        "code": event.code or None,
        "why": event.why,
        "value": stored_document(codec, event.stored, call_of=callee, is_given=event.type == HOOK_RECEIVED),
        "error": error_document(event.error),
    }


def hook_document(hook: HookRecord) -> Document:
    """Return a hook. A token that is a secret is not in it."""
    names = ("name", "origin", "run", "task", "call", "created_at", "type", "metadata", "has_url", "verify")
    return fields(hook, *names, "ended_at", "keep_until") | {
        "token": hook.token or None,
        "methods": list(hook.methods),
    }


# --- streams


def chunk_document(chunk: Chunk) -> Document:
    """Return an item of a stream. A value that is bytes is in Base64, and says so."""
    facts = fields(chunk, "index", "kind", "at", "attempt") | {"step": chunk.step or None}
    if isinstance(chunk.value, bytes):
        return facts | {"value": base64.b64encode(chunk.value).decode(), "encoding": "base64"}
    return facts | {"value": chunk.value}


def chunk_value(codec: Codec, data: bytes, payloads: Payloads) -> Any:
    """Return the value of a chunk; in words, if it cannot be read here."""
    try:
        return readable(codec, lambda codec: codec.decode(data, payloads, describe=True))
    except NotDecodable as error:
        return f"a chunk of {len(data)} bytes that cannot be read here: {error}"


# --- statistics

_PERCENTILES = (50, 90, 95, 99)


def stats_document(stats: Stats) -> Document:
    """Return statistics. The series has no histograms: it would be large."""
    return {
        "since": moment(stats.since),
        "until": moment(stats.until),
        "step": stats.step,
        "total": figures_document(stats.total),
        "tasks": {name: figures_document(each) for name, each in stats.tasks.items()},
        "queues": {name: figures_document(each) for name, each in stats.queues.items()},
        "points": [{"at": moment(each.at)} | figures_document(each, in_series=True) for each in stats.points],
        "failures": [fields(each) for each in stats.failures],
        "slow": [fields(each) for each in stats.slow],
        "delayed": [fields(each) for each in stats.delayed],
        "retried": [fields(each) for each in stats.retried],
        "deploys": [fields(each) for each in stats.deploys],
    }


def figures_document(figures: Figures, *, in_series: bool = False) -> Document:
    counts = fields(figures, "seconds", "ended", "per_second", "succeeded", "failed", "cancelled", "retried", "lost")
    return counts | {"wait": times_document(figures.wait, in_series), "run": times_document(figures.run, in_series)}


def times_document(times: Distribution, in_series: bool) -> Document:
    """Return durations in seconds; `histogram` has from, to and count of each bin."""
    percentiles = {f"p{percent}": times.percentile(percent) for percent in _PERCENTILES}
    facts = {"count": times.count, "mean": times.mean, **percentiles, "most": times.most}
    return facts if in_series else facts | {"histogram": [list(each) for each in times.histogram]}


# --- values


def stored_document(
    codec: Codec, stored: Stored | None, *, call_of: str | None = None, is_given: bool = False
) -> Document | None:
    """Return ``{"value": …}``, or the arguments of a call, or why they cannot be read; None if there is no value. See
    `decoded`.
    """
    if stored is None:
        return None
    try:
        value = decoded(codec, stored, call_of=call_of, is_given=is_given)
    except NotDecodable as error:
        return {"unreadable": str(error)}
    return {"value": value} if call_of is None else {"args": list(value[0]), "kwargs": value[1]}


def decoded(codec: Codec, stored: Stored, *, call_of: str | None = None, is_given: bool = False) -> Any:
    """Return a stored value; as data without classes, if their code was not imported. Raises `NotDecodable`.

    With `call_of`, it is the arguments of a call of that task. These, and a value that `is_given` from outside as they
    are, come without what their names say is secret.
    """
    if call_of is None:
        value = readable(codec, lambda codec: codec.decode(stored.data, stored.payloads, describe=True))
        return without_named(value) if is_given else value
    args, kwargs = readable(codec, lambda codec: codec.decode_call(stored.data, stored.payloads, describe=True))
    return call_without_named(args, kwargs, codec.parameters.get(call_of, ()))


def refuse_hidden(codec: Codec, record: InvocationRecord, given: object) -> None:
    """Raise `UsageError` if other arguments for an invocation have what its document says in the place of values."""
    with contextlib.suppress(NotDecodable):
        shown = leaves(decoded(codec, Stored(record.arguments, codec), call_of=record.task))
        texts = {str(each) for each in shown if isinstance(each, Placeholder | Secret)}
        for each in leaves(given):
            if isinstance(each, str) and each in texts:
                raise UsageError(f"'{each}' stands for a value that is not shown: write the value itself")


def readable(codec: Codec, decode: Callable[[Codec], Any]) -> Any:
    """Decode to values; to data without classes, if their code was not imported. Raises `NotDecodable`."""
    try:
        return decode(codec)
    except NotDecodable:
        with contextlib.suppress(NotDecodable):
            return without_classes(decode(DATA))
        raise
