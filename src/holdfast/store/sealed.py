"""A store whose values are encrypted on their way in, and opened on their way out.

It stands between the engine and any store. Above it all values are in the clear, so code that copies a value, say from
a child to the inbox of its parent, needs no keys. Below it, every value is encrypted.

A process without the key cannot copy a value that it could not open: the write raises `EncryptionKeyMissing`. Lists of
due work leave such records out: processes with the key take them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from msgspec import UNSET
from msgspec.structs import replace

from holdfast.codec import MARK
from holdfast.codec.sealing import CipherKeys, Place, is_broken, is_sealed
from holdfast.errors import CorruptRecord, EncryptionKeyMissing
from holdfast.model import sealing
from holdfast.model.changes import Change
from holdfast.model.claims import Claim, Claimed
from holdfast.model.decoding import PAYLOAD, PIECE, corrupt
from holdfast.model.log import AppendVerdict, Behind, Page
from holdfast.model.records import Entry, InvocationRecord, Piece, StoredPayload
from holdfast.store.contract import BlockingInsert, EntryOrder, Order, Store, Transaction

_CHANGED = "it was changed, or belongs to another place"


def sealed_store(store: Store, ring: CipherKeys | None) -> Store:
    """Return the store for the engine: an encrypting store, or, without keys, the guarded store itself."""
    if ring is None:
        guard(store)
        return store
    kind = SealedBlockingStore if isinstance(store, BlockingInsert) else SealedStore
    return cast(Store, kind(store, ring))


def guard(store: Any) -> None:
    """Have a store, which is used without keys, refuse to write what is encrypted, and hide it from lists of due work.
    The methods are replaced on the store itself: a call more for each operation is what an app without encryption pays.
    """
    if "is_guarded" in vars(store):
        return
    store.is_guarded = True
    checks: dict[str, Callable[[Any], None]] = {
        "insert": _check_records,
        "apply": _check_writes,
        "append": _check_pages,
        "put_entry": _check_entry,
    }
    if isinstance(store, BlockingInsert):
        checks["insert_blocking"] = _check_records
    for name, check in checks.items():
        vars(store)[name] = _checked(store, name, check)
    store.find = _without_locked(_late(store, "find"), Order.OUTBOX, sealing.missing_for_record)
    store.entries = _without_locked(_late(store, "entries"), EntryOrder.DUE, sealing.missing_for_entry)


def _late(store: Any, name: str) -> Callable[..., Any]:
    """Return a method that is looked up on the class at each call, unless the instance replaces it."""
    if name in vars(store):  # it is measured
        return cast(Callable[..., Any], vars(store)[name])
    if not hasattr(type(store), name):  # it leads to another store
        return lambda *args, **kwargs: store.__getattr__(name)(*args, **kwargs)
    return lambda *args, **kwargs: getattr(type(store), name)(store, *args, **kwargs)


def _checked(store: Any, name: str, check: Callable[[Any], None]) -> Callable[..., Any]:
    method = _late(store, name)

    def call(values: Any, *args: Any, **kwargs: Any) -> Any:
        check(values)
        return method(values, *args, **kwargs)

    return call


def _without_locked(method: Callable[..., Any], due: object, missing: Callable[[Any], str]) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        found = await method(*args, **kwargs)
        return [each for each in found if not missing(each)] if kwargs.get("order") is due and found else found

    return call


# What cannot be sealed is let through without a call: every submit and every end comes by here.


def _check_records(records: Sequence[InvocationRecord]) -> None:
    for record in records:
        is_new = record.result is None and record.error is None and record.run is None and record.notes is None
        if is_new and record.arguments[:1] != MARK and not record.errors and record.terms.follow is None:
            continue
        _refuse(sealing.missing_for_record(record), record.id)


def _check_writes(writes: Sequence[Any]) -> None:
    for write in writes:
        if isinstance(write, Change) and write.arguments is UNSET:
            result = write.result
            if not isinstance(result, bytes) or result[:1] != MARK:
                continue
        _refuse(sealing.missing_for_write(write), write.id)


def _check_pages(pages: Sequence[Page]) -> None:
    for page in pages:
        if MARK in page.events:
            _refuse(sealing.missing_for_page(page), page.run)


def _check_entry(entry: Entry) -> None:
    if entry.kind in sealing.SEALED_KINDS:
        _refuse(sealing.missing_for_entry(entry), entry.name)


class SealedStore:
    """Encrypts and decrypts around the store `below`. All other methods are those of that store."""

    def __init__(self, below: Store, ring: CipherKeys) -> None:
        self.below = below
        self.ring = ring
        self._seal = sealing.SealTurn(ring)
        self._open = sealing.OpenTurn(ring)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    # --- turning

    def records_in(self, records: Sequence[InvocationRecord]) -> list[InvocationRecord]:
        _check_records(records)
        return [sealing.turned_record(record, self._seal) for record in records]

    def record_out(self, record: InvocationRecord) -> InvocationRecord:
        return sealing.turned_record(record, self._open)

    def pages_in(self, pages: Sequence[Page]) -> list[Page]:
        return [sealing.turned_page(page, self._seal) for page in pages]

    def verdict_out(self, verdict: AppendVerdict) -> AppendVerdict:
        if not isinstance(verdict, Behind):
            return verdict
        return Behind(tuple(sealing.turned_page(page, self._open) for page in verdict.pages))

    def entry_in(self, entry: Entry) -> Entry:
        _check_entry(entry)
        return sealing.turned_entry(entry, self._seal)

    def entry_out(self, entry: Entry) -> Entry:
        return sealing.turned_entry(entry, self._open)

    def payload_in(self, app: str, payload: StoredPayload) -> StoredPayload:
        place = _place_of_first(app, payload)
        return replace(payload, first=replace(payload.first, data=self.ring.seal(payload.first.data, place)))

    # --- invocations

    async def insert(self, records: Sequence[InvocationRecord]) -> Sequence[bool]:
        return await self.below.insert(self.records_in(records))

    async def find_conflicts(self, records: Sequence[InvocationRecord]) -> Sequence[InvocationRecord | None]:
        found = await self.below.find_conflicts(records)
        return [None if record is None else self.record_out(record) for record in found]

    async def claim(self, claim: Claim) -> Claimed:
        claimed = await self.below.claim(claim)
        return replace(claimed, records=tuple(map(self.record_out, claimed.records))) if claimed.records else claimed

    async def release_waiters(self, *args: Any, **kwargs: Any) -> Sequence[InvocationRecord]:
        return list(map(self.record_out, await self.below.release_waiters(*args, **kwargs)))

    async def apply(self, changes: Sequence[Any]) -> Sequence[Any]:
        _check_writes(changes)
        return await self.below.apply([sealing.sealed_write(write, self._seal) for write in changes])

    async def get(self, app: str, ids: Sequence[Any]) -> Sequence[InvocationRecord | None]:
        return [None if record is None else self.record_out(record) for record in await self.below.get(app, ids)]

    async def find(
        self, *args: Any, order: Order = Order.NEWEST, set_aside: bool = False
    ) -> Sequence[InvocationRecord]:
        found = [self.record_out(each) for each in await self.below.find(*args, order=order, set_aside=set_aside)]
        if order is Order.OUTBOX:
            return [record for record in found if not sealing.missing_for_record(record)]
        return found

    # --- logs

    async def append(self, pages: Sequence[Page]) -> Sequence[AppendVerdict]:
        return list(map(self.verdict_out, await self.below.append(self.pages_in(pages))))

    async def read_log(self, *args: Any, **kwargs: Any) -> Sequence[Page]:
        return [sealing.turned_page(page, self._open) for page in await self.below.read_log(*args, **kwargs)]

    # --- payloads

    async def put_payloads(self, app: str, payloads: Sequence[StoredPayload]) -> None:
        await self.below.put_payloads(app, [self.payload_in(app, payload) for payload in payloads])

    async def put_piece(self, app: str, digest: str, number: int, piece: Piece) -> None:
        data = self.ring.seal(piece.data, _place_of_piece(app, digest, number, piece.packed))
        await self.below.put_piece(app, digest, number, replace(piece, data=data))

    async def get_payload(self, app: str, digest: str) -> StoredPayload | None:
        stored = await self.below.get_payload(app, digest)
        if stored is None or not is_sealed(stored.first.data):
            return stored
        data = self._opened(stored.first.data, _place_of_first(app, stored), PAYLOAD, digest)
        return replace(stored, first=replace(stored.first, data=data), is_sealed=True)

    async def get_piece(self, app: str, digest: str, number: int) -> Piece | None:
        piece = await self.below.get_piece(app, digest, number)
        if piece is None or not is_sealed(piece.data):
            return piece
        place = _place_of_piece(app, digest, number, piece.packed)
        return replace(piece, data=self._opened(piece.data, place, PIECE, f"{digest}#{number}"))

    def _opened(self, data: bytes, place: Place, kind: str, id: str) -> bytes:
        opened = self.ring.open(data, place)
        if is_broken(opened):
            raise corrupt(kind, id, ValueError(_CHANGED))
        if is_sealed(opened):
            _refuse(sealing.missing_key(opened), f"the payload {id}")
        return opened

    # --- entries

    async def put_entry(self, entry: Entry, over: Entry | None = None) -> bool:
        fresh = self.entry_in(entry)
        if over is None:
            return await self.below.put_entry(fresh)
        return await self._as_stored(over, lambda there: self.below.put_entry(fresh, there))

    async def entries(
        self,
        app: str,
        kind: str,
        names: Sequence[str] | None = None,
        *,
        order: EntryOrder = EntryOrder.NAME,
        **more: Any,
    ) -> Sequence[Entry]:
        found = await self.below.entries(app, kind, names, order=order, **more)
        if kind not in sealing.SEALED_KINDS:
            return found
        opened = [self.entry_out(entry) for entry in found]
        if order is EntryOrder.DUE:
            return [entry for entry in opened if not sealing.missing_for_entry(entry)]
        return opened

    async def remove_entry(self, entry: Entry) -> bool:
        return await self._as_stored(entry, self.below.remove_entry)

    async def quarantine_entry(self, entry: Entry, error: CorruptRecord) -> bool:
        return await self._as_stored(entry, lambda there: self.below.quarantine_entry(there, error))

    async def _as_stored(self, entry: Entry, act: Callable[[Entry], Any]) -> bool:
        """Apply `act` to the entry as it is stored: sealed with the newest key or an older key, or in the clear."""
        if entry.kind not in sealing.SEALED_KINDS:
            return bool(await act(entry))
        tried: set[bytes] = set()
        for turn in [*(sealing.SealTurn(self.ring.beginning_with(id)) for id in self.ring.ids), None]:
            there = entry if turn is None else sealing.turned_entry(entry, turn)
            if there.body not in tried and await act(there):
                return True
            tried.add(there.body)
        return False

    # --- transactions of users

    def joined(self, session: object) -> Transaction:
        return cast(Transaction, SealedTransaction(self.below.joined(session), self))


class SealedBlockingStore(SealedStore):
    """The same for a store that other threads may write to without the engine."""

    def insert_blocking(self, records: Sequence[InvocationRecord], committed: Callable[[], object]) -> Sequence[bool]:
        return cast(BlockingInsert, self.below).insert_blocking(self.records_in(records), committed)


class SealedTransaction:
    """A user's own transaction, into which values are written encrypted."""

    def __init__(self, below: Transaction, store: SealedStore) -> None:
        self._below = below
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    def insert(self, records: Sequence[InvocationRecord], stored: Sequence[StoredPayload]) -> Sequence[Any]:
        found = self._below.insert(self._store.records_in(records), self._payloads(records, stored))
        return [each and self._store.record_out(each) for each in found]

    async def ainsert(self, records: Sequence[InvocationRecord], stored: Sequence[StoredPayload]) -> Sequence[Any]:
        found = await self._below.ainsert(self._store.records_in(records), self._payloads(records, stored))
        return [each and self._store.record_out(each) for each in found]

    def put_entries(self, entries: Sequence[Entry], stored: Sequence[StoredPayload] = ()) -> Sequence[Entry | None]:
        sealed = list(map(self._store.entry_in, entries))
        found = self._below.put_entries(sealed, self._payloads(entries, stored))
        return [each and self._store.entry_out(each) for each in found]

    async def aput_entries(
        self, entries: Sequence[Entry], stored: Sequence[StoredPayload] = ()
    ) -> Sequence[Entry | None]:
        sealed = list(map(self._store.entry_in, entries))
        found = await self._below.aput_entries(sealed, self._payloads(entries, stored))
        return [each and self._store.entry_out(each) for each in found]

    def append(self, pages: Sequence[Page], stored: Sequence[StoredPayload]) -> Sequence[AppendVerdict]:
        verdicts = self._below.append(self._store.pages_in(pages), self._payloads(pages, stored))
        return list(map(self._store.verdict_out, verdicts))

    async def aappend(self, pages: Sequence[Page], stored: Sequence[StoredPayload]) -> Sequence[AppendVerdict]:
        verdicts = await self._below.aappend(self._store.pages_in(pages), self._payloads(pages, stored))
        return list(map(self._store.verdict_out, verdicts))

    def _payloads(self, written: Sequence[Any], stored: Sequence[StoredPayload]) -> list[StoredPayload]:
        return [self._store.payload_in(written[0].app, payload) for payload in stored]


def _place_of_first(app: str, payload: StoredPayload) -> Place:
    piece = _place_of_piece(app, payload.digest, 0, payload.first.packed)
    return piece._replace(field=f"{piece.field}/{payload.pieces}/{payload.size}")


def _place_of_piece(app: str, digest: str, number: int, packed: bool) -> Place:
    return Place(app, f"payload/{digest}", f"{number}/{int(packed)}")


def _refuse(key: str, what: str) -> None:
    if key:
        raise EncryptionKeyMissing(
            f"{what} has a value that is encrypted with the key '{key}', which this process lacks: see "
            "encryption_keys. A process with that key can do it."
        )
