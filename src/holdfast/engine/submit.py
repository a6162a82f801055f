"""Submit: one insert, then a hint.

Once `submit` returns, the work is durable. A crash before that leaves nothing or the whole record, and the caller
knows of neither; a crash between the insert and the hint costs a runner one polling interval.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.lifecycle.records import READY, Hint, InvocationRecord
from holdfast.store.contract import Store
from holdfast.wakeup.hub import Hub


class Submitter:
    def __init__(self, store: Store, hub: Hub) -> None:
        self._store = store
        self._hub = hub

    async def submit(self, records: Sequence[InvocationRecord]) -> Sequence[bool]:
        """Store new invocations; False for each id that was taken already."""
        if not records:
            return []
        stored = await self._store.insert(records)
        self._hub.send(Hint(READY, tuple({record.lane for record in records}), len(records)))
        return stored
