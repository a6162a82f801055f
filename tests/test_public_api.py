"""The public names, pinned: a change here is a change for users."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys

import pytest

import holdfast

PUBLIC = [
    "App",
    "AsyncTask",
    "Context",
    "Fatal",
    "HoldfastError",
    "Invocation",
    "InvocationCancelled",
    "InvocationGroup",
    "ResultTimeout",
    "Retries",
    "RetryLater",
    "Secret",
    "SoftTimeout",
    "Status",
    "Task",
    "TaskFailed",
    "TimedOut",
    "UsageError",
    "__version__",
    "all_of",
    "any_of",
    "chain",
    "context",
    "cron",
    "every",
    "group",
    "hook",
    "on_event",
    "on_exception",
    "on_result",
    "on_status",
    "once",
    "patched",
    "scheduled",
    "sleep",
    "stream",
    "trigger",
]

ELSEWHERE = {
    "holdfast.app": "EmbeddedRunner",
    "holdfast.errors": "BlockingCall EventNotFound Expired InvalidSchedule InvalidTrigger InvocationNotFound "
    "InvocationRefused KeyTaken ScheduleExists StoreError TriggerFailed UnknownSchedule",
    "holdfast.invocation": "HistoryEntry InvocationRecord",
    "holdfast.retries": "Exponential FirstMatch Fixed Forever MoveTo Never Only Timetable",
    "holdfast.schedules": "ScheduleRecord",
    "holdfast.triggers": "Cause EventRecord Trigger from_arguments from_cause from_event from_exception from_result",
}


def test_the_public_names_are_these() -> None:
    assert holdfast.__all__ == PUBLIC
    assert len(PUBLIC) <= 40  # with workflows, hooks and streams


@pytest.mark.parametrize(("module", "names"), ELSEWHERE.items())
def test_a_name_that_was_at_the_top_says_where_it_is_now(module: str, names: str) -> None:
    for name in names.split():
        assert name in importlib.import_module(module).__dict__
        with pytest.raises(ImportError, match=f"{name} is in {module} now; write: from {module} import {name}"):
            exec(f"from holdfast import {name}")
        with pytest.raises(ImportError, match=f"from {module} import {name}"):
            getattr(holdfast, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        holdfast.nonsense  # noqa: B018


@pytest.mark.parametrize("name", [name for name in PUBLIC if not name.startswith("__")])
def test_every_public_name_is_there_and_explained(name: str) -> None:
    thing = getattr(holdfast, name)
    assert thing.__module__.startswith("holdfast.")
    assert len((thing.__doc__ or "").strip()) > 10, f"{name} has no docstring"


@pytest.mark.parametrize(
    "thing", [holdfast.App, holdfast.Invocation, holdfast.InvocationGroup, holdfast.Task, holdfast.AsyncTask]
)
def test_every_public_method_is_explained(thing: type) -> None:
    """An async twin (`asubmit`) is explained by its sister (`submit`)."""
    methods = {name: inspect.getdoc(method) for name, method in inspect.getmembers(thing, inspect.isfunction)}
    documented = {name for name, text in methods.items() if text}
    twins = {f"a{name}" for name in dir(thing)}
    assert {name for name in methods if not name.startswith("_")} - documented - twins == set()


def loaded_after(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after a statement."""
    script = f"import json, sys\n{statement}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(answer.stdout))


def test_importing_holdfast_loads_no_database_driver_and_no_command_line() -> None:
    heavy = {"sqlite3", "pymongo", "bson", "typer", "rich", "pytest", "hypothesis", "starlette", "jinja2", "pydantic"}
    assert loaded_after("import holdfast") & heavy == set()


@pytest.mark.slow
def test_sqlite_is_loaded_only_by_the_store_that_needs_it() -> None:
    script = (
        "from holdfast.clock import SystemClock\n"
        "from holdfast.store import open_store\n"
        "open_store({!r}, clock=SystemClock())"
    )
    assert "sqlite3" not in loaded_after(script.format("memory://"))
    assert "sqlite3" in loaded_after(script.format("sqlite:///unused.db"))


def test_the_testing_package_needs_no_test_framework() -> None:
    assert loaded_after("import holdfast.testing") & {"pytest", "hypothesis"} == set()
