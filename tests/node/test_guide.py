"""The guide shows the example that `make test-world` runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.docs.pages import ROOT

EXAMPLE = ROOT / "integrations" / "workflow-world" / "example"


@pytest.mark.parametrize(("mark", "file"), [("ts", "workflows/order.ts"), ("python", "shop.py")])
def test_guide_shows_the_example(mark: str, file: str) -> None:
    page = Path(ROOT / "docs" / "guides" / "workflow-devkit.md").read_text()
    assert f"```{mark}\n{(EXAMPLE / file).read_text()}```\n" in page


@pytest.mark.parametrize("folder", [EXAMPLE, EXAMPLE.parent], ids=lambda folder: folder.name)
def test_lockfiles_name_no_host(folder: Path) -> None:
    assert '"resolved": "http' not in (folder / "package-lock.json").read_text()
