"""A server dies at each named point, in the middle of each write; another one goes on. (The processes that are really
killed are in `tests/faults`.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.world.interleaving import forbidden
from tests.world.worlds import Server, World

from holdfast import crashpoints
from holdfast.model.status import Status
from holdfast.workflows.hooks_records import HOOK
from holdfast.world.errors import WorldError
from holdfast.world.hooks import KIND
from holdfast.world.projection import STATUSES
from holdfast.world.records import invocation_of

POINTS = sorted(point for point in crashpoints.POINTS if point.startswith("world."))


class Died(BaseException):
    pass


@pytest.fixture(autouse=True)
def die(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def strike(name: str) -> None:
        raise Died(name)

    monkeypatch.setattr(crashpoints, "strike", strike)
    yield
    crashpoints.arm(None)


class Client:
    """A client that repeats a write, with the same operation, when its server has died."""

    def __init__(self, world: World, run: str) -> None:
        self.world, self.run = world, run
        self.server: Server = world
        self.deaths = self._number = 0

    def _repeated(self, write: Callable[[Server, str], Any]) -> Any:
        self._number += 1
        operation = f"op-{self._number}"
        try:
            return write(self.server, operation)
        except Died:
            self.deaths += 1
            crashpoints.arm(None)
            self.server = self.world.other()
            return write(self.server, operation)

    def create(self, kind: str, call: str | None = None, data: Any = None) -> Any:
        return self._repeated(
            lambda server, operation: server.create(self.run, kind, call, data=data or {}, operation=operation)
        )

    def stream(self, method: str, **fields: Any) -> None:
        fields |= {"run_id": self.run, "name": "s"}
        self._repeated(lambda server, operation: server.call(method, operation_id=operation, **fields))

    def live(self) -> Any:
        """Live a whole life."""
        self.create("run_created", data={"deploymentId": "d", "workflowName": "w", "input": b"1"})
        self.create("run_started")
        self.create("step_started", "step_1", {"stepName": "s", "input": b"x" * 100_000})
        self.stream("streams_write", chunks=["a", "b"])
        self.stream("streams_write", chunks=["c"])
        self.stream("streams_close")
        self.create("step_completed", "step_1", {"result": b"1"})
        self.create("hook_created", "hook_1", {"token": "t"})
        self.create("hook_received", "hook_1", {"payload": b"1"})
        self.create("hook_disposed", "hook_1")
        self.create("hook_created", "hook_2", {"token": "t"})
        self.create("attr_set", data={"changes": [{"key": "a", "value": "1"}]})
        return self.create("run_completed", data={"output": b"1"})


LIFE = [
    *("run_created", "run_started", "step_created", "step_started", "step_completed", "hook_created"),
    *("hook_received", "hook_disposed", "hook_created", "attr_set", "run_completed"),
]


@pytest.mark.parametrize("point", POINTS)
def test_a_server_dies_at_a_point_and_nothing_is_lost_or_doubled(point: str) -> None:
    times = 0
    while True:
        times += 1
        world = World("memory://")
        crashpoints.arm(f"{point}:{times}")
        client = Client(world, world.new_id())
        client.live()
        crashpoints.arm(None)
        if not client.deaths:
            assert times > 1, f"no write comes past {point}"
            world.close()
            return
        _check(world, client)
        world.close()


def _check(world: World, client: Client) -> None:
    run, server = client.run, world.other()
    assert server.kinds(run) == LIFE
    assert forbidden(server.events(run)) == []
    chunks = server.call("streams_get_chunks", run_id=run, name="s")
    assert ([chunk["data"] for chunk in chunks["data"]], chunks["done"]) == ([b"a", b"b", b"c"], True)
    with pytest.raises(WorldError):
        server.call("hooks_get_by_token", token="t")
    while world.do(server.storage.sweep()):
        pass
    id = invocation_of(run)
    assert id is not None
    (record,) = world.do(world.engine.store.get("app", [id]))
    assert record is not None
    assert (record.status, dict(record.attributes)) == (STATUSES["completed"], {"a": "1"})
    for kind in (HOOK, KIND):
        assert not world.do(world.engine.store.entries("app", kind, subject=id))


def test_a_run_whose_creation_never_came_back_ends_after_a_day(quick: World) -> None:
    run = quick.new_id()
    crashpoints.arm("world.inserted")
    with pytest.raises(Died):
        quick.run(id=run)
    crashpoints.arm(None)
    server = quick.other()
    with pytest.raises(WorldError) as caught:
        server.get(run)
    assert caught.value.status == 404
    assert server.call("runs_list")["data"] == []
    for seconds, expected in ((86_000, Status.REGISTERED), (1000, Status.CANCELLED)):
        quick.clock.advance(seconds)  # type: ignore[attr-defined]
        assert quick.do(server.storage.sweep()) is False
        id = invocation_of(run)
        assert id is not None
        (record,) = quick.do(quick.engine.store.get("app", [id]))
        assert record is not None
        assert record.status is expected


def test_the_sweep_repairs_invocations_that_lag(quick: World) -> None:
    runs = [quick.run(started=True) for _ in range(3)]
    for run, kind in zip(runs, ("run_completed", "run_failed", "run_cancelled"), strict=True):
        quick.hook(run, "hook_1", f"token-{kind}")
        crashpoints.arm("world.appended")
        with pytest.raises(Died):
            quick.create(run, kind, data={"output": b"1", "error": b"1"})
        crashpoints.arm(None)
    server = quick.other()
    assert server.hook(server.run(), "hook_1", "token-run_completed")["event"]["eventType"] == "hook_created"
    turns = 0
    while quick.do(server.storage.sweep(1)):
        turns += 1
    assert turns >= 3
    statuses = [quick.do(quick.engine.store.get("app", [invocation_of(run)]))[0].status for run in runs]  # type: ignore[list-item,union-attr]
    assert statuses == [Status.SUCCESS, Status.FAILED, Status.CANCELLED]
    assert len(quick.call("hooks_list")["data"]) == 1


def test_the_sweep_looks_again_at_a_run_that_went_on(quick: World) -> None:
    run, server = quick.run(started=True), quick.other()
    assert quick.do(server.storage.sweep()) is False
    crashpoints.arm("world.appended")
    with pytest.raises(Died):
        quick.create(run, "run_cancelled")
    crashpoints.arm(None)
    assert quick.do(server.storage.sweep()) is False
    id = invocation_of(run)
    assert id is not None
    (record,) = quick.do(quick.engine.store.get("app", [id]))
    assert record is not None
    assert record.status is Status.CANCELLED


def test_a_token_is_free_although_the_server_died_after_the_disposal(quick: World) -> None:
    run = quick.run(started=True)
    quick.hook(run, "hook_1", "t")
    crashpoints.arm("world.appended")
    with pytest.raises(Died):
        quick.create(run, "hook_disposed", "hook_1")
    crashpoints.arm(None)
    server = quick.other()
    assert server.hook(server.run(), "hook_2", "t")["event"]["eventType"] == "hook_created"
