"""Records as documents, changes as update pipelines.

A document is an invocation, field by field. Two fields exist only to keep indexes small: `ready` is there while the
invocation is available for a run, `owned` while somebody owns it; partial indexes hold those documents and no others.

A change is an aggregation pipeline, so that the server computes versions, epochs and the history's new lines from
what is in the document at that very moment. Strings from outside are wrapped in ``$literal``: in a pipeline, a plain
``"$epoch"`` would be read as the field of that name.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from bson import Binary
from msgspec import UNSET

from holdfast.codec import ErrorRecord
from holdfast.lifecycle.changes import OPTIONAL, Change, entries
from holdfast.lifecycle.decoding import INVOCATION, RUNNER, check_plain, corrupt, shown
from holdfast.lifecycle.history import CUT_EVERY, CUT_WITHIN, KEPT_LINES, LONGEST, is_cut_at, is_whole
from holdfast.lifecycle.records import (
    PLAIN,
    FailedAttempt,
    HistoryEntry,
    InvocationRecord,
    RunnerRecord,
)
from holdfast.lifecycle.retention import FOREVER
from holdfast.lifecycle.status import AVAILABLE, OWNED, TABLE, Status

Document = dict[str, Any]


def key_of(app: str, id: str) -> str:
    """The `_id`: one app's invocations lie beside each other, in the order of their ids."""
    return f"{app}|{id}"


# --- records


def to_document(record: InvocationRecord) -> Document:
    document: Document = {
        "_id": key_of(record.app, record.id),
        "app": record.app,
        "id": record.id,
        "task": record.task,
        "queue": record.queue,
        "tags": list(record.tags),
        "lane": record.lane,
        "rank": -record.priority,
        "status": record.status.value,
        "owner": record.owner,
        "epoch": record.epoch,
        "version": record.version,
        "attempt": record.attempt,
        "created_at": record.created_at,
        "due_at": record.due_at,
        "changed_at": record.changed_at,
        "claim_token": record.claim_token,
        "fingerprint": record.fingerprint,
        "parent_id": record.parent_id,
        "reason": record.reason,
        "arguments": Binary(record.arguments),
        "result": None if record.result is None else Binary(record.result),
        "error": None if record.error is None else error_document(record.error),
        "history": [entry_document(entry) for entry in record.history],
    }
    if record.status in AVAILABLE:
        document["ready"] = True
    if record.status in OWNED:
        document["owned"] = True
    for name in _SELDOM:
        if value := getattr(record, name):
            document[name] = value
    if record.cancellation is not None:
        document["cancellation"] = msgspec.to_builtins(record.cancellation)
    if record.terms is not PLAIN:
        document["terms"] = msgspec.to_builtins(record.terms)
    if record.errors:
        document["errors"] = _errors_document(record.errors)
    if record.origin is not None:
        document["origin"] = msgspec.to_builtins(record.origin)
    if record.outbox:
        document["outbox"] = list(record.outbox)
    elif record.retain_until is not None:
        document |= expiry(record.retain_until)
    if payloads := record.payloads:
        document["payloads"] = list(payloads)
    return document


def from_document(document: Mapping[str, Any]) -> InvocationRecord:
    """Return the record of a document.

    Raises `CorruptRecord` when the document cannot be one. Unknown fields are ignored here and survive in the store.
    """
    try:
        return _decode(document)
    except Exception as error:
        raise corrupt(INVOCATION, str(document.get("_id")).rpartition("|")[2], error) from error


def _decode(document: Mapping[str, Any]) -> InvocationRecord:
    """Types and bounds of all fields are checked while the record is made of them, and before."""
    for name in _REQUIRED:
        if name not in document:
            raise KeyError(name)
    for name in ("arguments", "result"):  # a text would be taken for base64
        if isinstance(document[name], str):
            raise TypeError(f"Expected `bytes`, got `str` - at `$.{name}`")
    rank, version = _whole(document["rank"], "rank"), _whole(document["version"], "version")
    numbers = {name: _whole(document[name], name) for name in ("epoch", "attempt")}
    record = msgspec.convert({**document, **numbers, "priority": -rank}, InvocationRecord)
    history, status = record.history, record.status
    if not history or history[-1].version != version or history[-1].status is not status:
        raise ValueError(f"its history does not end in version {version}, {status}")
    if len(history) != version and not is_whole(history):
        raise ValueError(f"its history has {len(history)} entries for {version} versions")
    if record.terms.retries is not None:
        check_plain(record.terms.retries, "terms.retries")
    _check_sense(record, document)
    return record


def _check_sense(record: InvocationRecord, document: Mapping[str, Any]) -> None:
    """Raise ValueError unless the fields that indexes are made of say what the record says."""
    status = record.status
    check_key(document, key_of(record.app, record.id))
    if record.lane != document["lane"]:
        raise ValueError(f"its lane {shown(document['lane'])} is not that of its task, queue and tags")
    if (status in AVAILABLE) is not (document.get("ready") is True):
        raise ValueError(f"it is {status}, and ready is {shown(document.get('ready'))}")
    if (status in OWNED) is not (document.get("owned") is True):
        raise ValueError(f"it is {status}, and owned is {shown(document.get('owned'))}")
    if status in OWNED and record.owner is None:
        raise ValueError(f"it is {status}, and nobody owns it")


