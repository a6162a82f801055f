"""Whoever types the word of another library is told ours."""

from __future__ import annotations

import re
from typing import Any

import pytest

from holdfast import App, UsageError, chain, declaring, group
from holdfast.errors import ArgumentsDoNotBind
from holdfast.groups import words

app = App("memory://", name="shop")


@app.task
def add(x: int, y: int = 0) -> int:
    return x + y


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("delay", r"add.submit\(…\)"),
        ("apply_async", r"add.options\(delay=…, queue=…\).submit\(…\)"),
        ("send", r"add.submit\(…\)"),
        ("enqueue", r"add.submit\(…\)"),
        *[(word, "write ") for word in words.METHODS],
    ],
)
def test_a_method_of_another_library_names_ours(word: str, ours: str) -> None:
    with pytest.raises(AttributeError, match=ours) as raised:
        getattr(add, word)
    assert raised.value.name == word
    assert not hasattr(add, word)


@pytest.mark.parametrize(("word", "ours"), [("countdown", "delay="), ("eta", "at="), *[(w, "") for w in words.OPTIONS]])
def test_an_option_of_another_library_names_ours(word: str, ours: str) -> None:
    with pytest.raises(UsageError, match=f"The option {word}= is {ours}"):
        add.options(**{word: 3})  # type: ignore[misc]
    with pytest.raises(ArgumentsDoNotBind, match=f"The option {word}= is {ours}"):
        add.submit(1, **{word: 3})


@pytest.mark.parametrize(
    ("word", "ours"),
    [("rate_limit", "rate=, over"), ("time_limit", "timeout="), ("max_retries", "retries="), ("bind", r"context\(\)")],
)
def test_an_option_of_a_task_elsewhere_names_ours(word: str, ours: str) -> None:
    with pytest.raises(UsageError, match=rf"a task has no option {word}\. Here it is {ours}"):
        app.task(**{word: 3})  # type: ignore[call-overload]


def test_our_words_for_options_of_tasks_are_options() -> None:
    for word, ours in words.TASK_OPTIONS.items():
        assert word not in declaring._OF_TASKS
        name = re.match(r"(\w+)=", ours)
        assert name is None or name[1] in declaring._OF_TASKS


@pytest.mark.parametrize(
    "made", [add.s(1), chain(add.s(1), add.s()), group([add.s(1)])], ids=["call", "chain", "group"]
)
def test_calls_that_belong_together_name_ours(made: Any) -> None:
    for word, ours in words.CALLS.items():
        with pytest.raises(AttributeError, match=rf"has no method {word}\(\): write {re.escape(ours)}"):
            getattr(made, word)
        assert hasattr(made, ours.partition("(")[0]) or word in ("set", "options")
    with pytest.raises(AttributeError, match="object has no attribute 'nonsense'"):
        made.nonsense  # noqa: B018
    with pytest.raises(UsageError, match=r"write .*\.then\("):
        made | add.s(2)


def test_handles_name_ours() -> None:
    one, some = add.submit(1), group([add.s(1)]).submit()
    for handle in (one, some, chain(add.s(1), add.s()).submit()):
        assert handle._ours
        for word, ours in handle._ours.items():
            with pytest.raises(AttributeError, match=f"'{word}': write {re.escape(ours)}$"):
                getattr(handle, word)
            assert ours.endswith("submit that") or hasattr(handle, re.match(r"\w+", ours)[0])  # type: ignore[index]
        with pytest.raises(AttributeError, match=r"object has no attribute 'nonsense'$"):
            handle.nonsense  # noqa: B018


def test_a_group_is_of_a_list_and_a_link_takes_what_comes_before() -> None:
    with pytest.raises(UsageError, match=r"write group\(\[a.s\(1\), b.s\(2\)\]\)"):
        group(add.s(1), add.s(2))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"group\(\) takes a list"):
        group(add.s(1))  # type: ignore[arg-type]
    with pytest.raises(
        ArgumentsDoNotBind, match=r"Its first argument comes from the call before; with si\(…\), none does"
    ):
        chain(add.s(1), add.s(1, 2, 3)).submit()


def test_chord_is_named() -> None:
    with pytest.raises(ImportError, match=r"group\(header\).then\(callback\)"):
        from holdfast import chord  # type: ignore[attr-defined]  # noqa: F401


def test_a_name_that_is_nobodys_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match="'Task' object has no attribute 'nonsense'"):
        add.nonsense  # noqa: B018
    with pytest.raises(ArgumentsDoNotBind) as raised:
        add.submit(1, nonsense=2)  # type: ignore[call-arg]
    assert "option" not in str(raised.value)
