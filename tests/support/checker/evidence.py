"""What is judged: the store as it was left, what witnesses saw, which faults were injected, and what was promised.

Times are elapsed time, as in the ledgers. What the store holds has the store's own time; `Dump.offset` is how far the
two were apart when the dump was taken. A history says when its writer built a change, which is a little before it was
written: good enough for bounds of seconds, and never used to decide an order. Orders come from the versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Self, TypeVar

import msgspec
from tests.support.checker.spans import Spans, union
from tests.support.checker.stock import Stock, stock
from tests.support.witness import Event, Ledgers, What, digest_of, digest_of_error

from holdfast.clock import Clock, SystemClock
from holdfast.codec import Codec, references
from holdfast.errors import CodecError, CorruptRecord, PayloadLost
from holdfast.executors.chunks import CHUNK, CLOSE, RESTART
from holdfast.fleet.services import SERVICE, Executions
from holdfast.fleet.slots import Execution
from holdfast.groups import records as groups
from holdfast.ids import InvocationId
from holdfast.model.records import Entry, HistoryEntry, InvocationRecord, Quarantined, RunnerRecord
from holdfast.model.status import Status
from holdfast.runtime.payloads import UNWANTED_SECONDS, PayloadStore
from holdfast.schedules import records as schedules
from holdfast.store.contract import Filter, Store
from holdfast.streams import records as streams
from holdfast.triggers import events, joins
from holdfast.triggers import rules as triggers
from holdfast.workflows import events as log_events
from holdfast.workflows import hooks_records as hook_records
from holdfast.world.rules import WorldEvent

T = TypeVar("T")
TokenOf = Callable[[InvocationRecord], str | None]

_PAGE = 500
_TRAIL = 1000
_NEVER_CHUNKED = 1 << 40  # only matters to a payload store that puts


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """An event in the log of a run, and the epoch of the owner whose page it came with."""

    position: int
    epoch: int
    event: log_events.Event
    generation: int = 0
    digest: str | None = None  # of the result that it holds

    @property
    def step(self) -> str:
        """The call as witnesses name it."""
        return f"{self.generation}/{self.event.call}" if self.generation else self.event.call

    def __str__(self) -> str:
        event = self.event
        return f"log {self.generation}:{self.position} {event.type} {event.call} epoch {self.epoch} at {event.at:.3f}"


class StreamLine(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream, and whose page it came with. `digest` is that of a chunk's value; else its kind."""

    position: int
    epoch: int
    digest: str
    writer: str = ""
    call: str = ""
    attempt: int = 1
    kind: int = CHUNK
    payloads: tuple[str, ...] = ()  # that it refers to

    def __str__(self) -> str:
        by = f"{self.writer} " if self.writer else ""
        return f"stream {self.position} {by}{self.call} attempt {self.attempt} epoch {self.epoch} {self.digest}"


