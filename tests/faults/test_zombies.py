"""Runners that were declared dead and are not: frozen for too long, or cut off from the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.faults.session import Process, Session
from tests.faults.settings import DEAD_AFTER_SECONDS
from tests.faults.stores import on
from tests.store.mongo.tools import database_of, with_options
from tests.support.freezing import freeze, wake
from tests.support.proxy import Proxy
from tests.support.witness import What

from holdfast.clock import SystemClock
from holdfast.model.status import FINAL, Status

pytestmark = pytest.mark.slow

PERMITTED_SECONDS = DEAD_AFTER_SECONDS * 2 / 3


@contextmanager
def frozen(session: Session, process: Process, *, family: bool = True) -> Iterator[None]:
    pids = process.family if family else [process.pid]
    with session.witness.fault("freeze", pid=process.pid):
        freeze(*pids, can_write=session.can_write)
        try:
            yield
        finally:
            wake(*pids)


def everything_runs_again(session: Session, *tokens: str) -> None:
    """Wait until each of these was begun a second time."""

    def twice() -> bool:
        begun = [event.token for event in session.events(What.EXEC_START)]
        return all(begun.count(token) == 2 for token in tokens)

    session.until(twice, f"{tokens} run again elsewhere")


def begins_anew(session: Session, process: Process, healthy: Process) -> None:
    """It is on the roster under another name, and does what is submitted when nobody else is there."""
    session.until(lambda: len({e.owner for e in session.runners() if e.pid == process.pid}) == 2, "it joins again")
    old, new = [event.owner for event in session.runners() if event.pid == process.pid]
    session.until(lambda: [runner.id for runner in session.roster() if runner.pid == process.pid] == [new], "anew")
    assert old not in {record.owner for record in session.records()}
    session.stop(healthy)
    (id,) = session.submit("anew")
    session.until(lambda: session.record(id).status in FINAL, "the new life works")
    assert str(session.record(id).history[1].owner).startswith(f"{new}/")


@on("sqlite", "mongodb")
def test_a_frozen_runner_wakes_up_and_nothing_that_it_writes_is_accepted(session: Session) -> None:
    ids = session.submit("thread", task="hold") + session.submit("loop", task="await_release")
    runner = session.start_runner("--workers", "1", "--concurrency", "2")
    session.began("thread", "loop")
    with frozen(session, runner):
        healthy = session.start_healthy()
        everything_runs_again(session, "thread", "loop")
        session.release()
        session.until(lambda: all(session.record(id).status in FINAL for id in ids), "they end")
        ends = [session.record(id) for id in ids]
    # From here on the zombie's code runs to its end too, and its worker tries to write that.
    begins_anew(session, runner, healthy)
    assert [session.record(id) for id in ids] == ends
    session.verdict()


@on("sqlite", "mongodb")
def test_a_worker_whose_runner_is_frozen_starts_nothing_and_ends_when_its_work_is_taken(session: Session) -> None:
    (id,) = session.submit("held", task="hold")
    runner = session.start_runner("--workers", "1", "--concurrency", "2")
    session.began("held")
    worker = session.events(What.EXEC_START)[0].pid
    with frozen(session, runner, family=False):
        lapsed = SystemClock().monotonic() + PERMITTED_SECONDS
        session.until(lambda: SystemClock().monotonic() > lapsed, "its permit is over")
        session.submit("late")
        healthy = session.start_healthy()
        everything_runs_again(session, "held")
        session.until(lambda: worker not in runner.family, "the worker ends, though its runner is silent")
        assert (session.record(id).status, session.record(id).epoch) == (Status.RUNNING, 2)
        session.release()
        session.until(lambda: session.record(id).status in FINAL, "it ends elsewhere")
    begins_anew(session, runner, healthy)
    assert [event.pid for event in session.events(What.EXEC_START, token="late")] == [healthy.pid]
    assert session.record(id).history[-1].owner is None
    session.verdict()


@on("mongodb", at_leisure=("sqlite",))
def test_coroutines_of_a_zombie_that_works_itself_are_cancelled(session: Session) -> None:
    ids = session.submit("thread", task="hold") + session.submit("loop", task="await_release")
    runner = session.start_runner("--workers", "0", "--concurrency", "2")
    session.began("thread", "loop")
    with frozen(session, runner):
        healthy = session.start_healthy()
        everything_runs_again(session, "thread", "loop")
    session.until(lambda: session.events(What.EXEC_END, token="loop", pid=runner.pid, raised=True), "it is cancelled")
    session.release()
    session.until(lambda: session.events(What.EXEC_END, token="thread", pid=runner.pid), "a thread cannot be")
    session.until(lambda: all(session.record(id).status in FINAL for id in ids), "they end")
    begins_anew(session, runner, healthy)
    session.verdict()


@on("mongodb")
def test_a_runner_that_is_cut_off_starts_no_work_and_begins_anew_when_it_is_back(session: Session) -> None:
    server = session.url.partition("://")[2].partition("/")[0]
    with Proxy(server) as proxy:
        through = with_options(f"mongodb://{proxy.address}/{database_of(session.url)}", directConnection="true")
        runner = session.start_runner("--workers", "1", "--concurrency", "2", HOLDFAST_URL=through)
        session.submit("held", task="hold")
        session.began("held")
        # Short work, so that the worker has more of it in reserve than it runs.
        shorts = [f"short {number}" for number in range(80)]
        session.submit(*shorts, seconds=0.05)
        session.began("short 9")
        workers = set(runner.family)
        with session.witness.fault("cut", pid=runner.pid):
            cut_at = SystemClock().monotonic()
            proxy.freeze()
            healthy = session.start_healthy()
            everything_runs_again(session, "held")
            session.release()
            session.ended("held", *shorts)
            healed_at = SystemClock().monotonic()
            proxy.thaw()
        begins_anew(session, runner, healthy)
        begun = [event.at - cut_at for event in session.events(What.EXEC_START) if event.pid in workers]
        late = [seconds for seconds in begun if PERMITTED_SECONDS + 0.3 < seconds < healed_at - cut_at]
        assert late == [], "work was begun without a permit"
        assert max(begun) > -0.5, "it was cut off when it had nothing to do, which proves nothing"
        session.verdict()
