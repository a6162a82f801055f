"""Logging in with a token in a real browser: what each role sees and may do, and what the audit record says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.browser.conftest import Told, elsewhere
from tests.support import chromium
from tests.web.shop import served

from holdfast import App
from holdfast.access.tokens import AccessTokens
from holdfast.web.asgi import WebApp

pytestmark = pytest.mark.xdist_group("browser")

TOKEN = "a-token-of-the-browser-0123456789"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """A monitor that asks for a token."""
    chromium.browser()
    app = App(f"sqlite:///{tmp_path_factory.mktemp('guarded')}/shop.db", name="shop", api_token=TOKEN)

    @app.task(name="pack", queue="parcels")
    def pack() -> None: ...

    elsewhere(pack.submit)
    web = WebApp(app)
    with served(web) as address:
        yield Told(app, {}, address)
        web.streams.end()
    app.close()


def log_in(page: Any, token: str) -> None:
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Log in").click()


def test_a_login_leads_to_the_page_and_its_actions_are_recorded(guarded: Told, window: Callable[..., Any]) -> None:
    opened = window(address=guarded.address)
    page = opened.open("/queues")
    assert "/login" in page.url
    assert opened.violations() == []
    log_in(page, "wrong-token-wrong-token")
    page.get_by_text("token").first.wait_for()
    assert "/login" in page.url
    log_in(page, TOKEN)
    page.wait_for_url("**/queues")
    page.get_by_role("button", name="Pause parcels").click()
    page.locator("dialog").get_by_label("Reason").fill("the belt stands still")
    page.locator("dialog button[type=submit]").click()
    page.get_by_role("button", name="Resume parcels").wait_for()
    page.goto(f"{guarded.address}/audit")
    row = page.locator("tr", has_text="queue.pause").first.inner_text()
    for word in ("parcels", "the belt stands still", "done", "login", "holdfast queues pause parcels"):
        assert word in row, (word, row)
    page.get_by_role("button", name="Log out").click()
    page.wait_for_url("**/login**")
    page.goto(f"{guarded.address}/queues")
    assert "/login" in page.url
    opened.said = [each for each in opened.said if "401" not in each and "403" not in each]


def test_a_viewer_sees_no_action_and_no_audit_record(guarded: Told, window: Callable[..., Any]) -> None:
    runtime = guarded.app.runtime
    making = runtime.ready().part(AccessTokens).create("looker", "viewer", 3600.0, "ann")
    _, made = elsewhere(runtime.run, making)
    opened = window(address=guarded.address)
    page = opened.open("/queues")
    log_in(page, made)
    page.wait_for_url("**/queues")
    assert page.locator("button[data-action]").count() == 0
    assert page.get_by_role("link", name="Audit").count() == 0
    answer = page.goto(f"{guarded.address}/audit")
    assert answer.status == 403
    opened.said = [each for each in opened.said if "401" not in each and "403" not in each]
