"""Wherever a process dies: nothing is lost, nothing is done twice without need, and everything goes on.

A story is mostly waiting, so each test tells a few at once.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.faults.cases import MATRIX, ONCE, Case
from tests.faults.stores import STORES

pytestmark = pytest.mark.slow

AT_ONCE = 6


def together(cases: list[Case]) -> list[object]:
    """A few cases for each test, all on one store."""
    params: list[object] = []
    for store in STORES:
        mine = [case for case in cases if case.store == store]
        for start in range(0, len(mine), AT_ONCE):
            few = mine[start : start + AT_ONCE]
            names = "-".join(f"{case.point}.{case.role}" for case in few)
            params.append(pytest.param(store, few, id=f"{store}-{names}"))
    return params


def play(cases: list[Case], url: str, folder: Path) -> None:
    def story(case: Case) -> None:
        own = folder / str(case)
        case.play(own, url if case.store == "mongodb" else f"sqlite:///{own / 'store.db'}")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        stories = {case: pool.submit(story, case) for case in cases}
    failed = {case: error for case, told in stories.items() if (error := told.exception()) is not None}
    for case, error in failed.items():
        error.add_note(f"this was {case}, in {folder / str(case)}")
    if failed:
        raise BaseExceptionGroup(f"{len(failed)} of {len(cases)} stories went wrong", list(failed.values()))


@pytest.mark.parametrize(("url", "cases"), together(ONCE), indirect=["url"])
def test_crashes_are_healed(url: str, cases: list[Case], tmp_path: Path) -> None:
    play(cases, url, tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize(("url", "cases"), together([case for case in MATRIX if case not in ONCE]), indirect=["url"])
def test_crashes_are_healed_in_every_role_and_on_every_store(url: str, cases: list[Case], tmp_path: Path) -> None:
    play(cases, url, tmp_path)
