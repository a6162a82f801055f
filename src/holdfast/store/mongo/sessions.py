"""Transactions of steps on MongoDB: sessions of clients that belong to the step's own loop, or to threads.

The engine's client belongs to the engine's loop, and no other loop can use it. So there is one client for each loop
that steps run on, and one for all threads. They are made with the first such step and closed with the store.

The server keeps the transaction of a process that was killed open for up to a minute
(`transactionLifetimeLimitSeconds`). Until then, a write to the same documents is a conflict, labelled as transient, and
a write to the place of its page waits. So these clients name their owner to the server, as the name of the application.
The next owner of a run finds the transactions of the dead by that name, and ends their sessions: a user may do that
with sessions of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import re
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from pymongo import MongoClient, ReadPreference, WriteConcern
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import InvalidOperation, OperationFailure, PyMongoError
from pymongo.read_concern import ReadConcern

from holdfast.errors import UsageError
from holdfast.store.mongo import connection
from holdfast.store.mongo.retry import is_forbidden

_COMMIT_SECONDS = 30.0  # for an answer to a commit; then the page decides
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 1.0
_MAJORITY = WriteConcern(w="majority", j=True)
_OURS = (
    "Holdfast commits the transaction of a step when the step returns, and aborts it when it raises: leave "
    "commit_transaction, abort_transaction and end_session out"
)
_SHADOWED = ("commit_transaction", "abort_transaction", "end_session")


def _name(owner: str, pid: int | str) -> str:
    """Return the name by which the server knows the transactions of an owner in a process. The next process of a worker
    has the same owner.
    """
    return f"holdfast step {owner} {pid}"


async def abort(collection: AsyncCollection[dict[str, Any]], owners: Collection[str]) -> int:
    """End the sessions with open transactions of these owners in other processes. Return how many there were."""
    admin, names = collection.database.client.admin, "|".join(re.escape(_name(owner, "")) for owner in owners)
    pattern = f"^(?:{names})(?!{os.getpid()}$)"
    found: list[dict[str, Any]] = []
    try:
        looking: list[dict[str, Any]] = [
            {"$currentOp": {"allUsers": False, "idleSessions": True}},
            {"$match": {"appName": {"$regex": pattern}, "transaction": {"$exists": True}}},
            {"$project": {"lsid": 1}},
        ]
        found = await (await admin.aggregate(looking)).to_list()
        if found:
            await admin.command({"killSessions": [{"id": each["lsid"]["id"]} for each in found]})
    except OperationFailure as error:
        if not is_forbidden(error):
            raise
        return 0  # they end by themselves, in a minute
    return len(found)


class SessionClients:
    """The clients of one store for steps, by owner."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._making = threading.Lock()
        self._blocking: dict[str, MongoClient[dict[str, Any]]] = {}
        self._loops: set[tuple[str, asyncio.AbstractEventLoop]] = set()

    def client(self, owner: str, *, is_async: bool) -> Any:
        """Return the client of the running loop, or that of all threads."""
        url = connection.named(self._url, _name(owner, os.getpid()))
        if is_async:
            loop = asyncio.get_running_loop()
            if (url, loop) in self._loops:
                return connection.acquired(url)
            self._loops.add((url, loop))
            return connection.acquire(url)  # until the store is closed
        with self._making:
            if url not in self._blocking:  # nor is that of the process that has forked this one
                self._blocking[url] = connection.make_blocking(url)
            return self._blocking[url]

    async def close(self) -> None:
        loops, self._loops = self._loops, set()
        for url, loop in loops:
            await connection.release_elsewhere(url, loop)
        blocking, self._blocking = self._blocking, {}
        for client in blocking.values():
            await asyncio.to_thread(client.close)


class MongoStepTransaction:
    """See `holdfast.store.contract.StepTransaction`."""

    excludes_writers = False

    def __init__(self, client: Callable[..., Any], *, is_async: bool) -> None:
        self._client = client
        self._is_async = is_async
        self._session: Any = None
        self._was_refused = False

    @property
    def session(self) -> Any:
        assert self._session is not None
        return self._session

    async def begin(self) -> None:
        session = self._client(is_async=self._is_async).start_session()
        await _answer(
            session.start_transaction(
                read_concern=ReadConcern("snapshot"), write_concern=_MAJORITY, read_preference=ReadPreference.PRIMARY
            )
        )
        for name in _SHADOWED:
            setattr(session, name, self._refuse)
        self._session, self._was_refused = session, False

    def _refuse(self, *_: Any) -> NoReturn:
        self._was_refused = True
        raise UsageError(_OURS)

    async def commit(self) -> None:
        """Commit, and ask until the server has answered: a commit may be sent again."""
        session, deadline, pause = self._taken(), time.monotonic() + _COMMIT_SECONDS, _FIRST_PAUSE_SECONDS
        try:
            while True:
                try:
                    await _answer(session.commit_transaction())
                    return
                except PyMongoError as error:
                    is_unknown = error.has_error_label("UnknownTransactionCommitResult")
                    if not is_unknown or time.monotonic() > deadline:
                        raise
                if self._is_async:
                    await asyncio.sleep(pause)
                else:
                    time.sleep(pause)  # noqa: ASYNC251 - a thread without a loop drives it
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        finally:
            await self._end(session)

    async def rollback(self) -> None:
        if self._session is None:
            return
        session = self._taken()
        with contextlib.suppress(PyMongoError, InvalidOperation):
            if session.in_transaction:
                await _answer(session.abort_transaction())
        await self._end(session)

    def _taken(self) -> Any:
        """Return the session, with its own methods again."""
        session, self._session = self.session, None
        for name in _SHADOWED:
            session.__dict__.pop(name, None)
        return session

    @staticmethod
    async def _end(session: Any) -> None:
        with contextlib.suppress(PyMongoError, InvalidOperation):
            await _answer(session.end_session())

    def is_transient(self, error: BaseException) -> bool:
        return isinstance(error, PyMongoError) and error.has_error_label("TransientTransactionError")

    def explained(self) -> Exception | None:
        return UsageError(_OURS) if self._was_refused else None


async def _answer(asked: Any) -> Any:
    """Return the answer of a driver, blocking or asynchronous."""
    return await asked if inspect.isawaitable(asked) else asked
