"""Runners and the services over HTTP."""

from __future__ import annotations

import functools

from holdfast.model.names import counted
from holdfast.model.records import DRAIN, STOP
from holdfast.web.actions import touched
from holdfast.web.problems import Problem
from holdfast.web.reading.runners import DEAD, WholeRunner
from holdfast.web.requests import limit_parameter
from holdfast.web.routing import ApiRoute, Asked, Render, action

_EFFECT = {
    DRAIN: "takes no more work, and ends when its running calls have ended",
    STOP: "ends now; its running calls go back to the queue",
}


async def list_runners(asked: Asked) -> Render:
    return (await asked.runtime.arun(asked.reading.runners.roster())).document


async def found_runner(asked: Asked) -> WholeRunner:
    """Return the runner of the path. Raises `Problem`."""
    found = await asked.runtime.arun(asked.reading.runners.runner(asked.path["id"]))
    if found is None:
        raise no_runner(asked.path["id"])
    return found


def no_runner(id: str) -> Problem:
    return Problem(
        404, "RunnerNotFound", f"there is no runner '{id[:80]}' on the roster: it has left, or it was removed"
    )


async def show_runner(asked: Asked) -> Render:
    return (await found_runner(asked)).document


async def ask_runner(asked: Asked, wish: str) -> Render:
    found = await found_runner(asked)
    runner, running = found.runner, len(found.owned)
    silent = "" if found.roster.state_of(runner) != DEAD else " It is silent, and may not get the request."
    if asked.body.preview:
        calls = f"; {counted(running, 'call')} with it now" if running else ""
        summary = f"runner {runner.id} {_EFFECT[wish]}{calls}.{silent}"
        return lambda: touched(summary, running, [f"{each.id} {each.task}" for each in found.owned])
    engine = await asked.runtime.aready()
    if not await asked.runtime.arun(engine.store.ask_runner(engine.app, runner.id, wish=wish)):
        raise no_runner(runner.id)
    summary = f"runner {runner.id} is asked to {wish}; it obeys with its next heartbeat.{silent}"
    return lambda: touched(summary, running, id=runner.id, asked=wish)


async def show_services(asked: Asked) -> Render:
    return (await asked.runtime.arun(asked.reading.runners.services(asked.query["limit"]))).document


def _asking(wish: str, summary: str) -> ApiRoute:
    ask, twin = functools.partial(ask_runner, wish=wish), f"holdfast runners {wish} {{id}}"
    return action(f"/runners/{{id}}/{wish}", ask, summary, f"runner.{wish}", twin=twin)


ROUTES = (
    ApiRoute("GET", "/runners", list_runners, "list the runners with their workers"),
    ApiRoute("GET", "/runners/{id}", show_runner, "show one runner, and the calls that it has"),
    _asking(DRAIN, "ask a runner to finish its work and end"),
    _asking(STOP, "ask a runner to end now"),
    ApiRoute(
        "GET",
        "/services",
        show_services,
        "show the slots of the services, why runners are skipped, and the last executions",
        {"limit": limit_parameter(10, 100)},
    ),
)
