"""The cache of payloads: what a process has read it does not read again, within its bytes, and never something else."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from tests.support.patience import patient

from holdfast import App
from holdfast.codec import Payload
from holdfast.errors import PayloadLost
from holdfast.model.records import Piece, StoredPayload
from holdfast.runtime.payloads import PIECE_BYTES, UNWANTED_SECONDS, PayloadCache, PayloadStore
from holdfast.store.memory.store import MemoryStore
from holdfast.testing.clock import FakeClock

NOISE = random.Random(7).randbytes(3 * PIECE_BYTES + 1)


class Counting(MemoryStore):
    """A store in memory that counts what is read of payloads."""

    reads = 0

    async def get_payload(self, app: str, digest: str) -> StoredPayload | None:
        self.reads += 1
        return await super().get_payload(app, digest)

    async def get_piece(self, app: str, digest: str, number: int) -> Piece | None:
        self.reads += 1
        return await super().get_piece(app, digest, number)


def payloads_of(store: MemoryStore, max_bytes: int, app: str = "shop") -> PayloadStore:
    return PayloadStore(store, app=app, chunk_threshold=1, cache=PayloadCache(max_bytes))


def test_thirty_calls_over_one_argument_read_it_once() -> None:
    async def scenario() -> None:
        store = Counting(FakeClock())
        payloads, large = payloads_of(store, len(NOISE)), Payload.of(NOISE)
        await payloads.keep([large])
        found = await asyncio.gather(*[payloads.fetch([large.reference]) for _ in range(30)])
        assert all(each[large.digest] == NOISE for each in found)
        assert store.reads == 4

    asyncio.run(scenario())


def test_a_reader_that_gives_up_does_not_take_the_payload_from_the_others() -> None:
    async def scenario() -> None:
        store = Counting(FakeClock())
        payloads, large = payloads_of(store, len(NOISE)), Payload.of(NOISE)
        await payloads.keep([large])
        first, second = (asyncio.create_task(payloads.fetch([large.reference])) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second)[large.digest] == NOISE

    asyncio.run(scenario())


def test_it_holds_so_many_bytes_and_drops_what_was_not_used_for_longest() -> None:
    cache = PayloadCache(300)
    for name in "abc":
        cache.put("shop", name, bytes(100))
    assert cache.get("shop", "a") is not None
    cache.put("shop", "d", bytes(100))
    cache.put("shop", "too large", bytes(301))
    assert [cache.get("shop", name) is not None for name in ("a", "b", "c", "d", "too large")] == [
        *(True, False, True, True, False)
    ]
    assert len(cache) == 300
    cache.put("shop", "d", bytes(100))
    assert len(cache) == 300


def test_without_bytes_each_reader_asks_the_store() -> None:
    async def scenario() -> None:
        store = Counting(FakeClock())
        payloads, large = payloads_of(store, 0), Payload.of(NOISE)
        await payloads.keep([large])
        for _ in range(2):
            await payloads.fetch([large.reference])
        assert store.reads == 8

    asyncio.run(scenario())


def test_who_has_to_know_whether_it_is_in_the_store_asks_the_store() -> None:
    async def scenario() -> None:
        clock = FakeClock()
        store = MemoryStore(clock)
        payloads, large = payloads_of(store, len(NOISE)), Payload.of(NOISE)
        await payloads.keep([large])
        await payloads.fetch([large.reference])
        clock.advance(UNWANTED_SECONDS + 1)
        assert (await payloads.collect()).removed == 1
        assert (await payloads.fetch([large.reference]))[large.digest] == NOISE
        with pytest.raises(PayloadLost):
            await payloads.fetch([large.reference], fresh=True)

    asyncio.run(scenario())


def test_calls_of_a_runner_share_one_read(tmp_path: Path) -> None:
    with App(f"sqlite:///{tmp_path}/shop.db", inline_limit=1024, chunk_threshold=1024) as app:

        @app.task(name="measure")
        def measure(data: bytes, number: int) -> int:
            return len(data) + number

        engine = app.runtime.ready()
        reads = list[str]()
        get_payload = engine.store.get_payload

        async def counted(name: str, digest: str) -> StoredPayload | None:
            reads.append(digest)
            return await get_payload(name, digest)

        engine.store.get_payload = counted  # type: ignore[method-assign]
        with app.runner(concurrency=8):
            group = measure.map([(NOISE, number) for number in range(30)])
            assert group.results(timeout=patient(60)) == [len(NOISE) + number for number in range(30)]
        assert len(reads) == 1
