"""Runs of workflows over HTTP: their steps and their events."""

from __future__ import annotations

from holdfast.runtime.runs import of_run
from holdfast.web.problems import about
from holdfast.web.requests import Parameter, limit_parameter
from holdfast.web.routing import ApiRoute, Asked, Render


async def list_steps(asked: Asked) -> Render:
    record = of_run(await asked.record())
    with about("query.after"):
        page = await asked.runtime.arun(asked.reading.steps(record, **asked.query))
    return lambda: page.document(asked.codec)


async def show_step(asked: Asked) -> Render:
    page = await asked.runtime.arun(asked.reading.step(await asked.record(), asked.path["step"]))
    return lambda: page.document(asked.codec)["steps"][0]


async def list_events(asked: Asked) -> Render:
    record = of_run(await asked.record())
    with about("query.after"):
        page = await asked.runtime.arun(asked.reading.events(record, **asked.query))
    return lambda: page.document(asked.codec)


_AFTER_STEP = Parameter("only after this step: the last one of the page before")
_AFTER_EVENT = Parameter("only after this event: the cursor of the last one of the page before")

ROUTES = (
    ApiRoute(
        "GET",
        "/invocations/{id}/steps",
        list_steps,
        "list the steps, children and waits of a run",
        {"after": _AFTER_STEP, "limit": limit_parameter(100, 500)},
    ),
    ApiRoute("GET", "/invocations/{id}/steps/{step:path}", show_step, "show one step, such as charge#2"),
    ApiRoute(
        "GET",
        "/invocations/{id}/events",
        list_events,
        "list the events of a run, in the order of its log",
        {
            "correlation": Parameter("only those of this step"),
            "after": _AFTER_EVENT,
            "limit": limit_parameter(100, 500),
        },
    ),
)
