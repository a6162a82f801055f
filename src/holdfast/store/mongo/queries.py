"""Every read that the MongoDB store sends, by name, each with the index it runs on.

They are whole: a cursor is read to its end inside the function, so that asking again repeats all of it. A claim has
no ``$or``, no ``$ne`` and no null-or-missing: it is a merge of one range per lane. MongoDB merges at most 200 ranges
in order; with more of them it would read everything and sort it, so a query for many goes out in portions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar

from msgspec.structs import replace
from pymongo import ASCENDING, DESCENDING
from pymongo.asynchronous.collection import AsyncCollection

from holdfast.lifecycle.claims import Claim
from holdfast.lifecycle.decoding import EARLIEST, LATEST
from holdfast.lifecycle.records import InvocationRecord, lane_of
from holdfast.lifecycle.status import Status
from holdfast.store.contract import Filter
from holdfast.store.mongo.documents import Document, key_of
from holdfast.store.mongo.marks import Range
from holdfast.store.mongo.sentinels import BESIDE, NO_SENTINEL, REAL_DUE, REAL_RANK

T = TypeVar("T")

Invocations = AsyncCollection[Document]

BESIDE_CLAIMS = "holdfast: behind the low-water marks"  # told to the server's log: no operation waits for it
QUEUE_ORDER = [("rank", ASCENDING), ("due_at", ASCENDING), ("id", ASCENDING)]


MOST_RANGES = 100


def _portions(values: Sequence[T]) -> Iterator[list[T]]:
    for first in range(0, len(values), MOST_RANGES):
        yield list(values[first : first + MOST_RANGES])


def ready(app: str, ranges: Sequence[Range], at: float, more: Document | None = None) -> Document:
    """What is due at `at` in these ranges, on the index `ready`. Each branch names every field of the index, so that
    MongoDB merges them in order; lanes that are looked at from the same place on share one.
    """
    together: dict[tuple[float | None, float], list[str]] = {}
    for lane, rank, since in ranges:
        together.setdefault((rank, since), []).append(lane)
    branches: list[Document] = []
    for (rank, since), names in together.items():
        due: Document = {"$lte": at} if rank is None else {"$gte": since, "$lte": at}
        # Ranks are whole numbers. A single point would keep MongoDB from merging the lanes in order.
        ranks = REAL_RANK if rank is None else {"$gte": rank, "$lt": rank + BESIDE}
        where: Document = {"app": app, "lane": {"$in": names}, "rank": ranks}
        branches.append(where | {"due_at": due, "ready": True} | (more or {}))
    return branches[0] if len(branches) == 1 else {"$or": branches}


async def candidates(
    invocations: Invocations, claim: Claim, ranges: Sequence[Range], limit: int, share: str | None = None
) -> list[Document]:
    """The first `limit` of what a claim may take, in queue order. Index: ready.

    Of a share, only those whose id matches it; that is looked up in the index too.
    """
    only: Document = {} if share is None else {"id": {"$regex": share}}
    found: list[Document] = []
    for some in _portions(ranges):
        wanted = ready(claim.app, some, claim.at, only)
        found += await invocations.find(wanted, _fields(claim), hint="ready").sort(QUEUE_ORDER).limit(limit).to_list()
    return found if len(ranges) <= MOST_RANGES else sorted(found, key=_place_in_queue)[:limit]


async def candidates_by_id(invocations: Invocations, claim: Claim, limit: int) -> list[Document]:
    """Of the invocations that a claim names, those that it may take, in queue order. Index: _id."""
    wanted: Document = {
        "_id": {"$in": [key_of(claim.app, id) for id in claim.ids]},
        "lane": {"$in": list(claim.lanes)},
        "due_at": {"$lte": claim.at},
        "ready": True,
    }
    return sorted(await invocations.find(wanted, _fields(claim)).to_list(), key=_place_in_queue)[:limit]


def _fields(claim: Claim) -> Document:
    names = ("_id", "lane", "rank", "due_at", "id", "status")
    return dict.fromkeys((*names, "task", "limit_key", "terms", "key") if claim.limits else names, True)


async def places(invocations: Invocations, app: str, lanes: Sequence[str], at: float, limit: int) -> list[Document]:
    """Where the first `limit` that are due lie, in queue order, from the heads of these lanes on. Index: ready."""
    found: list[Document] = []
    for some in _portions([Range(lane, None, float("-inf")) for lane in lanes]):
        cursor = invocations.find(ready(app, some, at), {"lane": True, "rank": True, "due_at": True}, hint="ready")
        found += await cursor.sort(QUEUE_ORDER).limit(limit).comment(BESIDE_CLAIMS).to_list()
    return found if len(lanes) <= MOST_RANGES else sorted(found, key=_place_in_queue)[:limit]


def _place_in_queue(found: Document) -> tuple[float, float, str]:
    """What has no proper place comes first: somebody will look at it, and set it aside."""
    rank, due_at = found.get("rank"), found.get("due_at")
    first = float("-inf")
    return (
        rank if isinstance(rank, int | float) else first,
        due_at if isinstance(due_at, int | float) else first,
        str(found.get("id")),
    )


async def taken(invocations: Invocations, claim: Claim, keys: list[str]) -> list[Document]:
    """What this claim got of these. Index: _id."""
    return await invocations.find({"_id": {"$in": keys}, "claim_token": claim.operation}).to_list()


async def claimed_before(invocations: Invocations, claim: Claim) -> list[Document]:
    """What an earlier try of this claim got. Index: owned."""
    wanted = {
        "app": claim.app,
        "owner": claim.owner,
        "claim_token": claim.operation,
        "owned": True,
        "status": claim.path[-1].value,
    }
    return await invocations.find(wanted, hint="owned").to_list()


async def next_due(invocations: Invocations, claim: Claim, since: float) -> Document | None:
    """Where the first of the claim's lanes lies that falls due; nothing does before `since`. Index: due."""
    first: list[Document] = []
    due = REAL_DUE if since == float("-inf") else REAL_DUE | {"$gte": since}
    for lanes in _portions(claim.lanes):
        wanted = {"ready": True, "app": claim.app, "lane": {"$in": lanes}, "due_at": due}
        fields = {"lane": True, "rank": True, "due_at": True}
        cursor = invocations.find(wanted, fields, hint="due").sort([("due_at", ASCENDING)])
        first += [found for found in await cursor.limit(1).to_list() if is_moment(found["due_at"])]
    return min(first, key=lambda found: float(found["due_at"]), default=None)


