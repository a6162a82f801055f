"""What is said of a store that does not answer: at once, then ever more seldom, and that it is back.

An outage lasts as long as it lasts, and a runner asks a dozen things all the time: a line for each failed try would
bury what somebody has to read. So each kind of operation is heard of at first, and then after pauses that grow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from holdfast.clock import Clock

log = logging.getLogger("holdfast.store")

_FIRST_PAUSE_SECONDS, _LONGER, _LONGEST_PAUSE_SECONDS = 10.0, 3, 300.0
_FORGOTTEN_SECONDS = 120.0  # without a failure: the next one is news. Longer than the longest pause between two tries

_repeated: ContextVar[bool] = ContextVar("repeated", default=False)
_told_elsewhere: ContextVar[bool] = ContextVar("told_elsewhere", default=False)


@contextmanager
def repeated() -> Iterator[None]:
    """What the store is asked in here is asked again if it gives up, so that is no error."""
    token = _repeated.set(True)
    try:
        yield
    finally:
        _repeated.reset(token)


@contextmanager
def told_elsewhere() -> Iterator[None]:
    """Whoever asks the store in here says himself what came of it."""
    token = _told_elsewhere.set(True)
    try:
        yield
    finally:
        _told_elsewhere.reset(token)


class Seldom:
    """Which of many lines about the same are worth saying. `time` is monotonic."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self._told: dict[str, tuple[float, float, float]] = {}  # when it was said last, the pause after that, last seen

    def is_due(self, what: str) -> bool:
        now = self._time()
        said, pause, seen = self._told.get(what, (0.0, 0.0, float("-inf")))
        if now - seen > _FORGOTTEN_SECONDS:
            pause, due = _FIRST_PAUSE_SECONDS, True
        elif due := now - said >= pause:
            pause = min(pause * _LONGER, _LONGEST_PAUSE_SECONDS)
        self._told[what] = (now if due else said, pause, now)
        return due

    def is_over(self, what: str) -> bool:
        """Whether there is something to take back: it was said that `what` fails."""
        return self._told.pop(what, None) is not None


class StoreLog:
    """What a store reports, as log lines. Most of it interests nobody."""

    def __init__(self, clock: Clock) -> None:
        self._seldom = Seldom(clock.monotonic)

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        match event:
            case "retry" | "gave_up" | "recovered" if _told_elsewhere.get():
                log.debug("%s: %s", event, facts)
            case "quarantine":
                message = "set a record aside: %s. `holdfast store check` counts them"
                log.error(message, facts["why"], extra=_named(facts))
            case "refused":
                log.error("a record stays as it is: %s", facts["why"], extra={"invocation": facts["id"]})
            case "log_lost":
                log.error("work may be lost: %s", facts["why"])
            case "log_renewed":
                log.warning("the store's files were renewed: %s", facts["why"])
            case "risk":
                log.warning("the store is open to others: %s", facts["why"])
            case "unreadable":
                level = logging.ERROR if self._seldom.is_due(f"unreadable {facts['id']}") else logging.DEBUG
                log.log(level, "left a record out: %s", facts["why"], extra=_named(facts))
            case "retry":
                message = "%s cannot be reached: %s, try %d failed, next in %.2f s: %s"
                self._warn(facts["what"], message, facts["try"], facts["delay"], facts)
            case "gave_up" if _repeated.get():
                message = "%s cannot be reached: %s, %d tries failed in %.1f s, and it is asked again: %s"
                self._warn(facts["what"], message, facts["tries"], facts["seconds"], facts)
            case "gave_up":
                message = "%s cannot be reached: %s, given up after %d tries in %.1f s: %s"
                log.error(message, _where(facts), facts["what"], facts["tries"], facts["seconds"], facts["why"])
            case "index_missing":
                log.error("%s", facts["why"])
            case "index_made":
                log.warning("an index was made again: %s", facts["why"])
            case "recovered":
                if self._seldom.is_over(facts["what"]) or not _repeated.get():
                    log.info("%s answers again: %s", _where(facts), facts["what"])
            case "change_stream_broken":
                level = logging.WARNING if self._seldom.is_due(event) else logging.DEBUG
                log.log(level, "hints stop coming, polling instead: %s", facts["why"])
            case "change_stream_open":
                if self._seldom.is_over("change_stream_broken"):
                    log.info("hints come again")
            case "hints_not_sent":
                log.debug("hints were not sent: %s", facts.get("why", ""))
            case "hint_not_taken":
                log.warning("a hint was not taken: %s", facts.get("why", ""))
            case "no_change_streams":
                log.info("no change streams here, polling instead: %s", facts["why"])

    def _warn(self, what: str, message: str, tries: int, seconds: float, facts: Mapping[str, Any]) -> None:
        """Each try of somebody who waits for the answer; of those that are repeated without end, only some."""
        due = not _repeated.get() or self._seldom.is_due(what)
        level = logging.WARNING if due else logging.DEBUG
        log.log(level, message, _where(facts), what, tries, seconds, facts["why"])


def _named(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a line about a stored record."""
    kind = facts.get("kind", "invocation")
    return {kind if kind in ("invocation", "runner") else "record": facts["id"]}


def _where(facts: Mapping[str, Any]) -> str:
    return str(facts.get("where", "the store"))
