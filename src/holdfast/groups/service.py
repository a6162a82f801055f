"""Groups in the store: whether all members have ended, and the one callback.

A member names its group in the outbox of its end. The receiver reads the first member that this process does not know
to have ended: one read for many ends, and no counter that could be wrong. When the last end is written, all others are
in the store. So the reader that comes after it sees that all have ended, and submits the callback. Its id follows from
the group, so several readers submit one callback. Ends that come during a check share the next check. A check reads few
more members than have ended, so the cost of an end does not depend on the size of its group.

The duty checks open groups now and then, so a stale read or a submit that died leaves no group open for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from weakref import WeakValueDictionary

from msgspec.structs import replace

from holdfast.codec import Payload
from holdfast.codec.extensions import Refused
from holdfast.crashpoints import crashpoint
from holdfast.errors import (
    CorruptRecord,
    InvocationNotFound,
    NotDecodable,
    PayloadLost,
    StoreUnavailable,
    ValueEncrypted,
)
from holdfast.fleet.services import Duty
from holdfast.groups import rules
from holdfast.groups.calling import Caller, following_on
from holdfast.groups.records import KIND, GroupRecord, from_entry, to_entry
from holdfast.ids import InvocationId
from holdfast.model.records import InvocationRecord, NextCall, Source
from holdfast.model.status import FINAL
from holdfast.runtime.engine import Engine
from holdfast.runtime.wait import get_readable
from holdfast.store.contract import EntryOrder
from holdfast.telemetry.events import PutOff

PAGE = 500
FIRST_PAGE = 16  # members of the first read of a check; each read after it is twice as large
FLOOR_STEP = 2000  # members, after which the progress of this look is stored for other processes
IDLE_SECONDS = 15.0
OPEN_SECONDS = 2.0
ABANDONED_SECONDS = 600.0  # without a submit that says that all members are stored
_AT_ONCE = 100
_REMEMBERED = 1000
_TRIES = 20


class _Checks:
    """The checks of one group: one at a time."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.known: set[str] = set()  # members that have ended, for the next check
        self.begun = 0
        self.made = 0  # the number of the last check that has succeeded


