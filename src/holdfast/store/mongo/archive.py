"""What has ended, in MongoDB: listing it, telling of it, and removing it.

The TTL index removes what need not be kept longer, by the field `expires_at`. It is set with the end; of what somebody
is yet to be told of, once that is `delivered`; of what ended under an older version, by `retain_old`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import convert
from pymongo import ASCENDING, DESCENDING, UpdateOne

from holdfast.lifecycle.decoding import LATEST
from holdfast.lifecycle.records import Terms
from holdfast.lifecycle.retention import FOREVER, OUTCOMES, retain_until
from holdfast.lifecycle.status import Status
from holdfast.store.contract import Ended
from holdfast.store.mongo.documents import Document, delivered, expiry
from holdfast.store.mongo.queries import Invocations, is_moment

_ORDER = [("changed_at", DESCENDING), ("id", DESCENDING)]
_FINAL: Document = {"status": {"$in": list(OUTCOMES)}}
_OVER: Document = _FINAL | {"outbox": {"$exists": False}}


async def ended(invocations: Invocations, app: str, where: Ended, limit: int) -> list[Document]:
    """Index: ended. Those with the very end of the page before are asked for first, by their ids."""
    if limit <= 0:
        return []  # to MongoDB, a limit of 0 is none
    found: list[Document] = []
    for wanted in looks(app, where):
        found += await invocations.find(wanted, hint="ended").sort(order_of(wanted)).limit(limit).to_list()
    return sorted(found, key=_end_of, reverse=True)[:limit]


def _end_of(document: Document) -> tuple[float, str]:
    """What has no proper end comes first, so it is no end of a page."""
    at = document.get("changed_at")
    return at if is_moment(at) else LATEST, str(document.get("id"))


def order_of(wanted: Document) -> list[tuple[str, int]]:
    """Of those with one and the same end, only the ids can be told apart; MongoDB would sort by both in memory."""
    return _ORDER if isinstance(wanted["changed_at"], dict) else _ORDER[1:]


def looks(app: str, where: Ended) -> Iterator[Document]:
    """The filter of each question."""
    statuses = {"$in": sorted(str(status) for status in where.statuses) or list(OUTCOMES)}
    base: Document = {"app": app, "status": statuses, "retain_until": {"$exists": True}}
    for time in _times(where):
        yield base | time


def _times(where: Ended) -> Iterator[Document]:
    span: dict[str, Any] = {"$gte": float("-inf") if where.since is None else where.since}
    if where.until is not None:
        span["$lt"] = where.until
    if where.before is None:
        yield {"changed_at": span}
        return
    at, id = where.before
    if (where.since is None or at >= where.since) and (where.until is None or at < where.until):
        yield {"changed_at": at, "id": {"$lt": id}}
    yield {"changed_at": span | {"$lt": at if where.until is None else min(at, where.until)}}


async def outboxes(invocations: Invocations, app: str, before: float, limit: int) -> list[Document]:
    """Index: outbox."""
    if limit <= 0:
        return []
    wanted = {"app": app, "outbox": {"$exists": True}, "changed_at": {"$lte": before}}
    order = [("changed_at", ASCENDING), ("id", ASCENDING)]
    return await invocations.find(wanted, hint="outbox").sort(order).limit(limit).to_list()


async def deliver(invocations: Invocations, keys: Sequence[str]) -> None:
    await invocations.update_many({"_id": {"$in": list(keys)}, "outbox": {"$exists": True}}, delivered())


async def remove(invocations: Invocations, keys: Sequence[str]) -> int:
    return (await invocations.delete_many({"_id": {"$in": list(keys)}} | _OVER)).deleted_count


async def remove_final(invocations: Invocations, app: str, before: float, limit: int) -> int:
    """Index: status."""
    if limit <= 0:
        return 0
    wanted = {"app": app, "changed_at": {"$lt": before}} | _OVER
    cursor = invocations.find(wanted, {"_id": True}, hint="status").sort([("id", ASCENDING)]).limit(limit)
    keys = [found["_id"] for found in await cursor.to_list()]
    await remove(invocations, keys)
    return len(keys)


async def remove_expired(invocations: Invocations, app: str, at: float, limit: int) -> int:
    """Index: expires."""
    if limit <= 0:
        return 0
    wanted = {"expires_at": {"$lte": dt.datetime.fromtimestamp(at, dt.UTC)}, "app": app}
    cursor = invocations.find(wanted, {"_id": True}, hint="expires").sort([("expires_at", ASCENDING)]).limit(limit)
    return await remove(invocations, [found["_id"] for found in await cursor.to_list()])


async def retain_old(invocations: Invocations, app: str, after: str, limit: int) -> str | None:
    """Index: status."""
    wanted = {"app": app, "id": {"$gt": after}} | _FINAL
    fields = dict.fromkeys(("id", "status", "changed_at", "retain_until", "terms", "key"), True)
    found = await invocations.find(wanted, fields, hint="status").sort([("id", ASCENDING)]).limit(limit).to_list()
    updates = [
        UpdateOne({"_id": one["_id"], "retain_until": {"$exists": False}}, {"$set": _kept(one)})
        for one in found
        if "retain_until" not in one
    ]
    if updates:
        await invocations.bulk_write(updates, ordered=False)
    return found[-1]["id"] if len(found) == limit else None


def _kept(document: Document) -> Document:
    try:
        terms = convert(document.get("terms", {}), Terms)
        until = retain_until(terms, document.get("key"), Status(document["status"]), document["changed_at"])
        return expiry(until)
    except Exception:  # whoever reads the whole document finds out
        return expiry(FOREVER)
