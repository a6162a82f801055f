"""Payloads: what is kept comes back byte for byte at every boundary, and what is damaged is said to be lost."""

from __future__ import annotations

import asyncio
import hashlib
import random
import tracemalloc
import zlib
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from pymongo import MongoClient
from tests.store.mongo.tools import database_of
from tests.support.engines import make_engine

from holdfast.codec import Payload, SizeLimits, references
from holdfast.errors import PayloadLost, StoreUnavailable
from holdfast.ids import InvocationId
from holdfast.model.records import InvocationRecord, Piece, StoredPayload
from holdfast.model.status import Status
from holdfast.runtime import payloads as payloads_module
from holdfast.runtime.payloads import PIECE_BYTES, UNWANTED_SECONDS, PayloadStore
from holdfast.runtime.rerun import Rerunner
from holdfast.store import open_store
from holdfast.store.contract import Store
from holdfast.store.memory.store import MemoryStore
from holdfast.testing.clock import FakeClock
from holdfast.testing.samples import START, invocation

KIB = 2**10
NOISE = random.Random(7).randbytes(6 * PIECE_BYTES + 1)


class Bench:
    """A payload store on a store, with a hand in the store."""

    def __init__(self, store: Store, clock: FakeClock, chunk_threshold: int) -> None:
        self.store = store
        self.clock = clock
        self.payloads = PayloadStore(store, app="shop", chunk_threshold=chunk_threshold)

    async def kept(self, data: bytes) -> Payload:
        payload = Payload.of(data)
        await self.payloads.keep([payload])
        return payload

    async def back(self, payload: Payload) -> bytes:
        return (await self.payloads.fetch([payload.reference]))[payload.digest]

    async def head(self, payload: Payload) -> StoredPayload:
        found = await self.store.get_payload("shop", payload.digest)
        assert found is not None
        return found

    async def pieces(self, payload: Payload) -> list[Piece]:
        head = await self.head(payload)
        further = [await self.store.get_piece("shop", payload.digest, number) for number in range(1, head.pieces)]
        assert await self.store.get_piece("shop", payload.digest, head.pieces) is None
        return [head.first, *(piece for piece in further if piece is not None)]

    async def put(self, payload: Payload, number: int, piece: Piece) -> None:
        """Put something else in the place of a piece."""
        if number:
            await self.store.put_piece("shop", payload.digest, number, piece)
        else:
            await self.store.put_payloads("shop", [replace(await self.head(payload), first=piece)])


Scenario = Callable[[Bench], Coroutine[Any, Any, None]]


def on_memory(scenario: Scenario, *, chunk_threshold: int = 1, kind: type[MemoryStore] = MemoryStore) -> None:
    clock = FakeClock()
    asyncio.run(scenario(Bench(kind(clock), clock, chunk_threshold)))


def on_store(url: str, scenario: Scenario, *, chunk_threshold: int = 1) -> None:
    async def main() -> None:
        clock = FakeClock()
        store = open_store(url, clock=clock)
        await store.open()
        try:
            await scenario(Bench(store, clock, chunk_threshold))
        finally:
            await store.close()

    asyncio.run(main())


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads_module, "PIECE_BYTES", 10)


# --- boundaries


def some_bytes(seed: int, size: int, plain: bool) -> bytes:
    return bytes([seed]) * size if plain else random.Random(seed).randbytes(size)


