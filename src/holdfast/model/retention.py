"""How long an ended invocation is kept.

How long it stays in the archive was agreed at submit, for each outcome, so that a deploy does not change it. The moment
of its removal is computed with the end and is part of the same write: never before its key's time is over, never under
an hour, and `FOREVER` for records that are never removed.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.model.records import Terms
from holdfast.model.status import FINAL, Status

RETENTION_SECONDS = 7 * 86_400.0  # where nothing else was agreed
SHORTEST_SECONDS = 3600.0
FOREVER = 253_402_300_799.0  # the last second of the year 9999
OUTCOMES = tuple(sorted(status.value for status in FINAL))


def retain_until(terms: Terms, key: str | None, outcome: Status, at: float) -> float:
    """Return until when an invocation that ends at `at` is kept."""
    agreed = terms.retention
    seconds = RETENTION_SECONDS if agreed is None else agreed.get(outcome.value, RETENTION_SECONDS)
    if seconds is None:
        return FOREVER
    until = at + (seconds if seconds > SHORTEST_SECONDS else SHORTEST_SECONDS)
    if key is not None:
        until = max(until, at + terms.key_seconds if terms.key_until is None else terms.key_until)
    return until if until < FOREVER else FOREVER


def agreed(declared: Mapping[str, float | None], usual: float) -> Mapping[str, float | None] | None:
    """Return what to store at submit: the outcomes that differ from `RETENTION_SECONDS`, or None if none does."""
    each = dict.fromkeys(OUTCOMES, usual) | dict(declared)
    return {outcome: seconds for outcome, seconds in each.items() if seconds != RETENTION_SECONDS} or None
