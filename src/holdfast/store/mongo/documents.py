"""Records as documents, changes as updates.

A document is an invocation, field by field. `ready` exists only to keep indexes small: it is there while the invocation
is available for a run, and partial indexes hold those documents and no others.

A change of a record whose version is known is written with plain operators, guarded by that version, and many of a kind
in one update. Any other change is an aggregation pipeline, so that the server computes versions, epochs and the
history's new lines from the document of that moment. Values are wrapped in ``$literal``: in a pipeline, a plain
``"$epoch"`` would be read as the field of that name.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from bson import Binary
from msgspec import UNSET
from pymongo import UpdateMany, UpdateOne

from holdfast.model.changes import (
    IN_LINE,
    OPTIONAL,
    Change,
    FieldReset,
    MoveUp,
    NoteUpdate,
    RunUpdate,
    StreamMark,
    WaitNote,
    entries,
)
from holdfast.model.decoding import INVOCATION, RUNNER, check_plain, corrupt, shown
from holdfast.model.keeping import Kept
from holdfast.model.records import (
    CUT_EVERY,
    CUT_WITHIN,
    FOREVER,
    KEPT_LINES,
    LONGEST,
    OUTCOMES,
    PLAIN,
    InboxEntry,
    InvocationRecord,
    RunnerRecord,
    digests_in,
    is_cut_at,
    is_whole,
)
from holdfast.model.state_writes import MAX_INBOX_BYTES, MAX_INBOX_ENTRIES
from holdfast.model.status import AVAILABLE, OWNED, TABLE, Status

Document = dict[str, Any]


def key_of(app: str, id: str) -> str:
    """Return the `_id`: an app's invocations lie next to each other, in the order of their ids."""
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
        "result": _stored(record.result),
        "error": _stored(record.error),
        "history": _stored(record.history),
    }
    if record.status in AVAILABLE:
        document["ready"] = True
    for name, field in _SELDOM.items():
        if value := getattr(record, name):
            document[field] = _stored(value)
    if record.terms is not PLAIN:
        document["terms"] = _stored(record.terms)
    if record.retain_until is not None and not record.outbox and not record.has_logs:
        document |= expiry(record.retain_until)
    if payloads := record.payloads:
        document["payloads"] = list(payloads)
    if record.attributes:
        document["attributes"] = listed(record.attributes.items())
    return document


def listed(attributes: Iterable[tuple[str, str]]) -> list[str]:
    """Return names and values as an index can hold them. No name has a '='."""
    return [f"{name}={value}" for name, value in sorted(attributes)]


def _attributes_of(found: object) -> dict[str, str]:
    if not isinstance(found, list) or not all(isinstance(each, str) and "=" in each for each in found):
        raise TypeError(f"Expected texts with a '=', got {shown(found)} - at `$.attributes`")
    pairs = [each.partition("=") for each in found]
    return {name: value for name, _, value in pairs}


def from_document(document: Mapping[str, Any]) -> InvocationRecord:
    """Return the record of a document.

    Raises `CorruptRecord` when the document cannot be one. Unknown fields are ignored here and survive in the store.
    """
    try:
        return _decode(document)
    except Exception as error:
        raise corrupt(INVOCATION, str(document.get("_id")).rpartition("|")[2], error) from error


def _decode(document: Mapping[str, Any]) -> InvocationRecord:
    """Return the record of a document. Types and bounds of its fields are checked before and meanwhile."""
    for name in _REQUIRED:
        if name not in document:
            raise KeyError(name)
    for name in ("arguments", "result"):  # a text would be taken for base64
        if isinstance(document[name], str):
            raise TypeError(f"Expected `bytes`, got `str` - at `$.{name}`")
    rank, version = _whole(document["rank"], "rank"), _whole(document["version"], "version")
    numbers: Document = {name: _whole(document[name], name) for name in ("epoch", "attempt")}
    if "attributes" in document:
        numbers["attributes"] = _attributes_of(document["attributes"])
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
    """Raise ValueError unless the fields of indexes agree with the record."""
    status = record.status
    check_key(document, key_of(record.app, record.id))
    if record.lane != document["lane"]:
        raise ValueError(f"its lane {shown(document['lane'])} is not that of its task, queue and tags")
    if (status in AVAILABLE) is not (document.get("ready") is True):
        raise ValueError(f"it is {status}, and ready is {shown(document.get('ready'))}")
    if status in OWNED and record.owner is None:
        raise ValueError(f"it is {status}, and has no owner")


