"""``holdfast dev``: a runner and the pages of an app, in one terminal, until Ctrl-C.

Two child processes do the work: a runner with ``--reload``, and the hidden command ``dev-pages``. Both import the
user's code, and restart when it changes; this process imports none. It holds the listening socket, so the address stays
while the pages restart: a browser that comes meanwhile waits for a moment.

A child has one end of a socket, and stops when the other end is closed. So a stop is not lost while a child restarts,
and no child outlives this process. The runner is stopped first, and the pages show what it does until its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Annotated, Any

import typer
from typer import Option

from holdfast.cli import logs
from holdfast.cli.command import AppArgument, AppOption, Needs, app_of, command
from holdfast.cli.discovery import app_for_tasks
from holdfast.cli.logs import LogFormat, LogLevel
from holdfast.cli.output import Output
from holdfast.cli.reloading import LOOK_SECONDS, Reload, files_now, restart_process, stop_with_parent
from holdfast.cli.run import SAME_SIGNAL_SECONDS, LogOptions, ServeOptions, importable
from holdfast.errors import ConfigurationError
from holdfast.executors.terminal import outlive_the_terminal
from holdfast.web import missing_extra

HOST, FIRST_PORT, _PORTS_TRIED = "127.0.0.1", 8080, 50
_READY = b"ready"


@command(Needs.NOTHING)
def dev(
    out: Output,
    *,
    app: AppArgument = None,
    app_option: AppOption = None,
    serve: ServeOptions,
    workers: Annotated[int, Option(help="Worker processes; 0 runs the tasks in the runner.", min=0, max=1000)] = 1,
    port: Annotated[
        int | None, Option(help="Where the pages are; else 8080, or the next free one.", min=0, max=65535)
    ] = None,
    no_open: Annotated[bool, Option("--no-open", help="Do not open the pages in a browser.")] = False,
    lines: LogOptions,
) -> None:
    """Run calls and serve the pages, with reload.

    Ctrl-C stops all: running work may end within the drain timeout; a second Ctrl-C ends it.

    While a changed file is no Python, the old code runs on. While the code cannot be imported, the runner waits, and
    the pages go on. The pages are opened in a browser if this is a terminal of a desktop, and CI is not set.
    """
    try:
        import holdfast.web.serving  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error
    app = app_of(app, app_option)
    logs.configure(lines.log_format, lines.log_level)
    outlive_the_terminal()
    common = [*_arguments(lines), *(["--app", app] if app else [])]
    with _taken(out, port) as taken, _StopSignals() as stop:
        pages = _Child("dev-pages", "--listen", str(taken.fileno()), *common, inherited=taken.fileno())
        children = [pages]
        try:
            if pages.is_ready(stop):
                children.append(_Child("run", "--reload", "--workers", str(workers), *_arguments(serve), *common))
                _show_address(out, f"http://{HOST}:{taken.getsockname()[1]}", is_opened=not no_open)
            failed = _watched(children, stop)
        finally:
            for child in reversed(children):
                child.stop(stop)
    if failed:
        raise typer.Exit(failed)
    out.line("stopped")


def _show_address(out: Output, address: str, *, is_opened: bool) -> None:
    out.document({"address": address, "api": f"{address}/api/v1"})
    out.line(f"open {address} (Ctrl-C stops all)")
    sys.stdout.flush()
    if is_opened and out.is_terminal and not out.json and may_open_browser(os.environ, sys.platform):
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


def may_open_browser(environ: Mapping[str, str], platform: str) -> bool:
    """Return whether a browser with its own window is to be expected here."""
    if environ.get("CI"):
        return False
    return platform == "darwin" or any(environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))


@contextlib.contextmanager
def _taken(out: Output, port: int | None) -> Iterator[socket.socket]:
    """Take the port that is asked for, else the first free one. Raises `ConfigurationError`."""
    from holdfast.web.serving import listening

    tried = [port] if port is not None else [*range(FIRST_PORT, FIRST_PORT + _PORTS_TRIED), 0]
    with contextlib.ExitStack() as stack:
        for each in tried:
            try:
                taken = stack.enter_context(listening(HOST, each, "the pages"))
                break
            except ConfigurationError:
                if each == tried[-1]:
                    raise
        found = taken.getsockname()[1]
        if port is None and found != FIRST_PORT:
            out.note(f"another program uses port {FIRST_PORT}, so the pages are at port {found}")
        yield taken


def _arguments(group: Any) -> list[str]:
    """Return options as they were given, for another process."""
    found: list[str] = []
    for each in dataclasses.fields(group):
        value = getattr(group, each.name)
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            found += [f"--{each.name.replace('_', '-')}", str(one)]
    return found


# --- children


class _StopSignals:
    """Counts SIGINT, SIGTERM and SIGHUP. The second one and later ones are passed on, so that the end comes at once."""

    def __init__(self) -> None:
        self.count = 0
        self._number, self._signalled_at = 0, 0.0
        self.then: Callable[[], object] = lambda: None
        self.wakeup, self._wakeup_writer = socket.socketpair()

    def __enter__(self) -> _StopSignals:
        for end in (self.wakeup, self._wakeup_writer):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        self.wakeup.close()
        self._wakeup_writer.close()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Count as a runner does: SIGHUP only as the first, and the same signal twice within half a second once."""
        now = time.monotonic()
        is_same = number == self._number and now - self._signalled_at < SAME_SIGNAL_SECONDS
        if is_same or (number == signal.SIGHUP and self.count):
            return
        self._number, self._signalled_at = number, now
        self.count += 1
        if self.count > 1:
            self.then()


