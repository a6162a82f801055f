"""How much a store looks at for some work: what no other job on the machine can change.

SQLite calls a function at every instruction of its virtual machine; the profiler of MongoDB tells how many keys and
documents each command has examined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tests.web.stepping import Steps

from holdfast import App


class Looks(Protocol):
    """Count what the store of an app looks at."""

    def of(self, work: Callable[[], object]) -> int: ...


def looks_of(app: App) -> Looks:
    url = app.runtime.url
    return Steps(app) if url.startswith("sqlite:") else ExaminedByMongo(url)


class ExaminedByMongo:
    """Count the keys and documents that MongoDB examines."""

    def __init__(self, url: str) -> None:
        self._url = url

    def of(self, work: Callable[[], object]) -> int:
        from pymongo import MongoClient

        with MongoClient[dict[str, Any]](self._url) as client:
            database = client.get_default_database()
            database.drop_collection("system.profile")
            database.command("profile", 2)
            try:
                work()
            finally:
                database.command("profile", 0)
            found = database["system.profile"].find({"ns": {"$not": {"$regex": r"\.system\."}}})
            return sum(each.get("keysExamined", 0) + each.get("docsExamined", 0) for each in found)
