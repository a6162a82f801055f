"""Named, legal changes.

A status is never set. A change is built by its name (`completed`, `failed`, `parked`, …), and the store applies it in
one conditional write. The write applies only while the invocation is in one of the source statuses and has the epoch of
the change. Where the table asks for the owner, the change's actor must still act for it. Everything that changes
together, such as the result and the final status, is in that one write.

A change may walk several edges at once (`path`); the history then shows every edge, and no crash can stop in between.
An epoch of `None` means that the change does not depend on the owner. That is legal only where the table does not ask
for an owner, or lets any actor override the owner. Where the table refuses a stranger on any edge, the change
`needs_owner`.

The outcome of a change is a value: `Applied`, `Lost` (another writer came first) or `Missing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Required, TypedDict, Unpack

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.codec import ErrorRecord
from holdfast.errors import InvocationStatusOwnershipError, InvocationStatusTransitionError
from holdfast.ids import InvocationId
from holdfast.model.crashes import PASSED_THROUGH, taken_from
from holdfast.model.keeping import Kept
from holdfast.model.notes import Notes
from holdfast.model.records import (
    Cancellation,
    FailedAttempt,
    HistoryEntry,
    InboxEntry,
    InvocationRecord,
    RunState,
    Waiting,
    cut,
    digests_in,
    is_cut_at,
    lane_of,
    retain_until,
)
from holdfast.model.status import (
    AVAILABLE,
    FINAL,
    RELEASING,
    TABLE,
    Status,
    acts_for,
    compute_new_owner,
    validate_transition,
    walk,
)

Path = tuple[Status, ...]


class Change(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One conditional write on one invocation."""

    name: str
    app: str
    id: InvocationId
    path: Path
    sources: frozenset[Status]
    epoch: int | None
    operation: str
    at: float
    actor: str | None = None
    version: int | None = None  # of the record that it was made from: lets a store write faster, and decides nothing
    never_began: bool = False  # RUNNING was written ahead and no code ran: the attempt is taken back
    why: str = ""
    due_at: float | UnsetType = UNSET
    result: bytes | UnsetType | None = UNSET
    error: ErrorRecord | UnsetType | None = UNSET
    errors: tuple[FailedAttempt, ...] | UnsetType = UNSET
    fingerprint: str | UnsetType | None = UNSET
    queue: str | UnsetType = UNSET
    lane: str | UnsetType = UNSET  # with the queue
    retain_until: float | UnsetType = UNSET  # with the end, and only with it
    cancellation: Cancellation | UnsetType = UNSET
    start_by: float | UnsetType = UNSET
    outbox: tuple[str, ...] | UnsetType = UNSET  # with the end: the triggers and receivers to notify
    run: RunState | UnsetType = UNSET
    wake_at: float | UnsetType | None = UNSET  # with SUSPENDED
    attributes: Mapping[str, str] | UnsetType = UNSET
    waiting: Waiting | UnsetType | None = UNSET  # with PAUSED and RESUMED
    notes: Notes | UnsetType | None = UNSET
    has_log: bool = False  # with the end of an invocation that has logs: it is kept until these are removed
    inbox_seen: int | None = None  # applies only if this number of entries was added to the inbox (`RunState.pushed`)
    slot: str | None = None  # that the invocation takes; only a claim gives one
    arguments: bytes | UnsetType = UNSET  # in the place of those of one that waits and was never claimed

    def __post_init__(self) -> None:
        _check(self)

    @property
    def target(self) -> Status:
        return self.path[-1]

    @property
    def needs_owner(self) -> bool:
        """Return whether only the owner may make the change; then the actor has to act for the owner of that time."""
        return not self.amends and needs_owner(self.path, self.sources)

    @property
    def by(self) -> str | None:
        """Return the actor of the change if it is not the owner: its lines of the history name this actor."""
        if self.actor is None or self.amends or Status.PENDING in self.path:
            return None
        return None if "/" in self.actor and needs_owner(self.path, self.sources) else self.actor

    @property
    def frees(self) -> bool:
        """Return whether the change gives back the slot of the invocation: without an owner it holds none."""
        return not RELEASING.isdisjoint(self.path)

    @property
    def frees_dedup_key(self) -> bool:
        """Return whether another invocation with its dedup key may be stored from then on: it has its first owner, or
        has ended.
        """
        return Status.PENDING in self.path or self.path[-1] in FINAL

    @property
    def amends(self) -> bool:
        """Return whether the change replaces the arguments and walks no edge. A run that restarts does walk."""
        return self.arguments is not UNSET and self.run is UNSET

    @property
    def has_started(self) -> bool:
        """Return whether the time limit for a first start is over: the invocation is started, or has ended."""
        return Status.RUNNING in self.path or self.path[-1] in FINAL

    @property
    def payloads(self) -> tuple[str, ...]:
        """Return the digests of the payloads in the change's result, errors or arguments."""
        errors = () if self.errors is UNSET else [failed.error for failed in self.errors]
        return digests_in(self.result, self.error, self.arguments, *errors)

    @property
    def attempts(self) -> int:
        """Return what the change adds to the attempts of the invocation."""
        return self.path.count(Status.RUNNING) - self.never_began


