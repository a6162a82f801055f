"""Submit: large values to the depot, one insert, then a hint.

Once `submit` returns, the work is durable. A crash before that leaves nothing or the whole record, and the caller
knows of neither; a crash between the insert and the hint costs a runner one polling interval.

Inside a user's own transaction the insert is the user's, and no hint is written before that is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast.codec import Payload
from holdfast.crashpoints import crashpoint
from holdfast.engine.depot import UNWANTED_SECONDS, Depot
from holdfast.engine.ending import end_all
from holdfast.lifecycle.records import READY, Hint, InvocationRecord
from holdfast.store.contract import Store, Transaction
from holdfast.wakeup.hub import Hub

_LOOK_SECONDS = 0.02  # it is a look at a flag in memory
_LONGEST_TRANSACTION_SECONDS = 120.0


class Submitter:
    def __init__(self, store: Store, depot: Depot, hub: Hub) -> None:
        self._store = store
        self._depot = depot
        self._hub = hub
        self._waiting: set[asyncio.Task[None]] = set()

    async def submit(
        self, records: Sequence[InvocationRecord], payloads: Sequence[Payload] = ()
    ) -> Sequence[InvocationRecord | None]:
        """Store new invocations, and the payloads that they refer to. Where an id was taken: what has it."""
        if not records:
            return []
        crashpoint("submit.before")
        kept_at = self._store.now()
        await self._depot.keep(payloads)
        crashpoint("submit.kept")
        stored = await self._store.insert(records)
        if payloads and self._store.now() - kept_at > UNWANTED_SECONDS / 2:  # the host slept, say
            await self._depot.keep(payloads)
        crashpoint("submit.after")
        self._hub.send(_hint(records))
        if all(stored):
            return [None] * len(records)
        there = await self._store.get(records[0].app, [record.id for record in records])
        return [None if ours else before for ours, before in zip(stored, there, strict=True)]

    async def keep(self, payloads: Sequence[Payload]) -> None:
        """Store payloads ahead of records that are inserted in a user's own transaction."""
        await self._depot.keep(payloads)

    async def announce(self, transaction: Transaction, records: Sequence[InvocationRecord]) -> None:
        """Send the hint for records in a user's own transaction once that is over, however it ended."""
        self._waiting.add(task := asyncio.create_task(self._hint_after(transaction, records)))
        task.add_done_callback(self._waiting.discard)

    async def close(self) -> None:
        """Those whose transactions are not over are not waited for."""
        await end_all(*self._waiting)

    async def _hint_after(self, transaction: Transaction, records: Sequence[InvocationRecord]) -> None:
        for _ in range(int(_LONGEST_TRANSACTION_SECONDS / _LOOK_SECONDS)):
            if transaction.is_over:
                break
            await asyncio.sleep(_LOOK_SECONDS)
        self._hub.send(_hint(records))


def _hint(records: Sequence[InvocationRecord]) -> Hint:
    return Hint(READY, tuple({record.lane for record in records}), len(records))
