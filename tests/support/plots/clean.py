"""Runs in which nothing went wrong, though it may look so."""

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
    WORKERS,
    Plot,
    S,
    accepted,
    amends,
    at_service,
    claim,
    crashes,
    done,
    ends,
    execution,
    fails,
    hands_back,
    kill,
    lease,
    left,
    life,
    made,
    saw,
    service,
    walks,
)
from tests.support.witness import What, digest_of_error

from holdfast.model.records import Terms
from holdfast.testing.samples import ERROR, START, runner

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
        "a key that several clients were given the same invocation for",
        "I7",
        left(done("a", key="k"), tokens={"a": "t"}),
        [*accepted("t", "a", idempotency_key="k"), *accepted("u", "a", 3, idempotency_key="k")],
    ),
    Plot(
        "a key whose time was over",
        "I7",
        left(
            done("a", terms=Terms(key_seconds=10.0)),
            made(claim(at=14), ends(15), id="b", key="k", created_at=START + 12.5, due_at=START + 12.5),
        ),
        [*accepted("t", "a", idempotency_key="k"), *accepted("u", "b", 12.6, idempotency_key="k")],
    ),
    Plot(
        "the same key of another task",
        "I7",
        left(done("a", key="k"), done("b", key="k", task="shop:other")),
        [*accepted("t", "a", idempotency_key="k"), *accepted("u", "b", 1, idempotency_key="k")],
    ),
    Plot(
        "a call that was amended so often that not every line is there",
        "I2",
        left(made(*[amends(n / 100) for n in range(30)], claim(), ends())),
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
        "a lease that was taken from a zombie by somebody whose clock is ahead",
        "I8",
        left(RERUN, made(claim("r2/0", 17.7), ends(18), id="b")),
        [*lease(1.1, 25, id="a", epoch=1, pid=1), *lease(17.8, 17.9, id="b", epoch=1, pid=2)],
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
        "a service whose slot was over at once because the clock was set",
        "I16",
        left(),
        [*service(1, 9, pid=1), *service(8, 10, pid=2)],
        [Fault(kind=FaultKind.CLOCK, at=7)],
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
        "payloads that are wanted, or not old, and a service that goes on",
        "I18",
        left(
            replace(done(), arguments=LARGE),
            stock=Stock((Kept(DIGEST, 0.0, 2), Kept("young", 99_999.0)), (KeptPiece(DIGEST, 1, 0.0),)),
            at=100_000.0,
            runners=(runner("r1", pid=1),),
            executions=(at_service("r1"),),
        ),
        life("r2", 0, 50, pid=2),
    ),
    Plot(
        "a service of somebody who has gone, and nobody was there to end it",
        "I18",
        left(executions=(at_service("r1"),)),
        [*life("r1", 0, 5), *life("r2", 0, 8, pid=2)],
    ),
    Plot(
        "a recovery in time, of work that then had to wait for a slot",
        "I20",
        left(
            made(
                claim("r1/0", 1),
                crashes(18),
                walks(S.CONCURRENCY_CONTROLLED, at=19),
                walks(S.REROUTED, at=50),
                claim("r2/0", 50),
                ends(51),
            )
        ),
        faults=[kill(2, owner="r1")],
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