# --- legality: a change is checked when it is made, before any store sees it


_OWNER, _STRANGER = "the owner's runner/1", "a stranger's runner/1"
_AMENDED = tuple((status,) for status in (Status.REGISTERED, Status.CONCURRENCY_CONTROLLED, Status.REROUTED))
_checked: set[tuple[tuple[Status, ...], frozenset[Status], bool, bool, bool, bool]] = set()


def _check(change: Change) -> None:
    """Raise unless the table allows every edge of a change, from each of its sources. Each shape is checked once."""
    if change.outbox is not UNSET and not (change.outbox and change.path and change.target in FINAL):
        raise InvocationStatusTransitionError(
            f"the change '{change.name}' of {change.id} has an outbox and does not end it, or one that names no trigger"
        )
    kept = change.retain_until is not UNSET
    shape = (change.path, change.sources, change.epoch is None, not change.actor, kept, change.amends)
    if shape in _checked:
        return
    if change.amends:
        if change.path not in _AMENDED or change.sources != frozenset(change.path) or change.epoch != 0:
            raise InvocationStatusTransitionError(
                f"'{change.name}' of {change.id}: only calls that were never claimed can be amended, in their place"
            )
        return
    if not change.path or not change.sources:
        raise InvocationStatusTransitionError(f"the change '{change.name}' of {change.id} has no path or no source")
    for source in change.sources:
        validate_transition(source, change.path[0])
    for before, after in zip(change.path, change.path[1:], strict=False):
        validate_transition(before, after)
    for status in change.path:
        compute_new_owner(status, None, change.actor)
    _check_ownership(change)
    if kept != (change.target in FINAL):
        raise InvocationStatusTransitionError(
            f"the change '{change.name}' of {change.id} to {change.target.name} says "
            f"{'until when it is kept, and it does not end' if kept else 'not until when it is kept'}"
        )
    _checked.add(shape)


def _check_ownership(change: Change) -> None:
    """Refuse a change for owners that names no actor, or no epoch."""
    if not needs_owner(change.path, change.sources):
        return
    edge = f"{min(change.sources).name} → {change.path[0].name} may be taken only by the owner"
    if change.epoch is None:
        raise InvocationStatusOwnershipError(f"{edge}, so '{change.name}' needs an epoch")
    if not change.actor:
        raise InvocationStatusOwnershipError(f"{edge}, so '{change.name}' has to name its actor")


