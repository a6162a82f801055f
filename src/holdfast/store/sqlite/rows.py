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
from holdfast.lifecycle.decoding import (
    EARLIEST,
    EXECUTION,
    INVOCATION,
    LARGEST_TEXT,
    LATEST,
    PAUSE,
    PAYLOAD,
    PIECE,
    RUNNER,
    JsonDecoder,
    check_body,
    corrupt,
)
from holdfast.lifecycle.history import is_whole
from holdfast.lifecycle.queues import QueuePause
from holdfast.lifecycle.records import (
    PLAIN,
    Cancellation,
    Entry,
    FailedAttempt,
    HistoryEntry,
    InvocationRecord,
    Origin,
    Piece,
    RunnerRecord,
    StoredPayload,
    Terms,
)
from holdfast.lifecycle.slots import Execution
from holdfast.lifecycle.status import OWNED, Status

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


class BadText(str):
    """A text that is not UTF-8, with its bytes as surrogates. No record has one: its type gives it away."""


LIST = ", ".join(COLUMNS)
PLACES = ", ".join("?" * len(COLUMNS))

_entry_encoder = msgspec.json.Encoder()
_history_decoder = msgspec.json.Decoder(tuple[HistoryEntry, ...])
_error_decoder = JsonDecoder[ErrorRecord](ErrorRecord)
_errors_decoder = JsonDecoder[tuple[FailedAttempt, ...]](tuple[FailedAttempt, ...])
terms_decoder = JsonDecoder[Terms](Terms)
_cancellation_decoder = JsonDecoder[Cancellation](Cancellation)
_origin_decoder = JsonDecoder[Origin](Origin)
_outbox_decoder = JsonDecoder[tuple[str, ...]](tuple[str, ...])
_runner_decoder = JsonDecoder[RunnerRecord](RunnerRecord)


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
    """Return the record of a row. Raises `CorruptRecord` when the row cannot be one."""
    try:
        return _decode(row)
    except Exception as error:
        raise corrupt(INVOCATION, row[1], error) from error


_NUMBERS = ("rank", "epoch", "version", "attempt", "at_most_once")
_MOMENTS = ("created_at", "due_at", "changed_at", "retain_until", "start_by")
_BYTES = ("arguments", "result")
_NULLABLE = frozenset(
    (
        *("owner", "claim_token", "fingerprint", "parent_id", "result", "error", "limit_key", "slot", "key", "twin"),
        *("terms", "errors", "retain_until", "rerun_of", "start_by", "cancellation", "origin", "outbox"),
    )
)
_OWNED = frozenset(status.value for status in OWNED)
_STATUSES = {status.value: status for status in Status}
_MOST_SHAPES = 10_000
_MOST = 2**53
_sound: set[tuple[type, ...]] = set()  # the types of rows that were looked at: there are few, and most are met again


def column_types() -> dict[str, tuple[str, ...]]:
    """Return the types that SQLite may tell of each column of a row that can be read."""
    kinds = {int: "integer", float: "real", bytes: "blob", str: "text"}
    return {name: (kinds[_type_of(name)], *(["null"] if name in _NULLABLE else [])) for name in COLUMNS}


def _type_of(name: str) -> type:
    return int if name in _NUMBERS else float if name in _MOMENTS else bytes if name in _BYTES else str


def _check_types(row: Sequence[object], shape: tuple[type, ...]) -> None:
    """Raise TypeError unless every column has its type; then remember this shape."""
    if len(shape) != len(COLUMNS):
        raise TypeError(f"it has {len(shape)} columns")
    for name, value in zip(COLUMNS, row, strict=True):
        wanted = _type_of(name)
        if type(value) is not wanted and not (value is None and name in _NULLABLE):
            raise TypeError(f"Expected `{wanted.__name__}`, got `{type(value).__name__}` - at `$.{name}`")
    if len(_sound) < _MOST_SHAPES:
        _sound.add(shape)


_OWNER, _STATUS, _HISTORY = (COLUMNS.index(name) for name in ("owner", "status", "history"))
_RANK, _EPOCH, _ATTEMPT = (COLUMNS.index(name) for name in ("rank", "epoch", "attempt"))
_CREATED, _DUE, _CHANGED, _RETAIN, _START_BY = (COLUMNS.index(name) for name in _MOMENTS)


def _check_bounds(row: Sequence[Any]) -> None:
    """Raise ValueError for a number that no record has, and for a text that is too long to be decoded."""
    if not (
        EARLIEST <= row[_CREATED] <= LATEST
        and EARLIEST <= row[_DUE] <= LATEST
        and EARLIEST <= row[_CHANGED] <= LATEST
        and (row[_RETAIN] is None or EARLIEST <= row[_RETAIN] <= LATEST)
        and (row[_START_BY] is None or EARLIEST <= row[_START_BY] <= LATEST)
    ):
        raise ValueError("a moment in it is beyond every calendar")
    if not (-_MOST <= row[_RANK] <= _MOST and 0 <= row[_EPOCH] <= _MOST and 0 <= row[_ATTEMPT] <= _MOST):
        raise ValueError("a number in it is out of all proportion")
    if row[_OWNER] is None and row[_STATUS] in _OWNED:
        raise ValueError(f"it is {row[_STATUS]}, and nobody owns it")
    if len(row[_HISTORY]) > LARGEST_TEXT:
        raise ValueError(f"its history has {len(row[_HISTORY]):,} characters")


