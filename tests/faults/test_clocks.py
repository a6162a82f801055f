"""Clocks that are wrong by ten minutes: no work begins early, nothing is stolen, nobody is taken for dead.

On MongoDB the server's time counts, whatever the hosts believe. On SQLite there is one host, so there is one clock; it
may be set while everybody works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.faults.clock import HostClock, set_clock
from tests.faults.session import Session
from tests.faults.settings import DEAD_AFTER_SECONDS
from tests.faults.stores import on
from tests.support.faketime import clock_off_by
from tests.support.fleet import DEAD_AFTER, Fleet, nap, virtually
from tests.support.witness import What

from holdfast.clock import SystemClock
from holdfast.model.records import RunnerRecord, WorkerRecord
from holdfast.model.status import FINAL, Status
from holdfast.store.contract import Store
from holdfast.store.memory.store import MemoryStore
from holdfast.testing.virtual import VirtualClock

TEN_MINUTES, HOUR = 600.0, 3600.0
DELAY_SECONDS = 2.0
PATIENT_SECONDS = 3.0  # a busy machine gives a process no time for a second now and then
PATIENT = {"HOLDFAST_RUNNER_CONSIDERED_DEAD_AFTER_MINUTES": f"{PATIENT_SECONDS}s"}


def passes(session: Session, seconds: float) -> None:
    """Let that much time pass."""
    until = SystemClock().monotonic() + seconds
    session.until(lambda: SystemClock().monotonic() > until, "time passes")


def nothing_was_stolen(session: Session, names: set[str] | None = None) -> None:
    """And the same runners are there. No verdict if a process got so little time that it may have counted as dead."""
    found = {entry.status for record in session.records() for entry in record.history}
    is_well = found <= {Status.REGISTERED, Status.PENDING, Status.RUNNING, Status.SUCCESS}
    is_well &= not any(process.says("declared runner") for process in session.processes)
    is_well &= names is None or {runner.id for runner in session.roster()} == names
    if not is_well and session.events(What.FAULT_START, kind="freeze"):
        pytest.skip("a process got no time for longer than half of its dead-after time")
    assert is_well, session.told()


@pytest.mark.slow
@on("mongodb")
def test_on_mongodb_the_servers_clock_counts(session: Session, tmp_path: Path) -> None:
    clocks = {name: set_clock(tmp_path / name, off) for name, off in (("fast", TEN_MINUTES), ("slow", -TEN_MINUTES))}
    runners = [
        session.start_runner("--workers", "0", "--concurrency", "1", HOLDFAST_TEST_CLOCK=str(path), **PATIENT)
        for path in clocks.values()
    ]
    session.until(lambda: len(session.roster()) == 2, "both join")
    names = {runner.id for runner in session.roster()}
    session.submit("held by one", "held by the other", task="hold")  # so that there is something to steal
    session.began("held by one", "held by the other")
    passes(session, 1.2 * PATIENT_SECONDS)
    session.release()
    for name, path in clocks.items():
        session.start("tests.faults.shop", name, HOLDFAST_TEST_CLOCK=str(path), HOLDFAST_TEST_DELAY=str(DELAY_SECONDS))
    session.submit("right", delay=DELAY_SECONDS)
    session.began("fast", "slow", "right")
    for token in ("fast", "slow", "right"):
        (sent,), (begun,) = (session.events(what, token=token) for what in (What.SUBMIT_INVOKE, What.EXEC_START))
        assert DELAY_SECONDS <= begun.at - sent.at < DELAY_SECONDS + 30
    nothing_was_stolen(session, names)
    assert {process.code for process in runners} == {None}
    session.stop(*runners)
    session.verdict()


@pytest.mark.slow
@on("sqlite")
def test_on_sqlite_the_hosts_clock_may_be_set(session: Session, tmp_path: Path) -> None:
    clock = set_clock(tmp_path / "clock", 0)
    session.app.runtime.clock = HostClock(str(clock))
    for _ in range(2):
        session.start_runner("--workers", "0", "--concurrency", "1", HOLDFAST_TEST_CLOCK=str(clock))
    session.until(lambda: len(session.roster()) == 2, "both join")
    names = {runner.id for runner in session.roster()}
    session.submit("held by one", "held by the other", task="hold")
    session.began("held by one", "held by the other")
    with session.witness.fault("clock"):
        for off in (TEN_MINUTES, 0, -TEN_MINUTES):
            set_clock(clock, off)
            passes(session, 1.5 * DEAD_AFTER_SECONDS)
            assert {runner.id for runner in session.roster()} == names, session.told()
    session.release()
    session.submit("after")
    session.submit("much later", delay=TEN_MINUTES / 2)
    session.began("after")
    assert not session.events(What.EXEC_START, token="much later")
    with session.witness.fault("clock"):
        set_clock(clock, 0)  # by the clock it is due now, and that is what counts here
        session.began("much later")
    nothing_was_stolen(session)
    session.verdict()


@on("sqlite")
@pytest.mark.parametrize(
    "off", [pytest.param(HOUR, id="ahead"), pytest.param(-HOUR, id="behind", marks=pytest.mark.faults)]
)
def test_on_sqlite_a_runner_with_a_clock_of_its_own_takes_nothing_and_its_death_is_noticed(
    session: Session, off: float
) -> None:
    """Real libfaketime. Its heartbeats are stamped an hour off, and so are the others' in its eyes."""
    wrong = session.start_runner("--workers", "0", "--concurrency", "1", **clock_off_by(off))
    session.start_runner("--workers", "0", "--concurrency", "2")
    session.until(lambda: len(session.roster()) == 2, "both join")
    now = session.ask(_now)
    (stamped,) = [runner for runner in session.roster() if runner.pid == wrong.pid]
    assert abs(stamped.heartbeat_at - now - off) < 60, "its clock is not wrong"
    ids = session.submit("one", "two", "three", task="hold")
    if off > 0:
        session.began("one", "two", "three")
    names = {runner.id for runner in session.roster()}
    passes(session, 1.5 * DEAD_AFTER_SECONDS)
    assert {runner.id for runner in session.roster()} == names, session.told()
    found = {entry.status for id in ids for entry in session.record(id).history}
    assert not found & {Status.PENDING_RECOVERY, Status.RUNNING_RECOVERY}  # a busy machine's worker may give work back
    wrong.end()
    died = SystemClock().monotonic()
    session.until(lambda: stamped.id not in {runner.id for runner in session.roster()}, "its death is noticed")
    session.release()
    session.until(lambda: all(session.record(id).status in FINAL for id in ids), "all of it is done")
    assert SystemClock().monotonic() - died < 20


