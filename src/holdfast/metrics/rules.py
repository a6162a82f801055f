"""What is measured: the table of metrics, and counts that can be added up. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

OTHER = "other"
MOST_NAMES = 100  # of tasks, and of queues, that have their own label
SHARE = 20  # a query to the store is not repeated before this multiple of its duration has passed
FRESH_SECONDS = 5.0  # nor before that


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """A metric: a line of the table in the docs."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    says: str
    bounds: tuple[float, ...] = ()  # of a histogram

    @property
    def series(self) -> tuple[str, ...]:
        """Return the names of its series at the endpoint."""
        if self.kind is MetricKind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


_TIMES = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0, 1800.0, 3600.0)
_SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)

OUTCOMES = ("succeeded", "failed", "cancelled")
TAKEN_BACK = ("running", "pending", "killed")

ENDED = Metric(
    "holdfast_ended_total", MetricKind.COUNTER, ("task", "outcome"), "calls that ended: succeeded, failed, …"
)
RETRIED = Metric(
    "holdfast_retried_total", MetricKind.COUNTER, ("task",), "attempts that failed and are followed by another"
)
RECOVERED = Metric(
    "holdfast_recovered_total", MetricKind.COUNTER, ("was",), "calls taken back: running, pending or killed"
)
LOST = Metric("holdfast_lost_total", MetricKind.COUNTER, (), "writes that came too late: the claim was another's")
SKIPS = Metric("holdfast_slot_skips_total", MetricKind.COUNTER, (), "turns at the services that a runner left unused")
DEATHS = Metric(
    "holdfast_worker_deaths_total", MetricKind.COUNTER, (), "worker processes that died, or had to be killed"
)
WAITED = Metric(
    "holdfast_wait_seconds", MetricKind.HISTOGRAM, ("queue",), "from due to the start of an attempt", _TIMES
)
RAN = Metric("holdfast_run_seconds", MetricKind.HISTOGRAM, ("task",), "from the start of an attempt to its end", _TIMES)
STORE = Metric("holdfast_store_seconds", MetricKind.HISTOGRAM, ("operation",), "operations of the store", _SHORT)
LAG = Metric(
    "holdfast_loop_lag_seconds", MetricKind.HISTOGRAM, (), "how late the engine's loops were, twice a second", _SHORT
)
HEARTBEAT = Metric(
    "holdfast_heartbeat_age_seconds", MetricKind.GAUGE, (), "since this runner sent a heartbeat that was answered"
)
DEPTH = Metric(
    "holdfast_queue_depth",
    MetricKind.GAUGE,
    ("queue", "state"),
    "calls in a queue: waiting, scheduled, blocked, running",
)
OLDEST = Metric(
    "holdfast_queue_oldest_seconds", MetricKind.GAUGE, ("queue",), "age of the oldest call that waits, from due"
)
RUNNERS = Metric("holdfast_runners", MetricKind.GAUGE, (), "runners on the roster")
ROSTER = Metric("holdfast_roster_heartbeat_age_seconds", MetricKind.GAUGE, (), "the oldest heartbeat on the roster")
UP = Metric("holdfast_store_up", MetricKind.GAUGE, (), "1 if the store has answered the questions of this scrape")

METRICS = (
    *(ENDED, RETRIED, RECOVERED, LOST, WAITED, RAN, STORE, LAG, HEARTBEAT, SKIPS, DEATHS),
    *(DEPTH, OLDEST, RUNNERS, ROSTER, UP),
)
BY_NAME = {metric.name: metric for metric in METRICS}


class Histogram(msgspec.Struct):
    """How many values fell into each bucket, and their sum. The last bucket is for all that are larger."""

    counts: list[int]
    total: float = 0.0

    @classmethod
    def of(cls, metric: Metric) -> Histogram:
        return cls([0] * (len(metric.bounds) + 1))

    def note(self, metric: Metric, value: float) -> None:
        self.counts[bisect_left(metric.bounds, value)] += 1
        self.total += value if value > 0 else 0.0

    def add(self, other: Histogram) -> None:
        self.counts = [ours + theirs for ours, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


Labels = str  # values of labels, with a line break between them: no name of ours has one
Counters = dict[str, dict[Labels, int]]
Histograms = dict[str, dict[Labels, Histogram]]


class Tables(msgspec.Struct, array_like=True):
    """Counts by metric and labels."""

    counters: Counters = {}
    histograms: Histograms = {}

    def __bool__(self) -> bool:
        return bool(self.counters or self.histograms)

    def count(self, metric: Metric, labels: Labels = "", many: int = 1) -> None:
        cells = self.counters.setdefault(metric.name, {})
        cells[labels] = cells.get(labels, 0) + many

    def histogram(self, metric: Metric, labels: Labels = "") -> Histogram:
        cells = self.histograms.setdefault(metric.name, {})
        if labels not in cells:
            cells[labels] = Histogram.of(metric)
        return cells[labels]


class LabelNames:
    """The first names have their own label; all others share one."""

    def __init__(self, most: int = MOST_NAMES) -> None:
        self._most = most
        self._known: set[str] = set()

    def label(self, name: str) -> str:
        if name in self._known:
            return name
        if len(self._known) >= self._most:
            return OTHER
        self._known.add(name)
        return name


def relabelled(metric: Metric, labels: Labels, tasks: LabelNames, queues: LabelNames) -> Labels:
    """Return the labels of a worker as its runner has them: together its workers may have more names than one."""
    bounded = {"task": tasks, "queue": queues}
    values = zip(metric.labels, labels.split("\n"), strict=False)
    return "\n".join(bounded[name].label(value) if name in bounded else value for name, value in values)


def counted(metric: Metric, tables: Tables) -> dict[Labels, int]:
    """Return the counts of a counter, with a 0 for what has not been counted yet and is known to come."""
    zeros = dict.fromkeys(TAKEN_BACK, 0) if metric is RECOVERED else {} if metric.labels else {"": 0}
    return zeros | tables.counters.get(metric.name, {})


def values_of(metric: Metric, labels: Labels) -> Sequence[str]:
    return labels.split("\n") if metric.labels else ()


def next_question_at(asked: float, answered: float) -> float:
    """Return when the store may be asked again, after a question that took from `asked` to `answered`."""
    return answered + max(FRESH_SECONDS, (answered - asked) * SHARE)
