"""The timers of a body: sleeps, and the time limits of what it awaits. They end when they are due, woken or given up.

The log gets a sleep when the run is suspended. A long sleep that is spent in memory, beside steps or in a run that
compensates, is written after a while: others see it then, and may end it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from holdfast.model.records import InboxEntry
from holdfast.workflows import events as e
from holdfast.workflows.attempts import SLOW_STEP_SECONDS, Item
from holdfast.workflows.events import Event
from holdfast.workflows.life import Command
from holdfast.workflows.rules import OpenCall, Past

if TYPE_CHECKING:
    from holdfast.workflows.run import Run

SLEEP = "sleep"


class BodyTimers:
    """The timers of one run that have not ended (`open`), by call."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.open: dict[str, Command] = {}
        self._writing: asyncio.TimerHandle | None = None

    @property
    def dues(self) -> list[float]:
        return [command.call.due or 0.0 for command in self.open.values()]

    # --- ends

    def complete_due(self, now: float) -> None:
        """Complete the timers whose time has come, the earliest first."""
        for due, id in sorted(zip(self.dues, self.open, strict=True)):
            if due <= now:
                self._complete(id, self.open[id])

    def wake(self, entry: InboxEntry) -> None:
        """End all sleeps before their time. The log has the message, also if it ends none: a later owner must not end a
        later sleep by it.
        """
        run = self._run
        sleeps = [(id, command) for id, command in self.open.items() if command.call.name == SLEEP]
        if not sleeps:
            run.gather(Item(Event(type=e.WOKEN, at=run.at(), entry=entry.id), True, is_urgent=True))
            run.flush()
        for id, command in sleeps:
            self._complete(id, command, entry.id)

    def _complete(self, id: str, command: Command, entry: str = "") -> None:
        run, call = self._run, command.call
        del self.open[id]
        run.ended_calls.add(id)
        past = run.replay.past.get(id)
        where = call.where if past is None or not past.created else ""  # once is enough
        event = self._event(e.WAIT_COMPLETED, call)
        run.gather(Item(msgspec.structs.replace(event, where=where, entry=entry, why="woken" if entry else "")))
        run.flush()

    def give_up(self, call: OpenCall) -> None:
        """Record the end of a timer that the log has: for people, it would be open for ever."""
        run = self._run
        self.open.pop(call.id, None)
        past = run.replay.past.get(call.id)
        if past is not None and past.created and call.id not in run.ended_calls:
            run.ended_calls.add(call.id)
            event = msgspec.structs.replace(self._event(e.WAIT_COMPLETED, call), where="", why=e.GIVEN_UP)
            run.gather(Item(event, True))

    # --- sleeps in the log

    def _unwritten_sleeps(self) -> list[OpenCall]:
        past = self._run.replay.past
        calls = [command.call for command in self.open.values() if command.call.name == SLEEP]
        return [call for call in calls if call.id not in past or not past[call.id].created]

    def gather_sleeps(self, *, is_urgent: bool = False) -> None:
        """Gather the sleeps that the log does not have yet."""
        for call in self._unwritten_sleeps():
            self._run.replay.past.setdefault(call.id, Past()).created = True
            self._run.gather(Item(self._event(e.WAIT_CREATED, call), True, is_urgent=is_urgent))

    def write_later(self) -> None:
        """Write long sleeps after a while, if they are spent in memory until then."""
        if self._writing is not None:
            return
        if any((call.seconds or 0.0) > SLOW_STEP_SECONDS for call in self._unwritten_sleeps()):
            self._writing = self._run.host.call_later(SLOW_STEP_SECONDS, self._write_sleeps)

    def _write_sleeps(self) -> None:
        run, self._writing = self._run, None
        if not (run.is_over or run.is_letting_go or run.is_replaying):
            self.gather_sleeps(is_urgent=True)
            run.flush()

    def stop(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        self._writing = None

    def _event(self, kind: str, call: OpenCall) -> Event:
        return Event(
            type=kind,
            at=self._run.at(),
            call=call.id,
            name=call.name,
            where=call.where,
            due=call.due,
            seconds=call.seconds,
        )
