"""What a store guarantees.

A store keeps invocations and applies changes to them. It holds no policy: what may follow what is decided by
`holdfast.lifecycle`, and a store only promises that each write is atomic, conditional and durable. Each method states
what is *Atomic*, whether calling it again is safe (*Idempotent*), which *Order* it keeps and what it *Raises*.

Every method takes many and answers for each, because a round trip or a flush to disk costs more than anything else
here. Every one of them may also raise `StoreUnavailable` (try again later) and `StoreError`; after such an error a
write may or may not have happened, and repeating it with the same operation id is safe.

A record of any kind that cannot be read (`holdfast.lifecycle.decoding`) stops nothing: the methods that list, claim or
change move it to quarantine, whole, observe that once, and answer with the rest. Three do not: `get` raises
`CorruptRecord`, and `find` and `ended` leave out what cannot be read, since people look with them.

A third party's store is found by the entry point group ``holdfast.stores`` (the URL's scheme is the name, the object
a `StoreOpener`) and proves itself with `holdfast.testing.conformance`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Flag, auto
from typing import Any, Protocol

import msgspec

from holdfast.clock import Clock
from holdfast.errors import CorruptRecord
from holdfast.ids import InvocationId
from holdfast.lifecycle.changes import Change, Verdict
from holdfast.lifecycle.claims import Claim, Claimed
from holdfast.lifecycle.limits import Release
from holdfast.lifecycle.queues import QueueDepth, QueuePause
from holdfast.lifecycle.records import (
    Collected,
    Entry,
    HintChannel,
    InvocationRecord,
    Piece,
    Quarantined,
    RunnerRecord,
    StoredPayload,
    WorkerRecord,
)
from holdfast.lifecycle.slots import Execution, ExecutionStatus
from holdfast.lifecycle.status import Status


class Ability(Flag):
    """What a store can do beyond the contract. Tests ask for an ability, never for a store's name."""

    NONE = 0
    MULTI_PROCESS = auto()  # several processes may share it
    DURABLE = auto()  # it outlives the process
    COSTLY_CLAIMS = auto()  # a claim takes several round trips, so it pays to claim ahead
    CHANGE_NOTIFICATIONS = auto()
    TRANSACTIONS = auto()
    TTL = auto()
    SHARED_CLOCK = auto()  # all processes have the same `now`, and it stamps heartbeats: their ages can be believed


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which invocations to list. Empty means: any."""

    statuses: frozenset[Status] = frozenset()
    tasks: frozenset[str] = frozenset()
    queues: frozenset[str] = frozenset()
    runner: str | None = None  # only what workers of this runner own
    parent: str | None = None  # only what this invocation has submitted
    before_id: str | None = None  # for the next page: only ids smaller than this one
    rerun_of: str | None = None  # only what repeats this one


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """Which ended invocations to list. Empty means: any."""

    statuses: frozenset[Status] = frozenset()
    since: float | None = None  # ended then or later
    until: float | None = None  # ended before
    before: tuple[float, str] | None = None  # for the next page: the end and the id of the last one of this page


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `store check`: what was looked at, whether it is well, and what to do if not."""

    subject: str
    ok: bool
    detail: str
    advice: str = ""


class Backup(msgspec.Struct, frozen=True, kw_only=True):
    """What a copy of a store has."""

    size: int  # bytes
    invocations: int
    schema_version: int


Observe = Callable[[str, Mapping[str, Any]], None]
"""How a store reports what happens inside it (``"commit"``, ``"retry"``, ``"quarantine"``):

a name and its facts. The engine decides what to log.
"""


def ignore(event: str, facts: Mapping[str, Any]) -> None:
    """The observer that looks away."""


