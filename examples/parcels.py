"""Declare the app of the crash in `make demo`. Its tasks run in worker processes, which import it by name."""

from __future__ import annotations

import time

from holdfast import App

app = App(name="parcels")  # its store is the setting `url`: HOLDFAST_URL


@app.task
def weigh(parcel: int, seconds: float) -> str:
    """Sleep, so that there is something to kill."""
    time.sleep(seconds)
    return f"parcel {parcel} weighs {parcel % 7 + 1} kg"
