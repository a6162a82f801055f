"""The stores on which a story is told.

All stories on one store are for one test process, so that it can tell several at once.
"""

from __future__ import annotations

import pytest

STORES = ("sqlite", "mongodb")
GROUP = {store: pytest.mark.xdist_group(f"faults-{store}") for store in STORES}


def on(*stores: str, at_leisure: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """For a test on each of these stores, and on others only in `make faults`."""
    params = [pytest.param(store, marks=GROUP[store]) for store in stores]
    params += [pytest.param(store, marks=[GROUP[store], pytest.mark.faults]) for store in at_leisure]
    return pytest.mark.parametrize("url", params, indirect=True)
