"""The duty `waits`: suspended runs whose time has come go back to the queue.

It looks at the soonest ones, by an index, when the next known one is due, and now and then: others suspend runs too. A
run that is to be woken before the next such look sends a hint, so that no run is later than a second or two. A lost
hint (its worker died right after the suspension) costs as much as the time between two looks: two seconds while runs
sleep, five where none was found, and a minute where this runner's code declares no workflow and none sleeps.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import CorruptRecord, NotDecodable
from holdfast.fleet.services import Duty
from holdfast.model.changes import Applied, awakened
from holdfast.model.records import WAITS, Hint, InvocationRecord, work_hint
from holdfast.runtime.engine import Engine
from holdfast.store.contract import Filter, Order
from holdfast.workflows.events import decode, is_progress

LOOK_SECONDS = 2.0
QUIET_SECONDS = 5.0
IDLE_SECONDS = 60.0
_AT_ONCE = 500
_TAIL_PAGES, _MAX_TAIL_PAGES = 20, 1000


class Waits:
    """A feature of a runner: see `holdfast.fleet.services.Feature`."""

    declares = ()

    def __init__(self, engine: Engine, *, has_runs: bool = False) -> None:
        self._engine = engine
        self._idle_seconds = QUIET_SECONDS if has_runs else IDLE_SECONDS
        self._store = engine.store
        self._next_look = 0.0  # by the store's time; one that is far ahead is no reason to wait
        engine.hub.on(WAITS, self._hinted)

    async def register(self) -> None:
        """Do nothing: no code declares anything here."""

    def duties(self) -> Sequence[Duty]:
        return (Duty(name="waits", every_seconds=0.5, perform=self.sweep),)

    def _hinted(self, hint: Hint) -> None:
        self._next_look = min(self._next_look, hint.since if hint.since is not None else 0.0)

    async def sweep(self) -> bool:
        """Wake what is due. Return True if there may be more."""
        now = self._store.now()
        if now < self._next_look <= now + IDLE_SECONDS:
            return False
        self._next_look = float("inf")  # for hints of what is suspended while this look is under way
        certain = now - self._store.clock_error()
        found = await self._soonest(1)
        if found and (found[0].wake_at or 0.0) <= certain:
            found = await self._soonest(_AT_ONCE)
        due = [record for record in found if (record.wake_at or 0.0) <= certain]
        coming = [record.wake_at for record in found if record.wake_at is not None and record.wake_at > certain]
        self._next_look = min([self._next_look, now + (LOOK_SECONDS if found else self._idle_seconds), *coming[:1]])
        await self._wake(due, now)
        return len(due) == _AT_ONCE

    async def _soonest(self, limit: int) -> Sequence[InvocationRecord]:
        return await self._store.find(self._engine.app, Filter(), limit, order=Order.WAKE_AT, set_aside=True)

    async def _wake(self, due: Sequence[InvocationRecord], now: float) -> None:
        if not due:
            return
        ids = self._engine.ids
        wanted = [awakened(record, operation=ids.operation(), at=now, why="its time has come") for record in due]
        verdicts = await self._store.apply(wanted)
        woken = [record for record, verdict in zip(due, verdicts, strict=True) if isinstance(verdict, Applied)]
        if woken:
            self._engine.hub.send(work_hint([(record.lane, now, record.priority) for record in woken]))


async def read_progress(engine: Engine, record: InvocationRecord) -> int:
    """Return the epoch of a run's last progress; 0 if there was none, or its log cannot be read. The end of the log is
    enough: a crash without progress leaves few pages.
    """
    generation = 0 if record.run is None else record.run.generation
    for limit in (_TAIL_PAGES, _MAX_TAIL_PAGES):
        try:
            pages = await engine.store.read_log(engine.app, record.id, generation=generation, limit=limit, latest=True)
            epochs = [page.epoch for page in pages if is_progress(decode(page))]
        except (CorruptRecord, NotDecodable):
            return 0
        if epochs or len(pages) < limit:
            break
    return max(epochs, default=0)


def wait_hint(wake_at: float | None, now: float) -> Hint | None:
    """Return the hint for a run that is to be woken before the next look; None if the look is soon enough."""
    if wake_at is None or wake_at > now + IDLE_SECONDS + LOOK_SECONDS:
        return None
    return Hint(WAITS, (), 1, wake_at)
