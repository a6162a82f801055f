"""Questions about groups: which there are, and how far their members have come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast.errors import InvocationNotFound
from holdfast.groups.looking import GroupAccess, callback_id, state_of
from holdfast.groups.records import GroupRecord
from holdfast.groups.rules import member_ids
from holdfast.groups.service import Groups
from holdfast.ids import InvocationId
from holdfast.model.status import Status
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.wait import get_readable
from holdfast.showing import fields
from holdfast.web.documents import Document

_AT_ONCE = 500


class GroupPage(NamedTuple):
    """Groups, newest first, and the cursor of the next page; None if there is none."""

    groups: Sequence[GroupRecord]
    before: str | None

    def document(self) -> Document:
        return {"groups": [group_document(each) for each in self.groups], "before": self.before}


class WholeGroup(NamedTuple):
    """A group, its first and last members, and the statuses of the first `counted` of them."""

    record: GroupRecord
    first: InvocationId | None
    last: InvocationId | None
    counts: Mapping[Status, int]
    counted: int

    def document(self) -> Document:
        counts = {status.value: count for status, count in self.counts.items()}
        ends = {"first": self.first, "last": self.last}
        return group_document(self.record) | ends | {"counts": counts, "counted": self.counted}


class GroupReading:
    """Ask for groups. Each method runs on the engine's loop."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime

    async def page(self, *, limit: int = 50, before: str | None = None) -> GroupPage:
        found = await GroupAccess(self._runtime).agroups(limit=limit, before=before)
        return GroupPage(found, found[-1].id if len(found) == limit and found else None)

    async def one(self, id: str, *, most: int | None = None) -> WholeGroup:
        """Return one group. The statuses of its first `most` members are counted. Raises `InvocationNotFound`."""
        engine = await self._runtime.engine()
        record = await engine.part(Groups).get(id)
        if record is None:
            raise InvocationNotFound(
                f"the store has no group {id:.80} of the app '{engine.app}'; it is kept for 30 days"
            )
        counted = record.size if most is None else min(record.size, most)
        counts: Counter[Status] = Counter()
        for start in range(0, counted, _AT_ONCE):
            ids = member_ids(record.id, start, min(start + _AT_ONCE, counted))
            found = await get_readable(engine.store, engine.app, ids)
            counts.update(member.status for member in found if member is not None)
        first, last = (member_ids(record.id, at, at + 1)[0] if record.size else None for at in (0, record.size - 1))
        return WholeGroup(record, first, last, counts, counted)


def group_document(record: GroupRecord) -> Document:
    return {
        "id": record.id,
        "size": record.size,
        "state": state_of(record),
        "ended": record.floor,
        **fields(record, "created_at", "done_at"),
        "parent_id": record.parent_id,
        "then": None if record.then is None else record.then.call.task,
        "on_error": None if record.on_error is None else record.on_error.call.task,
        "on_failure": "cancel" if record.cancels else "continue",
        "callback": callback_id(record),
        "failed": record.failed,
    }
