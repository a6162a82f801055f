"""``holdfast run``: a runner, until it is asked to stop.

The runner supervises worker processes, which run the tasks; with ``--workers 0`` it runs them itself. The command
``worker`` is what it starts them with.

With ``--reload`` it restarts when a source file of this folder changes. The runner stops as it would on a signal, so
nothing is lost. It also does so when its process cannot use the store any more: after the SQLite file was replaced, or
while code in its own process has connections to a deleted log. It waits for as long as other runners wait until they
declare it dead: until then the file may come back, or the code may close its connections.

``GET /health`` answers 200 while the runner's heartbeats are written, and 503 and why while they are not; see
`holdfast.web.runner_http`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from msgspec.structs import replace
from typer import Option

from holdfast.app import App
from holdfast.cli import logs
from holdfast.cli.command import AppArgument, AppOption, Needs, app_of, command
from holdfast.cli.discovery import app_for_tasks
from holdfast.cli.logs import LogFormat, LogLevel
from holdfast.cli.output import FAILED, Output
from holdfast.cli.reloading import (
    LOOK_SECONDS,
    Reload,
    RestartWatch,
    Seen,
    files_now,
    restart_after_a_change,
    restart_process,
    stop_with_parent,
)
from holdfast.clock import parse_duration
from holdfast.errors import HoldfastError, UsageError
from holdfast.executors.child_process import SIGNALS, AsyncChannel, end_for_lost_descriptors, end_group, end_with_parent
from holdfast.executors.loop import when_a_loop_is_broken
from holdfast.executors.terminal import let_go_of_a_closed_terminal, outlive_the_terminal
from holdfast.fleet.embedded import EmbeddedRunner
from holdfast.fleet.recovery import Recovery
from holdfast.fleet.supervisor import Supervisor, refuse_bad_numbers
from holdfast.fleet.worker_process import AttachedWorker, FromRunner
from holdfast.model.names import counted
from holdfast.model.records import RunnerRecord
from holdfast.runtime.claim import Permit
from holdfast.runtime.definition import names_of
from holdfast.runtime.release import Releaser
from holdfast.runtime.worker import Account, Worker, WorkerOptions
from holdfast.settings import Settings
from holdfast.showing import error_text, fields, sentence
from holdfast.telemetry.events import RestartDue, StopAsked, WorkerBroke
from holdfast.telemetry.logs import logging_telemetry
from holdfast.web.runner_http import RunnerHttp, address_of

LogFormatOption = Annotated[LogFormat, Option(help="Lines for people or for machines.")]
LogLevelOption = Annotated[LogLevel, Option(help="From which level on.")]

GRACE_SECONDS = 3  # for a worker without a runner to hand back what it holds


@dataclasses.dataclass
class ServeOptions:
    """The work that the runner takes, and how long it may finish it."""

    queues: Annotated[
        list[str] | None,
        Option(metavar="NAMES", help="Only these: a,b. a=3,b takes three of a to one of b. May be repeated."),
    ] = None
    tags: Annotated[list[str] | None, Option(metavar="NAMES", help="Take work with these tags too: gpu,eu.")] = None
    concurrency: Annotated[int | None, Option(help="How many invocations at a time, per worker.")] = None
    drain_timeout: Annotated[
        str | None, Option(metavar="DURATION", help="How long work may take to end at a stop: 30s.")
    ] = None

    def given(self) -> dict[str, Any]:
        """Return the options as `App.runner` takes them."""
        drain = None if self.drain_timeout is None else parse_duration(self.drain_timeout)
        queues = _weighted(_names(self.queues)) if self.queues else None
        return vars(self) | {"queues": queues, "tags": _names(self.tags or []), "drain_timeout": drain}


@dataclasses.dataclass
class ProcessOptions:
    """The worker processes of the runner."""

    workers: Annotated[int, Option(help="Worker processes; 0 runs the tasks in this process.", min=0, max=1000)] = 1
    max_tasks_per_worker: Annotated[int | None, Option(help="Replace a worker after this many tasks.", min=1)] = None
    memory_limit: Annotated[str | None, Option(metavar="SIZE", help="Replace a worker with more memory: 500M, 2G.")] = (
        None
    )

    parent: Annotated[int | None, Option(hidden=True, help="A socket of the process that started the runner.")] = None

    def limits(self) -> dict[str, Any]:
        """Return the options as `Supervisor` takes them. Raises `UsageError`."""
        memory = None if self.memory_limit is None else _bytes(self.memory_limit)
        refuse_bad_numbers(self.workers, self.max_tasks_per_worker, memory)
        if not self.workers and (self.max_tasks_per_worker is not None or memory is not None):
            raise UsageError("--max-tasks-per-worker and --memory-limit are about worker processes; use --workers 1")
        return {"count": self.workers, "max_tasks": self.max_tasks_per_worker, "memory_limit_bytes": memory}


@dataclasses.dataclass
class HealthOptions:
    """The address for health checks, and for /metrics."""

    health_port: Annotated[int | None, Option(help="Answer GET /health at this port.", min=0, max=65535)] = None
    health_host: Annotated[str, Option(help="Where to answer health checks.")] = "127.0.0.1"

    def address(self, settings: Settings) -> tuple[str, int] | None:
        """Return where to answer: as the options say, or the setting runner_http. Raises `ConfigurationError`."""
        return address_of(settings) if self.health_port is None else (self.health_host, self.health_port)


@dataclasses.dataclass
class LogOptions:
    """The log lines of the runner and its workers."""

    log_format: LogFormatOption = LogFormat.TEXT
    log_level: LogLevelOption = LogLevel.INFO


@command(Needs.NOTHING)
def run(
    out: Output,
    *,
    app: AppArgument = None,
    app_option: AppOption = None,
    serve: ServeOptions,
    processes: ProcessOptions,
    reload: Annotated[bool, Option("--reload", help="Restart when a source file changes.")] = False,
    health: HealthOptions,
    lines: LogOptions,
) -> None:
    """Run submitted calls, until SIGINT, SIGTERM, SIGQUIT or SIGHUP.

    The first signal lets running work end; the second one ends it; the third one ends all its processes at once.
    SIGHUP, as when a terminal is closed, only ever counts as the first. SIGHUP and SIGQUIT stay ignored if they were
    ignored at the start, as with nohup.
    """
    logs.configure(lines.log_format, lines.log_level)
    outlive_the_terminal()
    if processes.parent is not None:
        stop_with_parent(processes.parent)
    given = serve.given()
    app = app_of(app, app_option)
    before = files_now() if reload else {}
    with importable(out, app, before) as chosen:
        chosen.runtime.import_modules()  # before its declarations are read
        runner = chosen.runner(**given)
        limits = processes.limits()
        if processes.workers:
            start_worker = _worker_command(app, lines)
            runner.supervise(functools.partial(_supervisor, chosen, runner, start_worker, limits))
        _note_what_is_idle(out, chosen, list(given["queues"] or {}))
        with contextlib.ExitStack() as around:
            watch = around.enter_context(Reload(runner.request_stop, out.note, before)) if reload else None
            if (address := health.address(chosen.settings)) is not None:
                server = around.enter_context(RunnerHttp(chosen.runtime, runner, *address))
                out.note(f"health checks are answered at {server.address}/health")
            restart = around.enter_context(Restart(runner, chosen.settings))
            id, account, was_stopped = _until_stopped(runner)
    if not was_stopped and (why := restart.why or (watch and watch.why)):
        out.note(f"{why}; restarting")
        restart_process()
    out.document({"runner": id, **fields(account)})
    out.line(f"runner {id}: {_summary(account)}")
    _leave()


def worker(
    fd: Annotated[int, Option(help="The socket to the runner.")],
    app: AppOption = None,
    log_format: LogFormatOption = LogFormat.TEXT,
    log_level: LogLevelOption = LogLevel.INFO,
) -> None:
    """Work for the runner at the other end of a socket. Not for people: `holdfast run` starts it."""
    stream = socket.socket(fileno=fd)
    stream.set_inheritable(False)  # a program that outlives this worker must not keep the line open
    runner = os.getppid()
    end_with_parent(runner, stream, GRACE_SECONDS)
    outlive_the_terminal()
    # Its runner recovers what it held, and starts another.
    when_a_loop_is_broken(functools.partial(end_for_lost_descriptors, runner))
    stop = _catch_stops()
    logs.configure(log_format, log_level)
    try:
        chosen = app_for_tasks(Output(json=False), app)
        unfinished = _attach(chosen, stream, stop)
    except Exception as error:
        # It is one of many lines that the runner and its workers write, and has to look like one.
        why = error_text(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
        logging_telemetry().emit(WorkerBroke(why, error))
        raise typer.Exit(FAILED) from None
    if unfinished:  # user code still runs, and this is how it ends
        _flush()
        end_group()
    chosen.close()
    _leave()


def importable(out: Output, reference: str | None, before: Seen) -> App:
    """Return the app. If it cannot be imported, and files are watched (`before`), restart after a change."""
    try:
        return app_for_tasks(out, reference)
    except HoldfastError as error:
        if not before:
            raise
        out.note(f"{sentence(error_text(error))} Nothing runs until a file changes.")
    restart_after_a_change(before)


def _note_what_is_idle(out: Output, app: App, queues: list[str]) -> None:
    """Note queues that no declared task uses, and an app without tasks."""
    if not app.tasks:
        out.note("this app declares no tasks, so there is nothing that this runner could do")
        return
    declared = {queue for task in app.tasks.values() for queue in task.definition.queues}
    for queue in queues:
        if queue and queue not in declared:
            known = ", ".join(sorted(declared))
            why = f"no task is declared for the queue '{queue}', only for: {known}"
            out.note(f"{why}; calls that are submitted to it run")


def _supervisor(
    app: App,
    runner: EmbeddedRunner,
    command: Sequence[str],
    limits: Mapping[str, Any],
    record: RunnerRecord,
    recovery: Recovery,
) -> Supervisor:
    """Make the supervisor of a runner's worker processes."""
    engine = app.runtime.opened().opened
    assert engine is not None  # the runner has opened it
    drain = runner.drain_timeout_seconds
    return Supervisor(
        command=command, record=record, recovery=recovery, engine=engine, drain_timeout_seconds=drain, **limits
    )


