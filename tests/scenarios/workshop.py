"""Tasks that take their time: a module as a user would write it, imported by processes of their own too."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

from holdfast import App, SoftTimeout, context

NAME = "workshop"
home = App("memory://", name=NAME)  # where a process of its own finds them; a test declares them once more


def note(folder: str, name: str, text: str = "") -> None:
    """Leave a file behind: whole, or not there."""
    part = Path(folder, f".{name}")
    part.write_text(text)
    part.rename(Path(folder, name))


def _is_open(folder: str) -> bool:
    return Path(folder, "open").exists()


def attentive(folder: str) -> str:
    """Looks now and then whether it is to end."""
    note(folder, "begun")
    while not context().cancelled:
        time.sleep(0.01)
    note(folder, "told")
    context().raise_if_cancelled()
    return "never"


def obliging(folder: str) -> str:
    note(folder, "begun")
    while not context().cancelled:
        time.sleep(0.01)
    return "done nevertheless"


def deaf(folder: str) -> None:
    """Never looks, but runs Python code now and then."""
    note(folder, "begun")
    try:
        while True:
            time.sleep(0.01)
    finally:
        note(folder, "over")


def deaf_at_first(folder: str) -> str:
    """Cannot be stopped before the file `open` is there: it survives what is raised in it."""
    begun = False
    while True:
        try:  # everything is inside, the loop's own jumps too: an exception raised elsewhere would end it
            while not _is_open(folder):
                if not begun:
                    note(folder, f"begun {context().attempt}")
                    if context().attempt > 1:
                        return "second attempt"
                    begun = True
                time.sleep(0.01)
            break
        except BaseException as error:
            note(folder, "survived", type(error).__name__)
    note(folder, "over")
    return "too late"


async def asleep(folder: str) -> None:
    note(folder, "begun")
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        note(folder, "told", str(context().cancelled))
        await asyncio.sleep(0.05)
        note(folder, "cleaned")
        raise


async def content(folder: str) -> str:
    """Swallows its cancellation and returns."""
    note(folder, "begun")
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(600)
    return "kept"


async def clumsy(folder: str) -> None:
    """Fails while it cleans up."""
    note(folder, "begun")
    try:
        await asyncio.sleep(600)
    finally:
        raise KeyError("the broom")


async def stubborn(folder: str) -> str:
    """Swallows every cancellation until the file `open` is there."""
    note(folder, "begun")
    while not _is_open(folder):
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            note(folder, "survived")
    note(folder, "over")
    return "too late"


def partial(folder: str) -> str:
    note(folder, "begun")
    try:
        while True:
            time.sleep(0.01)
    except SoftTimeout as error:
        return f"partial: {error}"


async def partial_later(folder: str) -> str:
    note(folder, "begun")
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(600))
            await asyncio.sleep(600)
    except* SoftTimeout:
        note(folder, "softly")
    await asyncio.sleep(0.01)  # it is not cancelled any more
    return "partial"


def facts() -> dict[str, Any]:
    here = context()
    return {
        "id": here.invocation_id,
        "app": here.app,
        "task": here.task,
        "attempt": here.attempt,
        "epoch": here.epoch,
        "key": here.idempotency_key,
        "last": here.is_last_attempt,
        "previous": here.previous_error and here.previous_error.error.message,
        "remaining": here.remaining(),
        "cancelled": here.cancelled,
    }


async def facts_later() -> dict[str, Any]:
    await asyncio.sleep(0)
    return await asyncio.create_task(asyncio.to_thread(facts))


def failing_facts(times: int) -> dict[str, Any]:
    if context().attempt <= times:
        raise ValueError(f"attempt {context().attempt}")
    return facts()


EVERYTHING = [
    *(attentive, obliging, deaf, deaf_at_first, asleep, content, clumsy, stubborn),
    *(partial, partial_later, facts, facts_later, failing_facts),
]
for function in EVERYTHING:
    home.task(executor="process")(function)


# --- what code says of itself

log = logging.getLogger("shop.rows")


def telling(folder: str) -> str:
    """Says how far it is, and waits until it may go on."""
    here = context()
    here.set(customer="c-17", stage="loading")
    here.progress(40, total=100, message="rows")
    here.checkpoint({"row": 40})
    log.warning("at row %s", 40)
    note(folder, "told")
    while not _is_open(folder):
        time.sleep(0.01)
    here.progress(100, total=100, message="rows")
    here.set(stage="loaded")
    log.warning("at row %s", 100)
    return str(here.attributes)


async def telling_later(folder: str) -> str:
    here = context()
    here.set(customer="c-17", stage="loading")
    here.progress(40, total=100, message="rows")
    here.checkpoint({"row": 40})
    log.warning("at row %s", 40)
    note(folder, "told")
    while not _is_open(folder):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    here.progress(100, total=100, message="rows")
    here.set(stage="loaded")
    log.warning("at row %s", 100)
    return str(here.attributes)


def counting(rows: int, fails_at: int) -> list[Any]:
    """Goes on where the attempt before has stopped, and fails once."""
    here = context()
    before = here.last_checkpoint
    for row in range((before or 0) + 1, rows + 1):
        if row == fails_at and here.attempt == 1:
            raise RuntimeError(f"row {row}")
        here.checkpoint(row)
    return [before, here.last_checkpoint]


def crashing_beside(folder: str) -> Any:
    """Makes a checkpoint and, once that has left its process, ends without a word."""
    here = context()
    if here.attempt > 1:
        return here.last_checkpoint
    here.checkpoint("half")
    note(folder, "told")
    while not _is_open(folder):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def chatty(rows: int) -> float:
    """Says something of each row. Returns how long that took."""
    here, began = context(), time.perf_counter()
    for row in range(rows):
        here.progress(row, total=rows)
        here.checkpoint(row)
    return time.perf_counter() - began


for function in (telling, telling_later, counting, crashing_beside, chatty):
    home.task(executor="process")(function)
