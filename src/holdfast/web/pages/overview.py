"""The overview: whether all is well, in a sentence whose parts are links; then what is going on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.runtime.queues import Queue
from holdfast.showing import brief
from holdfast.stats import Figures, Stats
from holdfast.stats.api import FailureGroup
from holdfast.web.pages.charts import Drawn, Series, lines, time
from holdfast.web.pages.page import Context, WebPage
from holdfast.web.problems import about
from holdfast.web.reading.health import GOOD, MOST_COUNTED, AppHealth, HealthSign, capital, judged
from holdfast.web.requests import Parameter
from holdfast.web.routing import Asked

_SPANS = ("1h", "6h", "24h", "7d")
_QUEUES = 20
_GROUPS = 10


class HealedTask(NamedTuple):
    """A task whose attempts were lost with their worker or runner, and taken up again."""

    name: str
    lost: int


async def overview(asked: Asked) -> Callable[[], Context]:
    since = asked.query["since"]
    facts, hour = await asked.runtime.arun(asked.reading.health.facts())
    health, stats = judged(facts), hour
    if since != "1h":
        with about("query.since"):
            stats = (await asked.runtime.arun(asked.reading.stats(since))).stats
    return lambda: {
        "health": health,
        "told": linked(health),
        "is_empty": facts.is_empty and not facts.roster.runners,
        "stats": stats,
        "since": since,
        "spans": _SPANS,
        "rates": draw_rates(stats),
        "latency": draw_latency(stats),
        "queues": busiest_first(facts.queues)[:_QUEUES],
        "more_queues": max(0, len(facts.queues) - _QUEUES),
        "waiting": sum(queue.waiting for queue in facts.queues),
        "running": sum(queue.running for queue in facts.queues),
        "most": MOST_COUNTED,
        "failures": [(group, search_of(group, since)) for group in stats.failures[:_GROUPS]],
        "more_failures": max(0, len(stats.failures) - _GROUPS),
        "healed": healed_in(hour),
        "lost": hour.total.lost,
        "quoted": quoted,
    }


def linked(health: AppHealth) -> list[tuple[str, HealthSign]]:
    """Return the parts of the sentence in its order: what stands before each, and the sign that it links to."""
    if not health.signs:
        return []
    first, *others = health.signs
    if health.level == GOOD:
        return [("All well: ", first), *((", ", each) for each in others)]
    return [("", first._replace(text=capital(first.text))), *((", ", each) for each in others)]


def busiest_first(queues: Sequence[Queue]) -> list[Queue]:
    """Return paused queues, then those with most waiting calls."""
    return sorted(queues, key=lambda queue: (queue.pause is None, -queue.waiting, -queue.running, queue.name))


def search_of(group: FailureGroup, since: str) -> str:
    """Return the search that finds the calls of a group: by the class of the error, which is a part of its name."""
    kind = group.error.partition(": ")[0].rpartition(":")[2]
    return f"task:{quoted(group.task)} status:failed since:{since} error:{quoted(brief(kind, 80))}"


def quoted(word: str) -> str:
    """Return a word as a search has it."""
    if word and not any(character.isspace() or character in "\"'\\" for character in word):
        return word
    text = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def healed_in(stats: Stats) -> list[HealedTask]:
    found = [HealedTask(name, each.lost) for name, each in stats.tasks.items() if each.lost]
    return sorted(found, key=lambda each: (-each.lost, each.name))


def draw_rates(stats: Stats) -> Drawn:
    def per_second(name: str) -> list[float | None]:
        return [getattr(point, name) / point.seconds if point.seconds else None for point in stats.points]

    series = [
        Series("succeeded per second", per_second("succeeded"), "c3"),
        Series("failed per second", per_second("failed"), "c2"),
    ]
    return _drawn("calls that ended, per second", stats, series)


def draw_latency(stats: Stats) -> Drawn:
    def percentile(part: str, percent: int) -> list[float | None]:
        return [_times(point, part, percent) for point in stats.points]

    series = [
        Series("running: p50", percentile("run", 50), "c1"),
        Series("running: p95", percentile("run", 95), "c4"),
        Series("waiting: p95", percentile("wait", 95), "c2"),
    ]
    return _drawn("how long calls ran and waited, in seconds", stats, series, time)


def _times(figures: Figures, part: str, percent: int) -> float | None:
    found: float | None = getattr(figures, part).percentile(percent)
    return found


def _drawn(label: str, stats: Stats, series: Sequence[Series], said: Callable[[float], str] | None = None) -> Drawn:
    deploys = [(each.at, f"deploy of {each.release}") for each in stats.deploys]
    return lines(label, [point.at for point in stats.points], stats.until, series, deploys, said)


PAGES = (
    WebPage(
        "/",
        "Overview",
        "overview.html",
        overview,
        {"since": Parameter("over which time", default="1h", choices=_SPANS)},
        nav="overview",
        topics=("invocations", "runners", "queues", "stats", "store"),
    ),
)
