"""Actions over HTTP: the record of what is about to be done is stored before a route that changes something is called,
and its outcome after it. If the record cannot be stored, nothing is done.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from holdfast.access.audit import DONE, FAILED, WITH_VALUES, Action, AuditLog, said_of, twin_of
from holdfast.web.documents import Document
from holdfast.web.problems import Problem
from holdfast.web.routing import ApiRoute, Asked, Render
from holdfast.workflows.hooks_records import name_of

TWINS = {
    "access.open": "access open",
    "archive.purge": "purge",
    "archive.rerun": "rerun",
    "archive.retain": "archive retain",
    "event.emit": "events emit",
    "group.cancel": "groups cancel",
    "hook.resume": "hooks resume",
    "invocation.cancel": "cancel",
    "invocation.submit": "submit",
    "invocation.wake": "wake",
    "limit.clear": "limits clear",
    "limit.set": "limits set",
    "queue.pause": "queues pause",
    "queue.resume": "queues resume",
    "runner.drain": "runners drain",
    "runner.stop": "runners stop",
    "schedule.backfill": "schedules backfill",
    "schedule.create": "schedules create",
    "schedule.delete": "schedules delete",
    "schedule.pause": "schedules pause",
    "schedule.resume": "schedules resume",
    "schedule.run": "schedules run",
    "schedule.update": "schedules update",
    "token.create": "access token create",
    "token.revoke": "access token revoke",
    "workflow.fork": "workflow fork",
    "world.import": "world import",
    "world.redeliver": "world messages redeliver",
}
"""Which command does the same; a test compares them with the commands."""
_NAMES = ("name", "id", "ids", "task")  # of a body: what is changed, where the path does not say
_HOOK_NAME = re.compile("[0-9a-f]{64}")
_FILTERS = ("where", "query", "status", "task", "queue", "tag", "since", "until", "key", "error", "attributes")


def action_of(route: ApiRoute, asked: Asked) -> Action | None:
    """Return what a request is about to do; None if it changes nothing."""
    if not route.action or getattr(asked.body, "preview", False):
        return None
    who, names = asked.principal, hook_in(asked) if route.action == "hook.resume" else names_in(asked)
    options = [] if names else filter_in(asked)
    twin = TWINS.get(route.action)
    return Action(
        who=who.name,
        via=who.via,
        source=who.source,
        name=route.action,
        targets=[" ".join(names or options)] if asked.path or options else names,
        reason=getattr(asked.body, "reason", ""),
        twin="" if twin is None else twin_of(f"holdfast {twin}", names or [f"--{each}" for each in options]),
    )


def names_in(asked: Asked) -> list[str]:
    """Return the ids and names that a request names: in its path, else in its body."""
    if asked.path:
        return list(asked.path.values())
    found = (getattr(asked.body, name, None) for name in _NAMES)
    return next((words for value in found if (words := _words(value))), []) if not _is_filter(asked) else []


def hook_in(asked: Asked) -> list[str]:
    """Return the name of the hook that a request resumes. Its token is a secret, also where it looks like a name. What
    is no name in the path may be a token.
    """
    given = asked.path.get("name")
    if given is None:
        token = getattr(asked.body, "token", "")
        return [name_of(token)] if token else []
    return [given if _HOOK_NAME.fullmatch(given) else name_of(given)]


def filter_in(asked: Asked) -> list[str]:
    """Return the fields of a body that say which of many are changed: ``status=failed``."""
    named = [(name, "search" if name == "query" else name) for name in _FILTERS]
    return [f"{option}={word}" for name, option in named for word in _words(getattr(asked.body, name, None))]


def _is_filter(asked: Asked) -> bool:
    return not isinstance(getattr(asked.body, "task", ""), str) and not getattr(asked.body, "ids", ())


def _words(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{name}={each}" for name, each in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [each for each in value if isinstance(each, str)]
    return [value] if isinstance(value, str) and value else []


async def audited(asked: Asked, action: Action, work: Callable[[], Awaitable[Render | Response]]) -> Render | Response:
    """Do the work, with a record of it. Raises what it raises, and `StoreError` before anything is done. A client that
    hangs up leaves a record without an outcome, and so does a process that ends.
    """
    log = (await asked.runtime.aready()).part(AuditLog)
    record = await asked.runtime.arun(log.begin(action))
    try:
        answer = await work()
    except ClientDisconnect:
        raise
    except Exception as error:
        await asked.runtime.arun(log.end(record, FAILED, _said_of(error, action.name)))
        raise
    if isinstance(answer, Response):
        await asked.runtime.arun(log.end(record, FAILED if answer.status_code >= 400 else DONE))
        return answer
    document: Document = {}
    try:
        document = await asyncio.to_thread(answer)
    finally:  # the action is done, whatever becomes of its answer
        await asked.runtime.arun(log.end(record, DONE, str(document.get("summary", ""))))
    return lambda: document


def _said_of(error: Exception, action: str) -> str:
    if not isinstance(error, Problem):
        return said_of(error, action)
    is_mistake = error.status in (400, 422) and action in WITH_VALUES
    return f"{error.title}: {error.path if is_mistake else error.detail}"
