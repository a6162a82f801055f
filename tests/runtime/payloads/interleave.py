"""Every order in which the commands of several actors can reach a store.

Actors are coroutines. What they ask of a store stops at a gate before it is sent, and one of them at a time is let
through, up to its next gate: so a run is a sequence of choices, and `every_order` goes through all of them, running
everything anew for each. Two neighbouring commands that touch nothing in common give the same result in either order,
and only one of the two is run ("sleep sets"); that makes thousands of orders hundreds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

Footprint = frozenset[tuple[str, bool]]
"""What a command touches: names of tables or collections, and whether it writes there."""

Work = Callable[[], Coroutine[Any, Any, object]]


def touching(*, reads: str = "", writes: str = "") -> Footprint:
    """Of names with spaces between them."""
    return frozenset([(name, False) for name in reads.split()] + [(name, True) for name in writes.split()])


def _independent(one: Footprint, other: Footprint) -> bool:
    return not any(name == name_2 and (w or w_2) for name, w in one for name_2, w_2 in other)


class _Actor:
    def __init__(self, name: str, work: Work) -> None:
        self.name = name
        self.pending: Footprint | None = None  # what it wants to do next, if it stands at a gate
        self.go = asyncio.Event()
        self._stopped = asyncio.Event()
        self.task = asyncio.create_task(self._run(work))

    async def _run(self, work: Work) -> None:
        _ACTING.set(self)
        await self.stand(touching())  # so that nobody begins by himself
        await work()

    async def stand(self, footprint: Footprint) -> None:
        self.pending = footprint
        self._stopped.set()
        await self.go.wait()
        self.go.clear()
        self.pending = None

    async def stopped(self) -> None:
        """It stands at a gate, or has ended."""
        stopped = asyncio.ensure_future(self._stopped.wait())
        await asyncio.wait({self.task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        self._stopped.clear()
        if self.task.done():
            self.task.result()


_ACTING: ContextVar[_Actor | None] = ContextVar("acting", default=None)


async def gate(footprint: Footprint) -> None:
    """Called before each command. Nobody but actors is held up."""
    actor = _ACTING.get()
    if actor is not None:
        await actor.stand(footprint)


async def _step(actor: _Actor) -> None:
    actor.go.set()
    await actor.stopped()


async def _end(actors: Mapping[str, _Actor]) -> None:
    for actor in actors.values():
        actor.task.cancel()
    await asyncio.gather(*[actor.task for actor in actors.values()], return_exceptions=True)


async def _begun(works: Mapping[str, Work]) -> dict[str, _Actor]:
    actors = {name: _Actor(name, work) for name, work in works.items()}
    for actor in actors.values():
        await actor.stopped()
        await _step(actor)  # to its first command
    return actors


# --- all orders


@dataclass
class _Node:
    enabled: dict[str, Footprint]
    sleep: dict[str, Footprint]
    choice: str = ""
    explored: dict[str, Footprint] = field(default_factory=dict)

    def choose(self) -> bool:
        """The next one that was neither tried here nor would repeat an order that was."""
        left = [name for name in self.enabled if name not in self.sleep and name not in self.explored]
        self.choice = left[0] if left else ""
        return bool(left)

    def after(self) -> dict[str, Footprint]:
        """Who may sleep after the choice: those whose next command can as well come before it."""
        chosen = self.enabled[self.choice]
        before = self.sleep | self.explored
        return {name: footprint for name, footprint in before.items() if _independent(footprint, chosen)}


Setup = Callable[[], Awaitable[Mapping[str, Work]]]


async def every_order(setup: Setup) -> AsyncGenerator[tuple[str, ...], None]:
    """Run the actors that `setup` makes (anew for each run) in every order; yields the order after each run."""
    path: list[_Node] = []
    while True:
        actors = await _begun(await setup())
        try:
            order = await _follow(actors, path)
        finally:
            await _end(actors)
        if order is not None:
            yield order
        while path and not _next(path[-1]):
            path.pop()
        if not path:
            return


def _next(node: _Node) -> bool:
    if node.choice:
        node.explored[node.choice] = node.enabled[node.choice]
    return node.choose()


async def _follow(actors: Mapping[str, _Actor], path: list[_Node]) -> tuple[str, ...] | None:
    """One run: along the path, and beyond it to the end. None if it would only repeat another one."""
    order: list[str] = []
    while True:
        waiting = {name: actor.pending for name, actor in actors.items() if actor.pending is not None}
        if not waiting:
            return tuple(order)
        if len(order) == len(path):
            path.append(_Node(waiting, path[-1].after() if path else {}))
            if not path[-1].choose():
                return None
        node = path[len(order)]
        assert node.enabled == waiting, "the actors do not do the same in the same order"
        order.append(node.choice)
        await _step(actors[node.choice])


# --- one order


async def in_order(works: Mapping[str, Work], choose: Callable[[list[str]], str]) -> tuple[str, ...]:
    """Run the actors as somebody chooses; "" ends it there, as if the processes had died."""
    actors = await _begun(works)
    order: list[str] = []
    try:
        while waiting := [name for name, actor in actors.items() if actor.pending is not None]:
            if not (name := choose(waiting)):
                break
            order.append(name)
            await _step(actors[name])
    finally:
        await _end(actors)
    return tuple(order)
