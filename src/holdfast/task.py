"""Tasks: functions that can be submitted.

A task stays a plain function: calling it calls it. `submit` stores a call of it instead. Everything that can be wrong
with the arguments is found out at `submit`, where the caller can still do something about it: that they bind, and
that they can be stored.
"""

from __future__ import annotations

import datetime as dt
import functools
import inspect
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Never, ParamSpec, Self, TypeVar, cast

import msgspec

from holdfast.clock import Duration, length_of, parse_moment, reached
from holdfast.codec import Apart, Payload, Seen
from holdfast.declaring import pacing_of, refuse_for_call, refuse_with_pacing, valid_key, valid_priority
from holdfast.engine.concurrency import RunningConcurrency
from holdfast.engine.core import Engine
from holdfast.engine.definition import TaskDefinition
from holdfast.engine.depot import whole
from holdfast.engine.time_limits import TimeLimits
from holdfast.errors import KeyTaken, NotEncodable, StoreError, TwinDiffers, UsageError
from holdfast.execution.call import bind
from holdfast.execution.context import here, origin_in, parent_in
from holdfast.invocation import Invocation, InvocationGroup
from holdfast.lifecycle.limits import limit_key
from holdfast.lifecycle.names import valid_name
from holdfast.lifecycle.pacing import Debounce, Pacing, paced
from holdfast.lifecycle.records import KEY_SECONDS, InvocationRecord, Terms, registered

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
    key: str | None = None
    key_seconds: float = KEY_SECONDS
    pacing: Pacing | None = None
    session: Any = None
    expires_at: float | None = None
    time: TimeLimits | None = None


