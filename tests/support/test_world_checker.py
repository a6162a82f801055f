"""The checker of World runs: each invariant has planted violations that are found, and close calls that are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.support.checker import Violation
from tests.support.checker.world_runs import WORLD_CHECKS, WorldCase
from tests.support.plots.world_runs import CLEAN, PLANTED, WorldPlot

NUMBERS = {"I1", "I5", "I11", "I12"}


@pytest.mark.parametrize("plot", PLANTED, ids=lambda plot: f"{plot.breaks} {plot.name}")
def test_a_planted_violation_is_found_under_its_number(plot: WorldPlot) -> None:
    found = plot.judged()
    assert {violation.invariant for violation in found} == {plot.breaks}, "\n".join(map(str, found))


@pytest.mark.parametrize("plot", CLEAN, ids=lambda plot: f"{plot.breaks} {plot.name}")
def test_a_close_call_is_none(plot: WorldPlot) -> None:
    found = plot.judged()
    assert found == [], "\n".join(map(str, found))


def test_every_invariant_has_a_planted_violation_and_a_close_call() -> None:
    assert {plot.breaks for plot in PLANTED} == NUMBERS == {plot.breaks for plot in CLEAN}


@pytest.mark.parametrize("judge", WORLD_CHECKS, ids=lambda judge: judge.__name__)
def test_every_check_finds_something(judge: Callable[[WorldCase], Iterator[Violation]]) -> None:
    assert any(list(judge(plot.case())) for plot in PLANTED)
