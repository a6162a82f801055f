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
from holdfast.errors import StoreError
from holdfast.lifecycle.changes import Applied
from holdfast.lifecycle.identity import key_is_over
from holdfast.lifecycle.pacing import Debounce, amended
from holdfast.lifecycle.records import Hint, InvocationRecord, work_hint
from holdfast.store.contract import Store, Transaction
from holdfast.wakeup.hub import Hub

_LOOK_SECONDS = 0.02  # it is a look at a flag in memory
_LONGEST_TRANSACTION_SECONDS = 120.0
_TRIES = 20
_AT_ONCE = 3  # tries; then many want the same name, or an election is on, and a moment later all is clear
_PAUSE_SECONDS = 0.01


class Submitter:
    def __init__(self, store: Store, depot: Depot, hub: Hub) -> None:
        self._store = store
        self._depot = depot
        self._hub = hub
        self._waiting: set[asyncio.Task[None]] = set()

    async def submit(
        self,
        records: Sequence[InvocationRecord],
        payloads: Sequence[Payload] = (),
        debounce: Debounce | None = None,
    ) -> Sequence[InvocationRecord | None]:
        """Store new invocations, and the payloads that they refer to. Where an id, a key or a twin was taken: what has
        it. Those that debounce give a twin their arguments.
        """
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
        return [None] * len(records) if all(stored) else await self._yield(records, stored, debounce)

    async def _yield(
        self, records: Sequence[InvocationRecord], stored: Sequence[bool], debounce: Debounce | None
    ) -> Sequence[InvocationRecord | None]:
        """Who has what the others wanted. Whoever is gone by now, or has a key whose time is over, yields instead."""
        answers: list[InvocationRecord | None] = [None] * len(records)
        left = [number for number, ours in enumerate(stored) if not ours]
        for turn in range(_TRIES):
            await asyncio.sleep(max(0, turn - _AT_ONCE) * _PAUSE_SECONDS)
            wanted = [records[number] for number in left]
            free = []
            for number, holder in zip(left, await self._store.in_the_way(wanted), strict=True):
                answers[number] = holder
                if holder is None or await self._yields(holder, records[number], debounce):
                    free.append(number)
            if not free:
                return answers
            again = [records[number] for number in free]
            stored = await self._store.insert(again)
            self._hub.send(_hint(again))
            for number, ours in zip(free, stored, strict=True):
                answers[number] = None if ours else answers[number]
            left = [number for number, ours in zip(free, stored, strict=True) if not ours]
            if not left:
                return answers
        raise StoreError(f"{records[left[0]].id} could not be stored: its name is taken and freed again and again")

    async def _yields(self, holder: InvocationRecord, wanted: InvocationRecord, debounce: Debounce | None) -> bool:
        """Whether it is worth trying to store that one once more."""
        if debounce is not None and holder.id != wanted.id and holder.twin == wanted.twin:
            return not await self._amend(holder, wanted, debounce)
        by_key = holder.id != wanted.id and wanted.key is not None and holder.key == wanted.key
        if not by_key or not key_is_over(holder, self._store.now()):
            return False
        await self._store.free_key(holder.app, holder.id, str(holder.key))
        return True

    async def _amend(self, holder: InvocationRecord, wanted: InvocationRecord, debounce: Debounce) -> bool:
        """False: it was claimed meanwhile, or moved."""
        due_at = debounce.next_due(holder, wanted.created_at)
        (verdict,) = await self._store.apply([amended(holder, wanted, due_at=due_at)])
        self._hub.send(_hint([holder]))
        return isinstance(verdict, Applied)

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
        await until_over(transaction)
        self._hub.send(_hint(records))


async def until_over(transaction: Transaction) -> None:
    """Wait until a user's own transaction has ended, however that was; not for ever."""
    for _ in range(int(_LONGEST_TRANSACTION_SECONDS / _LOOK_SECONDS)):
        if transaction.is_over:
            return
        await asyncio.sleep(_LOOK_SECONDS)


def _hint(records: Sequence[InvocationRecord]) -> Hint:
    return work_hint([(record.lane, record.due_at, record.priority) for record in records])
