"""``holdfast stats``: how much ended, how long it waited and ran, and what failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from typer import Option

from holdfast.app import App
from holdfast.cli.command import command
from holdfast.cli.naming import explain_empty
from holdfast.cli.output import Output
from holdfast.model.names import counted
from holdfast.showing import brief, length, moment
from holdfast.stats import Distribution, Figures, Notable, Stats
from holdfast.web.reading.model import ReadModel

_BARS = "▁▂▃▄▅▆▇█"
_BROADEST = 60
_FEWEST, _MOST = 5, 10


@command()
def stats(
    out: Output,
    app: App,
    since: Annotated[str, Option(metavar="TIME", help="From then: 2026-11-15T08:00:00Z, or 2h ago.")] = "1h",
    until: Annotated[str | None, Option(metavar="TIME", help="Until then: a time, or 2h ago.")] = None,
    task: Annotated[list[str] | None, Option(help="By whole or short name; may be repeated.")] = None,
    queue: Annotated[list[str] | None, Option(help="Only these; may be repeated.")] = None,
    step: Annotated[str | None, Option(metavar="DURATION", help="Between points of the series: 1m, 1h.")] = None,
) -> None:
    """Show throughput, times and failures over a time.

    "wait" is from when a call was due until it began, "run" from there to its end. p95: 95 of 100 took no longer, with
    an error of 3 %. "lost" are attempts whose worker or runner died or stopped.

    Workers store what they count every 10 s, so the last seconds may be missing.
    """
    reading = ReadModel(app.runtime)
    answer = app.runtime.run(reading.stats(since, until, step=step, task=task or (), queue=queue or ()))
    out.document(answer.document())
    if not out.json:
        _print(out, answer.stats)
    if not answer.stats.tasks:
        explain_empty(out, app, task)


def _print(out: Output, found: Stats) -> None:
    total = found.total
    out.line(f"{moment(found.since)} to {moment(found.until)}, in steps of {length(found.step)}")
    if not (total.ended or total.retried or total.lost):
        return out.line("nothing has ended in that time; workers store what they count every 10 s")
    out.line(
        f"{counted(total.ended, 'call')} ended, {_rate(total)}: {total.succeeded} succeeded, {total.failed} failed, "
        f"{total.cancelled} cancelled; attempts: {total.retried} retried, {total.lost} lost"
    )
    out.line(f"ended   {_spark([point.ended for point in found.points])}")
    if total.failed:
        out.line(f"failed  {_spark([point.failed for point in found.points])}")
    titles = ("task", "ended", "failed", "retried", "lost", "wait p50", "p95", "run p50", "p95", "p99")
    rows = [
        (
            *(name, each.ended, each.failed, each.retried, each.lost),
            *(_at(each.wait, 50), _at(each.wait, 95)),
            *(_at(each.run, 50), _at(each.run, 95), _at(each.run, 99)),
        )
        for name, each in found.tasks.items()
    ]
    out.line()
    out.table(titles, rows)
    if found.failures:
        out.line()
        out.table(
            ("failed", "retried", "task", "last", "latest call", "error"),
            [
                (each.count, each.retried, each.task, moment(each.last_at), "".join(each.ids[:1]), brief(each.error))
                for each in found.failures[:_MOST]
            ],
        )
    _print_notable(out, "ran longest", found.slow)
    _print_notable(out, "waited longest", found.delayed)
    _print_notable(out, "most attempts", found.retried, is_time=False)
    if found.deploys:
        out.line()
        rows_of_deploys = [(moment(each.at), each.release, each.host) for each in found.deploys[-_MOST:]]
        out.table(("deploy", "release", "host"), rows_of_deploys)


def _print_notable(out: Output, title: str, found: Sequence[Notable], *, is_time: bool = True) -> None:
    if found:
        out.line()
        rows = [
            (each.id, each.task, _shown(each.value) if is_time else f"{each.value:g}", moment(each.at))
            for each in found[:_FEWEST]
        ]
        out.table((title, "task", "", "at"), rows)


def _rate(figures: Figures) -> str:
    rate = figures.per_second
    return f"{rate:,.1f} per second" if rate >= 1 else f"{rate * 60:,.1f} per minute"


def _spark(values: Sequence[int]) -> str:
    """Return bars, the last one of now; neighbours are added where there are more than fit."""
    each = -(-len(values) // _BROADEST)
    sums = [sum(values[max(0, end - each) : end]) for end in range(len(values), 0, -each)][::-1]
    highest = max(sums, default=0)
    bars = "".join(" " if not value else _BARS[(len(_BARS) - 1) * value // highest] for value in sums)
    return f"{bars}  at most {highest}"


def _at(times: Distribution, percent: float) -> str:
    seconds = times.percentile(percent)
    return "" if seconds is None else _shown(seconds)


def _shown(seconds: float) -> str:
    if seconds >= 60:
        return length(seconds)
    return f"{seconds:.1f}s" if seconds >= 1 else f"{seconds * 1000:.{1 if seconds < 0.01 else 0}f}ms"
