"""The state machine of an invocation: one table, and the table is the law.

`TABLE` below declares which status may follow which, and which actor may make the change. The guards in SQL and MongoDB
filters, the diagram, the colours of the monitor and the tests are derived from it. Nothing else in the code base lists
statuses by hand.

A different rule gets a different status, never a flag: a boolean beside a status would have to be asked for at every
place that reads the status. So recovery has two statuses. A non-owner may enter them, and they lead only back to the
queue. The history then shows that an owner was lost.

`rescued_by` says what brings an invocation out of a status when every process that knew about it has died. A
non-final status without a rescuer is a place where work can be stuck for ever, so the table refuses to load with one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from holdfast.errors import InvocationStatusOwnershipError, InvocationStatusTransitionError


class Status(StrEnum):
    """Where an invocation stands. Stored and shown as the lower-case name."""

    REGISTERED = "registered"
    CONCURRENCY_CONTROLLED = "concurrency_controlled"
    CONCURRENCY_CONTROLLED_FINAL = "concurrency_controlled_final"
    REROUTED = "rerouted"
    PENDING = "pending"
    PENDING_RECOVERY = "pending_recovery"
    RUNNING = "running"
    PAUSED = "paused"
    RESUMED = "resumed"
    CANCELLING = "cancelling"
    RUNNING_RECOVERY = "running_recovery"
    SUSPENDED = "suspended"
    PARKED = "parked"
    KILLED = "killed"
    RETRY = "retry"
    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Rescuer(StrEnum):
    """What brings an invocation out of a non-final status if all processes die."""

    CLAIM = "claim"
    RECOVER_PENDING = "recover_pending"
    RECOVER_RUNNING = "recover_running"
    SWEEP_LIMITS = "sweep_limits"
    WAKE_SUSPENDED = "wake_suspended"
    WAKE_PARKED = "wake_parked"


class Rule(NamedTuple):
    """What the table says about one status."""

    meaning: str
    next: frozenset[Status] = frozenset()
    is_final: bool = False
    available_for_run: bool = False
    requires_ownership: bool = False  # only the owner may leave it
    acquires_ownership: bool = False  # entering makes the actor the owner
    releases_ownership: bool = False  # entering clears the owner
    overrides_ownership: bool = False  # a non-owner may enter it
    rescued_by: Rescuer | None = None


class TableError(Exception):
    """The table contradicts itself. Raised at import, so it can never reach a user."""


S = Status
INITIAL = Status.REGISTERED

_FROM_RUNNING = frozenset(
    {
        *(S.PAUSED, S.SUSPENDED, S.PARKED, S.KILLED, S.RETRY, S.SUCCESS, S.FAILED, S.CANCELLING),
        S.RUNNING_RECOVERY,
    }
)

TABLE: Mapping[Status, Rule] = MappingProxyType(
    {
        S.REGISTERED: Rule(
            "stored and waiting for a runner",
            frozenset({S.PENDING, S.CONCURRENCY_CONTROLLED, S.CONCURRENCY_CONTROLLED_FINAL, S.CANCELLED, S.FAILED}),
            available_for_run=True,
            releases_ownership=True,
            rescued_by=Rescuer.CLAIM,
        ),
        S.CONCURRENCY_CONTROLLED: Rule(
            "waiting for a slot of its concurrency key",
            frozenset({S.REROUTED, S.CANCELLED, S.FAILED}),
            releases_ownership=True,
            rescued_by=Rescuer.SWEEP_LIMITS,
        ),
        S.CONCURRENCY_CONTROLLED_FINAL: Rule(
            "refused: it met a concurrency limit and was declared not to wait", is_final=True, releases_ownership=True
        ),
        S.REROUTED: Rule(
            "back in the queue",
            frozenset({S.PENDING, S.CONCURRENCY_CONTROLLED, S.CANCELLED, S.FAILED}),
            available_for_run=True,
            releases_ownership=True,
            rescued_by=Rescuer.CLAIM,
        ),
        S.PENDING: Rule(
            "claimed by an owner that has not started it",
            frozenset({S.RUNNING, S.KILLED, S.REROUTED, S.PENDING_RECOVERY, S.CANCELLING, S.PARKED}),
            requires_ownership=True,
            acquires_ownership=True,
            rescued_by=Rescuer.RECOVER_PENDING,
        ),
        S.PENDING_RECOVERY: Rule(
            "taken from an owner that never started it",
            frozenset({S.REROUTED}),
            releases_ownership=True,
            overrides_ownership=True,
            rescued_by=Rescuer.RECOVER_PENDING,
        ),
        S.RUNNING: Rule(
            "its code is running",
            _FROM_RUNNING,
            requires_ownership=True,
            rescued_by=Rescuer.RECOVER_RUNNING,
        ),
        S.PAUSED: Rule(
            "its owner waits in memory for a child",
            frozenset({S.RESUMED, S.KILLED, S.CANCELLING, S.RUNNING_RECOVERY}),
            requires_ownership=True,
            rescued_by=Rescuer.RECOVER_RUNNING,
        ),
        S.RESUMED: Rule(
            "running again after a pause",
            _FROM_RUNNING,
            requires_ownership=True,
            rescued_by=Rescuer.RECOVER_RUNNING,
        ),
        S.CANCELLING: Rule(
            "asked to end; its owner may clean up",
            frozenset({S.CANCELLED, S.SUCCESS, S.FAILED, S.KILLED, S.RUNNING_RECOVERY}),
            requires_ownership=True,
            overrides_ownership=True,
            rescued_by=Rescuer.RECOVER_RUNNING,
        ),
        S.RUNNING_RECOVERY: Rule(
            "taken from an owner that died while it ran",
            frozenset({S.REROUTED, S.FAILED, S.CANCELLED}),
            releases_ownership=True,
            overrides_ownership=True,
            rescued_by=Rescuer.RECOVER_RUNNING,
        ),
        S.SUSPENDED: Rule(
            "a durable wait: no owner, no slot, no memory",
            frozenset({S.REROUTED, S.CANCELLED}),
            releases_ownership=True,
            rescued_by=Rescuer.WAKE_SUSPENDED,
        ),
        S.PARKED: Rule(
            "cannot go on with the code at hand; other code or a person wakes it",
            frozenset({S.REROUTED, S.FAILED, S.CANCELLED}),
            releases_ownership=True,
            rescued_by=Rescuer.WAKE_PARKED,
        ),
        S.KILLED: Rule(
            "ended by its runner before it was done",
            frozenset({S.REROUTED, S.FAILED, S.CANCELLED}),
            releases_ownership=True,
            rescued_by=Rescuer.RECOVER_RUNNING,
        ),
        S.RETRY: Rule(
            "failed, and will be tried again when due",
            frozenset({S.PENDING, S.CONCURRENCY_CONTROLLED, S.CANCELLED}),
            available_for_run=True,
            releases_ownership=True,
            rescued_by=Rescuer.CLAIM,
        ),
        S.SUCCESS: Rule("ended with a result", is_final=True, releases_ownership=True),
        S.FAILED: Rule("ended with an error", is_final=True, releases_ownership=True),
        S.CANCELLED: Rule("ended by a request to cancel it", is_final=True, releases_ownership=True),
    }
)


def _edge_problems(table: Mapping[Status, Rule], status: Status, rule: Rule) -> list[str]:
    """Return contradictions between a rule and those of the statuses that follow it."""
    problems = []
    following = {name: table[name] for name in rule.next if name in table}
    if status in rule.next:
        problems.append(f"{status.name} leads to itself")
    if rule.requires_ownership and not any(r.overrides_ownership and r.releases_ownership for r in following.values()):
        problems.append(f"{status.name} can be left only by its owner, so a dead owner would keep it for ever")
    if rule.releases_ownership:
        problems += [
            f"{status.name} has no owner, and {name.name} needs one but does not acquire it"
            for name, r in following.items()
            if r.requires_ownership and not r.acquires_ownership
        ]
    return problems


def _reachable(table: Mapping[Status, Rule], start: Iterable[Status], *, backwards: bool = False) -> set[Status]:
    edges = {(a, b) for a, rule in table.items() for b in rule.next}
    if backwards:
        edges = {(b, a) for a, b in edges}
    found, frontier = set(start), list(start)
    while frontier:
        here = frontier.pop()
        fresh = {b for a, b in edges if a is here} - found
        found |= fresh
        frontier += fresh
    return found


def validate_table(table: Mapping[Status, Rule], initial: Status = INITIAL) -> None:
    """Raise `TableError` with every contradiction in `table`, not only the first."""
    problems = [f"{status.name} has no rule" for status in Status if status not in table]
    for status, rule in table.items():
        final, owned = rule.is_final, rule.requires_ownership
        can_be_claimed = any(table[name].acquires_ownership for name in rule.next if name in table)
        wrong = {
            "both acquires and releases ownership": rule.acquires_ownership and rule.releases_ownership,
            "is final but has exits": final and rule.next,
            "is final but keeps its owner": final and not rule.releases_ownership,
            "is a dead end": not final and not rule.next,
            "is not final and nothing rescues an invocation from it": not final and rule.rescued_by is None,
            "is final but names a rescuer": final and rule.rescued_by is not None,
            "is available for a run but cannot be claimed": rule.available_for_run and not can_be_claimed,
            "can be left only by an owner that it does not have": owned and rule.releases_ownership,
            "is to be rescued by a claim, but cannot be claimed": rule.rescued_by is Rescuer.CLAIM
            and not rule.available_for_run,
        }
        problems += [f"{status.name} {what}" for what, is_so in wrong.items() if is_so]
        problems += _edge_problems(table, status, rule)
    reachable = _reachable(table, [initial])
    problems += [f"{status.name} cannot be reached" for status in table if status not in reachable]
    ending = _reachable(table, [status for status, rule in table.items() if rule.is_final], backwards=True)
    problems += [f"{status.name} never leads to an end" for status in table if status not in ending]
    if problems:
        raise TableError("; ".join(problems))


def _select(table: Mapping[Status, Rule], flag: str) -> frozenset[Status]:
    return frozenset(status for status, rule in table.items() if getattr(rule, flag))


validate_table(TABLE)
FINAL = _select(TABLE, "is_final")
AVAILABLE = _select(TABLE, "available_for_run")
OWNED = _select(TABLE, "requires_ownership")
WAITING = AVAILABLE | {Status.CONCURRENCY_CONTROLLED}  # for a runner, their time or a slot
RELEASING = _select(TABLE, "releases_ownership")
SOURCES: Mapping[Status, frozenset[Status]] = MappingProxyType(
    {target: frozenset(source for source, rule in TABLE.items() if target in rule.next) for target in Status}
)


def validate_transition(source: Status | None, target: Status) -> None:
    """Raise `InvocationStatusTransitionError` unless the table has the edge.

    `None` is the state before the first status.
    """
    allowed: Iterable[Status] = {INITIAL} if source is None else TABLE[source].next
    if target not in allowed:
        names = ", ".join(sorted(status.name for status in allowed)) or "none, it is final"
        start = "the start" if source is None else source.name
        raise InvocationStatusTransitionError(f"{start} → {target.name} is not a legal change; allowed next: {names}")


def acts_for(actor: str | None, owner: str | None) -> bool:
    """Return whether `actor` may act as `owner`: it is that worker, or the runner that supervises it.

    An owner is called ``runner id/worker id``; a supervisor acts under the bare runner id.
    """
    return bool(actor and owner) and (actor == owner or str(owner).startswith(f"{actor}/"))


def validate_ownership(source: Status, target: Status, owner: str | None, actor: str | None) -> None:
    """Raise `InvocationStatusOwnershipError` if only the owner may take this edge and `actor` does not act for it."""
    if TABLE[source].requires_ownership and not TABLE[target].overrides_ownership and not acts_for(actor, owner):
        raise InvocationStatusOwnershipError(
            f"{source.name} → {target.name} may be taken only by the owner {owner or '(no owner)'}, "
            f"not by {actor or '(no actor)'}"
        )


def compute_new_owner(target: Status, owner: str | None, actor: str | None) -> str | None:
    """Return the owner of an invocation after `actor` moved it to `target`."""
    rule = TABLE[target]
    if rule.acquires_ownership:
        if actor is None:
            raise InvocationStatusOwnershipError(f"{target.name} needs an owner, and no actor was named")
        return actor
    return None if rule.releases_ownership else owner


def walk(
    source: Status | None, path: Iterable[Status], owner: str | None, actor: str | None
) -> tuple[Status | None, str | None]:
    """Take several edges as one change.

    Returns the last status and the owner then; raises at the first edge that is not legal.
    """
    for target in path:
        validate_transition(source, target)
        if source is not None:
            validate_ownership(source, target, owner, actor)
        owner = compute_new_owner(target, owner, actor)
        source = target
    return source, owner
