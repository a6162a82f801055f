"""What the public classes of one app share: its settings, codec, bridge and engine.

The engine is built when it is first needed: making an app touches neither the disk nor the network. It belongs to the
process that made it; a forked child builds its own and leaves the parent's alone.

`Bridge` is the only place where sync meets async. The engine is asynchronous and runs on one loop in one thread per
process, so apps on the same database share a client and its connections. A blocking call sends a coroutine there and
waits; an awaited call on another loop sends it there and awaits; so no method is written twice. User code never runs on
this loop. A closed app frees the callers that wait for it, ends its engine, and leaves the others alone: apps share a
client, which has tasks of its own on the loop. The thread ends with the last app.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import importlib
import inspect
import os
import random
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

import msgspec

from holdfast.clock import Clock, SystemClock
from holdfast.codec import Codec, Payload
from holdfast.codec.sealing import ring_of
from holdfast.errors import BlockingCall, ConfigurationError, CorruptRecord, StoreError, UsageError
from holdfast.executors.lifespan import Hooks
from holdfast.executors.loop import LoopThread
from holdfast.ids import Ids, InvocationId
from holdfast.masking import hide_also, mask_url
from holdfast.model.decoding import RATE
from holdfast.model.explain import MAX_NAMED, Explanation, RunWait, Surroundings, explain
from holdfast.model.limits import Limit
from holdfast.model.pacing import Debounce
from holdfast.model.rates import Bucket, Rate, bucket_of
from holdfast.model.records import InvocationRecord, Terms
from holdfast.model.status import AVAILABLE, FINAL, OWNED, Status
from holdfast.runtime.definition import TaskDefinition
from holdfast.runtime.engine import Engine
from holdfast.runtime.limits import ChangedLimits
from holdfast.runtime.measures import MeasurePort
from holdfast.runtime.pauses import pauses_of
from holdfast.runtime.runs import RunForks, RunLooks
from holdfast.runtime.streams import StreamReads
from holdfast.runtime.wait import get_readable
from holdfast.settings import Settings
from holdfast.store.contract import Filter, Order, Store
from holdfast.telemetry.events import DutyFailed
from holdfast.telemetry.logs import logging_telemetry
from holdfast.telemetry.tasks import here
from holdfast.tracing import Tracer

_OPEN = frozenset(Status) - FINAL
_MAX_HOLDERS = 10_000

InForce = Callable[[str], tuple[Limit | None, Rate | None]]
"""The limit and the rate of a task that are in force, as far as they are known."""

T = TypeVar("T")
P = ParamSpec("P")
_RUNTIMES: weakref.WeakSet[AppRuntime] = weakref.WeakSet()


async def explained(
    store: Store,
    record: InvocationRecord,
    in_force: InForce,
    dead_after_seconds: float,
    waits: Sequence[RunWait] = (),
    awaited: Explanation | None = None,
) -> Explanation:
    """Explain why an invocation stands where it stands. Of the children of a running invocation, the first is explained
    too, but not what that child may wait for in turn. `waits` say what a run waits for, by its log, and `awaited` what
    the first of these calls that is performed elsewhere waits for.
    """
    around = Surroundings(
        roster=await store.roster(record.app), now=store.now(), dead_after_seconds=dead_after_seconds, waits=waits
    )
    around = await _with_queue(store, record, in_force, around)
    if waits:
        around = msgspec.structs.replace(around, first_child="" if awaited is None else awaited.text)
    elif record.status in OWNED:
        if record.awaited is not None:
            found = await get_readable(store, record.app, record.awaited.ids[:MAX_NAMED])
            children: Sequence[InvocationRecord] = [each for each in found if each is not None]
        else:
            children = await store.find(record.app, Filter(parent=record.id, statuses=_OPEN), MAX_NAMED + 1)
        if children:
            its_queue = await _with_queue(store, children[0], in_force, around)
            held_up = explain(children[0], its_queue).text
            around = msgspec.structs.replace(around, children=children, first_child=held_up)
    return explain(record, around)


async def _with_queue(store: Store, record: InvocationRecord, in_force: InForce, around: Surroundings) -> Surroundings:
    """Return the surroundings with what holds this invocation back, if it waits."""
    if record.status not in AVAILABLE and record.status is not Status.CONCURRENCY_CONTROLLED:
        return around
    pauses, holders = await pauses_of(store, record.app), list[InvocationRecord]()
    if record.limit_key is not None:
        where = Filter(limit_key=record.limit_key)
        holders = list(await store.find(record.app, where, _MAX_HOLDERS, order=Order.SLOT))
    limit, rate = in_force(record.task)
    bucket = await _bucket_for(store, record, rate)
    return msgspec.structs.replace(around, pauses=pauses, holders=holders, limit=limit, bucket=bucket)


async def _bucket_for(store: Store, record: InvocationRecord, rate: Rate | None) -> Bucket | None:
    """Return the bucket that the next claim of an invocation looks at, if there is one."""
    if record.terms.rate_key is None or (record.run is not None and record.epoch > 0):
        return None
    for entry in await store.entries(record.app, RATE, [record.terms.rate_key]):
        with contextlib.suppress(CorruptRecord):
            bucket = bucket_of(entry)
            return bucket if rate is None else bucket.under(rate)
    return None


class _RunningBody(threading.local):
    life: Any = None


running_body = _RunningBody()
"""The life of the workflow's body that runs on this thread; its `life` is set by `holdfast.workflows` only."""

