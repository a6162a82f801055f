"""Payloads: large values are stored beside the records, before a record refers to them.

To keep payloads is to mark them as wanted, and to put the missing ones. Then the record that refers to them is written.
A crash in between leaves payloads without a reference, which are collected after a day. A payload that is being
collected at that moment is either spared or put again (see `Store.collect_payloads`).

Above `chunk_threshold` the bytes are cut into pieces of a fixed size, each compressed by itself: the content of a piece
depends on nothing but the payload, so two writers may mix, and neither side ever holds a second copy of the whole. A
fetched payload is checked against its name: its size before anything is unpacked, its digest at the end.

Costs: keeping what is there one round trip, putting one more per batch or piece; fetching one per payload and piece.
What was fetched stays in memory for a while (`PayloadCache`), so thirty calls over one large argument read it once.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from weakref import WeakValueDictionary

from holdfast.clock import format_duration
from holdfast.codec import Payload, Reference
from holdfast.errors import CorruptRecord, PayloadLost, StoreUnavailable
from holdfast.model.records import Collected, Piece, StoredPayload
from holdfast.store.contract import Store

PIECE_BYTES = 2**20  # a part of every stored name: another size would need other names
UNWANTED_SECONDS = 86_400.0
_AT_ONCE = 2  # pieces: one is committed while the other is on its way; more would take more memory
_BATCH_BYTES = 8 * 2**20
_STALE_SECONDS = UNWANTED_SECONDS / 2  # pieces that were put so long ago may be collected before their payload comes
_TRIES = 3
_LEVEL = 1  # of compression: most of the gain for a fifth of the time
_SAMPLE_BYTES = 16 * 2**10
_QUICK_BYTES = 256 * 2**10  # what is smaller is hashed on the spot


class PayloadCache:
    """Payloads that this process has read, up to a number of bytes; the least recently used are dropped first. A
    payload is named by its content, so what is here is never out of date. Used on one event loop.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._payloads: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def __len__(self) -> int:
        """Return how many bytes it holds."""
        return self._bytes

    def takes(self, size: int) -> bool:
        return size <= self._max_bytes

    def get(self, app: str, digest: str) -> bytes | None:
        data = self._payloads.get((app, digest))
        if data is not None:
            self._payloads.move_to_end((app, digest))
        return data

    def put(self, app: str, digest: str, data: bytes) -> None:
        if not self.takes(len(data)) or (app, digest) in self._payloads:
            return
        self._payloads[app, digest] = data
        self._bytes += len(data)
        while self._bytes > self._max_bytes:
            _, gone = self._payloads.popitem(last=False)
            self._bytes -= len(gone)

    def turn(self, app: str, digest: str) -> asyncio.Lock:
        """Return the lock under which a payload is read: the next reader finds it here."""
        return self._turns.setdefault((app, digest), asyncio.Lock())