class Store(Protocol):
    """Where invocations live."""

    abilities: Ability
    schema_version: int
    """Of the schema that this code knows and makes."""

    def now(self) -> float:
        """The store's time, seconds since the epoch: what due times are compared with."""
        ...

    def clock_error(self) -> float:
        """Return by how many seconds `now` may be off; 0 where the host's clock is the store's. Work is claimed when it
        is due for certain, so that a call that is to wait never starts early.
        """
        ...

    async def open(self, beside: object = None) -> None:
        """Connect, and create what is missing. `beside` is the session of a user whose own transaction may be open. The
        locks of that are not waited for: a store that cannot be made beside it raises `StoreUnavailable` at once.

        Atomic: the schema is there whole or not at all. Idempotent: yes. Raises: `SchemaMismatch` if something else
        or something newer is there, `StoreReadOnly`, `UnsupportedFileSystem`, `UnsafeStore`, `StoreUnavailable`.
        """
        ...

    async def close(self) -> None:
        """Finish what was accepted and let go of everything. Idempotent: yes."""
        ...

    async def insert(self, records: Sequence[InvocationRecord]) -> Sequence[bool]:
        """Store new invocations. True: it is stored by this call (or an earlier try of it). False: its id, its key or
        its twin was taken already, and what is there stays as it was.

        Atomic: each record by itself. Idempotent: yes, recognised by the operation id in the record's first history
        entry. Order: none. Raises: `StoreFull`, and then nothing of this call is stored that was not before.
        """
        ...

    async def in_the_way(self, records: Sequence[InvocationRecord]) -> Sequence[InvocationRecord | None]:
        """Who has the id, the key or the twin of each of these, which are of one app; None where nobody has.

        What has the key or the twin and cannot be read is set aside: nobody could ever store that call again. Raises:
        `CorruptRecord` if it has the id itself.
        """
        ...

    async def free_key(self, app: str, id: str, key: str) -> None:
        """From now on this key is nobody's, if that invocation still has it. Idempotent: yes."""
        ...

    async def claim(self, claim: Claim) -> Claimed:
        """Give due invocations of the wanted lanes to an owner: epoch + 1, path PENDING or PENDING → RUNNING.

        Atomic: each invocation by itself; two claims never get the same one. Idempotent: repeated with the same
        operation id and `again`, it first answers what it got already and what is still as it left it. Order: higher
        priority first, then earlier due, then smaller id. A record that cannot be read is moved to quarantine and
        observed; the others are claimed.

        What is under a limit is taken together with a slot, and a slot has at most one holder, whatever else happens
        at the time. What finds none is blocked or refused (`holdfast.lifecycle.limits.allot` decides) and the claim
        goes on to what lies behind it, but not without end: it may answer before it has seen everything.
        """
        ...

    async def release_waiters(
        self, app: str, wishes: Sequence[Release], *, operation: str, at: float
    ) -> Sequence[InvocationRecord]:
        """Let those go back to the queue who wait for slots that are free; who they are, as they are then.

        Atomic: each invocation by itself. Idempotent: no, but repeating it is harmless: who comes back to the queue
        and finds no slot waits again, at its old place. Order: as in `claim`; whoever waited before others is first.
        """
        ...

    async def waiting_keys(self, app: str) -> Mapping[str, int]:
        """The limit keys that somebody waits for, and how many slots of each are held. Its cost grows with these keys
        and slots, not with those who wait.
        """
        ...

    async def slot_holders(self, app: str, limit_key: str) -> Sequence[InvocationRecord]:
        """Who holds slots of this key. Order: by slot."""
        ...

    async def start_limits(self, app: str, limit: int) -> Sequence[InvocationRecord]:
        """Those that have to be started by some time (`start_by`) and are not yet. Order: by that time."""
        ...

    async def lanes(self, app: str) -> Sequence[str]:
        """The lanes in which something is ready, due or not. Its cost grows with the lanes, not with what is in them.

        Order: sorted.
        """
        ...

    async def apply(self, changes: Sequence[Change]) -> Sequence[Verdict]:
        """Apply each change if it still applies.

        Atomic: each change by itself, all its edges and fields together. Idempotent: yes, by the operation id
        (`Applied(again=True)`). Order: changes to one invocation are taken in the order given.
        """
        ...

    async def get(self, app: str, ids: Sequence[InvocationId]) -> Sequence[InvocationRecord | None]:
        """The invocations with these ids, in that order; None where there is none.

        What is answered is durable. Raises: `CorruptRecord`.
        """
        ...

    async def find(self, app: str, where: Filter, limit: int, *, set_aside: bool = False) -> Sequence[InvocationRecord]:
        """Newest first (by id).

        Records that cannot be read are left out and observed; for a service (`set_aside`), they are moved to
        quarantine. Arguments, result and error come along.
        """
        ...

    async def counts(self, app: str) -> Mapping[Status, int]:
        """How many invocations there are in each status; statuses without any are absent."""
        ...

    async def queue_depths(self, app: str, at: float) -> Sequence[QueueDepth]:
        """What lies in each queue that has anything, by that time. Its cost grows with what waits. Order: by name."""
        ...

    async def pause_queue(self, pause: QueuePause) -> QueuePause | None:
        """Mark a queue as paused. The pause that is in force then: this one, or an earlier one, which stays as it is.
        None: this operation was carried out before, and somebody has resumed the queue since.

        Atomic: yes. Idempotent: yes, by the operation id.
        """
        ...

    async def resume_queue(self, app: str, name: str, operation: str) -> bool:
        """End the pause of a queue. False: it was not paused. Atomic: yes. Idempotent: yes, by the operation id; the
        answer is True again.
        """
        ...

    async def pauses(self, app: str) -> Sequence[QueuePause]:
        """The queues that are paused. Order: by name."""
        ...

    async def keep_payloads(self, app: str, digests: Sequence[str]) -> Sequence[bool]:
        """Renew the time at which these payloads were last wanted. True: the whole payload is there, and
        `collect_payloads` leaves it alone until that time is over. False: it is not, and has to be put.

        Atomic: each by itself. Idempotent: yes.
        """
        ...

    async def put_piece(self, app: str, digest: str, number: int, piece: Piece) -> None:
        """Store a piece of a payload that is not there yet; the first one has the number 0 and is put with the
        payload itself.

        Idempotent: yes, it is replaced.
        """
        ...

    async def put_payloads(self, app: str, payloads: Sequence[StoredPayload]) -> None:
        """From now on these payloads are there; their other pieces have been put before.

        Atomic: each by itself. Idempotent: yes. Raises: `StoreFull`.
        """
        ...

    async def get_payload(self, app: str, digest: str) -> StoredPayload | None: ...

    async def get_piece(self, app: str, digest: str, number: int) -> Piece | None: ...

    async def collect_payloads(self, app: str, before: float, limit: int) -> Collected:
        """Remove payloads, and pieces without a payload, that nobody has wanted since `before` and no invocation
        refers to; look at up to `limit` of each. What is still referred to counts as wanted now, so that the next
        call looks at others.

        Atomic: a payload that is kept or put at the same time is either whole for its keeper, or the keeper is told
        that it is not there. Order: longest unwanted first.
        """
        ...

    async def enrol(self, runner: RunnerRecord) -> None:
        """Put a runner on the roster. Idempotent: yes, the entry is replaced."""
        ...

    async def heartbeat(
        self,
        app: str,
        runner_id: str,
        workers: Sequence[WorkerRecord] = (),
        *,
        ticks: bool = True,
        draining: bool = False,
    ) -> RunnerRecord | None:
        """Refresh a roster entry and tell who works there, whether its service loop `ticks`, and whether it is about to
        stop. The entry as it is
        then, with what others ask of the runner; None: there is none, so the runner was declared dead. Never creates
        one.

        Atomic: yes. Idempotent: yes.
        """
        ...

    async def silent(self, app: str) -> Sequence[tuple[RunnerRecord, float]]:
        """The roster entries that may be those of dead runners, each with the seconds since its last heartbeat, by the
        store's clock. With `SHARED_CLOCK`: the entry with the oldest heartbeat, and those that are stamped more than
        a second ahead, since that clock was set back; for them the seconds are below zero. Without: every entry.

        Order: oldest heartbeat first.
        """
        ...

    async def declare_dead(self, runner: RunnerRecord) -> bool:
        """Take a runner off the roster if it has been silent since that entry was read. True: we did it.

        Atomic: a heartbeat comes before or after; if after, it finds no entry. Idempotent: the second time is False.
        """
        ...

    async def ask_runner(
        self, app: str, runner_id: str, *, wish: str | None = None, sits_out_until: float | None = None
    ) -> bool:
        """Write into a roster entry what its runner shall do. False: there is no such entry. Idempotent: yes."""
        ...

    async def owners(self, app: str) -> Sequence[str]:
        """Everybody who owns an invocation. Its cost grows with the owners, not with what they own. Order: sorted."""
        ...

    async def leave(self, app: str, runner_id: str) -> None:
        """Take a runner off the roster. Idempotent: yes."""
        ...

    async def roster(self, app: str) -> Sequence[RunnerRecord]:
        """All entries. Order: creation, then id."""
        ...

    async def put_execution(self, app: str, execution: Execution) -> Execution | None:
        """Record an execution of a service. None: it is recorded, by this call or an earlier try of it. Otherwise it is
        to be RUNNING, another one of that service is, and that one is the answer.

        Atomic: at most one execution of a service is RUNNING. Idempotent: yes, by its id.
        """
        ...

    async def end_execution(self, app: str, id: str, status: ExecutionStatus, at: float, reason: str) -> bool:
        """Write the end of an execution that is RUNNING. False: it is not, somebody else has ended it.

        Atomic: yes. Idempotent: repeated with the same values it is True.
        """
        ...

    async def executions(self, app: str, service: str, limit: int) -> Sequence[Execution]:
        """Order: latest start first."""
        ...

    async def forget_executions(self, app: str, ids: Sequence[str]) -> None:
        """Remove these, except those that are RUNNING. Idempotent: yes."""
        ...

    async def outboxes(self, app: str, before: float, limit: int) -> Sequence[InvocationRecord]:
        """Ended invocations of which somebody is yet to be told, and that ended then or before. Until they are
        `delivered`, nothing removes them. Its cost grows with the answer.

        Order: oldest end first, then by id. A record that cannot be read is moved to quarantine and observed.
        """
        ...

    async def delivered(self, app: str, ids: Sequence[InvocationId]) -> None:
        """Everybody has been told of the ends of these: their outboxes are empty from now on.

        Atomic: each by itself. Idempotent: yes.
        """
        ...

    async def remove_final(self, app: str, before: float, limit: int) -> int:
        """Remove invocations that ended before that time and have no outbox, oldest ids first; how many there were.
        Idempotent: yes.
        """
        ...

    async def ended(self, app: str, where: Ended, limit: int) -> Sequence[InvocationRecord]:
        """The archive, at a cost that grows with the answer and not with what is in it.

        Order: latest end first, then larger id. Records that cannot be read are left out and observed. One that ended
        under an older schema may be missing until `retain_old` has seen it.
        """
        ...

    async def remove_ended(self, app: str, ids: Sequence[InvocationId]) -> int:
        """Remove those of these that have ended and have no outbox; how many there were. Idempotent: yes."""
        ...

    async def remove_expired(self, app: str, at: float, limit: int) -> int:
        """Remove ended invocations without an outbox that need not be kept until that time, longest over first, and
        then entries for which the same holds; how many there were. A store with `TTL` does that by itself, too.
        Idempotent: yes.
        """
        ...

    async def retain_old(self, app: str, after: str, limit: int) -> str | None:
        """Say of those that ended under an older schema how long they are kept. It looks at up to `limit`, and answers
        after which id to go on; None at the end. Idempotent: yes.
        """
        ...

    async def put_entry(self, entry: Entry, over: Entry | None = None) -> bool:
        """Store an entry of version 1 where there is none of its name, or one of version n + 1 where version n is.
        False: something else is there. With `over`, version n has to say what that entry says: one that was removed
        and made anew counts its versions from 1 again.

        Atomic: yes. Idempotent: repeated, if it is there as it was put, it is True.
        """
        ...

    async def entries(self, app: str, kind: str, names: Sequence[str] | None = None) -> Sequence[Entry]:
        """All entries of a kind, or those of these names. Order: by name."""
        ...

    async def due_entries(self, app: str, kind: str, limit: int) -> Sequence[Entry]:
        """The entries of a kind that have a `due_at`. Order: soonest first, then by name."""
        ...

    async def latest_entries(self, app: str, kind: str, limit: int, before: str | None = None) -> Sequence[Entry]:
        """The entries of a kind with the largest names, or with the largest that are smaller than `before`.

        Order: largest name first.
        """
        ...

    async def remove_entry(self, entry: Entry) -> bool:
        """Remove an entry if it is there in this version and says this. False: it is not. Idempotent: the second time
        is False.
        """
        ...

    async def quarantine_entry(self, entry: Entry, error: CorruptRecord) -> bool:
        """Move an entry aside whose body says nothing that can be read, if it is there as it was read. False: it is
        not. Idempotent: the second time is False.
        """
        ...

    async def quarantined(self, app: str) -> Sequence[Quarantined]:
        """What was moved aside because it could not be read. Order: oldest first."""
        ...

    async def quarantine_hidden(self, app: str) -> int:
        """Move aside invocations that hold something and that no claim, change or recovery would ever meet: they hold
        a slot and cannot be read, nobody owns them though they are owned, or their status is unknown. How many there
        were. Its cost grows with what is owned. Idempotent: yes.
        """
        ...

    async def check(self, *, deep: bool = False) -> Sequence[Finding]:
        """Look the store over as it is, without changing it. `deep` reads everything.

        Needs no `open`, which would make good what is missing before anybody could be told.
        """
        ...

    def joined(self, session: object) -> Transaction:
        """A user's own transaction on this store, as something to insert into. Raises: `UsageError`."""
        ...

    def hints(self) -> HintChannel | None:
        """A channel to the other processes of this store that rides on the store itself, or None."""
        ...


