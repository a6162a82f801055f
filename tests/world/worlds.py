"""Worlds for tests: one or several servers' storages on a store, driven from plain test functions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import pytest
from tests.support.engines import make_engine

from holdfast.clock import Clock, SystemClock
from holdfast.ids import derived_id
from holdfast.runtime.engine import Engine
from holdfast.store import open_store
from holdfast.store.contract import Store
from holdfast.testing.clock import FakeClock
from holdfast.world.errors import WorldError
from holdfast.world.records import run_name
from holdfast.world.storage import WorldStorage

T = TypeVar("T")
SPEC = 5


class Server:
    """The storage of one server, with the events of a workflow by name."""

    def __init__(self, run: Callable[[Awaitable[Any]], Any], store: Store, clock: Clock, seed: int, **settings: Any):
        self._run = run
        self.clock = clock
        self.engine: Engine = make_engine(store, clock, random.Random(seed), **settings)
        self.storage: WorldStorage = self.engine.part(WorldStorage)
        self._made = seed * 1000

    def call(self, method: str, **fields: Any) -> Any:
        return self._run(getattr(self.storage, method)(**fields))

    def new_id(self) -> str:
        """Return a run id as a client makes it."""
        self._made += 1
        return run_name(derived_id("test", str(self._made), at=self.clock.now()))

    def create(self, run: str | None, kind: str, call: str | None = None, **more: Any) -> Any:
        """Create an event. `data` is its eventData; `params`, `spec` and `operation` are optional."""
        event: dict[str, Any] = {"eventType": kind, "specVersion": more.pop("spec", SPEC)}
        event |= {} if call is None else {"correlationId": call}
        event |= {"eventData": more["data"]} if "data" in more else {}
        operation = {"operation_id": more["operation"]} if "operation" in more else {}
        return self.call("events_create", run_id=run, event=event, params=more.get("params"), **operation)

    def run(self, name: str = "checkout", *, input: Any = b"devl[[]]", started: bool = False, **more: Any) -> str:
        """Create a run, and return its id."""
        data = {"deploymentId": "dpl", "workflowName": name, "input": input, **more.pop("data", {})}
        run: str = self.create(more.pop("id", None) or self.new_id(), "run_created", data=data, **more)["run"]["runId"]
        if started:
            self.create(run, "run_started")
        return run

    def step(self, run: str, id: str = "step_1", *, started: bool = False, **more: Any) -> Any:
        data = {"stepName": "charge", "input": more.pop("input", b"devl[1]")}
        made = self.create(run, "step_created", id, data=data, **more)["step"]
        return self.create(run, "step_started", id)["step"] if started else made

    def hook(self, run: str, id: str, token: str, **more: Any) -> Any:
        return self.create(run, "hook_created", id, data={"token": token, **more})

    def events(self, run: str, **more: Any) -> list[Any]:
        return list(self.call("events_list", run_id=run, **more)["data"])

    def kinds(self, run: str) -> list[str]:
        return [event["eventType"] for event in self.events(run)]

    def get(self, run: str, **more: Any) -> Any:
        return self.call("runs_get", run_id=run, **more)

    def refused(self, name: str, status: int, *given: Any, **more: Any) -> WorldError:
        """Create an event that is refused so; nothing may be written. Return the error."""
        before = self.kinds(given[0]) if given[0] is not None and name != "WorkflowRunNotFoundError" else None
        with pytest.raises(WorldError) as caught:
            self.create(*given, **more)
        assert (caught.value.name, caught.value.status) == (name, status), caught.value.message
        if before is not None:
            assert self.kinds(given[0]) == before
        return caught.value


class World(Server):
    """A server on a store of its own, and others on the same store."""

    def __init__(self, url: str, *, clock: Clock | None = None, **settings: Any) -> None:
        self._loop = asyncio.Runner()
        self._url, self._settings, self._servers = url, settings, 1
        clock = clock or (FakeClock() if url == "memory://" else SystemClock())
        self._store = open_store(url, clock=clock)
        super().__init__(self._loop.run, self._store, clock, 1, **settings)
        self._loop.run(self.engine.open())
        self._others: list[Server] = []

    def other(self, **settings: Any) -> Server:
        """Return another server on the same store."""
        self._servers += 1
        store = self._store if self._url == "memory://" else open_store(self._url, clock=self.clock)
        other = Server(self._loop.run, store, self.clock, self._servers, **{**self._settings, **settings})
        if store is not self._store:
            self._others.append(other)
            self._loop.run(other.engine.open())
        return other

    def together(self, *work: Awaitable[T]) -> Sequence[T | BaseException]:
        async def gathered() -> Sequence[T | BaseException]:
            return await asyncio.gather(*work, return_exceptions=True)

        return self._loop.run(gathered())

    def do(self, work: Awaitable[T]) -> T:
        return self._loop.run(work)  # type: ignore[arg-type]

    def close(self) -> None:
        for server in [*self._others, self]:
            self._loop.run(server.engine.close())
        self._loop.close()
