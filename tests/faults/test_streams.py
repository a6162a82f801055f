"""Streams whose writers die after each of their pages, or freeze and wake when another one writes.

The checker judges the streams, and what their readers saw (I11).
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults import tasks
from tests.faults.session import Session
from tests.faults.stores import STORES
from tests.faults.streams import Followers
from tests.faults.test_runs import frozen_at, play
from tests.faults.test_zombies import begins_anew
from tests.support.witness import What

from holdfast.model.status import FINAL

pytestmark = pytest.mark.slow

PAGES = {"chant": tasks.WORDS, "novel": 2 * tasks.WORDS + len(tasks.TITLES) + 1}
"""That are written, one after another, if nothing happens."""


def dies_beside(page: int, task: str, point: str) -> Callable[[Session], None]:
    """The writer dies beside this page, and another runner goes on."""

    def story(session: Session) -> None:
        with Followers(session) as followers:
            followers.submit(task)
            victim = session.start_runner(
                *("--workers", "0", "--concurrency", "4"),
                HOLDFAST_CRASH_AT=f"{point}:{page}",
                HOLDFAST_TEST_ROLE="runner",
            )
            session.struck(point)
            session.until(lambda: victim.code is not None, "the writer dies")
            assert victim.code == -signal.SIGKILL
            session.start_healthy()
            session.ended(task)
        session.verdict()

    return story


def _deaths(point: str) -> dict[str, Callable[[Session], None]]:
    return {
        f"{task}-{point}-{page}": dies_beside(page, task, point)
        for task, count in PAGES.items()
        for page in range(1, count + 1)
    }


ON_EACH = pytest.mark.parametrize(("url", "store"), [(each, each) for each in STORES], indirect=["url"], ids=STORES)


@pytest.mark.faults
@pytest.mark.parametrize("point", ["chunk.before", "chunk.after"])
@ON_EACH
def test_readers_see_the_same_whichever_page_a_writer_dies_beside(
    url: str, store: str, point: str, tmp_path: Path
) -> None:
    play(_deaths(point), store, url, tmp_path)


# --- two writers


def freezes_at(point: str, *, wakes_early: bool = False) -> Callable[[Session], None]:
    """The writer freezes at this point; another one begins anew, or ends all, and then the first one goes on."""

    def story(session: Session) -> None:
        with Followers(session) as followers:
            followers.submit("chant" if "marked" in point else "novel")
            (id,) = [event.id for event in session.events(What.SUBMIT_OK)]
            assert id is not None
            zombie = session.start_runner(
                *("--workers", "0", "--concurrency", "4"),
                HOLDFAST_CRASH_AT=point,
                HOLDFAST_TEST_ROLE="runner",
                HOLDFAST_TEST_FREEZE="1",
            )
            with frozen_at(session, zombie, point):
                healthy = session.start_healthy()
                if wakes_early:
                    session.until(lambda: _has_restarted(session, id), "another one begins anew")
                else:
                    session.until(lambda: session.record(id).status in FINAL, "the other one ends it")
                session.until(lambda: zombie.pid not in {each.pid for each in session.roster()}, "it is declared dead")
                before = list(session.app.invocation(id).stream("words").stored())
            begins_anew(session, zombie, healthy)
            session.until(lambda: session.record(id).status in FINAL, "it ends")
        assert list(session.app.invocation(id).stream("words"))[: len(before)] == before
        if not wakes_early:
            assert list(session.app.invocation(id).stream("words")) == before, "the zombie has written"
        session.verdict()

    return story


def _has_restarted(session: Session, id: str) -> bool:
    return any(chunk.is_restart for chunk in session.app.invocation(id).stream("words").stored())


POINTS = ("chunk.before:4", "chunk.after:4", "chunk.before:9")


@pytest.mark.parametrize("url", ["mongodb"], indirect=True)
def test_a_writer_that_freezes_and_wakes_is_refused(url: str, tmp_path: Path) -> None:
    stories = {"late": freezes_at(POINTS[0]), "early": freezes_at(POINTS[1], wakes_early=True)}
    play(stories, "mongodb", url, tmp_path)


@pytest.mark.faults
@ON_EACH
def test_a_writer_that_freezes_anywhere_is_refused(url: str, store: str, tmp_path: Path) -> None:
    stories = {point.replace(":", "-"): freezes_at(point) for point in (*POINTS, "stream.listed")}
    early = {f"{point.replace(':', '-')}-early": freezes_at(point, wakes_early=True) for point in POINTS}
    play(stories | early, store, url, tmp_path)
