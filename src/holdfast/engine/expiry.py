"""Ends what was not started by the time that it was submitted with.

A worker looks at that before it starts one. But nobody may serve it, or it waits for a slot: a sweep finds those. It
knows when the next one is over, and otherwise looks every few seconds, since others submit as well.
"""

from __future__ import annotations

import logging

from holdfast.codec import Codec, ErrorRecord
from holdfast.engine.ends import Ends
from holdfast.errors import Expired
from holdfast.ids import Ids
from holdfast.lifecycle.cancelling import expired, is_too_late, why_expired
from holdfast.lifecycle.changes import Applied
from holdfast.lifecycle.names import counted
from holdfast.lifecycle.records import FINAL, Hint, InvocationRecord
from holdfast.store.contract import Store
from holdfast.wakeup.hub import Hub

log = logging.getLogger("holdfast.engine")

IDLE_SECONDS = 5.0
_AT_ONCE = 500
_codec = Codec()


def expiry(record: InvocationRecord, at: float) -> ErrorRecord:
    return _codec.encode_error(Expired(f"{record.task} {record.id} {why_expired(record, at)}", invocation_id=record.id))


class Expiry:
    def __init__(self, store: Store, ends: Ends, hub: Hub, ids: Ids, *, app: str) -> None:
        self._store = store
        self._ends = ends
        self._hub = hub
        self._ids = ids
        self._app = app
        self._next = 0.0

    async def sweep(self) -> bool:
        """True: there may be more."""
        now = self._store.now()
        if now < self._next:
            return False
        found = await self._store.start_limits(self._app, _AT_ONCE)
        late = [record for record in found if is_too_late(record, now)]
        changes = [
            (record, change)
            for record in late
            if record.owner is None  # an owner sees to it itself
            and (change := expired(record, error=expiry(record, now), operation=self._ids.operation(), at=now))
        ]
        verdicts = await self._ends.apply(changes) if changes else []
        ended = [
            record.id for (record, _), verdict in zip(changes, verdicts, strict=True) if isinstance(verdict, Applied)
        ]
        if ended:
            log.warning(
                "not started in time, so failed: %s: %s", counted(len(ended), "invocation"), ", ".join(ended[:5])
            )
            self._hub.send(Hint(FINAL, tuple(ended), len(ended)))
        coming = [record.start_by for record in found if record.start_by is not None and record.start_by > now]
        self._next = min(coming[0] if coming else now + IDLE_SECONDS, now + IDLE_SECONDS)
        return len(late) == _AT_ONCE
