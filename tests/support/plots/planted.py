"""Runs in which something went wrong, and the invariants that they break."""

from __future__ import annotations

from msgspec.structs import replace
from tests.support.checker import Bounds, Fault, FaultKind
from tests.support.checker.stock import Kept, KeptPiece, Stock
from tests.support.plots.material import (
    DIGEST,
    LARGE,
    ONE,
    R1,
    R2,
    RERUN,
    Plot,
    S,
    accepted,
    and_line,
    at_service,
    claim,
    crashes,
    done,
    ends,
    execution,
    fails,
    hands_back,
    kill,
    later_versions,
    lease,
    left,
    life,
    made,
    saw,
    service,
    walks,
    with_line,
    without_lines,
)
from tests.support.witness import What, digest_of, digest_of_error

from holdfast.model.records import Quarantined, Terms
from holdfast.testing.samples import ERROR, START, invocation, runner

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
    Plot("an end by a stranger", "I4", left(with_line(done(), -1, by="r2"))),
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
    Plot(
        "a key that was given to two",
        "I7",
        left(done("a"), done("b", created_at=START + 1)),
        [*accepted("t", "a", idempotency_key="k"), *accepted("u", "b", 1, idempotency_key="k")],
    ),
    Plot(
        "a key that was given away a moment too early",
        "I7",
        left(
            done("a", terms=Terms(key_seconds=10.0)),
            made(claim(at=12), ends(13), id="b", created_at=START + 11, due_at=START + 11),
        ),
        [*accepted("t", "a", idempotency_key="k"), *accepted("u", "b", 11, idempotency_key="k")],
    ),
    Plot("two that have one key", "I7", left(done("a", key="k"), done("b", key="k"))),
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
    Plot(
        "a lease that was given away before it was taken from its owner",
        "I8",
        left(RERUN, made(claim("r2/0", 16.7), ends(17), id="b")),
        [*lease(1.1, 25, id="a", epoch=1, pid=1), *lease(16.8, 16.9, id="b", epoch=1, pid=2)],
        [Fault(kind=FaultKind.FREEZE, at=2, until=19.5, owner="r1")],
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
        "two executions of a service, long after a clock was set",
        "I16",
        left(),
        [*service(3, 5, pid=1), *service(4, 6, pid=2)],
        [Fault(kind=FaultKind.CLOCK, at=2)],
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
    Plot("a payload that nobody wants", "I18", left(done(), stock=Stock((Kept("d", 0.0),)), at=100_000.0)),
    Plot("a piece without its payload", "I18", left(done(), stock=Stock((), (KeptPiece("d", 1, 0.0),)), at=100_000.0)),
    Plot("a payload that is gone", "I18", left(replace(done(), arguments=LARGE), stock=Stock())),
    Plot(
        "a payload that lacks a piece",
        "I18",
        left(replace(done(), arguments=LARGE), stock=Stock((Kept(DIGEST, 0.0, 3),), (KeptPiece(DIGEST, 1, 0.0),))),
    ),
    Plot(
        "a service of somebody who has gone",
        "I18",
        left(executions=(at_service("r1"),)),
        [*life("r1", 0, 5), *life("r2", 0, 50, pid=2)],
    ),
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
        "taken from a runner that sends heartbeats",
        "I20",
        left(RERUN),
        life("r1", 0, None, beats=range(18)),
        [Fault(kind=FaultKind.CUT, at=10, until=12, owner="r1")],
    ),
]
