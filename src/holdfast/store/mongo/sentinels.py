"""Sentinels: documents that only hold a place in an index.

MongoDB keeps removed index entries for minutes. A cursor that has read the last entry of a lane continues to the next
visible entry, over all removed entries of the following lanes. A write that has lost its place goes back over all
removed entries before it. Sentinels stop both. They have entries at the end of every range that a query on the hot path
reads:

- `ready`: after each rank (half a rank further), and after the last rank of each lane (rank MaxKey);
- `due`: before and after each lane, by the same two documents;
- `status`: after each status that invocations only pass through;
- every index that begins with the app, or with a fixed word and the app: after all entries of an app, by one document
  whose app is the app's name and a character more.

No query returns a sentinel. Its `_id` is no text, so no range of keys contains it. No query has its app, status, task
or queue. It never expires, and its due time is no number. Two processes that make the same sentinel get one. Without
sentinels everything works, only slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from bson import MaxKey, MinKey
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import BulkWriteError

from holdfast.model.status import FINAL, Status
from holdfast.store.mongo.documents import Document
from holdfast.store.mongo.retry import DUPLICATE

FIRST, LAST = MinKey(), MaxKey()
NO_SENTINEL: Document = {"_id.sentinel": {"$exists": False}}
HALF_RANK = 0.5  # ranks are whole numbers; the sentinel of one lies so far behind it
REAL_RANK: Document = {"$lt": LAST}
_WAITING = Status.CONCURRENCY_CONTROLLED.value
REAL_DUE: Document = {"$gt": float("-inf"), "$lt": float("inf")}


def of_rank(app: str, lane: str, rank: float) -> Document:
    """Return the sentinel after the due times of a rank, and after those of its lane."""
    key = {"sentinel": "rank", "app": app, "lane": lane, "rank": rank}
    return {"_id": key, "app": app, "lane": lane, "rank": rank + HALF_RANK, "due_at": LAST, "ready": True}


def of_lane(app: str, lane: str) -> Document:
    """Return the sentinel after the ranks of a lane, and before its due times."""
    key = {"sentinel": "lane", "app": app, "lane": lane}
    return {"_id": key, "app": app, "lane": lane, "rank": LAST, "due_at": FIRST, "ready": True}


def of_app(app: str) -> Iterator[Document]:
    """Return the sentinel after all entries of an app in every index, and one after each passing status."""
    behind = dict.fromkeys(("owner", "limit_key", "slot", "key", "twin", "rerun_of"), "")
    facts = behind | {"ready": True, "start_by": 0, "outbox": [], "parent_id": "-"}
    name = f"{app}\0"  # no app is called so, and none has a name in between
    yield {"_id": {"sentinel": "app", "app": app}, "app": name, "status": _WAITING, **facts}
    for status in sorted(set(Status) - FINAL):
        key = {"sentinel": "status", "app": app, "status": status.value}
        yield {"_id": key, "app": app, "status": f"{status.value}\0"}  # sorts behind it and before any other


class Sentinels:
    """The sentinels that this process has made or found."""

    def __init__(self) -> None:
        self._apps: set[str] = set()
        self._known: set[tuple[str, str, float | None]] = set()

    def missing(self, app: str, ranks: Iterable[tuple[str, float]]) -> list[Document]:
        """Return the sentinels that these lanes and ranks need and this process has not made."""
        wanted: list[Document] = [] if app in self._apps else list(of_app(app))
        for lane, rank in ranks:
            if (app, lane, None) not in self._known:
                wanted.append(of_lane(app, lane))
            if (app, lane, rank) not in self._known:
                wanted.append(of_rank(app, lane, rank))
        return list({str(one["_id"]): one for one in wanted}.values())

    def are_there(self, documents: Iterable[Document]) -> None:
        for one in documents:
            if "lane" in one:
                self._known.add((one["app"], one["lane"], None if one["rank"] == LAST else one["rank"] - HALF_RANK))
            else:
                self._apps.add(one["_id"]["app"])


async def make(invocations: AsyncCollection[dict[str, Any]], documents: list[Document]) -> None:
    """Insert the sentinels that are missing."""
    try:
        await invocations.insert_many(documents, ordered=False)
    except BulkWriteError as error:
        if any(item.get("code") != DUPLICATE for item in (error.details or {}).get("writeErrors", [])):
            raise
