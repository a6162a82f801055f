"""The entries of hooks in the store: claimed by a run, removed by it, and removed after its end.

The first `put_entry` of a name is the claim. An entry of the same run is its own: a predecessor of the owner, or an
earlier generation of the run, has put it. An entry of a run that has ended, or is gone, is no obstacle.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from holdfast.crashpoints import crashpoint
from holdfast.errors import CodecError, CorruptRecord, StoreError
from holdfast.fleet.services import Duty
from holdfast.ids import InvocationId
from holdfast.model.records import Entry, InvocationRecord
from holdfast.model.status import FINAL
from holdfast.runtime.engine import Engine
from holdfast.runtime.wait import get_readable
from holdfast.store.contract import EntryOrder
from holdfast.workflows.events import HOOK_RECEIVED
from holdfast.workflows.hooks_records import (
    HOOK,
    RANDOM,
    WEBHOOK,
    HookEntry,
    WantedHook,
    hook_entry,
    read_hook,
    read_webhook,
    webhook_entry,
)
from holdfast.workflows.looking import read

_TRIES = 20
_SWEEP_SECONDS = 60.0
_AT_ONCE = 200


class Taken(NamedTuple):
    """The answer to a claim. `owner` is the run that has the token; empty: it is this one."""

    owner: str = ""
    is_kept: bool = False  # the owner has ended, and keeps it


class StoredHook(NamedTuple):
    """A hook, and its entry as it was read."""

    entry: Entry
    hook: HookEntry


# --- reading


async def find(engine: Engine, name: str) -> StoredHook | None:
    """Return the hook of that name. A corrupt entry is quarantined; a token that is no longer kept is free."""
    for entry in await engine.store.entries(engine.app, HOOK, [name]):
        try:
            return StoredHook(entry, read_hook(entry))
        except CorruptRecord as error:
            await engine.store.quarantine_entry(entry, error)
    return None


# --- the owner of a run


async def claim(engine: Engine, wanted: WantedHook, *, is_first_owner: bool = False) -> Taken:
    """Store a hook, unless another one has its token. Idempotent: what a predecessor has stored is replaced."""
    if wanted.entry.origin == RANDOM and not is_first_owner:
        await _remove_left(engine, wanted)
    for _ in range(_TRIES):
        stored = await engine.store.put_entry(hook_entry(engine.app, wanted.name, wanted.entry))
        if not stored and (there := await find(engine, wanted.name)) is not None:
            if there.hook.run != wanted.entry.run or there.hook.ended_at is not None:
                if (held := await taken(engine, there)).owner:
                    return held
                continue
            stored = await _replace(engine, there, wanted)
        if stored:
            crashpoint("hook.stored")
            await _put_webhook(engine, wanted)
            crashpoint("hook.addressed")
            return Taken()
    raise StoreError(f"the hook {wanted.entry.call} of {wanted.entry.run} is claimed and freed again and again")


async def _remove_left(engine: Engine, wanted: WantedHook) -> None:
    """Remove what a predecessor has stored for this call, under a random token that no log has: nothing knows it."""
    ours = wanted.entry
    for entry in await engine.store.entries(engine.app, HOOK, subject=ours.run):
        if entry.name == wanted.name:
            continue
        try:
            left = StoredHook(entry, read_hook(entry))
        except CorruptRecord as error:
            await engine.store.quarantine_entry(entry, error)
            continue
        if (left.hook.call, left.hook.generation, left.hook.origin) == (ours.call, ours.generation, RANDOM):
            await _remove(engine, left)


async def _replace(engine: Engine, there: StoredHook, wanted: WantedHook) -> bool:
    """Put the hook in the place of one of the same run, which is not open any more, or is this one."""
    before = there.hook
    entry = msgspec.structs.replace(wanted.entry, created_at=before.created_at)
    if entry == before:
        return True
    if before.webhook and before.webhook != entry.webhook:
        await _remove_webhook(engine, before)
    version = there.entry.version + 1
    return await engine.store.put_entry(hook_entry(engine.app, wanted.name, entry, version=version), there.entry)


async def taken(engine: Engine, there: StoredHook) -> Taken:
    """Return which run has a token; no owner: it was freed, or is free by now."""
    entry, hook = there
    if hook.ended_at is not None:
        if entry.keep_until is not None and entry.keep_until > engine.store.now():
            return Taken(hook.run, is_kept=True)
        await engine.store.remove_entry(entry)
        return Taken()
    (owner,) = await get_readable(engine.store, engine.app, [hook.run])
    if owner is not None and owner.status not in FINAL:
        return Taken(hook.run)
    await _end(engine, there, owner)
    return Taken()


async def _put_webhook(engine: Engine, wanted: WantedHook) -> None:
    if wanted.entry.webhook:
        # Its name follows from 256 bits that only this run has: an entry that is there is its own.
        await engine.store.put_entry(webhook_entry(engine.app, wanted.name, wanted.entry))


async def earlier_payloads(engine: Engine, record: InvocationRecord) -> frozenset[str]:
    """Return the payloads in the log of a run before its last restart; none if that is gone, or cannot be read."""
    assert record.run is not None
    try:
        log = await read(engine, record, record.run.generation - 1)
    except (CodecError, CorruptRecord):
        return frozenset()
    return frozenset(event.entry for _, event in log if event.type == HOOK_RECEIVED)


async def release(engine: Engine, wanted: WantedHook) -> None:
    """Remove a hook that its run has disposed of."""
    for _ in range(_TRIES):
        there = await find(engine, wanted.name)
        if there is None or (there.hook.run, there.hook.call) != (wanted.entry.run, wanted.entry.call):
            return
        if await _remove(engine, there):
            crashpoint("hook.released")
            return


async def _remove(engine: Engine, there: StoredHook) -> bool:
    await _remove_webhook(engine, there.hook)
    return await engine.store.remove_entry(there.entry)


async def _remove_webhook(engine: Engine, hook: HookEntry) -> None:
    if hook.webhook:
        for entry in await engine.store.entries(engine.app, WEBHOOK, [hook.webhook]):
            await engine.store.remove_entry(entry)


# --- after the end of a run


async def end_hooks(engine: Engine, runs: Sequence[InvocationRecord]) -> Collection[str]:
    """Remove the hooks of ended runs, or keep their tokens as long as they say. Return the runs to try again: none."""
    for run in runs:
        for entry in await engine.store.entries(engine.app, HOOK, subject=run.id):
            try:
                await _end(engine, StoredHook(entry, read_hook(entry)), run)
            except CorruptRecord as error:
                await engine.store.quarantine_entry(entry, error)
        for entry in await engine.store.entries(engine.app, WEBHOOK, subject=run.id):
            await engine.store.remove_entry(entry)
    crashpoint("hook.ended")
    return ()


async def _end(engine: Engine, there: StoredHook, run: InvocationRecord | None) -> None:
    entry, hook = there
    ended_at = engine.store.now() if run is None else run.changed_at
    until = ended_at + (hook.keep_seconds or 0.0)
    if until <= engine.store.now():
        await _remove(engine, there)
        return
    await _remove_webhook(engine, hook)
    kept = msgspec.structs.replace(hook, ended_at=ended_at, webhook="")
    await engine.store.put_entry(
        hook_entry(engine.app, entry.name, kept, version=entry.version + 1, keep_until=until), entry
    )


class HookSweep:
    """A feature of a runner: hooks whose run has ended, or is gone, and that no end has removed. A zombie may have
    stored one. It reads a page of hooks or of webhooks every minute, in turns, and goes round. See
    `holdfast.fleet.services.Feature`.
    """

    declares = ()

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before: dict[str, str | None] = {HOOK: None, WEBHOOK: None}
        self._turns = itertools.cycle(self._before)

    async def register(self) -> None:
        """Do nothing: no code declares anything here."""

    def duties(self) -> Sequence[Duty]:
        return (Duty(name="hooks", every_seconds=_SWEEP_SECONDS, perform=self.sweep),)

    async def sweep(self) -> None:
        """Look at the next page of hooks or of webhooks."""
        await self._sweep(next(self._turns))

    async def _sweep(self, kind: str) -> None:
        engine = self._engine
        entries = await engine.store.entries(
            engine.app, kind, order=EntryOrder.LATEST, limit=_AT_ONCE, before=self._before[kind]
        )
        self._before[kind] = entries[-1].name if len(entries) == _AT_ONCE else None
        owned = [entry for entry in entries if entry.subject is not None]
        ids = list(dict.fromkeys(InvocationId(entry.subject or "") for entry in owned))
        found = await get_readable(engine.store, engine.app, ids) if ids else []
        runs = dict(zip(ids, found, strict=True))
        for entry in owned:
            run = runs[InvocationId(entry.subject or "")]
            if run is not None and (run.status not in FINAL or run.outbox):
                continue
            try:
                if kind == WEBHOOK:
                    read_webhook(entry)
                    await engine.store.remove_entry(entry)
                else:
                    await _end(engine, StoredHook(entry, read_hook(entry)), run)
            except CorruptRecord as error:
                await engine.store.quarantine_entry(entry, error)
