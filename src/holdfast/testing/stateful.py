"""Memory is the oracle: the same operations on the memory store and on another one must get the same answers.

    TestOracle = oracle_test(lambda clock: SqliteStore(a_new_file(), clock=clock, …))

Hypothesis makes up the operations, with ids and operation ids from a small pool, so that collisions, repetitions and
lost races are the rule. Needs Hypothesis.
"""

from __future__ import annotations

import asyncio
import unittest
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from holdfast.clock import Clock
from holdfast.errors import LifecycleError
from holdfast.ids import InvocationId
from holdfast.model.changes import APPLIED, Applied, Change, MoveUp, NoteUpdate, Push, RunUpdate, StreamMark, kept_until
from holdfast.model.claims import Claim
from holdfast.model.limits import Limit, Release
from holdfast.model.log import Page
from holdfast.model.notes import Notes
from holdfast.model.pacing import amended
from holdfast.model.records import (
    PLAIN,
    RETENTION_SECONDS,
    Entry,
    FailedAttempt,
    InboxEntry,
    InvocationRecord,
    Origin,
    RunnerRecord,
    RunState,
    Terms,
    lane_of,
)
from holdfast.model.state_writes import CANCEL_ENTRY, MAX_INBOX_BYTES, without_entries
from holdfast.model.status import FINAL, OWNED, TABLE, Status
from holdfast.store.contract import EntryOrder, Filter, Order, Store
from holdfast.store.memory.store import MemoryStore
from holdfast.testing.clock import FakeClock
from holdfast.testing.samples import (
    BY_NAME,
    CANCELLATION,
    ERROR,
    NOTES,
    REPLY_TO,
    START,
    WAITING,
    delivery,
    freeing,
    invocation,
    runner,
)

T = TypeVar("T")

APPS = st.sampled_from(["shop", "other"])
IDS = st.sampled_from([InvocationId(f"i{n}") for n in range(8)])
_TASKS = ["mail:send", "mail:drop"]
TASKS = st.sampled_from(_TASKS)
QUEUES = st.sampled_from(["default", "fast"])
TAGS = st.sampled_from([(), (), ("gpu",), ("eu", "gpu")])
OPERATIONS = st.sampled_from([f"op{n}" for n in range(12)]) | st.uuids().map(str)
LANES = st.builds(lane_of, QUEUES, TASKS, TAGS)
KEYS = st.sampled_from(["k1", "k2"])
MOST = 2  # that any claim here allows under one key
LIMITS = st.fixed_dictionaries({name: st.builds(Limit, st.integers(1, MOST), st.booleans()) for name in _TASKS})
AMENDABLE = (Status.REGISTERED, Status.CONCURRENCY_CONTROLLED, Status.REROUTED)
ACTORS = st.sampled_from(["r1/w1", "r1/w2", "r1", "r2", "r", "a stranger/w1"])  # workers, supervisors and others
SHIFTS = st.sampled_from([-5.0, -0.5, 0.0, 0.0, 0.5, 5.0])
RUNS = st.builds(RunState, tail=st.integers(0, 2))
NOTED = st.sampled_from([UNSET, UNSET, None, NOTES, Notes(checkpoint=b"x")])
ATTRIBUTES = st.sampled_from([{}, {}, {"stage": "a"}, {"stage": "b", "$x.y": "b"}, {"stage": "a", "$x.y": "b"}])
PAIRS = st.sampled_from([("stage", "a"), ("stage", "b"), ("$x.y", "b"), ("stage", "")])
SUBJECTS = st.sampled_from([None, "i1", "i2"])
GENERATIONS = st.sampled_from([0, 0, 1])
LOGS = IDS | st.sampled_from([InvocationId("none/tokens"), InvocationId("none/t")])  # streams of no invocation
INBOX = st.builds(
    InboxEntry,
    id=st.sampled_from(["e1", "e2", "e3", CANCEL_ENTRY]),
    kind=st.sampled_from(["wake", "child", CANCEL_ENTRY]),
    at=st.just(START),
    body=st.binary(max_size=3),
)


