"""Which keys the values in a store are encrypted with: whether a key may be dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from holdfast.codec.sealing import head_of
from holdfast.errors import CorruptRecord
from holdfast.ids import InvocationId
from holdfast.model.records import InvocationRecord
from holdfast.model.sealing import SEALED_KINDS, KeyCollector, turned_entry, turned_page, turned_record
from holdfast.store.contract import Filter, Store

_AT_ONCE = 500
_STREAM = "stream"  # the kind of an entry that says that there is a stream


class KeyUse(msgspec.Struct):
    """What has values under a key, by its id; empty: values in the clear."""

    key: str
    invocations: int = 0
    entries: int = 0
    pages: int = 0
    payloads: int = 0

    @property
    def total(self) -> int:
        return self.invocations + self.entries + self.pages + self.payloads


class KeySurvey:
    """Reads everything of an app, as it is stored."""

    def __init__(self, store: Store, app: str) -> None:
        self._store: Store = getattr(store, "below", store)
        self._app = app
        self._counts: Counter[tuple[str, str]] = Counter()
        self._payloads: set[str] = set()

    async def run(self, known: Iterable[str]) -> list[KeyUse]:
        """Return what each key is used for; of the `known` ones, also if it is nothing."""
        await self._records()
        for kind in sorted(SEALED_KINDS):
            for entry in await self._store.entries(self._app, kind):
                collector = KeyCollector()
                turned_entry(entry, collector)
                self._count("entries", collector)
                await self._look_at(entry.payloads)
        for entry in await self._store.entries(self._app, _STREAM):
            await self._log(InvocationId(entry.name), 0)
        used = {key for key, _ in self._counts}
        return [self._use_of(key) for key in [*known, *sorted(used.difference(known))]]

    def _use_of(self, key: str) -> KeyUse:
        return KeyUse(key, **{name: self._counts[key, name] for name in KeyUse.__struct_fields__[1:]})

    def _count(self, what: str, collector: KeyCollector) -> None:
        self._counts.update((key, what) for key in collector.keys)

    async def _records(self) -> None:
        before: str | None = None
        while found := await self._store.find(self._app, Filter(before_id=before), _AT_ONCE):
            for record in found:
                await self._record(record)
            before = found[-1].id

    async def _record(self, record: InvocationRecord) -> None:
        collector = KeyCollector()
        turned_record(record, collector)
        self._count("invocations", collector)
        await self._look_at(record.payloads)
        if record.run is not None:
            await self._log(record.id, record.run.generation)

    async def _log(self, log: InvocationId, generation: int) -> None:
        after = 0
        try:
            while pages := await self._store.read_log(
                self._app, log, generation=generation, after=after, limit=_AT_ONCE
            ):
                for page in pages:
                    collector = KeyCollector()
                    turned_page(page, collector)
                    self._count("pages", collector)
                    await self._look_at(page.payloads)
                after = pages[-1].last
        except CorruptRecord:  # `store check` reports it
            return

    async def _look_at(self, digests: Iterable[str]) -> None:
        for digest in digests:
            if digest not in self._payloads:
                self._payloads.add(digest)
                stored = await self._store.get_payload(self._app, digest)
                if stored is not None:
                    head = head_of(stored.first.data)
                    self._counts["" if head is None else head.key, "payloads"] += 1
