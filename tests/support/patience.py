"""How long a test waits before it fails. A failure takes that long; a success does not.

`HOLDFAST_TEST_PATIENCE=4` multiplies every such time: on a machine that is four times slower than usual, `.ci/run` sets
it. What a test promises to a user in seconds is not multiplied.
"""

from __future__ import annotations

import os

FACTOR = float(os.environ.get("HOLDFAST_TEST_PATIENCE", "1"))


def patient(seconds: float) -> float:
    """Return the seconds to wait on this machine."""
    return seconds * FACTOR
