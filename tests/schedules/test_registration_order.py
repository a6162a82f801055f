"""What a runner does when it starts, in this order: modules, core tasks, then what code declares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import App
from holdfast.errors import ConfigurationError, InvalidSetting, UsageError
from holdfast.model.records import Entry

MODULE = """
from holdfast import cron, on_event
from {here} import the

the.steps.append("import")

@the.app.task(name="late", triggers=[on_event("made"), cron("0 0 1 1 *")])
def late() -> None: ...
"""


class The:
    app: App
    steps: list[Any]


the = The()


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    name = f"late_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(here=__name__))
    monkeypatch.syspath_prepend(tmp_path)
    the.steps = []
    with App("memory://", trigger_task_modules=[name]) as the.app:
        store = the.app.runtime.ready().store
        put, enrol = store.put_entry, store.enrol

        async def put_entry(entry: Entry, over: Entry | None = None) -> bool:
            the.steps.append((entry.app, entry.kind, entry.name.partition("#")[0]))
            return await put(entry, over)

        async def enrolled(record: Any) -> None:
            the.steps.append("enrol")
            await enrol(record)

        monkeypatch.setattr(store, "put_entry", put_entry)
        monkeypatch.setattr(store, "enrol", enrolled)
        yield the.steps
    sys.modules.pop(name, None)


def test_modules_then_core_tasks_then_schedules_then_triggers(steps: list[Any]) -> None:
    with the.app.runner():
        (runner,) = the.app.runners()
    began = [step for step in steps if isinstance(step, str) or step[1] in ("schedule", "trigger")]
    assert began[:6] == [
        "import",
        "enrol",
        ("default~core", "schedule", "holdfast:recover_running_invocations"),
        ("default~core", "schedule", "holdfast:recover_pending_invocations"),
        ("default", "schedule", "late"),
        ("default", "trigger", "late"),
    ]
    assert [name.partition("#")[0] for name in runner.declares] == ["schedule:late", "trigger:late"]
    assert "late" in runner.tasks
    assert the.app.invocations() == [], "registering fires nothing"


def test_a_module_that_is_not_there_is_named() -> None:
    with App("memory://", trigger_task_modules="nobody.has.this") as app:
        with pytest.raises(ConfigurationError, match=r"trigger_task_modules \(keyword\): the module 'nobody.has.this'"):
            app.runner().start()


@pytest.mark.parametrize("given", ["a b", [1], "a..b", 5])
def test_what_is_no_list_of_modules_is_refused(given: Any) -> None:
    with pytest.raises(InvalidSetting, match="names of modules"):
        App("memory://", trigger_task_modules=given)


@pytest.mark.parametrize("refused", ["declaring", "hooks"])
def test_a_runner_that_cannot_start_takes_itself_off_the_roster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    def refuse(*_: object) -> None:
        raise UsageError("not so")

    with App(f"sqlite:///{tmp_path}/shop.db") as app:
        if refused == "hooks":
            app.on_worker_start(lambda: refuse())
        else:
            monkeypatch.setattr("holdfast.schedules.declared.Declarations.register", refuse)
        app.task(name="late")(lambda: None)
        with pytest.raises(UsageError, match="not so"):
            app.runner().start()
        assert app.runners() == []
