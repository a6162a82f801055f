"""The story of a shop, its pages on a real server, and a real browser in front of them."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.support import chromium
from tests.support.patience import patient
from tests.web.shop import served

from holdfast import App
from holdfast.web.asgi import WebApp

HERE = Path(__file__).parent
AXE = (HERE / "vendor" / "axe.min.js").read_text()


class Told(NamedTuple):
    """A story that is stored: its app, the ids in it, and the address of its pages."""

    app: App
    ids: dict[str, str]
    address: str


@pytest.fixture(scope="package")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """Seed a store once, and serve its pages. One runner is at work on a call that does not end, in a process of its
    own: it lasts as long as the tests of this process, whose output it would write into.
    """
    chromium.browser()
    folder = tmp_path_factory.mktemp("story")
    url, log = f"sqlite:///{folder}/shop.db", folder / "shop.log"
    with log.open("w") as errors:
        shop = subprocess.Popen(
            [sys.executable, "-m", "tests.browser.story"],
            cwd=HERE.parent.parent,
            env={**os.environ, "HOLDFAST_URL": url},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert shop.stdout is not None
        line = shop.stdout.readline()
        assert line, log.read_text()
        ids = json.loads(line)
        app: App = load_story(url).app
        with serving(app) as address:
            yield Told(app, ids, address)
        app.close()
    finally:
        shop.send_signal(signal.SIGINT)
        shop.communicate(timeout=patient(30))


def load_story(url: str, name: str = "browser_story") -> Any:
    """Import the shop anew, on a store of its own."""
    spec = importlib.util.spec_from_file_location(name, HERE / "story.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HOLDFAST_URL", url)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return module


def elsewhere(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on another thread: the driver of the browser has a loop on this one."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function, *args).result()


@contextmanager
def serving(app: App) -> Iterator[str]:
    """Serve the pages of an app as ``holdfast monitor`` does on a loopback address."""
    web = WebApp(app, is_local=True)
    with served(web) as address:
        try:
            yield address
        finally:
            web.streams.end()


class Window:
    """A page in the browser, and what its console has said."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address
        self.said: list[str] = []
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        page.on("console", lambda said: self.said.append(said.text) if said.type in ("error", "warning") else None)
        page.on("response", self._came)

    def _came(self, response: Any) -> None:
        if response.status >= 500:
            self.said.append(f"{response.status} for {response.url}")
        elif not response.url.startswith(self.address):
            self.said.append(f"a request to the outside: {response.url}")

    def open(self, path: str) -> Any:
        answer = self.page.goto(f"{self.address}{path}", wait_until="load")
        assert answer.status == 200, (path, answer.status)
        return self.page

    def violations(self) -> list[str]:
        """Return what axe finds on the page that is serious or worse."""
        self.page.evaluate(AXE)
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        return [
            f"{each['id']}: {each['help']}: {[node['html'][:160] for node in each['nodes'][:3]]}"
            for each in found
            if each["impact"] in ("serious", "critical")
        ]

    def overflow(self) -> int:
        """Return by how many pixels the page is wider than the window."""
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        return int(self.page.evaluate(wide))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for one module: its driver has an event loop on this thread, in which other tests could not block."""
    place = chromium.browser()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver, driver.chromium.launch(executable_path=place, args=chromium.FLAGS) as launched:
        yield launched


@pytest.fixture
def window(browser: Any, story: Told) -> Iterator[Callable[..., Window]]:
    """Open windows on the story: ``window(width=390, scheme="dark", script=False)``. What a console says of errors
    fails the test.
    """
    opened: list[tuple[Any, Window]] = []

    def make(width: int = 1280, scheme: str = "light", script: bool = True, address: str = story.address) -> Window:
        shape: dict[str, Any] = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
        context = browser.new_context(**shape, java_script_enabled=script, reduced_motion="reduce", bypass_csp=False)
        context.set_default_timeout(15_000)
        opened.append((context, Window(context.new_page(), address)))
        return opened[-1][1]

    yield make
    said = [each for _, window in opened for each in window.said]
    for context, _ in opened:
        context.close()
    assert not said, said