@lru_cache(maxsize=4096)
def needs_owner(path: tuple[Status, ...], sources: frozenset[Status]) -> bool:
    """Return whether only the owner may walk this path. Raises `InvocationStatusOwnershipError` if that depends on the
    source: then it has to be two changes.
    """
    answers = {source: _refuses_strangers(source, path) for source in sources}
    if len(set(answers.values())) > 1:
        owners, others = (
            sorted(s.name for s, answer in answers.items() if answer is wanted) for wanted in (True, False)
        )
        raise InvocationStatusOwnershipError(
            f"→ {path[0].name} may be taken only by the owner from {', '.join(owners)}, and by any actor from "
            f"{', '.join(others)}: make two changes of it"
        )
    return any(answers.values())


def _refuses_strangers(source: Status, path: tuple[Status, ...]) -> bool:
    try:
        walk(source, path, _OWNER if TABLE[source].requires_ownership else None, _STRANGER)
    except InvocationStatusOwnershipError:
        return True
    return False


# --- clearings and verdicts


class FieldReset(msgspec.Struct, frozen=True, kw_only=True):
    """A conditional write that walks no edge and leaves no line in the history: it empties one field."""

    name: str
    app: str
    id: InvocationId
    key: str | None = None  # that the invocation gives up, if it still has it; None: the outbox is emptied


def key_freed(record: InvocationRecord) -> FieldReset:
    """Free the key of an invocation whose time is over: another may have it."""
    return FieldReset(name="key_freed", app=record.app, id=record.id, key=record.key)


def delivered(record: InvocationRecord) -> FieldReset:
    """Empty the outbox of an invocation: every trigger in it was notified, so that the invocation may be removed."""
    return FieldReset(name="delivered", app=record.app, id=record.id)


# --- runs


class Push(msgspec.Struct, frozen=True, kw_only=True):
    """A conditional write that adds an entry to the inbox of a run; if the run is SUSPENDED, it goes back to the queue.

    With a `cancellation`, the run is to end: its next owner asks it to.
    """

    app: str
    id: InvocationId
    entry: InboxEntry
    operation: str
    at: float
    why: str = ""
    cancellation: Cancellation | None = None


class RunUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """A conditional write by the owner that replaces the state of its run. Entries that were added to the inbox since
    the owner read it (`inbox_seen`) stay. It walks no edge and leaves no line in the history.
    """

    app: str
    id: InvocationId
    epoch: int
    actor: str
    run: RunState
    inbox_seen: int


class NoteUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """A conditional write by the owner that replaces the attributes of an invocation, its notes, or both. It walks no
    edge and leaves no line in the history.
    """

    app: str
    id: InvocationId
    epoch: int
    actor: str
    attributes: Mapping[str, str] | UnsetType = UNSET
    notes: Notes | UnsetType | None = UNSET


class StreamMark(msgspec.Struct, frozen=True, kw_only=True):
    """A conditional write by the owner, before its first chunk: the invocation has streams from now on. It walks no
    edge and leaves no line in the history.
    """

    app: str
    id: InvocationId
    epoch: int
    actor: str


class WaitNote(msgspec.Struct, frozen=True, kw_only=True):
    """A conditional write by the owner: its code waits for others and keeps its slot meanwhile, or (None) no longer
    waits. It walks no edge and leaves no line in the history.
    """

    app: str
    id: InvocationId
    epoch: int
    actor: str
    waiting: Waiting | None


class MoveUp(msgspec.Struct, frozen=True, kw_only=True):
    """A conditional write that moves an invocation up in the queue, to the place of `due_at`: another invocation waits
    for it. It walks no edge, leaves no line in the history, and never moves it back.
    """

    app: str
    id: InvocationId
    due_at: float


StateWrite = Push | RunUpdate | NoteUpdate | StreamMark | WaitNote | MoveUp | Kept
"""A write that is no step of the status table."""
IN_LINE = AVAILABLE | {Status.CONCURRENCY_CONTROLLED}  # from which a claim or a free slot takes the first


