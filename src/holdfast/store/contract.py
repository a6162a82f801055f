"""The contract of a store.

A store keeps invocations and applies changes to them. It holds no policy: `holdfast.model` decides which status may
follow which, and a store only guarantees that each write is atomic, conditional and durable. Each method states what is
*Atomic*, whether calling it again is safe (*Idempotent*), which *Order* it keeps and what it *Raises*.

Every method takes many items and answers for each, because a round trip or a flush to disk costs more than anything
else here. Every method may also raise `StoreUnavailable` (try again later) and `StoreError`. After such an error a
write may or may not have happened. Repeating it with the same operation id is safe.

A corrupt record (`holdfast.model.decoding`) stops nothing: methods that list, claim or change move it to quarantine,
whole, observe that once, and answer with the rest. Three do not: `get` and `read_log` raise `CorruptRecord`, and `find`
leaves corrupt records out unless asked otherwise.

A third party's store is found by the entry point group ``holdfast.stores`` (the URL's scheme is the name, the object a
`StoreOpener`) and proves itself with `holdfast.testing.conformance`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum, Flag, auto
from typing import Any, Protocol, runtime_checkable

import msgspec

from holdfast.clock import Clock
from holdfast.errors import CorruptRecord
from holdfast.ids import InvocationId
from holdfast.model.changes import Verdict, Write
from holdfast.model.claims import Claim, Claimed
from holdfast.model.limits import Release
from holdfast.model.log import AppendVerdict, Page
from holdfast.model.queues import QueueDepth
from holdfast.model.records import (
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
from holdfast.model.status import Status


class Ability(Flag):
    """An ability beyond the contract. Tests ask for an ability, never for a store's name."""

    NONE = 0
    MULTI_PROCESS = auto()  # several processes may share it
    DURABLE = auto()  # it outlives the process
    COSTLY_CLAIMS = auto()  # a claim takes several round trips, so it pays to claim a second of work ahead
    BATCHED_CLAIMS = (
        auto()
    )  # a large claim costs little more than a small one: a few dozen ms of work are claimed ahead
    TRANSACTIONS = auto()
    TTL = auto()
    SHARED_CLOCK = auto()  # all processes have the same `now`, and it stamps heartbeats: their ages can be believed


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """A filter of invocations. An empty field allows any."""

    statuses: frozenset[Status] = frozenset()
    tasks: frozenset[str] = frozenset()
    queues: frozenset[str] = frozenset()
    runner: str | None = None  # only what workers of this runner own
    parent: str | None = None  # only what this invocation has submitted
    before_id: str | None = None  # for the next page: only ids smaller than this one
    id_ends: str | None = None  # only ids that end so, for people: alone, it reads the keys of all invocations
    rerun_of: str | None = None  # only reruns of this invocation
    limit_key: str | None = None
    since: float | None = None  # only what was last changed then or later
    until: float | None = None  # only what was last changed before
    attributes: frozenset[tuple[str, str]] = frozenset()  # names and values that it has, all of them
    before: tuple[float, str] | None = None  # for the next page of LATEST_END: end and id of the last of this page


class Order(Enum):
    """The order of a list of invocations, which may also restrict it. Each has an index: the cost grows with the
    answer.
    """

    NEWEST = auto()  # all, larger id first
    LATEST_END = auto()  # invocations that have ended: latest end first, then larger id
    OUTBOX = auto()  # with an outbox: oldest end first, then smaller id
    START_BY = auto()  # not started yet, with a time to start by: by that time, then by id
    SLOT = auto()  # holders of a slot, of one `limit_key`: by slot
    WAKE_AT = auto()  # suspended runs that go on by themselves: by that time, then by id


class EntryOrder(Enum):
    """The order of a list of entries of a kind, which may also restrict it."""

    NAME = auto()  # all, smaller name first
    LATEST = auto()  # all, larger name first
    DUE = auto()  # with a `due_at`: soonest first, then by name


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `store check`: the subject, whether it is well, and advice if not. A finding that is not `checked`
    names something that was not looked at.
    """

    subject: str
    ok: bool
    detail: str
    advice: str = ""
    checked: bool = True


class Backup(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a copy of a store."""

    size: int  # bytes
    invocations: int
    schema_version: int


ALL_KEYS = (("", "\U0010ffff"),)
"""The range of all limit keys."""

Observe = Callable[[str, Mapping[str, Any]], None]
"""How a store reports what happens inside it (``"commit"``, ``"retry"``, ``"quarantine"``):

a name and its facts. The engine decides what to log.
"""


