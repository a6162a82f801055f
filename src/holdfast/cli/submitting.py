"""``holdfast submit`` and ``holdfast wake``: the commands that put work into the queue."""

from __future__ import annotations

import datetime as dt
import json as json_text
from typing import Annotated, Any, NoReturn

import typer

from holdfast.app import App
from holdfast.cli.discovery import find_app, only_app, opened
from holdfast.cli.options import AppOption, AsJson, InvocationId, NameOption, UrlOption
from holdfast.cli.output import Output
from holdfast.cli.shown import described
from holdfast.clock import parse_duration
from holdfast.errors import UnknownTask, UsageError
from holdfast.invocation import Invocation
from holdfast.lifecycle.status import FINAL
from holdfast.task import Submittable


def submit(
    task: Annotated[str, typer.Argument(help="Its name, shop:send_mail, or send_mail if there is only one.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="JSON where it is JSON, else text. Put -- before one with a dash."),
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
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end and print the result.")] = False,
    timeout: Annotated[str | None, typer.Option(metavar="DURATION", help="How long to wait.")] = None,
    json: AsJson = False,
) -> None:
    """Store a call of a task and print its id."""
    with Output(json=json) as out:
        if timeout is not None and not wait:
            raise UsageError("--timeout says how long to --wait; without --wait nothing is waited for")
        patience = None if timeout is None else parse_duration(timeout)
        with find_app(app) if app else only_app(out) as chosen:
            wanted = find_task(chosen, task).options(
                delay=delay, at=None if at is None else _moment(at), priority=priority, queue=queue
            )
            invocation = wanted.submit(*map(parsed, arguments or []), **_keywords(kwargs, keyword or []))
            out.known = {"id": invocation.id, "task": wanted.name}
            if not json:
                out.line(invocation.id)
            if wait:
                _await(out, invocation, patience)
            elif json:
                out.document(out.known)


def wake(
    id: InvocationId, app: AppOption = None, url: UrlOption = None, name: NameOption = None, json: AsJson = False
) -> None:
    """Give a parked invocation another try."""
    with Output(json=json) as out, opened(out, app, url, name) as chosen:
        chosen.invocation(id).wake()
        if json:
            out.document({"id": id, "woken": True})
        else:
            out.line(f"{id} is back in the queue")


def find_task(app: App, name: str) -> Submittable[..., Any]:
    """The task of that name or alias, or the only one whose function is called so. Raises `UnknownTask`."""
    matching = [known for known in app.tasks if known.partition(":")[2] == name]
    if name in app.tasks or not matching:
        return app.get_task(name)
    if len(matching) > 1:
        raise UnknownTask(f"'{name}' may be {' or '.join(sorted(matching))}; write the whole name")
    return app.get_task(matching[0])


def parsed(text: str) -> object:
    """JSON where it is JSON, else the text itself: nobody wants to quote a word twice for the shell."""
    try:
        return json_text.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _keywords(whole: str | None, single: list[str]) -> dict[str, Any]:
    keywords = {} if whole is None else parsed(whole)
    if not isinstance(keywords, dict):
        raise UsageError(f'--kwargs {whole!r} is no JSON object; write it like \'{{"body": "hi"}}\'')
    for pair in single:
        name, sign, text = pair.partition("=")
        if not sign or not name:
            raise UsageError(f"-k {pair!r} is not of the form name=value")
        if name in keywords:
            raise UsageError(f"the keyword argument '{name}' is given twice")
        keywords[name] = parsed(text)
    return keywords


def _moment(text: str) -> dt.datetime:
    try:
        return dt.datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--at {text!r} is no time; write it like 2026-11-15T08:00:00Z") from None


def _await(out: Output, invocation: Invocation[Any], patience: float | None) -> None:
    try:
        result = invocation.result(patience)
    except Exception:
        # What is raised may be any class that user code raised; the record tells that from an error of ours.
        record = invocation.record()
        out.known["status"] = record.status
        if record.status not in FINAL or (record.error is None and not record.reason):
            raise
        error = record.error
        kind, why = (error.type_name, error.message) if error else (record.status.value, record.reason)
        message = f"{record.task} {record.id} is {record.status}: " + (
            f"{kind}: {why}" if error and why else why or kind
        )
        out.fail(kind, message, detail=error.traceback if error else "")
        return
    if out.json:
        out.document(out.known | {"status": "success", "result": result})
    else:
        out.line(described(result))
