"""The app: the composition root.

It declares tasks, reads the settings, and builds the engine when it is first needed: making an `App` touches neither
the disk nor the network, so a module that declares tasks can be imported anywhere.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import inspect
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Protocol, Self, TypeVar, Unpack, cast, overload

import msgspec

from holdfast import crashpoints
from holdfast.archive.api import Archive
from holdfast.archive.retention import Retention
from holdfast.around.listeners import Listeners
from holdfast.around.programs import KEEP_BYTES, CommandFailed, CommandResult, Programs
from holdfast.clock import Clock, Duration, parse_duration
from holdfast.codec.sealing import ring_of
from holdfast.declaring import (
    DirectOptions,
    TaskOptions,
    WorkflowOptions,
    definition_of,
    names,
    refuse_other_rate,
    refuse_unknown,
    valid_weights,
    workflow_definition,
)
from holdfast.direct import AsyncDirectTask, DirectTask, direct, spread_of
from holdfast.errors import DuplicateTask, UnknownTask, UsageError
from holdfast.executors.declared import remember
from holdfast.fleet.core_tasks import CoreTaskRegistry
from holdfast.fleet.embedded import EmbeddedRunner
from holdfast.fleet.services import Feature
from holdfast.groups.calling import Caller
from holdfast.groups.looking import GroupAccess
from holdfast.groups.service import Groups, GroupWatch
from holdfast.invocation import Invocation
from holdfast.metrics.measures import Measures
from holdfast.model.changes import CHILDREN, FOLLOW, GROUP, HOOKS, PARENT, Verdict
from holdfast.model.explain import living
from holdfast.model.names import valid_name
from holdfast.model.records import InvocationRecord, RunnerRecord
from holdfast.rates.api import LimitAccess
from holdfast.runtime import hints
from holdfast.runtime.app_runtime import AppRuntime, awaited, blocking
from holdfast.runtime.definition import TaskDefinition, is_redefined, where_of
from holdfast.runtime.engine import Engine
from holdfast.runtime.naming import ListOptions, Wanted, listing
from holdfast.runtime.queues import Queues
from holdfast.schedules.api import Schedules
from holdfast.schedules.declared import CoreSchedules, Declaration, Declarations
from holdfast.settings import Settings, absolute_url, default_url
from holdfast.stats.api import Since, Stats, stats_of
from holdfast.stats.counters import Counters
from holdfast.stats.service import StatsUpkeep
from holdfast.store import open_store
from holdfast.store.contract import Store
from holdfast.store.sealed import sealed_store
from holdfast.streams.reader import StreamReading
from holdfast.streams.service import StreamUpkeep
from holdfast.streams.writer import ChunkWriter
from holdfast.task import AsyncTask, AsyncWorkflow, Submittable, Task, Workflow
from holdfast.telemetry.events import store_observer
from holdfast.tracing import Tracer
from holdfast.triggers.api import Triggers
from holdfast.triggers.evaluation import declarations, evaluators, refuse_duplicate_names
from holdfast.triggers.outbox import Events, TriggerOutbox
from holdfast.triggers.rules import TriggerRecord
from holdfast.triggers.service import TriggerRegistry
from holdfast.workflows.api import AsyncStep, Step, StepBase
from holdfast.workflows.children import end_children, notify_parents
from holdfast.workflows.declaring import StepDeclaration, body_fingerprint, step_of, step_task
from holdfast.workflows.executor import WorkflowExecutor
from holdfast.workflows.forking import Forking
from holdfast.workflows.hooks_records import WORLD
from holdfast.workflows.hooks_requests import WebhookRequest
from holdfast.workflows.hooks_resuming import HookAccess
from holdfast.workflows.hooks_store import HookSweep, end_hooks
from holdfast.workflows.looking import Looking
from holdfast.workflows.service import Waits, read_progress
from holdfast.world.controlling import WorldRuns
from holdfast.world.looking import WorldLooking

__all__ = ["App", "EmbeddedRunner"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_NAME = "default"
MakeTask = Callable[[AppRuntime, TaskDefinition], Submittable[..., Any]]


class App:
    """Tasks, and the store that their invocations live in.

    `url` is ``sqlite:///shop.db``, ``memory://`` or what a plug-in provides; without it the setting `url`
    (``HOLDFAST_URL``), else `holdfast.db` beside the nearest pyproject.toml or in the current folder. Several apps
    share a store under different names.
    """

    def __init__(self, url: str | None = None, *, name: str | None = None, **settings: object) -> None:
        given = settings | {key: value for key, value in (("url", url), ("name", name)) if value is not None}
        settings_ = Settings.load(given, environ=os.environ, folder=Path.cwd())
        crashpoints.arm(os.environ.get(crashpoints.VARIABLE))
        hints.switch(os.environ.get(hints.VARIABLE))
        where = absolute_url(settings_.url or default_url(Path.cwd()), Path.cwd())
        self.runtime = AppRuntime(valid_name("app", settings_.name or DEFAULT_NAME), where, settings_, compose)
        self._runtime = self.runtime
        if settings_.metrics:
            self.runtime.measures = measures = Measures(self.runtime.name, self.runtime.clock.monotonic)
            self.runtime.telemetry.subscribe(measures)
        if settings_.tracing:
            encrypts = bool(settings_.encryption_keys or settings_.encryption_keys_file)
            self.runtime.tracer = Tracer(shows_errors=not encrypts)
        self.runtime.listeners = Listeners(self.runtime.name, self.runtime.telemetry, self.runtime.tasks)
        self.runtime.looks, self.runtime.forks = WorldLooking(Looking()), Forking()
        self.runtime.streams = StreamReading()
        self.runtime.basic_features = lambda engine, core: (CoreSchedules(core), Retention(engine))
        self.archive = Archive(self.runtime)
        self.queues = Queues(self.runtime)
        self.limits = LimitAccess(self.runtime)
        self.schedules = Schedules(self.runtime)
        self.triggers = Triggers(self.runtime)
        # By the names that people know, too.
        self.aarchive, self.rerun, self.arerun = self.archive.asearch, self.archive.rerun, self.archive.arerun
        self.purge, self.apurge = self.archive.purge, self.archive.apurge
        hooks = HookAccess(self.runtime)
        self.resume_hook, self.aresume_hook = hooks.resume_hook, hooks.aresume_hook
        self.resume_or_submit, self.aresume_or_submit = hooks.resume_or_submit, hooks.aresume_or_submit
        self.hook, self.ahook, self.hooks, self.ahooks = hooks.hook, hooks.ahook, hooks.hooks, hooks.ahooks
        groups = GroupAccess(self.runtime)
        self.group, self.agroup, self.groups, self.agroups = groups.group, groups.agroup, groups.groups, groups.agroups
        self.chain, self.achain = groups.chain, groups.achain
        self.runtime.codec.register(WebhookRequest)
        self.emit, self.aemit = self.triggers.emit, self.triggers.aemit
        self.events, self.aevents = self.triggers.events, self.triggers.aevents

    @property
    def name(self) -> str:
        return self.runtime.name

    @property
    def url(self) -> str:
        return self.runtime.url

    @property
    def settings(self) -> Settings:
        return self.runtime.settings

    def __repr__(self) -> str:
        return repr(self.runtime)

    # --- declaring

    @overload
    def task(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(self, function: None = None, /, **options: Unpack[TaskOptions]) -> _Decorator: ...

    def task(self, function: Callable[..., Any] | None = None, /, **options: Unpack[TaskOptions]) -> Any:
        """Declare a task: ``@app.task`` or ``@app.task(queue="mail", priority=5)``.

        Its name is its import path (``shop:send_mail``); `name` gives another one, and `aliases` are older names under
        which stored work may still call for it. A coroutine function shares one event loop with the others; a plain
        function gets a thread. ``executor="process"`` runs either in its own process, which may crash or compute for
        long without harm to others.

        An invocation of a crashed runner is run again; ``at_most_once=True`` ends it with `WorkerLost` instead. By
        default, an exception is final; `retries` is a number of further attempts, or a policy
        (``Retries(5, cap="10m")``).

        Ended invocations are kept for `archive_retention_seconds` (7 days), or for the `retention` of the task
        (``"1d"``; None for ever), which may differ by outcome (``{"success": "1d", "failed": None}``).

        `limit` says how many calls run at once, on all runners together: of the task, or of calls with the same values
        of the arguments in `limit_by` (a name, a list, "*" for all; alone it means ``limit=1``). Other calls wait for
        their turn, or end with `InvocationRefused` if `when_full` is "refuse".

        ``rate="100/m"`` says how many calls start in a time, on all runners together, up to `burst` at once: of the
        task, of calls with the same values of `rate_by`, or of all tasks with the same `rate_name`. Other calls wait.

        `unique` keeps the queue free of duplicates: while a call of the same kind waits for its start, `submit` stores
        nothing and returns a handle to that call. All calls of the task are of one kind, or calls with the same values
        of `unique_by`. With ``when_different="raise"`` the call is refused if other arguments differ.

        ``debounce="5s"`` waits for 5 s without a call and then runs once, with the arguments of the last call, at the
        latest `debounce_max_wait` after the first. ``throttle="10s"`` runs the first call; later calls within 10 s
        return its handle. Both go by `unique_by` if it is given, else by the task.

        An attempt that takes longer than `timeout` fails with `TimedOut`. After `soft_timeout`, `SoftTimeout` is raised
        in it. An invocation that was not started within `expires` ends with `Expired`. A cancelled invocation has
        `cancel_grace` to clean up; its children are cancelled with it, unless ``cancel_children=False``.

        ``validate="submit"`` checks the arguments of each call against the annotations when it is submitted, and raises
        `ArgumentsDoNotFit` with the path of the value that does not fit. The setting `validate` does so for all tasks.

        ``log_lines=50`` keeps the last lines that a call has logged with its invocation.

        `triggers` call the task by themselves, while runners run: ``triggers=[cron("0 9 * * mon-fri",
        timezone="Europe/Rome"), every("90s")]``, or with arguments and rules of their own, `scheduled(…)`; and on
        events: ``on_event("order.created")``, ``on_status(other, "failed")``, `on_result`, `on_exception`.
        """
        if function is None:
            refuse_unknown(options)
            return lambda function: self.task(function, **options)
        if isinstance(function, Submittable):
            raise UsageError(f"a task is made of a function, not of {function!r}")
        return self._declare(definition_of(function, options))

    @overload
    def direct_task(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncDirectTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def direct_task(self, function: Callable[P, R], /) -> DirectTask[P, R]: ...
    @overload
    def direct_task(self, function: None = None, /, **options: Unpack[DirectOptions]) -> _DirectDecorator: ...

    def direct_task(self, function: Callable[..., Any] | None = None, /, **options: Unpack[DirectOptions]) -> Any:
        """Declare a task whose call looks local: ``value = total([1, 2, 3])`` submits it and waits for its result.

        It takes the options of a task. ``fan_out=`` is a function of the call's arguments that returns those of each
        invocation, as `map` takes them; ``aggregate=`` makes one value of the list of their results. `local` calls the
        function itself, and `submit` returns a handle as for any task.
        """
        if function is None:
            refuse_unknown(options, DirectOptions)
            return lambda function: self.direct_task(function, **options)
        if isinstance(function, Submittable):
            raise UsageError(f"a task is made of a function, not of {function!r}")
        make = functools.partial(direct, spread=spread_of(options))
        return self._declare(definition_of(function, options), make)

    @overload
    def workflow(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncWorkflow[P, R]: ...
    @overload
    def workflow(self, function: Callable[P, R], /) -> Workflow[P, R]: ...
    @overload
    def workflow(self, function: None = None, /, **options: Unpack[WorkflowOptions]) -> _WorkflowDecorator: ...

    def workflow(self, function: Callable[..., Any] | None = None, /, **options: Unpack[WorkflowOptions]) -> Any:
        """Declare a workflow: ``@app.workflow`` on a function whose steps are recorded.

        After a crash or a long wait, its body runs again from the top, and recorded steps return what they returned.
        So the body itself may do nothing that a replay could not repeat: see docs/decisions/0011-workflows.md. It takes
        the options of a task, but for `retries`, `at_most_once`, `executor` and `soft_timeout`. `timeout` counts from
        the first start of the run. ``version="2"`` leaves runs of other versions to runners that declare them, and
        ``check=False`` does not read the body's source for calls of clocks and chance.
        """
        if function is None:
            return lambda function: self.workflow(function, **options)
        if isinstance(function, Submittable):
            raise UsageError(f"a workflow is made of a function, not of {function!r}")
        return self._declare(workflow_definition(function, options))

    @overload
    def step(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncStep[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def step(self, function: Callable[P, R], /) -> Step[P, R]: ...
    @overload
    def step(self, function: None = None, /, **options: Unpack[StepDeclaration]) -> _StepDecorator: ...

    def step(self, function: Callable[..., Any] | None = None, /, **options: Unpack[StepDeclaration]) -> Any:
        """Declare a step: a function that a workflow's body calls, and whose result is recorded.

        `retries` and `timeout` are those of one call. A recorded step never runs again; a step that was under way when
        its worker died does, with the same ``context().idempotency_key``. ``at_most_once=True`` raises `WorkerLost` in
        the body instead. ``repeatable=True`` is for reads and computation: it saves a write. ``transactional=True``
        commits the step's own writes together with its record. `queue`, `tags` and ``executor="process"`` run it
        elsewhere.
        """
        if function is None:
            return lambda function: self.step(function, **options)
        if isinstance(function, Submittable | StepBase):
            raise UsageError(f"a step is made of a function, not of {function!r}")
        definition = step_of(function, options)
        self._declare(step_task(definition))
        return (AsyncStep if inspect.iscoroutinefunction(function) else Step)(self.runtime, definition)

    def _declare(self, definition: TaskDefinition, make: MakeTask | None = None) -> Submittable[..., Any]:
        runtime = self.runtime
        for known in definition.names:
            if known in runtime.tasks and not is_redefined(runtime.tasks[known].definition, definition):
                other = runtime.tasks[known].definition.function
                raise DuplicateTask(
                    f"two tasks are named '{known}': {where_of(other)} and "
                    f"{where_of(definition.function)}. Give one of them name='…'."
                )
        refuse_duplicate_names(definition, runtime.definitions)
        refuse_other_rate(definition, runtime.definitions)
        runtime.codec.register_annotations(definition.function)
        remember(self.name, definition.name, definition.function, runtime.codec, runtime.hooks)
        kind: type[Submittable[..., Any]] = AsyncTask if definition.is_coroutine else Task
        if definition.is_workflow:
            kind = AsyncWorkflow if definition.is_coroutine else Workflow
        task = (make or kind)(runtime, definition)
        runtime.tasks.update(dict.fromkeys(definition.names, task))
        runtime.codec.parameters.update(dict.fromkeys(definition.names, tuple(definition.signature.parameters)))
        for each in evaluators(runtime, definition):
            self._declare(each)
        return task

    def register(self, cls: type[T], *, name: str | None = None) -> type[T]:
        """Let values, or exceptions, of this class be stored and come back as what they were.

        Usable as a decorator. Classes in the annotations of tasks are registered by themselves.
        """
        self.runtime.codec.register(cls, name=name)
        return cls

    def verifier(self, function: F, /, *, name: str | None = None) -> F:
        """Declare a function that checks the signatures of webhooks, for ``hook(verify=…)``: ``@app.verifier``.

        It takes a `WebhookRequest`, and returns whether the request is genuine. `holdfast.webhooks` makes such
        functions: ``app.verifier(github_signature(secret), name="github")``. The process that serves webhooks finds
        it by its name, so declare it where the workflow is declared.
        """
        if not callable(function):
            raise UsageError(f"a verifier is a function, not {function!r:.80}")
        known = valid_name("verifier", str(name or getattr(function, "__name__", "")))
        if self.runtime.verifiers.setdefault(known, function) is not function:
            raise UsageError(f"two verifiers are named '{known}'; give one of them name='…'")
        return function

    def on_worker_start(self, function: F) -> F:
        """Call this (async or not) in each worker before its first task: ``@app.on_worker_start``."""
        self.runtime.hooks.starts.append(function)
        return function

    def on_worker_stop(self, function: F) -> F:
        """Call this (async or not) in each worker after its last task."""
        self.runtime.hooks.stops.append(function)
        return function

    def lifespan(self, function: F) -> F:
        """Enter a context manager (async or not) in each worker, for pools and connections::

        @app.lifespan
        @asynccontextmanager
        async def pools():
            async with open_pool() as pool: ...
        """
        self.runtime.hooks.spans.append(function)
        return function

    def middleware(self, function: F) -> F:
        """Surround each call of each task, and each step, by a context manager that this function makes::

        @app.middleware
        @contextmanager
        def timed(call: Context):
            began = time.monotonic()
            yield
            print(call.task, time.monotonic() - began)

        It may be async. What it raises at the start fails the attempt; at the end it changes nothing. Bodies of
        workflows have none. ``@task.middleware`` surrounds the calls of one task.
        """
        self.runtime.hooks.middleware.append(function)
        return function

    def listen(self, *stages: str) -> Callable[[F], F]:
        """Call a function, async or not, when invocations reach these stages, or any: ``@app.listen("failed")``.

        The stages are "submitted", "started", "retried", "succeeded", "failed" (an attempt), "last_failure" and
        "finalised". It takes a `LifecycleEvent` of `holdfast.around`, and is called by the process that made the write,
        after it, at most once. What has to happen belongs into a trigger. ``@task.listen(…)`` is for one task.
        """
        declare: Callable[[F], F] = self.runtime.listeners.declaring(stages)
        return declare

    def provide(self, *values: object) -> None:
        """Let parameters with ``Injected[T]`` get these values, ahead of what lifespans yield: settings, or fakes in
        tests.
        """
        self.runtime.hooks.provided += values

    def shell_task(
        self,
        allow: Mapping[str, Iterable[str]],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        keep_bytes: int = KEEP_BYTES,
        **options: Unpack[TaskOptions],
    ) -> AsyncTask[..., CommandResult]:
        """Declare a task that runs the commands of an allow-list, without a shell::

            maintain = app.shell_task({"backup": ["pg_dump", "--file={path}", "{database}"]}, name="maintain")
            maintain.submit("backup", path="/backup/shop", database="shop")

        Its result is a `CommandResult`, its error `CommandFailed`. `env` replaces the environment, but for PATH. The
        last `keep_bytes` of what a command prints are kept. It takes the options of a task.
        """
        programs = Programs(allow, cwd, env, keep_bytes)
        options.setdefault("name", "shell")
        definition = definition_of(programs.function(), options)
        self.runtime.codec.register(CommandResult)
        self.runtime.codec.register(CommandFailed)
        checked = msgspec.structs.replace(definition, check=programs.words_of)
        return cast("AsyncTask[..., CommandResult]", self._declare(checked))

    @property
    def tasks(self) -> dict[str, Submittable[..., Any]]:
        """Return the declared tasks by name, without the internal tasks of triggers."""
        known = cast(dict[str, Submittable[..., Any]], self.runtime.tasks)
        return {task.name: task for task in known.values() if not task.definition.is_hidden}

    def get_task(self, name: str) -> Submittable[..., Any]:
        """Return the task of that name, or alias. Raises `UnknownTask`."""
        if name not in self.runtime.tasks:
            near = difflib.get_close_matches(name, self.runtime.tasks, n=1)
            known = ", ".join(sorted(self.tasks)) or "none"
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise UnknownTask(f"this app declares no task '{name}'.{hint} Declared: {known}.")
        return cast(Submittable[..., Any], self.runtime.tasks[name])

    # --- the store

    @blocking
    async def prepare(self, engine: Engine) -> None:
        """Open the store, and create it if it is missing, as ``holdfast store prepare`` does. Safe to repeat.

        A submit does the same, but cannot inside of your own transaction (``session=``).
        """

    aprepare = awaited(prepare)

    # --- looking

    def invocation(self, id: str) -> Invocation[Any]:
        """Return a handle to a stored invocation. The store is read when you use it."""
        if not isinstance(id, str):
            raise UsageError(f"invocation({id!r:.80}): expected an id, which is a text")
        return Invocation(self.runtime, id)

    @blocking
    async def invocations(
        self,
        engine: Engine,
        *,
        limit: int = 50,
        **where: Unpack[ListOptions],
    ) -> list[InvocationRecord]:
        """Return stored invocations, newest first: of a `status`, `task` or `queue` (one or several of each); of
        a `parent`, an id; with all of these `attributes` (``{"stage": "packed"}``); with that `key`; submitted `since`
        and before `until` (aware datetimes, or seconds since the epoch). `before` is an id: the last one of the page
        before.

        A task is given itself, or by its name, or by the short name that only one has. Raises `UnknownTask` for a name
        that is neither declared nor stored. A search by time looks at 20,000 invocations; so does one by `key`, unless
        it names the task or the app declares some.
        """
        if type(limit) is not int or not 0 <= limit <= 1_000_000:
            raise UsageError(f"limit={limit!r}: expected a whole number from 0 to 1,000,000")
        return list(await listing(self.runtime, engine, limit, where))

    ainvocations = awaited(invocations)

    @blocking
    async def runners(self, engine: Engine) -> list[RunnerRecord]:
        """Return the runners that are alive on this store."""
        return living(await engine.store.roster(self.name), engine.store.now(), self.settings.dead_after_seconds)

    arunners = awaited(runners)

    @blocking
    async def stats(
        self,
        engine: Engine,
        since: Since = "1h",
        until: Since | None = None,
        *,
        task: Wanted = (),
        queue: str | Iterable[str] | None = (),
        step: Duration | None = None,
    ) -> Stats:
        """Return what ended over a time, how long it waited and ran, and what failed: ``app.stats("24h")``.

        `since` and `until` are moments, or how long ago they were. `step` is that between points of the series. Workers
        store what they count every 10 s; a worker that is killed takes its last 10 s with it.
        """
        return await stats_of(self.runtime, engine, since, until, step=step, task=task, queue=queue)

    astats = awaited(stats)

    # --- running

    def runner(
        self,
        *,
        concurrency: int | None = None,
        queues: Iterable[str] | Mapping[str, int] | None = None,
        tags: Iterable[str] = (),
        drain_timeout: Duration | None = None,
    ) -> EmbeddedRunner:
        """Make a runner in this process: ``with app.runner(concurrency=8): …`` (or ``async with``).

        It serves all `queues` unless some are named, and tasks that ask for no tag beyond its own `tags`. Where several
        queues have more work than it has slots, they take turns; ``queues={"mail": 3, "default": 1}`` takes three of
        mail to one of default. On leaving, running work is finished within the drain timeout.
        """
        drain = self.settings.drain_timeout_seconds if drain_timeout is None else parse_duration(drain_timeout)
        return EmbeddedRunner(
            self.runtime,
            concurrency=self.settings.concurrency if concurrency is None else concurrency,
            queues=None if queues is None else valid_weights(queues),
            tags=tuple(valid_name("tag", tag) for tag in names(tags)),
            drain_timeout_seconds=drain,
            features=self._features,
        )

    def _features(self, engine: Engine, core: CoreTaskRegistry) -> Sequence[Feature]:
        declared = declarations(list(self.tasks.values()), engine)
        has_runs = any(definition.is_workflow for definition in self.runtime.definitions)
        release = self.settings.release or release_of(self.runtime.definitions)
        made = features(engine, declared=declared, triggers=self.triggers.declared, has_runs=has_runs, release=release)
        return CoreSchedules(core), *made

    def close(self) -> None:
        """End the runners in this process, let go of the store and of all threads. The app can be used again
        afterwards.

        A runner that still works is hurried: what it has not done goes back to the queue.
        """
        self.runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


async def _give_to_world(engine: Engine, *payload: Any) -> Verdict:
    from holdfast.world.resuming import give_payload  # few apps have one

    return await give_payload(engine, *payload)


def compose(*, url: str, store: Store | None, settings: Settings, clock: Clock, **shared: Any) -> Engine:
    """Make an engine with the features that have a part in each end of an invocation. The other keywords are those of
    `Engine`.
    """
    options = {name: getattr(settings, name) for name in _STORE_OPTIONS}
    options |= {
        "synchronous": settings.sqlite_synchronous,
        "busy_timeout_seconds": settings.sqlite_busy_timeout_seconds,
    }
    opened = store or open_store(url, clock=clock, observe=store_observer(shared["telemetry"]), options=options)
    measures, tracer = (shared.pop(name, None) for name in ("measures", "tracer"))
    if measures is not None:
        measures.watch_store(opened)
    sealed = sealed_store(opened, ring_of(settings.encryption_keys, settings.encryption_keys_file))
    engine = Engine(store=sealed, settings=settings, clock=clock, **shared)
    engine.measures, engine.tracer = measures, tracer
    engine.outbox = engine.part(TriggerOutbox)
    engine.part(Counters).attach()
    engine.outbox.receivers |= {
        PARENT: functools.partial(notify_parents, engine),
        CHILDREN: functools.partial(end_children, engine),
        HOOKS: functools.partial(end_hooks, engine),
        FOLLOW: engine.part(Caller).follow,
        GROUP: engine.part(Groups).receive,
    }
    engine.hook_receivers[WORLD] = functools.partial(_give_to_world, engine)
    engine.make_run_executor = WorkflowExecutor
    engine.chunks = engine.part(ChunkWriter)
    engine.read_progress, engine.read_waits = read_progress, WorldLooking(Looking()).waits_for
    engine.foreign = WorldRuns(engine)
    return engine


_STORE_OPTIONS = (
    *("use_change_streams", "signal_retention_seconds"),
    *("max_retries", "retry_base_delay", "retry_max_delay", "retry_max_time", "retry_indefinitely"),
)


def features(
    engine: Engine,
    *,
    declared: Sequence[Declaration] = (),
    triggers: Sequence[TriggerRecord] = (),
    has_runs: bool = False,
    release: str = "",
) -> tuple[Feature, ...]:
    """Return what a runner does for the app beside running its tasks. `release` names the code that it runs."""
    schedules = Declarations(engine, declared, engine.part(Events).emit_tick)
    return (
        schedules,
        TriggerRegistry(engine, triggers, has_runs=has_runs),
        Waits(engine, has_runs=has_runs),
        HookSweep(engine),
        GroupWatch(engine),
        Retention(engine),
        StreamUpkeep(engine),
        StatsUpkeep(engine, release),
    )


def release_of(definitions: Sequence[TaskDefinition]) -> str:
    """Return a digest of the tasks and of the code of their functions."""
    facts = sorted(f"{each.name}\0{each.fingerprint}\0{_code_of(each.function)}" for each in definitions)
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def _code_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    try:
        return body_fingerprint(function)
    except Exception:  # an object that can be called, say; what has no source must not keep a runner from its start
        return type(function).__qualname__


class _WorkflowDecorator(Protocol):
    """What ``@app.workflow(…)`` returns."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncWorkflow[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Workflow[P, R]: ...
    def __call__(self, function: Any, /) -> Any: ...


class _DirectDecorator(Protocol):
    """What ``@app.direct_task(…)`` returns."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncDirectTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: Callable[P, R], /) -> DirectTask[P, R]: ...
    def __call__(self, function: Any, /) -> Any: ...


class _StepDecorator(Protocol):
    """What ``@app.step(…)`` returns."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncStep[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: Callable[P, R], /) -> Step[P, R]: ...
    def __call__(self, function: Any, /) -> Any: ...


class _Decorator(Protocol):
    """What ``@app.task(…)`` returns: a coroutine function becomes an `AsyncTask`, a plain one a `Task`."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...
    def __call__(self, function: Any, /) -> Any: ...