class Groups:
    """The groups of an app, as one process sees them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._store = engine.store
        self._app = engine.app
        self._caller = engine.part(Caller)
        self._floors: dict[str, int] = {}  # by group: members below it have ended; 0 or more: the group is whole
        self._checks: WeakValueDictionary[str, _Checks] = WeakValueDictionary()

    # --- entries

    async def get(self, id: str) -> GroupRecord | None:
        entries = await self._store.entries(self._app, KIND, [id])
        return from_entry(entries[0]) if entries else None

    async def put(self, record: GroupRecord) -> bool:
        return await self._store.put_entry(to_entry(record, self._store.now()))

    async def change(self, id: str, **fields: object) -> GroupRecord | None:
        """Change these fields of a group that is not done. Return it as it is then; None if it is not there. A group
        that is whole by then is not abandoned.
        """
        for _ in range(_TRIES):
            record = await self.get(id)
            if record is None or record.done_at is not None or (record.is_whole and "abandoned" in fields):
                return record
            floor = fields.get("floor", 0)
            wanted = {**fields, "floor": max(record.floor, floor if isinstance(floor, int) else 0)}
            if "failed" in fields and record.failed is not None:
                del wanted["failed"]
            after = replace(record, version=record.version + 1, **wanted)
            if await self.put(after):
                return after
        raise StoreUnavailable(f"the group {id} is written to again and again by others")

    # --- ends of members

    async def receive(self, ended: Sequence[InvocationRecord]) -> Collection[str]:
        """Take the ends of members. Return the ids of those to try again: none."""
        groups: dict[InvocationId, list[InvocationRecord]] = {}
        for record in ended:
            if record.terms.group is not None:
                groups.setdefault(record.terms.group, []).append(record)
        for id, members in groups.items():
            if failed := [member for member in members if rules.is_failure(member)]:
                await self._cancel_others(id, failed)
            await self.check(id, frozenset(member.id for member in members))
        return ()

    async def check(self, id: InvocationId, known: Collection[str] = ()) -> None:
        """Submit the callback of a group if all its members have ended. `known` are some that have.

        Callers that wait for the same check share the next one: it begins after all their ends were written.
        """
        checks = self._checks.setdefault(id, _Checks())
        checks.known.update(known)
        begun = checks.begun
        async with checks.lock:
            if checks.made > begun:
                return
            checks.begun = number = checks.begun + 1
            together, checks.known = checks.known, set()
            await self._check(id, together)
            checks.made = number

    async def _check(self, id: InvocationId, known: Collection[str]) -> None:
        floor = self._floors.get(id)
        if floor is not None and not await self._goes_on(id, floor, known):
            return
        record = await self._whole(await self.get(id))
        if record is None or record.done_at is not None:
            self._floors.pop(id, None)
            return
        reached = await self._walk(record, max(floor or 0, record.floor), known)
        self._remember(id, reached)
        if reached == record.size:
            await self._done(record)
        elif reached - record.floor >= FLOOR_STEP:
            await self.change(id, floor=reached)

    async def _whole(self, record: GroupRecord | None) -> GroupRecord | None:
        """Return a group if all its members are stored; None if not yet. Its submit says so, unless it has died before
        that, or its user may add entries and change none: then the members are looked for.
        """
        if record is None or record.is_whole or record.done_at is not None:
            return record
        if not await self._all_there(record):
            return None
        after = await self.change(record.id, is_whole=True)
        if after is not None and after.failed is not None:  # while the others were being stored
            await self.cancel(after, reason=f"{after.failed} of its group has failed")
        return after

    async def _all_there(self, record: GroupRecord) -> bool:
        """Return whether all members are stored. No member is removed so early: a missing one is yet to come."""
        if record.size == 0:
            return True
        if not all(
            await get_readable(self._store, self._app, rules.member_ids(record.id, record.size - 1, record.size))
        ):
            return False
        for start in range(0, record.size, PAGE):
            ids = rules.member_ids(record.id, start, min(start + PAGE, record.size))
            if None in await get_readable(self._store, self._app, ids):
                return False
        return True

    async def _goes_on(self, id: InvocationId, floor: int, known: Collection[str]) -> bool:
        """Return whether the first member that had not ended has ended now. It was there: the group is whole."""
        (first,) = rules.member_ids(id, floor, floor + 1)
        if first in known:
            return True
        (found,) = await get_readable(self._store, self._app, [first])
        return found is None or found.status in FINAL

    async def _walk(self, record: GroupRecord, floor: int, known: Collection[str]) -> int:
        """Return the first member from `floor` on that has not ended. A member that is gone has ended before."""
        page = FIRST_PAGE
        while floor < record.size:
            ids = rules.member_ids(record.id, floor, min(floor + page, record.size))
            page = min(2 * page, PAGE)
            asked = [id for id in ids if id not in known]
            found = dict(zip(asked, await get_readable(self._store, self._app, asked), strict=True)) if asked else {}
            for id in ids:
                if (member := found.get(id)) is not None and member.status not in FINAL:
                    return floor
                floor += 1
        return floor

    def _remember(self, id: str, floor: int) -> None:
        self._floors.pop(id, None)
        self._floors[id] = floor
        while len(self._floors) > _REMEMBERED:
            del self._floors[next(iter(self._floors))]

    async def _cancel_others(self, id: InvocationId, failed: Sequence[InvocationRecord]) -> None:
        """Cancel the other members, if the group has `on_failure="cancel"`. The first failure does it, again if it has
        to.
        """
        record = await self.get(id)
        if record is None or not record.cancels or record.done_at is not None:
            return
        if record.failed is None:
            record = await self.change(id, failed=failed[0].id)
        if record is None or record.failed not in {member.id for member in failed}:
            return
        await self.cancel(record, reason=f"{record.failed} of its group has failed")

    async def cancel(self, record: GroupRecord, *, reason: str, by: str = "its group") -> None:
        """Cancel the members that have not ended."""
        for start in range(record.floor, record.size, PAGE):
            ids = rules.member_ids(record.id, start, min(start + PAGE, record.size))
            found = await get_readable(self._store, self._app, ids)
            alive = [member.id for member in found if member is not None and member.status not in FINAL]
            if alive:
                with contextlib.suppress(InvocationNotFound):
                    await self._engine.canceller.cancel(alive, by=by, reason=reason)

    # --- the end

    async def _done(self, record: GroupRecord) -> None:
        crashpoint("group.ended")
        if record.then is not None or record.on_error is not None:
            call, new = await self._callback(record)
            if new:
                await self._engine.payloads.keep(new)
            if call is not None:
                await self._caller.submit([call])
        crashpoint("group.called")
        await self.change(record.id, done_at=self._store.now(), floor=record.size)
        self._floors.pop(record.id, None)

    async def _callback(self, record: GroupRecord) -> tuple[InvocationRecord | None, tuple[Payload, ...]]:
        results, failures, failed = await self._ends(record)
        link = record.then if not failed else record.on_error
        if link is None and not failed:
            return None, ()
        said = rules.of_failures(failed, record.size) if failed else ""
        if link is None:
            assert record.then is not None
            return self._refused(record, record.then, said), ()
        why = said or f"all {record.size} calls of its group have ended"
        try:
            fetched = await self._engine.payloads.fetch(rules.wanted(results)) if link.takes and not failed else {}
            values = [rules.DATA.encode(failure) for failure in failures] if failed else results
            name_of = self._engine.codec.name_payload
            call = rules.collected(link, values, fetched, self._engine.limits, name_of)
        except Refused as refused:
            return self._refused(record, link, f"the list of what its group leaves {refused.why}"), ()
        except ValueEncrypted:
            raise  # by a key that this process lacks: another process submits the callback
        except (PayloadLost, NotDecodable) as error:
            return self._refused(record, link, f"a result of its group cannot be read: {error}"), ()
        return self._of_link(record, link, call.arguments, why), call.new

    async def _ends(self, record: GroupRecord) -> tuple[list[bytes], list[dict[str, object]], list[str]]:
        """Return the results, the failures and the ids of what failed, in the order of the members."""
        results, failures, failed = list[bytes](), list[dict[str, object]](), list[str]()
        for start in range(0, record.size, PAGE):
            ids = rules.member_ids(record.id, start, min(start + PAGE, record.size))
            for id, member in zip(ids, await get_readable(self._store, self._app, ids), strict=True):
                if member is None or rules.is_failure(member):
                    failures.append(rules.failure_of(member, id))
                    failed.append(id)
                else:
                    results.append(member.result or rules.DATA.encode(None))
        return results, failures, failed

    def _of_link(self, record: GroupRecord, link: NextCall, arguments: bytes, why: str) -> InvocationRecord:
        return self._caller.record(
            link,
            rules.done_id(record.id),
            arguments,
            why=why,
            parent=record.parent_id,
            origin=following_on(record.origin, Source(kind=KIND, id=record.id)),
            follow=link.call.terms.follow,
        )

    def _refused(self, record: GroupRecord, link: NextCall, why: str) -> InvocationRecord:
        return self._caller.ended(self._of_link(record, link, link.call.arguments, ""), why)

    # --- groups without news of their members

    async def tend(self, record: GroupRecord) -> None:
        """Perform the duty for an open group: find ends that its members did not report, and end a broken submit."""
        now = self._store.now()
        if now - record.created_at > ABANDONED_SECONDS and await self._whole(record) is None:
            return await self._abandon(record)
        self._floors.pop(record.id, None)
        await self.check(record.id)
        left = await self.get(record.id)
        if left is not None and left.done_at is None and left.version == record.version:
            await self.put(replace(left, version=left.version + 1))

    async def _abandon(self, record: GroupRecord) -> None:
        """Close a group whose submit never returned: cancel its stored members, and submit no callback."""
        await self.cancel(record, reason="the submit of its group has died before all calls were stored")
        await self.change(record.id, done_at=self._store.now(), abandoned=True)


class GroupWatch:
    """A feature of a runner: see `holdfast.fleet.services.Feature`."""

    declares = ()

    def __init__(self, engine: Engine) -> None:
        self._store = engine.store
        self._app = engine.app
        self._groups = engine.part(Groups)
        self._emit = engine.telemetry.emit
        self._monotonic = engine.clock.monotonic
        self._next = float("-inf")

    async def register(self) -> None:
        """Do nothing: no code declares groups."""

    def duties(self) -> Sequence[Duty]:
        return (Duty(name="groups", every_seconds=1.0, perform=self.sweep),)

    async def sweep(self) -> bool:
        """Look at open groups that are due. Return True if there may be more."""
        if self._monotonic() < self._next:
            return False
        now = self._store.now()
        entries = await self._store.entries(self._app, KIND, order=EntryOrder.DUE, limit=_AT_ONCE)
        self._next = self._monotonic() + (OPEN_SECONDS if entries else IDLE_SECONDS)
        due = [entry for entry in entries if entry.due_at is not None and entry.due_at <= now]
        for entry in due:
            try:
                await self._groups.tend(from_entry(entry))
            except StoreUnavailable:
                raise
            except CorruptRecord as error:
                await self._store.quarantine_entry(entry, error)
            except Exception as error:  # it must not stand in front of the others for ever
                self._emit(PutOff("groups", f"the group {entry.name}", str(error), error))
                await self._store.put_entry(replace(entry, version=entry.version + 1, due_at=now + 60.0))
        return len(due) == _AT_ONCE
