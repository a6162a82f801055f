"""``holdfast submit``: store a call of a task, and wait for its result if that is wanted."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Annotated, Any

from typer import Argument, Option

from holdfast.app import App
from holdfast.cli.arguments import CallWords
from holdfast.cli.command import Needs, command, time_given
from holdfast.cli.naming import attributes_of, find_task
from holdfast.cli.output import Output
from holdfast.clock import parse_duration
from holdfast.errors import HoldfastError, UsageError
from holdfast.invocation import Invocation
from holdfast.model.status import FINAL, OWNED

EXPLAIN_AFTER_SECONDS = 3.0  # of waiting for an invocation that was not started


@dataclasses.dataclass
class CallFlags:
    """The options of one call, as `Task.options` takes them."""

    delay: Annotated[str | None, Option(metavar="DURATION", help="Not before this has passed: 5m, 1h30m.")] = None
    at: Annotated[str | None, Option(metavar="TIME", help="Not before then: 2026-11-15T08:00:00Z.")] = None
    priority: Annotated[int | None, Option(help="From -100 to 100; higher goes first.")] = None
    queue: Annotated[str | None, Option(help="Another queue than the task's own.")] = None
    key: Annotated[str | None, Option(help="One key, one call: it is not stored a second time.")] = None
    key_for: Annotated[str | None, Option(metavar="DURATION", help="How long after its end the key is taken.")] = None
    expires: Annotated[str | None, Option(metavar="DURATION", help="It fails if not started by then: 1h.")] = None
    retries: Annotated[int | None, Option(help="How many more attempts after the first, instead of the task's.")] = None
    retention: Annotated[
        str | None, Option(metavar="DURATION", help="How long it is kept after its end: 30d; or forever.")
    ] = None
    attribute: Annotated[
        list[str] | None, Option(metavar="NAME=VALUE", help="To find it by: see ps --attribute; may be repeated.")
    ] = None

    def given(self) -> dict[str, Any]:
        given = vars(self) | {"at": None if self.at is None else time_given(self.at, "--at")}
        return given | {"attributes": attributes_of(given.pop("attribute") or ()) or None}


@command(Needs.TASKS, action="invocation.submit", target="task")
def submit(
    out: Output,
    app: App,
    task: Annotated[str, Argument(help="Its name, shop:send_mail, or send_mail if there is only one.")],
    words: CallWords,
    options: CallFlags,
    wait: Annotated[bool, Option("--wait", help="Wait for the end and print only the result.")] = False,
    timeout: Annotated[str | None, Option(metavar="DURATION", help="How long to wait.")] = None,
) -> None:
    """Store a call of a task and print its id.

    With --wait the result is printed instead: text as it is, anything else as JSON; the id goes to stderr. A call
    that was there already (see --key) is not stored again, and that is said.
    """
    if timeout is not None and not wait:
        raise UsageError("--timeout says how long to --wait; without --wait nothing is waited for")
    patience = None if timeout is None else parse_duration(timeout)
    wanted = find_task(app, task).options(**options.given())
    args, keywords = words.values(wanted.definition)
    invocation = wanted.submit(*args, **keywords)
    is_new = invocation.is_fresh
    out.known = {"id": invocation.id, "task": wanted.name, "new": is_new}
    out.did(invocation.id)
    if wait or not is_new:
        out.aside(f"submitted {invocation.id}" if is_new else f"{invocation.id} was there already")
    if wait:
        return _await(out, invocation, patience)
    out.document(out.known)
    out.line(invocation.id)


def wait_for_result(invocation: Invocation[Any], patience: float | None, explain: Callable[[str], None]) -> object:
    """Wait for the result. If it has not been started after a while, call `explain` once with what it waits for."""

    def look() -> None:
        with contextlib.suppress(HoldfastError):  # the wait itself will raise it
            if invocation.status not in OWNED | FINAL:
                explain(invocation.explain())

    timer = threading.Timer(EXPLAIN_AFTER_SECONDS, look)
    timer.daemon = True
    timer.start()
    try:
        return invocation.result(patience)
    finally:
        timer.cancel()
        timer.join()


def _await(out: Output, invocation: Invocation[Any], patience: float | None) -> None:
    try:
        result = wait_for_result(invocation, patience, out.note)
    except Exception:
        # User code may raise any class; the record distinguishes its errors from our own.
        record = invocation.record()
        out.known["status"] = record.status
        if record.status not in FINAL or (record.error is None and not record.reason):
            raise
        error = record.error
        kind, why = (error.type_name, error.message) if error else (record.status.value, record.reason)
        message = f"{record.task} {record.id} ({record.status}): {error or why or kind}"
        out.fail(kind, message, detail=error.traceback if error else "")
    out.document(out.known | {"status": "success", "result": result})
    out.value(result)
