"""Questions about the store itself: where and how large it is, its schema, its check, and what was set aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast.masking import mask_url
from holdfast.model.records import Quarantined
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.showing import fields, moment, without_secrets
from holdfast.store.contract import Finding
from holdfast.web.documents import Document

_MOST_APPS = 100
LONGEST_RAW = 10_000  # characters that are shown of a record that was set aside


class StoreFacts(NamedTuple):
    """A store. `sizes` are in bytes, by what takes them; empty where the store does not say."""

    url: str
    schema_version: int
    now: float
    clock_error: float
    apps: Sequence[str]
    sizes: Mapping[str, int]

    def document(self) -> Document:
        return {
            "url": self.url,
            "schema_version": self.schema_version,
            "now": moment(self.now),
            "clock_error": self.clock_error,
            "apps": list(self.apps),
            "sizes": dict(self.sizes),
        }


class CheckedStore(NamedTuple):
    """The findings of a check."""

    url: str
    findings: Sequence[Finding]

    @property
    def is_well(self) -> bool:
        return all(finding.ok for finding in self.findings)

    def document(self) -> Document:
        return {"url": self.url, "ok": self.is_well, "findings": [fields(finding) for finding in self.findings]}


class AsideList(NamedTuple):
    """Records that could not be read, latest first. `has_more`: there are others."""

    records: Sequence[Quarantined]
    has_more: bool

    def document(self) -> Document:
        return {"records": [aside_document(each) for each in self.records], "has_more": self.has_more}


def aside_document(record: Quarantined) -> Document:
    """Return a record that was set aside; of its contents, as much as a reader can take in."""
    raw = without_secrets(record.raw[:LONGEST_RAW])
    return fields(record, "id", "kind", "at", "why") | {"raw": raw, "characters": len(record.raw)}


class StoreReading:
    """Ask for the store. Each method runs on the engine's loop."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime

    async def facts(self) -> StoreFacts:
        store = (await self._runtime.engine()).store
        measure = getattr(store, "sizes", None)
        return StoreFacts(
            url=mask_url(self._runtime.url),
            schema_version=store.schema_version,
            now=store.now(),
            clock_error=store.clock_error(),
            apps=(await store.apps())[:_MOST_APPS],
            sizes={} if measure is None else await measure(),
        )

    async def check(self) -> CheckedStore:
        """Look at the store as `holdfast store check` does, and not deeper: that reads a bounded part of it."""
        store = (await self._runtime.engine()).store
        return CheckedStore(mask_url(self._runtime.url), await store.check())

    async def aside(self, limit: int) -> AsideList:
        engine = await self._runtime.engine()
        found = await engine.store.quarantined(engine.app, latest=limit + 1)
        return AsideList(found[:limit], len(found) > limit)
