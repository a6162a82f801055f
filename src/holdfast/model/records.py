"""Stored records, as frozen values.

An `InvocationRecord` is one call of a task: the truth about that call and its entry in the queue at once, so that no
second structure can get out of sync. It is immutable: a `holdfast.model.changes.Change` describes a step, and the store
applies it if its conditions hold.

Its history is bounded: an invocation that is retried for ever must not cost more with every change. Of a long history
the first line and the last few hundred are kept; the versions say how many are missing in between. It is cut now and
then, by the version alone, so every store cuts alike. A write whose reply was lost finds its operation in the last
lines. Crashes in a row are counted there too: `max_crash_recoveries` allows no more than these lines hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import UnsetType

from holdfast.codec import MARK, ErrorRecord, references
from holdfast.codec.sealing import head_of
from holdfast.errors import UsageError
from holdfast.ids import InvocationId
from holdfast.model.decoding import INVOCATION, Count, JsonDecoder, Moment, Number, Seconds, ahead, corrupt
from holdfast.model.notes import Notes
from holdfast.model.status import FINAL, OWNED, Status

DRAIN, STOP = "drain", "stop"
LOWEST_PRIORITY, HIGHEST_PRIORITY = -100, 100


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One edge that an invocation walked. `operation` recognises a retried write whose reply was lost.

    `owner` owned the invocation then. `by` made the change, if not the owner: the runner that performed a recovery.
    """

    version: Count = msgspec.field(name="v")
    status: Status = msgspec.field(name="s")
    at: Moment = msgspec.field(name="t")
    operation: str = msgspec.field(name="op")
    owner: str | None = msgspec.field(name="o", default=None)
    epoch: Count = msgspec.field(name="e", default=0)
    why: str = msgspec.field(name="w", default="")
    by: str | None = msgspec.field(name="b", default=None)


class FailedAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An attempt that failed and was followed by another: the `number`-th failure. Attempts count crashes as well."""

    number: Count
    attempt: Count
    at: Moment
    error: ErrorRecord
    due_at: Moment | None = None  # of the first failure: when that attempt was due
    trace: str = ""  # its span, as traceparent of W3C


KEY_SECONDS = 86_400.0


class Terms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The terms of an invocation, fixed at submit. They never change, and no query selects by them."""

    retries: Mapping[str, Any] | None = None  # a policy as `retries.dump_policy` wrote it; it may be of a newer version
    key_seconds: Seconds = KEY_SECONDS  # how long its key is taken after its end
    key_until: Moment | None = None  # or until when, whatever becomes of it
    retention: Mapping[str, Seconds | None] | None = None  # by outcome, how long it is kept; None: for ever
    timeout: Seconds | None = None  # seconds for each attempt
    soft_timeout: Seconds | None = None  # seconds after which an attempt gets `SoftTimeout`
    start_by: Moment | None = None  # without a first start by then, it ends
    cancel_grace: Seconds | None = None  # seconds to clean up; None: as the settings say
    cancel_children: bool = True  # what it has submitted is cancelled with it
    follow: Follow | None = None  # what is called when it has ended
    group: InvocationId | None = None  # the group that wants to know of its end
    effects_key: str | None = None  # of a rerun of a task: the key of the effects of the first run
    attributes: Mapping[str, str] | None = None  # that it began with
    trace: Mapping[str, str] | None = None  # the span of its submit: traceparent, tracestate; or the link of a rerun
    rate_key: str | None = None  # those with the same key share a rate of how many start in a time


PLAIN = Terms()


class StoredCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call that is stored, to be submitted later: by a schedule, a trigger or the end of another call."""

    task: str
    arguments: bytes
    queue: str = "default"
    tags: tuple[str, ...] = ()
    priority: Number = 0
    at_most_once: bool = False
    limit_key: str | None = None
    dedup_key: str | None = msgspec.field(default=None, name="twin")
    expires_seconds: Seconds | None = None  # terms have no moment, since it differs for each invocation
    terms: Terms = PLAIN
    is_run: bool = False  # of a workflow
    event: str = ""  # instead of a task: an event of that name, for a trigger that wants more than the tick


class NextCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call that is submitted when others have ended. `takes`: their outcome is its first argument."""

    call: StoredCall
    takes: bool = True
    delay_seconds: Seconds = 0.0