def _whole(value: Any, name: str) -> int:
    """Return a whole number. It may be a double after a manual edit."""
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
_SELDOM = {"dedup_key": "twin"} | {
    name: name
    for name in (
        *("at_most_once", "limit_key", "slot", "key", "retain_until", "rerun_of", "start_by", "cancellation"),
        *("errors", "origin", "outbox", "reply_to", "run", "wake_at", "has_streams", "waiting", "notes"),
    )
}


def _stored(value: Any) -> Any:
    """Return a value as it is stored."""
    if isinstance(value, bytes):
        return Binary(value)
    return msgspec.to_builtins(list(value) if isinstance(value, tuple) else value, builtin_types=(bytes,))


# --- changes


def guard(change: Change) -> Document:
    """Return the filter of a change: id, source status, epoch, and the owner where the table asks for it."""
    sources = sorted(change.sources)
    wanted: Document = {
        "_id": key_of(change.app, change.id),
        "status": sources[0].value if len(sources) == 1 else {"$in": [status.value for status in sources]},
        "history.op": {"$ne": change.operation},
    }
    if change.epoch is not None:
        wanted["epoch"] = change.epoch
    if change.inbox_seen is not None:
        wanted["run.pushed"] = change.inbox_seen
    return wanted | _owned_by(change.actor or "") if change.needs_owner else wanted


def _owned_by(actor: str) -> Document:
    """Return a filter for the invocations that `actor` may change as their owner, as `holdfast.model.status.acts_for`
    says.
    """
    if "/" in actor:
        return {"owner": actor}
    return {"$or": [{"owner": actor}, {"owner": {"$gte": f"{actor}/", "$lt": f"{actor}0"}}]}  # "0" follows "/"


def pipeline(change: Change) -> list[Document]:
    """Return a change as one stage that computes version, epoch, attempt and history from the document itself."""
    lines, owner, acquired = _lines(change)
    fields: Document = {name: {"$literal": value} for name, value in _facts(change).items()}
    fields |= dict.fromkeys(_gone(change), "$$REMOVE")
    fields |= {
        "owner": owner,
        "epoch": {"$add": ["$epoch", acquired]},
        "version": {"$add": ["$version", len(lines)]},
        "attempt": {"$add": ["$attempt", change.attempts]},
        "history": _history(lines),
    }
    if change.arguments is not UNSET:
        # Until its first start it has no others, except in the inbox of a run.
        fields["payloads"] = {"$cond": [_HAS_NO_LOG, list(change.payloads) or "$$REMOVE", _with(change.payloads)]}
    elif payloads := change.payloads:
        fields["payloads"] = _with(payloads)
    return [{"$set": fields}]


def _with(payloads: Sequence[str]) -> Document:
    return {"$setUnion": [{"$ifNull": ["$payloads", []]}, list(payloads)]}


def _facts(change: Change) -> Document:
    """Return the fields that a change sets to values of its own."""
    facts: Document = {"status": change.target.value, "changed_at": change.at, "reason": change.why}
    if change.target in AVAILABLE:
        facts["ready"] = True
    if Status.PENDING in change.path:
        facts["claim_token"] = change.operation
    if change.slot is not None:
        facts["slot"] = change.slot
    for name in (*OPTIONAL, "arguments"):
        if (value := getattr(change, name)) is not UNSET:
            facts[name] = listed(value.items()) if name == "attributes" else _stored(value)
    if change.retain_until is not UNSET and change.outbox is UNSET and not change.has_log:
        facts |= expiry(change.retain_until)
    return facts


def _gone(change: Change) -> tuple[str, ...]:
    """Return the fields that a change removes."""
    gone = {
        "ready": change.target not in AVAILABLE and not change.sources.isdisjoint(AVAILABLE),
        "slot": change.frees and change.slot is None,
        "twin": change.frees_dedup_key,
        "start_by": change.has_started,
    }
    return tuple(name for name, is_so in gone.items() if is_so)


