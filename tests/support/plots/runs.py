"""Runs of workflows: their logs, their steps, their children. Some in which something went wrong, and close calls."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from tests.support.checker import LogLine
from tests.support.checker.evidence import Dump
from tests.support.plots.material import (
    ONE,
    RERUN,
    Plot,
    claim,
    done,
    fails,
    kill,
    left,
    made,
    saw,
)
from tests.support.witness import Event, What, digest_of
from tests.workflows.lives import made_step

from holdfast.codec import Codec
from holdfast.ids import InvocationId
from holdfast.model.records import InvocationRecord, ReplyTo, RunState
from holdfast.testing.samples import ERROR, START
from holdfast.workflows import events as e

_CODEC = Codec()
CALL = _CODEC.encode_call((7,), {})


def line(position: int, kind: str, call: str = "charge#1", *, epoch: int = 1, **facts: Any) -> LogLine:
    digest = ONE if kind == e.STEP_COMPLETED else None
    about: dict[str, Any] = {"data": _CODEC.encode(1)} if kind == e.STEP_COMPLETED else {}
    if kind == e.STEP_CREATED:
        about = {"name": call.partition("#")[0], "data": CALL}
    event = e.Event(type=kind, at=START + position, call=call, **(about | facts))
    return LogLine(position=position, epoch=epoch, event=event, digest=digest)


def step(first: int, call: str = "charge#1", *, epoch: int = 1) -> list[LogLine]:
    kinds = (e.STEP_CREATED, e.STEP_STARTED, e.STEP_COMPLETED)
    return [line(first + number, kind, call, epoch=epoch) for number, kind in enumerate(kinds)]


def ran(
    since: float = 1.2, until: float | None = 1.5, *, epoch: int = 1, result: object = 1, **facts: Any
) -> list[Event]:
    given = {"id": "a", "step": "charge#1", "attempt": 1, "epoch": epoch, "span": f"step {since}"} | facts
    start = saw(What.STEP_START, since, **given)
    return [start] if until is None else [start, saw(What.STEP_END, until, **given, digest=digest_of(result))]


def as_run(record: InvocationRecord, **facts: Any) -> InvocationRecord:
    return replace(record, run=RunState(started_at=START, **facts), arguments=_CODEC.encode_call((), {}))


def child(record: InvocationRecord, call: str = "invoice#1", run: str = "a") -> InvocationRecord:
    return replace(record, reply_to=ReplyTo(run=InvocationId(run), call=call))


def logged(*lines: LogLine, runs: tuple[InvocationRecord, ...] = (), **facts: Any) -> Dump:
    return left(*(runs or (as_run(done()),)), logs={"a": lines}, **facts)


INVOICE: dict[str, Any] = {"child": "b", "name": "invoice"}
CREATED = line(1, e.STEP_CREATED, "invoice#1", **INVOICE)
TOLD: dict[str, Any] = {"entry": "child:b"}
COMPLETED = line(2, e.STEP_COMPLETED, "invoice#1", **TOLD)
FAILED = line(2, e.STEP_FAILED, "invoice#1", error=ERROR, **TOLD)
RUN, CHILD = as_run(done()), child(done("b"))
RERUN_RUN = as_run(RERUN)
DIED = [kill(2, owner="r1")]


async def _charge(number: int) -> int:
    raise AssertionError("the log answers for it")


charge = made_step(_charge, name="charge")


async def body() -> int:
    return int(await charge(7))


async def body_with_other_arguments() -> int:
    return int(await charge(8))


async def body_with_another_result() -> int:
    return int(await charge(7)) + 1


async def body_with_one_more_step() -> int:
    return int(await charge(7)) + int(await charge(7))


async def body_with_one_step_less() -> int:
    return 1


async def body_that_raises() -> int:
    raise ValueError(str(await charge(7)))


def replayed(name: str, breaks: str, body: Any, *, record: InvocationRecord = RUN) -> Plot:
    lines = step(1)
    lines[0] = replace(lines[0], event=replace(lines[0].event, code="3.11 abc"))
    return Plot(name, breaks, logged(*lines, runs=(record,), digests={"a": ONE}), ran(), bodies={record.task: body})


PLANTED = [
    # --- I5
    Plot("a position that is missing", "I5", logged(*step(1)[:1], *step(5)[2:])),
    Plot(
        "an owner that writes after its successor",
        "I5",
        logged(line(1, e.TAKEOVER, "", epoch=2), *step(2), runs=(RERUN_RUN,)),
        ran(),
        faults=DIED,
    ),
    Plot("a step that ended twice", "I5", logged(*step(1), line(4, e.STEP_FAILED)), ran()),
    Plot(
        "a step that ended before it was created",
        "I5",
        logged(line(1, e.STEP_COMPLETED), line(2, e.STEP_CREATED)),
        ran(),
    ),
    Plot(
        "a recorded step that runs again",
        "I5",
        logged(*step(1), line(4, e.TAKEOVER, "", epoch=2), runs=(RERUN_RUN,)),
        [*ran(), *ran(19.2, 19.5, epoch=2)],
        faults=DIED,
    ),
    Plot(
        "a recorded attempt that is made again",
        "I5",
        logged(
            line(1, e.STEP_CREATED),
            line(2, e.STEP_RETRYING, attempt=1),
            line(3, e.TAKEOVER, "", epoch=2),
            line(4, e.STEP_COMPLETED, epoch=2),
            runs=(RERUN_RUN,),
        ),
        [*ran(raised=True), *ran(19.2, 19.5, epoch=2)],
        faults=DIED,
    ),
    Plot("a step that runs twice in one epoch", "I5", logged(*step(1)), [*ran(), *ran(1.6, 1.7)]),
    Plot("a step that was recorded before it ran", "I5", logged(*step(1)), ran(until=None)),
    Plot("a result that no execution returned", "I5", logged(*step(1)), ran(result=2)),
    Plot(
        "a result that a predecessor's execution returned",
        "I5",
        logged(line(1, e.TAKEOVER, "", epoch=2), *step(2, epoch=2), runs=(RERUN_RUN,)),
        ran(),
        faults=DIED,
    ),
    # --- I13
    Plot("a child that is not there", "I13", logged(CREATED, COMPLETED)),
    Plot("a child whose run is not there", "I13", left(child(done("b")))),
    Plot("a call with two children", "I13", logged(CREATED, COMPLETED, runs=(RUN, CHILD, child(done("c"))))),
    Plot("a child that its run does not know", "I13", logged(runs=(RUN, CHILD))),
    Plot("a child that outlives its run", "I13 I1 I18", logged(CREATED, runs=(RUN, child(made(claim(), id="b"))))),
    Plot("a failed child that succeeded", "I13", logged(CREATED, FAILED, runs=(RUN, CHILD))),
    Plot(
        "a child that failed and was taken for done",
        "I13",
        logged(CREATED, COMPLETED, runs=(RUN, child(made(claim(), fails(), id="b")))),
    ),
    Plot(
        "another result than the child's",
        "I13",
        logged(CREATED, COMPLETED, runs=(RUN, CHILD), digests={"b": digest_of(2)}),
    ),
    Plot(
        "the end of a child that has not ended",
        "I13 I1 I18",
        logged(CREATED, COMPLETED, runs=(as_run(made(claim())), child(made(claim(), id="b")))),
    ),
    # --- I19
    replayed("other arguments", "I19", body_with_other_arguments),
    replayed("another result", "I19", body_with_another_result),
    replayed("a step more", "I19", body_with_one_more_step),
    replayed("a step less", "I19", body_with_one_step_less),
    replayed("an error instead of a result", "I19", body_that_raises),
    replayed("a result instead of an error", "I19", body, record=as_run(made(claim(), fails()))),
]

CLEAN = [
    Plot("a step that ran and was recorded", "I5", logged(*step(1)), ran()),
    Plot(
        "a step that ran again, since its end was not recorded",
        "I5",
        logged(line(1, e.TAKEOVER, "", epoch=2), *step(2, epoch=2), runs=(RERUN_RUN,)),
        [*ran(until=None), *ran(19.2, 19.5, epoch=2)],
        faults=DIED,
    ),
    Plot(
        "a step of a zombie that ran on, and was recorded by its successor",
        "I5",
        logged(line(1, e.TAKEOVER, "", epoch=2), *step(2, epoch=2), runs=(RERUN_RUN,)),
        [*ran(until=30.0), *ran(19.2, 19.5, epoch=2)],
        faults=DIED,
    ),
    Plot(
        "a second attempt in a later epoch",
        "I5",
        logged(
            line(1, e.STEP_CREATED),
            line(2, e.STEP_RETRYING, attempt=1),
            line(3, e.TAKEOVER, "", epoch=2),
            line(4, e.STEP_COMPLETED, epoch=2, attempt=2),
            runs=(RERUN_RUN,),
        ),
        [*ran(raised=True), *ran(19.2, 19.5, epoch=2, attempt=2)],
        faults=DIED,
    ),
    Plot(
        "the same call in another generation",
        "I5",
        logged(
            *step(1),
            *[replace(each, generation=1) for each in step(1)],
            runs=(as_run(done(), generation=1),),
        ),
        [*ran(), *ran(1.6, 1.7, step="1/charge#1")],
    ),
    Plot("a step that nobody watches", "I5", logged(*step(1))),
    Plot("a child that a run has recorded", "I13", logged(CREATED, COMPLETED, runs=(RUN, CHILD), digests={"b": ONE})),
    Plot("a child that nobody waits for", "I13", logged(CREATED, runs=(RUN, CHILD))),
    Plot(
        "a child that a run had submitted when it failed",
        "I13",
        logged(runs=(as_run(made(claim(), fails())), CHILD)),
    ),
    Plot("a child that was refused", "I13", logged(CREATED, line(2, e.STEP_FAILED, "invoice#1", error=ERROR))),
    replayed("a log that replays", "I19", body),
    replayed(
        "a run that was ended from outside", "I19", body_with_one_more_step, record=as_run(made(claim(), fails()))
    ),
    Plot("a run whose code is not at hand", "I19", logged(*step(1)), ran()),
]
