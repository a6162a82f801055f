"""How long an ended invocation is kept.

What has ended is the archive. How long it stays there was agreed when it was submitted, for each outcome, so a deploy
does not change what was promised. The moment at which it may go is computed with the end and is part of the same write:
never before its key's time is over, never under an hour, and `FOREVER` where nothing is to be removed.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.lifecycle.records import Terms
from holdfast.lifecycle.status import FINAL, Status

RETENTION_SECONDS = 7 * 86_400.0  # where nothing else was agreed
SHORTEST_SECONDS = 3600.0
FOREVER = 253_402_300_799.0  # the last second of the year 9999
OUTCOMES = tuple(sorted(status.value for status in FINAL))


def retain_until(terms: Terms, key: str | None, outcome: Status, at: float) -> float:
    """Until when something that ends now is kept."""
    agreed = terms.retention
    seconds = RETENTION_SECONDS if agreed is None else agreed.get(outcome.value, RETENTION_SECONDS)
    if seconds is None:
        return FOREVER
    until = at + (seconds if seconds > SHORTEST_SECONDS else SHORTEST_SECONDS)
    if key is not None:
        until = max(until, at + terms.key_seconds if terms.key_until is None else terms.key_until)
    return until if until < FOREVER else FOREVER


def agreed(declared: Mapping[str, float | None], usual: float) -> Mapping[str, float | None] | None:
    """What to write down at submit: the outcomes that differ from `RETENTION_SECONDS`, or None if none does."""
    each = dict.fromkeys(OUTCOMES, usual) | dict(declared)
    return {outcome: seconds for outcome, seconds in each.items() if seconds != RETENTION_SECONDS} or None
