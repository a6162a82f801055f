"""Of a long history the first line and the last few hundred are kept."""

from __future__ import annotations

import pytest

from holdfast.model.records import (
    CUT_EVERY,
    CUT_WITHIN,
    KEPT_LINES,
    LONGEST,
    HistoryEntry,
    cut,
    is_cut_at,
    is_whole,
    left_out,
    neighbours,
)
from holdfast.model.status import Status
from holdfast.settings import SPECS


def lines(*versions: int) -> tuple[HistoryEntry, ...]:
    return tuple(HistoryEntry(version=v, status=Status.RETRY, at=0.0, operation=f"{v}") for v in versions)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_it_stays_within_its_bounds_however_many_lines_a_change_has(step: int) -> None:
    history, version = lines(1), 1
    while version < 3000:
        history += lines(*range(version + 1, version + step + 1))
        version += step
        if is_cut_at(version):
            history = cut(history)
        assert len(history) <= LONGEST + CUT_WITHIN
        assert is_whole(history)
        assert (history[0].version, history[-1].version) == (1, version)
    assert left_out(history) == version - len(history) > 2000
    assert all(after.version == before.version + 1 for before, after in neighbours(history))


def test_a_short_one_is_left_alone() -> None:
    assert not any(is_cut_at(version) for version in range(LONGEST + 1))
    short = lines(*range(1, KEPT_LINES + 2))
    assert cut(short) is short
    assert (left_out(short), left_out(())) == (0, 0)


@pytest.mark.parametrize(
    "versions",
    [(1, 2, 4), (1, 5, 6), (2, 3), (1, 2, 2), (1, *range(3, KEPT_LINES + 2)), (1, 2, *range(10, KEPT_LINES + 10))],
)
def test_what_no_cut_leaves_out_is_missed(versions: tuple[int, ...]) -> None:
    assert not is_whole(lines(*versions)) or any(
        after.version != before.version + 1 for before, after in neighbours(lines(*versions))
    )


def test_the_crashes_that_a_setting_forgives_can_be_counted_in_what_is_kept() -> None:
    """A crash takes four lines, and a little may come in between."""
    assert SPECS["max_crash_recoveries"].high * 5 < KEPT_LINES
    assert CUT_EVERY > CUT_WITHIN
