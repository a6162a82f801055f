"""Groups and chains that were submitted earlier, and the family of an invocation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec

from holdfast.errors import CorruptRecord, InvocationNotFound, UsageError
from holdfast.groups import rules
from holdfast.groups.calls import callback_of
from holdfast.groups.handles import ChainInvocation, InvocationGroup
from holdfast.groups.records import KIND, GroupRecord, from_entry
from holdfast.groups.service import Groups
from holdfast.ids import InvocationId, number_of
from holdfast.invocation import Invocation
from holdfast.model.records import InvocationRecord
from holdfast.runtime.app_runtime import AppRuntime, awaited, blocking
from holdfast.runtime.engine import Engine
from holdfast.runtime.wait import get_all, get_readable
from holdfast.store.contract import EntryOrder, Filter

MOST_ABOVE, MOST_BELOW = 10, 20


class GroupAccess:
    """Groups and chains of an app, by their ids."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime

    @blocking
    async def group(self, engine: Engine, id: str) -> InvocationGroup[Any]:
        """Return the handle of a group that was submitted, by its id. Raises `InvocationNotFound`."""
        record = await self._found(engine, id)
        handles = [Invocation[Any](self._runtime, each) for each in rules.member_ids(record.id, 0, record.size)]
        return InvocationGroup(self._runtime, handles, record.id, callback_of(self._runtime, record))

    agroup = awaited(group)

    @blocking
    async def chain(self, engine: Engine, id: str) -> ChainInvocation[Any]:
        """Return the handle of a chain that was submitted, by the id of any of its links that is stored. Raises
        `InvocationNotFound`, and `UsageError` for an invocation that is no link.
        """
        (record,) = await get_all(engine.store, engine.app, [InvocationId(_text(id))])
        follow = record.terms.follow
        if follow is None or not (follow.rest or follow.place):
            raise UsageError(f"{record.task} {record.id} is no link of a chain that others follow")
        return ChainInvocation(self._runtime, rules.first_of(record), follow.place + 1 + len(follow.rest))

    achain = awaited(chain)

    @blocking
    async def groups(self, engine: Engine, *, limit: int = 50, before: str | None = None) -> list[GroupRecord]:
        """Return the groups that are kept, newest first. `before` is the id of the last one of the page before."""
        if type(limit) is not int or not 0 <= limit <= 10_000:
            raise UsageError(f"limit={limit!r}: expected a whole number from 0 to 10,000")
        entries = await engine.store.entries(engine.app, KIND, order=EntryOrder.LATEST, limit=limit, before=before)
        return [each for each in map(_readable, entries) if each is not None]

    agroups = awaited(groups)

    async def _found(self, engine: Engine, id: str) -> GroupRecord:
        record = await engine.part(Groups).get(_text(id))
        if record is None:
            raise InvocationNotFound(f"the store has no group {id} of the app '{engine.app}'; it is kept for 30 days")
        return record


def _text(id: object) -> str:
    if not isinstance(id, str):
        raise UsageError(f"{id!r:.80}: expected an id, which is a text")
    return id


def _readable(entry: Any) -> GroupRecord | None:
    try:
        return from_entry(entry)
    except CorruptRecord:
        return None


# --- the family of an invocation