class WorldLine(msgspec.Struct, frozen=True):
    """An event in the log of a World run. `digest` is that of what user code gave."""

    position: int
    operation: str
    event: WorldEvent
    digest: str | None = None

    def __str__(self) -> str:
        event = self.event
        return f"log {self.position} {event.type} {event.call} operation {self.operation} at {event.at:.3f}"


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """A store at rest, read through its contract."""

    records: tuple[InvocationRecord, ...]
    counts: Mapping[Status, int] | None = None  # None: not counted
    runners: tuple[RunnerRecord, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()
    tokens: Mapping[str, str] = {}  # by id
    digests: Mapping[str, str] = {}  # of results and errors, by id; missing where they could not be read
    stock: Stock | None = None  # payloads and pieces; None: not looked at
    executions: tuple[Execution, ...] = ()  # of services, latest first
    schedules: tuple[schedules.ScheduleRecord, ...] = ()
    triggers: tuple[triggers.TriggerRecord, ...] = ()
    events: tuple[events.EventRecord, ...] = ()
    payloads: Mapping[str, bytes] = {}  # of events, by digest; missing where they could not be read
    joins: tuple[joins.Join, ...] = ()  # what happened of several things that a trigger waits for
    groups: tuple[groups.GroupRecord, ...] = ()
    logs: Mapping[str, tuple[LogLine, ...]] = {}  # of runs, by id; the latest generation last
    streams: Mapping[str, tuple[StreamLine, ...]] = {}  # by invocation and name, with a slash between them
    hooks: tuple[hook_records.HookEntry, ...] = ()
    at: float = 0.0  # by the store's time
    offset: float = 0.0  # store time minus elapsed time


async def dump(
    store: Store,
    app: str,
    *,
    codec: Codec | None = None,
    clock: Clock | None = None,
    token_of: TokenOf | None = None,
) -> Dump:
    """Read everything that a store holds of an app.

    `codec` has to know the classes of results, like the app's own. `token_of` finds the witness's token in a record;
    by default it is the argument named ``token``, or else the first one.
    """
    codec, clock = codec or Codec(), clock or SystemClock()
    find_token = token_of or (lambda record: token_in_arguments(record, codec))
    payload_store = PayloadStore(store, app=app, chunk_threshold=_NEVER_CHUNKED)
    offset = store.now() - clock.monotonic()
    records: list[InvocationRecord] = []
    page = list(await store.find(app, Filter(), _PAGE))
    while page:
        records += page
        page = list(await store.find(app, Filter(before_id=page[-1].id), _PAGE))
    digests = [(record.id, await _digest(record, codec, payload_store)) for record in records]
    tokens = [(record.id, find_token(record)) for record in records]
    emitted = await _entries(store, app, events.KIND, events.from_entry)
    return Dump(
        records=tuple(reversed(records)),
        counts=dict(await store.counts(app)),
        runners=tuple(await store.roster(app)),
        quarantined=tuple(await store.quarantined(app)),
        tokens={id: token for id, token in tokens if token is not None},
        digests={id: digest for id, digest in digests if digest is not None},
        stock=await stock(store, app),
        executions=tuple(await Executions(store, app, SERVICE, 0).trail(_TRAIL)),
        schedules=await _entries(store, app, schedules.KIND, schedules.from_entry),
        triggers=await _entries(store, app, triggers.KIND, triggers.from_entry),
        events=emitted,
        payloads=await _payloads(emitted, payload_store),
        joins=await _entries(store, app, joins.KIND, joins.from_entry),
        groups=await _entries(store, app, groups.KIND, groups.from_entry),
        logs={record.id: await _log(store, record, codec, payload_store) for record in records if record.run},
        streams=await _streams(store, app, codec, payload_store),
        hooks=await _entries(store, app, hook_records.HOOK, hook_records.read_hook),
        at=store.now(),
        offset=offset,
    )


async def _payloads(emitted: tuple[events.EventRecord, ...], payload_store: PayloadStore) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for event in emitted:
        with suppress(PayloadLost):
            found |= await payload_store.fetch(references(event.payload))
    return found


async def _entries(store: Store, app: str, kind: str, read: Callable[[Entry], T]) -> tuple[T, ...]:
    """Those that can be read."""
    found = []
    for entry in await store.entries(app, kind):
        with suppress(CorruptRecord):
            found.append(read(entry))
    return tuple(found)


async def _log(
    store: Store, record: InvocationRecord, codec: Codec, payload_store: PayloadStore
) -> tuple[LogLine, ...]:
    assert record.run is not None
    lines: list[LogLine] = []
    for generation in range(record.run.generation + 1):
        after = 0
        while pages := await store.read_log(record.app, record.id, generation=generation, after=after, limit=_PAGE):
            for page in pages:
                for position, event in enumerate(log_events.decode(page), page.first):
                    digest = await _digest_of_event(event, codec, payload_store)
                    line = LogLine(position=position, epoch=page.epoch, event=event, generation=generation)
                    lines.append(msgspec.structs.replace(line, digest=digest))
            after = pages[-1].last
    return tuple(lines)


async def _streams(
    store: Store, app: str, codec: Codec, payload_store: PayloadStore
) -> dict[str, tuple[StreamLine, ...]]:
    found: dict[str, tuple[StreamLine, ...]] = {}
    for entry in await store.entries(app, streams.KIND):
        lines, after = list[StreamLine](), 0
        while pages := await store.read_log(app, InvocationId(entry.name), after=after, limit=_PAGE):
            for page in pages:
                for position, event in enumerate(streams.decode(page), page.first):
                    digest = _KINDS[event.kind]
                    if event.kind == CHUNK:
                        payloads = await payload_store.fetch(references(event.data))
                        digest = digest_of(codec.decode(event.data, payloads), codec)
                    line = StreamLine(
                        position=position,
                        epoch=page.epoch,
                        digest=digest,
                        writer=page.writer,
                        call=event.call,
                        attempt=event.attempt,
                        kind=event.kind,
                        payloads=streams.payloads_of([event]),
                    )
                    lines.append(line)
            after = pages[-1].last
        found[entry.name] = tuple(lines)
    return found


_KINDS = {CHUNK: "chunk", RESTART: "restart", CLOSE: "closed"}


async def _digest_of_event(event: log_events.Event, codec: Codec, payload_store: PayloadStore) -> str | None:
    if event.error is not None:
        return digest_of_error(event.error.message)
    if event.type not in (log_events.STEP_COMPLETED, log_events.HOOK_RECEIVED):
        return None
    try:
        return digest_of(codec.decode(event.data, await payload_store.fetch(references(event.data))), codec)
    except (CodecError, PayloadLost):
        return None


def token_in_arguments(record: InvocationRecord, codec: Codec) -> str | None:
    try:
        args, named = codec.decode_call(record.arguments, describe=True)
    except CodecError:
        return None
    token = named.get("token", args[0] if args else None)
    return token if isinstance(token, str) else None


async def _digest(record: InvocationRecord, codec: Codec, payload_store: PayloadStore) -> str | None:
    if record.error is not None:
        return digest_of_error(record.error.message)
    if record.result is None:
        return None
    try:
        value = codec.decode(record.result, await payload_store.fetch(references(record.result)))
        return digest_of(value, codec)
    except (CodecError, PayloadLost):
        return None


class FaultKind(StrEnum):
    KILL = "kill"  # of a process: at once, without a word
    STOP = "stop"  # a runner was told to end, and perhaps did not wait for what ran
    FREEZE = "freeze"  # of a process, for a while
    CUT = "cut"  # a runner could not reach the store, for a while
    OUTAGE = "outage"  # nobody could reach the store, or only badly
    LOST_REPLY = "lost_reply"  # a write took place, and its writer was not told
    CLOCK = "clock"  # a host's clock was set

    @property
    def explains_reruns(self) -> bool:
        """Whether work may have to be done again because of it. A database that is away is no reason to."""
        return self in (FaultKind.KILL, FaultKind.STOP, FaultKind.FREEZE, FaultKind.CUT)


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One injected fault: of a process (`pid`), of a runner or worker (`owner`), or of invocations (`ids`)."""

    kind: FaultKind
    at: float
    until: float | None = None  # None: it was over at once
    pid: int | None = None
    owner: str | None = None
    ids: tuple[str, ...] = ()

    @property
    def ended(self) -> float:
        return self.at if self.until is None else self.until


class Faults(msgspec.Struct, frozen=True):
    """What was injected."""

    all: tuple[Fault, ...] = ()

    @classmethod
    def of(cls, ledgers: Ledgers) -> Self:
        """The faults that a witness wrote down. One without an end lasted until the last line."""
        ends = {event.span: event.at for event in ledgers.of(What.FAULT_END)}
        last = ledgers.events[-1].at if ledgers.events else 0.0
        return cls(
            tuple(
                Fault(
                    kind=FaultKind(event.kind or ""),
                    at=event.at,
                    until=ends.get(event.span, last),
                    pid=event.victim,
                    owner=event.owner,
                    ids=event.ids,
                )
                for event in ledgers.of(What.FAULT_START)
            )
        )

    def windows(self, *, aftermath: float) -> Spans:
        """When something was in the way, or had been until `aftermath` seconds before."""
        return union((fault.at, fault.ended + aftermath) for fault in self.all)


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What was promised, in seconds and in numbers. The defaults are those of the documentation, for default settings;
    None means: not judged.
    """

    final_seconds: float | None = 60.0  # I1: from the submit, the due time or the last fault to the end
    slot_seconds: float | None = 2.0  # I8: until a free slot is filled while work waits for it
    subscribed_seconds: float = 3.0  # I10: until everybody knows a trigger that is stored
    recovery_seconds: float = 20.0  # I20: until a dead runner's work runs again
    may_be_full: bool = False  # I20: there may be no place for it, so that it counts when it is back in the queue
    worker_recovery_seconds: float = 2.0  # I20: the same for a worker whose runner lives
    dead_after_seconds: float = 15.0  # I20: a runner that is silent for less is alive
    retries: Mapping[str, int] = {}  # I14: of tasks that raise RetryLater without a policy; none for the others
    crash_cap: int | None = 3  # I14: crashes in a row after which work is run again
    service_seconds: Mapping[str, float] = {}  # I16: the period of each service
    unwanted_seconds: float = UNWANTED_SECONDS + 7200.0  # I18: until what nobody refers to is collected, once an hour
    tolerance_seconds: float = 0.5  # how much a history's times may be off


Evidence = HistoryEntry | Event | Fault | LogLine | StreamLine | WorldLine


class Violation(msgspec.Struct, frozen=True):
    """An invariant that does not hold, with the least that shows it."""

    invariant: str  # "I4"
    id: str | None
    sentence: str
    witness: tuple[Evidence, ...] = ()

    def __str__(self) -> str:
        about = f"{self.id}: " if self.id else ""
        return "\n    ".join([f"{self.invariant} {about}{self.sentence}", *map(shown, self.witness)])


def shown(evidence: Evidence) -> str:
    """One line of evidence, without what it leaves empty."""
    if isinstance(evidence, HistoryEntry):
        line = f"history {evidence.version} {evidence.status} at {evidence.at:.3f} epoch {evidence.epoch}"
        who = f" owner {evidence.owner}" if evidence.owner else ""
        return f"{line}{who} operation {evidence.operation}" + (f" ({evidence.why})" if evidence.why else "")
    if isinstance(evidence, LogLine | StreamLine | WorldLine):
        return str(evidence)
    fields = msgspec.structs.asdict(evidence)
    first = str(fields.pop("what", "fault"))
    told = {name: value for name, value in fields.items() if value is not False and value not in (None, "", ())}
    return first + "".join(f" {name}={value}" for name, value in told.items())
