"""Every read that the MongoDB store sends, by name, each with the index it runs on.

They are whole: a cursor is read to its end inside the function, so that asking again repeats all of it. A claim has
no ``$or``, no ``$ne`` and no null-or-missing: it is a merge of one range per lane. MongoDB merges at most 200 ranges
in order; with more of them it would read everything and sort it, so a query for many goes out in portions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar

from pymongo import ASCENDING, DESCENDING
from pymongo.asynchronous.collection import AsyncCollection

from holdfast.model.claims import Claim
from holdfast.model.decoding import EARLIEST, LATEST
from holdfast.model.records import InvocationRecord, lane_of
from holdfast.model.status import OWNED, Status
from holdfast.store.mongo.documents import Document, key_of
from holdfast.store.mongo.marks import Range
from holdfast.store.mongo.sentinels import HALF_RANK, NO_SENTINEL, REAL_DUE, REAL_RANK

T = TypeVar("T")

Invocations = AsyncCollection[Document]

WHOLE_LOOK = "holdfast: behind the low-water marks"  # a comment for the server's log: no operation waits for this query
QUEUE_ORDER = [("rank", ASCENDING), ("due_at", ASCENDING), ("id", ASCENDING)]


MAX_RANGES = 100
_KEYS_AT_ONCE = 100


def portions(values: Sequence[T]) -> Iterator[list[T]]:
    for first in range(0, len(values), MAX_RANGES):
        yield list(values[first : first + MAX_RANGES])


def ready(app: str, ranges: Sequence[Range], at: float, more: Document | None = None) -> Document:
    """Return a filter for the invocations in these ranges that are due at `at`, on the index `ready`. Each branch names
    every field of the index, so that MongoDB merges them in order; lanes with the same start share one.
    """
    together: dict[tuple[float | None, float], list[str]] = {}
    for lane, rank, since in ranges:
        together.setdefault((rank, since), []).append(lane)
    branches: list[Document] = []
    for (rank, since), names in together.items():
        due: Document = {"$lte": at} if rank is None else {"$gte": since, "$lte": at}
        # Ranks are whole numbers. A single point would keep MongoDB from merging the lanes in order.
        ranks = REAL_RANK if rank is None else {"$gte": rank, "$lt": rank + HALF_RANK}
        where: Document = {"app": app, "lane": {"$in": names}, "rank": ranks}
        branches.append(where | {"due_at": due, "ready": True} | (more or {}))
    return branches[0] if len(branches) == 1 else {"$or": branches}


async def candidates(
    invocations: Invocations, claim: Claim, ranges: Sequence[Range], limit: int, share: str | None = None
) -> list[Document]:
    """Return the first `limit` invocations that a claim may take, in queue order. Index: ready.

    Of a share, only ids that match it; the index has them too.
    """
    only: Document = {} if share is None else {"id": {"$regex": share}}
    found: list[Document] = []
    for some in portions(ranges):
        wanted = ready(claim.app, some, claim.at, only)
        found += await invocations.find(wanted, hint="ready").sort(QUEUE_ORDER).limit(limit).to_list()
    return found if len(ranges) <= MAX_RANGES else sorted(found, key=_place_in_queue)[:limit]


async def candidates_by_id(invocations: Invocations, claim: Claim, limit: int) -> list[Document]:
    """Return the named invocations that a claim may take, in queue order. Index: _id."""
    wanted: Document = {
        "_id": {"$in": [key_of(claim.app, id) for id in claim.ids]},
        "lane": {"$in": list(claim.lanes)},
        "due_at": {"$lte": claim.at},
        "ready": True,
    }
    return sorted(await invocations.find(wanted).to_list(), key=_place_in_queue)[:limit]


async def places(invocations: Invocations, app: str, lanes: Sequence[str], at: float, limit: int) -> list[Document]:
    """Return where the first `limit` due invocations of whole lanes lie, in queue order. Index: ready."""
    found: list[Document] = []
    for some in portions([Range(lane, None, float("-inf")) for lane in lanes]):
        cursor = invocations.find(ready(app, some, at), {"lane": True, "rank": True, "due_at": True}, hint="ready")
        found += await cursor.sort(QUEUE_ORDER).limit(limit).comment(WHOLE_LOOK).to_list()
    return found if len(lanes) <= MAX_RANGES else sorted(found, key=_place_in_queue)[:limit]


def _place_in_queue(found: Document) -> tuple[float, float, str]:
    """Return the place of a document in the queue. A document without one comes first, so that it is quarantined."""
    rank, due_at = found.get("rank"), found.get("due_at")
    first = float("-inf")
    return (
        rank if isinstance(rank, int | float) else first,
        due_at if isinstance(due_at, int | float) else first,
        str(found.get("id")),
    )


async def taken(invocations: Invocations, claim: Claim, keys: list[str]) -> list[Document]:
    """Return the documents that this claim took. Index: _id."""
    return await invocations.find({"_id": {"$in": keys}, "claim_token": claim.operation}).to_list()


async def claimed_before(invocations: Invocations, claim: Claim) -> list[Document]:
    """Return what an earlier try of this claim got. Index: status."""
    wanted = {"app": claim.app, "status": claim.path[-1].value, "owner": claim.owner, "claim_token": claim.operation}
    return await invocations.find(wanted, hint="status").to_list()


async def next_due(invocations: Invocations, claim: Claim, since: float) -> Document | None:
    """Return where the claim's next invocation lies that falls due, from `since` on. Index: due."""
    first: list[Document] = []
    due = REAL_DUE if since == float("-inf") else REAL_DUE | {"$gte": since}
    for lanes in portions(claim.lanes):
        wanted = {"ready": True, "app": claim.app, "lane": {"$in": lanes}, "due_at": due}
        fields = {"lane": True, "rank": True, "due_at": True}
        cursor = invocations.find(wanted, fields, hint="due").sort([("due_at", ASCENDING)])
        first += [found for found in await cursor.limit(1).to_list() if is_moment(found["due_at"])]
    return min(first, key=lambda found: float(found["due_at"]), default=None)


