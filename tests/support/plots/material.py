"""The material of plots: records as the real changes make them, forged where it pleases, and what witnesses saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace
from tests.support.checker import Bounds, Dump, Fault, FaultKind, Faults, Ledgers, Violation, check
from tests.support.checker.case import Body, Case
from tests.support.witness import Event, What, digest_of

from holdfast.codec import Codec, SizeLimits
from holdfast.fleet.slots import Execution
from holdfast.model import changes
from holdfast.model.changes import Change, apply_to
from holdfast.model.claims import claimed
from holdfast.model.pacing import amended
from holdfast.model.records import HistoryEntry, InvocationRecord, WorkerRecord
from holdfast.model.status import Status
from holdfast.testing.samples import ERROR, START, invocation, raw_change, runner, wish

S = Status
Changes = Callable[[InvocationRecord], Change]


# --- records, at seconds after START


def claim(owner: str = "r1/0", at: float = 1.0, start: bool = True) -> Changes:
    wanted = wish(f"claim by {owner} at {at}", owner=owner, at=START + at, start=start)
    return lambda record: claimed(wanted, record)


def ends(at: float = 2.0, result: bytes = b"\x01") -> Changes:
    return lambda record: changes.completed(record, result=result, operation=f"end {at}", at=START + at)


def fails(at: float = 2.0) -> Changes:
    return lambda record: changes.failed(record, error=ERROR, operation=f"fail {at}", at=START + at)


def crashes(at: float, *, last: bool = False) -> Changes:
    error = ERROR if last else None
    return lambda record: changes.recovered(
        record, by="r", operation=f"recover {at}", at=START + at, why="dead", error=error
    )


def hands_back(at: float) -> Changes:
    return lambda record: changes.handed_back(record, operation=f"back {at}", at=START + at, why="full")


def amends(at: float) -> Changes:
    later = invocation("later", operation=f"amend {at}", at=START + at)
    return lambda record: amended(record, later, due_at=START + at)


def walks(*path: Status, at: float) -> Changes:
    """Changes that have no name yet."""
    return lambda record: raw_change(record, *path, operation=f"to {path[-1]} {at}", epoch=record.epoch, at=START + at)


def made(*steps: Changes, id: str = "a", **fields: Any) -> InvocationRecord:
    record = invocation(id, **fields)
    for step in steps:
        record = apply_to(step(record), record)
    return record


def done(id: str = "a", at: float = 2.0, **fields: Any) -> InvocationRecord:
    return made(claim(), ends(at), id=id, **fields)


def with_line(record: InvocationRecord, number: int, **fields: Any) -> InvocationRecord:
    """The record with one line of its history forged; negative numbers count from the end."""
    history = list(record.history)
    history[number] = replace(history[number], **fields)
    return replace(record, history=tuple(history))


def later_versions(record: InvocationRecord) -> InvocationRecord:
    return replace(record, history=tuple(replace(line, version=line.version + 1) for line in record.history))


def without_lines(record: InvocationRecord, since: int, until: int) -> InvocationRecord:
    """The record as if these lines had never been written."""
    kept = record.history[:since] + record.history[until:]
    return replace(record, history=tuple(replace(line, version=n) for n, line in enumerate(kept, 1)))


def and_line(record: InvocationRecord, status: Status, at: float, **fields: Any) -> InvocationRecord:
    """The record with one line more than is legal."""
    last = record.history[-1]
    given: dict[str, Any] = {"epoch": last.epoch, "operation": f"forged {at}"} | fields
    line = HistoryEntry(version=last.version + 1, status=status, at=START + at, **given)
    return replace(record, status=status, owner=line.owner, epoch=line.epoch, history=(*record.history, line))


def left(*records: InvocationRecord, **fields: Any) -> Dump:
    return Dump(records=records, offset=START, **fields)


def saw(what: What, at: float, **facts: Any) -> Event:
    return Event(what=what, at=at, **({"pid": 1} | facts))


def accepted(token: str, id: str, at: float = 0.0, **facts: Any) -> list[Event]:
    return [saw(What.SUBMIT_INVOKE, at, token=token), saw(What.SUBMIT_OK, at, token=token, id=id, **facts)]


def execution(since: float, until: float | None, *, result: object = 0, **facts: Any) -> list[Event]:
    facts = {"span": f"span {since} {facts.get('pid', 1)}"} | facts
    start = saw(What.EXEC_START, since, **facts)
    return [start] if until is None else [start, saw(What.EXEC_END, until, **facts, digest=digest_of(result))]


def lease(since: float, until: float | None, *, id: str, limit: int = 1, **facts: Any) -> list[Event]:
    facts = {"key": "k", "limit": limit, "id": id, "span": f"lease {id} {since}"} | facts
    enter = saw(What.LEASE_ENTER, since, **facts)
    return [enter] if until is None else [enter, saw(What.LEASE_EXIT, until, **facts)]


def service(since: float, until: float | None, **facts: Any) -> list[Event]:
    facts = {"service": "sweep", "span": f"service {since}"} | facts
    start = saw(What.SERVICE_START, since, **facts)
    return [start] if until is None else [start, saw(What.SERVICE_END, until, **facts)]


def life(owner: str, since: float, until: float | None, beats: Sequence[float] = (), pid: int = 1) -> list[Event]:
    facts: dict[str, Any] = {"owner": owner, "pid": pid, "span": f"life of {owner}"}
    events = [saw(What.RUNNER_START, since, **facts), *(saw(What.RUNNER_BEAT, at, **facts) for at in beats)]
    return events if until is None else [*events, saw(What.RUNNER_END, until, **facts)]


def at_service(runner_id: str, window_ends: float = 10.0) -> Execution:
    """An execution that was not ended."""
    facts = {"id": "e", "service": "core", "runner_id": runner_id}
    return Execution(**facts, started_at=START, window_ends_at=START + window_ends)


def kill(at: float, **who: Any) -> Fault:
    return Fault(kind=FaultKind.KILL, at=at, **who)


ONE = digest_of(1)
PACKED = Codec().pack_call((b"x" * 100,), {}, ["data"], SizeLimits(inline=10, max_bytes=1000))
LARGE, DIGEST = PACKED.data, PACKED.payloads[0].digest  # arguments that refer to a payload
R1, R2 = {"pid": 1, "epoch": 1, "id": "a"}, {"pid": 2, "epoch": 2, "id": "a"}
WORKERS = replace(
    runner("r1", pid=7), workers=tuple(WorkerRecord(id=f"w{n}", pid=70 + n, started_at=START) for n in (1, 2))
)
RERUN = made(claim("r1/0", 1), crashes(18), claim("r2/0", 19), ends(20))
"""r1 died, and r2 did it again."""


class Plot(NamedTuple):
    """A run, and the invariants that it breaks."""

    name: str
    breaks: str
    dump: Dump
    events: Sequence[Event] = ()
    faults: Sequence[Fault] = ()
    bounds: Bounds = Bounds()
    bodies: Mapping[str, Body] = {}

    def judged(self) -> list[Violation]:
        return check(self.dump, Ledgers(tuple(self.events)), Faults(tuple(self.faults)), self.bounds, self.bodies)

    def case(self) -> Case:
        return Case(self.dump, Ledgers(tuple(self.events)), Faults(tuple(self.faults)), self.bounds, self.bodies)
