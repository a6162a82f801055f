"""Fallback looks: a process that waits for a hint also looks by itself now and then, since a hint may be lost.

They hide a hint that is never sent: everything still happens, a little later. So tests switch them off, with
``HOLDFAST_TEST_FALLBACK_LOOKS=off`` in the environment or with `switch`, and see that the hint alone is enough.
"""

from __future__ import annotations

from holdfast.errors import ConfigurationError

VARIABLE = "HOLDFAST_TEST_FALLBACK_LOOKS"
_NEVER_SECONDS = 1e6

_are_on = True


def switch(given: str | None) -> None:
    """Take what the variable says: ``on`` (or nothing) or ``off``."""
    global _are_on
    if given not in (None, "", "on", "off"):
        raise ConfigurationError(f"{VARIABLE}={given:.80}: expected 'on' or 'off'; 'off' is for tests only")
    _are_on = given != "off"


def look_after(seconds: float) -> float:
    """Return after how many seconds to look unasked, where that is only for the case that a hint was lost."""
    return seconds if _are_on else _NEVER_SECONDS
