"""Retry policies in words."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.model.policies import describe_policy
from holdfast.model.retries import Policy, dump_policy
from holdfast.retries import Exponential, FirstMatch, Fixed, Forever, MoveTo, Never, Only, Timetable


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (Never(), "none"),
        (Fixed(1, "90s"), "1 more attempt, 1m30s apart"),
        (Exponential(5), "5 more attempts, after about 1s, then 2 times as long each time, up to 1m"),
        (
            Exponential(2, "2s", "1h", 1.5, jitter=False),
            "2 more attempts, after 2s, then 1.5 times as long each time, up to 1h",
        ),
        (Timetable({"5m": "1m", "1h": "5m"}), "every 1m up to an age of 5m, every 5m up to an age of 1h, then none"),
        (Forever(Fixed(3, "10s")), "for ever, 10s apart"),
        (MoveTo("slow", Fixed(2)), "2 more attempts, 1s apart, on the queue 'slow'"),
        (
            Only(Fixed(2), [ConnectionError, "shop:Busy"]),
            "for ConnectionError or shop:Busy: 2 more attempts, 1s apart; for others none",
        ),
        (
            FirstMatch([(ValueError, Never()), (Exception, Forever(Fixed(0, 5)))]),
            "for ValueError: none; for Exception: for ever, 5s apart; for others none",
        ),
    ],
)
def test_a_policy_in_words(policy: Policy, says: str) -> None:
    assert describe_policy(dump_policy(policy)) == says


def test_one_that_is_not_known_stays_as_it_is_stored() -> None:
    unknown: dict[str, Any] = {"kind": "lunar", "phase": 3}
    assert describe_policy(unknown) == '{"kind": "lunar", "phase": 3}'
    assert describe_policy(None) == ""