class Full(msgspec.Struct, frozen=True):
    """The inbox of the run has no room."""


class Applied(msgspec.Struct, frozen=True):
    """The change is in the store.

    `again`: it was there already, since the reply to an earlier try had been lost. A store that writes a batch in one
    go may not know; then it is False.
    """

    again: bool = False


class Lost(msgspec.Struct, frozen=True):
    """Another writer came first: the record as that writer left it."""

    status: Status
    owner: str | None
    epoch: int


class Missing(msgspec.Struct, frozen=True):
    """There is no such invocation."""


Verdict = Applied | Lost | Missing | Full
APPLIED, APPLIED_AGAIN, MISSING, FULL = Applied(), Applied(again=True), Missing(), Full()
Write = Change | FieldReset | StateWrite


def kept_until(record: InvocationRecord, target: Status, at: float) -> float | UnsetType:
    """Return until when a change to this status keeps the record: nothing, unless it is the end."""
    return retain_until(record.terms, record.key, target, at) if target in FINAL else UNSET


def applies(change: Change, record: InvocationRecord) -> bool:
    """Return whether the record is still as the change expects it. Stores ask the same in their own language."""
    return (
        record.status in change.sources
        and (change.epoch is None or record.epoch == change.epoch)
        and (change.inbox_seen is None or has_seen(change.inbox_seen, record))
        and (record.owner == change.actor or not change.needs_owner or acts_for(change.actor, record.owner))
    )


def has_seen(inbox_seen: int, record: InvocationRecord) -> bool:
    """Return whether the inbox is as it was read."""
    return record.run is not None and record.run.pushed == inbox_seen


def was_applied(operation: str, history: Sequence[HistoryEntry]) -> bool:
    """Return whether a write with this operation id is in the history already: then only its reply was lost."""
    return any(entry.operation == operation for entry in reversed(history))


def entries(change: Change, *, version: int, epoch: int, owner: str | None) -> tuple[HistoryEntry, ...]:
    """Return the history lines of a change, one per edge, for a record of this version, epoch and owner.

    The reason stands with the last edge, and with an edge that took the invocation from its owner.
    """
    lines, by = [], None if Status.PENDING in change.path else change.by
    for step, status in enumerate(change.path, 1):
        owner = compute_new_owner(status, owner, change.actor)
        epoch += TABLE[status].acquires_ownership
        has_reason = step == len(change.path) or TABLE[status].overrides_ownership
        lines.append(
            HistoryEntry(
                version=version + step,
                status=status,
                at=change.at,
                operation=change.operation,
                owner=owner,
                epoch=epoch,
                by=by,
                why=change.why if has_reason else "",
            )
        )
    return tuple(lines)


def apply_to(change: Change, record: InvocationRecord) -> InvocationRecord:
    """Return the record after the change: the reference that every store has to agree with."""
    lines = entries(change, version=record.version, epoch=record.epoch, owner=record.owner)
    updates: dict[str, object] = {
        "status": lines[-1].status,
        "owner": lines[-1].owner,
        "epoch": lines[-1].epoch,
        "attempt": record.attempt + change.attempts,
        "changed_at": change.at,
        "reason": change.why,
        "history": record.history + lines,
    }
    if is_cut_at(lines[-1].version):
        updates["history"] = cut(record.history + lines)
    if change.arguments is not UNSET:
        updates["arguments"] = change.arguments
    if Status.PENDING in change.path:
        updates["claim_token"] = change.operation
    if change.slot is not None:
        updates["slot"] = change.slot
    elif change.frees:
        updates["slot"] = None
    if change.frees_dedup_key:
        updates["dedup_key"] = None
    if record.start_by is not None and change.has_started:
        updates["start_by"] = None
    for name in OPTIONAL:
        value = getattr(change, name)
        if value is not UNSET and name != "lane":  # which a record derives
            updates[name] = value
    return msgspec.structs.replace(record, **updates)


