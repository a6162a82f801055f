"""``holdfast triggers``: which trigger calls which task, and when.

The command imports no user code: it shows triggers as they are stored.
"""

from __future__ import annotations

from typing import Any

from holdfast.app import App
from holdfast.cli import reach
from holdfast.cli.command import command
from holdfast.cli.output import Output
from holdfast.showing import fields, length
from holdfast.triggers.rules import KIND, TriggerRecord, from_entry


@command()
def triggers(out: Output, app: App) -> None:
    """List the triggers: which task each calls, and when.

    Runners store them when they start. "decided by" is data if any process can decide whether a trigger fires, and
    code if that takes an invocation of its own, on a runner with that code. A retired trigger is in no code any more,
    and does not fire.
    """
    records, unreadable = reach.entries(app, KIND, from_entry)
    found = [_trigger_facts(each) for each in records]
    out.document({"triggers": found, "unreadable": unreadable})
    titles = ("name", "task", "state", "decided by", "when")
    rows = [[each[title.replace(" ", "_")] for title in titles] for each in found]
    out.table(titles, rows, empty="no triggers; a runner stores those that its tasks declare, when it starts")
    for why in unreadable.values():
        out.aside(f"note: {why}")


def _when(record: TriggerRecord) -> str:
    if all(len(clause) == 1 for clause in record.clauses):
        return str(record)
    paths = dict.fromkeys(each.correlate for each in record.conditions if each.correlate)
    alike = f" of the same {' or '.join(paths)}" if paths else ""
    return f"{record},{alike} within {length(record.within_seconds)}"


def _trigger_facts(record: TriggerRecord) -> dict[str, Any]:
    return fields(record, "name", "app", "within_seconds", "created_at", "retired_at") | {
        "task": record.call.task,
        "queue": record.call.queue,
        "when": _when(record),
        "state": "active" if record.retired_at is None else "retired",
        "decided_by": "code" if record.evaluator else "data",
        "evaluator": record.evaluator or None,
    }
