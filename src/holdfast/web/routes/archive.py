"""Ended invocations over HTTP: search them, run them again, remove them, keep them for another time."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any, cast

import msgspec

from holdfast.archive.api import Archive, ArchiveFilter
from holdfast.clock import parse_duration
from holdfast.errors import HoldfastError, InvocationNotFound, UsageError
from holdfast.model.names import counted
from holdfast.model.status import FINAL
from holdfast.runtime.definition import retention_of
from holdfast.runtime.naming import wanted_names
from holdfast.web.actions import touched
from holdfast.web.principals import Role
from holdfast.web.problems import about, wrong
from holdfast.web.reading.archive import ArchiveReading
from holdfast.web.requests import Parameter, limit_parameter, time_of
from holdfast.web.routing import Act, ApiRoute, Asked, Render, action

_MOST_IDS = 2_000  # the audit record has them all


class Selection(Act, kw_only=True):
    """The body of an action on ended invocations: some by their ids, or all that a filter means."""

    ids: Annotated[tuple[str, ...], msgspec.Meta(max_length=_MOST_IDS)] = ()
    status: tuple[str, ...] = ()
    task: tuple[str, ...] = ()
    queue: tuple[str, ...] = ()
    tag: tuple[str, ...] = ()
    since: str | None = None
    until: str | None = None
    key: str | None = None
    error: str | None = None
    attributes: dict[str, str] | None = None


class RerunEnded(Selection):
    """The body of a rerun of several. Repeat a `request` that was cut short: nothing is stored twice."""

    request: str | None = None
    new_key: bool = False


class PurgeEnded(Selection):
    """The body of a removal; with `force`, also of those whose key is still taken."""

    force: bool = False


class RetainEnded(Selection):
    """The body of another retention: a duration from the end, or "forever"."""

    retention: str


_COUNTED = 10_000
_FILTERS = tuple(name for name in Selection.__struct_fields__ if name not in ("ids", *Act.__struct_fields__))


async def list_archive(asked: Asked) -> Render:
    given = dict(asked.query)
    limit, before = given.pop("limit"), given.pop("before")
    where = await meant(asked, given, "query")
    try:
        page = await asked.runtime.arun(ArchiveReading(asked.runtime).page(where, limit=limit, before=before))
    except InvocationNotFound as error:
        raise wrong("query.before", str(error)) from error
    return page.document


async def meant(asked: Asked, given: dict[str, Any], place: str) -> ArchiveFilter:
    """Return the filter that parameters mean; `place` is the part of the request that has them. Raises `Problem`."""
    found = {name: value for name, value in given.items() if value not in (None, "", [], (), {})}
    for name in ("since", "until"):
        if name in found:
            found[name] = await _past(asked, f"{place}.{name}", found[name])
    if "task" in found:
        with about(f"{place}.task"):
            engine = await asked.runtime.aready()
            found["task"] = await asked.runtime.arun(wanted_names(asked.runtime, engine, list(found["task"])))
    return cast(ArchiveFilter, found)


async def _past(asked: Asked, place: str, text: str) -> float:
    """Return the time that a text means, or how long ago it was."""
    try:
        ago = parse_duration(text.strip())
    except HoldfastError:
        return time_of(place, text).timestamp()
    return max(0.0, (await asked.runtime.aready()).store.now() - ago)


async def _selected(asked: Asked) -> ArchiveFilter:
    """Return the filter of the body, without what ends from now on: its sender has not seen that."""
    where = await meant(asked, {name: getattr(asked.body, name) for name in _FILTERS}, "body")
    if not asked.body.ids and not where:
        raise UsageError("name invocations by ids, or by a filter such as status")
    if where:
        now, until = (await asked.runtime.aready()).store.now(), where.get("until")
        assert not isinstance(until, dt.datetime)
        where["until"] = now if until is None else min(until, now)
    return where


async def _previewed(asked: Asked, would: str) -> Render:
    """Say which invocations an action would touch: it looks at 10,000 at most."""
    where, ids = await _selected(asked), asked.body.ids
    if ids:
        return lambda: touched(f"{counted(len(ids), 'invocation')} would {would}, if they have ended.", len(ids), ids)
    found = await asked.runtime.arun(ArchiveReading(asked.runtime).page(where, limit=_COUNTED))
    count = len(found.records)
    shown = f"{count:,} invocations or more" if found.before is not None else counted(count, "invocation")
    items = [f"{each.task} {each.id}, {each.status}" for each in found.records[:20]]
    return lambda: touched(f"{shown} would {would}.", count, items)


async def rerun_ended(asked: Asked) -> Render:
    body: RerunEnded = asked.body
    if body.preview:
        return await _previewed(asked, "be run again")
    where = await _selected(asked)
    done = await Archive(asked.runtime).arerun(body.ids, request=body.request, new_key=body.new_key, **where)
    made, refused = [each.id for each in done.invocations], dict(done.refused)
    summary = f"{counted(len(made), 'invocation')} submitted"
    return lambda: touched(summary, len(made), made, request=done.request, refused=refused)


async def purge_ended(asked: Asked) -> Render:
    body: PurgeEnded = asked.body
    if body.preview:
        return await _previewed(asked, "be removed")
    done = await Archive(asked.runtime).apurge(body.ids, force=body.force, **await _selected(asked))
    kept = dict(done.kept)
    but = f"; {counted(len(kept), 'invocation')} stay" if kept else ""
    return lambda: touched(f"{counted(done.removed, 'invocation')} removed{but}", done.removed, kept=kept)


async def retain_ended(asked: Asked) -> Render:
    body: RetainEnded = asked.body
    with about("body.retention"):
        retention_of(body.retention)
    if body.preview:
        return await _previewed(asked, "be kept for another time")
    done = await Archive(asked.runtime).aretain(body.retention, body.ids, **await _selected(asked))
    count, refused = len(done.originals), dict(done.refused)
    soon = f"; {done.over} of them are then removed soon" if done.over else ""
    summary = f"{counted(count, 'invocation')} kept for another time{soon}"
    return lambda: touched(summary, count, done.originals, refused=refused)


PARAMETERS = {
    "status": Parameter("only invocations with this end", is_list=True, choices=tuple(sorted(FINAL))),
    "task": Parameter("only of this task", is_list=True),
    "queue": Parameter("only of this queue", is_list=True),
    "tag": Parameter("only what asks for this tag", is_list=True),
    "since": Parameter("ended since: a time, or how long ago (2h)"),
    "until": Parameter("ended before: a time, or how long ago (2h)"),
    "key": Parameter("with this idempotency key"),
    "error": Parameter("with this type of error, or text in it"),
    "before": Parameter("only older ones: the cursor of the page before", "id"),
    "limit": limit_parameter(50, 500),
}
ROUTES = (
    ApiRoute("GET", "/archive", list_archive, "search ended invocations, latest end first", PARAMETERS),
    action("/archive/rerun", rerun_ended, "run ended invocations again", "archive.rerun", RerunEnded),
    action("/archive/purge", purge_ended, "remove ended invocations", "archive.purge", PurgeEnded, Role.ADMIN),
    action("/archive/retain", retain_ended, "keep ended invocations for another time", "archive.retain", RetainEnded),
)
