"""The table of threats names tests that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/operations/security.md"


def rows() -> dict[str, str]:
    found = (line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if re.match(r"\| S\d", line))
    return {cells[0]: cells[-1] for cells in found}


def test_every_threat_has_a_row() -> None:
    assert list(rows()) == [f"S{number}" for number in range(1, 21)]


def test_every_named_test_is_there() -> None:
    for threat, cell in rows().items():
        named = re.findall(r"`(tests/\S+)::(\w+)`", cell)
        assert named, f"{threat} names no test"
        for file, name in named:
            tree = ast.parse((ROOT / file).read_text())
            there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert name in there, f"{threat}: {file} has no {name}"
