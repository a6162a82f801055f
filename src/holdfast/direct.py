"""Direct tasks: the call looks local and returns the value, and the work runs on the fleet.

A call is a `submit` and a wait for the result, so it is as durable as any other one. In a task, the caller's slot is
free meanwhile. With `fan_out`, a call becomes many invocations, and `aggregate` makes one value of their results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar, Unpack, cast

from holdfast.declaring import CallOptions, DirectOptions
from holdfast.errors import UsageError
from holdfast.runtime.app_runtime import AppRuntime, refuse_on_loop, running_body
from holdfast.runtime.definition import TaskDefinition
from holdfast.task import Submittable

P = ParamSpec("P")
R = TypeVar("R")

FanOut = Callable[..., Iterable[Any]]
Aggregate = Callable[[list[Any]], Any]


class Spread(NamedTuple):
    """How a call is spread over several invocations, and how their results become one."""

    fan_out: FanOut
    aggregate: Aggregate


def spread_of(options: DirectOptions) -> Spread | None:
    """Take the options of a direct task out of those of its invocations. Raises `UsageError`."""
    fan_out, aggregate = options.pop("fan_out", None), options.pop("aggregate", None)
    if fan_out is None and aggregate is None:
        return None
    if not callable(fan_out) or not callable(aggregate):
        raise UsageError(
            "fan_out= and aggregate= belong together: a function that takes the arguments of the call and returns "
            "those of each invocation, and one that takes the list of their results"
        )
    return Spread(fan_out, aggregate)


class DirectBase(Submittable[P, R]):
    """A task whose call is carried out on the fleet."""

    spread: Spread | None = None

    def options(self, **given: Unpack[CallOptions]) -> Self:
        task = super().options(**given)
        task.spread = self.spread
        return task

    def local(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call the function itself, here and now. Nothing is stored."""
        return self.definition.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Direct task {self.name}>"


class DirectTask(DirectBase[P, R]):
    """A direct task of a plain function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Submit a call and wait for its result. Raises what `Invocation.result` raises."""
        if running_body.life is None:
            refuse_on_loop(f"{self.name}()", "'await task.asubmit(…)', or declare an async function as a direct task")
        if self.spread is None:
            return self.submit(*args, **kwargs).result()
        results = self.map(self.spread.fan_out(*args, **kwargs))
        return cast(R, self.spread.aggregate([each.result() for each in results] if _in_body() else results.results()))


class AsyncDirectTask(DirectBase[P, R]):
    """A direct task of a coroutine function."""

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Submit a call and await its result. Raises what awaiting an `Invocation` raises."""
        if self.spread is None:
            return await (await self.asubmit(*args, **kwargs))
        results = await self.amap(self.spread.fan_out(*args, **kwargs))
        return cast(R, self.spread.aggregate([await each for each in results] if _in_body() else await results))


def _in_body() -> bool:
    return running_body.life is not None


def direct(runtime: AppRuntime, definition: TaskDefinition, spread: Spread | None = None) -> DirectBase[..., Any]:
    """Make a direct task of a definition."""
    kind: type[DirectBase[..., Any]] = AsyncDirectTask if definition.is_coroutine else DirectTask
    task = kind(runtime, definition)
    task.spread = spread
    return task
