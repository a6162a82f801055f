"""The pictures of the README and the docs: ``python -m tests.browser.pictures`` draws them from the story of a shop.

The shop has an hour behind it: bursts of work by clocks that were set back. Then its day is seeded as for the tests.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.browser.conftest import elsewhere, load_story, serving
from tests.support import chromium

from holdfast.clock import SystemClock
from holdfast.errors import InvocationError, ResultTimeout
from holdfast.ids import Ids

ROOT = Path(__file__).parent.parent.parent
PLACE = ROOT / "docs" / "images"
_WITHOUT_ROOT = """(root) => {
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(root, "/srv/shop");
}"""  # tracebacks name the folder of this checkout
_BURSTS, _APART = 12, 300.0


class Picture(NamedTuple):
    """A picture: its file, the page, and how large a part of it."""

    name: str
    path: str
    height: int = 860
    scheme: str = "light"
    width: int = 1280
    press: str = ""  # a button that is pressed before


PICTURES = (
    Picture("overview", "/", 1210),
    Picture("overview-dark", "/", 1210, "dark"),
    Picture("overview-phone", "/", 840, "light", 390),
    Picture("invocations", "/invocations", 900),
    Picture("invocation", "/invocations/{failed}", 1500),
    Picture("run", "/invocations/{waiting run}", 1250),
    Picture("queues", "/queues", 560),
    Picture("action", "/queues", 560, press="Resume mail"),
    Picture("schedules", "/schedules", 620),
    Picture("task", "/tasks/charge", 900),
    Picture("runners", "/runners", 900),
)


class EarlierClock(SystemClock):
    """A clock that is set back."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def now(self) -> float:
        return super().now() - self._seconds


def live_through_an_hour(url: str) -> None:
    """Let the shop work in bursts, five minutes apart."""
    chance = random.Random(7)
    for number in range(_BURSTS, 0, -1):
        with earlier(url, number * _APART) as module:
            app = module.app
            with app.runner(concurrency=8, queues=["default", "mail", "slow"]):
                calls = [
                    module.charge.submit(f"c-{n}", chance.randrange(100, 900)) for n in range(chance.randrange(15, 60))
                ]
                calls += [module.mail.submit(f"c-{n}") for n in range(chance.randrange(5, 30))]
                calls += [module.render.submit(chance.randrange(3, 40)) for _ in range(3)]
                for each in calls:
                    with contextlib.suppress(InvocationError, ResultTimeout, module.CardDeclined):
                        each.result(timeout=60)


@contextlib.contextmanager
def earlier(url: str, seconds: float) -> Iterator[Any]:
    module = load_story(url, "shop")
    runtime = module.app.runtime
    runtime.clock = EarlierClock(seconds)
    runtime.ids = Ids(runtime.clock, runtime.rng)
    try:
        yield module
    finally:
        module.app.close()


def draw(address: str, ids: dict[str, str]) -> None:
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as driver,
        driver.chromium.launch(executable_path=chromium.browser(), args=chromium.FLAGS) as browser,
    ):
        for each in PICTURES:
            context = browser.new_context(
                viewport={"width": each.width, "height": each.height}, color_scheme=each.scheme, reduced_motion="reduce"
            )
            page = context.new_page()
            path = each.path.format_map(ids)
            page.goto(f"{address}{path}", wait_until="load")
            page.locator(".live-state", has_text="live").wait_for()
            if each.press:
                page.get_by_role("button", name=each.press).click()
                page.locator("dialog .preview p").wait_for()
            page.evaluate(_WITHOUT_ROOT, str(ROOT))
            page.screenshot(path=PLACE / f"{each.name}.png")
            context.close()
            print(f"docs/images/{each.name}.png")


def main() -> int:
    PLACE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/shop.db"
        live_through_an_hour(url)
        module = load_story(url, "shop")
        ids = module.seed(module.app)
        module.app.close()  # what it has counted is stored
        module = load_story(url, "shop")
        with module.importing(module.app) as running, serving(module.app) as address:
            elsewhere(draw, address, ids | {"running": running})
        module.app.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