@st.composite
def new_invocations(draw: st.DrawFn) -> InvocationRecord:
    more: dict[str, Any] = {
        "task": draw(TASKS),
        "queue": draw(QUEUES),
        "tags": draw(TAGS),
        "priority": draw(st.integers(-2, 2)),
    }
    more |= {"due_at": START + draw(SHIFTS), "arguments": draw(st.binary(max_size=3))}
    more |= {"key": draw(st.none() | KEYS), "dedup_key": draw(st.none() | KEYS), "parent_id": draw(st.none() | IDS)}
    more |= {"start_by": draw(st.none() | SHIFTS.map(lambda shift: START + shift))}
    more |= {"origin": draw(st.none() | st.just(Origin(trigger="t", depth=1)))}
    more |= {"run": draw(st.none() | RUNS), "reply_to": draw(st.none() | st.just(REPLY_TO))}
    more |= {"attributes": draw(ATTRIBUTES), "notes": draw(st.none() | st.just(NOTES))}
    more |= {"limit_key": draw(st.none() | KEYS), "terms": draw(st.sampled_from([PLAIN, Terms(retries={"kind": "?"})]))}
    return invocation(draw(IDS), app=draw(APPS), operation=draw(OPERATIONS), **more)


@st.composite
def legal_paths(draw: st.DrawFn, source: Status) -> tuple[Status, ...]:
    """Return walks of one to three edges of the table from `source` on."""
    path: list[Status] = []
    here = source
    for _ in range(draw(st.integers(1, 3))):
        following = sorted(TABLE[here].next)
        if not following:
            break
        here = draw(st.sampled_from(following))
        path.append(here)
    return tuple(path)


FILTERS = st.builds(
    Filter,
    attributes=st.frozensets(PAIRS, max_size=2),
    statuses=st.frozensets(st.sampled_from(sorted(Status)), max_size=3),
    tasks=st.frozensets(TASKS, max_size=2),
    queues=st.frozensets(QUEUES, max_size=2),
    runner=st.none() | st.sampled_from(["r1", "r2", "r"]),
    parent=st.none() | IDS,
    before_id=st.none() | IDS,
    limit_key=st.none() | KEYS,
    since=st.none() | SHIFTS.map(lambda shift: START + shift),
    until=st.none() | SHIFTS.map(lambda shift: START + shift),
)


