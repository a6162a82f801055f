"""The server's time: learnt from its answers, each believed as far as its round trip allows.

The servers here are on this host, so its clock tells what the truth is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.store.mongo.tools import opened, until
from tests.support.mongod import Mongod, quick_server
from tests.support.patience import patient

from holdfast import App
from holdfast.model.records import RunnerRecord
from holdfast.store.mongo.store import MongoStore
from holdfast.store.mongo.time import DRIFT, ServerTime
from holdfast.testing.clock import FakeClock
from holdfast.testing.samples import runner

FROZEN_SECONDS = 0.7
SOON = 0.05  # off by no more than this: one hundred times what a round trip takes


@pytest.fixture(scope="module")
def server() -> Iterator[Mongod]:
    with quick_server() as server:
        yield server


async def beat_while_frozen(store: MongoStore, server: Mongod, seconds: float) -> RunnerRecord | None:
    """A heartbeat that the server takes when it wakes up, after so long."""
    server.freeze()
    try:
        beating = asyncio.create_task(store.heartbeat("shop", "r"))
        await asyncio.sleep(seconds)
    finally:
        server.resume()
    return await beating


@pytest.mark.xdist_group("mongo")
def test_a_slow_answer_does_not_move_the_clock(server: Mongod) -> None:
    async def run() -> None:
        async with opened(server.url("slow")) as store:
            await store.enrol(runner("r"))
            assert await beat_while_frozen(store, server, FROZEN_SECONDS) is not None
            assert abs(store.now() - time.time()) < SOON
            assert store.clock_error() < SOON
            assert store.now() - store.clock_error() <= time.time() <= store.now() + store.clock_error()

    asyncio.run(run())


@pytest.mark.xdist_group("mongo")
def test_delayed_work_does_not_start_early_after_a_slow_answer(server: Mongod) -> None:
    started: list[float] = []
    settings = {"runner_heartbeat_seconds": 0.6, "runner_considered_dead_after_minutes": "30s"}
    with App(server.url("late"), name="shop", poll_interval_seconds=0.05, **settings) as app:

        @app.task(name="note")
        def note() -> None:
            started.append(time.time())

        with app.runner():
            note.submit().result(timeout=patient(10))
            started.clear()
            server.freeze()  # beats wait in the server's socket, and are answered when it wakes up
            time.sleep(FROZEN_SECONDS)
            due = time.time() + 0.3
            server.resume()
            note.options(at=due).submit()
            sent = time.time()
            note.options(delay=0.3).submit()
            until(lambda: len(started) == 2)
        assert started[0] >= due
        assert started[1] >= sent + 0.3
        assert started[1] < sent + 0.3 + 1.0


# --- what is believed


class Answer(NamedTuple):
    """One question: seconds since the one before, on the way there, and on the way back."""

    after: float
    there: float
    back: float


class Server:
    """A server whose clock is off by `ahead`, and runs too fast by `drift`."""

    def __init__(self, ahead: float, drift: float = 0.0) -> None:
        self.clock = FakeClock()
        self.ahead = ahead
        self.drift = drift
        self.learnt = ServerTime(self.clock)

    @property
    def truth(self) -> float:
        elapsed = self.clock.monotonic()
        return 1e9 + elapsed * (1 + self.drift) + self.ahead

    def answer(self, answer: Answer) -> None:
        self.clock.advance(answer.after)
        asked = self.clock.monotonic()
        self.clock.advance(answer.there)
        said = int(self.truth * 1000) / 1000  # it tells milliseconds, cut off
        self.clock.advance(answer.back)
        self.learnt.learn(said, asked)

    @property
    def off(self) -> float:
        return self.learnt.now() - self.truth


SECONDS = st.floats(0.0, 10.0)
ANSWERS = st.lists(st.builds(Answer, st.floats(0.0, 600.0), SECONDS, SECONDS), min_size=1, max_size=8)


@given(ANSWERS, st.floats(-1e6, 1e6), st.floats(-DRIFT, DRIFT), st.floats(0.0, 600.0))
def test_the_truth_is_within_the_error(answers: list[Answer], ahead: float, drift: float, after: float) -> None:
    server = Server(ahead, drift)
    for answer in answers:
        server.answer(answer)
        assert abs(server.off) <= server.learnt.error() + 1e-6
    server.clock.advance(after)
    assert abs(server.off) <= server.learnt.error() + 1e-6
    assert server.learnt.error() <= min(answer.there + answer.back for answer in answers) / 2 + 1.3


def test_a_slow_answer_is_outvoted_by_a_quick_one() -> None:
    server = Server(3600.0)
    server.answer(Answer(0.0, 0.001, 0.001))
    for slow in (Answer(2.0, 8.0, 0.0), Answer(2.0, 0.0, 8.0)):
        server.answer(slow)
        assert abs(server.off) < 0.005


@pytest.mark.parametrize("step", [-3600.0, -0.5, 0.5, 3600.0])
def test_a_clock_that_is_set_is_followed(step: float) -> None:
    server = Server(0.0)
    for _ in range(5):
        server.answer(Answer(2.0, 0.001, 0.003))
    server.ahead += step
    server.answer(Answer(2.0, 0.001, 0.003))
    assert abs(server.off) < 0.005
    assert abs(server.off) <= server.learnt.error()


def test_where_answers_are_slow_a_set_clock_is_followed_as_far_as_they_can_tell() -> None:
    server = Server(0.0)
    server.answer(Answer(0.0, 0.001, 0.001))
    server.ahead += 10.0
    server.answer(Answer(2.0, 4.0, 4.0))
    assert abs(server.off) <= server.learnt.error() < 5.0
    server.answer(Answer(2.0, 0.001, 0.001))
    assert abs(server.off) < 0.005


def test_it_is_asked_again_when_drift_may_have_made_a_difference() -> None:
    server = Server(0.0)
    assert not server.learnt.is_old()
    server.answer(Answer(0.0, 0.001, 0.001))
    assert not server.learnt.is_old()
    server.clock.advance(120.0)
    assert server.learnt.is_old()
    server.answer(Answer(0.0, 0.5, 0.5))
    assert not server.learnt.is_old(), "a distant server cannot do better, and is not asked all the time"


def test_before_the_first_answer_the_hosts_clock_has_to_do() -> None:
    clock = FakeClock()
    learnt = ServerTime(clock)
    assert (learnt.now(), learnt.error()) == (clock.now(), 0.0)
