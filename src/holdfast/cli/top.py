"""``holdfast top``: runners, queues, rates and failures as they are now."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from holdfast.app import App
from holdfast.cli import live
from holdfast.cli.command import command
from holdfast.cli.output import Output
from holdfast.model.names import counted
from holdfast.showing import at_least, brief, length, moment
from holdfast.stats import Distribution
from holdfast.web.reading.load import SINCE, Load, LoadReading
from holdfast.web.reading.queues import MOST_COUNTED

_MOST_CALLS = 20


@command()
def top(
    out: Output,
    app: App,
    once: Annotated[
        bool, Option("--once", help="Print it once; so it is without a terminal, and with --json.")
    ] = False,
) -> None:
    """Show runners, queues, rates and failures, live.

    It is drawn again every 2 s until Ctrl-C. Rates and failures are of the last 5 minutes; workers store what they
    count every 10 s. It reads running and waiting calls, and never ended calls. A number of a queue over 1,000 is a
    lower bound.
    """
    reading = LoadReading(app.runtime)

    def draw() -> None:
        load = reading.load()
        out.document(load.document())
        if not out.json:
            _print(out, app, load)

    live.repeated(out, draw, watch=out.is_terminal and not once and not out.json)


def _print(out: Output, app: App, load: Load) -> None:
    busy, places = sum(each.running for each in load.alive), sum(each.runner.capacity for each in load.alive)
    total = load.stats.total
    out.line(f"{app.name}, {moment(load.at)}")
    out.line(f"{counted(len(load.alive), 'runner')} alive, {busy} of {counted(places, 'slot')} busy")
    out.line(
        f"last {SINCE}: {total.ended:,} ended ({total.per_second:,.1f} per second), {total.failed:,} failed, "
        f"{total.retried:,} retried, {total.lost:,} lost"
    )
    out.line(f"95 of 100 waited for {_p95(total.wait)} or less, and ran for {_p95(total.run)} or less")
    out.line()
    rows = [
        (
            *(each.runner.id, each.state, f"{each.running} of {each.runner.capacity}"),
            f"{length(max(0.0, load.at - each.runner.heartbeat_at))} ago",
            f"{each.runner.host}: " + ", ".join(f"{worker.id}={worker.running}" for worker in each.runner.workers),
        )
        for each in load.runners
    ]
    out.table(("runner", "state", "running", "heartbeat", "workers"), rows, empty="no runners; start one: holdfast run")
    out.line()
    _print_calls(out, load)
    out.table(
        ("queue", "waiting", "oldest", "scheduled", "blocked", "running", "per minute", "paused"),
        [
            (
                *(
                    each.name,
                    at_least(each.waiting, MOST_COUNTED),
                    "" if each.oldest_seconds is None else length(each.oldest_seconds),
                ),
                *(at_least(number, MOST_COUNTED) for number in (each.scheduled, each.blocked, each.running)),
                f"{each.per_minute:g}",
                "" if each.pause is None else f"by {each.pause.by}",
            )
            for each in load.queues
        ],
        empty="no queues: nothing is stored, and no task is declared",
    )
    if load.stats.failures:
        out.line()
        failures = [
            (each.count, each.retried, each.task, f"{length(max(0.0, load.at - each.last_at))} ago", brief(each.error))
            for each in load.stats.failures[:5]
        ]
        out.table(("failed", "retried", "task", "last", "error"), failures)


def _print_calls(out: Output, load: Load) -> None:
    """Print what each worker runs, longest first."""
    calls = sorted((call for each in load.runners for call in each.calls), key=lambda call: call.changed_at)
    if calls:
        rows = [
            (
                call.id,
                call.task,
                length(max(0.0, load.at - call.changed_at)),
                call.owner,
                live.progress_text(call, load.at),
            )
            for call in calls[:_MOST_CALLS]
        ]
        out.table(("running", "task", "for", "worker", "progress"), rows)
        if len(calls) > _MOST_CALLS:
            out.line(f"and {len(calls) - _MOST_CALLS} more")
        out.line()


def _p95(times: Distribution) -> str:
    seconds = times.percentile(95)
    return "–" if seconds is None else length(seconds)