def is_moment(value: object) -> TypeGuard[float]:
    """Whether a field is a number that can be a time. The server's ranges of numbers have decimals in them, too."""
    return isinstance(value, int | float) and EARLIEST <= value <= LATEST


async def lanes(invocations: Invocations, app: str) -> list[str]:
    """The distinct lanes of what is ready. Index: due, jumping from lane to lane (no hint before 7.1)."""
    found = await invocations.distinct("lane", {"app": app, "ready": True, "due_at": REAL_DUE})
    return sorted(lane for lane in found if isinstance(lane, str))


async def start_limits(invocations: Invocations, app: str, limit: int) -> list[Document]:
    """Those that have to be started by some time. Index: start_by."""
    wanted = {"app": app, "start_by": {"$gte": float("-inf")}}
    order = [("start_by", ASCENDING), ("id", ASCENDING)]
    return await invocations.find(wanted, hint="start_by").sort(order).limit(limit).to_list()


def task_in(lane: str) -> str:
    return lane.split("|", 2)[1]


def waiting(app: str, limit_key: str, without: Collection[str] = ()) -> Document:
    """Who waits for a slot of this key, on the index `waiting`."""
    wanted: Document = {"status": Status.CONCURRENCY_CONTROLLED.value, "app": app, "limit_key": limit_key}
    return wanted | {"lane": {"$nin": sorted(without)}} if without else wanted


async def does_anybody_wait(invocations: Invocations, app: str, limit_key: str) -> bool:
    """Whether somebody waits for a slot of this key. Index: waiting."""
    found = invocations.find(waiting(app, limit_key), {"_id": True}, hint="waiting")
    return bool(await found.limit(1).to_list())


async def waiting_keys(invocations: Invocations, app: str, among: Sequence[str] | None = None) -> list[str]:
    """The distinct keys that somebody waits for. Index: waiting, jumping from key to key (no hint before 7.1)."""
    wanted: Document = {"status": Status.CONCURRENCY_CONTROLLED.value, "app": app}
    if among is not None:
        wanted["limit_key"] = {"$in": list(among)}
    return [key for key in await invocations.distinct("limit_key", wanted) if isinstance(key, str)]


