"""Executions of services in MongoDB. A unique index is the gate."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from pymongo import DESCENDING
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import DuplicateKeyError

from holdfast.lifecycle.decoding import EXECUTION, corrupt
from holdfast.lifecycle.slots import Execution, ExecutionStatus
from holdfast.store.mongo.documents import Document, check_key, key_of, name_of

Executions = AsyncCollection[Document]


async def put(executions: Executions, app: str, execution: Execution) -> Document | None:
    """The one that is in the way. Index: executing."""
    document: Document = {"_id": key_of(app, execution.id), "app": app, **msgspec.to_builtins(execution)}
    while True:
        try:
            await executions.insert_one(document)
            return None
        except DuplicateKeyError:
            if await executions.find_one({"_id": document["_id"]}, {"_id": True}) is not None:
                return None
        wanted = {"app": app, "service": execution.service, "status": ExecutionStatus.RUNNING.value}
        if (other := await executions.find_one(wanted, hint="executing")) is not None:
            return other
        # It has ended in the meantime.


async def end(executions: Executions, app: str, id: str, status: ExecutionStatus, at: float, reason: str) -> bool:
    key = key_of(app, id)
    wanted: Document = {"_id": key, "status": ExecutionStatus.RUNNING.value}
    facts: Document = {"status": status.value, "ended_at": at, "reason": reason}
    result = await executions.update_one(wanted, {"$set": facts})
    return result.matched_count > 0 or await executions.find_one({"_id": key, **facts}, {"_id": True}) is not None


async def listing(executions: Executions, app: str, service: str, limit: int) -> list[Document]:
    """Index: executed."""
    if limit <= 0:
        return []
    order = [("started_at", DESCENDING), ("id", DESCENDING)]
    cursor = executions.find({"app": app, "service": service}, hint="executed").sort(order).limit(limit)
    return await cursor.to_list()


async def forget(executions: Executions, app: str, ids: Sequence[str]) -> None:
    keys = [key_of(app, id) for id in ids]
    final = [status.value for status in ExecutionStatus if status is not ExecutionStatus.RUNNING]
    await executions.delete_many({"_id": {"$in": keys}, "status": {"$in": final}})


def execution_of(document: Document) -> Execution:
    """Return the execution of a document. Raises `CorruptRecord`."""
    try:
        found = msgspec.convert({name: document[name] for name in Execution.__struct_fields__}, Execution)
        check_key(document, key_of(document["app"], found.id))
        return found
    except Exception as error:
        raise corrupt(EXECUTION, name_of(document), error) from error
