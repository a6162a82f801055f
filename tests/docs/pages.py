"""The pages of the documentation, as the tests read them: code blocks, tables, headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAPERS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("**/*.md"))]
PAGES = [path for path in PAPERS if path.parent.name != "decisions"]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


class Block(NamedTuple):
    """A block of Python on a page. `mark` is the word after ``python``."""

    page: Path
    line: int
    mark: str
    code: str


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in re.finditer(r"^```python(?: (\w+))?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield Block(page, text.count("\n", 0, found.start(2)), found[1] or "", found[2])


def prose_of(page: Path) -> str:
    """Return the text of a page with its code blocks emptied; line numbers stay."""
    return re.sub(
        r"^```.*?^```$",
        lambda block: "\n" * block[0].count("\n"),
        page.read_text(),
        flags=re.DOTALL | re.MULTILINE,
    )


def anchors(paper: Path) -> set[str]:
    """Return the names by which the headings of a paper can be linked to."""
    headings = re.findall(r"^#+ (.+)$", paper.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table under a heading, without its head."""
    _, found, rest = (DOCS / page).read_text().partition(f"\n{heading}\n")
    assert found, f"{page} has no heading '{heading}'"
    table = re.search(r"(?:^\|.*\n)+", rest.partition("\n#")[0], re.MULTILINE)
    assert table, f"{page} has no table under '{heading}'"
    lines = table[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def listed(page: str, heading: str) -> set[str]:
    """Return the names in the first column of a table. Each may be there once."""
    found = [name for row in rows(page, heading) for name in names(row[0])]
    assert len(found) == len(set(found)), f"{page}, {heading}: a name is there twice"
    return set(found)