class Transaction(Protocol):
    """A user's own transaction. What is inserted is there when the user commits, and never was if not. Errors pass
    through as the driver raises them, and nothing is tried again: that is the business of whoever began it.
    """

    is_async: bool  # whether `ainsert` has to be awaited on the loop of the session; else `insert` is called
    carries_payloads: bool  # whether payloads have to be inserted with it; else they are kept before

    @property
    def is_over(self) -> bool: ...

    def insert(
        self, records: Sequence[InvocationRecord], stored: Sequence[StoredPayload]
    ) -> Sequence[InvocationRecord | None]:
        """Insert what is not there; what is, is answered. All records are of one app.

        Atomic: with the transaction.
        """
        ...

    async def ainsert(
        self, records: Sequence[InvocationRecord], stored: Sequence[StoredPayload]
    ) -> Sequence[InvocationRecord | None]: ...

    def put_entries(self, entries: Sequence[Entry]) -> Sequence[Entry | None]:
        """Insert new entries, all of one app. What has the name of one is answered and stays, unless the time for which
        it is kept is over: then it is replaced.

        Atomic: with the transaction.
        """
        ...

    async def aput_entries(self, entries: Sequence[Entry]) -> Sequence[Entry | None]: ...


class StoreOpener(Protocol):
    """What an entry point of the group ``holdfast.stores`` has to be. It does no I/O: `Store.open` does."""

    def __call__(self, url: str, *, clock: Clock, observe: Observe, options: Mapping[str, Any]) -> Store: ...
