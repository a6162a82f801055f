"""Questions about queues, limits and rates: how deep, paused or changed by whom, which calls hold and which wait."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from holdfast.model.limits import task_of
from holdfast.model.names import unversioned
from holdfast.model.queues import QueuePause
from holdfast.model.rates import LimitChange, is_rate_key, shown_key
from holdfast.model.records import InvocationRecord
from holdfast.model.status import Status
from holdfast.rates.api import Allowance, LimitAccess, LimitInForce, ranges_of
from holdfast.rates.labels import label_of
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.queues import Queue, Queues
from holdfast.showing import fields, moment
from holdfast.store.contract import Filter, Order
from holdfast.web.documents import Document, invocation_document
from holdfast.web.reading.health import MOST_BLOCKED

MOST_COUNTED = 1000  # calls of a queue
MOST_KEYS = 100  # of a limit
_KEYS = 50  # of a limit
_HOLDERS = 20  # of a key
_WAITERS = 20  # of a limit


class QueueList(NamedTuple):
    """The queues of an app, by name."""

    queues: Sequence[Queue]

    def document(self) -> Document:
        return {"queues": [fields(each) | {"pause": pause_document(each.pause)} for each in self.queues]}


class LimitList(NamedTuple):
    """The limits and rates of an app, by name."""

    limits: Sequence[LimitInForce]

    def document(self) -> Document:
        return {"limits": [fields(each) | {"change": change_document(each.change)} for each in self.limits]}


class LimitKey(NamedTuple):
    """A key of a limit for which calls wait: how many slots are held, and the calls that hold them."""

    key: str
    held: int
    holders: Sequence[InvocationRecord]
    label: str = ""  # what the calls have in common

    def document(self) -> Document:
        holders = [invocation_document(each) for each in self.holders]
        return {"key": shown_key(self.key), "label": self.label, "held": self.held, "holders": holders}


class LimitWaiter(NamedTuple):
    """A call that waits for a slot or for its start, and what its key stands for."""

    record: InvocationRecord
    label: str

    def document(self) -> Document:
        return invocation_document(self.record) | {"label": self.label}


class WholeLimit(NamedTuple):
    """A limit or rate: its keys with waiting calls, the newest of these, and what is left of its rate."""

    limit: LimitInForce | None
    name: str
    keys: Sequence[LimitKey]
    waiters: Sequence[LimitWaiter]
    allowances: Sequence[Allowance]

    def document(self) -> Document:
        return {
            "name": self.name,
            "limit": None if self.limit is None else LimitList([self.limit]).document()["limits"][0],
            "waiting": [each.document() for each in self.keys],
            "waiters": [each.document() for each in self.waiters],
            "keys": [allowance_document(each) for each in self.allowances],
        }


class QueueReading:
    """Ask for queues and limits."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime
        self._queues, self._limits = Queues(runtime), LimitAccess(runtime)

    async def queues(self) -> QueueList:
        """Return the queues. A number over `MOST_COUNTED` is a lower bound."""
        return QueueList(await self._queues.alist(most=MOST_COUNTED + 1))

    async def limits(self) -> LimitList:
        """Return the limits and rates. A number of keys over `MOST_KEYS` is a lower bound."""
        return LimitList(await self._limits.alist(most=MOST_KEYS + 1))

    async def limit(self, name: str) -> WholeLimit:
        """Return one limit or rate, with the first of its keys for which calls wait, and the newest of those."""
        found = {each.name: each for each in (await self.limits()).limits}.get(name)
        keys = await self._runtime.arun(self.keys(name))
        waiters = await self._runtime.arun(self._waiters({name} if found is None else {name, *found.tasks}))
        return WholeLimit(found, name, keys, waiters, await self._limits.aallowances(name, limit=_KEYS))

    async def _waiters(self, tasks: Collection[str]) -> Sequence[LimitWaiter]:
        """Return calls of these tasks among the newest that wait for any limit: stores have no index by both."""
        engine, wanted = await self._runtime.engine(), Filter(statuses=frozenset({Status.CONCURRENCY_CONTROLLED}))
        records = await engine.store.find(engine.app, wanted, MOST_BLOCKED)
        found = [each for each in records if each.task in tasks or unversioned(each.task) in tasks][:_WAITERS]
        return [LimitWaiter(each, label_of(self._runtime, each, each.limit_key or "")) for each in found]

    async def keys(self, name: str) -> Sequence[LimitKey]:
        """Return the first keys of a limit for which calls wait. It runs on the engine's loop."""
        engine = await self._runtime.engine()
        waiting = await engine.store.waiting_keys(engine.app, ranges_of(name), _KEYS)
        keys = sorted(key for key in waiting if not is_rate_key(key) and task_of(key) == name)[:_KEYS]
        found = []
        for key in keys:
            holders = await engine.store.find(engine.app, Filter(limit_key=key), _HOLDERS, order=Order.SLOT)
            label = label_of(self._runtime, holders[0], key) if holders else ""
            found.append(LimitKey(key, waiting[key], holders, label))
        return found


def pause_document(pause: QueuePause | None) -> Document | None:
    return None if pause is None else {"since": moment(pause.at), "by": pause.by, "reason": pause.reason}


def change_document(change: LimitChange | None) -> Document | None:
    return None if change is None else fields(change)


def allowance_document(each: Allowance) -> Document:
    return fields(each) | {
        "shown_key": shown_key(each.key),
        "last": [{"id": id, "at": moment(at)} for id, at in each.last],
    }
