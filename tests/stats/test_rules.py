"""Counting, without a store: bins of durations, errors of one kind, what a change counts as."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.codec import ErrorRecord
from holdfast.model import changes
from holdfast.model.cancellation import expired
from holdfast.model.changes import Applied, Change, Lost
from holdfast.model.records import HistoryEntry, InvocationRecord, RunState
from holdfast.model.status import Status
from holdfast.stats.rules import (
    MOST_CELLS,
    MOST_DEPLOYS,
    MOST_FAILURES,
    MOST_NOTABLE,
    OTHER_TASKS,
    OTHERS,
    Cell,
    Cells,
    DeployMark,
    Tally,
    bin_of,
    bounds_of,
    cell_of,
    count,
    count_all,
    distribution,
    key_of,
    marked,
    name_of,
    normalised,
    note,
    start_in,
    step_at_least,
    usual_step,
    where_of,
)
from holdfast.testing.samples import START, TASK, invocation

SECONDS = st.floats(min_value=1e-6, max_value=1e9)
KEY = key_of("default", TASK)
MINUTE = START // 60 * 60


def error(name: str = "ValueError", message: str = "no card") -> ErrorRecord:
    return ErrorRecord(type_name=name, message=message, traceback="", data=None)


def begun(waited: float = 0.5, *, epoch: int = 1, back_at: float | None = None, **facts: Any) -> InvocationRecord:
    """An invocation that a worker runs: it was created, or is back in the queue, and began `waited` seconds later."""
    record = invocation("a", **facts)
    queued = max(record.due_at, record.created_at) if back_at is None else back_at
    lines = [record.history[0]]
    if back_at is not None:
        lines.append(HistoryEntry(version=4, status=Status.REROUTED, at=back_at, operation="x", epoch=epoch - 1))
    for status in (Status.PENDING, Status.RUNNING):
        at = queued + waited
        lines.append(HistoryEntry(version=5, status=status, at=at, operation="y", owner="r/1", epoch=epoch))
    known = {"status": Status.RUNNING, "owner": "r/1", "epoch": epoch, "attempt": epoch, "history": tuple(lines)}
    return replace(record, **known)


def success(record: InvocationRecord, at: float) -> Change:
    return changes.completed(record, result=b"", operation="end", at=at)


def counted(record: InvocationRecord, change: Change) -> Cell:
    cells: Cells = {}
    count(cells, record, change)
    return cells.get(KEY, Cell())


# --- durations


@given(SECONDS)
def test_a_duration_is_within_its_bin(seconds: float) -> None:
    low, high = bounds_of(bin_of(seconds))
    assert low <= seconds < high
    assert high / low <= 1 + 1 / 16


@pytest.mark.parametrize("seconds", [0.0, -5.0, 1e-9, float("-inf")])
def test_what_took_no_time_is_in_the_shortest_bin(seconds: float) -> None:
    assert bin_of(seconds) == bin_of(1e-6)


@given(st.lists(SECONDS, min_size=1), st.sampled_from([0, 50, 90, 99, 100]))
def test_a_percentile_is_off_by_three_percent_at_most(found: list[float], percent: int) -> None:
    tally = Tally()
    for each in found:
        tally.add(each)
    times = distribution(tally)
    rank = max(1, -(-len(found) * percent // 100))
    exact = sorted(found)[rank - 1]
    assert times.percentile(percent) == pytest.approx(exact, rel=0.033)
    assert times.count == len(found)
    assert times.most == max(found)
    assert sum(number for _, _, number in times.histogram) == len(found)


def test_without_calls_there_is_no_percentile() -> None:
    empty = distribution(Tally())
    assert (empty.count, empty.mean, empty.percentile(50), empty.histogram) == (0, None, None, [])
    for wrong in (-1, 101, float("nan")):
        with pytest.raises(ValueError, match="is no percentage"):
            empty.percentile(wrong)


@given(st.lists(SECONDS), st.lists(SECONDS))
def test_tallies_add_up(one: list[float], two: list[float]) -> None:
    first, second, both = Tally(), Tally(), Tally()
    for tally, values in ((first, one), (second, two), (both, [*one, *two])):
        for each in values:
            tally.add(each)
    first.merge(second)
    assert (first.bins, first.most) == (both.bins, both.most)
    assert first.total == pytest.approx(both.total)


# --- errors of one kind


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        ("order 7 has no card", "order 12,345.50 has no card", "order <n> has no card"),
        ("no user 'c-17'", "no user 'c-18'", "no user '…'"),
        ("no column 'price'", "no column 'price'", "no column 'price'"),
        ("<Pool at 0x7f3a>", "<Pool at 0xff>", "<Pool at <address>>"),
        ("ann@shop.example is unknown", "bob.b@x.example is unknown", "<email> is unknown"),
        ("since 2026-11-19T08:00:00Z", "since 2025-01-02 03:04:05.67+01:00", "since <time>"),
        ("job 01jd3w4t6xkq8r9v2m5n7p0b1c is gone", "job 0123456789abcdef01234567 is gone", "job <id> is gone"),
        ("3f2504e0-4f89-41d3-9a0c-0305e82c3301!", "00000000-0000-0000-0000-000000000000!", "<id>!"),
        ("timeout after 3s\nhost: a", "timeout after 40s\nhost: b", "timeout after <n>s"),
        ("utf8 and http2 stay", "utf8 and http2 stay", "utf8 and http2 stay"),
    ],
)
def test_errors_that_differ_by_their_values_are_of_one_kind(one: str, other: str, kind: str) -> None:
    assert normalised("builtins:ValueError", one) == normalised("ValueError", other) == f"ValueError: {kind}"


def test_other_errors_are_of_another_kind() -> None:
    kinds = {normalised("ValueError", "no card"), normalised("KeyError", "no card"), normalised("ValueError", "no")}
    assert len(kinds) == 3
    assert normalised("shop:Refused", "") == "shop:Refused"


@given(st.text(), st.text())
def test_any_text_becomes_a_short_one_that_every_store_holds(name: str, message: str) -> None:
    kind = normalised(name, message)
    assert len(kind) <= 1000
    kind.encode()
    assert "\0" not in kind
    assert "\n" not in kind


def test_a_huge_message_takes_no_time_and_a_password_is_not_kept() -> None:
    assert len(normalised("E", "7" * 10_000_000)) < 300
    assert len(normalised("E", "'" * 100_000 + "@." * 100_000)) < 1000
    assert "hunter2" not in normalised("E", "no answer of mongodb://ann:hunter2@db.example/shop")


def test_the_place_of_an_error_is_the_last_frame() -> None:
    trace = 'Traceback:\n  File "/a/b/shop.py", line 7, in charge\n  File "C:\\lib\\pay.py", line 8, in pay\nE: x'
    assert where_of(trace) == "pay.py in pay"
    assert where_of("no frames") == ""


# --- what a change counts as


def test_a_success_counts_with_its_times() -> None:
    record = begun(0.5)
    cell = counted(record, success(record, START + 2.5))
    assert (cell.succeeded, cell.failed, cell.run.total, cell.wait.total) == (1, 0, 2.0, 0.5)
    assert (list(cell.slow), list(cell.delayed), list(cell.tried)) == (["a"], [], [])


def test_a_delayed_call_waits_from_when_it_is_due() -> None:
    record = begun(0.25, due_at=START + 60)
    assert counted(record, success(record, START + 61)).wait.total == 0.25


def test_a_call_that_was_moved_up_waits_from_its_creation() -> None:
    record = begun(0.25, due_at=START - 86_400)
    assert counted(record, success(record, START + 1)).wait.total == 0.25


def test_a_call_that_was_recovered_waits_from_its_return_to_the_queue() -> None:
    record = begun(0.25, epoch=2, back_at=START + 100)
    cell = counted(record, success(record, START + 101))
    assert (cell.wait.total, cell.run.total, list(cell.tried)) == (0.25, 0.75, ["a"])


def test_a_call_that_a_rate_or_limit_has_held_up_waits_from_then() -> None:
    record = begun(60.0)  # it was due at its start, which the rate has given it
    held_up = (
        HistoryEntry(version=2, status=Status.CONCURRENCY_CONTROLLED, at=START + 2, operation="c"),
        HistoryEntry(version=3, status=Status.REROUTED, at=START + 59, operation="d"),
    )
    first, *claim = record.history
    record = replace(record, due_at=START + 59.75, history=(first, *held_up, *claim))
    change = success(record, START + 61)
    cell = counted(record, change)
    assert (cell.wait.total, cell.run.total, list(cell.delayed)) == (58.0, 1.0, ["a"])
    quick: Cells = {}
    count_all(lambda start: quick, [([(record, change)], [Applied()])], change.at)
    assert quick[KEY] == cell
    again = begun(0.25, epoch=2, back_at=START + 100)  # it was held up before its first attempt only
    ran = HistoryEntry(version=4, status=Status.RUNNING, at=START + 60, operation="e", epoch=1)
    again = replace(again, history=(first, *held_up, ran, *again.history[1:]))
    assert counted(again, success(again, START + 101)).wait.total == 0.25


def test_a_parent_that_paused_has_run_since_its_start() -> None:
    record = begun(0.0)
    lines = [
        HistoryEntry(version=6 + n, status=status, at=START + 1 + n, operation="z", owner="r/1", epoch=1)
        for n, status in enumerate((Status.PAUSED, Status.RESUMED))
    ]
    record = replace(record, status=Status.RESUMED, history=(*record.history, *lines))
    assert counted(record, success(record, START + 5)).run.total == 5.0


def test_a_failure_and_a_retry_count_with_their_errors() -> None:
    record = begun()
    failed = changes.failed(record, error=error(), operation="end", at=START + 1)
    cell = counted(record, failed)
    assert (cell.failed, cell.errors["ValueError: no card"].count, cell.run.total) == (1, 1, 0.5)
    retried = changes.retried(record, error=error(), due_at=START, queue=None, operation="o", at=START + 1, why="")
    cell = counted(record, retried)
    assert (cell.failed, cell.retried, cell.errors["ValueError: no card"].retried) == (0, 1, 1)
    assert cell.errors["ValueError: no card"].ids == ["a"]


def test_a_lost_attempt_counts_and_one_that_never_began_does_not() -> None:
    record = begun()
    lost = changes.recovered(record, by="r", operation="o", at=START + 1, why="dead")
    assert (counted(record, lost).lost, counted(record, lost).succeeded) == (1, 0)
    last = changes.recovered(record, by="r", operation="o", at=START + 1, why="dead", error=error("WorkerLost"))
    assert (counted(record, last).lost, counted(record, last).failed) == (1, 1)
    back = changes.handed_back(record, operation="o", at=START + 1, why="stop")
    assert counted(record, back) == Cell()


def test_a_call_that_expired_has_failed_without_having_run() -> None:
    record = invocation("a", start_by=START + 1)
    change = expired(record, error=error("Expired"), operation="o", at=START + 2)
    assert change is not None
    cell = counted(record, change)
    assert (cell.failed, cell.run.bins, cell.wait.bins) == (1, {}, {})


def test_a_run_counts_once_from_its_first_start() -> None:
    record = replace(begun(0.5, epoch=7, back_at=START + 3600), run=RunState(started_at=START + 1))
    cell = counted(record, success(record, START + 3601))
    assert (cell.succeeded, cell.run.total, cell.wait.bins, dict(cell.tried)) == (1, 3600.0, {}, {})


def test_a_start_counts_as_nothing() -> None:
    record = replace(begun(), status=Status.PENDING)
    assert counted(record, changes.started(record, operation="o", at=START)) == Cell()


@given(
    st.floats(min_value=-10, max_value=1e5),
    st.floats(min_value=-10, max_value=1e5),
    st.floats(min_value=-1e5, max_value=1e5),
)
def test_plain_successes_are_counted_as_all_others(waited: float, took: float, due: float) -> None:
    """`count_all` has a way of its own for them."""
    record = begun(waited, due_at=START + due)
    change = success(record, max(record.due_at, START) + waited + took)
    quick: Cells = {}
    slow: Cells = {}
    count_all(lambda start: quick, [([(record, change)], [Applied()])], change.at)
    count(slow, record, change)
    assert quick == slow


def test_only_what_was_written_is_counted_each_in_its_minute_and_late_ones_now() -> None:
    record, minutes = begun(created_at=MINUTE, due_at=MINUTE), dict[int, Cells]()
    written = [(record, success(record, MINUTE + second)) for second in (1, 2, 61)]
    verdicts = [Applied(), Lost(Status.SUCCESS, None, 1), Applied(again=True)]
    count_all(lambda start: minutes.setdefault(start, {}), [(written, verdicts)], MINUTE + 50)
    assert {start: cells[KEY].succeeded for start, cells in minutes.items()} == {MINUTE: 1, MINUTE + 60: 1}
    late = dict[int, Cells]()
    count_all(lambda start: late.setdefault(start, {}), [(written, verdicts)], MINUTE + 7200)
    assert {start: cells[KEY].succeeded for start, cells in late.items()} == {MINUTE + 7200: 2}


# --- bounds


def test_many_errors_tasks_and_slow_calls_take_bounded_room() -> None:
    cell = Cell()
    for number in range(MOST_FAILURES + 50):
        cell.failure(f"E{number}").count += 1
    assert len(cell.errors) == MOST_FAILURES + 1
    assert cell.errors[OTHERS].count == 50
    cells: Cells = {}
    for number in range(MOST_CELLS + 50):
        cell_of(cells, key_of("q", f"t{number}")).succeeded += 1
    assert (len(cells), cells[OTHER_TASKS].succeeded) == (MOST_CELLS + 1, 50)
    best: dict[str, tuple[float, float]] = {}
    for number in range(100):
        note(best, f"i{number % 50}", float(number % 50), START)
    assert sorted(best) == sorted(f"i{number}" for number in range(50 - MOST_NOTABLE, 50))


def test_a_merged_failure_has_the_latest_message_and_the_first_time() -> None:
    older, newer = begun(), replace(begun(), id="b")
    cells: Cells = {}
    count(cells, newer, changes.failed(newer, error=error(message="order 9"), operation="o", at=START + 9))
    count(cells, older, changes.failed(older, error=error(message="order 2"), operation="o", at=START + 2))
    failure = cells[KEY].errors["ValueError: order <n>"]
    assert (failure.count, failure.first_at, failure.last_at) == (2, START + 2, START + 9)
    assert (failure.message, failure.ids) == ("order 9", ["b", "a"])


# --- names, steps and marks


def test_names_of_files_sort_by_time_and_others_are_not_ours() -> None:
    assert name_of(60) < name_of(120, "w") < name_of(180) < name_of(10_000_000_000)
    assert (start_in(name_of(60)), start_in(name_of(120, "w"))) == (60, 120)
    assert [start_in(wrong) for wrong in ("", "60", "00000000060x", "٠" * 11, "-0000000060")] == [None] * 5


@pytest.mark.parametrize(
    ("seconds", "step"), [(60, 60), (3600, 60), (86_400, 1800), (30 * 86_400, 6 * 3600), (1e10, 604_800)]
)
def test_the_usual_step_shows_about_a_hundred_points(seconds: float, step: int) -> None:
    assert usual_step(seconds) == step


def test_a_step_is_a_multiple_of_the_coarsest_file() -> None:
    assert step_at_least(60, []) == 60
    assert step_at_least(60, [60, 600]) == 600
    assert step_at_least(900, [60, 600]) == 1200


def test_a_deploy_is_marked_and_so_is_its_undoing() -> None:
    def mark(at: float, release: str) -> DeployMark:
        return DeployMark(at=at, release=release)

    marks: Any = ()
    for at, release in ((0, "a"), (1000, "a"), (2000, "b"), (2010, "a"), (2020, "b"), (2030, "a"), (9000, "b")):
        marks = marked(marks, mark(at, release), 1e9) or marks
    assert [(each.at, each.release) for each in marks] == [(0, "a"), (2000, "b"), (2010, "a"), (9000, "b")]
    assert marked(marks, mark(9000 + 1e9, "c"), 1000.0) == (mark(9000 + 1e9, "c"),)
    many = [mark(n * 1000.0, f"r{n}") for n in range(MOST_DEPLOYS)]
    assert len(marked(many, mark(1e6, "new"), 1e9) or ()) == MOST_DEPLOYS
