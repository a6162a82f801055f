"""Engines, workers and runners for tests, put together as an app does it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.app import compose, features
from holdfast.clock import Clock
from holdfast.codec import SizeLimits
from holdfast.fleet.recovery import Recovery
from holdfast.fleet.runner import Runner, RunnerOptions
from holdfast.fleet.services import Duty
from holdfast.fleet.supervisor import Workers
from holdfast.ids import Ids
from holdfast.model.records import RunnerRecord, Serves
from holdfast.runtime.claim import Permit, Unlimited
from holdfast.runtime.definition import TaskDefinition, names_of
from holdfast.runtime.engine import Engine
from holdfast.runtime.execute import MakeExecutor
from holdfast.runtime.worker import Worker, WorkerOptions
from holdfast.schedules.declared import CoreSchedules, Declaration
from holdfast.settings import Settings
from holdfast.store.contract import Store
from holdfast.telemetry.logs import logging_telemetry
from holdfast.triggers.rules import TriggerRecord


def make_engine(
    store: Store,
    clock: Clock,
    rng: random.Random,
    *,
    app: str = "app",
    limits: SizeLimits | None = None,
    **settings: Any,
) -> Engine:
    settings.setdefault("stats_retention_seconds", 0)  # counters draw ids, which would change every seed
    shared = {"app": app, "ids": Ids(clock, rng), "rng": rng, "telemetry": logging_telemetry(clock.monotonic)}
    engine = compose(url="", store=store, settings=Settings(**settings), clock=clock, **shared)
    engine.limits = limits or engine.limits
    return engine


def make_worker(
    engine: Engine,
    definitions: Sequence[TaskDefinition],
    *,
    owner: str,
    serves: Serves | None = None,
    permit: Permit | None = None,
    recovery: Recovery | None = None,
    make_executor: MakeExecutor | None = None,
    **options: Any,
) -> Worker:
    asked = WorkerOptions(owner=owner, serves=serves or Serves(tasks=frozenset(names_of(definitions))), **options)
    return Worker(
        engine, definitions, asked, permit or Unlimited(), recovery or Recovery(engine), make_executor=make_executor
    )


class More:
    """More duties for a runner: see `holdfast.fleet.services.Feature`."""

    declares = ()

    def __init__(self, *duties: Duty) -> None:
        self._duties = duties

    async def register(self) -> None:
        pass

    def duties(self) -> Sequence[Duty]:
        return self._duties


def make_runner(
    engine: Engine,
    definitions: Sequence[TaskDefinition],
    *,
    concurrency: int,
    drain_timeout_seconds: float = 30.0,
    queues: Sequence[str] | None = None,
    declared: Sequence[Declaration] = (),
    triggers: Sequence[TriggerRecord] = (),
    make_executor: MakeExecutor | None = None,
    make_workers: Callable[[RunnerRecord, Recovery], Workers] | None = None,
) -> Runner:
    options = RunnerOptions(
        version="test",
        concurrency=concurrency,
        queues=None if queues is None else tuple(queues),
        drain_timeout_seconds=drain_timeout_seconds,
    )
    return Runner(
        engine,
        definitions,
        options,
        lambda core: (
            CoreSchedules(core),
            *features(
                engine,
                declared=declared,
                triggers=triggers,
                has_runs=any(definition.is_workflow for definition in definitions),
            ),
        ),
        make_executor=make_executor,
        make_workers=make_workers,
    )
