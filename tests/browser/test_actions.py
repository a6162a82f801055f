"""Every kind of action in a real browser: it is done, and the audit record has it with its reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.browser.conftest import elsewhere, serving
from tests.support import chromium

from holdfast import App

pytestmark = pytest.mark.xdist_group("browser")


def test_actions_are_done_and_audited(tmp_path: Path, window: Callable[..., Any]) -> None:
    chromium.browser()
    app = App(f"sqlite:///{tmp_path}/shop.db", name="shop", poll_interval_seconds=0.2)

    @app.task(name="pack", limit=2)
    def pack(order: str = "o-1") -> str:
        return order

    def seed() -> tuple[str, str, list[str]]:
        app.schedules.create("nightly", pack, every="1h")
        with app.runner(concurrency=1):
            done, gone = pack.submit(), pack.submit("o-2")
            done.result(timeout=30), gone.result(timeout=30)
        return done.id, gone.id, [pack.submit(f"w-{n}").id for n in range(3)]

    with app, serving(app) as address:
        done, gone, waiting = elsewhere(seed)
        opened = window(address=address)
        page, dialog = opened.page, opened.page.locator("dialog")

        def act(path: str, button: str, **fields: str) -> None:
            if page.url != f"{address}{path}":
                opened.open(path)
            page.get_by_role("button", name=button, exact=True).first.click()
            for label, text in fields.items():
                dialog.get_by_label(label).fill(text)
            dialog.get_by_label("Reason").fill(f"to try {button}")
            dialog.locator("button[type=submit]:enabled").click()
            dialog.wait_for(state="detached")

        act(f"/invocations/{done}", "Keep for")
        act(f"/invocations/{done}", "Rerun")
        page.wait_for_url(lambda url: not url.endswith(done))
        act(f"/invocations/{waiting[0]}", "Cancel")
        act(f"/invocations/{gone}", "Remove")
        act("/limits/pack", "Change pack", **{"At once": "7"})
        act("/limits/pack", "Clear pack")
        act("/schedules/nightly", "Pause nightly")
        act("/schedules/nightly", "Resume nightly")
        act("/schedules/nightly", "Run now: nightly")
        act("/schedules/nightly", "Delete")
        act("/events", "Emit an event", Name="order.created")
        opened.open("/invocations?q=status:registered")
        page.locator("[data-select-page]").check()
        act("/invocations?q=status:registered", "Cancel")

        opened.open("/audit")
        rows = [row.inner_text() for row in page.locator("tbody tr").all()]
    expected = {
        "archive.retain": "Keep for",
        "archive.rerun": "Rerun",
        "invocation.cancel": "Cancel",
        "archive.purge": "Remove",
        "limit.set": "Change pack",
        "limit.clear": "Clear pack",
        "schedule.pause": "Pause nightly",
        "schedule.resume": "Resume nightly",
        "schedule.run": "Run now: nightly",
        "schedule.delete": "Delete",
        "event.emit": "Emit an event",
    }
    for name, button in expected.items():
        assert any(name in row and f"to try {button}" in row and "done" in row for row in rows), (name, rows)
    assert len(rows) == len(expected) + 1
