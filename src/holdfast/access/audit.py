"""The audit record: who did what, when, from where and why.

A record is stored before an action, and its outcome after it, as a second entry under the same name: nothing that is
stored here changes. A record without an outcome says "begun": the process ended in between, and the action may have
been done. Names sort by the store's time. Retention needs no duty: every entry has a time to be kept.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from holdfast.crashpoints import crashpoint
from holdfast.errors import CodecError, CorruptRecord, HoldfastError, StoreError, UsageError
from holdfast.ids import derived_id
from holdfast.model.decoding import Moment, ahead
from holdfast.model.names import counted
from holdfast.model.records import FOREVER, Entry, entry_reader
from holdfast.runtime.engine import Engine
from holdfast.showing import brief, error_text, without_secrets
from holdfast.store.contract import EntryOrder
from holdfast.telemetry.events import DutyFailed

AUDIT, OUTCOME = "audit", "audit.outcome"
BEGUN, DONE, FAILED = "begun", "done", "failed"
MANY = "(several)"  # the subject of records with several targets
_CALLS = ("invocation.submit", "archive.rerun", "workflow.fork", "schedule.create", "schedule.update")
WITH_VALUES = frozenset([*_CALLS, "event.emit", "hook.resume"])  # actions that are given arguments or a payload
_LONGEST, _LONGEST_TARGET = 500, 2_000  # a search has up to 1,000
_NOUNS = {"archive": "invocation", "invocation": "invocation", "world": "message"}
_AT_ONCE, _MOST_LOOKED = 200, 2_000
_MILLISECOND = 0.001


class Action(NamedTuple):
    """What a user is about to do. `via` is how the user is known, `source` the address or host of the user."""

    who: str
    via: str
    source: str
    name: str  # queue.pause
    targets: Sequence[str] = ()  # the ids or names of what it changes
    reason: str = ""
    twin: str = ""  # the command that does the same


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An action. `outcome` is "begun", "done" or "failed", `detail` the error, `ended_at` the time of the outcome.

    An action on several has all of them in `targets`, and their number in words as its `target`.
    """

    id: str = ""
    at: Moment
    who: str
    via: str
    source: str = ""
    action: str
    target: str = ""
    targets: tuple[str, ...] = ()
    reason: str = ""
    twin: str = ""
    outcome: str = BEGUN
    detail: str = ""
    ended_at: Moment | None = None


class AuditOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of the second entry."""

    at: Moment
    outcome: str
    detail: str = ""


class AuditFilter(NamedTuple):
    """Which records are wanted. An empty field allows any. `action` may be a whole name, or a part of it."""

    who: str = ""
    action: str = ""
    target: str = ""
    since: float | None = None

    def allows(self, record: AuditRecord) -> bool:
        return (
            kept_text(self.who) in ("", record.who)
            and self.action in ("", record.action, *record.action.split("."))
            and _kept_target(self.target) in ("", record.target, *record.targets)
        )


class AuditPage(NamedTuple):
    """Records, newest first, and the cursor of the next page; None if there is none."""

    records: Sequence[AuditRecord]
    before: str | None


read_record = entry_reader(AuditRecord, AUDIT, named="audit record")
read_outcome = entry_reader(AuditOutcome, OUTCOME, named="outcome of an audit record")


class AuditLog:
    """The audit records of one app; a part of its engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._store = engine.store
        self._app = engine.app
        self._last = 0.0

    async def begin(self, action: Action) -> AuditRecord:
        """Store the record of an action that is about to be done. Raises `StoreError`: then it must not be done."""
        at = self._last = max(self._store.now(), self._last + _MILLISECOND)
        names = tuple(_kept_target(without_secrets(each)) for each in action.targets)
        record = AuditRecord(
            id=derived_id(self._engine.ids.operation(), at=at),
            at=at,
            who=kept_text(action.who),
            via=action.via,
            source=kept_text(action.source),
            action=action.name,
            target=counted(len(names), _NOUNS.get(action.name.partition(".")[0], "name"))
            if names[1:]
            else "".join(names),
            targets=names if names[1:] else (),
            reason=kept_text(without_secrets(action.reason)),
            twin=_kept_target(without_secrets(action.twin)),
        )
        body, subject = (
            msgspec.json.encode(msgspec.structs.replace(record, id="")),
            MANY if names[1:] else record.target,
        )
        if not await self._store.put_entry(self._entry(AUDIT, record, body, subject or None)):
            raise StoreError(f"the audit record of {record.action} could not be stored: its id is taken. Try again.")
        crashpoint("audit.begun")
        return record

    async def end(self, record: AuditRecord, outcome: str, detail: str = "") -> None:
        """Store the outcome of an action. The action is done, so an error is only reported: the record says begun."""
        ended = AuditOutcome(at=self._store.now(), outcome=outcome, detail=kept_text(without_secrets(detail)))
        try:
            await self._store.put_entry(self._entry(OUTCOME, record, msgspec.json.encode(ended)))
        except StoreError as error:
            self._engine.telemetry.emit(DutyFailed("audit", f"store the outcome of {record.action} {record.id}", error))

    def _entry(self, kind: str, record: AuditRecord, body: bytes, subject: str | None = None) -> Entry:
        until = min(ahead(record.at, self._engine.settings.audit_retention_seconds), FOREVER)
        return Entry(app=self._app, kind=kind, name=record.id, body=body, keep_until=until, subject=subject)

    async def page(self, where: AuditFilter, limit: int, before: str | None = None) -> AuditPage:
        """Return records, newest first; `before` is the cursor of the page before. It looks at 2,000 at most, so a page
        may have fewer than `limit` and a cursor all the same.
        """
        found: list[AuditRecord] = []
        at_once = limit if where == AuditFilter() else _AT_ONCE
        for _ in range(_MOST_LOOKED // _AT_ONCE):
            entries, is_more = await self._entries(where.target, at_once, before)
            for entry in entries:
                before = entry.name
                if (record := await self._read(entry)) is None:
                    continue
                if where.since is not None and record.at < where.since:
                    return AuditPage(await self._with_outcomes(found), None)
                if where.allows(record):
                    found.append(record)
                if len(found) == limit:
                    return AuditPage(await self._with_outcomes(found), before)
            if not is_more:
                return AuditPage(await self._with_outcomes(found), None)
        return AuditPage(await self._with_outcomes(found), before)

    async def _entries(self, target: str, limit: int, before: str | None) -> tuple[Sequence[Entry], bool]:
        """Return records, newest first, and whether there may be more: those of a target by its index, together with
        those that have several targets.
        """
        found: list[Entry] = []
        complete_from = ""  # of a read that was cut, older ones are not known
        for subject in (_kept_target(target), MANY) if target else (None,):
            entries = await self._store.entries(
                self._app, AUDIT, order=EntryOrder.LATEST, limit=limit, before=before, subject=subject
            )
            found += entries
            if len(entries) == limit:
                complete_from = max(complete_from, entries[-1].name)
        known = [entry for entry in found if entry.name >= complete_from]
        return sorted(known, key=lambda entry: entry.name, reverse=True), bool(complete_from)

    async def _read(self, entry: Entry) -> AuditRecord | None:
        try:
            return msgspec.structs.replace(read_record(entry), id=entry.name)
        except CorruptRecord as error:
            await self._store.quarantine_entry(entry, error)
            return None

    async def _with_outcomes(self, records: Sequence[AuditRecord]) -> Sequence[AuditRecord]:
        """Return the records with how they ended."""
        ends: dict[str, AuditOutcome] = {}
        for entry in await self._store.entries(self._app, OUTCOME, [each.id for each in records]) if records else ():
            try:
                ends[entry.name] = read_outcome(entry)
            except CorruptRecord as error:
                await self._store.quarantine_entry(entry, error)
        return [
            each
            if (end := ends.get(each.id)) is None
            else msgspec.structs.replace(each, outcome=end.outcome, detail=end.detail, ended_at=end.at)
            for each in records
        ]


def said_of(error: Exception, action: str) -> str:
    """Return what the record of an action says of an error. The text of another library's exception may hold anything,
    and that of a mistake in arguments or a payload quotes them.
    """
    name, is_mistake = type(error).__name__, isinstance(error, UsageError | CodecError)
    if not isinstance(error, HoldfastError) or (is_mistake and action in WITH_VALUES):
        return name
    return f"{name}: {error_text(error)}"


def kept_text(text: str, longest: int = _LONGEST) -> str:
    """Return a text as it is kept: one that every store can hold, and not too long."""
    return brief(text.encode("utf-8", "backslashreplace").decode(), longest)


def _kept_target(text: str) -> str:
    return kept_text(text, _LONGEST_TARGET)


def twin_of(command: str, words: Sequence[str]) -> str:
    """Return the command that does an action; if its words are too long to be kept, it says how many there are."""
    whole = " ".join([command, *map(shlex.quote, words)])
    return whole if len(whole) <= _LONGEST_TARGET or len(words) < 2 else f"{command} (with {len(words)} names)"
