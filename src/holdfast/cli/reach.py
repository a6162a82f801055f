"""The command line's way into an app: the only file here that uses what an app keeps to itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from holdfast.app import App
from holdfast.codec import Codec
from holdfast.errors import HoldfastError
from holdfast.invocation import End, Invocation
from holdfast.lifecycle.records import InvocationRecord
from holdfast.lifecycle.status import FINAL, OWNED
from holdfast.store.contract import Finding, Store

T = TypeVar("T")


def with_store(app: App, work: Callable[[Store], Awaitable[T]]) -> T:
    """Open the app's store if it is not open, and do something with it."""

    async def job() -> T:
        return await work((await app._engine()).store)

    return app._run(job())


def looked_over(app: App, *, deep: bool) -> Sequence[Finding]:
    """What there is to tell about the app's store as it is. It is not opened: that would make good what is missing."""

    async def job() -> Sequence[Finding]:
        return await app._engine_maker()().store.check(deep=deep)

    return app._run(job())


def explained(app: App, record: InvocationRecord) -> str:
    return app._run(app._explain(record))


def awaited(
    app: App,
    invocation: Invocation[Any],
    patience_seconds: float | None,
    *,
    explain_after_seconds: float,
    explain: Callable[[str], None],
) -> object:
    """The result. If nobody has begun with it by then, `explain` is told once what it waits for."""

    async def job() -> End:
        waiting = asyncio.ensure_future(invocation._end(patience_seconds))
        try:
            done, _ = await asyncio.wait({waiting}, timeout=explain_after_seconds)
            if not done and (why := await _held_up(app, invocation)):
                explain(why)
            return await waiting
        finally:
            waiting.cancel()

    return invocation._outcome(app._run(job()))


async def _held_up(app: App, invocation: Invocation[Any]) -> str:
    try:
        record = await invocation._record()
        return "" if record.status in OWNED | FINAL else await app._explain(record)
    except HoldfastError:  # whoever waits will be told by the wait itself
        return ""


def codec_of(app: App) -> Codec:
    return app._codec