class Plain(NamedTuple):
    """A change of a record whose version is known: as long as the version is the same, the client can compute all
    values of the update.
    """

    change: Change
    guard: Document
    facts: Document
    lines: list[Document]

    @property
    def update(self) -> Document:
        """Return the change as plain operators, which cost the server less than half of a pipeline."""
        change = self.change
        update: Document = {"$set": self.facts, "$push": {"history": {"$each": self.lines}}}
        if change.attempts:
            update["$inc"] = {"attempt": change.attempts}
        if gone := _gone(change):
            update["$unset"] = dict.fromkeys(gone, "")
        if payloads := change.payloads:
            update["$addToSet"] = {"payloads": {"$each": list(payloads)}}
        return update

    @property
    def kind(self) -> Hashable:
        """Return the key by which changes share one update; None if this change needs its own update."""
        change = self.change
        large = isinstance(change.result, bytes) and len(change.result) > _LARGE
        if (
            large
            or change.run is not UNSET
            or change.attributes is not UNSET
            or change.notes is not UNSET
            or change.slot
            or change.error is not UNSET
            or change.errors is not UNSET
            or change.payloads
        ):
            return None
        actor = change.actor if change.needs_owner else None
        return change.path, change.sources, change.epoch, change.version, change.attempts, actor, tuple(self.facts)


def plain(change: Change) -> Plain | None:
    """Return a change as plain values; None if only the server can compute it. If the version has moved on, nothing
    matches the guard, and a pipeline decides.
    """
    if change.version is None or change.epoch is None:
        return None
    rule = TABLE[change.path[0]]
    if not (rule.acquires_ownership or rule.releases_ownership or (change.needs_owner and change.by is None)):
        return None  # the owner stays, and only the server knows who that is
    lines = entries(change, version=change.version, epoch=change.epoch, owner=change.actor)
    last = lines[-1]
    if is_cut_at(last.version):
        return None
    wanted = guard(change) | {"version": change.version}
    del wanted["history.op"]  # the operation cannot be there: it would have moved the version
    facts = _facts(change) | {"owner": last.owner, "epoch": last.epoch, "version": last.version}
    return Plain(change, wanted, facts, _stored(lines))


def updates_of(changes: Iterable[Change | FieldReset], *, together: bool) -> list[UpdateOne | UpdateMany]:
    """Return the updates that make these changes. Those of a kind go `together`: a statement for each would cost the
    server more than the change itself.
    """
    updates: list[UpdateOne | UpdateMany] = []
    kinds: dict[Hashable, list[Plain]] = {}
    for change in changes:
        found = plain(change) if together and isinstance(change, Change) else None
        if found is None or (kind := found.kind) is None:
            updates.append(UpdateOne(*update_of(change)))
        else:
            kinds.setdefault(kind, []).append(found)
    for alike in kinds.values():
        for first in range(0, len(alike), _TOGETHER):
            some = alike[first : first + _TOGETHER]
            updates.append(_joint_update(some) if len(some) > 1 else UpdateOne(some[0].guard, some[0].update))
    return updates


_TOGETHER, _LARGE = 50, 2**16  # changes, and bytes of a result: one statement has at most 16 MB


def _joint_update(alike: Sequence[Plain]) -> UpdateMany:
    """Return one update of many documents, in which each picks its own values from lists by its `_id`."""
    keys = [one.guard["_id"] for one in alike]
    place = {"$indexOfArray": [{"$literal": keys}, "$_id"]}

    def own(values: list[Any]) -> Document:
        first = values[0]
        same = all(value == first for value in values)
        return {"$literal": first} if same else {"$arrayElemAt": [{"$literal": values}, place]}

    fields: Document = {name: own([one.facts[name] for one in alike]) for name in alike[0].facts}
    fields["history"] = {"$concatArrays": ["$history", own([one.lines for one in alike])]}
    if attempts := alike[0].change.attempts:
        fields["attempt"] = {"$add": ["$attempt", attempts]}
    fields |= dict.fromkeys(_gone(alike[0].change), "$$REMOVE")
    return UpdateMany(alike[0].guard | {"_id": {"$in": keys}}, [{"$set": fields}])


