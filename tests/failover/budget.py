"""How long the failure tests may take.

They are in every `make test`, and nobody runs what is slow: 90 s on two idle cores, all of them together. What counts
is what one process of `pytest -n 2` takes, since that is how long somebody waits. Machines that others use too are
slower, so only twice that fails, and only where `CI` is set: a laptop may be busy with anything.
"""

from __future__ import annotations

from tests.support.patience import patient

MOST_SECONDS = patient(90.0)
SLACK = 2.0


class Spent:
    """What the tests have taken so far: their setups and teardowns count."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tortured = False  # those have no limit

    def complaint(self) -> str:
        """What is wrong, or an empty text."""
        if self.tortured or self.seconds <= MOST_SECONDS * SLACK:
            return ""
        return (
            f"tests/failover took {self.seconds:.0f} s; {MOST_SECONDS:.0f} s is the most on an idle machine, and "
            f"{MOST_SECONDS * SLACK:.0f} s on any. See --durations=20, and move what is long to torture."
        )
