"""The benchmarks: that they measure something, and that a count that grows is noticed."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent))  # the benchmarks are not installed with the package

import tests.support.mongod
from benchmarks import (
    bench,
    counts,
    crowd,
    hooks,
    measure,
    mongo,
    monitor,
    neighbour,
    scale,
    stock,
    sustained,
    workflows,
    world,
)
from benchmarks.counts import Verdict, compare, passes, report, smallest
from benchmarks.quiet import Quiet
from benchmarks.syncs import CannotCount, SyncCounter
from benchmarks.targets import TARGETS, Fresh
from benchmarks.work import counter
from tests.support.patience import patient

from holdfast.clock import SystemClock
from holdfast.store import open_store
from holdfast.store.contract import Ability

TINY = measure.Sizes(submits=5, mapped=20, drained=40, waits=5, idle_seconds=0.1, rounds=3)
CALLS, FLUSHES = "drain: Python calls", "drain: flushes to disk"


def verdicts(committed: counts.Counts, now: counts.Counts) -> dict[str, Verdict]:
    return {line.name: line.verdict for line in compare(committed, now)}


@pytest.fixture
def no_mongod(monkeypatch: pytest.MonkeyPatch) -> None:
    def binary() -> str:
        raise RuntimeError("there is none in this test")

    monkeypatch.setattr(tests.support.mongod, "binary", binary)
    monkeypatch.delenv("HOLDFAST_TEST_MONGODB_URL", raising=False)


# --- comparing counts


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        (100, Verdict.SAME),
        (109, Verdict.SAME),
        (111, Verdict.MORE),
        (83, Verdict.SAME),  # a drain's calls are committed with a tenth of room
        (80, Verdict.LESS),
    ],
)
def test_a_count_may_stray_by_ten_percent(now: float, verdict: Verdict) -> None:
    assert verdicts({CALLS: 100}, {CALLS: now}) == {CALLS: verdict}


def test_one_more_file_on_the_path_of_a_lone_task_fails() -> None:
    assert verdicts({counts.FILES: 34}, {counts.FILES: 35}) == {counts.FILES: Verdict.MORE}
    assert verdicts({counts.FILES: 34}, {counts.FILES: 34}) == {counts.FILES: Verdict.SAME}


def test_eleven_percent_more_fails_and_names_the_count() -> None:
    lines = compare({CALLS: 100, FLUSHES: 3}, {CALLS: 111, FLUSHES: 3})
    assert not passes(lines)
    grown = next(line for line in report(lines).splitlines() if line.startswith(CALLS))
    assert grown.split()[-4:] == ["100", "111", "1.11", "MORE"]


def test_twenty_percent_less_passes_and_asks_for_a_rewrite() -> None:
    lines = compare({CALLS: 100}, {CALLS: 80})
    assert passes(lines)
    assert "--write" in report(lines)


def test_within_the_tolerance_there_is_nothing_to_do() -> None:
    assert "--write" not in report(compare({CALLS: 100}, {CALLS: 105}))


def test_something_where_there_was_nothing_fails() -> None:
    assert verdicts({FLUSHES: 0}, {FLUSHES: 0.001}) == {FLUSHES: Verdict.MORE}
    assert verdicts({FLUSHES: 0}, {FLUSHES: 0}) == {FLUSHES: Verdict.SAME}


def test_a_count_that_is_missing_on_either_side_fails() -> None:
    assert verdicts({}, {CALLS: 1}) == {CALLS: Verdict.NEW}
    assert verdicts({CALLS: 1}, {FLUSHES: 1}) == {CALLS: Verdict.GONE, FLUSHES: Verdict.NEW}
    assert not passes(compare({CALLS: 1}, {}))
    assert not passes(compare({}, {CALLS: 1}))


def test_where_flushes_cannot_be_counted_the_rest_is_compared() -> None:
    lines = compare({CALLS: 100, FLUSHES: 3}, {CALLS: 100})
    assert passes(lines)
    assert "not counted here" in report(lines)
    assert not passes(compare({CALLS: 100, FLUSHES: 3}, {CALLS: 120}))


def test_without_a_mongod_the_rest_is_compared() -> None:
    committed = {CALLS: 100.0, FLUSHES: 3.0, counts.MONGO_LONE: 6.0, counts.MONGO_DRAIN: 0.2}
    lines = compare(committed, {CALLS: 100, FLUSHES: 3})
    assert passes(lines)
    assert "MongoDB's commands are not counted here" in report(lines)
    assert "Flushes" not in report(lines)
    assert not passes(compare(committed, {CALLS: 100, FLUSHES: 3, counts.MONGO_LONE: 6}))  # one of two is an error


def test_a_command_more_on_mongodb_fails() -> None:
    assert not passes(compare({counts.MONGO_LONE: 6}, {counts.MONGO_LONE: 7}))


def test_the_smallest_of_the_rounds_counts() -> None:
    assert smallest([{CALLS: 3, FLUSHES: 1}, {CALLS: 2, FLUSHES: 4}]) == {CALLS: 2, FLUSHES: 1}


def test_the_committed_counts_are_those_of_the_workloads() -> None:
    committed = json.loads(counts.COMMITTED.read_text("utf-8"))
    kinds = (counts.TRANSACTIONS, counts.FLUSHES, counts.CALLS)
    on_sqlite = {f"{name}: {kind}" for name in counts.WORKLOADS for kind in kinds}
    assert set(committed) == on_sqlite | {counts.FILES} | set(counts.MONGO)
    assert all(value > 0 for value in committed.values())


def test_a_check_stops_at_the_first_good_round_and_fails_after_three_bad_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_mongod: None
) -> None:
    (tmp_path / "counts.json").write_text(json.dumps({CALLS: 100}))
    monkeypatch.setattr(counts, "COMMITTED", tmp_path / "counts.json")
    measured = iter([150.0, 104.0, 150.0, 150.0, 150.0])
    monkeypatch.setattr(counts, "measure", lambda mongo: ({CALLS: next(measured)}, {}))
    assert counts.main(["--check"]) == 0
    assert counts.main(["--check"]) == 1
    assert list(measured) == []


# --- counting


def test_every_flush_of_sqlite_is_seen(tmp_path: Path) -> None:
    counter = SyncCounter()
    try:
        counter.__enter__()
    except CannotCount as error:
        pytest.skip(str(error))
    try:
        full, normal = (_flushes(counter, tmp_path / mode, mode) for mode in ("full", "normal"))
    finally:
        counter.__exit__(None, None, None)
    assert full == 20  # the log, once per commit
    assert normal == 0


def _flushes(counter: SyncCounter, path: Path, synchronous: str) -> int:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute("CREATE TABLE t (x)")
    before = counter.count
    for number in range(20):
        connection.execute("INSERT INTO t VALUES (?)", (number,))
    flushes = counter.count - before
    connection.close()
    return flushes


def test_counts_of_a_lone_task(tmp_path: Path) -> None:
    counting = subprocess.run(  # apart: a profiler among the threads of other tests has hung the interpreter
        [sys.executable, "-c", _COUNTING, f"sqlite:///{tmp_path / 'counts.db'}"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=True,
    )
    transactions, settles, left = json.loads(counting.stdout)
    assert transactions >= 9  # submit, claim, settle
    assert settles > 0
    assert not left


_COUNTING = """
import json, sys
from benchmarks import counts
meter = counts.Meter()
counts.wait_for_each(sys.argv[1], 3, meter)
settles = sum(calls for name, calls in meter.functions.items() if "Settler.change_for" in name)
print(json.dumps([meter.totals[counts.TRANSACTIONS], settles, sys.getprofile() is not None]))
"""


@pytest.mark.slow
def test_commands_of_a_lone_task_and_of_a_drain(mongo_url: str) -> None:
    lone = mongo.lone(mongo_url, 3)
    for command in ("insert", "findAndModify", "update", "find"):  # on a busy machine a look may come too early
        assert lone[command, "holdfast_invocations"] >= 3
    assert mongo.without_signals(lone).total() < lone.total()
    drained = mongo.drain(mongo_url, 100)
    assert 0 < mongo.without_signals(drained).total() < drained.total() < 100


# --- measuring


def test_memory_is_measured_in_this_process() -> None:
    here = [each for each in measure.MEASUREMENTS if each.run is not measure.idle_cpu and _everywhere(each)]
    assert len(here) == 5
    for measurement in here:
        figures = measurement.run("memory://", TINY)
        assert figures.keys() == measurement.figures.keys()
        assert all(value > 0 for value in figures.values())


def _everywhere(measurement: measure.Measurement) -> bool:
    return measurement.needs is Ability.NONE and not measurement.only_for


@pytest.mark.slow
@pytest.mark.parametrize("stores", ["memory,sqlite", pytest.param("mongo", marks=pytest.mark.torture)])
def test_a_quick_bench_prints_every_figure(stores: str, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--quick", "--json", "--stores", stores])
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["fsync_p50_us"] > 0
    assert found["stores"].keys() | found["skipped"].keys() == set(stores.split(",")) <= TARGETS.keys()
    on_mongo = {name for each in measure.MEASUREMENTS if each.only_for for name in each.figures}
    of_processes = {name for each in measure.MEASUREMENTS if each.needs is not Ability.NONE for name in each.figures}
    for store, names in found["stores"].items():
        without = {"memory": on_mongo | of_processes, "sqlite": on_mongo, "mongo": set()}[store]
        assert names.keys() == measure.UNITS.keys() - without
    medians = [(name, figure["median"]) for store in found["stores"].values() for name, figure in store.items()]
    assert all(median > 0 for name, median in medians if name != "idle runner, commands")  # it may be that idle


@pytest.mark.faults
@pytest.mark.slow
def test_a_quick_bench_of_workflows_prints_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    workflows.main(["--quick", "--json", "--stores", "sqlite"])
    figures = json.loads(capsys.readouterr().out)["sqlite"]
    assert len(figures) == 5
    assert all(value > 0 for name, value in figures.items() if name != "a sleeping run [bytes]")


def test_a_quick_bench_of_the_world_prints_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    world.main(["--quick", "--json", "--stores", "memory"])
    figures = json.loads(capsys.readouterr().out)["memory"]
    assert len(figures) == 5
    assert min(figures.values()) > 0


@pytest.mark.faults
@pytest.mark.slow
def test_a_quick_bench_of_hooks_prints_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    hooks.main(["--quick", "--json", "--stores", "sqlite"])
    figures = json.loads(capsys.readouterr().out)["sqlite"]
    assert len(figures) == 6
    assert all(value > 0 for value in figures.values())


@pytest.mark.faults
@pytest.mark.slow
def test_a_quick_bench_of_the_monitor_prints_every_page(capsys: pytest.CaptureFixture[str]) -> None:
    monitor.main(["--parts", "pages", "--rounds", "1", "--archived", "300", "--backlog", "100"])
    text = capsys.readouterr().out
    for path in ("/", "/invocations", "/invocations/{id}", "/queues", "/limits/{name}", "/store"):
        assert re.search(rf"^{re.escape(path)} +\d", text, re.MULTILINE), path


def test_without_a_mongod_the_bench_says_so(no_mongod: None, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--quick", "--stores", "mongo"])
    assert "mongo: not measured: no mongod, or no driver for it: there is none in" in capsys.readouterr().out


def test_the_table_shows_the_median_the_best_and_what_a_store_cannot_do() -> None:
    machine = bench.describe_machine()
    text = bench.as_text(
        machine, {"memory": {"submit, map": [1000.0, 3000.0, 2000.0], "idle runner, CPU": [2, 1, 3]}}, {}
    )
    rows = {line.partition("  ")[0]: line.split() for line in text.splitlines()}
    assert rows["submit, map"][-3:] == ["tasks/s", "2,000", "(3,000)"]
    assert rows["idle runner, CPU"][-2:] == ["2.00", "(1.00)"]
    assert rows["drain 2×10, functions"][-1] == "-"
    assert "median of 3 (best)" in text


def test_a_drain_is_counted_from_five_percent_on() -> None:
    ends = [0.0] * 4 + [10.0] + [10.0 + tenth / 10 for tenth in range(1, 96)]  # a slow start, then ten per second
    assert measure.rate(ends) == pytest.approx(10.0)


def test_an_unknown_store_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--stores", "memory,oracle"])
    assert "no store 'oracle'" in capsys.readouterr().err


# --- at scale

SMALL = scale.Sizes(
    few=2200, archived=1500, backlog=500, rounds=1, repetitions=2, warm_ups=0, crowd=crowd.Sizes(backlog=600, rounds=1)
)
SEVERAL = replace(SMALL, rounds=3)


def scaled(fresh: Fresh) -> tuple[scale.Taken, scale.Work, list[scale.Line]]:
    taken, work, stocks = asyncio.run(scale.measure(fresh, SMALL, Quiet(0.0), lambda text: None))
    assert stocks[scale.ARCHIVE].count == stocks[scale.FEW].count + SMALL.archived
    assert stocks[scale.ARCHIVE].space > stocks[scale.FEW].space > 0
    return taken, work, scale.judge(taken, work, SMALL)


@pytest.mark.slow
def test_sqlite_looks_at_no_more_for_a_claim_a_submit_or_a_settle_at_scale() -> None:
    with TARGETS["sqlite"].served() as fresh:
        taken, work, lines = scaled(fresh)
    text = scale.report(taken, work, lines)
    assert all(any(line.startswith(name) for line in text.splitlines()) for name in scale.NAMES)
    assert [line for line in lines if not line.operation.startswith("list") and not line.flat] == []
    assert all(work[store][name] > 0 for store in work for name in scale.NAMES)


@pytest.mark.slow
@pytest.mark.xdist_group("mongo")
def test_mongodb_looks_at_no_more_at_scale(replica_set: str) -> None:
    taken, work, lines = scaled(lambda: tests.support.mongod.fresh_database(replica_set))
    assert [line for line in lines if not line.flat] == []
    for name in scale.NAMES:
        searches_nothing = name.startswith("submit") or name == "claim, nothing there"  # only sentinels are met
        assert all((work[store][name] < 5) is searches_nothing or name.endswith(" 1") for store in work), name
        assert len(taken[scale.ARCHIVE][name]) == len(taken[scale.FEW][name]) > 0


@pytest.mark.slow
def test_a_short_sustained_run_prints_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    code = sustained.main(["--stores", "memory,sqlite", "--seconds", "1", "--waits", "10", "--quiet"])
    printed = capsys.readouterr().out
    assert code in {0, 1}
    for store in ("memory", "sqlite"):
        (line,) = [line for line in printed.splitlines() if line.startswith(store)]
        assert len(line.removesuffix("TOO SLOW").split()) == 1 + sustained.PARTS + 4
    assert (code == 1) is ("TOO SLOW" in printed)


@pytest.mark.parametrize(
    ("last", "after", "good"), [(90.0, 1.3, True), (89.0, 1.0, False), (120.0, 1.31, False), (95.0, 0.5, True)]
)
def test_a_sustained_run_fails_when_it_slows_down(last: float, after: float, good: bool) -> None:
    figures = sustained.Figures([300.0, 100.0, *[100.0] * 7, last], 1.0, after)
    assert figures.good is good
    assert ("TOO SLOW" in sustained.report(600, {"mongo": figures})) is not good


@pytest.mark.slow
@pytest.mark.xdist_group("mongo")
@pytest.mark.parametrize("processes", [0, 2])
def test_a_crowd_claims_all_there_is(mongo_url: str, processes: int) -> None:
    several = crowd.Crowd(claimers=4, processes=processes, batch=50)
    outcome = crowd.run(mongo_url, several, SMALL.crowd.backlog, Quiet(0.0))  # raises unless all is claimed
    assert outcome.per_second > 0
    assert outcome.claims >= 1
    assert outcome.conflicts >= 0


def test_work_grows_with_what_is_read(tmp_path: Path) -> None:
    async def work(archived: int) -> int:
        url = f"sqlite:///{tmp_path}/{archived}.db"
        store = open_store(url, clock=SystemClock())
        await store.open()
        filled = await stock.stock(url, store, few=100, archived=archived, backlog=0, rng=random.Random(1))
        counted = await counter(url, store)(lambda: store.counts(stock.APP))
        assert sum((await store.counts(stock.APP)).values()) == filled.count
        await store.close()
        return counted

    few, many = (asyncio.run(work(archived)) for archived in (10, 2000))
    assert many > 2 * few


def times(*medians: float) -> list[float]:
    """Three repetitions for each round, around these medians."""
    return [value for median in medians for value in (median * 0.9, median, median * 5)]


def test_a_ratio_compares_what_was_measured_at_the_same_time() -> None:
    assert scale.ratio(times(1.2, 12.0, 1.2), times(1.0, 10.0, 1.0), 3) == pytest.approx(1.2)
    assert scale.ratio(times(1.2, 99.0, 1.2), times(1.0, 1.0, 1.0), 3) == pytest.approx(1.2)  # one bad spell


def line(time: float | None, work: float = 1.0, control: float = 1.0) -> scale.Line:
    return scale.Line(operation="claim 1", store=scale.ARCHIVE, time=time, control=control, work=work)


def test_flat_is_within_a_quarter_and_chance_is_granted_what_it_needed() -> None:
    assert line(1.25).flat
    assert not line(1.26).flat
    assert line(1.26, control=1.1).flat
    assert not line(1.26, control=0.5).flat
    assert not line(1.0, work=1.3).flat
    assert not line(1.0, work=1.3, control=2.0).flat
    assert line(None).flat
    assert not line(None, work=1.3).flat


@pytest.mark.parametrize(("archive", "code"), [(1.0, 0), (1.3, 1)])
def test_a_bench_at_scale_fails_if_something_is_not_flat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], archive: float, code: int
) -> None:
    async def measured(*_: object) -> scale.Measured:
        factors = {scale.FEW: 1.0, scale.AGAIN: 1.0, scale.ARCHIVE: archive, scale.BACKLOG: 1.0}
        taken = {store: {name: times(*[factor] * 3) for name in scale.NAMES} for store, factor in factors.items()}
        work = {store: dict.fromkeys(scale.NAMES, 7) for store in factors}
        return scale.Measured(taken, work, {store: stock.Stock(1, 1, []) for store in factors})

    monkeypatch.setattr(scale, "measure", measured)
    monkeypatch.setattr(scale, "FULL", SEVERAL)
    monkeypatch.setattr(scale, "_PATIENCE_SECONDS", 0.0)
    assert scale.main(["--stores", "sqlite"]) == code
    assert ("OVER" in capsys.readouterr().out) is bool(code)


def crowds(alone: float, many: float, conflicts: float) -> dict[crowd.Crowd, Sequence[crowd.Outcome]]:
    return {each: [crowd.Outcome(many if each.claimers > 1 else alone, conflicts, 1.0)] for each in crowd.CROWDS}


def test_a_crowd_must_get_more_than_one_and_not_hinder_itself() -> None:
    assert [each.name for each in crowd.CROWDS] == [
        "1 claimer, 1 process, batches of 50",
        "16 claimers, 4 processes, batches of 50",
        "1 claimer, 1 process, batches of 10",
        "16 claimers, 4 processes, batches of 10",
    ]
    assert crowd.complaints(crowds(100, 101, 0.19)) == {}
    assert set(crowd.complaints(crowds(100, 100, 0.0)).values()) == {"less than one alone"}
    assert set(crowd.complaints(crowds(100, 900, 0.2)).values()) == {"0.2 conflicts or more"}
    assert "less than one alone" in crowd.report(crowds(100, 90, 0.0))


def test_a_crowd_is_timed_until_nine_tenths_are_claimed() -> None:
    got = [(11.0, 45), (12.0, 45), (60.0, 10)]
    assert crowd.rate(10.0, got) == pytest.approx(45.0)


# --- the neighbour


def test_the_neighbour_is_compared_by_medians() -> None:
    theirs = [{neighbour.DRAIN: 20.0, neighbour.LATENCY: 200.0}, {neighbour.DRAIN: 24.0, neighbour.LATENCY: 220.0}]
    ours = [{neighbour.DRAIN: 1100.0, neighbour.LATENCY: 10.0}, {neighbour.DRAIN: 1100.0, neighbour.LATENCY: 11.0}]
    drain, latency = neighbour.report({"pynenc": theirs, "Holdfast": ours}).splitlines()[2:]
    assert drain.startswith(neighbour.DRAIN)
    assert drain.endswith("50.0×")
    assert latency.endswith("20.0×")


def test_without_python_312_the_neighbour_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert neighbour.main([]) == 0
    assert "needs Python 3.12" in capsys.readouterr().out
