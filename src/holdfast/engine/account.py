"""What a runner did, in numbers."""

from __future__ import annotations

import msgspec


class Account(msgspec.Struct):
    """For the last line that a runner prints."""

    started: int = 0
    ended: int = 0
    interrupted: int = 0
    deaths: int = 0  # of worker processes

    def add(self, other: Account) -> None:
        self.started += other.started
        self.ended += other.ended
        self.interrupted += other.interrupted
        self.deaths += other.deaths
