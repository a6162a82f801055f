"""An app may be closed by whoever interrupts one of its calls, wherever that call is just then."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.patience import patient

import holdfast
from holdfast import App
from holdfast.errors import UsageError

OURS = (
    str(Path(holdfast.__file__).parent / "runtime" / "app_runtime.py"),
    str(Path(holdfast.__file__).parent / "ids.py"),
)
WATCHED = (*OURS, threading.__file__, "futures/_base.py")


class Interruption:
    """Calls something at the n-th line that a thread comes to in the watched files, as a signal handler would."""

    def __init__(self, number: int, handler: Any) -> None:
        self._left = number
        self._handler = handler
        self.happened = False

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.endswith(WATCHED):
            return self.trace if event == "call" else None
        if event == "line" and not self.happened:
            self._left -= 1
            if self._left < 0:
                self.happened = True
                self._handler()
        return self.trace


def interrupted_at(number: int) -> bool:
    """Whether there was such a line. The call ends, with a result or an error, and so does the closing."""
    app = App("memory://")
    echo = app.task(name="echo")(lambda x: x)
    echo.submit(0)
    interruption = Interruption(number, app.close)

    def call() -> None:
        sys.settrace(interruption.trace)
        try:
            echo.submit(1)
        except UsageError:
            pass
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), f"it hangs when interrupted at line {number}"
    app.close()
    return interruption.happened


def count_lines() -> int:
    """At how many lines a call was interrupted, each once."""
    number = 0
    while interrupted_at(number):
        number += 1
    return number


def test_an_app_may_be_closed_at_any_line_of_a_call() -> None:
    """In an interpreter of its own: one in which an exception was thrown into a thread that had ended may hang when it
    is traced (3.11).
    """
    counting = subprocess.run(
        [sys.executable, "-c", "from tests.runtime.test_bridge import count_lines; print(count_lines())"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=True,
    )
    assert int(counting.stdout) > 20


BREAKS_ITS_LOOPS = """
import os, time
from holdfast import App
from holdfast.errors import StoreError

app = App("memory://")

@app.task
def close_everything():
    os.closerange(3, 4096)
    time.sleep(600)

app.runner().start()
try:
    close_everything.submit().result(timeout=60)
except StoreError as error:
    print(error)
try:
    close_everything.submit()
except StoreError as error:
    print(error)
"""


def test_whoever_waits_for_a_broken_loop_is_told() -> None:
    """User code in the same process has closed the descriptors of the loops: nobody hangs, and the log stays short."""
    ended = subprocess.run(
        [sys.executable, "-c", BREAKS_ITS_LOOPS], capture_output=True, text=True, timeout=patient(60), check=False
    )
    first, second = ended.stdout.splitlines()
    assert "the event loop on which Holdfast works in this process is broken" in first
    assert "restart the process" in second
    assert ended.stderr.count("cannot go on") <= 2
    assert len(ended.stderr) < 20_000
