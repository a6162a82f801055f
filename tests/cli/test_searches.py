"""A search as an argument: ``ps`` lists what it means, and ``cancel``, ``rerun`` and ``purge`` act on that."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.processes import Command


@pytest.fixture
def three(shop: Path, holdfast: Command) -> list[str]:
    """Calls that wait: two on the queue mail, one of them of a customer."""
    options = ([], ["--queue", "mail"], ["--queue", "mail", "--attribute", "customer=c 1"])
    return [holdfast("submit", "add", "1", "--delay", "1h", *each).out.strip() for each in options]


def test_ps_takes_a_search_beside_its_options(three: list[str], holdfast: Command) -> None:
    def listed(*arguments: str) -> list[str]:
        return [each["id"] for each in holdfast("ps", "--json", *arguments).json["invocations"]]

    first, second, third = three
    assert listed("task:add since:1h") == [third, second, first]
    assert listed('customer:"c 1"') == [third]
    assert listed("--", "-queue:mail") == [first]
    assert listed("task:add -queue:mail") == [first]
    assert listed("queue:mail", "--attribute", "customer=c 1") == [third]
    assert listed("queue:mail", "--queue", "default") == []
    assert listed("queue:mail", "--limit", "1") == [third]
    assert listed("queue:mail", "--limit", "1", "--before", third) == [second]
    wrong = holdfast("ps", "staus:failed")
    assert wrong.code == 2
    assert "did you mean status:? " in wrong.err
    assert "at character 1" in wrong.err


def test_all_that_a_search_means_is_cancelled_rerun_and_removed(three: list[str], holdfast: Command) -> None:
    first, second, third = three
    looked = holdfast("cancel", "--search", "queue:mail")
    assert looked.code == 0
    assert "2 invocations would be cancelled; nothing was done" in looked.err
    answer = holdfast("cancel", "--search", "queue:mail", "--reason", "no mail", "--yes")
    assert answer.code == 0
    assert "2 invocations cancelled" in answer.out
    assert holdfast("show", third, "--json").json["cancellation"]["reason"] == "no mail"
    assert holdfast("show", first, "--json").json["status"] == "registered"
    again = holdfast("cancel", "--search", "queue:mail", "--yes", "--json").json
    assert again["matched"] == 0
    rerun = holdfast("rerun", "--search", "status:cancelled", "--yes", "--json").json
    assert rerun["done"] == 2
    assert len(holdfast("ps", f"rerun:{second}", "--json").json["invocations"]) == 1
    assert holdfast("purge", "--search", "status:cancelled", "--yes", "--json").json["done"] == 2
    assert holdfast("show", second).code == 4


def test_a_rerun_has_other_arguments(three: list[str], holdfast: Command) -> None:
    first = three[0]
    holdfast("cancel", first)
    fresh = holdfast("rerun", first, "--arguments", "[5, 6]", "--json").json["reruns"][0]["id"]
    assert holdfast("show", fresh, "--json").json["arguments"] == {"args": [5, 6], "kwargs": {}}
    assert holdfast("rerun", first, "--arguments", '{"c": 1}').code == 2
    assert holdfast("rerun", "--status", "cancelled", "--arguments", "[1]", "--yes").code == 2


@pytest.mark.parametrize(
    "arguments",
    [["cancel"], ["cancel", "--search", ""], ["purge", "--search", "task:add", "--status", "failed"]],
    ids=" ".join,
)
def test_what_is_meant_has_to_be_said_once(three: list[str], holdfast: Command, arguments: list[str]) -> None:
    assert holdfast(*arguments).code == 2
