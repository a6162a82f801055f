"""How long a history gets.

What is retried for ever would grow for ever, and every change of it would cost more than the one before. So of a long
history the first line and the last few hundred are kept; the versions tell how many are missing in between. It is cut
now and then, not with every line: whether with this one follows from its version alone, so every store cuts alike.

The last lines are what everything else goes by: a write whose reply was lost finds its operation there, and crashes in
a row are counted there (`max_crash_recoveries` allows no more of them than these lines can tell).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from holdfast.lifecycle.records import HistoryEntry

KEPT_LINES = 256
CUT_EVERY = 64
CUT_WITHIN = 4  # a change has a few lines, and may step over the very version
LONGEST = KEPT_LINES + CUT_EVERY  # up to here nothing is cut


def is_cut_at(version: int) -> bool:
    """Whether the change that leads to this version cuts the history."""
    return version > LONGEST and version % CUT_EVERY < CUT_WITHIN


def cut(history: tuple[HistoryEntry, ...]) -> tuple[HistoryEntry, ...]:
    return history if len(history) <= KEPT_LINES + 1 else history[:1] + history[-KEPT_LINES:]


def left_out(history: Sequence[HistoryEntry]) -> int:
    """How many lines are missing after the first."""
    return history[-1].version - len(history) if history else 0


def is_whole(history: Sequence[HistoryEntry]) -> bool:
    """Whether nothing is missing but what a cut leaves out."""
    missing = left_out(history)
    return missing == 0 or (missing > 0 and len(history) > KEPT_LINES and history[1].version == missing + 2)


def neighbours(history: Sequence[HistoryEntry]) -> Iterator[tuple[HistoryEntry, HistoryEntry]]:
    """Each line with the one that followed it. The first one's successor may have been left out."""
    return pairwise(history[1:] if left_out(history) > 0 and is_whole(history) else history)
