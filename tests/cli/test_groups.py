"""groups, groups show and cancel, and the family in show: what they tell and do, without any process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.processes import Command

from holdfast import App, chain, group
from holdfast.groups.looking import Relative, drawn
from holdfast.groups.rules import done_id, error_id


@pytest.fixture
def app(shop: Path) -> Iterator[App]:
    """The shop's store, as another process has it, with tasks of its own."""
    with App("sqlite:///shop.db") as app:

        @app.task(name="shop:add")
        def add(a: int, b: int = 0) -> int:
            return a + b

        @app.task(name="shop:total")
        def total(numbers: list[int]) -> int:
            return sum(numbers)

        app.prepare()
        yield app


def test_groups_are_listed_shown_and_cancelled(app: App, holdfast: Command) -> None:
    add, total = app.get_task("shop:add"), app.get_task("shop:total")
    assert holdfast("groups").out == "no groups\n"
    found = group([add.s(n) for n in range(3)]).then(total).submit()
    plain = group([add.s(1)]).submit()
    listed = holdfast("groups", "--json").json["groups"]
    assert [(each["id"], each["size"], each["state"], each["then"]) for each in listed] == [
        (plain.id, 1, "nothing follows", None),
        (found.id, 3, "open", "shop:total"),
    ]
    assert listed[1]["callback"] == done_id(found.id or "")
    shown = holdfast("groups", "show", (found.id or "")[:20], "--json").json
    assert (shown["id"], shown["counts"]) == (found.id, {"registered": 3})
    assert holdfast("groups", "show", (found.id or "")[-8:], "--json").json["id"] == found.id
    assert "is too short for a part of an id" in holdfast("groups", "show", "01").err
    assert "members      3 registered" in holdfast("groups", "show", found.id or "").out
    done = holdfast("groups", "cancel", found.id or "", "--reason", "enough", "--by", "ann")
    assert done.out == f"group {found.id}: 3 cancelled\n"
    assert found[0].record().reason == "cancelled by ann: enough"


def test_what_is_no_group_is_refused(app: App, holdfast: Command) -> None:
    id = app.get_task("shop:add").submit(1).id
    assert holdfast("groups", "show", id).code == 4
    assert holdfast("groups", "show", "nonsense!").code == 4
    found = group([app.get_task("shop:add").s(1)]).submit()
    told = holdfast("show", found.id or "")
    assert (told.code, f"{found.id} is a group: holdfast groups show" in told.err) == (4, True)


def test_show_draws_the_family(app: App, holdfast: Command) -> None:
    add, total = app.get_task("shop:add"), app.get_task("shop:total")
    run: Any = chain(add.s(1), add, add.s(b=2)).on_error(total).submit()
    family = holdfast("show", run.id, "--json").json["family"]
    assert [(each["id"], each["status"], each["role"], each["is_self"]) for each in family] == [
        (run.ids[0], "registered", "link 1 of 3", True),
        (run.ids[1], "not called", "link 2 of 3", False),
        (run.ids[2], "not called", "link 3 of 3", False),
        (error_id(run.id), "not called", "on an error", False),
    ]
    found = group([add.s(n) for n in range(3)]).then(total).submit()
    told = holdfast("show", found[1].id).out
    assert f"group {found.id} open  member 2 of 3" in told
    assert f"└─ shop:add {found[1].id} registered  ◀ this" in told
    assert f"{found.callback and found.callback.id} not called  follows the group" in told
    assert "family" in holdfast("show", app.get_task("shop:add").submit(1).id, "--json").json


def test_show_draws_the_group_of_a_callback(app: App, holdfast: Command) -> None:
    total = app.get_task("shop:total")
    done: Any = group([]).then(chain(total, total)).submit()
    told = holdfast("show", done.callback.id).out
    assert f"group {done.id} done  of 0\nshop:total {done.callback.id} registered  link 1 of 2  ◀ this" in told


def test_branches_go_on_below_what_stands_between() -> None:
    lines = [Relative(depth=depth, id=str(depth), task="a", status="") for depth in (0, 1, 2, 1, 2)]
    assert [branch for branch, _ in drawn(lines)] == ["", "├─ ", "│  └─ ", "└─ ", "   └─ "]


def test_why_names_what_follows(app: App, holdfast: Command) -> None:
    add, total = app.get_task("shop:add"), app.get_task("shop:total")
    run: Any = chain(add.s(1), total).submit()
    assert "After a success, shop:total follows it." in holdfast("why", run.id).out
    found = group([add.s(1)]).then(total).submit()
    assert f"The group {found.id} waits for its end: holdfast groups show" in holdfast("why", found[0].id).out
