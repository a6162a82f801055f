"""Run an app in a test: its own tasks, a store in memory, a clock that the test moves, and no runner.

A submitted call stays in the queue until the test calls `drain`, or waits for a result. Then the real worker claims,
runs and settles one call after the other. Retries, keys, limits, delays and large values work as elsewhere. Two things
differ: user code runs where the test waits (see `holdfast.testing.pump`), and the clock is moved to the next due time
when a caller waits for it.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from holdfast.app import App, features
from holdfast.clock import Duration, parse_duration
from holdfast.codec import references
from holdfast.errors import ResultTimeout, UsageError
from holdfast.executors.call import Call
from holdfast.executors.lifespan import ExitCallbacks
from holdfast.fleet.runner import path_duties
from holdfast.fleet.services import Duty, Feature
from holdfast.ids import Ids, InvocationId
from holdfast.model.records import InvocationRecord, Serves
from holdfast.model.status import FINAL, Status
from holdfast.runtime.app_runtime import EngineHandle, refuse_on_loop
from holdfast.runtime.claim import Unlimited
from holdfast.runtime.engine import Engine
from holdfast.runtime.outage import cancel_tasks
from holdfast.runtime.release import Releaser
from holdfast.runtime.worker import Worker, WorkerOptions
from holdfast.task import Submittable
from holdfast.testing.clock import FakeClock
from holdfast.testing.pump import BOX, CoroutineLoop, Job, PumpingBridge, WaitingExecutor
from holdfast.testing.report import Ran, Report
from holdfast.testing.stage import EagerEvents, EagerWatcher, StageStore
from holdfast.testing.submitted import Submitted, complaint, matching
from holdfast.triggers.evaluation import declarations
from holdfast.triggers.events import from_entry
from holdfast.triggers.outbox import Events

_MOST = 10_000


class Endless(AssertionError):
    """Raised by a drain that has run too many calls to come to an end."""


class Harness:
    """Drive an app in a test: ``with testing_app(app) as t:``. Every blocking method has an async form with an `a` in
    front.
    """

    def __init__(self, app: App, start: dt.datetime | float | None = None) -> None:
        self.app = app
        self.clock = FakeClock(_moment(start))
        self._store = StageStore(self.clock)
        self._coroutine_loop = CoroutineLoop()
        self._ran: list[Ran] = []
        self._errors: dict[str, BaseException] = {}
        self._depth = 0
        self._swept = self.clock.now()
        self._before: dict[str, Any] = {}
        self._duties_of: object = None
        self._duties: Sequence[Duty] = ()
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
        self._before = {name: getattr(self.app.runtime, name) for name in ours}
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
            self._coroutine_loop.close()

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
            return engine

        return EngineHandle(with_eager_watcher, PumpingBridge(self._coroutine_loop, self._store.take_in))

    # --- running

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
        first = len(self._ran)
        await self._work(end, most, lambda: False)
        if until is not None and not BOX.get().is_interrupted:
            self._move_to(end)
        ran = self._ran[first:]
        records = await self._store.get(self.app.name, [each.id for each in ran])
        left = [record for record in self._store._of(self.app.name) if record.status not in FINAL]
        return Report(ran, records, left, self.clock.now())

    def _end(self, until: Duration | dt.datetime | None) -> float:
        now = self.clock.now()
        if until is None:
            return now
        if not isinstance(until, dt.datetime):
            return now + parse_duration(until)
        if (moment := _moment(until)) < now:
            raise UsageError(f"until={until!r} is over: the clock of this test says {_told(now)}")
        return moment

    async def _perform(self, ids: Sequence[InvocationId], timeout: float | None) -> None:
        """Run calls until these have ended, for a caller that waits, and move the clock as if it had waited."""
        name = self.app.name

        def enough() -> bool:
            found = [self._store._records.get((name, id)) for id in ids]
            return all(record is None or record.status in FINAL for record in found)

        end = float("inf") if timeout is None else self.clock.now() + timeout
        await self._work(end, _MOST, enough)
        if enough() or BOX.get().is_interrupted:
            return
        if timeout is not None:
            self._move_to(end)
        else:
            open_ones = [r for r in await self._store.get(name, ids) if r is not None and r.status not in FINAL]
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
            await self._here("start hooks", lambda: self.app.runtime.hooks.enter(ends))
        self._depth += 1
        first = len(self._ran)
        try:
            while not enough() and not BOX.get().is_interrupted:
                if len(self._ran) - first >= most:
                    raise Endless(f"{most:,} calls were run, and there is more. {self._usual()} Give most= if not.")
                if await self._step(engine, releaser) or await self._perform_duties(engine):
                    continue
                due = self._store.next_due(self.app.name, ticks=end < float("inf"))  # who waits needs no tick
                if due is None or due > end:
                    return
                self._move_to(due)
        finally:
            self._depth -= 1
            if self._depth == 0 and self.app.runtime.hooks:
                await self._here("stop hooks", ends.leave)

    def _usual(self) -> str:
        last = self._ran[-1].call if self._ran else ""
        return f"The last one was {last}: does it submit itself again, or is it retried for ever?"

    async def _step(self, engine: Engine, releaser: Releaser) -> bool:
        """Let a worker run one call. Return False if no call is due."""
        before = len(self._ran)
        worker = self._worker(engine, releaser)
        empty = self._store.nothing[worker.owner] = asyncio.Event()
        life = asyncio.create_task(worker.run())
        nothing = asyncio.create_task(empty.wait())
        try:
            await asyncio.wait({life, nothing}, return_when=asyncio.FIRST_COMPLETED)
            if not life.done():
                worker.stop()
            account = await life
            await engine.outbox.finish()
        finally:
            await cancel_tasks(life, nothing)
            del self._store.nothing[worker.owner]
        for ran in self._ran[before:]:
            (record,) = await self._store.get(self.app.name, [ran.id])
            if record is not None and ran.status is None:
                ran.status = record.status
                ran.error = self._failure_of(record, self._errors.pop(ran.id, None))
        return account.started > 0

    def _failure_of(self, record: InvocationRecord, raised: BaseException | None) -> BaseException | None:
        """Return the error of an attempt. After a time limit it is the stored error, not the one that the code saw."""
        failures = [each.error for each in record.errors] if record.status is Status.RETRY else [record.error]
        stored = failures[-1] if failures else None
        if stored is None or type(raised).__qualname__ == stored.type_name.rpartition(":")[2]:
            return raised
        return self.app.runtime.codec.decode_error(stored, invocation_id=record.id)

    def _worker(self, engine: Engine, releaser: Releaser) -> Worker:
        definitions = self.app.runtime.definitions
        box = BOX.get()
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
        return Worker(*made, make_executor=lambda kind, deliver: WaitingExecutor(box, deliver, self._noted))

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

    async def _here(self, name: str, work: Callable[[], Any]) -> None:
        """Run a function where the caller waits, and raise its error here."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[BaseException | None] = loop.create_future()

        def tell(error: BaseException | None) -> None:
            loop.call_soon_threadsafe(done.set_result, error)

        async def caught() -> BaseException | None:
            try:
                await work()
            except BaseException as error:
                return error
            return None

        BOX.get().put(Job(name, caught, True, tell, is_call=False))
        if isinstance(error := await done, BaseException):
            raise error

    def _noted(self, call: Call) -> Call:
        """Return the same call, with its error kept: a test wants the error itself."""
        function = call.function

        @contextmanager
        def noted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
            self._errors.pop(call.key, None)
            self._ran.append(Ran(self.app.invocation(call.key), call.task, args, kwargs))
            try:
                yield
            except BaseException as error:
                self._errors[call.key] = error
                raise

        def plain(*args: Any, **kwargs: Any) -> Any:
            with noted(args, kwargs):
                return function(*args, **kwargs)

        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            with noted(args, kwargs):
                return await function(*args, **kwargs)

        return call._replace(function=coroutine if asyncio.iscoroutinefunction(function) else plain)

    def _move_to(self, moment: float) -> None:
        while (left := moment - self.clock.now()) > 0:
            self.clock.advance(max(left, 1e-6))  # a sum of floats may fall a hair short

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


def testing_app(app: App | None = None, *, start: dt.datetime | float | None = None) -> Harness:  # noqa: PT028
    """Put the app on its own store in memory until the end of the block: ``with testing_app(app) as t:``.

    Without an app a new one is made, `t.app`. The clock begins at `start`, or at the present time.
    """
    return Harness(App("memory://", name="testing") if app is None else app, start)


testing_app.__test__ = False  # type: ignore[attr-defined]  # its name begins like that of a test


def _moment(at: dt.datetime | float | None) -> float:
    if at is None:
        return time.time()
    if isinstance(at, dt.datetime):
        if at.tzinfo is None:
            raise UsageError(f"{at!r} has no time zone, so the moment is ambiguous; use an aware datetime")
        return at.timestamp()
    return float(at)


def _told(moment: float) -> str:
    return dt.datetime.fromtimestamp(moment, dt.UTC).isoformat(timespec="seconds")
