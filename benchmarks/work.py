"""How much a store has to look at for an operation: what no other job on the machine can change.

MongoDB tells how many keys and documents each command examines, when it is asked to explain it; SQLite calls a
function of ours at every turn of its virtual machine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from holdfast.store.contract import Store

Count = Callable[[Callable[[], Awaitable[object]]], Awaitable[int]]
"""Carries out an operation, and answers how much there was to look at."""


def listen(url: str) -> None:
    """To be called before the store is opened: MongoDB's driver tells only of clients that are made afterwards."""
    if not url.startswith("sqlite:///"):
        import benchmarks.commands  # noqa: F401


def counter(url: str, store: Store) -> Count:
    return _turns_of(store) if url.startswith("sqlite:///") else _examined_by(url)


# --- SQLite


def _turns_of(store: Any) -> Count:
    """By its threads' own connections: what is counted is what the store does, not a copy of it."""

    async def count(operation: Callable[[], Awaitable[object]]) -> int:
        turns = 0

        def turn() -> int:
            nonlocal turns
            turns += 1
            return 0

        for thread in (store._read, store._write):
            await thread(lambda connection: connection.raw.set_progress_handler(turn, 1))
        await operation()
        counted = turns
        for thread in (store._read, store._write):
            await thread(lambda connection: connection.raw.set_progress_handler(None, 1))
        return counted

    return count


# --- MongoDB

_UNEXPLAINED = frozenset({"insert", "dbStats", "ping", "hello"})  # they search nothing
_NOT_FOR_EXPLAIN = frozenset({"lsid", "txnNumber", "writeConcern", "readConcern", "ordered"})


def _examined_by(url: str) -> Count:
    from pymongo import MongoClient

    from benchmarks.commands import CommandCounter
    from holdfast.store.mongo.connection import database_name
    from holdfast.store.mongo.queries import WHOLE_LOOK

    async def count(operation: Callable[[], Awaitable[object]]) -> int:
        with CommandCounter(database_name(url)) as sent:
            await operation()
        examined = 0
        with MongoClient[dict[str, Any]](url) as client:
            for (name, _), command in sent.commands:
                beside = command.get("comment") == WHOLE_LOOK
                for single in [] if name in _UNEXPLAINED or beside else _singles(dict(command)):
                    explained = client[database_name(url)].command("explain", single, verbosity="executionStats")
                    examined += _largest("totalKeysExamined", explained) + _largest("totalDocsExamined", explained)
        return examined

    return count


def _singles(command: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The command as `explain` takes it: one update at a time."""
    kept = {name: value for name, value in command.items() if name not in _NOT_FOR_EXPLAIN and not name.startswith("$")}
    if "updates" not in kept:
        yield kept
    for one in kept.get("updates", []):
        yield kept | {"updates": [one]}


def _largest(name: str, explained: object) -> int:
    """An aggregation has the number in several places; the sum of a command is the largest."""
    if isinstance(explained, list):
        return max((_largest(name, part) for part in explained), default=0)
    if isinstance(explained, dict):
        here = explained.get(name, 0)
        return max([here if isinstance(here, int) else 0, *(_largest(name, part) for part in explained.values())])
    return 0
