"""Let ``session=`` in a test join the user's own transaction, on the store in memory.

The store of a test has no transactions, but the user's code has: a connection to a SQLite file, or a session of
MongoDB. Calls and events of such a session wait outside of the store until its transaction has committed, and are
dropped if it was rolled back. Any other object, such as a stand-in of the test, counts as committed at once.

How a transaction ended is learnt from the user's code: the methods of a MongoDB session that end one are wrapped; on a
SQLite connection a row in a temporary table is there afterwards or not.
"""

from __future__ import annotations

import contextlib
import inspect
import sqlite3
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, Protocol

from holdfast.errors import UsageError
from holdfast.model.identity import find_conflict
from holdfast.model.log import APPENDED, AppendVerdict, Page, judge
from holdfast.model.records import Entry, InvocationRecord, StoredPayload


class TransactionEnd(Enum):
    """How a transaction has ended."""

    NOT_YET = auto()
    COMMITTED = auto()
    ROLLED_BACK = auto()


class There(Protocol):
    """What a transaction asks the store that it will be put into."""

    def holder_of(self, record: InvocationRecord) -> InvocationRecord | None: ...
    def entry_like(self, entry: Entry) -> Entry | None: ...
    def pages_from(self, page: Page) -> Sequence[Page]: ...


class StageTransaction:
    """Implement `holdfast.store.contract.Transaction`. `ended` returns how the user's own has ended."""

    carries_payloads = False
    is_over = True  # no watcher is needed: the test kit looks itself

    def __init__(self, there: There, ended: Callable[[], TransactionEnd], *, is_async: bool) -> None:
        self.is_async = is_async
        self.ended = ended
        self.records: list[InvocationRecord] = []
        self.entries: dict[tuple[str, str], Entry] = {}
        self.pages: list[Page] = []
        self._there = there

    def insert(
        self, records: Sequence[InvocationRecord], stored: Sequence[StoredPayload]
    ) -> Sequence[InvocationRecord | None]:
        answers: list[InvocationRecord | None] = []
        for record in records:
            answers.append(holder := self._there.holder_of(record) or find_conflict(record, self.records))
            if holder is None:
                self.records.append(record)
        return answers

    async def ainsert(
        self, records: Sequence[InvocationRecord], stored: Sequence[StoredPayload]
    ) -> Sequence[InvocationRecord | None]:
        return self.insert(records, stored)

    def put_entries(self, entries: Sequence[Entry], stored: Sequence[StoredPayload] = ()) -> Sequence[Entry | None]:
        answers = []
        for entry in entries:
            name = (entry.kind, entry.name)
            answers.append(there := self.entries.get(name) or self._there.entry_like(entry))
            if there is None:
                self.entries[name] = entry
        return answers

    async def aput_entries(
        self, entries: Sequence[Entry], stored: Sequence[StoredPayload] = ()
    ) -> Sequence[Entry | None]:
        return self.put_entries(entries, stored)

    def append(self, pages: Sequence[Page], stored: Sequence[StoredPayload]) -> Sequence[AppendVerdict]:
        verdicts: list[AppendVerdict] = []
        for page in pages:
            there = self._there.pages_from(page) or [mine for mine in self.pages if _same_place(mine, page)]
            verdicts.append(judge(page, there) if there else APPENDED)
            if not there:
                self.pages.append(page)
        return verdicts

    async def aappend(self, pages: Sequence[Page], stored: Sequence[StoredPayload]) -> Sequence[AppendVerdict]:
        return self.append(pages, stored)


def _same_place(one: Page, other: Page) -> bool:
    return (one.app, one.run, one.generation, one.first) == (other.app, other.run, other.generation, other.first)


class StandIn(StageTransaction):
    """Stand in for an object that is no transaction of a database: it has committed at once."""

    def __init__(self, there: There) -> None:
        super().__init__(there, self._end, is_async=False)

    def _end(self) -> TransactionEnd:
        has_written = self.records or self.entries or self.pages
        return TransactionEnd.COMMITTED if has_written else TransactionEnd.NOT_YET