class _Child:
    """A command in a process and its own session: a signal of the terminal is for the parent only."""

    def __init__(self, *arguments: str, inherited: int | None = None) -> None:
        self._line, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "holdfast", *arguments, "--parent", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *([] if inherited is None else [inherited])],
                start_new_session=True,
            )
        self.name = arguments[0]

    def is_ready(self, stop: _StopSignals) -> bool:
        """Wait until it says so. Return False if it ends before, or a stop is asked for."""
        while not stop.count and self.code is None:
            if select.select([self._line, stop.wakeup], [], [], LOOK_SECONDS)[0] == [self._line]:
                return bool(self._line.recv(100))
        return False

    @property
    def code(self) -> int | None:
        """Return its exit code, once it has ended."""
        return self._process.poll()

    def stop(self, stop: _StopSignals) -> None:
        """Ask it to end, and wait; a further signal is passed on, the third one ends it whatever it does."""
        stop.then = lambda: self._hurry(stop.count)
        self._line.close()
        self._process.wait()
        stop.then = lambda: None

    def _hurry(self, count: int) -> None:
        if self.code is None:
            self._process.send_signal(signal.SIGTERM if count < 4 else signal.SIGKILL)


def _watched(children: list[_Child], stop: _StopSignals) -> int:
    """Wait for a stop, or for the end of a child that failed. Return its exit code, or 0."""
    while not stop.count:
        for child in children:
            if (code := child.code) is not None and (code or child.name != "run"):
                return code if code > 0 else 1
        select.select([stop.wakeup], [], [], LOOK_SECONDS)
    return 0


# --- the pages


def pages(
    listen: Annotated[int, Option(help="The socket to serve at.")],
    parent: Annotated[int, Option(help="The socket to the parent.")],
    app: AppOption = None,
    log_format: Annotated[LogFormat, Option()] = LogFormat.TEXT,
    log_level: Annotated[LogLevel, Option()] = LogLevel.INFO,
    only_import: Annotated[bool, Option("--only-import", help="See whether the code can be imported.")] = False,
) -> None:
    """Serve the pages at a socket. Not for people: `holdfast dev` starts it."""
    from holdfast.web.serving import serve_at

    # The runner says the same of changed files, and more.
    logs.configure(log_format, max(log_level, LogLevel.WARNING, key=list(LogLevel).index))
    with Output(json=False) as out:
        if only_import:
            stop_with_parent(parent)
            app_for_tasks(out, app).runtime.import_modules()
            return
        outlive_the_terminal()
        stop_with_parent(parent)
        line = socket.socket(fileno=os.dup(parent))
        before = files_now()
        with importable(out, app, before) as chosen:
            chosen.runtime.import_modules()
            chosen.prepare()
            change = _PagesReload(app, before, parent)
            with socket.socket(fileno=os.dup(listen)) as taken, change.watch:  # the original is for the next life
                serve_at(chosen, taken, started=lambda: _say_ready(line))
    if change.is_due:
        restart_process()


def _say_ready(line: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the parent reads the first one only
        line.send(_READY, socket.MSG_DONTWAIT)


class _PagesReload:
    """Ends the server when the code has changed and can be imported. Until then the pages go on with the old code."""

    def __init__(self, reference: str | None, before: Any, parent: int) -> None:
        self._reference, self._parent = reference, parent
        self.is_due = False
        self.watch = Reload(self._changed, lambda text: None, before)

    def _changed(self) -> None:
        while True:
            seen = files_now()
            if self._can_be_imported():
                break
            while files_now() == seen:
                threading.Event().wait(LOOK_SECONDS)
        self.is_due = True
        os.kill(os.getpid(), signal.SIGTERM)

    def _can_be_imported(self) -> bool:
        app = [] if self._reference is None else ["--app", self._reference]
        line = str(self._parent)  # so that code whose import never ends does not outlive the command
        tried = [
            sys.executable,
            "-m",
            "holdfast",
            "dev-pages",
            "--listen",
            "0",
            "--parent",
            line,
            "--only-import",
            *app,
        ]
        return subprocess.run(tried, pass_fds=[self._parent], capture_output=True, check=False).returncode == 0
