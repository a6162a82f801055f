"""Hints between the engines of one process, as sockets or a change stream carry them between processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tests.support.fleet import LATENCY, Fleet

from holdfast.model.records import Hint
from holdfast.runtime.engine import Engine
from holdfast.store.contract import Store


class Wire:
    """Carries hints between the hubs of all engines that a fleet makes from now on."""

    def __init__(self, fleet: Fleet) -> None:
        self._listening: list[tuple[_End, str, Callable[[Hint], None]]] = []
        make = fleet.engine

        def connected(store: Store) -> Engine:
            engine = make(store)
            engine.hub.connect(_End(self))
            return engine

        fleet.engine = connected  # type: ignore[method-assign]

    def carry(self, sender: _End, hint: Hint) -> None:
        for end, kind, receive in self._listening:
            if end is not sender and kind == hint.kind:
                asyncio.get_running_loop().call_later(LATENCY, receive, hint)

    def add(self, end: _End, kind: str, receive: Callable[[Hint], None]) -> None:
        self._listening.append((end, kind, receive))


class _End:
    """See `holdfast.model.records.HintChannel`."""

    trust = 1

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def send(self, hints: Sequence[Hint]) -> None:
        for hint in hints:
            self._wire.carry(self, hint)

    def listen(self, kind: str, receive: Callable[[Hint], None]) -> None:
        self._wire.add(self, kind, receive)

    async def close(self) -> None:
        pass
