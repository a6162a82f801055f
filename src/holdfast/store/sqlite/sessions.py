"""Transactions of steps on SQLite: a connection of the step's own, with the file's write lock, for two seconds at most.

No other process can write meanwhile. So a timer on its own thread rolls the transaction back when its time is over,
whatever the step does; from then on the connection refuses to write.

The step may not end the transaction: its page has to be in it. So COMMIT and ROLLBACK are refused on its connection,
as SQL and as methods.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn, cast

from holdfast.errors import StoreUnavailable, UsageError
from holdfast.store.sqlite.threads import WriteTurn, forks

LIMIT_SECONDS = 2.0
_OURS = (
    "Holdfast commits the transaction of a step when the step returns, and rolls it back when it raises: leave commit, "
    "rollback, close, `with`, executescript and isolation_level out"
)


class StepConnection(sqlite3.Connection):
    """What a transactional step gets: a connection in a transaction that only Holdfast ends."""

    is_ours = True  # it is Holdfast that uses it now
    was_refused = False

    def authorize(self, action: int, *_: Any) -> int:
        if action != sqlite3.SQLITE_TRANSACTION or self.is_ours:
            return sqlite3.SQLITE_OK
        self.was_refused = True
        return sqlite3.SQLITE_DENY

    def _refuse(self, *_: Any) -> NoReturn:
        raise UsageError(_OURS)

    commit = rollback = __enter__ = _refuse

    def close(self) -> None:
        if not self.is_ours:
            self._refuse()
        super().close()


class SqliteStepTransaction:
    """See `holdfast.store.contract.StepTransaction`."""

    excludes_writers = True

    def __init__(
        self,
        connect: Callable[[type[sqlite3.Connection]], sqlite3.Connection],
        turn: Callable[[], WriteTurn],
        *,
        is_async: bool,
    ) -> None:
        self._connect = connect
        self._make_turn = turn
        self._is_async = is_async
        self._connection: StepConnection | None = None
        self._ending = threading.Lock()  # the step ends it, or the timer does
        self._held = ExitStack()
        self._timer: threading.Timer | None = None
        self._is_open = self._is_late = False

    @property
    def session(self) -> StepConnection:
        assert self._connection is not None
        return self._connection

    async def begin(self) -> None:
        await self._do(self._begin)

    async def commit(self) -> None:
        await self._do(self._commit)

    async def rollback(self) -> None:
        await self._do(self._rollback)

    async def _do(self, job: Callable[[], None]) -> None:
        """Wait for locks and flushes, on a thread where a loop has to go on. A cancellation comes after that."""
        if not self._is_async:
            return job()
        future = asyncio.ensure_future(asyncio.to_thread(job))
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = error
        future.result()
        if cancelled is not None:
            raise cancelled

    def _begin(self) -> None:
        self._is_late = False
        with ExitStack() as held:
            connection = cast(StepConnection, self._connect(StepConnection))
            held.callback(self._close, connection)
            turn = self._make_turn()
            held.callback(turn.close)
            locks = ExitStack()
            held.callback(locks.close)
            locks.enter_context(turn)
            locks.enter_context(forks)
            connection.execute("BEGIN IMMEDIATE")
            turn.sign()
            connection.set_authorizer(connection.authorize)
            connection.is_ours = False
            self._locks = locks
            self._held, self._connection, self._is_open = held.pop_all(), connection, True
        self._timer = threading.Timer(LIMIT_SECONDS, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def _expire(self) -> None:
        """Roll back: the time is over. The code of the step may still run, and use the connection."""
        with self._ending:
            if not self._is_open or (connection := self._connection) is None:
                return
            self._is_late = True
            connection.interrupt()  # a statement that runs now
            try:
                connection.execute("PRAGMA query_only = ON")
            finally:
                self._end(connection, "ROLLBACK")

    def _commit(self) -> None:
        with self._ending:
            if (late := self._late()) is not None:
                raise late
            connection = self.session
            self._end(connection, "COMMIT")
        self._let_go()

    def _rollback(self) -> None:
        with self._ending:
            if self._is_open and self._connection is not None:
                self._end(self._connection, "ROLLBACK")
        self._let_go()

    def _end(self, connection: StepConnection, statement: str) -> None:
        """End the transaction, and let others write."""
        self._is_open = False
        connection.is_ours = True
        try:
            connection.execute(statement)
        except sqlite3.Error:
            if statement == "COMMIT":
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        finally:
            connection.is_ours = False
            self._locks.close()

    def _let_go(self) -> None:
        """Close everything: the code of the step has ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._held.close()

    @staticmethod
    def _close(connection: StepConnection) -> None:
        connection.is_ours = True
        connection.close()

    def is_transient(self, error: BaseException) -> bool:
        """Return whether another process had the lock for so long that the transaction could not begin."""
        is_busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
        return isinstance(error, StoreUnavailable) or is_busy

    def explained(self) -> Exception | None:
        if (late := self._late()) is not None:
            return late
        return UsageError(_OURS) if self._connection is not None and self._connection.was_refused else None

    def _late(self) -> TimeoutError | None:
        if not self._is_late:
            return None
        return TimeoutError(
            f"its transaction was open for more than {LIMIT_SECONDS:g} s and was rolled back: no other process can "
            "write to a SQLite file meanwhile, nor other code of this one. Do what takes long in a step of its own; "
            "submit with options(session=context().session)"
        )
