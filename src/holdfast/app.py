"""The app: the composition root.

It declares tasks, reads the settings, and builds the engine when it is first needed: making an `App` touches neither
the disk nor the network, so a module that declares tasks can be imported anywhere.
"""

from __future__ import annotations

import atexit
import difflib
import importlib
import logging
import os
import random
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

from holdfast import crashpoints
from holdfast._inside import Inside
from holdfast.archive import Archived
from holdfast.clock import Clock, Duration, SystemClock, parse_duration
from holdfast.codec import Codec, Limits
from holdfast.declaring import TaskOptions, definition_of, names, refuse_unknown, valid_weights
from holdfast.embedded import EmbeddedRunner
from holdfast.emitting import Emitting
from holdfast.engine.core import Duties, Engine
from holdfast.engine.declarations import Declaration
from holdfast.engine.definition import TaskDefinition, is_redefined, where_of
from holdfast.engine.explaining import explained
from holdfast.engine.outages import StoreLog
from holdfast.engine.runner import RunnerSettings
from holdfast.errors import ConfigurationError, DuplicateTask, UnknownTask, UsageError
from holdfast.execution.declared import remember
from holdfast.execution.hooks import Hooks
from holdfast.ids import Ids
from holdfast.invocation import End, Invocation, outcome_of
from holdfast.lifecycle.explain import Explanation, living
from holdfast.lifecycle.limits import Limit
from holdfast.lifecycle.names import valid_name
from holdfast.lifecycle.records import InvocationRecord, RunnerRecord
from holdfast.lifecycle.status import Status
from holdfast.lifecycle.triggers import TriggerRecord
from holdfast.masking import mask_url
from holdfast.queues import Queues
from holdfast.schedules import cron
from holdfast.scheduling import Schedules
from holdfast.settings import Settings, absolute_url, default_url
from holdfast.store import open_store
from holdfast.store.contract import Filter, Store
from holdfast.task import AsyncTask, Submittable, Task
from holdfast.triggering import declarations, evaluators, refuse_doubles, trigger_records
from holdfast.wakeup import fallback

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_NAME = "default"
log = logging.getLogger("holdfast.engine")


