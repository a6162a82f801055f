"""Suspects: work that was running when its process died runs apart from then on, in a process of its own.

All who run in a worker share its process, so a crash is charged to each of them, and one is guilty. Apart, the next
crash strikes nobody but its cause: a poison pill ends after its own crashes, and its neighbours succeed.

Not everything can run elsewhere: not what needs the things that an app's hooks have opened in the worker, not what is
declared in the program itself (another process would have to run it once more), not what has no name to find it by.
Such work stays where it always runs, and so does what turns out not to be found over there.
"""

from __future__ import annotations

from holdfast.codec import Codec
from holdfast.engine.definition import Place, TaskDefinition
from holdfast.execution.call import Outcome, Unfit
from holdfast.execution.declared import MAINS, Unreachable, address_of
from holdfast.lifecycle.crashes import crashes_in_a_row
from holdfast.lifecycle.records import InvocationRecord


class Suspects:
    def __init__(self, codec: Codec, *, apart: bool) -> None:
        self._codec = codec
        self._apart = apart
        self._elsewhere: set[str] = set()
        self._at_home: set[str] = set()

    def place_for(self, record: InvocationRecord, task: TaskDefinition) -> Place:
        """Where to run it this time."""
        if not self._apart or task.place is Place.PROCESS:
            return task.place
        if not crashes_in_a_row(record.history) or record.id in self._at_home or not self._can_be_found(task):
            return task.place
        self._elsewhere.add(record.id)
        return Place.APART

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