OPTIONAL = (
    *("due_at", "result", "error", "errors", "fingerprint", "queue", "lane", "retain_until"),
    *("cancellation", "start_by", "outbox", "run", "wake_at", "attributes", "waiting", "notes"),
)


def pushes_by_run(changes: Sequence[Write]) -> list[list[int]] | None:
    """Return the numbers of pushes, those to one run together; None if there is anything else among the changes."""
    found: dict[tuple[str, str], list[int]] = {}
    for index, change in enumerate(changes):
        if not isinstance(change, Push):
            return None
        found.setdefault((change.app, change.id), []).append(index)
    return list(found.values())


def rounds(changes: Sequence[Write]) -> Iterator[list[tuple[int, Write]]]:
    """Yield numbered changes, in as few rounds as possible so that no round has two changes of one invocation."""
    waiting = list(enumerate(changes))
    while waiting:
        this_round: dict[tuple[str, str], tuple[int, Write]] = {}
        later = []
        for item in waiting:
            if this_round.setdefault((item[1].app, item[1].id), item) is not item:
                later.append(item)
        yield list(this_round.values())
        waiting = later


# --- changes by name


class ChangeFacts(TypedDict, total=False):
    """The fields of a change besides its edges. See `Change`."""

    operation: Required[str]
    at: Required[float]
    actor: str | None
    version: int | None
    never_began: bool
    why: str
    due_at: float | UnsetType
    result: bytes
    error: ErrorRecord | UnsetType
    errors: tuple[FailedAttempt, ...]
    fingerprint: str | None
    queue: str
    lane: str
    cancellation: Cancellation
    start_by: float
    arguments: bytes
    run: RunState
    wake_at: float | None
    attributes: Mapping[str, str] | UnsetType
    waiting: Waiting | None
    notes: Notes | UnsetType | None
    inbox_seen: int


PARENT = "@parent"  # in an outbox: the run that waits for the end
CHILDREN = "@children"  # in an outbox: what is to end with the run
HOOKS = "@hooks"  # in an outbox: its hooks
FOLLOW = "@follow"  # in an outbox: what is called after it
GROUP = "@group"  # in an outbox: its group


def change_of(
    name: str, record: InvocationRecord, path: Path, sources: frozenset[Status], **facts: Unpack[ChangeFacts]
) -> Change:
    """Build a change of a record. It holds for the record's epoch; an end says how long the record is kept, and names
    the run that waits for it. The end of a started run names its children too, unless its body has returned: then its
    owner has seen to them before. It names its hooks, unless its owner knows that there are none.
    """
    app, id, epoch, until = record.app, record.id, record.epoch, kept_until(record, path[-1], facts["at"])
    outbox: tuple[str, ...] = ()
    if path[-1] in FINAL:
        has_children = record.compensates and path[-1] is not Status.SUCCESS
        outbox = (PARENT,) if record.reply_to is not None else ()
        outbox += (CHILDREN,) if has_children else ()
        outbox += (HOOKS,) if has_children or (record.run is not None and record.run.has_hooks) else ()
        outbox += (FOLLOW,) if record.terms.follow is not None else ()
        outbox += (GROUP,) if record.terms.group is not None else ()
    return Change(
        name=name,
        app=app,
        id=id,
        path=path,
        sources=sources,
        epoch=epoch,
        retain_until=until,
        outbox=outbox or UNSET,
        has_log=record.has_logs and path[-1] in FINAL,
        **facts,
    )


def owned(
    name: str, record: InvocationRecord, path: Path, sources: frozenset[Status], **facts: Unpack[ChangeFacts]
) -> Change:
    """Build a change by the invocation's owner: it holds only for the epoch that the owner was given. What ends while
    its code waits is RESUMED in the same write.
    """
    if record.status is Status.PAUSED and Status.RESUMED in sources:
        path, sources = (Status.RESUMED, *path), frozenset({Status.PAUSED})
    facts |= {"actor": record.owner, "version": record.version}
    return change_of(name, record, path, sources, **facts)


