"""Submit: large values to the payload store, one insert, then a hint.

Once `submit` returns, the work is durable. A crash before that leaves nothing or the whole record, and the caller
knows of neither; a crash between the insert and the hint costs a runner one polling interval.

Inside a user's own transaction the insert is the user's, and no hint is written before that is over.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from holdfast.clock import reached
from holdfast.codec import Payload
from holdfast.crashpoints import crashpoint
from holdfast.errors import StoreError, StoreFull, StoreReadOnly, StoreUnavailable
from holdfast.model.changes import Applied, key_freed
from holdfast.model.identity import key_is_over
from holdfast.model.pacing import Debounce, amended
from holdfast.model.records import Hint, InvocationRecord, lane_of, work_hint
from holdfast.runtime.outage import cancel_tasks
from holdfast.runtime.payloads import UNWANTED_SECONDS
from holdfast.store.contract import BlockingInsert, Transaction

if TYPE_CHECKING:
    from holdfast.runtime.engine import Engine
from holdfast.telemetry.events import Submitted

_LOOK_SECONDS = 0.02  # it is a look at a flag in memory
_LONGEST_TRANSACTION_SECONDS = 120.0
_TRIES = 20
_AT_ONCE = 3  # tries; then many want the same name, or an election is on, and a moment later all is clear
_PAUSE_SECONDS = 0.01


class Submitter:
    def __init__(self, engine: Engine) -> None:
        self._store = engine.store
        self._payloads = engine.payloads
        self._hub = engine.hub
        self._is_core = engine.is_core
        self.telemetry = engine.telemetry
        self._waiting: set[asyncio.Task[None]] = set()
        self._blocking = engine.store if isinstance(engine.store, BlockingInsert) else None

    def submit_here(self, records: Sequence[InvocationRecord], call_soon: Callable[[Callable[[], None]], None]) -> bool:
        """Store new invocations on the caller's own thread: a detour over the engine's loop takes two more hand-overs.

        `call_soon` has the engine's loop call a function. Return True if all are stored; else the caller has to call
        `submit`, which recognises records that are stored already.
        """
        if self._blocking is None:
            return False

        def committed() -> None:
            crashpoint("submit.after")
            hint = _hint(records)
            self._hub.send_abroad(hint)  # here: a process may end right after its submit, and its loop with it
            with contextlib.suppress(RuntimeError):  # that loop is closed
                call_soon(lambda: self._hub.send(hint, abroad=False))

        crashpoint("submit.before")
        crashpoint("submit.kept")
        try:
            stored = self._blocking.insert_blocking(records, committed)
        except (StoreUnavailable, StoreFull, StoreReadOnly):
            raise
        except Exception:  # a damaged row is in the way
            return False
        if not all(stored):
            return False
        if self.telemetry.wants(Submitted):
            self.telemetry.emit(Submitted(tuple(records)))
        return True

    async def submit(
        self,
        records: Sequence[InvocationRecord],
        payloads: Sequence[Payload] = (),
        debounce: Debounce | None = None,
    ) -> Sequence[InvocationRecord | None]:
        """Store new invocations and their payloads. Return the holder of each id, key or dedup key that was taken.

        With `debounce`, the holder gets the arguments of the new call.
        """
        if not records:
            return []
        crashpoint("submit.before")
        kept_at = self._store.now()
        if payloads:
            await self._payloads.keep(payloads)
        crashpoint("submit.kept")
        stored = await self._store.insert(records)
        if payloads and self._store.now() - kept_at > UNWANTED_SECONDS / 2:  # the host slept, say
            await self._payloads.keep(payloads)
        crashpoint("submit.after")
        self._hub.send(_hint(records), abroad=not self._is_core)  # a runner performs its own core tasks
        self._emit_submitted(records, stored)
        return [None] * len(records) if all(stored) else await self._yield(records, stored, debounce)

    async def _yield(
        self, records: Sequence[InvocationRecord], stored: Sequence[bool], debounce: Debounce | None
    ) -> Sequence[InvocationRecord | None]:
        """Return the records that conflict with ours. A holder that is gone by now, or has a key whose time is over,
        yields.
        """
        answers: list[InvocationRecord | None] = [None] * len(records)
        left = [number for number, ours in enumerate(stored) if not ours]
        for turn in range(_TRIES):
            await asyncio.sleep(max(0, turn - _AT_ONCE) * _PAUSE_SECONDS)
            wanted = [records[number] for number in left]
            free = []
            for number, holder in zip(left, await self._store.find_conflicts(wanted), strict=True):
                answers[number] = holder
                if holder is None or await self._yields(holder, records[number], debounce):
                    free.append(number)
            if not free:
                return answers
            again = [records[number] for number in free]
            stored = await self._store.insert(again)
            self._hub.send(_hint(again))
            self._emit_submitted(again, stored)
            for number, ours in zip(free, stored, strict=True):
                answers[number] = None if ours else answers[number]
            left = [number for number, ours in zip(free, stored, strict=True) if not ours]
            if not left:
                return answers
        raise StoreError(f"{records[left[0]].id} could not be stored: its name is taken and freed again and again")

    def _emit_submitted(self, records: Sequence[InvocationRecord], stored: Sequence[bool]) -> None:
        if self.telemetry.wants(Submitted):
            self.telemetry.emit(Submitted(tuple(record for record, new in zip(records, stored, strict=True) if new)))

    async def _yields(self, holder: InvocationRecord, wanted: InvocationRecord, debounce: Debounce | None) -> bool:
        """Return whether it is worth trying to store the wanted record once more."""
        if debounce is not None and holder.id != wanted.id and holder.dedup_key == wanted.dedup_key:
            return not await self._amend(holder, wanted, debounce)
        by_key = holder.id != wanted.id and wanted.key is not None and holder.key == wanted.key
        if not by_key or not key_is_over(holder, self._store.now()):
            return False
        await self._store.apply([key_freed(holder)])
        return True

    async def _amend(self, holder: InvocationRecord, wanted: InvocationRecord, debounce: Debounce) -> bool:
        """Give the holder the wanted arguments. Return False if it was claimed meanwhile, or moved."""
        due_at = debounce.next_due(holder, wanted.created_at)
        (verdict,) = await self._store.apply([amended(holder, wanted, due_at=due_at)])
        self._hub.send(_hint([holder]))
        return isinstance(verdict, Applied)

    def due_after(self, delay_seconds: float, now: float | None = None) -> float:
        """Return when a call is due that is to wait so long from now: not before, however far the store's clock is off.
        A call without a delay is due by every clock.
        """
        now, error = self._store.now() if now is None else now, self._store.clock_error()
        return reached("delay", now + error, delay_seconds) if delay_seconds else now - error

    async def announce(self, transaction: Transaction, records: Sequence[InvocationRecord]) -> None:
        """Send the hint for records in a user's own transaction once that is over, however it ended."""
        self._waiting.add(task := asyncio.create_task(self._hint_after(transaction, records)))
        task.add_done_callback(self._waiting.discard)

    async def close(self) -> None:
        """Stop waiting for transactions that are not over."""
        await cancel_tasks(*self._waiting)

    async def _hint_after(self, transaction: Transaction, records: Sequence[InvocationRecord]) -> None:
        await until_over(transaction)
        self._hub.send(_hint(records))
        if self.telemetry.wants(Submitted):  # only what was committed is there
            with contextlib.suppress(StoreError):
                there = await self._store.get(records[0].app, [record.id for record in records])
                self._emit_submitted(records, [found is not None for found in there])


async def until_over(transaction: Transaction) -> None:
    """Wait until a user's own transaction has ended, however that was; not for ever."""
    for _ in range(int(_LONGEST_TRANSACTION_SECONDS / _LOOK_SECONDS)):
        if transaction.is_over:
            return
        await asyncio.sleep(_LOOK_SECONDS)


def _hint(records: Sequence[InvocationRecord]) -> Hint:
    since = min([record.due_at for record in records])
    ways = {(record.queue, record.task, record.tags, record.priority): None for record in records}  # few, of many
    places = [(lane_of(queue, task, tags), since, priority) for queue, task, tags, priority in ways]
    return replace(work_hint(places), count=len(records))
