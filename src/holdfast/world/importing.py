"""Import of a database of `@workflow-worlds/mongodb` 0.2.x: every run with its events, hooks and streams.

All runs are read and translated before anything is written, and one that cannot be imported is named: then nothing is
imported. Each run is written pages first and its invocation last, so no list and no delivery meets a part of it. An
import that was interrupted goes on where it was. The database itself is not changed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from holdfast.errors import ImportRefused, MissingExtra, StoreUnavailable, UsageError
from holdfast.runtime.engine import Engine
from holdfast.streams import rules as portions
from holdfast.telemetry.events import RecordsWalked
from holdfast.world.errors import WorldError
from holdfast.world.records import invocation_of, size_of
from holdfast.world.requests import moment
from holdfast.world.storage import WorldStorage
from holdfast.world.translation import NotImportable, OriginalRun, Translated, translated

COLLECTIONS = frozenset({"runs", "steps", "events", "hooks"})
OPERATION = "import"
_MOST_NAMED = 20


class Imported(msgspec.Struct, kw_only=True):
    """The outcome of an import: runs that were written, those that were there, and repairs of their logs."""

    runs: int = 0
    there: int = 0
    open: int = 0
    events: int = 0
    chunks: int = 0
    dropped: int = 0
    added: int = 0


class OriginalDatabase:
    """A database of the original World, to read. Use it as an asynchronous context manager."""

    def __init__(self, url: str, name: str) -> None:
        try:
            from pymongo import AsyncMongoClient
            from pymongo.errors import ConfigurationError, InvalidName
        except ModuleNotFoundError as error:
            raise MissingExtra(
                "an import reads MongoDB, which needs the extra: pip install 'holdfast[mongo]'"
            ) from error
        try:
            self._client: Any = AsyncMongoClient(url, tz_aware=True, serverSelectionTimeoutMS=5000)
            self._database: Any = self._client[name]
        except (ConfigurationError, InvalidName, ValueError) as error:  # the driver's text may quote a password
            raise UsageError(
                "an import needs the address of a MongoDB, such as mongodb://127.0.0.1:27017, and the name of a "
                f"database: {type(error).__name__}"
            ) from error
        self.name = name

    async def __aenter__(self) -> OriginalDatabase:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()

    async def is_there(self) -> bool:
        """Return whether this is a database of the original World."""
        from pymongo.errors import PyMongoError

        try:
            return set(await self._database.list_collection_names()) >= COLLECTIONS
        except PyMongoError as error:
            raise StoreUnavailable(f"the database {self.name} cannot be read: {error}") from error

    async def deliveries(self, now: float) -> int:
        """Return how many messages are being delivered: then a program still runs on this database."""
        found = self._database["queue_messages"].find({"status": "processing"}, {"lockedUntil": 1})
        locked = [document.get("lockedUntil") async for document in found]
        return sum(until is not None and moment("lockedUntil", until) > now for until in locked)

    async def runs(self) -> AsyncIterator[OriginalRun]:
        async for run in self._database["runs"].find().sort("runId", 1):
            where = {"runId": run.get("runId")}
            yield OriginalRun(
                run=run,
                events=await self._all("events", where),
                steps=await self._all("steps", where),
                hooks=await self._all("hooks", where),
            )

    async def streams(self, run: str) -> list[str]:
        return sorted({str(found["streamName"]) for found in await self._all("stream_runs", {"runId": run})})

    async def chunks(self, stream: str) -> AsyncIterator[tuple[bytes, bool]]:
        """Yield the chunks of a stream, in order, and with each whether it is the end."""
        async for chunk in self._database["stream_chunks"].find({"streamName": stream}).sort("chunkId", 1):
            yield bytes(chunk.get("data") or b""), bool(chunk.get("eof"))

    async def _all(self, collection: str, where: dict[str, Any]) -> list[Any]:
        return [document async for document in self._database[collection].find(where)]


async def import_original(engine: Engine, url: str, database: str, *, check_only: bool = False) -> Imported:
    """Import all runs of a database of the original World; with `check_only`, only say what would be done.

    Raises `ImportRefused`, and then nothing was written, `UsageError`, `MissingExtra`, `StoreError`.
    """
    async with OriginalDatabase(url, database) as original:
        if not await original.is_there():
            raise UsageError(f"{database} is no database of @workflow-worlds/mongodb: it has no runs, steps and events")
        if busy := await original.deliveries(engine.store.now()):
            raise ImportRefused(
                f"{busy} messages of {database} are being delivered: stop the program that uses it first"
            )
        done = await _checked(engine, original)
        if check_only:
            return done
        done = Imported()
        async for found in original.runs():
            log = translated(found, engine.codec, engine.limits)
            await _import_run(engine, original, log, done)
            engine.telemetry.emit(RecordsWalked(1))
        return done


async def _checked(engine: Engine, original: OriginalDatabase) -> Imported:
    """Translate every run, and forget it again. Raises `ImportRefused` for those that cannot be imported."""
    wrong: dict[str, str] = {}
    done = Imported()
    async for found in original.runs():
        try:
            log = translated(found, engine.codec, engine.limits)
            for hook in log.run.open_hooks:
                if owner := await engine.part(WorldStorage).token_owner(log.run.id, hook.id, hook.token):
                    raise NotImportable(f"the run {log.run.id}: the token of its hook {hook.id} belongs to {owner}")
            _count(done, log)
            engine.telemetry.emit(RecordsWalked(1))
        except NotImportable as error:
            wrong[str(found.run.get("runId"))] = str(error)
    if wrong:
        shown = "; ".join(list(wrong.values())[:_MOST_NAMED])
        more = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise ImportRefused(f"{len(wrong)} runs of {original.name} cannot be imported: {shown}{more}", tuple(wrong))
    return done


def _count(done: Imported, log: Translated) -> None:
    done.runs += 1
    done.open += not log.run.is_ended
    done.events += len(log.events)
    done.dropped += log.dropped
    done.added += log.added


async def _import_run(engine: Engine, original: OriginalDatabase, log: Translated, done: Imported) -> None:
    storage, id = engine.part(WorldStorage), invocation_of(log.run.id)
    assert id is not None
    if (await engine.store.get(engine.app, [id]))[0] is not None:
        done.there += 1
        return
    await engine.payloads.keep(log.payloads)
    for name in await original.streams(log.run.id):
        done.chunks += await _import_stream(storage, original, log, name)
    parts = []
    rest = log.events
    while rest:
        count = portions.portion([size_of(event) for event in rest])
        parts.append(rest[:count])
        rest = rest[count:]
    try:
        await storage.import_run(id, parts, OPERATION)
    except WorldError as error:
        raise ImportRefused(f"the run {log.run.id}: {error.message}", (log.run.id,)) from error
    _count(done, log)


async def _import_stream(storage: WorldStorage, original: OriginalDatabase, log: Translated, name: str) -> int:
    """Write the chunks of a stream. Return how many."""
    number, batch, size, ended = 0, list[bytes](), 0, False
    count = 0
    async for chunk, is_end in original.chunks(name):
        ended = ended or is_end
        if chunk and not is_end:
            batch.append(chunk)
            size += len(chunk)
            count += 1
        if batch and (size > 2**20 or len(batch) == 1000):
            await storage.streams_write(
                run_id=log.run.id, name=name, chunks=batch, operation_id=f"{OPERATION}:{number}"
            )
            number, batch, size = number + 1, [], 0
        if ended:
            break
    if batch:
        await storage.streams_write(run_id=log.run.id, name=name, chunks=batch, operation_id=f"{OPERATION}:{number}")
    if ended:
        await storage.streams_close(run_id=log.run.id, name=name, operation_id=f"{OPERATION}:end")
    return count