async def held(invocations: Invocations, app: str, keys: Sequence[str]) -> list[Document]:
    """The slots of these keys that are held. Index: slot."""
    wanted = {"app": app, "limit_key": {"$in": list(keys)}, "slot": {"$gte": ""}}
    fields = {"_id": False, "limit_key": True, "slot": True, "id": True, "owner": True}
    return await invocations.find(wanted, fields, hint="slot").to_list()


async def slot_holders(invocations: Invocations, app: str, limit_key: str) -> list[Document]:
    """Who holds slots of this key. Index: slot."""
    wanted = {"app": app, "limit_key": limit_key, "slot": {"$gte": ""}}
    return await invocations.find(wanted, hint="slot").sort([("slot", ASCENDING)]).to_list()


async def by_key(invocations: Invocations, keys: Sequence[str]) -> list[Document]:
    """Index: _id."""
    return await invocations.find({"_id": {"$in": list(keys)}}).to_list()


async def in_the_way(invocations: Invocations, app: str, keys: Sequence[str], names: Names) -> list[Document]:
    """Who has these ids, keys of tasks, or twins. Index: _id, key, twin."""
    found = await by_key(invocations, keys)
    for wanted, hint in holders(app, names):
        found += await invocations.find(wanted, hint=hint).to_list()
    return found


class Names(NamedTuple):
    """What no two invocations may have in common."""

    keys: Sequence[tuple[str, str]]  # of a task
    twins: Sequence[str]


def names_of(records: Sequence[InvocationRecord]) -> Names:
    keys = [(record.task, record.key) for record in records if record.key is not None]
    return Names(keys, [record.twin for record in records if record.twin is not None])


def holders(app: str, names: Names) -> Iterator[tuple[Document, str]]:
    """Filter and index of each look for who has them."""
    for task, key in names.keys:
        yield {"app": app, "task": task, "key": key}, "key"
    if names.twins:
        yield {"app": app, "twin": {"$in": list(names.twins)}}, "twin"


async def first_operations(invocations: Invocations, keys: Sequence[str]) -> dict[str, str]:
    """The operation that stored each of these. Index: _id."""
    cursor = invocations.find({"_id": {"$in": list(keys)}}, {"history": {"$slice": 1}})
    return {found["_id"]: _first_operation(found.get("history")) for found in await cursor.to_list()}


def _first_operation(history: Any) -> str:
    """An empty text for a history that cannot be read."""
    first = history[0] if isinstance(history, list) and history else None
    operation = first.get("op") if isinstance(first, dict) else None
    return operation if isinstance(operation, str) else ""


def listing_filter(app: str, where: Filter) -> tuple[Document, str | None, list[tuple[str, int]]]:
    """Filter, index and order of a listing. No index: there are several, and MongoDB tries which of them leads to a
    page soonest. Failures are few, and so are the calls of a rare task; which of them is not known here.
    """
    wanted: Document = {"app": app}
    indexes: list[str] = []
    if where.parent is not None:  # one has few children
        wanted["parent_id"] = where.parent
        indexes.append("parent")
    for name, values in (("status", where.statuses), ("task", where.tasks), ("queue", where.queues)):
        if values:
            wanted[name] = {"$in": sorted(str(value) for value in values)}
            indexes += [name] * (len(values) <= MOST_RANGES and where.parent is None)
    if where.rerun_of is not None:
        wanted["rerun_of"] = where.rerun_of
        indexes = ["rerun"]
    if where.runner is not None:
        wanted["owner"] = {"$gte": f"{where.runner}/", "$lt": f"{where.runner}0"}  # 0 is the character after /
    if indexes:
        if where.before_id is not None:
            wanted["id"] = {"$lt": where.before_id}
        return wanted, indexes[0] if len(indexes) == 1 else None, [("id", DESCENDING)]
    # '}' is the character after '|', so this range is all of the app's keys.
    wanted["_id"] = {"$gt": f"{app}|", "$lt": f"{app}" + "}" if where.before_id is None else f"{app}|{where.before_id}"}
    return wanted, "_id_", [("_id", DESCENDING)]


