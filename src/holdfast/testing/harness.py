"""Run an app in a test: its own tasks, a store in memory, a clock that the test moves, and no runner.

A submitted call stays in the queue until the test calls `drain`, or waits for a result. Then the real worker claims,
runs and settles one call after the other. Retries, keys, limits, delays and large values work as elsewhere. Two things
differ: user code runs where the test waits (see `holdfast.testing.pump`), and the clock is moved to the next due time
when a caller waits for it.
"""

# ruff: noqa: PT028 - testing_app is no test
from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import functools
import inspect
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Self, cast

from holdfast.app import App, features
from holdfast.clock import Duration, parse_duration
from holdfast.codec import references
from holdfast.errors import ResultTimeout, UsageError
from holdfast.executors.around import Resources
from holdfast.executors.call import Call
from holdfast.executors.lifespan import ExitCallbacks
from holdfast.executors.local import Deliver
from holdfast.fleet.runner import path_duties
from holdfast.fleet.services import Duty, Feature
from holdfast.ids import Ids, InvocationId
from holdfast.invocation import Chunk, Invocation
from holdfast.model.records import InvocationRecord, Serves
from holdfast.model.status import FINAL, OWNED, Status
from holdfast.runtime.app_runtime import EngineHandle, refuse_on_loop
from holdfast.runtime.claim import Unlimited
from holdfast.runtime.definition import ExecutorKind
from holdfast.runtime.engine import Engine
from holdfast.runtime.outage import cancel_tasks
from holdfast.runtime.release import Releaser
from holdfast.runtime.worker import Account, Worker, WorkerOptions
from holdfast.streams.following import LiveTails
from holdfast.task import Submittable
from holdfast.testing.clock import FakeClock
from holdfast.testing.pump import BOX, CoroutineLoop, Job, PumpingBridge, WaitingExecutor
from holdfast.testing.replays import FinishedRuns
from holdfast.testing.report import Ran, RanStep, Report
from holdfast.testing.runs import StageRuns, step_of
from holdfast.testing.stage import EagerEvents, EagerTails, EagerWatcher, StageStore
from holdfast.testing.submitted import Submitted, complaint, matching
from holdfast.triggers.evaluation import declarations
from holdfast.triggers.events import from_entry
from holdfast.triggers.outbox import Events
from holdfast.workflows.hooks_resuming import MAX_LISTED, HookRecord

_MOST = 10_000
_LOOK_SECONDS = 0.005  # whether a run has begun, or only waits


class Endless(AssertionError):
    """Raised by a drain that has run too many calls to come to an end."""


class Staying(NamedTuple):
    """A worker whose run waits in memory."""

    worker: Worker
    runs: StageRuns
    life: asyncio.Task[Account]

    @property
    def engine(self) -> Engine:
        return self.runs.engine


