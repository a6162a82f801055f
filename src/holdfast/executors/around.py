"""What the calls of a task run inside of: middleware, and the resources that its parameters get.

A middleware is a context manager, made for each call. A plain one fits every task; an async one is entered on the loop
of the worker if the task is a plain function. It may refuse a start by raising there. It cannot change an outcome: what
it raises or swallows when it is left is reported, and counts for nothing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from holdfast.crashpoints import crashpoint
from holdfast.errors import SoftTimeout, UsageError
from holdfast.executors.context import context_in
from holdfast.executors.injection import InjectedParameter, filled, fits
from holdfast.executors.loop import LoopThread
from holdfast.model.parking import MISSING
from holdfast.telemetry import Telemetry
from holdfast.telemetry.events import HookFailed

if TYPE_CHECKING:
    from holdfast.executors.call import Call
    from holdfast.executors.interrupts import SoftTimeoutInjector
    from holdfast.executors.lifespan import Hooks

Middleware = Callable[[Any], Any]
"""Takes the `Context` of a call, and returns a context manager, plain or async."""

_LOOK_SECONDS = 0.2  # so that a soft timeout can be raised in a thread that waits


class ResourceMissing(Exception):
    """No lifespan yields what a parameter wants. The text says so."""


class Resources:
    """The values of one worker that its lifespans have yielded, or that were provided. `loop` is that of coroutines."""

    def __init__(self, provided: Iterable[Any] = (), loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._provided = list(provided)
        self._opened: list[tuple[Callable[..., Any], Any]] = []
        self._loop = loop

    def add(self, lifespan: Callable[..., Any], value: Any) -> None:
        if value is not None:
            self._opened.append((lifespan, value))

    def with_more(self, provided: Iterable[Any]) -> Resources:
        """Return the same, with values that go ahead of all others."""
        other = Resources((*self._provided, *provided), self._loop)
        other._opened = self._opened
        return other

    def of(self, wanted: InjectedParameter) -> Any:
        """Return the value for a parameter. Raises `ResourceMissing`."""
        for value in reversed(self._provided):
            if fits(value, wanted.kind):
                return value
        if wanted.lifespan is not None:
            found = [value for source, value in self._opened if source is wanted.lifespan]
        else:
            found = [value for _, value in self._opened if fits(value, wanted.kind)]
        if len(found) == 1:
            return found[0]
        if wanted.lifespan is not None:
            name = _name(wanted.lifespan)
            raise ResourceMissing(
                f"{MISSING}: {wanted} comes from {name}, which is no lifespan here, or yields nothing"
            )
        how_many = f"{len(found)} lifespans yield" if found else "no lifespan of the app yields"
        raise ResourceMissing(f"{MISSING}: {how_many} what the parameter '{wanted}' gets")

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Return a loop for async middleware around plain functions."""
        return self._loop or _spare_loop()


