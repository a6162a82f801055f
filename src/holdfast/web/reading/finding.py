"""Invocations by parts of their ids: the beginning, or else the end."""

from __future__ import annotations

import contextlib

from holdfast.errors import InvocationNotFound, StoreReadOnly, UsageError
from holdfast.ids import LENGTH, is_id
from holdfast.model.decoding import INVOCATION
from holdfast.model.names import core_app
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.store.contract import Filter

RUN_PREFIX = "wrun_"
SHORTEST = 6  # characters of an id: they give the time to a quarter of an hour
LISTED = 5


class IdFinder:
    """Find whole ids. Each method runs on the engine's loop."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime

    async def find(self, text: str) -> str:
        """Find an invocation by the beginning of its id, or else by its end. A whole id is returned as it is, without a
        look. The id of a World run may be written as Workflow DevKit shows it: `wrun_` and capitals.

        Raises `InvocationNotFound`, or `UsageError` with the ids that begin, or end, so.
        """
        if text.startswith(RUN_PREFIX):
            text = text.removeprefix(RUN_PREFIX).lower()
        if is_id(text):
            return text
        after = behind(text, "invocation", InvocationNotFound)
        engine = await self._runtime.engine()
        labels: dict[str, str] = {}
        for each in (engine.app, core_app(engine.app)):
            for where in (Filter(before_id=after), Filter(id_ends=text)):
                found = await engine.store.find(each, where, LISTED + 1)
                labels |= {record.id: f"{record.task}, {record.status}" for record in found}
                if any(is_meant(id, text) for id in labels):
                    return only_one(engine.app, labels, text, "invocation", InvocationNotFound)
        # It may be quarantined; the command says so.
        with contextlib.suppress(StoreReadOnly):
            set_aside = await engine.store.quarantined(engine.app)
            labels |= {each.id: "set aside" for each in set_aside if each.kind == INVOCATION}
        return only_one(engine.app, labels, text, "invocation", InvocationNotFound)


def is_meant(id: str, text: str) -> bool:
    return id.startswith(text) or id.endswith(text)


def behind(text: str, what: str, missing: type[Exception]) -> str:
    """Return a text after all ids that begin with this one: "{" is after every letter, and lists are newest first."""
    if not is_id(text[:LENGTH].ljust(LENGTH, "0")):
        raise missing(
            f"there is no {what} '{text[:80]}'; an id has {LENGTH} characters, and its first or last {SHORTEST} will do"
        )
    if len(text) < SHORTEST:
        raise UsageError(
            f"'{text}' is too short for a part of an id: write {SHORTEST} characters or more of its "
            "beginning, or of its end"
        )
    return f"{text[:LENGTH]}{{"


def only_one(app: str, labels: dict[str, str], text: str, what: str, missing: type[Exception]) -> str:
    """Return the id that is meant: that which begins so, else that which ends so."""
    found = [id for id in labels if id.startswith(text)] or [id for id in labels if id.endswith(text)]
    if not found:
        raise missing(f"the app '{app}' has no {what} whose id begins or ends with '{text[:80]}'")
    if len(found) > 1:
        listed = ", ".join(f"{id} ({labels[id]})" for id in found[:LISTED])
        more = " and others" if len(found) > LISTED else ""
        raise UsageError(f"'{text}' may be {listed}{more}; write more of it")
    return found[0]
