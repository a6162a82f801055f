"""Schedules and triggers of the simulated world: two small tasks beside the one that all jobs are calls of.

`tick` is called by schedules, `echo` by triggers: by an event, by the end of a job, and by both of them for one job.
Neither writes into a ledger; what has to come of what is in the store.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from tests.support.simulation.plan import APP, TASK, Emission, Plan

from holdfast.codec import Codec
from holdfast.model.status import Status
from holdfast.runtime.definition import ExecutorKind, TaskDefinition
from holdfast.runtime.engine import Engine
from holdfast.schedules import every
from holdfast.schedules.declared import Declaration, Declarations
from holdfast.schedules.records import Rules, StoredCall
from holdfast.triggers.events import EventRecord
from holdfast.triggers.rules import DATA, Argument, Clause, OnEnd, OnEvent, TriggerRecord
from holdfast.triggers.service import TriggerRegistry

TICK, ECHO, EVENT = "tick", "echo", "packed"
_KEPT_SECONDS = 86_400.0
_LAST_TICKS_SECONDS = 3.0  # after the faults


async def tick(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def echo(token: str | None = None, **more: Any) -> str | None:
    return token


def tasks(plan: Plan) -> list[TaskDefinition]:
    functions: dict[str, Callable[..., Any]] = {TICK: tick} if plan.timers else {}
    functions |= {ECHO: echo} if plan.emissions else {}
    return [
        TaskDefinition(name=name, function=function, signature=inspect.signature(function), executor=ExecutorKind.LOOP)
        for name, function in functions.items()
    ]


def declarations(plan: Plan, start: float) -> list[Declaration]:
    """The schedules. They end a little after the faults do, so that all comes to rest."""
    ends_at = start + plan.chaos_seconds + _LAST_TICKS_SECONDS
    return [
        Declaration(
            name=timer.name,
            timing=every(timer.every, anchor=start),
            call=StoredCall(task=TICK, arguments=Codec().encode_call((), {"seconds": timer.seconds})),
            rules=Rules(catch_up=timer.catch_up, overlap=timer.overlap, ends_at=ends_at),
        )
        for timer in plan.timers
    ]


def triggers(plan: Plan) -> list[TriggerRecord]:
    if not plan.emissions:
        return []
    ended = OnEnd(tasks=(TASK,), statuses=(Status.SUCCESS, Status.FAILED), parameters=("token",), correlate="token")
    packed = OnEvent(name=EVENT, correlate="token")
    box = OnEvent(name=EVENT, where=DATA.encode({"kind": "box"}))
    clauses: dict[str, Clause] = {"event": ((box,),), "end": ((ended,),), "both": ((packed,), (ended,))}
    arguments = (Argument(name="token", part="cause", path="name"),)
    call = StoredCall(task=ECHO, arguments=b"")
    return [
        TriggerRecord(app=APP, name=f"{ECHO}#{name}", clauses=(clause,), call=call, arguments=arguments)
        for name, clause in clauses.items()
    ]


def event_of(emission: Emission, id: str, now: float) -> EventRecord:
    return EventRecord(
        app=APP,
        id=id,
        name=EVENT,
        payload=DATA.encode({"kind": emission.kind, "token": emission.token}),
        at=now,
        keep_until=now + _KEPT_SECONDS,
        key=emission.key,
    )


async def deploy(plan: Plan, engine: Engine, start: float) -> None:
    """Store schedules and triggers, before anything happens, so that it is known what has to come of it."""
    await Declarations(engine, declarations(plan, start)).register()
    await TriggerRegistry(engine, triggers(plan)).register()
