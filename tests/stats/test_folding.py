"""Files of counters become coarser and fewer, and no count is lost or doubled, whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from tests.stats.files import TASK, Files

from holdfast import App, crashpoints
from holdfast.model.records import Entry
from holdfast.runtime.engine import Engine
from holdfast.stats.api import question, read_stats
from holdfast.stats.rules import LEVELS, Level
from holdfast.stats.service import StatsUpkeep

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
MEMORY = pytest.mark.parametrize("url", ["memory"], indirect=True)


class Struck(Exception):
    """Stands for the death of the process."""


@pytest.fixture
def dies(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the next visit of the point be the last thing that happens."""

    def strike(name: str) -> None:
        crashpoints.arm(None)
        raise Struck(name)

    monkeypatch.setattr(crashpoints, "strike", strike)
    yield lambda: crashpoints.arm("stats.folded")
    crashpoints.arm(None)


def test_files_are_folded_by_their_age(files: Files) -> None:
    for worker in ("a", "b", "c"):
        for ago in (5 * MINUTE, 30 * MINUTE, 31 * MINUTE, 5 * HOUR, 5 * HOUR + MINUTE, 9 * DAY):
            files.put(ago, worker, ended=2)
    before = files.stats()
    assert before.total.succeeded == 36
    files.fold()
    workers, minutes, tens, hours = files.counts()
    assert (workers, minutes, hours) == (3, 2, 1)
    assert tens in (1, 2)  # the two minutes may be on both sides of a border
    after = files.stats()
    assert (after.total.succeeded, after.total.run.total) == (36, pytest.approx(18.0))
    assert after.total.run.bins == before.total.run.bins
    assert after.tasks[TASK].wait.count == 36
    files.fold()
    assert files.counts() == [workers, minutes, tens, hours]


def test_a_late_file_is_added_to_what_was_folded(files: Files) -> None:
    files.put(HOUR, "a", ended=2)
    files.fold()
    files.put(HOUR, "b", ended=3)
    assert files.stats().total.succeeded == 5
    files.fold()
    assert files.counts()[:2] == [0, 1]
    assert files.stats().total.succeeded == 5


@pytest.mark.parametrize("ago", [HOUR, 9 * HOUR, 9 * DAY])
def test_a_crash_after_a_fold_neither_loses_nor_doubles(files: Files, dies: Callable[[], None], ago: float) -> None:
    """At each level: the coarser file is there, and its sources are, too."""
    files.put(ago, "a", ended=2)
    files.put(ago, "b", ended=3)
    for _ in range(4):
        dies()
        try:
            files.fold()
        except Struck:
            assert sum(files.counts()) > 1
        assert files.stats().total.succeeded == 5
    files.fold()
    assert files.stats().total.succeeded == 5
    assert sum(files.counts()) == 1


def test_what_a_crash_has_left_is_removed_before_more_is_folded(files: Files, dies: Callable[[], None]) -> None:
    files.put(HOUR, "a", ended=2)
    dies()
    with pytest.raises(Struck):
        files.fold()
    files.put(HOUR, "b", ended=3)
    files.fold()
    assert files.counts()[:2] == [0, 1]
    files.fold()
    assert files.stats().total.succeeded == 5


class Delayed:
    """A store whose answer to the first question for what is due comes when another runner has folded."""

    def __init__(self, store: Any, meanwhile: Callable[[], Any]) -> None:
        self._store = store
        self._meanwhile: Callable[[], Any] | None = meanwhile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def entries(self, *args: Any, **named: Any) -> Any:
        found = await self._store.entries(*args, **named)
        if "order" in named and found and self._meanwhile is not None:
            meanwhile, self._meanwhile = self._meanwhile, None
            await meanwhile()
        return found


def folding_late(engine: Engine, meanwhile: Callable[[], Any]) -> StatsUpkeep:
    upkeep = StatsUpkeep(engine)
    upkeep._store = Delayed(engine.store, meanwhile)
    return upkeep


def test_of_two_folds_at_once_each_file_counts_once(files: Files) -> None:
    """The other one has folded and removed what this one found, and then folded more into the same file."""
    files.put(HOUR, "a", ended=2)
    later = files.entry(HOUR, "b", ended=3)

    async def fold_at_once(engine: Engine) -> None:
        async def meanwhile() -> None:
            await StatsUpkeep(engine).fold()
            await engine.store.put_entry(later)
            await StatsUpkeep(engine).fold()

        await folding_late(engine, meanwhile).fold()

    files.run(fold_at_once)
    files.fold()
    assert files.stats().total.succeeded == 5
    assert files.counts()[:2] == [0, 1]


def test_files_are_read_after_what_they_are_folded_into(files: Files) -> None:
    """Another runner folds them, and then more into the same file, before this one reads either."""
    files.put(HOUR, "a", ended=2)
    later = files.entry(HOUR, "b", ended=3)

    async def fold(engine: Engine) -> None:
        upkeep = StatsUpkeep(engine)
        read = upkeep._target

        async def after_others(*args: Any) -> Any:
            upkeep._target = read  # type: ignore[method-assign]
            await StatsUpkeep(engine).fold()
            await engine.store.put_entry(later)
            await StatsUpkeep(engine).fold()
            return await read(*args)

        upkeep._target = after_others  # type: ignore[method-assign]
        await upkeep.fold()

    files.run(fold)
    assert files.stats().total.succeeded == 5


