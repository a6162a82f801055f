"""Links lead somewhere, and pages that the code names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.docs.pages import DOCS, PAGES, PAPERS, ROOT, anchors, name_of


@pytest.mark.parametrize("paper", PAPERS, ids=name_of)
def test_links_lead_somewhere(paper: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", paper.read_text()):
        there = paper.parent / target if target else paper
        assert there.exists(), f"{paper.name} links to {target}"
        if anchor:
            assert anchor in anchors(there), f"{paper.name} links to {target}#{anchor}"


def test_every_page_can_be_found_from_the_index() -> None:
    index = DOCS / "index.md"
    linked = {str(index.parent / link) for link in re.findall(r"\]\(([^)#]+\.md)\)", index.read_text())}
    wanted = {str(page) for page in PAGES if page.is_relative_to(index.parent) and page != index}
    assert wanted <= linked
    assert "(docs/index.md#learn)" in (ROOT / "README.md").read_text()


def test_every_decision_can_be_found_from_their_index() -> None:
    index = DOCS / "decisions" / "index.md"
    linked = re.findall(r"\]\((\d[^)]+\.md)\)", index.read_text())
    assert linked == sorted(path.name for path in index.parent.glob("0*.md"))


def test_pages_that_the_code_names_exist() -> None:
    """An error that says "see docs/…" leads to a page."""
    for file in [*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py"), ROOT / "CHANGELOG.md", ROOT / "Makefile"]:
        for page in re.findall(r"\bdocs/[\w./-]+\.(?:md|svg|mmd)\b", file.read_text()):
            assert (ROOT / page).exists(), f"{file.name} names {page}"


def test_the_architecture_names_files_that_exist() -> None:
    """A name without a folder lies where the one before it in the same row does."""
    _, _, table = (ROOT / "ARCHITECTURE.md").read_text().partition("## Where things are")
    for row in table.partition("\n## ")[0].splitlines():
        folder = ""
        for name in re.findall(r"`([\w/*]+(?:\.py|/))`", row):
            folder = f"{name.rpartition('/')[0]}/" if "/" in name else folder
            within = ROOT if name.startswith("tests/") else ROOT / "src" / "holdfast"
            assert list(within.glob(f"{folder}{name.rpartition('/')[2]}".rstrip("/"))), name
