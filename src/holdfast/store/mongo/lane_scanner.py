"""Scans whole lanes for work behind the low-water marks, off the path of any claim.

After a claim that began at the marks, a look at the whole lanes follows within `FRESH_SECONDS` of the previous look. It
finds invocations that arrived behind a mark without a hint, and delivers a hint to this process, which then claims
them. The sentinels of new lanes and ranks are made here too, since claims should not wait for either.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

from msgspec import UnsetType
from pymongo.errors import OperationFailure, PyMongoError

from holdfast.errors import StoreError
from holdfast.model.changes import Change, MoveUp
from holdfast.model.records import READY, Hint
from holdfast.model.status import AVAILABLE
from holdfast.store.mongo import queries, schema, sentinels
from holdfast.store.mongo.documents import Document
from holdfast.store.mongo.marks import Marks, Seen
from holdfast.store.mongo.quarantine import Collections
from holdfast.store.mongo.sentinels import Sentinels

_SOON_SECONDS = 0.05
_LOOKED_AT = 50
_REMAKE_SECONDS = 600.0  # a user may remove sentinels


def seen_in(documents: Sequence[Document]) -> list[Seen] | None:
    """Return the places of documents; None if one of them has no valid place."""
    seen = []
    for one in documents:
        lane, rank, due_at = one.get("lane"), one.get("rank"), one.get("due_at")
        if not isinstance(lane, str) or not isinstance(rank, int | float) or not isinstance(due_at, int | float):
            return None
        seen.append(Seen(lane, rank, due_at))
    return seen


class LaneScanner:
    """Scan whole lanes and make sentinels, off the path of any claim. `deliver` hands a hint to this process."""

    def __init__(
        self,
        collection: Collections,
        monotonic: Callable[[], float],
        now: Callable[[], float],
        deliver: Callable[[Hint], None],
    ) -> None:
        self._collection = collection
        self._monotonic = monotonic
        self._now = now
        self._deliver = deliver
        self.marks = Marks(monotonic)
        self._sentinels = Sentinels()
        self._made_at = monotonic()
        self._claimed: dict[str, dict[str, float]] = {}  # by app: lanes that were claimed from, and when
        self._task: asyncio.Task[None] | None = None

    def note_changes(self, changes: Iterable[Change | MoveUp]) -> None:
        """Note changes: invocations that became available, or were moved up, may lie behind a mark."""
        for change in changes:
            if isinstance(change, MoveUp):
                self.marks.lower_all(change.app, change.due_at)
            elif change.path[-1] in AVAILABLE:
                if isinstance(change.due_at, UnsetType):  # it keeps its place, wherever that is
                    self.marks.forget(change.app)
                else:
                    self.marks.lower_all(change.app, change.due_at)
                    if not isinstance(change.lane, UnsetType):
                        self.marks.forget(change.app, [change.lane])

    def look_soon(self, app: str, lanes: Iterable[str], began: float) -> None:
        """Schedule a look at these lanes, from which a claim began at that time (monotonic)."""
        claimed = self._claimed.setdefault(app, {})
        for lane in lanes:
            claimed[lane] = began
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._see_to_it())

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _see_to_it(self) -> None:
        """Look at whole lanes, when it is time, until no further claim came. An error ends it: the next claim schedules
        it again, and looks at stale lanes itself.
        """
        await asyncio.sleep(_SOON_SECONDS)
        with contextlib.suppress(PyMongoError, StoreError):
            while True:
                await self._make_sentinels()
                self._forget_what_was_looked_at()
                if not self._claimed:
                    return
                wait = min(self.marks.fresh_for(app, lanes) for app, lanes in self._claimed.items())
                await asyncio.sleep(max(wait, 0.0))
                self._forget_what_was_looked_at()
                for app, lanes in tuple(self._claimed.items()):
                    stale = [lane for lane in lanes if self.marks.is_stale(app, [lane])]
                    for lane in stale:
                        del lanes[lane]
                    if stale:
                        await self._look(app, stale)

    def _forget_what_was_looked_at(self) -> None:
        for app, lanes in tuple(self._claimed.items()):
            for lane, began in tuple(lanes.items()):
                if self.marks.whole_at(app, lane) >= began:
                    del lanes[lane]
            if not lanes:
                del self._claimed[app]

    async def _look(self, app: str, lanes: Sequence[str]) -> None:
        at, look, seen = self._now(), self.marks.begin(app, lanes, whole=True), None
        behind: list[Seen] = []
        try:
            invocations = self._collection(schema.INVOCATIONS)
            seen = seen_in(await queries.places(invocations, app, lanes, at, _LOOKED_AT))
            behind = [one for one in seen or () if self.marks.is_behind(app, one)]
        finally:
            self.marks.end(look, seen, _LOOKED_AT, at)
        if behind:
            self._deliver(Hint(READY, tuple({one.lane for one in behind}), len(behind)))

    async def _make_sentinels(self) -> None:
        if self._monotonic() - self._made_at > _REMAKE_SECONDS:
            self._sentinels, self._made_at = Sentinels(), self._monotonic()
        for app, lanes in tuple(self._claimed.items()):
            if wanted := self._sentinels.missing(app, self.marks.known(app, lanes)):
                self._sentinels.are_there(wanted)
                with contextlib.suppress(OperationFailure):  # a user's validator, say; it works without them
                    await sentinels.make(self._collection(schema.INVOCATIONS), wanted)
