"""Work with pages as an operator does: search, brush, select all that match, fill in forms, copy the command."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.browser.conftest import Told
from tests.browser.test_using_pages import assert_is_a_command, close

pytestmark = pytest.mark.xdist_group("browser")
Windows = Callable[..., Any]


def test_a_search_is_completed_by_keys(window: Windows) -> None:
    page = window().open("/invocations")
    page.keyboard.press("/")
    page.keyboard.type("task:ch")
    page.get_by_role("option", name="task:charge").wait_for()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.keyboard.type("status:fai")
    page.get_by_role("option", name="status:failed").wait_for()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Tab")
    assert page.get_by_label("Search").input_value() == "task:charge status:failed "
    page.get_by_label("Search").press("Enter")
    page.wait_for_url("**/invocations?q=task*")
    assert {each.inner_text() for each in page.locator("#found td .status").all()} == {"failed"}


def test_a_drag_over_the_chart_narrows_the_time(window: Windows) -> None:
    page = window().open("/invocations?q=task:charge")
    columns = page.locator("svg[data-brush] a[data-since]")
    first, last = columns.nth(columns.count() - 4), columns.nth(columns.count() - 2)
    since, until = first.get_attribute("data-since"), last.get_attribute("data-until")
    begin, end = first.bounding_box(), last.bounding_box()
    page.mouse.move(begin["x"] + 2, begin["y"] + 30)
    page.mouse.down()
    page.mouse.move(end["x"] + 2, begin["y"] + 30, steps=4)
    page.mouse.up()
    page.wait_for_url("**since*")
    assert parse_qs(urlsplit(page.url).query)["q"] == [f"task:charge since:{since} until:{until}"]


def test_all_that_match_are_previewed_with_their_number(story: Told, window: Windows) -> None:
    page = window().open("/invocations?q=task:total")
    page.locator("[data-select-page]").check()
    page.get_by_role("button", name="Select all that match").click()
    number = page.locator("[data-selected]", has_text="that match").inner_text().split()[1]
    page.get_by_role("button", name="Rerun").click()
    dialog = page.locator("dialog")
    dialog.locator(".preview p", has_text=f"{number} invocations would be run again").wait_for()
    assert "holdfast rerun --search task:total" in dialog.inner_text()
    close(page)


def test_the_twin_says_what_the_form_says(story: Told, window: Windows) -> None:
    page = window().open("/limits/charge")
    page.get_by_role("button", name="Change").click()
    dialog = page.locator("dialog")
    dialog.get_by_label("At once").fill("5")
    dialog.get_by_label("Reason").fill("ann's list")
    assert twin_of(dialog) == ["holdfast", "limits", "set", "charge", "--limit", "5", "--reason", "ann's list"]
    close(page)
    page.goto(f"{story.address}/invocations/{story.ids['failed']}")
    page.get_by_role("button", name="Keep for").click()
    assert twin_of(dialog) == ["holdfast", "archive", "retain", "30d", story.ids["failed"]]
    close(page)
    page.goto(f"{story.address}/hooks")
    page.get_by_role("button", name="Resume approve:o-77").click()
    dialog.get_by_label("by").fill("ann")
    assert twin_of(dialog)[3:] == ["approve:o-77", '{"by":"ann","approved":true}']
    close(page)


def twin_of(dialog: Any) -> list[str]:
    text = dialog.locator("code").inner_text()
    assert_is_a_command(text)
    return shlex.split(text)


def test_a_task_is_run_by_its_form_and_the_audit_record_has_the_reason(story: Told, window: Windows) -> None:
    page = window().open("/tasks/needs_gpu")
    page.get_by_role("button", name="Run it").click()
    dialog = page.locator("dialog")
    dialog.get_by_label("prompt").fill("a dog")
    dialog.get_by_label("Reason").fill("to see it wait")
    dialog.locator(".preview li", has_text="needs_gpu(prompt='a dog')").wait_for()
    dialog.locator("button[type=submit]").click()
    page.wait_for_url("**/invocations/*")
    assert "no live runner serves the queue 'gpu'" in page.locator("#why").inner_text()
    page.goto(f"{story.address}/audit?action=invocation.submit")
    assert "to see it wait" in page.locator("tbody tr").first.inner_text()


def test_narrow_tables_stack_with_labels(window: Windows) -> None:
    page = window(width=375).open("/queues")
    row = page.locator("#queues tr", has_text="gpu")
    label = "each => getComputedStyle(each, '::before').content"
    assert "Waiting" in [each.evaluate(label).strip('"').strip() for each in row.locator("td").all()]
    box = row.get_by_role("button").bounding_box()
    assert box["x"] + box["width"] <= 375, "the action can be reached without a sideways scroll"


def test_the_keys_of_all_pages_are_listed(window: Windows) -> None:
    page = window().open("/")
    page.keyboard.press("?")
    said = page.get_by_role("dialog", name="Keys").inner_text()
    assert all(name in said for name in ("g q", "Queues and limits", "g r", "Runners"))
    close(page)
