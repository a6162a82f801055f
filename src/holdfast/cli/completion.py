"""Values for the completion of a shell: tasks, queues, statuses, the newest ids.

They are asked for while a user waits at the prompt, so what takes longer than a second is not offered, and nothing is
said of errors. The shell's side is typer's: ``holdfast --install-completion``.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import typer

from holdfast.app import App
from holdfast.model.status import Status

VARIABLE = "_HOLDFAST_COMPLETE"
SECONDS = 1.0
_MOST = 20

Offers = list[tuple[str, str]]


def complete(command: Any) -> NoReturn:
    """Answer the shell, and end this process at once, whatever still runs."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # code that is imported may print, and a shell shows that in the middle of a line
    try:
        command.main(prog_name="holdfast", complete_var=VARIABLE)
        code: object = 0
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 0)


def in_time(work: Callable[[], Offers], seconds: float | None = None) -> Offers:
    """Return what `work` returns, or nothing if it fails or takes longer."""
    found: Offers = []

    def run() -> None:
        found.extend(work())

    def quietly() -> None:
        try:
            run()
        except BaseException:
            found.clear()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(SECONDS if seconds is None else seconds)
    return [] if thread.is_alive() else found


def tasks(ctx: typer.Context, incomplete: str) -> Offers:
    """Offer tasks by their short names, where only one task has it: bash ends words at a colon."""

    def known(app: App) -> Offers:
        from holdfast.cli import reach

        names = {task.definition.name for task in app.tasks.values() if not task.definition.is_hidden}
        if not names:
            names = {name for runner in reach.roster(app) for name in runner.tasks}
        short = Counter(name.rpartition(":")[2] for name in names)
        offered = {name: name.rpartition(":")[2] for name in names}
        return [(each if short[each] == 1 else name, name) for name, each in sorted(offered.items())]

    return _beginning(incomplete, in_time(lambda: _asked(ctx, known, is_stored=False)))


def queues(ctx: typer.Context, incomplete: str) -> Offers:
    def known(app: App) -> Offers:
        return [(each.name, f"{each.waiting:,} waiting") for each in app.queues.list()]

    return _beginning(incomplete, in_time(lambda: _asked(ctx, known)))


def statuses(ctx: typer.Context, incomplete: str) -> Offers:
    return _beginning(incomplete, [(status.value, "") for status in Status])


def ids(ctx: typer.Context, incomplete: str) -> Offers:
    """Offer the newest invocations, or those whose ids begin so."""

    def newest(app: App) -> Offers:
        from holdfast.store.contract import Filter
        from holdfast.web.reading.model import ReadModel

        where = Filter(before_id=f"{incomplete}{{" if incomplete else None)
        page = app.runtime.run(ReadModel(app.runtime).invocations(where, _MOST))
        return [(record.id, f"{record.task} {record.status}") for record in page.records]

    return _beginning(incomplete, in_time(lambda: _asked(ctx, newest)))


def _beginning(incomplete: str, offers: Sequence[tuple[str, str]]) -> Offers:
    return [offer for offer in offers if offer[0].startswith(incomplete)]


def _asked(ctx: typer.Context, ask: Callable[[App], Offers], *, is_stored: bool = True) -> Offers:
    """Ask the app that the command line names so far. A store that is not there is not made."""
    from holdfast.cli.command import Needs, opened
    from holdfast.cli.output import Output

    given = {**(ctx.parent.params if ctx.parent else {}), **{k: v for k, v in ctx.params.items() if v}}
    app = given.get("app") or given.get("app_option")
    needs = Needs.STORE if is_stored or given.get("url") else Needs.APP
    with opened(Output(json=False), needs, app=app, url=given.get("url"), name=given.get("name")) as found:
        return [] if found is None else ask(found)


BY_NAME = {"task": tasks, "tasks": tasks, "queue": queues, "queues": queues, "status": statuses}
"""What completes the parameters of these names, whichever command has them."""
