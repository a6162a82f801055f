"""What the ends of members cost: the same for each, whatever the size of their group."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from pymongo import MongoClient
from tests.support.patience import patient

from holdfast import App, group
from holdfast.groups.service import Groups
from holdfast.ids import InvocationId
from holdfast.model import changes
from holdfast.model.claims import Claim
from holdfast.model.records import InvocationRecord
from holdfast.runtime.engine import Engine

SMALL, LARGE = 500, 5_000
BATCH = 25  # ends that are written together
AHEAD = 60  # how far apart members that end together may be
COUNTED = ("get", "entries", "put_entry", "apply", "insert", "find")


@pytest.fixture(params=["memory", "sqlite", "mongodb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    known = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/shop.db"}
    return known.get(request.param) or str(request.getfixturevalue("mongo_url"))


@contextmanager
def counted(engine: Engine) -> Iterator[Counter[str]]:
    """Count calls of the store, and what they are asked for."""
    found: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name in COUNTED:
            patch.setattr(engine.store, name, _counting(found, name, getattr(engine.store, name)))
        yield found


def _counting(found: Counter[str], name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def wrapped(*args: Any, **more: Any) -> Any:
        await asyncio.sleep(0)  # others go on meanwhile, as with every store but that in memory
        found["calls"] += 1
        found["asked for"] += len(args[-1]) if name == "get" else len(args[0]) if name in ("apply", "insert") else 1
        return await call(*args, **more)

    return wrapped


@contextmanager
def examined(url: str, found: Counter[str]) -> Iterator[None]:
    """Count the documents that MongoDB examines, by its own account."""
    if not url.startswith("mongodb"):
        yield
        return
    with MongoClient[dict[str, Any]](url) as client:
        database = client.get_default_database()
        database.create_collection("system.profile", capped=True, size=64 * 2**20)
        database.command("profile", 2)
        yield
        database.command("profile", 0)
        namespaces = [f"{database.name}.holdfast_{name}" for name in ("invocations", "entries")]
        for line in database["system.profile"].find({"ns": {"$in": namespaces}}):
            found["examined"] += line.get("docsExamined", 0)
        database.drop_collection("system.profile")


async def started(engine: Engine, members: list[InvocationId]) -> list[InvocationRecord]:
    """Claim members, as a runner does. Return them in an order in which they may end."""
    (first,) = await engine.store.get(engine.app, members[:1])
    assert first is not None
    running: list[InvocationRecord] = []
    for start in range(0, len(members), 100):
        some = tuple(members[start : start + 100])
        claim = Claim(
            app=engine.app,
            lanes=(first.lane,),
            limit=len(some),
            owner="runner/1",
            operation=f"claim {start}",
            at=engine.store.now(),
            ids=some,
        )
        running += (await engine.store.claim(claim)).records
    rng, place = random.Random(len(members)), {id: number for number, id in enumerate(members)}
    return sorted(running, key=lambda record: place[record.id] + rng.random() * AHEAD)


async def end(engine: Engine, ended: list[InvocationRecord]) -> None:
    """Write ends together, then deliver them, as a worker does."""
    await engine.store.apply(
        [
            replace(
                changes.completed(record, result=b"\x01", operation=f"end {record.id}", at=engine.store.now()),
                outbox=("@group",),
            )
            for record in ended
        ]
    )
    found = await engine.store.get(engine.app, [record.id for record in ended])
    await engine.outbox.dispatch([record for record in found if record is not None])  # type: ignore[attr-defined]


def costs(url: str, size: int) -> Counter[str]:
    """Return what the ends of a group of this size cost."""
    app = App(url, name=f"shop{size}", sqlite_synchronous="normal")

    @app.task
    def add(x: int) -> int:
        return x

    @app.task
    def total(numbers: list[int]) -> int:
        return len(numbers)

    async def run(found: Any) -> Counter[str]:
        engine = await app.runtime.engine()
        ending = await started(engine, found.ids)
        assert len(ending) == size
        with counted(engine) as cost, examined(url, cost):
            for first in range(0, size, BATCH):
                await end(engine, ending[first : first + BATCH])
        (callback,) = await engine.store.get(engine.app, [found.callback.id])
        assert callback is not None
        return cost

    with app:
        return app.runtime.run(run(group(add.s(number) for number in range(size)).then(total).submit()))


def test_the_end_of_a_member_costs_the_same_in_a_large_group(url: str) -> None:
    small, large = costs(url, SMALL), costs(url, LARGE)
    assert small.keys() == large.keys()
    for what in small:
        each = (small[what] / SMALL, large[what] / LARGE)
        assert each[1] <= 1.1 * each[0], (what, each)
    assert large["asked for"] <= 10 * LARGE


def running(app: App, size: int, scenario: Callable[[Engine, list[InvocationRecord], InvocationId], Any]) -> None:
    """Run a scenario with a group whose members run."""

    @app.task
    def add(x: int) -> int:
        return x

    async def run(found: Any) -> None:
        engine = await app.runtime.engine()
        await scenario(engine, await started(engine, found.ids), found.callback.id)

    with app:
        app.runtime.run(run(group(add.s(number) for number in range(size)).then(add).submit()))


def test_ends_that_come_during_a_check_share_the_next_one() -> None:
    """Else each waits for its turn, on a slow store ever longer, until the sweep delivers it a second time."""

    async def scenario(engine: Engine, members: list[InvocationRecord], callback: InvocationId) -> None:
        with counted(engine) as alone:
            await engine.part(Groups).receive(members[:1])
        with counted(engine) as together:
            await asyncio.gather(*[engine.part(Groups).receive([member]) for member in members])
        assert together["calls"] <= 2 * alone["calls"] + 2

    running(App("memory://", name="shop"), 100, scenario)


def test_an_end_that_is_written_during_a_check_is_seen_by_another() -> None:
    """A check that has read before the end was written does not stand for one after it."""

    async def scenario(engine: Engine, members: list[InvocationRecord], callback: InvocationId) -> None:
        last, has_read, go_on = members.pop(), asyncio.Event(), asyncio.Event()
        await end(engine, members)
        read = engine.store.get

        async def slow(app: str, ids: Any) -> Any:
            answer = await read(app, ids)
            has_read.set()
            await go_on.wait()
            return answer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.store, "get", slow)
            early = asyncio.create_task(engine.part(Groups).check(last.terms.group or ""))
            await asyncio.wait_for(has_read.wait(), patient(10.0))
        ending = asyncio.create_task(end(engine, [last]))
        for _ in range(20):
            await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(early, ending)
        (called,) = await engine.store.get(engine.app, [callback])
        assert called is not None

    running(App("memory://", name="shop"), 3, scenario)
