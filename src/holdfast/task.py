"""Tasks: functions that can be submitted.

A task stays a plain function: calling it calls it. `submit` stores a call of it instead. Everything that can be wrong
with the arguments is found out at `submit`, where the caller can still do something about it: that they bind, and
that they can be stored.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, Unpack, cast

import msgspec

from holdfast.around.here import FirstAttempt, HereAttempt, refuse_here
from holdfast.clock import reached
from holdfast.codec import Payload, Placeholder, Seen
from holdfast.declaring import CallOptions, SubmitOptions, changed_options
from holdfast.errors import ArgumentsDoNotBind, KeyTaken, NotEncodable, StoreError, TwinDiffers, UsageError
from holdfast.executors.call import bind
from holdfast.executors.context import origin_in, parent_in
from holdfast.groups import words
from holdfast.groups.calls import TaskCall, common_given, merged
from holdfast.groups.handles import InvocationGroup
from holdfast.invocation import Invocation
from holdfast.model.limits import limit_key
from holdfast.model.pacing import Debounce, paced
from holdfast.model.records import (
    KEY_SECONDS,
    Follow,
    InvocationRecord,
    NextCall,
    RunState,
    Terms,
    call_like,
    first_history,
)
from holdfast.runtime.app_runtime import AppRuntime, completed, refuse_on_loop, running_body
from holdfast.runtime.definition import ALL_ARGUMENTS, TaskDefinition
from holdfast.runtime.engine import Engine
from holdfast.runtime.fitting import Fitting, secret_parameters, with_secrets
from holdfast.runtime.payloads import whole
from holdfast.telemetry.tasks import here
from holdfast.workflows.api import submitted_in_body
from holdfast.workflows.life import AsyncLife, Command, Life, PlainLife
from holdfast.workflows.loop import where

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class Submittable(Generic[P, R]):
    """A task of a plain or of a coroutine function."""

    def __init__(self, runtime: AppRuntime, definition: TaskDefinition, options: SubmitOptions | None = None) -> None:
        self._runtime = runtime
        self.definition = definition
        self._options = options or SubmitOptions()
        self._names = tuple(definition.signature.parameters)
        self._limited = definition.limit is not None or definition.rate is not None
        self._time = self._options.time or definition.time
        given, usual = self._options, runtime.settings.archive_retention_seconds
        self.terms = self._time.added_to(definition.terms(usual, retries=given.retries, kept=given.retention))
        is_checked = (definition.validate or runtime.settings.validate) == "submit"
        self._fitting = Fitting(definition.function, definition.signature, definition.name) if is_checked else None
        self._pacing = self._options.pacing or definition.pacing
        functools.update_wrapper(cast(Any, self), definition.function, updated=())

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def is_validated(self) -> bool:
        """Return whether arguments are checked against annotations when a call is submitted."""
        return self._fitting is not None

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    if not TYPE_CHECKING:  # else every name would do

        def __getattr__(self, word: str) -> Any:
            """Say our word for a method of other libraries."""
            said = "" if word.startswith("_") else words.of_method(self.definition.name, word)
            raise AttributeError(
                said or f"{type(self).__name__!r} object has no attribute {word!r}", name=word, obj=self
            )

    def options(self, **given: Unpack[CallOptions]) -> Self:
        """Return the same task with other options for the calls that are submitted through it.

        `delay` is a duration ("5m", 300, a timedelta) from now; `at` a moment (an aware datetime, or seconds since
        the epoch); `priority` lies between −100 and 100 and higher goes first.

        `key` makes the call idempotent: the first submit of this task with that key stores it, and every later one
        returns the same invocation; other arguments with the same key are refused with `KeyTaken`. The key is free
        again `key_for` (by default a day) after the call has ended.

        `debounce` and `throttle` are as in `App.task`; calls with the same `debounce_key` or `throttle_key`, a text,
        are of a kind, else all of the task.

        `timeout`, `soft_timeout`, `expires`, `cancel_grace` and `cancel_children` are as in `App.task`; `expires` may
        also be a moment (an aware datetime). `retries` and `retention` replace those of the task; a retention by
        outcome (``{"failed": "30d"}``) changes these outcomes only, and "forever" keeps the call.

        `attributes` are texts by which the call can be found: ``attributes={"customer": "c-17"}``. Its code may set
        more, by ``context().set(…)``.

        `session` is your own transaction: a session of pymongo's (async) client inside `start_transaction`, or a
        `sqlite3.Connection` to the store's file. The invocation is there when you commit, and never was if you do
        not.
        """
        changed = changed_options(self.definition, self._options, given)
        return type(self)(self._runtime, self.definition, changed)

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Invocation[R]:
        """Store a call of this task. Once this returns, the work survives the loss of every process.

        In the body of a workflow the call is recorded, and stored before the next step begins.
        """
        if (life := running_body.life) is not None:
            return self._submitted_in(life, args, kwargs)
        return completed(self._store([(args, kwargs)], is_blocking=True))[0]

    async def asubmit(self, *args: P.args, **kwargs: P.kwargs) -> Invocation[R]:
        if (life := running_body.life) is not None:
            return self._submitted_in(life, args, kwargs)
        return (await self._store([(args, kwargs)]))[0]

    def map(self, calls: Iterable[Any], *, common_args: Mapping[str, object] | None = None) -> InvocationGroup[R]:
        """Store a call for each item, all in one go.

        A tuple is positional arguments, a dict keyword arguments, anything else the only argument. `common_args` are
        keyword arguments of all of them, which are stored once. If one of the calls cannot be stored, none is.
        """
        common = {} if common_args is None else common_given(common_args)
        if (life := running_body.life) is not None:
            handles = [self._submitted_in(life, args, merged(common, kwargs)) for args, kwargs in map(_spread, calls)]
            return InvocationGroup(self._runtime, handles)
        stored = completed(self._store((_spread(call) for call in calls), is_blocking=True, common=common))
        return InvocationGroup(self._runtime, stored)

    async def amap(
        self, calls: Iterable[Any], *, common_args: Mapping[str, object] | None = None
    ) -> InvocationGroup[R]:
        if running_body.life is not None:
            return self.map(calls, common_args=common_args)
        stored = await self._store((_spread(call) for call in calls), common=common_given(common_args))
        return InvocationGroup(self._runtime, stored)

    def try_here(self, *args: P.args, **kwargs: P.kwargs) -> FirstAttempt[R]:
        """Run the first attempt here and now, and store the call only if it must be retried.

        Success stores nothing, and a final failure is raised. Until a retry is stored, nothing survives the end of this
        process: that is the price, and `submit` is for work that must not be lost. Time limits do not hold here.
        """
        definition = self.definition
        if definition.is_coroutine:
            refuse_on_loop(f"{self.name}.try_here()", f"'await {self.name}.atry_here(…)'")
        attempt = self._attempt(self._runtime.ready(), args, kwargs)
        value = asyncio.run(attempt.run_coroutine()) if definition.is_coroutine else attempt.run()
        return FirstAttempt(value, self._runtime.run(attempt.keep()) if attempt.has_failed else None)

    async def atry_here(self, *args: P.args, **kwargs: P.kwargs) -> FirstAttempt[R]:
        attempt = self._attempt(await self._runtime.aready(), args, kwargs)
        value = await attempt.run_either()
        return FirstAttempt(value, await self._runtime.arun(attempt.keep()) if attempt.has_failed else None)

    def _attempt(self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HereAttempt:
        refuse_in_body(self.name)
        given, task = self._options, self.definition
        needs = {"key": given.key, "delay": given.delay_seconds, "at": given.at, "session": given.session}
        refuse_here(task, needs | {"expires": given.expires_at, "debounce or throttle": self._pacing})
        return HereAttempt(self._runtime, engine, task, self.prepared(engine, args, kwargs), (args, kwargs))

    def listen(self, *stages: str) -> Callable[[F], F]:
        """Call a function when invocations of this task reach these stages: see `App.listen`."""
        declare: Callable[[F], F] = self._runtime.listeners.declaring(stages, self.definition.names)
        return declare

    def middleware(self, function: F) -> F:
        """Surround each call of this task by a context manager, inside of those of the app: see `App.middleware`."""
        if self.definition.is_workflow:
            raise UsageError(f"{self.name} is a workflow: its body is replayed, so no middleware surrounds it")
        self._runtime.hooks.of_tasks.setdefault(self.name, []).append(function)
        return function

    def _submitted_in(self, life: Life, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Invocation[R]:
        if self._options.session is not None:
            raise UsageError("session= has no meaning in the body of a workflow: submit it in a step")
        command = self._opened_in(life, args, kwargs, is_awaited=False)
        assert command.child is not None
        return Invocation(self._runtime, command.child.id)

    def _opened_in(
        self, life: Life, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_awaited: bool, at: str = ""
    ) -> Command:
        if life.about.app != self._runtime.name:  # its end could not reach the run
            raise UsageError(
                f"{self.name} belongs to the app '{self._runtime.name}', and this run to '{life.about.app}': submit it "
                "in a step, and have it report by a hook if the run is to wait for it"
            )
        ends = self._options.on_parent_end or ("cancel" if is_awaited else "continue")

        def prepared() -> tuple[InvocationRecord, list[Payload]]:
            return self.prepared(life.engine, args, kwargs)

        return submitted_in_body(
            life, prepared, self.definition.names, is_awaited=is_awaited, cancels_on_end=ends == "cancel", at=at
        )

    def prepared(
        self,
        engine: Engine,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seen: Seen | None = None,
        shared: Mapping[str, bytes] | None = None,
    ) -> tuple[InvocationRecord, list[Payload]]:
        """Return a call as it would be stored now, and the payloads that it refers to."""
        payloads: list[Payload] = []
        self._check(args, kwargs)
        return self._record(engine, args, kwargs, payloads, {} if seen is None else seen, shared), payloads

    # --- calls that follow others

    def s(self, *args: Any, **kwargs: Any) -> TaskCall[R]:
        """Return a call that is not submitted yet, for `group` and `chain`. In a chain, and as a callback, it takes the
        result of what it follows as its first argument.
        """
        return TaskCall(self, args, kwargs)

    def si(self, *args: P.args, **kwargs: P.kwargs) -> TaskCall[R]:
        """Return a call like `s`, which takes nothing of what it follows."""
        return TaskCall(self, args, kwargs, takes=False)

    @functools.cached_property
    def _secrets(self) -> frozenset[str]:
        return secret_parameters(self.definition.function, self.definition.signature)

    @property
    def runtime(self) -> AppRuntime:
        return self._runtime

    def link(self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], *, takes: bool) -> NextCall:
        """Return a call as it is stored to follow others. With `takes`, its first argument comes from them."""
        if self.definition.unique:
            raise UsageError(
                f"{self.name} has unique=, debounce= or throttle=, and a call that follows others must not be left out"
            )
        self._refuse_options("a call that follows others has", but="delay")
        whole = (None, *args) if takes else args
        self._check(whole, kwargs, takes=takes)
        task = self.definition
        for by, word in ((task.limit_by, "limit"), (task.rate_by, "rate")):
            if takes and (by == ALL_ARGUMENTS or self._passed_on in by):
                raise UsageError(
                    f"{self.name} has {word}_by='{self._passed_on}', which it takes from the call before, and the "
                    f"{word} has to be known at submit: use another argument, or submit it in a task"
                )
        record = self._record(engine, whole, kwargs, [], {})
        if secrets := self._secrets:
            whole, kwargs = with_secrets(secrets, task.signature, whole, kwargs)
            args = whole[takes:]
        packed = self._runtime.codec.pack_call(args, kwargs, self._names[takes:], engine.limits)
        self._refuse_payloads(engine, packed.payloads, "a call that follows others keeps")
        terms = msgspec.structs.replace(record.terms, start_by=None, key_until=None, trace=None)
        like = msgspec.structs.replace(record, arguments=packed.data, terms=terms)
        call = call_like(like, self._time.expires)
        return NextCall(call=call, takes=takes, delay_seconds=self._options.delay_seconds)

    @property
    def has_session(self) -> bool:
        """Return whether its calls are stored in a transaction of their caller."""
        return self._options.session is not None

    @property
    def _passed_on(self) -> str:
        return next(iter(self._names), "")

    def _refuse_options(self, what: str, but: str = "") -> None:
        given = self._options
        others = {
            "key": given.key,
            "delay": given.delay_seconds,
            "at": given.at,
            "session": given.session,
            "expires": given.expires_at,
            "debounce or throttle": self._pacing if but else given.pacing,
        }
        if refused := [f"{name}=" for name, value in others.items() if value and name != but]:
            raise UsageError(f"{what} no {', '.join(refused)}")

    def _refuse_payloads(self, engine: Engine, payloads: Sequence[Payload], what: str) -> None:
        if payloads:
            size = sum(len(payload.data) for payload in payloads)
            raise UsageError(
                f"the arguments have {size:,} bytes, and {what} at most {engine.limits.inline:,}: "
                "give it a name or a path of what it shall work on"
            )

    async def store_chain(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        follow: Callable[[Engine], Follow] | None,
        *,
        is_blocking: bool,
    ) -> Invocation[R]:
        """Store the first call of a chain, with what follows it."""
        return (await self._store([(args, kwargs)], is_blocking=is_blocking, follow=follow))[0]

    def template(
        self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[InvocationRecord, float | None, list[Payload]]:
        """Return a call that is to be submitted again and again, after how many seconds each expires, and the payloads
        that it refers to.
        """
        self._refuse_options("a schedule submits its call again and again, so it has")
        record, payloads = self.prepared(engine, args, kwargs)
        terms = msgspec.structs.replace(record.terms, start_by=None, key_until=None, trace=None)
        dedup_key = record.dedup_key if self._pacing is None else None  # ticks are neither debounced nor throttled
        return msgspec.structs.replace(record, terms=terms, dedup_key=dedup_key), self._time.expires, payloads

    # Arguments are encoded here, on the caller's thread: that may run user code, and take a while.

    async def _store(
        self,
        calls: Iterable[CallArguments],
        *,
        is_blocking: bool = False,
        follow: Callable[[Engine], Follow] | None = None,
        common: Mapping[str, object] | None = None,
    ) -> list[Invocation[R]]:
        runtime, session = self._runtime, self._options.session
        engine = runtime.ready(session) if is_blocking else await runtime.aready(session)
        if engine.tracer is None:
            return await self._stored(engine, calls, is_blocking, follow, common)
        with engine.tracer.submitting(self.name, self._options.queue or self.definition.queue):
            return await self._stored(engine, calls, is_blocking, follow, common)

    async def _stored(
        self,
        engine: Engine,
        calls: Iterable[CallArguments],
        is_blocking: bool,
        follow: Callable[[Engine], Follow] | None,
        common: Mapping[str, object] | None,
    ) -> list[Invocation[R]]:
        runtime, session = self._runtime, self._options.session
        records, payloads = self._records(engine, calls, common)
        if follow is not None:
            terms = msgspec.structs.replace(records[0].terms, follow=follow(engine))
            records = [msgspec.structs.replace(records[0], terms=terms)]
        if engine.quota.most and not engine.quota.has_room(len(records)):
            await runtime.either(engine.quota.admit(len(records)), is_blocking)
        if not records or session is None:
            bridge = runtime.opened().bridge
            is_quick = is_blocking and bool(records) and not payloads and bridge.may_wait()
            if is_quick and engine.submitter.submit_here(records, bridge.call):
                return self._handles(records, [None] * len(records))
            work = engine.submitter.submit(records, payloads, self.debounce)
            return self._handles(records, await runtime.either(work, is_blocking))
        transaction = engine.store.joined(session)
        if transaction.is_async and is_blocking:
            raise UsageError("the session belongs to an asynchronous client; await asubmit() or amap() with it")
        stored = whole(payloads) if transaction.carries_payloads else ()
        if not transaction.carries_payloads:
            await runtime.either(engine.payloads.keep(payloads), is_blocking)
        if transaction.is_async:
            there = await transaction.ainsert(records, stored)
        else:
            there = transaction.insert(records, stored)
        await runtime.either(engine.submitter.announce(transaction, records), is_blocking)
        return self._handles(records, there)

    def _records(
        self, engine: Engine, calls: Iterable[CallArguments], common: Mapping[str, object] | None
    ) -> tuple[list[InvocationRecord], list[Payload]]:
        """Return the records of these calls. Each is encoded as it comes: a generator may change it later."""
        seen: Seen = {}
        payloads: list[Payload] = []
        shared = self._runtime.codec.shared(common) if common else None
        records = []
        for args, named in calls:
            kwargs = merged(common, named) if common else dict(named)
            self._check(args, kwargs)
            records.append(self._record(engine, args, kwargs, payloads, seen, shared))
        if self._options.key is not None and len(records) > 1:
            raise UsageError(f"the key {self._options.key!r} is for one call, and these are {len(records)}")
        return records, payloads

    def _handles(
        self, records: list[InvocationRecord], there: Sequence[InvocationRecord | None]
    ) -> list[Invocation[R]]:
        """Return handles of the records, some of which were there already."""
        handles: list[Invocation[R]] = []
        for record, before in zip(records, there, strict=True):
            if before is None:
                handles.append(Invocation(self._runtime, record.id, fresh=True))
            else:
                self._agree(record, before)
                handles.append(Invocation(self._runtime, before.id))
        return handles

    def _agree(self, record: InvocationRecord, before: InvocationRecord) -> None:
        """Raise an error if the stored record is another call than this one."""
        if record.id == before.id:
            raise StoreError(f"the new id {record.id} was taken already; the stored one is untouched")
        if self._pacing is not None:
            return  # that is what it is for
        if record.key is None or record.key != before.key:
            return self._agree_on_duplicate(record, before)
        if record.arguments != before.arguments:
            now, then = (self._bound(one) for one in (record, before))
            if now != then:
                raise KeyTaken(
                    f"the key {self._options.key!r} of {record.task} belongs to {before.id}, which was called with "
                    "other arguments. One key is one call; use another key, or the arguments of the first."
                )

    def _agree_on_duplicate(self, record: InvocationRecord, before: InvocationRecord) -> None:
        if self.definition.raises_when_different and self._bound(record) != self._bound(before):
            option = self.definition.spelling("when_different")
            raise TwinDiffers(
                f"{before.id} of {record.task} waits for its start and has the dedup key of this call, but other "
                f"arguments differ, which the task refuses by {option}="
            )

    def _bound(self, record: InvocationRecord) -> object:
        """Return digests of the call's arguments by name, with the defaults: ``add(1, 2)`` is ``add(1, b=2)``.

        Digests differ for 1, True and 1.0, as in dedup keys; to Python these are equal.
        """
        given, named = self._runtime.codec.decode_call(record.arguments, describe=True)
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
            return self._runtime.codec.digest(
                {"payload": str(value)} if isinstance(value, Placeholder) else {"value": value}
            )
        except NotEncodable:  # a default, which nothing that is stored is like
            return ""

    def _record(
        self,
        engine: Engine,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        payloads: list[Payload],
        seen: Seen,
        shared: Mapping[str, bytes] | None = None,
    ) -> InvocationRecord:
        task, options, ids, now = self.definition, self._options, engine.ids, engine.store.now()
        due_at = engine.submitter.due_after(options.delay_seconds, now) if options.at is None else options.at
        if secrets := self._secrets:
            args, kwargs = with_secrets(secrets, task.signature, args, kwargs)
        packed = self._runtime.codec.pack_call(args, kwargs, self._names, engine.limits, seen, shared)
        payloads += packed.payloads
        record = InvocationRecord(
            id=ids.new(),
            key=options.key,
            dedup_key=self._dedup_key(args, kwargs),
            app=self._runtime.name,
            task=task.name,
            arguments=packed.data,
            queue=options.queue or task.queue,
            tags=task.tags,
            at_most_once=task.at_most_once,
            priority=task.priority if options.priority is None else options.priority,
            created_at=now,
            due_at=due_at,
            limit_key=task.waits_under(self._digest_of(task.limit_by if task.limit else task.rate_by, args, kwargs))
            if self._limited
            else None,
            terms=self.terms if options.key_seconds == KEY_SECONDS else self._terms_with_key,
            parent_id=None if here.get() is None else parent_in(self._runtime.name),
            origin=None if here.get() is None else origin_in(self._runtime.name),
            changed_at=now,
            run=RunState() if task.body else None,
            history=first_history(ids.operation(), now),
        )
        if task.rate is not None and task.rate_by:
            key = task.rate_key(self._digest_of(task.rate_by, args, kwargs))
            record = msgspec.structs.replace(record, terms=msgspec.structs.replace(record.terms, rate_key=key))
        if self._pacing is not None:
            reached("debounce" if isinstance(self._pacing, Debounce) else "throttle", now, self._pacing.seconds)
            record = paced(record, self._pacing)
        if options.expires_at is not None or self._time.expires is not None:
            record = self._expiring(record)
        if options.attributes:
            terms = msgspec.structs.replace(record.terms, attributes=options.attributes)
            record = msgspec.structs.replace(record, attributes=options.attributes, terms=terms)
        return record if engine.tracer is None else engine.tracer.passed(record)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, takes: bool = False) -> None:
        """Raise unless a call may have these arguments. With `takes`, the first one is not known yet."""
        task = self.definition
        try:
            bind(task.signature, args, kwargs, task.name)
        except ArgumentsDoNotBind as error:
            raise self._with_hint(error, kwargs, takes=takes) from None
        if secrets := self._secrets:
            args, kwargs = with_secrets(secrets, task.signature, args, kwargs)
        if self._fitting is not None:
            self._fitting.check(args, kwargs, takes=takes)
        if task.check is not None and not takes:
            task.check(*args, **kwargs)

    def _with_hint(
        self, error: ArgumentsDoNotBind, kwargs: Mapping[str, Any], *, takes: bool = False
    ) -> ArgumentsDoNotBind:
        """Add our word for an option of other libraries that was given as an argument, and what `takes` means."""
        if takes:
            error = ArgumentsDoNotBind(f"{error}. Its first argument comes from the call before; with si(…), none does")
        said = [words.of_option(self.name, name, "the option") for name in kwargs if name not in self._names]
        return ArgumentsDoNotBind(f"{error}. {said[0][:1].upper()}{said[0][1:]}") if any(said) else error

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
    def debounce(self) -> Debounce | None:
        return self._pacing if isinstance(self._pacing, Debounce) else None

    @property
    def _terms_with_key(self) -> Terms:
        return msgspec.structs.replace(self.terms, key_seconds=self._options.key_seconds)

    def _dedup_key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return the dedup key: of the calls with the same one, only one waits. A call with a key has none: with the
        dedup key of another call, it would be stored again once that call has started.
        """
        if self._options.key is not None:
            return None
        if self._pacing is not None and self._pacing.key is not None:
            return limit_key(self.name, self._runtime.codec.digest({"key": self._pacing.key}))
        if not self.definition.unique and self._pacing is None:
            return None
        return self._shared_key(self.definition.unique_by, args, kwargs)

    def _shared_key(self, by: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the task's name, with a digest of the arguments that the limit or the kind goes by."""
        return limit_key(self.name, self._digest_of(by, args, kwargs))

    def _digest_of(self, by: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        shared = self.definition.shared(by, args, kwargs)
        return self._runtime.codec.digest(shared) if shared else ""


CallArguments = tuple[tuple[Any, ...], Mapping[str, Any]]


class Task(Submittable[P, R]):
    """A task of a plain function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself, here and now. Nothing is stored."""
        refuse_in_body(self.name)
        return self.definition.function(*args, **kwargs)  # type: ignore[no-any-return]


class AsyncTask(Submittable[P, R]):
    """A task of a coroutine function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Call the coroutine function itself. Nothing is stored."""
        refuse_in_body(self.name)
        return self.definition.function(*args, **kwargs)  # type: ignore[no-any-return]


class Workflow(Submittable[P, R]):
    """A workflow. Called in the body of another one, it is a child; elsewhere, a call runs its function as it is."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return cast(R, self._called(args, kwargs))

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        life = running_body.life
        if life is None:
            return self.definition.function(*args, **kwargs)
        if isinstance(life, PlainLife):
            return life.wait_for(self._opened_in(life, args, kwargs, is_awaited=True))
        own, at = cast(AsyncLife, life), where()
        return own.deferred(self.name, at, lambda made: self._awaited(own, args, kwargs, at, made))

    async def _awaited(self, life: AsyncLife, args: tuple[Any, ...], kwargs: dict[str, Any], at: str, made: int) -> Any:
        life.unawaited.pop(made, None)
        return await life.future_of(self._opened_in(life, args, kwargs, is_awaited=True, at=at))

    def __repr__(self) -> str:
        return f"<Workflow {self.name}>"


class AsyncWorkflow(Workflow[P, R]):
    """A workflow of a coroutine function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:  # type: ignore[override]
        return cast(Coroutine[Any, Any, R], self._called(args, kwargs))


def refuse_in_body(name: str) -> None:
    """Raise `UsageError` in the body of a workflow: what a task does there would not be recorded."""
    if running_body.life is not None:
        raise UsageError(
            f"the task {name} is called in the body of a workflow, where a replay would call it again: "
            "submit it and await the handle, or make it a step"
        )


def _spread(call: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(call, tuple):
        return call, {}
    if isinstance(call, dict):
        return (), call
    return (call,), {}
