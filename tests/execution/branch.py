"""A module that makes tasks of the functions of another."""

from __future__ import annotations

from tests.execution import library
from tests.execution.crew import app

triple = app.task(executor="process", name="triple")(library.triple)
quadruple = library.declare(app)
