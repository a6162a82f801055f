"""What the engine has to know about a task."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

from holdfast.lifecycle.records import lane_of


class Place(StrEnum):
    """What kind of place a task runs in."""

    THREAD = "thread"
    LOOP = "loop"


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
    def names(self) -> tuple[str, ...]:
        """The names under which stored invocations may call for it."""
        return (self.name, *self.aliases)

    @property
    def lanes(self) -> tuple[str, ...]:
        return tuple(lane_of(self.queue, name, self.tags) for name in self.names)
