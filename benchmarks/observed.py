"""``make bench-observed``: what metrics and tracing cost a drain, in turns in one run, as ratios.

Each round drains the same calls once with nothing, with metrics, and with tracing by an SDK whose exporter drops all:
of each hundredth call, and of all.
Other work on the machine hits all alike; processor time is what an answer should go by. A drain of functions that do
nothing is the worst case; `--milliseconds 1` gives each call some work of its own.

`--waiting 1000000` measures instead what a scrape asks of a store in which so many calls wait.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import workload
from benchmarks.stock import APP, stock
from benchmarks.table import table
from benchmarks.targets import TARGETS, CannotServe
from holdfast.clock import SystemClock
from holdfast.model.status import WAITING
from holdfast.store import open_store

KINDS: dict[str, dict[str, object]] = {
    "nothing": {},
    "metrics": {"metrics": True},
    "tracing of 1 %": {"tracing": True},
    "tracing": {"tracing": True},
}
PLACES = 10
QUOTA = 100_000


class Drain(NamedTuple):
    processor: float
    wall: float


def main() -> None:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observed", description=about)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tasks", type=int, default=3000)
    parser.add_argument("--milliseconds", type=float, default=0.0, help="of processor time in each call")
    parser.add_argument("--waiting", type=int, help="measure the question of a scrape beside so many waiting calls")
    parser.add_argument("--without-sdk", action="store_true", help="trace with the API of OpenTelemetry alone")
    options = parser.parse_args()
    if options.waiting:
        titles = ["", "depth of queues, exact", "counted up to 1,000", f"for max_waiting of {QUOTA:,}"]
        print(table(titles, list(asked(options.waiting))))
        return
    if not options.without_sdk:
        drop_spans()
    rounds = []
    for number in range(options.rounds):
        kinds = list(KINDS)[:: 1 if number % 2 == 0 else -1]
        found = {}
        for kind in kinds:
            sampling.one_in = 100 if kind.endswith("1 %") else 1
            found[kind] = drained(KINDS[kind], options.tasks, options.milliseconds / 1000)
        rounds.append(found)
    rows = [[kind, *summary(rounds, kind, options.tasks)] for kind in KINDS]
    print(table(["", "µs of processor per call, least", "ratio", "median ratio", "calls per second"], rows))
    print(f"{options.rounds} rounds of {options.tasks:,} calls")


def asked(waiting: int) -> Iterator[list[str]]:
    """Yield for each store the median times of five questions: of a scrape, of a page, and of a submit."""
    for target in TARGETS.values():
        if target.name == "memory":
            continue
        with suppress(CannotServe), target.served() as fresh, fresh() as url:
            yield [target.name, *asyncio.run(_asked(url, waiting))]


async def _asked(url: str, waiting: int) -> list[str]:
    store = open_store(url, clock=SystemClock())
    await store.open()
    questions: list[Callable[[], Awaitable[object]]] = [
        lambda: store.queue_depths(APP, store.now()),
        lambda: store.queue_depths(APP, store.now(), 1001),
        lambda: store.counts(APP, QUOTA + 1, WAITING),
    ]
    try:
        await stock(url, store, few=4, archived=0, backlog=waiting, rng=random.Random(1))
        return [f"{statistics.median([await _timed(ask) for _ in range(5)]):.0f} ms" for ask in questions]
    finally:
        await store.close()


async def _timed(ask: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await ask()
    return (time.perf_counter() - began) * 1000


class Sampling:
    """Which spans are made: one in so many."""

    one_in = 1


sampling = Sampling()


def drop_spans() -> None:
    """Have an SDK that makes the sampled spans and exports none."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult

    class OneIn(Sampler):
        def __init__(self) -> None:
            self._turns = count()

        def should_sample(self, parent_context: Any, trace_id: int, name: str, *more: Any, **named: Any) -> Any:
            is_made = next(self._turns) % sampling.one_in == 0
            return SamplingResult(Decision.RECORD_AND_SAMPLE if is_made else Decision.DROP)

        def get_description(self) -> str:
            return "one in so many"

    class Drop(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider(sampler=OneIn())
    provider.add_span_processor(BatchSpanProcessor(Drop()))
    trace.set_tracer_provider(provider)


def drained(settings: dict[str, object], tasks: int, seconds: float) -> Drain:
    """Drain so many calls in this process."""
    left, done = iter(range(tasks - 1)), threading.Event()

    def called() -> None:
        until = time.thread_time() + seconds
        while seconds and time.thread_time() < until:
            pass
        if next(left, None) is None:
            done.set()

    with tempfile.TemporaryDirectory(prefix="hf-observed-") as folder:
        made = workload.make(f"sqlite:///{Path(folder) / 'a.db'}", called=called, **settings)
        with made.app as app:
            made.function.map(range(tasks))
            processor, wall = time.process_time(), time.perf_counter()
            with app.runner(concurrency=PLACES):
                done.wait()
            return Drain(time.process_time() - processor, time.perf_counter() - wall)


def summary(rounds: list[dict[str, Drain]], kind: str, tasks: int) -> list[str]:
    """Return the least processor time per call, the median of its ratios, and the median of rates."""
    least = min(each[kind].processor for each in rounds) / tasks * 1e6
    lowest = min(each[kind].processor for each in rounds) / min(each["nothing"].processor for each in rounds)
    costs = statistics.median(each[kind].processor / each["nothing"].processor for each in rounds)
    rate = statistics.median(tasks / each[kind].wall for each in rounds)
    return [f"{least:.0f}", f"{lowest:.3f}", f"{costs:.3f}", f"{rate:,.0f}"]


if __name__ == "__main__":
    main()