async def listing(invocations: Invocations, app: str, where: Filter, limit: int) -> list[Document]:
    """Newest first. Index: status, task or queue, else _id."""
    if limit <= 0:
        return []  # to MongoDB, a limit of 0 is none
    found: list[Document] = []
    parts = _listing_parts(where)
    for part in parts:
        wanted, index, order = listing_filter(app, part)
        found += await invocations.find(wanted, hint=index).sort(order).limit(limit).to_list()
    return found if len(parts) == 1 else sorted(found, key=lambda one: str(one.get("id")), reverse=True)[:limit]


def _listing_parts(where: Filter) -> list[Filter]:
    """The same question in portions. There are few statuses; and if one is given, its index is used."""
    if not where.statuses and len(where.tasks) > MOST_RANGES:
        return [replace(where, tasks=frozenset(some)) for some in _portions(sorted(where.tasks))]
    if not where.statuses and not where.tasks and len(where.queues) > MOST_RANGES:
        return [replace(where, queues=frozenset(some)) for some in _portions(sorted(where.queues))]
    return [where]


async def counts(invocations: Invocations, app: str) -> dict[str, int]:
    """How many of each status. Index: status, without reading a document."""
    stages: list[dict[str, Any]] = [{"$match": {"app": app}}, {"$group": {"_id": "$status", "n": {"$sum": 1}}}]
    cursor = await invocations.aggregate(stages, hint="status")
    return {found["_id"]: found["n"] for found in await cursor.to_list() if isinstance(found["_id"], str)}


async def roster(runners: Invocations, app: str) -> list[Document]:
    """Index: roster."""
    order = [("started_at", ASCENDING), ("id", ASCENDING)]
    return await runners.find({"app": app}, hint="roster").sort(order).to_list()


async def owners(invocations: Invocations, app: str) -> list[str]:
    """The distinct owners. Index: owned, jumping from owner to owner (no hint before 7.1)."""
    found = await invocations.distinct("owner", {"owned": True, "app": app})
    return sorted(owner for owner in found if isinstance(owner, str))


async def of_unknown_status(invocations: Invocations, app: str) -> list[Document]:
    """Those whose status is none. Index: status, by the gaps between the statuses."""
    wanted: Document = {"app": app, "status": {"$nin": _STATUSES}} | NO_SENTINEL
    return await invocations.find(wanted, hint="status").limit(MOST_STRANGE).to_list()


async def without_owner(invocations: Invocations, app: str) -> list[Document]:
    """Those that are owned by nobody whose work recovery could ask for. Index: owned, all of it."""
    wanted: Document = {"owned": True, "app": app, "owner": {"$not": _OWNER}}
    return await invocations.find(wanted, hint="owned").limit(MOST_STRANGE).to_list()


async def all_slot_holders(invocations: Invocations, app: str) -> list[Document]:
    """Who holds a slot of whatever key. Index: slot."""
    return await invocations.find({"app": app, "slot": {"$exists": True}}, hint="slot").to_list()


async def waiting_after(invocations: Invocations, app: str, status: str, after: str) -> tuple[list[Document], str]:
    """Of the next ones of a status that is available for a run, those that no claim would find; and where to go on.

    Index: status. A look reads so many and no more, and goes on where the last one ended.
    """
    wanted: Document = {"app": app, "status": status, "id": {"$gt": after}}
    fields = dict.fromkeys(("id", "queue", "task", "tags", "lane", "due_at", "ready"), True)
    cursor = invocations.find(wanted, fields, hint="status").sort([("id", ASCENDING)]).limit(MOST_WALKED)
    found = await cursor.to_list()
    hidden = [one["_id"] for one in found if _is_hidden(one)][:MOST_STRANGE]
    following = found[-1]["id"] if len(found) == MOST_WALKED else ""
    return await by_key(invocations, hidden) if hidden else [], following


def _is_hidden(found: Document) -> bool:
    try:
        lane = lane_of(found["queue"], found["task"], tuple(found["tags"]))
    except (KeyError, TypeError):
        return True
    return found.get("lane") != lane or found.get("ready") is not True or not is_moment(found.get("due_at"))


MOST_WALKED = 5000
_STATUSES = sorted(status.value for status in Status)
_OWNER = re.compile("^.+/")
MOST_STRANGE = 1000


async def quarantined(quarantine: Invocations, app: str) -> list[Document]:
    """Index: app."""
    return await quarantine.find({"app": app}, hint="app").sort([("at", ASCENDING)]).to_list()
