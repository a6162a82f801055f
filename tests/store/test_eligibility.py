"""What is claimed is what may be claimed: the stores' claims against the one place that decides and explains it.

For whatever records, runners and pauses: a claim by a runner, with the lanes that it would ask for, takes an invocation
if and only if nothing is said to hold it back.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.support.mongod import fresh_database

from holdfast.model.eligibility import Reason, Standing, held_back, obstacle, offer_of, open_lanes
from holdfast.model.explain import Surroundings, explain
from holdfast.model.limits import Limit
from holdfast.model.queues import QueuePause
from holdfast.model.records import InvocationRecord, RunnerRecord, registered
from holdfast.model.status import AVAILABLE, Status
from holdfast.runtime.pauses import pause_queue, pauses_of
from holdfast.store import open_store
from holdfast.store.contract import Filter, Order, Store
from holdfast.testing.clock import FakeClock
from holdfast.testing.samples import START, again, invocation, raw_change, runner, the, wish

DEAD_AFTER = 15.0
NAMES = count()  # every example has an app of its own, on one store
TASKS, QUEUES, TAGS = ("a", "b"), ("default", "mail", "slow"), ("eu", "gpu")
LIMITS = {"b": Limit(2)}
PATHS: dict[Status, tuple[Status, ...]] = {
    Status.REGISTERED: (),
    Status.RETRY: (),
    Status.CONCURRENCY_CONTROLLED: (Status.CONCURRENCY_CONTROLLED,),
    Status.REROUTED: (Status.CONCURRENCY_CONTROLLED, Status.REROUTED),
    Status.CANCELLED: (Status.CANCELLED,),
    Status.RUNNING: (Status.PENDING, Status.RUNNING),
    Status.PARKED: (Status.PENDING, Status.RUNNING, Status.PARKED),
    Status.SUSPENDED: (Status.PENDING, Status.RUNNING, Status.SUSPENDED),
    Status.KILLED: (Status.PENDING, Status.RUNNING, Status.KILLED),
    Status.SUCCESS: (Status.PENDING, Status.RUNNING, Status.SUCCESS),
}


class Case(NamedTuple):
    status: Status
    facts: dict[str, Any]
    holders: int  # of its limit key
    fleet: list[RunnerRecord]
    paused: frozenset[str]


facts = st.fixed_dictionaries(
    {
        "task": st.sampled_from(TASKS),
        "queue": st.sampled_from(QUEUES),
        "tags": st.lists(st.sampled_from(TAGS), unique=True).map(sorted).map(tuple),
        "priority": st.integers(-100, 100),
        "due_at": st.sampled_from([START - 1e9, START, START, START + 0.001, START + 1e9]),
        "limit_key": st.sampled_from([None, "k"]),
    }
)
# Most runners can do most of it, so that each condition is often the only one that fails.
runners = st.builds(
    lambda n, tasks, queues, tags, draining, silent: runner(
        f"r{n}", tasks=tasks, queues=queues, tags=tags, draining=draining, heartbeat_at=START - silent
    ),
    st.integers(0, 1000),
    st.sampled_from([TASKS, TASKS, TASKS, ("a",), ("b",), ()]),
    st.sampled_from([None, None, QUEUES, ("default",), ("mail", "slow"), ()]),
    st.sampled_from([TAGS, TAGS, TAGS, ("gpu",), ()]),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([0.0, 0.0, DEAD_AFTER, DEAD_AFTER + 0.1]),
)
cases = st.builds(
    Case,
    st.sampled_from([Status.REGISTERED] * 8 + sorted(PATHS)),
    facts,
    st.sampled_from([0, 0, 1, 2]),
    st.lists(runners, min_size=1, max_size=3),
    st.sampled_from([frozenset(), frozenset(), frozenset({"mail"}), frozenset({"default", "slow"})]),
)


async def put(store: Store, app: str, case: Case) -> InvocationRecord:
    """The record as the case has it, stored. Only what is in the queue is limited: what runs would need a slot."""
    own = case.facts | ({} if not PATHS[case.status] else {"limit_key": None})
    record = registered(replace(invocation("it", app=app), **own), operation="in", at=START - 50)
    await store.insert([record])
    if path := PATHS[case.status]:
        await store.apply([raw_change(record, *path, operation="to", actor="r/0")])
    if case.status is Status.RETRY:
        started = raw_change(record, Status.PENDING, Status.RUNNING, operation="run", actor="r/0")
        if record.limit_key is None:
            await store.apply([started])
            await store.apply([replace(again(await the(store, "it", app)), due_at=case.facts["due_at"])])
    return await the(store, "it", app)


async def hold_slots(store: Store, app: str, holders: int) -> None:
    taken = [invocation(f"h{n}", app=app, task="b", limit_key="k") for n in range(holders)]
    await store.insert(taken)
    got = await store.claim(wish("hold", app=app, lanes=("default|b",), limits=LIMITS, owner="h/0"))
    assert len(got.records) == holders


async def check(store: Store, case: Case) -> None:
    app = f"app{next(NAMES)}"
    await hold_slots(store, app, case.holders)
    record = await put(store, app, case)
    for name in case.paused:
        await pause_queue(store, QueuePause(app=app, name=name, at=START, by="ann", reason="", operation=name))
    pauses = await pauses_of(store, app)
    paused = frozenset(pause.name for pause in pauses)
    holders = await store.find(app, Filter(limit_key="k"), 10, order=Order.SLOT) if record.limit_key else ()
    around = Surroundings(
        roster=case.fleet,
        now=START,
        dead_after_seconds=DEAD_AFTER,
        pauses=pauses,
        holders=holders,
        limit=LIMITS.get(record.task),
    )
    standing = Standing(record, START, around.limit, len(holders))
    told = explain(record, around)
    assert len(told.text) > 10
    offers = [offer_of(each, paused) for each in around.alive]
    assert list(told.reasons) == held_back(standing, offers, paused)
    # Nothing holds it back if and only if one of the living may take it.
    assert (told.reasons == ()) == any(obstacle(standing, offer) is None for offer in offers)
    lanes = [*await store.lanes(app), record.lane, "default|a", "mail|b|gpu"]
    for number, offer in enumerate(offers):
        asked = tuple(open_lanes(dict.fromkeys(lanes), offer))
        claim = wish(f"c{number}", app=app, lanes=asked, limits=LIMITS, owner=f"x{number}/0")
        got = [found.id for found in (await store.claim(claim)).records]
        assert (got == ["it"]) == (obstacle(standing, offer) is None), (told, offer, got)
        if got or (await the(store, "it", app)).status is not record.status:
            return  # it has gone on: what follows would be another case


class Stores:
    """One store for all examples, on one loop."""

    def __init__(self, url: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.store = open_store(url, clock=FakeClock(START))
        self.loop.run_until_complete(self.store.open())

    def close(self) -> None:
        self.loop.run_until_complete(self.store.close())
        self.loop.close()


@pytest.fixture(
    params=["memory", "sqlite", pytest.param("mongo", marks=pytest.mark.xdist_group("stores"))], scope="module"
)
def stores(request: pytest.FixtureRequest) -> Iterator[Stores]:
    folder = Path(tempfile.mkdtemp(prefix="hf-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        url = "memory://" if request.param == "memory" else f"sqlite:///{folder}/store.db"
        if request.param == "mongo":
            url = stack.enter_context(fresh_database(request.getfixturevalue("replica_set")))
        opened = Stores(url)
        stack.callback(opened.close)
        yield opened


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=250)
@given(case=cases)
def test_a_runner_takes_what_nothing_holds_back_and_nothing_else(stores: Stores, case: Case) -> None:
    stores.loop.run_until_complete(check(stores.store, case))


def test_without_a_runner_that_is_alive_nothing_may_take_it() -> None:
    standing = Standing(invocation("a"), START)
    assert held_back(standing, [], frozenset()) == [Reason.NO_RUNNER]


def test_the_cases_reach_every_kind_of_status() -> None:
    assert set(PATHS) >= AVAILABLE