class Follow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The calls after the end of an invocation: the `rest` of its chain, one after another, or `on_error`."""

    rest: tuple[NextCall, ...] = ()
    on_error: NextCall | None = None
    chain: InvocationId | None = None  # the first link of the chain; None: it is that itself
    place: Count = 0  # how many links are before it


# --- how long an ended invocation is kept: agreed at submit, for each outcome, so that a deploy does not change it. The
# moment of its removal is part of the write of its end.

RETENTION_SECONDS = 7 * 86_400.0  # where nothing else was agreed
SHORTEST_SECONDS = 3600.0
FOREVER = 253_402_300_799.0  # the last second of the year 9999: never removed
OUTCOMES = tuple(sorted(status.value for status in FINAL))


def retain_until(terms: Terms, key: str | None, outcome: Status, at: float) -> float:
    """Return until when an invocation that ends at `at` is kept."""
    agreed = terms.retention
    seconds = RETENTION_SECONDS if agreed is None else agreed.get(outcome.value, RETENTION_SECONDS)
    if seconds is None:
        return FOREVER
    until = at + (seconds if seconds > SHORTEST_SECONDS else SHORTEST_SECONDS)
    if key is not None:
        until = max(until, at + terms.key_seconds if terms.key_until is None else terms.key_until)
    return until if until < FOREVER else FOREVER


def agreed_retention(declared: Mapping[str, float | None], usual: float) -> Mapping[str, float | None] | None:
    """Return what to store at submit: the outcomes that differ from `RETENTION_SECONDS`, or None if none does."""
    each = dict.fromkeys(OUTCOMES, usual) | dict(declared)
    return {outcome: seconds for outcome, seconds in each.items() if seconds != RETENTION_SECONDS} or None


class Cancellation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request to end an invocation: by which user or program, why, when, and until when its code may clean up."""

    by: str
    at: Moment
    until: Moment
    reason: str = ""
    children: bool = True  # and what it has submitted

    def __str__(self) -> str:
        return f"cancelled by {self.by}: {self.reason}" if self.reason else f"cancelled by {self.by}"


