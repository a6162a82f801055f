"""What every part of the MongoDB store stands on: its client, the server's time, its collections, the way to ask."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pymongo
from pymongo import AsyncMongoClient, ReadPreference, WriteConcern
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import OperationFailure
from pymongo.read_concern import ReadConcern

from holdfast.clock import Clock
from holdfast.errors import StoreUnavailable
from holdfast.lifecycle.records import Hint
from holdfast.store.contract import Observe
from holdfast.store.mongo import connection, schema
from holdfast.store.mongo.behind import Behind
from holdfast.store.mongo.claims import Claims
from holdfast.store.mongo.documents import (
    Document,
)
from holdfast.store.mongo.hints import StreamHints
from holdfast.store.mongo.quarantine import Quarantine
from holdfast.store.mongo.retry import (
    BAD_VALUE,
    NO_SUCH_INDEX,
    Retry,
    RetryPolicy,
    is_forbidden,
    is_missing_index,
    is_transient,
    text_of,
)
from holdfast.store.mongo.time import ServerTime
from holdfast.store.mongo.transaction import MongoTransaction, joined

T = TypeVar("T")

_MAJORITY = WriteConcern(w="majority", j=True)
_CERTAIN_SECONDS = 5.0  # how long one try of a certain read waits for the majority


class MongoBase:
    def __init__(
        self,
        url: str,
        *,
        where: str,
        process: str,
        clock: Clock,
        rng: random.Random,
        observe: Observe,
        retry: RetryPolicy,
        use_change_streams: bool,
        signal_seconds: int = schema.SIGNAL_SECONDS,
    ) -> None:
        self._url = url
        self._process = process
        self._clock = clock
        self._rng = rng
        self._observe = observe
        self._use_change_streams = use_change_streams
        self._signal_seconds = signal_seconds
        self._retry = Retry(
            *(retry, clock, rng, observe, where, connection.user_name(url)),
            explain=lambda: connection.wrong_set_name(url),
        )
        self._time = ServerTime(clock)
        self._quarantine = Quarantine(self._collection, self.now, observe)
        self._behind = Behind(self._collection, clock.monotonic, self.now, self._hear)
        self._claims = Claims(self._collection, self._quarantine, rng, self._behind)
        self._database: AsyncDatabase[Document] | None = None
        self._mark: object = None  # tells this database from others of the same name
        self._told_of_index = False
        self._walked: dict[tuple[str, str], str] = {}  # how far the audit has looked at what waits
        self._may_write = True  # until a write is refused
        self._alone = False  # a standalone: nobody to agree with, and nobody to hear a hint
        self._hints: StreamHints | None = None

    def now(self) -> float:
        return self._time.now()

    def clock_error(self) -> float:
        return self._time.error()

    # --- opening and closing

    async def open(self, beside: object = None) -> None:
        if self._database is not None:
            return
        client = connection.acquire(self._url)
        try:
            database = self._database_of(client)
            await self._retry.ask("opening", lambda again: self._prepare(database))
        except BaseException:
            await connection.release(self._url)
            raise
        self._database = database
        self._hints = StreamHints(
            database[schema.SIGNALS].with_options(read_concern=ReadConcern("majority")),  # a stream takes no other
            self._process,
            use_change_streams=self._use_change_streams,
            observe=self._observe,
            can_be_heard=lambda: not self._alone,
            on_hint=self._behind.marks.hear,
        )

    def _database_of(self, client: AsyncMongoClient[Document]) -> AsyncDatabase[Document]:
        return client.get_database(
            connection.database_name(self._url),
            codec_options=connection.LENIENT,
            write_concern=_MAJORITY,
            read_concern=ReadConcern("local"),
            read_preference=ReadPreference.PRIMARY,
        )

    async def _prepare(self, database: AsyncDatabase[Document]) -> None:
        """Learn the server's time, check the version, create what is missing."""
        await self._learn_time(database)
        self._mark = await schema.prepare(database, self._signal_seconds)

    async def _learn_time(self, database: AsyncDatabase[Document]) -> None:
        asked = self._clock.monotonic()
        hello = await database.command("hello")
        self._time.learn(hello["localTime"].timestamp(), asked)
        self._alone = "setName" not in hello and hello.get("msg") != "isdbgrid"

    def _hear(self, hint: Hint) -> None:
        """Tell this process what no hint told it."""
        if self._hints is not None:
            self._hints.tell(hint)

    async def close(self) -> None:
        await self._behind.close()
        if self._hints is not None:
            await self._hints.close()
            self._hints = None
        if self._database is not None:
            self._database = None
            await connection.release(self._url)

    def joined(self, session: object) -> MongoTransaction:
        return joined(session, connection.database_name(self._url), self._mark, self.now, self._observe)

    def hints(self) -> StreamHints | None:
        return self._hints

    def _collection(self, name: str, *, majority: bool = False) -> AsyncCollection[Document]:
        if self._database is None:
            raise StoreUnavailable("the MongoDB store is not open")
        collection = self._database[name]
        return collection.with_options(read_concern=ReadConcern("majority")) if majority else collection

    async def _certainly(self, name: str, read: Callable[[AsyncCollection[Document]], Awaitable[T]]) -> T:
        """Read what a read with majority did not show. Just after an election the new primary may not know yet that
        the majority has what its predecessor acknowledged, so it is made to find out. Who may not write reads
        linearizable instead, which the server does for them, if slowly. Only those pay who ask for what is not there.
        """
        if self._alone:
            return await read(self._collection(name))
        if self._may_write:
            try:
                await schema.wait_for_majority(self._collection(schema.SIGNALS))  # a submitter may write there
                return await read(self._collection(name, majority=True))
            except OperationFailure as error:
                if not is_forbidden(error):
                    raise
                self._may_write = False
        with pymongo.timeout(_CERTAIN_SECONDS):
            return await read(self._collection(name).with_options(read_concern=ReadConcern("linearizable")))

    async def _ask(self, what: str, attempt: Callable[[bool], Awaitable[T]]) -> T:
        """Every operation comes through here; now and then one takes the time with it."""
        if self._time.is_old() and (database := self._database) is not None:
            await self._retry.ask("time", lambda again: self._learn_time(database))
        return await self._retry.ask(what, lambda again: self._mended(attempt, again))

    async def _mended(self, attempt: Callable[[bool], Awaitable[T]], again: bool) -> T:
        """The answer. If somebody has dropped an index that it names, the index is made again first."""
        try:
            return await attempt(again)
        except OperationFailure as error:
            if not is_missing_index(error) or (database := self._database) is None:
                raise
        await self._make_indexes(database)
        return await attempt(True)

    async def _make_indexes(self, database: AsyncDatabase[Document]) -> None:
        """Where this user may not, somebody else has to: that is said once, and the operation is tried again later."""
        names = ""
        try:
            names = ", ".join(await schema.missing(database))
            await schema.put_right(database, self._signal_seconds)
            self._mark = await schema.prepare(
                database, self._signal_seconds
            )  # the whole database may have been dropped
        except OperationFailure as error:
            if is_transient(error):
                raise
            which = f"the index {names}" if names else "an index of ours"
            told = f"{which} is missing; run: holdfast store prepare. To make it again failed: {text_of(error)}"
            if not self._told_of_index:
                self._told_of_index = True
                self._observe("index_missing", {"why": told})
            raise OperationFailure(f"{told} ({NO_SUCH_INDEX})", BAD_VALUE) from error
        self._told_of_index = False
        self._observe("index_made", {"why": f"somebody had dropped {names or 'an index of ours'}"})
