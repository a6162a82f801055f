"""Statistics: how much ended, how long it waited and ran, and what failed, over time.

``app.stats()`` returns a `Stats`; see docs/guides/stats.md.
"""

from holdfast.stats.api import Deploy, FailureGroup, Figures, Notable, Point, Stats
from holdfast.stats.rules import Distribution

__all__ = ["Deploy", "Distribution", "FailureGroup", "Figures", "Notable", "Point", "Stats"]