class PayloadStore:
    def __init__(self, store: Store, *, app: str, chunk_threshold: int, cache: PayloadCache | None = None) -> None:
        self._store = store
        self._app = app
        self._chunk_threshold = chunk_threshold
        self._cache = PayloadCache(0) if cache is None else cache

    async def keep(self, payloads: Iterable[Payload]) -> None:
        """Put these payloads into the store, where no collector removes them within a day."""
        wanted = {payload.digest: payload for payload in payloads}
        for _ in range(_TRIES if wanted else 0):
            began = self._store.now()
            there = await self._store.keep_payloads(self._app, tuple(wanted))
            missing = [payload for payload, found in zip(wanted.values(), there, strict=True) if not found]
            for batch in _batches(missing, self._chunk_threshold):
                await self._put(batch)
            if self._is_recent(began):
                return
        if wanted:
            raise _too_slow(wanted.values())

    def _is_recent(self, began: float) -> bool:
        """Return whether payloads wanted at that time may be relied on. By the store's time, as collectors go by that,
        and a monotonic clock may stand still while its host sleeps.
        """
        return self._store.now() - began < _STALE_SECONDS

    async def _put(self, batch: Sequence[Payload]) -> None:
        """Put payloads, and do it again if it took so long (the host was suspended, say) that their first pieces may
        have been collected.
        """
        for _ in range(_TRIES):
            began = self._store.now()
            stored = [await self._put_pieces(payload) for payload in batch]
            if self._is_recent(began):
                await self._store.put_payloads(self._app, stored)
                if self._is_recent(began):
                    return
        raise _too_slow(batch)

    async def _put_pieces(self, payload: Payload) -> StoredPayload:
        """Put all pieces but the first, which comes with the payload."""
        digest, data = payload
        if len(data) <= self._chunk_threshold:
            return StoredPayload(digest=digest, size=len(data), pieces=1, first=Piece(data))
        count = -(-len(data) // PIECE_BYTES)
        for start in range(1, count, _AT_ONCE):
            numbers = range(start, min(start + _AT_ONCE, count))
            pieces = await asyncio.to_thread(_cut, data, numbers)
            await asyncio.gather(*[self._store.put_piece(self._app, digest, n, pieces.pop(0)) for n in numbers])
        (first,) = await asyncio.to_thread(_cut, data, [0])
        return StoredPayload(digest=digest, size=len(data), pieces=count, first=first)

    async def fetch(self, references: Sequence[Reference], *, fresh: bool = False) -> dict[str, bytes]:
        """Return the payloads by digest, from memory if they are there; `fresh`, only from the store. Raises
        `PayloadLost` for a missing payload, and for one with other bytes than its name says.
        """
        found: dict[str, bytes] = {}
        for digest, size in references:
            if digest not in found:
                is_kept = not fresh and self._cache.takes(size)
                found[digest] = await (self._fetch_once(digest, size) if is_kept else self._fetch(digest, size))
        return found

    async def _fetch_once(self, digest: str, size: int) -> bytes:
        """Return a payload. Concurrent callers share one read."""
        if (data := self._cache.get(self._app, digest)) is not None and len(data) == size:
            return data
        async with self._cache.turn(self._app, digest):
            data = self._cache.get(self._app, digest)
            if data is None or len(data) != size:
                data = await self._fetch(digest, size)
                self._cache.put(self._app, digest, data)
            return data

    async def _fetch(self, digest: str, size: int) -> bytes:
        try:
            stored = await self._store.get_payload(self._app, digest)
        except CorruptRecord as error:
            raise _damaged(digest, str(error)) from error
        if stored is None:
            raise PayloadLost(f"the payload {digest} ({size:,} bytes) is not in the store")
        if stored.size != size or stored.pieces != (1 if stored.pieces == 1 else -(-size // PIECE_BYTES)):
            raise _damaged(digest, f"{stored.size:,} bytes in {stored.pieces} pieces instead of {size:,} bytes")
        if stored.pieces == 1 and not stored.first.packed:
            data = stored.first.data
        else:
            data = await self._assembled(stored)
        is_its_own = stored.is_sealed or await _aside(len(data), lambda: hashlib.sha256(data).hexdigest()) == digest
        if len(data) != size or not is_its_own:
            raise _damaged(digest, "its content has changed")
        return data

    async def _assembled(self, stored: StoredPayload) -> bytes:
        # Of its final size, so that it need not move while it grows; what is not written yet takes no memory. At the
        # end it hands its buffer over without a copy.
        whole = io.BytesIO(bytes(stored.size))
        for number in range(stored.pieces):
            expected = min(PIECE_BYTES, stored.size - number * PIECE_BYTES)
            try:
                piece = stored.first if number == 0 else await self._store.get_piece(self._app, stored.digest, number)
                if piece is None:
                    raise _damaged(stored.digest, f"the piece {number} of {stored.pieces} is missing")
                whole.write(await asyncio.to_thread(_unpacked, piece, expected))
            except (CorruptRecord, zlib.error, ValueError) as error:
                raise _damaged(stored.digest, f"the piece {number}: {error}") from error
        return whole.getvalue()

    async def collect(self, limit: int = 200) -> Collected:
        """Remove payloads that were not wanted for a day and to which nothing refers; look at a bounded number."""
        return await self._store.collect_payloads(self._app, self._store.now() - UNWANTED_SECONDS, limit)


def whole(payloads: Iterable[Payload]) -> list[StoredPayload]:
    """Return payloads in one piece each, for a store that takes them with the record, in one transaction."""
    each = {payload.digest: payload.data for payload in payloads}
    return [StoredPayload(digest=name, size=len(data), pieces=1, first=Piece(data)) for name, data in each.items()]


def _too_slow(payloads: Iterable[Payload]) -> StoreUnavailable:
    size = sum(len(payload.data) for payload in payloads)
    return StoreUnavailable(
        f"{size:,} bytes could not be stored within {format_duration(_STALE_SECONDS)}, {_TRIES} times; after that the "
        "first of them may be collected before the last has come. The way to the store is too slow for this size."
    )


def _damaged(digest: str, why: str) -> PayloadLost:
    return PayloadLost(f"the payload {digest} is damaged: {why}")


def _cut(data: bytes, numbers: Iterable[int]) -> list[Piece]:
    view = memoryview(data)
    return [_packed(view[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]) for number in numbers]


def _packed(part: memoryview) -> Piece:
    """Compress a part, if that makes it smaller. Three samples decide, as most incompressible data is so throughout."""
    starts = (0, len(part) // 2, max(0, len(part) - _SAMPLE_BYTES))
    samples = [part[start : start + _SAMPLE_BYTES] for start in starts]
    if any(len(zlib.compress(sample, _LEVEL)) < 0.97 * len(sample) for sample in samples):
        packed = zlib.compress(part, _LEVEL)
        if len(packed) < len(part):
            return Piece(packed, packed=True)
    return Piece(bytes(part))


def _unpacked(piece: Piece, expected: int) -> bytes:
    """Return the bytes of a piece, up to a limit: a decompression bomb is not unpacked."""
    if not piece.packed:
        data = piece.data
    else:
        machine = zlib.decompressobj()
        data = machine.decompress(piece.data, expected + 1)
    if len(data) != expected:
        raise ValueError(f"{len(data):,} bytes or more instead of {expected:,}")
    return data


async def _aside(size: int, work: Callable[[], str]) -> str:
    return work() if size <= _QUICK_BYTES else await asyncio.to_thread(work)


def _batches(payloads: Sequence[Payload], alone: int) -> Iterator[list[Payload]]:
    """Group payloads for one write each. Payloads of several pieces go alone."""
    batch: list[Payload] = []
    size = 0
    for payload in payloads:
        if batch and size + len(payload.data) > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(payload)
        size += len(payload.data) if len(payload.data) <= alone else _BATCH_BYTES
    if batch:
        yield batch