def _history(lines: list[Document]) -> Document:
    """Return the history with these lines, cut where `holdfast.model.records.is_cut_at` says so."""
    version, longer = {"$add": ["$version", len(lines)]}, {"$concatArrays": ["$history", lines]}
    is_cut = {"$and": [{"$gt": [version, LONGEST]}, {"$lt": [{"$mod": [version, CUT_EVERY]}, CUT_WITHIN]}]}
    shorter = {"$concatArrays": [{"$slice": ["$history", 1]}, {"$slice": [longer, -KEPT_LINES]}]}
    return {"$cond": [is_cut, shorter, longer]}


def _lines(change: Change) -> tuple[list[Document], Any, int]:
    """Return the history's new lines as expressions, the owner after the last of them, and how often the epoch grew."""
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
    """Return the fields that say how long an invocation is kept. `expires_at` is a date, since a TTL index reads
    nothing else. An invocation with an outbox gets the date once that was `delivered`. An invocation with logs, of a
    run or of streams, has none: the logs have to be removed before it.
    """
    if retain_until >= FOREVER:
        return {"retain_until": retain_until}
    return {"retain_until": retain_until, "expires_at": dt.datetime.fromtimestamp(retain_until, dt.UTC)}


def update_of(change: Change | FieldReset) -> tuple[Document, Document | list[Document]]:
    """Return filter and update of a change."""
    if isinstance(change, Change):
        found = plain(change)
        return (guard(change), pipeline(change)) if found is None else (found.guard, found.update)
    key = key_of(change.app, change.id)
    if change.key is not None:
        return {"_id": key, "key": change.key}, {"$unset": {"key": ""}}
    # With an empty outbox, the time runs that the record is kept: see `expiry`.
    date = {"$toDate": {"$multiply": ["$retain_until", 1000]}}
    gone: Document = {"outbox": "$$REMOVE", "expires_at": {"$cond": [_ENDS, date, "$$REMOVE"]}}
    return {"_id": key, "outbox": {"$exists": True}}, [{"$set": gone}]


def is_cleared(change: FieldReset, record: InvocationRecord) -> bool:
    return not record.outbox if change.key is None else record.key != change.key


_HAS_NO_LOG: Document = {"$eq": [{"$type": "$run"}, "missing"]}
_HAS_NO_STREAMS: Document = {"$eq": [{"$type": "$has_streams"}, "missing"]}
_ENDS: Document = {
    "$and": [{"$isNumber": "$retain_until"}, {"$lt": ["$retain_until", FOREVER]}, _HAS_NO_LOG, _HAS_NO_STREAMS]
}


def update_of_note(write: NoteUpdate | StreamMark | WaitNote) -> tuple[Document, Document]:
    """Return filter and update of a write that replaces attributes and notes, marks an invocation, or says what it
    waits for.
    """
    owned = {"_id": key_of(write.app, write.id), "epoch": write.epoch, "owner": write.actor}
    if isinstance(write, StreamMark):
        return owned, {"$set": {"has_streams": True}}
    if isinstance(write, WaitNote):
        return owned, {"$set": {"waiting": _stored(write.waiting)}} if write.waiting else {"$unset": {"waiting": ""}}
    said: Document = {}
    if write.attributes is not UNSET:
        said["attributes"] = listed(write.attributes.items())
    if write.notes is not UNSET:
        said["notes"] = write.notes and _stored(write.notes)
    gone = {name: "" for name, value in said.items() if not value}
    there = {name: value for name, value in said.items() if value}
    return owned, ({"$set": there} if there else {}) | ({"$unset": gone} if gone else {})


def update_of_place(write: MoveUp) -> UpdateOne:
    """Return the update that moves an invocation up in the queue, if it waits behind that place."""
    statuses = [status.value for status in sorted(IN_LINE)]
    wanted = {"_id": key_of(write.app, write.id), "status": {"$in": statuses}, "due_at": {"$gt": write.due_at}}
    return UpdateOne(wanted, {"$set": {"due_at": write.due_at}})


