"""Functions that know nothing of tasks."""

from __future__ import annotations

from holdfast import App, Task


def triple(x: int) -> int:
    return x * 3


def forgotten() -> None:
    pass


def quadruple(x: int) -> int:
    return x * 4


def declare(app: App) -> Task[[int], int]:
    """On behalf of whoever calls it."""
    return app.task(executor="process", name="quadruple")(quadruple)
