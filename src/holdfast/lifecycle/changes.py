"""Named, legal changes.

Nobody sets a status. One builds a change by its name (`completed`, `failed`, `parked`, …) and gives it to the store,
which applies it in one conditional write: only if the invocation is still in one of the legal source statuses and
still has the epoch that the change was made for. Everything that changes together, the result and the final status
above all, is in that one write.

A change may walk several edges at once (`path`); the history then shows every edge, and no crash can stop in between.
An epoch of `None` means that the change does not depend on who owns the invocation, which is legal only where the
table does not ask for an owner or lets anybody override one.

What became of a change is a value: `Applied`, `Lost` (somebody else came first) or `Missing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.codec import ErrorRecord
from holdfast.errors import InvocationStatusOwnershipError, InvocationStatusTransitionError
from holdfast.lifecycle.crashes import taken_from
from holdfast.lifecycle.history import LONGEST, cut, is_cut_at
from holdfast.lifecycle.records import Cancellation, FailedAttempt, HistoryEntry, InvocationRecord, digests_in, lane_of
from holdfast.lifecycle.retention import retain_until
from holdfast.lifecycle.status import FINAL, RELEASING, TABLE, Status, compute_new_owner, validate_transition


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One conditional write on one invocation."""

    name: str
    app: str
    id: str
    path: tuple[Status, ...]
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
    outbox: tuple[str, ...] | UnsetType = UNSET  # with the end: the triggers that are to be told of it
    slot: str | None = None  # that the invocation takes; only a claim gives one
    arguments: bytes | UnsetType = UNSET  # in the place of those of one that waits and was never claimed

    def __post_init__(self) -> None:
        _check(self)

    @property
    def target(self) -> Status:
        return self.path[-1]

    @property
    def frees(self) -> bool:
        """Whether the change gives back the slot that the invocation may hold: who owns nothing holds nothing."""
        return not RELEASING.isdisjoint(self.path)

    @property
    def frees_twin(self) -> bool:
        """Whether another of its kind may be stored from then on: it has its first owner, or has ended without one."""
        return Status.PENDING in self.path or self.path[-1] in FINAL

    @property
    def amends(self) -> bool:
        """Whether it changes what an invocation is, and not where it stands: no edge is walked."""
        return self.arguments is not UNSET

    @property
    def has_started(self) -> bool:
        """Whether no time limit for its first start is left: it is started, or has ended."""
        return Status.RUNNING in self.path or self.path[-1] in FINAL

    @property
    def payloads(self) -> tuple[str, ...]:
        """The digests of what the change's result, errors or arguments have apart."""
        errors = () if self.errors is UNSET else [failed.error for failed in self.errors]
        return digests_in(self.result, self.error, self.arguments, *errors)

    @property
    def attempts(self) -> int:
        """What the change adds to the attempts of the invocation."""
        return self.path.count(Status.RUNNING) - self.never_began


class Applied(msgspec.Struct, frozen=True):
    """The change is in the store.

    `again` tells that it was there already: the reply to an earlier try had been lost. A store that writes a batch in
    one go may not be able to tell; then it says False.
    """

    again: bool = False


class Lost(msgspec.Struct, frozen=True):
    """Another writer came first; this is what it left."""

    status: Status
    owner: str | None
    epoch: int


class Missing(msgspec.Struct, frozen=True):
    """There is no such invocation."""


Verdict = Applied | Lost | Missing
APPLIED, APPLIED_AGAIN, MISSING = Applied(), Applied(again=True), Missing()

_checked: set[tuple[tuple[Status, ...], frozenset[Status], bool, bool, bool, bool]] = set()


