"""Hooks over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from holdfast.errors import NotEncodable, PayloadDoesNotFit
from holdfast.web.principals import Role
from holdfast.web.problems import Problem, about, wrong
from holdfast.web.requests import Parameter, document_of, limit_parameter
from holdfast.web.routing import ApiRoute, Asked, Render
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


async def resume_hook(asked: Asked) -> Render:
    """Resume a hook by its name, or by the token in the body."""
    given = await document_of(asked.request, asked.runtime.settings.webhook_limit)
    by_name = "name" in asked.path
    known = ("payload", "resume_id", "reason") if by_name else ("payload", "resume_id", "reason", "token")
    for name in given:
        if name not in known:
            raise wrong(f"body.{name[:80]}", f"there is no '{name[:80]}' here; known are: {', '.join(known)}")
    resume_id = given.get("resume_id")
    with about("body.resume_id"):
        resume_id = None if resume_id is None else valid_resume_id(resume_id)
    with about("body.token"):
        name = asked.path["name"] if by_name else name_of(valid_token(given.get("token")))
    engine = await asked.runtime.aready()
    try:
        sent = await asyncio.to_thread(Sent, engine, given.get("payload"))
        hook = await asked.runtime.arun(resumed(engine, name, sent, resume_id))
    except (NotEncodable, PayloadDoesNotFit) as error:
        raise Problem(422, type(error).__name__, str(error), path=f"body.{error.path}") from error
    return lambda: {"run": hook.run, "call": hook.call, "resume_id": resume_id}


class HookPayload(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A payload for the hook of that name. With a `resume_id`, it is delivered once, however often it is sent."""

    payload: Any = None
    resume_id: str | None = None


class TokenPayload(HookPayload, kw_only=True, forbid_unknown_fields=True):
    """A payload for the hook of a token."""

    token: str


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
    ApiRoute(
        "POST",
        "/hooks/resume",
        resume_hook,
        "give a payload to the hook of a token",
        role=Role.OPERATOR,
        action="hook.resume",
        reads=TokenPayload,
    ),
    ApiRoute("GET", "/hooks/{name}", show_hook, "show one hook, by the hash of its token"),
    ApiRoute(
        "POST",
        "/hooks/{name}/resume",
        resume_hook,
        "give a payload to the hook of that name",
        role=Role.OPERATOR,
        action="hook.resume",
        reads=HookPayload,
    ),
)