class Relative(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a family tree. What is not stored has no status yet."""

    depth: int
    id: str
    task: str
    status: str
    role: str = ""
    is_self: bool = False


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """The lines of parents, chain, group, callback and children of an invocation."""

    lines: tuple[Relative, ...]

    @property
    def is_alone(self) -> bool:
        return len(self.lines) <= 1


async def family_of(engine: Engine, record: InvocationRecord) -> Family:
    """Read the family of an invocation: a few reads, whatever its size."""
    lines = list[Relative]()
    for above in reversed(await _ancestors(engine, record)):
        lines.append(_line(above, len(lines), "submitted it"))
    depth = len(lines)
    group = await engine.part(Groups).get(rules.group_of(record.id))
    if group is not None and group.size >= number_of(record.id) > 0:
        lines.append(_group_line(group, f"member {number_of(record.id):,} of {group.size:,}", depth))
        depth += 1
    elif (before := await _group_before(engine, record)) is not None:
        lines.append(_group_line(before, f"of {before.size:,}", depth))
    chain = [line async for line in _chain(engine, record, depth)]
    lines += chain or [_line(record, depth, role_of(record) if group is None else "", is_self=True)]
    if group is not None and (callback := callback_id(group)) is not None:
        (found,) = await get_readable(engine.store, engine.app, [callback])
        link = group.then or group.on_error
        assert link is not None
        lines.append(_expected(found, callback, link.call.task, depth - 1, "follows the group"))
    children = await engine.store.find(engine.app, Filter(parent=record.id), MOST_BELOW + 1)
    lines += [_line(child, depth + 1, role_of(child)) for child in reversed(children[:MOST_BELOW])]
    if len(children) > MOST_BELOW:
        said = f"more: holdfast ps --parent {record.id}"
        lines.append(Relative(depth=depth + 1, id="", task="…", status="", role=said))
    return Family(lines=tuple(lines))


def callback_id(group: GroupRecord) -> InvocationId | None:
    return None if group.then is None and group.on_error is None else rules.done_id(group.id)


async def _group_before(engine: Engine, record: InvocationRecord) -> GroupRecord | None:
    """Return the group that an invocation, or the chain that it is a link of, follows."""
    id, first = rules.first_of(record), record
    if id != record.id:
        first = (await get_readable(engine.store, engine.app, [id]))[0] or record
    origin = first.origin
    if origin is None or origin.trigger or not origin.sources or origin.sources[0].kind != KIND:
        return None
    return await engine.part(Groups).get(origin.sources[0].id)


async def _ancestors(engine: Engine, record: InvocationRecord) -> list[InvocationRecord]:
    above = list[InvocationRecord]()
    while record.parent_id is not None and len(above) < MOST_ABOVE:
        (found,) = await get_readable(engine.store, engine.app, [record.parent_id])
        if found is None:
            break
        above.append(record := found)
    return above


async def _chain(engine: Engine, record: InvocationRecord, depth: int) -> AsyncIterator[Relative]:
    """Yield the links of its chain and what is called on an error; nothing for an invocation without followers."""
    first, follow = rules.first_of(record), record.terms.follow
    if follow is None and record.origin is not None and record.origin.sources[:1]:
        source = record.origin.sources[0]  # the last link, which nothing follows
        if source.kind == "end" and not record.origin.trigger:
            (before,) = await get_readable(engine.store, engine.app, [InvocationId(source.id)])
            if before is not None and before.terms.follow is not None:
                first, follow = rules.first_of(before), before.terms.follow
    if follow is None:
        return
    (head,) = await get_readable(engine.store, engine.app, [first])
    whole = head.terms.follow if head is not None and head.terms.follow is not None else follow
    start = 0 if whole is not follow else follow.place
    tasks = [head.task if head is not None and start == 0 else record.task, *[link.call.task for link in whole.rest]]
    ids = [rules.link_id(first, start + place) for place in range(len(tasks))]
    size = start + len(tasks)
    for place, (id, task, found) in enumerate(
        zip(ids, tasks, await get_readable(engine.store, engine.app, ids), strict=True), start + 1
    ):
        role = f"link {place} of {size}" if size > 1 else ""
        yield _expected(found, id, task, depth, role, is_self=id == record.id)
    if whole.on_error is not None:
        id = rules.error_id(first)
        (found,) = await get_readable(engine.store, engine.app, [id])
        yield _expected(found, id, whole.on_error.call.task, depth, "on an error", is_self=id == record.id)


def _expected(
    found: InvocationRecord | None, id: str, task: str, depth: int, role: str, *, is_self: bool = False
) -> Relative:
    if found is not None:
        return _line(found, depth, role, is_self=is_self)
    return Relative(depth=depth, id=id, task=task, status="not called", role=role)


def _line(record: InvocationRecord, depth: int, role: str, *, is_self: bool = False) -> Relative:
    return Relative(depth=depth, id=record.id, task=record.task, status=record.status.value, role=role, is_self=is_self)


def role_of(record: InvocationRecord) -> str:
    """Return what an invocation is to others, from its record alone."""
    follow, sources = record.terms.follow, () if record.origin is None else record.origin.sources
    if record.terms.group is not None:
        return f"member {number_of(record.id):,} of the group {record.terms.group}"
    if sources and record.origin is not None and not record.origin.trigger:
        return f"follows {'the group ' if sources[0].kind == KIND else ''}{sources[0].id}"
    return f"link 1 of {1 + len(follow.rest)}" if follow is not None and follow.rest else ""


def _group_line(group: GroupRecord, role: str, depth: int) -> Relative:
    return Relative(depth=depth, id=group.id, task="group", status=state_of(group), role=role)


def state_of(group: GroupRecord) -> str:
    """Return how a group stands, in a word or two."""
    if group.abandoned:
        return "abandoned"
    if not group.is_watched:
        return "nothing follows"
    return "open" if group.done_at is None else "done"


def drawn(lines: Sequence[Relative]) -> Iterator[tuple[str, Relative]]:
    """Yield each line with the branch that leads to it."""
    for number, line in enumerate(lines):
        goes_on = [_goes_on(lines[number + 1 :], depth) for depth in range(1, line.depth + 1)]
        branch = "".join("│  " if more else "   " for more in goes_on[:-1])
        yield branch + ("".join("├─ " if more else "└─ " for more in goes_on[-1:])), line


def _goes_on(later: Sequence[Relative], depth: int) -> bool:
    """Return whether another line of this depth follows below the same one."""
    return next((line.depth == depth for line in later if line.depth <= depth), False)