def _attach(app: App, stream: socket.socket, stop: _StopRequest) -> bool:
    """Work for the runner at the other end. Return True if user code still runs."""
    app.runtime.import_modules()

    async def job() -> bool:
        engine = await app.runtime.engine()
        channel: AsyncChannel[FromRunner] = await AsyncChannel.open(stream, FromRunner)
        attached = AttachedWorker(channel, app.runtime.clock, engine.telemetry, engine.measures)
        loop = asyncio.get_running_loop()
        stop.then(lambda: None if loop.is_closed() else loop.call_soon_threadsafe(attached.stop))

        def make_worker(options: WorkerOptions, permit: Permit) -> Worker:
            definitions = app.runtime.definitions
            served = replace(options.serves, tasks=frozenset(names_of(definitions)))
            options = replace(options, serves=served)
            return Worker(engine, definitions, options, permit, Releaser(engine), hooks=app.runtime.hooks)

        return await attached.run(make_worker)

    return app.runtime.run(job())


class _StopRequest:
    """The handler of signals that ask a worker to end. They may come before there is anything to stop."""

    def __init__(self) -> None:
        self._is_asked = False
        self._act: Callable[[], object] = lambda: None

    def __call__(self, *_: object) -> None:
        self._is_asked = True
        self._act()

    def then(self, act: Callable[[], object]) -> None:
        """Call `act` at each request; now, if there was one."""
        self._act = act
        if self._is_asked:
            act()


