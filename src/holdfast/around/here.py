"""Optimistic execution: the first attempt runs in the caller's process, and only a retry is stored.

The record of the call is built first, as `submit` builds it: what cannot be stored is refused before its code runs, and
all attempts have one id. Success stores nothing, and so does a failure that is final, which the caller gets. If the
task's retries want another attempt, one write stores the invocation in RETRY, by the edges that a worker would have
walked. The notes of the attempt are part of it. A crash before that write loses the call, which no caller was promised.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Generator
from typing import Any, Generic, TypeVar, cast

from msgspec.structs import replace

from holdfast.codec import Payload
from holdfast.crashpoints import crashpoint
from holdfast.errors import StoreError, UsageError
from holdfast.executors.around import CallsAround, ResourceMissing
from holdfast.executors.call import Call, raised
from holdfast.executors.notes import CallNotes
from holdfast.invocation import Invocation
from holdfast.model import changes
from holdfast.model.changes import apply_to
from holdfast.model.claims import Claim, claimed
from holdfast.model.records import InvocationRecord
from holdfast.model.status import Status
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.definition import TaskDefinition
from holdfast.runtime.engine import Engine
from holdfast.runtime.release import change_after
from holdfast.telemetry import events as e
from holdfast.telemetry.tasks import here

R = TypeVar("R")


class FirstAttempt(Generic[R]):
    """What `try_here` returns: the result, or the invocation that was stored to try again.

    `result` and `await` give the result in either case.
    """

    def __init__(self, value: R | None, invocation: Invocation[R] | None) -> None:
        self._value = value
        self.invocation = invocation

    @property
    def is_done(self) -> bool:
        """Return whether the first attempt has succeeded, so that nothing is stored."""
        return self.invocation is None

    def result(self, timeout: float | None = None) -> R:
        """Return the result of the attempt here, or wait for that of the stored invocation."""
        return cast(R, self._value) if self.invocation is None else self.invocation.result(timeout)

    async def aresult(self, timeout: float | None = None) -> R:
        return cast(R, self._value) if self.invocation is None else await self.invocation.aresult(timeout)

    def __await__(self) -> Generator[Any, None, R]:
        return self.aresult().__await__()

    def __repr__(self) -> str:
        return f"<FirstAttempt: {'done here' if self.invocation is None else self.invocation.id}>"


class HereAttempt:
    """One call that is tried here. `keep` stores what is to be tried again."""

    def __init__(
        self,
        runtime: AppRuntime,
        engine: Engine,
        task: TaskDefinition,
        prepared: tuple[InvocationRecord, list[Payload]],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        self._runtime, self._engine, self._task = runtime, engine, task
        self._record, self._payloads = prepared
        self._arguments = arguments
        self._change: changes.Change | None = None
        self._error: Exception | None = None
        owner = f"{socket.gethostname()}.{os.getpid()}/here"
        claim = Claim(
            app=self._record.app,
            lanes=(self._record.lane,),
            limit=1,
            owner=owner,
            operation=engine.ids.operation(),
            at=self._record.created_at,
        )
        self._running = apply_to(claimed(claim, self._record), self._record)
        self._notes = CallNotes(
            engine.codec, engine.limits, attributes=self._record.attributes, now=engine.store.now
        )  # stored with the failure: the next attempt asks for its checkpoint

    @property
    def has_failed(self) -> bool:
        """Return whether it has failed, and is to be tried again."""
        return self._change is not None

    def run(self) -> Any:
        """Call a plain function."""
        call = self._call()
        entered = here.set(call)
        try:
            args, kwargs = self._arguments
            value = call.function(*args, **kwargs) if call.around is None else call.around.run(call, args, kwargs)
        except Exception as error:
            self._failed(call, error)
        else:
            return self._succeeded(value)
        finally:
            here.reset(entered)

    async def run_coroutine(self) -> Any:
        call = self._call()
        entered = here.set(call)
        try:
            args, kwargs = self._arguments
            if call.around is None:
                value = await call.function(*args, **kwargs)
            else:
                value = await call.around.run_coroutine(call, args, kwargs, None)
        except Exception as error:
            self._failed(call, error)
        else:
            return self._succeeded(value)
        finally:
            here.reset(entered)

    async def run_either(self) -> Any:
        """Call a function of either kind without holding up the loop here."""
        return await (self.run_coroutine() if self._task.is_coroutine else asyncio.to_thread(self.run))

    def _call(self) -> Call:
        task, engine = self._task, self._engine
        around = CallsAround(self._runtime.hooks, engine.telemetry)
        if engine.telemetry.wants(e.StartedHere):
            engine.telemetry.emit(e.StartedHere((self._running,)))
        return Call(
            self._record.id,
            task.name,
            task.function,
            task.signature,
            self._record.arguments,
            engine.codec,
            engine.limits,
            {},
            self._running,
            around=around.of(task.name, task.wanted),
            notes=lambda call: self._notes,
            outer=_outer(),
        )

    def _succeeded(self, value: Any) -> Any:
        if self._engine.telemetry.wants(e.RanHere):
            operation, at = self._engine.ids.operation(), self._engine.store.now()
            change = changes.completed(self._running, result=b"", operation=operation, at=at)
            self._engine.telemetry.emit(e.RanHere(self._running, change))
        return value

    def _failed(self, call: Call, error: Exception) -> None:
        """Decide what follows a failure. Raises the error if it is final."""
        if isinstance(error, ResourceMissing):
            raise UsageError(
                f"{self._task.name} cannot be tried here: {error}. What lifespans yield is opened by workers only: use "
                "submit(), or give this process a value by app.provide(…)"
            ) from None
        outcome, engine = raised(call, error), self._engine
        change = change_after(
            self._running,
            outcome,
            operation=engine.ids.operation(),
            at=engine.store.now(),
            random_unit=engine.rng.random(),
            fingerprint=None,
        )
        if change.target is not Status.RETRY:
            if engine.telemetry.wants(e.RanHere):
                engine.telemetry.emit(e.RanHere(self._running, change))
            raise error
        self._error = error
        self._payloads += outcome.payloads
        said, self._notes.is_over = self._notes.said, True
        self._change = replace(change, attributes=said.attributes, notes=said.notes)

    async def keep(self) -> Invocation[Any]:
        """Store the invocation that is to be tried again. On the engine's loop."""
        assert self._change is not None
        crashpoint("here.failed")
        stored = apply_to(self._change, self._running)
        try:
            await self._engine.submitter.submit([stored], self._payloads)
        except StoreError as away:
            raise away from self._error
        self._engine.telemetry.emit(e.Retried(self._running, self._change))
        return Invocation(self._runtime, stored.id)


def _outer() -> Call | None:
    """Return the call of a worker whose code tries another one: the slot that a wait gives back is its own."""
    call = here.get()
    return (call.outer or call) if isinstance(call, Call) else None


def refuse_here(task: TaskDefinition, given: dict[str, object]) -> None:
    """Raise `UsageError` if a call needs the store before its code runs. `given` are options of the call."""
    if task.is_workflow:
        raise UsageError(f"{task.name} is a workflow, which is replayed from its log, so it cannot be tried here")
    needs = {
        "limit": task.limit,
        "rate": task.rate,
        "unique": task.unique or None,
        "at_most_once": task.at_most_once or None,
        **given,
    }
    if refused := [f"{name}=" for name, value in needs.items() if value]:
        raise UsageError(
            f"{task.name} cannot be tried here: {', '.join(refused)} would have to be looked up in the store first. "
            "Use submit()"
        )
