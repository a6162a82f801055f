"""Who in this process waits for what.

A runner subscribes to lanes, a waiting caller to the end of an invocation. `Hub.send` tells the subscribers here at
once, and the other processes through a channel if there is one. Whoever waits on the hub also looks by himself from
time to time, so a hint may be lost, doubled or come too early.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from holdfast.lifecycle.records import FINAL, READY, Hint, HintChannel

Wake = Callable[[], None]


class Hub:
    """Not for threads: everything here happens on the engine's loop."""

    def __init__(self) -> None:
        self._channel: HintChannel | None = None
        self._listening: set[str] = set()
        self._waiting: dict[str, dict[str, set[Wake]]] = {READY: defaultdict(set), FINAL: defaultdict(set)}

    def connect(self, channel: HintChannel | None) -> None:
        self._channel = channel

    def subscribe(self, kind: str, subjects: Iterable[str], wake: Wake) -> Callable[[], None]:
        """Call `wake` whenever something happens to one of `subjects`. Returns what ends the subscription."""
        if self._channel is not None and kind not in self._listening:
            self._listening.add(kind)
            self._channel.listen(kind, self._receive)
        waiting, wanted = self._waiting[kind], tuple(subjects)
        for subject in wanted:
            waiting[subject].add(wake)

        def unsubscribe() -> None:
            for subject in wanted:
                if wakes := waiting.get(subject):
                    wakes.discard(wake)
                    if not wakes:
                        del waiting[subject]

        return unsubscribe

    def send(self, *hints: Hint) -> None:
        """Tell everybody."""
        for hint in hints:
            self._receive(hint)
        if self._channel is not None:
            self._channel.send(hints)

    def _receive(self, hint: Hint) -> None:
        waiting = self._waiting.get(hint.kind)
        if not waiting:
            return
        subjects = hint.subjects or tuple(waiting)
        for wake in {wake for subject in subjects for wake in waiting.get(subject, ())}:
            wake()
