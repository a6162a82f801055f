"""Runs of workflows whose owners die after each page of their logs, or freeze and wake when another one has the run.

A page is written whole or not at all, so the states that a death can leave are those between two pages: a death after
each page is a death after each event. The checker judges logs, steps and children (I5, I13, I19).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.faults import tasks
from tests.faults.session import Process, Session
from tests.faults.stores import STORES, on
from tests.faults.test_zombies import begins_anew
from tests.support.freezing import freeze, wake
from tests.support.witness import What

from holdfast.clock import SystemClock
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL, Status
from holdfast.workflows import events as e

pytestmark = pytest.mark.slow

AT_ONCE = 4
SAMPLE = {"sqlite": (1, 5, 9), "mongodb": (3, 7, 11)}


def told(session: Session, token: str) -> None:
    """Judge how it went, and the result of the journey with this token."""
    session.verdict()
    (record,) = [each for each in session.records() if each.task == "journey"]
    expected = [f"{token} far" if name == "far" else name for name in tasks.JOURNEY]
    assert session.app.invocation(record.id).result() == expected
    assert all(each.status is Status.SUCCESS for each in session.records())


def events_of(session: Session, record: InvocationRecord) -> list[tuple[int, e.Event]]:
    """The log of a run: each event with the epoch of its writer."""
    pages = session.ask(lambda store: store.read_log(session.name, record.id, limit=1000))
    return [(page.epoch, event) for page in pages for event in e.decode(page)]


def dies_after(page: int) -> Callable[[Session], None]:
    """The owner dies after this page, and another runner goes on."""

    def story(session: Session) -> None:
        session.submit("one", task="journey")
        victim = session.start_runner(
            *("--workers", "0", "--concurrency", "4"),
            HOLDFAST_CRASH_AT=f"append.after:{page}",
            HOLDFAST_TEST_ROLE="runner",
        )
        session.struck("append.after")
        session.until(lambda: victim.code is not None, "the owner dies")
        assert victim.code == -signal.SIGKILL
        session.start_healthy()
        told(session, "one")
        (record,) = [each for each in session.records() if each.task == "journey"]
        assert len(events_of(session, record)) >= 20

    return story


def dies_after_each_page(session: Session) -> None:
    """Every owner dies after its first page, over and over: each time the run has come further, so it ends."""
    (id,) = session.submit("one", task="journey")
    session.start_runner(
        *("--workers", "1", "--concurrency", "4"),
        HOLDFAST_CRASH_AT="append.after",
        HOLDFAST_TEST_ROLE="worker",
        HOLDFAST_TEST_EACH="1",
    )
    session.until(lambda: session.record(id).status in FINAL, "it ends", 240)
    told(session, "one")
    assert len(session.events(What.FAULT_START, why="append.after")) >= tasks.JOURNEY_PAGES - 1


def play(stories: dict[str, Callable[[Session], None]], store: str, url: str, folder: Path) -> None:
    """Tell a few stories at once, each on an app of its own."""

    def tell(name: str) -> None:
        own = folder / name
        session = Session(own, url if store == "mongodb" else f"sqlite:///{own / 'store.db'}")
        try:
            stories[name](session)
        finally:
            session.end()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        ends = {name: pool.submit(tell, name) for name in stories}
    failed = {name: error for name, end in ends.items() if (error := end.exception()) is not None}
    for name, error in failed.items():
        error.add_note(f"this was {name}, in {folder / name}")
    if failed:
        raise BaseExceptionGroup(f"{len(failed)} of {len(stories)} stories went wrong", list(failed.values()))


def _deaths(pages: tuple[int, ...]) -> dict[str, Callable[[Session], None]]:
    return {f"page-{page}": dies_after(page) for page in pages}


@pytest.mark.parametrize(("url", "store"), [(store, store) for store in STORES], indirect=["url"], ids=STORES)
def test_a_run_goes_on_when_its_owner_dies_after_a_page(url: str, store: str, tmp_path: Path) -> None:
    play(_deaths(SAMPLE[store]), store, url, tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize(("url", "store"), [(store, store) for store in STORES], indirect=["url"], ids=STORES)
def test_a_run_goes_on_whichever_page_its_owner_dies_after(url: str, store: str, tmp_path: Path) -> None:
    play(_deaths(tuple(range(1, tasks.JOURNEY_PAGES))), store, url, tmp_path)


@pytest.mark.faults
@on(*STORES)
def test_a_run_ends_though_each_of_its_owners_dies_after_one_page(session: Session) -> None:
    dies_after_each_page(session)


# --- two owners

POINTS = ("append.before:4", "append.after:4", "suspend.before", "suspend.after")


@contextmanager
def frozen_at(session: Session, process: Process, point: str) -> Iterator[None]:
    """Wait until a process has stopped itself at this point. If one of its other threads was in the middle of a commit,
    it has SQLite's lock, and goes on for a moment: see `tests.support.freezing`.
    """
    session.struck(point.partition(":")[0])
    with session.witness.fault("freeze", pid=process.pid):
        freeze(process.pid, can_write=session.can_write)
        try:
            yield
        finally:
            wake(process.pid)


def freezes_at(point: str) -> Callable[[Session], None]:
    """The owner freezes at this point; another one takes the run, and then the first one goes on."""

    def story(session: Session) -> None:
        (id,) = session.submit("one", task="journey")
        zombie = session.start_runner(
            *("--workers", "0", "--concurrency", "4"),
            HOLDFAST_CRASH_AT=point,
            HOLDFAST_TEST_ROLE="runner",
            HOLDFAST_TEST_FREEZE="1",
        )
        with frozen_at(session, zombie, point):
            healthy = session.start_healthy()
            session.until(lambda: session.record(id).status in FINAL, "the other one ends it")
            session.until(lambda: zombie.pid not in {each.pid for each in session.roster()}, "it is declared dead")
            end = session.record(id)
            before = events_of(session, end)
            woken_at = SystemClock().monotonic()
        begins_anew(session, zombie, healthy)
        assert session.record(id) == end
        assert events_of(session, end) == before, "the zombie has written into the log"
        late = [event for event in session.events(What.STEP_START, pid=zombie.pid) if event.at > woken_at]
        assert late == [], "the zombie has begun a step"
        told(session, "one")

    return story


def zombie_among_steps(session: Session) -> None:
    """The zombie goes on while its successor is in the middle of the run, not only when all is over."""
    (id,) = session.submit("one", task="journey")
    zombie = session.start_runner(
        *("--workers", "0", "--concurrency", "4"),
        HOLDFAST_CRASH_AT="append.before:3",
        HOLDFAST_TEST_ROLE="runner",
        HOLDFAST_TEST_FREEZE="1",
    )
    with frozen_at(session, zombie, "append.before:3"):
        session.start_healthy()
        session.until(lambda: session.record(id).epoch > 1, "another one claims it")
    session.until(lambda: session.record(id).status in FINAL, "it ends")
    assert {epoch for epoch, _ in events_of(session, session.record(id))} >= {1, 2}
    told(session, "one")


@pytest.mark.parametrize(("url", "store"), [(store, store) for store in STORES], indirect=["url"], ids=STORES)
def test_an_owner_that_freezes_and_wakes_is_fenced(url: str, store: str, tmp_path: Path) -> None:
    point = POINTS[STORES.index(store)]
    play({point.replace(":", "-"): freezes_at(point), "among-steps": zombie_among_steps}, store, url, tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize(("url", "store"), [(store, store) for store in STORES], indirect=["url"], ids=STORES)
def test_an_owner_that_freezes_anywhere_is_fenced(url: str, store: str, tmp_path: Path) -> None:
    play({point.replace(":", "-"): freezes_at(point) for point in POINTS}, store, url, tmp_path)
