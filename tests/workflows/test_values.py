"""Large values of runs: results, errors and data that are stored apart from the log."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.patience import patient

from holdfast import App, Status, context
from holdfast.codec import Reference
from holdfast.model.parking import GONE
from holdfast.runtime.payloads import PayloadStore
from holdfast.workflows import values
from holdfast.workflows.api import sleep
from holdfast.workflows.values import LargeValues

Until = Callable[[Callable[[], object]], None]
LARGE_BYTES = 200_000


def make_app(folder: Path, **settings: Any) -> App:
    given = {"poll_interval_seconds": 0.1, "workflow_linger_seconds": 0.1, **settings}
    return App(f"sqlite:///{folder / 'values.db'}", name="values", **given)


def test_no_large_value_stays_in_memory_and_a_replay_fetches_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, fetched, kept, lives = make_app(tmp_path), list[int](), list[int](), list[LargeValues]()
    fetch, init = PayloadStore.fetch, LargeValues.__init__
    monkeypatch.setattr(values, "AHEAD_BYTES", 3 * LARGE_BYTES + 1000)

    async def noted(self: PayloadStore, references: Sequence[Reference]) -> dict[str, bytes]:
        fetched.append(sum(size for _, size in references))
        return await fetch(self, references)

    def made(self: LargeValues, run: Any) -> None:
        init(self, run)
        lives.append(self)

    monkeypatch.setattr(PayloadStore, "fetch", noted)
    monkeypatch.setattr(LargeValues, "__init__", made)

    @app.step(name="page")
    async def page(number: int, before: bytes) -> bytes:
        if number == 7:
            raise ValueError("no paper", b"7" * LARGE_BYTES)
        context().data["last"] = bytes([number]) * LARGE_BYTES
        return bytes([number + 100]) * LARGE_BYTES

    @app.workflow(name="book")
    async def book() -> list[int]:
        pages, told = [b""], list[int]()
        for number in range(10):
            try:
                pages.append(await page(number, pages[-1]))
                told += [pages[-1][0], context().data["last"][0]]
            except ValueError as error:
                told.append(len(error.args[1]))
        kept.append(len(lives[0]))
        await sleep(0.3)
        return told

    with app, app.runner():
        run = book.submit()
        told = [[number + 100, number] if number != 7 else [LARGE_BYTES] for number in range(10)]
        assert run.result(patient(20)) == [each for some in told for each in some]
        assert [entry.status for entry in run.history()].count(Status.SUSPENDED) == 1
    assert kept[0] == 0, "what was delivered is not kept"
    # Arguments are not fetched: the body has them when it makes the call again.
    assert sum(fetched) < 20 * (LARGE_BYTES + 100)
    assert max(fetched) <= 3 * LARGE_BYTES + 1000
    assert len(fetched) >= 6
    assert len(lives) == 2


def test_a_run_whose_log_refers_to_a_lost_value_is_parked(tmp_path: Path, until: Until) -> None:
    app = make_app(tmp_path)

    @app.step(name="page")
    async def page() -> bytes:
        return b"x" * LARGE_BYTES

    @app.workflow(name="book")
    async def book() -> int:
        count = len(await page())
        await sleep(3600)
        return count

    with app, app.runner():
        run = book.submit()
        until(lambda: run.status is Status.SUSPENDED)
        with sqlite3.connect(tmp_path / "values.db") as connection:
            (kept,) = connection.execute("SELECT * FROM holdfast_payloads").fetchall()
            connection.execute("DELETE FROM holdfast_payloads")
        connection.close()
        run.wake()
        until(lambda: run.status is Status.PARKED)
        assert run.record().reason.startswith(f"{GONE}: the payload")
        with sqlite3.connect(tmp_path / "values.db") as connection:
            connection.execute(f"INSERT INTO holdfast_payloads VALUES ({', '.join('?' * len(kept))})", kept)
        connection.close()
        run.wake()
        assert run.result(patient(20)) == LARGE_BYTES


@dataclass
class Point:
    x: int


def test_data_that_the_code_cannot_read_parks_the_run(tmp_path: Path, until: Until) -> None:
    def declared(*, knows_point: bool) -> tuple[App, Any]:
        app = make_app(tmp_path)
        if knows_point:
            app.register(Point, name="point")

        @app.step(name="mark")
        async def mark() -> None:
            context().data["at"] = Point(7)

        @app.workflow(name="walk")
        async def walk() -> int:
            await mark()
            await sleep(0.2)
            return context().data["at"].x

        return app, walk

    old, walk = declared(knows_point=True)
    with old, old.runner():
        run = walk.submit()
        until(lambda: run.status is Status.SUSPENDED)
    new, _ = declared(knows_point=False)
    with new, new.runner():
        until(lambda: new.invocation(run.id).status is Status.PARKED)
        assert "the data that mark#1 has set cannot be read" in new.invocation(run.id).record().reason
