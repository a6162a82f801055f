"""Tasks that a process of their own has to find."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from holdfast import App, Context
from holdfast.around import INJECTED, Injected

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForTypes

app = App("memory://", name="yard")
surrounded: list[str] = []


def app_at(url: str) -> App:
    """Return an app on this store with the tasks of this module."""
    os.environ["HOLDFAST_URL"] = url
    app.runtime.url = url
    return app


class YardPool:
    def __init__(self, name: str) -> None:
        self.name = name


@app.lifespan
@asynccontextmanager
async def pools() -> AsyncIterator[YardPool]:
    yield YardPool(f"pool of {os.getpid()}")


@app.middleware
@contextmanager
def around(call: Context) -> Iterator[None]:
    surrounded.append(call.task)
    yield


@app.task(executor="process")
def crunch(n: int, pool: Injected[YardPool] = INJECTED) -> dict[str, Any]:
    return {"pid": os.getpid(), "pool": pool.name, "surrounded": bool(surrounded)}


@app.task(executor="process")
async def crunch_async(n: int, pool: Injected[YardPool] = INJECTED) -> dict[str, Any]:
    return {"pid": os.getpid(), "pool": pool.name, "surrounded": bool(surrounded)}


def takes_any_number(*pools: Injected[YardPool]) -> None: ...


def takes_one_in_quotes(pool: "Injected[YardPool]", other: Injected["YardPool"]) -> str:  # noqa: UP037
    return f"{pool.name}, {other.name}"


def takes_one_perhaps(pool: Injected[YardPool] | None = None) -> None: ...


def takes_one_without_its_mark(pool: YardPool = INJECTED) -> None: ...


def takes_an_unknown_one(pool: Injected[OnlyForTypes]) -> None: ...


async def body(pool: Injected[YardPool]) -> None: ...
