"""The commands about queues: ``queues`` with ``pause`` and ``resume``."""

from __future__ import annotations

import difflib
from typing import Annotated

from typer import Argument, Option

from holdfast.app import App
from holdfast.cli import reach
from holdfast.cli.command import command
from holdfast.cli.output import Output
from holdfast.model.queues import QueuePause
from holdfast.showing import length
from holdfast.web.reading.queues import QueueList, pause_document

QueueName = Annotated[str, Argument(metavar="NAME", help="The queue.")]


@command()
def queues(out: Output, app: App) -> None:
    """List the queues with their calls; or pause or resume one.

    Calls wait, are scheduled for later, are blocked by a limit, or run.

    "oldest" is how long the first waiting call has been due. "per minute" counts the attempts that ended over the last
    5 minutes, on the runners that are alive.
    """
    found, now = app.queues.list(), reach.time_of(app)
    out.document(QueueList(found).document())
    titles = ("queue", "waiting", "scheduled", "blocked", "running", "oldest", "per minute", "runners", "paused")
    rows = [
        (
            *(each.name, each.waiting, each.scheduled, each.blocked, each.running),
            "" if each.oldest_seconds is None else length(each.oldest_seconds),
            f"{each.per_minute:g}",
            each.runners,
            "" if each.pause is None else _pause_in_words(each.pause, now),
        )
        for each in found
    ]
    out.table(titles, rows, empty="no queues: nothing is stored, and no task is declared")


@command(action="queue.pause", target="queue")
def pause(
    out: Output,
    app: App,
    queue: QueueName,
    reason: Annotated[str, Option(help="The reason; stored with the pause.")] = "",
    by: Annotated[str | None, Option(help="The user; else this user and host.")] = None,
) -> None:
    """Let no runner take work from a queue until it is resumed.

    All runners know of it within seconds. Running calls go on; submitted calls wait.
    """
    known = {each.name: each.pause for each in app.queues.list()}
    done = app.queues.pause(queue, reason=reason, by=by)
    if queue not in known:
        near = difflib.get_close_matches(queue, known, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        out.note(f"no call is in the queue '{queue}', and no task or runner names it{hint}")
    changed = known.get(queue) is None
    out.document({"queue": queue, "paused": True, "changed": changed, "pause": pause_document(done)})
    if changed:
        out.line(f"the queue '{queue}' is paused; to let it go on: holdfast queues resume {queue}")
    else:
        out.line(f"the queue '{queue}' was paused already: {_pause_in_words(done, reach.time_of(app))}")


@command(action="queue.resume", target="queue")
def resume(out: Output, app: App, queue: QueueName) -> None:
    """End the pause of a queue."""
    ended = app.queues.resume(queue)
    out.document({"queue": queue, "paused": False, "changed": ended})
    names = ", ".join(each.name for each in app.queues.list() if each.pause is not None)
    others = f"; paused are: {names}" if names else ""
    out.line(f"the queue '{queue}' {'is resumed' if ended else f'was not paused{others}'}")


def _pause_in_words(pause: QueuePause, now: float) -> str:
    why = f": {pause.reason}" if pause.reason else ""
    return f"for {length(max(0.0, now - pause.at))} by {pause.by}{why}"
