"""S8, S15: values with operators, and texts that act on terminals or logs, are values and texts."""

from __future__ import annotations

import json
import logging
import random
from typing import Any

import pytest
from pymongo import monitoring

from holdfast import App
from holdfast.showing import as_json, printable, value_line

OPERATORS = ("$where", "$function", "$ne", "$gt", "$regex", "$expr", "a.b", "$", "", "\0", "__proto__", "$$ROOT")
FORBIDDEN = {"$where", "$function", "$accumulator", "mapReduce", "mapreduce", "eval", "$eval"}


class Sent(monitoring.CommandListener):
    """Remembers the names of all fields of all commands."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        self.names.add(event.command_name)
        self._add(event.command)

    def _add(self, value: Any) -> None:
        if isinstance(value, dict):
            self.names.update(map(str, value))
            for item in value.values():
                self._add(item)
        elif isinstance(value, list):
            for item in value:
                self._add(item)

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None: ...
    def failed(self, event: monitoring.CommandFailedEvent) -> None: ...


def hostile(drawn: random.Random, depth: int = 3) -> Any:
    if depth == 0 or drawn.random() < 0.3:
        return drawn.choice([*OPERATORS, 1, None, True])
    if drawn.random() < 0.7:
        return {drawn.choice(OPERATORS): hostile(drawn, depth - 1) for _ in range(3)}
    return [hostile(drawn, depth - 1) for _ in range(2)]


def test_values_with_operators_come_back_as_they_were(mongo_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listener, drawn = Sent(), random.Random(3)
    monkeypatch.setattr(monitoring, "_LISTENERS", monitoring._Listeners([listener], [], [], [], []))
    values = [hostile(drawn) for _ in range(500)]
    with App(mongo_url, name="shop", poll_interval_seconds=0.2) as app:

        @app.task(name="keep")
        def keep(value: Any) -> Any:
            return value

        calls = keep.map([(value,) for value in values]) if hasattr(keep, "map") else []
        calls = list(calls)
        for name in OPERATORS:
            app.emit("ordered", {name: {"$ne": None}})
            found = app.invocations(key=name or "x", limit=3)
            assert list(found) == []
        with app.runner(concurrency=20):
            assert [call.result(timeout=60) for call in calls] == values
    assert listener.names
    assert not listener.names & FORBIDDEN


HOSTILE = "a\nINFO forged\r\x1b[31m\x07\u202e\u2028\x00z"


def test_a_text_of_a_user_is_one_harmless_line_everywhere() -> None:
    for shown in (printable(HOSTILE), value_line({"k": HOSTILE}), as_json({HOSTILE: HOSTILE})):
        assert shown.isprintable()
        assert len(shown.splitlines()) == 1
    assert json.loads(as_json([HOSTILE])) == [HOSTILE]


def test_no_record_of_a_log_is_more_than_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with App("memory://", name="shop", poll_interval_seconds=0.1) as app, caplog.at_level(logging.DEBUG, "holdfast"):

        @app.task(name="boom")
        def boom(text: str) -> None:
            raise ValueError(text)

        call = boom.options(attributes={"customer": "x"}).submit(HOSTILE)
        with app.runner(), pytest.raises(ValueError):
            call.result(timeout=30)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("holdfast")]
    assert any("boom" in line for line in lines)
    assert [line for line in lines if "\x1b" in line or "\nINFO forged" in line] == []
