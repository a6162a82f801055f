"""Questions about ended invocations: which there are, and how long they are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.archive.api import Archive, ArchiveFilter
from holdfast.model.records import InvocationRecord
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.showing import fields, moment
from holdfast.web.documents import Document


class ArchiveList(NamedTuple):
    """Ended invocations, latest end first, and the cursor of the next page. A page may have fewer than were asked for
    while there are more: a search looks at a bounded number of records at a time.
    """

    records: Sequence[InvocationRecord]
    before: str | None

    def document(self) -> Document:
        return {"invocations": [ended_document(record) for record in self.records], "before": self.before}


class ArchiveReading:
    """Ask for ended invocations. Each method runs on the engine's loop."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._archive = Archive(runtime)

    async def page(self, where: ArchiveFilter, *, limit: int = 50, before: str | None = None) -> ArchiveList:
        records, place = await self._archive.page(limit, before, where)
        return ArchiveList(records, place and place[1])


def ended_document(record: InvocationRecord) -> Document:
    error = record.error
    same = ("id", "task", "status", "queue", "tags", "key", "created_at", "retain_until", "attempt", "reason")
    return fields(record, *same, "rerun_of") | {
        "ended_at": moment(record.changed_at),
        "error": error and {"type": error.type_name, "message": error.message},
    }
