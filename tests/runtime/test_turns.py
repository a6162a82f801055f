"""Queues take turns: a flood in one keeps no other waiting, and where there is no flood nothing changes."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from tests.runtime.test_claiming_ahead import Costly, costly
from tests.runtime.test_worker import Harness, definition, nap, running
from tests.support.engines import make_worker

from holdfast.executors.local import InlineExecutor
from holdfast.model.queues import queue_in
from holdfast.model.records import InvocationRecord, Serves, registered
from holdfast.runtime.claim import ASK_AGAIN_SECONDS, Turn, Turns, Unlimited
from holdfast.runtime.worker import Worker
from holdfast.testing.virtual import VirtualClock, run_virtual

# --- the rule itself


def begun(*queues: str, weights: dict[str, int] | None = None) -> Turns:
    turns = Turns(weights or {})
    turns.queues = set(queues)
    turns.begin()
    turns.know(queues, now=0.0)
    return turns


def play(turns: Turns, stock: dict[str, int], wanted: int, rounds: int) -> Counter[str]:
    """What is taken of each queue, by claims of so many."""
    taken: Counter[str] = Counter()
    for _ in range(rounds):
        left = wanted
        while left and (turn := turns.next(left)) is not None:
            got = min(turn.max_count, stock[turn.queue])
            stock[turn.queue] -= got
            taken[turn.queue] += got
            left -= got
            turns.took(turn, got)
    return taken


def test_of_one_queue_there_are_no_turns() -> None:
    turns = Turns({})
    turns.queues = {"a"}
    turns.begin()
    assert not turns.are_on
    assert not turns.wants_to_know(0.0)
    assert turns.next(10) is None


@pytest.mark.parametrize("wanted", [1, 2, 3, 10, 100])
@pytest.mark.parametrize("queues", ["ab", "abc", "abcdefgh"])
def test_all_queues_get_the_same_in_the_end(wanted: int, queues: str) -> None:
    taken = play(begun(*queues), dict.fromkeys(queues, 10**9), wanted, 1000)
    assert max(taken.values()) - min(taken.values()) <= max(1, wanted)
    assert set(taken) == set(queues)


def test_a_weight_is_how_many_to_one() -> None:
    taken = play(begun("a", "b", weights={"a": 3}), {"a": 10**9, "b": 10**9}, 10, 1000)
    assert 2.9 < taken["a"] / taken["b"] < 3.1


def test_a_full_claim_of_two_queues_is_two_claims() -> None:
    turns = begun("a", "b")
    assert turns.next(10) == Turn("a", 5)
    turns.took(Turn("a", 5), 5)
    assert turns.next(5) == Turn("b", 5)


def test_one_that_has_no_more_is_left_out_until_there_is_news() -> None:
    turns = begun("a", "b", "c")
    turns.took(Turn("a", 5), 2)
    turns.took(Turn("b", 5), 5)
    assert turns.next(10) is not None
    turns.took(Turn("c", 5), 0)
    assert turns.next(10) is None  # only b is left: all lanes at once
    turns.add("a")
    assert turns.next(10) == Turn("a", 5)  # it has saved nothing up, and is as far as b
    turns.know(["b"], now=1.0)
    assert turns.next(10) is None
    assert not turns.wants_to_know(1.0 + ASK_AGAIN_SECONDS / 2)
    assert turns.wants_to_know(1.0 + ASK_AGAIN_SECONDS)


def test_there_are_never_more_than_a_few_claims_for_one() -> None:
    turns = begun(*[f"q{n:03}" for n in range(100)])
    left, claims = 100, 0
    while left:
        turn = turns.next(left)
        assert turn is not None
        turns.took(turn, turn.max_count)
        left -= turn.max_count
        claims += 1
    assert claims <= 12


# --- a worker


class Shop(Harness):
    async def fill(self, queue: str, count: int, *args: Any, **facts: Any) -> list[str]:
        now = self.clock.now()
        records = [
            registered(
                InvocationRecord(
                    id=self.ids.new(),
                    app="app",
                    task="nap",
                    arguments=self.codec.encode_call(args, {}),
                    created_at=now,
                    due_at=facts.get("due_at", now),
                    priority=facts.get("priority", 0),
                    queue=queue,
                ),
                operation=self.ids.operation(),
                at=now,
            )
            for _ in range(count)
        ]
        if facts.get("hint", True):
            await self.engine.submitter.submit(records)
        else:
            await self.store.insert(records)
        return [record.id for record in records]

    def serving(self, concurrency: int = 2, **weights: int) -> Worker:
        return make_worker(
            self.engine,
            [definition(nap)],
            owner=f"{self.ids.new()}/0",
            serves=Serves(tasks=frozenset({"nap"}), weights=weights),
            concurrency=concurrency,
            permit=Unlimited(),
            drain_timeout_seconds=30.0,
            make_executor=lambda kind, deliver: InlineExecutor(deliver),
        )

    @property
    def claims(self) -> list[Any]:
        assert isinstance(self.store, Costly)
        return self.store.claims


@pytest.mark.parametrize("flood", [{}, {"priority": 100}, {"due_at": 0.0}])
@pytest.mark.parametrize("hint", [True, False])
def test_a_flood_keeps_no_other_queue_waiting(flood: dict[str, Any], hint: bool) -> None:
    async def main(clock: VirtualClock) -> None:
        shop = Shop(clock)
        await shop.fill("flood", 500, 1.0, **flood)
        await shop.fill("mail", 1, 0.001)
        worker = shop.serving(concurrency=2)
        life = await running(worker)
        await asyncio.sleep(10)
        began = clock.now()
        (lone,) = await shop.fill("mail", 1, 0.001, hint=hint)
        await shop.end(lone)
        assert clock.now() - began < (1.5 if hint else 3.5)
        left = await shop.store.queue_depths("app", clock.now())
        assert [depth.name for depth in left if depth.waiting] == ["flood"]
        worker.stop(hurry=True)
        await life

    run_virtual(main)


@pytest.mark.parametrize(("weights", "ratio"), [({}, 1.0), ({"mail": 3}, 3.0)])
def test_two_floods_are_served_as_their_weights_say(weights: dict[str, int], ratio: float) -> None:
    async def main(clock: VirtualClock) -> None:
        shop = Shop(clock)
        ids = {"flood": await shop.fill("flood", 400, 0.5, priority=9), "mail": await shop.fill("mail", 400, 0.5)}
        worker = shop.serving(concurrency=4, **weights)
        life = await running(worker)
        await asyncio.sleep(30)
        worker.stop()
        await life
        done = {queue: sum([(await shop.record(id)).status == "success" for id in some]) for queue, some in ids.items()}
        assert sum(done.values()) > 200
        assert done["mail"] / done["flood"] == pytest.approx(ratio, rel=0.1)

    run_virtual(main)


def test_within_a_queue_priority_decides() -> None:
    async def main(clock: VirtualClock) -> None:
        shop = Shop(clock)
        await shop.fill("flood", 100, 0.5)
        low = await shop.fill("mail", 5, 0.5, priority=-1)
        high = await shop.fill("mail", 5, 0.5, priority=1)
        worker = shop.serving(concurrency=1)
        life = await running(worker)
        await shop.end(*high)
        assert [(await shop.record(id)).status for id in low[1:]] == ["registered"] * 4
        await shop.end(*low)
        worker.stop(hurry=True)
        await life

    run_virtual(main)


def test_with_one_queue_no_turns_are_taken_and_nothing_is_asked() -> None:
    async def main(clock: VirtualClock) -> None:
        shop = Shop(clock, costly(clock))
        ids = await shop.fill("default", 200, 0.01)
        looks: list[float] = []
        lanes = shop.store.lanes

        async def counted(app: str) -> Any:
            looks.append(clock.now())
            return await lanes(app)

        shop.store.lanes = counted  # type: ignore[method-assign]
        worker = shop.serving()
        life = await running(worker)
        began = clock.now()
        await shop.end(*ids)
        assert clock.now() - began < 4
        assert len(looks) == 1  # when it starts
        assert all(len(claim.lanes) == 1 for claim in shop.claims)
        worker.stop()
        await life

    run_virtual(main)


def test_work_that_all_finds_a_place_is_claimed_in_one_go_whatever_its_queue() -> None:
    async def main(clock: VirtualClock) -> None:
        shop = Shop(clock, costly(clock))
        await shop.fill("mail", 1, 0.001)
        worker = shop.serving(concurrency=10)
        life = await running(worker)
        await asyncio.sleep(0.5)
        before = len(shop.claims)
        ids = [id for queue in ("default", "mail", "slow") for id in await shop.fill(queue, 2, 0.001)]
        await shop.end(*ids)
        assert len(shop.claims) - before <= 4  # hints come one by one
        assert all(len(claim.lanes) >= 2 for claim in shop.claims[before:])
        worker.stop()
        await life

    run_virtual(main)


def test_turns_cost_few_claims_even_with_many_queues() -> None:
    async def main(clock: VirtualClock) -> None:
        shop = Shop(clock, costly(clock))
        ids = [id for n in range(20) for id in await shop.fill(f"q{n}", 50, 0.01)]
        worker = shop.serving(concurrency=10)
        life = await running(worker)
        await shop.end(*ids)
        assert len(shop.claims) < len(ids) / 4
        queues = Counter(queue_in(claim.lanes[0]) for claim in shop.claims if len(claim.lanes) == 1)
        assert len(queues) == 20
        worker.stop()
        await life

    run_virtual(main)


def test_when_the_flood_is_over_what_falls_due_is_found_in_time() -> None:
    """A turn tells nothing about the other queues; the first claim for all does."""

    async def main(clock: VirtualClock) -> None:
        shop = Shop(clock)
        await shop.fill("flood", 20, 0.1)
        await shop.fill("mail", 20, 0.1)
        (later,) = await shop.fill("slow", 1, 0.001, due_at=clock.now() + 60.5, hint=False)
        worker = shop.serving(concurrency=2)
        life = await running(worker)
        await shop.end(later)
        assert (await shop.record(later)).changed_at - (await shop.record(later)).due_at < 1.1
        worker.stop()
        await life

    run_virtual(main)
