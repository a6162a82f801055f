"""Tasks that run in processes of their own: a module as a user would write it, imported by the children too."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import App, SoftTimeout

app = App("memory://", name="crew")


@dataclass
class Order:
    number: int


class Declined(Exception):
    pass


app.register(Declined)


@app.task(executor="process")
def echo(value: Any) -> Any:
    return value


@app.task(executor="process")
def pid() -> int:
    return os.getpid()


@app.task(executor="process")
def thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@app.task(executor="process")
def double(order: Order) -> Order:
    return Order(order.number * 2)


@app.task(executor="process")
async def on_a_loop() -> tuple[int, int]:
    await asyncio.sleep(0)
    return os.getpid(), id(asyncio.get_running_loop())


async def _leave() -> None:
    sys.exit(7)


@app.task(executor="process")
async def break_the_loop() -> None:
    task = asyncio.create_task(_leave())
    await asyncio.Event().wait()
    await task


@app.task(executor="process")
def decline(reason: str) -> None:
    raise Declined(reason)


@app.task(executor="process")
def leave(code: int) -> None:
    sys.exit(code)


@app.task(executor="process")
def unstorable() -> object:
    return object()


@app.task(executor="process")
def die(code: int) -> None:
    os._exit(code)


@app.task(executor="process")
def kill_yourself(number: int) -> None:
    os.kill(os.getpid(), number)
    threading.Event().wait()


@app.task(executor="process")
def read_nowhere() -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # the report of the crash is of no use in the output of the tests
    ctypes.string_at(0)


@app.task(executor="process")
def close_everything() -> None:
    os.closerange(3, 1024)


@app.task(executor="process")
def leave_a_fork_behind(folder: str) -> None:
    """Die, while a process that was forked here lives on and holds whatever it inherited."""
    grandchild = os.fork()
    if not grandchild:
        while True:
            signal.pause()
    note(folder, "grandchild", grandchild)
    os._exit(5)


@app.task(executor="process")
def hang(folder: str, name: str = "pid") -> None:
    note(folder, name, os.getpid())
    threading.Event().wait()


@app.task(executor="process")
def give_way() -> str:
    try:
        while True:
            time.sleep(0.01)
    except SoftTimeout:
        return "partial"


@app.task(executor="process")
def spin(folder: str) -> None:
    """Never let go of the interpreter."""
    note(folder, "pid", os.getpid())
    ctypes.PyDLL(None).pause()


@app.task(executor="process")
def hang_with_a_program(folder: str) -> None:
    program = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    note(folder, "pid", os.getpid())
    note(folder, "program", program.pid)
    program.wait()


@app.task(executor="process")
def shrug_off(number: int) -> str:
    """Send a signal to this process, and tell what a program that it starts would do on it."""
    os.kill(os.getpid(), number)
    code = f"import signal; print(signal.getsignal({number}) in (signal.SIG_DFL, signal.default_int_handler))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@app.task(executor="process")
def end_a_fork() -> int:
    """Fork, and tell whether SIGTERM ends the fork, as `multiprocessing` relies on."""
    fork = os.fork()
    if not fork:
        while True:
            signal.pause()
    os.kill(fork, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])


@app.task(executor="process")
def bytes_of(size: int) -> bytes:
    return b"x" * size


@app.task(executor="process")
def length(value: bytes) -> int:
    return len(value)


def note(folder: str, name: str, number: int) -> None:
    whole = Path(folder) / f"{name}.tmp"
    whole.write_text(str(number))
    whole.rename(Path(folder) / name)


@app.task(executor="process")
async def wait_to_be_cancelled(seconds: float) -> str:
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        return "cancelled"
    return "done"


# --- odd but legal ways to declare


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return ["wrapped", function(*args)]

    return wrapper


@app.task(executor="process")
@_kept
def wrapped(x: int) -> int:
    return x


@_kept
@app.task(executor="process", name="wrapped-after")
def wrapped_after(x: int) -> int:
    return x


def plain(x: int) -> int:
    return -x


task_of_plain = app.task(executor="process", name="of-plain")(plain)


@app.task(executor="process")
def replaced(x: int) -> int:
    return x + 1


replaced_task, replaced = replaced, None  # type: ignore[assignment]


@dataclass
class Secret:
    number: int


def reveal() -> Any:
    return Secret(1)


other_app = App("memory://", name="other")
app.register(Secret)
reveal_here = app.task(executor="process", name="reveal")(reveal)
reveal_there = other_app.task(executor="process", name="reveal")(reveal)