def is_moment(value: object) -> TypeGuard[float]:
    """Return whether a field is a number that can be a time. The server's ranges of numbers contain decimals, too."""
    return isinstance(value, int | float) and EARLIEST <= value <= LATEST


async def lanes(invocations: Invocations, app: str) -> list[str]:
    """Return the distinct lanes with ready invocations. Index: due, jumping from lane to lane (no hint before 7.1)."""
    found = await invocations.distinct("lane", {"app": app, "ready": True, "due_at": REAL_DUE})
    return sorted(lane for lane in found if isinstance(lane, str))


def task_in(lane: str) -> str:
    return lane.split("|", 2)[1]


def waiting(app: str, limit_key: str, without: Collection[str] = ()) -> Document:
    """Return a filter for the waiters of a limit key, on the index `waiting`."""
    wanted: Document = {"status": Status.CONCURRENCY_CONTROLLED.value, "app": app, "limit_key": limit_key}
    return wanted | {"lane": {"$nin": sorted(without)}} if without else wanted


async def has_waiters(invocations: Invocations, app: str, limit_key: str) -> bool:
    """Return whether an invocation waits for a slot of this key. Index: waiting."""
    found = invocations.find(waiting(app, limit_key), {"_id": True}, hint="waiting")
    return bool(await found.limit(1).to_list())


async def waiting_keys(invocations: Invocations, app: str, among: Sequence[str] | None = None) -> list[str]:
    """Return the distinct limit keys with waiters. Index: waiting, jumping from key to key (no hint before 7.1)."""
    wanted: Document = {"status": Status.CONCURRENCY_CONTROLLED.value, "app": app}
    if among is not None:
        wanted["limit_key"] = {"$in": list(among)}
    return [key for key in await invocations.distinct("limit_key", wanted) if isinstance(key, str)]


