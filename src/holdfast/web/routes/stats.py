"""Statistics over HTTP."""

from __future__ import annotations

from holdfast.web.problems import about
from holdfast.web.requests import Parameter
from holdfast.web.routing import ApiRoute, Asked, Render


async def show_stats(asked: Asked) -> Render:
    with about("query"):
        return (await asked.runtime.arun(asked.reading.stats(**asked.query))).document


ROUTES = (
    ApiRoute(
        "GET",
        "/stats",
        show_stats,
        "show how much ended, how long it waited and ran, and what failed",
        {
            "since": Parameter("from then: a time, or how long ago, such as 24h", default="1h"),
            "until": Parameter("until then: likewise; now, if it is not given"),
            "step": Parameter("between points of the series, such as 10m"),
            "task": Parameter("only of this task, by its whole name", is_list=True),
            "queue": Parameter("only of this queue", is_list=True),
        },
    ),
)
