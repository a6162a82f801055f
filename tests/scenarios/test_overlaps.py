"""What a tick does while the one before has not ended: each policy acts visibly, on a real runner and every store.

All four run side by side, since each of them has to wait for real ticks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.patience import eventually, patient

from holdfast import App, Status
from holdfast.invocation import InvocationRecord
from holdfast.schedules.records import Overlap, Progress

MONGODB = pytest.param("mongodb", marks=pytest.mark.faults)


@pytest.fixture(params=["memory", "sqlite", MONGODB])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    url = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/shop.db"}.get(request.param)
    with App(url or request.getfixturevalue("mongo_url"), poll_interval_seconds=0.2) as app:
        yield app


class Shop:
    """A task for each policy, and a schedule that calls it every second; a call lasts until `let_go`. And one more that
    nobody runs: what was never started has not ended either.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self.open: set[str] = set()
        for policy in Overlap:
            task = app.task(name=policy.value)(self._hold(policy.value))
            app.schedules.create(policy.value, task, every="1s", overlap=policy.value)
            unserved = app.task(name=f"unserved-{policy}", queue="unserved")(lambda: None)
            app.schedules.create(f"unserved-{policy}", unserved, every="1s", overlap=policy.value)

    def _hold(self, name: str) -> Callable[[], object]:
        async def hold() -> None:
            while name not in self.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        return hold

    def let_go(self, policy: Overlap) -> None:
        self.open.add(policy.value)

    def calls(self, policy: str, status: Status | None = None) -> list[InvocationRecord]:
        """Oldest first."""
        found = self.app.invocations(task=policy, status=() if status is None else status.value)
        return sorted(found, key=lambda record: record.id)

    def progress(self, policy: Overlap) -> Progress:
        return self.app.schedules.get(policy.value).progress


def test_every_policy_acts_on_the_invocation_of_the_tick_before(app: App) -> None:
    shop = Shop(app)
    with app.runner(concurrency=50, queues=["default"], drain_timeout=5):
        eventually(lambda: len(shop.calls(Overlap.ALLOW, Status.RUNNING)) >= 2, "two ticks run side by side")

        eventually(lambda: shop.progress(Overlap.SKIP).skipped >= 1, "a tick is left out")
        assert [call.status for call in shop.calls(Overlap.SKIP)] == [Status.RUNNING]

        eventually(lambda: shop.progress(Overlap.QUEUE).queued, "a tick waits for the one before")
        assert [call.status for call in shop.calls(Overlap.QUEUE)] == [Status.RUNNING]
        shop.let_go(Overlap.QUEUE)
        eventually(lambda: len(shop.calls(Overlap.QUEUE)) >= 2, "the tick that waited is called")
        waited = shop.calls(Overlap.QUEUE)[1]
        assert waited.created_at > waited.due_at, "it is the tick of that time, and not the next one"

        eventually(lambda: shop.calls(Overlap.CANCEL, Status.CANCELLED), "a tick takes the place of the one before")
        eventually(lambda: len(shop.calls(Overlap.CANCEL)) >= 2, "and is called itself")
        first = shop.calls(Overlap.CANCEL)[0]
        assert first.status is Status.CANCELLED
        assert first.cancellation is not None
        assert first.cancellation.by == "its schedule"
        assert first.cancellation.reason == "the next tick of the schedule 'cancel' takes its place"

        eventually(lambda: len(shop.calls("unserved-cancel")) >= 2, "a tick replaces a call that was never started")

        def only_the_last_one_waits() -> bool:  # a tick cancels the one before, and then it is inserted
            found = [call.status for call in shop.calls("unserved-cancel")]
            return found == [Status.CANCELLED] * (len(found) - 1) + [Status.REGISTERED]

        eventually(only_the_last_one_waits, "and all but the last one are cancelled")
        for policy in (Overlap.SKIP, Overlap.QUEUE):
            assert [call.status for call in shop.calls(f"unserved-{policy}")] == [Status.REGISTERED]
        assert len(shop.calls("unserved-allow")) >= 2

        app.schedules.delete("cancel")  # so that nothing takes the place of the last one
        for policy in Overlap:
            shop.let_go(policy)
        last = shop.calls(Overlap.CANCEL)[-1]
        assert app.invocation(last.id).result(patient(20)) is None