def _check(change: Change) -> None:
    """Refuse a change that the table does not allow. Each shape is checked once; there are a few dozen of them."""
    if change.outbox is not UNSET and not (change.outbox and change.path and change.target in FINAL):
        raise InvocationStatusTransitionError(
            f"the change '{change.name}' of {change.id} has an outbox and does not end it, or one that names nobody"
        )
    kept = change.retain_until is not UNSET
    shape = (change.path, change.sources, change.epoch is None, change.actor is None, kept, change.amends)
    if shape in _checked:
        return
    if change.amends:
        if change.path not in _AMENDED or change.sources != frozenset(change.path) or change.epoch != 0:
            raise InvocationStatusTransitionError(
                f"'{change.name}' of {change.id}: only what was never claimed can be amended, where it stands"
            )
        return
    if not change.path or not change.sources:
        raise InvocationStatusTransitionError(f"the change '{change.name}' of {change.id} has no path or no source")
    for source in change.sources:
        validate_transition(source, change.path[0])
    for before, after in zip(change.path, change.path[1:], strict=False):
        validate_transition(before, after)
    if change.epoch is None:
        for source in change.sources:
            if TABLE[source].requires_ownership and not TABLE[change.path[0]].overrides_ownership:
                raise InvocationStatusOwnershipError(
                    f"{source.name} → {change.path[0].name} may be taken only by the owner, "
                    f"so '{change.name}' needs an epoch"
                )
    for status in change.path:
        compute_new_owner(status, None, change.actor)
    if kept != (change.target in FINAL):
        raise InvocationStatusTransitionError(
            f"the change '{change.name}' of {change.id} to {change.target.name} says "
            f"{'until when it is kept, and it does not end' if kept else 'not until when it is kept'}"
        )
    _checked.add(shape)


def kept_until(record: InvocationRecord, target: Status, at: float) -> float | UnsetType:
    """What a change to this status has to say about how long the record is kept: nothing, unless it is the end."""
    return retain_until(record.terms, record.key, target, at) if target in FINAL else UNSET


_AMENDED = tuple((status,) for status in (Status.REGISTERED, Status.CONCURRENCY_CONTROLLED, Status.REROUTED))


def applies(change: Change, record: InvocationRecord) -> bool:
    """Whether the record is still as the change expects it. Stores ask the same in their own language."""
    return record.status in change.sources and (change.epoch is None or record.epoch == change.epoch)


def was_applied(operation: str, history: Sequence[HistoryEntry]) -> bool:
    """Whether a write with this operation id is in the record already: the reply was lost, the write was not."""
    return any(entry.operation == operation for entry in reversed(history))


def entries(change: Change, *, version: int, epoch: int, owner: str | None) -> tuple[HistoryEntry, ...]:
    """The history lines of a change, one per edge, for a record that has this version, epoch and owner before it."""
    lines = []
    for step, status in enumerate(change.path, 1):
        owner = compute_new_owner(status, owner, change.actor)
        epoch += TABLE[status].acquires_ownership
        last = step == len(change.path)
        lines.append(
            HistoryEntry(
                version=version + step,
                status=status,
                at=change.at,
                operation=change.operation,
                owner=owner,
                epoch=epoch,
                why=change.why if last else "",
            )
        )
    return tuple(lines)


def apply_to(change: Change, record: InvocationRecord) -> InvocationRecord:
    """The record after the change: the reference that every store has to agree with."""
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
    if lines[-1].version > LONGEST and is_cut_at(lines[-1].version):
        updates["history"] = cut(record.history + lines)
    if change.amends:
        updates["arguments"] = change.arguments
    if Status.PENDING in change.path:
        updates["claim_token"] = change.operation
    if change.slot is not None:
        updates["slot"] = change.slot
    elif change.frees:
        updates["slot"] = None
    if change.frees_twin:
        updates["twin"] = None
    if record.start_by is not None and change.has_started:
        updates["start_by"] = None
    for name in OPTIONAL:
        value = getattr(change, name)
        if value is not UNSET and name != "lane":  # which a record derives
            updates[name] = value
    return msgspec.structs.replace(record, **updates)


OPTIONAL = (
    "due_at",
    "result",
    "error",
    "errors",
    "fingerprint",
    "queue",
    "lane",
    "retain_until",
    "cancellation",
    "start_by",
    "outbox",
)


def rounds(changes: Sequence[Change]) -> Iterator[list[tuple[int, Change]]]:
    """The changes with their numbers, in as few rounds as possible so that none holds two of one invocation."""
    waiting = list(enumerate(changes))
    while waiting:
        this_round: dict[tuple[str, str], tuple[int, Change]] = {}
        later = []
        for item in waiting:
            if this_round.setdefault((item[1].app, item[1].id), item) is not item:
                later.append(item)
        yield list(this_round.values())
        waiting = later


