"""Pages in use: actions with their preview, reason and twin; keys; what stands still while one is about to click."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import typer
from tests.browser.conftest import Told
from tests.browser.test_every_page import PATHS, addresses
from tests.support.patience import eventually

from holdfast.cli import program

pytestmark = pytest.mark.xdist_group("browser")
Windows = Callable[..., Any]
COMMANDS: Any = typer.main.get_command(program._make())


def close(page: Any) -> None:
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")


@pytest.mark.parametrize("path", PATHS)
def test_each_action_shows_what_it_will_touch_and_its_twin(story: Told, window: Windows, path: str) -> None:
    page = window().open(addresses(story)[path][0])
    seen = set[str]()
    for number in range(page.locator("button[data-action]:visible:enabled").count()):
        button = page.locator("button[data-action]:visible:enabled").nth(number)
        title = button.inner_text()
        if title in seen:
            continue
        seen.add(title)
        button.click()
        dialog = page.locator("dialog")
        assert dialog.locator("h2").inner_text() == title
        assert dialog.get_by_label("Reason").count() == 1
        if (twin := button.get_attribute("data-twin")) is not None:
            assert twin in dialog.inner_text()
            assert_is_a_command(twin)
        if button.get_attribute("data-no-preview") is None:
            eventually(lambda dialog=dialog: re.sub("…", "", said(dialog)).strip())
        close(page)


def said(dialog: Any) -> str:
    """Return what the dialog says that the action will touch, or what is missing."""
    return str(dialog.locator(".preview").inner_text() + dialog.locator(".problem").inner_text())


def assert_is_a_command(twin: str) -> None:
    """The twin names a command that exists, with options that it has."""
    first, *words = shlex.split(twin)
    assert first == "holdfast"
    command = COMMANDS
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    options = {name for each in command.params for name in getattr(each, "opts", ())}
    assert {word for word in words if word.startswith("--")} <= options, twin


def test_a_queue_is_resumed_and_paused_with_a_reason(story: Told, window: Windows) -> None:
    page = window().open("/queues")
    page.get_by_role("button", name="Resume mail").click()
    page.locator("dialog").get_by_label("Reason").fill("the provider is back")
    page.locator("dialog button[type=submit]").click()
    page.get_by_role("button", name="Pause mail").wait_for()
    assert "is resumed" in page.locator(".toast").inner_text()
    assert {each.name: each.pause for each in story.app.queues.list()}["mail"] is None
    page.get_by_role("button", name="Pause mail").click()
    page.locator("dialog").get_by_label("Reason").fill("the provider is down")
    page.locator("dialog .preview p").wait_for()  # before it is there, nothing is done
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Resume mail").wait_for()
    pause = {each.name: each.pause for each in story.app.queues.list()}["mail"]
    assert pause is not None
    assert pause.reason == "the provider is down"


def test_a_mistake_is_said_in_the_dialog_and_changes_nothing(story: Told, window: Windows) -> None:
    opened = window()
    page = opened.open("/limits/charge")
    page.get_by_role("button", name="Change").click()
    page.locator("dialog").get_by_label("At once").fill("0")
    page.locator("dialog .problem", has_text="expected a whole number").wait_for()
    close(page)
    opened.said = [each for each in opened.said if "400" not in each]  # the browser's own line about the refusal
    assert {each.name: each.limit for each in story.app.limits.list()}["charge"] == 2


def test_keys_move_open_and_explain(story: Told, window: Windows) -> None:
    page = window().open("/queues")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.locator("tr.is-current").count() == 1
    first = page.locator("tr.is-current th").inner_text()
    page.keyboard.press("k")
    assert page.locator("tr.is-current th").inner_text() != first
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keys").wait_for()
    close(page)
    page.goto(f"{story.address}/events")
    page.keyboard.press("/")
    page.keyboard.type("order.created")
    page.keyboard.press("Enter")
    page.wait_for_url("**/events?name=order.created")
    page.keyboard.press("g")
    page.keyboard.press("t")
    page.wait_for_url("**/tasks")
