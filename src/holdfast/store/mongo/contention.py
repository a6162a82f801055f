"""Keeps claimers apart that want the same invocations, without communication between them.

A lone claimer takes the head of the queue, in exact order. Of several claimers that do so, all but one have looked and
written in vain. So a claimer that finds others faster divides the queue by the last character of the ids, and takes the
first of one share only: two shares, four, up to sixteen, and another share after each collision. Sixteen claimers thus
settle within a few claims, each with a share of its own, and nothing is written for it. The server selects the share
while it reads the index.

A share without work is followed by a look at the head of all, and so is every sixteenth claim: invocations of a share
without a claimer are the oldest there, or the most urgent. After each second without a collision the shares are doubled
in size, until there is one again.

Claims of one, in one command, notice no collision: the server repeats them silently. So after 64 claims in a row one
looks first, to learn.
"""

from __future__ import annotations

import random

from holdfast.ids import ALPHABET

_MAX_SHARES = 16
_TO_THE_HEAD = 1 / 16
_CALM_SECONDS = 1.0
_ENOUGH = 0.9  # of what was chosen: less is a collision
_ROW = 64


class Contention:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.shares = 1
        self._mine = 0
        self._learned_at = float("-inf")
        self._at_head = True  # whether the last look went there
        self._row = 0

    def share(self, at: float) -> str | None:
        """Return the ids to look for, as a regular expression; None: all."""
        if self.shares > 1 and not 0 <= at - self._learned_at < _CALM_SECONDS:
            self._divide(self.shares // 2, at)
        self._at_head = self.shares == 1 or self._rng.random() < _TO_THE_HEAD
        if self._at_head:
            return None
        size = len(ALPHABET) // self.shares
        return f"[{ALPHABET[self._mine * size : (self._mine + 1) * size]}]$"

    def learn(self, chosen: int, got: int, at: float) -> None:
        """Learn how many of the chosen records could be taken."""
        self._row = 0
        if got < chosen * _ENOUGH and (self.shares == 1 or not self._at_head):
            self._divide(min(self.shares * 2, _MAX_SHARES), at)

    def took_head(self, found: bool) -> None:
        """Learn whether a claim of one found a head to take."""
        self._row = self._row + 1 if found else 0

    @property
    def looks_first(self) -> bool:
        """Return whether a claim of one looks before it takes."""
        return self.shares > 1 or self._row >= _ROW

    def _divide(self, shares: int, at: float) -> None:
        self.shares, self._mine, self._learned_at = shares, self._rng.randrange(shares), at
