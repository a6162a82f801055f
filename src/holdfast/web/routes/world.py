"""A World over HTTP: runs of Workflow DevKit, the messages that are delivered for them, and the servers."""

from __future__ import annotations

from holdfast.errors import UsageError
from holdfast.runtime.foreign import MAX_DELIVERIES
from holdfast.web.actions import touched
from holdfast.web.problems import Problem, about
from holdfast.web.reading.world import WorldReading
from holdfast.web.requests import Parameter, limit_parameter
from holdfast.web.routing import Act, ApiRoute, Asked, Render, action


class Redelivering(Act, kw_only=True):
    """The body of another delivery. With the same `request`, a text of your choice, the message is sent once."""

    request: str | None = None


async def list_runs(asked: Asked) -> Render:
    with about("query.status"):
        return (await asked.runtime.arun(WorldReading(asked.runtime).runs(**asked.query))).document


async def list_messages(asked: Asked) -> Render:
    given = {**asked.query, "ended": asked.query["ended"] == "yes"}
    return (await asked.runtime.arun(WorldReading(asked.runtime).messages(**given))).document


async def show_message(asked: Asked) -> Render:
    return (await asked.runtime.arun(WorldReading(asked.runtime).message(asked.path["id"]))).document


async def list_servers(asked: Asked) -> Render:
    return (await asked.runtime.arun(WorldReading(asked.runtime).servers())).document


async def redeliver(asked: Asked) -> Render:
    body: Redelivering = asked.body
    whole = await asked.runtime.arun(WorldReading(asked.runtime).message(asked.path["id"]))
    message = whole.message
    if message.status == "delivering":
        raise Problem(409, "UsageError", f"{message.id} is being delivered; if that fails, it is tried again by itself")
    if body.preview:
        state = f"is at attempt {message.attempt} of {MAX_DELIVERIES}" if message.ended_at is None else message.status
        would = "is replaced, and its attempts count from 1" if message.ended_at is None else "is sent once more"
        return lambda: touched(f"{message.id} {state}: it {would}.", 1, [message.id])
    engine = await asked.runtime.aready()
    try:
        made = await asked.runtime.arun(engine.foreign.redeliver(message.id, body.request or str(engine.ids.new())))
    except UsageError as error:
        raise Problem(409, "UsageError", str(error)) from error
    return lambda: touched(f"{message.id} is delivered again as {made}", 1, [made], id=made)


_BEFORE = Parameter("only older ones: the cursor of the page before", "id")
ROUTES = (
    ApiRoute(
        "GET",
        "/world/runs",
        list_runs,
        "list runs of a World, newest first",
        {
            "status": Parameter("only of this status", is_list=True),
            "before": _BEFORE,
            "limit": limit_parameter(50, 500),
        },
    ),
    ApiRoute(
        "GET",
        "/world/messages",
        list_messages,
        "list messages of a World that are to be delivered, newest first",
        {
            "run": Parameter("only those of this run, ended ones too: wrun_…"),
            "ended": Parameter("whether ended ones are wanted too", choices=("yes", "no"), default="no"),
            "before": _BEFORE,
            "limit": limit_parameter(50, 500),
        },
    ),
    ApiRoute("GET", "/world/messages/{id}", show_message, "show one message: its content, its attempts, its error"),
    action(
        "/world/messages/{id}/redeliver",
        redeliver,
        "deliver a message at once, whatever has become of it",
        "world.redeliver",
        Redelivering,
        twin="holdfast world messages redeliver {id}",
    ),
    ApiRoute("GET", "/world/servers", list_servers, "list the servers that deliver messages"),
)
