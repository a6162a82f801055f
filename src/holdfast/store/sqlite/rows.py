"""Records as rows, and back.

A row is an invocation; the columns that are guarded, indexed or shown have a column each. The history is JSON
objects, each followed by a comma, so that a change appends to it by concatenation without reading it. `rank` is minus
the priority, so that the queue's index ascends in every column.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import msgspec

from holdfast.codec import ErrorRecord
from holdfast.ids import InvocationId
from holdfast.model.decoding import (
    EARLIEST,
    INVOCATION,
    LARGEST_TEXT,
    LATEST,
    PAYLOAD,
    PIECE,
    RUNNER,
    JsonDecoder,
    check_body,
    corrupt,
)
from holdfast.model.notes import Notes
from holdfast.model.records import (
    PLAIN,
    Cancellation,
    Entry,
    FailedAttempt,
    HistoryEntry,
    InvocationRecord,
    Origin,
    Piece,
    ReplyTo,
    RunnerRecord,
    RunState,
    StoredPayload,
    Terms,
    Waiting,
    is_whole,
)
from holdfast.model.status import OWNED, Status

SHORT = [  # what every row has, and most rows have nothing else
    *("app", "id", "task", "queue", "tags", "lane", "rank", "status", "epoch", "version", "attempt", "created_at"),
    *("due_at", "changed_at", "reason", "arguments", "at_most_once", "history"),
]
_NULLABLE = [
    *("owner", "claim_token", "fingerprint", "parent_id", "result", "error", "limit_key", "slot", "key", "twin"),
    *("terms", "errors", "retain_until", "rerun_of", "start_by", "cancellation", "origin", "outbox"),
    *("reply_to", "run", "wake_at", "attributes", "has_streams", "waiting", "notes"),
]
COLUMNS = [*SHORT, *_NULLABLE]
_FIELDS = [{"rank": "priority", "twin": "dedup_key"}.get(name, name) for name in COLUMNS]  # of records


class BadText(str):
    """A text that is not UTF-8, with its bytes as surrogates. No record has one: its type gives it away."""


LIST = ", ".join(COLUMNS)

_entry_encoder = msgspec.json.Encoder()
_history_decoder = msgspec.json.Decoder(tuple[HistoryEntry, ...])
_DECODERS: dict[str, JsonDecoder[Any]] = {
    "error": JsonDecoder(ErrorRecord),
    "terms": JsonDecoder(Terms),
    "errors": JsonDecoder(tuple[FailedAttempt, ...]),
    "cancellation": JsonDecoder(Cancellation),
    "origin": JsonDecoder(Origin),
    "outbox": JsonDecoder(tuple[str, ...]),
    "reply_to": JsonDecoder(ReplyTo),
    "run": JsonDecoder(RunState),
    "attributes": JsonDecoder(dict[str, str]),
    "waiting": JsonDecoder(Waiting),
    "notes": JsonDecoder(Notes),
}
_runner_decoder = JsonDecoder[RunnerRecord](RunnerRecord)


def history_text(entries: Sequence[HistoryEntry]) -> str:
    if len(entries) == 1:
        return _entry_encoder.encode(entries[0]).decode() + ","
    return "".join([_entry_encoder.encode(entry).decode() + "," for entry in entries])


def history_of(text: str) -> tuple[HistoryEntry, ...]:
    return _history_decoder.decode("[" + text[:-1] + "]")


SIMPLE = frozenset({str, bytes, int, float, type(None)})  # values that a column stores as they are


def column_value(value: Any) -> Any:
    """Return what a column stores of a field: JSON of structs, tuples and maps, and NULL for an empty one."""
    if isinstance(value, tuple | dict | msgspec.Struct):
        return _entry_encoder.encode(value).decode() if value else None
    return value


def to_row(record: InvocationRecord) -> list[Any]:
    """Return the values of `COLUMNS`."""
    row = [*_short_of(record), *_nullable_of(record)]
    row[_STREAMS] = record.has_streams or None
    for index in _ENCODED:
        if (value := row[index]) is not None:
            row[index] = column_value(value)
    if record.terms is PLAIN:
        row[_TERMS] = None
    return _finished(row, record)


def to_short_row(record: InvocationRecord) -> list[Any] | None:
    """Return the values of `SHORT`; None for a record that has a value in one of the other columns."""
    return _finished(list(_short_of(record)), record) if _nullable_of(record) == _ABSENT else None


def _finished(row: list[Any], record: InvocationRecord) -> list[Any]:
    """Put texts and numbers into the columns that hold something else than the field."""
    row[_TAGS] = ",".join(record.tags)
    row[_RANK] = -record.priority
    row[_STATUS] = TEXTS[record.status]
    row[_HISTORY] = history_text(record.history)
    return row


def from_row(row: Sequence[Any]) -> InvocationRecord:
    """Return the record of a row. Raises `CorruptRecord` when the row cannot be one."""
    try:
        return _decode(row)
    except Exception as error:
        raise corrupt(INVOCATION, row[1], error) from error


_NUMBERS = ("rank", "epoch", "version", "attempt", "at_most_once", "has_streams")
_MOMENTS = ("created_at", "due_at", "changed_at", "retain_until", "start_by", "wake_at")
_BYTES = ("arguments", "result")
_short_of = attrgetter(*_FIELDS[: len(SHORT)])
_nullable_of = attrgetter(*_FIELDS[len(SHORT) :])
_ABSENT = _nullable_of(
    InvocationRecord(id=InvocationId(""), app="", task="", arguments=b"", created_at=0.0, due_at=0.0)
)
_OWNED = frozenset(status.value for status in OWNED)
STATUSES = {status.value: status for status in Status}
TEXTS = {status: status.value for status in Status}  # sqlite3 binds a plain text without looking for an adapter
_MAX_SHAPES = 10_000
_MAX = 2**53
_sound: set[tuple[type, ...]] = set()  # the types of rows that were looked at: there are few, and most are met again


def column_types() -> dict[str, tuple[str, ...]]:
    """Return the types that SQLite may report for each column of a readable row."""
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
    if len(_sound) < _MAX_SHAPES:
        _sound.add(shape)


_OWNER, _STATUS, _HISTORY, _TAGS = (COLUMNS.index(name) for name in ("owner", "status", "history", "tags"))
_RANK, _EPOCH, _ATTEMPT, _TERMS = (COLUMNS.index(name) for name in ("rank", "epoch", "attempt", "terms"))
_STREAMS = COLUMNS.index("has_streams")
_ENCODED = [COLUMNS.index(name) for name in _DECODERS]
_CREATED, _DUE, _CHANGED, _RETAIN, _START_BY, _WAKE_AT = (COLUMNS.index(name) for name in _MOMENTS)


def _check_bounds(row: Sequence[Any]) -> None:
    """Raise ValueError for a number that no record has, and for a text that is too long to be decoded."""
    if not (
        EARLIEST <= row[_CREATED] <= LATEST
        and EARLIEST <= row[_DUE] <= LATEST
        and EARLIEST <= row[_CHANGED] <= LATEST
        and (row[_RETAIN] is None or EARLIEST <= row[_RETAIN] <= LATEST)
        and (row[_START_BY] is None or EARLIEST <= row[_START_BY] <= LATEST)
        and (row[_WAKE_AT] is None or EARLIEST <= row[_WAKE_AT] <= LATEST)
    ):
        raise ValueError("a moment in it is beyond every calendar")
    if not (-_MAX <= row[_RANK] <= _MAX and 0 <= row[_EPOCH] <= _MAX and 0 <= row[_ATTEMPT] <= _MAX):
        raise ValueError("a number in it is out of all proportion")
    if row[_OWNER] is None and row[_STATUS] in _OWNED:
        raise ValueError(f"it is {row[_STATUS]}, and no worker owns it")
    if len(row[_HISTORY]) > LARGEST_TEXT:
        raise ValueError(f"its history has {len(row[_HISTORY]):,} characters")


def _decode(row: Sequence[Any]) -> InvocationRecord:
    """Check types, then bounds, then JSON, before a record is made."""
    shape = tuple(map(type, row))
    if shape not in _sound:
        _check_types(row, shape)
    _check_bounds(row)
    fields = {name: value for name, value in zip(_FIELDS, row, strict=True) if value is not None}
    lane, version, status, history = fields.pop("lane"), fields.pop("version"), fields["status"], fields["history"]
    entries = _history_decoder.decode("[" + history[:-1] + "]")
    if not entries or entries[-1].version != version or entries[-1].status != status:
        raise ValueError(f"its history does not end in version {version}, {status}")
    if len(entries) != version and not is_whole(entries):
        raise ValueError(f"its history has {len(entries)} entries for {version} versions")
    for name, decoder in _DECODERS.items():
        if name in fields:
            fields[name] = decoder.decode(fields[name])
    fields["tags"] = tuple(fields["tags"].split(",")) if fields["tags"] else ()
    fields["priority"] = -fields["priority"]
    fields["at_most_once"] = fields["at_most_once"] == 1
    if "has_streams" in fields:
        fields["has_streams"] = fields["has_streams"] == 1
    record = InvocationRecord(**(fields | {"status": STATUSES[status], "history": entries}))
    if record.lane != lane:
        raise ValueError(f"its lane {lane!r} is not that of its task, queue and tags")
    return record


def raw_text(columns: Sequence[str], row: Sequence[object]) -> str:
    """Return the row as it is, for quarantine: readable, and complete enough to be put back by hand."""
    return json.dumps({name: _plain(value) for name, value in zip(columns, row, strict=False)})


def _plain(value: object) -> object:
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


PAGE_COLUMNS = (
    *("app", "run", "generation", "first", "last", "epoch", "operation", "at", "events", "payloads", "writer"),
)
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


ENTRY_COLUMNS = ("app", "kind", "name", "body", "version", "due_at", "keep_until", "subject", "payloads")


def entry_of(row: Sequence[Any]) -> Entry:
    """Return the entry of a row. Raises `CorruptRecord`; what its body says is not looked at."""
    fields = dict(zip(ENTRY_COLUMNS, row, strict=True))
    try:
        _refuse_bad_text(row)
        check_body(fields["body"])
        fields["payloads"] = () if fields["payloads"] is None else json.loads(fields["payloads"])
        return msgspec.convert(fields, Entry)
    except Exception as error:
        raise corrupt(str(fields["kind"]), fields["name"], error) from error


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