class Harness:
    """Drive an app in a test: ``with testing_app(app) as t:``. Every blocking method has an async form with an `a` in
    front.
    """

    def __init__(
        self,
        app: App,
        start: dt.datetime | float | None = None,
        *,
        replays: bool = True,
        other_process: bool = True,
    ) -> None:
        self.app = app
        self.clock = FakeClock(_moment(start))
        self._store = StageStore(self.clock)
        self._coroutine_loop = CoroutineLoop()
        self._ran: list[Ran] = []
        self._ran_steps: list[RanStep] = []
        self._started = 0  # calls of tasks and steps, and lives of bodies
        self._unsettled: list[Ran] = []  # attempts that have no outcome yet
        self._runs: dict[str, Ran] = {}  # of workflows, in the drain that is under way
        self._finished = FinishedRuns(app, replays=replays, other_process=other_process)
        self._errors: dict[str, BaseException] = {}
        self._depth = 0
        self._swept = self.clock.now()
        self._before: dict[str, Any] = {}
        self._duties_of: object = None
        self._duties: Sequence[Duty] = ()
        self._made_runs: dict[Worker, StageRuns] = {}
        self._provided: list[object] = []
        self._resources = Resources(app.runtime.hooks.provided)
        self._declared: frozenset[str] = frozenset()  # the tasks whose schedules and triggers are stored

    # --- taking the place of the app's store

    def __enter__(self) -> Self:
        if self._before:
            raise UsageError("this harness is in use already; testing_app() makes another one")
        rng = random.Random(0)
        ours = {
            "url": "memory://",
            "clock": self.clock,
            "rng": rng,
            "ids": Ids(self.clock, rng),
            "_handle": None,
            "runners": set(),
            "make_handle": self._make_handle,
        }
        settings = self.app.runtime.settings
        if settings.encryption_keys or settings.encryption_keys_file:  # a test sees values as they are
            ours["settings"] = dataclasses.replace(settings, encryption_keys="", encryption_keys_file="")
        self._before = {name: getattr(self.app.runtime, name) for name in ours}
        self._name_payload, self.app.runtime.codec.name_payload = self.app.runtime.codec.name_payload, None
        for name, value in ours.items():
            setattr(self.app.runtime, name, value)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.app.close()
        finally:
            for name, value in self._before.items():
                setattr(self.app.runtime, name, value)
            self._before = {}
            self.app.runtime.codec.name_payload = self._name_payload
            self._coroutine_loop.close()
        if kind is None:
            self._finished.replay_elsewhere()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)

    def _make_handle(self) -> EngineHandle:
        """Make the engine's handle. An app that is closed and used again in a test keeps its store."""
        make = self.app.runtime.make_engine(self._store)

        def with_eager_watcher() -> Engine:
            engine = make()
            engine.watcher = EagerWatcher(engine, self._perform)
            engine.put_part(Events, EagerEvents(engine, self._declare))
            engine.put_part(LiveTails, EagerTails(engine, self._perform))
            engine.make_run_executor = self._make_runs
            return engine

        return EngineHandle(with_eager_watcher, PumpingBridge(self._coroutine_loop, self._store.take_in))

    # --- running

    def provide(self, *values: object) -> None:
        """Let parameters with ``Injected[T]`` get these values, ahead of what lifespans yield."""
        self._provided += values

    def drain(self, *, until: Duration | dt.datetime | None = None, check: bool = False, most: int = _MOST) -> Report:
        """Run every call that is due, one after the other, on this thread. Return a report of the runs.

        With `until` (a duration from now, or a moment) the clock moves to each due time on the way, and stops there.
        With `check` the errors of calls that failed for good are raised. After `most` calls `Endless` is raised.
        """
        refuse_on_loop("drain()", "'await adrain()'")
        return self.app.runtime.run(self._drain(until, most)).checked(check)

    async def adrain(
        self, *, until: Duration | dt.datetime | None = None, check: bool = False, most: int = _MOST
    ) -> Report:
        """Do the same as `drain`; coroutine functions run on this loop."""
        return (await self.app.runtime.arun(self._drain(until, most))).checked(check)

    def advance(self, by: Duration, *, check: bool = False, most: int = _MOST) -> Report:
        """Move the clock by this duration, and run the calls that fall due on the way, each at its time."""
        return self.drain(until=by, check=check, most=most)

    async def aadvance(self, by: Duration, *, check: bool = False, most: int = _MOST) -> Report:
        return await self.adrain(until=by, check=check, most=most)

    async def _drain(self, until: Duration | dt.datetime | None, most: int) -> Report:
        end = self._end(until)
        first, first_step = len(self._ran), len(self._ran_steps)
        await self._work(end, most, lambda: False)
        if until is not None and not BOX.get().is_interrupted:
            self._move_to(end)
        ran = self._ran[first:]
        records = await self._store.get(self.app.name, [each.id for each in ran])
        left = self._store.unfinished(self.app.name)
        return Report(ran, records, left, self.clock.now(), steps=self._ran_steps[first_step:])

    def _end(self, until: Duration | dt.datetime | None) -> float:
        now = self.clock.now()
        if until is None:
            return now
        if not isinstance(until, dt.datetime):
            return now + parse_duration(until)
        if (moment := _moment(until)) < now:
            raise UsageError(f"until={until!r} is over: the clock of this test says {_in_words(now)}")
        return moment

    async def _perform(self, ids: Sequence[InvocationId], timeout: float | None) -> None:
        """Run calls until these have ended, for a caller that waits, and move the clock as if it had waited."""
        name = self.app.name

        def enough() -> bool:  # a call that is expected to follow others may not be there yet
            return not self._store.unfinished(name, ids) and self._store.has_all(name, ids)

        end = float("inf") if timeout is None else self.clock.now() + timeout
        await self._work(end, _MOST, enough)
        if enough() or BOX.get().is_interrupted:
            return
        if timeout is not None:
            self._move_to(end)
        else:
            open_ones = [r for r in await self._store.get(name, ids) if r is not None and r.status not in FINAL]
            if not open_ones:
                raise ResultTimeout(
                    f"{ids[0]} will not be called in this test: nothing is left to run that it could follow"
                )
            why = await self.app.runtime.explain(open_ones[0])
            raise ResultTimeout(
                f"{open_ones[0].task} {open_ones[0].id} will not end in this test: nothing is left to run that could "
                f"end it. It is {open_ones[0].status}: {why}"
            )

    async def _work(self, end: float, most: int, enough: Callable[[], bool]) -> None:
        """Run one call after the other until `enough` holds, or until no call falls due by `end`."""
        engine = await self.app.runtime.engine()
        await self._declare(engine)
        await self._dispatch_committed(engine)
        releaser = Releaser(engine)
        ends = ExitCallbacks(engine.telemetry)
        if self._depth == 0 and self.app.runtime.hooks:
            await self._here("start hooks", lambda: self._enter(ends))
        if self._depth == 0:
            self._runs.clear()
        self._depth += 1
        first = self._started
        idle: list[Staying] = []  # runs that compensate wait in memory
        try:
            while (idle or not enough()) and not BOX.get().is_interrupted:
                if self._started - first >= most:
                    raise Endless(f"{most:,} calls were run, and there is more. {self._usual()} Give most= if not.")
                if await self._step(engine, releaser, idle) or await self._perform_duties(engine):
                    continue
                if await self._go_on(idle):
                    continue
                due = self._next_due(idle, ticks=end < float("inf"))  # a caller that waits needs no tick
                if due is None or (due > end and not idle):
                    break
                self._move_to(due)
        finally:
            for staying in idle:
                staying.worker.stop(hurry=True)
                await staying.life
            self._depth -= 1
            if self._depth == 0 and self.app.runtime.hooks:
                await self._here("stop hooks", ends.leave)
            if self._depth == 0:
                await self._here("listeners", self.app.runtime.listeners.settle, is_coroutine=False)
        if self._depth == 0 and not BOX.get().is_interrupted:
            await self._replay_finished(engine)

    async def _enter(self, ends: ExitCallbacks) -> None:
        self._resources = await self.app.runtime.hooks.enter(ends)

    def _next_due(self, idle: Sequence[Staying], *, ticks: bool) -> float | None:
        times = [self._store.next_due(self.app.name, ticks=ticks), *(each.runs.host.next_due for each in idle)]
        return min((time for time in times if time is not None), default=None)

    async def _go_on(self, idle: list[Staying]) -> bool:
        """Let runs that wait in memory look for news. Return True if there was any."""
        went_on = False
        for staying in list(idle):
            await staying.runs.look()
            if not staying.runs.is_idle:
                went_on = True
                idle.remove(staying)
                await self._until_idle(staying, idle)
        return went_on

    def _usual(self) -> str:
        last = self._ran[-1].call if self._ran else ""
        return f"The last one was {last}: does it submit itself again, or is it retried for ever?"

    async def _step(self, engine: Engine, releaser: Releaser, idle: list[Staying]) -> bool:
        """Let a worker run one call. Return False if no call is due."""
        worker = self._worker(engine, releaser)
        empty = self._store.nothing[worker.owner] = asyncio.Event()
        life = asyncio.create_task(worker.run())
        nothing = asyncio.create_task(empty.wait())
        try:
            while not life.done() and worker not in self._made_runs:
                await asyncio.wait({life, nothing}, return_when=asyncio.FIRST_COMPLETED, timeout=_LOOK_SECONDS)
                if nothing.done():
                    worker.stop()
                    break
        finally:
            await cancel_tasks(nothing)
            del self._store.nothing[worker.owner]
        if (runs := self._made_runs.pop(worker, None)) is not None:
            await self._until_idle(Staying(worker, runs, life), idle)
            return True
        try:
            account = await life
        finally:
            await cancel_tasks(life)
        await self._settle(engine)
        return account.started > 0

    async def _until_idle(self, staying: Staying, idle: list[Staying]) -> None:
        """Wait until a run has left its worker, or only waits there."""
        worker, runs, life = staying
        try:
            while not life.done():
                await asyncio.wait({life}, timeout=_LOOK_SECONDS)
                if BOX.get().is_interrupted:
                    worker.stop(hurry=True)
                elif not life.done() and runs.is_idle:
                    idle.append(staying)
                    return
            await life
        except BaseException:
            await cancel_tasks(life)
            raise
        await self._settle(staying.engine)

    async def _settle(self, engine: Engine) -> None:
        """Note how the calls have ended that have ended."""
        await engine.outbox.finish()
        for ran in list(self._unsettled):
            (record,) = await self._store.get(self.app.name, [ran.id])
            if record is None or record.status in OWNED:
                continue
            self._unsettled.remove(ran)
            ran.status = record.status
            ran.error = self._failure_of(record, self._errors.pop(ran.id, None))
            if record.run is not None:
                self._finished.note(record)

    async def _replay_finished(self, engine: Engine) -> None:
        """Replay the runs that have ended, where the caller waits."""
        if work := await self._finished.to_replay(engine):
            await self._here("replay", work, is_coroutine=False)

    def _failure_of(self, record: InvocationRecord, raised: BaseException | None) -> BaseException | None:
        """Return the error of an attempt. After a time limit it is the stored error, not the one that the code saw."""
        failures = [each.error for each in record.errors] if record.status is Status.RETRY else [record.error]
        stored = failures[-1] if failures else None
        if stored is None or type(raised).__qualname__ == stored.type_name.rpartition(":")[2]:
            return raised
        return self.app.runtime.codec.decode_error(stored, invocation_id=record.id)

    def _worker(self, engine: Engine, releaser: Releaser) -> Worker:
        definitions = self.app.runtime.definitions
        options = WorkerOptions(
            owner=f"testing/{engine.ids.new()}",
            serves=Serves(
                tasks=frozenset(name for each in definitions for name in each.names),
                tags=frozenset(tag for each in definitions for tag in each.tags),
            ),
            concurrency=1,
            drain_timeout_seconds=3600.0,
            max_tasks=1,
        )
        made = (engine, definitions, options, Unlimited(), releaser)
        hooks, box = self.app.runtime.hooks.without_lives(), BOX.get()
        executors = functools.partial(WaitingExecutor, box, around=self._noted)
        worker = Worker(*made, make_executor=lambda kind, deliver: executors(deliver), hooks=hooks)
        worker.calls_around.open(self._resources.with_more(self._provided))
        worker.waits.is_off = True  # calls run one inside of the other here
        return worker

    def _make_runs(self, engine: Engine, worker: Worker, deliver: Deliver, coroutines: object) -> StageRuns:
        box = BOX.get()

        def make_step_executor(kind: ExecutorKind, deliver: Deliver) -> WaitingExecutor:
            return WaitingExecutor(box, deliver, self._noted_step)

        made = StageRuns(engine, worker, deliver, self._noted_run, make_step_executor)
        self._made_runs[worker] = made
        return made

    async def _dispatch_committed(self, engine: Engine) -> None:
        """Dispatch events of user transactions that have committed."""
        while self._store.committed_events:
            await engine.part(Events).dispatch(from_entry(self._store.committed_events.pop(0)))

    async def _declare(self, engine: Engine) -> None:
        """Store the schedules and triggers of the tasks, as a runner does when it starts."""
        if self._declared != (known := frozenset(self.app.tasks)):
            self._declared = known
            for feature in self._features(engine):
                await feature.register()

    def _features(self, engine: Engine) -> Sequence[Feature]:
        declared = declarations(list(self.app.tasks.values()), engine)
        return features(engine, declared=declared, triggers=self.app.triggers.declared)

    def _duties_for(self, engine: Engine) -> Sequence[Duty]:
        """Return the duties of the services, except the retirement of declarations: a test has no runner."""
        own = path_duties(engine, self.app.runtime.definitions)
        theirs = [duty for feature in self._features(engine) for duty in feature.duties()]
        return [*own, *(duty for duty in theirs if not duty.name.startswith("declared"))]

    async def _perform_duties(self, engine: Engine) -> bool:
        """Perform the duties of the services, once per moment. Return True if a call may be due now."""
        if self._swept == self.clock.now():
            return False
        self._swept = self.clock.now()
        if self._duties_of != (engine, self._declared):
            self._duties_of, self._duties = (engine, self._declared), self._duties_for(engine)
        for duty in self._duties:
            while await duty.perform() is True:
                pass
        return True

    async def _here(self, name: str, work: Callable[[], Any], *, is_coroutine: bool = True) -> None:
        """Run a function where the caller waits, and raise its error here."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[BaseException | None] = loop.create_future()

        def deliver(error: BaseException | None) -> None:
            loop.call_soon_threadsafe(done.set_result, error)

        async def caught() -> BaseException | None:
            try:
                await work()
            except BaseException as error:
                return error
            return None

        def plain() -> BaseException | None:
            try:
                work()
            except BaseException as error:
                return error
            return None

        BOX.get().put(Job(name, caught if is_coroutine else plain, is_coroutine, deliver, is_call=False))
        if isinstance(error := await done, BaseException):
            raise error

    def _noted(self, call: Call) -> Call:
        """Return the same call, with its error kept: a test wants the error itself."""

        @contextmanager
        def noted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
            self._errors.pop(call.key, None)
            self._started += 1
            ran = Ran(self.app.invocation(call.key), call.task, args, kwargs)
            self._ran.append(ran)
            self._unsettled.append(ran)
            try:
                yield
            except BaseException as error:
                self._errors[call.key] = error
                raise

        return _wrapped(call, noted)

    def _noted_run(self, call: Call) -> Call:
        """Return the call of a body that is noted once per drain, however often the body starts over."""
        about: Any = call.about
        id = about.id

        @contextmanager
        def noted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
            self._errors.pop(id, None)
            self._started += 1
            if id not in self._runs:
                self._ran.append(ran := Ran(self.app.invocation(id), call.task, args, kwargs))
                self._runs[id] = ran
            if (ran := self._runs[id]) not in self._unsettled:
                ran.status = None
                self._unsettled.append(ran)
            try:
                yield
            except Exception as error:
                self._errors[id] = error
                raise

        return _wrapped(call, noted)

    def _noted_step(self, call: Call) -> Call:
        """Return the call of a step that is noted, with its error."""
        step, about = step_of(call)

        @contextmanager
        def noted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
            self._started += 1
            ran = RanStep(self.app.invocation(about.invocation_id), step, about.attempt, args, kwargs)
            self._ran_steps.append(ran)
            try:
                yield
            except BaseException as error:
                ran.error = error
                raise

        return _wrapped(call, noted)

    def _move_to(self, moment: float) -> None:
        while (left := moment - self.clock.now()) > 0:
            self.clock.advance(max(left, 1e-6))  # a sum of floats may fall a hair short

    # --- what was written

    def stream(self, invocation: Invocation[Any], name: str = "default", *, attempts: str = "all") -> list[Chunk]:
        """Return the chunks that are in a stream now. Nothing is run: see `drain`."""
        return list(invocation.stream(name, attempts=attempts).stored())

    async def astream(
        self, invocation: Invocation[Any], name: str = "default", *, attempts: str = "all"
    ) -> list[Chunk]:
        return [chunk async for chunk in await invocation.stream(name, attempts=attempts).astored()]

    # --- what was submitted

    def submitted(self, task: Submittable[..., Any] | str | None = None) -> list[Submitted]:
        """Return the calls of this task, or of all, that were stored since the beginning or since `forget_submitted`,
        in order.

        A submit that found a stored call (by its key, for instance) stored nothing.
        """
        return self.app.runtime.run(self._submitted(task))

    async def _submitted(self, task: Submittable[..., Any] | str | None) -> list[Submitted]:
        engine = await self.app.runtime.engine()
        await self._dispatch_committed(engine)
        name = None if task is None else self._task(task).name
        records = [record for record in self._store.submitted if record.app == self.app.name]
        return [await self._read(engine, record) for record in records if name is None or record.task == name]

    async def _read(self, engine: Engine, record: InvocationRecord) -> Submitted:
        (now,) = await engine.store.get(engine.app, [record.id])
        arguments = (now or record).arguments  # those of the last call, if it was debounced
        args, kwargs = self.app.runtime.codec.decode_call(arguments, await engine.payloads.fetch(references(arguments)))
        return Submitted(
            invocation=self.app.invocation(record.id),
            task=record.task,
            args=args,
            kwargs=kwargs,
            queue=record.queue,
            priority=record.priority,
            key=record.key,
            delay_seconds=round(max(0.0, record.due_at - record.created_at), 3),
            status=(now or record).status,
        )

    def waiting_hooks(self) -> list[HookRecord]:
        """Return the open hooks, oldest first. Resume them with ``app.resume_hook``, then `drain`."""
        return _open_hooks(self.app.hooks(limit=MAX_LISTED))

    async def awaiting_hooks(self) -> list[HookRecord]:
        return _open_hooks(await self.app.ahooks(limit=MAX_LISTED))

    def forget_submitted(self) -> None:
        """Forget the calls that were submitted so far."""
        self._store.submitted.clear()

    def assert_submitted(
        self, task: Submittable[..., Any] | str, /, *args: Any, times: int | None = 1, **kwargs: Any
    ) -> list[Submitted]:
        """Assert that exactly `times` calls of the task with these arguments were submitted (None: at least one).
        Return them.

        ``submit(1)``, ``submit(order=1)`` and ``submit(1, 10)``, if 10 is a default, are one call. Without arguments
        any call counts. `unittest.mock.ANY` matches any value.
        """
        there = self._task(task)
        found = self.submitted(there)
        hits = matching(there.definition, found, args, kwargs)
        if not hits if times is None else len(hits) != times:
            raise AssertionError(complaint(there.definition, found, hits, args, kwargs, times, self.submitted()))
        return hits

    def assert_not_submitted(self, task: Submittable[..., Any] | str, /, *args: Any, **kwargs: Any) -> None:
        """Assert that no call of the task with these arguments was submitted; without arguments, none at all."""
        self.assert_submitted(task, *args, times=0, **kwargs)

    def _task(self, task: Submittable[..., Any] | str) -> Submittable[..., Any]:
        return self.app.get_task(task if isinstance(task, str) else task.name)


def testing_app(
    app: App | None = None,
    *,
    start: dt.datetime | float | None = None,
    replays: bool = True,
    other_process: bool = True,
) -> Harness:
    """Put the app on its own store in memory until the end of the block: ``with testing_app(app) as t:``.

    Without an app a new one is made, `t.app`. The clock begins at `start`, or at the present time.

    With `replays`, each run of a workflow that has ended is replayed at the end of a drain, and `ReplayMismatch` is
    raised if its body is not deterministic. With `other_process`, also at the end of the block, in another process
    with another hash seed, if the body can be imported there.
    """
    made = App("memory://", name="testing") if app is None else app
    return Harness(made, start, replays=replays, other_process=other_process)


testing_app.__test__ = False  # type: ignore[attr-defined]  # its name begins like that of a test


def _wrapped(call: Call, noted: Callable[[tuple[Any, ...], dict[str, Any]], AbstractContextManager[None]]) -> Call:
    """Return the call with its function inside of a context."""
    function = call.function

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        with noted(*_given(call, args, kwargs)):
            return function(*args, **kwargs)

    @functools.wraps(function)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        with noted(*_given(call, args, kwargs)):
            return await function(*args, **kwargs)

    return call._replace(function=coroutine if asyncio.iscoroutinefunction(function) else plain)


def _given(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call without those that are injected."""
    if call.around is None or not call.around.injects:
        return args, kwargs
    bound = inspect.signature(call.function).bind(*args, **kwargs).arguments
    given = {name: value for name, value in bound.items() if name in call.signature.parameters}
    both = inspect.BoundArguments(call.signature, cast(Any, given))
    return both.args, both.kwargs


def _open_hooks(hooks: list[HookRecord]) -> list[HookRecord]:
    return sorted((hook for hook in hooks if hook.is_open), key=lambda hook: (hook.created_at, hook.run, hook.call))


def _moment(at: dt.datetime | float | None) -> float:
    if at is None:
        return time.time()
    if isinstance(at, dt.datetime):
        if at.tzinfo is None:
            raise UsageError(f"{at!r} has no time zone, so the moment is ambiguous; use an aware datetime")
        return at.timestamp()
    return float(at)


def _in_words(moment: float) -> str:
    return dt.datetime.fromtimestamp(moment, dt.UTC).isoformat(timespec="seconds")