_guards: list[Callable[[], None]] = []


def guard(check: Callable[[], None]) -> None:
    """Have this called before each use of the engine in the body of a workflow: it raises where that is wrong."""
    _guards.append(check)


class BridgedCall(Generic[T]):
    """Work for the loop, and its outcome. All but `outcome` happens on the loop.

    A waiting caller holds no lock that the loop might want, as it does at times with a future of the standard library:
    a signal handler may interrupt the caller anywhere, and close the app, and would then wait for a loop that waits for
    the caller.
    """

    def __init__(self, work: Coroutine[Any, Any, T], notify: Callable[[], object]) -> None:
        self._work = work
        self._notify = notify
        self._task: asyncio.Task[T] | None = None
        self._outcome: Callable[[], T] | None = None

    def start(self, ended: Callable[[BridgedCall[Any]], None]) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(self._finish)
        self._task.add_done_callback(lambda _: ended(self))

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def cut(self, refuse: Callable[[], Any] | None = None) -> None:
        """Cancel the work and free its caller at once: the caller gets what `refuse` raises."""
        if self._task is None:
            self._work.close()
        if self._outcome is None:
            self._outcome = refuse or _raise_closed
            self._notify()
        self.cancel()

    def _finish(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # retrieved, even if no caller waits any more
        if self._outcome is None:
            self._outcome = _raise_closed if task.cancelled() else task.result
            self._notify()

    def outcome(self) -> T:
        assert self._outcome is not None
        return self._outcome()


def _check_guards(work: Coroutine[Any, Any, Any]) -> None:
    if running_body.life is None:
        return
    try:
        for check in _guards:
            check()
    except BaseException:
        work.close()
        raise


class Bridge:
    """Run coroutines on the engine's loop, for one app, from other threads and loops."""

    def __init__(self) -> None:
        self._thread = _acquire()
        self._closed = False
        self._sending = threading.RLock()  # nothing is sent once it is closed; a signal handler may close it
        self._calls: set[BridgedCall[Any]] = set()  # touched by the loop alone
        self._on_their_way: set[BridgedCall[Any]] = set()  # on their way to it
        self._unwatch = self._thread.on_broken(self._broken)

    def _broken(self) -> None:
        """Free the waiting callers: the loop will never turn again."""
        with self._sending:
            for bridged in (*self._calls, *self._on_their_way):
                bridged.cut(_raise_broken)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work on the loop and wait here. Short work only, if this thread runs its own loop."""
        _check_guards(work)
        if threading.current_thread() is self._thread.thread:
            work.close()
            raise UsageError("a blocking call from inside the engine would wait for itself for ever")
        gate = threading.Lock()
        gate.acquire()
        bridged = self._send(work, gate.release)
        try:
            gate.acquire()
        except BaseException:
            self._call(bridged.cancel)
            raise
        return bridged.outcome()

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work on the loop and await it here."""
        _check_guards(work)
        own = asyncio.get_running_loop()
        if own is self._thread.loop:
            return await work
        notified = asyncio.Event()

        def notify() -> None:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                own.call_soon_threadsafe(notified.set)

        bridged = self._send(work, notify)
        try:
            await notified.wait()
        except BaseException:
            self._call(bridged.cancel)
            raise
        return bridged.outcome()

    def _send(self, work: Coroutine[Any, Any, T], notify: Callable[[], object]) -> BridgedCall[T]:
        bridged = BridgedCall(work, notify)
        with self._sending:
            self._on_their_way.add(bridged)
            if not self._closed and not self._thread.is_broken and self._call(functools.partial(self._begin, bridged)):
                return bridged
            self._on_their_way.discard(bridged)
        work.close()
        if self._thread.is_broken:
            _raise_broken()
        raise _closed_meanwhile()

    def _begin(self, bridged: BridgedCall[Any]) -> None:
        self._on_their_way.discard(bridged)
        if self._closed:
            bridged.cut()
        else:
            self._calls.add(bridged)
            bridged.start(self._calls.discard)

    def _call(self, function: Callable[[], None]) -> bool:
        try:
            self.call(function)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def may_wait(self) -> bool:
        """Return whether this thread may wait for a thread of the store without the loop."""
        return threading.current_thread() is not self._thread.thread

    def call(self, function: Callable[[], None]) -> None:
        """Call a function on the loop soon, without waiting: safe from signal handlers."""
        self._thread.loop.call_soon_threadsafe(function)

    def close(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Free the waiting callers first, with an error: they must not find a store that is being closed. Then run
        `end` on the loop.
        """
        with self._sending:
            if self._closed:
                return
            self._closed = True
        self._unwatch()
        if self._thread.is_broken:
            return _release()  # nothing can be ended there any more
        gate = threading.Lock()
        gate.acquire()
        ending = BridgedCall(self._end(end), gate.release)
        self.call(functools.partial(ending.start, lambda _: None))
        try:
            if threading.current_thread() is not self._thread.thread:
                gate.acquire()
                ending.outcome()
        finally:
            _release()

    async def _end(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        for bridged in tuple(self._calls):
            bridged.cut()
        await asyncio.sleep(0)  # so that they are cancelled first
        await end()


# --- the thread that all bridges of a process lead to

_lock = threading.RLock()
_thread: LoopThread | None = None
_users = 0
_of_parents: list[LoopThread] = []


def _acquire() -> LoopThread:
    global _thread, _users
    with _lock:
        if _thread is None or _thread.is_broken:
            _thread = LoopThread("holdfast-engine", logging_telemetry())
        _users += 1
        return _thread


def _release() -> None:
    global _thread, _users
    with _lock:
        _users -= 1
        ended = _thread if _users == 0 else None
        if ended is not None:
            _thread = None
    if ended is not None:
        ended.end()


def _forget() -> None:
    """Forget the parent's thread, of which a forked child has a copy only. Its loop is neither used nor released: that
    would close connections of the parent.
    """
    global _lock, _thread, _users
    if _thread is not None:
        _of_parents.append(_thread)
    _lock, _thread, _users = threading.RLock(), None, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _raise_closed() -> Any:
    raise _closed_meanwhile()


def _raise_broken() -> Any:
    raise StoreError(
        "the event loop on which Holdfast works in this process is broken: code of this process closed a descriptor "
        "that was not its own, with os.close or os.closerange say. Whether this call was carried out is not known; "
        "restart the process"
    )


def _closed_meanwhile() -> UsageError:
    return UsageError("the app was closed while this call was under way; whether it was carried out is not known")


def refuse_on_loop(call: str, instead: str) -> None:
    """Raise `BlockingCall` if this thread runs an event loop: a wait without end would stop everything on it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise BlockingCall(f"{call} would block the event loop that runs on this thread; use {instead}")


class EndableRunner(Protocol):
    """A runner in this process."""

    def end(self) -> object: ...


@runtime_checkable
class DeclaredTask(Protocol):
    """A task as features see it: its declaration, and how a call of it would be stored."""

    @property
    def name(self) -> str: ...
    @property
    def definition(self) -> TaskDefinition: ...
    @property
    def terms(self) -> Terms: ...
    @property
    def debounce(self) -> Debounce | None: ...
    @property
    def is_validated(self) -> bool: ...
    def prepared(
        self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[InvocationRecord, list[Payload]]: ...
    def template(
        self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[InvocationRecord, float | None, list[Payload]]: ...


class EngineHandle:
    """Hold the loop thread and the engine of an app in use. Belongs to the process that made it."""

    def __init__(self, make_engine: Callable[[], Engine], bridge: Bridge | None = None) -> None:
        self.pid = os.getpid()
        self.bridge = bridge or Bridge()
        self._make_engine = make_engine
        self._engine: Engine | None = None
        self._opening: asyncio.Lock | None = None
        self._closed = False

    @property
    def opened(self) -> Engine | None:
        return self._engine

    async def engine(self, session: object = None) -> Engine:
        """Return the engine, opened on first use, perhaps beside a user's own transaction. A failed opening is not
        remembered: the next call tries again.
        """
        if self._engine is None:
            self._opening = self._opening or asyncio.Lock()
            async with self._opening:
                if self._engine is None:
                    engine = self._make_engine()
                    await engine.open(session)
                    self._engine = engine
        return self._engine

    def abandon(self) -> None:
        """Close it without waiting: no caller is left that could use it."""
        if self.pid == os.getpid():
            threading.Thread(target=self.close, name="holdfast-close", daemon=True).start()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.bridge.close(self._end)

    async def _end(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()


Compose = Callable[..., Engine]
"""Makes an engine with all features, from the keywords of `Engine`."""


class AppRuntime:
    def __init__(self, name: str, url: str, settings: Settings, compose: Compose) -> None:
        self._compose = compose
        self.name = name
        self.url = url
        self.settings = settings
        self.codec = Codec()
        if (ring := ring_of(settings.encryption_keys, settings.encryption_keys_file)) is not None:
            self.codec.name_payload = functools.partial(ring.name_payload, name)
        hide_also(settings.secret_names)
        self.hooks = Hooks()
        self.tasks: dict[str, DeclaredTask] = {}  # by each of their names
        self.verifiers: dict[str, Callable[..., object]] = {}  # of webhooks, by name
        self.clock: Clock = SystemClock()
        # Not the kernel's randomness for each id: asking for it lets go of the interpreter, and so splits batches.
        self.rng = random.Random()
        self.ids = Ids(self.clock, self.rng)
        self.telemetry = logging_telemetry(self.clock.monotonic)
        self.measures: MeasurePort | None = None  # the app sets it, if metrics are on
        self.tracer: Tracer | None = None  # likewise, of tracing
        self.listeners: Any = None  # `holdfast.around.listeners.Listeners`; the app sets it
        self.runners: set[EndableRunner] = set()  # that run
        self.make_handle: Callable[[], EngineHandle] | None = None  # a test's replacement
        self.looks: RunLooks | None = None  # into runs of workflows; the app sets it
        self.forks: RunForks | None = None
        self.streams: StreamReads | None = None
        # What each runner does beside its tasks, from the engine and the core tasks; the app sets it.
        self.basic_features: Callable[[Engine, Any], Sequence[Any]] = lambda engine, core: ()
        self._handle: EngineHandle | None = None
        self._opening = threading.RLock()  # the first use may come from many threads, and from a signal handler
        _RUNTIMES.add(self)

    def __repr__(self) -> str:
        return f"<App {self.name!r} on {mask_url(self.url)}>"

    @property
    def definitions(self) -> list[TaskDefinition]:
        """Return the tasks that a runner serves."""
        return list({task.name: task.definition for task in self.tasks.values()}.values())

    @property
    def has_code(self) -> bool:
        """Return whether this process knows a task of the app. Else only what needs no code can be offered."""
        return any(not definition.is_hidden for definition in self.definitions)

    def ready(self, session: object = None) -> Engine:
        """Return the engine, opened; `session` is that of a user's own transaction."""
        handle = self.opened()
        opened = handle.opened
        return handle.bridge.run(handle.engine(session)) if opened is None else opened

    async def aready(self, session: object = None) -> Engine:
        handle = self.opened()
        opened = handle.opened
        return await handle.bridge.arun(handle.engine(session)) if opened is None else opened

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.opened().bridge.run(work)

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        return await self.opened().bridge.arun(work)

    async def either(self, work: Coroutine[Any, Any, T], is_blocking: bool) -> T:
        """Run `work` on the engine's loop, for a coroutine that serves a blocking caller (see `completed`), or not."""
        return self.run(work) if is_blocking else await self.arun(work)

    async def engine(self) -> Engine:
        return await self.opened().engine()

    def opened(self) -> EngineHandle:
        handle = self._handle
        if handle is not None and handle.pid == os.getpid():
            return handle
        with self._opening:
            if self._handle is None or self._handle.pid != os.getpid():
                if self._handle is not None:
                    self.runners = set()  # of the parent, which has them
                fresh = EngineHandle(self.make_engine()) if self.make_handle is None else self.make_handle()
                weakref.finalize(self, fresh.abandon).atexit = False
                if self._handle is not None and self._handle.pid == os.getpid():
                    fresh.abandon()  # a signal handler came in between and made one
                else:
                    self._handle = fresh
            return self._handle

    def make_engine(self, given: Store | None = None) -> Callable[[], Engine]:
        """Return what builds the engine. It must not hold this, or an app that was forgotten would never be let go."""
        made = {"app": self.name, "clock": self.clock, "ids": self.ids, "rng": self.rng}
        made |= {
            "codec": self.codec,
            "telemetry": self.telemetry,
            "settings": self.settings,
            "url": self.url,
            "store": given,
            "measures": self.measures,
            "tracer": self.tracer,
        }
        return functools.partial(self._compose, **made)

    def import_modules(self) -> None:
        """Import the modules that declare triggers, before a runner or a worker starts."""
        for name in filter(None, self.settings.trigger_task_modules.split(",")):
            try:
                importlib.import_module(name)
            except Exception as error:
                where = self.settings.origin("trigger_task_modules").source
                raise ConfigurationError(
                    f"trigger_task_modules ({where}): the module '{name}' cannot be imported: "
                    f"{type(error).__name__}: {error}"
                ) from error

    async def explain(self, record: InvocationRecord) -> Explanation:
        engine, dead_after = await self.engine(), self.settings.dead_after_seconds
        in_force = functools.partial(self._in_force, await self._changed_limits(engine))
        if self.looks is not None and record.run is not None:
            of_world = await self.looks.explain(engine, record)
            if of_world is not None:
                return of_world
        waits, awaited = await self._waits(engine, record), None
        if child := next((call.child for call in waits[:MAX_NAMED] if call.child), ""):
            (found,) = await get_readable(engine.store, engine.app, [InvocationId(child)])
            if found is not None:
                # What it waits for in turn is named, but not explained: a chain of children may be long.
                awaited = await explained(engine.store, found, in_force, dead_after, await self._waits(engine, found))
        return await explained(engine.store, record, in_force, dead_after, waits, awaited)

    async def _changed_limits(self, engine: Engine) -> ChangedLimits:
        changed = engine.part(ChangedLimits)
        if any(task.definition.limit or task.definition.rate for task in self.tasks.values()):
            await changed.refresh()
        return changed

    def _in_force(self, changed: ChangedLimits, name: str) -> tuple[Limit | None, Rate | None]:
        if (task := self.tasks.get(name)) is None:
            return None, None
        limit, rate, shared = task.definition.limit, task.definition.rate, task.definition.rate_name
        return (
            None if limit is None else changed.limit(name, limit),
            None if rate is None else changed.rate(shared or task.definition.name, rate),
        )

    async def _waits(self, engine: Engine, record: InvocationRecord) -> Sequence[RunWait]:
        """Return what a run waits for, by its log; nothing for a task."""
        if self.looks is None or record.run is None:
            return ()
        return await self.looks.waits_for(engine, record)

    def close(self) -> None:
        """End the runners in this process, and let go of the store and of all threads."""
        handle = self._handle
        if handle is not None and handle.pid == os.getpid():
            try:
                for runner in list(self.runners):
                    runner.end()
            finally:
                self._handle = None
                handle.close()
        if self.listeners is not None:
            self.listeners.finish()


class HasRuntime(Protocol):
    """A public class of an app, such as ``app.schedules``."""

    _runtime: AppRuntime


S = TypeVar("S", bound=HasRuntime)


def blocking(method: Callable[Concatenate[S, Engine, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[S, P], T]:
    """Make a blocking method of a method that takes the opened engine first and returns a coroutine for the engine's
    loop.

    A plain method is called on the caller's thread, so it may run user code before it returns its coroutine.
    """

    @functools.wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._runtime.run(method(self, self._runtime.ready(), *args, **kwargs))

    return _without_engine(run)


def awaited(made: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Make the async method that belongs to a `blocking` one."""
    method: Callable[Concatenate[S, Engine, P], Coroutine[Any, Any, T]] = made.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(method)
    async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._runtime.arun(method(self, await self._runtime.aready(), *args, **kwargs))

    return _without_engine(run)


def completed(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, on the caller's thread: the blocking form of an async method."""
    try:
        work.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError(f"{work!r} serves a blocking caller, and has suspended")


def _without_engine(run: Callable[P, T]) -> Callable[P, T]:
    signature = inspect.signature(run)
    shown = [each for each in signature.parameters.values() if each.name != "engine"]
    run.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return run


def runtime_here() -> AppRuntime | None:
    """Return the runtime of the app whose code runs here; None outside of tasks and workflows."""
    call = here.get()
    return (
        None
        if call is None
        else next((each for each in list(_RUNTIMES) if each.codec is getattr(call, "codec", None)), None)
    )


def _reseed() -> None:
    """Reseed the random numbers of a forked child: it must not repeat its parent's ids."""
    for runtime in list(_RUNTIMES):
        runtime.rng.seed()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reseed)


@atexit.register
def _close_all() -> None:
    """Close all apps: running work goes back to the queue, and a closed store needs no check at the next start."""
    for runtime in list(_RUNTIMES):
        try:
            runtime.close()
        except Exception as error:
            runtime.telemetry.emit(DutyFailed("engine", f"close {runtime!r} at the end of the program", error))