def _whole(value: Any, name: str) -> int:
    """Return a whole number, which may be a double if somebody has edited it."""
    if type(value) is float and value.is_integer():
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"Expected `int`, got `{type(value).__name__}` - at `$.{name}`")
    return value


_REQUIRED = (
    *("app", "id", "task", "queue", "tags", "lane", "rank", "status", "owner", "epoch", "version", "attempt"),
    *("created_at", "due_at", "changed_at", "claim_token", "fingerprint", "parent_id", "reason", "arguments"),
    *("result", "error", "history"),
)
# A document has these only if there is something to say.
_SELDOM = ("at_most_once", "limit_key", "slot", "key", "twin", "retain_until", "rerun_of", "start_by")


def entry_document(entry: HistoryEntry) -> Document:
    return msgspec.to_builtins(entry)  # type: ignore[no-any-return]


def error_document(error: ErrorRecord) -> Document:
    document: Document = msgspec.to_builtins(error, builtin_types=(bytes,))
    return document


def _errors_document(errors: Sequence[FailedAttempt]) -> list[Document]:
    return msgspec.to_builtins(errors, builtin_types=(bytes,))  # type: ignore[no-any-return]


# --- changes


def guard(change: Change) -> Document:
    """What the invocation must still be for the change to apply:

    id, legal source status, epoch, and the owner where the table asks for it. Nothing else is asked, and nothing else
    is trusted.
    """
    sources = sorted(change.sources)
    wanted: Document = {
        "_id": key_of(change.app, change.id),
        "status": sources[0].value if len(sources) == 1 else {"$in": [status.value for status in sources]},
        "history.op": {"$ne": change.operation},
    }
    if change.epoch is not None:
        wanted["epoch"] = change.epoch
    return wanted | _owned_by(change.actor or "") if change.needs_owner else wanted


def _owned_by(actor: str) -> Document:
    """Whose invocations `actor` may change as their owner, as `holdfast.lifecycle.status.acts_for` says it."""
    if "/" in actor:
        return {"owner": actor}
    return {"$or": [{"owner": actor}, {"owner": {"$gte": f"{actor}/", "$lt": f"{actor}0"}}]}  # "0" follows "/"


def pipeline(change: Change) -> list[Document]:
    """The whole change as one stage: every edge's line in the history, and every field that changes with it."""
    lines, owner, acquired = _lines(change)
    target = change.target
    fields: Document = {
        "status": target.value,
        "owner": owner,
        "epoch": {"$add": ["$epoch", acquired]},
        "version": {"$add": ["$version", len(lines)]},
        "attempt": {"$add": ["$attempt", change.attempts]},
        "changed_at": change.at,
        "reason": {"$literal": change.why},
        "history": _history(lines),
        "ready": True if target in AVAILABLE else "$$REMOVE",
        "owned": True if target in OWNED else "$$REMOVE",
    }
    if Status.PENDING in change.path:
        fields["claim_token"] = {"$literal": change.operation}
    if change.slot is not None:
        fields["slot"] = {"$literal": change.slot}
    elif change.frees:
        fields["slot"] = "$$REMOVE"
    if change.frees_twin:
        fields["twin"] = "$$REMOVE"
    if change.has_started:
        fields["start_by"] = "$$REMOVE"
    for name in OPTIONAL:
        value = getattr(change, name)
        if value is not UNSET:
            fields[name] = {"$literal": _stored(name, value)}
    if change.retain_until is not UNSET and change.outbox is UNSET:
        fields |= expiry(change.retain_until)
    if change.arguments is not UNSET:
        fields["arguments"] = Binary(change.arguments)
        fields["payloads"] = list(change.payloads) or "$$REMOVE"  # until its first start it has no others
    elif payloads := change.payloads:
        fields["payloads"] = {"$setUnion": [{"$ifNull": ["$payloads", []]}, list(payloads)]}
    return [{"$set": fields}]


