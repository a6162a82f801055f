"""Is all well? Facts about an app, read at a bounded cost, and the sentence that follows from them.

`judged` is pure: from the facts to signs, the worst first, and from these to one sentence in words.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from holdfast.fleet.services import SERVICE, Executions
from holdfast.fleet.slots import Execution, ExecutionStatus
from holdfast.model.limits import task_of
from holdfast.model.names import counted
from holdfast.model.queues import QueuePause
from holdfast.model.rates import is_rate_key, shown_key
from holdfast.model.records import InvocationRecord
from holdfast.model.status import Status
from holdfast.rates.labels import label_of
from holdfast.runtime.app_runtime import AppRuntime
from holdfast.runtime.queues import Queue, Queues
from holdfast.runtime.runs import WORLD_QUEUE
from holdfast.showing import brief, length
from holdfast.stats import Figures, Stats
from holdfast.stats.api import question, read_stats
from holdfast.store.contract import Filter
from holdfast.web.documents import Document
from holdfast.web.reading.runners import ALIVE, DEAD, DRAINING, Roster

GOOD, NOTE, WARN, BAD = "good", "busy", "warn", "bad"
_WORST_FIRST = (BAD, WARN, NOTE)
MOST_COUNTED = 1000  # calls of a queue
MOST_BLOCKED = 200  # calls that wait for limits, and parked calls
_NAMED = 3
_LONG_WAIT_SECONDS = 120.0
_CYCLES_WITHOUT_SERVICES = 3
_MANY_FAILED, _PART_FAILED, _MOST_FAILED = 10, 0.1, 0.5


class LimitWait(NamedTuple):
    """Calls that wait for a slot of one key: `label` is what they have in common, and `task` is theirs."""

    label: str
    task: str
    calls: int


class HealthFacts(NamedTuple):
    """What health is judged by."""

    now: float
    roster: Roster
    queues: Sequence[Queue] = ()
    blocked: Sequence[LimitWait] = ()  # most calls first
    parked: int = 0
    damaged: int = 0
    hour: Figures = Figures(seconds=3600.0)
    services_at: float | None = None  # when they were last seen to be performed; None: never
    services_every_seconds: float = 60.0
    is_empty: bool = False  # nothing was ever stored


class HealthSign(NamedTuple):
    """A sign of the health of an app: its level, its text, and the page about it."""

    level: str
    text: str
    page: str


class AppHealth(NamedTuple):
    """The judgement: the worst level, one sentence, and what it is made of."""

    level: str
    sentence: str
    signs: Sequence[HealthSign]

    def document(self) -> Document:
        return {"level": self.level, "sentence": self.sentence, "signs": [each._asdict() for each in self.signs]}


# --- the judgement


def judged(facts: HealthFacts) -> AppHealth:
    """Return whether all is well, and what is not."""
    if facts.is_empty and not facts.roster.runners:
        return AppHealth(NOTE, "Nothing is here yet: no runner, and no call.", ())
    found = [*_of_runners(facts), *_of_queues(facts), *_of_calls(facts)]
    signs = sorted(found, key=lambda sign: _WORST_FIRST.index(sign.level))
    troubles = [sign.text for sign in signs if sign.level in (BAD, WARN)]
    notes = [sign.text for sign in signs if sign.level == NOTE]
    if troubles:
        return AppHealth(signs[0].level, _sentence(", ".join([*troubles, *notes])), signs)
    return AppHealth(GOOD, _sentence(": ".join(["all well", ", ".join(notes)]) if notes else "all well"), signs)


def _sentence(text: str) -> str:
    return f"{capital(text)}."


def capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


def _of_runners(facts: HealthFacts) -> Iterator[HealthSign]:
    roster = facts.roster
    states = Counter(roster.state_of(runner) for runner in roster.runners)
    waiting = sum(queue.waiting + queue.blocked for queue in facts.queues if queue.name != WORLD_QUEUE)
    waits = f", and {_calls(waiting)} {_wait(waiting)}" if waiting else ""
    if not states[ALIVE] + states[DRAINING]:
        yield HealthSign(BAD if waiting or states[DEAD] else WARN, f"no runner is alive{waits}", "/runners")
    elif not states[ALIVE]:
        yield HealthSign(BAD if waiting else WARN, f"all runners are draining{waits}", "/runners")
    elif states[DRAINING]:
        yield HealthSign(NOTE, f"{counted(states[DRAINING], 'runner')} draining", "/runners")
    if states[DEAD]:
        longest = length(max(facts.now - each.heartbeat_at for each in roster.runners if roster.state_of(each) == DEAD))
        yield HealthSign(BAD, f"{counted(states[DEAD], 'runner')} silent for {longest}", "/runners")
    workers = [
        each
        for runner in roster.runners
        if roster.state_of(runner) != DEAD
        for each in runner.workers
        if each.unresponsive_since is not None
    ]
    if workers:
        do = "does" if len(workers) == 1 else "do"
        yield HealthSign(BAD, f"{counted(len(workers), 'worker')} {do} not answer", "/runners")
    yield from _of_services(facts, states[ALIVE])


def _of_services(facts: HealthFacts, alive: int) -> Iterator[HealthSign]:
    patience = _CYCLES_WITHOUT_SERVICES * facts.services_every_seconds
    joined = min((runner.started_at for runner in facts.roster.runners), default=facts.now)
    since = max(joined, joined if facts.services_at is None else facts.services_at)
    if alive and facts.now - since > patience:
        text = f"no runner has performed the services for {length(facts.now - since)}"
        yield HealthSign(BAD, text, "/runners")


def _of_queues(facts: HealthFacts) -> Iterator[HealthSign]:
    has_runners = any(facts.roster.state_of(runner) == ALIVE for runner in facts.roster.runners)
    for queue in facts.queues:
        if queue.pause is not None:
            yield HealthSign(WARN, _paused(queue.pause, facts.now), "/queues")
        elif queue.name == WORLD_QUEUE:
            if (queue.oldest_seconds or 0) > _LONG_WAIT_SECONDS:
                runs, waited = _some(queue.waiting, "World run", MOST_COUNTED), length(queue.oldest_seconds or 0)
                yield HealthSign(BAD, f"{runs} {_wait(queue.waiting)} to be delivered, for up to {waited}", "/world")
        elif queue.waiting and not queue.runners and has_runners:
            text = f"{_calls(queue.waiting)} {_wait(queue.waiting)} in {_named(queue.name)}, which no runner serves"
            yield HealthSign(BAD, text, "/queues")
        elif queue.runners and (queue.oldest_seconds or 0) > _LONG_WAIT_SECONDS:
            of = f"the oldest of {_calls(queue.waiting)}" if queue.waiting > 1 else "a call"
            text = f"{of} in {_named(queue.name)} has waited for {length(queue.oldest_seconds or 0)}"
            yield HealthSign(WARN, text, "/queues")


def _of_calls(facts: HealthFacts) -> Iterator[HealthSign]:
    for each in facts.blocked[:_NAMED]:
        text = f"{_calls(each.calls, MOST_BLOCKED)} {_wait(each.calls)} for limit {_named(each.label)}"
        yield HealthSign(NOTE, text, f"/invocations?q=status:{Status.CONCURRENCY_CONTROLLED}")
    if more := sum(each.calls for each in facts.blocked[_NAMED:]):
        text = f"{_calls(more, MOST_BLOCKED)} {_wait(more)} for other limits"
        yield HealthSign(NOTE, text, f"/invocations?q=status:{Status.CONCURRENCY_CONTROLLED}")
    if facts.parked:
        are = "is" if facts.parked == 1 else "are"
        text = f"{_calls(facts.parked, MOST_BLOCKED)} {are} parked"
        yield HealthSign(WARN, text, f"/invocations?q=status:{Status.PARKED}")
    if facts.damaged:
        was = "was" if facts.damaged == 1 else "were"
        text = f"{_some(facts.damaged, 'damaged record', MOST_BLOCKED)} {was} set aside"
        yield HealthSign(WARN, text, "/store")
    hour = facts.hour
    if hour.failed:
        part = hour.failed / max(1, hour.ended)
        many = hour.failed >= _MANY_FAILED and part > _PART_FAILED
        level = BAD if many and part > _MOST_FAILED else WARN if many else NOTE
        text = f"{hour.failed:,} of {counted(hour.ended, 'call')} failed in the last hour"
        yield HealthSign(level, text, "/invocations?q=status:failed+since:1h")


def _paused(pause: QueuePause, now: float) -> str:
    """Say by whom and since when, on the clock of UTC; with the day, if that was not today."""
    at, today = dt.datetime.fromtimestamp(pause.at, dt.UTC), dt.datetime.fromtimestamp(now, dt.UTC)
    since = at.strftime("%H:%M UTC" if at.date() == today.date() else "%d %b %H:%M UTC")
    why = f" ({brief(pause.reason, 60)})" if pause.reason else ""
    return f"queue {_named(pause.name)} is paused by {_named(pause.by)} since {since}{why}"


def _named(name: str) -> str:
    return brief(name, 60)


def _calls(count: int, most: int = MOST_COUNTED) -> str:
    return _some(count, "call", most)


def _some(count: int, what: str, most: int) -> str:
    return f"over {most:,} {what}s" if count > most else counted(count, what)


def _wait(count: int) -> str:
    return "waits" if count == 1 else "wait"


# --- the facts


class HealthReading:
    """Ask for facts, each by a bounded read. Runs on the engine's loop."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime

    async def health(self) -> AppHealth:
        return judged((await self.facts())[0])

    async def facts(self) -> tuple[HealthFacts, Stats]:
        """Return what health is judged by, and the statistics of the last hour."""
        engine = await self._runtime.engine()
        store, app, now = engine.store, engine.app, engine.store.now()
        roster = Roster(await store.roster(app), now, engine.settings.dead_after_seconds)
        queues = await Queues(self._runtime).alist(most=MOST_COUNTED + 1)
        limited = Filter(statuses=frozenset({Status.CONCURRENCY_CONTROLLED}))
        blocked = await store.find(app, limited, MOST_BLOCKED + 1)
        parked = await store.find(app, Filter(statuses=frozenset({Status.PARKED})), MOST_BLOCKED + 1)
        trail = await Executions(store, app, SERVICE, 0).trail(1)
        stats = await read_stats(engine, question(now, "1h"))
        newest = await store.find(app, Filter(), 1)
        damaged = len(await store.quarantined(app, latest=MOST_BLOCKED + 1))
        facts = HealthFacts(
            now=now,
            roster=roster,
            queues=queues,
            blocked=waits_of(blocked, lambda record: label_of(self._runtime, record, record.limit_key or "")),
            parked=len(parked),
            damaged=damaged,
            hour=stats.total,
            services_at=_last_at(trail, now),
            services_every_seconds=engine.settings.slots.interval_seconds,
            is_empty=not (newest or stats.total.ended or damaged or any(queue.pause for queue in queues)),
        )
        return facts, stats


