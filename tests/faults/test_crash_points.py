"""Wherever a process dies: nothing is lost, nothing is done twice without need, and everything goes on."""

from __future__ import annotations

import pytest
from tests.faults.cases import MATRIX, ONCE, Case
from tests.faults.conftest import Stories
from tests.faults.stores import GROUP

pytestmark = pytest.mark.slow


def _params(cases: list[Case]) -> list[object]:
    return [pytest.param(case, id=str(case), marks=GROUP[case.store]) for case in cases]


@pytest.mark.parametrize("case", _params(ONCE))
def test_a_crash_is_healed(stories: Stories, case: Case) -> None:
    stories.outcome(case)


@pytest.mark.faults
@pytest.mark.parametrize("case", _params([case for case in MATRIX if case not in ONCE]))
def test_a_crash_is_healed_in_every_role_and_store(stories: Stories, case: Case) -> None:
    stories.outcome(case)
