"""One list of events, one table of log lines, and a bus that costs nothing where nobody listens."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.processes import eventually
from tests.support.patience import patient

from holdfast import App, on_status
from holdfast.errors import StoreUnavailable
from holdfast.retries import Fixed
from holdfast.telemetry import Telemetry
from holdfast.telemetry import events as e
from holdfast.telemetry.logs import FIELDS, ROWS, SILENT, If, LogLines, levels, logging_telemetry
from holdfast.testing.samples import invocation

BASES = {kind for kind in vars(e).values() if isinstance(kind, type) and kind.__name__.startswith("Of")}


def kinds(base: type[e.Event] = e.Event) -> Iterator[type[e.Event]]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


EVERY = sorted(set(kinds()) - BASES, key=lambda kind: kind.__name__)


def test_every_event_has_a_line_or_is_silent() -> None:
    assert set(EVERY) == set(ROWS) | SILENT
    assert not SILENT & set(ROWS)
    assert len(EVERY) > 50


@pytest.mark.parametrize("kind", ROWS, ids=lambda kind: kind.__name__)
def test_a_row_names_what_its_event_has(kind: type[e.Event]) -> None:
    row = ROWS[kind]
    for name in re.findall(r"{(\w+)", row.message + row.throttle_key + row.ends):
        assert hasattr(kind, name), name
    level = row.level
    while isinstance(level, If):
        assert hasattr(kind, level.condition)
        level = level.otherwise
    assert row.logger or hasattr(kind, "area")
    assert re.match(r"[a-z].*: ", row.message), "verb object: reason"


def test_fields_of_lines_are_no_attributes_of_every_record() -> None:
    taken = logging.makeLogRecord({}).__dict__.keys() | {"message", "asctime"}
    assert taken.isdisjoint({*FIELDS, "record", "remote_traceback", "series"})


class Listener:
    def __init__(self, *wanted: type[e.Event], fails: bool = False) -> None:
        self.wanted, self.fails, self.heard = wanted, fails, list[e.Event]()

    def wants(self, kind: type[e.Event]) -> bool:
        return kind in self.wanted

    def __call__(self, event: e.Event) -> None:
        if self.fails:
            raise RuntimeError("no luck")
        self.heard.append(event)


def test_a_subscriber_that_fails_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    first, broken, last = Listener(e.RunnerJoined), Listener(fails=True), Listener()
    telemetry = Telemetry(first, broken)
    telemetry.subscribe(last)
    telemetry.emit(e.RunnerJoined("r"))
    assert first.heard == last.heard == [e.RunnerJoined("r")]
    assert "could not report RunnerJoined" in caplog.text
    assert telemetry.wants(e.RunnerJoined)
    assert not telemetry.wants(e.Claimed)


def test_a_level_that_changes_later_counts(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = logging_telemetry()
    for level, wanted in ((logging.INFO, False), (logging.DEBUG, True), (logging.INFO, False)):
        caplog.set_level(level, "holdfast")
        assert [telemetry.wants(kind) for kind in (e.Settled, e.Claimed)] == [wanted, False]
    telemetry.subscribe(Listener(e.Claimed))
    assert telemetry.wants(e.Claimed)


def test_nobody_wants_what_would_not_be_logged(caplog: pytest.LogCaptureFixture) -> None:
    lines = LogLines()
    with caplog.at_level(logging.INFO, "holdfast"):
        assert [lines.wants(kind) for kind in (e.Settled, e.Claimed, e.Failed)] == [False, False, True]
    with caplog.at_level(logging.DEBUG, "holdfast"):
        assert [lines.wants(kind) for kind in (e.Settled, e.Claimed, e.Failed)] == [True, False, True]


def test_a_line_has_the_level_of_its_event_and_the_fields(caplog: pytest.LogCaptureFixture) -> None:
    emit = logging_telemetry().emit
    with caplog.at_level(logging.DEBUG, "holdfast"):
        emit(e.DutyFailed("runner", "watch the others", StoreUnavailable("away")))
        emit(e.DutyFailed("services", "do a duty", StoreUnavailable("away"), is_owed=True))
        emit(e.DutyFailed("services", "do a duty", StoreUnavailable("away"), is_owed=True))
        emit(e.DutyFailed("worker", "look", KeyError("a defect")))
        record = invocation("a")
        emit(e.ChangeLost(record, "it is gone", "completed"))
    told = [(each.name, each.levelname, bool(each.exc_info)) for each in caplog.records]
    assert told == [
        ("holdfast.runner", "DEBUG", False),
        ("holdfast.services", "WARNING", False),
        ("holdfast.services", "DEBUG", False),
        ("holdfast.worker", "ERROR", True),
        ("holdfast.engine", "WARNING", False),
    ]
    last = vars(caplog.records[-1])
    assert (last["invocation"], last["task"], last["epoch"]) == (record.id, record.task, record.epoch)
    assert caplog.messages[-1] == f"dropped 'completed' of {record.task}: it is gone"


def test_levels_of_a_row_are_those_that_it_may_have() -> None:
    assert levels(ROWS[e.DutyFailed].level) == [logging.ERROR, logging.WARNING, logging.DEBUG]
    assert levels(ROWS[e.Failed].level) == [logging.ERROR]


class Everything(Listener):
    def wants(self, kind: type[e.Event]) -> bool:
        return True

    def kinds(self, id: str) -> list[str]:
        """The types of the events about this invocation, in their order."""
        return [type(event).__name__ for event in self.heard if id in ids_of(event)]


def ids_of(event: Any) -> list[str]:
    records = getattr(event, "records", None) or [getattr(event, "record", None)]
    return [record.id for record in records if record is not None] + [getattr(event, "invocation", "")]


def test_the_life_of_an_invocation_is_reported_step_by_step() -> None:
    app, listener = App("memory://"), Everything()
    app.runtime.telemetry.subscribe(listener)

    @app.task(name="good")
    def good() -> int:
        return 1

    @app.task(name="bad", retries=Fixed(1, "1ms"))
    def bad() -> None:
        raise ValueError("no luck")

    @app.task(name="told", triggers=[on_status(bad, "failed")])
    def told() -> None: ...

    with app, app.runner():
        first, second = good.submit(), bad.submit()
        assert first.result(timeout=patient(30)) == 1
        with pytest.raises(ValueError, match="no luck"):
            second.result(timeout=patient(30))
        eventually(lambda: [event for event in listener.heard if isinstance(event, e.TriggerFired)], "it fires")
    assert listener.kinds(first.id) == ["Submitted", "Claimed", "Started", "Settled"]
    twice = ["Claimed", "Started"]
    assert listener.kinds(second.id) == ["Submitted", *twice, "Retried", *twice, "Failed"]
    (fired,) = [event for event in listener.heard if isinstance(event, e.TriggerFired)]
    assert (fired.task, listener.kinds(fired.invocation)[:2]) == ("told", ["TriggerFired", "Submitted"])
    runner = [type(event).__name__ for event in listener.heard if isinstance(event, e.OfRunner)]
    assert (runner[0], runner[-1]) == ("RunnerJoined", "RunnerLeft")


def test_nobody_but_telemetry_and_the_command_line_logs() -> None:
    """`holdfast/__init__.py` silences the loggers of a library; a child process sends records of user code."""
    source = Path(e.__file__).parents[1]
    found = {
        str(path.relative_to(source).parent if path.parent != source else path.name)
        for path in source.rglob("*.py")
        if re.search(r"^import logging|getLogger|from logging", path.read_text(), re.MULTILINE)
    }
    assert found == {"__init__.py", "telemetry", "executors", "cli"}
    both_ends = {path.name for path in (source / "executors").glob("*.py") if "getLogger" in path.read_text()}
    assert both_ends == {"child.py", "processes.py"}
