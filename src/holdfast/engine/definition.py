"""What the engine has to know about a task."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

from holdfast.errors import UsageError
from holdfast.execution.declared import why_unreachable
from holdfast.lifecycle.records import lane_of


class Place(StrEnum):
    """What kind of place a task runs in."""

    THREAD = "thread"
    LOOP = "loop"
    PROCESS = "process"


class TaskDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A task as declared in code. Its `fingerprint` changes when its signature or its options do."""

    name: str
    function: Callable[..., Any]
    signature: inspect.Signature
    place: Place
    queue: str = "default"
    tags: tuple[str, ...] = ()
    priority: int = 0
    aliases: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        facts = (str(self.signature), self.place, self.queue, ",".join(self.tags), str(self.priority))
        return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]

    @property
    def is_coroutine(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which stored invocations may call for it."""
        return (self.name, *self.aliases)

    @property
    def lanes(self) -> tuple[str, ...]:
        return tuple(lane_of(self.queue, name, self.tags) for name in self.names)


def place_for(function: Callable[..., Any], executor: str | None) -> Place:
    """Where a function runs: plain ones on a thread and coroutine functions on the loop, unless something else is
    asked for. Raises `UsageError`.
    """
    usual = Place.LOOP if inspect.iscoroutinefunction(function) else Place.THREAD
    if executor is None or executor == usual:
        return usual
    if executor != Place.PROCESS:
        kind = "a coroutine function" if usual is Place.LOOP else "a plain function"
        raise UsageError(f"executor={executor!r}: {kind} runs in '{usual}', where it runs anyway, or in 'process'")
    if why := why_unreachable(function):
        raise UsageError(f'executor="process" needs a function at the top level of a module: {why}')
    return Place.PROCESS


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:
        raise UsageError(f"{function!r} does not tell its parameters; wrap it in a function that does") from None
