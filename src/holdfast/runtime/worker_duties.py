"""What a worker does beside its loop: it audits what it owns, and wakes parked work.

`Audit` compares the worker's invocations in the store with those in its memory. A claim that was still executing when
its repetition had read, or an end that was given up, leaves work behind in the name of a living owner. Work that is
unknown twice in a row, in the same epoch, is treated like the work of a dead owner. `wake_parked` gives parked work
another try when the code has changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from holdfast.model import changes
from holdfast.model.changes import Applied
from holdfast.model.parking import may_fit
from holdfast.model.records import runner_of
from holdfast.model.status import OWNED, Status
from holdfast.runtime.definition import TaskDefinition
from holdfast.runtime.engine import Engine
from holdfast.runtime.release import Releaser
from holdfast.runtime.wait import pages
from holdfast.store.contract import Filter
from holdfast.telemetry import events as e

AUDIT_SECONDS = 15.0
AGAIN_SECONDS = 2.0  # suspects are looked at soon: a caller may wait for their end
_AT_ONCE = 500
_UNKNOWN = "its owner does not know of it"


class Audit:
    """Find invocations that the store gives to this owner and the worker does not know. `known` returns the invocations
    that the worker knows, or None while a claim is under way.
    """

    def __init__(
        self, engine: Engine, releaser: Releaser, owner: str, known: Callable[[], Collection[str] | None]
    ) -> None:
        self._engine = engine
        self._releaser = releaser
        self._owner = owner
        self._known = known
        self._suspects: set[tuple[str, int]] = set()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(AGAIN_SECONDS if self._suspects else AUDIT_SECONDS)
            try:
                await self._look()
            except Exception as error:
                self._engine.telemetry.emit(e.DutyFailed("worker", f"audit {self._owner}", error))

    async def _look(self) -> None:
        where = Filter(runner=runner_of(self._owner), statuses=OWNED)
        found = await self._engine.store.find(self._engine.app, where, _AT_ONCE, set_aside=True)
        known = self._known()
        if known is None:
            return  # and those of the last look are still to be looked at
        strange = [record for record in found if record.owner == self._owner and record.id not in known]
        left = [record for record in strange if (record.id, record.epoch) in self._suspects]
        self._suspects = {(record.id, record.epoch) for record in strange}
        cancelled = [each for each in left if each.status is Status.CANCELLING]  # no code runs that could end them
        await self._releaser.end(cancelled, _UNKNOWN)
        await self._releaser.recover([record for record in left if record not in cancelled], _UNKNOWN)


async def wake_parked(engine: Engine, owner: str, tasks: Mapping[str, TaskDefinition]) -> None:
    store = engine.store
    where = Filter(statuses=frozenset({Status.PARKED}), tasks=frozenset(tasks))
    async for parked in pages(store, engine.app, where):
        changed = [record for record in parked if may_fit(record.fingerprint, tasks[record.task].fingerprint)]
        at, why = store.now(), f"{owner} has other code"
        woken = [changes.woken(record, operation=engine.ids.operation(), at=at, why=why) for record in changed]
        verdicts = await store.apply(woken)
        for record, verdict in zip(changed, verdicts, strict=True):
            if isinstance(verdict, Applied):
                engine.telemetry.emit(e.Woken(record))
