"""Claimers that want the same: each finds a share of its own, and nothing of the queue is forgotten for it."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace
from tests.store.mongo.tools import opened, play

from holdfast.ids import ALPHABET
from holdfast.model.pacing import amended
from holdfast.store.mongo import queries
from holdfast.store.mongo.claims import Contention
from holdfast.store.mongo.store import MongoStore
from holdfast.testing.samples import START, ids_of, invocation, wish

pytestmark = [pytest.mark.xdist_group("mongo")]


class Dice(random.Random):
    """Chance that never leads to the head of the queue."""

    def random(self) -> float:
        return max(super().random(), 0.1)

    def randrange(self, stop: int) -> int:  # type: ignore[override]
        return super().getrandbits(16) % stop


def shares_of(contention: Contention, at: float) -> str:
    pattern = contention.share(at)
    assert pattern is not None
    return "".join(letter for letter in ALPHABET if re.search(pattern, letter))


def test_alone_there_are_no_shares() -> None:
    contention = Contention(Dice(1))
    contention.learn(10, 10, START)
    assert contention.share(START) is None


def test_who_loses_divides_and_moves() -> None:
    contention = Contention(Dice(1))
    sizes = []
    for _ in range(6):
        contention.learn(10, 5, START)
        sizes.append(len(shares_of(contention, START)))
    assert sizes == [16, 8, 4, 2, 2, 2]


def test_the_shares_are_all_of_the_queue() -> None:
    met = set()
    contention = Contention(Dice(1))
    for _ in range(500):
        contention.learn(10, 0, START)
        met.add(shares_of(contention, START))
    assert "".join(sorted(share for share in met if len(share) == 2)) == ALPHABET


def test_each_calm_second_doubles_a_share_until_there_is_one() -> None:
    contention = Contention(Dice(1))
    for _ in range(9):
        contention.learn(10, 0, START)
        contention.share(START)
    sizes = [len(shares_of(contention, START + 1.5 * n)) for n in range(4)]
    assert sizes == [2, 4, 8, 16]
    assert contention.share(START + 10) is None
    assert contention.shares == 1


def test_one_claim_in_sixteen_goes_to_the_head_and_what_is_lost_there_says_nothing() -> None:
    contention = Contention(random.Random(1))
    contention.learn(10, 0, START)
    looks = Counter(contention.share(START) is None for _ in range(4000))
    assert 180 < looks[True] < 320
    while contention.share(START) is not None:
        pass
    contention.learn(10, 0, START)
    assert contention.shares == 2


def test_a_row_of_single_claims_looks_first_now_and_then() -> None:
    contention = Contention(Dice(1))
    for _ in range(64):
        assert not contention.looks_first
        contention.took_head(found=True)
    assert contention.looks_first
    contention.learn(1, 1, START)
    assert not contention.looks_first, "nobody was there"
    for _ in range(63):
        contention.took_head(found=True)
    contention.took_head(found=False)
    contention.took_head(found=True)
    assert not contention.looks_first, "the row was broken"


@pytest.mark.parametrize("limit", [1, 7])
def test_what_a_share_does_not_have_is_taken_from_the_others(mongo_url: str, limit: int) -> None:
    """With one letter at the end of all ids, most shares are empty."""

    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation(f"i{n:02}-0") for n in range(20)])
        got: list[str | None] = []
        for turn in range(40):
            store._claims.contention.learn(2, 0, START)
            got += ids_of((await store.claim(wish(f"claim {turn}", limit=limit))).records)
        assert sorted(map(str, got)) == [f"i{n:02}-0" for n in range(20)]

    play(mongo_url, scenario)


class Counting(Contention):
    """Counts what was chosen, and what of it was got."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.chosen = self.got = 0

    def learn(self, chosen: int, got: int, at: float) -> None:
        self.chosen, self.got = self.chosen + chosen, self.got + got
        super().learn(chosen, got, at)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 5])
def test_claimers_settle_down(mongo_url: str, limit: int) -> None:
    """Eight claimers of one queue: all of it is claimed once, and little is wanted by two."""

    async def scenario(store: MongoStore) -> None:
        count = 1000
        await store.insert([invocation(f"i{n:04}{ALPHABET[n % 32]}") for n in range(count)])
        got: list[str | None] = []
        contentions: list[Counting] = []

        async def work(number: int) -> None:
            async with opened(mongo_url) as mine:
                mine._claims.contention = contention = Counting(random.Random(number))
                contentions.append(contention)
                turn, found = 0, [""]
                while found:
                    wanted = wish(f"{number} {turn}", limit=limit, owner=f"r/{number}", at=mine.now())
                    found = ids_of((await mine.claim(wanted)).records)
                    turn += 1
                    got.extend(found)

        await asyncio.gather(*(work(number) for number in range(8)))
        got += ids_of((await store.claim(wish("rest", limit=count))).records)
        assert len(got) == len(set(got)) == count
        chosen, had = sum(each.chosen for each in contentions), sum(each.got for each in contentions)
        assert had > 0.6 * chosen, (had, chosen)

    play(mongo_url, scenario)


@pytest.mark.parametrize("limit", [2, 7])
def test_what_is_debounced_between_the_look_and_the_taking_is_not_taken(
    mongo_url: str, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """It was due when the claim looked, and is not due any more."""
    look = queries.candidates

    async def scenario(store: MongoStore) -> None:
        await store.insert([invocation("a"), invocation("b")])
        (waiting,) = await store.get("shop", ["a"])
        assert waiting is not None

        async def slow(*args: Any) -> Any:
            found = await look(*args)
            later = replace(invocation("x", operation="amend"), arguments=b"later")
            await store.apply([amended(waiting, later, due_at=START + 60)])
            return found

        monkeypatch.setattr(queries, "candidates", slow)
        assert ids_of((await store.claim(wish(limit=limit))).records) == ["b"]

    play(mongo_url, scenario)
