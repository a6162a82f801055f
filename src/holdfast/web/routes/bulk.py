"""Actions on all invocations that a search means, or on those that are named: cancel, rerun, purge.

A request acts on a bounded number and says where to go on (`more` is what the next body has besides). What is meant is
what matched at one moment, `until`: that of the preview. So a repetition changes nothing twice, and nothing that came
later: a rerun has an id that follows from `request` and what it repeats.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, cast

import msgspec

from holdfast.archive.api import Archive
from holdfast.ids import InvocationId, is_id
from holdfast.invocation import cancelled_all
from holdfast.model.names import counted
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL, Status
from holdfast.runtime.engine import Engine
from holdfast.runtime.listing import Keep
from holdfast.runtime.rerun import Rerunner
from holdfast.runtime.wait import get_readable
from holdfast.web.actions import touched
from holdfast.web.documents import Document
from holdfast.web.principals import Role
from holdfast.web.problems import about, wrong
from holdfast.web.reading.search import Query, parse
from holdfast.web.reading.searching import statuses_of
from holdfast.web.routes.calls import line_of
from holdfast.web.routing import Act, ApiRoute, Asked, Render, action

_AT_ONCE, _MOST_IDS = 200, 500
_PREVIEWED = 10


class Bulk(Act, kw_only=True):
    """Which invocations are meant: those of a search, or these."""

    query: str = ""
    ids: list[str] = msgspec.field(default_factory=list)
    until: float | None = None  # only what matched then; else now
    before: str | None = None  # go on after this one
    request: str | None = None  # of reruns: repeated with the same one, nothing is stored twice
    new_key: bool = False
    force: bool = False


class _Deed(NamedTuple):
    """What is done to invocations: whether it is for ended ones, in words, and how. It returns why some are left."""

    of_ended: bool
    would: str
    done: str
    do: Callable[[Asked, Bulk, Sequence[InvocationRecord]], Awaitable[dict[str, str]]]


async def _cancel(asked: Asked, body: Bulk, records: Sequence[InvocationRecord]) -> dict[str, str]:
    engine = await asked.runtime.engine()
    await cancelled_all(engine, [record.id for record in records], body.reason, asked.principal.name, None)
    return {}


async def _rerun(asked: Asked, body: Bulk, records: Sequence[InvocationRecord]) -> dict[str, str]:
    engine = await asked.runtime.engine()
    due_at = engine.submitter.due_after(0.0)
    rerunner = engine.part(Rerunner)
    request = cast(str, body.request)
    fresh = [record for record in records if not rerunner.is_of(request, record)]
    done = await rerunner.rerun(fresh, request=request, due_at=due_at, new_key=body.new_key)
    return {each.original.id: each.why for each in done if each.why}


async def _purge(asked: Asked, body: Bulk, records: Sequence[InvocationRecord]) -> dict[str, str]:
    return dict(await Archive(asked.runtime).remove(await asked.runtime.engine(), records, force=body.force))


_DEEDS = {
    "cancel": _Deed(False, "would be cancelled", "cancelled", _cancel),
    "rerun": _Deed(True, "would be run again", "run again", _rerun),
    "purge": _Deed(True, "would be removed", "removed", _purge),
}


def _acting(name: str) -> Callable[[Asked], Awaitable[Render]]:
    async def act(asked: Asked) -> Render:
        body = cast(Bulk, asked.body)
        with about("body.query"):
            query = parse(body.query)
        if not query and not body.ids:
            raise wrong("body.query", "say which ones: by a search, or by ids", status=422)
        if len(body.ids) > _MOST_IDS or not all(map(is_id, body.ids)):
            raise wrong("body.ids", f"expected up to {_MOST_IDS} whole ids", status=422)
        with about("body.query"):
            answer = await asked.runtime.arun(_done(asked, body, query, _DEEDS[name]))
        return lambda: answer

    return act


async def _done(asked: Asked, body: Bulk, query: Query, deed: _Deed) -> Document:
    engine = await asked.runtime.engine()
    now = engine.store.now()
    body.until = now if body.until is None else min(body.until, now)
    body.request = body.request or engine.ids.new()
    keep = _matched(query, body.until, deed)
    if body.preview:
        return await _preview(asked, body, query, deed, keep)
    records, before = await _batch(asked, engine, body, query, keep)
    left = await deed.do(asked, body, records) if records else {}
    done = [record for record in records if record.id not in left]
    more = None if before is None else {"until": body.until, "request": body.request, "before": before}
    text = f"{counted(len(done), 'invocation')} {deed.done}" + (f", {len(left)} left as they are" if left else "")
    return touched(text, len(done), map(line_of, done), refused=left, more=more, request=body.request)


async def _preview(asked: Asked, body: Bulk, query: Query, deed: _Deed, keep: Keep) -> Document:
    bound = {"until": body.until, "request": body.request}
    if body.ids:
        records, _ = await _batch(asked, await asked.runtime.engine(), body, query, keep)
        return touched(
            f"{counted(len(records), 'invocation')} {deed.would}", len(records), map(line_of, records), bind=bound
        )
    number = await asked.reading.searching.count(query, until=body.until, keep=keep)
    page = await asked.reading.searching.page(query, _PREVIEWED, until=body.until, keep=keep)
    text = "1 invocation" if number.text == "1" else f"{number.text} invocations"
    return touched(f"{text} {deed.would}", number.number, map(line_of, page.records), bind=bound)


async def _batch(
    asked: Asked, engine: Engine, body: Bulk, query: Query, keep: Keep
) -> tuple[Sequence[InvocationRecord], str | None]:
    """Return some of those that are meant, and where to go on."""
    if body.ids:
        found = await get_readable(engine.store, engine.app, [InvocationId(id) for id in dict.fromkeys(body.ids)])
        return [record for record in found if record is not None and keep(record)], None
    page = await asked.reading.searching.page(query, _AT_ONCE, body.before, until=body.until, keep=keep)
    return page.records, page.before


def _matched(query: Query, until: float, deed: _Deed) -> Keep:
    """Return what tells whether an invocation matched at a moment, as far as its status goes, and matches now."""
    statuses = statuses_of(query)

    def keep(record: InvocationRecord) -> bool:
        if (record.status in FINAL) is not deed.of_ended or record.created_at >= until:
            return False
        if deed.of_ended:
            return record.changed_at < until
        return not statuses or _status_at(record, until) in statuses

    return keep


def _status_at(record: InvocationRecord, at: float) -> Status:
    return next((entry.status for entry in reversed(record.history) if entry.at <= at), record.status)


def _route(name: str, summary: str, role: Role) -> ApiRoute:
    return action(f"/invocations/bulk-{name}", _acting(name), summary, f"invocation.bulk-{name}", Bulk, role)


ROUTES = (
    _route("cancel", "cancel all that a search means, some at a time", Role.OPERATOR),
    _route("rerun", "run all ended ones that a search means again, some at a time", Role.OPERATOR),
    _route("purge", "remove all ended ones that a search means, some at a time", Role.ADMIN),
)
