"""Who in this process waits for what.

A runner listens for lanes that have work, a waiting caller for the end of an invocation. `Hub.send` tells the listeners
here at once, and the other processes through a channel if there is one. Whoever waits on the hub also looks by himself
from time to time, so a hint may be lost, doubled or come too early.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.lifecycle.records import CANCEL, FINAL, PAUSES, READY, ROSTER, SCHEDULES, Hint, HintChannel

log = logging.getLogger("holdfast.engine")

REMEMBERED = 4096

OnReady = Callable[[Hint], None]
Wake = Callable[[], None]
Unsubscribe = Callable[[], None]


class Hub:
    """Not for threads: everything here happens on the engine's loop."""

    def __init__(self) -> None:
        self._channel: HintChannel | None = None
        self._listening: set[str] = set()
        self._ready: list[OnReady] = []
        self._final: dict[str, set[Wake]] = {}
        self._wakes: dict[str, list[Wake]] = {ROSTER: [], PAUSES: [], SCHEDULES: []}
        self._cancel: list[OnReady] = []
        self._ended: dict[str, None] = {}  # the last ids that ended, in that order

    def connect(self, channel: HintChannel | None) -> None:
        self._channel = channel
        self._listening.clear()

    @property
    def trust(self) -> int:
        """For how many polling intervals one may rely on hints alone. Without a channel, all of them are from here."""
        return 1 if self._channel is None else self._channel.trust

    def on_ready(self, heard: OnReady) -> Unsubscribe:
        """Call `heard` with each hint that lanes got work. Returns what ends the subscription."""
        self._listen(READY)
        self._ready.append(heard)
        return lambda: self._ready.remove(heard)

    def on_final(self, id: str, wake: Wake) -> Unsubscribe:
        """Call `wake` when the invocation has ended. Returns what ends the subscription."""
        self._listen(FINAL)
        self._final.setdefault(id, set()).add(wake)

        def unsubscribe() -> None:
            wakes = self._final.get(id, set())
            wakes.discard(wake)
            if not wakes:
                self._final.pop(id, None)

        return unsubscribe

    def on_roster(self, wake: Wake) -> Unsubscribe:
        """Call `wake` when a runner is gone that took turns at the services. Returns what ends the subscription."""
        return self._on(ROSTER, wake)

    def on_pauses(self, wake: Wake) -> Unsubscribe:
        """Call `wake` when a queue was paused or resumed. Returns what ends the subscription."""
        return self._on(PAUSES, wake)

    def on_schedules(self, wake: Wake) -> Unsubscribe:
        """Call `wake` when a schedule has changed. Returns what ends the subscription."""
        return self._on(SCHEDULES, wake)

    def _on(self, kind: str, wake: Wake) -> Unsubscribe:
        self._listen(kind)
        self._wakes[kind].append(wake)
        return lambda: self._wakes[kind].remove(wake)

    def on_cancel(self, heard: OnReady) -> Unsubscribe:
        """Call `heard` with each hint that invocations are to end. Returns what ends the subscription."""
        self._listen(CANCEL)
        self._cancel.append(heard)
        return lambda: self._cancel.remove(heard)

    def _listen(self, kind: str) -> None:
        if self._channel is not None and kind not in self._listening:
            self._listening.add(kind)
            self._channel.listen(kind, self._receive)

    def send(self, *hints: Hint) -> None:
        """Tell everybody."""
        for hint in hints:
            self._receive(hint)
        if self._channel is not None:
            try:
                self._channel.send(hints)
            except Exception as error:  # a hint is never worth an error: the write it tells of is done
                log.warning("a hint could not be sent: %r", error)

    def _receive(self, hint: Hint) -> None:
        if hint.kind == READY:
            for heard in tuple(self._ready):
                heard(hint)
        elif hint.kind == CANCEL:
            for heard in tuple(self._cancel):
                heard(hint)
        elif hint.kind in self._wakes:
            for wake in tuple(self._wakes[hint.kind]):
                wake()
        elif hint.kind == FINAL:
            self._remember(hint.subjects)
            if self._final:
                for id in hint.subjects or tuple(self._final):
                    for wake in tuple(self._final.get(id, ())):
                        wake()

    def _remember(self, ids: tuple[str, ...]) -> None:
        self._ended.update(dict.fromkeys(ids))
        while len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def has_ended(self, id: str) -> bool:
        """Whether its end was heard of, not too long ago."""
        return id in self._ended