class Submittable(Generic[P, R]):
    """What tasks of plain and of coroutine functions share."""

    def __init__(self, app: App, definition: TaskDefinition, options: SubmitOptions | None = None) -> None:
        self._app = app
        self.definition = definition
        self._options = options or SubmitOptions()
        self._names = tuple(definition.signature.parameters)
        self._limited = definition.limit is not None
        self._time = self._options.time or definition.time
        self._terms = self._time.added_to(definition.terms(app.settings.archive_retention_seconds))
        self._pacing = self._options.pacing or definition.pacing
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
        key: str | None = None,
        key_for: Duration | None = None,
        debounce: Duration | None = None,
        debounce_max_wait: Duration | None = None,
        debounce_key: str | None = None,
        throttle: Duration | None = None,
        throttle_key: str | None = None,
        session: Any = None,
        timeout: Duration | None = None,
        soft_timeout: Duration | None = None,
        expires: Duration | dt.datetime | None = None,
        cancel_grace: Duration | None = None,
        cancel_children: bool | None = None,
        **unknown: Never,
    ) -> Self:
        """The same task with other options for the calls that are submitted through it.

        `delay` is a duration ("5m", 300, a timedelta) from now; `at` a moment (an aware datetime, or seconds since
        the epoch); `priority` lies between −100 and 100 and higher goes first.

        `key` makes the call idempotent: the first submit of this task with that key stores it, and every other one
        returns the same invocation; other arguments with the same key are refused with `KeyTaken`. The key is free
        again `key_for` (a day, if nothing is said) after the call has ended.

        `debounce` and `throttle` are as in `App.task`; with `debounce_key` or `throttle_key`, a text, calls of the same
        one are of a kind, else all of the task.
        `timeout`, `soft_timeout`, `expires`, `cancel_grace` and `cancel_children` are as in `App.task`; `expires` may
        also be a moment (an aware datetime).

        `session` is your own transaction: a session of pymongo's (async) client inside `start_transaction`, or a
        `sqlite3.Connection` to the store's file. The invocation is there when you commit, and never was if you do
        not.
        """
        refuse_for_call(self.name, unknown, _CALL_OPTIONS)
        if key_for is not None and key is None and self._options.key is None:
            raise UsageError("key_for= says how long a key is taken; give key= as well")
        if delay is not None and at is not None:
            raise UsageError("give either delay= or at=, not both")
        before = self._options
        kept = (before.delay_seconds, before.at) if delay is None and at is None else (0.0, None)
        changed = msgspec.structs.replace(
            before,
            delay_seconds=kept[0] if delay is None else length_of("delay", delay),
            at=kept[1] if at is None else parse_moment(at),
            priority=self._options.priority if priority is None else valid_priority(priority),
            queue=self._options.queue if queue is None else valid_name("queue", queue),
            key=before.key if key is None else valid_key("key", key),
            key_seconds=before.key_seconds if key_for is None else length_of("key_for", key_for),
            pacing=pacing_of(debounce, debounce_max_wait, debounce_key, throttle, throttle_key) or before.pacing,
            session=self._options.session if session is None else session,
            expires_at=parse_moment(expires, "expires") if isinstance(expires, dt.datetime) else before.expires_at,
            time=self._time.changed(
                timeout=timeout,
                soft_timeout=soft_timeout,
                expires=None if isinstance(expires, dt.datetime) else expires,
                cancel_grace=cancel_grace,
                cancel_children=cancel_children,
            ),
        )
        refuse_with_pacing(changed.pacing or self.definition.pacing, changed, self.definition)
        if expires is not None and not isinstance(expires, dt.datetime):
            changed = msgspec.structs.replace(changed, expires_at=None)
        return type(self)(self._app, self.definition, changed)

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Invocation[R]:
        """Store a call of this task. Once this returns, the work survives the loss of every process."""
        return self._store(self._engine(), [(args, kwargs)])[0]

    async def asubmit(self, *args: P.args, **kwargs: P.kwargs) -> Invocation[R]:
        return (await self._astore(await self._aengine(), [(args, kwargs)]))[0]

    def map(self, calls: Iterable[Any]) -> InvocationGroup[R]:
        """Store a call for each item, all in one go.

        A tuple is positional arguments, a dict keyword arguments, anything else the only argument. If one of them
        cannot be stored, none is.
        """
        return self._store(self._engine(), (_spread(call) for call in calls))

    async def amap(self, calls: Iterable[Any]) -> InvocationGroup[R]:
        return await self._astore(await self._aengine(), (_spread(call) for call in calls))

    def _engine(self) -> Engine:
        return self._app._ready(self._options.session)

    async def _aengine(self) -> Engine:
        return await self._app._aready(self._options.session)

    def prepared(
        self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[InvocationRecord, list[Payload]]:
        """A call as it would be stored now, and the large values that it refers to."""
        payloads: list[Payload] = []
        return self._record(engine, args, kwargs, payloads, {}), payloads

    # Arguments are encoded here, on the caller's thread: that may run user code, and take a while.

    def _store(self, engine: Engine, calls: Iterable[CallArguments]) -> InvocationGroup[R]:
        records, payloads = self._records(engine, calls)
        if not records or self._options.session is None:
            work = engine.submitter.submit(records, payloads, self._debounce)
            return self._handles(records, self._app._run(work))
        transaction = engine.store.joined(self._options.session)
        if transaction.is_async:
            raise UsageError("the session belongs to an asynchronous client; await asubmit() or amap() with it")
        if not transaction.carries_payloads:
            self._app._run(engine.submitter.keep(payloads))
        there = transaction.insert(records, whole(payloads) if transaction.carries_payloads else ())
        self._app._run(engine.submitter.announce(transaction, records))
        return self._handles(records, there)

    async def _astore(self, engine: Engine, calls: Iterable[CallArguments]) -> InvocationGroup[R]:
        records, payloads = self._records(engine, calls)
        if not records or self._options.session is None:
            work = engine.submitter.submit(records, payloads, self._debounce)
            return self._handles(records, await self._app._arun(work))
        transaction = engine.store.joined(self._options.session)
        if not transaction.carries_payloads:
            await self._app._arun(engine.submitter.keep(payloads))
        stored = whole(payloads) if transaction.carries_payloads else ()
        there = (
            await transaction.ainsert(records, stored) if transaction.is_async else transaction.insert(records, stored)
        )
        await self._app._arun(engine.submitter.announce(transaction, records))
        return self._handles(records, there)

    def _records(self, engine: Engine, calls: Iterable[CallArguments]) -> tuple[list[InvocationRecord], list[Payload]]:
        """Each call is encoded as it comes: a generator may change what it has yielded before it yields the next."""
        seen: Seen = {}
        payloads: list[Payload] = []
        records = [self._record(engine, args, dict(kwargs), payloads, seen) for args, kwargs in calls]
        if self._options.key is not None and len(records) > 1:
            raise UsageError(f"the key {self._options.key!r} is for one call, and these are {len(records)}")
        return records, payloads

    def _handles(self, records: list[InvocationRecord], there: Sequence[InvocationRecord | None]) -> InvocationGroup[R]:
        """Handles of these, some of which were there already."""
        for record, before in zip(records, there, strict=True):
            if before is not None:
                self._agree(record, before)
        handles = [
            Invocation[R](self._app, record.id if before is None else before.id, fresh=before is None)
            for record, before in zip(records, there, strict=True)
        ]
        return InvocationGroup(self._app, handles)

    def _agree(self, record: InvocationRecord, before: InvocationRecord) -> None:
        """Refuse what is there instead, unless it is the same call."""
        if record.id == before.id:
            raise StoreError(f"the new id {record.id} was taken already; what was there is untouched")
        if self._pacing is not None:
            return  # that is what it is for
        if record.key is None or record.key != before.key:
            return self._agree_on_twin(record, before)
        if record.arguments != before.arguments:
            now, then = (self._bound(one) for one in (record, before))
            if now != then:
                raise KeyTaken(
                    f"the key {self._options.key!r} of {record.task} belongs to {before.id}, which was called with "
                    "other arguments. One key is one call; use another key, or the arguments of the first."
                )

    def _agree_on_twin(self, record: InvocationRecord, before: InvocationRecord) -> None:
        if self.definition.raises_on_different_twin and self._bound(record) != self._bound(before):
            raise TwinDiffers(
                f"{before.id} of {record.task} waits for its start and shares its key arguments with this call, but "
                "not the others; the task declares on_diff_non_key_args_raise=True"
            )

    def _bound(self, record: InvocationRecord) -> object:
        """The call's arguments by name, with the defaults: ``add(1, 2)`` is the same call as ``add(1, b=2)``. Each as
        its digest, which tells 1 from True and from 1.0 as those of twins do; to Python they are equal.
        """
        given, named = self._app._codec.decode_call(record.arguments, describe=True)
        args, kwargs = (
            [self._digest(item) for item in given],
            {name: self._digest(item) for name, item in named.items()},
        )
        try:
            bound = self.definition.signature.bind(*args, **kwargs).arguments
        except TypeError:  # of a signature that has changed since
            return args, kwargs
        for name, parameter in self.definition.signature.parameters.items():
            if name not in bound and parameter.default is not parameter.empty:
                bound[name] = self._digest(parameter.default)
        return bound

    def _digest(self, value: object) -> str:
        try:
            return self._app._codec.digest({"apart": str(value)} if isinstance(value, Apart) else {"value": value})
        except NotEncodable:  # a default, which nothing that is stored is like
            return ""

    def _record(
        self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], payloads: list[Payload], seen: Seen
    ) -> InvocationRecord:
        task, options, ids, now = self.definition, self._options, engine.ids, engine.store.now()
        due_at = engine.due_after(options.delay_seconds, now) if options.at is None else options.at
        bind(task.signature, args, kwargs, task.name)
        packed = self._app._codec.pack_call(args, kwargs, self._names, engine.limits, seen)
        payloads += packed.payloads
        record = InvocationRecord(
            id=ids.new(),
            key=options.key,
            twin=self._twin(args, kwargs),
            app=self._app.name,
            task=task.name,
            arguments=packed.data,
            queue=options.queue or task.queue,
            tags=task.tags,
            at_most_once=task.at_most_once,
            priority=task.priority if options.priority is None else options.priority,
            created_at=now,
            due_at=due_at,
            limit_key=self._limit_key(args, kwargs) if self._limited else None,
            terms=self._terms if options.key_seconds == KEY_SECONDS else self._terms_with_key,
            parent_id=None if here.get() is None else parent_in(self._app.name),
            origin=None if here.get() is None else origin_in(self._app.name),
        )
        if self._pacing is not None:
            reached("debounce" if isinstance(self._pacing, Debounce) else "throttle", now, self._pacing.seconds)
            record = paced(record, self._pacing)
        if options.expires_at is not None or self._time.expires is not None:
            record = self._expiring(record)
        return registered(record, operation=ids.operation(), at=now)

    def _expiring(self, record: InvocationRecord) -> InvocationRecord:
        at = self._options.expires_at
        start_by = reached("expires", record.created_at, self._time.expires or 0.0) if at is None else at
        if isinstance(self._pacing, Debounce) and start_by <= self._pacing.last_due(record.created_at):
            raise UsageError(
                f"expires= may end before {record.task} is due: debounce= moves it with each call. Give a "
                "debounce_max_wait= that is shorter than expires="
            )
        if start_by <= record.due_at:
            raise UsageError(
                f"expires= ends before the call is due, so {record.task} could never be started; give more time"
            )
        terms = msgspec.structs.replace(record.terms, start_by=start_by)
        return msgspec.structs.replace(record, start_by=start_by, terms=terms)

    @property
    def _debounce(self) -> Debounce | None:
        return self._pacing if isinstance(self._pacing, Debounce) else None

    @property
    def _terms_with_key(self) -> Terms:
        return msgspec.structs.replace(self._terms, key_seconds=self._options.key_seconds)

    def _twin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """What it has in common with those of which only one is to wait, as one string. With a key, that alone says
        which call is the same: handed the twin of another key, it would be stored again once that one has started.
        """
        if self._options.key is not None:
            return None
        if self._pacing is not None and self._pacing.key is not None:
            return limit_key(self.name, self._app._codec.digest({"key": self._pacing.key}))
        if self.definition.registration.mode is RunningConcurrency.DISABLED:
            return None if self._pacing is None else limit_key(self.name, "")
        shared = self.definition.registration.shared(self.definition.signature, args, kwargs)
        return limit_key(self.name, self._app._codec.digest(shared) if shared else "")

    def _limit_key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """What the call has in common with those that share its limit, as one string."""
        shared = self.definition.concurrency.shared(self.definition.signature, args, kwargs)
        if shared is None:
            return None
        return limit_key(self.name, self._app._codec.digest(shared) if shared else "")


_CALL_OPTIONS = [name for name in inspect.signature(Submittable.options).parameters if name not in ("self", "unknown")]

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
