"""Lists of invocations: the filter that people mean, and the search for what no index knows.

The store finds by status, task, queue, parent and attributes. By the time of the submit it does not: then the newest
invocations that the filter allows are looked at, up to `MAX_LOOKED`. A key is looked up where the task is known, since
only one call of a task has it.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from holdfast.clock import parse_moment
from holdfast.errors import UsageError
from holdfast.model.records import InvocationRecord
from holdfast.model.status import Status
from holdfast.runtime.engine import Engine
from holdfast.store.contract import Filter

_PAGE, MAX_LOOKED = 200, 20_000
Keep = Callable[[InvocationRecord], bool]
Moment = dt.datetime | float | None


class Listed(NamedTuple):
    """Invocations, newest first, and the id after which the next page begins; None if there is none."""

    records: Sequence[InvocationRecord]
    before: str | None


async def listed(
    engine: Engine,
    where: Filter,
    limit: int,
    keep: Keep | None = None,
    *,
    oldest: str | None = None,
    most: int = MAX_LOOKED,
) -> Listed:
    """Return the invocations that `keep` wants. Without it the store finds them by an index; with it, `most` are looked
    at, down to the id `oldest`.
    """
    if keep is None:
        records = await engine.store.find(engine.app, where, limit)
        return Listed(records, records[-1].id if records and len(records) == limit else None)
    found: list[InvocationRecord] = []
    for _ in range(most // _PAGE if limit else 0):
        page = await engine.store.find(engine.app, where, _PAGE)
        for record in page:
            if oldest is not None and record.id < oldest:
                return Listed(found, None)
            where = replace(where, before_id=record.id)
            if keep(record):
                found.append(record)
                if len(found) == limit:
                    return Listed(found, record.id)
        if len(page) < _PAGE:
            return Listed(found, None)
    return Listed(found, where.before_id)


async def with_key(engine: Engine, tasks: Iterable[str], key: str) -> list[InvocationRecord]:
    """Return the calls of these tasks that have a key, newest first: one look for each task."""
    now = engine.store.now()
    asked = [
        InvocationRecord(
            id=engine.ids.new(), app=engine.app, task=task, arguments=b"", key=key, created_at=now, due_at=now
        )
        for task in tasks
    ]
    found = await engine.store.find_conflicts(asked) if asked else ()
    each = {record.id: record for record in found if record is not None}
    return sorted(each.values(), key=lambda record: record.id, reverse=True)


def made_within(since: Moment, until: Moment) -> Keep | None:
    """Return a predicate for invocations submitted from `since` to before `until`; None if there is no bound."""
    first, last = (
        None if moment is None else parse_moment(moment, name) for name, moment in (("since", since), ("until", until))
    )
    if first is None and last is None:
        return None
    return lambda record: (first is None or record.created_at >= first) and (last is None or record.created_at < last)


def is_allowed(where: Filter, record: InvocationRecord) -> bool:
    """Return whether a filter of `filter_of` allows a record, as the store decides it."""
    return (
        (not where.statuses or record.status in where.statuses)
        and (not where.tasks or record.task in where.tasks)
        and (not where.queues or record.queue in where.queues)
        and (where.parent is None or record.parent_id == where.parent)
        and (where.rerun_of is None or record.rerun_of == where.rerun_of)
        and (where.before_id is None or record.id < where.before_id)
        and where.attributes <= record.attributes.items()
    )


def filter_of(
    *,
    status: str | Iterable[str] | None = (),
    task: str | Iterable[str] | None = (),
    queue: str | Iterable[str] | None = (),
    parent: str | None = None,
    attributes: Mapping[str, str] | None = None,
    before: str | None = None,
) -> Filter:
    """Return which invocations are meant; None means any. Raises `UsageError`."""
    for name, id in (("parent", parent), ("before", before)):
        if id is not None and not isinstance(id, str):
            raise UsageError(f"{name}={id!r:.80}: expected the id of an invocation")
    return Filter(
        statuses=frozenset(_status(name) for name in several("status", status)),
        tasks=frozenset(several("task", task)),
        queues=frozenset(several("queue", queue)),
        parent=parent,
        attributes=pairs(attributes or {}),
        before_id=before,
    )


def several(name: str, value: Any, kind: Any = str) -> list[Any]:
    """Return the values of a filter: one, some, or none at all. Raises `UsageError`."""
    is_one = isinstance(value, (kind, bytes)) or not isinstance(value, Iterable)
    found = [] if value is None else [value] if is_one else list(value)
    if not all(isinstance(each, kind) for each in found):
        raise UsageError(f"{name}={value!r:.80}: expected a name, or some")
    return found


def pairs(attributes: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    if not isinstance(attributes, Mapping):
        raise UsageError(f"attributes={attributes!r:.80}: expected names and texts, such as {{'customer': 'c-17'}}")
    for name, value in attributes.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f"attributes={{{name!r}: {value!r:.80}}}: an attribute has a name and a text")
    return frozenset(attributes.items())


def _status(name: str) -> Status:
    try:
        return Status(name.lower())
    except ValueError:
        raise UsageError(f"there is no status '{name}'; there are: {', '.join(Status)}") from None
