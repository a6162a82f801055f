"""The text of `/metrics`: the counts of a process, and, at a scrape, the state of the whole fleet from the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from holdfast.errors import MissingExtra, StoreError
from holdfast.metrics.measures import Measures
from holdfast.metrics.rules import (
    DEPTH,
    FRESH_SECONDS,
    HEARTBEAT,
    METRICS,
    OLDEST,
    ROSTER,
    RUNNERS,
    UP,
    Histogram,
    LabelNames,
    Metric,
    MetricKind,
    Tables,
    counted,
    next_question_at,
    values_of,
)
from holdfast.model.queues import QueueDepth
from holdfast.runtime.engine import Engine
from holdfast.telemetry.events import DutyFailed

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PATIENCE_SECONDS = 3.0  # for the store
COUNT_SECONDS = 1.0  # for an exact count; then a scrape goes on without it
MOST_COUNTED = 1000  # calls of a queue, at each question
_STATES = ("waiting", "scheduled", "blocked", "running")
Gauges = dict[Metric, dict[tuple[str, ...], float]]


def refuse_without_library() -> None:
    """Raise `MissingExtra` if the text could not be written."""
    try:
        import prometheus_client  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "/metrics needs the library 'prometheus-client', which is not installed: pip install 'holdfast[metrics]'"
        ) from error


class Exposition:
    """Answer scrapes of one process. `heartbeat_age` is that of its runner, if it has one. `declared` returns
    the tasks and the queues of its code: they have a 0 from the start, and each queue has one again when it is empty.
    """

    def __init__(
        self,
        measures: Measures | None,
        heartbeat_age: Callable[[], float | None] = lambda: None,
        declared: Callable[[], tuple[Iterable[str], Iterable[str]]] = lambda: ((), ()),
    ) -> None:
        self._measures = measures
        self._heartbeat_age = heartbeat_age
        self._declared = declared
        self._queues = LabelNames()
        self._seen: set[str] = set()
        self._known: Gauges = {UP: {(): 0.0}}
        self._next_question = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._exact: dict[str, QueueDepth] = {}  # of the last count
        self._next_count = float("-inf")
        self._counting: asyncio.Task[None] | None = None

    async def gather(self, engine: Engine) -> tuple[Tables, Gauges]:
        """Return all values, on the engine's loop. The store is given a few seconds; without it, the rest is there."""
        now = engine.clock.monotonic
        if now() >= self._next_question and self._asking is None:
            self._asking = asyncio.create_task(self._ask(engine))
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=PATIENCE_SECONDS)
            if self._asking is not None:
                self._known = {UP: {(): 0.0}}
        gauges = dict(self._known)
        if (age := self._heartbeat_age()) is not None:
            gauges[HEARTBEAT] = {(): age}
        measures = self._measures
        if measures is None:
            return Tables({}, {}), gauges
        measures.expect(self._declared()[0])
        return measures.now(), gauges

    async def _ask(self, engine: Engine) -> None:
        began = engine.clock.monotonic()
        try:
            self._known = await self._asked(engine)
        except StoreError:
            self._known = {UP: {(): 0.0}}
        except Exception as error:
            self._known = {UP: {(): 0.0}}
            engine.telemetry.emit(DutyFailed("engine", "ask the store for /metrics", error))
        finally:
            answered = engine.clock.monotonic()
            self._next_question = next_question_at(began, answered) if self._known[UP][()] else answered + FRESH_SECONDS
            self._asking = None

    async def _asked(self, engine: Engine) -> Gauges:
        at = engine.store.now()
        depths = await self._depths(engine, at)
        roster = await engine.store.roster(engine.app)
        found: Gauges = {UP: {(): 1.0}, DEPTH: {}, OLDEST: {}, RUNNERS: {(): float(len(roster))}}
        self._seen.update(map(self._queues.label, [*self._declared()[1], *(depth.name for depth in depths)]))
        for queue in self._seen:
            self._take(found, QueueDepth(name=queue), at)
        for depth in depths:
            self._take(found, depth, at)
        beats = [at - runner.heartbeat_at for runner in roster]
        found[ROSTER] = {(): max([0.0, *beats])}
        return found

    async def _depths(self, engine: Engine, at: float) -> Sequence[QueueDepth]:
        """Return depths that are exact up to `MOST_COUNTED`. Beyond, they are those of the last count of all, which
        takes long beside many waiting calls: it goes on by itself, and is repeated ever more seldom.
        """
        depths = await engine.store.queue_depths(engine.app, at, MOST_COUNTED + 1)
        if all(getattr(depth, state) <= MOST_COUNTED for depth in depths for state in _STATES):
            return depths
        if self._counting is None and engine.clock.monotonic() >= self._next_count:
            self._counting = asyncio.create_task(self._count(engine, at))
        if self._counting is not None:
            await asyncio.wait({self._counting}, timeout=COUNT_SECONDS)
        return [_deeper(depth, self._exact.get(depth.name, depth)) for depth in depths]

    async def _count(self, engine: Engine, at: float) -> None:
        began = engine.clock.monotonic()
        try:
            self._exact = {depth.name: depth for depth in await engine.store.queue_depths(engine.app, at)}
        except StoreError:
            pass  # the next query shows that
        except Exception as error:
            engine.telemetry.emit(DutyFailed("engine", "count the queues for /metrics", error))
        finally:
            self._next_count = next_question_at(began, engine.clock.monotonic())
            self._counting = None

    def _take(self, found: Gauges, depth: QueueDepth, at: float) -> None:
        queue = self._queues.label(depth.name)
        for state in _STATES:
            labels = (queue, state)
            found[DEPTH][labels] = found[DEPTH].get(labels, 0.0) + getattr(depth, state)
        age = 0.0 if depth.oldest_due_at is None else max(0.0, at - depth.oldest_due_at)
        found[OLDEST][queue,] = max(age, found[OLDEST].get((queue,), 0.0))


