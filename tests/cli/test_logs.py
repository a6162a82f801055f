"""Log lines: one event is one line, whatever it quotes."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.cli import logs
from holdfast.cli.logs import LogFormat, LogLevel
from holdfast.showing import as_json, describe, length, moment, plain, printable

NASTY = "one\ntwo\r\x1b[31mred\x1b[0m\x00 \u202eturned\u2028 \x85 ok é"


Stderr = Callable[[], str]


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Stderr:
    """What was written there since it was last asked."""
    return lambda: capsys.readouterr().err


def raised(message: str) -> Any:
    try:
        raise ValueError(message)
    except ValueError:
        return sys.exc_info()


def test_text_lines_carry_time_level_logger_and_fields(stderr: Stderr) -> None:
    logs.configure(LogFormat.TEXT, LogLevel.INFO)
    record = logging.makeLogRecord(
        {
            "name": "holdfast.runner",
            "levelno": logging.INFO,
            "levelname": "INFO",
            "msg": "%s is done",
            "args": ("it",),
            "created": 1794729600.1234,
            "invocation": "01abc",
            "task": "shop:add",
            "runner": None,
            "epoch": 2,
        }
    )
    logging.getLogger().handle(record)
    expected = "2026-11-15 08:00:00.123 INFO  holdfast.runner  it is done  [invocation=01abc task=shop:add epoch=2]\n"
    assert stderr() == expected


def test_text_lines_cannot_be_forged(stderr: Stderr) -> None:
    logs.configure(LogFormat.TEXT, LogLevel.INFO)
    logging.getLogger("holdfast.test").error("said: %s", NASTY, extra={"task": NASTY}, exc_info=raised(NASTY))
    first, *others = stderr().split("\n")[:-1]
    assert "said: one\\ntwo\\r\\x1b[31mred\\x1b[0m\\x00 \\u202eturned\\u2028 \\x85 ok é" in first
    assert others, "the traceback is missing"
    assert all(line.startswith("  | ") for line in others)
    assert all(line.isprintable() for line in (first, *others))


def test_json_lines_are_one_object_each(stderr: Stderr) -> None:
    logs.configure(LogFormat.JSON, LogLevel.INFO)
    log = logging.getLogger("holdfast.test")
    log.error("said: %s", NASTY, extra={"invocation": "01abc", "epoch": 3}, exc_info=raised(NASTY))
    log.info("second")
    first, second = stderr().splitlines()
    assert first.isascii()
    assert first.isprintable()
    facts = json.loads(first)
    assert facts["message"] == f"said: {NASTY}"
    assert (facts["level"], facts["logger"]) == ("error", "holdfast.test")
    assert (facts["invocation"], facts["epoch"]) == ("01abc", 3)
    assert "ValueError: one\ntwo" in facts["exception"]
    assert facts["time"].endswith("Z")
    assert json.loads(second).keys() == {"time", "level", "logger", "message"}


def test_the_traceback_of_a_failed_task_follows_its_line(stderr: Stderr) -> None:
    logs.configure(LogFormat.TEXT, LogLevel.INFO)
    remote = 'Traceback (most recent call last):\n  File "x"\x1b[2J\nValueError: at mongodb://bob:hunter2@host/db\n'
    logging.getLogger("holdfast.test").warning("it failed", extra={"task": "a:b", "remote_traceback": remote})
    first, *others = stderr().split("\n")[:-1]
    assert first.endswith("it failed  [task=a:b]")
    assert others == [
        "    | Traceback (most recent call last):",
        '    |   File "x"\\x1b[2J',
        "    | ValueError: at mongodb://bob:***@host/db",
    ]


def test_the_traceback_of_a_failed_task_is_a_field_for_machines(stderr: Stderr) -> None:
    logs.configure(LogFormat.JSON, LogLevel.INFO)
    log = logging.getLogger("holdfast.test")
    log.warning("it failed", extra={"remote_traceback": "Traceback:\nValueError: mongodb://bob:hunter2@host/db"})
    log.warning("it failed", extra={"remote_traceback": ""})
    first, second = map(json.loads, stderr().splitlines())
    assert first["remote_traceback"] == "Traceback:\nValueError: mongodb://bob:***@host/db"
    assert "remote_traceback" not in second


@pytest.mark.parametrize("format", list(LogFormat))
def test_passwords_of_urls_are_hidden(stderr: Stderr, format: LogFormat) -> None:
    logs.configure(format, LogLevel.INFO)
    failure = raised("cannot reach mongodb://bob:hunter2@host/db")
    logging.getLogger("holdfast.test").error("trying mongodb://bob:hunter2@host/db again", exc_info=failure)
    written = stderr()
    assert "hunter2" not in written
    assert "mongodb://bob:***@host/db again" in written


def test_configuring_again_replaces_the_handler_and_the_level_counts(stderr: Stderr) -> None:
    logs.configure(LogFormat.TEXT, LogLevel.DEBUG)
    logs.configure(LogFormat.TEXT, LogLevel.WARNING)
    logging.getLogger("holdfast.test").info("unheard")
    logging.getLogger("holdfast.test").warning("heard")
    assert stderr().count("\n") == 1


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("message", "argument", "shown"),
    [
        ("number %d", "x", "number %d (its arguments do not fit: TypeError: %d format: a real number is"),
        ("odd %s", Unshowable(), "odd %s (its arguments do not fit: RuntimeError: no"),
        (Unshowable(), "x", "a message of /shop.py:7 cannot be shown: RuntimeError"),
    ],
)
def test_a_line_whose_arguments_do_not_fit_is_still_a_line(message: Any, argument: object, shown: str) -> None:
    """Not through a logger: pytest would format it, too."""
    record = logging.LogRecord("shop", logging.ERROR, "/shop.py", 7, message, (argument,), None)
    (line,) = logs.JsonLines().format(record).splitlines()
    assert json.loads(line)["message"].startswith(shown)
    assert logs.TextLines().format(record).partition(" shop  ")[2].startswith(shown)


def test_no_value_is_too_odd_to_be_shown() -> None:
    assert describe(Unshowable()) == "<a Unshowable that cannot be shown: RuntimeError>"
    assert describe("x" * 5000).endswith("(5002 characters)")
    odd = {"nan": float("nan"), 3: {1, 2}, "bytes": b"\xff", "big": 1 << 50_000, "odd": Unshowable(), "c": 1j}
    assert json.loads(as_json(odd))["nan"] == "nan"
    assert plain(odd)["big"].startswith("0x1000")
    assert printable("plain é") == "plain é"


def test_half_a_character_is_shown_too() -> None:
    # Not through a logger: pytest would keep the raw line, and cannot send it to another process.
    record = logging.makeLogRecord({"msg": "half \udcff", "name": "holdfast.test", "levelname": "INFO"})
    assert "half \\udcff" in logs.TextLines().format(record)
    assert json.loads(logs.JsonLines().format(record))["message"] == "half \udcff"


def test_times_that_are_no_dates_are_shown_as_numbers() -> None:
    assert moment(0.0015) == "1970-01-01T00:00:00.001Z"
    assert moment(1e300) == "1e+300"
    assert moment(float("nan")) == "nan"
    assert (length(0.25), length(61.2), length(float("inf"))) == ("250ms", "1m1s", "infs")
