"""Tasks that wait for others, as their users write them, on every store, with real threads, loops and processes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.scenarios import relatives
from tests.support.patience import patient

from holdfast import App, Invocation, InvocationGroup, Status
from holdfast.errors import CircularWait, TaskFailed
from holdfast.executors.waiting import only_waits
from holdfast.runtime import waits

PATIENCE = patient(30.0)
SLOTS = 3
STORES = ["memory", "sqlite", pytest.param("mongo", marks=pytest.mark.xdist_group("mongo"))]


def url_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    if kind == "mongo":
        return str(request.getfixturevalue("mongo_url"))
    return "memory://" if kind == "memory" else f"sqlite:///{folder}/shop.db"


@pytest.fixture(params=STORES)
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    with App(url_of(request.param, request, tmp_path), name="shop", poll_interval_seconds=0.2) as app:
        yield app


class Meter:
    """Counts how much code of tasks runs at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now = self.most = 0

    @contextlib.contextmanager
    def code(self) -> Iterator[None]:
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        self._count(-1)
        try:
            yield
        finally:
            self._count(1)

    def _count(self, more: int) -> None:
        with self._lock:
            self.now += more
            self.most = max(self.most, self.now)


def declare(app: App, meter: Meter) -> dict[str, Callable[[int], InvocationGroup[int]]]:
    """Declare parents of every kind. Each is submitted as often as it is told."""

    @app.task
    def double(n: int) -> int:
        with meter.code():
            return n * 2

    @app.task
    async def async_double(n: int) -> int:
        with meter.code():
            await asyncio.sleep(0.01)
            return n * 2

    @app.task
    def threads(n: int) -> int:
        with meter.code():
            child = double.submit(n)
            with meter.wait():
                return child.result(PATIENCE)

    @app.task
    def groups(n: int) -> int:
        with meter.code():
            children = double.map(range(n, n + 3))
            with meter.wait():
                return sum(children.results(PATIENCE))

    @app.task
    async def coroutines(n: int) -> int:
        with meter.code():
            child = await async_double.asubmit(n)
            with meter.wait():
                return await child

    @app.task
    async def gathers(n: int) -> int:
        with meter.code():
            children = [await async_double.asubmit(each) for each in (n, n + 1)]
            with meter.wait():
                return sum(await asyncio.gather(*children))

    @app.task
    async def task_groups(n: int) -> int:
        with meter.code():
            children = [await double.asubmit(each) for each in (n, n + 1)]
            with meter.wait():
                async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
                    found = [group.create_task(child.aresult()) for child in children]
            return sum(each.result() for each in found)

    tasks: list[Any] = [threads, groups, coroutines, gathers, task_groups]
    return {task.name.rpartition(":")[2].rpartition(".")[2]: lambda n, task=task: task.map(range(n)) for task in tasks}