class StoreMachine(RuleBasedStateMachine):
    """Drive two stores with one clock on one loop, since a store may bind its futures to the loop that opened it."""

    open_store: ClassVar[Callable[[Clock], Store]]

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = FakeClock(START)
        self.memory = MemoryStore(self.clock)
        self.other = type(self).open_store(self.clock)
        self.seen: list[InvocationRecord] = []  # records that were read before: most are stale by now

    @initialize()
    def open(self) -> None:
        self.loop.run_until_complete(self.other.open())

    def teardown(self) -> None:
        self.loop.run_until_complete(self.other.close())
        self.loop.close()

    def both(self, ask: Callable[[Store], Awaitable[T]]) -> T:
        """Return the answer, which has to be the same from both stores."""

        async def answers() -> tuple[T, T]:
            return await ask(self.memory), await ask(self.other)

        expected, got = self.loop.run_until_complete(answers())
        assert plain(got) == plain(expected)
        return expected

    @rule(records=st.lists(new_invocations(), max_size=5, unique_by=lambda r: (r.app, r.id, r.history[0].operation)))
    def insert(self, records: list[InvocationRecord]) -> None:
        self.both(lambda store: store.insert(records))
        self.seen += records

    @rule(app=APPS, id=IDS, key=KEYS)
    def free_key(self, app: str, id: InvocationId, key: str) -> None:
        self.both(lambda store: store.apply([freeing(id, key, app)]))

    @rule(records=st.lists(new_invocations(), max_size=3))
    def find_conflicts(self, records: list[InvocationRecord]) -> None:
        mine = [record for record in records if record.app == "shop"]
        self.both(lambda store: store.find_conflicts(mine))

    @rule(seconds=st.floats(0, 10))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(
        app=APPS,
        lanes=st.lists(LANES, max_size=5).map(tuple),
        limit=st.integers(0, 6),
        owner=st.sampled_from(["r1/w1", "r2/w1"]),
        operation=OPERATIONS,
        start=st.booleans(),
        again=st.booleans(),
        ids=st.just(()) | st.lists(IDS, max_size=3, unique=True).map(tuple),
        shift=SHIFTS,
        limits=LIMITS,
        limited=st.sampled_from([True, True, False]),
    )
    def claim(self, shift: float, **fields: Any) -> None:
        claim = Claim(at=self.clock.now() + shift, **fields)
        self.seen += self.both(lambda store: store.claim(claim)).records

    @rule(data=st.data(), count=st.integers(1, 4))
    def apply(self, data: st.DataObject, count: int) -> None:
        if self.seen:
            drawn = [self._change(data) for _ in range(count)]
            batch = [change for change in drawn if change is not None]
            self.both(lambda store: store.apply(batch))

    def _change(self, data: st.DataObject) -> Change | None:
        record = data.draw(st.sampled_from(self.seen))
        if data.draw(st.booleans()):
            (current,) = self.loop.run_until_complete(self.memory.get(record.app, [record.id]))
            record = current or record
        epoch = record.epoch + data.draw(st.sampled_from([0, 0, 0, 0, -1, 1]))
        operation = data.draw(OPERATIONS)
        if record.epoch == 0 and record.status in AMENDABLE and data.draw(st.booleans()):
            later = invocation("later", operation=operation, arguments=data.draw(st.binary(max_size=3)))
            return amended(record, later, due_at=self.clock.now() + data.draw(SHIFTS))
        if data.draw(st.booleans()):
            return self._named(data, replace(record, epoch=epoch), operation)
        return self._unnamed(data, record, epoch, operation)

    def _named(self, data: st.DataObject, record: InvocationRecord, operation: str) -> Change | None:
        """Make a named change by its own actor or by another; None where no actor may make it."""
        _, build = BY_NAME[data.draw(st.sampled_from(sorted(BY_NAME)))]
        try:
            change = build(record)
            actor = data.draw(st.just(change.actor) | ACTORS)
            return replace(change, operation=operation, at=self.clock.now(), actor=actor)
        except LifecycleError:
            return None

    def _unnamed(self, data: st.DataObject, record: InvocationRecord, epoch: int, operation: str) -> Change | None:
        """Make any walk that the table allows, so that a store is ready for later changes."""
        path = data.draw(legal_paths(record.status))
        (there,) = self.loop.run_until_complete(self.memory.get(record.app, [record.id]))
        if there is not None and there.limit_key is not None and Status.PENDING in path:
            return None  # only a claim makes an owner, and gives a slot
        optional: dict[str, Any] = data.draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "due_at": SHIFTS.map(lambda shift: self.clock.now() + shift),
                    "result": st.none() | st.binary(max_size=2),
                    "error": st.none() | st.just(ERROR),
                    "errors": st.just((FailedAttempt(number=1, attempt=1, at=START, error=ERROR),)),
                    "fingerprint": st.none() | st.just("f"),
                    "cancellation": st.just(CANCELLATION),
                    "outbox": st.sampled_from([("t",), ("t", "u")]),
                    "waiting": st.none() | st.just(WAITING),
                    "wake_at": st.none() | SHIFTS.map(lambda shift: self.clock.now() + shift),
                },
            )
        )
        try:
            return Change(
                name="unnamed",
                app=record.app,
                id=record.id,
                path=path,
                sources=frozenset({record.status}),
                epoch=data.draw(st.sampled_from([epoch, None])),
                operation=operation,
                at=self.clock.now(),
                actor=data.draw(st.just(record.owner or "r3/w1") | ACTORS),
                why=data.draw(st.sampled_from(["", "because"])),
                retain_until=kept_until(record, path[-1], self.clock.now()) if path else UNSET,
                has_log=record.has_logs and bool(path) and path[-1] in FINAL,
                **optional,
            )
        except LifecycleError:
            return None

    @rule(app=APPS, ids=st.lists(IDS, min_size=1, max_size=3), shift=SHIFTS)
    def move_up(self, app: str, ids: list[InvocationId], shift: float) -> None:
        moves = [MoveUp(app=app, id=id, due_at=self.clock.now() + shift - n) for n, id in enumerate(ids)]
        self.both(lambda store: store.apply(moves))

    @rule(
        app=APPS,
        wishes=st.lists(
            st.builds(
                Release,
                limit_key=KEYS,
                count=st.integers(0, 3),
                max_running=st.none() | st.integers(1, MOST),
                without=st.frozensets(LANES, max_size=2),
            ),
            max_size=3,
            unique_by=lambda wish: wish.limit_key,
        ),
        operation=OPERATIONS,
    )
    def release_waiters(self, app: str, wishes: list[Release], operation: str) -> None:
        at = self.clock.now()
        self.seen += self.both(lambda store: store.release_waiters(app, wishes, operation=operation, at=at))

    @rule(
        app=APPS,
        id=IDS,
        entries=st.lists(INBOX, min_size=1, max_size=3),
        size=st.sampled_from([1, 1, 1, MAX_INBOX_BYTES // 6]),
        cancels=st.booleans(),
    )
    def push(self, app: str, id: InvocationId, entries: list[InboxEntry], size: int, cancels: bool) -> None:
        asked = CANCELLATION if cancels else None
        facts: dict[str, Any] = {"app": app, "id": id, "at": self.clock.now(), "cancellation": asked}
        for number, entry in enumerate(replace(one, body=one.body * size) for one in entries):
            push = Push(entry=entry, operation=f"push {len(self.seen)} {number}", **facts)
            self.both(lambda store, push=push: store.apply([push]))  # type: ignore[misc]

    @rule(data=st.data(), epochs=st.sampled_from([0, 0, 0, 1]), missed=st.sampled_from([0, 0, 0, 1]))
    def update_run(self, data: st.DataObject, epochs: int, missed: int) -> None:
        """Let the owner, or another, write the state of a run: fewer entries, another tail."""
        everything = self.loop.run_until_complete(self.memory.find("shop", Filter(), 1000))
        runs = [record for record in everything if record.run is not None and record.owner is not None]
        if not runs:
            return
        record = data.draw(st.sampled_from(runs))
        assert record.run is not None
        gone = data.draw(st.sets(st.sampled_from(["e1", "e2", "e3"])))
        run = replace(without_entries(record.run, gone), tail=data.draw(st.integers(0, 3)))
        update = RunUpdate(
            app=record.app,
            id=record.id,
            epoch=record.epoch + epochs,
            actor=data.draw(st.just(record.owner or "") | ACTORS),
            run=run,
            inbox_seen=record.run.pushed - missed,
        )
        self.both(lambda store: store.apply([update]))

    @rule(data=st.data(), epochs=st.sampled_from([0, 0, 0, 1]), attributes=ATTRIBUTES | st.just(UNSET), notes=NOTED)
    def note(
        self, data: st.DataObject, epochs: int, attributes: dict[str, str] | UnsetType, notes: Notes | UnsetType | None
    ) -> None:
        """Let the owner, or another, replace the attributes and notes of an invocation."""
        if attributes is UNSET and notes is UNSET:
            return
        everything = self.loop.run_until_complete(self.memory.find("shop", Filter(), 1000))
        if records := [record for record in everything if record.owner is not None]:
            record = data.draw(st.sampled_from(records))
            actor = data.draw(st.just(record.owner or "") | ACTORS)
            epoch = record.epoch + epochs
            said: dict[str, Any] = {"attributes": attributes, "notes": notes}
            update = NoteUpdate(app="shop", id=record.id, epoch=epoch, actor=actor, **said)
            self.both(lambda store: store.apply([update]))

    @rule(data=st.data(), epochs=st.sampled_from([0, 0, 0, 1]))
    def mark_streams(self, data: st.DataObject, epochs: int) -> None:
        """Let the owner, or another, say that an invocation has streams."""
        everything = self.loop.run_until_complete(self.memory.find("shop", Filter(), 1000))
        if records := [record for record in everything if record.owner is not None]:
            record = data.draw(st.sampled_from(records))
            actor = data.draw(st.just(record.owner or "") | ACTORS)
            mark = StreamMark(app="shop", id=record.id, epoch=record.epoch + epochs, actor=actor)
            self.both(lambda store: store.apply([mark]))

    @rule(app=APPS, runs=st.lists(LOGS, min_size=1, max_size=3, unique=True), generation=GENERATIONS, data=st.data())
    def append(self, app: str, runs: list[InvocationId], generation: int, data: st.DataObject) -> None:
        """Append behind a page that the log has: the last, or one before it."""
        pages = []
        for run in runs:
            log = self.loop.run_until_complete(self.memory.read_log(app, run, generation=generation, limit=1000))
            ends = [0, *(page.last for page in log)]
            first = 1 + data.draw(st.sampled_from(ends) | st.just(ends[-1]))
            pages.append(
                Page(
                    app=app,
                    run=run,
                    generation=generation,
                    first=first,
                    last=first + data.draw(st.integers(0, 2)),
                    epoch=data.draw(st.integers(1, 3)),
                    operation=data.draw(OPERATIONS),
                    at=self.clock.now(),
                    events=data.draw(st.binary(max_size=3)),
                    payloads=data.draw(st.sampled_from([(), ("d" * 64,)])),
                    writer=data.draw(st.sampled_from(["", "", "w"])),
                )
            )
        self.both(lambda store: store.append(pages))
        for run in runs:
            self.both(lambda store, run=run: store.read_log(app, run, generation=generation, limit=1000))  # type: ignore[misc]

    @rule(
        app=APPS,
        run=LOGS,
        generation=GENERATIONS,
        after=st.integers(0, 6),
        until=st.none() | st.integers(0, 6),
        limit=st.integers(0, 3),
        latest=st.booleans(),
    )
    def read_log(self, app: str, run: InvocationId, **asked: Any) -> None:
        self.both(lambda store: store.read_log(app, run, **asked))

    @rule(app=APPS, run=LOGS, before=st.integers(0, 2))
    def remove_log(self, app: str, run: InvocationId, before: int) -> None:
        self.both(lambda store: store.remove_log(app, run, before=before))

    @rule(app=APPS, ids=st.lists(IDS, max_size=3))
    def delivered(self, app: str, ids: list[InvocationId]) -> None:
        self.both(lambda store: store.apply(delivery(*ids, app=app)))

    @rule(app=APPS, ids=st.lists(IDS, max_size=3), seconds=SHIFTS, limit=st.integers(0, 2))
    def remove(self, app: str, ids: list[InvocationId], seconds: float, limit: int) -> None:
        self.both(lambda store: store.remove_ended(app, ids))
        at = self.clock.now() + seconds
        self.both(lambda store: store.remove_expired(app, at + RETENTION_SECONDS, limit))
        for id in ids:
            self.both(lambda store, id=id: store.read_log(app, id, limit=1000))  # type: ignore[misc]

    @rule(
        app=APPS,
        name=st.sampled_from(["a", "b", "c"]),
        version=st.sampled_from([1, 1, 2, 3]),
        keep_until=st.none() | SHIFTS.map(lambda shift: START + RETENTION_SECONDS + shift),
        bodies=st.tuples(st.sampled_from([b"1", b"2"]), st.sampled_from([None, b"1", b"2"])),
        subject=SUBJECTS,
    )
    def put_entry(
        self,
        app: str,
        name: str,
        version: int,
        keep_until: float | None,
        bodies: tuple[bytes, bytes | None],
        subject: str | None,
    ) -> None:
        body, before = bodies
        facts: dict[str, Any] = {"app": app, "kind": "event", "name": name}
        entry = Entry(**facts, body=body, version=version, keep_until=keep_until, subject=subject)
        over = None if before is None else replace(entry, version=version - 1, body=before)
        self.both(lambda store: store.put_entry(entry, over))

    @rule(app=APPS, limit=st.integers(0, 2), before=st.none() | st.sampled_from(["a", "b", "z"]), subject=SUBJECTS)
    def latest_entries(self, app: str, limit: int, before: str | None, subject: str | None) -> None:
        wanted: dict[str, Any] = {"limit": limit, "before": before, "subject": subject}
        self.both(lambda store: store.entries(app, "event", order=EntryOrder.LATEST, **wanted))

    @rule(app=APPS, ids=st.lists(IDS, max_size=4))
    def get(self, app: str, ids: list[InvocationId]) -> None:
        self.both(lambda store: store.get(app, ids))

    @rule(app=APPS, where=FILTERS, limit=st.integers(0, 5), order=st.sampled_from(sorted(Order, key=str)))
    def find(self, app: str, where: Filter, limit: int, order: Order) -> None:
        if order is not Order.SLOT or where.limit_key is not None:
            self.both(lambda store: store.find(app, where, limit, order=order))

    @rule(app=APPS, id=st.sampled_from(["r1", "r2", "r3"]), age=SHIFTS)
    def enrol(self, app: str, id: str, age: float) -> None:
        self.both(lambda store: store.enrol(runner(id, app=app, started_at=START + age)))

    @rule(app=APPS, id=st.sampled_from(["r1", "r2", "r3"]))
    def heartbeat(self, app: str, id: str) -> None:
        self.both(lambda store: store.heartbeat(app, id))

    @rule(app=APPS, id=st.sampled_from(["r1", "r2", "r3"]), wish=st.none() | st.sampled_from(["drain", "stop"]))
    def ask_runner(self, app: str, id: str, wish: str | None) -> None:
        self.both(lambda store: store.ask_runner(app, id, wish=wish, sits_out_until=START))

    @rule(app=APPS, id=st.sampled_from(["r1", "r2", "r3"]))
    def leave(self, app: str, id: str) -> None:
        self.both(lambda store: store.remove_runner(app, id))

    @rule(app=APPS, shift=SHIFTS)
    def look_at_queues(self, app: str, shift: float) -> None:
        self.both(lambda store: store.queue_depths(app, self.clock.now() + shift))

    @invariant()
    def the_contents_are_equal(self) -> None:
        for app in ("shop", "other"):
            self.both(lambda store, app=app: store.find(app, Filter(), 1000))  # type: ignore[misc]
            self.both(lambda store, app=app: store.counts(app))  # type: ignore[misc]
            self.both(lambda store, app=app: store.find(app, Filter(), 1000, order=Order.LATEST_END))  # type: ignore[misc]
            self.both(lambda store, app=app: store.lanes(app))  # type: ignore[misc]
            self.both(lambda store, app=app: store.roster(app))  # type: ignore[misc]
            self.both(lambda store, app=app: store.owners(app))  # type: ignore[misc]
            self.both(lambda store, app=app: store.waiting_keys(app))  # type: ignore[misc]
            self.both(lambda store, app=app: store.waiting_keys(app, most=1))  # type: ignore[misc]
            self.both(lambda store, app=app: store.find(app, Filter(), 3, order=Order.START_BY))  # type: ignore[misc]
            self.both(lambda store, app=app: store.find(app, Filter(), 3, order=Order.OUTBOX))  # type: ignore[misc]
            self.both(lambda store, app=app: store.find(app, Filter(), 3, order=Order.WAKE_AT))  # type: ignore[misc]
            self.both(lambda store, app=app: store.entries(app, "event"))  # type: ignore[misc]

    @invariant()
    def no_slot_has_two_holders_and_no_key_more_than_its_limit(self) -> None:
        for app in ("shop", "other"):
            everything = self.loop.run_until_complete(self.other.find(app, Filter(), 1000))
            slots = [record.slot for record in everything if record.slot is not None]
            assert len(slots) == len(set(slots))
            for key in ("k1", "k2"):
                owned = [r for r in everything if r.limit_key == key and r.status in OWNED]
                assert len(owned) <= MOST
                assert {r.slot for r in everything if r.limit_key == key} - {None} == {r.slot for r in owned}
                where = Filter(limit_key=key)
                self.both(lambda store, app=app, where=where: store.find(app, where, 1000, order=Order.SLOT))  # type: ignore[misc]


def plain(answer: object) -> object:
    """Return what has to be equal. Sequences and mappings may be of any class.

    Two things may differ: in a batch a store may not know which changes were applied before, and a store with its own
    clock stamps heartbeats by it.
    """
    if isinstance(answer, list | tuple):
        many = len(answer) > 1
        return [_plain_item(item, many) for item in answer]
    return dict(answer) if isinstance(answer, dict) else _plain_item(answer, many=False)


def _plain_item(item: object, many: bool) -> object:
    if isinstance(item, Applied) and many:
        return APPLIED
    return replace(item, heartbeat_at=0.0) if isinstance(item, RunnerRecord) else item


def oracle_test(open_store: Callable[[Clock], Store]) -> type[unittest.TestCase]:
    """Return a test case that drives the stores of `open_store`, each new and empty, side by side with memory."""
    machine: Any = type("Machine", (StoreMachine,), {"open_store": staticmethod(open_store)})
    case: type[unittest.TestCase] = machine.TestCase
    return case
