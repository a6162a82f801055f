"""What is stored, as frozen values.

An `InvocationRecord` is one call of a task: it is at once the truth about that call and its entry in the queue, so
there is no second structure to fall out of step with. Nobody assigns to it; a `holdfast.lifecycle.changes.Change`
describes a step, and the store takes it if it still applies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
from msgspec import UnsetType

from holdfast.codec import MARK, ErrorRecord, references
from holdfast.errors import UsageError
from holdfast.ids import InvocationId
from holdfast.lifecycle.decoding import INVOCATION, Count, Moment, Number, Seconds
from holdfast.lifecycle.status import Status

DRAIN, STOP = "drain", "stop"
LOWEST_PRIORITY, HIGHEST_PRIORITY = -100, 100


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One edge that an invocation walked. `operation` recognises a retried write whose reply was lost.

    `owner` is who owned the invocation then, `by` who made it walk, where that was not its owner: the runner that
    performed a recovery.
    """

    version: Count = msgspec.field(name="v")
    status: Status = msgspec.field(name="s")
    at: Moment = msgspec.field(name="t")
    operation: str = msgspec.field(name="op")
    owner: str | None = msgspec.field(name="o", default=None)
    epoch: Count = msgspec.field(name="e", default=0)
    why: str = msgspec.field(name="w", default="")
    by: str | None = msgspec.field(name="b", default=None)


class FailedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that failed and was followed by another: the `number`-th failure. Attempts count crashes as well."""

    number: Count
    attempt: Count
    at: Moment
    error: ErrorRecord


KEY_SECONDS = 86_400.0


class Terms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was agreed when it was submitted. None of it ever changes, and none of it is searched for."""

    retries: Mapping[str, Any] | None = None  # a policy as `retries.dump_policy` wrote it; it may be of a newer version
    key_seconds: Seconds = KEY_SECONDS  # how long its key is taken after its end
    key_until: Moment | None = None  # or until when, whatever becomes of it
    retention: Mapping[str, Seconds | None] | None = None  # by outcome, how long it is kept; None: for ever
    timeout: Seconds | None = None  # seconds for each attempt
    soft_timeout: Seconds | None = None  # seconds after which an attempt is told that its time is up
    start_by: Moment | None = None  # without a first start by then, it ends
    cancel_grace: Seconds | None = None  # seconds to clean up; None: as the settings say
    cancel_children: bool = True  # what it has submitted is cancelled with it


PLAIN = Terms()


class Cancellation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Somebody asks an invocation to end: who, why and when, and until when its code may clean up."""

    by: str
    at: Moment
    until: Moment
    reason: str = ""
    children: bool = True  # and what it has submitted

    def __str__(self) -> str:
        return f"cancelled by {self.by}: {self.reason}" if self.reason else f"cancelled by {self.by}"


class Source(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened, and that a trigger fired for: an event, the end of an invocation, a schedule's tick."""

    kind: str  # event, end or tick
    id: str
    name: str = ""  # of the event, of the task or of the schedule


class Origin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What led to an invocation that nobody submitted by hand.

    `depth` is how many triggers lie between it and what began it all, and `path` the last few tasks on that way. What
    such an invocation submits has both from it, and neither a trigger nor sources of its own.
    """

    trigger: str = ""
    sources: tuple[Source, ...] = ()
    depth: Count = 0
    path: tuple[str, ...] = ()


class InvocationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a task, as stored."""

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
    twin: str | None = None  # no other call has it, as long as it waits for its first start
    start_by: Moment | None = None  # of its terms, as long as it waits for its first start
    cancellation: Cancellation | None = None
    terms: Terms = PLAIN
    errors: tuple[FailedAttempt, ...] = ()  # of attempts before the last; in the end `error` has that of the last
    retain_until: Moment | None = None  # it has ended, and is kept until then
    rerun_of: InvocationId | None = None  # the ended invocation that it repeats
    origin: Origin | None = None  # what triggered it
    outbox: tuple[str, ...] = ()  # triggers that are yet to be told of its end; until then it is kept
    history: tuple[HistoryEntry, ...] = ()

    @property
    def lane(self) -> str:
        return lane_of(self.queue, self.task, self.tags)

    @property
    def payloads(self) -> tuple[str, ...]:
        """The digests of what lies apart."""
        return digests_in(self.arguments, self.result, self.error, *[failed.error for failed in self.errors])

    @property
    def failures(self) -> int:
        """How many attempts have failed and were followed by another."""
        return self.errors[-1].number if self.errors else 0

    @property
    def version(self) -> int:
        return self.history[-1].version if self.history else 0