EXPECTED = {
    "threads": lambda n: 2 * n,
    "groups": lambda n: 6 * n + 6,
    "coroutines": lambda n: 2 * n,
    "gathers": lambda n: 4 * n + 2,
    "task_groups": lambda n: 4 * n + 2,
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_more_parents_than_slots_end_and_never_more_code_than_slots_runs(app: App, kind: str) -> None:
    meter = Meter()
    submit = declare(app, meter)[kind]
    with app.runner(concurrency=SLOTS):
        parents = submit(3 * SLOTS)
        assert parents.results(PATIENCE) == [EXPECTED[kind](n) for n in range(3 * SLOTS)]
    assert meter.most <= SLOTS
    walked = [line.status for parent in parents for line in parent.history()]
    assert walked.count(Status.PAUSED) == walked.count(Status.RESUMED) >= SLOTS


def test_a_chain_of_parents_deeper_than_slots_ends(app: App) -> None:
    @app.task
    def sum_to(n: int) -> int:
        return n + (sum_to.submit(n - 1).result(PATIENCE) if n else 0)

    with app.runner(concurrency=1):
        assert sum_to.submit(12).result(PATIENCE) == 78


def test_a_child_goes_before_work_that_was_there_before_it(app: App) -> None:
    begun, told, lines = threading.Event(), threading.Event(), list[str]()

    @app.task
    def work(name: str) -> None:
        lines.append(name)

    @app.task
    def parent() -> None:
        begun.set()
        assert told.wait(PATIENCE)
        work.submit("child").result(PATIENCE)

    with app.runner(concurrency=1):
        invocation = parent.submit()
        assert begun.wait(PATIENCE)
        others = work.map([f"other {n}" for n in range(20)])
        told.set()
        invocation.result(PATIENCE)
        others.results(PATIENCE)
    assert lines[0] == "child"


@pytest.mark.parametrize("bound", [0, 1])
def test_beyond_the_bound_a_thread_keeps_its_slot(tmp_path: Path, bound: int) -> None:
    """With two slots and two parents, the child of one of them still finds a slot if one may be given back."""
    release = threading.Event()
    with App(f"sqlite:///{tmp_path}/shop.db", name="shop", waiting_threads=bound) as app:

        @app.task
        def child() -> None:
            release.wait(PATIENCE)

        @app.task
        def parent() -> None:
            child.submit().result(PATIENCE)

        with app.runner(concurrency=2 + (bound == 0)):
            parents = parent.map([()] * 2)
            wanted = 2 - bound
            said = _until(
                lambda: [p.explain() for p in parents], lambda all: sum("keeps its slot" in f for f in all) == wanted
            )
            assert "the most that waiting_threads allows" in "".join(said)
            assert [p.status for p in parents].count(Status.PAUSED) == bound
            release.set()
            parents.results(PATIENCE)


def _until(look: Callable[[], Any], holds: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not holds(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def test_a_circle_is_refused_and_its_path_is_told(app: App) -> None:
    @app.task
    def below(above: str) -> str:
        try:
            app.invocation(above).result(PATIENCE)
        except CircularWait as error:
            return str(error)
        return "it has ended"

    @app.task
    def above() -> str:
        from holdfast import context

        return below.submit(context().invocation_id).result(PATIENCE)

    with app.runner(concurrency=1):
        top = above.submit()
        told = top.result(PATIENCE)
    assert f"→ {top.id} (" in told
    assert "would wait for ever" in told


@pytest.mark.parametrize("may_be_woken", [False, True])
def test_a_circle_through_a_workflow_is_refused_unless_something_else_may_wake_it(
    may_be_woken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "RUN_SECONDS", 0.1)
    with App("memory://", name="shop", poll_interval_seconds=0.2) as app:

        @app.workflow
        async def order(n: int) -> str:
            child = await pay.asubmit(n)
            if not may_be_woken:
                return await child
            async with asyncio.timeout(1.6):  # it is suspended after a second
                return await child

        @app.task(limit=1)
        def pay(n: int) -> str:
            if n == 0:
                return "paid"
            try:
                return order.submit(n - 1).result(PATIENCE)
            except (CircularWait, TaskFailed, TimeoutError) as error:
                return repr(error)

        with app.runner(concurrency=2):
            top = pay.submit(1)
            told = top.result(PATIENCE)
    if may_be_woken:
        assert "TimeoutError" in told
    else:
        assert "would wait for ever" in told
        assert ".order) → " in told


def test_code_beside_a_wait_keeps_the_slot(tmp_path: Path) -> None:
    release = threading.Event()
    with App(f"sqlite:///{tmp_path}/shop.db", name="shop") as app:

        @app.task
        def child() -> int:
            release.wait(PATIENCE)
            return 1

        @app.task
        async def parent() -> int:
            waits = asyncio.create_task((await child.asubmit()).aresult())
            await asyncio.wait([waits], timeout=PATIENCE)
            return await waits

        with app.runner(concurrency=2):
            invocation = parent.submit()
            said = _until(invocation.explain, lambda text: "keeps its slot" in text)
            assert "other code of it may run meanwhile" in said
            release.set()
            assert invocation.result(PATIENCE) == 1
        assert Status.PAUSED not in [line.status for line in invocation.history()]


# --- processes


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    url = f"sqlite:///{tmp_path}/family.db"
    monkeypatch.setenv("HOLDFAST_TEST_RELATIVES", url)
    with App(url, name=relatives.NAME, waiting_processes=4) as app:
        for task in (relatives.double, relatives.parent, relatives.async_parent, relatives.narcissus):
            app.task(name=task.name, executor="process")(task.definition.function)
        yield app


@pytest.mark.slow
def test_processes_that_wait_give_their_slots_back(family: App) -> None:
    with family.runner(concurrency=1):
        parents = [_submit(family, name, 5) for name in ("parent", "async_parent")]
        assert [parent.result(2 * PATIENCE) for parent in parents] == [11, 22]
        assert [line.status for line in parents[0].history()][-3:] == ["paused", "resumed", "success"]
        assert "waits for its own end" in _submit(family, "narcissus").result(2 * PATIENCE)


def _submit(app: App, name: str, *args: Any) -> Invocation[Any]:
    task: Any = app.runtime.tasks[f"tests.scenarios.relatives:{name}"]
    invocation: Invocation[Any] = task.submit(*args)
    return invocation


# --- what asyncio lets a coroutine wait for


def test_what_counts_as_only_waiting() -> None:
    async def main() -> None:
        ends = [asyncio.get_running_loop().create_future() for _ in range(3)]
        waits, inside = [asyncio.ensure_future(_of(each)) for each in ends], list[asyncio.Task[None]]()

        async def grouped() -> None:
            async with asyncio.TaskGroup() as group:
                inside.extend(group.create_task(_of(each)) for each in ends)

        async def beside() -> None:
            await asyncio.gather(waits[0], asyncio.sleep(9))

        async def looks() -> None:
            await asyncio.wait(waits, timeout=9)

        found, tasks = {}, list[asyncio.Future[Any]]()
        assert only_waits(waits[0], waits)
        for name, code in {
            "gather": _of(asyncio.gather(*waits)),
            "gathers of gathers": _of(asyncio.gather(_of(asyncio.gather(*waits[:2])), waits[2])),
            "beside": beside(),
            "wait": looks(),
            "sleep": asyncio.sleep(9),
        }.items():
            tasks.append(task := asyncio.ensure_future(code))
            for _ in range(3):
                await asyncio.sleep(0)
            found[name] = only_waits(task, waits)
        assert [name for name, is_idle in found.items() if is_idle] == ["gather", "gathers of gathers"]
        tasks.append(group := asyncio.ensure_future(grouped()))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not only_waits(group, waits), "the tasks of the group wait, and are none of these"
        assert only_waits(group, [*waits, *inside])
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, *waits, return_exceptions=True)

    asyncio.run(main())


async def _of(future: Any) -> None:
    await future
