"""A store whose values are encrypted on their way in, and opened on their way out.

It stands between the engine and any store. Above it all values are as users gave them, so code that passes a value on,
from a child to the inbox of its parent say, need not know of keys; below it, whatever the place, they are encrypted.

It is there without keys too: then it lets everything pass, except that it refuses to store at another place what is
encrypted and was not opened here (`EncryptionKeyMissing`). Lists of work that is due leave such records to processes
with the key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from msgspec.structs import replace

from holdfast.codec.sealing import KeyRing, Place, is_broken, is_sealed
from holdfast.errors import CorruptRecord, EncryptionKeyMissing
from holdfast.model.claims import Claim, Claimed
from holdfast.model.decoding import PAYLOAD, PIECE, corrupt
from holdfast.model.log import AppendVerdict, Behind, Page
from holdfast.model.records import Entry, InvocationRecord, Piece, StoredPayload
from holdfast.store import sealing
from holdfast.store.contract import BlockingInsert, EntryOrder, Order, Store, Transaction

_READS = ("find_conflicts", "claim", "release_waiters", "read_log", "get", "get_payload", "get_piece")
_WRITES = ("put_piece", "put_payloads", "remove_entry", "quarantine_entry")
_CHANGED = "it was changed, or belongs to another place"


def sealed_store(store: Store, ring: KeyRing | None) -> Store:
    """Return the store as the engine is to see it."""
    kind = SealedBlockingStore if isinstance(store, BlockingInsert) else SealedStore
    return cast(Store, kind(store, ring))


class SealedStore:
    """A store with another one below it. What is not here, that one does."""

    def __init__(self, below: Store, ring: KeyRing | None) -> None:
        self.below = below
        self.ring = ring
        self._seal = None if ring is None else sealing.SealTurn(ring)
        self._open = None if ring is None else sealing.OpenTurn(ring)
        if ring is None:
            for name in (*_READS, *_WRITES):
                setattr(self, name, getattr(below, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    # --- turning

    def _in(self, records: Sequence[InvocationRecord]) -> list[InvocationRecord]:
        for record in records:
            _refuse(sealing.missing_for_record(record), record.id)
        seal = self._seal
        return list(records) if seal is None else [sealing.turned_record(record, seal) for record in records]

    def _out(self, record: InvocationRecord) -> InvocationRecord:
        return record if self._open is None else sealing.turned_record(record, self._open)

    def _pages_in(self, pages: Sequence[Page]) -> list[Page]:
        if self._seal is None:
            for page in pages:
                if b"\xc1" in page.events:
                    _refuse(sealing.missing_for_page(page), page.run)
            return list(pages)
        return [sealing.turned_page(page, self._seal) for page in pages]

    def _verdicts_out(self, verdicts: Sequence[AppendVerdict]) -> Sequence[AppendVerdict]:
        opens = self._open
        if opens is None:
            return verdicts
        return [
            Behind(tuple(sealing.turned_page(page, opens) for page in each.pages)) if isinstance(each, Behind) else each
            for each in verdicts
        ]

    def _entry_in(self, entry: Entry) -> Entry:
        if entry.kind in sealing.SEALED_KINDS:
            _refuse(sealing.missing_for_entry(entry), entry.name)
        return entry if self._seal is None else sealing.turned_entry(entry, self._seal)

    def _entry_out(self, entry: Entry) -> Entry:
        return entry if self._open is None else sealing.turned_entry(entry, self._open)

    def _payload_in(self, app: str, payload: StoredPayload) -> StoredPayload:
        if self.ring is None:
            return payload
        place = _place_of_first(app, payload)
        return replace(payload, first=replace(payload.first, data=self.ring.seal(payload.first.data, place)))

    # --- invocations

    async def insert(self, records: Sequence[InvocationRecord]) -> Sequence[bool]:
        return await self.below.insert(self._in(records))

    async def find_conflicts(self, records: Sequence[InvocationRecord]) -> Sequence[InvocationRecord | None]:
        found = await self.below.find_conflicts(records)
        return [None if record is None else self._out(record) for record in found]

    async def claim(self, claim: Claim) -> Claimed:
        claimed = await self.below.claim(claim)
        return replace(claimed, records=tuple(map(self._out, claimed.records))) if claimed.records else claimed

    async def release_waiters(self, *args: Any, **kwargs: Any) -> Sequence[InvocationRecord]:
        return list(map(self._out, await self.below.release_waiters(*args, **kwargs)))

    async def apply(self, changes: Sequence[Any]) -> Sequence[Any]:
        for write in changes:
            _refuse(sealing.missing_for_write(write), write.id)
        seal = self._seal
        return await self.below.apply(
            changes if seal is None else [sealing.sealed_write(write, seal) for write in changes]
        )

    async def get(self, app: str, ids: Sequence[Any]) -> Sequence[InvocationRecord | None]:
        return [None if record is None else self._out(record) for record in await self.below.get(app, ids)]

    async def find(
        self, *args: Any, order: Order = Order.NEWEST, set_aside: bool = False
    ) -> Sequence[InvocationRecord]:
        found = [self._out(each) for each in await self.below.find(*args, order=order, set_aside=set_aside)]
        if order is Order.OUTBOX:
            return [record for record in found if not sealing.missing_for_record(record)]
        return found

    # --- logs

    async def append(self, pages: Sequence[Page]) -> Sequence[AppendVerdict]:
        return self._verdicts_out(await self.below.append(self._pages_in(pages)))

    async def read_log(self, *args: Any, **kwargs: Any) -> Sequence[Page]:
        opens = cast(sealing.OpenTurn, self._open)
        return [sealing.turned_page(page, opens) for page in await self.below.read_log(*args, **kwargs)]

    # --- payloads

    async def put_payloads(self, app: str, payloads: Sequence[StoredPayload]) -> None:
        await self.below.put_payloads(app, [self._payload_in(app, payload) for payload in payloads])

    async def put_piece(self, app: str, digest: str, number: int, piece: Piece) -> None:
        ring = cast(KeyRing, self.ring)
        data = ring.seal(piece.data, _place_of_piece(app, digest, number, piece.packed))
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
        opened = cast(KeyRing, self.ring).open(data, place)
        if is_broken(opened):
            raise corrupt(kind, id, ValueError(_CHANGED))
        if is_sealed(opened):
            _refuse(sealing.missing_key(opened), f"the payload {id}")
        return opened

    # --- entries

    async def put_entry(self, entry: Entry, over: Entry | None = None) -> bool:
        fresh = self._entry_in(entry)
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
        opened = [self._entry_out(entry) for entry in found]
        if order is EntryOrder.DUE:
            return [entry for entry in opened if not sealing.missing_for_entry(entry)]
        return opened

    async def remove_entry(self, entry: Entry) -> bool:
        return await self._as_stored(entry, self.below.remove_entry)

    async def quarantine_entry(self, entry: Entry, error: CorruptRecord) -> bool:
        return await self._as_stored(entry, lambda there: self.below.quarantine_entry(there, error))

    async def _as_stored(self, entry: Entry, act: Callable[[Entry], Any]) -> bool:
        """Do it to the entry as it is stored: with the newest key, an older one, or from before there were keys."""
        if self.ring is None or entry.kind not in sealing.SEALED_KINDS:
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

    def records_in(self, records: Sequence[InvocationRecord]) -> list[InvocationRecord]:
        return self._in(records)

    def record_out(self, record: InvocationRecord | None) -> InvocationRecord | None:
        return None if record is None else self._out(record)

    def payloads_in(self, app: str, stored: Sequence[StoredPayload]) -> list[StoredPayload]:
        return [self._payload_in(app, payload) for payload in stored]

    def entries_in(self, entries: Sequence[Entry]) -> list[Entry]:
        return [self._entry_in(entry) for entry in entries]

    def entry_out(self, entry: Entry | None) -> Entry | None:
        return None if entry is None else self._entry_out(entry)

    def pages_in(self, pages: Sequence[Page]) -> list[Page]:
        return self._pages_in(pages)

    def verdicts_out(self, verdicts: Sequence[AppendVerdict]) -> Sequence[AppendVerdict]:
        return self._verdicts_out(verdicts)


class SealedBlockingStore(SealedStore):
    """The same for a store that other threads may write to without the engine."""

    def insert_blocking(self, records: Sequence[InvocationRecord], committed: Callable[[], object]) -> Sequence[bool]:
        return cast(BlockingInsert, self.below).insert_blocking(self._in(records), committed)


class SealedTransaction:
    """A user's own transaction, into which values are written encrypted."""

    def __init__(self, below: Transaction, store: SealedStore) -> None:
        self._below = below
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    def insert(self, records: Sequence[InvocationRecord], stored: Sequence[StoredPayload]) -> Sequence[Any]:
        found = self._below.insert(self._store.records_in(records), self._payloads(records, stored))
        return list(map(self._store.record_out, found))

    async def ainsert(self, records: Sequence[InvocationRecord], stored: Sequence[StoredPayload]) -> Sequence[Any]:
        found = await self._below.ainsert(self._store.records_in(records), self._payloads(records, stored))
        return list(map(self._store.record_out, found))

    def put_entries(self, entries: Sequence[Entry], stored: Sequence[StoredPayload] = ()) -> Sequence[Entry | None]:
        found = self._below.put_entries(self._store.entries_in(entries), self._payloads(entries, stored))
        return list(map(self._store.entry_out, found))

    async def aput_entries(
        self, entries: Sequence[Entry], stored: Sequence[StoredPayload] = ()
    ) -> Sequence[Entry | None]:
        found = await self._below.aput_entries(self._store.entries_in(entries), self._payloads(entries, stored))
        return list(map(self._store.entry_out, found))

    def append(self, pages: Sequence[Page], stored: Sequence[StoredPayload]) -> Sequence[AppendVerdict]:
        verdicts = self._below.append(self._store.pages_in(pages), self._payloads(pages, stored))
        return self._store.verdicts_out(verdicts)

    async def aappend(self, pages: Sequence[Page], stored: Sequence[StoredPayload]) -> Sequence[AppendVerdict]:
        verdicts = await self._below.aappend(self._store.pages_in(pages), self._payloads(pages, stored))
        return self._store.verdicts_out(verdicts)

    def _payloads(self, with_: Sequence[Any], stored: Sequence[StoredPayload]) -> list[StoredPayload]:
        return self._store.payloads_in(with_[0].app, stored) if stored else []


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
