"""Functions that know nothing of tasks."""

from __future__ import annotations


def triple(x: int) -> int:
    return x * 3


def forgotten() -> None:
    pass