async def _now(store: Store) -> float:
    return store.now()


class SetStore(MemoryStore):
    """Its clock is set at the worst moment: after a beat, and right before somebody asks who was silent.

    That of a host is known to all at once; that of a server they learn with their next beat.
    """

    def __init__(self, clock: VirtualClock, *, is_server: bool, off: float) -> None:
        super().__init__(clock)
        self._is_server = is_server
        self._off = off
        self._real = self._known = 0.0
        self.is_to_be_set = False

    def now(self) -> float:
        return super().now() + self._known

    async def heartbeat(
        self,
        app: str,
        runner_id: str,
        workers: Sequence[WorkerRecord] = (),
        *,
        ticks: bool = True,
        draining: bool = False,
    ) -> RunnerRecord | None:
        self._known = self._real
        return await super().heartbeat(app, runner_id, workers, ticks=ticks, draining=draining)

    async def silent(self, app: str) -> Sequence[tuple[RunnerRecord, float]]:
        if self.is_to_be_set:
            self.is_to_be_set, self._real = False, self._off
            if not self._is_server:
                self._known = self._real
        return [(runner, age + self._real - self._known) for runner, age in await super().silent(app)]


@pytest.mark.parametrize("off", [TEN_MINUTES, -TEN_MINUTES, DEAD_AFTER + 1])
@pytest.mark.parametrize("is_server", [True, False])
def test_nobody_is_dead_because_the_stores_clock_was_set_and_the_dead_are_found(is_server: bool, off: float) -> None:
    async def scenario(fleet: Fleet) -> None:
        assert isinstance(fleet.store, SetStore)
        members = [await fleet.started(nap) for _ in range(3)]
        names = set(await fleet.roster())
        await asyncio.sleep(3 * DEAD_AFTER)
        fleet.store.is_to_be_set = True
        for _ in range(30):
            await asyncio.sleep(DEAD_AFTER / 10)
            assert set(await fleet.roster()) == names
        assert not fleet.store.is_to_be_set
        victim = members[0].id
        members[0].crash()
        assert await fleet.gone(victim) <= DEAD_AFTER + 1

    virtually(scenario, lambda clock: SetStore(clock, is_server=is_server, off=off))
