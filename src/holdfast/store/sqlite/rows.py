"""Records as rows, and back.

A row is an invocation; the columns that are guarded, indexed or shown have a column each. The history is JSON
objects, each followed by a comma, so that a change appends to it by concatenation without reading it. `rank` is minus
the priority, so that the queue's index ascends in every column.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from holdfast.codec import ErrorRecord
from holdfast.errors import CorruptRecord
from holdfast.lifecycle.history import is_whole
from holdfast.lifecycle.records import (
    PLAIN,
    Cancellation,
    FailedAttempt,
    HistoryEntry,
    InvocationRecord,
    Origin,
    RunnerRecord,
    Terms,
)
from holdfast.lifecycle.status import Status

COLUMNS = [
    "app",
    "id",
    "task",
    "queue",
    "tags",
    "lane",
    "rank",
    "status",
    "owner",
    "epoch",
    "version",
    "attempt",
    "created_at",
    "due_at",
    "changed_at",
    "claim_token",
    "fingerprint",
    "parent_id",
    "reason",
    "arguments",
    "result",
    "error",
    "at_most_once",
    "limit_key",
    "slot",
    "key",
    "twin",
    "terms",
    "errors",
    "retain_until",
    "rerun_of",
    "start_by",
    "cancellation",
    "origin",
    "outbox",
    "history",
]
LIST = ", ".join(COLUMNS)
PLACES = ", ".join("?" * len(COLUMNS))

_LARGEST_NUMBER = 2**53

_entry_encoder = msgspec.json.Encoder()
_history_decoder = msgspec.json.Decoder(tuple[HistoryEntry, ...])
_error_decoder = msgspec.json.Decoder(ErrorRecord)
_errors_decoder = msgspec.json.Decoder(tuple[FailedAttempt, ...])
_terms_decoder = msgspec.json.Decoder(Terms)
_cancellation_decoder = msgspec.json.Decoder(Cancellation)
_origin_decoder = msgspec.json.Decoder(Origin)
_outbox_decoder = msgspec.json.Decoder(tuple[str, ...])


def history_text(entries: Iterable[HistoryEntry]) -> str:
    return "".join([_entry_encoder.encode(entry).decode() + "," for entry in entries])


def operation_text(operation: str) -> str:
    """How an operation id stands in a history: what to search for."""
    return '"op":' + _entry_encoder.encode(operation).decode()


def history_of(text: str) -> tuple[HistoryEntry, ...]:
    return _history_decoder.decode("[" + text[:-1] + "]")


def error_text(error: ErrorRecord | None) -> str | None:
    return None if error is None else _entry_encoder.encode(error).decode()


def errors_text(errors: Sequence[FailedAttempt]) -> str:
    return _entry_encoder.encode(errors).decode()


def cancellation_text(cancellation: Cancellation | None) -> str | None:
    return None if cancellation is None else _entry_encoder.encode(cancellation).decode()


def outbox_text(names: Sequence[str]) -> str:
    return _entry_encoder.encode(names).decode()


def to_row(record: InvocationRecord) -> tuple[object, ...]:
    return (
        record.app,
        record.id,
        record.task,
        record.queue,
        ",".join(record.tags),
        record.lane,
        -record.priority,
        record.status.value,
        record.owner,
        record.epoch,
        record.version,
        record.attempt,
        record.created_at,
        record.due_at,
        record.changed_at,
        record.claim_token,
        record.fingerprint,
        record.parent_id,
        record.reason,
        record.arguments,
        record.result,
        error_text(record.error),
        record.at_most_once,
        record.limit_key,
        record.slot,
        record.key,
        record.twin,
        None if record.terms is PLAIN else _entry_encoder.encode(record.terms).decode(),
        errors_text(record.errors) if record.errors else None,
        record.retain_until,
        record.rerun_of,
        record.start_by,
        None if record.cancellation is None else cancellation_text(record.cancellation),
        None if record.origin is None else _entry_encoder.encode(record.origin).decode(),
        outbox_text(record.outbox) if record.outbox else None,
        history_text(record.history),
    )


def from_row(row: Sequence[Any]) -> InvocationRecord:
    """The record of a row. Raises `CorruptRecord` when the row cannot be one."""
    try:
        return _decode(row)
    except (ValueError, TypeError, AttributeError, msgspec.MsgspecError) as error:
        raise CorruptRecord(f"the stored invocation {row[1]} cannot be read: {error}") from error


def _decode(row: Sequence[Any]) -> InvocationRecord:
    (
        app,
        id,
        task,
        queue,
        tags,
        lane,
        rank,
        status,
        owner,
        epoch,
        version,
        attempt,
        created_at,
        due_at,
        changed_at,
    ) = row[:15]
    (claim_token, fingerprint, parent_id, reason, arguments, result, error, *rest) = row[15:]
    at_most_once, limit_key, slot, key, twin, terms, errors, *late, history = rest
    retain_until, rerun_of, start_by, cancellation, origin, outbox = late
    entries = history_of(history)
    if entries and len(entries) != entries[-1].version and not is_whole(entries):
        raise ValueError(f"its history has {len(entries)} entries for {entries[-1].version} versions")
    if max(abs(rank), epoch, version, attempt) > _LARGEST_NUMBER:
        raise ValueError("a number in it is out of all proportion")
    if not entries or entries[-1].version != version or entries[-1].status != status:
        raise ValueError(f"its history does not end in version {version}, {status}")
    record = InvocationRecord(
        app=app,
        id=id,
        task=task,
        queue=queue,
        tags=tuple(tags.split(",")) if tags else (),
        priority=-rank,
        status=Status(status),
        owner=owner,
        epoch=epoch,
        attempt=attempt,
        created_at=created_at,
        due_at=due_at,
        changed_at=changed_at,
        claim_token=claim_token,
        fingerprint=fingerprint,
        parent_id=parent_id,
        reason=reason,
        arguments=arguments,
        result=result,
        error=None if error is None else _error_decoder.decode(error),
        at_most_once=bool(at_most_once),
        limit_key=limit_key,
        slot=slot,
        key=key,
        twin=twin,
        terms=PLAIN if terms is None else _terms_decoder.decode(terms),
        errors=() if errors is None else _errors_decoder.decode(errors),
        retain_until=retain_until,
        rerun_of=rerun_of,
        start_by=start_by,
        cancellation=None if cancellation is None else _cancellation_decoder.decode(cancellation),
        origin=None if origin is None else _origin_decoder.decode(origin),
        outbox=() if outbox is None else _outbox_decoder.decode(outbox),
        history=entries,
    )
    if record.lane != lane:
        raise ValueError(f"its lane {lane!r} is not that of its task, queue and tags")
    return record


def raw_text(row: Sequence[object]) -> str:
    """The row as it is, for quarantine: readable, and complete enough to be put back by hand."""
    return json.dumps({name: _plain(value) for name, value in zip(COLUMNS, row, strict=False)})


def _plain(value: object) -> object:
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


RUNNER_COLUMNS = ["app", "id", "started_at", "heartbeat_at", "body"]


def runner_row(runner: RunnerRecord) -> tuple[object, ...]:
    return (runner.app, runner.id, runner.started_at, runner.heartbeat_at, _entry_encoder.encode(runner).decode())


def runner_of(row: Sequence[Any]) -> RunnerRecord:
    runner = msgspec.json.decode(row[4], type=RunnerRecord)
    return msgspec.structs.replace(runner, heartbeat_at=row[3])