def _catch_stops() -> _StopRequest:
    """Handle signals from now on without ending this process. Return their handler.

    An interrupt is meant for the runner. Not SIG_IGN: programs that tasks start would inherit that. The runner starts
    a worker with all of them blocked, since it has no handlers yet.
    """
    stop = _StopRequest()
    signal.signal(signal.SIGINT, lambda *_: None)
    for number in _asking():
        signal.signal(number, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return stop


def _asking() -> list[signal.Signals]:
    """Return the signals that ask this process to drain, without those ignored at its start."""
    polite = (signal.SIGHUP, signal.SIGQUIT)
    return [signal.SIGTERM, *(number for number in polite if signal.getsignal(number) is not signal.SIG_IGN)]


def _worker_command(reference: str | None, lines: LogOptions) -> list[str]:
    app = ["--app", reference] if reference else []
    logs = ["--log-format", lines.log_format.value, "--log-level", lines.log_level.value]
    return [sys.executable, "-m", "holdfast", "worker", *app, *logs]


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise UsageError(f"--memory-limit {text}: expected a size such as 500M or 2G")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _leave() -> None:
    """End this process even if user code left a thread behind.

    Python would wait for the threads of `asyncio.to_thread` and of executors, perhaps for ever. The store is closed and
    the account is given, so there is nothing left to wait for.
    """
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    if any(not thread.daemon for thread in others):
        _end_process()


def _end_process() -> NoReturn:
    """End this process without waiting for anything. Printed text is kept."""
    _flush()
    os._exit(0)


def _flush() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()


def _names(given: list[str]) -> list[str]:
    return [name.strip() for text in given for name in text.split(",")]


def _weighted(given: list[str]) -> dict[str, int]:
    """Return queues and their weights: ``mail=3``. A name may contain =: only a number after the last is a weight."""
    found = {}
    for text in given:
        name, _, weight = text.rpartition("=")
        found[name if name and weight.isdigit() else text] = int(weight) if name and weight.isdigit() else 1
    return found


def _summary(account: Account) -> str:
    deaths = f", {counted(account.deaths, 'worker')} died" if account.deaths else ""
    return f"{account.started} started, {account.ended} ended, {account.interrupted} interrupted{deaths}"


def _until_stopped(runner: EmbeddedRunner) -> tuple[str | None, Account, bool]:
    """Run it. Return its id, what it did, and True if a signal has stopped it."""
    with _Signals(runner) as signals:
        runner.start()
        signals.repeat()
        id = runner.id
        return id, runner.wait(), signals.count > 0


_URGENCY = {
    False: "running work may end within the drain timeout, another SIGINT or SIGTERM ends it now",
    True: "running work is ended and handed back",
}


SAME_SIGNAL_SECONDS = 0.5


class _Signals:
    """Turn signals into requests to stop, each more urgent than the one before.

    SIGHUP is no more than a request to drain: when a terminal is closed, the kernel and the shell both send one, and a
    process manager may send one right after SIGTERM. The same signal twice within half a second counts
    once: `timeout` of GNU sends two, to its child and to the group.
    """

    def __init__(self, runner: EmbeddedRunner, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._runner = runner
        self._monotonic = monotonic
        self.count = 0
        self._last_at = float("-inf")
        self._last_number: int | None = None
        self._telemetry = logging_telemetry()
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, *_asking())}

    def __enter__(self) -> _Signals:
        for number in self._before:
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            let_go_of_a_closed_terminal()
            if self.count:
                return
        now = self._monotonic()
        if number == self._last_number and now - self._last_at < SAME_SIGNAL_SECONDS:
            return
        self._last_at, self._last_number = now, number
        self.count += 1
        if self.count > 2:
            # Something does not let go. What is stored is safe, so an end without ceremony costs only time.
            self._runner.kill_workers()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        name = signal.Signals(number).name
        self._telemetry.emit(StopAsked(f"{name}; {_URGENCY[self.count > 1]}"))
        self._runner.request_stop(hurry=self.count > 1)

    def repeat(self) -> None:
        """Ask again: a signal that came while the runner was starting had no effect yet."""
        if self.count:
            self._runner.request_stop(hurry=self.count > 1)


# --- restarting


class Restart(RestartWatch):
    """Restarts when this process cannot use the store any more."""

    def __init__(self, runner: EmbeddedRunner, settings: Settings) -> None:
        super().__init__()
        self._runner = runner
        self._patience = settings.dead_after_seconds

    def _watch(self) -> None:
        since: float | None = None
        while not self._end.wait(LOOK_SECONDS):
            if not (why := self._runner.needs_restart):
                since = None
            elif since is None:
                since = time.monotonic()
                logging_telemetry().emit(RestartDue(why, self._patience))
            elif time.monotonic() - since >= self._patience:
                self.why = why
                self._runner.request_stop(hurry=True)
                return
