"""Tasks, steps and workflows that write to streams."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from holdfast import App, context, stream
from holdfast.errors import NotEncodable, StreamClosed
from holdfast.retries import Fixed

LARGE = 20 * 2**20


def count(number: int, name: str = "default") -> int:
    out = stream(name)
    for each in range(number):
        out.write(each)
    return number


async def paced(number: int, seconds: float) -> int:
    """Write a chunk, and wait a little."""
    for each in range(number):
        await stream().write(each)
        await stream().flush()
        await asyncio.sleep(seconds)
    return number


async def tokens(text: str) -> int:
    async with stream("tokens") as out:
        for each in text.split():
            await out.write(each)
    return len(text.split())


def values() -> None:
    out = stream()
    for value in ("text", b"\x00bytes", {"a": [1, 2.5, None]}, os.urandom(LARGE), "x" * 100_000):
        out.write(value)


def lost_after(number: int, attempts: int) -> int:
    """Fail in all attempts but the last, after so many chunks."""
    out = stream("lost")
    for each in range(number):
        out.write((context().attempt, each))
    if context().attempt < attempts:
        raise OSError("not yet")
    return context().attempt


def silent_again(attempts: int) -> None:
    """Write in the first attempt alone."""
    if context().attempt == 1:
        stream("first").write("void")
        stream("second").write("void")
    if context().attempt < attempts:
        raise OSError("not yet")


def flushed(name: str) -> list[int]:
    """Return how many items there are after each flush, as a reader of the store sees them."""
    out, seen = stream(), []
    for each in range(3):
        out.write(each)
        out.flush()
        seen.append(APPS[name].invocation(context().invocation_id).stream().tail().index)
    return seen


def closes_and_writes() -> str:
    out = stream("done")
    out.write(1)
    out.close()
    out.close()
    try:
        out.write(2)
    except StreamClosed as error:
        return str(error)
    return "no error"


def odd() -> str:
    """Return what is said of a chunk that cannot be stored."""
    try:
        stream().write({"a": [1, object()]})
    except NotEncodable as error:
        stream().write("told")
        return error.path or ""
    return "no error"


def writes_to(name: str, value: Any) -> None:
    stream(name).write(value)
    stream(name).flush()


def draft_apart(words: int) -> int:
    for each in range(words):
        stream("draft").write(each)
    if context().attempt == 1:
        raise OSError("not yet")
    return os.getpid()


APPS: dict[str, App] = {}


def declare(app: App) -> App:
    APPS[app.name] = app
    again = Fixed(5, 0.01)
    for function in (count, values, flushed, closes_and_writes, writes_to, odd, tokens, paced):
        app.task(name=function.__name__)(function)
    for function in (lost_after, silent_again):
        app.task(name=function.__name__, retries=again)(function)
    for function in (count, values, tokens, closes_and_writes, writes_to, odd):
        app.task(name=f"{function.__name__}.apart", executor="process")(function)
    app.task(name="lost_after.apart", executor="process", retries=again)(lost_after)
    _declare_runs(app)
    return app


def _declare_runs(app: App) -> None:
    @app.step(name="draft")
    async def draft(words: int, name: str = "draft") -> int:
        for each in range(words):
            await stream(name).write(f"{context().attempt}.{each}")
        return words

    @app.step(name="flaky", retries=Fixed(5, 0.01))
    def flaky(words: int, attempts: int) -> int:
        for each in range(words):
            stream("draft").write(f"{context().attempt}.{each}")
        if context().attempt < attempts:
            raise OSError("not yet")
        return context().attempt

    apart = app.step(name="apart", executor="process", retries=Fixed(5, 0.01))(draft_apart)

    @app.step(name="bank", transactional=True)
    def bank() -> None:
        stream().write(1)

    @app.workflow(name="essay")
    async def essay(words: int) -> str:
        out = stream("progress")
        await out.write("begun")
        await draft(words)
        await out.write(b"drafted")
        async with stream("notes") as notes:
            await notes.write({"words": words})
        await out.flush()
        return "done"

    @app.workflow(name="plain")
    def plain(words: int) -> int:
        out = stream("progress")
        out.write("begun")
        written: int = flaky(words, 3)
        with stream("notes") as notes:
            notes.write(written)
        return written

    @app.workflow(name="together")
    async def together(writers: int, words: int, queue: str = "") -> int:
        step = draft.options(queue=queue) if queue else draft
        return sum(await asyncio.gather(*[step(words) for _ in range(writers)]))

    @app.workflow(name="isolated")
    async def isolated(words: int) -> int:
        return await apart(words)

    @app.workflow(name="closed")
    async def closed() -> list[str]:
        said = []
        out = stream("done")
        await out.close()
        for write in (lambda: out.write(1), lambda: draft(1, "done")):
            try:
                await write()
            except StreamClosed as error:
                said.append(str(error))
        return said

    @app.workflow(name="banking")
    async def banking() -> None:
        await bank()


app = declare(App(os.environ.get("HOLDFAST_URL", "memory://"), name="studio"))  # for processes that import this module
