"""What an editor knows about tasks. Checked by mypy (strict), never run."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, assert_type

from holdfast import App, AsyncTask, Invocation, InvocationGroup, Task

app = App("memory://")


@app.task
def add(x: int, y: int) -> int:
    return x + y


@app.task(queue="mail", priority=3)
def greet(name: str, *, loud: bool = False) -> str:
    return name.upper() if loud else name


@app.task
async def fetch(url: str) -> bytes:
    return url.encode()


@app.task(name="other")
async def fetch_named(url: str) -> bytes:
    return url.encode()


@app.direct_task
def price(item: str) -> int:
    return len(item)


@app.direct_task(queue="gpu", fan_out=lambda item: [(item,)], aggregate=sum)
async def fetch_price(item: str) -> int:
    return len(item)


assert_type(price("book"), int)
assert_type(price.submit("book"), Invocation[int])
assert_type(price.options(priority=9)("book"), int)
priced: Coroutine[Any, Any, int] = fetch_price("book")
assert_type(add(1, 2), int)
assert_type(add.submit(1, 2), Invocation[int])
assert_type(add.submit(1, 2).result(), int)
assert_type(greet.options(delay="5m").submit("a", loud=True).result(timeout=1), str)
assert_type(greet.map([("a",)]), InvocationGroup[str])
assert_type(greet.map([("a",)]).results(), list[str])
called: Coroutine[Any, Any, bytes] = fetch("x")
assert_type(fetch.submit("x").result(), bytes)
assert_type(fetch_named.submit("x").result(), bytes)


async def in_async_code() -> None:
    assert_type(await add.asubmit(1, 2), Invocation[int])
    assert_type(await add.submit(1, 2), int)
    assert_type(await (await fetch.asubmit("x")), bytes)


def wrong_calls(task: Task[[int, int], int], other: AsyncTask[[str], bytes]) -> None:
    task.submit("1", 2)  # type: ignore[arg-type]
    task.submit(1)  # type: ignore[call-arg]
    other.submit(url=1)  # type: ignore[call-arg]