async def waiting_keys_within(invocations: Invocations, app: str, first: str, last: str, most: int | None) -> list[str]:
    """Return the first `most` distinct limit keys with waiters of a range. Index: waiting. Of keys that few wait for,
    one look finds many.
    """
    found: dict[str, None] = {}
    wanted: Document = {"status": Status.CONCURRENCY_CONTROLLED.value, "app": app}
    span = {"$gte": first, "$lt": last}
    while most is None or len(found) < most:
        cursor = invocations.find(wanted | {"limit_key": span}, {"limit_key": True, "_id": False}, hint="waiting")
        keys = [
            each["limit_key"] for each in await cursor.sort([("limit_key", ASCENDING)]).limit(_KEYS_AT_ONCE).to_list()
        ]
        if not keys:
            break
        found |= dict.fromkeys(keys)
        span = {"$gt": keys[-1], "$lt": last}
    return list(found)[:most]


async def held(invocations: Invocations, app: str, keys: Sequence[str]) -> list[Document]:
    """Return the held slots of these keys. Index: slot."""
    wanted = {"app": app, "limit_key": {"$in": list(keys)}, "slot": {"$gte": ""}}
    fields = {"_id": False, "limit_key": True, "slot": True, "id": True, "owner": True}
    return await invocations.find(wanted, fields, hint="slot").to_list()


async def by_key(invocations: Invocations, keys: Sequence[str]) -> list[Document]:
    """Return the documents with these keys. Index: _id."""
    return await invocations.find({"_id": {"$in": list(keys)}}).to_list()


async def find_conflicts(invocations: Invocations, app: str, keys: Sequence[str], names: Names) -> list[Document]:
    """Return the documents that have these ids, keys or dedup keys. Index: _id, key, twin."""
    found = await by_key(invocations, keys)
    for wanted, hint in holders(app, names):
        found += await invocations.find(wanted, hint=hint).to_list()
    return found


class Names(NamedTuple):
    """The keys that no two invocations may have in common."""

    keys: Sequence[tuple[str, str]]  # of a task
    dedup_keys: Sequence[str]


def names_of(records: Sequence[InvocationRecord]) -> Names:
    keys = [(record.task, record.key) for record in records if record.key is not None]
    return Names(keys, [record.dedup_key for record in records if record.dedup_key is not None])


def holders(app: str, names: Names) -> Iterator[tuple[Document, str]]:
    """Yield filter and index of each query for the holders of these names."""
    for task, key in names.keys:
        yield {"app": app, "task": task, "key": key}, "key"
    if names.dedup_keys:
        yield {"app": app, "twin": {"$in": list(names.dedup_keys)}}, "twin"


async def first_operations(invocations: Invocations, keys: Sequence[str]) -> dict[str, str]:
    """Return the operation that stored each of these. Index: _id."""
    cursor = invocations.find({"_id": {"$in": list(keys)}}, {"history": {"$slice": 1}})
    return {found["_id"]: _first_operation(found.get("history")) for found in await cursor.to_list()}


def _first_operation(history: Any) -> str:
    """Return the first operation of a history, or an empty text if it cannot be read."""
    first = history[0] if isinstance(history, list) and history else None
    operation = first.get("op") if isinstance(first, dict) else None
    return operation if isinstance(operation, str) else ""


async def apps(collection: AsyncCollection[Document]) -> list[str]:
    """Return the apps that have documents in a collection whose keys begin with the app. Index: _id, from app to app;
    '}' is the character after '|'. The keys of sentinels are no texts.
    """
    found, after = list[str](), ""
    while next_one := await collection.find_one({"_id": {"$gt": after}}, {"_id": True}, sort=[("_id", ASCENDING)]):
        app = str(next_one["_id"]).partition("|")[0]
        found.append(app)
        after = f"{app}" + "}"
    return found


