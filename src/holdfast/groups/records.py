"""The stored record of a group, an entry: how many members, what is called when they are done, how far it has come."""

from __future__ import annotations

import msgspec

from holdfast.ids import InvocationId
from holdfast.model.decoding import Count, Moment, Seconds
from holdfast.model.records import Entry, NextCall, Origin, entry_reader

KIND = "group"
FIRST_LOOK_SECONDS = 10.0
LONGEST_LOOK_SECONDS = 300.0
KEPT_SECONDS = 30 * 86_400.0  # of a group that nothing waits for


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A group. It `is_watched` if its end causes something: then its members report their ends to it."""

    app: str
    id: InvocationId
    size: Count
    created_at: Moment
    parent_id: InvocationId | None = None
    origin: Origin | None = None
    then: NextCall | None = None
    on_error: NextCall | None = None
    cancels: bool = False  # the other members, when one has failed
    is_whole: bool = False  # all members are stored
    floor: Count = 0  # members below it have ended
    failed: InvocationId | None = None  # the member whose failure cancels the others
    done_at: Moment | None = None
    abandoned: bool = False  # its submit has died before all members were stored
    kept_seconds: Seconds = KEPT_SECONDS  # after its end
    version: Count = 1

    @property
    def is_watched(self) -> bool:
        return self.then is not None or self.on_error is not None or self.cancels


def to_entry(record: GroupRecord, now: float) -> Entry:
    """Return the entry. An open group is checked less and less often: its members report their ends."""
    is_open = record.is_watched and record.done_at is None
    pause = min(max(FIRST_LOOK_SECONDS, (now - record.created_at) / 4), LONGEST_LOOK_SECONDS)
    return Entry(
        app=record.app,
        kind=KIND,
        name=record.id,
        body=msgspec.json.encode(record),
        version=record.version,
        due_at=now + pause if is_open else None,
        keep_until=None if is_open else now + record.kept_seconds,
    )


from_entry = entry_reader(GroupRecord, KIND)
