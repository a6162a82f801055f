"""Suspects: work that was running when its process died, and again when the next one did, runs in a process of its own.

All who run in a worker share its process, so a crash is charged to each of them, and one is guilty. Apart, the next
crash strikes nobody but its cause: a poison pill ends after its own crashes, and its neighbours succeed. One crash
alone makes no suspects: most are the work of the system or of a person, and dozens of new processes at once would make
everybody wait for what a new worker does at once.

Work that ran in two workers that had to be killed, since they did not answer while another call was past its time, is
suspected likewise: it may be what held the interpreter. Apart, it can end, and holds up nobody.

A worker runs only so many apart; the others wait in the queue meanwhile.

Not everything can run elsewhere: not what is declared in the program itself (another process would have to run it once
more), not what has no name to find it by. Such work stays where it always runs, and so does what turns out not to be
found over there.
"""

from __future__ import annotations

import os

from holdfast.codec import Codec
from holdfast.engine.definition import Place, TaskDefinition
from holdfast.execution.call import Outcome, Unfit
from holdfast.execution.declared import MAINS, Unreachable, address_of
from holdfast.lifecycle.crashes import crashes_in_a_row, kills_in_a_row
from holdfast.lifecycle.records import InvocationRecord

_CRASHES = 2  # make a suspect, or fewer if fewer are forgiven
_KILLS = 2  # beside others that were past their time
PLACES_APART = max(10, 4 * (os.cpu_count() or 1))  # of a worker: each is an interpreter
CROWDED_SECONDS = 3.0  # after which one looks again for room


class Suspects:
    def __init__(self, codec: Codec, *, max_crashes: int) -> None:
        self._codec = codec
        self._crashes = max(1, min(_CRASHES, max_crashes))
        self._elsewhere: set[str] = set()
        self._at_home: set[str] = set()

    @property
    def apart(self) -> tuple[str, ...]:
        """The invocations that run in processes of their own now."""
        return tuple(sorted(self._elsewhere))

    def place_for(self, record: InvocationRecord, task: TaskDefinition) -> Place | None:
        """Where to run it this time; None: apart, where there is no room now."""
        if task.place is Place.PROCESS or not self._is_suspect(record):
            return task.place
        if record.id in self._at_home or not self._can_be_found(task):
            return task.place
        if len(self._elsewhere) >= PLACES_APART:
            return None
        self._elsewhere.add(record.id)
        return Place.APART

    def _is_suspect(self, record: InvocationRecord) -> bool:
        return crashes_in_a_row(record.history) >= self._crashes or kills_in_a_row(record.history) >= _KILLS

    def _can_be_found(self, task: TaskDefinition) -> bool:
        if getattr(task.function, "__module__", None) in MAINS:
            return False
        try:
            address_of(task.name, task.function, self._codec)
        except Unreachable:
            return False
        return True

    def come_home(self, id: str, outcome: Outcome) -> bool:
        """It has this outcome. True: it could not begin elsewhere, and is yet to be tried where it always runs."""
        went = id in self._elsewhere
        self._elsewhere.discard(id)
        self._at_home.discard(id)
        if went and isinstance(outcome, Unfit):
            self._at_home.add(id)
            return True
        return False
