"""Cancel: an invocation without an owner ends at once, an owner is asked to end it, and its children follow.

Each write is conditional by itself. A write that loses to a claim or to an end is decided again; there is nothing to
undo. A crash between an invocation and its children leaves these as they were: asking again asks them too, and so does
the owner when it ends the invocation.

An owner learns of it by a hint, or by a look, once per heartbeat while it holds anything (`CancellationListener`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from holdfast.errors import StoreError
from holdfast.ids import InvocationId
from holdfast.model import cancellation as cancelling
from holdfast.model.changes import Applied, Change, Push, Verdict, apply_to
from holdfast.model.decoding import ahead
from holdfast.model.records import CANCEL, ENDED, Cancellation, Hint, InvocationRecord, runner_of, work_hint
from holdfast.model.state_writes import pushed
from holdfast.model.status import FINAL, Status
from holdfast.runtime.hints import Wakeup, look_after
from holdfast.runtime.wait import get_readable, missing, pages
from holdfast.store.contract import Filter
from holdfast.telemetry.events import DutyFailed, Settled

if TYPE_CHECKING:
    from holdfast.runtime.engine import Engine

_OPEN = frozenset(Status) - FINAL - {Status.CANCELLING}
_BEING_CANCELLED = frozenset({Status.CANCELLING, Status.CANCELLED})
_AT_ONCE = 500
_TRIES = 20


class Canceller:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._store = engine.store
        self._hub = engine.hub
        self._app = engine.app

    async def cancel(
        self, ids: Sequence[InvocationId], *, by: str, reason: str = "", children: bool | None = None
    ) -> list[InvocationRecord]:
        """Ask for the end of these invocations and of their children (None: as was agreed when each was submitted).

        Return the records as they are then, or as they were if they had ended before. Raises `InvocationNotFound`, or
        `CorruptRecord` for a damaged record, once all others are cancelled.
        """
        after: list[InvocationRecord] = []
        for start in range(0, len(ids), _AT_ONCE):
            found = await get_readable(self._store, self._app, ids[start : start + _AT_ONCE])
            after += await self._cancel([record for record in found if record is not None], by, reason, children)
        for record in after:
            if record.cancellation is not None and record.status in _BEING_CANCELLED:
                wanted = record.cancellation.children if children is None else children
                if wanted:
                    await self.cancel_children(record, by, reason)
        there = {record.id for record in after}
        for id in ids:
            if id not in there:
                raise await missing(self._store, self._app, id)
        return after

    async def cancel_children(self, parent: InvocationRecord, by: str, reason: str) -> None:
        """Cancel everything that it has submitted and that has not ended, and so on."""
        parents = [parent]
        while parents:
            above = parents.pop()
            why = f"its parent {above.id} was cancelled" + (f": {reason}" if reason else "")
            where = Filter(parent=above.id, statuses=_OPEN)
            async for found in pages(self._store, self._app, where):
                after = await self._cancel(found, by, why, None)
                parents += [child for child in after if child.cancellation and child.cancellation.children]

    async def _cancel(
        self, records: Sequence[InvocationRecord], by: str, reason: str, children: bool | None
    ) -> list[InvocationRecord]:
        """Cancel these. Return them as they are then."""
        after = {record.id: record for record in records}
        waiting, foreign = [], self._engine.foreign
        for record in records:
            if foreign is not None and foreign.has(record):
                after[record.id] = await foreign.cancel(record, by=by, reason=reason)
            else:
                waiting.append(record)
        for _ in range(_TRIES):
            now = self._store.now()
            asked = []
            for record in waiting:
                cancellation = asked_to_end(
                    record,
                    by=by,
                    reason=reason,
                    at=now,
                    usual_grace=self._engine.settings.cancel_grace_seconds,
                    children=children,
                )
                change = cancelling.cancel(record, cancellation, operation=self._engine.ids.operation())
                if change is not None:
                    asked.append((record, change))
            lost = []
            for (record, change), verdict in zip(asked, await self._write(asked), strict=True):
                if not isinstance(verdict, Applied):
                    lost.append(record.id)
                elif isinstance(change, Change):
                    after[record.id] = apply_to(change, record)
                    if change.target in FINAL and self._engine.telemetry.wants(Settled):
                        self._engine.telemetry.emit(Settled(record, change))
                elif isinstance(then := pushed(change, record), InvocationRecord):
                    after[record.id] = then
            self._send_hints([after[record.id] for record, _ in asked if record.id not in lost])
            if not lost:
                return list(after.values())
            waiting = [record for record in await get_readable(self._store, self._app, lost) if record is not None]
            after |= {record.id: record for record in waiting}
        raise StoreError(f"{lost[0]} could not be cancelled: it is changed again and again")

    async def _write(self, asked: Sequence[tuple[InvocationRecord, Change | Push]]) -> list[Verdict]:
        """Write the requests; a run without an owner gets its request into its inbox."""
        changes = [(record, change) for record, change in asked if isinstance(change, Change)]
        pushes = [change for _, change in asked if isinstance(change, Push)]
        applied = iter(await self._engine.outbox.apply(changes) if changes else [])
        added = iter(await self._store.apply(pushes) if pushes else [])
        return [next(applied if isinstance(change, Change) else added) for _, change in asked]

    def _send_hints(self, records: Sequence[InvocationRecord]) -> None:
        if ready := [(each.lane, each.due_at, each.priority) for each in records if each.status is Status.REROUTED]:
            self._hub.send(work_hint(ready))
        for kind, status in ((ENDED, Status.CANCELLED), (CANCEL, Status.CANCELLING)):
            if ids := tuple(record.id for record in records if record.status is status):
                self._hub.send(Hint(kind, ids, len(ids)))


def asked_to_end(
    record: InvocationRecord, *, by: str, reason: str, at: float, usual_grace: float, children: bool | None
) -> Cancellation:
    """Return the cancellation of an invocation. Its own terms come first; `children` None: as the terms say. What a run
    has submitted ends with it, or not, as `on_parent_end` says: the run sees to that itself.
    """
    grace = usual_grace if record.terms.cancel_grace is None else record.terms.cancel_grace
    wanted = (record.terms.cancel_children and record.run is None) if children is None else children
    return Cancellation(by=by, reason=reason, at=at, until=ahead(at, grace), children=wanted)


class CancellationListener:
    """Report to a worker which of its invocations were cancelled. `holds` says whether the worker has an invocation;
    None: whether it has any. `awaits` says whether the answer to a claim or a start is under way: the store may have
    given the worker an invocation that it does not know yet. Such a hint `is_early`, and is applied when the invocation
    has `arrived`.
    """

    def __init__(
        self,
        engine: Engine,
        owner: str,
        every_seconds: float,
        holds: Callable[[str | None], bool],
        awaits: Callable[[], bool],
        deliver: Callable[[InvocationRecord], None],
    ) -> None:
        self._store = engine.store
        self._hub = engine.hub
        self._app = engine.app
        self._owner = owner
        self._every = every_seconds
        self._holds = holds
        self._awaits = awaits
        self._deliver = deliver
        self.is_early = False  # a hint has come that may be about what is under way
        self._wakeup = Wakeup()

    async def run(self) -> None:
        unsubscribe = self._hub.on(CANCEL, self._hinted)
        try:
            while True:
                await self._wakeup.wait(look_after(self._every))
                if self._holds(None):
                    await self._look()
        finally:
            unsubscribe()

    def _hinted(self, hint: Hint) -> None:
        self.is_early = self.is_early or self._awaits()
        if not hint.subjects or any(self._holds(id) for id in hint.subjects):
            self._wakeup.notify()

    def arrived(self) -> None:
        """Look again, since a hint `is_early`: the worker has invocations now that it did not know then."""
        self.is_early = False
        self._wakeup.notify()

    async def _look(self) -> None:
        where = Filter(runner=runner_of(self._owner), statuses=frozenset({Status.CANCELLING}))
        try:
            found = await self._store.find(self._app, where, _AT_ONCE, set_aside=True)
        except Exception as error:
            self._hub.telemetry.emit(DutyFailed("engine", "look which invocations are cancelled", error))
            return
        for record in found:
            if record.owner == self._owner:
                self._deliver(record)