def ignore(event: str, facts: Mapping[str, Any]) -> None:
    """Observe nothing."""


@runtime_checkable
class BlockingInsert(Protocol):
    """The ability of a store with its own writer thread: other threads may wait for it, without the engine's loop."""

    def insert_blocking(self, records: Sequence[InvocationRecord], committed: Callable[[], object]) -> Sequence[bool]:
        """Do as `Store.insert`. Not on an event loop that others rely on. `committed` is called on any thread, as soon
        as the write is durable; it must neither block nor raise.
        """
        ...


class Store(Protocol):
    """Keeps the invocations, entries, payloads and runners of apps."""

    abilities: Ability
    schema_version: int
    """The schema version that this code knows and creates."""

    def now(self) -> float:
        """Return the store's time, seconds since the epoch. Due times are compared with it."""
        ...

    def clock_error(self) -> float:
        """Return by how many seconds `now` may be off; 0 where the host's clock is the store's. Claims wait until work
        is due for certain, so that a delayed call never starts early.
        """
        ...

    def needs_restart(self, *, by_children: bool = False) -> str:
        """Return why only a new process can use the store, as far as the system shows it: user code in this process, or
        (`by_children`) in a child process, keeps the store locked. Empty: no reason.
        """
        ...

    async def open(self, session: object = None) -> None:
        """Connect, and create what is missing. `session` is a user's session, whose transaction may be open. Its locks
        are not waited for: a store that cannot be made meanwhile raises `StoreUnavailable` at once.

        Atomic: the schema is there whole or not at all. Idempotent: yes. Raises: `SchemaMismatch` for a foreign or
        newer schema, `StoreReadOnly`, `UnsupportedFileSystem`, `UnsafeStore`, `StoreUnavailable`.
        """
        ...

    async def close(self) -> None:
        """Finish accepted operations and release everything. Idempotent: yes."""
        ...

    async def insert(self, records: Sequence[InvocationRecord]) -> Sequence[bool]:
        """Store new invocations. True: it is stored by this call (or an earlier try of it). False: its id, key or dedup
        key was taken already, and the stored invocation stays as it was.

        Atomic: each record by itself. Idempotent: yes, recognised by the operation id in the record's first history
        entry. Order: none. Raises: `StoreFull`, and then this call has stored nothing.
        """
        ...

    async def find_conflicts(self, records: Sequence[InvocationRecord]) -> Sequence[InvocationRecord | None]:
        """Return for each record, all of one app, the stored invocation that has its id, key or dedup key; else None.

        A corrupt holder of the key or dedup key is quarantined: else no such call could ever be stored again. Raises:
        `CorruptRecord` if it has the id itself.
        """
        ...

    async def claim(self, claim: Claim) -> Claimed:
        """Give due invocations of the wanted lanes to an owner: epoch + 1, path PENDING or PENDING → RUNNING.

        Atomic: each invocation by itself; two claims never get the same one. Idempotent: repeated with the same
        operation id and `again`, it first returns the invocations that it got before and that are still as it left
        them. Order: higher priority first, then earlier due, then smaller id. Corrupt records are quarantined; the
        others are claimed.

        An invocation under a limit is taken together with a slot, and a slot has at most one holder at any time. An
        invocation without a slot is blocked or refused (`holdfast.model.limits.allot` decides), and the claim goes on
        behind it. Its work is bounded: it may return before it has seen everything.
        """
        ...

    async def release_waiters(
        self, app: str, wishes: Sequence[Release], *, operation: str, at: float
    ) -> Sequence[InvocationRecord]:
        """Return waiters to the queue for which slots are free, and return their records.

        Atomic: each invocation by itself. Idempotent: no, but repeating it is harmless: a waiter that finds no slot
        waits again, at its old place. Order: as in `claim`, longest waiter first.
        """
        ...

    async def waiting_keys(
        self, app: str, within: Sequence[tuple[str, str]] = ALL_KEYS, most: int | None = None
    ) -> Mapping[str, int]:
        """Return the limit keys with waiters, and how many slots of each are held. Its cost grows with these keys and
        slots, not with the waiters. `within` are ranges that have their first text and not their last one; of each,
        the first `most` keys are returned.
        """
        ...

    async def lanes(self, app: str) -> Sequence[str]:
        """Return the lanes with ready invocations, due or not. Its cost grows with the lanes, not with their
        invocations.

        Order: sorted.
        """
        ...

    async def apply(self, changes: Sequence[Write]) -> Sequence[Verdict]:
        """Apply each change if it still applies. A clearing always does: an empty field stays empty. A push adds to the
        inbox of a run that has not ended, unless the entry is there or the inbox is full (`Full`). Attributes and
        notes are replaced for the owner, and the mark that an invocation has streams, or what it waits for, is set for
        it. A `MoveUp` gives an invocation that waits in the queue an earlier place there; elsewhere it changes nothing,
        and is `APPLIED` all the same. A `Kept` says until when an ended invocation is kept.

        Atomic: each change by itself, all its edges and fields together. Idempotent: yes, by the operation id
        (`Applied(again=True)`), a push by the id of its entry. Order: changes to one invocation are taken in the order
        given.
        """
        ...

    async def append(self, pages: Sequence[Page]) -> Sequence[AppendVerdict]:
        """Append pages to logs of runs and streams, each of another log. A writer appends behind the last page that it
        knows, so positions are dense. A page that finds its place taken is not stored; `holdfast.model.log.judge` says
        whether it was stored before (`Appended`), or its writer is `Behind` or `Fenced`. A damaged page is in no answer
        and holds up no page of another log.

        Atomic: each page by itself. Idempotent: yes, by the operation id. Raises: `StoreFull`.
        """
        ...

    async def read_log(
        self,
        app: str,
        run: InvocationId,
        *,
        generation: int = 0,
        after: int = 0,
        until: int | None = None,
        limit: int,
        latest: bool = False,
    ) -> Sequence[Page]:
        """Return the first `limit` pages of a log that begin after this position, and at `until` or before; with
        `latest`, the last ones. So the last page `until` a position is the page that has it. Its cost grows with the
        answer, not with the log.

        The answer is durable. Order: by position; with `latest`, last page first. Raises: `CorruptRecord` if one of
        them is damaged, or one is missing between them or at the start. Damaged pages stay where they are.
        """
        ...

    async def remove_log(self, app: str, run: InvocationId, *, before: int) -> int:
        """Remove the generations of a log before this one, damaged pages included. Return how many pages were removed.
        The log of a stream has one generation, 0. Idempotent: yes.
        """
        ...

    async def get(self, app: str, ids: Sequence[InvocationId]) -> Sequence[InvocationRecord | None]:
        """Return the invocations with these ids, in that order; None for an unknown id.

        The answer is durable. Raises: `CorruptRecord`.
        """
        ...

    async def find(
        self, app: str, where: Filter, limit: int, *, order: Order = Order.NEWEST, set_aside: bool = False
    ) -> Sequence[InvocationRecord]:
        """Return the first `limit` invocations of this order that the filter allows, with arguments, result and error.
        Corrupt records are left out and observed; with `set_aside`, they are quarantined.
        """
        ...

    async def apps(self) -> Sequence[str]:
        """Return the names of the apps that have invocations, entries or runners in this store. Its cost grows with the
        apps, not with what they have. Order: sorted.
        """
        ...

    async def counts(
        self, app: str, most: int | None = None, among: Iterable[Status] = tuple(Status)
    ) -> Mapping[Status, int]:
        """Count invocations by status; statuses without any, and others than those `among` these, are absent. Its cost
        grows with these invocations; with `most`, it may stop at this number for each status. A number below `most` is
        exact then, any other is a lower bound.
        """
        ...

    async def queue_depths(self, app: str, at: float, most: int | None = None) -> Sequence[QueueDepth]:
        """Return the depth of each queue that is not empty, at that time. Its cost grows with the waiting invocations;
        with `most`, with the lanes only: it may stop at this number for each lane and priority, earliest due first, and
        for running and blocked ones. A sum below `most` is exact then, any other is a lower bound. Order: by name.
        """
        ...

    async def keep_payloads(self, app: str, digests: Sequence[str]) -> Sequence[bool]:
        """Renew the time at which these payloads were last wanted. True: the whole payload is there, and
        `collect_payloads` leaves it alone until that time is over. False: it is not, and has to be put.

        Atomic: each by itself. Idempotent: yes.
        """
        ...

    async def put_piece(self, app: str, digest: str, number: int, piece: Piece) -> None:
        """Store a piece of a payload that is not there yet; the first piece has the number 0 and is put with the
        payload.

        Idempotent: yes, it is replaced.
        """
        ...

    async def put_payloads(self, app: str, payloads: Sequence[StoredPayload]) -> None:
        """Store payloads whose other pieces have been put before.

        Atomic: each by itself. Idempotent: yes. Raises: `StoreFull`.
        """
        ...

    async def get_payload(self, app: str, digest: str) -> StoredPayload | None: ...

    async def get_piece(self, app: str, digest: str, number: int) -> Piece | None: ...

    async def collect_payloads(self, app: str, before: float, limit: int) -> Collected:
        """Remove payloads, and pieces without a payload, that were not wanted since `before` and are not referred to.
        References are in invocations and their inboxes, in entries, and in logs of runs and streams. Look at up to
        `limit` of each kind. Payloads that are referred to count as wanted now, so that the next call looks at others.
        A store may count what an inbox referred to before, until the invocation is removed.

        Atomic: a payload that is kept or put at the same time is either whole, or its keeper learns that it is not
        there. Order: longest unwanted first.
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
        """Refresh a roster entry with its workers, whether its service loop `ticks`, and whether the runner is about to
        stop. Return the entry as it is then, with requests to the runner; None: there is no entry, so the runner was
        declared dead. Never creates one.

        Atomic: yes. Idempotent: yes.
        """
        ...

    async def silent(self, app: str) -> Sequence[tuple[RunnerRecord, float]]:
        """Return the roster entries of runners that may be dead, each with the seconds since its last heartbeat, by the
        store's clock. With `SHARED_CLOCK`: the entry with the oldest heartbeat, and entries that are stamped more than
        a second ahead, since that clock was set back; their seconds are below zero. Without: every entry.

        Order: oldest heartbeat first.
        """
        ...

    async def remove_runner(self, app: str, runner_id: str, *, heartbeat_at: float | None = None) -> bool:
        """Remove a runner from the roster; with `heartbeat_at`, only if it has been silent since. True: this call did
        it.

        Atomic: a heartbeat comes before or after; if after, it finds no entry. Idempotent: the second time is False.
        """
        ...

    async def ask_runner(
        self, app: str, runner_id: str, *, wish: str | None = None, sits_out_until: float | None = None
    ) -> bool:
        """Write a request to a runner into its roster entry. False: there is no such entry. Idempotent: yes."""
        ...

    async def owners(self, app: str) -> Sequence[str]:
        """Return all owners of invocations. Its cost grows with the owners, not with their work. Order: sorted."""
        ...

    async def roster(self, app: str) -> Sequence[RunnerRecord]:
        """Return all entries. Order: creation, then id."""
        ...

    async def remove_ended(self, app: str, ids: Sequence[InvocationId]) -> int:
        """Remove those of these invocations that ended and have no outbox, and before them their logs, also those of
        their streams. Return how many. Idempotent: yes.
        """
        ...

    async def remove_expired(self, app: str, at: float, limit: int) -> int:
        """Remove ended invocations without an outbox whose retention is over by then, longest over first. The logs of
        each, also of its streams, are removed before it. Then remove such entries. Return how many were removed. A
        store with `TTL` also removes by itself what has no log. Idempotent: yes.
        """
        ...

    async def put_entry(self, entry: Entry, over: Entry | None = None) -> bool:
        """Store an entry of version 1 where there is none of its name, or of version n + 1 where version n is. False:
        another entry is there. With `over`, version n has to have that body: an entry that was removed and made again
        counts its versions from 1.

        Atomic: yes. Idempotent: repeated, if it is there as it was put, it is True.
        """
        ...

    async def entries(
        self,
        app: str,
        kind: str,
        names: Sequence[str] | None = None,
        *,
        order: EntryOrder = EntryOrder.NAME,
        limit: int | None = None,
        before: str | None = None,
        subject: str | None = None,
    ) -> Sequence[Entry]:
        """Return the entries of a kind with these names; without names, the first `limit` of that order. With LATEST,
        only names smaller than `before`; with `subject`, by name or latest, only entries that belong to it.
        """
        ...

    async def remove_entry(self, entry: Entry) -> bool:
        """Remove an entry if it is there with this version and body. False: it is not. Idempotent: the second time is
        False.
        """
        ...

    async def quarantine_entry(self, entry: Entry, error: CorruptRecord) -> bool:
        """Quarantine an entry with a corrupt body, if it is there as it was read. False: it is not. Idempotent: the
        second time is False.
        """
        ...

    async def quarantined(self, app: str, id: str | None = None, *, latest: int | None = None) -> Sequence[Quarantined]:
        """Return the quarantined records, or only those with this id. Order: oldest first; with `latest`, at most this
        many, latest first.
        """
        ...

    async def quarantine_hidden(self, app: str) -> int:
        """Quarantine invocations that no claim, change or recovery would ever meet: a corrupt invocation with a slot,
        an owned one without an owner, an unknown status. Return how many there were. Its cost grows with the owned
        invocations. Idempotent: yes.
        """
        ...

    async def check(self, *, deep: bool = False) -> Sequence[Finding]:
        """Inspect the store as it is, without changing it. `deep` reads everything.

        It needs no `open`, which would repair faults before they are reported.
        """
        ...

    def joined(self, session: object) -> Transaction:
        """Return a user's own transaction on this store, to insert into. Raises: `UsageError`."""
        ...

    def transaction(self, *, is_async: bool, owner: str = "") -> StepTransaction:
        """Return a transaction for a step of a workflow, which it has to `begin`. With `is_async` it belongs to the
        running event loop, else to the thread that begins it. Raises: `UsageError` where there are no transactions.
        """
        ...

    async def abort_transactions(self, owners: Collection[str]) -> int:
        """Roll back what these owners, which are dead, have begun in other processes. Return how many transactions that
        were: none where a transaction ends with its process, and where this user may not.

        Atomic: each. Idempotent: yes.
        """
        ...

    def hints(self) -> HintChannel | None:
        """Return the store's channel to its other processes, or None."""
        ...