class CallAround:
    """What the calls of one task run inside of. `middleware` begins with the outermost."""

    def __init__(
        self,
        middleware: Iterable[Middleware],
        wanted: tuple[InjectedParameter, ...],
        resources: Callable[[], Resources],
        telemetry: Telemetry,
    ) -> None:
        self._middleware = tuple(middleware)
        self._wanted = wanted
        self._resources = resources
        self._telemetry = telemetry
        self._whole: inspect.Signature | None = None

    @property
    def injects(self) -> bool:
        return bool(self._wanted)

    def run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a plain function. Raises the errors of the call, errors of a middleware at its start, or
        `ResourceMissing`.
        """
        args, kwargs = self._arguments(call, args, kwargs)
        with contextlib.ExitStack() as stack:
            for made in self._made(call):
                stack.enter_context(made)
            crashpoint("user.before")
            return call.function(*args, **kwargs)

    async def run_coroutine(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], injector: SoftTimeoutInjector | None
    ) -> Any:
        args, kwargs = self._arguments(call, args, kwargs)
        async with contextlib.AsyncExitStack() as stack:
            for made in self._made(call):
                await stack.enter_async_context(made)
            crashpoint("user.before")
            coroutine: Coroutine[Any, Any, Any] = call.function(*args, **kwargs)
            return await (coroutine if injector is None else injector.awaited(coroutine))

    def _arguments(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self._wanted:
            return args, kwargs
        resources = self._resources()
        values = {wanted.name: resources.of(wanted) for wanted in self._wanted}
        self._whole = self._whole or inspect.signature(call.function)
        return filled(self._whole, call.signature.bind(*args, **kwargs).arguments, values)

    def _made(self, call: Call) -> list[_Entered]:
        about = context_in(call)
        return [_Entered(make, about, self._resources, self._telemetry) for make in self._middleware]


class _Entered:
    """One middleware of one call, as both kinds of context manager."""

    def __init__(self, make: Middleware, about: Any, resources: Callable[[], Resources], telemetry: Telemetry) -> None:
        self._make = make
        self._about = about
        self._resources = resources
        self._telemetry = telemetry
        self._inner: Any = None

    def _begin(self) -> None:
        self._inner = self._make(self._about)
        if not hasattr(self._inner, "__enter__") and not hasattr(self._inner, "__aenter__"):
            raise UsageError(
                f"the middleware {_name(self._make)} returned {self._inner!r:.80}, which is no context manager: "
                "decorate it with @contextmanager or @asynccontextmanager"
            )

    def __enter__(self) -> Self:
        self._begin()
        if hasattr(self._inner, "__aenter__"):
            self._wait(self._inner.__aenter__())
        else:
            self._inner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        swallows: object = False
        with self._reported(error):
            if hasattr(self._inner, "__aexit__"):
                swallows = self._wait(self._inner.__aexit__(kind, error, trace))
            else:
                swallows = self._inner.__exit__(kind, error, trace)
        self._report_swallowed(swallows, error)

    async def __aenter__(self) -> Self:
        self._begin()
        if hasattr(self._inner, "__aenter__"):
            await self._inner.__aenter__()
        else:
            self._inner.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        swallows: object = False
        with self._reported(error):
            if hasattr(self._inner, "__aexit__"):
                swallows = await self._inner.__aexit__(kind, error, trace)
            else:
                swallows = self._inner.__exit__(kind, error, trace)
        self._report_swallowed(swallows, error)

    @contextlib.contextmanager
    def _reported(self, error: BaseException | None) -> Any:
        """Report what leaving raises, unless it is the error of the call itself: its outcome stands."""
        try:
            yield
        except SoftTimeout:
            raise
        except (Exception, SystemExit) as wrong:
            if wrong is not error:
                self._report("it failed after", wrong)

    def _report_swallowed(self, swallows: object, error: BaseException | None) -> None:
        if swallows and error is not None:
            self._report("it swallowed the error of", error)

    def _report(self, what: str, error: BaseException) -> None:
        why = f"{what} {self._about.task if self._about else 'a call'}, whose outcome stands: {error}"
        self._telemetry.emit(HookFailed(f"the middleware {_name(self._make)}", why, error))

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._resources().loop)
        try:
            while not concurrent.futures.wait([future], timeout=_LOOK_SECONDS).done:
                pass
        except BaseException:
            future.cancel()
            raise
        return future.result()


class CallsAround:
    """Make what the calls of each task run inside of, once per task."""

    def __init__(self, hooks: Hooks | None, telemetry: Telemetry) -> None:
        self._hooks = hooks
        self._resources = Resources(() if hooks is None else hooks.provided)
        self._telemetry = telemetry
        self._made: dict[str, CallAround | None] = {}

    def open(self, resources: Resources | None) -> None:
        """Take what the lifespans of a worker have yielded, if it has any."""
        self._resources = resources or self._resources

    def of(self, task: str, wanted: tuple[InjectedParameter, ...]) -> CallAround | None:
        if task not in self._made:
            middleware = () if self._hooks is None else self._hooks.middleware_of(task)
            needed = wanted or middleware
            made = CallAround(middleware, wanted, lambda: self._resources, self._telemetry) if needed else None
            self._made[task] = made
        return self._made[task]


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", function))


_spare: list[LoopThread] = []
_making = threading.Lock()


def _spare_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of a thread for async middleware, where no worker has one for coroutines."""
    with _making:
        if not _spare or _spare[0].is_broken or not _spare[0].thread.is_alive():
            _spare[:] = [LoopThread("holdfast-middleware", Telemetry())]
        return _spare[0].loop
