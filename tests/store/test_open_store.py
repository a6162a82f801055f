"""A store is found by the scheme of its URL, and imported only then."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import holdfast.store
from holdfast.clock import Clock, SystemClock
from holdfast.errors import ConfigurationError, MissingExtra, UnknownStore
from holdfast.store import open_store, schemes
from holdfast.store.contract import Observe
from holdfast.store.memory.store import MemoryStore
from holdfast.store.sqlite.store import SqliteStore
from holdfast.testing import FakeClock


def plug_in(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    entry = EntryPoint(name, value, holdfast.store.GROUP)
    monkeypatch.setattr(holdfast.store, "entry_points", lambda group: [entry] if group == entry.group else [])


def test_our_own_stores_are_found_without_being_installed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(holdfast.store, "entry_points", lambda group: [])
    assert schemes().keys() >= {"memory", "sqlite"}
    assert isinstance(open_store("memory://", clock=SystemClock()), MemoryStore)
    assert isinstance(open_store(f"sqlite:///{folder}/s.db", clock=SystemClock()), SqliteStore)
    assert list(folder.iterdir()) == [], "nothing is touched before `open`"


def test_a_misspelt_scheme_gets_a_suggestion() -> None:
    with pytest.raises(UnknownStore, match=r"begin with sqlit://.*memory://, .*Did you mean sqlite://\?"):
        open_store("sqlit:///shop.db", clock=SystemClock())


def test_an_unknown_scheme_may_be_a_plug_in_that_is_not_installed() -> None:
    with pytest.raises(UnknownStore, match=r"cassandra://; installed: .*A plug-in may provide it"):
        open_store("cassandra://host", clock=SystemClock())


@pytest.mark.parametrize(
    "url",
    ["bob:hunter2@host/db://", "mongo:bob:hunter2@host://x", "user=bob;pwd=hunter2://x", "sqlite:///s.db?key=hunter2"],
)
def test_no_message_quotes_what_may_be_a_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        open_store(url, clock=SystemClock())
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("url", ["shop.db", "", "/var/lib/shop.db", "sqlite:shop.db"])
def test_a_url_needs_a_scheme(url: str) -> None:
    with pytest.raises(UnknownStore, match=r"needs a scheme, such as sqlite:///shop\.db"):
        open_store(url, clock=SystemClock())


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named 'pymongo' (from {name})", name="pymongo.asynchronous")

    plug_in(monkeypatch, "mongodb", "holdfast.store.mongo:open_mongo")
    monkeypatch.setattr(holdfast.store, "import_module", missing)
    with pytest.raises(MissingExtra, match=r"pip install 'holdfast\[mongo\]'"):
        open_store("mongodb://host/db", clock=SystemClock())


def test_another_missing_module_is_a_bug_and_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, "ours", "no_such_package_at_all:opener")
    with pytest.raises(ModuleNotFoundError, match="no_such_package_at_all"):
        open_store("ours://x", clock=SystemClock())


def open_plugged_in(url: str, *, clock: Clock, observe: Observe, options: Mapping[str, Any]) -> MemoryStore:
    store = MemoryStore(clock, observe)
    store.opened_with = (url, dict(options))  # type: ignore[attr-defined]
    return store


def test_a_plug_in_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, "ours", "ours_for_holdfast:open_plugged_in")
    module = type("Module", (), {"open_plugged_in": staticmethod(open_plugged_in)})
    monkeypatch.setattr(holdfast.store, "import_module", {"ours_for_holdfast": module}.__getitem__)
    clock = FakeClock(5.0)
    store = open_store("ours://somewhere", clock=clock, options={"a": 1})
    assert store.opened_with == ("ours://somewhere", {"a": 1})  # type: ignore[attr-defined]
    assert store.now() == 5.0


def test_a_plug_in_may_not_replace_a_store_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, "memory", "evil:opener")
    assert isinstance(open_store("memory://", clock=SystemClock()), MemoryStore)
