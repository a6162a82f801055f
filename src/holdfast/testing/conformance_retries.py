"""The part of the conformance suite about failed attempts and terms."""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.model import changes
from holdfast.model.changes import APPLIED, MAX_ERRORS, Applied, apply_to
from holdfast.model.claims import claimed
from holdfast.model.records import (
    CUT_EVERY,
    CUT_WITHIN,
    KEPT_LINES,
    LONGEST,
    InvocationRecord,
    Terms,
    lane_of,
    left_out,
)
from holdfast.model.status import Status
from holdfast.store.contract import Ability, Store
from holdfast.testing.conformance_payloads import digest_of, large, put
from holdfast.testing.samples import ERROR, START, TASK, Stage, again, invocation, owned, the, wish

_POLICY = {"kind": "from the future", "attempts": 3, "nested": {"waits": [1.5, None, "ß"]}}


class RetryConformance:
    def test_terms_of_any_version_come_back_unchanged(self, stage: Stage) -> None:
        async def write(store: Store) -> None:
            await store.insert([invocation("a", terms=Terms(retries=_POLICY)), invocation("b")])
            assert (await the(store, "a")).terms == Terms(retries=_POLICY)
            assert (await the(store, "b")).terms == Terms()
            (claimed,) = (await store.claim(wish(ids=("a",)))).records
            assert claimed.terms == Terms(retries=_POLICY)
            await store.apply([again(claimed)])

        async def read(store: Store) -> None:
            assert (await the(store, "a")).terms == Terms(retries=_POLICY)

        stage.play(write, read, needs=Ability.DURABLE)

    def test_a_failed_attempt_waits_for_its_time(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store)
            assert list(await store.apply([again(record)])) == [APPLIED]
            waiting = await the(store)
            assert waiting.status is Status.RETRY
            assert waiting.owner is None
            assert [(failed.attempt, failed.error) for failed in waiting.errors] == [(1, ERROR)]
            early = await store.claim(wish("early", at=START + 30))
            assert early.records == ()
            assert early.next_due_at == START + 31
            (second,) = (await store.claim(wish("due", at=START + 31))).records
            assert (second.attempt, second.epoch, second.errors) == (2, 2, waiting.errors)

        stage.play(scenario)

    def test_a_failed_attempt_may_move_to_another_queue(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store)
            await store.apply([again(record, queue="slow")])
            assert (await the(store)).queue == "slow"
            assert list(await store.lanes("shop")) == [lane_of("slow", TASK)]
            assert (await store.claim(wish("old", at=START + 60))).records == ()
            (second,) = (await store.claim(wish("new", lanes=(lane_of("slow", TASK),), at=START + 60))).records
            assert second.queue == "slow"

        stage.play(scenario)

    def test_the_errors_of_all_attempts_are_kept_up_to_a_number(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("a")])
            for attempt in range(1, MAX_ERRORS + 6):
                (record,) = (await store.claim(wish(f"claim {attempt}", at=START + 99))).records
                error = replace(ERROR, message=f"attempt {attempt}")
                await store.apply([replace(again(record, error=error), operation=f"again {attempt}")])
            kept = [failed.attempt for failed in (await the(store)).errors]
            assert kept == [1, 2, 3, 4, 5, *range(11, MAX_ERRORS + 6)]
            (record,) = (await store.claim(wish("last", at=START + 99))).records
            await store.apply([changes.completed(record, result=b"r", operation="end", at=START)])
            ended = await the(store)
            assert ended.error is None
            assert [failed.error.message for failed in ended.errors] == [f"attempt {number}" for number in kept]

        stage.play(scenario)

    def test_a_long_history_keeps_its_first_line_and_its_last_ones(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([first := invocation("a")])
            expected, number = first, 0
            while expected.version < LONGEST + 3 * CUT_EVERY:
                number += 1
                claim = wish(f"claim {number}", at=START + 99)
                (record,) = (await store.claim(claim)).records
                expected = apply_to(claimed(claim, expected), expected)
                change = replace(again(record), operation=f"again {number}")
                if number % 3 == 0:
                    change = replace(change, version=None)
                assert list(await store.apply([change])) == [APPLIED]
                expected = apply_to(change, expected)
            there = await the(store)
            assert there.history == expected.history
            assert there.history[0] == first.history[0]
            assert KEPT_LINES < len(there.history) <= LONGEST + CUT_WITHIN
            assert left_out(there.history) == there.version - len(there.history) > 0
            (verdict,) = await store.apply([change])
            assert isinstance(verdict, Applied)
            assert (await the(store)) == there  # its operation is among the last lines
            assert list(await store.insert([first])) == [True]  # and that of its insert is the first

        stage.play(scenario)

    def test_what_the_errors_of_attempts_have_apart_is_kept(self, stage: Stage) -> None:
        async def ended(store: Store, record: InvocationRecord) -> None:
            await store.apply([again(record, error=replace(ERROR, data=large(1).data))])
            (second,) = (await store.claim(wish("second", at=START + 99))).records
            await store.apply([changes.completed(second, result=b"r", operation="end", at=START)])

        async def scenario(store: Store) -> None:
            await put(store, 1, 2)
            await ended(store, await owned(store))
            stage.clock.advance(10)
            assert await store.collect_payloads("shop", store.now(), 10) == (1, False)
            assert await store.get_payload("shop", digest_of(1)) is not None

        stage.play(scenario)
