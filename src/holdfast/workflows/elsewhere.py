"""The calls of a run that other invocations perform: children, and steps on other queues.

Each is inserted with an id that follows from the run and the call, then recorded. Its end comes by the inbox. A child
that the body gives up is asked to end, and only then recorded as given up: until then, each owner asks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast.crashpoints import crashpoint
from holdfast.errors import InvocationCancelled
from holdfast.model.records import InboxEntry
from holdfast.workflows import events as e
from holdfast.workflows.attempts import Item
from holdfast.workflows.children import CHILD_COMPLETED, CHILD_FAILED, error_of
from holdfast.workflows.events import Event
from holdfast.workflows.life import Command
from holdfast.workflows.rules import Past

if TYPE_CHECKING:
    from holdfast.workflows.run import Run


class Elsewhere:
    """The calls of one run that have not ended elsewhere (`open`), by call."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.open: dict[str, Command] = {}
        self.submitting = 0  # inserts, and requests to end, that are under way
        self.asking = 0  # children to end, without an answer yet: the run does not end before

    # --- beginning

    def submit(self, command: Command, past: Past) -> None:
        run, child, id = self._run, command.child, command.call.id
        assert child is not None
        self.open[id] = command
        if past.child:
            if command.is_awaited:
                run.host.watch_child(run, command)  # the message of its end may have been dropped
            return
        past.child = child.id
        run.replay.past[id] = past
        command.is_submitting = True
        self.submitting += 1
        run.host.submit_child(run, command)

    def submitted(self, command: Command, refused: Exception | None) -> None:
        """Go on after the insert of a child. A refusal fails the call."""
        run = self._run
        self.submitting -= 1
        command.is_submitting = False
        if run.is_over:
            return
        if refused is not None:
            self.open.pop(command.call.id, None)
            error = run.codec.encode_error(refused)
            event = Event(type=e.STEP_FAILED, at=run.at(), call=command.call.id, error=error, why=str(refused)[:500])
            run.gather_created(command)
            run.gather(Item(event, False))
            run.host.warn(run.record, f"{command.call.id}: {refused}")
        else:
            run.gather_created(command, then=_child_created)
            if command.is_cancelled:  # the body gave it up meanwhile
                self.ask_to_end(command)
        run.pump()

    # --- ends

    def ended(self, entry: InboxEntry) -> None:
        """Take the message of an end."""
        run = self._run
        if entry.call not in run.replay.open:
            return  # the body has given it up
        common: dict[str, Any] = {"at": run.at(), "call": entry.call, "entry": entry.id}
        if entry.kind == CHILD_COMPLETED:
            event = Event(type=e.STEP_COMPLETED, data=entry.body, **common)
        elif entry.kind == CHILD_FAILED:
            event = Event(type=e.STEP_FAILED, error=error_of(entry.body), **common)
        else:
            why = f"the child of {entry.call} was cancelled"
            error = run.codec.encode_error(InvocationCancelled(why, invocation_id=run.id))
            event = Event(type=e.STEP_FAILED, error=error, why=why, **common)
        run.updates.unwritten.add(entry.id)
        run.host.fetch_then(run, event, self._gather_end)

    def _gather_end(self, event: Event, payloads: Mapping[str, bytes]) -> None:
        run, life = self._run, self._run.life
        if run.is_over or life is None or event.call not in run.replay.open or event.call in run.ended_calls:
            run.updates.unwritten.discard(event.entry)
            return
        run.ended_calls.add(event.call)
        if (command := life.by_id.get(event.call)) is not None:
            # The last owner may have died between the insert of the child and the page that says so.
            run.gather_created(command, event.entry.removeprefix("child:"))
            run.withdraw(command)
        run.values.add(event.call, payloads)
        run.gather(Item(event))
        run.flush()

    # --- giving up

    def ask_to_end(self, command: Command) -> None:
        run = self._run
        assert command.child is not None
        self.asking += 1
        why = f"its parent {run.id} does not wait for it any more"
        run.host.cancel_children(run, [command.child.id], why, lambda: self._asked_to_end(command))

    def _asked_to_end(self, command: Command) -> None:
        """Record that a child which the body has given up is asked to end."""
        run, id = self._run, command.call.id
        self.asking -= 1
        past = run.replay.past.get(id)
        has_ended = id in run.ended_calls  # the end was on its way when the body gave the call up
        if command.step is None and past is not None and past.created and not (has_ended or run.is_over):
            run.ended_calls.add(id)
            why = "the body gave it up, and it was asked to end"
            run.gather(Item(Event(type=e.STEP_FAILED, at=run.at(), call=id, why=why), True, is_urgent=True))
            run.flush()
        run.pump()

    def end_with_run(self) -> bool:
        """Ask the children to end that end with the run. Return whether there are such; the run is pumped then.

        They are asked before the end is written: an owner that dies in between leaves a run that comes here again.
        """
        run = self._run
        awaited = [command for command in self.open.values() if command.child is not None and command.cancels_on_end]
        if not awaited:
            return False
        for command in awaited:
            command.cancels_on_end = False
        self.submitting += 1
        ids = [command.child.id for command in awaited if command.child is not None]
        run.host.cancel_children(run, ids, f"its parent {run.id} has ended", self._all_asked_to_end)
        return True

    def _all_asked_to_end(self) -> None:
        self.submitting -= 1
        self._run.pump()


def _child_created() -> None:
    crashpoint("child.created")
