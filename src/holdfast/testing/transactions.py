"""``session=`` in a test: what is submitted or emitted joins the user's own transaction, on the store in memory.

The store of a test has no transactions, and the user's code under test has: a connection to a SQLite file of the test,
a session of a MongoDB. What is handed over with one waits outside the store until that transaction has committed, and
is dropped if it was rolled back. Any other object, such as a stand-in of the test, counts as committed at once.

How a transaction ended is learnt from what the user's code does: of a MongoDB session the methods that end one are
listened to; on a SQLite connection a row in a temporary table is there afterwards or not.
"""

from __future__ import annotations

import contextlib
import inspect
import sqlite3
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, Protocol

from holdfast.errors import UsageError
from holdfast.lifecycle.identity import in_the_way
from holdfast.lifecycle.records import Entry, InvocationRecord, StoredPayload


class Ended(Enum):
    """What has become of a transaction."""

    NOT_YET = auto()
    COMMITTED = auto()
    ROLLED_BACK = auto()


class There(Protocol):
    """What a transaction asks the store that it will be put into."""

    def holder_of(self, record: InvocationRecord) -> InvocationRecord | None: ...
    def entry_like(self, entry: Entry) -> Entry | None: ...


class StageTransaction:
    """See `holdfast.store.contract.Transaction`. `ended` tells what has become of the user's own."""

    carries_payloads = False
    is_over = True  # nobody has to be told by somebody who waits for its end: the test kit sees to that

    def __init__(self, there: There, ended: Callable[[], Ended], *, is_async: bool) -> None:
        self.is_async = is_async
        self.ended = ended
        self.records: list[InvocationRecord] = []
        self.entries: dict[tuple[str, str], Entry] = {}
        self._there = there

    def insert(
        self, records: Sequence[InvocationRecord], stored: Sequence[StoredPayload]
    ) -> Sequence[InvocationRecord | None]:
        answers: list[InvocationRecord | None] = []
        for record in records:
            answers.append(holder := self._there.holder_of(record) or in_the_way(record, self.records))
            if holder is None:
                self.records.append(record)
        return answers

    async def ainsert(
        self, records: Sequence[InvocationRecord], stored: Sequence[StoredPayload]
    ) -> Sequence[InvocationRecord | None]:
        return self.insert(records, stored)

    def put_entries(self, entries: Sequence[Entry]) -> Sequence[Entry | None]:
        answers = []
        for entry in entries:
            name = (entry.kind, entry.name)
            answers.append(there := self.entries.get(name) or self._there.entry_like(entry))
            if there is None:
                self.entries[name] = entry
        return answers

    async def aput_entries(self, entries: Sequence[Entry]) -> Sequence[Entry | None]:
        return self.put_entries(entries)


class StandIn(StageTransaction):
    """Of something that is no transaction of a database: it has committed as soon as there is anything in it."""

    def __init__(self, there: There) -> None:
        super().__init__(there, self._end, is_async=False)

    def _end(self) -> Ended:
        return Ended.COMMITTED if self.records or self.entries else Ended.NOT_YET


def joined(session: object, there: There, mark: str) -> StageTransaction:
    """The transaction that `session` is in. Raises `UsageError` as the real stores do."""
    if isinstance(session, sqlite3.Connection):
        return StageTransaction(there, _watched_connection(session, mark), is_async=False)
    commit = getattr(session, "commit_transaction", None)
    if commit is None or not hasattr(session, "in_transaction"):
        return StandIn(there)
    if not session.in_transaction:
        raise UsageError("the session is in no transaction; call submit inside session.start_transaction()")
    return StageTransaction(there, _watched_session(session), is_async=inspect.iscoroutinefunction(commit))


# --- MongoDB


def _watched_session(session: Any) -> Callable[[], Ended]:
    """Its own methods are covered, for this instance and this transaction, by ones that note what they came to."""
    state = [Ended.NOT_YET]

    def note(end: Ended) -> None:
        state[0] = end
        for name in _ENDS:
            if session.__dict__.get(name) in covers:
                del session.__dict__[name]

    covers = [_cover(session, name, lambda end=end: note(end)) for name, end in _ENDS.items()]  # type: ignore[misc]
    for name, cover in zip(_ENDS, covers, strict=True):
        setattr(session, name, cover)
    return lambda: Ended.ROLLED_BACK if state[0] is Ended.NOT_YET and session.has_ended else state[0]


def _cover(session: Any, name: str, note: Callable[[], None]) -> Callable[[], Any]:
    real = getattr(session, name)
    if inspect.iscoroutinefunction(real):

        async def awaited() -> None:
            await real()
            note()

        return awaited

    def called() -> None:
        real()
        note()

    return called


_ENDS = {"commit_transaction": Ended.COMMITTED, "abort_transaction": Ended.ROLLED_BACK}


# --- SQLite


def _watched_connection(connection: sqlite3.Connection, mark: str) -> Callable[[], Ended]:
    """A row in a temporary table goes the way of the transaction. Once the connection is closed nobody can look, and
    the last word that was heard on it counts.
    """
    begins = connection.isolation_level is not None or getattr(connection, "autocommit", None) is False
    if not connection.in_transaction and not begins:
        raise UsageError("the connection is in no transaction and begins none by itself; execute BEGIN first")
    cursor = connection.cursor()
    if not connection.in_transaction:
        cursor.execute("BEGIN IMMEDIATE")
    cursor.execute("CREATE TEMP TABLE IF NOT EXISTS holdfast_testing (mark TEXT)")
    cursor.execute("INSERT INTO temp.holdfast_testing VALUES (?)", (mark,))
    said: list[Ended] = []  # how the transaction ended, if that was heard
    state = [Ended.NOT_YET]

    def heard(statement: str) -> None:
        words = statement.upper().split()[:3]
        if words and words[0] in _WORDS and "TO" not in words and not said:
            said.append(_WORDS[words[0]])

    connection.set_trace_callback(heard)

    def ended() -> Ended:
        if state[0] is Ended.NOT_YET:
            try:
                if not connection.in_transaction:
                    connection.set_trace_callback(None)
                    state[0] = Ended.COMMITTED if _is_marked(connection, mark) else Ended.ROLLED_BACK
            except sqlite3.ProgrammingError:  # it was closed, or belongs to another thread
                state[0] = said[0] if said else Ended.ROLLED_BACK
        return state[0]

    return ended


_WORDS = {"COMMIT": Ended.COMMITTED, "END": Ended.COMMITTED, "ROLLBACK": Ended.ROLLED_BACK}


def _is_marked(connection: sqlite3.Connection, mark: str) -> bool:
    with contextlib.suppress(sqlite3.OperationalError):  # the table was rolled back as well
        cursor = connection.cursor()
        return cursor.execute("DELETE FROM temp.holdfast_testing WHERE mark = ?", (mark,)).rowcount > 0
    return False
