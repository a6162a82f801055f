"""Tasks of an app with hooks, and of one whose hooks fail outside its worker."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from holdfast import App

app = App("memory://", name="hooked")
opened: list[int] = []


@app.lifespan
@asynccontextmanager
async def pool() -> AsyncIterator[None]:
    opened.append(id(asyncio.get_running_loop()))
    yield
    if closing := os.environ.get("HOLDFAST_TEST_CLOSED"):
        Path(closing).touch()  # noqa: ASYNC240


@app.task(name="plain")
def plain() -> int:
    return len(opened)


@app.task(name="on_its_loop")
async def on_its_loop() -> bool:
    return opened == [id(asyncio.get_running_loop())]


broken = App("memory://", name="broken")


@broken.on_worker_start
def fail() -> None:
    raise OSError("no such pool here")


@broken.task(name="never")
def never() -> None: ...
