"""Tasks that log, of every kind."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

from holdfast import App, SoftTimeout
from holdfast.executors.child_process import WAKE

app = App("memory://", name="chatty")
log = logging.getLogger("chatty")
logging.getLogger("chatty.own").addHandler(logging.StreamHandler())  # as modules do when they are imported


def say(word: str) -> int:
    log.info("said %s", word, extra={"task": "mine", "size": 3})
    return os.getpid()


@app.task
def on_a_thread(word: str) -> int:
    return say(word)


@app.task
async def on_the_loop(word: str) -> int:
    await asyncio.to_thread(say, f"{word} beside")
    return say(word)


@app.task(executor="process")
def in_a_process(word: str) -> int:
    return say(word)


@app.task(executor="process")
async def on_a_loop_in_a_process(word: str) -> int:
    return say(word)


@app.task(executor="process")
def unlucky() -> None:
    log.debug("too quiet")
    log.warning("half a %s and %r", "\ud83d", object, extra={"thing": object(), "large": 2**80})
    log.warning("no number: %d", "x")
    try:
        raise ValueError("no luck")
    except ValueError:
        log.exception("it failed")


@app.task(executor="process", at_most_once=True)
def crashes() -> None:
    log.warning("about to crash")
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(executor="process")
def handlers() -> list[list[str]]:
    return [[type(each).__name__ for each in logging.getLogger(name).handlers] for name in ("", "chatty.own")]


@app.task(executor="process")
def floods(count: int, done: str) -> None:
    for number in range(count):
        log.info("%06d %s", number, "x" * 1000)
    Path(done).touch()


@app.task(executor="process", soft_timeout=0.3)
def goes_on() -> str:
    try:
        while True:
            log.info("on and on %s", "x" * 200)
    except SoftTimeout:
        time.sleep(0.2)  # a slow parent has room again; while it has none, records are dropped
        log.info("that is enough")
        return "soft"


@app.task(executor="process", soft_timeout=0.1)
def is_struck_in_a_record() -> str:
    """The soft timeout is over where `logging` makes a record, and swallows exceptions."""
    controls = signal.getsignal(WAKE).__self__  # type: ignore[union-attr]
    swallows = sys.modules["multiprocessing"]
    real = swallows.current_process

    def slow() -> object:
        ends = time.monotonic() + 10.0
        while not controls._logs.is_awaited and time.monotonic() < ends:
            time.sleep(0.01)
        return real()

    try:
        swallows.current_process = slow  # type: ignore[attr-defined]
        log.info("that takes long")
    except SoftTimeout:
        return "soft"
    finally:
        swallows.current_process = real  # type: ignore[attr-defined]
    return "swallowed"


@app.task(executor="process")
def forks() -> int:
    threading.Thread(target=lambda: [log.info("beside"), time.sleep(0.01)]).start()
    if (pid := os.fork()) == 0:
        log.info("nobody hears this")
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
