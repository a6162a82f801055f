"""Large values on their way to a body: those of calls that have ended, and those that a replay is about to deliver.

A run may have thousands of large results. So none of them is in memory for longer than until it is delivered, and a
replay has a few of them fetched ahead of itself. Arguments are not fetched: a body that makes a call again has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from holdfast.codec import Payloads, Reference, references
from holdfast.workflows.events import STEP_CREATED, STEP_RETRYING, Event

if TYPE_CHECKING:
    from holdfast.workflows.run import Run

AHEAD_BYTES = 8 * 2**20  # that a replay has in memory; a single event may have more
_AHEAD_EVENTS = 500
_UNREAD = frozenset({STEP_CREATED, STEP_RETRYING})


def references_of(events: Iterable[Event]) -> list[Reference]:
    """Return the large values that a body needs to go on after these events."""
    return [
        reference
        for event in events
        if event.type not in _UNREAD
        for data in (event.data, None if event.error is None else event.error.data)
        for reference in references(data)
    ]


class LargeValues:
    """The large values of one run that its body has not got yet."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._ended: dict[str, dict[str, bytes]] = {}  # by call
        self._ahead: dict[str, bytes] = {}
        self._is_fetching = False

    def __len__(self) -> int:
        return sum(map(len, self._ended.values())) + len(self._ahead)

    def add(self, call: str, payloads: Payloads) -> None:
        """Keep the values of a call that has ended, until that is delivered."""
        if payloads:
            self._ended.setdefault(call, {}).update(payloads)

    def take(self, call: str) -> Payloads:
        """Return the values of a call whose end is delivered now. They are not kept."""
        return self._ended.pop(call, None) or self._ahead

    def are_here(self, event: Event) -> bool:
        """Return whether a replay can deliver this event. If not, it goes on when the values are here."""
        carried = self._run.replay.carried.get(event.call, ())
        wanted = references_of((*carried, event))
        if all(digest in self._ahead for digest, _ in wanted):
            return True
        if not self._is_fetching:
            self._is_fetching = True
            soon = [*wanted, *self._later(wanted)]
            self._ahead = {digest: self._ahead[digest] for digest, _ in soon if digest in self._ahead}
            missing = [reference for reference in soon if reference.digest not in self._ahead]
            self._run.host.fetch_ahead(self._run, missing, self._fetched)
        return False

    def _later(self, wanted: Iterable[Reference]) -> list[Reference]:
        """Return values that will be wanted soon: to fetch each by itself would take a round trip more for each."""
        room, found = AHEAD_BYTES - sum(size for _, size in wanted), list[Reference]()
        for reference in references_of(self._run.replay.ahead(_AHEAD_EVENTS)):
            room -= reference.size
            if room < 0:
                break
            found.append(reference)
        return found

    def _fetched(self, payloads: Mapping[str, bytes]) -> None:
        self._is_fetching = False
        self._ahead |= payloads
        self._run.pump()

    def clear(self) -> None:
        """Forget what was fetched ahead: the replay is over."""
        self._ahead = {}
