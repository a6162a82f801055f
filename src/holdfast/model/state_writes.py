"""Records after writes that are no step of the status table: pushes to inboxes, states of runs, notes, places in line.

These functions are the reference that every store has to agree with.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from msgspec import UNSET

from holdfast.model.changes import (
    APPLIED,
    APPLIED_AGAIN,
    FULL,
    IN_LINE,
    Lost,
    MoveUp,
    NoteUpdate,
    Push,
    RunUpdate,
    StateWrite,
    StreamMark,
    Verdict,
    WaitNote,
    apply_to,
    awakened,
)
from holdfast.model.keeping import Kept
from holdfast.model.records import InvocationRecord, RunState
from holdfast.model.status import FINAL, SOURCES, Status

MAX_INBOX_ENTRIES = 1000
MAX_INBOX_BYTES = 2**20
CANCEL_ENTRY = "cancel"
_RESERVED_ENTRIES = 10  # for a cancel
_NOT_BY_PUSH = SOURCES[Status.CANCELLING] | {Status.CANCELLING, Status.PARKED}  # an owner is asked, PARKED ends at once
_NOTED = ("attributes", "notes")


def written(write: StateWrite, record: InvocationRecord) -> InvocationRecord | Verdict:
    """Return the record after such a write, or why there is none."""
    if isinstance(write, Push):
        return pushed(write, record)
    if isinstance(write, MoveUp):
        return moved_up(write, record)
    if isinstance(write, Kept):
        return kept_longer(write, record)
    return updated(write, record) if isinstance(write, RunUpdate) else noted(write, record)


def moved_up(write: MoveUp, record: InvocationRecord) -> InvocationRecord | Verdict:
    """Return the record with its new place; `APPLIED` if it keeps its own, since no caller depends on which it is."""
    if record.status not in IN_LINE or record.due_at <= write.due_at:
        return APPLIED
    return msgspec.structs.replace(record, due_at=write.due_at)


def kept_longer(write: Kept, record: InvocationRecord) -> InvocationRecord | Verdict:
    if record.status not in FINAL:
        return Lost(record.status, record.owner, record.epoch)
    is_there = record.retain_until == write.until
    return APPLIED_AGAIN if is_there else msgspec.structs.replace(record, retain_until=write.until)


def noted(write: NoteUpdate | StreamMark | WaitNote, record: InvocationRecord) -> InvocationRecord | Verdict:
    """Return the record with other attributes, notes, its mark or what it waits for, or why it stays as it is."""
    if (record.epoch, record.owner) != (write.epoch, write.actor):
        return Lost(record.status, record.owner, record.epoch)
    if isinstance(write, StreamMark):
        return APPLIED_AGAIN if record.has_streams else msgspec.structs.replace(record, has_streams=True)
    if isinstance(write, WaitNote):
        is_there = record.waiting == write.waiting
        return APPLIED_AGAIN if is_there else msgspec.structs.replace(record, waiting=write.waiting)
    said = {name: value for name in _NOTED if (value := getattr(write, name)) is not UNSET}
    is_there = all(getattr(record, name) == value for name, value in said.items())
    return APPLIED_AGAIN if is_there else msgspec.structs.replace(record, **said)


def pushed(push: Push, record: InvocationRecord) -> InvocationRecord | Verdict:
    """Return the record after a push, or why there is none: the reference that every store has to agree with. A cancel
    of a run that has got an owner meanwhile is refused: the owner has read the run before, and is to be asked.
    """
    run, entry = record.run, push.entry
    if run is None or record.status in FINAL:
        return Lost(record.status, record.owner, record.epoch)
    if any(there.id == entry.id for there in run.inbox):
        return APPLIED_AGAIN
    if push.cancellation is not None and record.status in _NOT_BY_PUSH:
        return Lost(record.status, record.owner, record.epoch)
    reserved = _RESERVED_ENTRIES if entry.kind == CANCEL_ENTRY else 0
    size = sum(there.size for there in run.inbox) + entry.size
    if len(run.inbox) >= MAX_INBOX_ENTRIES + reserved or (size > MAX_INBOX_BYTES and run.inbox and not reserved):
        return FULL
    after = msgspec.structs.replace(
        record,
        run=msgspec.structs.replace(run, inbox=(*run.inbox, entry), pushed=run.pushed + 1),
        cancellation=push.cancellation or record.cancellation,
    )
    if record.status is not Status.SUSPENDED:
        return after
    return apply_to(awakened(after, operation=push.operation, at=push.at, why=push.why), after)


def pushed_all(pushes: Sequence[Push], record: InvocationRecord) -> tuple[InvocationRecord, list[Verdict]]:
    """Return the record after pushes to one run, one after another, and the verdict of each. A store may write them
    together.
    """
    verdicts: list[Verdict] = []
    for push in pushes:
        after = pushed(push, record)
        if isinstance(after, InvocationRecord):
            record = after
        verdicts.append(APPLIED if isinstance(after, InvocationRecord) else after)
    return record, verdicts


def updated(update: RunUpdate, record: InvocationRecord) -> InvocationRecord | Verdict:
    """Return the record after an update of its run, or why there is none."""
    run, there = update.run, record.run
    if (record.epoch, record.owner) != (update.epoch, update.actor) or there is None:
        return Lost(record.status, record.owner, record.epoch)
    newer = there.pushed - update.inbox_seen
    if newer < 0:
        return Lost(record.status, record.owner, record.epoch)
    if newer:  # only the owner removes entries, so these are the last ones
        known = {entry.id for entry in run.inbox}
        added = [entry for entry in there.inbox[-newer:] if entry.id not in known]
        run = msgspec.structs.replace(run, inbox=(*run.inbox, *added), pushed=there.pushed)
    return APPLIED_AGAIN if there == run else msgspec.structs.replace(record, run=run)


def without_entries(run: RunState, gone: Collection[str]) -> RunState:
    """Return the state of a run without these inbox entries, which its log has."""
    return msgspec.structs.replace(run, inbox=tuple(entry for entry in run.inbox if entry.id not in gone))
