"""The rate of what began, seen from outside: by the moments at which user code ran."""

from __future__ import annotations

from collections.abc import Iterable


def excess(moments: Iterable[float], per_second: float, burst: int) -> float:
    """Return by how many calls the worst window is above rate × time + burst; below zero if none is."""
    worst, lowest = float("-inf"), float("inf")
    for number, at in enumerate(sorted(moments)):
        # A window from the moment i to the moment j has j - i + 1 calls, and may have (at_j - at_i) * rate + burst.
        place = number - at * per_second
        lowest = min(lowest, place)
        worst = max(worst, place - lowest + 1 - burst)
    return worst
