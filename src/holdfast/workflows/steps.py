"""Steps as they are declared: a function, its retries, its time limit, and how its end is recorded."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.executors.injection import InjectedParameter
from holdfast.model.retries import Never, Policy
from holdfast.runtime.definition import ExecutorKind


class StepDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A step. `name` is the short name that addresses it in a run (``charge#2``), `task` that of its invocations."""

    name: str
    task: str
    function: Callable[..., Any]
    signature: inspect.Signature
    executor: ExecutorKind
    retries: Policy = Never()
    timeout: float | None = None
    cancel_grace: float = 10.0
    repeatable: bool = False
    at_most_once: bool = False
    transactional: bool = False
    queue: str | None = None
    tags: tuple[str, ...] = ()
    wanted: tuple[InjectedParameter, ...] = ()  # parameters that a worker fills in

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.signature.parameters)


class StepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How one call of a step differs from what its declaration says."""

    key: str | None = None
    queue: str | None = None
    tags: tuple[str, ...] | None = None
    timeout: float | None = None
    retries: Policy | None = None
