"""The source of the package as tests read it: parsed once for all of them, in one process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
TOGETHER = pytest.mark.xdist_group("source")


@cache
def files() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}


@cache
def tree_of(source: str) -> ast.Module:
    return ast.parse(source)
