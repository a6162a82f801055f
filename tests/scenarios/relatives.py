"""Process tasks that wait for each other: a module as a user would write it, imported by their own processes."""

from __future__ import annotations

import os

from holdfast import App

NAME = "relatives"
home = App(os.environ.get("HOLDFAST_TEST_RELATIVES", "memory://"), name=NAME)


@home.task(executor="process")
def double(n: int) -> int:
    return n * 2


@home.task(executor="process")
def parent(n: int) -> int:
    return double.submit(n).result(timeout=60) + 1


@home.task(executor="process")
async def async_parent(n: int) -> int:
    first, second = await (await double.amap([n, n + 1]))
    return first + second


@home.task(executor="process")
def narcissus() -> str:
    from holdfast import context
    from holdfast.errors import CircularWait

    try:
        home.invocation(context().invocation_id).result(timeout=60)
    except CircularWait as error:
        return str(error)
    return "it has an end"
