"""A module that makes tasks of the functions of another."""

from __future__ import annotations

from tests.executors import library
from tests.executors.crew import app

triple = app.task(executor="process", name="triple")(library.triple)
quadruple = library.declare(app)
