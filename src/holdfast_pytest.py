"""Fixtures for pytest, which finds them by itself where Holdfast is installed.

It stands beside the package, so that pytest does not load Holdfast at its start, and imports it when a fixture is
used: whoever has pytest and does not test tasks pays nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from holdfast import App
    from holdfast.testing import Harness


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("holdfast_app", "the app that the fixture holdfast_app gives, as module:attribute", default="")


@pytest.fixture
def holdfast_app(request: pytest.FixtureRequest) -> App:
    """The app under test: what the setting holdfast_app names, else a new one. Define your own to choose."""
    from holdfast import App, UsageError

    reference = str(request.config.getini("holdfast_app"))
    if not reference:
        return App("memory://", name="testing")
    module, _, attribute = reference.partition(":")
    app = getattr(importlib.import_module(module), attribute, None) if attribute else None
    if not isinstance(app, App):
        raise UsageError(f"the setting holdfast_app of pytest is {reference!r}: expected module:attribute of an App")
    return app


@pytest.fixture
def holdfast_testing(holdfast_app: App) -> Iterator[Harness]:
    """`holdfast_app` on a store in memory and on a clock that stands still, for this test."""
    from holdfast.testing import testing_app

    with testing_app(holdfast_app) as harness:
        yield harness