_RESERVED = frozenset({Status.PENDING})
WORKING = frozenset({Status.RUNNING, Status.RESUMED})
_ENDING = WORKING | {Status.CANCELLING}
MAX_ERRORS = 50  # that are kept of attempts before the last: the first few and the latest
_FIRST_ERRORS = 5


def started(record: InvocationRecord, *, operation: str, at: float) -> Change:
    """Begin reserved work."""
    return owned("started", record, (Status.RUNNING,), _RESERVED, operation=operation, at=at)


def handed_back(record: InvocationRecord, *, operation: str, at: float, why: str, by: str | None = None) -> Change:
    """Return work that its owner has not begun to the queue. `by`: the owner's runner; None: the owner itself.

    Work that was marked as RUNNING ahead goes by KILLED, the only way back from there, and its attempt does not count.
    """
    facts: ChangeFacts = {"operation": operation, "at": at, "why": why}
    path: Path = (Status.REROUTED,)
    sources = _RESERVED
    if record.status is Status.RUNNING:
        path, sources, facts["never_began"] = (Status.KILLED, Status.REROUTED), frozenset({Status.RUNNING}), True
        if record.attempt == 1 and record.terms.start_by is not None:
            facts["start_by"] = record.terms.start_by
    facts |= {"actor": record.owner if by is None else by, "version": record.version}
    return change_of("handed_back", record, path, sources, **facts)


def completed(record: InvocationRecord, *, result: bytes, operation: str, at: float) -> Change:
    """End an invocation with its result, in the same write."""
    return owned("completed", record, (Status.SUCCESS,), _ENDING, operation=operation, at=at, result=result)


def failed(record: InvocationRecord, *, error: ErrorRecord, operation: str, at: float, why: str = "") -> Change:
    """End an invocation with an error: user code raised, or its result cannot be stored."""
    return owned("failed", record, (Status.FAILED,), _ENDING, operation=operation, at=at, why=why, error=error)


def retried(
    record: InvocationRecord,
    *,
    error: ErrorRecord,
    due_at: float,
    queue: str | None,
    operation: str,
    at: float,
    why: str,
) -> Change:
    """Retry a failed attempt at `due_at`, perhaps on another queue."""
    facts: ChangeFacts = {"operation": operation, "at": at, "why": why, "due_at": due_at}
    facts["errors"] = _with_failure(record, error, at)
    if queue is not None:
        facts |= {"queue": queue, "lane": lane_of(queue, record.task, record.tags)}
    return owned("retried", record, (Status.RETRY,), WORKING, **facts)


def _with_failure(record: InvocationRecord, error: ErrorRecord, at: float) -> tuple[FailedAttempt, ...]:
    number, due_at = record.failures + 1, None if record.errors else record.due_at
    failed = FailedAttempt(number=number, attempt=record.attempt, at=at, error=error, due_at=due_at)
    errors = (*record.errors, failed)
    return errors if len(errors) <= MAX_ERRORS else errors[:_FIRST_ERRORS] + errors[_FIRST_ERRORS - MAX_ERRORS :]


def deferred(record: InvocationRecord, *, due_at: float, operation: str, at: float, why: str) -> Change:
    """Return a call that asked for another attempt later to the queue. It has not failed."""
    facts: ChangeFacts = {"operation": operation, "at": at, "why": why, "due_at": due_at}
    return owned("deferred", record, (Status.SUSPENDED, Status.REROUTED), WORKING, **facts)


def parked(
    record: InvocationRecord,
    *,
    fingerprint: str | None,
    operation: str,
    at: float,
    why: str,
    error: ErrorRecord | None = None,
) -> Change:
    """Park an invocation that the deployed code cannot continue. With an `error`, it was begun, and that attempt
    counts.
    """
    facts: ChangeFacts = {"operation": operation, "at": at, "why": why, "fingerprint": fingerprint}
    if error is not None:
        facts["errors"] = _with_failure(record, error, at)
    return owned("parked", record, (Status.PARKED,), _RESERVED | WORKING, **facts)


