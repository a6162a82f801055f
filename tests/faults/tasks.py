"""What the runners of the fault tests run. Each call writes into a ledger when it begins and ends."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import functools
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.witness import What, Witness

from holdfast import App, all_of, on_event, on_result, on_status
from holdfast.triggers import Trigger, from_event, from_result

LEDGERS = "HOLDFAST_TEST_LEDGERS"
TRIGGERS = "HOLDFAST_TEST_TRIGGERS"
PADDING = "x" * 100_000  # more than lies in a record
LOOK_SECONDS = 0.02


def role() -> str:
    """What this process is, by its command."""
    commands = {"run": "runner", "worker": "worker"}
    return next((commands[word] for word in sys.argv[1:2] if word in commands), "client")


@functools.cache
def witness() -> Witness:
    return Witness.in_folder(os.environ[LEDGERS], role())


def released() -> bool:
    """Whether the test lets go of what waits in user code, everywhere or in this process."""
    folder = Path(os.environ[LEDGERS])
    return (folder / "release").exists() or (folder / f"release {os.getpid()}").exists()


# --- good ones


def work(token: str, seconds: float = 0.0, padding: str = "") -> str:
    with witness().execution(token) as execution:
        time.sleep(seconds)
        return execution.returns(f"{token} {execution.stamp} {padding}")


def hold(token: str) -> str:
    """Runs until the test says so."""
    with witness().execution(token) as execution:
        while not released():
            time.sleep(LOOK_SECONDS)
        return execution.returns(f"{token} {execution.stamp}")


async def await_release(token: str) -> str:
    with witness().execution(token) as execution:
        while not released():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)
        return execution.returns(f"{token} {execution.stamp}")


def limited(token: str, seconds: float = 0.0) -> str:
    """One at a time, on all runners together."""
    with witness().execution(token) as execution, witness().lease("limited", 1, token=token):
        time.sleep(seconds)
        return execution.returns(f"{token} {execution.stamp}")


# --- what triggers call


def packed(order: str) -> dict[str, str]:
    """What the event says."""
    return {"order": order, "told": f"{order} packed"}


def order(token: str) -> dict[str, str]:
    """Its end calls `after_order`, and `after_both` once the order is packed."""
    with witness().execution(token) as execution:
        return execution.returns({"token": token, "after": f"{token} ended", "both": f"{token} ended and packed"})


def after_order(token: str) -> str:
    with witness().execution(token) as execution:
        return execution.returns(f"{token} {execution.stamp}")


# --- poison


def exits(token: str) -> None:
    _last_words(token)
    os._exit(3)


def segfaults(token: str) -> None:
    _last_words(token)
    faulthandler._sigsegv()  # type: ignore[attr-defined]


def devours(token: str) -> None:
    """As a library does that was written for a machine with more memory."""
    _last_words(token)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**32, hard))
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    while True:
        ctypes.memset(libc.malloc(2**28), 1, 1)


def _last_words(token: str) -> None:
    """That it begins, and that this process dies of it."""
    span = f"{token}-{os.getpid()}-{time.monotonic_ns()}"
    witness().write(What.EXEC_START, token=token, span=span)
    with witness().fault("kill", pid=os.getpid()):
        pass


ALL = (work, hold, await_release, limited, exits, segfaults, devours)
OPTIONS: dict[str, dict[str, Any]] = {"limited": {"limit": 1}}
PACKED = "packed"
CALLED: dict[str, Trigger] = {
    "after_order": on_status("order", arguments={"token": from_result("after")}),
    "after_event": on_event(PACKED, arguments={"token": from_event("told")}),
    "after_both": all_of(
        on_event(PACKED, correlate="order"),
        on_result("order", correlate="token", arguments={"token": from_result("both")}),
    ),
}
"""Tasks that are called by triggers."""


def declare(app: App, *, with_triggers: bool) -> None:
    """All tasks of these stories. Runners know those with triggers only if a story is about them."""
    for function in ALL:
        app.task(name=function.__name__, **OPTIONS.get(function.__name__, {}))(function)
    if with_triggers:
        app.task(name="order")(order)
        for name, trigger in CALLED.items():
            app.task(name=name, triggers=[trigger])(after_order)