class Source(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A happening for which a trigger fired: an event, the end of an invocation, a schedule's tick."""

    kind: str  # event, end or tick
    id: str
    name: str = ""  # of the event, of the task or of the schedule


class Origin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The cause of an invocation that was not submitted by hand.

    `depth` counts the triggers between it and its first cause, `path` has the last few tasks on that way. Its children
    inherit both, without their own trigger or sources.
    """

    trigger: str = ""
    sources: tuple[Source, ...] = ()
    depth: Count = 0
    path: tuple[str, ...] = ()


class ReplyTo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The run that waits for the end of an invocation, and which of its calls does."""

    run: InvocationId
    call: str
    generation: Count = 0
    root: InvocationId | None = None  # the first run above it; None: the run that waits is that itself
    ends_with_run: bool = False  # it is cancelled if the run ends before it
    effects_key: str | None = None  # of a step: the key of its effects, the same in every life of the run


class InboxEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message to a run: the end of a child, a wake, a cancel. An entry with the same id is added once."""

    id: str
    kind: str
    at: Moment
    call: str = ""  # of the run, that it is for
    generation: Count = 0
    body: bytes = b""  # what is said, encoded; it may refer to payloads

    @property
    def size(self) -> int:
        return len(self.body) + len(self.id) + len(self.call) + 64


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """The further fields of a workflow's invocation: its inbox, and the state in which its last owner left it.

    Its owner replaces it whole, if the inbox has not moved since (`pushed`). All others only add to the inbox.
    """

    generation: Count = 0  # of its log
    suspended_in: Count = 0  # the epoch of the last owner that suspended it: no write of that owner is under way
    tail: Count = 0  # how long the log was then
    started_at: Moment | None = None  # first start of this log, as far as an owner has written it down
    pushed: Count = 0  # how many entries were ever added to the inbox
    inbox: tuple[InboxEntry, ...] = ()
    effects_key: str | None = None  # what the keys of its effects begin with, if it repeats another run
    first_started_at: Moment | None = None  # of its first log, once it was restarted
    seed: str | None = None  # of a fork: what its first log was made with
    has_hooks: bool = False  # they end with it


MAX_WAITED = 100


class Waiting(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The invocations that the code of an owner waits for: those of one wait, or of several side by side. At most
    `MAX_WAITED` are named; there are `more`. `keeps_slot` says why the slot is not given back meanwhile.
    """

    ids: tuple[InvocationId, ...]
    epoch: Count  # of the owner: of another one it says nothing
    more: Count = 0
    keeps_slot: str = ""


class InvocationRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One call of a task, as stored. Records hold no cycles, and there are many: the collector need not visit them."""

    id: InvocationId
    app: str
    task: str
    arguments: bytes
    created_at: Moment
    due_at: Moment
    queue: str = "default"
    tags: tuple[str, ...] = ()
    priority: Number = 0
    status: Status = Status.REGISTERED
    owner: str | None = None
    epoch: Count = 0
    attempt: Count = 0
    changed_at: Moment = 0.0
    claim_token: str | None = None
    fingerprint: str | None = None
    reason: str = ""
    result: bytes | None = None
    error: ErrorRecord | None = None
    parent_id: InvocationId | None = None
    at_most_once: bool = False  # a crashed attempt is its last
    limit_key: str | None = None  # those with the same key share a limit of how many run at once
    slot: str | None = None  # the place under that limit that it holds
    key: str | None = None  # no other call of its task has it, as long as it is taken
    # No other call has it, as long as it waits for its first start.
    dedup_key: str | None = msgspec.field(default=None, name="twin")
    start_by: Moment | None = None  # of its terms, as long as it waits for its first start
    cancellation: Cancellation | None = None
    terms: Terms = PLAIN
    errors: tuple[FailedAttempt, ...] = ()  # of attempts before the last; in the end `error` has that of the last
    retain_until: Moment | None = None  # it has ended, and is kept until then
    rerun_of: InvocationId | None = None  # the ended invocation that it repeats
    origin: Origin | None = None  # what triggered it
    outbox: tuple[str, ...] = ()  # triggers and receivers of its end that are not notified yet; until then it is kept
    reply_to: ReplyTo | None = None  # the run that waits for its end
    run: RunState | None = None  # of a workflow
    wake_at: Moment | None = None  # while it is SUSPENDED: when it goes on by itself
    attributes: Mapping[str, str] = msgspec.field(default_factory=dict)  # by which it can be found
    has_streams: bool = False  # its owners have written to streams; those of it are removed before it
    waiting: Waiting | None = None  # for other invocations: see `awaited`
    notes: Notes | None = None  # what its code says of itself
    history: tuple[HistoryEntry, ...] = ()

    @property
    def awaited(self) -> Waiting | None:
        """Return the invocations that its code waits for now."""
        waiting = self.waiting
        return waiting if waiting is not None and waiting.epoch == self.epoch and self.status in OWNED else None

    @property
    def lane(self) -> str:
        return lane_of(self.queue, self.task, self.tags)

    @property
    def key_of_effects(self) -> str:
        """Return the prefix of the idempotency keys of its effects: a rerun or fork has that of the first run."""
        repeated = None if self.run is None else self.run.effects_key
        of_step = None if self.reply_to is None else self.reply_to.effects_key
        return repeated or of_step or self.terms.effects_key or self.key or self.id

    @property
    def first_due_at(self) -> float:
        """Return when its first attempt was due, from which a timetable counts its age."""
        due_at = self.errors[0].due_at if self.errors else self.due_at
        return self.created_at if due_at is None else max(due_at, self.created_at)

    @property
    def seed(self) -> str:
        """Return the seed of random values in its body: a fork replays the random values of another run."""
        run = self.run or RunState()
        return run.seed if run.seed is not None and not run.generation else f"{self.id}/{run.generation}"

    @property
    def root_id(self) -> InvocationId | None:
        """Return the topmost run among its ancestors; None if no run has called it."""
        return None if self.reply_to is None else self.reply_to.root or self.reply_to.run

    @property
    def compensates(self) -> bool:
        """Return whether this is a run that has started: its body takes part in its end."""
        return self.run is not None and self.attempt > 0

    @property
    def has_logs(self) -> bool:
        """Return whether logs belong to it, of a run or of streams, which are removed before it."""
        return self.run is not None or self.has_streams

    @property
    def payloads(self) -> tuple[str, ...]:
        """Return the digests of its payloads."""
        inbox = () if self.run is None else [entry.body for entry in self.run.inbox]
        return digests_in(self.arguments, self.result, self.error, *[failed.error for failed in self.errors], *inbox)

    @property
    def failures(self) -> int:
        """Return how many attempts have failed and were followed by another."""
        return self.errors[-1].number if self.errors else 0

    @property
    def version(self) -> int:
        return self.history[-1].version if self.history else 0


def lane_of(queue: str, task: str, tags: tuple[str, ...] = ()) -> str:
    """Return the lane of an invocation: queue, task and tags as one string.

    A runner asks for the lanes that it serves. So work for other runners costs it nothing, even at the head of the
    queue.
    """
    return "|".join((queue, task, ",".join(sorted(tags)))) if tags else f"{queue}|{task}"


def kept_text(name: str, text: str) -> str:
    """Return a text of a request in the form that is stored. Characters that no store can hold are escaped, and a long
    text is cut: neither is a reason to refuse the request.
    """
    if not isinstance(text, str):
        raise UsageError(f"{name}={text!r:.80}: expected a text")
    whole = text.encode("utf-8", "backslashreplace").decode()
    return whole if len(whole) <= _LONGEST_TEXT else f"{whole[:_LONGEST_TEXT]}…"


_LONGEST_TEXT = 2000


class Serves(msgspec.Struct, frozen=True, kw_only=True):
    """The work that a runner takes: these tasks, from these queues (None: from any), without tags that it lacks. It
    takes from several queues in turn, by their weights, by default 1.
    """

    tasks: frozenset[str]
    queues: frozenset[str] | None = None
    tags: frozenset[str] = frozenset()
    weights: Mapping[str, int] = msgspec.field(default_factory=dict)


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of a runner. As an owner of invocations its name is ``runner id/worker id``."""

    id: str
    pid: Count
    started_at: Moment
    running: Count = 0  # running invocations, by its last report to its runner
    ended: Mapping[str, Number] = msgspec.field(default_factory=dict)  # of late, by queue: see `model.queues.rates`
    unresponsive_since: Moment | None = None  # its runner asks it, and it does not answer
    begun: tuple[str, ...] | None = None  # invocations whose code has begun; known while it does not answer
    starting: bool = False  # it has not looked for work yet: it imports code, or enters lifespans


class RunnerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A runner, as the roster stores it."""

    id: str
    app: str
    host: str
    pid: Count
    version: str
    started_at: Moment
    heartbeat_at: Moment
    concurrency: Count
    tasks: tuple[str, ...]
    queues: tuple[str, ...] | None = None  # None: any
    weights: Mapping[str, Number] = msgspec.field(default_factory=dict)  # of queues with more than one share
    tags: tuple[str, ...] = ()
    draining: bool = False  # it is stopping: it finishes running calls and takes no new ones
    workers: tuple[WorkerRecord, ...] = ()
    supervises: bool = False  # its workers are processes, and `workers` names all that are there
    wish: str = ""  # what a user asks of it: DRAIN, STOP
    can_run_atomic_service: bool = True
    declares: tuple[str, ...] = ()  # the schedules and triggers of its code, as "schedule:name" and "trigger:name"
    schema: Number = 0  # the version of the store's schema that its code knows
    dead_after_seconds: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = (
        0.0  # by its own settings: it promises heartbeats that often
    )
    sits_out_until: Moment | None = None  # it left its slot unused: others do its share until then

    @property
    def lacks_workers(self) -> bool:
        """Return whether none of its worker processes has started: it takes long, or they end before that."""
        return self.supervises and all(worker.starting for worker in self.workers)

    @property
    def capacity(self) -> int:
        """Return how many invocations the runner runs at once."""
        return self.concurrency * max(1, len(self.workers))

    @property
    def serves(self) -> Serves:
        queues = None if self.queues is None else frozenset(self.queues)
        tasks, tags = frozenset(self.tasks), frozenset(self.tags)
        return Serves(tasks=tasks, queues=queues, tags=tags, weights=self.weights)


class Piece(msgspec.Struct, frozen=True):
    """A part of a payload's bytes, compressed (`packed`) or as they are."""

    data: bytes
    packed: bool = False


class StoredPayload(msgspec.Struct, frozen=True, kw_only=True):
    """A payload as it is stored: its first piece, and how many there are."""

    digest: str
    size: Count
    pieces: Count
    first: Piece
    is_sealed: bool = False  # it was encrypted, and is what its name says: not stored


class Collected(NamedTuple):
    """The outcome of a look at unwanted payloads: how many were removed, and whether there may be more."""

    removed: int
    more: bool


def digests_in(*encoded: bytes | ErrorRecord | UnsetType | None) -> tuple[str, ...]:
    """Return the payloads that arguments, results and errors refer to, each once."""
    found: dict[str, None] = {}
    for part in encoded:
        data = part.data if isinstance(part, ErrorRecord) else part
        if isinstance(data, bytes) and data[:1] == MARK:
            sealed = head_of(data)
            named = references(data) if sealed is None else sealed.references
            found.update(dict.fromkeys(reference.digest for reference in named))
    return tuple(found)


class Quarantined(msgspec.Struct, frozen=True, kw_only=True):
    """A stored record that could not be read.

    It was moved whole, so that a corrupt record neither stops a loop nor is lost. Its `kind` is that of an entry
    (schedule, trigger, event, join, …), or one of `holdfast.model.decoding`.
    """

    id: str
    app: str
    at: float
    why: str
    raw: str
    kind: str = INVOCATION


class Hint(msgspec.Struct, frozen=True):
    """A message between processes that may be lost: an event that other processes may wait for."""

    kind: str  # READY, ENDED, ROSTER, CANCEL, PAUSES, SCHEDULES, INBOX, WAITS, ANSWERS or STREAM
    # By kind: lanes with work, invocations that ended or are to end, runners that are gone. Also changed pauses and
    # schedules, runs with a new inbox entry, answers to webhooks, streams with new chunks. Empty: any.
    subjects: tuple[str, ...]
    count: int = 1  # how many invocations it is about
    # Of work: the oldest due time, and the priorities. None: unknown, look everywhere.
    since: float | None = None
    priorities: tuple[int, ...] = ()

    def joined(self, other: Hint, max_subjects: int) -> Hint:
        """Merge two hints. A hint that would name too many subjects names none, which means any."""
        subjects = tuple(dict.fromkeys(self.subjects + other.subjects))
        anything = not self.subjects or not other.subjects or len(subjects) > max_subjects
        since = None if self.since is None or other.since is None else min(self.since, other.since)
        priorities = tuple(sorted({*self.priorities, *other.priorities}))
        if since is None or len(priorities) > _MAX_PRIORITIES:
            since, priorities = None, ()
        return Hint(self.kind, () if anything else subjects, self.count + other.count, since, priorities)


def work_hint(places: Sequence[tuple[str, float, int]]) -> Hint:
    """Return the hint that work waits: the lane, due time and priority of each invocation."""
    lanes, priorities = tuple({lane: None for lane, _, _ in places}), {priority for _, _, priority in places}
    if not places or len(priorities) > _MAX_PRIORITIES:
        return Hint(READY, lanes, len(places))
    since = min([due_at for _, due_at, _ in places])
    return Hint(READY, lanes, len(places), since, tuple(sorted(priorities)))


_MAX_PRIORITIES = 8


def runner_of(owner: str | None) -> str:
    """Return the runner's id in the name of an owner."""
    return (owner or "").partition("/")[0]


READY = "ready"
ENDED = "final"
ROSTER = "roster"
CANCEL = "cancel"
PAUSES = "pauses"
SCHEDULES = "schedules"
INBOX = "inbox"
WAITS = "waits"
ANSWERS = "answers"
STREAM = "stream"


class HintChannel(Protocol):
    """Carries hints between processes. It may lose every one of them: that costs latency, never work."""

    trust: int
    """For how many polling intervals waiters may rely on hints alone; 0 while none arrive."""

    def send(self, hints: Sequence[Hint]) -> None:
        """Send hints to the other processes, soon, without waiting and without raising."""
        ...

    def listen(self, kind: str, receive: Callable[[Hint], None]) -> None:
        """Call `receive` on the running event loop, from now on, for each hint of that kind from another process.

        When hints may have been lost, or stop coming, it is called with a hint that names no subject.
        """
        ...

    async def close(self) -> None: ...


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A small record of some `kind` under a name: a schedule, a trigger.

    The store does not read its `body`, which is JSON. Its `version` grows by one with each change, and a change applies
    only to the version that was read. `due_at` is the time of the next look at it; None: never. `subject` is what it
    belongs to, the run of a hook say, by which entries of its kind are found. `payloads` are the digests of the
    payloads that its body refers to: they stay as long as the entry does.
    """

    app: str
    kind: str
    name: str
    body: bytes
    version: Count = 1
    due_at: Moment | None = None
    keep_until: Moment | None = None  # removed some time after that; None: kept until a user removes it
    subject: str | None = None
    payloads: tuple[str, ...] = ()


_decoders: dict[str, Callable[[Entry], object]] = {}
T = TypeVar("T", bound=msgspec.Struct)


def entry_reader(
    cls: type[T], *kinds: str, named: str = "", check: Callable[[T], object] | None = None
) -> Callable[[Entry], T]:
    """Make the function that reads the bodies of entries of these kinds; `store check` reads them with it, too.

    It raises `CorruptRecord`, which calls the record `named`, for a body that it cannot read or that `check` refuses:
    perhaps a newer version wrote it.
    """
    decoder, has_version = JsonDecoder[T](cls), "version" in cls.__struct_fields__

    def read(entry: Entry) -> T:
        try:
            record = decoder.decode(entry.body)
            if check is not None:
                check(record)
            return msgspec.structs.replace(record, version=entry.version) if has_version else record
        except Exception as error:
            raise corrupt(named or kinds[0], entry.name, error) from error

    _decoders.update(dict.fromkeys(kinds, read))
    return read


def read_body(entry: Entry) -> None:
    """Raise `CorruptRecord` if the body of an entry cannot be read, as far as its kind is known here."""
    if entry.kind in _decoders:
        _decoders[entry.kind](entry)


def call_like(record: InvocationRecord, expires_seconds: float | None) -> StoredCall:
    """Return the stored call of an invocation, from which another is made."""
    shared = {name: getattr(record, name) for name in _SHARED}
    return StoredCall(**shared, expires_seconds=expires_seconds, is_run=record.run is not None)


def invocation_of(call: StoredCall, *, operation: str, why: str, **fields: Any) -> InvocationRecord:
    """Return a new invocation that makes this call. `fields` complete or replace those of the call."""
    run = {"run": RunState()} if call.is_run else {}
    record = InvocationRecord(**{name: getattr(call, name) for name in _SHARED} | run | fields)
    if call.terms.attributes and not record.attributes:
        record = msgspec.structs.replace(record, attributes=call.terms.attributes)
    if call.expires_seconds is not None:
        start_by = ahead(max(record.created_at, record.due_at), call.expires_seconds)
        terms = msgspec.structs.replace(record.terms, start_by=start_by)
        record = msgspec.structs.replace(record, start_by=start_by, terms=terms)
    return registered(record, operation=operation, at=record.created_at, why=why)


# What calls and invocations have in common.
_SHARED = ("task", "arguments", "queue", "tags", "priority", "at_most_once", "limit_key", "dedup_key", "terms")


def registered(record: InvocationRecord, *, operation: str, at: float, why: str = "") -> InvocationRecord:
    """Return the record as it enters the store: REGISTERED, with the first line of its history."""
    history = first_history(operation, at, why)
    return msgspec.structs.replace(
        record, status=Status.REGISTERED, owner=None, epoch=0, changed_at=at, history=history
    )


def first_history(operation: str, at: float, why: str = "") -> tuple[HistoryEntry]:
    """Return the history of an invocation that enters the store."""
    return (HistoryEntry(version=1, status=Status.REGISTERED, at=at, operation=operation, why=why),)


KEPT_LINES = 256
CUT_EVERY = 64
CUT_WITHIN = 4  # a change has a few lines, and may step over the very version
LONGEST = KEPT_LINES + CUT_EVERY  # up to here nothing is cut


def is_cut_at(version: int) -> bool:
    """Return whether the change that leads to this version cuts the history."""
    return version > LONGEST and version % CUT_EVERY < CUT_WITHIN


def cut(history: tuple[HistoryEntry, ...]) -> tuple[HistoryEntry, ...]:
    return history if len(history) <= KEPT_LINES + 1 else history[:1] + history[-KEPT_LINES:]


def left_out(history: Sequence[HistoryEntry]) -> int:
    """Return how many lines are missing after the first."""
    return history[-1].version - len(history) if history else 0


def is_whole(history: Sequence[HistoryEntry]) -> bool:
    """Return whether only lines are missing that a cut leaves out."""
    missing = left_out(history)
    return missing == 0 or (missing > 0 and len(history) > KEPT_LINES and history[1].version == missing + 2)


def neighbours(history: Sequence[HistoryEntry]) -> Iterator[tuple[HistoryEntry, HistoryEntry]]:
    """Return each line with its successor. The successor of the first line may have been left out."""
    return pairwise(history[1:] if left_out(history) > 0 and is_whole(history) else history)
