"""The commands about queues: ``queues`` with ``pause`` and ``resume``."""

from __future__ import annotations

import difflib
from typing import Annotated, Any

import msgspec
import typer

from holdfast.app import App
from holdfast.cli.choosing import looked_at, subcommand
from holdfast.cli.options import AppOption, AsJson, NameOption, UrlOption
from holdfast.cli.output import Output
from holdfast.cli.reach import time_of
from holdfast.cli.shown import length, moment
from holdfast.lifecycle.queues import QueuePause
from holdfast.queues import Queue

_TITLES = ("queue", "waiting", "scheduled", "blocked", "running", "oldest", "per minute", "runners", "paused")
QueueName = Annotated[str, typer.Argument(metavar="NAME", help="The queue.")]


def queues(
    context: typer.Context,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """List the queues: what waits, is scheduled for later, is blocked by a limit and runs; or pause or resume one.

    "oldest" is for how long the first of those that wait has been due. "per minute" is how many calls have ended over
    the last 5 minutes, retried ones included, as the runners that are alive have counted them.
    """
    if context.invoked_subcommand is not None:
        return
    with Output(json=json) as out, looked_at(out, app, url, name) as chosen:
        found = chosen.queues.list()
        if json:
            return out.document({"queues": [_facts(queue) for queue in found]})
        now = time_of(chosen)
        rows = [
            (
                queue.name,
                queue.waiting,
                queue.scheduled,
                queue.blocked,
                queue.running,
                "" if queue.oldest_seconds is None else length(queue.oldest_seconds),
                f"{queue.per_minute:g}",
                queue.runners,
                "" if queue.pause is None else _told(queue.pause, now),
            )
            for queue in found
        ]
        out.table(_TITLES, rows, empty="no queues: nothing is stored, and no task is declared")


def pause(
    context: typer.Context,
    queue: QueueName,
    reason: Annotated[str, typer.Option(help="Why, for whoever asks.")] = "",
    by: Annotated[str | None, typer.Option(help="Who; else this user and host.")] = None,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """Let no runner take work from a queue until it is resumed.

    All runners know of it within seconds. What runs goes on; what is submitted waits.
    """
    with subcommand(context, app, url, name, json) as (out, chosen):
        known = chosen.queues.list()
        before = next((one.pause for one in known if one.name == queue), None)
        done = chosen.queues.pause(queue, reason=reason, by=by)
        if before is None and queue not in {one.name for one in known}:
            out.note(_unused(queue, [one.name for one in known]))
        if out.json:
            return out.document(
                {"queue": queue, "paused": True, "changed": before is None, "pause": _pause_facts(done)}
            )
        if before is not None:
            return out.line(f"the queue '{queue}' was paused already: {_told(done, time_of(chosen))}")
        out.line(f"the queue '{queue}' is paused; to let it go on: holdfast queues resume {queue}")


def resume(
    context: typer.Context,
    queue: QueueName,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """End the pause of a queue."""
    with subcommand(context, app, url, name, json) as (out, chosen):
        ended = chosen.queues.resume(queue)
        if out.json:
            return out.document({"queue": queue, "paused": False, "changed": ended})
        out.line(f"the queue '{queue}' {'is resumed' if ended else f'was not paused{_paused_ones(chosen)}'}")


def _unused(queue: str, known: list[str]) -> str:
    near = difflib.get_close_matches(queue, known, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return f"nobody uses a queue '{queue}' yet: nothing lies in it, and no task or runner names it{hint}"


def _paused_ones(app: App) -> str:
    names = [queue.name for queue in app.queues.list() if queue.pause is not None]
    return f"; those that are: {', '.join(names)}" if names else ""


def _told(pause: QueuePause, now: float) -> str:
    why = f": {pause.reason}" if pause.reason else ""
    return f"for {length(max(0.0, now - pause.at))} by {pause.by}{why}"


def _facts(queue: Queue) -> dict[str, Any]:
    return msgspec.structs.asdict(queue) | {"pause": queue.pause and _pause_facts(queue.pause)}


def _pause_facts(pause: QueuePause) -> dict[str, Any]:
    return {"since": moment(pause.at), "by": pause.by, "reason": pause.reason}
