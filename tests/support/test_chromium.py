"""The tests of pages are not left out where they have to run."""

from __future__ import annotations

import pytest
from tests.support import chromium


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_without_the_browser_ci_fails_and_others_skip(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chromium, "_PLACE", "/nowhere/chromium")
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="apt-get install chromium"):
        chromium.browser()


@pytest.mark.slow
def test_an_error_of_a_script_fails_the_test() -> None:
    with pytest.raises(AssertionError, match="planted"), chromium.page() as page:
        page.set_content("<script>throw new Error('planted')</script>")
