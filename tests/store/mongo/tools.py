"""What the tests of the MongoDB store share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from pymongo import MongoClient, WriteConcern
from tests.support.patience import patient

from holdfast.clock import SystemClock
from holdfast.store.mongo import open_mongo
from holdfast.store.mongo.store import MongoStore

Document = dict[str, Any]

QUICK = {"retry_base_delay": 0.002, "retry_max_delay": 0.02}


class Events:
    """What a store reported."""

    def __init__(self) -> None:
        self.all: list[tuple[str, Mapping[str, Any]]] = []

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        self.all.append((event, facts))

    def named(self, name: str) -> list[Mapping[str, Any]]:
        return [facts for event, facts in self.all if event == name]


def make_store(url: str, events: Events | None = None, **options: Any) -> MongoStore:
    return open_mongo(url, clock=SystemClock(), observe=events or Events(), options=QUICK | options)


@asynccontextmanager
async def opened(url: str, events: Events | None = None, **options: Any) -> AsyncIterator[MongoStore]:
    store = make_store(url, events, **options)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def play(
    url: str, scenario: Callable[[MongoStore], Awaitable[object]], events: Events | None = None, **more: Any
) -> None:
    """Run a scenario on an open store."""

    async def run() -> None:
        async with opened(url, events, **more) as store:
            await scenario(store)

    asyncio.run(run())


def with_options(url: str, **options: object) -> str:
    """The URL with more options. True and False are spelled as URLs do."""
    given = "&".join(
        f"{name}={str(value).lower() if value in (True, False) else value}" for name, value in options.items()
    )
    return f"{url}{'&' if '?' in url else '?'}{given}"


def database_of(url: str) -> str:
    return url.partition("://")[2].partition("/")[2].partition("?")[0]


def address_of(url: str) -> str:
    """Its first host."""
    return url.partition("://")[2].partition("/")[0].partition(",")[0]


def until(holds: Callable[[], object], seconds: float = patient(10.0), what: str = "") -> float:
    """Wait until it holds; returns for how long. Fails after so many seconds."""
    began = time.monotonic()
    while not holds():
        waited = time.monotonic() - began
        assert waited < seconds, f"not within {seconds} s: {what or holds}"
        time.sleep(0.005)
    return time.monotonic() - began


async def auntil(holds: Callable[[], object], seconds: float = patient(10.0), what: str = "") -> float:
    """`until`, on a loop."""
    began = time.monotonic()
    while not holds():
        waited = time.monotonic() - began
        assert waited < seconds, f"not within {seconds} s: {what or holds}"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


@contextmanager
def failing(
    client: MongoClient[Document], *commands: str, app: str, times: int | None = None, **how: object
) -> Iterator[None]:
    """Let the server fail these commands of the client with that `appname`, so many times (None: always).

    How: ``errorCode=91`` or ``closeConnection=True``.
    """
    mode: object = "alwaysOn" if times is None else {"times": times}
    data = {"failCommands": list(commands), "appName": app, **how}
    client.admin.command({"configureFailPoint": "failCommand", "mode": mode, "data": data})
    try:
        yield
    finally:
        client.admin.command({"configureFailPoint": "failCommand", "mode": "off"})


def nudge(client: MongoClient[Document]) -> None:
    """Write something somewhere: what waits for the server's log to move looks again."""
    client.holdfast_nudge.get_collection("nudge", write_concern=WriteConcern(w=1)).insert_one({})
    client.drop_database("holdfast_nudge")
