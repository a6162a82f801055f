"""``holdfast submit`` and ``holdfast wake``: the commands that put work into the queue."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.app import App
from holdfast.cli.arguments import arguments as arguments_of
from holdfast.cli.arguments import words
from holdfast.cli.choosing import app_for_work, looked_at
from holdfast.cli.naming import find_id, find_task
from holdfast.cli.options import AppOption, AsJson, InvocationId, NameOption, UrlOption, time_given
from holdfast.cli.output import Output
from holdfast.cli.reach import awaited, stored_now
from holdfast.clock import parse_duration
from holdfast.errors import UsageError
from holdfast.invocation import Invocation
from holdfast.lifecycle.status import FINAL

EXPLAIN_AFTER_SECONDS = 3.0  # of waiting for something that nobody has begun with


def submit(
    task: Annotated[str, typer.Argument(help="Its name, shop:send_mail, or send_mail if there is only one.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ARGS", help="What the task's annotations say; else JSON, else text. Put -- before one with a dash."
        ),
    ] = None,
    app: AppOption = None,
    kwargs: Annotated[str | None, typer.Option(metavar="JSON", help="Keyword arguments as a JSON object.")] = None,
    keyword: Annotated[
        list[str] | None, typer.Option("-k", metavar="NAME=JSON", help="One keyword argument; may be repeated.")
    ] = None,
    delay: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Not before this has passed: 5m, 1h30m.")
    ] = None,
    at: Annotated[str | None, typer.Option(metavar="TIME", help="Not before then: 2026-11-15T08:00:00Z.")] = None,
    priority: Annotated[int | None, typer.Option(help="From -100 to 100; higher goes first.")] = None,
    queue: Annotated[str | None, typer.Option(help="Another queue than the task's own.")] = None,
    key: Annotated[
        str | None, typer.Option(help="One key, one call: what was submitted with it before is not stored again.")
    ] = None,
    key_for: Annotated[
        str | None, typer.Option(metavar="DURATION", help="How long after its end the key is taken: 7d.")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="DURATION", help="It fails if nobody has started it by then: 1h.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end and print only the result.")] = False,
    timeout: Annotated[str | None, typer.Option(metavar="DURATION", help="How long to wait.")] = None,
    json: AsJson = False,
) -> None:
    """Store a call of a task and print its id.

    With --wait the result is printed instead: text as it is, anything else as JSON; the id goes to stderr. A call
    that was there already (see --key) is not stored again, and that is said.
    """
    with Output(json=json) as out:
        if timeout is not None and not wait:
            raise UsageError("--timeout says how long to --wait; without --wait nothing is waited for")
        patience = None if timeout is None else parse_duration(timeout)
        given = words(arguments or [], kwargs, keyword or [])
        with app_for_work(out, app, task) as chosen:
            wanted = find_task(chosen, task).options(
                delay=delay,
                at=None if at is None else time_given(at, "--at"),
                priority=priority,
                queue=queue,
                key=key,
                key_for=key_for,
                expires=expires,
            )
            args, keywords = arguments_of(wanted.definition, given)
            invocation = wanted.submit(*args, **keywords)
            is_new = stored_now(invocation)
            out.known = {"id": invocation.id, "task": wanted.name, "new": is_new}
            if wait or not is_new:
                out.aside(f"submitted {invocation.id}" if is_new else f"{invocation.id} was there already")
            if wait:
                _await(out, chosen, invocation, patience)
            elif json:
                out.document(out.known)
            else:
                out.line(invocation.id)


def wake(
    id: InvocationId, app: AppOption = None, url: UrlOption = None, name: NameOption = None, json: AsJson = False
) -> None:
    """Give a parked invocation another try."""
    with Output(json=json) as out, looked_at(out, app, url, name) as chosen:
        id = find_id(chosen, id)
        chosen.invocation(id).wake()
        if json:
            out.document({"id": id, "woken": True})
        else:
            out.line(f"{id} is back in the queue")


def _await(out: Output, app: App, invocation: Invocation[Any], patience: float | None) -> None:
    try:
        result = awaited(app, invocation, patience, explain_after_seconds=EXPLAIN_AFTER_SECONDS, explain=out.note)
    except Exception:
        # What is raised may be any class that user code raised; the record tells that from an error of ours.
        record = invocation.record()
        out.known["status"] = record.status
        if record.status not in FINAL or (record.error is None and not record.reason):
            raise
        error = record.error
        kind, why = (error.type_name, error.message) if error else (record.status.value, record.reason)
        message = f"{record.task} {record.id} ({record.status}): {error or why or kind}"
        out.fail(kind, message, detail=error.traceback if error else "")
    if out.json:
        out.document(out.known | {"status": "success", "result": result})
    else:
        out.value(result)
