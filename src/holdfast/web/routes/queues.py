"""Queues, limits and rates over HTTP."""

from __future__ import annotations

from holdfast.model.names import counted, valid_name
from holdfast.model.rates import LimitChange
from holdfast.rates.api import LimitAccess
from holdfast.runtime.queues import Queues
from holdfast.web.actions import touched
from holdfast.web.problems import about
from holdfast.web.reading.queues import MOST_COUNTED, QueueReading
from holdfast.web.routing import Act, ApiRoute, Asked, Render, action


class SetLimit(Act):
    """The body of a change of a limit or a rate; what is not given stays as it is."""

    limit: int | None = None
    rate: str | None = None
    burst: int | None = None


async def list_queues(asked: Asked) -> Render:
    return (await QueueReading(asked.runtime).queues()).document


async def list_limits(asked: Asked) -> Render:
    return (await QueueReading(asked.runtime).limits()).document


async def show_limit(asked: Asked) -> Render:
    with about("path.name"):
        name = valid_name("task", asked.path["name"])
    return (await QueueReading(asked.runtime).limit(name)).document


async def pause_queue(asked: Asked) -> Render:
    with about("path.name"):
        name = valid_name("queue", asked.path["name"])
    if asked.body.preview:
        found = {each.name: each for each in (await QueueReading(asked.runtime).queues()).queues}
        there = found.get(name)
        if there is not None and there.pause is not None:
            by = there.pause.by
            return lambda: touched(f"the queue '{name}' is paused already, by {by}", 0)
        waiting, running = (0, 0) if there is None else (there.waiting, there.running)
        goes_on = f" {_many(running, 'running call')} go on." if running else ""
        return lambda: touched(
            f"No runner takes work from '{name}' until it is resumed: {_many(waiting, 'call')} wait there now."
            f"{goes_on}",
            waiting,
        )
    pause = await Queues(asked.runtime).apause(name, reason=asked.body.reason, by=asked.principal.name)
    return lambda: touched(f"the queue '{name}' is paused, by {pause.by}", queue=name, paused=True)


def _many(count: int, what: str) -> str:
    return f"over {MOST_COUNTED:,} {what}s" if count > MOST_COUNTED else counted(count, what)


async def resume_queue(asked: Asked) -> Render:
    with about("path.name"):
        name = valid_name("queue", asked.path["name"])
    if asked.body.preview:
        return lambda: touched(f"Runners take work from '{name}' again.")
    ended = await Queues(asked.runtime).aresume(name)
    done = "is resumed" if ended else "was not paused"
    return lambda: touched(f"the queue '{name}' {done}", queue=name, paused=False, changed=ended)


async def set_limit(asked: Asked) -> Render:
    name, body = asked.path["name"], asked.body
    access = LimitAccess(asked.runtime)
    if body.preview:
        access.check(name, body.limit, body.rate, body.burst)
        return lambda: touched(f"All runners follow within 2 seconds: '{name}' gets {_asked_for(body)}.")
    done = await access.aset(
        name, limit=body.limit, rate=body.rate, burst=body.burst, reason=body.reason, by=asked.principal.name
    )
    return lambda: touched(f"'{name}' is changed: {_asked_for(done)}", name=name)


async def clear_limit(asked: Asked) -> Render:
    name = asked.path["name"]
    if asked.body.preview:
        return lambda: touched(f"What the code declares for '{name}' holds again, within 2 seconds.")
    ended = await LimitAccess(asked.runtime).aclear(name)
    done = "is as the code declares it" if ended else "was not changed"
    return lambda: touched(f"'{name}' {done}", name=name, changed=ended)


def _asked_for(change: SetLimit | LimitChange) -> str:
    parts = (("limit", change.limit), ("rate", change.rate), ("burst", change.burst))
    return ", ".join(f"{name} {value}" for name, value in parts if value is not None) or "no change"


ROUTES = (
    ApiRoute("GET", "/queues", list_queues, "list queues: how deep they are (1,001: or more), and which are paused"),
    action("/queues/{name}/pause", pause_queue, "let no runner take work from a queue", "queue.pause"),
    action("/queues/{name}/resume", resume_queue, "end the pause of a queue", "queue.resume"),
    ApiRoute("GET", "/limits", list_limits, "list limits and rates, and for how many keys calls wait (101: or more)"),
    ApiRoute(
        "GET",
        "/limits/{name}",
        show_limit,
        "show a limit or rate: which calls hold it, which wait, and when others start",
    ),
    action("/limits/{name}/set", set_limit, "change a limit or a rate until it is cleared", "limit.set", SetLimit),
    action("/limits/{name}/clear", clear_limit, "end the change of a limit or rate", "limit.clear"),
)
