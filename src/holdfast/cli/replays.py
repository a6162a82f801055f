"""``holdfast workflow check`` and ``replay``: does the code at hand fit the logs of stored runs?

The body runs here with the recorded results. No step runs, and nothing is written.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer import Option

from holdfast.app import App
from holdfast.cli import reach
from holdfast.cli.command import AppArgument, AppOption, InvocationId, Needs, app_of, app_with_code, command
from holdfast.cli.invocations import found
from holdfast.cli.naming import find_task
from holdfast.cli.output import FAILED, Output
from holdfast.cli.progress import walking
from holdfast.errors import HoldfastError, UnknownTask, UsageError
from holdfast.model.names import counted
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL, Status
from holdfast.runtime.definition import TaskDefinition
from holdfast.runtime.listing import filter_of
from holdfast.runtime.runs import of_run
from holdfast.web.reading.model import ReadModel
from holdfast.workflows.replaying import ReplayReport, Verdict, replayed

_TITLES = ("id", "workflow", "status", "verdict", "why")
_OPEN = tuple(sorted(status.value for status in set(Status) - FINAL))


class _Checked(NamedTuple):
    """What came of one run. `report` is None if it could not be replayed."""

    record: InvocationRecord
    verdict: str
    why: str
    report: ReplayReport | None = None

    @property
    def fits(self) -> bool:
        return self.verdict == Verdict.FITS

    @property
    def text(self) -> str:
        """Return how code and log differ, else what to know about them."""
        warnings = () if self.report is None else self.report.warnings
        return self.why or "; ".join(f"warning: {each}" for each in warnings)


@command(Needs.NOTHING)
def check(
    out: Output,
    app: AppArgument = None,
    app_option: AppOption = None,
    tasks: Annotated[
        list[str] | None, Option("--task", help="Only these workflows, by whole or short name; may be repeated.")
    ] = None,
    status: Annotated[list[str] | None, Option(help="Only these, also ended ones; else all that are open.")] = None,
    limit: Annotated[int, Option(min=1, max=10_000, help="Check at most this many runs, newest first.")] = 100,
) -> None:
    """Replay stored runs against the code at hand, without effects.

    A run fits the code; or it diverges, or needs a patch: both calls are named, with file and line. Exits with 1 if
    any run does not fit, so that CI can ask before a deploy. No step runs, and nothing is written.
    """
    app = app_of(app, app_option)
    with app_with_code(out, app) as chosen:
        names = [each for name in tasks or () for each in _workflow(chosen, name)]
        where = filter_of(status=status or _OPEN, task=names)
        stored, more = chosen.runtime.run(ReadModel(chosen.runtime).invocations(where, limit, reach.is_run))
        with contextlib.redirect_stdout(sys.stderr):  # what bodies print is no part of the answer
            checked = []
            with walking(out, None, "replaying", len(stored)) as advance:
                for record in stored:
                    checked.append(_check(chosen, record))
                    advance(1)
    _answer(out, checked, may_be_more=more is not None)


def _answer(out: Output, checked: Sequence[_Checked], *, may_be_more: bool) -> None:
    counts = Counter(each.verdict for each in checked)
    summary = {_key(verdict): counts[verdict] for verdict in (*_ALWAYS, *sorted(set(counts) - set(_ALWAYS)))}
    out.document({"runs": [_facts(each) for each in checked], "summary": summary, "may_be_more": may_be_more})
    rows = [(each.record.id, each.record.task, each.record.status.value, each.verdict, each.text) for each in checked]
    out.table(_TITLES, rows, empty="no runs to check")
    if checked:
        said = ", ".join(f"{number} {_SAID.get(verdict, verdict)}" for verdict, number in counts.items())
        out.line(f"{counted(len(checked), 'run')}: {said}")
    if may_be_more:
        out.aside("note: there may be more: give a larger --limit, or name a --task")
    if not all(each.fits for each in checked):
        raise typer.Exit(FAILED)


_UNREADABLE, _UNDECLARED = "unreadable", "not declared"
_ALWAYS = (Verdict.FITS.value, Verdict.DIVERGES.value, Verdict.NEEDS_PATCH.value)
_SAID = {Verdict.FITS.value: "fit", Verdict.DIVERGES.value: "diverge", Verdict.NEEDS_PATCH.value: "need a patch"}


def _key(verdict: str) -> str:
    return verdict.replace(" a ", "_").replace(" ", "_")


def _workflow(app: App, name: str) -> tuple[str, ...]:
    """Return the names under which the store may have runs of this workflow."""
    definition = find_task(app, name).definition
    if not definition.is_workflow:
        raise UsageError(f"--task {name}: {definition.name} is a task, and has no log; name a workflow")
    return definition.names


def _check(app: App, record: InvocationRecord) -> _Checked:
    try:
        definition = app.get_task(record.task).definition
    except UnknownTask:
        why = f"this code declares no workflow '{record.task}': a runner with it would never take the run"
        return _Checked(record, _UNDECLARED, why)
    if not definition.is_workflow:
        why = f"this code declares '{record.task}' as a task: a runner with it would park the run"
        return _Checked(record, _UNDECLARED, why)
    try:
        report = _replay(app, record, definition)
    except HoldfastError as error:
        return _Checked(record, _UNREADABLE, str(error))
    return _Checked(record, report.verdict.value, report.why, report)


def _definition(app: App, record: InvocationRecord) -> TaskDefinition:
    definition = app.get_task(of_run(record).task).definition
    if not definition.is_workflow:
        raise UsageError(f"{record.id} is a run, and {record.task} is a task in this code")
    return definition


def _replay(app: App, record: InvocationRecord, definition: TaskDefinition, function: Any = None) -> ReplayReport:
    engine, stored = reach.stored_run(app, record)
    return replayed(stored, definition, engine, function=function)


def _facts(each: _Checked) -> dict[str, Any]:
    report = each.report
    return {
        "id": each.record.id,
        "task": each.record.task,
        "status": each.record.status,
        "verdict": _key(each.verdict),
        "why": each.why,
        "warnings": [] if report is None else list(report.warnings),
        "events": None if report is None else report.events,
        "waits_for": [] if report is None else list(report.waits_for),
        "has_ended": None if report is None else report.has_ended,
    }


# --- one run


@command(Needs.CODE)
def replay(
    out: Output,
    app: App,
    id: InvocationId,
    use_pdb: Annotated[
        bool, Option("--pdb", help="Stop in the body: at the end of the log, or where code and log differ.")
    ] = False,
) -> None:
    """Replay a run here, with its recorded results and without effects.

    Says whether the code at hand fits the log, and what the body waits for at its end. With --pdb a debugger stops in
    the body there; `up` and `p NAME` show the values that it has computed. Exits with 1 if the code does not fit.
    """
    if use_pdb and out.json:
        raise UsageError("--pdb talks to a person, and --json to a program: give one of them")
    record = found(app, id)
    definition = _definition(app, record)
    with contextlib.redirect_stdout(sys.stderr) if out.json else contextlib.nullcontext():
        report = _replay(app, record, definition)
    out.document(_facts(_Checked(record, report.verdict.value, report.why, report)))
    out.line(f"{record.task} {record.id} ({record.status}): {_summary(report)}")
    for warning in report.warnings:
        out.line(f"warning: {warning}")
    if use_pdb:
        from holdfast.cli.debugger import StopInBody  # here, because pdb takes a while to load

        stop = StopInBody(definition.function)
        _replay(app, record, definition, stop.body)
        if not stop.has_stopped:
            out.note("the debugger did not stop: the body has not been called, or has no code of its own here")
    if not report.fits:
        raise typer.Exit(FAILED)


def _summary(report: ReplayReport) -> str:
    events = counted(report.events, "event")
    if not report.fits:
        return f"{report.verdict}: {report.why}"
    if report.has_ended:
        return f"fits; {events} replayed, and the body has ended"
    return f"fits; {events} replayed, and the body waits for {', '.join(report.waits_for) or 'nothing'}"
