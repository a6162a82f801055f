"""A deterministic simulation: the whole engine on one thread, in virtual time, with every fault a seed can think of.

A seed makes a plan: how many runners, which work is submitted when, which schedules tick and which events call tasks,
and what strikes them all: processes are killed before any of their steps, frozen, stopped and cut off; the database is
away; requests and replies are lost or late; hints are lost and doubled; and all that is ready runs in an order drawn by
lot. Then everything heals, work has to come to its end, and `tests.support.checker` judges what the store holds
against what was seen.

::

    run = simulate(4711)
    assert not run.violations, run

The same seed gives the same run, message by message: `Run.trace` is a hash of all of them. ``python -m
tests.support.simulation 4711`` shows a run, and with ``--shrink`` the smallest plan that fails in the same way.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any, cast

import msgspec
from tests.support.checker import Violation
from tests.support.simulation.judge import judged
from tests.support.simulation.plan import (
    Emission,
    Ending,
    Job,
    Party,
    Plan,
    Strike,
    Timer,
    Weather,
    dying_families,
    dying_parties,
    dying_starters,
    dying_tellers,
    families_of,
    hooks_of,
    parties_of,
    plan_of,
    rates_of,
    shrunk,
    tales_of,
    trips_of,
    zombie_tellers,
)
from tests.support.simulation.scheduler import SeededLoop
from tests.support.simulation.world import Evidence, World, defects

from holdfast.testing.virtual import VirtualClock
from holdfast.workflows.life import evict_all

__all__ = [
    "Emission",
    "Ending",
    "Job",
    "Party",
    "Plan",
    "Run",
    "Strike",
    "Timer",
    "Weather",
    "dying_families",
    "dying_parties",
    "dying_starters",
    "dying_tellers",
    "families_of",
    "hooks_of",
    "parties_of",
    "plan_of",
    "rates_of",
    "shrunk",
    "simulate",
    "tales_of",
    "trips_of",
    "zombie_tellers",
]

_ROUNDS = 50


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a plan."""

    plan: Plan
    violations: tuple[Violation, ...]
    trace: str
    evidence: Evidence

    def __str__(self) -> str:
        told = [f"seed {self.plan.seed}: {len(self.violations)} violations in {self.evidence.seconds:.0f} s"]
        return "\n".join([*told, *map(str, self.violations), *map(str, self.plan.strikes)])


def simulate(plan: Plan | int, *, keep_trace: bool = False) -> Run:
    """Run a plan, or that of a seed, and judge it."""
    if isinstance(plan, int):
        plan = plan_of(plan)
    loop = SeededLoop(random.Random(f"order {plan.seed}"), plan.disorder)
    world = World(plan, VirtualClock(loop), keep_trace=keep_trace)
    broken: list[str] = []
    tasks: list[asyncio.Task[Any]] = []  # of the dead, too: let go of, they would clean up behind themselves

    def start(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **facts: Any) -> asyncio.Task[Any]:
        tasks.append(task := asyncio.Task(work, loop=loop, **facts))
        return task

    loop.set_task_factory(cast(Any, start))
    loop.set_exception_handler(lambda _, context: broken.append(f"{context['message']}: {context.get('exception')!r}"))
    with defects() as found:
        try:
            evidence = loop.run_until_complete(world.run())
            told = [*found, *broken]
            loop.run_until_complete(_dissolve(world))
        finally:
            asyncio.set_event_loop(None)
            loop.close()
    violations = [*judged(plan, evidence), *(Violation("defect", None, sentence) for sentence in told)]
    return Run(plan=plan, violations=tuple(violations), trace=evidence.trace, evidence=evidence)


async def _dissolve(world: World) -> None:
    """Let go of everything that still waits, the dead included: their cleanup reaches nobody any more."""
    world.end()
    evict_all()
    for _ in range(_ROUNDS):
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if not left:
            return
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=5.0)
