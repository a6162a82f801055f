"""The app that is measured. Its tasks have fixed names, so that every process that makes it knows the same ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast import App, stream
from holdfast.task import AsyncTask, Task

PLACES = 10
_CHUNK = b"x" * 100


class Workload(NamedTuple):
    app: App
    function: Task[[int], int]
    coroutine: AsyncTask[[int], int]


def make(url: str, *, called: Callable[[], None] = lambda: None, **settings: object) -> Workload:
    """An app on `url` with a task of each kind that does next to nothing; `called` is told of every call."""
    app = App(url, name="benchmark", **settings)

    @app.task(name="benchmark:function")
    def function(number: int) -> int:
        called()
        return number

    @app.task(name="benchmark:coroutine")
    async def coroutine(number: int) -> int:
        called()
        return number

    @app.task(name="benchmark:chunks")
    def chunks(count: int) -> None:
        out = stream()
        for _ in range(count):
            out.write(_CHUNK)

    return Workload(app, function, coroutine)
