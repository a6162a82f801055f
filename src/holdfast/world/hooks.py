"""The tokens of hooks, claimed before the event is in the log.

A token is claimed by an entry of the kind that the app's own hooks have, so Python and TypeScript share one space of
tokens. A second entry, named by the hook's id, leads from that id to its run. An entry is believed only as far as the
log of its run agrees: if its hook was disposed of, or its run has ended, it is no obstacle and is removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from holdfast.crashpoints import crashpoint
from holdfast.errors import CorruptRecord, StoreError
from holdfast.ids import InvocationId
from holdfast.model.decoding import Moment
from holdfast.model.records import Entry, entry_reader
from holdfast.model.status import FINAL
from holdfast.runtime.engine import Engine
from holdfast.runtime.wait import get_readable
from holdfast.store.contract import EntryOrder
from holdfast.telemetry.events import DutyFailed
from holdfast.workflows.hooks_records import HOOK, WORLD, HookEntry, hook_entry, name_of, read_hook
from holdfast.workflows.hooks_store import StoredHook, find, taken
from holdfast.world.logs import RunLog, WarmLogs
from holdfast.world.records import TASK, run_name, task_of
from holdfast.world.rules import WorldHook

KIND = "world_hook"
_TRIES = 20
_AT_ONCE = 20  # logs that are read side by side
_AFTER_SLASH = "0"  # the character that follows a slash


class WorldHookEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The body of the entry that is named by a hook's id and its run: the name of its token's entry."""

    hook: str
    run: InvocationId
    call: str
    created_at: Moment


read_world_hook = entry_reader(WorldHookEntry, KIND)


