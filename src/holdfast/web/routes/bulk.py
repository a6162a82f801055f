"""Actions on all invocations that a search means, over HTTP. `more` of an answer is what the next body has besides."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, cast

import msgspec

from holdfast.ids import is_id
from holdfast.model.names import counted
from holdfast.web.actions import touched
from holdfast.web.bulk import DEEDS, BulkActions, BulkWanted
from holdfast.web.documents import Document
from holdfast.web.principals import Role
from holdfast.web.problems import about, wrong
from holdfast.web.reading.search import parse
from holdfast.web.routes.calls import line_of
from holdfast.web.routing import Act, ApiRoute, Asked, Render, action

_MOST_IDS, _PREVIEWED = 500, 10


class Bulk(Act, kw_only=True):
    """Which invocations are meant: those of a search, or these."""

    query: str = ""
    ids: Annotated[list[str], msgspec.Meta(max_length=_MOST_IDS)] = msgspec.field(default_factory=list)
    until: float | None = None  # only what matched then; else now
    before: str | None = None  # go on after this one
    request: str | None = None  # of reruns: repeated with the same one, nothing is stored twice
    new_key: bool = False
    force: bool = False


def _acting(name: str) -> Callable[[Asked], Awaitable[Render]]:
    async def act(asked: Asked) -> Render:
        body = cast(Bulk, asked.body)
        if not body.query.strip() and not body.ids:
            raise wrong("body.query", "say which ones: by a search, or by ids", status=422)
        if not all(map(is_id, body.ids)):
            raise wrong("body.ids", "expected whole ids", status=422)
        if body.before is not None and not is_id(body.before):
            raise wrong("body.before", "give the cursor of the answer before", status=422)
        with about("body.query"):
            answer = await asked.runtime.arun(_answer(asked, body, name))
        return lambda: answer

    return act


async def _answer(asked: Asked, body: Bulk, name: str) -> Document:
    engine = await asked.runtime.engine()
    now, deed, actions = engine.store.now(), DEEDS[name], BulkActions(asked.runtime)
    wanted = BulkWanted(
        parse(body.query),
        now if body.until is None else min(body.until, now),
        body.request or engine.ids.new(),
        body.ids,
        asked.principal.name,
        body.reason,
        body.new_key,
        body.force,
    )
    bound = {"until": wanted.until, "request": wanted.request}
    if body.preview:
        number, first = await actions.preview(name, wanted, _PREVIEWED)
        text = "1 invocation" if number.text == "1" else f"{number.text} invocations"
        return touched(f"{text} {deed.would}", number.number, map(line_of, first), bind=bound)
    done, left, before = await actions.act(name, wanted, body.before)
    text = f"{counted(len(done), 'invocation')} {deed.done}" + (f", {len(left)} left as they are" if left else "")
    more = None if before is None else {**bound, "before": before}
    return touched(text, len(done), map(line_of, done), refused=dict(left), more=more, request=wanted.request)


def _route(name: str, summary: str, role: Role) -> ApiRoute:
    noun = "archive" if DEEDS[name].of_ended else "invocation"
    return action(f"/invocations/bulk-{name}", _acting(name), summary, f"{noun}.{name}", Bulk, role)


ROUTES = (
    _route("cancel", "cancel all that a search means, some at a time", Role.OPERATOR),
    _route("rerun", "run all ended invocations of a search again, in batches", Role.OPERATOR),
    _route("purge", "remove all ended invocations of a search, in batches", Role.ADMIN),
)
