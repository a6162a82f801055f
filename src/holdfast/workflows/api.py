"""The public face of workflows: `Step`, `Workflow`, `sleep`, `patched`.

A step called in a body is recorded; outside of a body, and in another step, it is a plain call. A workflow called in a
body is a child; `submit` starts a run from anywhere.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, ParamSpec, Self, TypeVar, Unpack, cast

import msgspec

from holdfast.clock import Duration, length_of
from holdfast.errors import UsageError
from holdfast.executors.call import bind
from holdfast.executors.chunks import NothingToAwait
from holdfast.ids import InvocationId, derived_id
from holdfast.model.names import valid_name
from holdfast.model.records import InvocationRecord, ReplyTo
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.fitting import secret_parameters, with_secrets
from holdfast.workflows.declaring import StepCall, step_options
from holdfast.workflows.life import AsyncLife, Command, Life, PlainLife, current_life
from holdfast.workflows.loop import where
from holdfast.workflows.steps import StepDefinition, StepOptions

P = ParamSpec("P")
R = TypeVar("R")


class StepBase(Generic[P, R]):
    """A step of a plain or of a coroutine function."""

    def __init__(self, runtime: AppRuntime, definition: StepDefinition, options: StepOptions | None = None) -> None:
        self._runtime = runtime
        self.definition = definition
        self._options = options or StepOptions()
        functools.update_wrapper(cast(Any, self), definition.function, updated=())

    @property
    def name(self) -> str:
        return self.definition.name

    def __repr__(self) -> str:
        return f"<Step {self.name}>"

    @functools.cached_property
    def _secrets(self) -> frozenset[str]:
        return secret_parameters(self.definition.function, self.definition.signature)

    def options(self, **given: Unpack[StepCall]) -> Self:
        """Return the same step with other options for the calls made through it.

        `key` names the call, so that it may be moved or added while runs are under way; each key is one call of a run.
        `queue` and `tags` send it to other runners. `timeout` and `retries` are as in `App.step`.
        """
        return type(self)(self._runtime, self.definition, step_options(self.definition, self._options, given))

    def _opened(self, life: Life, args: tuple[Any, ...], kwargs: dict[str, Any], at: str) -> Command:
        step = self.definition
        bind(step.signature, args, kwargs, step.name)
        if self._secrets:
            args, kwargs = with_secrets(self._secrets, step.signature, args, kwargs)
        packed = life.codec.pack_call(args, kwargs, step.names, life.limits)
        return life.opened_step(step, packed, self._options, at)


class Step(StepBase[P, R]):
    """A step of a plain function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step, in a body; elsewhere, call the function."""
        life = current_life()
        if life is None:
            return self.definition.function(*args, **kwargs)  # type: ignore[no-any-return]
        if isinstance(life, PlainLife):
            return cast(R, life.wait_for(self._opened(life, args, kwargs, where())))
        return cast(R, _awaitable(cast(AsyncLife, life), self, args, kwargs))  # it is awaited, as every step there


class AsyncStep(StepBase[P, R]):
    """A step of a coroutine function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Run the step, in a body; elsewhere, call the coroutine function."""
        life = current_life()
        if life is None:
            return self.definition.function(*args, **kwargs)  # type: ignore[no-any-return]
        if isinstance(life, PlainLife):
            return cast(Coroutine[Any, Any, R], life.wait_for(self._opened(life, args, kwargs, where())))
        return _awaitable(cast(AsyncLife, life), self, args, kwargs)


def _awaitable(
    life: AsyncLife, step: StepBase[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Coroutine[Any, Any, Any]:
    at = where()
    return life.deferred(step.name, at, lambda made: _awaited(life, step, args, kwargs, at, made))


async def _awaited(
    life: AsyncLife, step: StepBase[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], at: str, made: int
) -> Any:
    """Open the call when it is awaited. `at` is where it was written: its own task has no caller by then."""
    life.unawaited.pop(made, None)
    return await life.future_of(step._opened(life, args, kwargs, at))


# --- waiting


def sleep(duration: Duration) -> Awaitable[None]:
    """Wait in the body of a workflow: ``await sleep("3 days")``. Costs no memory while it takes long.

    In a plain body it waits without ``await``. Outside of a workflow it is refused: use `time.sleep`,
    `asyncio.sleep`, or ``options(delay=…)``.
    """
    life = current_life()
    if life is None:
        raise UsageError(
            "sleep() waits in the body of a workflow. In a step or task, use time.sleep or asyncio.sleep; to run a "
            'task later, submit it with options(delay="…")'
        )
    seconds = length_of("sleep", duration)
    if isinstance(life, PlainLife):
        life.sleep(seconds)
        return NothingToAwait()
    return asyncio.sleep(seconds)


def patched(name: str) -> bool:
    """Return whether a body is to take its new path: True for new runs, False for runs that are past this point."""
    life = current_life()
    if life is None:
        raise UsageError("patched() is for the body of a workflow")
    return life.patched(valid_name("patch", name))


# --- children


def submitted_in_body(
    life: Life, prepared: Callable[[], tuple[InvocationRecord, Any]], names: tuple[str, ...], **more: Any
) -> Command:
    """Submit an invocation in a body, with an id that follows from the run and the call. `names` are those of its task,
    the present one first.
    """
    about = life.about
    call = life.child_id(names)
    record, payloads = prepared()
    # A keyed step that was added before this call moves the body's time, and the derived id with it.
    recorded = life.replay.children.get(call)
    id = (
        recorded.child
        if recorded is not None
        else derived_id("child", about.invocation_id, str(life.generation), call, at=life.now)
    )
    run = record.run
    if run is not None and record.key is None:  # so that the effects of a child are the same in a rerun of its parent
        within = f"{life.generation}/{call}" if life.generation else call
        run = msgspec.structs.replace(run, effects_key=f"{about.idempotency_key}/{within}")
    child = msgspec.structs.replace(
        record,
        run=run,
        id=InvocationId(id),
        parent_id=InvocationId(about.invocation_id),
        reply_to=ReplyTo(
            run=InvocationId(about.invocation_id),
            call=call,
            generation=life.generation,
            root=about.run.root_id,
            ends_with_run=bool(more.get("cancels_on_end")),
        ),
    )
    return life.opened_child(child, tuple(payloads), call, older_names=names[1:], **more)
