"""Calls on loops: each has one outcome, also one that is to end before its first step."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.support.patience import patient

from holdfast.codec import Codec, SizeLimits
from holdfast.errors import SoftTimeout
from holdfast.executors.call import INTERRUPTED, Call, Interrupted, Outcome, Raised, Returned
from holdfast.executors.local import Executor, InlineExecutor, LoopExecutor, OutcomeBatch, ThreadExecutor
from holdfast.telemetry.logs import logging_telemetry

CODEC = Codec()
LIMITS = SizeLimits(inline=2**16, max_bytes=2**20)
KINDS = [LoopExecutor, InlineExecutor]
PATIENCE_SECONDS = patient(5.0)


def call_of(key: str, function: Callable[..., Any], *, soft: bool = False) -> Call:
    arguments = CODEC.encode_call((), {})
    return Call(key, key, function, inspect.signature(function), arguments, CODEC, LIMITS, {}, has_soft_timeout=soft)


def outcomes_of(kind: type[Any], use: Callable[[Executor], None], *keys: str) -> dict[str, Outcome]:
    """Every outcome that comes of this use, until these have one; a second outcome of a call is a failure."""

    async def main() -> dict[str, Outcome]:
        found: dict[str, Outcome] = {}
        all_there = asyncio.Event()

        def deliver(outcomes: Sequence[tuple[str, Outcome]]) -> None:
            for key, outcome in outcomes:
                assert key not in found, f"a second outcome of {key}"
                found[key] = outcome
            if found.keys() >= set(keys):
                all_there.set()

        places = kind(deliver, logging_telemetry()) if kind is LoopExecutor else kind(deliver)
        try:
            use(places)
            await asyncio.wait_for(all_there.wait(), PATIENCE_SECONDS)
            await asyncio.sleep(0.02)  # for a second outcome, which must not come
        finally:
            places.close()
        return found

    return asyncio.run(main())


class Blocked:
    """Holds the loop of the places while calls are handed over, so that none of them can begin."""

    def __init__(self, places: Executor) -> None:
        self._free = threading.Event()
        if isinstance(places, LoopExecutor):
            holding = threading.Event()
            places._loop.call_soon_threadsafe(lambda: (holding.set(), self._free.wait(PATIENCE_SECONDS)))
            assert holding.wait(PATIENCE_SECONDS)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._free.set()


def test_an_outcome_that_comes_while_others_are_fetched_is_fetched_too() -> None:
    """From another thread, right after the last one was taken out of the batch."""

    async def main() -> None:
        found, is_there = list[str](), asyncio.Event()

        def deliver(outcomes: Sequence[tuple[str, Outcome]]) -> None:
            found.extend(key for key, _ in outcomes)
            if len(found) == 2:
                is_there.set()

        batch = OutcomeBatch(deliver)

        class Interleaved(deque[tuple[str, Outcome]]):
            def popleft(self) -> tuple[str, Outcome]:
                taken = super().popleft()
                if taken[0] == "first":
                    batch.add("second", INTERRUPTED)
                    batch.announce()
                return taken

        batch._outcomes = Interleaved()
        batch.add("first", INTERRUPTED)
        batch.announce()
        await asyncio.wait_for(is_there.wait(), PATIENCE_SECONDS)

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["cancel", "force", "interrupt"])
def test_a_call_that_is_to_end_before_its_first_step_never_begins_and_has_an_outcome(kind: type[Any], how: str) -> None:
    began = list[bool]()

    async def never() -> None:
        began.append(True)

    def use(places: Executor) -> None:
        with Blocked(places):
            places.start([call_of("never", never), call_of("other", other)])
            getattr(places, how)(["never"])
            getattr(places, how)(["never"])  # whoever asks twice gets one outcome

    async def other() -> str:
        return "done"

    found = outcomes_of(kind, use, "never", "other")
    assert not began
    assert isinstance(found["other"], Returned)
    assert found["never"] == (INTERRUPTED if how == "interrupt" else Interrupted("its code had not begun"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_soft_timeout_before_the_first_step_is_raised_in_the_code_once_it_runs(kind: type[Any]) -> None:
    async def partial() -> str:
        try:
            await asyncio.sleep(PATIENCE_SECONDS)
        except SoftTimeout:
            await asyncio.sleep(0)
            return "partial"
        return "whole"

    def use(places: Executor) -> None:
        with Blocked(places):
            places.start([call_of("soft", partial, soft=True)])
            places.raise_soft_timeout(["soft"])

    began = time.monotonic()
    found = outcomes_of(kind, use, "soft")["soft"]
    assert isinstance(found, Returned)
    assert CODEC.decode(found.result) == "partial"
    assert time.monotonic() - began < PATIENCE_SECONDS


def test_a_soft_timeout_before_a_thread_has_the_call_is_raised_in_it() -> None:
    def partial() -> str:
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while time.monotonic() < deadline:
                time.sleep(0.01)
        except SoftTimeout:
            return "partial"
        return "whole"

    async def main() -> Outcome:
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        places = ThreadExecutor(0, lambda outcomes: ended.set_result(outcomes[0][1]))
        try:
            places.start([call_of("soft", partial)])
            places.raise_soft_timeout(["soft"])
            places.make_room(1)
            return await asyncio.wait_for(ended, PATIENCE_SECONDS)
        finally:
            places.close()

    outcome = asyncio.run(main())
    assert isinstance(outcome, Returned)
    assert CODEC.decode(outcome.result) == "partial"


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_has_begun_decides_what_becomes_of_its_cancellation(kind: type[Any]) -> None:
    begun = threading.Event()

    async def gives_way() -> None:
        begun.set()
        await asyncio.sleep(PATIENCE_SECONDS)

    def use(places: Executor) -> None:
        places.start([call_of("begun", gives_way)])
        if isinstance(places, LoopExecutor):
            assert begun.wait(PATIENCE_SECONDS)
            places.cancel(["begun"])
        else:
            asyncio.get_running_loop().call_later(0.01, places.cancel, ["begun"])

    found = outcomes_of(kind, use, "begun")["begun"]
    assert isinstance(found, Raised)
    assert found.error.type_name.endswith("CancelledError")
