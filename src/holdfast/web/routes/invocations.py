"""Invocations over HTTP."""

from __future__ import annotations

from holdfast.runtime.listing import filter_of
from holdfast.web.documents import history_of
from holdfast.web.problems import about, wrong
from holdfast.web.reading.search import LONGEST, parse
from holdfast.web.requests import Parameter, limit_parameter
from holdfast.web.routing import ApiRoute, Asked, Render


async def list_invocations(asked: Asked) -> Render:
    given = dict(asked.query)
    limit, attributes = given.pop("limit"), _attributes(given.pop("attribute"))
    text = given.pop("q")
    with about("query.status"):
        where = filter_of(**given, attributes=attributes)
    if text is not None:
        with about("query.q"):
            page = asked.reading.searching.page(parse(text), limit, also=where)
            return (await asked.runtime.arun(page)).document
    return (await asked.runtime.arun(asked.reading.invocations(where, limit))).document


def _attributes(pairs: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not name or not sign or found.setdefault(name, value) != value:
            raise wrong("query.attribute", f"attribute={pair[:80]!r}: write name=value, and each name once")
    return found


async def complete(asked: Asked) -> Render:
    text, at = asked.query["q"] or "", asked.query["at"]
    found = await asked.runtime.arun(asked.reading.searching.complete(text, len(text) if at is None else at))
    return lambda: found


async def count(asked: Asked) -> Render:
    with about("query.q"):
        found = asked.reading.searching.count(parse(asked.query["q"] or ""))
        return (await asked.runtime.arun(found)).document


async def show_invocation(asked: Asked) -> Render:
    whole = await asked.runtime.arun(asked.reading.whole(await asked.record()))
    return lambda: whole.document(asked.codec)


async def show_values(asked: Asked) -> Render:
    values = await asked.runtime.arun(asked.reading.values(await asked.record()))
    return lambda: values.document(asked.codec)


async def show_history(asked: Asked) -> Render:
    record = await asked.record()
    return lambda: history_of(record)


async def explain(asked: Asked) -> Render:
    return (await asked.runtime.arun(asked.reading.why(await asked.record()))).document


ROUTES = (
    ApiRoute(
        "GET",
        "/invocations",
        list_invocations,
        "list invocations, newest first",
        {
            "status": Parameter("only of this status", is_list=True),
            "task": Parameter("only of this task, by its whole name", is_list=True),
            "queue": Parameter("only of this queue", is_list=True),
            "parent": Parameter("only the children of this invocation", "id"),
            "attribute": Parameter("only with this attribute: name=value", is_list=True),
            "before": Parameter("only older ones: the cursor of the page before", "id"),
            "limit": limit_parameter(50, 500),
            "q": Parameter("a search, such as: task:charge status:failed since:1h customer:c-17"),
        },
    ),
    ApiRoute(
        "GET",
        "/invocations/complete",
        complete,
        "complete a search: what could be written at a place, instead of the characters from start to end",
        {
            "q": Parameter("the search so far"),
            "at": Parameter("the place of the cursor; else its end", "number", 0, LONGEST),
        },
    ),
    ApiRoute(
        "GET",
        "/invocations/count",
        count,
        "count the invocations of a search, up to 10,000",
        {"q": Parameter("the search")},
    ),
    ApiRoute("GET", "/invocations/{id}", show_invocation, "show everything about one invocation"),
    ApiRoute("GET", "/invocations/{id}/values", show_values, "show its values whole, large ones too"),
    ApiRoute("GET", "/invocations/{id}/history", show_history, "show each status that it has had"),
    ApiRoute("GET", "/invocations/{id}/why", explain, "explain what it waits for, or how it ended"),
)
