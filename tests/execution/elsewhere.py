"""Functions that others declare as tasks."""

from __future__ import annotations


def triple(x: int) -> int:
    return x * 3


def absent() -> None:
    pass
