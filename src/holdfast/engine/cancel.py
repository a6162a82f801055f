"""Cancel: what nobody owns ends at once, an owner is asked, and what they have submitted follows.

Each write is conditional by itself. Who loses one, to a claim or to an end, looks again; there is nothing to undo. A
crash between an invocation and its children leaves these as they were: asking again asks them too, and so does its
owner when it gives way.

An owner hears of it by a hint, or when it looks, which it does once per heartbeat while it has something to lose.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from holdfast.engine.bell import Bell
from holdfast.engine.ends import Ends
from holdfast.engine.outages import repeated
from holdfast.engine.reading import get_readable
from holdfast.errors import InvocationNotFound, StoreError
from holdfast.ids import Ids, InvocationId
from holdfast.lifecycle import cancelling
from holdfast.lifecycle.changes import Applied, apply_to
from holdfast.lifecycle.decoding import ahead
from holdfast.lifecycle.records import CANCEL, FINAL, Cancellation, Hint, InvocationRecord, runner_of
from holdfast.lifecycle.status import FINAL as FINAL_STATUSES
from holdfast.lifecycle.status import Status
from holdfast.store.contract import Filter, Store
from holdfast.wakeup.fallback import look_after
from holdfast.wakeup.hub import Hub

log = logging.getLogger("holdfast.engine")

GRACE_SECONDS = 10.0
_OPEN = frozenset(Status) - FINAL_STATUSES - {Status.CANCELLING}
_BEING_CANCELLED = frozenset({Status.CANCELLING, Status.CANCELLED})
_AT_ONCE = 500
_TRIES = 20


class Canceller:
    def __init__(
        self, store: Store, ends: Ends, hub: Hub, ids: Ids, *, app: str, grace_seconds: float = GRACE_SECONDS
    ) -> None:
        self._store = store
        self._ends = ends
        self._hub = hub
        self._ids = ids
        self._app = app
        self._grace = grace_seconds

    async def cancel(
        self, ids: Sequence[InvocationId], *, by: str, reason: str = "", children: bool | None = None
    ) -> list[InvocationRecord]:
        """Ask for their end, and for that of their children (None: as was agreed when each was submitted).

        The records as they are then, or as they were if they had ended before. Raises `InvocationNotFound` once all
        others are cancelled.
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
                raise InvocationNotFound(f"the store has no invocation {id} of the app '{self._app}'")
        return after

    async def cancel_children(self, parent: InvocationRecord, by: str, reason: str) -> None:
        """All that it has submitted and has not ended, and so on."""
        parents = [parent]
        while parents:
            above = parents.pop()
            why = f"its parent {above.id} was cancelled" + (f": {reason}" if reason else "")
            where = Filter(parent=above.id, statuses=_OPEN)
            while found := await self._store.find(self._app, where, _AT_ONCE, set_aside=True):
                after = await self._cancel(found, by, why, None)
                parents += [child for child in after if child.cancellation and child.cancellation.children]
                where = Filter(parent=above.id, statuses=_OPEN, before_id=found[-1].id)

    async def _cancel(
        self, records: Sequence[InvocationRecord], by: str, reason: str, children: bool | None
    ) -> list[InvocationRecord]:
        """These as they are then."""
        after = {record.id: record for record in records}
        waiting = list(records)
        for _ in range(_TRIES):
            now = self._store.now()
            asked = []
            for record in waiting:
                cancellation = asked_to_end(
                    record, by=by, reason=reason, at=now, usual_grace=self._grace, children=children
                )
                change = cancelling.cancel(record, cancellation, operation=self._ids.operation())
                if change is not None:
                    asked.append((record, change))
            verdicts = await self._ends.apply(asked) if asked else []
            lost = []
            for (record, change), verdict in zip(asked, verdicts, strict=True):
                if isinstance(verdict, Applied):
                    after[record.id] = apply_to(change, record)
                else:
                    lost.append(record.id)
            self._tell([after[record.id] for record, _ in asked if record.id not in lost])
            if not lost:
                return list(after.values())
            waiting = [record for record in await get_readable(self._store, self._app, lost) if record is not None]
            after |= {record.id: record for record in waiting}
        raise StoreError(f"{lost[0]} could not be cancelled: it is changed again and again")

    def _tell(self, records: Sequence[InvocationRecord]) -> None:
        for kind, status in ((FINAL, Status.CANCELLED), (CANCEL, Status.CANCELLING)):
            if ids := tuple(record.id for record in records if record.status is status):
                self._hub.send(Hint(kind, ids, len(ids)))


def asked_to_end(
    record: InvocationRecord, *, by: str, reason: str, at: float, usual_grace: float, children: bool | None
) -> Cancellation:
    """Return what is asked of an invocation. Its own terms come first; `children` None: as they say."""
    grace = usual_grace if record.terms.cancel_grace is None else record.terms.cancel_grace
    wanted = record.terms.cancel_children if children is None else children
    return Cancellation(by=by, reason=reason, at=at, until=ahead(at, grace), children=wanted)


class Ear:
    """Tells a worker what of its own is to end. `holds`: whether it has that one; None: whether it has any."""

    def __init__(
        self,
        store: Store,
        hub: Hub,
        app: str,
        owner: str,
        every_seconds: float,
        holds: Callable[[str | None], bool],
        heard: Callable[[InvocationRecord], None],
    ) -> None:
        self._store = store
        self._hub = hub
        self._app = app
        self._owner = owner
        self._every = every_seconds
        self._holds = holds
        self._heard = heard
        self._bell = Bell()

    async def run(self) -> None:
        unsubscribe = self._hub.on_cancel(self._hinted)
        try:
            while True:
                await self._bell.wait(look_after(self._every))
                if self._holds(None):
                    await self._look()
        finally:
            unsubscribe()

    def _hinted(self, hint: Hint) -> None:
        if not hint.subjects or any(self._holds(id) for id in hint.subjects):
            self._bell.ring()

    async def _look(self) -> None:
        where = Filter(runner=runner_of(self._owner), statuses=frozenset({Status.CANCELLING}))
        try:
            with repeated():
                found = await self._store.find(self._app, where, _AT_ONCE, set_aside=True)
        except StoreError as error:
            log.debug("nobody can tell what is to end: %s", error)
            return
        except Exception:
            log.exception("while looking what is to end")
            return
        for record in found:
            if record.owner == self._owner:
                self._heard(record)