def unowned(
    name: str, record: InvocationRecord, target: Status, sources: frozenset[Status], operation: str, at: float, why: str
) -> Change:
    """A change of what nobody owns."""
    return Change(
        name=name,
        app=record.app,
        id=record.id,
        path=(target,),
        sources=sources,
        epoch=record.epoch,
        operation=operation,
        at=at,
        why=why,
        retain_until=kept_until(record, target, at),
    )


_WORKING = frozenset({Status.RUNNING, Status.RESUMED})
_ENDING = _WORKING | {Status.CANCELLING}


_RESERVED = frozenset({Status.PENDING})


def owned(
    name: str,
    record: InvocationRecord,
    path: tuple[Status, ...],
    sources: frozenset[Status],
    *,
    operation: str,
    at: float,
    why: str = "",
    result: bytes | UnsetType | None = UNSET,
    error: ErrorRecord | UnsetType | None = UNSET,
    fingerprint: str | UnsetType | None = UNSET,
    never_began: bool = False,
) -> Change:
    """A change by the invocation's owner: it holds only while the epoch is the one that the owner was given."""
    return Change(
        name=name,
        app=record.app,
        id=record.id,
        path=path,
        sources=sources,
        epoch=record.epoch,
        operation=operation,
        at=at,
        actor=record.owner,
        version=record.version,
        why=why,
        result=result,
        error=error,
        fingerprint=fingerprint,
        never_began=never_began,
        retain_until=retain_until(record.terms, record.key, path[-1], at) if path[-1] in FINAL else UNSET,
    )


def started(record: InvocationRecord, *, operation: str, at: float) -> Change:
    """The owner of reserved work begins it."""
    return owned("started", record, (Status.RUNNING,), _RESERVED, operation=operation, at=at)


def handed_back(record: InvocationRecord, *, operation: str, at: float, why: str) -> Change:
    """The owner of work that it has not begun returns it to the queue.

    Work that was marked as RUNNING ahead goes by KILLED, the only way back from there, and its attempt does not count.
    """
    ahead = record.status is Status.RUNNING
    path, sources = (
        ((Status.KILLED, Status.REROUTED), frozenset({Status.RUNNING})) if ahead else ((Status.REROUTED,), _RESERVED)
    )
    change = owned("handed_back", record, path, sources, operation=operation, at=at, why=why, never_began=ahead)
    again = ahead and record.attempt == 1 and record.terms.start_by is not None
    return msgspec.structs.replace(change, start_by=record.terms.start_by) if again else change


def completed(record: InvocationRecord, *, result: bytes, operation: str, at: float) -> Change:
    """User code returned; the result is part of the same write."""
    return owned("completed", record, (Status.SUCCESS,), _ENDING, operation=operation, at=at, result=result)


def failed(record: InvocationRecord, *, error: ErrorRecord, operation: str, at: float, why: str = "") -> Change:
    """User code raised, or its result cannot be stored."""
    return owned("failed", record, (Status.FAILED,), _ENDING, operation=operation, at=at, why=why, error=error)


MOST_ERRORS = 50  # that are kept of attempts before the last: the first few and the latest
_FIRST_ERRORS = 5


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
    """User code raised, and is to be tried again at `due_at`, perhaps on another queue."""
    errors = _with_failure(record, error, at)
    change = owned("retried", record, (Status.RETRY,), _WORKING, operation=operation, at=at, why=why)
    moved = {} if queue is None else {"queue": queue, "lane": lane_of(queue, record.task, record.tags)}
    return msgspec.structs.replace(change, errors=errors, due_at=due_at, **moved)


def _with_failure(record: InvocationRecord, error: ErrorRecord, at: float) -> tuple[FailedAttempt, ...]:
    failed = FailedAttempt(number=record.failures + 1, attempt=record.attempt, at=at, error=error)
    errors = (*record.errors, failed)
    return errors if len(errors) <= MOST_ERRORS else errors[:_FIRST_ERRORS] + errors[_FIRST_ERRORS - MOST_ERRORS :]