def killed(
    record: InvocationRecord,
    *,
    operation: str,
    at: float,
    why: str,
    by: str | None = None,
    error: ErrorRecord | None = None,
) -> Change:
    """Return an invocation that was interrupted to the queue. It ends instead if it may not be run again (with this
    error) or was being cancelled. `by`: the owner's runner; None: the owner itself.
    """
    actor = record.owner if by is None else by
    facts: ChangeFacts = {"operation": operation, "at": at, "actor": actor, "why": why, "error": error or UNSET}
    return _taken_away("killed", record, Status.KILLED, facts)


def recovered(
    record: InvocationRecord, *, by: str | None, operation: str, at: float, why: str, error: ErrorRecord | None = None
) -> Change:
    """Return a dead owner's work to the queue, or end it with this error: the caller gives one if it has crashed too
    often. `by` is the runner that performs it, and need not be the owner's.
    """
    pending = record.status is Status.PENDING
    error = None if pending else error
    facts: ChangeFacts = {"operation": operation, "at": at, "actor": by, "why": why, "error": error or UNSET}
    through = Status.PENDING_RECOVERY if pending else Status.RUNNING_RECOVERY
    return _taken_away("recovered", record, through, facts)


def _taken_away(name: str, record: InvocationRecord, through: Status, facts: ChangeFacts) -> Change:
    """Take work from its owner, by the status `through`: back to the queue, or to its end."""
    target, sources = Status.REROUTED, WORKING | {Status.PAUSED}
    if record.status is Status.CANCELLING:
        sources = frozenset({Status.CANCELLING})
        if not record.compensates:
            target, facts["error"] = Status.CANCELLED, UNSET
        elif facts["error"] is not UNSET:
            target = Status.FAILED
    elif through is Status.PENDING_RECOVERY:
        sources = _RESERVED
    elif facts["error"] is not UNSET:
        target = Status.FAILED
    elif through is Status.KILLED:
        sources |= _RESERVED
    facts["version"] = record.version
    return change_of(name, record, (through, target), sources, **facts)


def rescued(
    record: InvocationRecord, *, by: str | None, operation: str, at: float, why: str, error: ErrorRecord | None = None
) -> Change:
    """Move an invocation out of a transitional status: to the queue, or to its end if it may not be run again (with
    this error) or was being cancelled.
    """
    target, sources = Status.REROUTED, PASSED_THROUGH
    if taken_from(record) is Status.CANCELLING and not record.compensates:
        target, error = Status.CANCELLED, None
    elif error is not None:
        target = Status.FAILED
    if target is not Status.REROUTED:
        sources -= {Status.PENDING_RECOVERY}
    facts: ChangeFacts = {"operation": operation, "at": at, "actor": by, "why": why, "error": error or UNSET}
    return change_of("rescued", record, (target,), sources, **facts)


def awakened(record: InvocationRecord, *, operation: str, at: float, why: str) -> Change:
    """Return a suspended run to the queue: its time has come, or its inbox has a message."""
    facts: ChangeFacts = {"operation": operation, "at": at, "why": why, "due_at": at, "wake_at": None}
    return change_of("awakened", record, (Status.REROUTED,), frozenset({Status.SUSPENDED}), **facts)


def woken(record: InvocationRecord, *, operation: str, at: float, why: str) -> Change:
    """Return a parked invocation to the queue: other code is deployed, or a user asked for it."""
    facts: ChangeFacts = {"operation": operation, "at": at, "why": why, "due_at": at, "fingerprint": None}
    return change_of("woken", record, (Status.REROUTED,), frozenset({Status.PARKED}), **facts)
