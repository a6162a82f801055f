"""``holdfast triggers``: which trigger calls which task, and when.

The command imports no user code: it shows triggers as they are stored.
"""

from __future__ import annotations

from holdfast.app import App
from holdfast.cli.command import command
from holdfast.cli.output import Output
from holdfast.web.reading.schedules import ScheduleReading


@command()
def triggers(out: Output, app: App) -> None:
    """List the triggers: which task each calls, and when.

    Runners store them when they start. "decided by" is data if any process can decide whether a trigger fires, and code
    if that takes its own invocation, on a runner with that code. A retired trigger is in no code any more, and does not
    fire.
    """
    answer = app.runtime.run(ScheduleReading(app.runtime).triggers())
    out.document(document := answer.document())
    titles = ("name", "task", "state", "decided by", "when")
    rows = [[each[title.replace(" ", "_")] for title in titles] for each in document["triggers"]]
    out.table(titles, rows, empty="no triggers; a runner stores the triggers of its tasks when it starts")
    for why in answer.unreadable.values():
        out.aside(f"note: {why}")
