"""Ends: whoever writes the end of an invocation writes with it which triggers are to be told, and then tells them.

That the triggers are named in the same write is what loses none: a crash right after it leaves an ended invocation with
an outbox, which the services find. Telling comes after, beside the writer's other work, and emptying the outbox after
that. It costs nothing where nobody listens: two lookups in memory, and one small read in two seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from msgspec.structs import replace

from holdfast.crashpoints import crashpoint
from holdfast.engine.ending import end_all
from holdfast.engine.reading import get_readable
from holdfast.engine.subscriptions import Subscriptions
from holdfast.engine.telling import Teller
from holdfast.errors import StoreError
from holdfast.ids import InvocationId
from holdfast.lifecycle.changes import Applied, Change, Verdict
from holdfast.lifecycle.records import InvocationRecord
from holdfast.lifecycle.status import FINAL
from holdfast.store.contract import Store

log = logging.getLogger("holdfast.triggers")

_LAST_SECONDS = 2.0


class Ends:
    def __init__(self, store: Store, subscriptions: Subscriptions, teller: Teller, *, app: str) -> None:
        self._store = store
        self._subscriptions = subscriptions
        self._teller = teller
        self._app = app
        self._telling: set[asyncio.Task[None]] = set()

    async def apply(self, wanted: Sequence[tuple[InvocationRecord, Change]]) -> Sequence[Verdict]:
        """Apply these changes, each to its record; the verdicts of `Store.apply`."""
        changes = [change for _, change in wanted]
        if any(change.path[-1] in FINAL and change.app == self._app for change in changes):
            if self._subscriptions.are_fresh:
                self._subscriptions.renew()
            else:
                await self._subscriptions.freshen()
            if self._subscriptions:
                changes = [self._addressed(record, change) for record, change in wanted]
        verdicts = await self._store.apply(changes)
        told = [
            change.id for change, verdict in zip(changes, verdicts, strict=True) if change.outbox and _is_in(verdict)
        ]
        if told:
            crashpoint("outbox.written")
            self._telling.add(task := asyncio.get_running_loop().create_task(self._tell(told)))
            task.add_done_callback(self._telling.discard)
        return verdicts

    def _addressed(self, record: InvocationRecord, change: Change) -> Change:
        names = self._subscriptions.of_end(record.task, change.path[-1]) if change.app == self._app else ()
        return replace(change, outbox=names) if names else change

    async def _tell(self, ids: Sequence[InvocationId]) -> None:
        try:
            found = await get_readable(self._store, self._app, ids)
            await self.tell([record for record in found if record is not None])
        except StoreError as error:
            log.debug("triggers are told later of the ends of %d invocations: %s", len(ids), error)
        except Exception:
            log.exception("telling triggers of the ends of %s", ", ".join(ids[:5]))

    async def tell(self, records: Sequence[InvocationRecord]) -> None:
        """Tell the triggers in these records' outboxes, and empty them."""
        waiting = [record for record in records if record.outbox]
        if waiting:
            await self._teller.tell([(await self._teller.facts_of(record), record.outbox) for record in waiting])
            await self._store.delivered(self._app, [record.id for record in waiting])
            crashpoint("outbox.delivered")

    async def get_ready(self, app: str) -> None:
        """So that the first end need not wait for what triggers there are."""
        if app == self._app:
            with contextlib.suppress(StoreError):
                await self._subscriptions.freshen()

    async def finish(self) -> None:
        """Give those that are being told a moment; the services see to the others."""
        if self._telling:
            await asyncio.wait(set(self._telling), timeout=_LAST_SECONDS)
        await end_all(*self._telling)


def _is_in(verdict: Verdict) -> bool:
    return isinstance(verdict, Applied)