def parked(
    record: InvocationRecord,
    *,
    fingerprint: str | None,
    operation: str,
    at: float,
    why: str,
    error: ErrorRecord | None = None,
) -> Change:
    """The invocation cannot go on with the code at hand. With an `error`, it was begun, and that attempt counts."""
    sources = _RESERVED | _WORKING
    change = owned(
        "parked", record, (Status.PARKED,), sources, operation=operation, at=at, why=why, fingerprint=fingerprint
    )
    return change if error is None else msgspec.structs.replace(change, errors=_with_failure(record, error, at))


def killed(
    record: InvocationRecord, *, operation: str, at: float, why: str, error: ErrorRecord | None = None
) -> Change:
    """The runner ended user code before it was done; the work goes back to the queue in the same write, or ends where
    it may not be run again (with this error) or was being cancelled.
    """
    return _taken_away("killed", record, Status.KILLED, operation=operation, at=at, why=why, error=error)


def recovered(
    record: InvocationRecord, *, operation: str, at: float, why: str, error: ErrorRecord | None = None
) -> Change:
    """The owner died. Its work goes back to the queue in the same write, or ends with this error: the caller gives one
    if it has crashed too often.
    """
    if record.status is Status.PENDING:
        recovery, error = Status.PENDING_RECOVERY, None
    else:
        recovery = Status.RUNNING_RECOVERY
    return _taken_away("recovered", record, recovery, operation=operation, at=at, why=why, error=error)


def _taken_away(
    name: str,
    record: InvocationRecord,
    through: Status,
    *,
    operation: str,
    at: float,
    why: str,
    error: ErrorRecord | None,
) -> Change:
    """Somebody ends or has ended the owner's code: by `through` to where the work belongs now."""
    if record.status is Status.CANCELLING:
        target, sources, error = Status.CANCELLED, frozenset({Status.CANCELLING}), None
    elif through is Status.PENDING_RECOVERY:
        target, sources = Status.REROUTED, _RESERVED
    elif error is not None:
        target, sources = Status.FAILED, _WORKING | {Status.PAUSED}
    else:
        reserved = _RESERVED if through is Status.KILLED else frozenset[Status]()
        target, sources = Status.REROUTED, _WORKING | {Status.PAUSED} | reserved
    return Change(
        name=name,
        app=record.app,
        id=record.id,
        path=(through, target),
        sources=sources,
        epoch=record.epoch,
        operation=operation,
        at=at,
        actor=record.owner,
        version=record.version,
        why=why,
        error=UNSET if error is None else error,
        retain_until=kept_until(record, target, at),
    )


def rescued(
    record: InvocationRecord, *, operation: str, at: float, why: str, error: ErrorRecord | None = None
) -> Change:
    """What stands in a status that is only ever passed through goes on to where it was meant to go: to the queue, or to
    its end if it may not be run again (with this error) or was being cancelled.
    """
    if taken_from(record) is Status.CANCELLING:
        target, error = Status.CANCELLED, None
    else:
        target = Status.REROUTED if error is None else Status.FAILED
    return Change(
        name="rescued",
        app=record.app,
        id=record.id,
        path=(target,),
        sources=_PASSED_THROUGH if target is Status.REROUTED else _PASSED_THROUGH - {Status.PENDING_RECOVERY},
        epoch=record.epoch,
        operation=operation,
        at=at,
        why=why,
        error=UNSET if error is None else error,
        retain_until=kept_until(record, target, at),
    )


_PASSED_THROUGH = frozenset({Status.KILLED, Status.PENDING_RECOVERY, Status.RUNNING_RECOVERY})


def woken(record: InvocationRecord, *, operation: str, at: float, why: str) -> Change:
    """A parked invocation goes back to the queue: there is other code, or a person says so."""
    return Change(
        name="woken",
        app=record.app,
        id=record.id,
        path=(Status.REROUTED,),
        sources=frozenset({Status.PARKED}),
        epoch=record.epoch,
        operation=operation,
        at=at,
        why=why,
        due_at=at,
        fingerprint=None,
    )
