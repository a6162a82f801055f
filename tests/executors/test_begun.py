"""The table of begun calls, from both sides, and an executor that asks it."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Sequence

import pytest

from holdfast.codec import Codec, SizeLimits
from holdfast.executors.begun import BegunCalls, BegunTable
from holdfast.executors.call import NOT_BEGUN, Call, Outcome, Returned, Unfit
from holdfast.executors.local import Executor, LoopExecutor, ThreadExecutor
from holdfast.executors.processes import ProcessExecutor
from holdfast.telemetry import Telemetry


@pytest.fixture
def sides() -> tuple[BegunTable, BegunCalls]:
    table = BegunTable.create(2)
    return table, BegunCalls.attach(table.descriptor)


Sides = tuple[BegunTable, BegunCalls]


def test_a_runner_sees_what_has_begun_until_its_end_is_in_the_store(sides: Sides) -> None:
    table, calls = sides
    assert table.marks() == {}
    assert calls.begin("a~1", calls.ticket)
    assert calls.begin("b~7", calls.ticket)
    assert table.marks() == {"a~1": True, "b~7": True}
    calls.over("a~1")
    assert table.marks() == {"a~1": False, "b~7": True}
    calls.remove(["a~1", "never-entered~1"])
    assert table.marks() == {"b~7": True}


def test_a_table_that_no_worker_uses_says_nothing() -> None:
    table = BegunTable.create(2)
    os.close(table.descriptor)
    assert table.marks() is None


def test_nothing_begins_after_it_was_revoked_until_the_worker_has_accepted_that(sides: Sides) -> None:
    table, calls = sides
    claimed_before = calls.ticket
    assert calls.begin("begun~1", claimed_before)
    table.revoke()
    assert (table.is_revoked, calls.is_revoked) == (True, True)
    assert not calls.begin("queued~1", claimed_before)
    assert table.marks() == {"begun~1": True}
    calls.accept()
    assert (table.is_revoked, calls.is_revoked) == (False, False)
    assert not calls.begin("queued~1", claimed_before), "its runner has given it to others"
    assert calls.begin("queued~2", calls.ticket)
    table.revoke()
    table.revoke()
    assert calls.is_revoked, "twice is once"


def test_a_full_table_says_nothing_until_there_is_room_again(sides: Sides) -> None:
    table, calls = sides
    marks = [f"{n}~1" for n in range(25)]  # 12 entries for each slot
    for mark in marks:
        assert calls.begin(mark, calls.ticket)
    assert table.marks() is None
    calls.remove(marks[:1])
    assert table.marks() is None, "the last call is not listed"
    calls.remove(marks[24:])
    assert table.marks() == dict.fromkeys(marks[1:24], True)


def test_a_call_that_begins_again_in_another_executor_has_one_entry(sides: Sides) -> None:
    table, calls = sides
    calls.begin("a~1", calls.ticket)
    calls.begin("a~1", calls.ticket)
    calls.remove(["a~1"])
    assert table.marks() == {}


def function() -> str:
    return "ran"


async def coroutine() -> str:
    return "ran"


MAKERS: dict[str, Callable[..., Executor]] = {
    "thread": lambda deliver, begun: ThreadExecutor(2, deliver, begun),
    "loop": lambda deliver, begun: LoopExecutor(deliver, Telemetry(), None, begun),
    "process": lambda deliver, begun: ProcessExecutor(2, deliver, Telemetry(), begun=begun),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_an_executor_enters_calls_and_does_not_begin_what_was_revoked(kind: str, sides: Sides) -> None:
    table, begun = sides
    codec, run = Codec(), coroutine if kind == "loop" else function

    def call(key: str, ticket: int) -> Call:
        about = (codec.encode_call((), {}), codec, SizeLimits(2**10, 2**20), {})
        return Call(key, "t", run, inspect.signature(run), *about, mark=f"{key}~1", ticket=ticket)

    async def main() -> dict[str, Outcome]:
        outcomes, done = dict[str, Outcome](), asyncio.Event()

        def deliver(arrived: Sequence[tuple[str, Outcome]]) -> None:
            outcomes.update(arrived)
            if len(outcomes) == 2:
                done.set()

        executor = MAKERS[kind](deliver, begun)
        before = begun.ticket
        table.revoke()
        begun.accept()
        executor.start([call("old", before), call("new", begun.ticket)])
        await asyncio.wait_for(done.wait(), 30)
        executor.close()
        return outcomes

    outcomes = asyncio.run(main())
    assert outcomes["old"] is NOT_BEGUN
    assert isinstance(outcomes["new"], Returned if kind != "process" else Unfit), "a child knows no such task"
    assert table.marks() == {"new~1": False}, "its code is over; its end is not in the store"


def test_the_table_tells_by_when_the_first_step_has_to_end(sides: Sides) -> None:
    table, calls = sides
    assert table.steps_end_by == float("inf")
    calls.set_steps_end_by(1234.5)
    assert table.steps_end_by == 1234.5
    assert table.marks() == {}
    calls.set_steps_end_by(float("inf"))
    assert table.steps_end_by == float("inf")
