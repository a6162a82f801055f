"""`find`: the first invocations that a filter allows, at the cost of the page and not of the collection.

Each order reads its index, in one query or in a few with merged answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace
from pymongo import ASCENDING, DESCENDING

from holdfast.model.decoding import LATEST
from holdfast.model.records import OUTCOMES
from holdfast.model.status import OWNED, Status
from holdfast.store.contract import Filter, Order
from holdfast.store.mongo.documents import Document, key_of, listed
from holdfast.store.mongo.queries import MAX_RANGES, Invocations, by_key, is_moment, portions


class Query(NamedTuple):
    """One query. Without a hint, MongoDB tries which of several indexes leads to a page soonest. Without an order, the
    matches are few, and no index has their order.
    """

    wanted: Document
    hint: str | None
    order: list[tuple[str, int]]


async def find(invocations: Invocations, app: str, where: Filter, order: Order, limit: int) -> list[Document]:
    if limit <= 0:
        return []  # to MongoDB, a limit of 0 is none
    found: list[Document] = []
    all_looks = list(looks(app, where, order))
    for look in all_looks:
        if look.order:
            found += await invocations.find(look.wanted, hint=look.hint).sort(look.order).limit(limit).to_list()
        else:
            found += await _sorted_here(invocations, look, limit)
    if len(all_looks) > 1:
        found.sort(key=_end_of if order is Order.LATEST_END else _id_of, reverse=True)
    return found[:limit]


async def _sorted_here(invocations: Invocations, look: Query, limit: int) -> list[Document]:
    """Return the newest of what owners hold. That is no more than the fleet runs, and it lies by owner. The ids are
    taken from the index alone, if all are proper ones.
    """
    found = await invocations.find(look.wanted, {"id": True, "_id": False}, hint=look.hint).to_list()
    if not all(isinstance(one.get("id"), str) for one in found):
        found = await invocations.find(look.wanted, {"id": True}, hint=look.hint).to_list()
    newest = sorted(found, key=_id_of, reverse=True)[:limit]
    keys = [one.get("_id", key_of(look.wanted["app"], str(one["id"]))) for one in newest]
    return sorted(await by_key(invocations, keys), key=_id_of, reverse=True)


def _id_of(document: Document) -> str:
    return str(document.get("id"))


def _end_of(document: Document) -> tuple[float, str]:
    """Return the place by end. A document without a proper end comes first, so that no page ends with it."""
    at = document.get("changed_at")
    return at if is_moment(at) else LATEST, _id_of(document)


def looks(app: str, where: Filter, order: Order) -> Iterator[Query]:
    """Yield the queries of a listing."""
    if order is Order.NEWEST:
        for part in _parts(where):
            yield from _newest(app, part)
        return
    wanted: Document = {"app": app} | _conditions(where)
    if where.before_id is not None:
        wanted["id"] = {"$lt": where.before_id}
    if order is Order.LATEST_END:
        yield from _latest_ends(wanted, where)
    elif order is Order.OUTBOX:
        by_end = [("changed_at", ASCENDING), ("id", ASCENDING)]
        yield Query(wanted | {"outbox": {"$exists": True}, "changed_at": _span(where)}, "outbox", by_end)
    elif order is Order.START_BY:
        by_start = [("start_by", ASCENDING), ("id", ASCENDING)]
        yield Query(wanted | _changed(where) | {"start_by": {"$gte": float("-inf")}}, "start_by", by_start)
    elif order is Order.WAKE_AT:
        if where.statuses and Status.SUSPENDED not in where.statuses:
            return
        by_time = [("wake_at", ASCENDING), ("id", ASCENDING)]
        sleeping = {"status": Status.SUSPENDED.value, "wake_at": {"$gte": float("-inf")}}
        yield Query(wanted | _changed(where) | sleeping, "wake", by_time)
    else:
        by_slot = [("limit_key", ASCENDING), ("slot", ASCENDING)]
        yield Query(wanted | _changed(where) | {"slot": {"$gte": ""}}, "slot", by_slot)


def _parts(where: Filter) -> list[Filter]:
    """Return a filter in portions. Statuses are few; if one is given, its index is used."""
    if not where.statuses and len(where.tasks) > MAX_RANGES:
        return [replace(where, tasks=frozenset(some)) for some in portions(sorted(where.tasks))]
    if not where.statuses and not where.tasks and len(where.queues) > MAX_RANGES:
        return [replace(where, queues=frozenset(some)) for some in portions(sorted(where.queues))]
    return [where]


def _newest(app: str, where: Filter) -> Iterator[Query]:
    """Yield the queries by id. Failures are few, and so are the calls of a rare task; which of them is not known here.
    Index: parent, rerun, attributes, status, task or queue; else _id.
    """
    wanted: Document = {"app": app} | _conditions(where) | _changed(where)
    is_by_other = where.parent is not None or where.rerun_of is not None or bool(where.attributes)
    if not is_by_other and (where.statuses or where.runner is not None):
        if owned := where.statuses & OWNED or (frozenset() if where.statuses else OWNED):
            before = {} if where.before_id is None else {"id": {"$lt": where.before_id}}
            yield Query(wanted | before | {"status": {"$in": sorted(map(str, owned))}}, "status", [])
        if where.runner is not None or not (others := where.statuses - OWNED):
            return
        wanted |= {"status": {"$in": sorted(map(str, others))}, "owner": None}
    indexes = ["parent"] * (where.parent is not None)  # one has few children
    for name, values in (("status", where.statuses), ("task", where.tasks), ("queue", where.queues)):
        indexes += [name] * (0 < len(values) <= MAX_RANGES and where.parent is None)
    if where.attributes:
        indexes = ["attributes"]
    if where.rerun_of is not None:
        indexes = ["rerun"]
    if indexes:
        if where.before_id is not None:
            wanted["id"] = {"$lt": where.before_id}
        yield Query(wanted, indexes[0] if len(indexes) == 1 else None, [("id", DESCENDING)])
        return
    # '}' is the character after '|', so this range is all of the app's keys.
    last = f"{app}" + "}" if where.before_id is None else f"{app}|{where.before_id}"
    wanted["_id"] = {"$gt": f"{app}|", "$lt": last} | wanted.get("_id", {})
    yield Query(wanted, "_id_", [("_id", DESCENDING)])


def _latest_ends(base: Document, where: Filter) -> Iterator[Query]:
    """Yield the queries by end. Invocations with the very end of the page before come first, by their ids. Index:
    ended.
    """
    statuses = {"$in": sorted(str(status) for status in where.statuses) or list(OUTCOMES)}
    wanted = base | {"status": statuses, "retain_until": {"$exists": True}}
    by_end, span = [("changed_at", DESCENDING), ("id", DESCENDING)], _span(where)
    if where.before is None:
        yield Query(wanted | {"changed_at": span}, "ended", by_end)
        return
    at, id = where.before
    if (where.since is None or at >= where.since) and (where.until is None or at < where.until):
        # Records with the same time of end differ by id only; MongoDB would sort by both in memory.
        yield Query(wanted | {"changed_at": at, "id": {"$lt": id}}, "ended", by_end[1:])
    earlier = span | {"$lt": at if where.until is None else min(at, where.until)}
    yield Query(wanted | {"changed_at": earlier}, "ended", by_end)


def _conditions(where: Filter) -> Document:
    wanted: Document = {}
    for name, values in (("status", where.statuses), ("task", where.tasks), ("queue", where.queues)):
        if values:
            wanted[name] = {"$in": sorted(str(value) for value in values)}
    exact = {"parent_id": where.parent, "rerun_of": where.rerun_of, "limit_key": where.limit_key}
    wanted |= {name: value for name, value in exact.items() if value is not None}
    if where.id_ends is not None:
        wanted["_id"] = {"$regex": f"{re.escape(where.id_ends)}$"}
    if where.attributes:
        wanted["attributes"] = {"$all": listed(where.attributes)}
    if where.runner is not None:
        wanted["owner"] = {"$gte": f"{where.runner}/", "$lt": f"{where.runner}0"}  # 0 is the character after /
    return wanted


def _span(where: Filter) -> dict[str, Any]:
    until = {} if where.until is None else {"$lt": where.until}
    return {"$gte": float("-inf") if where.since is None else where.since} | until


def _changed(where: Filter) -> Document:
    return {} if where.since is None and where.until is None else {"changed_at": _span(where)}
