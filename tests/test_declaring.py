"""The options of a task that say which calls share a limit or a waiting call, by their present and older names."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import App, UsageError
from holdfast.declaring import OLDER_NAMES, TaskOptions, definition_of
from holdfast.model.limits import Limit
from holdfast.runtime.definition import ALL_ARGUMENTS, TaskDefinition


def bill(customer: str, month: int = 1, *lines: str) -> None:
    """The function of every task here."""


def declared(**options: Any) -> TaskDefinition:
    return definition_of(bill, TaskOptions(name="bill", **options))  # type: ignore[typeddict-item]


def facts(task: TaskDefinition) -> tuple[object, ...]:
    shared = (task.limit, task.limit_by, task.unique, task.unique_by, task.raises_when_different)
    return *shared, task.pacing, task.fingerprint


SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"running_concurrency": "disabled"}, {}),
    ({"running_concurrency": "task"}, {"limit": 1}),
    ({"running_concurrency": "task", "concurrency_limit": 3}, {"limit": 3}),
    ({"running_concurrency": "arguments"}, {"limit_by": "*"}),
    ({"running_concurrency": "arguments"}, {"limit_by": ["*"], "limit": 1}),
    ({"running_concurrency": "keys", "key_arguments": ["customer"]}, {"limit_by": "customer"}),
    (
        {"running_concurrency": "keys", "key_arguments": ["month", "customer"], "concurrency_limit": 2},
        {"limit": 2, "limit_by": ["customer", "month"]},
    ),
    ({"running_concurrency": "task", "reroute_on_concurrency_control": False}, {"limit": 1, "when_full": "refuse"}),
    ({"running_concurrency": "task", "reroute_on_concurrency_control": True}, {"limit": 1, "when_full": "wait"}),
    ({"registration_concurrency": "task"}, {"unique": True}),
    ({"registration_concurrency": "arguments"}, {"unique_by": "*"}),
    ({"registration_concurrency": "keys", "key_arguments": ["month"]}, {"unique_by": ["month"]}),
    (
        {"registration_concurrency": "task", "on_diff_non_key_args_raise": True},
        {"unique": True, "when_different": "raise"},
    ),
    (
        {"registration_concurrency": "keys", "running_concurrency": "keys", "key_arguments": ["month"]},
        {"unique_by": "month", "limit_by": "month"},
    ),
    (
        {"registration_concurrency": "arguments", "running_concurrency": "keys", "key_arguments": ["month"]},
        {"unique_by": "*", "limit_by": "month"},
    ),
    ({"debounce": 5, "key_arguments": ["month"]}, {"debounce": 5, "unique_by": "month"}),
    ({"throttle": 5}, {"throttle": 5, "unique_by": None, "limit": None}),
    ({"concurrency_limit": 2, "limit_by": "month"}, {"limit": 2, "limit_by": "month"}),
]


@pytest.mark.parametrize(("older", "present"), SAME)
def test_older_names_mean_what_they_meant(older: dict[str, Any], present: dict[str, Any]) -> None:
    assert facts(declared(**older)) == facts(declared(**present))


def test_what_the_options_say() -> None:
    assert facts(declared())[:5] == (None, (), False, (), False)
    assert declared(limit=3, when_full="refuse").limit == Limit(3, waits=False)
    assert declared(limit_by="*").limit_by == ALL_ARGUMENTS
    assert declared(unique_by=["month", "customer"]).unique_by == ("customer", "month")
    assert declared(unique_by="month", when_different="raise").raises_when_different


VALUES = {
    "limit": 1,
    "limit_by": "month",
    "when_full": "wait",
    "unique": True,
    "unique_by": "month",
    "when_different": "keep",
    "running_concurrency": "task",
    "key_arguments": ["month"],
    "concurrency_limit": 1,
    "reroute_on_concurrency_control": True,
    "registration_concurrency": "task",
    "on_diff_non_key_args_raise": False,
}


@pytest.mark.parametrize(("older", "present"), [(old, new) for old, news in OLDER_NAMES.items() for new in news])
def test_an_option_by_both_of_its_names_is_refused(older: str, present: str) -> None:
    with pytest.raises(UsageError, match=f"{older}= and {present}= are the same option"):
        declared(**{name: VALUES[name] for name in (older, present)})


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("^limit=0: expected a whole number from 1 to 10,000", {"limit": 0}),
        ("^limit=True: expected a whole number", {"limit": True}),
        ("^concurrency_limit=0: expected", {"running_concurrency": "task", "concurrency_limit": 0}),
        ("^limit_by: the task has no parameter 'size'; it has: customer, month, lines", {"limit_by": "size"}),
        ("^unique_by: the task has no parameter 'size'", {"unique_by": ["month", "size"]}),
        ("^key_arguments: the task has no parameter '*'", {"running_concurrency": "keys", "key_arguments": ["*"]}),
        (r"^limit_by=\['\*', 'month'\]: '\*' means all", {"limit_by": ["*", "month"]}),
        (r"^unique_by=\[\] names no argument", {"unique_by": []}),
        ("^when_full='drop': expected 'wait' or 'refuse'", {"limit": 1, "when_full": "drop"}),
        ("^when_different='ask': expected 'keep' or 'raise'", {"unique": True, "when_different": "ask"}),
        ('^when_full="refuse" needs limit=', {"when_full": "refuse"}),
        ("^concurrency_limit= and reroute_on.* need running_concurrency=", {"reroute_on_concurrency_control": False}),
        ("^unique='yes': expected True or False", {"unique": "yes"}),
        ("^unique=False and unique_by= contradict", {"unique": False, "unique_by": "month"}),
        ("^when_different= needs a dedup key, .* unique= or unique_by=", {"when_different": "raise"}),
        ("^on_diff_non_key_args_raise= needs a .* registration_concurrency=", {"on_diff_non_key_args_raise": True}),
        ("^unique= contradicts debounce= .*unique_by=$", {"debounce": 1, "unique": True}),
        ("^registration_concurrency= contradicts .*key_arg", {"debounce": 1, "registration_concurrency": "task"}),
        ("throttle= contradicts when_different=", {"throttle": 1, "unique_by": "month", "when_different": "raise"}),
        ("throttle= contradicts on_diff_non_key_args_raise=", {"throttle": 1, "on_diff_non_key_args_raise": True}),
        ("and limit_by= goes by them", {"debounce": 1, "limit_by": "month"}),
        ("and running_concurrency= goes by", {"debounce": 1, "running_concurrency": "arguments"}),
        ("expected names in a list", {"running_concurrency": "keys", "key_arguments": "month"}),
    ],
)
def test_a_refusal_speaks_of_the_name_that_was_given(match: str, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=match):
        declared(**options)


def test_a_call_of_a_task_with_older_names_is_told_of_these() -> None:
    task = App("memory://").task(name="bill", registration_concurrency="task")(bill)
    with pytest.raises(UsageError, match="contradicts the registration_concurrency= of bill"):
        task.options(debounce=1)
    with pytest.raises(UsageError, match="It is declared for all of them"):
        task.options(limit=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("given", [5, None, True, [1, "customer"], [["customer"]], b"customer", {"customer": 1}, len])
@pytest.mark.parametrize("option", ["limit_by", "unique_by", "key_arguments"])
def test_names_of_arguments_that_are_none_are_refused(option: str, given: object) -> None:
    more = {"running_concurrency": "keys"} if option == "key_arguments" else {}
    if given is None and option != "key_arguments":
        assert declared(**{option: given}).limit_by == ()
        return
    with pytest.raises(UsageError, match=f"{option}=.*expected names of arguments"):
        declared(**{option: given}, **more)


def test_a_switch_is_true_or_false() -> None:
    with pytest.raises(UsageError, match="reroute_on_concurrency_control='no': expected True or False"):
        declared(running_concurrency="task", reroute_on_concurrency_control="no")


# --- rates


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rate": "0/s"}, "expected 1 to 1,000,000 calls"),
        ({"rate": "-1/s"}, "expected calls and a time"),
        ({"rate": "100"}, "expected calls and a time"),
        ({"rate": 5}, "rate=5: expected calls and a time"),
        ({"rate": "100/fortnight"}, "rate='100/fortnight': 'fortnight' is no time"),
        ({"rate": "1/0s"}, "in a time from 1ms to 366d"),
        ({"rate": "1/s", "burst": 0}, "burst=0: expected a whole number"),
        ({"rate": "1/s", "burst": True}, "burst=True: expected a whole number"),
        ({"burst": 3}, "burst= needs rate="),
        ({"rate_name": "api"}, "rate_name= needs rate="),
        ({"rate": "1/s", "rate_by": "nobody"}, "no parameter 'nobody'"),
        ({"rate": "1/s", "rate_by": []}, "names no argument"),
        ({"rate": "1/s", "rate_name": "a|b"}, "no name for a rate"),
    ],
)
def test_a_rate_that_has_no_meaning_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        declared(**options)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"rate": "1/s", "rate_name": "api"}, {"rate": "2/s", "rate_name": "api"}),
        ({"rate": "1/s", "rate_name": "api"}, {"rate": "1/s", "burst": 3, "rate_name": "api"}),
        ({"rate": "1/s", "rate_name": "api"}, {"rate": "1/s", "rate_name": "api", "when_full": "refuse"}),
        ({"rate": "1/s"}, {"rate": "2/s", "rate_name": "first"}),
        ({"rate": "2/s", "rate_name": "second"}, {"rate": "1/s"}),
    ],
)
def test_tasks_that_share_a_bucket_declare_the_same_rate(first: dict[str, Any], second: dict[str, Any]) -> None:
    """The calls of a task with a rate of its own share a bucket under the name of the task."""
    app = App("memory://", name="shop")
    app.task(name="first", **first)(bill)
    with pytest.raises(UsageError, match=r"declare the same"):
        app.task(name="second", **second)(bill)
