"""Records with their values encrypted, and back.

Encrypted are arguments (also of calls that follow), results, messages and tracebacks of errors, chunks and payloads. So
are inboxes and logs of runs, and of the notes the checkpoint, the log lines and the message of the progress. Everything
that a store searches, guards or counts by stays in the clear: names, statuses, times, keys, attributes.

A value that cannot be opened stays as it is stored. A placeholder is stored beside it, so a reader without the key
needs no extra code.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from holdfast.codec import MARK, ErrorRecord, Reference
from holdfast.codec.payloads import split
from holdfast.codec.sealing import NO_HEAD, CipherKeys, Place, head_of, is_broken, is_sealed, with_references
from holdfast.model.changes import Change, NoteUpdate, Push, RunUpdate, Write
from holdfast.model.log import Page
from holdfast.model.notes import LogLine, Notes
from holdfast.model.records import PLAIN, Entry, FailedAttempt, Follow, InvocationRecord, NextCall, RunState

HIDDEN = "<encrypted>"
# The names of fields with values in the bodies of entries, by kind; they are sealed wherever they stand in the body.
_FIELDS: Mapping[str, frozenset[str]] = {
    "schedule": frozenset({"arguments"}),
    "event": frozenset({"payload"}),
    "event-key": frozenset({"payload"}),
    "join": frozenset({"picked"}),
    "group": frozenset({"arguments"}),
    "answer": frozenset({"body"}),
    "hook": frozenset({"metadata", "body", "token"}),
}
SEALED_KINDS = frozenset(_FIELDS)
_AS_JSON = frozenset({"metadata"})  # any value of JSON, not only bytes
_AS_TEXT = frozenset({"token", "secret"})
_OTHERS = frozenset({"attributes", "retries", "retention", "headers", "schema"})  # their keys are names that users give
_TEXT = "<encrypted>:"  # before base64, where a text or a JSON value stood
# A body without these has no sealed values, and is not decoded. The first digit of base64 has 6 bits of the mark.
_SEALED_STARTS = (b'"' + base64.b64encode(MARK)[:1], f'"{_TEXT}'.encode())
_state = msgspec.msgpack.Decoder(tuple[str, str, bytes | None])
_notes = msgspec.msgpack.Decoder(tuple[str, bytes | None, tuple[LogLine, ...]])
_pack = msgspec.msgpack.encode
T = TypeVar("T")


class SealTurn:
    """Turns values of records into sealed ones."""

    def __init__(self, ring: CipherKeys) -> None:
        self._ring = ring

    def value(self, data: bytes, place: Place) -> bytes:
        return self._ring.seal(data, place)

    def error(self, error: ErrorRecord, place: Place) -> ErrorRecord:
        if is_sealed(error.data):
            return error
        references: tuple[Reference, ...] = ()
        body: bytes | memoryview | None = error.data
        if error.data is not None and error.data[:1] == MARK:
            references, body = split(error.data)
        inner = _pack((error.message, error.traceback, None if body is None else bytes(body)))
        data = self._ring.seal_parts(references, inner, place)
        return replace(error, message=HIDDEN if error.message else "", traceback="", data=data)

    def notes(self, notes: Notes, place: Place) -> Notes:
        said = "" if notes.progress is None else notes.progress.message
        if is_sealed(notes.checkpoint) or not (said or notes.checkpoint is not None or notes.log):
            return notes
        data = self._ring.seal(_pack((said, notes.checkpoint, notes.log)), place)
        lines = tuple(replace(line, text=f"{HIDDEN} ({len(notes.log)} lines)", logger="") for line in notes.log[-1:])
        progress = replace(notes.progress, message=HIDDEN) if notes.progress is not None and said else notes.progress
        return replace(notes, progress=progress, checkpoint=data, log=lines)

    def text(self, text: str, place: Place) -> str:
        if not text or _sealed_text(text):
            return text
        return _TEXT + base64.b64encode(self._ring.seal(text.encode("utf-8", "surrogatepass"), place)).decode()

    def why(self, text: str, error: ErrorRecord | None) -> str:
        """Return a reason without the message of its error, which it quotes."""
        return text if error is None or not error.message else text.replace(f": {error.message}", f": {HIDDEN}")


class OpenTurn:
    """Turns sealed values of records back, as far as there are keys."""

    def __init__(self, ring: CipherKeys) -> None:
        self._ring = ring

    def value(self, data: bytes, place: Place) -> bytes:
        return self._ring.open(data, place)

    def error(self, error: ErrorRecord, place: Place) -> ErrorRecord:
        if error.data is None or not is_sealed(error.data):
            return error
        opened = self._ring.open_parts(error.data, place)
        if isinstance(opened, bytes):
            return replace(error, data=opened)
        references, inner = opened
        message, traceback, body = _state.decode(inner)
        if references and body is not None:
            body = with_references(references, body)
        return replace(error, message=message, traceback=traceback, data=body)

    def notes(self, notes: Notes, place: Place) -> Notes:
        if notes.checkpoint is None or not is_sealed(notes.checkpoint):
            return notes
        opened = self._ring.open(notes.checkpoint, place)
        if is_sealed(opened):
            return replace(notes, checkpoint=opened)
        said, checkpoint, log = _notes.decode(opened)
        progress = replace(notes.progress, message=said) if notes.progress is not None else None
        return replace(notes, progress=progress, checkpoint=checkpoint, log=log)

    def text(self, text: str, place: Place) -> str:
        if (sealed := _sealed_text(text)) is None:
            return text
        opened = self._ring.open(sealed, place)
        return text if is_sealed(opened) else opened.decode("utf-8", "surrogatepass")

    def why(self, text: str, error: ErrorRecord | None) -> str:
        return text


Turn = SealTurn | OpenTurn


def _sealed_text(text: object) -> bytes | None:
    """Return the sealed bytes that stand in the place of a text; None if it is a text."""
    if not isinstance(text, str) or not text.startswith(_TEXT):
        return None
    try:
        data = base64.b64decode(text.removeprefix(_TEXT), validate=True)
    except (binascii.Error, ValueError):
        return None
    return data if is_sealed(data) else None


# --- invocations


def turned_record(record: InvocationRecord, turn: Turn) -> InvocationRecord:
    place, changed = _places(record.app, record.id), dict[str, Any]()
    changed["arguments"] = turn.value(record.arguments, place("arguments"))
    if record.result is not None:
        changed["result"] = turn.value(record.result, place("result"))
    if record.error is not None:
        changed["error"] = turn.error(record.error, place("error"))
    if record.errors:
        changed["errors"] = _errors(record.errors, place, turn)
    if record.run is not None and record.run.inbox:
        changed["run"] = _run(record.run, place, turn)
    if record.notes is not None:
        changed["notes"] = turn.notes(record.notes, place("notes"))
    if record.terms.follow is not None:
        changed["terms"] = replace(record.terms, follow=_follow(record.terms.follow, place, turn))
    if all(value is getattr(record, name) for name, value in changed.items()):
        return record
    return replace(record, **changed)


def _places(app: str, id: str) -> Callable[[str], Place]:
    return lambda field: Place(app, id, field)


def _errors(errors: tuple[FailedAttempt, ...], place: Callable[[str], Place], turn: Turn) -> tuple[FailedAttempt, ...]:
    return tuple(replace(each, error=turn.error(each.error, place(f"errors/{each.number}"))) for each in errors)


def _run(run: RunState, place: Callable[[str], Place], turn: Turn) -> RunState:
    inbox = [replace(each, body=turn.value(each.body, place(f"inbox/{each.id}"))) for each in run.inbox]
    return replace(run, inbox=tuple(inbox))


def _follow(follow: Follow, place: Callable[[str], Place], turn: Turn) -> Follow:
    def turned(link: NextCall, number: int) -> NextCall:
        data = turn.value(link.call.arguments, place(f"follow/{follow.place + number}"))
        return replace(link, call=replace(link.call, arguments=data))

    rest = tuple(turned(link, number) for number, link in enumerate(follow.rest, 1))
    return replace(follow, rest=rest, on_error=None if follow.on_error is None else turned(follow.on_error, 0))


def sealed_write(write: Write, turn: SealTurn) -> Write:
    """Return a change with its values encrypted."""
    place, changed = _places(write.app, write.id), dict[str, Any]()
    if isinstance(write, Push):
        body = turn.value(write.entry.body, place(f"inbox/{write.entry.id}"))
        return replace(write, entry=replace(write.entry, body=body))
    if not isinstance(write, Change | RunUpdate | NoteUpdate):
        return write
    if isinstance(write, Change | RunUpdate) and isinstance(write.run, RunState) and write.run.inbox:
        changed["run"] = _run(write.run, place, turn)
    if isinstance(write, Change | NoteUpdate) and isinstance(write.notes, Notes):
        changed["notes"] = turn.notes(write.notes, place("notes"))
    if isinstance(write, Change):
        changed |= _sealed_outcome(write, place, turn)
    return replace(write, **changed) if changed else write


def _sealed_outcome(change: Change, place: Callable[[str], Place], turn: SealTurn) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    last: ErrorRecord | None = None
    for name in ("result", "arguments"):
        if isinstance(data := getattr(change, name), bytes):
            changed[name] = turn.value(data, place(name))
    if change.errors is not UNSET and change.errors:
        last, changed["errors"] = change.errors[-1].error, _errors(change.errors, place, turn)
    if isinstance(change.error, ErrorRecord):
        last, changed["error"] = change.error, turn.error(change.error, place("error"))
    if last is not None:
        changed["why"] = turn.why(change.why, last)
    return changed


# --- logs


def turned_page(page: Page, turn: Turn) -> Page:
    """Return a page with the bytes, errors and secrets in its events turned; what kind they are of stays readable."""
    place = _places(page.app, page.run)
    try:
        events = msgspec.msgpack.decode(page.events)
    except Exception:  # damaged: its reader reports that
        return page
    where = f"log/{page.generation}/{page.first}"
    try:
        return replace(page, events=_pack(_turned_event(events, where, place, turn)))
    except Exception:
        if isinstance(turn, SealTurn):
            raise
        return page


def _turned_event(value: Any, where: str, place: Callable[[str], Place], turn: Turn) -> Any:
    if isinstance(value, bytes):
        return turn.value(value, place(where)) if value else value
    if isinstance(value, list):
        return [_turned_event(item, f"{where}/{index}", place, turn) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if value.keys() >= {"type_name", "message", "traceback"}:
        error = turn.error(msgspec.convert(value, ErrorRecord), place(where))
        return value | {"message": error.message, "traceback": error.traceback, "data": error.data}
    turned = {name: _turned_event(item, f"{where}/{name}", place, turn) for name, item in value.items()}
    if isinstance(secret := value.get("secret"), str):
        turned["secret"] = turn.text(secret, place(f"{where}/secret"))
    if isinstance(why := value.get("why"), str) and isinstance(failed := value.get("error"), dict):
        turned["why"] = turn.why(why, msgspec.convert(failed, ErrorRecord))
    return turned


# --- entries


def turned_entry(entry: Entry, turn: Turn) -> Entry:
    names = _FIELDS.get(entry.kind)
    if names is None:
        return entry
    try:
        body = msgspec.json.decode(entry.body)
    except Exception:
        return entry
    place = _places(entry.app, f"{entry.kind}/{entry.name}")
    try:
        turned = _turned_body(body, names, "", place, turn)
        return entry if turned == body else replace(entry, body=msgspec.json.encode(turned))
    except Exception:
        if isinstance(turn, SealTurn):
            raise
        return entry  # damaged: its reader reports that


def _turned_body(value: Any, names: frozenset[str], where: str, place: Callable[[str], Place], turn: Turn) -> Any:
    if isinstance(value, list):
        return [_turned_body(item, names, f"{where}/{index}", place, turn) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    turned: dict[str, Any] = {}
    for name, item in value.items():
        here = f"{where}/{name}"
        if name in names and name in _AS_JSON:
            turned[name] = _turned_json(item, place(here), turn)
        elif name in names and name in _AS_TEXT and isinstance(item, str):
            turned[name] = turn.text(item, place(here))
        elif name in names and isinstance(item, str):
            turned[name] = base64.b64encode(turn.value(base64.b64decode(item), place(here))).decode() if item else item
        else:
            turned[name] = item if name in _OTHERS else _turned_body(item, names, here, place, turn)
    return turned


def _turned_json(value: Any, place: Place, turn: Turn) -> Any:
    if isinstance(turn, SealTurn):
        is_there = value is None or _sealed_text(value) is not None
        return value if is_there else turn.text(msgspec.json.encode(value).decode(), place)
    if _sealed_text(value) is None:
        return value
    opened = turn.text(value, place)
    return value if opened == value else msgspec.json.decode(opened)


# --- what is still sealed


def sealed_in(record: InvocationRecord) -> str:
    """Return the key that a worker lacks to run an invocation; empty if it lacks none, or the invocation is damaged."""
    if record.terms is PLAIN and record.run is None and record.notes is None:
        return missing_key(record.arguments)
    inbox = [] if record.run is None else [entry.body for entry in record.run.inbox]
    follow = record.terms.follow
    after = [] if follow is None else [link.call.arguments for link in (*follow.rest, follow.on_error) if link]
    checkpoint = None if record.notes is None else record.notes.checkpoint
    return missing_key(record.arguments, checkpoint, *inbox, *after)


def missing_key(*values: bytes | None) -> str:
    """Return the id of the key that the first sealed one of these needs; empty if there is none."""
    for data in values:
        if data is not None and data[:1] == MARK and is_sealed(data) and not is_broken(data):
            return (head_of(data) or NO_HEAD).key
    return ""


def missing_for_record(record: InvocationRecord) -> str:
    errors = [each.error.data for each in record.errors] + ([] if record.error is None else [record.error.data])
    return sealed_in(record) or missing_key(record.result, *errors)


def missing_for_write(write: Write) -> str:
    if isinstance(write, Push):
        return missing_key(write.entry.body)
    found: list[bytes | None] = []
    if isinstance(write, Change):
        found += [data for data in (write.result, write.arguments) if isinstance(data, bytes)]
    return missing_key(*found)


def missing_for_entry(entry: Entry) -> str:
    """Return the key that the values in an entry need; empty if it has none that are sealed."""
    names = _FIELDS.get(entry.kind)
    if names is None or not any(start in entry.body for start in _SEALED_STARTS):
        return ""
    collector = KeyCollector()
    try:
        _turned_body(msgspec.json.decode(entry.body), names, "", _places(entry.app, entry.name), collector)
    except Exception:
        return ""
    return collector.key


def missing_for_page(page: Page) -> str:
    collector = KeyCollector()
    turned_page(page, collector)
    return collector.key


class KeyCollector(OpenTurn):
    """Finds the keys of the values that it meets, empty for those in the clear, and changes nothing."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    @property
    def key(self) -> str:
        """Return one of the keys; empty if there are none."""
        return next(iter(self.keys - {""}), "")

    def value(self, data: bytes, place: Place) -> bytes:
        self.keys.add(missing_key(data))
        return data

    def error(self, error: ErrorRecord, place: Place) -> ErrorRecord:
        self.keys.add(missing_key(error.data))
        return error

    def notes(self, notes: Notes, place: Place) -> Notes:
        self.keys.add(missing_key(notes.checkpoint))
        return notes

    def text(self, text: str, place: Place) -> str:
        self.keys.add(missing_key(_sealed_text(text)))
        return text
