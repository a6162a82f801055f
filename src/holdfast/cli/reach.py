"""The command line's way into an app: the only file here that uses what an app keeps to itself."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from holdfast.app import App
from holdfast.archive import ArchiveFilter
from holdfast.codec import Codec
from holdfast.embedded import EmbeddedRunner
from holdfast.engine.attached import Attached
from holdfast.engine.messages import Orders
from holdfast.engine.outages import told_elsewhere
from holdfast.engine.permit import Permit
from holdfast.engine.process_crew import ProcessCrew, refuse_bad_numbers
from holdfast.engine.recovery import Recovery
from holdfast.engine.worker import Worker
from holdfast.errors import HoldfastError, UsageError
from holdfast.invocation import End, Invocation
from holdfast.lifecycle.events import EventRecord
from holdfast.lifecycle.explain import Explanation
from holdfast.lifecycle.records import InvocationRecord, RunnerRecord, Serves
from holdfast.lifecycle.status import FINAL, OWNED
from holdfast.masking import mask_url
from holdfast.store.contract import Backup, Filter, Finding, Store

T = TypeVar("T")


def with_store(app: App, work: Callable[[Store], Awaitable[T]]) -> T:
    """Open the app's store if it is not open, and do something with it."""

    async def job() -> T:
        return await work((await app._engine()).store)

    return app._run(job())


def time_of(app: App) -> float:
    """The store's time, which may differ from this machine's."""

    async def ask(store: Store) -> float:
        return store.now()

    return with_store(app, ask)


_SHORT_SECONDS = 3.0  # for one who waits at a terminal; the driver takes 5 s to find out that nobody is there
_PATIENCE = ("max_retries", "retry_max_time", "retry_indefinitely")


@contextmanager
def impatient(app: App) -> Iterator[None]:
    """A store that does not answer is asked for a few seconds only, unless the settings say for how long."""
    if all(app.settings.origin(name).source == "default" for name in _PATIENCE):
        app.settings = dataclasses.replace(app.settings, retry_max_time=_SHORT_SECONDS)
    with told_elsewhere():
        yield


def is_made(app: App) -> bool:
    """Whether the app's store on a MongoDB server is there. Looking for it makes nothing."""

    async def job() -> bool:
        store: Any = app._engine_maker()().store
        return bool(await store.exists())

    return app._run(job())


def looked_over(app: App, *, deep: bool) -> Sequence[Finding]:
    """What there is to tell about the app's store as it is. It is not opened: that would make good what is missing."""

    async def job() -> Sequence[Finding]:
        return await app._engine_maker()().store.check(deep=deep)

    return app._run(job())


def backed_up(app: App, target: Path, *, overwrite: bool) -> Backup:
    """A copy of the app's store. It is not opened for that."""

    async def job() -> Backup:
        store: Any = app._engine_maker()().store
        if not hasattr(store, "backup"):
            raise UsageError(f"a store at {mask_url(app.url)} is not backed up from here")
        return await store.backup(target, overwrite=overwrite)  # type: ignore[no-any-return]

    return app._run(job())


def explained(app: App, record: InvocationRecord) -> Explanation:
    return app._run(app._explain(record))


def stored_now(invocation: Invocation[Any]) -> bool:
    """Whether the submit that returned this has stored it, and not found it there."""
    return invocation._fresh


def awaited(
    app: App,
    invocation: Invocation[Any],
    patience_seconds: float | None,
    *,
    explain_after_seconds: float,
    explain: Callable[[str], None],
) -> object:
    """The result. If nobody has begun with it by then, `explain` is told once what it waits for."""

    async def job() -> End:
        waiting = asyncio.ensure_future(invocation._end(patience_seconds))
        try:
            done, _ = await asyncio.wait({waiting}, timeout=explain_after_seconds)
            if not done and (why := await _held_up(app, invocation)):
                explain(why)
            return await waiting
        finally:
            waiting.cancel()

    return invocation._outcome(app._run(job()))


