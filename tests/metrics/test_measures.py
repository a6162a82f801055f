"""What is counted, how counts of workers become one, and how many labels there may be."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from holdfast import App
from holdfast.metrics import rules
from holdfast.metrics.exposition import Exposition, text_of
from holdfast.metrics.measures import Measures
from holdfast.metrics.rules import Histogram, LabelNames, MetricKind, Tables, next_question_at
from holdfast.model.changes import Lost
from holdfast.model.status import Status
from holdfast.telemetry import events as e
from holdfast.testing.samples import invocation


def measured(**settings: object) -> App:
    return App("memory://", metrics=True, **settings)


def tables_of(app: App) -> Tables:
    measures = app.runtime.measures
    assert isinstance(measures, Measures)

    async def now() -> Tables:
        return measures.now()

    return app.runtime.run(now())


def test_ends_retries_and_times_are_counted() -> None:
    with measured() as app:
        tries: list[int] = []

        @app.task(name="good", retries=1)
        def good() -> None:
            tries.append(1)
            if len(tries) == 1:
                raise ValueError("once")

        @app.task(name="bad", queue="mail")
        def bad() -> None:
            raise ValueError("no")

        with app.runner():
            good.submit().result()
            for run in (bad.submit(), bad.submit()):
                with pytest.raises(ValueError, match="no"):
                    run.result()
        tables = tables_of(app)
        assert tables.counters[rules.ENDED.name] == {"good\nsucceeded": 1, "bad\nfailed": 2}
        assert tables.counters[rules.RETRIED.name] == {"good": 1}
        runs, waits = tables.histograms[rules.RAN.name], tables.histograms[rules.WAITED.name]
        assert {task: sum(each.counts) for task, each in runs.items()} == {"good": 2, "bad": 2}
        assert {queue: sum(each.counts) for queue, each in waits.items()} == {"default": 2, "mail": 2}
        assert {"claim", "apply", "heartbeat"} <= tables.histograms[rules.STORE.name].keys()


class Listener:
    """Keeps what was written."""

    def __init__(self) -> None:
        self.seen: list[e.ChangesWritten] = []

    def wants(self, kind: type[e.Event]) -> bool:
        return kind is e.ChangesWritten

    def __call__(self, event: e.Event) -> None:
        if isinstance(event, e.ChangesWritten):
            self.seen.append(event)


@pytest.fixture
def written() -> list[e.ChangesWritten]:
    """What the engine writes for five calls that succeed."""
    listener = Listener()
    with App("memory://") as app:
        app.runtime.telemetry.subscribe(listener)

        @app.task(name="add")
        def add(a: int) -> int:
            return a

        with app.runner():
            for run in add.map(range(5)):
                run.result()
    return listener.seen


def test_first_attempts_are_counted_as_all_others_are(written: list[e.ChangesWritten]) -> None:
    """Most calls are counted by a shorter way: it has to come to the same."""
    short, long = (Measures("app", lambda: 0.0) for _ in range(2))
    for event in written:
        short(event)
        long(replace(event, wanted=[(record, replace(change, name="else")) for record, change in event.wanted]))
    assert short.now().counters == long.now().counters == {rules.ENDED.name: {"add\nsucceeded": 5}}
    for name in (rules.RAN.name, rules.WAITED.name):
        (ours,), (theirs,) = (measures.now().histograms[name].values() for measures in (short, long))
        assert (ours.counts, ours.total) == (theirs.counts, pytest.approx(theirs.total))


def test_what_was_lost_to_another_write_is_not_counted(written: list[e.ChangesWritten]) -> None:
    measures = Measures("app", lambda: 0.0)
    for event in written:
        measures(replace(event, verdicts=[Lost(status=Status.FAILED, epoch=2, owner=None)] * len(event.wanted)))
    assert not measures.now()


def test_events_of_runners_are_counted() -> None:
    measures = Measures("shop", lambda: 0.0)
    record = invocation("a")
    measures(e.SlotSkipped("r"))
    measures(e.ChangeLost(replace(record, app="shop"), "it is gone", "completed"))
    measures(e.ChangeLost(replace(record, app="shop/core"), "it is gone", "completed"))  # of another app
    measures(e.RunnerJoined("r"))
    assert measures.now().counters == {rules.SKIPS.name: {"": 1}, rules.LOST.name: {"": 1}}


def test_counts_of_workers_add_up() -> None:
    runner, workers = Measures("shop", lambda: 0.0), [Measures("shop", lambda: 0.0) for _ in range(2)]
    for worker in workers:
        worker(e.SlotSkipped("r"))
        worker(e.SlotSkipped("r"))
        runner.add(worker.taken())
        assert worker.taken() == b""
    workers[0](e.SlotSkipped("r"))
    runner.add(workers[0].taken())
    assert runner.now().counters == {rules.SKIPS.name: {"": 5}}


def test_names_are_bounded() -> None:
    names = LabelNames(2)
    assert [names.label(each) for each in ("a", "b", "c", "a", "d")] == ["a", "b", rules.OTHER, "a", rules.OTHER]
    runner = Measures("shop", lambda: 0.0)
    for first in range(0, 3 * rules.MOST_NAMES, rules.MOST_NAMES):
        worker = Measures("shop", lambda: 0.0)
        worker.expect(f"task{number}" for number in range(first, first + rules.MOST_NAMES))
        fresh = worker.now()
        for labels in fresh.counters[rules.ENDED.name]:
            fresh.counters[rules.ENDED.name][labels] = 1
        runner.add(msgspec.msgpack.encode(fresh))
    ended = runner.now().counters[rules.ENDED.name]
    assert len({labels.partition("\n")[0] for labels in ended}) == rules.MOST_NAMES + 1
    assert sum(ended.values()) == 3 * 3 * rules.MOST_NAMES
    assert ended[f"{rules.OTHER}\nfailed"] == 2 * rules.MOST_NAMES


def test_a_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram.of(rules.RAN)
    for seconds in (-1.0, 0.0, rules.RAN.bounds[0], rules.RAN.bounds[0] * 1.01, rules.RAN.bounds[-1] * 2):
        histogram.note(rules.RAN, seconds)
    assert (histogram.counts[0], histogram.counts[1], histogram.counts[-1]) == (3, 1, 1)
    assert histogram.total == pytest.approx(rules.RAN.bounds[0] * 2.01 + rules.RAN.bounds[-1] * 2)


def test_the_store_is_asked_for_a_twentieth_of_the_time_at_most() -> None:
    assert next_question_at(100.0, 100.01) == pytest.approx(105.01)
    assert next_question_at(100.0, 102.0) == pytest.approx(142.0)


def test_a_queue_that_is_empty_again_is_zero() -> None:
    with measured() as app:

        @app.task(name="add", queue="mail")
        def add() -> None: ...

        exposition = Exposition(None)
        now = [0.0]

        class Times:
            def monotonic(self) -> float:
                return now[0]

        engine = app.runtime.ready()
        engine.clock = Times()  # type: ignore[assignment]
        run = add.submit()

        def depths() -> dict[str, float]:
            now[0] += 100
            _, gauges = app.runtime.run(exposition.gather(engine))
            text = text_of(Tables({}, {}), gauges).decode()
            lines = [line for line in text.splitlines() if line.startswith("holdfast_queue_depth{")]
            return {line.partition(" ")[0]: float(line.partition(" ")[2]) for line in lines}

        waiting = 'holdfast_queue_depth{queue="mail",state="waiting"}'
        assert depths()[waiting] == 1.0
        with app.runner():
            run.result()
        assert depths()[waiting] == 0.0


def test_a_defect_while_asking_says_so_once_and_leaves_no_old_gauges(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with measured() as app:
        exposition, now = Exposition(None), [0.0]
        engine = app.runtime.ready()
        monkeypatch.setattr(engine.clock, "monotonic", lambda: now[0])

        def gauges() -> dict[str, float]:
            now[0] += 100
            return {
                metric.name: sum(of.values()) for metric, of in app.runtime.run(exposition.gather(engine))[1].items()
            }

        assert gauges()["holdfast_store_up"] == 1.0

        async def broken(*args: object) -> object:
            raise ZeroDivisionError("a defect")

        with monkeypatch.context() as patched:
            patched.setattr(engine.store, "roster", broken)
            assert [gauges() for _ in range(3)] == [{"holdfast_store_up": 0.0}] * 3
        assert [each.getMessage() for each in caplog.records] == ["could not ask the store for /metrics: a defect"]
        assert gauges()["holdfast_store_up"] == 1.0


def test_every_metric_says_what_it_is() -> None:
    assert len({metric.name for metric in rules.METRICS}) == len(rules.METRICS)
    for metric in rules.METRICS:
        assert metric.name.startswith("holdfast_")
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
        assert bool(metric.bounds) == (metric.kind is MetricKind.HISTOGRAM)
        assert list(metric.bounds) == sorted(metric.bounds)
    assert {rules.LAG, rules.RECOVERED} <= {*rules.METRICS}
