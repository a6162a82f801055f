"""config: every setting, and where its value comes from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command


def test_config_tells_sources_and_hides_secrets(
    folder: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_CONCURRENCY", "3")
    monkeypatch.setenv("HOLDFAST_URL", "mongodb://bob:hunter2@host/db")
    answer = holdfast("config", "--json")
    assert "hunter2" not in answer.out
    rows = {row["name"]: row for row in answer.json["settings"]}
    assert (rows["concurrency"]["value"], rows["concurrency"]["source"]) == (3, "environment HOLDFAST_CONCURRENCY")
    assert "mongodb://bob:***@host/db" in holdfast("config").out


def test_config_of_an_app_shows_its_keywords(shop: Path, holdfast: Command) -> None:
    rows = {row["name"]: row for row in holdfast("config", "--json").json["settings"]}
    assert (rows["url"]["shown"], rows["url"]["source"]) == ("sqlite:///shop.db", "keyword")


def test_an_unknown_setting_is_an_error_that_suggests_the_right_one(
    folder: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_CONCURENCY", "3")
    answer = holdfast("config")
    assert answer.code == 1
    assert "Did you mean HOLDFAST_CONCURRENCY?" in answer.err
