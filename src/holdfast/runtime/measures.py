"""Measures of a process, as the engine knows them: what `holdfast.metrics` counts, on its way to the runner."""

from __future__ import annotations

from typing import Protocol


class MeasurePort(Protocol):
    def begin(self) -> None:
        """Begin to watch the engine's loop, which runs here."""
        ...

    def end(self) -> None:
        """Stop watching the loop."""
        ...

    def taken(self) -> bytes:
        """Return what was counted since the last call, encoded; empty if that is nothing."""
        ...

    def add(self, data: bytes) -> None:
        """Add what another process has `taken`."""
        ...
