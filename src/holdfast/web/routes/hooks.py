"""Hooks over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

from holdfast.errors import NotEncodable, PayloadDoesNotFit
from holdfast.web.actions import touched
from holdfast.web.problems import Problem, about
from holdfast.web.requests import Parameter, limit_parameter
from holdfast.web.routing import Act, ApiRoute, Asked, Render, action
from holdfast.workflows.hooks_records import name_of, valid_resume_id, valid_token
from holdfast.workflows.hooks_resuming import Sent, resumed
from holdfast.workflows.hooks_resuming import not_found as not_found_hook


async def list_hooks(asked: Asked) -> Render:
    return (await asked.runtime.arun(asked.reading.hooks(**asked.query))).document


async def show_hook(asked: Asked) -> Render:
    hook = await asked.runtime.arun(asked.reading.hook(asked.path["name"]))
    if hook is None:
        raise not_found_hook("")
    return hook.document


class HookPayload(Act, kw_only=True):
    """A payload for the hook of that name. With a `resume_id`, it is delivered once, however often it is sent."""

    payload: Any = None
    resume_id: str | None = None


class TokenPayload(HookPayload, kw_only=True):
    """A payload for the hook of a token."""

    token: str


async def resume_hook(asked: Asked) -> Render:
    """Resume a hook by its name, or by the token in the body."""
    body: HookPayload = asked.body
    with about("body.resume_id"):
        resume_id = None if body.resume_id is None else valid_resume_id(body.resume_id)
    if isinstance(body, TokenPayload):
        with about("body.token"):
            name = name_of(valid_token(body.token))
    else:
        name = asked.path["name"]
    engine = await asked.runtime.aready()
    if body.preview:
        found = await asked.runtime.arun(asked.reading.hook(name))
        if found is None:
            raise not_found_hook("")
        return lambda: touched(f"The run {found.hook.run} of {found.hook.task} goes on.", 1, [found.hook.run])
    try:
        sent = await asyncio.to_thread(Sent, engine, body.payload)
        hook = await asked.runtime.arun(resumed(engine, name, sent, resume_id))
    except (NotEncodable, PayloadDoesNotFit) as error:
        raise Problem(422, type(error).__name__, str(error), path=f"body.{error.path}") from error
    return lambda: touched(
        f"{hook.task} {hook.run} goes on", 1, [hook.run], run=hook.run, call=hook.call, resume_id=resume_id
    )


ROUTES = (
    ApiRoute(
        "GET",
        "/hooks",
        list_hooks,
        "list hooks",
        {
            "run": Parameter("only those of this run", "id"),
            "before": Parameter("only after this one: the cursor of the page before"),
            "limit": limit_parameter(100, 500),
        },
    ),
    action("/hooks/resume", resume_hook, "give a payload to the hook of a token", "hook.resume", TokenPayload),
    ApiRoute("GET", "/hooks/{name}", show_hook, "show one hook, by the hash of its token"),
    action("/hooks/{name}/resume", resume_hook, "give a payload to that hook", "hook.resume", HookPayload),
)
