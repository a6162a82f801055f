"""The audit record: who did what, when, from where and why.

A record is stored before an action, and its outcome after it, as a second entry under the same name: nothing that is
stored here changes. A record without an outcome says "begun": the process ended in between, and the action may have
been done. Names sort by the store's time. Retention needs no duty: every entry has a time to be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from holdfast.crashpoints import crashpoint
from holdfast.errors import CorruptRecord, StoreError
from holdfast.ids import derived_id
from holdfast.model.decoding import Moment, ahead
from holdfast.model.records import FOREVER, Entry, entry_reader
from holdfast.runtime.engine import Engine
from holdfast.showing import brief, without_secrets
from holdfast.store.contract import EntryOrder
from holdfast.telemetry.events import DutyFailed

AUDIT, OUTCOME = "audit", "audit.outcome"
BEGUN, DONE, FAILED = "begun", "done", "failed"
_LONGEST = 500
_AT_ONCE, _MOST_LOOKED = 200, 2_000
_MILLISECOND = 0.001


class Action(NamedTuple):
    """What a user is about to do. `via` is how the user is known, `source` the address or host of the user."""

    who: str
    via: str
    source: str
    name: str  # queue.pause
    target: str = ""  # the id or name of what it changes
    reason: str = ""
    twin: str = ""  # the command that does the same


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An action. `outcome` is "begun", "done" or "failed", `detail` the error, `ended_at` the time of the outcome."""

    id: str = ""
    at: Moment
    who: str
    via: str
    source: str = ""
    action: str
    target: str = ""
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
            and kept_text(self.target) in ("", record.target)
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
        record = AuditRecord(
            id=derived_id(self._engine.ids.operation(), at=at),
            at=at,
            who=kept_text(action.who),
            via=action.via,
            source=kept_text(action.source),
            action=action.name,
            target=kept_text(without_secrets(action.target)),
            reason=kept_text(without_secrets(action.reason)),
            twin=kept_text(without_secrets(action.twin)),
        )
        body = msgspec.json.encode(msgspec.structs.replace(record, id=""))
        if not await self._store.put_entry(self._entry(AUDIT, record, body, record.target or None)):
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
        for _ in range(_MOST_LOOKED // _AT_ONCE):
            entries = await self._store.entries(
                self._app,
                AUDIT,
                order=EntryOrder.LATEST,
                limit=_AT_ONCE if where != AuditFilter() else limit,
                before=before,
                subject=kept_text(where.target) if where.target else None,
            )
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
            if len(entries) < _AT_ONCE:
                return AuditPage(await self._with_outcomes(found), None)
        return AuditPage(await self._with_outcomes(found), before)

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


def kept_text(text: str) -> str:
    """Return a text as it is kept: one that every store can hold, and not too long."""
    return brief(text.encode("utf-8", "backslashreplace").decode(), _LONGEST)
