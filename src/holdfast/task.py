"""Tasks: functions that can be submitted.

A task stays a plain function: calling it calls it. `submit` stores a call of it instead. Everything that can be wrong
with the arguments is found out at `submit`, where the caller can still do something about it: that they bind, and
that they can be stored.
"""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, cast

import msgspec

from holdfast.clock import Duration, parse_duration
from holdfast.engine.core import Engine
from holdfast.engine.definition import TaskDefinition
from holdfast.errors import StoreError, UsageError
from holdfast.execution.call import bind
from holdfast.invocation import Invocation, InvocationGroup
from holdfast.lifecycle.records import HIGHEST_PRIORITY, LOWEST_PRIORITY, InvocationRecord, registered

if TYPE_CHECKING:
    from holdfast.app import App

P = ParamSpec("P")
R = TypeVar("R")


class SubmitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How one call differs from what its task declares."""

    delay_seconds: float = 0.0
    at: float | None = None
    priority: int | None = None
    queue: str | None = None


class Submittable(Generic[P, R]):
    """What tasks of plain and of coroutine functions share."""

    def __init__(self, app: App, definition: TaskDefinition, options: SubmitOptions | None = None) -> None:
        self._app = app
        self.definition = definition
        self._options = options or SubmitOptions()
        self._names = tuple(definition.signature.parameters)
        functools.update_wrapper(cast(Any, self), definition.function, updated=())

    @property
    def name(self) -> str:
        return self.definition.name

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    def options(
        self,
        *,
        delay: Duration | None = None,
        at: dt.datetime | float | None = None,
        priority: int | None = None,
        queue: str | None = None,
    ) -> Self:
        """The same task with other options for the calls that are submitted through it.

        `delay` is a duration ("5m", 300, a timedelta) from now; `at` a moment (an aware datetime, or seconds since
        the epoch); `priority` lies between −100 and 100 and higher goes first.
        """
        if delay is not None and at is not None:
            raise UsageError("give either delay= or at=, not both")
        changed = msgspec.structs.replace(
            self._options,
            delay_seconds=0.0 if delay is None else parse_duration(delay),
            at=None if at is None else _moment(at),
            priority=self._options.priority if priority is None else valid_priority(priority),
            queue=self._options.queue if queue is None else valid_name("queue", queue),
        )
        return type(self)(self._app, self.definition, changed)

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Invocation[R]:
        """Store a call of this task. Once this returns, the work survives the loss of every process."""
        return self._store(self._app._ready(), [(args, kwargs)])[0]

    async def asubmit(self, *args: P.args, **kwargs: P.kwargs) -> Invocation[R]:
        return (await self._astore(await self._app._aready(), [(args, kwargs)]))[0]

    def map(self, calls: Iterable[Any]) -> InvocationGroup[R]:
        """Store a call for each item, all in one go.

        A tuple is positional arguments, a dict keyword arguments, anything else the only argument. If one of them
        cannot be stored, none is.
        """
        return self._store(self._app._ready(), [_spread(call) for call in calls])

    async def amap(self, calls: Iterable[Any]) -> InvocationGroup[R]:
        return await self._astore(await self._app._aready(), [_spread(call) for call in calls])

    # Arguments are encoded here, on the caller's thread: that may run user code, and take a while.

    def _store(self, engine: Engine, calls: list[CallArguments]) -> InvocationGroup[R]:
        records = [self._record(engine, args, dict(kwargs)) for args, kwargs in calls]
        return self._handles(records, self._app._run(engine.submitter.submit(records)))

    async def _astore(self, engine: Engine, calls: list[CallArguments]) -> InvocationGroup[R]:
        records = [self._record(engine, args, dict(kwargs)) for args, kwargs in calls]
        return self._handles(records, await self._app._arun(engine.submitter.submit(records)))

    def _handles(self, records: list[InvocationRecord], stored: Sequence[bool]) -> InvocationGroup[R]:
        if not all(stored):
            taken = len(stored) - sum(stored)
            raise StoreError(f"{taken} of {len(stored)} new ids were taken already; what was there is untouched")
        return InvocationGroup(self._app, [Invocation(self._app, record.id, fresh=True) for record in records])

    def _record(self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> InvocationRecord:
        task, options, ids, now = self.definition, self._options, engine.ids, engine.store.now()
        bind(task.signature, args, kwargs, task.name)
        record = InvocationRecord(
            id=ids.new(),
            app=self._app.name,
            task=task.name,
            arguments=self._app._codec.encode_call(args, kwargs, self._names),
            queue=options.queue or task.queue,
            tags=task.tags,
            priority=task.priority if options.priority is None else options.priority,
            created_at=now,
            due_at=now + options.delay_seconds if options.at is None else options.at,
        )
        return registered(record, operation=ids.operation(), at=now)


CallArguments = tuple[tuple[Any, ...], Mapping[str, Any]]


class Task(Submittable[P, R]):
    """A task of a plain function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself, here and now. Nothing is stored."""
        return self.definition.function(*args, **kwargs)  # type: ignore[no-any-return]


class AsyncTask(Submittable[P, R]):
    """A task of a coroutine function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Call the coroutine function itself. Nothing is stored."""
        return self.definition.function(*args, **kwargs)  # type: ignore[no-any-return]


def _spread(call: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(call, tuple):
        return call, {}
    if isinstance(call, dict):
        return (), call
    return (call,), {}


_LATEST = 253_402_300_799.0  # the last second of the year 9999


def _moment(at: object) -> float:
    if isinstance(at, dt.datetime):
        if at.tzinfo is None:
            raise UsageError(f"at={at!r} has no time zone, so the moment is ambiguous; use an aware datetime")
        return at.timestamp()
    if isinstance(at, int | float) and not isinstance(at, bool) and 0 <= at <= _LATEST:
        return float(at)
    raise UsageError(f"at={at!r}: expected an aware datetime or seconds since the epoch")


def valid_priority(priority: int) -> int:
    if (
        not isinstance(priority, int)
        or isinstance(priority, bool)
        or not LOWEST_PRIORITY <= priority <= HIGHEST_PRIORITY
    ):
        raise UsageError(f"priority={priority!r}: expected a whole number from {LOWEST_PRIORITY} to {HIGHEST_PRIORITY}")
    return priority


_FORBIDDEN = frozenset("|,\0\n\r\t ")


def valid_name(what: str, name: str) -> str:
    """Queue, tag and task names end up in one string (the lane) and in file and log lines, so a few characters are
    kept out.
    """
    if not isinstance(name, str) or not name or len(name) > 200 or _FORBIDDEN & set(name) or not name.isprintable():
        raise UsageError(
            f"{name!r} is no name for a {what}: 1 to 200 characters, without spaces, commas and vertical bars"
        )
    return name
