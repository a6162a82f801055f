"""cancel: one or many, what is told, and what show and history say about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cli.processes import eventually
from tests.support.patience import patient

if TYPE_CHECKING:
    from conftest import Command, Process


def submitted(holdfast: Command, *arguments: str) -> str:
    return str(holdfast("submit", "--json", *arguments).json["id"])


def test_what_waits_is_cancelled_and_it_may_be_said_again(shop: Path, holdfast: Command) -> None:
    first, second = (submitted(holdfast, "add", number, "--delay", "1h") for number in "12")
    answer = holdfast("cancel", first, second[:-2], "--reason", "not wanted", "--by", "ann")
    assert (answer.code, answer.out) == (0, f"{first} is cancelled\n{second} is cancelled\n")
    again = holdfast("cancel", first, "--json")
    assert again.json == {"invocations": [{"id": first, "status": "cancelled"}]}
    shown = holdfast("show", first).out
    assert "add (cancelled): cancelled by ann: not wanted, " in shown
    assert holdfast("show", first, "--json").json["cancellation"]["by"] == "ann"
    last = holdfast("history", first, "--json").json["history"][-1]
    assert (last["status"], last["why"]) == ("cancelled", "cancelled by ann: not wanted")


def test_what_has_ended_stays_as_it_is(shop: Path, holdfast: Command, start: Callable[..., Process]) -> None:
    id = submitted(holdfast, "add", "1")
    start("run", "--workers", "0")
    eventually(lambda: holdfast("show", id, "--json").json["status"] == "success", "it succeeds")
    assert holdfast("cancel", id).out == f"{id} had ended before: success\n"
    assert holdfast("cancel", "0" * 26).code == 4


def test_a_running_one_is_told_across_processes(shop: Path, holdfast: Command, start: Callable[..., Process]) -> None:
    id = submitted(holdfast, "linger", "600")
    runner = start("run", "--workers", "1")
    runner.says("lingering")
    assert holdfast("cancel", id, "--reason", "enough").out == f"{id} is asked to end\n"
    eventually(
        lambda: holdfast("show", id, "--json").json["status"] == "cancelled", "it is cancelled", seconds=patient(8)
    )
    shown = holdfast("show", id).out
    assert "enough" in shown
    walked = [line["status"] for line in holdfast("history", id, "--json").json["history"]]
    assert walked == ["registered", "pending", "running", "cancelling", "cancelled"]
