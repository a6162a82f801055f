"""The live feed: one reader of the store notifies any number of listeners of the topics that have changed.

While there are listeners, a watcher asks once a second how the topics in use stand, and compares. Each change has a
number, and the number is the id of an event: a client that reconnects with it gets the changes since. A client without
a number, or with a number of another process, is notified of all its topics once.

The feed keeps for each listener the names of topics that are not sent yet, so a slow listener costs nothing more;
`EventStreamResponse` closes the connection of a client that takes nothing. A feed ends by itself after some minutes:
the client comes back, and its rights are checked again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from holdfast.errors import HoldfastError
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.showing import as_json
from holdfast.telemetry.events import WebRequestFailed
from holdfast.web.problems import Problem, internal_error, problem_of, too_many, wrong
from holdfast.web.reading.topics import INVOCATION, TOPICS, TopicReading, is_topic
from holdfast.web.sse import Batches, ServerEvent

LOOK_SECONDS = 1.0
LOST_SECONDS = 10.0  # without an answer, the store counts as away
LIFE_SECONDS = 900.0
MOST_TOPICS = 200  # in use, or remembered
MOST_OF_ONE = 60  # in use by one principal, so that it does not fill the feed for all
MOST_ASKED = 20  # by one client
_FETCHES_PER_SECOND = 20.0  # a notified client fetches its page: of many clients, each is notified more seldom

Look = Callable[[Collection[str]], Awaitable[Mapping[str, Any]]]
Pause = Callable[[float], Awaitable[object]]


class TopicState(NamedTuple):
    """How a topic stood at the last look, and the number of its last change."""

    value: Any
    number: int


class FeedListener:
    """A client of the feed: its topics, and the changes that are not sent yet."""

    def __init__(self, topics: Sequence[str]) -> None:
        self.topics = frozenset(topics)
        self.changed: set[str] = set()
        self.unseen: set[str] = set()  # by any look: the first look that sees a topic notifies
        self.problem: Problem | None = None
        self.woken = asyncio.Event()

    def notify(self, topics: Collection[str]) -> None:
        self.problem = None
        if mine := self.topics.intersection(topics):
            self.changed |= mine
            self.woken.set()

    def warn(self, problem: Problem) -> None:
        self.problem = problem
        self.woken.set()


class LiveFeed:
    """The feed of one process. It belongs to the loop of the server."""

    def __init__(
        self,
        runtime: AppRuntime,
        look: Look | None = None,
        *,
        pause: Pause = asyncio.sleep,
        life_seconds: float = LIFE_SECONDS,
    ) -> None:
        reading = TopicReading(runtime)

        async def ask(topics: Collection[str]) -> Mapping[str, Any]:
            return await runtime.arun(reading.values(topics))

        self._telemetry = runtime.telemetry
        self._look = ask if look is None else look
        self._pause = pause
        self._life_seconds = life_seconds
        self._rng = random.Random()
        self._name = f"{self._rng.getrandbits(48):012x}"
        self._number = 0
        self._states: dict[str, TopicState] = {}  # the oldest look first
        self._listeners: set[FeedListener] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._problem: Problem | None = None  # while the store is away

    def __len__(self) -> int:
        return len(self._listeners)

    # --- listeners

    def asked(self, text: str, others: Collection[str] = ()) -> list[str]:
        """Return the topics of a request. Raises `Problem`: for a wrong one, and for more than this process serves.
        `others` are the topics that its principal uses already.
        """
        topics = list(dict.fromkeys(text.replace(",", " ").split()))
        for topic in topics:
            if not is_topic(topic):
                known = ", ".join((*TOPICS, f"{INVOCATION}ID"))
                raise wrong("query.topics", f"{topic[:80]!r} is no topic; there are: {known}")
        if not 0 < len(topics) <= MOST_ASKED:
            raise wrong("query.topics", f"topics={text[:80]!r}: give 1 to {MOST_ASKED} topics, with spaces between")
        if len({*others, *topics}) > MOST_OF_ONE:
            raise too_many(f"{MOST_OF_ONE} topics of the live feed of this process are in use by you")
        if len(self._in_use.union(topics)) > MOST_TOPICS:
            raise too_many(f"{MOST_TOPICS} topics of the live feed of this process are in use")
        return topics

    async def follow(self, topics: Sequence[str], last_event_id: str | None = None) -> Batches:
        """Yield what changes: an event `changed` with the names of topics, or `problem` while the store is away."""
        listener, ends_at = FeedListener(topics), asyncio.get_running_loop().time() + self._life_seconds
        known = self._number_in(last_event_id)
        listener.unseen = {topic for topic in topics if topic not in self._states}
        listener.notify(
            [name for name in topics if (state := self._states.get(name)) and (known is None or state.number > known)]
        )
        if self._problem is not None:
            listener.warn(self._problem)
        self._listeners.add(listener)
        try:
            if self._watcher is None or self._watcher.done():
                self._watcher = asyncio.create_task(self._watch())
            while await self._is_notified(listener, ends_at):
                await self._stand_in_line()
                yield [self._event(listener)]
        finally:
            self._listeners.discard(listener)
            if not self._listeners and self._watcher is not None:
                self._watcher.cancel()
                self._watcher = None

    async def _is_notified(self, listener: FeedListener, ends_at: float) -> bool:
        """Wait until there is something to send. Return False when the feed of this listener ends."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(ends_at):
                return await listener.woken.wait()
        return False

    async def _stand_in_line(self) -> None:
        seconds = len(self._listeners) / _FETCHES_PER_SECOND
        if seconds > 1:
            await self._pause(self._rng.uniform(0.5, 1.5) * seconds)

    def _event(self, listener: FeedListener) -> ServerEvent:
        listener.woken.clear()
        if listener.problem is not None:
            return ServerEvent(as_json(listener.problem.document()), name="problem")
        changed, listener.changed = sorted(listener.changed), set()
        return ServerEvent(as_json({"topics": changed}), id=f"{self._name}-{self._number}", name="changed")

    def _number_in(self, last_event_id: str | None) -> int | None:
        """Return the number in the id of an event; None if it is not of this process."""
        name, _, number = (last_event_id or "").partition("-")
        if name != self._name or not (number.isascii() and number.isdigit() and len(number) <= 18):
            return None
        return int(number)

    # --- the watcher

    @property
    def _in_use(self) -> set[str]:
        return {topic for listener in self._listeners for topic in listener.topics}

    async def _watch(self) -> None:
        while self._listeners:
            await self.look()
            await self._pause(LOOK_SECONDS)

    async def look(self) -> None:
        """Ask for the values of the topics in use, and notify the listeners of changes."""
        in_use = sorted(self._in_use)
        try:
            async with asyncio.timeout(LOST_SECONDS):
                found = await self._look(in_use)
        except Exception as error:
            return self._lose(error)
        was_away, self._problem = self._problem is not None, None
        changed = self._compared(found)
        for listener in self._listeners:
            seen, listener.unseen = listener.unseen & found.keys(), listener.unseen - found.keys()
            listener.notify(listener.topics if was_away else changed | seen)

    def _compared(self, found: Mapping[str, Any]) -> set[str]:
        """Remember the values of topics. Return the topics that have changed."""
        changed = set()
        for topic, value in found.items():
            before = self._states.pop(topic, None)
            if before is None or before.value != value:
                self._number += 1
                if before is not None:
                    changed.add(topic)
                before = TopicState(value, self._number)
            self._states[topic] = before
        for topic in [topic for topic in self._states if topic not in found][: max(0, len(self._states) - MOST_TOPICS)]:
            del self._states[topic]
        return changed

    def _lose(self, error: Exception) -> None:
        if self._problem is not None:
            return
        self._problem = problem = problem_of(error) or _away(error)
        if not isinstance(error, HoldfastError | TimeoutError):
            self._telemetry.emit(WebRequestFailed("GET", "the live feed", repr(error), error))
        for listener in self._listeners:
            listener.warn(problem)


def _away(error: Exception) -> Problem:
    if isinstance(error, TimeoutError):
        return Problem(503, "StoreUnavailable", f"the store has not answered for {LOST_SECONDS:g} s")
    return internal_error()