def lane_of(queue: str, task: str, tags: tuple[str, ...] = ()) -> str:
    """What a runner must serve to take an invocation, as one string.

    A runner asks for the lanes it knows. So work that it cannot do is never looked at, however much of it lies at the
    head of the queue.
    """
    return "|".join((queue, task, ",".join(sorted(tags)))) if tags else f"{queue}|{task}"


def kept_text(name: str, text: str) -> str:
    """Who asks for something and why, as it is kept. It is no reason to refuse what is asked for, so what no store can
    hold is written otherwise, and what is very long is cut.
    """
    if not isinstance(text, str):
        raise UsageError(f"{name}={text!r:.80}: expected a text")
    whole = text.encode("utf-8", "backslashreplace").decode()
    return whole if len(whole) <= _LONGEST_TEXT else f"{whole[:_LONGEST_TEXT]}…"


_LONGEST_TEXT = 2000


class Serves(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner takes: these tasks, from these queues (None: from any), asking for no tag that it does not have.
    Of several queues with work it takes in turn, as many as each one's weight says, 1 if it has none.
    """

    tasks: frozenset[str]
    queues: frozenset[str] | None = None
    tags: frozenset[str] = frozenset()
    weights: Mapping[str, int] = msgspec.field(default_factory=dict)


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of a runner: what owns invocations is called ``runner id/worker id``."""

    id: str
    pid: Count
    started_at: Moment
    running: Count = 0  # invocations, when its runner last heard of it
    ended: Mapping[str, Number] = msgspec.field(default_factory=dict)  # of late, by queue: see `lifecycle.queues.rates`
    unresponsive_since: Moment | None = None  # its runner asks it, and it does not answer


class RunnerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A runner as the roster knows it."""

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
    draining: bool = False  # it was told to stop: it finishes what runs and takes nothing new
    workers: tuple[WorkerRecord, ...] = ()
    wish: str = ""  # what somebody asks of it: DRAIN, STOP
    can_run_atomic_service: bool = True
    declares: tuple[str, ...] = ()  # the schedules and triggers of its code, as "schedule:name" and "trigger:name"
    schema: Number = 0  # the version of the store's schema that its code knows
    dead_after_seconds: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = (
        0.0  # by its own settings: it promises to be heard that often
    )
    sits_out_until: Moment | None = None  # it left its slot unused: others do its share until then

    @property
    def capacity(self) -> int:
        """How many invocations it runs at once."""
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


class Collected(NamedTuple):
    """What a look at unwanted payloads came to: how many are gone, and whether there may be more to look at."""

    removed: int
    more: bool


def digests_in(*encoded: bytes | ErrorRecord | UnsetType | None) -> tuple[str, ...]:
    """The payloads that arguments, results and errors refer to, each once."""
    found: dict[str, None] = {}
    for part in encoded:
        data = part.data if isinstance(part, ErrorRecord) else part
        if isinstance(data, bytes) and data[:1] == MARK:
            found.update(dict.fromkeys(reference.digest for reference in references(data)))
    return tuple(found)


class Quarantined(msgspec.Struct, frozen=True, kw_only=True):
    """A stored record that could not be read.

    It was moved aside whole, so that one bad record neither stops a loop nor is lost. Its `kind` is that of an entry
    (schedule, trigger, event, join, …), or one of those that `holdfast.lifecycle.decoding` names.
    """

    id: str
    app: str
    at: float
    why: str
    raw: str
    kind: str = INVOCATION


class Hint(msgspec.Struct, frozen=True):
    """A message that may be lost: something happened that somebody may be waiting for."""

    kind: str  # READY, FINAL, ROSTER, CANCEL, PAUSES or SCHEDULES
    # Lanes that have work, invocations that ended or are to end, runners that are gone, queues paused or resumed,
    # schedules that changed; empty means: any.
    subjects: tuple[str, ...]
    count: int = 1  # how many invocations it is about
    # Of work: the oldest due time, and the priorities. None: nobody knows, look everywhere.
    since: float | None = None
    priorities: tuple[int, ...] = ()

    def joined(self, other: Hint, most_subjects: int) -> Hint:
        """Both hints as one. One that would name too many says: any."""
        subjects = tuple(dict.fromkeys(self.subjects + other.subjects))
        anything = not self.subjects or not other.subjects or len(subjects) > most_subjects
        since = None if self.since is None or other.since is None else min(self.since, other.since)
        priorities = tuple(sorted({*self.priorities, *other.priorities}))
        if since is None or len(priorities) > _MOST_PRIORITIES:
            since, priorities = None, ()
        return Hint(self.kind, () if anything else subjects, self.count + other.count, since, priorities)


def work_hint(places: Sequence[tuple[str, float, int]]) -> Hint:
    """Return the hint that work waits: the lane, due time and priority of each invocation."""
    lanes, priorities = tuple({lane: None for lane, _, _ in places}), {priority for _, _, priority in places}
    if not places or len(priorities) > _MOST_PRIORITIES:
        return Hint(READY, lanes, len(places))
    since = min([due_at for _, due_at, _ in places])
    return Hint(READY, lanes, len(places), since, tuple(sorted(priorities)))


_MOST_PRIORITIES = 8


def runner_of(owner: str | None) -> str:
    """The runner's id in the name of an owner."""
    return (owner or "").partition("/")[0]


READY = "ready"
FINAL = "final"
ROSTER = "roster"
CANCEL = "cancel"
PAUSES = "pauses"
SCHEDULES = "schedules"


class HintChannel(Protocol):
    """Carries hints between processes. It may lose every one of them: that costs latency, never work."""

    trust: int
    """For how many polling intervals those who wait may rely on hints alone; 0 while none arrive."""

    def send(self, hints: Sequence[Hint]) -> None:
        """Tell the other processes, soon, without waiting and without raising."""
        ...

    def listen(self, kind: str, receive: Callable[[Hint], None]) -> None:
        """From now on call `receive` on the running event loop for each hint of that kind from another process.

        When hints may have been lost, or stop coming, it is called with a hint that names no subject.
        """
        ...

    async def close(self) -> None: ...


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A small thing that an app keeps beside its invocations, of some `kind`, under a name: a schedule, a trigger.

    The store knows nothing of its `body`, which is JSON. Its `version` goes up by one with each change, and a change
    is made only to the version that was read. `due_at` is when somebody should look at it next; None: never.
    """

    app: str
    kind: str
    name: str
    body: bytes
    version: Count = 1
    due_at: Moment | None = None
    keep_until: Moment | None = None  # removed some time after that; None: kept until somebody removes it


def registered(
    record: InvocationRecord,
    *,
    operation: str,
    at: float,
    actor: str | None = None,
    why: str = "",
) -> InvocationRecord:
    """The record as it enters the store: REGISTERED, with the first line of its history."""
    entry = HistoryEntry(version=1, status=Status.REGISTERED, at=at, operation=operation, why=why)
    return msgspec.structs.replace(
        record, status=Status.REGISTERED, owner=None, epoch=0, changed_at=at, history=(entry,)
    )
