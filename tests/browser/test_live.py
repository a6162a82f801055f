"""Live updates in a real browser: they arrive, leave alone what one is about to click, and rest in a hidden tab."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.browser.conftest import Told, elsewhere, serving
from tests.support import chromium

from holdfast import App

pytestmark = pytest.mark.xdist_group("browser")

COUNT = "window.replaced = 0; document.addEventListener('holdfast:replaced', () => { window.replaced += 1; })"


def test_a_change_arrives_by_itself(story: Told, window: Callable[..., Any]) -> None:
    page = window().open("/queues")
    page.locator(".live-state", has_text="live").wait_for()
    elsewhere(story.app.queues.pause, "gpu")
    try:
        page.get_by_role("button", name="Resume gpu").wait_for()
    finally:
        elsewhere(story.app.queues.resume, "gpu")
    page.get_by_role("button", name="Pause gpu").wait_for()


def test_what_one_is_about_to_click_stays_where_it_is(story: Told, window: Callable[..., Any]) -> None:
    page = window().open("/queues")
    page.locator(".live-state", has_text="live").wait_for()
    page.evaluate(COUNT)
    page.get_by_role("button", name="Pause gpu").hover()
    with page.expect_response(lambda answer: answer.url.endswith("/queues")):
        elsewhere(story.app.queues.pause, "default")
    try:
        assert page.get_by_role("button", name="Pause default").count() == 1, "the list has waited"
        page.mouse.move(5, 5)
        page.get_by_role("button", name="Resume default").wait_for()
        assert page.evaluate("window.replaced") >= 1
    finally:
        elsewhere(story.app.queues.resume, "default")


def test_a_hidden_tab_asks_for_nothing(story: Told, window: Callable[..., Any]) -> None:
    page = window().open("/queues")
    page.locator(".live-state", has_text="live").wait_for()
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
    tell = "document.dispatchEvent(new Event('visibilitychange'))"
    page.evaluate(hide % "true" + tell)
    page.locator(".live-state", has_text="paused").wait_for()
    elsewhere(story.app.queues.pause, "gpu")
    try:
        page.evaluate(hide % "false" + tell)
        page.get_by_role("button", name="Resume gpu").wait_for()
    finally:
        elsewhere(story.app.queues.resume, "gpu")


def test_what_comes_with_the_end_of_a_call_is_shown(tmp_path: Path, window: Callable[..., Any]) -> None:
    chromium.browser()
    app = App(f"sqlite:///{tmp_path}/shop.db", name="new", poll_interval_seconds=0.2)

    @app.task(name="fail")
    def fail() -> None:
        raise ValueError("no such customer")

    def run() -> None:
        with app.runner(concurrency=1), contextlib.suppress(Exception):
            call.result(timeout=30)

    with app, serving(app) as address:
        opened = window(address=address)
        page = opened.open("/")
        page.get_by_text("What to do next").wait_for()
        page.locator(".live-state", has_text="live").wait_for()
        call = elsewhere(fail.submit)
        page.get_by_role("heading", name="Queues").wait_for()
        assert page.get_by_text("What to do next").count() == 0
        page = opened.open(f"/invocations/{call.id}")
        page.locator("h1", has_text="registered").wait_for()
        page.locator(".live-state", has_text="live").wait_for()
        elsewhere(run)
        page.locator("h1", has_text="failed").wait_for()
        page.locator("#failures", has_text="no such customer").wait_for()
        page.get_by_role("button", name="Rerun").first.wait_for()
        assert page.title().startswith("fail failed")
