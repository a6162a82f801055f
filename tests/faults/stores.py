"""The stores on which a story is told."""

from __future__ import annotations

import pytest

STORES = ("sqlite", "mongodb")


def on(*stores: str, at_leisure: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """For a test on each of these stores, and on others only in `make faults`."""
    later = [pytest.param(store, marks=pytest.mark.faults) for store in at_leisure]
    return pytest.mark.parametrize("url", [*stores, *later], indirect=True)