def joined(session: object, there: There, mark: str) -> StageTransaction:
    """Return the transaction that `session` is in. Raises `UsageError` as the real stores do."""
    if isinstance(session, sqlite3.Connection):
        return StageTransaction(there, _watched_connection(session, mark), is_async=False)
    commit = getattr(session, "commit_transaction", None)
    if commit is None or not hasattr(session, "in_transaction"):
        return StandIn(there)
    if not session.in_transaction:
        raise UsageError("the session is in no transaction; call submit inside session.start_transaction()")
    return StageTransaction(there, _watched_session(session), is_async=inspect.iscoroutinefunction(commit))


# --- MongoDB


def _watched_session(session: Any) -> Callable[[], TransactionEnd]:
    """Wrap the session's methods, for this instance and this transaction, to note how it ends."""
    state = [TransactionEnd.NOT_YET]

    def note(end: TransactionEnd) -> None:
        state[0] = end
        for name in _ENDS:
            if session.__dict__.get(name) in covers:
                del session.__dict__[name]

    covers = [_cover(session, name, lambda end=end: note(end)) for name, end in _ENDS.items()]  # type: ignore[misc]
    for name, cover in zip(_ENDS, covers, strict=True):
        setattr(session, name, cover)
    return lambda: TransactionEnd.ROLLED_BACK if state[0] is TransactionEnd.NOT_YET and session.has_ended else state[0]


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


_ENDS = {"commit_transaction": TransactionEnd.COMMITTED, "abort_transaction": TransactionEnd.ROLLED_BACK}


# --- SQLite


def _watched_connection(connection: sqlite3.Connection, mark: str) -> Callable[[], TransactionEnd]:
    """Insert a row into a temporary table, which shares the fate of the transaction. Once the connection is closed, its
    last statement decides.
    """
    begins = connection.isolation_level is not None or getattr(connection, "autocommit", None) is False
    if not connection.in_transaction and not begins:
        raise UsageError("the connection is in no transaction and begins none by itself; execute BEGIN first")
    cursor = connection.cursor()
    if not connection.in_transaction:
        cursor.execute("BEGIN IMMEDIATE")
    cursor.execute("CREATE TEMP TABLE IF NOT EXISTS holdfast_testing (mark TEXT)")
    cursor.execute("INSERT INTO temp.holdfast_testing VALUES (?)", (mark,))
    said: list[TransactionEnd] = []  # how the transaction ended, if that was heard
    state = [TransactionEnd.NOT_YET]

    def heard(statement: str) -> None:
        words = statement.upper().split()[:3]
        if words and words[0] in _WORDS and "TO" not in words and not said:
            said.append(_WORDS[words[0]])

    connection.set_trace_callback(heard)

    def ended() -> TransactionEnd:
        if state[0] is TransactionEnd.NOT_YET:
            try:
                if not connection.in_transaction:
                    connection.set_trace_callback(None)
                    state[0] = TransactionEnd.COMMITTED if _is_marked(connection, mark) else TransactionEnd.ROLLED_BACK
            except sqlite3.ProgrammingError:  # it was closed, or belongs to another thread
                state[0] = said[0] if said else TransactionEnd.ROLLED_BACK
        return state[0]

    return ended


_WORDS = {"COMMIT": TransactionEnd.COMMITTED, "END": TransactionEnd.COMMITTED, "ROLLBACK": TransactionEnd.ROLLED_BACK}


def _is_marked(connection: sqlite3.Connection, mark: str) -> bool:
    with contextlib.suppress(sqlite3.OperationalError):  # the table was rolled back as well
        cursor = connection.cursor()
        return cursor.execute("DELETE FROM temp.holdfast_testing WHERE mark = ?", (mark,)).rowcount > 0
    return False
