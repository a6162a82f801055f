"""Who checks the checker: every invariant has a planted violation that is found, and a close call that is none."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from holdfast import App, Invocation
from holdfast.clock import SystemClock
from holdfast.lifecycle import changes
from holdfast.lifecycle.changes import APPLIED, MISSING, Change, Claim, Lost, Verdict, apply_to, claimed
from holdfast.lifecycle.records import HistoryEntry, InvocationRecord, Quarantined, WorkerRecord
from holdfast.lifecycle.status import TABLE, Rescuer, Rule, Status
from holdfast.store import open_store
from holdfast.store.memory import MemoryStore
from holdfast.testing import FakeClock, checker, witness
from holdfast.testing.checker import Bounds, Dump, Fault, FaultKind, Faults, Ledgers, Violation, check, dead_ends, rest
from holdfast.testing.checker.case import Case
from holdfast.testing.checker.spans import union, without
from holdfast.testing.samples import BY_NAME, ERROR, LANE, START, invocation, raw_change, runner, wish
from holdfast.testing.witness import Event, What, Witness, digest_of, digest_of_error

S = Status
Changes = Callable[[InvocationRecord], Change]


# --- material: records as the real changes make them, at seconds after START


def claim(owner: str = "r1/0", at: float = 1.0, start: bool = True) -> Changes:
    wanted = wish(f"claim by {owner} at {at}", owner=owner, at=START + at, start=start)
    return lambda record: claimed(wanted, record)


def ends(at: float = 2.0, result: bytes = b"\x01") -> Changes:
    return lambda record: changes.completed(record, result=result, operation=f"end {at}", at=START + at)


def fails(at: float = 2.0) -> Changes:
    return lambda record: changes.failed(record, error=ERROR, operation=f"fail {at}", at=START + at)


def crashes(at: float, *, last: bool = False) -> Changes:
    error = ERROR if last else None
    return lambda record: changes.recovered(record, operation=f"recover {at}", at=START + at, why="dead", error=error)


def hands_back(at: float) -> Changes:
    return lambda record: changes.handed_back(record, operation=f"back {at}", at=START + at, why="full")


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


def kill(at: float, **who: Any) -> Fault:
    return Fault(kind=FaultKind.KILL, at=at, **who)


ONE = digest_of(1)
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

    def judged(self) -> list[Violation]:
        return check(self.dump, Ledgers(tuple(self.events)), Faults(tuple(self.faults)), self.bounds)

    def case(self) -> Case:
        return Case(self.dump, Ledgers(tuple(self.events)), Faults(tuple(self.faults)), self.bounds)


PLANTED = [
    # --- I1
    Plot("an acknowledged submit that is not there", "I1", left(), accepted("t", "a")),
    Plot("an end that never came", "I1", left(invocation("a")), accepted("t", "a")),
    Plot("an end that came too late", "I1", left(done(at=62.0)), accepted("t", "a")),
    Plot("an unknown submit that ran and vanished", "I1", left(), execution(1, 2, token="t")),
    Plot("a result of something that is not there", "I1", left(), [saw(What.RESULT_SEEN, 3, id="a", status="success")]),
    Plot("an unknown submit that is there, and ended too late", "I1", left(done(at=62.0))),
    # --- I2
    Plot("a gap in the versions", "I2", left(with_line(done(), -1, version=9))),
    Plot("a first version that is not 1", "I2 I4", left(replace(done(), history=done().history[1:]))),
    Plot(
        "an edge that the table does not have",
        "I2",
        left(and_line(made(claim(), walks(S.PAUSED, at=2)), S.CANCELLED, 3)),
    ),
    Plot("no history", "I2", left(replace(done(), history=(), epoch=0, attempt=0))),
    Plot(
        "one write, twice",
        "I2",
        left(with_line(made(claim(), walks(S.RETRY, at=2), claim(at=3), ends(4)), -1, operation="to retry 2")),
        bounds=Bounds(retries={"shop:send": 1}),
    ),
    Plot("another status first", "I2", left(with_line(done(), 0, status=S.REROUTED))),
    Plot("versions that begin with 2", "I2", left(later_versions(done()))),
    # --- I3
    Plot("a life after the end", "I3", left(and_line(done(), S.FAILED, 3.0))),
    Plot("success without a result", "I3", left(replace(done(), result=None))),
    Plot("a result before the end", "I3 I1 I18", left(replace(made(claim()), result=b"\x01"))),
    Plot(
        "two clients that saw different results",
        "I3",
        left(done()),
        [saw(What.RESULT_SEEN, at, id="a", status="success", digest=digest_of(at)) for at in (3, 4)],
    ),
    Plot(
        "a result that changed after it was seen",
        "I3",
        left(done(), digests={"a": ONE}),
        [saw(What.RESULT_SEEN, 3, id="a", status="success", digest=digest_of(2))],
    ),
    Plot("an end of another kind", "I3", left(done()), [saw(What.RESULT_SEEN, 3, id="a", status="failed")]),
    # --- I4
    Plot("two owners at once", "I4 I2 I14", left(without_lines(RERUN, 3, 5)), faults=[kill(2, owner="r1")]),
    Plot(
        "the same epoch for two claims",
        "I4",
        left(replace(with_line(with_line(with_line(RERUN, -3, epoch=1), -2, epoch=1), -1, epoch=1), epoch=1)),
        faults=[kill(2, owner="r1")],
    ),
    Plot("an owner without a claim", "I4", left(with_line(done(), 2, owner="r2/0"))),
    Plot("an owner after the end", "I4 I18", left(replace(with_line(done(), -1, owner="r1/0"), owner="r1/0"))),
    Plot("an owner that the history does not know", "I4 I18", left(replace(done(), owner="r9/0"))),
    Plot("an epoch before any claim", "I4", left(with_line(done(), 0, epoch=1))),
    Plot("a claim by nobody", "I4", left(with_line(done(), 1, owner=None))),
    Plot(
        "one epoch in two processes",
        "I4 I15",
        left(done()),
        [*execution(1.2, 1.5, id="a", pid=1, epoch=1), *execution(1.3, 1.6, id="a", pid=2, epoch=1)],
    ),
    Plot(
        "an execution by somebody who never owned it",
        "I4",
        left(done()),
        [*life("r2", 0, 5, pid=2), *execution(1.2, 1.5, id="a", pid=2, epoch=1)],
    ),
    Plot(
        "called twice in the attempt that followed a reservation",
        "I4 I15",
        left(made(claim(start=False), crashes(1.1), claim("r2/0", 1.2), ends(2))),
        [*execution(1.3, 1.4, id="a"), *execution(1.5, 1.6, id="a")],
    ),
    Plot(
        "an execution by somebody who never owned it and was killed for it",
        "I4",
        left(done()),
        execution(1.2, 1.5, id="a", pid=2, epoch=1),
        [kill(3, pid=2, owner="r2")],
    ),
    # --- I6
    Plot(
        "a write of an old epoch",
        "I6",
        left(replace(with_line(RERUN, -1, epoch=1), epoch=1)),
        faults=[kill(2, owner="r1")],
    ),
    Plot("an epoch that nobody wrote", "I6", left(replace(done(), epoch=5))),
    Plot(
        "the result of a zombie",
        "I6",
        left(RERUN, digests={"a": ONE}),
        [*execution(1.2, 19.9, result=1, **R1), *execution(19.2, 19.8, result=2, **R2)],
        [kill(2, owner="r1")],
    ),
    Plot(
        "the result of a zombie, of whose epoch nobody told",
        "I6",
        left(RERUN, digests={"a": ONE}),
        [*execution(1.2, 19.9, result=1, id="a"), *execution(19.2, 19.8, result=2, id="a", pid=2)],
        [kill(2, owner="r1")],
    ),
    Plot(
        "the error of a zombie",
        "I6",
        left(
            made(claim("r1/0", 1), crashes(18), claim("r2/0", 19), fails(20)),
            digests={"a": digest_of_error(ERROR.message)},
        ),
        [
            saw(What.EXEC_START, 1.2, span="1", **R1),
            saw(What.EXEC_END, 19.9, span="1", raised=True, digest=digest_of_error(ERROR.message), **R1),
            *execution(19.2, 19.95, result=2, **R2),
        ],
        [kill(2, owner="r1")],
    ),
    Plot(
        "the result of an execution that did not return",
        "I6",
        left(done(), digests={"a": ONE}),
        execution(1.2, None, id="a", epoch=1),
    ),
    Plot(
        "a result in an epoch that was not executed",
        "I6",
        left(RERUN, digests={"a": ONE}),
        execution(1.2, 19, result=1, **R1),
        [kill(2, owner="r1")],
    ),
    Plot(
        "a result in an epoch whose owner did not execute it",
        "I6",
        left(RERUN, digests={"a": ONE}),
        [*life("r1", 0, 40), *life("r2", 0, 40, pid=2), *execution(1.2, 19, result=1, id="a")],
        [kill(2, owner="r1")],
    ),
    Plot(
        "a result that nobody returned",
        "I6",
        left(done(), digests={"a": ONE}),
        execution(1.2, 1.5, result=2, id="a"),
    ),
    Plot(
        "a result of one that raised",
        "I6",
        left(done()),
        [saw(What.EXEC_START, 1.2, span="1", **R1), saw(What.EXEC_END, 1.5, span="1", raised=True, **R1)],
    ),
    Plot("an end by somebody who was told to stop", "I6", left(done()), [saw(What.FENCED, 1.5, id="a", epoch=1)]),
    # --- I7
    Plot(
        "an unknown submit that is there twice",
        "I7",
        left(done("a"), done("b"), tokens={"a": "t", "b": "t"}),
        [saw(What.SUBMIT_INVOKE, 0, token="t"), saw(What.SUBMIT_UNKNOWN, 1, token="t")],
    ),
    Plot(
        "a submit that is there beside its id", "I7", left(done("a"), done("b"), tokens={"b": "t"}), accepted("t", "a")
    ),
    Plot(
        "a refused submit that is there",
        "I7",
        left(done("a"), tokens={"a": "t"}),
        [saw(What.SUBMIT_INVOKE, 0, token="t"), saw(What.SUBMIT_FAIL, 0, token="t")],
    ),
    # --- I8
    Plot(
        "two under a limit of one",
        "I8",
        left(done("a"), done("b")),
        [*lease(1.1, 1.8, id="a"), *lease(1.5, 1.9, id="b")],
    ),
    Plot(
        "two under a limit of one, after one was given back",
        "I8",
        left(done("a"), made(claim(start=False), hands_back(1.05), claim(at=1.1), ends(), id="b")),
        [*lease(1.3, 1.8, id="a"), *lease(1.2, 1.9, id="b")],
    ),
    Plot(
        "a free slot that nobody fills",
        "I8",
        left(done("a"), done("b", at=9)),
        [*lease(1.1, 1.8, id="a"), *lease(8, 8.5, id="b")],
    ),
    Plot(
        "a free slot, and one that waits for ever",
        "I8 I1",
        left(done("a"), invocation("b", limit_key="k")),
        [*lease(1.1, 1.8, id="a"), saw(What.SUBMIT_INVOKE, 30, token="later")],
    ),
    Plot(
        "a free slot, and one that waits for ever for what its submit asked for",
        "I8 I1",
        left(done("a"), invocation("b")),
        [*lease(1.1, 1.8, id="a"), *accepted("t", "b", key="k"), saw(What.SUBMIT_INVOKE, 30, token="later")],
    ),
    # --- I14
    Plot(
        "a retry too many",
        "I14",
        left(made(claim(), walks(S.RETRY, at=2), claim(at=3), ends(4))),
    ),
    Plot("more attempts than runs", "I14 I15", left(replace(done(), attempt=2))),
    Plot(
        "more runs than are accounted for",
        "I14 I2 I4",
        left(replace(without_lines(RERUN, 3, 5), attempt=1)),
        faults=[kill(2, owner="r1")],
    ),
    Plot("an attempt that was not counted", "I14", left(replace(done(), attempt=0))),
    Plot(
        "a poison pill",
        "I14",
        left(made(*[step for n in range(3) for step in (claim("r1/0", n), crashes(n + 0.5))], claim(at=5), ends(6))),
        faults=[kill(n + 0.2, owner="r1") for n in range(3)],
        bounds=Bounds(crash_cap=2),
    ),
    Plot(
        "at most once, and once more",
        "I14",
        left(replace(RERUN, at_most_once=True)),
        faults=[kill(2, owner="r1")],
    ),
    # --- I15
    Plot("a needless second execution", "I15 I20", left(RERUN)),
    Plot(
        "a fault of another invocation",
        "I15",
        left(RERUN),
        faults=[Fault(kind=FaultKind.CUT, at=2, until=17, ids=("b",))],
    ),
    Plot("a fault of another runner", "I15 I20", left(RERUN), faults=[kill(2, owner="r")]),
    Plot("a lost reply", "I15 I20", left(RERUN), faults=[Fault(kind=FaultKind.LOST_REPLY, at=2, owner="r1")]),
    Plot(
        "a fault of another process",
        "I15",
        left(RERUN),
        [*execution(1.2, 1.5, id="a", pid=5), *execution(19.2, 19.8, id="a", pid=6)],
        [kill(1.3, pid=9)],
    ),
    *(
        Plot(
            f"a fault of its process {when}",
            "I15",
            left(RERUN),
            [*execution(1.2, 1.5, id="a", pid=5), *execution(19.2, 19.8, id="a", pid=6)],
            [kill(at, pid=5)],
        )
        for when, at in (("before", 0.5), ("afterwards", 9.0))
    ),
    Plot("a silence that nobody caused", "I15", left(RERUN), life("r1", 0, None, beats=(0, 2))),
    Plot("a runner that left without what it had", "I15", left(RERUN), life("r1", 0, 5)),
    Plot("a fault before it was claimed", "I15", left(RERUN), faults=[kill(0, owner="r1")]),
    Plot("a fault after it was done", "I15 I20", left(RERUN), faults=[kill(20.6, owner="r1")]),
    Plot(
        "an outage of the database is no reason to run again",
        "I15 I20",
        left(RERUN),
        faults=[Fault(kind=FaultKind.OUTAGE, at=2, until=17)],
    ),
    Plot(
        "killed by a runner that nobody had told to stop",
        "I15",
        left(made(claim("r1/0", 1), walks(S.KILLED, S.REROUTED, at=5), claim("r2/0", 6), ends(7))),
    ),
    Plot(
        "two duplicates of one fault",
        "I15",
        left(
            made(
                claim("r1/0", 1),
                crashes(18),
                claim("r2/0", 19),
                walks(S.KILLED, S.REROUTED, at=20),
                claim("r2/0", 21),
                ends(22),
            )
        ),
        faults=[kill(2, owner="r1")],
    ),
    Plot(
        "called twice in one attempt",
        "I15 I4",
        left(done()),
        [*execution(1.2, 1.3, id="a"), *execution(1.4, 1.5, id="a")],
    ),
    Plot(
        "called twice in one attempt, and killed then",
        "I15 I4",
        left(made(claim("r1/0", 1), crashes(18, last=True))),
        [*execution(1.2, 1.3, id="a"), *execution(1.4, None, id="a")],
        [kill(2, owner="r1")],
    ),
    Plot("a result of nothing", "I15", left(done("a"), done("b")), execution(1.2, 1.3, id="a", epoch=1)),
    # --- I16
    Plot("two executions of a service", "I16", left(), [*service(1, 5, pid=1), *service(4, 6, pid=2)]),
    Plot(
        "two executions of a service, one of them by somebody who died later",
        "I16",
        left(),
        [*service(1, None, pid=1), *service(4, 6, pid=2)],
        [kill(5, pid=1)],
    ),
    Plot(
        "three executions of a service, and only the first is that of a zombie",
        "I16",
        left(),
        [*service(1, 9, pid=1, epoch=3), *service(5, 8, pid=2, epoch=4), *service(7, 10, pid=3, epoch=5)],
        [Fault(kind=FaultKind.FREEZE, at=2, until=8.5, pid=1)],
    ),
    Plot(
        "two executions of a service with one epoch, fault or not",
        "I16",
        left(),
        [*service(1, 9, pid=1, epoch=3), *service(8, 10, pid=2, epoch=3)],
        [Fault(kind=FaultKind.FREEZE, at=2, until=8.5, pid=1)],
    ),
    Plot(
        "a service that nobody serves",
        "I16",
        left(),
        [*life("r1", 0, 100), *service(1, 2), *service(50, 51)],
        bounds=Bounds(service_seconds={"sweep": 10}),
    ),
    Plot(
        "a service that never ran",
        "I16",
        left(),
        life("r1", 0, 100),
        bounds=Bounds(service_seconds={"sweep": 10}),
    ),
    *(
        Plot(
            f"two executions of a service, and {why}",
            "I16",
            left(),
            [*service(4, 9, pid=1, epoch=3), *service(8, 10, pid=2, epoch=4)],
            [Fault(kind=kind, at=2, until=until, pid=1)],
        )
        for why, kind, until in (
            ("a lost reply", FaultKind.LOST_REPLY, 8.5),
            ("its process was well again before", FaultKind.FREEZE, 3),
        )
    ),
    # --- I18
    Plot("a count that is off", "I18", left(done(), counts={S.SUCCESS: 2})),
    Plot("a status that the history does not know", "I18", left(replace(done(), status=S.FAILED))),
    Plot("a leftover owner", "I18 I1", left(made(claim(start=False)))),
    Plot("a leftover slot", "I18", left(replace(done(), slot="k#1"))),
    Plot("a lease that was never left", "I18", left(done()), lease(1.1, None, id="a")),
    Plot(
        "a lease that was never left by somebody who froze",
        "I18",
        left(done()),
        lease(1.1, None, id="a", pid=5),
        [Fault(kind=FaultKind.FREEZE, at=1.5, until=3, pid=5)],
    ),
    Plot("a runner that left and is still there", "I18", left(runners=(runner("r1", pid=7),)), life("r1", 0, 5, pid=7)),
    Plot(
        "a runner that was killed by its name and is still there",
        "I18",
        left(runners=(runner("r1"),)),
        faults=[kill(1, owner="r1")],
    ),
    Plot("a dead runner that is still there", "I18", left(runners=(runner("r1", pid=7),)), faults=[kill(1, pid=7)]),
    Plot("a quarantined record", "I18", left(quarantined=(Quarantined(id="a", app="shop", at=0.0, why="?", raw=""),))),
    # --- I20
    Plot(
        "a recovery that took too long",
        "I20",
        left(made(claim("r1/0", 1), crashes(40), claim("r2/0", 41), ends(42))),
        faults=[kill(2, owner="r1")],
    ),
    Plot(
        "work that came back into the queue in time, and ran too late",
        "I20",
        left(made(claim("r1/0", 1), crashes(18), claim("r2/0", 41), ends(42))),
        faults=[kill(2, owner="r1")],
    ),
    Plot(
        "a recovery of what an unknown process did, that took too long",
        "I20",
        left(made(claim("r1/0", 1), crashes(40), claim("r2/0", 41), ends(42))),
        [*execution(1.2, None, id="a", pid=5, epoch=1), *execution(41.2, 41.8, id="a", pid=6, epoch=2)],
        [kill(2, pid=5)],
    ),
    Plot(
        "taken from a worker that died later",
        "I20 I15",
        left(made(claim("r1/w1", 1), crashes(2.5), claim("r1/w2", 3), ends(4))),
        life("r1", 0, None, beats=range(5)),
        [kill(10, owner="r1/w1")],
    ),
    Plot(
        "a worker whose runner took too long",
        "I20",
        left(made(claim("r1/w1", 1), crashes(9), claim("r1/w2", 9.5), ends(10))),
        faults=[kill(2, owner="r1/w1")],
    ),
    Plot(
        "no recovery at all",
        "I20 I1 I18",
        left(made(claim("r1/0", 1))),
        faults=[kill(2, owner="r1")],
    ),
    Plot(
        "taken from a runner whose heart beats",
        "I20",
        left(RERUN),
        life("r1", 0, None, beats=range(18)),
        [Fault(kind=FaultKind.CUT, at=10, until=12, owner="r1")],
    ),
]

CLEAN = [
    Plot("nothing at all", "I1", left()),
    Plot("a submit that is there and has ended", "I1", left(done(at=59)), accepted("t", "a")),
    Plot("late, but it was due late", "I1", left(done(at=99, due_at=START + 90)), accepted("t", "a")),
    Plot(
        "late, but there was an outage",
        "I1",
        left(done(at=99)),
        accepted("t", "a"),
        [Fault(kind=FaultKind.OUTAGE, at=3, until=80)],
    ),
    Plot(
        "an execution of something that cannot be known, since records tell no tokens",
        "I1",
        left(done("b")),
        execution(1, 2, token="t"),
    ),
    Plot("every way to an end", "I2", left(RERUN), faults=[kill(2, owner="r1")]),
    Plot(
        "a claim asked again gets what it had lost",
        "I2",
        left(made(claim(start=False), crashes(2), claim(start=False), crashes(2.5), claim(at=3), ends(4))),
    ),
    Plot(
        "seen twice alike",
        "I3",
        left(done(), digests={"a": ONE}),
        [saw(What.RESULT_SEEN, at, id="a", status="success", digest=ONE) for at in (3, 4)],
    ),
    Plot(
        "a zombie that works on, and is refused",
        "I4",
        left(RERUN, digests={"a": ONE}),
        [
            *life("r1", 0, 30, pid=1),
            *life("r2", 0, 30, pid=2),
            *execution(1.2, 19.9, result=2, token="t", pid=1),
            *execution(19.2, 19.8, result=1, token="t", pid=2),
            *accepted("t", "a", pid=3),
            saw(What.FENCED, 20.5, id="a", epoch=1),
        ],
        [Fault(kind=FaultKind.FREEZE, at=2, until=19.5, pid=1)],
    ),
    Plot(
        "the result of the epoch that ended it",
        "I6",
        left(RERUN, digests={"a": ONE}),
        [*execution(1.2, None, **R1), *execution(19.2, 19.8, result=1, **R2)],
        [kill(2, owner="r1", pid=1)],
    ),
    Plot(
        "told to stop, and ended by others",
        "I6",
        left(made(claim("r1/0", 1), crashes(18, last=True))),
        [saw(What.FENCED, 20, id="a", epoch=1)],
        [Fault(kind=FaultKind.FREEZE, at=2, until=19, owner="r1")],
    ),
    Plot(
        "the same error in every epoch",
        "I6",
        left(
            made(claim("r1/0", 1), crashes(18), claim("r2/0", 19), fails(20)),
            digests={"a": digest_of_error(ERROR.message)},
        ),
        [
            event
            for facts, since in ((R1, 1.2), (R2, 19.2))
            for event in (
                saw(What.EXEC_START, since, span=str(since), **facts),
                saw(
                    What.EXEC_END,
                    since + 0.5,
                    span=str(since),
                    raised=True,
                    digest=digest_of_error(ERROR.message),
                    **facts,
                ),
            )
        ],
        [kill(2, owner="r1")],
    ),
    Plot(
        "executions that cannot be told apart, one of which returned it",
        "I6",
        left(
            made(claim("r1/0", 1), crashes(18), claim("r1/0", 19), crashes(36), claim("r1/0", 37), ends(38)),
            digests={"a": ONE},
        ),
        [*execution(1.2, None, id="a"), *execution(37.2, 37.8, result=1, id="a")],
        [kill(2, owner="r1"), kill(20, owner="r1")],
    ),
    Plot(
        "an error of the engine's own",
        "I6",
        left(made(claim(), fails()), digests={"a": digest_of_error(ERROR.message)}),
        execution(1.2, 1.5, id="a", epoch=1),
    ),
    Plot(
        "an unknown submit that is not there",
        "I7",
        left(),
        [saw(What.SUBMIT_INVOKE, 0, token="t"), saw(What.SUBMIT_UNKNOWN, 1, token="t")],
    ),
    Plot(
        "an unknown submit that is there, of a client that died",
        "I7",
        left(done(), tokens={"a": "t"}),
        [saw(What.SUBMIT_INVOKE, 0, token="t", pid=9)],
        [kill(0.5, pid=9)],
    ),
    Plot(
        "a submit that was unknown, and accepted when asked again",
        "I7",
        left(done(), tokens={"a": "t"}),
        [saw(What.SUBMIT_INVOKE, 0, token="t"), saw(What.SUBMIT_UNKNOWN, 1, token="t"), *accepted("t", "a", 2)],
    ),
    Plot(
        "a refused submit that is not there",
        "I7",
        left(),
        [saw(What.SUBMIT_INVOKE, 0, token="t"), saw(What.SUBMIT_FAIL, 0, token="t")],
    ),
    Plot(
        "a submit that was refused, and unknown when asked again",
        "I7",
        left(done(), tokens={"a": "t"}),
        [
            saw(What.SUBMIT_INVOKE, 0, token="t"),
            saw(What.SUBMIT_FAIL, 0, token="t"),
            saw(What.SUBMIT_INVOKE, 1, token="t"),
            saw(What.SUBMIT_UNKNOWN, 1, token="t"),
        ],
    ),
    Plot(
        "two, one after the other, under a limit of one",
        "I8",
        left(done("a"), done("b")),
        [*lease(1.1, 1.5, id="a"), *lease(1.5, 1.9, id="b")],
    ),
    Plot(
        "a lease that was taken from a zombie",
        "I8",
        left(RERUN),
        [*lease(1.1, 25, id="a", epoch=1, pid=1), *lease(19.2, 19.8, id="a", epoch=2, pid=2)],
        [Fault(kind=FaultKind.FREEZE, at=2, until=19.5, owner="r1")],
    ),
    Plot(
        "a lease that was taken from a zombie whose epoch nobody told",
        "I8",
        left(RERUN),
        [
            *life("r1", 0, 40, pid=1),
            *life("r2", 0, 40, pid=2),
            *lease(1.1, 25, id="a", pid=1),
            *lease(19.2, 19.8, id="a", pid=2),
        ],
        [Fault(kind=FaultKind.FREEZE, at=2, until=19.5, pid=1)],
    ),
    Plot(
        "a lease that ended with its process",
        "I8",
        left(RERUN),
        [*lease(1.1, None, id="a", pid=1), *lease(19.2, 19.8, id="a", pid=2)],
        [kill(2, owner="r1", pid=1)],
    ),
    Plot(
        "a full house, and others that wait",
        "I8",
        left(*(done(id, at=90) for id in "abc")),
        [*lease(1.1, 30, id="a", limit=2), *lease(1.2, 20, id="b", limit=2), *lease(21, 40, id="c", limit=2)],
        bounds=Bounds(final_seconds=100),
    ),
    Plot(
        "a free slot that nobody promised to fill",
        "I8",
        left(done("a"), done("b", at=9)),
        [*lease(1.1, 1.8, id="a"), *lease(8, 8.5, id="b")],
        bounds=Bounds(slot_seconds=None),
    ),
    Plot(
        "a free slot, and work that was tried again later",
        "I8",
        left(done("a"), done("b", at=21, due_at=START + 20)),
        [*lease(1.1, 1.8, id="a"), *lease(8, 8.5, id="b"), *lease(20.5, 20.6, id="b")],
    ),
    Plot(
        "a free slot, and work that was cancelled before",
        "I8",
        left(done("a"), made(walks(S.CANCELLED, at=20), id="b", limit_key="k")),
        [*lease(1.1, 1.8, id="a"), saw(What.SUBMIT_INVOKE, 30, token="later")],
    ),
    Plot(
        "a free slot while the database is away",
        "I8",
        left(done("a"), done("b", at=31)),
        [*lease(1.1, 1.8, id="a"), *lease(30, 30.5, id="b")],
        [Fault(kind=FaultKind.OUTAGE, at=2, until=15)],
    ),
    Plot(
        "declared retries",
        "I14",
        left(made(claim(), walks(S.RETRY, at=2), claim(at=3), ends(4))),
        bounds=Bounds(retries={"shop:send": 1}),
    ),
    Plot(
        "work that was marked as running ahead and given back",
        "I14",
        left(
            made(
                claim(),
                hands_back(2),
                claim("r2/0", 3),
                ends(4),
            )
        ),
    ),
    Plot(
        "a crash cap that is just kept, and begins anew after a retry",
        "I14",
        left(
            made(
                *(claim("r1/0", 1), crashes(1.5), claim("r1/0", 2), walks(S.RETRY, at=2.5)),
                *(claim("r1/0", 3), crashes(3.5), claim("r1/0", 4), crashes(4.5, last=True)),
            )
        ),
        faults=[kill(at, owner="r1") for at in (1.2, 3.2, 4.2)],
        bounds=Bounds(retries={"shop:send": 1}, crash_cap=1),
    ),
    Plot(
        "at most once, and it crashed",
        "I14",
        left(made(claim("r1/0", 1), crashes(18, last=True), at_most_once=True)),
        faults=[kill(2, owner="r1")],
    ),
    Plot("one more execution for one fault", "I15", left(RERUN), faults=[kill(2, owner="r1")]),
    Plot(
        "one more execution for a fault of which only the pid is known",
        "I15",
        left(RERUN),
        [*execution(1.2, None, id="a", pid=5), *execution(19.2, 19.8, id="a", pid=6)],
        [kill(2, pid=5)],
    ),
    Plot(
        "one more execution for a fault of that invocation",
        "I15",
        left(RERUN),
        faults=[Fault(kind=FaultKind.CUT, at=30, ids=("a",))],
    ),
    Plot(
        "work that expired",
        "I15",
        left(done("a"), made(walks(S.FAILED, at=5), id="b")),
        execution(1.2, 1.5, id="a"),
    ),
    Plot(
        "one more execution for the death of the process that its worker was",
        "I15",
        left(made(claim("r1/w1", 1), crashes(2.5), claim("r1/w2", 3), ends(4)), runners=(WORKERS,)),
        faults=[kill(2, pid=71)],
    ),
    Plot(
        "a runner that was told to stop",
        "I15",
        left(made(claim("r1/0", 1), walks(S.KILLED, S.REROUTED, at=5), claim("r2/0", 6), ends(7))),
        faults=[Fault(kind=FaultKind.STOP, at=2, until=5, owner="r1")],
    ),
    Plot("a service again and again", "I16", left(), [*service(1, 5, pid=1), *service(5, 6, pid=2)]),
    Plot(
        "a service whose runner froze and was superseded",
        "I16",
        left(),
        [*service(1, 9, pid=1, epoch=3), *service(8, 10, pid=2, epoch=4)],
        [Fault(kind=FaultKind.FREEZE, at=2, until=8.5, pid=1)],
    ),
    Plot(
        "a service whose runner, known by name, was cut off",
        "I16",
        left(),
        [*service(1, 9, pid=1, owner="r1"), *service(8, 10, pid=2, owner="r2")],
        [Fault(kind=FaultKind.CUT, at=2, until=8.5, owner="r1")],
    ),
    Plot(
        "a service whose runner was killed",
        "I16",
        left(),
        [*service(1, None, pid=1), *service(8, 10, pid=2)],
        [kill(2, pid=1)],
    ),
    Plot(
        "a service that is served while somebody lives",
        "I16",
        left(),
        [*life("r1", 0, 30), *service(1, 2), *service(20, 21), *life("r2", 100, 130), *service(110, 120)],
        bounds=Bounds(service_seconds={"sweep": 10}),
    ),
    Plot(
        "counts that agree, and a runner that lives",
        "I18",
        left(done(), counts={S.SUCCESS: 1}, runners=(runner("r1", pid=1),)),
        life("r1", 0, None),
    ),
    Plot(
        "a runner that froze, and one beside another that left",
        "I18",
        left(runners=(runner("r1", pid=7),)),
        life("r2", 0, 5, pid=8),
        [Fault(kind=FaultKind.FREEZE, at=2, until=3, pid=7)],
    ),
    Plot(
        "a recovery in time, by its runner's silence",
        "I20",
        left(RERUN),
        life("r1", 0, None, beats=(0, 2, 30)),
        [kill(2.5, owner="r1")],
    ),
    Plot(
        "a recovery that had to wait for the database",
        "I20",
        left(made(claim("r1/0", 1), crashes(40), claim("r2/0", 41), ends(42))),
        faults=[kill(2, owner="r1"), Fault(kind=FaultKind.OUTAGE, at=3, until=30)],
    ),
    Plot(
        "a freeze that nobody noticed",
        "I20",
        left(done(at=50)),
        faults=[Fault(kind=FaultKind.FREEZE, at=2, until=7, owner="r1")],
    ),
    Plot(
        "long work of others, and what the dead one had done before",
        "I20",
        left(
            RERUN,
            made(claim("r2/0", 1), ends(50), id="b"),
            made(claim("r1/0", 1), walks(S.RETRY, at=1.5), claim("r2/0", 50), ends(51), id="c"),
        ),
        faults=[kill(2, owner="r1")],
        bounds=Bounds(retries={"shop:send": 1}),
    ),
    Plot(
        "a worker that its living runner gave up at once",
        "I20",
        left(made(claim("r1/w1", 1), crashes(2.5), claim("r1/w2", 3), ends(4))),
        life("r1", 0, None, beats=range(5)),
        [kill(2, owner="r1/w1")],
    ),
    Plot(
        "one slow recovery of a hundred and fifty",
        "I20",
        left(
            *(made(claim("r1/0", 1), crashes(18), claim("r2/0", 19), ends(20), id=f"i{n}") for n in range(150)),
            made(claim("r1/0", 1), crashes(40), claim("r2/0", 41), ends(42), id="slow"),
        ),
        faults=[kill(2, owner="r1")],
    ),
    Plot(
        "times of a clock that was set tell nothing",
        "I20",
        left(made(claim("r1/0", 1), crashes(4000), claim("r2/0", 4001), ends(4002))),
        faults=[kill(2, owner="r1"), Fault(kind=FaultKind.CLOCK, at=1)],
    ),
]


@pytest.mark.parametrize("plot", PLANTED, ids=lambda plot: f"{plot.breaks.split()[0]} {plot.name}")
def test_a_planted_violation_is_found_under_its_number(plot: Plot) -> None:
    found = plot.judged()
    assert {violation.invariant for violation in found} == set(plot.breaks.split()), "\n".join(map(str, found))


@pytest.mark.parametrize("plot", CLEAN, ids=lambda plot: f"{plot.breaks} {plot.name}")
def test_a_close_call_is_none(plot: Plot) -> None:
    found = plot.judged()
    assert found == [], "\n".join(map(str, found))


NUMBERS = {"I1", "I2", "I3", "I4", "I6", "I7", "I8", "I14", "I15", "I16", "I18", "I20"}  # I17 is about the table


def test_every_invariant_has_a_planted_violation_and_a_close_call() -> None:
    assert {plot.breaks.split()[0] for plot in PLANTED} == NUMBERS
    assert {plot.breaks for plot in CLEAN} == NUMBERS


def test_every_invariant_is_explained() -> None:
    told = set(re.findall(r"^(I\d+) ", checker.__doc__ or "", re.MULTILINE))
    assert told == NUMBERS | {"I17"}


@pytest.mark.parametrize("judge", checker.CHECKS, ids=lambda judge: judge.__name__)
def test_every_check_finds_something(judge: Callable[[Case], Iterator[Violation]]) -> None:
    if judge is not rest.table_has_no_dead_end:
        assert any(list(judge(plot.case())) for plot in PLANTED)


def test_a_violation_shows_the_least_that_proves_it() -> None:
    (two, *_) = [plot for plot in PLANTED if plot.name == "two under a limit of one"]
    (found,) = two.judged()
    assert found.id == "b"
    assert [event.at for event in found.witness if isinstance(event, Event)] == [1.1, 1.5]
    lines = str(found).splitlines()
    assert lines[0] == "I8 b: 2 hold a slot of 'k' at once, and its limit is 1"
    assert lines[1].strip().startswith("lease.enter at=1.1 pid=1 id=a")
    (life_after, *_) = [plot for plot in PLANTED if plot.name == "a life after the end"]
    (found,) = life_after.judged()
    assert [entry.version for entry in found.witness if isinstance(entry, HistoryEntry)] == [4, 5]
    assert "history 5 failed" in str(found)
    assert "fault kind=kill at=2" in str(Violation("I20", None, "…", (kill(2, owner="r1"),)))


# --- I17: the table


def test_the_table_has_no_dead_end() -> None:
    assert list(dead_ends()) == []
    everywhere = {who: frozenset(status for status, rule in TABLE.items() if rule.rescued_by is who) for who in Rescuer}
    assert list(dead_ends(sweeps=everywhere)) == []


@pytest.mark.parametrize(
    ("status", "fields", "stuck"),
    [
        (S.RUNNING, {"rescued_by": None}, {S.RUNNING}),
        (S.RUNNING, {"next": TABLE[S.RUNNING].next - {S.RUNNING_RECOVERY}}, {S.RUNNING}),
        (S.RUNNING_RECOVERY, {"overrides_ownership": False}, {S.RUNNING, S.PAUSED, S.RESUMED, S.CANCELLING}),
        (S.SUSPENDED, {"next": frozenset()}, {S.SUSPENDED}),
        (S.RETRY, {"available_for_run": False}, {S.RETRY}),
        (S.PENDING_RECOVERY, {"next": frozenset({S.PENDING_RECOVERY})}, {S.PENDING, S.PENDING_RECOVERY}),
    ],
)
def test_a_dead_end_is_found(status: Status, fields: dict[str, Any], stuck: set[Status]) -> None:
    table = dict(TABLE) | {status: TABLE[status]._replace(**fields)}
    found = list(dead_ends(table))
    assert {violation.invariant for violation in found} == {"I17"}
    assert {Status(violation.sentence.split()[0]) for violation in found} == stuck


def test_a_duty_that_skips_one_status_is_a_dead_end() -> None:
    sweeps = {
        who: frozenset(s for s, rule in TABLE.items() if rule.rescued_by is who and s is not S.PAUSED)
        for who in Rescuer
    }
    (found,) = dead_ends(sweeps=sweeps)
    assert found.sentence.startswith("paused ")


def test_a_status_without_owner_that_only_an_owner_may_enter_is_no_way_out() -> None:
    """Even if the table had such an edge, nobody could take it once the owner is dead."""
    rule = Rule("odd", frozenset({S.RUNNING}), releases_ownership=True, rescued_by=Rescuer.WAKE_PARKED)
    (found,) = dead_ends(dict(TABLE) | {S.PARKED: rule})
    assert found.sentence.startswith("parked ")


# --- what the real changes write is legal


class Histories(RuleBasedStateMachine):
    """Named changes by fresh and by stale owners, with operation ids that collide, on the memory store."""

    OPERATIONS = st.sampled_from([f"op{n}" for n in range(20)]) | st.uuids().map(str)
    IDS = st.sampled_from("abc")

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock(START)
        self.store = MemoryStore(self.clock)
        self.seen: list[InvocationRecord] = []
        self.events: list[Event] = []

    @rule(id=IDS, operation=OPERATIONS)
    def insert(self, id: str, operation: str) -> None:
        record = invocation(id, operation=operation)
        asyncio.run(self.store.insert([record]))
        self.seen.append(record)

    @rule(owner=st.sampled_from(["r1/0", "r2/0"]), operation=OPERATIONS, start=st.booleans(), again=st.booleans())
    def claim(self, **fields: Any) -> None:
        claim = Claim(app="shop", lanes=(LANE,), limit=2, at=self.clock.now(), **fields)
        self.seen += asyncio.run(self.store.claim(claim)).records

    @rule(data=st.data(), name=st.sampled_from(sorted(BY_NAME)), operation=OPERATIONS, fresh=st.booleans())
    def change(self, data: st.DataObject, name: str, operation: str, fresh: bool) -> None:
        if not self.seen:
            return
        record = data.draw(st.sampled_from(self.seen))
        if fresh:
            (current,) = asyncio.run(self.store.get("shop", [record.id]))
            record = current or record
        _, build = BY_NAME[name]
        change = build(replace(record, epoch=record.epoch + data.draw(st.sampled_from([0, 0, 0, -1, 1]))))
        asyncio.run(self.store.apply([replace(change, operation=operation, at=self.clock.now())]))

    @rule()
    def somebody_looks(self) -> None:
        """Whatever a client is shown once has to hold for ever."""
        self.clock.advance(1)
        dump = asyncio.run(checker.dump(self.store, "shop", clock=self.clock))
        for record in dump.records:
            if TABLE[record.status].is_final:
                facts = {"id": record.id, "status": record.status, "digest": dump.digests.get(record.id)}
                self.events.append(saw(What.RESULT_SEEN, self.clock.monotonic(), **facts))

    @invariant()
    def histories_are_legal(self) -> None:
        dump = asyncio.run(checker.dump(self.store, "shop", clock=self.clock))
        found = check(dump, Ledgers(tuple(self.events)))
        wrong = [violation for violation in found if violation.invariant in ("I2", "I3", "I4", "I6", "I14")]
        assert wrong == [], "\n".join(map(str, wrong))


class TestHistoriesAreLegal(Histories.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(stateful_step_count=30)


# --- planted bugs in a store, found by what witnesses saw


class NoFencing(MemoryStore):
    """Takes a write whatever its epoch."""

    def _apply(self, change: Change) -> Verdict:
        record = self._records.get((change.app, change.id))
        if record is None:
            return MISSING
        if record.status not in change.sources:
            return Lost(record.status, record.owner, record.epoch)
        self._put(apply_to(change, record))
        return APPLIED


class Forgetful(MemoryStore):
    """Says that it has stored what it has not."""

    def _insert(self, record: InvocationRecord) -> bool:
        return True


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        pytest.param(MemoryStore, set(), id="no bug"),
        pytest.param(NoFencing, {"I6"}, id="no fencing"),
        pytest.param(Forgetful, {"I1"}, id="forgetful"),
    ],
)
def test_a_zombie_on_a_store_with_a_planted_bug(tmp_path: Path, kind: type[MemoryStore], broken: set[str]) -> None:
    """r1 freezes while it runs; r2 takes over; r1 wakes up, and its end comes before that of r2."""
    clock = FakeClock(START)
    store, log = kind(clock), Witness(tmp_path / "all.jsonl", clock=clock)

    async def submit() -> None:
        with log.submission("t") as accepted_as:
            await store.insert([invocation("a", arguments=b"\x92\x91\xa1t\x80")])
            accepted_as("a")

    async def executed(owner: str, value: int, meanwhile: Callable[[], Any]) -> Change | None:
        got = (await store.claim(wish(f"claim {owner}", owner=owner, at=clock.now()))).records
        if not got:
            return None
        (record,) = got
        with log.execution("t", epoch=record.epoch) as run:
            await meanwhile()
            run.returns(value)
            clock.advance(1)
        result = bytes([value])
        return changes.completed(record, result=result, operation=f"end {owner}", at=clock.now())

    async def story() -> Dump:
        await submit()
        later: list[Change | None] = []

        async def frozen() -> None:
            clock.advance(20)
            (record,) = await store.get("shop", ["a"])
            assert record is not None
            why = changes.recovered(record, operation="recover", at=clock.now(), why="silent")
            await store.apply([why])
            later.append(await executed("r2/0", 2, awake))

        async def awake() -> None:
            clock.advance(1)

        first = await executed("r1/0", 1, frozen)
        for change in [first, *later]:
            clock.advance(1)
            if change is not None:
                verdicts = await store.apply([change])
                if verdicts != [APPLIED]:
                    log.fenced("a", epoch=change.epoch or 0)
        return await checker.dump(store, "shop", clock=clock)

    left_behind = asyncio.run(story())
    fault = Fault(kind=FaultKind.FREEZE, at=2, until=21, owner="r1")
    found = check(left_behind, witness.read(tmp_path), Faults((fault,)))
    assert {violation.invariant for violation in found} == broken, "\n".join(map(str, found))


# --- the whole way: an app, its runner, and the dump through the contract


@pytest.mark.slow
def test_an_ordinary_run_is_clean(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    app = App(url, name="shop")
    log = Witness(tmp_path / "run.jsonl")

    @app.task(name="work")
    def work(token: str, size: int) -> str:
        with log.execution(token) as run:
            if token == "unlucky":
                raise ValueError("no luck")
            return run.returns(f"{token} {run.stamp} " + "x" * size)

    with app, app.runner(concurrency=4):
        submitted: dict[str, Invocation[str]] = {}
        for token in [*map(str, range(20)), "unlucky"]:
            with log.submission(token) as accepted_as:
                submitted[token] = work.submit(token, 20_000 * len(submitted))  # some lie apart from their records
                accepted_as(submitted[token].id)
        for _ in range(2):
            for token, handle in submitted.items():
                try:
                    log.saw(handle.id, result=handle.result(timeout=60))
                except ValueError as error:
                    log.saw(token=token, error=error)

    async def look() -> Dump:
        store = open_store(url, clock=SystemClock())
        await store.open()
        try:
            return await checker.dump(store, "shop")
        finally:
            await store.close()

    there = asyncio.run(look())
    assert len(there.records) == len(there.tokens) == len(there.digests) == 21
    assert any(record.payloads for record in there.records)
    ledgers = witness.read(tmp_path)
    assert len(ledgers.of(What.RESULT_SEEN)) == 42
    assert check(there, ledgers) == []
    forged = replace(there, digests={**there.digests, submitted["3"].id: ONE})
    assert {violation.invariant for violation in check(forged, ledgers)} == {"I3", "I6"}


def test_a_dump_reads_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.testing.checker.evidence._PAGE", 3)

    async def story() -> Dump:
        store = MemoryStore(FakeClock(START))
        await store.insert([invocation(f"i{n}") for n in range(10)] + [invocation("foreign", app="other")])
        await store.enrol(runner("r1"))
        return await checker.dump(store, "shop", clock=FakeClock(START), token_of=lambda record: record.id[1:])

    there = asyncio.run(story())
    assert [record.id for record in there.records] == [f"i{n}" for n in range(10)]
    assert there.counts == {S.REGISTERED: 10}
    assert [entry.id for entry in there.runners] == ["r1"]
    assert there.tokens["i7"] == "7"
    assert there.offset == START


# --- arithmetic

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda ab: (min(ab), max(ab))), max_size=6)


@given(span=st.tuples(st.integers(0, 30), st.integers(0, 30)), windows=SPANS)
def test_what_is_left_outside_of_windows(span: tuple[float, float], windows: list[tuple[float, float]]) -> None:
    joined, kept = union(windows), without(span, union(windows))
    assert all(before[1] < after[0] for before, after in pairwise(joined))
    for second in range(30):
        middle = second + 0.5
        in_window = any(a < middle < b for a, b in windows)
        assert any(a < middle < b for a, b in joined) is in_window
        assert any(a < middle < b for a, b in kept) is (span[0] < middle < span[1] and not in_window)
