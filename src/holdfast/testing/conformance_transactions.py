"""The part of the conformance suite about transactions of steps.

Use `holdfast.testing.conformance.StoreConformance`, which includes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.model.log import APPENDED, Fenced, Page
from holdfast.store.contract import Ability, Store
from holdfast.testing.samples import Stage, ids, invocation, page


def _driven(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never suspends, as a thread without a loop does."""
    with pytest.raises(StopIteration) as end:
        work.send(None)
    return end.value.value


async def _perform(store: Store, pages: list[Page], *, is_async: bool, commits: bool) -> Any:
    """Append a page and submit an invocation in a transaction, and end it."""
    transaction = store.transaction(is_async=is_async)

    async def work() -> Any:
        await transaction.begin()
        joined = store.joined(transaction.session)
        record = invocation(pages[0].operation)
        if joined.is_async:
            await joined.ainsert([record], ())
            verdicts = await joined.aappend(pages, ())
        else:
            joined.insert([record], ())
            verdicts = joined.append(pages, ())
        await (transaction.commit() if commits else transaction.rollback())
        await transaction.rollback()  # does nothing any more
        return list(verdicts)

    return await work() if is_async else await asyncio.to_thread(_driven, work())


class TransactionConformance:
    """See the module."""

    @pytest.mark.parametrize("is_async", [True, False])
    def test_a_step_and_its_page_are_committed_together(self, stage: Stage, is_async: bool) -> None:
        async def operations(store: Store) -> list[str]:
            return [one.operation for one in await store.read_log("shop", page(1).run, limit=10)]

        async def scenario(store: Store) -> None:
            first, second = page(1, operation="first"), page(2, operation="second")
            assert await _perform(store, [first], is_async=is_async, commits=False) == [APPENDED]
            assert await operations(store) == []
            assert await _perform(store, [first], is_async=is_async, commits=True) == [APPENDED]
            assert await _perform(store, [second], is_async=is_async, commits=True) == [APPENDED]
            assert await operations(store) == ["first", "second"]
            late = page(2, operation="late", epoch=1)
            await store.append([page(3, operation="takeover", epoch=2)])
            assert await _perform(store, [late], is_async=is_async, commits=False) == [Fenced(2)]
            found = await store.get("shop", ids("first", "second", "late"))
            assert [record is not None for record in found] == [True, True, False]

        stage.play(scenario, needs=Ability.TRANSACTIONS)

    def test_transactions_of_living_owners_are_left_alone(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            assert await store.abort_transactions([]) == 0
            transaction = store.transaction(is_async=True, owner="a/0")
            await transaction.begin()
            joined = store.joined(transaction.session)
            first = page(1, operation="first")
            await (joined.aappend([first], ()) if joined.is_async else asyncio.sleep(0, joined.append([first], ())))
            assert await store.abort_transactions(["a/0", "a", "b/0"]) == 0, "it is one of this process"
            await transaction.commit()
            assert [one.operation for one in await store.read_log("shop", first.run, limit=10)] == ["first"]

        stage.play(scenario, needs=Ability.TRANSACTIONS)

    def test_a_store_without_transactions_says_so(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            if Ability.TRANSACTIONS not in store.abilities:
                with pytest.raises(UsageError, match="no transactions"):
                    store.transaction(is_async=False)
                assert await store.abort_transactions(["a/0"]) == 0

        stage.play(scenario)
