"""Every page of the table, in a real browser: it loads, nothing is said in the console, it fits a phone, axe finds
nothing serious, and it can be read without script.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from tests.browser.conftest import Told

from holdfast.web.pages.table import PAGES

pytestmark = pytest.mark.xdist_group("browser")
Windows = Callable[..., Any]


def addresses(story: Told) -> dict[str, list[str]]:
    """Return addresses of each page, with records that the story has."""
    app, ids = story.app, story.ids
    schedules = [quote(each.name) for each in app.schedules.list()]
    named = {
        "/invocations/{id}": [ids[name] for name in ("failed", "run", "waiting run", "held", "success", "later")],
        "/tasks/{name}": ["charge", "checkout"],
        "/limits/{name}": ["charge", "mail"],
        "/schedules/{name}": schedules,
        "/events/{id}": [ids["event"]],
        "/runners/{id}": [each.id for each in app.runners()],
        "/hook/{name}": [each.name for each in app.hooks()],
    }
    found: dict[str, list[str]] = {}
    for page in PAGES:
        if page.path == "/world/messages/{id}":  # of a World; the shop has none
            continue
        values = named.get(page.path)
        assert values or "{" not in page.path, f"say which records {page.path} is to be tried with"
        start = page.path.partition("{")[0]
        found[page.path] = [f"{start}{value}" for value in values] if values else [page.path]
    return found


PATHS = [page.path for page in PAGES if page.path != "/world/messages/{id}"]


@pytest.mark.parametrize("path", PATHS)
def test_a_page_loads_fits_and_can_be_used_by_all(story: Told, window: Windows, path: str) -> None:
    wide, narrow = window(), window(width=390, scheme="dark")
    for place in addresses(story)[path]:
        for each in (wide, narrow):
            page = each.open(place)
            assert page.locator("h1").count() == 1
            assert each.overflow() == 0, (place, "is wider than the window")
            assert each.violations() == [], place


def test_pages_can_be_read_without_script(story: Told, window: Windows) -> None:
    plain = window(script=False)
    for places in addresses(story).values():
        page = plain.open(places[0])
        assert page.locator("main").inner_text().strip()
        assert page.locator("button[data-action]:visible").count() == 0, "an action needs the script"
        assert page.locator("nav a").count() > 5
