"""``holdfast run``: a runner, until somebody asks it to stop.

It supervises worker processes, which run the tasks; without any, it runs them itself. The command ``worker`` is what it
starts them with.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Annotated, NoReturn

import msgspec
import typer

from holdfast.app import App
from holdfast.cli import logs
from holdfast.cli.choosing import app_for_work
from holdfast.cli.health import Health
from holdfast.cli.logs import LogFormat, LogLevel
from holdfast.cli.options import AppOption, AsJson
from holdfast.cli.output import FAILED, Output
from holdfast.cli.reach import attach, runner_of
from holdfast.cli.reloading import Reload, start_anew, start_anew_after_a_change
from holdfast.cli.shown import sentence, told
from holdfast.clock import parse_duration
from holdfast.embedded import EmbeddedRunner
from holdfast.engine.account import Account
from holdfast.engine.worker_process import SIGNALS
from holdfast.errors import HoldfastError, UsageError
from holdfast.execution.lifeline import (
    end_group,
    end_with_runner,
    let_go_of_a_closed_terminal,
    outlive_the_terminal,
)
from holdfast.execution.loop import when_a_loop_is_broken
from holdfast.lifecycle.names import counted

log = logging.getLogger("holdfast.worker")


QueuesOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAMES", help="Only these: a,b. a=3,b takes three of a to one of b. May be repeated."),
]


def run(
    app: Annotated[str | None, typer.Argument(metavar="APP", help="module:attribute; the same as --app.")] = None,
    app_option: AppOption = None,
    queues: QueuesOption = None,
    tags: Annotated[
        list[str] | None, typer.Option(metavar="NAMES", help="Take work that asks for these tags too: gpu,eu.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(help="How many invocations at a time, per worker.")] = None,
    workers: Annotated[
        int, typer.Option(help="Worker processes; 0 runs the tasks in this process.", min=0, max=1000)
    ] = 1,
    max_tasks_per_worker: Annotated[
        int | None, typer.Option(help="Replace a worker after so many tasks.", min=1)
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Replace a worker that holds more memory: 500M, 2G.")
    ] = None,
    reload: Annotated[bool, typer.Option("--reload", help="Start anew when a source file changes.")] = False,
    health_port: Annotated[
        int | None, typer.Option(help="Answer GET /health there, on loopback or --health-host.", min=0, max=65535)
    ] = None,
    health_host: Annotated[str, typer.Option(help="Where to answer health checks.")] = "127.0.0.1",
    drain_timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="How long running work may take to end at a stop: 30s, 5m.")
    ] = None,
    log_format: Annotated[LogFormat, typer.Option(help="Lines for people or for machines.")] = LogFormat.TEXT,
    log_level: Annotated[LogLevel, typer.Option(help="From which level on.")] = LogLevel.INFO,
    json: AsJson = False,
) -> None:
    """Work on what was submitted, until SIGINT, SIGTERM, SIGQUIT or SIGHUP.

    The first signal lets running work end; the second one ends it; the third one ends all its processes at once.
    SIGHUP, as when a terminal is closed, is only ever the first. SIGHUP and SIGQUIT are left alone if they were ignored
    at the start, as nohup does it.
    """
    logs.configure(log_format, log_level)
    outlive_the_terminal()
    with Output(json=json) as out:
        drain = None if drain_timeout is None else parse_duration(drain_timeout)
        if app and app_option and app != app_option:
            raise UsageError(f"the app is named twice: {app}, and --app {app_option}")
        with _importable(out, app or app_option, reload) as chosen:
            weights = _weighted(_names(queues)) if queues else None
            limit = None if memory_limit is None else _bytes(memory_limit)
            runner = runner_of(
                chosen,
                command=_worker_command(app or app_option, log_format, log_level),
                workers=workers,
                concurrency=concurrency,
                queues=weights,
                tags=_names(tags or []),
                drain_timeout=drain,
                max_tasks=max_tasks_per_worker,
                memory_limit_bytes=limit,
            )
            _note_what_is_idle(out, chosen, list(weights or {}))
            with contextlib.ExitStack() as around:
                watch = around.enter_context(Reload(runner, out.note)) if reload else None
                if health_port is not None:
                    health = around.enter_context(Health(runner, health_host, health_port))
                    out.note(f"health checks are answered at http://{health_host}:{health.port}/health")
                id, account, was_told = _until_stopped(runner)
        if watch is not None and watch.changed and not was_told:
            out.note(f"{watch.changed} has changed; starting anew")
            start_anew()
        if json:
            out.document({"runner": id, **msgspec.structs.asdict(account)})
        else:
            out.line(f"runner {id}: {_told(account)}")
    _leave()


def worker(
    fd: Annotated[int, typer.Option(help="The socket to the runner.")],
    app: AppOption = None,
    log_format: Annotated[LogFormat, typer.Option()] = LogFormat.TEXT,
    log_level: Annotated[LogLevel, typer.Option()] = LogLevel.INFO,
) -> None:
    """Work for the runner at the other end of a socket. Not for people: `holdfast run` starts it."""
    stream = socket.socket(fileno=fd)
    stream.set_inheritable(False)  # a program that outlives this worker must not keep the line open
    end_with_runner(stream)
    when_a_loop_is_broken(end_group)  # the runner recovers what it held, and starts another
    told_early = _hear()

    def on_stop(stop: Callable[[], object]) -> None:
        for number in _asking():
            signal.signal(number, lambda *_: stop())
        if told_early:
            stop()

    logs.configure(log_format, log_level)
    try:
        chosen = app_for_work(Output(json=False), app)
        unfinished = attach(chosen, stream, on_stop)
    except HoldfastError as error:
        # It is one of many lines that the runner and its workers write, and has to look like one.
        log.error("this worker cannot work: %s", told(error))
        raise typer.Exit(FAILED) from None
    except Exception:
        log.exception("this worker has ended by an error")
        raise typer.Exit(FAILED) from None
    if unfinished:  # user code still runs, and this is how it ends
        _flush()
        end_group()
    chosen.close()
    _leave()


def _importable(out: Output, reference: str | None, reload: bool) -> App:
    """The app; with ``--reload``, after as many changes as it takes."""
    try:
        return app_for_work(out, reference)
    except HoldfastError as error:
        if not reload:
            raise
        out.note(f"{sentence(told(error))} Nothing runs until a file changes.")
    start_anew_after_a_change()


def _note_what_is_idle(out: Output, app: App, queues: list[str]) -> None:
    """What a runner is asked to do and never will, as far as anybody can tell."""
    if not app.tasks:
        out.note("this app declares no tasks, so there is nothing that this runner could do")
        return
    declared = {queue for task in app.tasks.values() for queue in task.definition.queues}
    for queue in queues:
        if queue and queue not in declared:
            known = ", ".join(sorted(declared))
            out.note(f"no task is declared for the queue '{queue}', only for: {known}; it gets what is submitted to it")


def _hear() -> list[int]:
    """From now on signals are heard, and do not end this process. What has been told so far.

    Whoever interrupts means the runner. Not SIG_IGN: programs that tasks start would inherit that. The runner has
    started us with all of them blocked, since there was nobody yet to hear them.
    """
    told: list[int] = []
    signal.signal(signal.SIGINT, lambda *_: None)
    for number in _asking():
        signal.signal(number, lambda number, _: told.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return told


def _asking() -> list[signal.Signals]:
    """The signals that ask a process to drain: not those that whoever started it wants to be ignored."""
    polite = (signal.SIGHUP, signal.SIGQUIT)
    return [signal.SIGTERM, *(number for number in polite if signal.getsignal(number) is not signal.SIG_IGN)]


def _worker_command(reference: str | None, log_format: LogFormat, log_level: LogLevel) -> list[str]:
    app = ["--app", reference] if reference else []
    logs = ["--log-format", log_format.value, "--log-level", log_level.value]
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
    """Without waiting for anything. What was printed is kept."""
    _flush()
    os._exit(0)


def _flush() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()


def _names(given: list[str]) -> list[str]:
    return [name.strip() for text in given for name in text.split(",")]


def _weighted(given: list[str]) -> dict[str, int]:
    """Queues and their weights: ``mail=3``. A name may have a = in it; a number behind the last one is a weight."""
    found = {}
    for text in given:
        name, _, weight = text.rpartition("=")
        found[name if name and weight.isdigit() else text] = int(weight) if name and weight.isdigit() else 1
    return found


def _told(account: Account) -> str:
    deaths = f", {counted(account.deaths, 'worker')} died" if account.deaths else ""
    return f"{account.started} started, {account.ended} ended, {account.interrupted} interrupted{deaths}"


def _until_stopped(runner: EmbeddedRunner) -> tuple[str | None, Account, bool]:
    """Its id, what it did, and whether a signal told it to stop."""
    with _Signals(runner) as signals:
        runner.start()
        signals.repeat()
        id = runner.id
        return id, runner.wait(), signals.heard > 0


_URGENCY = {
    False: "running work may end within the drain timeout, another SIGINT or SIGTERM ends it now",
    True: "running work is ended and handed back",
}


class _Signals:
    """Turns signals into requests to stop, each more urgent than the one before.

    SIGHUP is no more than a request to drain: when a terminal is closed, the kernel and the shell both send one, and a
    process manager may send one right after SIGTERM.
    """

    def __init__(self, runner: EmbeddedRunner) -> None:
        self._runner = runner
        self.heard = 0
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, *_asking())}

    def __enter__(self) -> _Signals:
        for number in self._before:
            signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            let_go_of_a_closed_terminal()
            if self.heard:
                return
        self.heard += 1
        if self.heard > 2:
            # Something does not let go. What is stored is safe, so an end without ceremony costs only time.
            self._runner.kill_workers()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        name = signal.Signals(number).name
        logging.getLogger("holdfast.runner").info("stop: %s; %s", name, _URGENCY[self.heard > 1])
        self._runner.request_stop(hurry=self.heard > 1)

    def repeat(self) -> None:
        """Ask again: a signal that came while the runner was starting had nobody to talk to yet."""
        if self.heard:
            self._runner.request_stop(hurry=self.heard > 1)