class WorldHooks:
    def __init__(self, engine: Engine, logs: WarmLogs) -> None:
        self._engine = engine
        self._store = engine.store
        self._logs = logs
        self._before: str | None = None

    # --- claiming

    async def claim(self, log: RunLog, hook: str, token: str, at: float) -> str:
        """Claim a token for a hook. Return the run that has it; empty: it is claimed."""
        task = task_of(log.run.name)
        wanted = HookEntry(run=log.id, task=task, call=hook, created_at=at, token=token, receiver=WORLD)
        name = name_of(token)
        for _ in range(_TRIES):
            if not await self._store.put_entry(hook_entry(self._engine.app, name, wanted)):
                there = await find(self._engine, name)
                if there is None:
                    continue
                if (there.hook.run, there.hook.call) != (log.id, hook):
                    if owner := await self._owner(there):
                        return run_name(owner)
                    continue
            crashpoint("world.claimed")
            await self._store.put_entry(self._id_entry(wanted, name))
            return ""
        raise StoreError(f"the token of the hook {hook:.80} is claimed and freed again and again")

    async def owner(self, run: InvocationId, hook: str, token: str) -> str:
        """Return the other run with an open hook of this token; empty if the token is free."""
        there = await find(self._engine, name_of(token))
        if there is None or (there.hook.run, there.hook.call) == (run, hook):
            return ""
        owner = await self._owner(there)
        return run_name(owner) if owner else ""

    def _id_entry(self, wanted: HookEntry, name: str) -> Entry:
        body = WorldHookEntry(hook=name, run=wanted.run, call=wanted.call, created_at=wanted.created_at)
        return Entry(
            app=self._engine.app,
            kind=KIND,
            name=_id_name(wanted.call, wanted.run),
            body=msgspec.json.encode(body),
            subject=wanted.run,
        )

    async def _owner(self, there: StoredHook) -> str:
        """Return the run that has a token; empty: its entry was removed, or it is gone by now."""
        if not there.hook.task.startswith(TASK):
            return (await taken(self._engine, there)).owner
        log = await self._logs.fresh(there.hook.run)
        hook = log.run.hooks.get(there.hook.call)
        is_its_own = hook is None or (hook.token == there.hook.token and not hook.is_disposed)
        if log.run.exists and not log.run.is_ended and is_its_own:
            return there.hook.run
        await self._remove(there)
        return ""

    async def release_unless_open(self, log: RunLog, hook: str, token: str) -> None:
        """Give up a claim whose event was refused, unless another writer has created the same hook by it."""
        there = log.run.hooks.get(hook)
        if log.run.is_ended or there is None or there.is_disposed or there.token != token:
            await self.release(log, hook, token)

    async def release(self, log: RunLog, hook: str, token: str) -> None:
        """Give a token up that the hook has, if it does."""
        there = await find(self._engine, name_of(token))
        if there is not None and (there.hook.run, there.hook.call) == (log.id, hook):
            await self._remove(there)
        else:
            await self._remove_id(_id_name(hook, log.id))
        crashpoint("world.released")

    async def _remove(self, there: StoredHook) -> None:
        await self._remove_id(_id_name(there.hook.call, there.hook.run))
        await self._store.remove_entry(there.entry)

    async def _remove_id(self, name: str) -> None:
        for entry in await self._store.entries(self._engine.app, KIND, [name]):
            await self._store.remove_entry(entry)

    # --- looking

    async def by_token(self, token: str) -> tuple[RunLog, WorldHook] | None:
        """Return the open hook that has a token, and its run."""
        there = await find(self._engine, name_of(token))
        if there is None or not there.hook.task.startswith(TASK):
            return None
        return await self._open(there.hook.run, there.hook.call)

    async def by_id(self, id: str) -> tuple[RunLog, WorldHook] | None:
        """Return the open hook of that id. Ids are unique only within a run: of several, that of the latest run."""
        first, before = f"{id}/", id + _AFTER_SLASH
        while entries := await self._page(10, before):
            for entry in entries:
                if not entry.name.startswith(first):
                    return None
                if (found := await self._of_entry(entry)) is not None:
                    return found
            before = entries[-1].name
        return None

    async def page(self, limit: int, before: str | None) -> Sequence[tuple[str, RunLog, WorldHook]]:
        """Return open hooks, at least one if there are any behind `before`: larger id first, with a name for the next
        page.
        """
        found: list[tuple[str, RunLog, WorldHook]] = []
        while not found and (entries := await self._page(limit, before)):
            for start in range(0, len(entries), _AT_ONCE):
                some = entries[start : start + _AT_ONCE]
                there = await asyncio.gather(*[self._listed(entry) for entry in some])
                found += [(entry.name, *each) for entry, each in zip(some, there, strict=True) if each is not None]
            before = entries[-1].name
        return found

    async def _page(self, limit: int, before: str | None) -> Sequence[Entry]:
        return await self._store.entries(self._engine.app, KIND, order=EntryOrder.LATEST, limit=limit, before=before)

    async def _of_entry(self, entry: Entry) -> tuple[RunLog, WorldHook] | None:
        try:
            body = read_world_hook(entry)
        except CorruptRecord as error:
            await self._store.quarantine_entry(entry, error)
            return None
        return await self._open(body.run, body.call)

    async def _listed(self, entry: Entry) -> tuple[RunLog, WorldHook] | None:
        """Return the hook of an entry for a list, which goes on without the hooks of a damaged log."""
        try:
            return await self._of_entry(entry)
        except CorruptRecord as error:
            self._engine.telemetry.emit(DutyFailed("world", f"list the hook {entry.name}", error))
            return None

    async def _open(self, run: InvocationId, id: str) -> tuple[RunLog, WorldHook] | None:
        log = await self._logs.fresh(run)
        hook = log.run.hooks.get(id)
        return None if hook is None or hook.is_disposed or log.run.is_ended else (log, hook)

    # --- the end of runs

    async def end(self, run: InvocationId) -> None:
        """Remove the entries of an ended run."""
        for entry in await self._store.entries(self._engine.app, HOOK, subject=run):
            try:
                if read_hook(entry).task.startswith(TASK):
                    await self._store.remove_entry(entry)
            except CorruptRecord as error:
                await self._store.quarantine_entry(entry, error)
        for entry in await self._store.entries(self._engine.app, KIND, subject=run):
            await self._store.remove_entry(entry)

    async def sweep(self, limit: int) -> None:
        """Look at the next entries by id, and remove those whose run has ended or is gone. Entries by token are swept
        with the app's own hooks.
        """
        entries = await self._page(limit, self._before)
        self._before = entries[-1].name if len(entries) == limit else None
        ids = list(dict.fromkeys(InvocationId(entry.subject or "") for entry in entries))
        records = dict(zip(ids, await get_readable(self._store, self._engine.app, ids), strict=True)) if ids else {}
        for entry in entries:
            record = records.get(InvocationId(entry.subject or ""))
            if record is None or record.status in FINAL:
                await self._store.remove_entry(entry)


def _id_name(hook: str, run: str) -> str:
    return f"{hook}/{run}"
