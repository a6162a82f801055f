"""A workflow that got a version: the names that commands take, its schedules and triggers, and `why` for older runs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.processes import Command, eventually
from tests.support.patience import patient

from holdfast import App, on_status

FIRST = """
from holdfast import App

app = App("sqlite:///shop.db", poll_interval_seconds=0.1)

@app.workflow
async def checkout(order: str) -> str:
    return f"first {order}"
"""
BY_URL = ("--url", "sqlite:///shop.db")
SECOND = FIRST.replace("@app.workflow", '@app.workflow(version="2")').replace("first", "second")


@pytest.fixture
def deployed(folder: Path, holdfast: Command) -> Path:
    """A folder with a waiting run and a schedule of the first code, and then the second code."""
    (folder / "shop.py").write_text(FIRST)
    assert holdfast("submit", "checkout", "1").code == 0
    assert holdfast("schedules", "create", "nightly", "checkout", "7", "--every", "1d").code == 0
    (folder / "shop.py").write_text(SECOND)
    sys.modules.pop("shop", None)
    return folder


def with_runner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("shop").app.runner()


def test_a_workflow_is_found_without_its_version(deployed: Path, holdfast: Command) -> None:
    for name in ("checkout", "shop:checkout", "checkout@2", "shop:checkout@2"):
        assert holdfast("submit", name, "2", "--json").json["task"] == "shop:checkout@2"
    listed = holdfast("ps", "--task", "shop:checkout", "--json").json["invocations"]
    assert sorted(each["task"] for each in listed) == ["shop:checkout", *["shop:checkout@2"] * 4]
    listed = holdfast("ps", "--task", "checkout@2", "--json").json["invocations"]
    assert {each["task"] for each in listed} == {"shop:checkout@2"}


def test_check_takes_this_version_only(deployed: Path, holdfast: Command) -> None:
    every = holdfast("workflow", "check")
    assert (every.code, "not declared" in every.out) == (1, True)
    assert holdfast("workflow", "check", "--task", "shop:checkout").code == 0


def test_two_versions_in_one_program_need_the_whole_name(folder: Path, holdfast: Command) -> None:
    (folder / "shop.py").write_text(SECOND + SECOND.split("\n\n", 1)[1].replace('"2"', '"3"').partition("\n\n")[2])
    answer = holdfast("submit", "checkout", "1")
    assert answer.code != 0
    assert "'checkout' may be shop:checkout@2 or shop:checkout@3; write the whole name" in answer.err


def test_a_schedule_of_an_older_version_is_told_of(
    deployed: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "'nightly' calls shop:checkout, which no living runner knows, so its calls wait"
    helps = "holdfast schedules update nightly shop:checkout@2"
    assert said not in holdfast("schedules").err, "no runner lives: nothing is known"
    with with_runner(deployed, monkeypatch):
        for words in (("schedules",), ("schedules", "show", "nightly")):
            assert f"{said}: {helps}" in holdfast(*words, *BY_URL).err
    assert holdfast("schedules", "update", "nightly", "shop:checkout@2", "7").code == 0
    sys.modules.pop("shop")
    with with_runner(deployed, monkeypatch):
        assert said not in holdfast("schedules", *BY_URL).err


@pytest.mark.parametrize("by_name", [True, False])
def test_a_trigger_hears_of_every_version(tmp_path: Path, by_name: bool) -> None:
    with App(f"sqlite:///{tmp_path}/shop.db", poll_interval_seconds=0.1) as old:

        @old.workflow(name="shop:checkout")
        async def first(order: str) -> str:
            return order

        before = first.submit("1")
    with App(f"sqlite:///{tmp_path}/shop.db", poll_interval_seconds=0.1) as app:

        @app.workflow(name="shop:checkout", version="2")
        async def checkout(order: str) -> str:
            return order

        @app.task(name="shop:thank", triggers=[on_status("shop:checkout" if by_name else checkout)])
        def thank() -> None: ...

        with app.runner(), old.runner():
            assert before.result(patient(30)) == "1"
            assert checkout.submit("2").result(patient(30)) == "2"

            def causes() -> set[str]:
                made = app.invocations(task="shop:thank")
                return {each.origin.sources[0].name for each in made if each.origin is not None}

            eventually(
                lambda: causes() == {"shop:checkout", "shop:checkout@2"}, lambda: str(causes()), seconds=patient(20)
            )
