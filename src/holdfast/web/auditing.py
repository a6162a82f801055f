"""Actions over HTTP: the record of what is about to be done is stored before a route that changes something is called,
and its outcome after it. If the record cannot be stored, nothing is done.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from holdfast.access.audit import DONE, FAILED, Action, AuditLog
from holdfast.errors import HoldfastError
from holdfast.showing import error_text
from holdfast.web.documents import Document
from holdfast.web.problems import Problem
from holdfast.web.routing import ApiRoute, Asked, Render

_NAMING = ("where", "query", "ids", "id", "names", "name", "task", "queue", "schedule", "event", "key")
"""Fields of a body that say what is changed, where the path does not."""


def action_of(route: ApiRoute, asked: Asked) -> Action | None:
    """Return what a request is about to do; None if it changes nothing."""
    if not route.action or getattr(asked.body, "preview", False):
        return None
    who, target = asked.principal, target_of(asked)
    words = {name: shlex.quote(value) for name, value in asked.path.items()}
    return Action(
        who=who.name,
        via=who.via,
        source=who.source,
        name=route.action,
        target=target,
        reason=getattr(asked.body, "reason", ""),
        twin=route.twin.format(**words, target=shlex.quote(target)) if route.twin else "",
    )


def target_of(asked: Asked) -> str:
    """Return the ids and names that a request names: in its path, else in its body."""
    if asked.path:
        return " ".join(asked.path.values())
    return " ".join(word for name in _NAMING for word in _words(getattr(asked.body, name, None)))


def _words(value: Any) -> list[str]:
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
        await asked.runtime.arun(log.end(record, FAILED, _said_of(error)))
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


def _said_of(error: Exception) -> str:
    """Return what the record says of an error. The text of one that is not ours may hold anything."""
    if isinstance(error, Problem):
        return f"{error.title}: {error.detail}"
    name = type(error).__name__
    return f"{name}: {error_text(error)}" if isinstance(error, HoldfastError) else name