class Transaction(Protocol):
    """A user's own transaction. Its inserts are there when the user commits, and never were if not. Errors pass through
    as the driver raises them, and nothing is retried here: the code that began the transaction decides.
    """

    is_async: bool  # whether `ainsert` has to be awaited on the loop of the session; else `insert` is called
    carries_payloads: bool  # whether payloads have to be inserted with it; else they are kept before

    @property
    def is_over(self) -> bool:
        """Return whether it has ended, and what it committed can be read."""
        ...

    def insert(
        self, records: Sequence[InvocationRecord], stored: Sequence[StoredPayload]
    ) -> Sequence[InvocationRecord | None]:
        """Insert new records, all of one app. Return for each the conflicting invocation, or None.

        Atomic: with the transaction.
        """
        ...

    async def ainsert(
        self, records: Sequence[InvocationRecord], stored: Sequence[StoredPayload]
    ) -> Sequence[InvocationRecord | None]: ...

    def put_entries(self, entries: Sequence[Entry], stored: Sequence[StoredPayload] = ()) -> Sequence[Entry | None]:
        """Insert new entries, all of one app, and what they refer to. Return for each the entry that has its name and
        stays, or None. An entry whose time to be kept is over is replaced.

        Atomic: with the transaction.
        """
        ...

    async def aput_entries(
        self, entries: Sequence[Entry], stored: Sequence[StoredPayload] = ()
    ) -> Sequence[Entry | None]: ...

    def append(self, pages: Sequence[Page], stored: Sequence[StoredPayload]) -> Sequence[AppendVerdict]:
        """Append pages to logs of runs, as `Store.append` does. Other than `Appended`, a verdict means that the page is
        not in the transaction: the caller rolls it back.

        Atomic: with the transaction. Idempotent: yes, by the operation id.
        """
        ...

    async def aappend(self, pages: Sequence[Page], stored: Sequence[StoredPayload]) -> Sequence[AppendVerdict]: ...


