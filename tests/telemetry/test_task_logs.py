"""Log records that are made inside tasks carry their call, wherever the code runs."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cli.processes import eventually
from tests.support.patience import patient
from tests.telemetry import chatty

from holdfast import App
from holdfast.cli.logs import JsonLines, TextLines
from holdfast.errors import WorkerLost
from holdfast.telemetry import TaskFields
from holdfast.telemetry.keeping import line_of

PATIENCE_SECONDS = patient(30.0)


class Lines(logging.Handler):
    """Keeps records, and holds up whoever logs until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.texts: list[str] = []
        self.json: list[str] = []
        self.free = threading.Event()
        self.free.set()

    def emit(self, record: logging.LogRecord) -> None:
        self.free.wait(PATIENCE_SECONDS)
        self.records.append(record)
        self.texts.append(TextLines().format(record))
        self.json.append(JsonLines().format(record))

    def of(self, text: str) -> logging.LogRecord:
        (found,) = [each for each in self.records if text in each.getMessage()]
        return found


@pytest.fixture
def lines() -> Iterator[Lines]:
    lines, logger = Lines(), logging.getLogger("chatty")
    lines.addFilter(TaskFields())
    level = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    yield lines
    lines.free.set()
    logger.removeHandler(lines)
    logger.setLevel(level)


@pytest.fixture
def app(lines: Lines) -> Iterator[App]:
    with chatty.app.runner(concurrency=2):
        yield chatty.app
    chatty.app.close()


def test_lines_of_threads_loops_and_processes_carry_their_call(app: App, lines: Lines) -> None:
    tasks = [chatty.on_a_thread, chatty.on_the_loop, chatty.in_a_process, chatty.on_a_loop_in_a_process]
    for number, task in enumerate(tasks):
        invocation: Any = task.submit(f"w{number}.")
        pid = invocation.result(timeout=PATIENCE_SECONDS)
        assert (pid == os.getpid()) is (number < 2)
        record: Any = lines.of(f"said w{number}." if number != 1 else "said w1. beside")
        assert (record.invocation, record.attempt, record.process) == (invocation.id, 1, pid)
        assert (record.task, record.size) == ("mine", 3), "a user's own fields stay"
        shown = f"[invocation={invocation.id} task={invocation.record().task} attempt=1]"
        assert shown in lines.texts[lines.records.index(record)], "a line of Holdfast tells the call"
        told = json.loads(lines.json[lines.records.index(record)])
        assert (told["invocation"], told["task"], told["attempt"]) == (invocation.id, invocation.record().task, 1)


def test_what_cannot_be_sent_is_told_in_words_and_hurts_no_task(app: App, lines: Lines) -> None:
    chatty.unlucky.submit().result(timeout=PATIENCE_SECONDS)
    words = [record.getMessage() for record in lines.records]
    misfit = "no number: %d (its arguments do not fit: TypeError: %d format: a real number is required, not str)"
    assert words == ["half a \\ud83d and <class 'object'>", misfit, "it failed"]
    odd: Any = lines.records[0]
    assert (odd.large, hasattr(odd, "thing"), odd.levelname) == (str(2**80), False, "WARNING")
    assert "ValueError: no luck" in str(lines.records[2].exc_text)
    assert "  | ValueError: no luck" in lines.texts[2]


def test_what_a_task_logs_before_it_crashes_is_heard(app: App, lines: Lines) -> None:
    with pytest.raises(WorkerLost):
        chatty.crashes.submit().result(timeout=PATIENCE_SECONDS)
    assert lines.of("about to crash")


def test_a_child_has_no_handlers_but_the_parents(app: App) -> None:
    assert chatty.handlers.submit().result(timeout=PATIENCE_SECONDS) == [["ParentHandler"], []]
    assert len(logging.getLogger("chatty.own").handlers) == 1, "here it is as the module wants it"


def test_a_slow_parent_holds_up_no_user_code_and_what_is_dropped_is_counted(
    app: App, lines: Lines, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chatty.in_a_process.submit("first").result(timeout=PATIENCE_SECONDS)
    lines.free.clear()
    invocation = chatty.floods.submit(5000, str(tmp_path / "done"))
    eventually((tmp_path / "done").exists, "user code is through")
    assert len(lines.records) == 1, "nobody has written anything"
    lines.free.set()
    invocation.result(timeout=PATIENCE_SECONDS)
    came = [record.getMessage()[:6] for record in lines.records[1:]]
    assert came == sorted(set(came)), "none twice, in their order"
    (told,) = [text for text in caplog.messages if "log records of" in text]
    assert told == f"dropped {5000 - len(came)} log records of {chatty.floods.name}: its process logs too fast"
    assert 500 < len(came) < 4000


def test_a_soft_timeout_in_the_middle_of_logging_breaks_nothing(app: App, lines: Lines) -> None:
    assert chatty.goes_on.submit().result(timeout=PATIENCE_SECONDS) == "soft"
    assert lines.of("that is enough")
    assert chatty.in_a_process.submit("after").result(timeout=PATIENCE_SECONDS) > 0


def test_a_soft_timeout_while_a_record_is_made_is_raised_after_it(app: App, lines: Lines) -> None:
    assert chatty.is_struck_in_a_record.submit().result(timeout=PATIENCE_SECONDS) == "soft"
    assert lines.of("that takes long")


def test_a_fork_of_a_process_task_may_log(app: App, lines: Lines) -> None:
    assert chatty.forks.submit().result(timeout=PATIENCE_SECONDS) == 7
    assert chatty.in_a_process.submit("after").result(timeout=PATIENCE_SECONDS) > 0
    assert [record for record in lines.records if "nobody hears" in record.getMessage()] == []


def test_lines_outside_of_tasks_and_of_holdfast_itself_carry_no_call(lines: Lines) -> None:
    logging.getLogger("chatty").warning("outside")
    assert not hasattr(lines.of("outside"), "invocation")
    assert lines.texts[0].endswith("chatty  outside")


def test_a_kept_line_can_be_stored() -> None:
    record = logging.LogRecord("shop\ud800", 7, "shop.py", 1, "at %s of http://a:secret@b/ \ud800\n", ("row",), None)
    assert line_of(record).text == "at row of http://a:***@b/ \\ud800\n"
    record = logging.LogRecord("shop", logging.INFO, "shop.py", 1, "%d rows", ("x",), None)
    record.exc_text = "Traceback …\n  …\nKeyError: 7"  # of a child process
    line = line_of(record)
    assert line.text.startswith("%d rows (its arguments do not fit: TypeError")
    assert line.text.endswith("(KeyError: 7)")
    assert len(line_of(logging.LogRecord("shop", 20, "shop.py", 1, "x" * 1000, (), None)).text) == 501
    msgspec.json.encode(line)
