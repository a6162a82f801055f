"""The part of the conformance suite about queues: depths, pauses, and due times of any moment."""

from __future__ import annotations

import pytest

from holdfast.model import changes
from holdfast.model.limits import Limit
from holdfast.model.queues import QueueDepth
from holdfast.model.records import lane_of
from holdfast.store.contract import Store
from holdfast.testing.samples import START, TASK, Stage, ids_of, invocation, the, wish

LATEST = 253_402_300_799.999  # the last moment of the year 9999


class QueueConformance:
    # --- depths

    def test_depths_count_ready_scheduled_running_and_blocked(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            assert list(await store.queue_depths("shop", START)) == []
            due = [
                invocation(f"d{n}", queue="mail", due_at=START - n, priority=n, tags=("gpu",) * (n % 2))
                for n in range(4)
            ]
            later = [invocation(f"l{n}", queue="mail", due_at=START + 1 + n) for n in range(2)]
            kept = [invocation(f"k{n}", queue="slow", limit_key="k") for n in range(3)]
            await store.insert([*due, *later, *kept, invocation("o", app="other"), invocation("x", due_at=START + 9)])
            mail, slow = lane_of("mail", TASK), lane_of("slow", TASK)
            await store.claim(wish("c1", lanes=(slow,), limits={TASK: Limit(1)}))
            (taken,) = (await store.claim(wish("c2", lanes=(mail,), limit=1, start=False))).records
            assert list(await store.queue_depths("shop", START)) == [
                QueueDepth(name="default", scheduled=1),
                QueueDepth(name="mail", waiting=3, scheduled=2, running=1, oldest_due_at=START - 3),
                QueueDepth(name="slow", blocked=2, running=1),
            ]
            assert taken.id == "d2"
            await store.apply([changes.started(taken, operation="s", at=START)])
            ended = await the(store, "d2")
            await store.apply([changes.completed(ended, result=b"r", operation="e", at=START)])
            (_, mails, _) = await store.queue_depths("shop", START + 100)
            assert mails == QueueDepth(name="mail", waiting=5, oldest_due_at=START - 3)

        stage.play(scenario)

    def test_bounded_depths_are_exact_below_the_bound_and_know_the_oldest(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            mail = [invocation(f"m{n}", queue="mail", due_at=START - n, priority=n % 2) for n in range(9)]
            slow = [invocation(f"s{n}", queue="slow", due_at=START + n) for n in range(3)]
            await store.insert([*mail, *slow])
            few = {depth.name: depth for depth in await store.queue_depths("shop", START, 2)}
            assert few["mail"].waiting >= 2
            assert few["mail"].oldest_due_at == START - 8
            assert few["slow"].waiting + few["slow"].scheduled >= 2
            assert list(await store.queue_depths("shop", START, 10)) == list(await store.queue_depths("shop", START))

        stage.play(scenario)

    # --- any moment

    @pytest.mark.parametrize("due_at", [0.0, START + 0.001, START + 3e9 + 1 / 3, LATEST])
    def test_a_due_time_is_kept_to_the_last_bit_however_far_it_is(self, stage: Stage, due_at: float) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("a", due_at=due_at)])
            assert (await the(store)).due_at == due_at
            early = await store.claim(wish("early", at=due_at - 0.0005))
            assert (early.records, early.next_due_at) == ((), due_at)
            assert ids_of((await store.claim(wish("due", at=due_at))).records) == ["a"]

        stage.play(scenario)
