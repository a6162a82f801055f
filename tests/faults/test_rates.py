"""Rates from outside: two real runners, one of which is killed, and what the tasks have written down when they began.

A call begins some time after its claim. The times at which calls were claimed keep to the rate without allowance. The
first lines of code keep to it with an allowance: what the worst call of the run took from its claim to its first line,
less the guard that rates keep for that.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest
from tests.faults import pacing
from tests.faults.pacing import LASTING, PACES, Start, starts_in
from tests.faults.session import Session
from tests.faults.stores import STORES, on
from tests.support.windows import excess

from holdfast.model.rates import rate_of
from holdfast.model.records import InvocationRecord
from holdfast.model.status import Status

pytestmark = pytest.mark.slow

CALLS = {LASTING: 6, "steady": 150, "by_customer": 40, "read_api": 40, "write_api": 40, "shaky": 30}
BEFORE_KILL = 60  # starts


def submit_all(session: Session) -> None:
    tasks = {name: session.app.get_task(name) for name in CALLS}
    for name, count in CALLS.items():
        keys = {"by_customer": ["ann", "bob"], "read_api": ["api"], "write_api": ["api"]}.get(name, [name])
        tasks[name].map([(keys[number % len(keys)],) for number in range(count)])


def runner(session: Session, *options: str) -> None:
    session.start("holdfast", "run", "tests.faults.pacing:app", "--concurrency", "8", *options)


def owner_of_work(session: Session) -> str:
    """Return the runner of a call that goes on until its process is killed; empty if none runs."""
    running = [record for record in session.records() if record.task == LASTING and record.status is Status.RUNNING]
    return (running[0].owner or "").partition("/")[0] if running else ""


def claims_of(records: Sequence[InvocationRecord]) -> dict[tuple[str, int], float]:
    """Return when each attempt was claimed."""
    found = {}
    for record in records:
        began = [line.at for line in record.history if line.status is Status.RUNNING]
        found.update({(record.id, attempt): at for attempt, at in enumerate(began, 1)})
    return found


def broken(starts: dict[str, list[Start]], claims: dict[tuple[str, int], float]) -> list[str]:
    """Return in words which rates were exceeded."""
    found = []
    for key, pace in PACES.items():
        claimed = [claims[start.id, start.attempt] for start in starts[key]]
        late = max(start.at - at for start, at in zip(starts[key], claimed, strict=True))
        guard = rate_of(f"{pace.per_second}/s", pace.burst).guard
        allowed = pace.per_second * max(0.0, late - guard)
        for what, moments, most in (
            ("claims", claimed, 1e-6),
            ("first lines", [start.at for start in starts[key]], allowed),
        ):
            over = excess(moments, pace.per_second, pace.burst)
            if over > most:
                found.append(f"{key}: {over:.2f} {what} above {pace}; allowed: {most:.2f}, since {late:.3f} s passed")
    return found


@on(*STORES)
@pytest.mark.xdist_group("mongo")
def test_two_runners_keep_to_rates_while_one_is_killed_and_taken_over(session: Session) -> None:
    pacing.declare(session.app)
    runner(session, "--workers", "1")
    runner(session, "--workers", "0")
    session.until(lambda: len(session.roster()) == 2, "both runners join")
    submit_all(session)
    session.until(lambda: sum(map(len, starts_in(session.ledgers_folder).values())) > BEFORE_KILL, "calls begin")
    session.until(lambda: owner_of_work(session), "a runner runs a lasting call")
    its = owner_of_work(session)
    (pid,) = [each.pid for each in session.roster() if each.id == its]
    victim = next(process for process in session.processes if process.pid == pid)
    victim.signal_family(signal.SIGKILL)
    session.release()
    session.rest()

    records, starts = session.records(), starts_in(session.ledgers_folder)
    assert {record.status for record in records} == {Status.SUCCESS}
    assert len(records) == sum(CALLS.values()), "no waiter is forgotten"
    taken_over = [record for record in records if Status.RUNNING_RECOVERY in {line.status for line in record.history}]
    assert LASTING in {record.task for record in taken_over}, f"what {its} ran is taken over"
    assert {start.attempt for start in starts["shaky"]} >= {1, 2}, "retries take starts"
    found = broken(starts, claims_of(records))
    assert not found, "\n".join(found)
