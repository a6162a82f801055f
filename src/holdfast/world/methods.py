"""The methods of the World's protocol: one table. A request is checked here, and becomes a call with keywords.

A line says which fields a method takes, and which of them it needs. What a field may hold is for the method to say: it
raises `WorldError` (400). Fields that are not in the line are refused: a newer client must not believe that they count.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from holdfast.errors import KeyTaken, NotEncodable, UsageError
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.engine import Engine
from holdfast.world.delivery import Addresses
from holdfast.world.errors import CONFLICT, WORLD_ERROR, WorldError, bad_request
from holdfast.world.queue import Messages
from holdfast.world.requests import text
from holdfast.world.rules import MAX_ID
from holdfast.world.storage import WorldStorage

Kind = type | tuple[type, ...]
_TEXT, _OBJECT, _LIST, _WHOLE = str, dict, list, int
_RESOLVED = {"resolveData": _TEXT}
_PAGED = {"pagination": _OBJECT, **_RESOLVED}


Call = Callable[[AppRuntime, Engine, dict[str, Any]], Awaitable[dict[str, Any]]]


class Method(NamedTuple):
    """A line of the table: the call, its required and its other fields."""

    call: Call
    required: Mapping[str, Kind]
    others: Mapping[str, Kind]
    may_be_null: frozenset[str] = frozenset()  # of the required ones


def _of_storage(name: str) -> Call:
    def call(runtime: AppRuntime, engine: Engine, given: dict[str, Any]) -> Awaitable[dict[str, Any]]:
        made: Awaitable[dict[str, Any]] = getattr(engine.part(WorldStorage), name)(**given)
        return made

    return call


async def _queue(runtime: AppRuntime, engine: Engine, given: dict[str, Any]) -> dict[str, Any]:
    if (base_url := given.get("base_url")) is not None:
        given["base_url"] = str(engine.part(Addresses).checked(base_url))
    return await engine.part(Messages).send(**given)


async def _start(runtime: AppRuntime, engine: Engine, given: dict[str, Any]) -> dict[str, Any]:
    await engine.part(Addresses).register(given["base_url"])
    return {}


async def _submit(runtime: AppRuntime, engine: Engine, given: dict[str, Any]) -> dict[str, Any]:
    """Submit a Python task; repeated with the same operation id, it is the same call."""
    task: Any = runtime.tasks.get(given["task"])
    if task is None or task.definition.is_hidden:
        known = ", ".join(sorted({each.name for each in runtime.tasks.values() if not each.definition.is_hidden}))
        raise WorldError(WORLD_ERROR, 404, f"this app has no task {given['task']!r:.80}; it has: {known or 'none'}")
    operation = text("operationId", given["operation_id"], MAX_ID)
    try:
        keyed = task.options(key=given.get("key") or f"world:{operation}")
        handle = await keyed.asubmit(*given.get("args", ()), **given.get("kwargs", {}))
    except KeyTaken as error:
        raise WorldError(CONFLICT, 409, str(error)) from error
    except (UsageError, NotEncodable) as error:
        raise bad_request(str(error)) from error
    return {"id": handle.id}


def _method(name: str, required: Mapping[str, Kind], others: Mapping[str, Kind] = {}, *nullable: str) -> Method:
    return Method(_of_storage(name), required, others, frozenset(nullable))


_RUN = {"runId": _TEXT}
_STREAM = {"runId": _TEXT, "name": _TEXT}
_ONCE = {"operationId": _TEXT}

METHODS: Mapping[str, Method] = {
    "events.create": _method(
        "events_create", {"runId": _TEXT, "event": _OBJECT}, {"params": _OBJECT, **_ONCE}, "runId"
    ),
    "events.get": _method("events_get", {**_RUN, "eventId": _TEXT}, _RESOLVED),
    "events.list": _method("events_list", _RUN, _PAGED),
    "events.listByCorrelationId": _method(
        "events_list_by_correlation_id", {"correlationId": _TEXT}, {**_RUN, **_PAGED}
    ),
    "runs.get": _method("runs_get", _RUN, _RESOLVED),
    "runs.list": _method("runs_list", {}, {"workflowName": _TEXT, "status": (str, list), **_PAGED}),
    "runs.setAttributes": _method(
        "runs_set_attributes", {**_RUN, "changes": _LIST}, {"allowReservedAttributes": bool, **_ONCE}
    ),
    "steps.get": _method("steps_get", {"runId": _TEXT, "stepId": _TEXT}, _RESOLVED, "runId"),
    "steps.list": _method("steps_list", _RUN, _PAGED),
    "hooks.get": _method("hooks_get", {"hookId": _TEXT}, _RESOLVED),
    "hooks.getByToken": _method("hooks_get_by_token", {"token": _TEXT}, _RESOLVED),
    "hooks.list": _method("hooks_list", {}, {**_RUN, **_PAGED}),
    "queue": Method(
        _queue,
        {"queueName": _TEXT, "message": object, **_ONCE},
        {"idempotencyKey": _TEXT, "delaySeconds": (int, float), "headers": _OBJECT, "baseUrl": _TEXT},
    ),
    "submit": Method(_submit, {"task": _TEXT, **_ONCE}, {"args": _LIST, "kwargs": _OBJECT, "key": _TEXT}),
    "start": Method(_start, {"baseUrl": _TEXT}, {}),
    "streams.write": _method("streams_write", {**_STREAM, "chunks": _LIST}, _ONCE),
    "streams.close": _method("streams_close", _STREAM, _ONCE),
    "streams.list": _method("streams_list", _RUN),
    "streams.getChunks": _method("streams_get_chunks", _STREAM, {"limit": _WHOLE, "cursor": _TEXT}),
    "streams.getInfo": _method("streams_get_info", _STREAM),
}

_UPPER = re.compile(r"[A-Z]")


def keywords_of(method: Method, given: Any) -> dict[str, Any]:
    """Return the keywords of a call. Raises `WorldError`."""
    if not isinstance(given, dict):
        raise bad_request("the body is no JSON object")
    known = {**method.required, **method.others}
    if unknown := [name for name in given if name not in known]:
        raise bad_request(f"there is no field {unknown[0]!r:.80} here; there are: {', '.join(known) or 'none'}")
    found: dict[str, Any] = {}
    for name, kind in known.items():
        value = given.get(name)
        if value is None and (name not in method.required or name in method.may_be_null):
            if name in method.required:
                found[_snake(name)] = None
            continue
        if name not in given or (value is None and kind is not object):
            raise bad_request(f"{name}: it is missing")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
            raise bad_request(f"{name}: it has the wrong type")
        found[_snake(name)] = value
    return found


def _snake(name: str) -> str:
    return _UPPER.sub(lambda letter: "_" + letter[0].lower(), name)
