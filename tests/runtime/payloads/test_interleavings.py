"""Found already there while being collected: in whatever order the commands of writers and collectors reach the store,
what a published record refers to is whole.

A writer keeps a payload of several pieces (or puts it) and publishes the record, as the engine does. The payload may
lie there from an earlier life, unwanted for so long that the collector is after it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pymongo import WriteConcern
from tests.runtime.payloads.interleave import Footprint, Work, every_order, gate, in_order, touching
from tests.support.mongod import fresh_database

from holdfast.codec import Codec, Packed, SizeLimits, references
from holdfast.errors import PayloadLost
from holdfast.model.records import Collected, Piece, StoredPayload
from holdfast.runtime import payloads as payloads_module
from holdfast.runtime.payloads import PayloadStore
from holdfast.store import open_store
from holdfast.store.contract import Store
from holdfast.store.memory.store import MemoryStore
from holdfast.store.mongo import payloads as mongo_payloads
from holdfast.store.sqlite import payloads as sqlite_payloads
from holdfast.testing.clock import FakeClock
from holdfast.testing.samples import invocation

PACKED: Packed = Codec().pack("ten bytes!", SizeLimits(4, 1000))
(PAYLOAD,) = PACKED.payloads
DIGEST = PAYLOAD.digest
# An earlier life was so long ago, and untouched for so long is unwanted. Short, because a store that learns the time
# from its server does so every ten minutes, and this clock stands still in between.
LONG_SECONDS, DAY = 0.02, 0.01


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads_module, "PIECE_BYTES", 4)
    monkeypatch.setattr(payloads_module, "_AT_ONCE", 1)  # an actor does one thing at a time


# --- stores whose commands stop at the gate


class GatedMemory(MemoryStore):
    """Each method is one command; also of SQLite, where each is one transaction."""

    async def keep_payloads(self, app: str, digests: Sequence[str]) -> Sequence[bool]:
        await gate(touching(writes="payloads"))
        return await super().keep_payloads(app, digests)

    async def put_piece(self, app: str, digest: str, number: int, piece: Piece) -> None:
        await gate(touching(writes="pieces"))
        await super().put_piece(app, digest, number, piece)

    async def put_payloads(self, app: str, payloads: Sequence[StoredPayload]) -> None:
        await gate(touching(writes="payloads pieces"))
        await super().put_payloads(app, payloads)

    async def insert(self, records: Sequence[Any]) -> Sequence[bool]:
        await gate(touching(writes="invocations"))
        return await super().insert(records)

    async def collect_payloads(self, app: str, before: float, limit: int) -> Collected:
        await gate(touching(reads="invocations", writes="payloads pieces"))
        return await super().collect_payloads(app, before, limit)


class GatedCursor:
    def __init__(self, cursor: Any, name: str) -> None:
        self._cursor, self._name = cursor, name

    def sort(self, *how: Any) -> GatedCursor:
        self._cursor.sort(*how)
        return self

    def limit(self, most: int) -> GatedCursor:
        self._cursor.limit(most)
        return self

    async def to_list(self) -> Any:
        await gate(touching(reads=self._name))
        return await self._cursor.to_list()


class GatedCollection:
    """A pymongo collection each of whose commands stops at the gate."""

    def __init__(self, collection: Any) -> None:
        self._collection = collection.with_options(write_concern=WriteConcern(w=1))  # it need not wait for the journal
        self._name = collection.name

    def find(self, *how: Any, **more: Any) -> GatedCursor:
        return GatedCursor(self._collection.find(*how, **more), self._name)

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        async def command(*how: Any, **more: Any) -> Any:
            name = {"reads": self._name} if method == "find_one" else {"writes": self._name}
            await gate(touching(**name))
            return await getattr(self._collection, method)(*how, **more)

        return command


_NUMBERS = itertools.count()


class Scene:
    """A store with its clock, on which the same short play is given many times, each time by another app."""

    def __init__(self, store: Store, clock: FakeClock) -> None:
        self.store = store
        self._clock = clock
        self._apps = (f"app{number}" for number in _NUMBERS)
        self.app = ""

    def payload_store(self) -> PayloadStore:
        return PayloadStore(self.store, app=self.app, chunk_threshold=1)

    async def set(self, life: str) -> None:
        """A new app in which the payload had that life."""
        self.app = next(self._apps)
        if life in ("lost its reference", "is referred to"):
            await self.payload_store().keep([PAYLOAD])
        elif life == "was removed half":
            for number in (1, 2):
                await self.store.put_piece(self.app, DIGEST, number, Piece(b"old!"[: 4 if number == 1 else 2]))
        if life == "is referred to":
            await self.store.insert([invocation("before", app=self.app, arguments=PACKED.data)])
        self.a_day_goes_by()

    def a_day_goes_by(self) -> None:
        self._clock.advance(LONG_SECONDS)

    async def write(self, id: str) -> None:
        await self.payload_store().keep([PAYLOAD])
        await self.store.insert([invocation(id, app=self.app, arguments=PACKED.data)])

    async def collect(self) -> None:
        await self.store.collect_payloads(self.app, self.store.now() - DAY, 10)

    def actors(self, writers: int, collectors: int) -> Mapping[str, Work]:
        found: dict[str, Work] = {f"writer {n}": partial(self.write, f"{n}") for n in range(writers)}
        return found | {f"collector {n}": self.collect for n in range(collectors)}

    async def is_whole(self) -> bool:
        try:
            found = await self.payload_store().fetch(references(PACKED.data))
        except PayloadLost:
            return False
        return found == {DIGEST: PAYLOAD.data}

    async def holds(self) -> bool:
        """Whole now, and after another collection."""
        whole = await self.is_whole()
        await self.collect()
        return whole and await self.is_whole()


@asynccontextmanager
async def scene(kind: str, where: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    clock = FakeClock()
    store: Store
    if kind == "memory":
        store = GatedMemory(clock)
    else:
        store = open_store(where, clock=clock, options={"sqlite_synchronous": "normal"} if kind == "sqlite" else {})
    if kind == "sqlite":
        for name in ("keep_payloads", "put_piece", "put_payloads", "insert", "collect_payloads"):
            monkeypatch.setattr(store, name, partial(_gated, getattr(store, name), FOOTPRINTS[name]))
    if kind == "mongo":
        original = getattr(store, "_collection")  # noqa: B009
        for part in (store, getattr(store, "_invocations")):  # noqa: B009
            monkeypatch.setattr(part, "_collection", lambda *how, **more: GatedCollection(original(*how, **more)))
    await store.open()
    try:
        yield Scene(store, clock)
    finally:
        await store.close()


FOOTPRINTS: dict[str, Footprint] = {
    "keep_payloads": touching(writes="payloads"),
    "put_piece": touching(writes="pieces"),
    "put_payloads": touching(writes="payloads pieces"),
    "insert": touching(writes="invocations"),
    "collect_payloads": touching(reads="invocations", writes="payloads pieces"),
}


async def _gated(method: Callable[..., Awaitable[Any]], footprint: Footprint, *how: Any) -> Any:
    await gate(footprint)
    return await method(*how)


@pytest.fixture(params=["memory", "sqlite", pytest.param("mongo", marks=pytest.mark.xdist_group("mongo"))])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def one_database(standalone: str) -> Iterator[str]:
    """For MongoDB a standalone server: what one command does is the same there."""
    with fresh_database(standalone) as url:
        yield url


@pytest.fixture
def where(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if kind != "mongo":
        return f"sqlite:///{tmp_path}/store.db"
    found: str = request.getfixturevalue("one_database")
    return found


Play = Callable[[Callable[[Scene], Awaitable[None]]], None]


@pytest.fixture
def play(kind: str, where: str, monkeypatch: pytest.MonkeyPatch) -> Play:
    def run(scenario: Callable[[Scene], Awaitable[None]]) -> None:
        async def main() -> None:
            async with scene(kind, where, monkeypatch) as stage:
                await scenario(stage)

        asyncio.run(main())

    return run


LIVES = ["never was", "lost its reference", "was removed half", "is referred to"]


async def orders_until_lost(stage: Scene, life: str, writers: int = 1) -> tuple[int, tuple[str, ...] | None]:
    """How many orders were run, and the first one, if any, in which the payload was lost."""

    async def setup() -> Mapping[str, Work]:
        await stage.set(life)
        return stage.actors(writers, 1)

    run = 0
    async with aclosing(every_order(setup)) as orders:
        async for order in orders:
            run += 1
            if not await stage.holds():
                return run, order
    return run, None


FEWEST = {"memory": 3, "sqlite": 3, "mongo": 5}  # else the driver has stopped to look


@pytest.mark.parametrize("life", LIVES)
def test_a_payload_that_a_record_refers_to_is_whole_in_every_order(play: Play, kind: str, life: str) -> None:
    async def scenario(stage: Scene) -> None:
        run, lost = await orders_until_lost(stage, life)
        assert lost is None
        assert run >= FEWEST[kind]

    play(scenario)


@pytest.mark.parametrize("kind", ["memory"])
def test_two_writers_and_a_collector_in_every_order(play: Play) -> None:
    async def scenario(stage: Scene) -> None:
        run, lost = await orders_until_lost(stage, "lost its reference", writers=2)
        assert lost is None
        assert run > 50

    play(scenario)


def test_two_writers_and_two_collectors(play: Play, kind: str) -> None:
    """Too many orders to try them all where each takes a while; so by chance, but by the same chance every time."""

    async def scenario(stage: Scene) -> None:
        rng = random.Random(7)
        tried = set()
        for turn in range(150 if kind == "memory" else 60):
            await stage.set(LIVES[turn % 3])
            eager = rng.choice(["", "writer", "collector"])  # else everybody would end at about the same time

            def choose(waiting: list[str], eager: str = eager) -> str:
                chosen = [name for name in waiting if eager and name.startswith(eager) and rng.random() < 0.7]
                return rng.choice(chosen or waiting)

            tried.add(order := await in_order(stage.actors(2, 2), choose))
            assert await stage.holds(), order
        assert len(tried) > 40

    play(scenario)


@pytest.mark.parametrize("life", ["lost its reference", "was removed half"])
def test_a_collector_that_dies_at_any_step_leaves_nothing_half(play: Play, life: str) -> None:
    async def scenario(stage: Scene) -> None:
        for steps in itertools.count():
            await stage.set(life)
            left = iter(["collector 0"] * steps)
            order = await in_order(stage.actors(0, 1), lambda _, left=left: next(left, ""))  # type: ignore[misc]
            await stage.write("a")
            assert await stage.holds(), order
            if len(order) < steps:
                break
        assert steps >= 1

    play(scenario)


def test_a_writer_that_dies_at_any_step_leaves_nothing_half_and_nothing_for_ever(play: Play) -> None:
    async def scenario(stage: Scene) -> None:
        seen = set()
        for steps in itertools.count():
            for another in (True, False):
                await stage.set("never was")
                left = iter(["writer 0"] * steps)
                order = await in_order(stage.actors(1, 0), lambda _, left=left: next(left, ""))  # type: ignore[misc]
                published = bool([one for one in await stage.store.get(stage.app, ["0"]) if one])
                if another:
                    await stage.write("another")
                    assert await stage.holds(), order
                else:
                    there = await left_over(stage)
                    seen.add(tuple(there))
                    await stage.collect()
                    assert await left_over(stage) == there, order  # it is not a day old yet
                    stage.a_day_goes_by()
                    await stage.collect()
                    assert await left_over(stage) == (there if published else []), order
            if len(order) < steps:
                break
        assert seen == {(), (1,), (1, 2), (0, 1, 2)}
        assert published

    play(scenario)


async def left_over(stage: Scene) -> list[int]:
    whole = await stage.store.get_payload(stage.app, DIGEST)
    pieces = [n for n in (1, 2) if await stage.store.get_piece(stage.app, DIGEST, n) is not None]
    return [0, *pieces] if whole else pieces


# --- the driver would find it


async def _remove_whoever_wants_it(payloads: Any, pieces: Any, app: str, digest: str, before: float) -> bool:
    gone = await payloads.delete_one({"_id": f"{app}|{digest}"})
    await mongo_payloads._remove_pieces(pieces, f"{app}|{digest}", before)
    return bool(gone.deleted_count)


async def _remove_all_pieces(pieces: Any, key: str, before: float) -> None:
    await pieces.delete_many({"_id": {"$gt": f"{key}|", "$lt": f"{key}" + "}"}})


async def _keep_without_renewal(payloads: Any, app: str, digests: Sequence[str], now: float) -> list[bool]:
    keys = [f"{app}|{digest}" for digest in digests]
    there = {found["_id"] for found in await payloads.find({"_id": {"$in": keys}}, {"_id": True}).to_list()}
    return [key in there for key in keys]


async def _always_unreferred(*_: Any) -> bool:
    return False


BREAKS = {
    "a deletion that does not look at the last wish": ("remove", _remove_whoever_wants_it, "lost its reference"),
    "pieces deleted whatever their age": ("_remove_pieces", _remove_all_pieces, "lost its reference"),
    "orphans deleted whatever their age": ("_remove_pieces", _remove_all_pieces, "was removed half"),
    "a keeper that does not renew": ("keep", _keep_without_renewal, "lost its reference"),
    "a collector that does not look for references": ("is_referred_to", _always_unreferred, "is referred to"),
}


@pytest.mark.parametrize("kind", [pytest.param("mongo", marks=pytest.mark.xdist_group("mongo"))])
@pytest.mark.parametrize("name", BREAKS)
def test_the_driver_finds_a_missing_guard(play: Play, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, broken, life = BREAKS[name]
    monkeypatch.setattr(mongo_payloads, function, broken)
    # Without its references, the payload of an earlier record is gone with no writer at all.
    writers = 0 if life == "is referred to" else 1

    async def scenario(stage: Scene) -> None:
        _, lost = await orders_until_lost(stage, life, writers)
        assert lost is not None

    play(scenario)


@pytest.mark.parametrize("kind", ["sqlite"])
def test_the_driver_finds_a_collection_in_two_transactions(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(stage: Scene) -> None:
        store: Any = stage.store

        async def look_then_remove(app: str, before: float, limit: int) -> Collected:
            await gate(touching(reads="payloads invocations"))
            found = await store._read(lambda c: c.execute(sqlite_payloads.UNWANTED, (app, before, limit)).fetchall())
            await gate(touching(writes="payloads pieces"))
            for digest, wanted in found:
                if not wanted:
                    await store._write(lambda c, digest=digest: c.execute(sqlite_payloads.REMOVE, (app, digest)))
            return Collected(0, more=False)

        monkeypatch.setattr(store, "collect_payloads", look_then_remove)
        _, lost = await orders_until_lost(stage, "lost its reference")
        assert lost is not None

    play(scenario)
