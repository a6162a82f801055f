"""A shop whose orders are workflows: what the tests about looking and forking work on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast import App, context
from holdfast.retries import Fixed
from holdfast.workflows.api import sleep


class Shop:
    """An app with a workflow `checkout`, and what its steps have seen."""

    def __init__(self, path: Path) -> None:
        self.app = app = App(f"sqlite:///{path / 'shop.db'}", name="shop", poll_interval_seconds=0.1)
        self.keys: list[str] = []
        self.calls: list[str] = []
        self.fails = 0

        @app.step(name="charge")
        async def charge(order: str) -> str:
            self.calls.append(f"charge {order}")
            self.keys.append(context().idempotency_key)
            return f"receipt {order}"

        @app.step(name="pack")
        async def pack(order: str) -> str:
            self.calls.append(f"pack {order}")
            context().set(stage="packed")
            return f"box {order}"

        @app.step(name="ship", retries=Fixed(3, "1h"))
        async def ship(order: str) -> str:
            if self.fails > 0:
                self.fails -= 1
                raise OSError("no truck")
            return f"shipped {order}"

        @app.workflow(name="shop:invoice")
        async def invoice(order: str) -> str:
            return await charge(f"{order} invoice")

        @app.workflow(name="shop:checkout")
        async def checkout(order: str, pause: float = 0.0) -> str:
            receipt = await charge(order)
            context().set(stage="charged")
            await asyncio.gather(pack(order), pack(f"{order}b"))
            if pause:
                await sleep(pause)
            await ship(order)
            return f"{receipt}, {await invoice(order)}"

        @app.workflow(name="shop:waiting")
        async def waiting(order: str) -> str:
            return await invoice.options(delay="1h").submit(order)

        @app.workflow(name="shop:broken")
        async def broken() -> None:
            raise ValueError("no")

        @app.step(name="huge")
        async def huge(size: int) -> bytes:
            return b"x" * size

        @app.workflow(name="shop:large")
        async def large() -> int:
            return len(await huge(3_000_000))

        @app.step(name="slow")
        async def slow() -> None:
            await asyncio.sleep(30)

        @app.workflow(name="shop:lengthy")
        async def lengthy() -> None:
            await slow()

        @app.task(name="shop:plain")
        def plain() -> None: ...

        self.checkout: Any = checkout
        self.waiting: Any = waiting
        self.broken: Any = broken
        self.large: Any = large
        self.lengthy: Any = lengthy
        self.plain = plain


@contextmanager
def open_shop(path: Path) -> Iterator[Shop]:
    shop = Shop(path)
    with shop.app, shop.app.runner():
        yield shop
