"""The events of a run on their way into its log: gathered, written as pages one after another, and then delivered.

How many of them a body has seen already is counted, never searched for: a body may run thousands of repeatable steps
before anything has to be written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from holdfast.model.log import MAX_PAGE_EVENTS
from holdfast.workflows import events as e
from holdfast.workflows.attempts import Item
from holdfast.workflows.events import Event

if TYPE_CHECKING:
    from holdfast.workflows.run import Run

_MANY_EVENTS = 500  # of repeatable steps are written although they may wait


class Pages:
    """The events of one run that are not durable yet. `seen` counts those that the body has seen, `unseen` the others;
    `tail` is the last position of the log.
    """

    def __init__(self, run: Run, tail: int, code: str, deliver: Callable[[Event], None]) -> None:
        self._run = run
        self._deliver = deliver
        self._code = code  # which the first event of each owner carries
        self.tail = tail
        self.seen = self.unseen = 0
        self._gathered: list[Item] = []
        self._writing: list[Item] | None = None
        self._pressing = 0  # gathered events that may not wait
        self._reserving: deque[Callable[[], None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._gathered or self._writing)

    @property
    def has_gathered(self) -> bool:
        return bool(self._gathered)

    def gather(self, item: Item) -> None:
        if self._code:
            item.event = msgspec.structs.replace(item.event, code=self._code)
            self._code = ""
        self._gathered.append(item)
        self.seen += item.seen
        self.unseen += not item.seen
        self._pressing += not item.may_wait

    def flush(self, *, force: bool = False) -> None:
        """Write what was gathered, unless it may wait: results of repeatable steps do, until something needs them."""
        if self._writing is not None or self._run.is_letting_go:
            return
        if not self._gathered:
            if self._reserving:
                self._writing = _RESERVED
                self._reserving.popleft()()
            return
        if not (force or self._reserving or self._pressing) and len(self._gathered) < _MANY_EVENTS:
            return
        count = e.portion([item.event for item in self._gathered[:MAX_PAGE_EVENTS]])
        self._writing, self._gathered = self._gathered[:count], self._gathered[count:]
        self._pressing = sum(not item.may_wait for item in self._gathered)
        self._run.host.append(self._run, self._writing)

    def reserve(self, then: Callable[[], None]) -> None:
        """Call `then` once everything is written. From then on nothing else is, until `release`: a step writes its
        page by itself.
        """
        self._reserving.append(then)
        self.flush(force=True)

    def release(self, written: list[Item] | None = None) -> bool:
        """Go on writing, behind what the step has written. Return whether it has written something, which is to be
        taken as `written`.
        """
        self._writing = written or None
        if self._writing is None:
            self.flush()
            return False
        self.seen += sum(item.seen for item in self._writing)
        self.unseen += sum(not item.seen for item in self._writing)
        return True

    def take_code(self) -> str:
        """Return what the first event of this owner says about its code; empty if it was said."""
        said, self._code = self._code, ""
        return said

    def give_code_back(self, code: str) -> None:
        """Say it with the next event after all: that event was not written."""
        if self._gathered:
            first = self._gathered[0]
            first.event = msgspec.structs.replace(first.event, code=code)
        else:
            self._code = code

    def written(self) -> list[Event]:
        """Deliver the events of the page, which is durable, and return them."""
        written, self._writing = self._writing or [], None
        self.tail += len(written)
        self._run.events += len(written)
        for item in written:
            if item.seen:
                self.seen -= 1
            else:
                self.unseen -= 1
                self._deliver(item.event)
            if item.event.entry:
                self._run.updates.unwritten.discard(item.event.entry)
            if item.then is not None:
                item.then()
        return [item.event for item in written]


_RESERVED = [Item(Event(type="", at=0.0))]  # by a step that writes its page itself
