"""holdfast stats: what it tells, for people and for programs, without any process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.processes import Command
from tests.stats.files import Files
from tests.support.patience import patient

from holdfast import App
from holdfast.stats.records import StatsFile, file_entry
from holdfast.stats.rules import WORKERS, Cell, Failure, key_of, name_of, start_of

HOSTILE = "a <b>\x1b[31m\u202e"


@pytest.fixture
def app(shop: Path) -> Iterator[App]:
    """The shop's store, as another process has it."""
    with App("sqlite:///shop.db") as app:
        app.prepare()
        yield app


def test_statistics_are_told_by_task_with_failures_and_calls_that_stand_out(app: App, holdfast: Command) -> None:
    @app.task(name="shop:boom")
    def boom(text: str) -> None:
        raise ValueError(text)

    with app.runner():
        calls = [boom.submit(f"order {number} has no card") for number in range(3)]
        for call in calls:
            with pytest.raises(ValueError, match="order"):
                call.result(patient(30))
        Files(app).put(600, ended=70, seconds=90)
        app.stats()
        lines = holdfast("stats").out.splitlines()
    assert lines[0].endswith("in steps of 1m")
    assert lines[1].startswith("73 calls ended, 1.2 per minute: 70 succeeded, 3 failed, 0 cancelled; attempts: 0 ret")
    assert lines[2].startswith("ended   ")
    assert lines[2].endswith("at most 70")
    assert lines[3].endswith("at most 3")
    titles = "task ended failed retried lost wait p50 p95 run p50 p95 p99"
    assert " ".join(lines[5].split()) == titles
    rows = {line.split()[0]: line.split()[1:] for line in lines[6:8]}
    assert rows["shop:boom"][:4] == ["3", "3", "0", "0"]
    assert rows["shop:mail"] == ["70", "0", "0", "0", "9.0s", "9.0s", "1m30s", "1m30s", "1m30s"]
    (failure,) = [line for line in lines if "has no card" in line]
    assert failure.split()[:3] == ["3", "0", "shop:boom"]
    assert failure.endswith("ValueError: order <n> has no card")
    assert any(call.id in failure for call in calls)
    assert [line.split()[0] for line in lines if line.startswith("deploy")] == ["deploy"]


def test_the_document_is_that_of_the_api(app: App, holdfast: Command) -> None:
    Files(app).put(600, ended=4, seconds=2)
    told = holdfast("stats", "--json", "--since", "2h", "--step", "10m").json
    assert (told["total"]["ended"], told["step"], told["tasks"]["shop:mail"]["run"]["count"]) == (4, 600, 4)
    assert told["tasks"]["shop:mail"]["run"]["p95"] == pytest.approx(2.0, rel=0.033)
    assert sum(count for _, _, count in told["total"]["run"]["histogram"]) == 4
    assert sum(point["ended"] for point in told["points"]) == 4
    assert "histogram" not in told["points"][0]["run"]
    assert holdfast("stats", "--json", "--queue", "mail").json["total"]["ended"] == 0
    assert holdfast("stats", "--json", "--url", "sqlite:///shop.db", "--task", "shop:mail").json["total"]["ended"] == 4


def test_without_any_end_that_is_said(app: App, holdfast: Command) -> None:
    assert holdfast("stats").out.splitlines()[1].startswith("nothing has ended in that time")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--since", "soon"], "is no time"),
        (["--since", "2026-11-15T08:00:00"], "no time zone"),
        (["--since", "1h", "--until", "2h"], "before until"),
        (["--step", "7s"], "whole minutes"),
        (["--task", "ad"], "declares no task"),
    ],
)
def test_what_makes_no_sense_is_refused(app: App, holdfast: Command, options: list[str], said: str) -> None:
    answer = holdfast("stats", *options)
    assert (answer.code, said in answer.err) == (2, True), answer


def test_stored_text_does_not_act_on_a_terminal(app: App, holdfast: Command) -> None:
    now = Files(app).now
    failure = Failure(count=1, first_at=now, last_at=now, message=HOSTILE, where=HOSTILE, ids=[HOSTILE])
    cell = Cell(failed=1, errors={HOSTILE: failure}, slow={HOSTILE: (5.0, now)})
    name = name_of(start_of(now, 60), "w")
    file = StatsFile(cells={key_of(HOSTILE, HOSTILE): cell})
    entry = file_entry(app.name, WORKERS, name, file, kept_seconds=1e6)
    Files(app).run(lambda engine: engine.store.put_entry(entry))
    for options in ((), ("--json",)):
        out = holdfast("stats", *options).out
        assert "\x1b" not in out
        assert "\u202e" not in out
