"""A real browser: Debian's package `chromium`, driven by playwright."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

_PLACE = "/usr/bin/chromium"
_MISSING = f"{_PLACE} is not installed: apt-get install chromium"
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


def browser() -> str:
    """Return where the browser is. Skip the test where it is missing; in CI, fail: it is a part of that machine."""
    if Path(_PLACE).exists():
        return _PLACE
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(_MISSING)
    pytest.skip(_MISSING)


@contextmanager
def page(ignored: Sequence[str] = ()) -> Iterator[Page]:
    """Open a page in a browser without a window, with a profile of its own. An error of a script fails the test; so
    does any other in its console, but for those that are `ignored`.
    """
    place = browser()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver, driver.chromium.launch(executable_path=place, args=FLAGS) as launched:
        opened, errors = launched.new_page(), list[str]()
        opened.on("pageerror", lambda error: errors.append(str(error)))
        opened.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        yield opened
        unexpected = [error for error in errors if not any(each in error for each in ignored)]
        assert not unexpected, unexpected
