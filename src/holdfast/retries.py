"""Retry policies of tasks: ``@app.task(retries=Fixed(3, "10s"))``. See docs/guides/retries.md."""

from holdfast.model.retries import (
    Exponential,
    FirstMatch,
    Fixed,
    Forever,
    MoveTo,
    Never,
    Only,
    Policy,
    Retries,
    Timetable,
)

__all__ = [
    "Exponential",
    "FirstMatch",
    "Fixed",
    "Forever",
    "MoveTo",
    "Never",
    "Only",
    "Policy",
    "Retries",
    "Timetable",
]