def _deeper(depth: QueueDepth, exact: QueueDepth) -> QueueDepth:
    """Return a depth with exact numbers instead of lower bounds."""
    numbers = {state: getattr(depth, state) for state in _STATES}
    more = {state: max(n, getattr(exact, state)) for state, n in numbers.items() if n > MOST_COUNTED}
    return replace(depth, **more)


def text_of(tables: Tables, gauges: Gauges) -> bytes:
    """Return the text for Prometheus. Raises `MissingExtra`."""
    refuse_without_library()
    from prometheus_client.exposition import generate_latest

    made: Any = _Collected(list(_families(tables, gauges)))
    return generate_latest(made)


class _Collected:
    """What `prometheus_client` calls a registry."""

    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        return self._families


def _families(tables: Tables, gauges: Gauges) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    for metric in METRICS:
        known = (metric.name, metric.says)
        if metric.kind is MetricKind.COUNTER:
            counter = CounterMetricFamily(*known, labels=metric.labels)
            for labels, many in counted(metric, tables).items():
                counter.add_metric(values_of(metric, labels), many)
            yield counter
        elif metric.kind is MetricKind.HISTOGRAM:
            family = HistogramMetricFamily(*known, labels=metric.labels)
            for labels, histogram in tables.histograms.get(metric.name, {}).items():
                family.add_metric(values_of(metric, labels), _buckets(metric, histogram), histogram.total)
            yield family
        elif metric in gauges:
            gauge = GaugeMetricFamily(*known, labels=metric.labels)
            for values, value in gauges[metric].items():
                gauge.add_metric(values, value)
            yield gauge


def _buckets(metric: Metric, histogram: Histogram) -> list[tuple[str, float]]:
    made, so_far = [], 0
    for bound, many in zip([*map(str, metric.bounds), "+Inf"], histogram.counts, strict=True):
        so_far += many
        made.append((bound, float(so_far)))
    return made
