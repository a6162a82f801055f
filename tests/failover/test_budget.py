"""The failure tests are counted, and too many seconds are told with the figure."""

from __future__ import annotations

import pytest
from tests.failover.budget import Spent
from tests.support.patience import patient

pytestmark = pytest.mark.xdist_group("failover")


@pytest.mark.parametrize(
    ("seconds", "tortured", "said"), [(90, False, ""), (179, False, ""), (181, False, "took"), (999, True, "")]
)
def test_too_many_seconds_are_told(seconds: float, tortured: bool, said: str) -> None:
    spent = Spent()
    spent.seconds, spent.tortured = patient(seconds), tortured
    assert said in spent.complaint()
    assert bool(said) == bool(spent.complaint())