async def _held_up(app: App, invocation: Invocation[Any]) -> str:
    try:
        record = await invocation._record()
        return "" if record.status in OWNED | FINAL else (await app._explain(record)).text
    except HoldfastError:  # whoever waits will be told by the wait itself
        return ""


def searched(
    app: App, limit: int, before: str | None, where: ArchiveFilter
) -> tuple[list[InvocationRecord], str | None]:
    """A page of the archive, and after which id the next one begins, if there may be one."""
    records, last = app._run(app._archive(limit, before, where))
    return records, None if last is None else last[1]


def reruns_of(app: App, id: str) -> Sequence[InvocationRecord]:
    """The last few that repeat this one."""
    return with_store(app, lambda store: store.find(app.name, Filter(rerun_of=id), 10))


def event_of(app: App, id: str) -> EventRecord:
    """Raises `EventNotFound`."""

    async def job() -> EventRecord:
        return await (await app._engine()).events.get(id)

    return app._run(job())


def codec_of(app: App) -> Codec:
    return app._codec


def runner_of(
    app: App,
    *,
    command: Sequence[str],
    workers: int,
    concurrency: int | None,
    queues: Mapping[str, int] | None,
    tags: list[str],
    drain_timeout: float | None,
    max_tasks: int | None,
    memory_limit_bytes: int | None,
) -> EmbeddedRunner:
    """A runner with worker processes, or without any, that runs the tasks here."""
    refuse_bad_numbers(workers, max_tasks, memory_limit_bytes)
    app._import_modules()  # before anybody asks what it declares
    runner = app.runner(concurrency=concurrency, queues=queues, tags=tags, drain_timeout=drain_timeout)
    if workers == 0:
        if max_tasks is not None or memory_limit_bytes is not None:
            raise UsageError("--max-tasks-per-worker and --memory-limit are about worker processes; use --workers 1")
        return runner

    def crew(record: RunnerRecord, recovery: Recovery) -> ProcessCrew:
        engine = app._opened().opened
        assert engine is not None  # the runner has opened it
        return ProcessCrew(
            command=command,
            count=workers,
            record=record,
            recovery=recovery,
            clock=app._clock,
            now=engine.store.now,
            drain_timeout_seconds=runner.drain_timeout_seconds,
            unresponsive_seconds=app.settings.worker_unresponsive_seconds,
            max_tasks=max_tasks,
            memory_limit_bytes=memory_limit_bytes,
        )

    runner.supervise(crew)
    return runner


def attach(app: App, stream: socket.socket, on_stop: Callable[[Callable[[], object]], object]) -> bool:
    """Work for the runner at the other end. True: user code still runs."""

    app._import_modules()

    async def job() -> bool:
        engine = await app._engine()
        attached = Attached(*await asyncio.open_connection(sock=stream), app._clock)
        loop = asyncio.get_running_loop()
        stops.append(lambda: None if loop.is_closed() else loop.call_soon_threadsafe(attached.stop))
        if was_told:
            attached.stop()
        duties = app._duties

        def make_worker(orders: Orders, permit: Permit) -> Worker:
            definitions = app._definitions
            return engine.worker(
                definitions,
                app._codec,
                owner=orders.owner,
                serves=Serves(
                    tasks=frozenset(name for each in definitions for name in each.names),
                    queues=None if orders.queues is None else frozenset(orders.queues),
                    tags=frozenset(orders.tags),
                    weights=orders.weights,
                ),
                concurrency=orders.concurrency,
                permit=permit,
                recovery=engine.recovery(app.name, duties),
                drain_timeout_seconds=orders.drain_timeout_seconds,
                hooks=app._hooks,
                max_tasks=orders.max_tasks,
                leaves_unfinished=True,
                look_seconds=duties.runner.heartbeat_seconds,
            )

        return await attached.run(make_worker)

    def stop() -> None:
        was_told.append(True)
        for each in stops:
            each()

    was_told: list[bool] = []
    stops: list[Callable[[], object]] = []
    on_stop(stop)
    return app._run(job())
