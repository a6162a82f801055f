"""Parked work gets another try when the code has changed since it was parked."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from msgspec.structs import replace

from holdfast.engine.definition import TaskDefinition
from holdfast.engine.settle import fields
from holdfast.ids import Ids
from holdfast.lifecycle import changes
from holdfast.lifecycle.changes import Applied
from holdfast.lifecycle.status import Status
from holdfast.store.contract import Filter, Store

log = logging.getLogger("holdfast.worker")

_AT_ONCE = 500


async def wake_parked(store: Store, ids: Ids, app: str, owner: str, tasks: Mapping[str, TaskDefinition]) -> None:
    where = Filter(statuses=frozenset({Status.PARKED}), tasks=frozenset(tasks))
    while True:
        parked = await store.find(app, where, _AT_ONCE, set_aside=True)
        changed = [record for record in parked if record.fingerprint != tasks[record.task].fingerprint]
        at, why = store.now(), f"{owner} has other code"
        woken = [changes.woken(record, operation=ids.operation(), at=at, why=why) for record in changed]
        verdicts = await store.apply(woken)
        for record, verdict in zip(changed, verdicts, strict=True):
            if isinstance(verdict, Applied):
                log.info("%s is woken: the code has changed since it was parked", record.task, extra=fields(record))
        if len(parked) < _AT_ONCE:
            return
        where = replace(where, before_id=parked[-1].id)
