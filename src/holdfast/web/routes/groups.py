"""Groups over HTTP."""

from __future__ import annotations

from collections import Counter

from holdfast.errors import InvocationNotFound
from holdfast.groups.looking import GroupAccess
from holdfast.ids import is_id
from holdfast.model.names import counted
from holdfast.web.actions import touched
from holdfast.web.reading.groups import GroupReading, WholeGroup
from holdfast.web.requests import Parameter, limit_parameter
from holdfast.web.routing import ApiRoute, Asked, Render, action

_COUNTED = 2_000  # members whose status is read


async def list_groups(asked: Asked) -> Render:
    return (await asked.runtime.arun(GroupReading(asked.runtime).page(**asked.query))).document


async def _found(asked: Asked) -> WholeGroup:
    id = asked.path["id"]
    if not is_id(id):
        raise InvocationNotFound(f"there is no group '{id[:80]}': an id is 26 characters, and not shortened")
    return await asked.runtime.arun(GroupReading(asked.runtime).one(id, most=_COUNTED))


async def show_group(asked: Asked) -> Render:
    return (await _found(asked)).document


async def cancel_group(asked: Asked) -> Render:
    found = await _found(asked)
    record = found.record
    if asked.body.preview:
        said = f"The members that wait or run would end: {counted(record.size - record.floor, 'member')} at most."
        return lambda: touched(said, record.size - record.floor)
    group = await GroupAccess(asked.runtime).agroup(record.id)
    statuses = Counter(await group.acancel(asked.body.reason, by=asked.principal.name))
    counts = {status.value: count for status, count in statuses.items()}
    said = ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()))
    return lambda: touched(
        f"group {record.id}: {said or 'it has no members'}", record.size, id=record.id, counts=counts
    )


_QUERY = {
    "before": Parameter("only older ones: the cursor of the page before", "id"),
    "limit": limit_parameter(50, 500),
}
ROUTES = (
    ApiRoute("GET", "/groups", list_groups, "list groups, newest first", _QUERY),
    ApiRoute("GET", "/groups/{id}", show_group, "show one group, with the statuses of its first 2,000 members"),
    action("/groups/{id}/cancel", cancel_group, "end the members of a group that wait or run", "group.cancel"),
)