def _decode(row: Sequence[Any]) -> InvocationRecord:
    """Types first, then bounds, then what is JSON: all of it before a record is made."""
    shape = tuple(map(type, row))
    if shape not in _sound:
        _check_types(row, shape)
    _check_bounds(row)
    app, id, task, queue, tags, lane, rank, status, owner, epoch, version, attempt, *more = row
    created_at, due_at, changed_at, claim_token, fingerprint, parent_id, reason, arguments, result, error, *rest = more
    at_most_once, limit_key, slot, key, twin, terms, errors, *late, outbox, history = rest
    retain_until, rerun_of, start_by, cancellation, origin = late
    entries = _history_decoder.decode("[" + history[:-1] + "]")
    if not entries or entries[-1].version != version or entries[-1].status != status:
        raise ValueError(f"its history does not end in version {version}, {status}")
    if len(entries) != version and not is_whole(entries):
        raise ValueError(f"its history has {len(entries)} entries for {version} versions")
    record = InvocationRecord(
        app=app,
        id=id,
        task=task,
        queue=queue,
        tags=tuple(tags.split(",")) if tags else (),
        priority=-rank,
        status=_STATUSES[status],
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
        at_most_once=at_most_once == 1,
        limit_key=limit_key,
        slot=slot,
        key=key,
        twin=twin,
        terms=PLAIN if terms is None else terms_decoder.decode(terms),
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


def raw_text(columns: Sequence[str], row: Sequence[object]) -> str:
    """Return the row as it is, for quarantine: readable, and complete enough to be put back by hand."""
    return json.dumps({name: _plain(value) for name, value in zip(columns, row, strict=False)})


def _plain(value: object) -> object:
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


PAYLOAD_COLUMNS = ("app", "digest", "size", "pieces", "wanted_at")
PIECE_COLUMNS = ("app", "digest", "number", "put_at", "packed", "data")
RUNNER_COLUMNS = ["app", "id", "started_at", "heartbeat_at", "body"]


def runner_row(runner: RunnerRecord) -> tuple[object, ...]:
    return (runner.app, runner.id, runner.started_at, runner.heartbeat_at, _entry_encoder.encode(runner).decode())


def _refuse_bad_text(row: Sequence[object]) -> None:
    if BadText in map(type, row):
        raise ValueError("a text in it is not UTF-8")


def runner_of(row: Sequence[Any]) -> RunnerRecord:
    """Return the roster entry of a row. Raises `CorruptRecord`."""
    app, id, started_at, heartbeat_at, body = row
    try:
        _refuse_bad_text(row)
        runner = _runner_decoder.decode(body)
        times = {"started_at": started_at, "heartbeat_at": heartbeat_at, "app": app, "id": id}
        return msgspec.convert(msgspec.structs.asdict(runner) | times, RunnerRecord)
    except Exception as error:
        raise corrupt(RUNNER, id, error) from error


ENTRY_COLUMNS = ("app", "kind", "name", "body", "version", "due_at", "keep_until")


def entry_of(row: Sequence[Any]) -> Entry:
    """Return the entry of a row. Raises `CorruptRecord`; what its body says is not looked at."""
    fields = dict(zip(ENTRY_COLUMNS, row, strict=True))
    try:
        _refuse_bad_text(row)
        check_body(fields["body"])
        return msgspec.convert(fields, Entry)
    except Exception as error:
        raise corrupt(str(fields["kind"]), fields["name"], error) from error


EXECUTION_COLUMNS = ("id", "service", "runner_id", "started_at", "window_ends_at", "status", "ended_at", "reason")


def execution_of(row: Sequence[Any]) -> Execution:
    """Return the execution of a row. Raises `CorruptRecord`."""
    try:
        _refuse_bad_text(row)
        return msgspec.convert(dict(zip(EXECUTION_COLUMNS, row, strict=True)), Execution)
    except Exception as error:
        raise corrupt(EXECUTION, row[0], error) from error


def pause_of(app: str, row: Sequence[Any]) -> QueuePause:
    """Return the pause of a queue's row: name, since when, by whom, why, operations. Raises `CorruptRecord`."""
    name, at, by, reason, operations = row
    try:
        _refuse_bad_text(row)
        operation = operations.split("\n")[-1]
        fields = {"app": app, "name": name, "at": at, "by": by, "reason": reason, "operation": operation}
        return msgspec.convert(fields, QueuePause)
    except Exception as error:
        raise corrupt(PAUSE, name, error) from error


def payload_of(digest: str, size: Any, pieces: Any, data: Any, packed: Any) -> StoredPayload:
    """Return a payload with its first piece. Raises `CorruptRecord`."""
    first = piece_of(digest, data, packed)
    try:
        return msgspec.convert({"digest": digest, "size": size, "pieces": pieces, "first": first}, StoredPayload)
    except Exception as error:
        raise corrupt(PAYLOAD, digest, error) from error


def piece_of(digest: str, data: Any, packed: Any) -> Piece:
    if type(data) is not bytes or packed not in (0, 1):
        error = TypeError(f"it has {type(data).__name__} for its bytes, and {packed!r} for packed")
        raise corrupt(PIECE, digest, error)
    return Piece(data, bool(packed))
