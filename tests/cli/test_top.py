"""holdfast top: what runs, waits and fails, at any width; and how it is drawn again on a terminal."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cli.processes import eventually
from tests.cli.roster import enrol

from holdfast import App, context
from holdfast.cli import live
from holdfast.store.contract import Filter

if TYPE_CHECKING:
    from conftest import Command


@pytest.fixture
def app(shop: Path) -> Iterator[App]:
    with App("sqlite:///shop.db", name="default", poll_interval_seconds=0.1) as found:
        found.prepare()
        yield found


def test_it_shows_runners_queues_and_calls(app: App, holdfast: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    began, may_end = threading.Event(), threading.Event()

    @app.task(name="shop:hold")
    def hold() -> None:
        context().progress(40, total=100, message="rows")
        began.set()
        may_end.wait(30)

    enrol(app, "dead", heartbeat_at=time.time() - 3600)
    with app.runner(concurrency=3):
        held = hold.submit()
        assert began.wait(30)
        waiting = hold.options(queue="mail", delay="1h").submit()
        eventually(lambda: held.progress() is not None, "the progress is stored")
        app.queues.pause("mail", by="kai")
        monkeypatch.setenv("COLUMNS", "80")
        narrow = holdfast("top", "--app", "shop:app")
        monkeypatch.setenv("COLUMNS", "200")
        wide = holdfast("top", "--once", "--app", "shop:app")
        facts = holdfast("top", "--json", "--app", "shop:app").json
        may_end.set()
    for answer, width in ((narrow, 80), (wide, 200)):
        assert answer.code == 0
        assert max(map(len, answer.out.splitlines())) <= width
        for text in ("1 runner alive", "of 3 slots busy", held.id, "40 of 100 rows (40%)", "by kai", "dead"):
            assert text in answer.out
    assert waiting.id not in wide.out
    (alive,) = [each for each in facts["runners"] if each["state"] == "alive"]
    assert [call["id"] for call in alive["calls"]] == [held.id]
    assert {each["name"]: each["scheduled"] for each in facts["queues"]} == {"default": 0, "mail": 1}
    assert facts["ended"]["failed"] == 0


def test_an_empty_store(app: App, holdfast: Command) -> None:
    answer = holdfast("top", "--app", "shop:app")
    assert (answer.code, "no runners" in answer.out) == (0, True)


def test_it_asks_only_for_what_runs(app: App, holdfast: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside any number of ended calls it reads no more: the one listing is of owned calls, and bounded."""
    from holdfast.store.sqlite.store import SqliteStore

    asked: list[tuple[Filter, int]] = []
    find = SqliteStore.find

    async def noted(self: SqliteStore, app: str, where: Filter, limit: int, **rest: object) -> object:
        asked.append((where, limit))
        return await find(self, app, where, limit, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(SqliteStore, "find", noted)
    assert holdfast("top", "--app", "shop:app").code == 0
    assert [(len(where.statuses) > 0, limit) for where, limit in asked] == [(True, 200)]


class Terminal(io.StringIO):
    """Counts what is written, as a terminal gets it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return len(text)

    def isatty(self) -> bool:
        return True


def test_a_frame_is_one_write_and_clears_only_what_is_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("LINES", "6")
    screen = live.Screen()
    screen.draw(lambda: print("a\nb"))
    screen.draw(lambda: print("c"))
    screen.draw(lambda: print("\n".join("123456789")))
    first, second, third = terminal.writes
    assert first == "\x1b[H\x1b[2Ja\x1b[K\nb\x1b[K\n\x1b[J"
    assert second == "\x1b[Hc\x1b[K\n\x1b[J", "what was there is overwritten, and never cleared first"
    assert third.count("\n") == 5
    assert "… 5 more lines" in third


def test_a_slow_store_is_asked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.cli.output import Output

    pauses: list[float] = []
    now = iter([0.0, 1.0])
    monkeypatch.setattr(live.time, "monotonic", lambda: next(now))

    def stop(seconds: float) -> None:
        pauses.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(live, "pause", stop)
    with pytest.raises(KeyboardInterrupt):
        live.repeated(Output(json=False, terminal=False), lambda: None, watch=True)
    assert pauses == [20.0]