class StepTransaction(Protocol):
    """A transaction that the store makes for a step: the step writes by its session, its page is appended by
    `Store.joined`, and both are committed together. It is restarted to run the step again.

    Its coroutine functions suspend only if it was made with `is_async`: otherwise a thread without a loop drives them.
    """

    excludes_writers: bool  # while it is open, no other write to the store is carried out

    @property
    def session(self) -> Any:
        """Return what the step gets; only between `begin` and the end."""
        ...

    async def begin(self) -> None:
        """Begin the transaction. Raises errors as the driver does."""
        ...

    async def commit(self) -> None:
        """Commit, and release the connection. Raises the driver's errors. After an error that is not transient the
        transaction may be committed: then its page is in the log.
        """
        ...

    async def rollback(self) -> None:
        """Roll back, if it is open, and let go of everything. Raises nothing."""
        ...

    def is_transient(self, error: BaseException) -> bool:
        """Return whether nothing was committed, and the same may succeed if all of it is run again."""
        ...

    def explained(self) -> Exception | None:
        """Return why a step cannot be committed whatever its code returns or raises; None if it can."""
        ...


class StoreOpener(Protocol):
    """The type of an entry point of the group ``holdfast.stores``. It does no I/O: `Store.open` does."""

    def __call__(self, url: str, *, clock: Clock, observe: Observe, options: Mapping[str, Any]) -> Store: ...
