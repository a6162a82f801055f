"""Buckets of rates: what any mix of claims may take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.support.windows import excess

from holdfast.model.rates import Rate, new_bucket, rate_of

NOW = 1_000_000.0
RATES = [rate_of("10/s", 10), rate_of("1/s", 1), rate_of("2/s", 4), rate_of("100/s", 1), rate_of("6/m")]


def starts(looks: list[tuple[float, Rate]]) -> list[float]:
    """Return when starts were taken by claimers that look after so many seconds, each with the rate that it knows."""
    now, bucket, found = NOW, new_bucket(looks[0][1], NOW), []
    for pause, rate in looks:
        now += pause
        bucket = bucket.under(rate)
        while (after := bucket.start("id", now)) is not None:
            bucket = after
            found.append(now)
    return found


@given(st.lists(st.tuples(st.floats(0, 2), st.sampled_from(RATES)), min_size=1, max_size=60))
def test_runners_that_know_different_rates_never_exceed_the_largest_of_them(looks: list[tuple[float, Rate]]) -> None:
    used = {rate for _, rate in looks}
    most = max(1 / rate.interval for rate in used), max(rate.burst for rate in used)
    assert excess(starts(looks), *most) <= 1e-3


def test_a_deploy_that_lowers_the_burst_gives_no_more_starts_than_before() -> None:
    old, new = rate_of("10/s", 10), rate_of("1/s", 1)
    assert len(starts([(0.0, old), (0.0, new)] * 10)) == 10
