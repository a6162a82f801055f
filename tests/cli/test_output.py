"""Tables: they fit 80 columns whatever is in them, and nothing of it is lost."""

from __future__ import annotations

from collections.abc import Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.cli.processes import Command

from holdfast import App, on_event
from holdfast.cli.output import Output, _cells
from holdfast.cli.reach import time_of, with_store
from holdfast.fleet.services import SERVICE, line_of
from holdfast.fleet.slots import Execution, ExecutionStatus
from holdfast.model.records import RunnerRecord, WorkerRecord

LONG = "a_rather_long_name_that_somebody_has_thought_of_" * 3
WORDS = "the relay does not answer, and nobody knows when it will; " * 4


@pytest.fixture
def app(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    """A store in which everything has a long name and much to tell."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("HOLDFAST_URL", "sqlite:///shop.db")
    with App("sqlite:///shop.db") as app:

        @app.task(name=f"shop.{LONG}:ship", queue=LONG, triggers=[on_event("order.created")])
        def ship(text: str = "") -> None: ...

        with app.runner():
            pass
        ship.submit(WORDS)
        ship.submit(WORDS).cancel(WORDS, by=LONG)
        app.schedules.create(LONG, ship, [WORDS], cron="0 3 * * *", timezone="America/Argentina/Buenos_Aires")
        app.schedules.pause(LONG, reason=WORDS)
        app.schedules.create("hourly", ship, [WORDS], every="1h")
        app.queues.pause(LONG, reason=WORDS, by=LONG)
        app.emit("order.created", {"text": WORDS})
        now = time_of(app)
        times = {"started_at": now - 9, "heartbeat_at": now - 1}
        workers = tuple(WorkerRecord(id=str(i), pid=4_000_000 + i, started_at=now) for i in range(9))
        runner = RunnerRecord(
            id="r" * 26, app=app.name, host=LONG, pid=4_000_000, version="10.11.12.dev13", concurrency=100,
            tasks=(), queues=(LONG, "mail"), tags=(LONG,), workers=workers, **times
        )  # fmt: skip
        with_store(app, methodcaller("enrol", runner))
        execution = Execution(
            id="e" * 26, service=SERVICE, runner_id=runner.id, started_at=now - 5, window_ends_at=now + 5
        )
        ended = replace(execution, status=ExecutionStatus.ABANDONED, ended_at=now, reason=WORDS)
        with_store(app, methodcaller("put_entry", line_of(app.name, ended, 600)))
        yield app


TABLES: dict[str, list[str]] = {
    "ps": ["shop.a_rather_long_name", "cancelled by"],
    "archive": ["shop.a_rather_long_name", "the relay does not answer"],
    "history ID": ["cancelled", "nobody knows when"],
    "rerun --status cancelled": ["shop.a_rather_long_name", "the relay does not answer"],
    "triggers": ["shop.a_rather_long_name", "order.created"],
    "services": ["r" * 26, "its turn", "abandoned", "nobody knows when"],
    "config": ["runner_heartbeat_seconds", "sqlite:///shop.db"],
    "runners": ["r" * 26, "10.11.12.dev13", "8: pid 4000008, 0 running"],
    "queues": ["a_rather_long_name", "nobody knows when"],
    "schedules": ["shop.a_rather_long_name", "clock of America/Argentina/B", "nobody knows when"],
    "schedules show hourly": [":00:00.000Z in "],
    "schedules next hourly": [":00:00.000Z in "],
    "schedules backfill NAME --from 2026-01-01T00:00Z --to 2026-01-09T00:00Z --dry-run": ["2026-01-08T06:00:00.000Z"],
    "events": ["order.created", "by shop.a_rather_long_name"],
    "events show EVENT": ["shop.a_rather_long_name", "registered"],
    "status render": ["CONCURRENCY_CONTROLLED_FINAL", "other code or a person wakes it", "RETRY, SUCCESS, FAILED"],
    "store check": ["durability", "survives a power cut"],
}


@pytest.mark.parametrize("command", TABLES)
def test_a_table_fits_80_columns_and_tells_everything(
    app: App, holdfast: Command, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    words = {"ID": app.archive(limit=1)[0].id, "NAME": LONG, "EVENT": app.events(limit=1)[0].id}
    monkeypatch.setattr(Output, "line", lambda *_: None)  # only tables
    answer = holdfast(*(words.get(word, word) for word in command.split()))
    assert answer.code == 0, answer.err
    assert [line for line in answer.out.splitlines() if len(line) > 80] == []
    flat = " ".join(answer.out.split())
    assert [told for told in TABLES[command] if told not in flat] == [], answer.out


def drawn(capsys: pytest.CaptureFixture[str], titles: tuple[str, ...], *rows: tuple[Any, ...]) -> list[str]:
    Output(json=False).table(titles, rows)
    return capsys.readouterr().out.splitlines()


def test_what_has_no_room_stands_beneath_its_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert drawn(capsys, ("id", "host", "queues", "why"), ("0" * 26, "web1", "any, mail", ""), ("1", "w", "", "x")) == [
        "id                          host",
        "00000000000000000000000000  web1",
        "    queues: any, mail",
        "1                           w",
        "    why: x",
    ]


def test_the_last_column_is_wrapped_where_it_is_if_it_has_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert drawn(capsys, ("id", "why"), ("1", "it waits for a slot of a limit, and for somebody")) == [
        "id  why",
        "1   it waits for a slot of a limit, and",
        "    for somebody",
    ]


def test_wide_characters_take_two_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = drawn(capsys, ("name", "why"), ("東京", "大阪 " * 20), ("x", "y"))
    assert max(map(_cells, lines)) <= 40
    assert lines[-1] == "x     y"
    assert "".join(lines).count("大阪") == 20


@pytest.mark.parametrize("columns", ["", "nonsense", "0", "-5"])
def test_without_a_terminal_a_table_has_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = drawn(capsys, ("id", "why"), ("1", "word " * 40))
    assert 70 < max(map(len, lines)) <= 80