class App(Archived, Emitting):
    """Tasks, and the store that their invocations live in.

    `url` is ``sqlite:///shop.db``, ``memory://`` or what a plug-in provides; without it the setting `url`
    (``HOLDFAST_URL``), else `holdfast.db` beside the nearest pyproject.toml or in the current folder. Several apps
    share a store under different names.
    """

    def __init__(self, url: str | None = None, *, name: str | None = None, **settings: object) -> None:
        given = settings | {key: value for key, value in (("url", url), ("name", name)) if value is not None}
        self.settings = Settings.load(given, environ=os.environ, folder=Path.cwd())
        crashpoints.arm(os.environ.get(crashpoints.VARIABLE))
        fallback.switch(os.environ.get(fallback.VARIABLE))
        self.url = absolute_url(self.settings.url or default_url(Path.cwd()), Path.cwd())
        self.name = valid_name("app", self.settings.name or DEFAULT_NAME)
        self._tasks: dict[str, Submittable[..., Any]] = {}
        self._codec = Codec()
        self._hooks = Hooks()
        self._clock: Clock = SystemClock()
        # Not the kernel's randomness for each id: asking for it lets go of the interpreter, and so splits batches.
        self._rng = random.Random()
        self._ids = Ids(self._clock, self._rng)
        self._inside: Inside | None = None
        self._make_inside: Callable[[], Inside] | None = None  # what a test has put in the place of the usual
        self._runners: set[EmbeddedRunner] = set()  # those that run
        self._opening = threading.RLock()  # the first use may come from many threads, and from a signal handler
        _APPS.add(self)

    def __repr__(self) -> str:
        return f"<App {self.name!r} on {mask_url(self.url)}>"

    # --- declaring

    @overload
    def task(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(self, function: None = None, /, **options: Unpack[TaskOptions]) -> _Decorator: ...

    def task(self, function: Callable[..., Any] | None = None, /, **options: Unpack[TaskOptions]) -> Any:
        """Declare a task: ``@app.task`` or ``@app.task(queue="mail", priority=5)``.

        Its name is its import path (``shop:send_mail``); `name` gives another one, and `aliases` are older names
        under which stored work may still call for it. A coroutine function shares one event loop with the others; a
        plain function gets a thread. ``executor="process"`` runs either in a process of its own, which may crash or
        compute without harm to others.

        Work whose runner crashed is run again; ``at_most_once=True`` ends it with `WorkerLost` instead. What raised is
        over, unless `retries` says otherwise: a number of further attempts, or a policy (``Retries(5, cap="10m")``).

        What has ended is kept for `archive_retention_seconds` (7 days); `retention` says otherwise for this task
        (``"1d"``; None for ever), or for some outcomes (``{"success": "1d", "failed": None}``).

        `running_concurrency` limits how many calls run at once, on all runners together: `concurrency_limit` of the
        "task", or of those with the same "arguments", or with the same values of `key_arguments` ("keys"). Others wait
        for their turn, or end with `InvocationRefused` if `reroute_on_concurrency_control` is false.

        `registration_concurrency` keeps the queue free of doubles: a call that meets one of its kind (of the same
        "task", "arguments" or "keys") that has not been started yet is not stored, and its handle is that one's. With
        ``on_diff_non_key_args_raise=True`` it is refused if other arguments differ.

        ``debounce="5s"`` waits until no call came for so long and then runs once, with the arguments of the last one,
        at the latest `debounce_max_wait` after the first; ``throttle="10s"`` runs the first call, and those that come
        within that time are taken for it. Both go by `key_arguments` if there are any, else by the task.
        Each attempt may take up to `timeout`; then it is ended and has failed with `TimedOut`. After `soft_timeout` it
        gets a `SoftTimeout`. What was not started within `expires` ends with `Expired`. What is cancelled has
        `cancel_grace` to clean up, and what it has submitted is cancelled with it, unless ``cancel_children=False``.
        `triggers` call the task by themselves, while runners run: ``triggers=[cron("0 9 * * mon-fri",
        timezone="Europe/Rome"), every("90s")]``, or with arguments and rules of their own, `scheduled(…)`; and when
        something happens: ``on_event("order.created")``, ``on_status(other, "failed")``, `on_result`, `on_exception`.
        """
        if function is None:
            refuse_unknown(options)
            return lambda function: self.task(function, **options)
        if isinstance(function, Submittable):
            raise UsageError(f"a task is made of a function, not of {function!r}")
        return self._declare(definition_of(function, options))

    def _declare(self, definition: TaskDefinition) -> Submittable[..., Any]:
        for known in definition.names:
            if known in self._tasks and not is_redefined(self._tasks[known].definition, definition):
                other = self._tasks[known].definition.function
                raise DuplicateTask(
                    f"two tasks are named '{known}': {where_of(other)} and "
                    f"{where_of(definition.function)}. Give one of them name='…'."
                )
        refuse_doubles(definition, self._definitions)
        self._codec.register_annotations(definition.function)
        remember(self.name, definition.name, definition.function, self._codec, self._hooks)
        kind: type[Submittable[..., Any]] = AsyncTask if definition.is_coroutine else Task
        task = kind(self, definition)
        self._tasks.update(dict.fromkeys(definition.names, task))
        for each in evaluators(self, definition):
            self._declare(each)
        return task

    def register(self, cls: type[T], *, name: str | None = None) -> type[T]:
        """Let values, or exceptions, of this class be stored and come back as what they were.

        Usable as a decorator. Classes in the annotations of tasks are registered by themselves.
        """
        self._codec.register(cls, name=name)
        return cls

    def on_worker_start(self, function: F) -> F:
        """Call this (async or not) in each worker before its first task: ``@app.on_worker_start``."""
        self._hooks.starts.append(function)
        return function

    def on_worker_stop(self, function: F) -> F:
        """Call this (async or not) in each worker after its last task."""
        self._hooks.stops.append(function)
        return function

    def lifespan(self, function: F) -> F:
        """A context manager (async or not) around the life of each worker, for pools and connections::

        @app.lifespan
        @asynccontextmanager
        async def pools():
            async with open_pool() as pool: ...
        """
        self._hooks.spans.append(function)
        return function

    @property
    def tasks(self) -> dict[str, Submittable[..., Any]]:
        """The declared tasks by name; not those that decide for triggers."""
        return {task.name: task for task in self._tasks.values() if not task.definition.is_hidden}

    @property
    def _definitions(self) -> list[TaskDefinition]:
        """What a runner serves."""
        return list({task.name: task.definition for task in self._tasks.values()}.values())

    def get_task(self, name: str) -> Submittable[..., Any]:
        """The task of that name, or alias. Raises `UnknownTask`."""
        if name not in self._tasks:
            near = difflib.get_close_matches(name, self._tasks, n=1)
            known = ", ".join(sorted(self.tasks)) or "none"
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise UnknownTask(f"this app declares no task '{name}'.{hint} Declared: {known}.")
        return self._tasks[name]

    @property
    def schedules(self) -> Schedules:
        """What is called again and again: ``app.schedules.create("nightly", clean, cron="0 3 * * *")``."""
        return Schedules(self)

    # --- looking

    def invocation(self, id: str) -> Invocation[Any]:
        """A handle to a stored invocation. It is not looked up before you ask it something."""
        if not isinstance(id, str):
            raise UsageError(f"invocation({id!r:.80}): expected an id, which is a text")
        return Invocation(self, id)

    def invocations(
        self,
        *,
        status: str | Iterable[str] = (),
        task: str | Iterable[str] = (),
        queue: str | Iterable[str] = (),
        parent: str | None = None,
        limit: int = 50,
        before: str | None = None,
    ) -> list[InvocationRecord]:
        """Stored invocations, newest first; of a `parent`, an id, those that it has submitted. `before` is an id: the
        next page begins with the last one of this page.
        """
        return self._run(self._list(status, task, queue, parent, limit, before))

    async def ainvocations(
        self,
        *,
        status: str | Iterable[str] = (),
        task: str | Iterable[str] = (),
        queue: str | Iterable[str] = (),
        parent: str | None = None,
        limit: int = 50,
        before: str | None = None,
    ) -> list[InvocationRecord]:
        return await self._arun(self._list(status, task, queue, parent, limit, before))

    async def _list(
        self,
        status: str | Iterable[str],
        task: str | Iterable[str],
        queue: str | Iterable[str],
        parent: str | None,
        limit: int,
        before: str | None,
    ) -> list[InvocationRecord]:
        if type(limit) is not int or not 0 <= limit <= 1_000_000:
            raise UsageError(f"limit={limit!r}: expected a whole number from 0 to 1,000,000")
        engine = await self._engine()
        where = Filter(
            statuses=frozenset(_status(name) for name in _several(status)),
            tasks=frozenset(_several(task)),
            queues=frozenset(_several(queue)),
            parent=parent,
            before_id=before,
        )
        return list(await engine.store.find(self.name, where, limit))

    @property
    def queues(self) -> Queues:
        """The queues of this app: ``app.queues.list()``, ``.pause("mail", reason="…")``, ``.resume("mail")``."""
        return Queues(self)

    def runners(self) -> list[RunnerRecord]:
        """The runners that are alive on this store."""
        return self._run(self._living())

    async def arunners(self) -> list[RunnerRecord]:
        return await self._arun(self._living())

    async def _living(self) -> list[RunnerRecord]:
        engine = await self._engine()
        return living(await engine.store.roster(self.name), engine.store.now(), self._dead_after)

    def _declarations(self, engine: Engine) -> list[Declaration]:
        return declarations(list(self.tasks.values()), engine)

    def _import_modules(self) -> None:
        """Before a runner or a worker starts: what is declared in these modules belongs to it."""
        for name in filter(None, self.settings.trigger_task_modules.split(",")):
            try:
                importlib.import_module(name)
            except Exception as error:
                where = self.settings.origin("trigger_task_modules").source
                raise ConfigurationError(
                    f"trigger_task_modules ({where}): the module '{name}' cannot be imported: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def _triggers(self) -> list[TriggerRecord]:
        return trigger_records(list(self.tasks.values()), self.name)

    @property
    def _duties(self) -> Duties:
        settings = self.settings
        return Duties(
            runner=RunnerSettings(
                heartbeat_seconds=settings.runner_heartbeat_seconds,
                dead_after_seconds=self._dead_after,
                slots=settings.slots,
            ),
            max_crash_recoveries=settings.max_crash_recoveries,
            max_pending_seconds=settings.max_pending_seconds,
            recover_running_cron=cron(settings.recover_running_invocations_cron),
            recover_pending_cron=cron(settings.recover_pending_invocations_cron),
        )

    @property
    def _dead_after(self) -> float:
        return self.settings.runner_considered_dead_after_minutes * 60

    # --- running

    def runner(
        self,
        *,
        concurrency: int | None = None,
        queues: Iterable[str] | Mapping[str, int] | None = None,
        tags: Iterable[str] = (),
        drain_timeout: Duration | None = None,
    ) -> EmbeddedRunner:
        """A runner in this process: ``with app.runner(concurrency=8): …`` (or ``async with``).

        It serves all `queues` unless some are named, and tasks that ask for no tag beyond its own `tags`. Where several
        queues have more work than it has places, they take turns; ``queues={"mail": 3, "default": 1}`` takes three of
        the one to one of the other. On leaving, running work is finished within the drain timeout.
        """
        drain = self.settings.drain_timeout_seconds if drain_timeout is None else parse_duration(drain_timeout)
        return EmbeddedRunner(
            self,
            concurrency=self.settings.concurrency if concurrency is None else concurrency,
            queues=None if queues is None else valid_weights(queues),
            tags=tuple(valid_name("tag", tag) for tag in names(tags)),
            drain_timeout_seconds=drain,
        )

    def close(self) -> None:
        """End the runners in this process, let go of the store and of all threads. The app can be used again
        afterwards.

        A runner that still works is hurried: what it has not done goes back to the queue.
        """
        inside = self._inside
        if inside is not None and inside.pid == os.getpid():
            try:
                for runner in list(self._runners):
                    runner.end()
            finally:
                self._inside = None
                inside.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- inside

    def _ready(self, beside: object = None) -> Engine:
        """The engine, opened; `beside` is the session of a user's own transaction."""
        inside = self._opened()
        opened = inside.opened
        return inside.bridge.run(inside.engine(beside)) if opened is None else opened

    async def _aready(self, beside: object = None) -> Engine:
        inside = self._opened()
        opened = inside.opened
        return await inside.bridge.arun(inside.engine(beside)) if opened is None else opened

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._opened().bridge.run(work)

    async def _arun(self, work: Coroutine[Any, Any, T]) -> T:
        return await self._opened().bridge.arun(work)

    async def _engine(self) -> Engine:
        return await self._opened().engine()

    def _opened(self) -> Inside:
        # A forked child has the parent's objects but none of its threads: it builds its own and leaves the parent's
        # alone.
        inside = self._inside
        if inside is not None and inside.pid == os.getpid():
            return inside
        with self._opening:
            if self._inside is None or self._inside.pid != os.getpid():
                if self._inside is not None:
                    self._runners = set()  # of the parent, which has them
                fresh = Inside(self._engine_maker()) if self._make_inside is None else self._make_inside()
                weakref.finalize(self, fresh.abandon).atexit = False
                if self._inside is not None and self._inside.pid == os.getpid():
                    fresh.abandon()  # a signal handler came in between and made one
                else:
                    self._inside = fresh
            return self._inside

    def _engine_maker(self, given: Store | None = None) -> Callable[[], Engine]:
        """What builds the engine. It must not hold the app, or an app that was forgotten would never be let go."""
        settings, url, name, clock, ids, rng = self.settings, self.url, self.name, self._clock, self._ids, self._rng
        options = {
            "synchronous": settings.sqlite_synchronous,
            "busy_timeout_seconds": settings.sqlite_busy_timeout_seconds,
            "use_change_streams": settings.use_change_streams,
            "signal_retention_seconds": settings.signal_retention_seconds,
            "max_retries": settings.max_retries,
            "retry_base_delay": settings.retry_base_delay,
            "retry_max_delay": settings.retry_max_delay,
            "retry_max_time": settings.retry_max_time,
            "retry_indefinitely": settings.retry_indefinitely,
        }

        def make() -> Engine:
            store = given or open_store(url, clock=clock, observe=StoreLog(clock), options=options)
            poll = settings.poll_interval_seconds
            return Engine(
                app=name,
                store=store,
                clock=clock,
                ids=ids,
                rng=rng,
                poll_interval_seconds=poll,
                limits=Limits(settings.inline_limit, settings.payload_limit),
                chunk_threshold=settings.chunk_threshold,
                cancel_grace_seconds=settings.cancel_grace_seconds,
                trigger_max_depth=settings.trigger_max_depth,
            )

        return make

    def _outcome(self, end: End) -> object:
        return outcome_of(end, self._codec)

    async def _explain(self, record: InvocationRecord) -> Explanation:
        def limit_of(name: str) -> Limit | None:
            task = self._tasks.get(name)
            return None if task is None else task.definition.limit

        return await explained((await self._engine()).store, record, limit_of, self._dead_after)


_APPS: weakref.WeakSet[App] = weakref.WeakSet()


def _reseed() -> None:
    """A forked child must not repeat its parent's ids."""
    for app in list(_APPS):
        app._rng.seed()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reseed)


@atexit.register
def _close_all() -> None:
    """What still runs goes back to the queue, and a store that is closed needs no check at the next start."""
    for app in list(_APPS):
        try:
            app.close()
        except Exception:
            log.exception("while closing %r at the end of the program", app)


class _Decorator(Protocol):
    """What ``@app.task(…)`` returns: a coroutine function becomes an `AsyncTask`, a plain one a `Task`."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...
    def __call__(self, function: Any, /) -> Any: ...


def _several(value: str | Iterable[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _status(name: str) -> Status:
    try:
        return Status(name.lower())
    except ValueError:
        raise UsageError(f"there is no status '{name}'; there are: {', '.join(Status)}") from None