def test_a_fold_that_loses_a_race_leaves_everything_to_the_next(files: Files) -> None:
    """Another runner, which does not know of the second file yet, writes the target after this one has read it."""
    files.put(HOUR, "a", ended=2)
    later = files.entry(HOUR, "b", ended=3)

    async def fold(engine: Engine) -> None:
        upkeep = StatsUpkeep(engine)
        read = upkeep._target

        async def beaten(*args: Any) -> Any:
            found = await read(*args)
            upkeep._target = read  # type: ignore[method-assign]
            await StatsUpkeep(engine).fold()
            await engine.store.put_entry(later)
            return found

        async def knowing(level: Level, names: Sequence[str]) -> Any:
            return await files_of(level, [*names, later.name] if level is LEVELS[0] else names)

        files_of = upkeep._files
        upkeep._target, upkeep._files = beaten, knowing  # type: ignore[method-assign]
        await upkeep.fold()

    files.run(fold)
    assert files.counts()[:2] == [1, 1]
    files.fold()
    assert files.stats().total.succeeded == 5


def test_a_reader_sees_each_count_once_while_files_are_folded(files: Files) -> None:
    """A fold after each of its reads, of every level."""
    for ago in (HOUR, 9 * HOUR, 9 * DAY):
        files.put(ago, "a", ended=2)

    async def read(engine: Engine) -> int:
        store = engine.store
        real = store.entries
        is_folding = False

        async def entries(*args: Any, **named: Any) -> Any:
            nonlocal is_folding
            found = await real(*args, **named)
            if not is_folding:
                is_folding = True
                await StatsUpkeep(engine).fold()
                is_folding = False
            return found

        store.entries = entries  # type: ignore[method-assign]
        try:
            return (await read_stats(engine, question(store.now(), 20 * DAY))).total.succeeded
        finally:
            store.entries = real  # type: ignore[method-assign]

    assert files.run(read) == 6
    assert files.stats().total.succeeded == 6


@pytest.mark.parametrize("cell", [b"7", b'{"succeeded": -1}', b'{"run": {"bins": {"9999999": 1}}}'])
def test_a_corrupt_file_is_set_aside_and_the_rest_goes_on(files: Files, cell: bytes) -> None:
    files.put(HOUR, "a", ended=2)
    damaged = replace(files.entry(HOUR, "b", ended=1), body=b'{"cells": {"q|t": %s}}' % cell)
    files.run(lambda engine: engine.store.put_entry(damaged))
    assert files.stats().total.succeeded == 2
    files.fold()
    assert files.counts()[:2] == [0, 1]
    assert files.stats().total.succeeded == 2
    (found,) = files.run(lambda engine: engine.store.quarantined(engine.app))
    assert found.kind == LEVELS[0].kind


def test_a_file_with_a_strange_name_is_set_aside(files: Files) -> None:
    strange = Entry(app="shop", kind=LEVELS[0].kind, name="nonsense", body=b"{}", due_at=1.0)
    files.run(lambda engine: engine.store.put_entry(strange))
    assert files.stats().total.ended == 0
    files.fold()
    assert files.counts() == [0, 0, 0, 0]


def test_files_are_kept_as_long_as_the_setting_says(files: Files) -> None:
    files.put(29 * DAY, "a")
    files.put(31 * DAY, "b")
    for entry in files.entries()[0]:
        assert entry.keep_until == int(entry.name[:11]) + MINUTE + 30 * DAY
    removed = files.run(lambda engine: engine.store.remove_expired(engine.app, files.now, 10))
    assert removed <= 1  # a server with TTL may have been there before
    files.fold()
    assert sum(files.counts()) == 1


class Counting:
    """A store that notes what it is asked."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name != "now":
            self.asked.append(name)
        return getattr(self._store, name)


@MEMORY
def test_an_answer_reads_files_and_no_invocations(files: Files) -> None:
    for ago in (5 * MINUTE, HOUR, 9 * HOUR, 9 * DAY):
        files.put(ago, "a", ended=1000)
    files.fold()

    async def read(engine: Engine) -> list[str]:
        engine.store, real = Counting(engine.store), engine.store  # type: ignore[assignment]
        try:
            await read_stats(engine, question(real.now(), 20 * DAY))
            return engine.store.asked  # type: ignore[attr-defined, no-any-return]
        finally:
            engine.store = real

    assert files.run(read) == ["entries"] * 5  # four levels, and the deploys


@MEMORY
def test_an_idle_fold_asks_three_questions_in_five_minutes(app: App, files: Files) -> None:
    files.put(5 * MINUTE, "a")

    async def fold(engine: Engine) -> tuple[int, int]:
        upkeep = StatsUpkeep(engine)
        upkeep._store = store = Counting(engine.store)  # type: ignore[assignment]
        await upkeep.fold()
        first = len(store.asked)
        await upkeep.fold()
        return first, len(store.asked) - first

    assert files.run(fold) == (3, 0)
