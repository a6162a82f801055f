"""Tasks that kill the process that runs them: they end after a few crashes, and nobody else pays for it."""

from __future__ import annotations

import pytest
from tests.faults.session import Session
from tests.faults.stores import on
from tests.support.witness import What

from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL, Status

pytestmark = pytest.mark.slow

CRASHES = 4  # three are forgiven


def is_ended_by_its_crashes(session: Session, id: str) -> None:
    record = session.record(id)
    assert record.status is Status.FAILED
    assert record.error is not None
    assert record.error.type_name == "holdfast.errors:WorkerLost"
    assert f"that was crash {CRASHES} in a row, and 3 are forgiven: before, it ran on" in record.error.message
    assert _crashes(record) == CRASHES


def _crashes(record: InvocationRecord) -> int:
    return [entry.status for entry in record.history].count(Status.RUNNING_RECOVERY)


def goes_well(session: Session, poison: list[str]) -> None:
    """The verdict. That work is taken from a living worker is wrong, unless it is a pill that was run apart."""
    session.release()
    session.rest()
    session.stop()
    found = [each for each in session.violations() if each.invariant != "I20" or each.id not in poison]
    assert not found, "\n".join([*map(str, found), session.told()])


@on("sqlite")
def test_only_the_guilty_one_is_charged(session: Session) -> None:
    innocent = session.submit("a", "b", "c", task="hold") + session.submit("d", "e", task="await_release")
    runner = session.start_runner("--workers", "1", "--concurrency", "6")
    session.began(*"abcde")
    worker = session.events(What.EXEC_START)[0].pid
    assert {event.pid for event in session.events(What.EXEC_START)} == {worker}
    (poison,) = session.submit("pill", task="exits")
    session.until(lambda: session.record(poison).status in FINAL, "the pill ends")
    is_ended_by_its_crashes(session, poison)
    session.release()
    session.until(lambda: all(session.record(id).status in FINAL for id in innocent), "the innocent end")
    assert {session.record(id).status for id in innocent} == {Status.SUCCESS}
    assert {_crashes(session.record(id)) for id in innocent} <= {1, 2}
    goes_well(session, [poison])
    assert runner.says(", 2 worker"), "the workers died more than twice"
    twice = [token for token, id in zip("abcde", innocent, strict=True) if _crashes(session.record(id)) == 2]
    assert twice, "the pill did not strike among others again"
    last = {event.token: event.pid for event in session.events(What.EXEC_START)}
    assert len({last[token] for token in twice}) == len(twice), "they did not run in processes of their own"


@pytest.mark.faults
@on("sqlite")
def test_several_pills_do_not_cost_a_bystander_its_life(session: Session) -> None:
    """Once it runs apart, it ends with its worker, but is not charged for that."""
    (innocent,) = session.submit("bystander", task="hold")
    session.start_runner("--workers", "1", "--concurrency", "4")
    session.began("bystander")
    for name in ("first pill", "second pill"):
        (pill,) = session.submit(name, task="exits")
        session.until(lambda: session.record(pill).status in FINAL, f"the {name} ends")  # noqa: B023
    session.release()
    session.until(lambda: session.record(innocent).status in FINAL, "the bystander ends")
    record = session.record(innocent)
    assert record.status is Status.SUCCESS, session.told()
    assert _crashes(record) == 2
    assert any(entry.why.endswith("it ran in an isolated process, and is not charged") for entry in record.history)
    session.stop()


@on("mongodb")
def test_whatever_kills_the_process_is_ended_and_other_work_goes_on(session: Session) -> None:
    runner = session.start_runner("--workers", "1", "--concurrency", "4")
    poison = session.submit("crash", task="segfaults") + session.submit("hunger", task="devours")
    session.submit("beside", seconds=0.3)
    session.until(lambda: all(session.record(id).status in FINAL for id in poison), "the pills end")
    for id in poison:
        is_ended_by_its_crashes(session, id)
    (after,) = session.submit("after")
    session.until(lambda: session.record(after).status in FINAL, "work goes on")
    assert session.record(after).attempt == 1
    goes_well(session, poison)
    most = [", 1 worker died", ", 2 worker", ", 3 worker", ", 4 worker"]  # two for each pill, if they strike one by one
    assert any(map(runner.says, most)), "pills that were known were run among others"
    assert all(record.status is Status.SUCCESS for record in session.records() if record.id not in poison)
