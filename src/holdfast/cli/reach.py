"""The command line's way into an app: the only file here that uses what an app keeps to itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from holdfast.app import App
from holdfast.codec import Codec
from holdfast.lifecycle.records import InvocationRecord
from holdfast.store.contract import Store

T = TypeVar("T")


def with_store(app: App, work: Callable[[Store], Awaitable[T]]) -> T:
    """Open the app's store if it is not open, and do something with it."""

    async def job() -> T:
        return await work((await app._engine()).store)

    return app._run(job())


def explained(app: App, record: InvocationRecord) -> str:
    return app._run(app._explain(record))


def codec_of(app: App) -> Codec:
    return app._codec
