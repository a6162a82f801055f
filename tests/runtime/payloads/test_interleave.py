"""The driver of interleavings leaves out no outcome, and runs fewer orders than there are."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping

from tests.runtime.payloads.interleave import Work, every_order, gate, in_order, touching

State = dict[str, int]
# Each step reads one variable and writes another: x, y and z are touched by all in turn, w by one of them alone.
PROGRAMS = {"a": [("x", "y"), ("w", "w"), ("y", "z")], "b": [("y", "x"), ("x", "x")], "c": [("z", "y"), ("y", "x")]}


def do(state: State, step: tuple[str, str]) -> None:
    source, target = step
    state[target] = 2 * state[source] + state[target] + 1


def outcomes_one_by_one() -> tuple[int, set[tuple[tuple[str, int], ...]]]:
    """By trying all orders there are, with nothing clever."""
    names = [name for name, steps in PROGRAMS.items() for _ in steps]
    orders, found = set(itertools.permutations(names)), set()
    for order in orders:
        state, left = dict.fromkeys("wxyz", 1), {name: iter(steps) for name, steps in PROGRAMS.items()}
        for name in order:
            do(state, next(left[name]))
        found.add(tuple(state.items()))
    return len(orders), found


def test_every_outcome_is_found_with_fewer_runs() -> None:
    state: State = {}
    found, tried = set(), []

    async def run(name: str) -> None:
        for step in PROGRAMS[name]:
            await gate(touching(reads=step[0], writes=step[1]))
            do(state, step)

    async def setup() -> Mapping[str, Work]:
        state.update(dict.fromkeys("wxyz", 1))
        return {name: lambda name=name: run(name) for name in PROGRAMS}  # type: ignore[misc]

    async def main() -> None:
        async for order in every_order(setup):
            tried.append(order)
            found.add(tuple(state.items()))

    asyncio.run(main())
    count, expected = outcomes_one_by_one()
    assert count == math.factorial(7) // (math.factorial(3) * 2 * 2)
    assert found == expected
    assert len(set(tried)) == len(tried) < count


def test_an_actor_can_be_ended_between_two_commands() -> None:
    done: list[str] = []

    async def run(name: str) -> None:
        for number in range(3):
            await gate(touching(writes="x"))
            done.append(f"{name}{number}")

    async def main() -> None:
        order = iter(["a", "b", "a", ""])
        await in_order({"a": lambda: run("a"), "b": lambda: run("b")}, lambda waiting: next(order))

    asyncio.run(main())
    assert done == ["a0", "b0", "a1"]
