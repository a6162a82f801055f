"""Fixtures for pytest, which finds them where Holdfast is installed.

This module is beside the package, so that pytest does not load Holdfast at its start. A fixture imports it when it is
used.
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
    text = "whether the fixture holdfast_testing replays workflows in another process, with another hash seed"
    parser.addini("holdfast_other_process", text, type="bool", default=True)


@pytest.fixture
def holdfast_app(request: pytest.FixtureRequest) -> App:
    """Return the app under test: the one that the setting holdfast_app names, otherwise a new one. Override it to
    choose.
    """
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
def holdfast_testing(request: pytest.FixtureRequest, holdfast_app: App) -> Iterator[Harness]:
    """Put `holdfast_app` on a store in memory and a clock that stands still, for this test."""
    from holdfast.testing import testing_app

    other_process = bool(request.config.getini("holdfast_other_process"))
    with testing_app(holdfast_app, other_process=other_process) as harness:
        yield harness
