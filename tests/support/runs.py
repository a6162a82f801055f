"""Runs of workflows in a fleet, on virtual time: their bodies and steps are on the engine's own loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.fleet import APP, Fleet

from holdfast import App
from holdfast.model.records import InvocationRecord
from holdfast.runtime.definition import TaskDefinition
from holdfast.runtime.engine import Engine


class Declared:
    """What a program declares: ``declared.app`` has the decorators. It is never opened."""

    def __init__(self) -> None:
        self.app = App("memory://", name=APP)

    @property
    def tasks(self) -> Sequence[TaskDefinition]:
        return [task.definition for task in self.app.runtime.tasks.values()]


def call_of(engine: Engine, workflow: Any, *args: Any) -> InvocationRecord:
    """Return a call of a task or workflow as it would be stored now."""
    record, payloads = workflow.prepared(engine, args, {})
    assert not payloads
    return record  # type: ignore[no-any-return]


async def submit(fleet: Fleet, workflow: Any, *args: Any) -> str:
    """Put a call into the store, without a hint."""
    record = call_of(fleet.engine(fleet.store), workflow, *args)
    await fleet.store.insert([record])
    return record.id
