"""Runs whose workers die: the crash cap, suspects, `at_most_once`, and hand-over."""

from __future__ import annotations

import signal
import time

import pytest
from tests.support.patience import patient
from tests.workflows.fleet import Fleet

from holdfast import Status
from holdfast.errors import WorkerLost

SQLITE = pytest.mark.parametrize("url", ["sqlite"], indirect=True)


def test_crashes_with_progress_in_between_are_not_in_a_row(fleet: Fleet) -> None:
    run = fleet.workflow("falling").submit(3)  # one crash for each step, and one in a row is forgiven
    fleet.start("--workers", "1", HOLDFAST_MAX_CRASH_RECOVERIES="1")
    assert run.result(patient(60)) == 3
    assert [len(fleet.processes(f"falls {number}")) for number in range(3)] == [2] * 3


@SQLITE
def test_crashes_without_progress_end_a_run(fleet: Fleet) -> None:
    run = fleet.workflow("falling").submit(2, 99)
    fleet.start("--workers", "1", HOLDFAST_MAX_CRASH_RECOVERIES="1")
    with pytest.raises(WorkerLost, match="crash 2 in a row"):
        run.result(patient(60))
    assert set(fleet.lines("falls")) == {"falls 0"}


@SQLITE
def test_the_step_of_a_suspect_run_runs_apart_and_its_body_does_not(fleet: Fleet) -> None:
    run = fleet.workflow("suspect").submit()
    fleet.start("--workers", "1")
    step, data, body = run.result(patient(60))
    assert step == data != body
    bodies, steps = fleet.processes("body"), fleet.processes("apart")
    assert steps[:2] == bodies[:2]
    assert (steps[2], bodies[2]) == (step, body)


def test_a_step_that_may_run_once_raises_worker_lost_after_a_crash(fleet: Fleet) -> None:
    run = fleet.workflow("careful").submit()
    fleet.start("--workers", "1")
    assert run.result(patient(60)).startswith("lost: the worker that ran once#1 died")
    assert fleet.lines("once") == ["once"]
    step = run.step("once#1")
    assert (step.status, step.error and step.error.type_name) == ("failed", "holdfast.errors:WorkerLost")


@SQLITE
def test_a_stopping_runner_hands_a_run_over_at_its_next_step_boundary(fleet: Fleet) -> None:
    run = fleet.workflow("walk").submit(4, 1.0)
    first = fleet.start("--workers", "1")
    fleet.until(lambda: fleet.lines("paces 1"), "the second step begins")
    began = time.monotonic()
    first.send_signal(signal.SIGTERM)
    fleet.until(lambda: first.poll() is not None, "the runner ends")
    assert time.monotonic() - began < 15
    assert first.returncode == 0
    assert fleet.lines("pace")[-1] == "paced 1", "the step that ran was finished"
    record = run.record()
    assert record.status is Status.REROUTED
    assert [line.status for line in record.history][-2:] == [Status.SUSPENDED, Status.REROUTED]
    fleet.start("--workers", "1")
    assert run.result(patient(60)) == 6
    assert fleet.lines("paces") == [f"paces {number}" for number in range(4)]
    assert [event for event in run.events() if event.type == "takeover"] == []
