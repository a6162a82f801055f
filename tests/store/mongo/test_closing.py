"""An app that is closed right after a submit has told everybody, and closing never hangs."""

from __future__ import annotations

import time

import pytest
from tests.support.patience import patient

from holdfast import App

pytestmark = [pytest.mark.xdist_group("mongo")]


def test_a_submit_before_the_close_reaches_an_idle_runner_at_once(mongo_url: str) -> None:
    with App(mongo_url, poll_interval_seconds=20) as serving:
        serving.task(name="noop")(noop)
        with serving.runner():
            serving.get_task("noop").submit().result(timeout=patient(10))  # its stream is open now
            began = time.monotonic()
            with App(mongo_url) as submitting:
                id = submitting.task(name="noop")(noop).submit().id
            assert serving.invocation(id).result(timeout=patient(10)) == 1
            assert time.monotonic() - began < 8


def noop() -> int:
    return 1


@pytest.mark.slow
def test_closing_never_hangs(mongo_url: str) -> None:
    for _ in range(10):
        with App(mongo_url) as app:
            app.task(name="noop")(noop)
            with app.runner():
                assert app.get_task("noop").submit().result(timeout=patient(10)) == 1
            began = time.monotonic()
        assert time.monotonic() - began < 5
