"""The audit record over HTTP."""

from __future__ import annotations

from holdfast.web.principals import Role
from holdfast.web.problems import about
from holdfast.web.requests import Parameter, limit_parameter
from holdfast.web.routing import ApiRoute, Asked, Render


async def list_audit(asked: Asked) -> Render:
    with about("query"):
        return (await asked.runtime.arun(asked.reading.audit(**asked.query))).document


ROUTES = (
    ApiRoute(
        "GET",
        "/audit",
        list_audit,
        "list audit records, newest first",
        {
            "who": Parameter("only by this user or token"),
            "action": Parameter("only this action, such as queue.pause, or all of queue"),
            "target": Parameter("only what changed this: an id, or a name"),
            "since": Parameter("from then: a time, or how long ago, such as 24h"),
            "before": Parameter("only after this one: the cursor of the page before", "id"),
            "limit": limit_parameter(100, 500),
        },
        role=Role.ADMIN,
    ),
)
