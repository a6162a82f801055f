"""Processes that are killed while what they run is being cancelled: it ends, and is never run again."""

from __future__ import annotations

import os
import signal

import pytest
from tests.faults.session import Session
from tests.faults.stores import STORES, on
from tests.support.witness import What

from holdfast.model.status import FINAL, Status

pytestmark = pytest.mark.slow


def is_asked(session: Session, id: str) -> None:
    """Cancel what runs, and see that its code takes its time."""
    assert session.app.invocation(id).cancel("enough", by="ann") is Status.CANCELLING
    assert session.record(id).status is Status.CANCELLING


def ends_cancelled(session: Session, id: str) -> None:
    session.until(lambda: session.record(id).status in FINAL, "it ends")
    record = session.record(id)
    walked = [entry.status for entry in record.history]
    assert walked[-3:] == [Status.CANCELLING, Status.RUNNING_RECOVERY, Status.CANCELLED]
    assert record.cancellation is not None
    assert record.cancellation.by == "ann"
    assert len(session.events(What.EXEC_START, token="a")) == 1
    session.release()
    session.rest()
    session.stop()
    found = session.violations()
    assert not found, "\n".join([*map(str, found), session.told()])


@on(*STORES)
@pytest.mark.xdist_group("mongo")
def test_a_worker_that_is_killed_meanwhile(session: Session) -> None:
    (id,) = session.submit("a", task="hold")
    session.start_runner("--workers", "1", "--concurrency", "2")
    session.began("a")
    is_asked(session, id)
    worker = session.events(What.EXEC_START)[0].pid
    with session.witness.fault("kill", pid=worker):
        os.kill(worker, signal.SIGKILL)
    ends_cancelled(session, id)


@on(*STORES)
@pytest.mark.xdist_group("mongo")
def test_a_runner_that_is_killed_meanwhile(session: Session) -> None:
    (id,) = session.submit("a", task="hold")
    victim = session.start_runner("--workers", "0", "--concurrency", "2")
    session.began("a")
    is_asked(session, id)
    with session.witness.fault("kill", pid=victim.pid):
        victim.signal_family(signal.SIGKILL)
    session.until(lambda: victim.code is not None, "it is gone")
    session.start_healthy()
    ends_cancelled(session, id)


@on("sqlite")
def test_what_waits_is_not_begun_and_what_ends_in_time_has_its_result(session: Session) -> None:
    (id, other) = (*session.submit("a", task="hold"), *session.submit("b", delay=600.0))
    session.start_runner("--workers", "1", "--concurrency", "2")
    session.began("a")
    session.app.invocation(other).cancel("not yet begun", by="bob")
    session.app.invocation(id).cancel("enough", by="ann")
    session.release()
    session.until(lambda: session.record(id).status in FINAL, "it ends")
    assert session.record(id).status is Status.SUCCESS  # its code came to its end in the time of grace
    assert session.record(other).status is Status.CANCELLED
    assert session.events(What.EXEC_START, token="b") == []
