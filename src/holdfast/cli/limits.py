"""The commands about limits and rates: ``limits`` with ``list``, ``show``, ``set`` and ``clear``."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from holdfast.app import App
from holdfast.cli import reach
from holdfast.cli.command import command
from holdfast.cli.output import Output
from holdfast.model.rates import LimitChange, shown_key
from holdfast.showing import length
from holdfast.web.reading.queues import LimitList, QueueReading, allowance_document, change_document

LimitName = Annotated[str, Argument(metavar="NAME", help="The task, or the name that tasks share for a rate.")]


@command()
def limits(out: Output, app: App) -> None:
    """List limits and rates with what waits for them, or change one.

    "keys waiting" counts the keys for which calls wait outside the queue: customers, say. "held" counts their slots.
    """
    found, now = app.limits.list(), reach.time_of(app)
    out.document(LimitList(found).document())
    rows = [
        (
            each.name,
            _both(each.limit, each.declared_limit),
            _both(each.rate, each.declared_rate),
            "" if each.burst is None else each.burst,
            each.waiting_keys,
            each.held,
            "" if each.change is None else _in_words(each.change, now),
        )
        for each in found
    ]
    titles = ("name", "limit", "rate", "burst", "keys waiting", "held", "changed")
    out.table(titles, rows, empty="no limits: no task declares a limit or a rate, and none was changed")


@command()
def show(
    out: Output,
    app: App,
    task: LimitName,
    limit: Annotated[int, Option(help="The keys to show at most.", min=1)] = 50,
) -> None:
    """Show the keys of a limit or rate.

    Of a rate: starts left, the next one, and the last calls that took one. Of a limit: keys for which calls wait, with
    the calls that hold the slots.
    """
    task = app.limits.whole_name(task)
    found, now = app.limits.allowances(task, limit=limit), reach.time_of(app)
    held = app.runtime.run(QueueReading(app.runtime).keys(task))
    if not found and not held:
        app.limits.refuse_unknown(task)
    waiting = [each.document() for each in held]
    out.document({"name": task, "keys": [allowance_document(each) for each in found], "waiting": waiting})
    if held:
        slots = [(each.label or shown_key(each.key), each.held, ", ".join(r.id for r in each.holders)) for each in held]
        out.table(("key", "held", "by"), slots)
    rows = [
        (
            each.label or shown_key(each.key),
            each.rate,
            each.left,
            "now" if each.next_at <= now else f"in {length(each.next_at - now)}",
            "yes" if each.waiting else "",
            each.taken,
            ", ".join(f"{id} {length(max(0.0, now - at))} ago" for id, at in each.last[:1]),
        )
        for each in found
    ]
    titles = ("key", "rate", "left", "next start", "waiting", "taken", "last")
    if rows or not held:
        empty = f"no call waits for a slot of '{task}', and none has taken a start under its rate in the last hour"
        out.table(titles, rows, empty=empty)


@command(action="limit.set", target="task")
def set_limit(
    out: Output,
    app: App,
    task: LimitName,
    limit: Annotated[int | None, Option(help="How many calls run at once.", min=1)] = None,
    rate: Annotated[str | None, Option(help='How many calls start in a time, such as "100/m".')] = None,
    burst: Annotated[int | None, Option(help="How many of them at once.", min=1)] = None,
    reason: Annotated[str, Option(help="The reason; stored with the change.")] = "",
    by: Annotated[str | None, Option(help="The user; else this user and host.")] = None,
) -> None:
    """Change a limit or a rate until it is cleared, over deploys.

    All runners follow within 2 seconds. Running calls go on, and count.
    """
    task = app.limits.whole_name(task)
    done = app.limits.set(task, limit=limit, rate=rate, burst=burst, reason=reason, by=by)
    out.document({"name": task, "change": change_document(done)})
    out.line(f"'{task}' is changed: {_what(done)}; to go back to the code: holdfast limits clear {task}")


@command(action="limit.clear", target="task")
def clear(out: Output, app: App, task: LimitName) -> None:
    """End the change of a limit or rate: what the code declares holds again."""
    task = app.limits.whole_name(task)
    ended = app.limits.clear(task)
    out.document({"name": task, "changed": ended})
    names = ", ".join(each.name for each in app.limits.list() if each.change is not None)
    others = f"; changed are: {names}" if names else ""
    out.line(f"'{task}' is as the code declares it" if ended else f"'{task}' was not changed{others}")


def _both(value: object, declared: object) -> str:
    if value is None:
        return ""
    return f"{value}" if value == declared or declared is None else f"{value} (code: {declared})"


def _what(change: LimitChange) -> str:
    parts = (("limit", change.limit), ("rate", change.rate), ("burst", change.burst))
    return ", ".join(f"{name} {value}" for name, value in parts if value is not None)


def _in_words(change: LimitChange, now: float) -> str:
    why = f": {change.reason}" if change.reason else ""
    return f"{length(max(0.0, now - change.at))} ago by {change.by}{why}"