@given(st.builds(some_bytes, st.integers(0, 9), st.integers(0, 75), st.booleans()), st.integers(1, 40))
@settings(max_examples=250, deadline=None)
def test_any_size_comes_back_whatever_the_threshold(data: bytes, chunk_threshold: int) -> None:
    async def scenario(bench: Bench) -> None:
        payload = await bench.kept(data)
        assert await bench.back(payload) == data
        pieces = await bench.pieces(payload)
        if len(data) <= chunk_threshold:
            assert pieces == [Piece(data)]
        else:
            assert len(pieces) == -(-len(data) // 10)
            assert all(len(piece.data) <= 10 for piece in pieces)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(payloads_module, "PIECE_BYTES", 10)
        on_memory(scenario, chunk_threshold=chunk_threshold)


@pytest.mark.slow
def test_the_sizes_around_whole_pieces_come_back_from_each_store(url: str) -> None:
    async def scenario(bench: Bench) -> None:
        zeros = bytes(3 * PIECE_BYTES)
        for data in (
            NOISE[:PIECE_BYTES],
            NOISE[: PIECE_BYTES + 1],
            zeros[: PIECE_BYTES + 1],
            zeros[: 2 * PIECE_BYTES],
            NOISE,
            zeros[: 3 * PIECE_BYTES - 1],
        ):
            payload = await bench.kept(data)
            back = await bench.back(payload)
            assert (len(back), hashlib.sha256(back).hexdigest()) == (len(data), payload.digest)
            pieces = await bench.pieces(payload)
            assert len(pieces) == -(-len(data) // PIECE_BYTES)
            noise = data[:10] == NOISE[:10]
            # What does not become smaller is stored as it is.
            assert {piece.packed for piece in pieces if len(piece.data) > 1} == {not noise}
            assert sum(len(piece.data) for piece in pieces) == (len(data) if noise else pytest.approx(0, abs=60 * KIB))

    on_store(url, scenario, chunk_threshold=PIECE_BYTES)


@pytest.mark.usefixtures("small_pieces")
def test_what_one_threshold_wrote_another_one_reads() -> None:
    async def scenario(bench: Bench) -> None:
        payloads: list[Payload] = []
        for size, threshold in ((35, 20), (35, 100), (7, 1), (7, 10)):
            writer = PayloadStore(bench.store, app="shop", chunk_threshold=threshold)
            payloads.append(Payload.of(some_bytes(len(payloads), size, plain=False)))
            await writer.keep(payloads[-1:])
        assert [await bench.back(payload) for payload in payloads] == [payload.data for payload in payloads]
        # One that was in several pieces is replaced by one that is in one, as a user's own transaction does.
        whole = replace(await bench.head(payloads[0]), pieces=1, first=Piece(payloads[0].data))
        await bench.store.put_payloads("shop", [whole])
        assert await bench.back(payloads[0]) == payloads[0].data

    on_memory(scenario)


# --- what is asked of the store


class Counting(MemoryStore):
    """Remembers what was put and asked."""

    def __init__(self, *how: Any) -> None:
        super().__init__(*how)
        self.calls: list[tuple[str, int]] = []

    async def keep_payloads(self, app: str, digests: Sequence[str]) -> Sequence[bool]:
        self.calls.append(("keep", len(digests)))
        return await super().keep_payloads(app, digests)

    async def put_piece(self, app: str, digest: str, number: int, piece: Piece) -> None:
        self.calls.append(("piece", len(piece.data)))
        await super().put_piece(app, digest, number, piece)

    async def put_payloads(self, app: str, payloads: Sequence[StoredPayload]) -> None:
        self.calls.append(("put", sum(len(payload.first.data) for payload in payloads)))
        await super().put_payloads(app, payloads)


def test_what_is_there_costs_one_question_and_nothing_is_put_twice() -> None:
    async def scenario(bench: Bench) -> None:
        store = bench.store
        assert isinstance(store, Counting)
        await bench.payloads.keep([])
        assert store.calls == []
        payloads = [Payload.of(bytes([number]) * 100) for number in range(10)]
        await bench.payloads.keep(payloads[:6] * 3)
        assert store.calls == [("keep", 6), ("put", 600)]
        store.calls.clear()
        await bench.payloads.keep(payloads)
        assert store.calls == [("keep", 10), ("put", 400)]
        store.calls.clear()
        await bench.payloads.keep(payloads)
        assert store.calls == [("keep", 10)]

    on_memory(scenario, chunk_threshold=15 * 2**20, kind=Counting)


def test_many_are_put_in_batches_that_are_not_too_large_and_those_of_pieces_alone() -> None:
    async def scenario(bench: Bench) -> None:
        store = bench.store
        assert isinstance(store, Counting)
        payloads = [Payload.of(bytes([number]) * 3 * 2**20) for number in range(7)]
        payloads.insert(1, Payload.of(NOISE))
        await bench.payloads.keep(payloads)
        assert all(size <= 8 * 2**20 for _, size in store.calls)
        assert store.calls.count(("put", PIECE_BYTES)) == 1
        assert [name for name, _ in store.calls].count("put") == 5  # two of 3 MB at a time
        for payload in payloads:
            assert await bench.back(payload) == payload.data

    on_memory(scenario, chunk_threshold=5 * 2**20, kind=Counting)


# --- collection


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_what_was_kept_and_never_referred_to_is_collected_after_a_day_and_not_before(kind: str, tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        payload = await bench.kept(b"p" * 35)
        bench.clock.advance(UNWANTED_SECONDS - 1)
        assert await bench.payloads.collect() == (0, False)
        await bench.payloads.keep([payload])  # wanted again
        bench.clock.advance(UNWANTED_SECONDS - 1)
        assert await bench.payloads.collect() == (0, False)
        assert await bench.back(payload) == payload.data
        bench.clock.advance(2)
        assert await bench.payloads.collect() == (1, False)
        with pytest.raises(PayloadLost, match="is not in the store"):
            await bench.back(payload)

    if kind == "memory":
        on_memory(scenario)
    else:
        on_store(f"sqlite:///{tmp_path}/store.db", scenario)


class Sleepy(MemoryStore):
    """The host sleeps for two days just when a piece or the payload was put, and others collect meanwhile."""

    sleeps_after = -1
    puts = 0

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.clock = clock

    async def _slept(self) -> None:
        self.puts += 1
        if self.puts == self.sleeps_after:
            self.clock.advance(2 * UNWANTED_SECONDS)
            await self.collect_payloads("shop", self.now() - UNWANTED_SECONDS, 100)

    async def put_piece(self, app: str, digest: str, number: int, piece: Piece) -> None:
        await super().put_piece(app, digest, number, piece)
        await self._slept()

    async def put_payloads(self, app: str, payloads: Sequence[StoredPayload]) -> None:
        await super().put_payloads(app, payloads)
        await self._slept()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("sleeps_after", range(1, 8))
def test_a_host_that_slept_while_it_put_pieces_puts_them_again(sleeps_after: int) -> None:
    async def scenario(bench: Bench) -> None:
        bench.store.sleeps_after = sleeps_after  # type: ignore[attr-defined]
        payloads = [Payload.of(bytes([number]) * 35) for number in range(2)]  # of three pieces beside the first
        await bench.payloads.keep(payloads)
        for payload in payloads:
            assert await bench.back(payload) == payload.data
        bench.clock.advance(UNWANTED_SECONDS - 100)
        assert await bench.payloads.collect() == (0, False)

    on_memory(scenario, kind=Sleepy)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("hours", "puts"), [(2, 4), (5, None)])
def test_slow_ways_are_enough_unless_the_pieces_would_be_collected_meanwhile(hours: int, puts: int | None) -> None:
    class Slow(MemoryStore):
        puts = 0

        async def put_piece(self, app: str, digest: str, number: int, piece: Piece) -> None:
            await super().put_piece(app, digest, number, piece)
            self.puts += 1
            self._clock.advance(hours * 3600)  # type: ignore[attr-defined]

    async def scenario(bench: Bench) -> None:
        payload = Payload.of(b"x" * 50)  # of four pieces beside the first
        if puts is None:
            with pytest.raises(StoreUnavailable, match="50 bytes could not be stored within 12h, 3 times"):
                await bench.payloads.keep([payload])
        else:
            await bench.payloads.keep([payload])
            assert await bench.back(payload) == payload.data
            assert bench.store.puts == puts  # type: ignore[attr-defined]

    on_memory(scenario, kind=Slow)


# --- damage

DATA = bytes(range(10)) + bytes(10) + b"c" * 10 + b"end"  # in pieces of 10


def packed(data: bytes) -> Piece:
    return Piece(zlib.compress(data), packed=True)


async def _without_a_piece(bench: Bench, payload: Payload) -> None:
    store = bench.store
    assert isinstance(store, MemoryStore)
    del store._pieces["shop", payload.digest, 2]


async def _swapped(bench: Bench, payload: Payload) -> None:
    pieces = await bench.pieces(payload)
    await bench.put(payload, 1, pieces[2])
    await bench.put(payload, 2, pieces[1])


async def _first_swapped(bench: Bench, payload: Payload) -> None:
    pieces = await bench.pieces(payload)
    await bench.put(payload, 0, pieces[1])


def _piece(number: int, piece: Piece) -> Callable[[Bench, Payload], Coroutine[Any, Any, None]]:
    async def put(bench: Bench, payload: Payload) -> None:
        await bench.put(payload, number, piece)

    return put


def _head(**fields: Any) -> Callable[[Bench, Payload], Coroutine[Any, Any, None]]:
    async def put(bench: Bench, payload: Payload) -> None:
        await bench.store.put_payloads("shop", [replace(await bench.head(payload), **fields)])

    return put


DAMAGE = {
    "a missing piece": _without_a_piece,
    "two pieces in each other's place": _swapped,
    "a piece in the first one's place": _first_swapped,
    "a truncated piece": _piece(0, Piece(DATA[:9])),
    "an empty piece": _piece(0, Piece(b"")),
    "a longer piece": _piece(3, Piece(b"end.")),
    "another piece of the same length": _piece(3, Piece(b"dne")),
    "a truncated packed piece": _piece(1, Piece(zlib.compress(bytes(10))[:-6], packed=True)),
    "a packed piece without its end": _piece(1, Piece(zlib.compress(NOISE[:10])[:12], packed=True)),
    "a packed piece that is too short": _piece(1, packed(bytes(9))),
    "a packed piece that is too long": _piece(1, packed(bytes(11))),
    "a bomb": _piece(1, packed(bytes(10_000_000))),
    "bytes marked as packed": _piece(0, Piece(DATA[:10], packed=True)),
    "packed bytes marked as plain": _piece(1, Piece(zlib.compress(bytes(10)))),
    "a larger size": _head(size=34),
    "a smaller size": _head(size=32),
    "a negative size": _head(size=-1),
    "fewer pieces": _head(pieces=3),
    "more pieces": _head(pieces=5),
    "no pieces": _head(pieces=0),
    "fewer than no pieces": _head(pieces=-4),
    "one piece": _head(pieces=1),
    "one packed piece": _head(pieces=1, first=packed(DATA)),
}


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_told_and_mended_by_putting_it_right(name: str) -> None:
    async def scenario(bench: Bench) -> None:
        payload = await bench.kept(DATA)
        whole, pieces = await bench.head(payload), await bench.pieces(payload)
        await DAMAGE[name](bench, payload)
        with pytest.raises(PayloadLost, match=f"{payload.digest} is damaged: ") as caught:
            await bench.back(payload)
        assert len(str(caught.value)) < 300
        for number, piece in list(enumerate(pieces))[1:]:
            await bench.store.put_piece("shop", payload.digest, number, piece)
        await bench.store.put_payloads("shop", [whole])
        assert await bench.back(payload) == DATA

    on_memory(scenario)


def test_a_bomb_is_not_unpacked() -> None:
    """A quarter of a gigabyte in a megabyte: no more than the piece's own size is ever unpacked."""

    async def scenario(bench: Bench) -> None:
        payload = await bench.kept(bytes(2 * PIECE_BYTES))
        bomb = zlib.compressobj(1)
        data = b"".join([bomb.compress(bytes(2**20)) for _ in range(256)] + [bomb.flush()])
        await bench.put(payload, 1, Piece(data, packed=True))
        tracemalloc.start()
        try:
            with pytest.raises(PayloadLost, match="the piece 1: "):
                await bench.back(payload)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 10 * PIECE_BYTES

    on_memory(scenario)


@pytest.mark.xdist_group("mongo")
@pytest.mark.usefixtures("small_pieces")
def test_documents_that_somebody_has_edited_are_damage_and_no_crash(mongo_url: str) -> None:
    edits: list[tuple[str, dict[str, Any]]] = [
        *[("holdfast_payloads", {"$set": {name: value}}) for name in ("size", "pieces") for value in ("4", None, 4.5)],
        *[("holdfast_payloads", {"$unset": {name: ""}}) for name in ("size", "pieces", "data", "packed")],
        ("holdfast_payloads", {"$set": {"data": "text"}}),
        ("holdfast_payload_pieces", {"$set": {"data": [1]}}),
        ("holdfast_payload_pieces", {"$set": {"packed": 1}}),
        ("holdfast_payload_pieces", {"$unset": {"data": ""}}),
    ]

    async def scenario(bench: Bench) -> None:
        payload = await bench.kept(DATA)
        with MongoClient[dict[str, Any]](mongo_url) as client:
            database = client[database_of(mongo_url)]
            for collection, edit in edits:
                where = {"_id": {"$regex": payload.digest + "(\\|000002)?$"}}
                sound = {name: list(database[name].find()) for name in ("holdfast_payloads", "holdfast_payload_pieces")}
                assert database[collection].update_one(where, edit).modified_count == 1
                with pytest.raises(PayloadLost, match="is damaged"):
                    await bench.back(payload)
                assert database.holdfast_quarantine.delete_many({}).deleted_count > 0
                for name, documents in sound.items():
                    for document in documents:
                        database[name].replace_one({"_id": document["_id"]}, document, upsert=True)
                assert await bench.back(payload) == DATA

    on_store(mongo_url, scenario)


def test_a_value_that_is_collected_while_its_submit_sleeps_is_stored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host sleeps for two days between value and invocation, and others collect meanwhile."""

    async def main() -> None:
        clock = FakeClock(START)
        store = MemoryStore(clock)
        engine = make_engine(store, clock, random.Random(1), app="shop")
        packed = engine.codec.pack_call(("x" * 500,), {}, (), SizeLimits(inline=64, max_bytes=2**20), {})
        record, insert = replace(invocation("a"), arguments=packed.data), store.insert

        async def slept(records: Sequence[InvocationRecord]) -> Sequence[bool]:
            clock.advance(2 * UNWANTED_SECONDS)
            assert (await store.collect_payloads("shop", store.now() - UNWANTED_SECONDS, 100)).removed == 1
            return await insert(records)

        monkeypatch.setattr(store, "insert", slept)
        await engine.submitter.submit([record], packed.payloads)
        assert await engine.payloads.fetch(references(record.arguments))

    asyncio.run(main())


def test_a_rerun_keeps_its_value_though_the_original_is_removed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        clock = FakeClock(START)
        store = MemoryStore(clock)
        engine = make_engine(store, clock, random.Random(1), app="shop")
        packed = engine.codec.pack_call(("x" * 500,), {}, (), SizeLimits(inline=64, max_bytes=2**20), {})
        record, submit = replace(invocation("a"), arguments=packed.data), engine.submitter.submit
        await submit([record], packed.payloads)
        original = replace(record, status=Status.SUCCESS)
        clock.advance(2 * UNWANTED_SECONDS)

        async def removed(
            records: Sequence[InvocationRecord], payloads: Sequence[Payload]
        ) -> Sequence[InvocationRecord | None]:
            del store._records["shop", InvocationId("a")]
            await store.collect_payloads("shop", store.now() - UNWANTED_SECONDS, 100)
            return await submit(records, payloads)

        monkeypatch.setattr(engine.submitter, "submit", removed)
        (again,) = await Rerunner(engine).rerun([original], request="r", due_at=store.now())
        assert again.id is not None
        assert await engine.payloads.fetch(references(record.arguments))

    asyncio.run(main())
