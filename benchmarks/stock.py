"""Stores with a past: a few invocations that the store itself made, then a mass of their copies.

The few are inserted, claimed and ended through the store, like any others. The mass are the same records with ids,
times and operation ids of their own, in the form that the store gives them, but written past its durability: nobody
waits for them.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from holdfast.codec import ErrorRecord
from holdfast.ids import Ids
from holdfast.model import changes
from holdfast.model.changes import Change
from holdfast.model.claims import Claim
from holdfast.model.records import InvocationRecord, lane_of, registered
from holdfast.model.status import Status
from holdfast.store.contract import Store
from holdfast.testing.clock import FakeClock

APP = "scale"
TASKS = tuple(f"scale:task{number}" for number in range(4))
LANES = tuple(lane_of("default", task) for task in TASKS)
RARE_TASK, RARE_QUEUE = "scale:rare", "rare"
PAGE = 50

_RARE = 140  # older than everything else, and more than a page in each of two statuses
READY = 400
_ONE_IN_FAILS = 50  # of the mass
_SPAN_SECONDS = 30 * 86400.0
_SAMPLE = 2000
_BATCH = 1000
_ARGUMENTS = b"\x91\xc4\x80" + b"x" * 128  # and the results
_ERROR = ErrorRecord(
    type_name="ValueError",
    message="no such order: 1000",
    traceback="Traceback …\n" + "  line of code\n" * 12,
    data=None,
)


@dataclass(frozen=True)
class Stock:
    """What was put into a store: how many, the bytes that they take on the disk with their indexes, and ids from all
    over it that have a page of everything behind them.
    """

    count: int
    space: int
    ids: Sequence[str]


class Maker:
    """Makes records as the engine does, by a clock that the caller moves."""

    def __init__(self, rng: random.Random, now: float) -> None:
        self._rng = rng
        self.clock = FakeClock(now)
        self.ids = Ids(self.clock, rng)

    def new(self, task: str, queue: str = "default") -> InvocationRecord:
        at = self.clock.now()
        bare = InvocationRecord(
            id=self.ids.new(), app=APP, task=task, queue=queue, arguments=_ARGUMENTS, created_at=at, due_at=at
        )
        return registered(bare, operation=self.ids.operation(), at=at)

    def copy(self, record: InvocationRecord) -> InvocationRecord:
        """The same life, at another time."""
        later = self.clock.now() - record.created_at
        renamed = {entry.operation: self.ids.operation() for entry in record.history}
        return replace(
            record,
            id=self.ids.new(),
            created_at=record.created_at + later,
            due_at=record.due_at + later,
            changed_at=record.changed_at + later,
            claim_token=renamed.get(record.claim_token or ""),
            history=tuple(
                [replace(entry, at=entry.at + later, operation=renamed[entry.operation]) for entry in record.history]
            ),
        )


async def stock(url: str, store: Store, *, few: int, archived: int, backlog: int, rng: random.Random) -> Stock:
    """Fill an empty store: oldest what is rare, then a few that ended with their mass, then what is ready with its."""
    now = store.now()
    maker = Maker(rng, now - _SPAN_SECONDS - 7200)
    rare = [maker.new(RARE_TASK, RARE_QUEUE) for _ in range(_RARE)]
    common = [maker.new(TASKS[number % len(TASKS)]) for number in range(few)]
    await store.insert([*rare, *common])
    await _end(store, maker, (*LANES, lane_of(RARE_QUEUE, RARE_TASK)), _RARE + few)
    ended = [record for record in await store.get(APP, [record.id for record in common]) if record is not None]
    sample: list[str] = []
    write = _writer(url)
    maker.clock.set(now - _SPAN_SECONDS - 3600)
    sample += write(_mass(maker, _mixed(ended), archived, _SPAN_SECONDS))
    maker.clock.set(now - 3600)
    ready = [maker.new(TASKS[number % len(TASKS)]) for number in range(READY)]
    await store.insert(ready)
    sample += write(_mass(maker, cycle(ready), backlog, 3000.0))
    sample = sample or [record.id for record in ready]
    count = _RARE + few + archived + READY + backlog
    return Stock(count, _space(url), rng.sample(sample, min(len(sample), _SAMPLE)))


async def _end(store: Store, maker: Maker, lanes: tuple[str, ...], count: int) -> None:
    """Claim all there is, and complete or fail it by turns."""
    wish = Claim(
        app=APP, lanes=lanes, limit=count, owner="stock/0", operation=maker.ids.operation(), at=maker.clock.now()
    )
    claimed = await store.claim(wish)
    if len(claimed.records) < count:
        raise RuntimeError(f"{len(claimed.records)} of {count} were claimed")
    maker.clock.advance(0.01)
    await store.apply([end_of(record, maker, fails=number % 2 == 1) for number, record in enumerate(claimed.records)])


def end_of(record: InvocationRecord, maker: Maker, *, fails: bool = False) -> Change:
    operation, at = maker.ids.operation(), maker.clock.now()
    if fails:
        return changes.failed(record, error=_ERROR, operation=operation, at=at)
    return changes.completed(record, result=_ARGUMENTS, operation=operation, at=at)


def _mixed(ended: Sequence[InvocationRecord]) -> Iterator[InvocationRecord]:
    """Mostly successes, as in life."""
    failures = cycle([record for record in ended if record.status is Status.FAILED])
    successes = cycle([record for record in ended if record.status is Status.SUCCESS])
    while True:
        yield from islice(successes, _ONE_IN_FAILS - 1)
        yield next(failures)


def _mass(
    maker: Maker, templates: Iterator[InvocationRecord], count: int, span_seconds: float
) -> Iterator[InvocationRecord]:
    for template in islice(templates, count):
        maker.clock.advance(span_seconds / count)
        yield maker.copy(template)


# --- writing fast

Write = Callable[[Iterator[InvocationRecord]], list[str]]  # all of them; answers a sample of their ids


def _writer(url: str) -> Write:
    return _to_sqlite(url) if url.startswith("sqlite:///") else _to_mongo(url)


def _space(url: str) -> int:
    if url.startswith("sqlite:///"):
        return Path(url.removeprefix("sqlite:///")).stat().st_size
    from pymongo import MongoClient

    from holdfast.store.mongo.connection import database_name
    from holdfast.store.mongo.schema import INVOCATIONS

    with MongoClient[dict[str, Any]](url) as client:
        return int(client[database_name(url)].command("collStats", INVOCATIONS)["totalSize"])


def _batches(records: Iterator[InvocationRecord], size: int) -> Iterator[list[InvocationRecord]]:
    while batch := list(islice(records, size)):
        yield batch


def _sample_of(batch: Sequence[InvocationRecord]) -> list[str]:
    return [record.id for record in batch[:: max(1, _BATCH // 10)]]


def _to_sqlite(url: str) -> Write:
    from holdfast.store.sqlite.invocations import insert

    def write(records: Iterator[InvocationRecord]) -> list[str]:
        sample: list[str] = []
        with closing(sqlite3.connect(Path(url.removeprefix("sqlite:///")), isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = OFF")
            for batch in _batches(records, _BATCH * 20):
                connection.execute("BEGIN IMMEDIATE")
                insert(connection, batch)
                connection.execute("COMMIT")
                sample += _sample_of(batch)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return sample

    return write


def _to_mongo(url: str) -> Write:
    from pymongo import MongoClient, WriteConcern

    from holdfast.store.mongo.connection import database_name
    from holdfast.store.mongo.documents import to_document
    from holdfast.store.mongo.schema import INVOCATIONS

    def write(records: Iterator[InvocationRecord]) -> list[str]:
        sample: list[str] = []
        with MongoClient[dict[str, Any]](url) as client:
            collection = client[database_name(url)].get_collection(INVOCATIONS, write_concern=WriteConcern(w=1))
            for batch in _batches(records, _BATCH):
                collection.insert_many(map(to_document, batch), ordered=False)
                sample += _sample_of(batch)
            client.admin.command("fsync")  # what is measured later does not pay for writing this out
        return sample

    return write
