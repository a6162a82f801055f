"""The list of invocations: a search, the calls over time, and what one can do to those that are chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.errors import InvocationNotFound, UsageError
from holdfast.model.names import counted
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL, OWNED, Status
from holdfast.showing import length, moment
from holdfast.web.pages.charts import Axes, Drawn, Series, columns
from holdfast.web.pages.page import Context, WebPage
from holdfast.web.problems import Problem
from holdfast.web.reading.search import (
    Query,
    Term,
    formatted,
    parse,
    values_of,
    with_terms,
    without,
)
from holdfast.web.reading.searching import FoundPage, Times, whole_id
from holdfast.web.requests import Parameter, limit_parameter
from holdfast.web.routing import Asked

_CHIPS = tuple(
    map(
        Status,
        [
            "failed",
            "parked",
            "retry",
            "running",
            "registered",
            "concurrency_controlled",
            "suspended",
            "success",
            "cancelled",
        ],
    )
)
_TIMES = ("15m", "1h", "24h", "7d")
_KINDS = {"failed": "f-bad", "succeeded": "f-good", "cancelled": "f-idle", "others": "f-busy"}


class Chip(NamedTuple):
    """A link that changes the search."""

    text: str
    q: str
    is_current: bool


class Slice(NamedTuple):
    """A part of the time: its place in the chart, and the search for it."""

    x: float
    width: float
    q: str
    title: str
    since: str
    until: str


async def list_page(asked: Asked) -> Callable[[], Context]:
    text, limit, before = asked.query["q"] or "", asked.query["limit"], asked.query["before"]
    problem, page, times = "", FoundPage([], None, limit), Times((), 0.0, False)
    query: Query = ()
    try:
        query = parse(text)
        if (id := whole_id(query)) is not None:
            root = str(asked.request.scope.get("root_path", "")).rstrip("/")
            raise Problem(303, "SeeOther", "this is one invocation", headers={"location": f"{root}/invocations/{id}"})
        searching = asked.reading.searching
        page = await asked.runtime.arun(searching.page(query, limit, before))
        times = await asked.runtime.arun(searching.times(query, page))
    except (UsageError, InvocationNotFound) as error:
        problem = str(error)

    def context() -> Context:
        rows = [
            _row(record, document)
            for record, document in zip(page.records, page.document()["invocations"], strict=True)
        ]
        return {
            "text": text,
            "problem": problem,
            "rows": rows,
            "older": page.before,
            "is_cut": page.is_cut,
            "limit": limit,
            "chart": _chart(times),
            "slices": _slices(query, times),
            "said": _said(times),
            "statuses": _status_chips(query),
            "times": _time_chips(query),
            "attribute": lambda name, value: formatted((Term("attribute", value, name=name),)),
        }

    return context


def _row(record: InvocationRecord, document: dict[str, Any]) -> dict[str, Any]:
    return document | {
        "created": record.created_at,
        "changed": record.changed_at,
        "is_ended": record.status in FINAL,
        "is_owned": record.status in OWNED,
        "began": _began(record),
    }


def _began(record: InvocationRecord) -> float | None:
    """Return when its last attempt began."""
    return next((entry.at for entry in reversed(record.history) if entry.status is Status.RUNNING), None)


def _status_chips(query: Query) -> list[Chip]:
    chosen = values_of(query, "status")
    rest = without(query, "status")
    chips = [Chip("all", formatted(rest), not chosen)]
    return chips + [
        Chip(str(status), formatted((*rest, Term("status", str(status)))), chosen == [str(status)]) for status in _CHIPS
    ]


def _time_chips(query: Query) -> list[Chip]:
    chosen, rest = values_of(query, "since"), without(query, "since", "until")
    chips = [Chip("any time", formatted(rest), not chosen and not values_of(query, "until"))]
    return chips + [Chip(each, formatted((*rest, Term("since", each))), chosen == [each]) for each in _TIMES]


def _chart(times: Times) -> Drawn | None:
    if not times.columns:
        return None
    names = [name for name in _KINDS if any(each.counts.get(name) for each in times.columns)]
    series = [Series(name, [each.counts.get(name, 0) for each in times.columns], _KINDS[name]) for name in names]
    return columns(_said(times), [each.at for each in times.columns], times.until, series)


def _slices(query: Query, times: Times) -> list[Slice]:
    """Return a link for each column. It narrows the search to that time."""
    if not times.columns:
        return []
    starts = [each.at for each in times.columns]
    axes, found = Axes(starts[0], times.until, 1, height=120), list[Slice]()
    for each, end in zip(times.columns, [*starts[1:], times.until], strict=True):
        since, until = moment(each.at), moment(end)
        q = formatted(with_terms(query, Term("since", since), Term("until", until)))
        said = ", ".join(f"{count:,} {name}" for name, count in each.counts.items() if count) or "nothing"
        found.append(
            Slice(axes.x(each.at), round(axes.x(end) - axes.x(each.at), 2), q, f"{since}: {said}", since, until)
        )
    return found


def _said(times: Times) -> str:
    """Return what the chart shows, in words."""
    if not times.columns:
        return "nothing to draw"
    sums: dict[str, int] = {}
    for each in times.columns:
        for name, count in each.counts.items():
            sums[name] = sums.get(name, 0) + count
    numbers = ", ".join(f"{count:,} {name}" for name, count in sums.items() if count) or "nothing"
    if times.is_of_ended:
        return f"Ended within {length(times.until - times.columns[0].at)}: {numbers}"
    return f"When the {counted(sum(sums.values()), 'invocation')} of this page came: {numbers}"


PAGES = (
    WebPage(
        "/invocations",
        "Invocations",
        "invocations.html",
        list_page,
        {
            "q": Parameter("a search"),
            "before": Parameter("the cursor of the page before", "id"),
            "limit": limit_parameter(50, 200),
        },
        nav="invocations",
        topics=("invocations",),
    ),
)