async def counts(invocations: Invocations, app: str, most: int | None, among: Sequence[str]) -> dict[str, int]:
    """Count invocations by status, the first `most` of each. Index: status, without reading a document."""
    if most is not None:
        asked = {status: {"app": app, "status": status} for status in among}
        each = {s: await invocations.count_documents(where, hint="status", limit=most) for s, where in asked.items()}
        return {status: count for status, count in each.items() if count}
    match = {"app": app, "status": {"$in": list(among)}}
    stages: list[dict[str, Any]] = [{"$match": match}, {"$group": {"_id": "$status", "n": {"$sum": 1}}}]
    cursor = await invocations.aggregate(stages, hint="status")
    return {found["_id"]: found["n"] for found in await cursor.to_list()}


async def owners(invocations: Invocations, app: str) -> list[str]:
    """Return the distinct owners. Index: status, jumping from owner to owner (no hint before 7.1)."""
    found = await invocations.distinct("owner", {"app": app, "status": {"$in": OWNED_STATUSES}})
    return sorted(owner for owner in found if isinstance(owner, str))


async def of_unknown_status(invocations: Invocations, app: str) -> list[Document]:
    """Return documents with an unknown status. Index: status, by the gaps between the statuses."""
    wanted: Document = {"app": app, "status": {"$nin": _STATUSES}} | NO_SENTINEL
    return await invocations.find(wanted, hint="status").limit(MAX_STRANGE).to_list()


async def without_owner(invocations: Invocations, app: str) -> list[Document]:
    """Return owned invocations whose owner is no worker that recovery could ask for. Index: status."""
    wanted: Document = {"app": app, "status": {"$in": OWNED_STATUSES}, "owner": {"$not": _OWNER}}
    return await invocations.find(wanted, hint="status").limit(MAX_STRANGE).to_list()


async def all_slot_holders(invocations: Invocations, app: str) -> list[Document]:
    """Return the holders of all slots. Index: slot."""
    return await invocations.find({"app": app, "slot": {"$exists": True}}, hint="slot").to_list()


async def waiting_after(invocations: Invocations, app: str, status: str, after: str) -> tuple[list[Document], str]:
    """Return the next invocations of an available status that no claim would find, and where to go on.

    Each call reads a bounded number of documents. Index: status.
    """
    wanted: Document = {"app": app, "status": status, "owner": None, "id": {"$gt": after}}
    fields = dict.fromkeys(("id", "queue", "task", "tags", "lane", "due_at", "ready"), True)
    cursor = invocations.find(wanted, fields, hint="status").sort([("id", ASCENDING)]).limit(MAX_WALKED)
    found = await cursor.to_list()
    hidden = [one["_id"] for one in found if _is_hidden(one)][:MAX_STRANGE]
    following = found[-1]["id"] if len(found) == MAX_WALKED else ""
    return await by_key(invocations, hidden) if hidden else [], following


def _is_hidden(found: Document) -> bool:
    try:
        lane = lane_of(found["queue"], found["task"], tuple(found["tags"]))
    except (KeyError, TypeError):
        return True
    return found.get("lane") != lane or found.get("ready") is not True or not is_moment(found.get("due_at"))


MAX_WALKED = 5000
_STATUSES = sorted(status.value for status in Status)
OWNED_STATUSES = sorted(status.value for status in OWNED)
_OWNER = re.compile("^.+/")
MAX_STRANGE = 1000


async def quarantined(quarantine: Invocations, app: str, id: str | None, latest: int | None) -> list[Document]:
    """Return quarantined records, oldest first, or the `latest` first. Index: app."""
    where = {"app": app} if id is None else {"app": app, "id": id}
    found = quarantine.find(where, hint="app")
    if latest is None:
        return await found.sort([("at", ASCENDING)]).to_list()
    return await found.sort([("at", DESCENDING)]).limit(latest).to_list() if latest else []
