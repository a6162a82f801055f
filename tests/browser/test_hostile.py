"""Records whose every text is hostile: no page runs any of it, is broken by it, or gets wider than the window."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.browser.conftest import Told, elsewhere, serving
from tests.support import chromium
from tests.support.patience import eventually, patient

from holdfast import App, context, hook, on_event, stream
from holdfast.errors import HoldfastError
from holdfast.web.pages.table import PAGES

pytestmark = pytest.mark.xdist_group("browser")
LONG = "x" * 1_000_000
TEXTS = (
    "<script>window.ran = 1</script>",
    "\"><img src=x onerror='window.ran = 2'>",
    "</script></style></textarea></title><svg onload=window.ran=3>",
    "' onmouseover=window.ran=4 x='{{ 7 * 7 }}${7*7}",
    "javascript:window.ran=5//\u202eevil\u2066\u0000\u001b[2J\r\n\t\u2028",
    "\U0001f4a5\u0301\u0301\u0301" * 40,
)
HOSTILE = " ".join(TEXTS)


def hostile_app(url: str) -> App:
    app = App(url, name="evil", poll_interval_seconds=0.2)
    log = logging.getLogger("evil")

    class Hostile(Exception):
        pass

    Hostile.__name__ = Hostile.__qualname__ = "<b>Hostile</b>"

    @app.task(name="evil<i>", log_lines=5, limit=1, limit_by="text", triggers=[on_event("<b>happened</b>")])
    def evil(text: Any = None, long: str = "") -> Any:
        context().set(where="<i>" + TEXTS[1])
        context().progress(1, total=2, message=TEXTS[0])
        log.warning("%s", HOSTILE)
        stream().write(HOSTILE)
        if isinstance(text, str) and text.startswith("fail"):
            raise Hostile(HOSTILE + text)
        return {HOSTILE: [HOSTILE, long]}

    @app.workflow(name="evil_run")
    async def evil_run(text: str) -> Any:
        return await hook("evil:" + TEXTS[0], metadata={HOSTILE: LONG[:5000]})

    app.evil, app.evil_run = evil, evil_run  # type: ignore[attr-defined]
    return app


def seed(app: Any) -> dict[str, str]:
    with app.runner(concurrency=4):
        calls = {
            "fine": app.evil.options(key=TEXTS[0], attributes={"<u>": TEXTS[1]}).submit(HOSTILE),
            "long": app.evil.submit(HOSTILE, LONG),
            "failed": app.evil.submit(f"fail {HOSTILE}"),
            "long failure": app.evil.submit(f"fail {LONG}"),
        }
        run = app.evil_run.submit(HOSTILE)
        event = app.emit("<b>happened</b>", {HOSTILE: HOSTILE, "long": LONG[:20_000]}, key=TEXTS[1])
        for each in calls.values():
            with contextlib.suppress(HoldfastError, Exception):
                each.result(timeout=patient(60))
        eventually(lambda: list(app.hooks()), "the run waits at its hook")
    app.queues.pause("default", reason=HOSTILE[:500], by="<b>ann</b>")
    app.schedules.create("<b>hourly</b>", app.evil, [HOSTILE], every="1h")
    app.schedules.pause("<b>hourly</b>", reason=HOSTILE, by=TEXTS[0])
    waiting = app.evil.submit(HOSTILE)
    cancelled = app.evil.options(delay="1h").submit("x")
    cancelled.cancel(reason=HOSTILE)
    return {each: call.id for each, call in calls.items()} | {
        "run": run.id,
        "event": event.id,
        "waiting": waiting.id,
        "cancelled": cancelled.id,
    }


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    chromium.browser()
    app = hostile_app(f"sqlite:///{tmp_path_factory.mktemp('evil')}/evil.db")
    ids = elsewhere(seed, app)
    with serving(app) as address:
        yield Told(app, ids, address)
    app.close()


def places(evil: Told) -> dict[str, list[str]]:
    app, ids = evil.app, evil.ids
    named = {
        "/invocations/{id}": [each for name, each in ids.items() if name != "event"],
        "/tasks/{name}": [quote("evil<i>", safe=""), "evil_run"],
        "/limits/{name}": [quote("evil<i>", safe="")],
        "/schedules/{name}": [quote(each.name, safe="") for each in app.schedules.list()],
        "/events/{id}": [ids["event"]],
        "/hook/{name}": [each.name for each in app.hooks()],
        "/runners/{id}": [],
        "/world/messages/{id}": [],
    }
    found = {}
    for page in PAGES:
        start = page.path.partition("{")[0]
        values = named.get(page.path, [""])
        found[page.path] = [f"{start}{value}" for value in values]
    return found


@pytest.mark.parametrize("path", [page.path for page in PAGES])
def test_nothing_hostile_runs_or_breaks_a_page(evil: Told, window: Callable[..., Any], path: str) -> None:
    for width in (1280, 390):
        opened = window(width=width, address=evil.address)
        for place in places(evil)[path]:
            page = opened.open(place)
            assert page.evaluate("window.ran") is None, place
            assert opened.overflow() == 0, (place, width)
            assert page.locator("main b, main i, main u, main svg image, main img").count() == 0, place
            page.locator("main").hover(position={"x": 5, "y": 5})
            assert page.evaluate("document.documentElement.outerHTML.length") < 400_000, (place, "is too heavy")


def test_searches_for_hostile_texts_are_answered(evil: Told, window: Callable[..., Any]) -> None:
    opened = window(address=evil.address)
    for text in TEXTS:
        answer = opened.page.goto(f"{evil.address}/invocations?q={quote(text)}")
        assert answer.status in (200, 400)
        assert opened.page.evaluate("window.ran") is None
        assert opened.overflow() == 0
    opened.said = [each for each in opened.said if "400" not in each]


def test_the_folder_of_the_test_is_not_on_a_page(evil: Told, window: Callable[..., Any]) -> None:
    assert str(Path(__file__).parent) not in window(address=evil.address).open("/").content()
