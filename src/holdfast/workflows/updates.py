"""The inbox of a run in its invocation, while the run goes on.

The change that ends, suspends or hands over a run removes the messages that its log has. A run that goes on for longer
removes them by a `RunUpdate`, once there are many. Otherwise the inbox of a run with a thousand children would be full,
and each push would read and write a large invocation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.model.records import RunState
from holdfast.model.state_writes import MAX_INBOX_BYTES

if TYPE_CHECKING:
    from holdfast.workflows.run import Run

_MANY_ENTRIES = 50  # that the log has, and that are removed from the inbox of a run that goes on


class RunUpdates:
    """The updates of one run. `unwritten` are the inbox entries whose events are not durable yet."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.is_writing = False
        self.unwritten: set[str] = set()

    def send(self) -> None:
        """Remove old messages, if there are many."""
        run, state, life = self._run, self._run.record.run, self._run.life
        if state is None or life is None or run.is_replaying:
            return
        if self._has_old_entries(state):
            self._write()

    def _has_old_entries(self, state: RunState) -> bool:
        """Return whether many messages in the inbox, or large ones, are in the log already."""
        if not state.inbox:
            return False
        old = [each for each in state.inbox if each.id in self._run.handled and each.id not in self.unwritten]
        return len(old) >= _MANY_ENTRIES or sum(each.size for each in old) >= MAX_INBOX_BYTES // 4

    def _write(self) -> None:
        if not (self._run.is_over or self.is_writing or self._run.is_letting_go):
            self.is_writing = True
            self._run.host.update(self._run)

    def written(self, state: RunState | None) -> None:
        """Go on after an update to this state; None: it was refused."""
        run = self._run
        self.is_writing = False
        if run.is_over:
            return
        if state is not None and run.record.run is not None and run.record.run.pushed == state.pushed:
            run.record = msgspec.structs.replace(run.record, run=state)
        self.send()
        run.pump()
