"""The audit of a worker: what the store says that it owns, compared with what it knows of.

A claim that was still executing when its repetition had read, or an end that was given up, leaves work behind that
nobody runs, in the name of an owner that lives. What is strange twice in a row, in the same epoch, is treated like the
work of an owner that died; what was cancelled meanwhile is ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from holdfast.engine.outages import repeated
from holdfast.engine.recovery import Recovery
from holdfast.errors import StoreError
from holdfast.lifecycle.records import runner_of
from holdfast.lifecycle.status import OWNED, Status
from holdfast.store.contract import Filter, Store

log = logging.getLogger("holdfast.worker")

AUDIT_SECONDS = 15.0
AGAIN_SECONDS = 2.0  # who is suspected is looked at soon: somebody may wait for its end
_AT_ONCE = 500
_UNKNOWN = "its owner does not know of it"


class Audit:
    """`known` gives the invocations that the worker knows of, or None while it cannot tell: a claim is under way."""

    def __init__(
        self, store: Store, recovery: Recovery, *, app: str, owner: str, known: Callable[[], Collection[str] | None]
    ) -> None:
        self._store = store
        self._recovery = recovery
        self._app = app
        self._owner = owner
        self._known = known
        self._suspects: set[tuple[str, int]] = set()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(AGAIN_SECONDS if self._suspects else AUDIT_SECONDS)
            try:
                with repeated():
                    await self._look()
            except StoreError as error:
                log.debug("no audit: %s", error)
            except Exception:
                log.exception("the audit of %s", self._owner)

    async def _look(self) -> None:
        where = Filter(runner=runner_of(self._owner), statuses=OWNED)
        found = await self._store.find(self._app, where, _AT_ONCE, set_aside=True)
        known = self._known()
        if known is None:
            return  # and those of the last look are still to be looked at
        strange = [record for record in found if record.owner == self._owner and record.id not in known]
        left = [record for record in strange if (record.id, record.epoch) in self._suspects]
        self._suspects = {(record.id, record.epoch) for record in strange}
        cancelled = [record for record in left if record.status is Status.CANCELLING]  # nobody gives way for those
        await self._recovery.end(cancelled, _UNKNOWN)
        await self._recovery.recover([record for record in left if record not in cancelled], _UNKNOWN)
