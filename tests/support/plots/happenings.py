"""Schedules and triggers: runs in which they did what they promise, and runs in which they did not."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from tests.support.checker import Dump
from tests.support.plots.material import Plot, claim, ends, fails, left, made, saw
from tests.support.witness import What

from holdfast.clock import moment
from holdfast.model.changes import apply_to, change_of
from holdfast.model.records import InvocationRecord, Origin, Source
from holdfast.model.status import Status
from holdfast.schedules import every
from holdfast.schedules.records import CatchUp, Overlap, Progress, Rules, ScheduleRecord, StoredCall
from holdfast.schedules.rules import invocation_id
from holdfast.schedules.service import called
from holdfast.testing.samples import ERROR, START
from holdfast.triggers import joins
from holdfast.triggers.events import EventRecord
from holdfast.triggers.joins import Happened, Join
from holdfast.triggers.rules import DATA, OnEnd, OnEvent, TriggerRecord

NOTHING = DATA.encode_call((), {})
NIGHTLY = ScheduleRecord(
    app="shop",
    name="nightly",
    uid="u",
    timing=every("10s", anchor=START),
    call=StoredCall(task="shop:send", arguments=NOTHING),
    rules=Rules(catch_up=CatchUp.ALL),
    through=START + 35,
    next_at=START + 40,
    created_at=START,
)


def fired(tick: float, id: str | None = None, why: str = "", schedule: ScheduleRecord = NIGHTLY) -> InvocationRecord:
    """The invocation of a tick, so many seconds after START; it has ended."""
    at = START + tick
    why = why or f"tick {moment(at)} of the schedule '{schedule.name}'"
    record = called(schedule, id or invocation_id(schedule, at), f"fire {tick} {id}", at, at, at, why)
    return grown(record, tick)


def grown(record: InvocationRecord, at: float) -> InvocationRecord:
    done = made(claim(at=at + 1), ends(at + 2), id=record.id)
    history = (*record.history, *done.history[1:])
    names = ("status", "epoch", "attempt", "result", "changed_at")
    return replace(record, **{name: getattr(done, name) for name in names}, history=history)


def scheduled(*records: InvocationRecord, **fields: Any) -> Dump:
    return left(*records, schedules=(replace(NIGHTLY, **fields),), at=START + 36)


THREE = [fired(10), fired(20), fired(30)]

# --- triggers

PAY, PACKED = "shop:pay", "packed"
ON_PACKED = TriggerRecord(
    app="shop",
    name="told#1",
    clauses=(((OnEvent(name=PACKED, where=DATA.encode({"kind": "box"})),),),),
    call=StoredCall(task="shop:told", arguments=b""),
    created_at=START,
)
ON_PAY = replace(
    ON_PACKED, name="told#2", clauses=(((OnEnd(tasks=(PAY,), statuses=(Status.SUCCESS, Status.FAILED)),),),)
)
ON_BOTH = replace(
    ON_PACKED,
    name="told#3",
    clauses=(
        (
            (OnEvent(name=PACKED, correlate="order"),),
            (OnEnd(tasks=(PAY,), statuses=(Status.SUCCESS,), parameters=("order",), correlate="order"),),
        ),
    ),
)
BY_CODE = replace(ON_PACKED, name="told#4", evaluator="trigger:told#4")


def packed(id: str = "e", at: float = 10.0, kind: str = "box", order: int = 7, **fields: Any) -> EventRecord:
    payload = DATA.encode({"kind": kind, "order": order})
    return EventRecord(app="shop", id=id, name=PACKED, payload=payload, at=START + at, keep_until=START + 9e4, **fields)


def paid(id: str = "p", at: float = 10.0, order: int = 7, **fields: Any) -> InvocationRecord:
    arguments = DATA.encode_call((order,), {})
    return made(claim(at=at - 1), ends(at), id=id, task=PAY, arguments=arguments, **fields)


def of(
    *happened: EventRecord | InvocationRecord, trigger: TriggerRecord = ON_PACKED, id: str = "c", **fields: Any
) -> Any:
    sources = tuple(
        Source(kind="event", id=each.id, name=each.name)
        if isinstance(each, EventRecord)
        else Source(kind="end", id=each.id, name=each.task)
        for each in happened
    )
    given = {"task": trigger.call.task, "arguments": NOTHING} | fields
    return made(claim(at=11), ends(12), id=id, origin=Origin(trigger=trigger.name, sources=sources), **given)


def refused(record: InvocationRecord) -> InvocationRecord:
    """Stored only to say why it was not called."""
    change = change_of(
        "refused", record, (Status.FAILED,), frozenset({Status.REGISTERED}), operation="o", at=START + 9, why="no"
    )
    return apply_to(replace(change, error=ERROR), record)


def told(*records: InvocationRecord, events: Any = (), triggers: Any = (ON_PACKED,), **fields: Any) -> Dump:
    return left(*records, events=tuple(events), triggers=tuple(triggers), at=START + 60, **fields)


BOTH = (packed(), paid())
COMPLETE = Join(
    app="shop",
    name=joins.name_of(ON_BOTH, 0, packed().facts) or "",
    trigger=ON_BOTH.name,
    clause=0,
    members=((), ()),
    firings=((Happened(source=packed().facts.source, at=START, picked=b"\x80"),) * 2,),
)

PLANTED = [
    # --- I9
    Plot("one tick, twice", "I9", scheduled(*THREE, fired(20, id="again"))),
    Plot("a firing between two ticks", "I9", scheduled(*THREE, fired(25))),
    Plot("a firing of what was before the schedule", "I9", scheduled(fired(0), *THREE)),
    Plot(
        "a firing with an id of its own", "I9", scheduled(fired(10, id="mine"), *THREE[1:], progress=Progress(missed=1))
    ),
    Plot("a tick that was passed over", "I9", scheduled(THREE[0], THREE[2])),
    Plot(
        "more ticks are missing than were missed",
        "I9",
        scheduled(THREE[2], progress=Progress(missed=1), rules=Rules(catch_up=CatchUp.NONE)),
    ),
    Plot(
        "a tick that is an event, and is not there",
        "I9",
        scheduled(call=StoredCall(task="shop:send", arguments=b"", event="schedule:nightly"), through=START + 15),
    ),
    # --- I10
    Plot("an event that nobody heard of", "I10", told(events=[packed()])),
    Plot("an event that was to be told", "I10", told(of(packed()), events=[packed(outbox=(ON_PACKED.name,))])),
    Plot("one event, two calls", "I10", told(of(packed()), of(packed(), id="d"), events=[packed()])),
    Plot("a call for an event that is another", "I10", told(of(packed()), events=[packed(kind="bag")])),
    Plot("an end that nobody heard of", "I10", told(paid(), triggers=[ON_PAY])),
    Plot(
        "an end that was to be told",
        "I10",
        told(replace(paid(), outbox=("told#2",)), of(paid(), trigger=ON_PAY), triggers=[ON_PAY]),
    ),
    Plot(
        "one end, two calls",
        "I10",
        told(paid(), of(paid(), trigger=ON_PAY), of(paid(), trigger=ON_PAY, id="d"), triggers=[ON_PAY]),
    ),
    Plot("both have happened, and nothing came of it", "I10", told(BOTH[1], events=BOTH[:1], triggers=[ON_BOTH])),
    Plot(
        "both have happened, and it waits",
        "I10",
        told(BOTH[1], of(*BOTH, trigger=ON_BOTH), events=BOTH[:1], triggers=[ON_BOTH], joins=(COMPLETE,)),
    ),
    Plot(
        "one happening in two calls",
        "I10",
        told(
            BOTH[1],
            of(*BOTH, trigger=ON_BOTH),
            of(packed("f"), BOTH[1], trigger=ON_BOTH, id="d"),
            events=[BOTH[0], packed("f")],
            triggers=[ON_BOTH],
        ),
    ),
    Plot(
        "two that do not belong together",
        "I10",
        told(paid(order=8), of(*BOTH, trigger=ON_BOTH), events=BOTH[:1], triggers=[ON_BOTH]),
    ),
    Plot("code that was not asked", "I10", told(events=[packed(kind="bag")], triggers=[BY_CODE])),
    Plot("an acknowledged event that is not there", "I10", told(), [saw(What.EMIT_OK, 3, id="e")]),
]

CLEAN = [
    Plot("every tick once", "I9", scheduled(*THREE)),
    Plot("a tick that nobody has decided about", "I9", scheduled(*THREE[:2], through=START + 25)),
    Plot("a crash before the schedule has moved on", "I9", scheduled(*THREE, through=START + 5)),
    Plot("ticks that were missed, and said so", "I9", scheduled(THREE[2], progress=Progress(missed=2))),
    Plot(
        "a tick that was skipped",
        "I9",
        scheduled(*THREE[:2], rules=Rules(overlap=Overlap.SKIP), progress=Progress(skipped=1)),
    ),
    Plot("a tick that waits", "I9", scheduled(*THREE[:2], progress=Progress(queued=(START + 30,)))),
    Plot(
        "before its start, after its end",
        "I9",
        scheduled(THREE[1], rules=Rules(starts_at=START + 20, ends_at=START + 29)),
    ),
    Plot(
        "run now, and made up for",
        "I9",
        scheduled(
            *THREE,
            fired(25, id="now", why="the schedule 'nightly' was asked to run now"),
            fired(20, id="again", why=f"tick {moment(START + 20)} of the schedule 'nightly', made up for"),
        ),
    ),
    Plot("one event, one call", "I10", told(of(packed()), events=[packed()]), [saw(What.EMIT_OK, 3, id="e")]),
    Plot("an event that is another", "I10", told(events=[packed(kind="bag")])),
    Plot("an event before everybody knew the trigger", "I10", told(events=[packed(at=2)])),
    Plot("or that somebody knew at once", "I10", told(of(packed(at=2)), events=[packed(at=2)])),
    Plot("a trigger that rests", "I10", told(events=[packed()], triggers=[replace(ON_PACKED, retired_at=START + 5)])),
    Plot("an end, and one call", "I10", told(paid(), of(paid(), trigger=ON_PAY), triggers=[ON_PAY])),
    Plot(
        "what could not be called tells nobody",
        "I10",
        told(
            refused(made(id="p", task=PAY, arguments=NOTHING)),
            triggers=[ON_PAY],
        ),
    ),
    Plot(
        "a failure that it does not wait for",
        "I10",
        told(made(claim(), fails(9), id="p", task=PAY, arguments=NOTHING), triggers=[ON_BOTH]),
    ),
    Plot("both, and one call", "I10", told(BOTH[1], of(*BOTH, trigger=ON_BOTH), events=BOTH[:1], triggers=[ON_BOTH])),
    Plot("one of both", "I10", told(events=BOTH[:1], triggers=[ON_BOTH])),
    Plot("both, for different orders", "I10", told(paid(order=8), events=BOTH[:1], triggers=[ON_BOTH])),
    Plot(
        "code that was asked, and called",
        "I10",
        told(
            of(packed(), trigger=BY_CODE),
            of(packed(), trigger=BY_CODE, id="d", task="trigger:told#4"),
            events=[packed()],
            triggers=[BY_CODE],
        ),
    ),
    Plot(
        "another that waits is enough",
        "I10",
        told(events=[packed()], triggers=[replace(ON_PACKED, call=replace(ON_PACKED.call, dedup_key="t"))]),
    ),
]