def update_of_time(write: Kept) -> UpdateOne:
    """Return the update that keeps an ended invocation until another time. It may have logs, or an outbox: see
    `expiry`.
    """
    wanted = {"_id": key_of(write.app, write.id), "status": {"$in": list(OUTCOMES)}}
    has_no_outbox: Document = {"$eq": [{"$type": "$outbox"}, "missing"]}
    times = expiry(write.until)
    if "expires_at" in times:
        times["expires_at"] = {
            "$cond": [{"$and": [_HAS_NO_LOG, _HAS_NO_STREAMS, has_no_outbox]}, times["expires_at"], "$$REMOVE"]
        }
    return UpdateOne(wanted, [{"$set": {"expires_at": "$$REMOVE"} | times}])


def update_of_inbox(
    entries: Sequence[InboxEntry], before: InvocationRecord, after: InvocationRecord
) -> tuple[Document, Document]:
    """Return filter and update of a write that adds entries to the inbox of a run. The filter holds as long as no
    change was made since `before` was read.
    """
    wanted = {"_id": key_of(before.app, before.id), "version": before.version, **_has_room(entries, before)}
    update: Document = {
        "$inc": {"run.pushed": len(entries)},
        "$push": {"run.inbox": {"$each": [_stored(entry) for entry in entries]}},
    }
    sets: Document = {}
    if after.cancellation is not before.cancellation:
        sets["cancellation"] = _stored(after.cancellation)
    if after.version > before.version:  # back to the queue
        fields = ("owner", "due_at", "changed_at", "reason", "version", "wake_at")
        sets |= {name: getattr(after, name) for name in fields} | {"status": after.status.value, "ready": True}
        if is_cut_at(after.version):
            sets["history"] = _stored(after.history)
        else:
            update["$push"]["history"] = {"$each": _stored(after.history[before.version - after.version :])}
    if sets:
        update["$set"] = sets
    if digests := digests_in(*[entry.body for entry in entries]):
        update["$addToSet"] = {"payloads": {"$each": list(digests)}}
    return wanted, update


def update_of_state(update: RunUpdate, before: InvocationRecord, after: InvocationRecord) -> tuple[Document, Document]:
    assert before.run is not None
    wanted = {"_id": key_of(update.app, update.id), "version": before.version, "run.pushed": before.run.pushed}
    state, payloads = {"run": _stored(after.run)}, list(after.payloads)
    whole = {"$set": state | {"payloads": payloads}} if payloads else {"$set": state, "$unset": {"payloads": ""}}
    return wanted | {"epoch": update.epoch, "owner": update.actor}, whole


_PUSHED_MEANWHILE = 200


def _has_room(entries: Sequence[InboxEntry], before: InvocationRecord) -> Document:
    """Return a filter for an inbox without these entries that still has room. Others may push at the same time:
    where there is much room, each of them is written at its first try.
    """
    assert before.run is not None
    seen, inbox = before.run.pushed, before.run.inbox
    absent: Document = {"run.inbox.id": {"$nin": [entry.id for entry in entries]}}
    size = sum(entry.size for entry in (*inbox, *entries))
    if size > MAX_INBOX_BYTES // 2 or len(inbox) + len(entries) + _PUSHED_MEANWHILE >= MAX_INBOX_ENTRIES:
        return absent | {"run.pushed": seen}
    small = {"$lte": [{"$bsonSize": "$run"}, 4 * MAX_INBOX_BYTES]}  # a document has 16 MB
    return absent | {"run.pushed": {"$gte": seen, "$lte": seen + _PUSHED_MEANWHILE}, "$expr": small}


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
    """Raise ValueError unless a document is stored under its own key: else it could be neither changed nor removed."""
    if document["_id"] != key:
        raise ValueError(f"it is stored as {shown(document['_id'])}, and says that it is {shown(key)}")


def name_of(document: Mapping[str, Any]) -> str:
    """Return the part of a document's key behind the app's name."""
    return str(document.get("_id")).partition("|")[2]
