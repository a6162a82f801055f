"""Runs that have ended are replayed in another process with another hash seed."""

from __future__ import annotations

from typing import Any

import pytest
from tests.testing import hashed

from holdfast.errors import ReplayMismatch
from holdfast.testing import other_process, testing_app


@pytest.mark.parametrize("workflow", [hashed.in_set_order, hashed.plain_in_set_order])
def test_a_loop_over_a_set_is_found(workflow: Any) -> None:
    with pytest.raises(ReplayMismatch) as caught, testing_app(hashed.app) as t:
        workflow.submit(20)
        t.drain(check=True)
    said = str(caught.value)
    assert "was recorded with other arguments than those of charge#" in said
    assert said.count("hashed.py:") == 2
    assert "in another process, with another hash seed" in said


def test_a_body_that_sorts_fits_and_its_children_are_no_effects() -> None:
    with testing_app(hashed.app) as t:
        hashed.in_order.submit(20)
        t.advance("2h", check=True)
        t.assert_submitted(hashed.mail, "a@b.c")


def test_other_process_can_be_turned_off() -> None:
    with testing_app(hashed.app, other_process=False) as t:
        hashed.in_set_order.submit(20)
        t.drain(check=True)


def test_what_a_test_has_changed_is_not_changed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashed, "SETTING", "patched")
    with pytest.raises(ReplayMismatch, match="use what this test has changed"), testing_app(hashed.app):
        assert hashed.by_setting.submit().result() == "patched"


def test_the_error_of_a_test_comes_first() -> None:
    with pytest.raises(ZeroDivisionError), testing_app(hashed.app) as t:
        hashed.in_set_order.submit(20)
        t.drain(check=True)
        raise ZeroDivisionError


def test_a_body_inside_of_a_function_is_replayed_here_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(other_process, "_ask", asked.append)
    with testing_app() as t:

        @t.app.workflow
        async def local() -> int:
            return 1

        assert local.submit().result() == 1
    assert asked == []


def test_one_process_serves_many_tests() -> None:
    pids = set()
    for _ in range(2):
        with testing_app(hashed.app) as t:
            hashed.in_order.submit(3)
            t.advance("2h", check=True)
        assert other_process._process is not None
        pids.add(other_process._process.pid)
    assert len(pids) == 1


def test_a_process_that_dies_is_told_and_fails_no_test() -> None:
    t = testing_app(hashed.app).__enter__()
    hashed.in_order.submit(3)
    t.advance("2h", check=True)
    assert other_process._process is not None
    other_process._process.kill()
    other_process._process.poll = lambda: None  # type: ignore[method-assign]  # nobody has noticed
    with pytest.warns(UserWarning, match="was not replayed in another process"):
        t.__exit__(None, None, None)
    with testing_app(hashed.app) as t:
        hashed.in_order.submit(3)
        t.advance("2h", check=True)
