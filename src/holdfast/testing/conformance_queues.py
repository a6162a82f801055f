"""What every store must do so that queues can be looked at and paused, and so that any moment can be a due time."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from holdfast.lifecycle import changes
from holdfast.lifecycle.limits import Limit
from holdfast.lifecycle.queues import MOST_OPERATIONS, QueueDepth, QueuePause
from holdfast.lifecycle.records import lane_of
from holdfast.store.contract import Ability, Store
from holdfast.testing.samples import ODD_NAMES, START, TASK, Stage, ids_of, invocation, the, wish

LATEST = 253_402_300_799.999  # the last moment of the year 9999


def paused(
    name: str = "mail", operation: str = "p1", app: str = "shop", reason: str = "the relay is down"
) -> QueuePause:
    return QueuePause(app=app, name=name, at=START + 1, by="ann@host", reason=reason, operation=operation)


class QueueConformance:
    # --- pauses

    def test_a_queue_is_paused_once_and_by_the_first(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            assert list(await store.pauses("shop")) == []
            first = paused()
            assert await store.pause_queue(first) == first
            assert await store.pause_queue(first) == first  # an earlier try of the same
            assert await store.pause_queue(paused(operation="p2", reason="another")) == first
            assert list(await store.pauses("shop")) == [first]
            assert await store.resume_queue("shop", "mail", "r1")
            assert list(await store.pauses("shop")) == []

        stage.play(scenario)

    def test_a_repeated_operation_undoes_nothing_that_came_after_it(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            assert not await store.resume_queue("shop", "mail", "r0")  # it was not paused
            await store.pause_queue(paused())
            assert await store.resume_queue("shop", "mail", "r1")
            assert await store.resume_queue("shop", "mail", "r1")
            assert await store.pause_queue(paused()) is None
            assert list(await store.pauses("shop")) == []
            second = paused(operation="p2")
            assert await store.pause_queue(second) == second
            assert await store.resume_queue("shop", "mail", "r1")  # it was done, before
            assert list(await store.pauses("shop")) == [second]
            assert await store.resume_queue("shop", "mail", "r2")
            assert not await store.resume_queue("shop", "mail", "r3")

        stage.play(scenario)

    def test_a_queue_that_is_paused_often_does_not_grow(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for n in range(MOST_OPERATIONS + 4):
                assert await store.pause_queue(last := paused(operation=f"p{n}")) == last
                assert await store.resume_queue("shop", "mail", f"r{n}")
                assert await store.pause_queue(last) is None

        stage.play(scenario)

    def test_pauses_are_of_one_app_and_in_the_order_of_their_names(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for app in ("shop", *ODD_NAMES):
                for name in reversed(ODD_NAMES):
                    await store.pause_queue(paused(name, app=app))
            for app in ("shop", *ODD_NAMES):
                assert list(await store.pauses(app)) == [paused(name, app=app) for name in sorted(ODD_NAMES)]
            assert await store.resume_queue("shop", "%", "r1")
            assert len(await store.pauses("shop")) == len(ODD_NAMES) - 1
            assert len(await store.pauses("%")) == len(ODD_NAMES)

        stage.play(scenario)

    def test_of_many_who_pause_at_once_one_does_and_all_are_told(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            wanted = [paused(operation=f"p{n}", reason=f"reason {n}") for n in range(8)]
            told = await asyncio.gather(*[store.pause_queue(each) for each in wanted])
            assert len(set(told)) == 1
            assert told[0] in wanted
            assert list(await store.pauses("shop")) == [told[0]]

        stage.play(scenario)

    def test_a_pause_outlives_the_process(self, stage: Stage) -> None:
        async def pause(store: Store) -> None:
            await store.pause_queue(paused())

        async def look(store: Store) -> None:
            assert list(await store.pauses("shop")) == [paused()]

        stage.play(pause, look, needs=Ability.DURABLE)

    # --- depths

    def test_depths_tell_what_waits_is_scheduled_runs_and_is_blocked(self, stage: Stage) -> None:
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

    def test_a_paused_queue_is_a_matter_of_runners_and_a_store_still_takes_and_gives(self, stage: Stage) -> None:
        """Who claims decides which lanes to ask for: see `holdfast.lifecycle.eligibility`."""

        async def scenario(store: Store) -> None:
            await store.pause_queue(replace(paused("default")))
            assert list(await store.insert([invocation("a")])) == [True]
            assert ids_of((await store.claim(wish())).records) == ["a"]

        stage.play(scenario)