def _last_at(trail: Sequence[Execution], now: float) -> float | None:
    """Return until when the services were performed: an execution may last to the end of its window."""
    if not trail:
        return None
    last = trail[0]
    return min(now, last.window_ends_at) if last.status is ExecutionStatus.RUNNING else last.ended_at or last.started_at


def waits_of(
    records: Iterable[InvocationRecord], label: Callable[[InvocationRecord], str] = lambda _: ""
) -> list[LimitWait]:
    """Group calls that wait for a slot by their key, most calls first. A key is a digest, so a group is named by the
    `label` of a call, or by the attributes that its calls share, if they have any.
    """
    groups: dict[str, list[InvocationRecord]] = {}
    for record in records:
        groups.setdefault(record.limit_key or "", []).append(record)
    found = [
        LimitWait(label(group[0]) or _label(key, group), group[0].task, len(group)) for key, group in groups.items()
    ]
    return sorted(found, key=lambda each: (-each.calls, each.label))


def _label(key: str, group: Sequence[InvocationRecord]) -> str:
    shared = set.intersection(*[set(dict(record.attributes).items()) for record in group])
    if shared and "|" in key.lstrip("|"):
        return ", ".join(f"{name}={value}" for name, value in sorted(shared))
    if is_rate_key(key):
        return shown_key(key)
    _, _, digest = key.partition("|")
    return f"{task_of(key)}|{digest[:8]}" if digest else task_of(key) or "?"
