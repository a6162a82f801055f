"""Work that a runner has claimed ahead and not begun: PENDING, or RUNNING if it begins in a moment.

Where a claim costs several round trips, taking work for ten places ten times over in one go is worth it. But nobody
else can run what lies here, so the reserve holds only as much as is expected to start within a second, judged by how
long calls have taken so far, and gives back what lay too long.
"""

from __future__ import annotations

from collections import deque

from holdfast.lifecycle.records import InvocationRecord

AHEAD_SECONDS = 1.0
AT_ONCE_SECONDS = 0.1
MOST_TIMES = 10  # as many times the places of the runner
KEEP_SECONDS = 2.5  # half of the time after which a claim that does not start counts as lost
_WEIGHT = 0.2  # of the newest call in the average
_MEMORY_SECONDS = 60.0  # a task that has not been seen for so long says nothing about the next claim


class Reserve:
    def __init__(self, places: int) -> None:
        self._places = places
        self._waiting: deque[tuple[float, InvocationRecord]] = deque()
        self._averages: dict[str, tuple[float, float]] = {}  # of each task: seconds, and when it last ended

    def __len__(self) -> int:
        return len(self._waiting)

    def learn(self, task: str, seconds: float, now: float) -> None:
        """A call of this task took so long, from its start to its outcome."""
        before, _ = self._averages.get(task, (seconds, now))
        self._averages[task] = (before + _WEIGHT * (seconds - before), now)

    def _slowest(self, now: float) -> float | None:
        """The average of the slowest task of late: the next claim may bring nothing but calls of that one."""
        for task, (_, ended) in tuple(self._averages.items()):
            if now - ended > _MEMORY_SECONDS:
                del self._averages[task]
        return max((average for average, _ in self._averages.values()), default=None)

    def room(self, now: float) -> int:
        """How many more may be claimed ahead. None before the first call has ended: nothing is known yet."""
        slowest = self._slowest(now)
        if slowest is None:
            return 0
        soon = self._places * AHEAD_SECONDS / max(slowest, 0.001)
        capacity = min(int(soon), self._places * MOST_TIMES)
        room = capacity - len(self._waiting)
        return room if room > self._places and room * 2 >= capacity else 0  # less would not be worth the round trips

    def begins_at_once(self, count: int, now: float) -> bool:
        """Whether so many calls are short enough to be marked as RUNNING before their place is free.

        The last of them waits for less than the blink of an eye, and its start needs no write of its own.
        """
        slowest = self._slowest(now)
        return slowest is not None and (len(self._waiting) + count) * slowest / self._places < AT_ONCE_SECONDS

    def ids(self) -> set[str]:
        return {record.id for _, record in self._waiting}

    def add(self, records: tuple[InvocationRecord, ...], now: float) -> None:
        self._waiting.extend((now, record) for record in records)

    def take(self, count: int) -> list[InvocationRecord]:
        """The oldest ones, to be started."""
        return [self._waiting.popleft()[1] for _ in range(min(count, len(self._waiting)))]

    def remove(self, id: str) -> bool:
        """Take it out, if it is here."""
        before = len(self._waiting)
        self._waiting = deque(item for item in self._waiting if item[1].id != id)
        return len(self._waiting) < before

    def of_queues(self, queues: frozenset[str]) -> list[InvocationRecord]:
        """What lies in these queues, to be given back."""
        taken = [record for _, record in self._waiting if record.queue in queues]
        if taken:
            self._waiting = deque(item for item in self._waiting if item[1].queue not in queues)
        return taken

    def stale(self, now: float) -> list[InvocationRecord]:
        """What lay too long, to be given back.

        The guess was wrong, so nothing of the like is claimed ahead until calls prove it.
        """
        taken = []
        while self._waiting and now - self._waiting[0][0] >= KEEP_SECONDS:
            taken.append(self._waiting.popleft()[1])
        for record in taken:
            average, _ = self._averages.get(record.task, (0.0, now))
            self._averages[record.task] = (max(average, KEEP_SECONDS), now)
        return taken

    def patience(self, now: float) -> float | None:
        """Seconds until something has lain too long."""
        return max(0.0, self._waiting[0][0] + KEEP_SECONDS - now) if self._waiting else None
