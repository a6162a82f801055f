"""Wait: read invocations, and wait for their ends without asking all the time.

Subscribe first, then read, then sleep: whatever ends after the read finds the subscription. A hint can be lost, so a
caller that waits also reads once per polling interval. One of the invocations may be damaged, or quarantined for that:
`get_readable` leaves it out, `get_all` raises what happened and what to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from holdfast.ids import InvocationId
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL
from holdfast.runtime.hints import Pace, wait_for

if TYPE_CHECKING:
    from holdfast.runtime.engine import Engine

from msgspec.structs import replace

from holdfast.errors import CorruptRecord, HoldfastError, InvocationNotFound, StoreReadOnly
from holdfast.model.decoding import INVOCATION
from holdfast.model.explain import moment_in_words
from holdfast.model.records import Quarantined
from holdfast.store.contract import Filter, Store

_PAGE = 500
_ADVICE = "See docs/operations/damaged-records.md for how to look at it, repair it or remove it"
FIRST_READ_SECONDS = 0.02


async def pages(
    store: Store, app: str, where: Filter, *, set_aside: bool = True
) -> AsyncIterator[Sequence[InvocationRecord]]:
    """Yield all invocations that the filter allows, newest first; a last page may be empty. Unreadable records are
    quarantined with `set_aside`.
    """
    while True:
        page = await store.find(app, where, _PAGE, set_aside=set_aside)
        yield page
        if len(page) < _PAGE:
            return
        where = replace(where, before_id=page[-1].id)


async def get_readable(store: Store, app: str, ids: Sequence[InvocationId]) -> Sequence[InvocationRecord | None]:
    """Return the invocations of these ids; None where there is none, or a record that cannot be read.

    A store's `get` refuses them all if one cannot be read. Then they are asked for one by one.
    """
    try:
        return await store.get(app, ids)
    except CorruptRecord:
        if len(ids) == 1:
            return [None]
    return [record for id in ids for record in await get_readable(store, app, [id])]


async def get_all(store: Store, app: str, ids: Sequence[InvocationId]) -> list[InvocationRecord]:
    """Return the invocations of these ids.

    Raises `CorruptRecord` if one of them is damaged, or was set aside for that, and `InvocationNotFound`.
    """
    try:
        found = await store.get(app, ids)
    except CorruptRecord as error:
        raise _damaged(error) from error
    records = [record for record in found if record is not None]
    if len(records) < len(ids):
        raise await missing(store, app, ids[list(found).index(None)])
    return records


async def missing(store: Store, app: str, id: InvocationId) -> HoldfastError:
    """Return the error for an invocation that the store does not give: damaged, set aside, or not there."""
    try:
        await store.get(app, [id])
    except CorruptRecord as error:
        return _damaged(error)
    if aside := await _aside(store, app, INVOCATION, id):
        return _set_aside(aside)
    return InvocationNotFound(f"the store has no invocation {id} of the app '{app}'")


async def entry_set_aside(store: Store, app: str, kind: str, name: str) -> str:
    """Return what to add where an entry is not there: that one of its name was set aside; else ""."""
    aside = await _aside(store, app, kind, name)
    if aside is None:
        return ""
    return (
        f". A record of that name was set aside at {moment_in_words(aside.at)}, since it is damaged: {aside.why}. "
        f"{_ADVICE}"
    )


async def _aside(store: Store, app: str, kind: str, id: str) -> Quarantined | None:
    """Return the latest record of this kind and id that was set aside."""
    try:
        found = [each for each in await store.quarantined(app, id) if each.kind == kind]
    except StoreReadOnly:  # this user may not look there
        return None
    return found[-1] if found else None


def _damaged(error: CorruptRecord) -> CorruptRecord:
    text = f"{error}. It is not run, and a runner that meets it sets it aside. {_ADVICE}"
    return CorruptRecord(text, kind=error.kind, id=error.id, field=error.field, reason=error.reason)


def _set_aside(aside: Quarantined) -> CorruptRecord:
    text = (
        f"{aside.id} was set aside at {moment_in_words(aside.at)}, since it is damaged: {aside.why}. It is kept whole, "
        f"is not run and has no result. {_ADVICE}; or submit the call again"
    )
    return CorruptRecord(text, kind=INVOCATION, id=aside.id, reason=aside.why)


class Watcher:
    def __init__(self, engine: Engine) -> None:
        self._store = engine.store
        self._hub = engine.hub
        self._app = engine.app
        self._poll_interval = engine.settings.poll_interval_seconds

    async def ends(
        self, ids: Sequence[InvocationId], timeout: float | None, *, fresh: bool = False, expected: bool = False
    ) -> dict[str, InvocationRecord]:
        """Return the final records of `ids`. Invocations that are `expected` may be stored later.

        Invocations that have not ended after `timeout` seconds are missing from the answer. Raises
        `InvocationNotFound`, and `CorruptRecord` for a damaged record.
        """
        # `fresh`: they were submitted a moment ago, so the first read would most likely come too early.
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        ended: dict[str, InvocationRecord] = {}
        open_ids = set(ids)
        known = {id for id in open_ids if self._hub.has_ended(id)}
        notified = EndNotifications(known if fresh else open_ids)
        pace = Pace(self._poll_interval)
        pace.quicken()
        subscriptions = [self._hub.on_final(id, notified.about(id)) for id in open_ids]
        try:
            if fresh and not await notified.wait(FIRST_READ_SECONDS):
                notified.add(open_ids)
            look_at = loop.time() + pace.pause(trust=self._hub.trust)  # at all: a notification does not delay it
            while open_ids:
                asked = tuple(notified.take() & open_ids)
                are_all = len(asked) == len(open_ids)
                read = self._store.get(self._app, asked) if expected else get_all(self._store, self._app, asked)
                for id, record in zip(asked, await read, strict=True):
                    if record is not None and record.status in FINAL:
                        ended[id] = record
                        open_ids.discard(id)
                now = loop.time()
                if open_ids and deadline is not None and now >= deadline:
                    break
                if are_all:
                    look_at = now + pace.pause(trust=self._hub.trust)
                patience = (look_at if deadline is None else min(look_at, deadline)) - now
                if open_ids and (patience <= 0 or not await notified.wait(patience)):
                    notified.add(open_ids)
        finally:
            for unsubscribe in subscriptions:
                unsubscribe()
        return ended


class EndNotifications:
    """Collect the invocations whose end was notified since they were last taken. At first: those that are given."""

    def __init__(self, subjects: set[InvocationId]) -> None:
        self._ids = set(subjects)
        self._event = asyncio.Event()

    def about(self, subject: InvocationId) -> _Subscription:
        return _Subscription(self, subject)

    def add(self, subjects: set[InvocationId]) -> None:
        self._ids |= subjects
        self._event.set()

    def take(self) -> set[InvocationId]:
        taken, self._ids = self._ids, set()
        self._event.clear()
        return taken

    async def wait(self, seconds: float) -> bool:
        """Wait for a notification, for so long. Return False if there was none."""
        return bool(self._ids) or await wait_for(self._event, seconds)


class _Subscription:
    """A subscription to one subject: a callable that is equal only to itself."""

    def __init__(self, notified: EndNotifications, subject: InvocationId) -> None:
        self._notified = notified
        self._subject = {subject}

    def __call__(self) -> None:
        self._notified.add(self._subject)
