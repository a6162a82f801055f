"""How much a store looks at for some work: what no other job on the machine can change.

SQLite calls a function at every instruction of its virtual machine; the profiler of MongoDB tells how many keys and
documents each command has examined.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable
from typing import Any, Protocol

from holdfast import App


class Looks(Protocol):
    """Count what the store of an app looks at."""

    def of(self, work: Callable[[], object]) -> int: ...


def looks_of(app: App) -> Looks:
    url = app.runtime.url
    return StepsOfSqlite(app) if url.startswith("sqlite:") else ExaminedByMongo(url)


class StepsOfSqlite:
    """Count the instructions of SQLite's machine that reading takes."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._seen = itertools.count()

    def of(self, work: Callable[[], object]) -> int:
        work()  # once before: statements are prepared
        self._set(lambda: next(self._seen) < 0)
        before = next(self._seen)
        work()
        self._set(None)
        return next(self._seen) - before

    def _set(self, handler: Callable[[], bool] | None) -> None:
        def install(connection: Any) -> None:
            raw: sqlite3.Connection = connection.raw
            raw.set_progress_handler(handler, 1)

        async def job() -> None:
            store: Any = (await self._app.runtime.engine()).store
            await store._read(install)

        self._app.runtime.run(job())


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
