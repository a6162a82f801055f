"""Whether the table allows a change, and who may make it.

A change is checked when it is made, before any store sees it: every edge of its path, from each of its sources. The
rules of ownership are asked of the same table, by walking the path as a stranger would. Where a stranger is refused,
the change `needs_owner`: it has to name its actor, and every store applies it only while that actor still acts for
the owner (`holdfast.lifecycle.status.acts_for`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from msgspec import UNSET

from holdfast.errors import InvocationStatusOwnershipError, InvocationStatusTransitionError
from holdfast.lifecycle.status import FINAL, TABLE, Status, compute_new_owner, validate_transition, walk

if TYPE_CHECKING:
    from holdfast.lifecycle.changes import Change

_OWNER, _STRANGER = "the owner's runner/1", "a stranger's runner/1"
_AMENDED = tuple((status,) for status in (Status.REGISTERED, Status.CONCURRENCY_CONTROLLED, Status.REROUTED))
_checked: set[tuple[tuple[Status, ...], frozenset[Status], bool, bool, bool, bool]] = set()


def check(change: Change) -> None:
    """Refuse a change that the table does not allow. Each shape is checked once; there are a few dozen of them."""
    if change.outbox is not UNSET and not (change.outbox and change.path and change.target in FINAL):
        raise InvocationStatusTransitionError(
            f"the change '{change.name}' of {change.id} has an outbox and does not end it, or one that names nobody"
        )
    kept = change.retain_until is not UNSET
    shape = (change.path, change.sources, change.epoch is None, not change.actor, kept, change.amends)
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
    """Refuse a change for owners that does not say who makes it, or for which claim of the owner's."""
    if not needs_owner(change.path, change.sources):
        return
    edge = f"{min(change.sources).name} → {change.path[0].name} may be taken only by the owner"
    if change.epoch is None:
        raise InvocationStatusOwnershipError(f"{edge}, so '{change.name}' needs an epoch")
    if not change.actor:
        raise InvocationStatusOwnershipError(f"{edge}, so '{change.name}' has to say who makes it")


@lru_cache(maxsize=4096)
def needs_owner(path: tuple[Status, ...], sources: frozenset[Status]) -> bool:
    """Whether only the owner may walk this path. Raises `InvocationStatusOwnershipError` if that depends on the source:
    a change by the owner and a change by anybody are two changes.
    """
    answers = {source: _refuses_strangers(source, path) for source in sources}
    if len(set(answers.values())) > 1:
        owners, others = (
            sorted(s.name for s, answer in answers.items() if answer is wanted) for wanted in (True, False)
        )
        raise InvocationStatusOwnershipError(
            f"→ {path[0].name} may be taken only by the owner from {', '.join(owners)}, and by anybody from "
            f"{', '.join(others)}: make two changes of it"
        )
    return any(answers.values())


def _refuses_strangers(source: Status, path: tuple[Status, ...]) -> bool:
    try:
        walk(source, path, _OWNER if TABLE[source].requires_ownership else None, _STRANGER)
    except InvocationStatusOwnershipError:
        return True
    return False