def quick(change: Change) -> tuple[Document, Document] | None:
    """Guard and update of a change by somebody who knows the record's version, if it can be done without a pipeline.

    While the version is the same, so is everything that the server would have to compute. Plain operators cost it less
    than half. If the version has moved on, nothing matches, and the pipeline decides.
    """
    if change.version is None or change.epoch is None:
        return None
    rule = TABLE[change.path[0]]
    if not (rule.acquires_ownership or rule.releases_ownership or (change.needs_owner and change.by is None)):
        return None  # the owner stays, and only the server knows who that is
    lines = entries(change, version=change.version, epoch=change.epoch, owner=change.actor)
    last = lines[-1]
    if last.version > LONGEST and is_cut_at(last.version):
        return None
    wanted = guard(change) | {"version": change.version}
    del wanted["history.op"]  # the operation cannot be there: it would have moved the version
    fields: Document = {
        "status": last.status.value,
        "owner": last.owner,
        "epoch": last.epoch,
        "version": last.version,
        "changed_at": change.at,
        "reason": change.why,
    }
    if Status.PENDING in change.path:
        fields["claim_token"] = change.operation
    if change.slot is not None:
        fields["slot"] = change.slot
    for name in OPTIONAL:
        value = getattr(change, name)
        if value is not UNSET:
            fields[name] = _stored(name, value)
    if change.retain_until is not UNSET and change.outbox is UNSET:
        fields |= expiry(change.retain_until)
    gone = {}
    for name, holders in (("ready", AVAILABLE), ("owned", OWNED)):
        if last.status in holders:
            fields[name] = True
        else:
            gone[name] = ""
    if change.frees and change.slot is None:
        gone["slot"] = ""
    if change.frees_twin:
        gone["twin"] = ""
    if change.has_started:
        gone["start_by"] = ""
    update: Document = {"$set": fields, "$push": {"history": {"$each": [entry_document(line) for line in lines]}}}
    if change.attempts:
        update["$inc"] = {"attempt": change.attempts}
    if gone:
        update["$unset"] = gone
    if payloads := change.payloads:
        update["$addToSet"] = {"payloads": {"$each": list(payloads)}}
    return wanted, update


def _history(lines: list[Document]) -> Document:
    """The history with these lines, cut where `holdfast.lifecycle.history.is_cut_at` says so."""
    version, longer = {"$add": ["$version", len(lines)]}, {"$concatArrays": ["$history", lines]}
    is_cut = {"$and": [{"$gt": [version, LONGEST]}, {"$lt": [{"$mod": [version, CUT_EVERY]}, CUT_WITHIN]}]}
    shorter = {"$concatArrays": [{"$slice": ["$history", 1]}, {"$slice": [longer, -KEPT_LINES]}]}
    return {"$cond": [is_cut, shorter, longer]}


def _lines(change: Change) -> tuple[list[Document], Any, int]:
    """The history's new lines as expressions, the owner after the last of them, and how often the epoch grew."""
    owner: Any = "$owner"
    acquired, lines, by = 0, [], change.by
    for step, status in enumerate(change.path, 1):
        rule = TABLE[status]
        if rule.acquires_ownership:
            owner, acquired = {"$literal": change.actor}, acquired + 1
        elif rule.releases_ownership:
            owner = None
        line: Document = {
            "v": {"$add": ["$version", step]},
            "s": status.value,
            "t": change.at,
            "op": {"$literal": change.operation},
            "e": {"$add": ["$epoch", acquired]},
        }
        if owner is not None:
            line["o"] = owner
        if by is not None:
            line["b"] = {"$literal": by}
        if change.why and (step == len(change.path) or rule.overrides_ownership):
            line["w"] = {"$literal": change.why}
        lines.append(line)
    return lines, owner, acquired


def expiry(retain_until: float) -> Document:
    """When the TTL index may remove it: a date, which is all that such an index reads. Nothing is kept beside an
    invocation that would have to be removed before it, so it is the same moment. What has an outbox gets the date once
    that was `delivered`.
    """
    if retain_until >= FOREVER:
        return {"retain_until": retain_until}
    return {"retain_until": retain_until, "expires_at": dt.datetime.fromtimestamp(retain_until, dt.UTC)}


def _stored(name: str, value: Any) -> Any:
    if name == "error" and value is not None:
        return error_document(value)
    if name == "cancellation":
        return msgspec.to_builtins(value)
    if name == "errors":
        return _errors_document(value)
    if name == "result" and value is not None:
        return Binary(value)
    return list(value) if name == "outbox" else value


def delivered() -> list[Document]:
    """The update that empties an outbox, and lets the time run that the record is kept: see `expiry`."""
    date = {"$toDate": {"$multiply": ["$retain_until", 1000]}}
    return [{"$set": {"outbox": "$$REMOVE", "expires_at": {"$cond": [_ENDS, date, "$$REMOVE"]}}}]


_ENDS: Document = {"$and": [{"$isNumber": "$retain_until"}, {"$lt": ["$retain_until", FOREVER]}]}


# --- runners


def runner_document(runner: RunnerRecord) -> Document:
    document: Document = msgspec.to_builtins(runner)
    return {"_id": key_of(runner.app, runner.id), **document}


def runner_of(document: Mapping[str, Any]) -> RunnerRecord:
    """Return the roster entry of a document. Raises `CorruptRecord`."""
    try:
        runner = msgspec.convert(dict(document), RunnerRecord)
        check_key(document, key_of(runner.app, runner.id))
        return runner
    except Exception as error:
        raise corrupt(RUNNER, name_of(document), error) from error


# --- what else there is


def check_key(document: Mapping[str, Any], key: str) -> None:
    """Raise ValueError unless a document is stored under the key that it says: nobody could change or remove it."""
    if document["_id"] != key:
        raise ValueError(f"it is stored as {shown(document['_id'])}, and says that it is {shown(key)}")


def name_of(document: Mapping[str, Any]) -> str:
    """Return what its key says behind the app's name."""
    return str(document.get("_id")).partition("|")[2]
