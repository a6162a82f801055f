"""Whoever types the word of another library is told ours."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import App, UsageError, chain, group
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
    "made", [add.s(1), chain(add.s(1), add.s()), group([add.s(1)])], ids=["call", "chain", "group"]
)
def test_calls_that_belong_together_name_ours(made: Any) -> None:
    for word in words.CALLS:
        with pytest.raises(AttributeError, match=rf"has no method {word}\(\): write submit\(\)"):
            getattr(made, word)
    with pytest.raises(AttributeError, match="object has no attribute 'nonsense'"):
        made.nonsense  # noqa: B018
    with pytest.raises(UsageError, match=r"write .*\.then\("):
        made | add.s(2)


def test_chord_is_named() -> None:
    with pytest.raises(ImportError, match=r"group\(header\).then\(callback\)"):
        from holdfast import chord  # type: ignore[attr-defined]  # noqa: F401


def test_a_name_that_is_nobodys_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match="'Task' object has no attribute 'nonsense'"):
        add.nonsense  # noqa: B018
    with pytest.raises(ArgumentsDoNotBind) as raised:
        add.submit(1, nonsense=2)  # type: ignore[call-arg]
    assert "option" not in str(raised.value)
