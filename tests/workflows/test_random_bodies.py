"""Random bodies under random completion orders, evictions, crashes and cancels: one result, and the same commands."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.patience import patient
from tests.workflows.lives import Body, Diverged, Owner, begun, made_step, nothing
from tests.workflows.random_bodies import (
    KINDS,
    PLAIN_KINDS,
    differences,
    finished,
    random_program,
    survives,
    work,
)

from holdfast.workflows import life, loop, rules
from holdfast.workflows.events import Event
from holdfast.workflows.loop import BodyLoop, BodyTask
from holdfast.workflows.rules import Replay

# A body that is evicted inside of a `finally` may have made coroutines that nobody awaits any more.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CHANCES = {"evict": 0.1, "crash": 0.1, "cancel": 0.02}
ROOT = Path(__file__).parents[2]


def in_process(
    python: str, cases: list[dict[str, Any]], seeds: range = range(0), hash_seed: int = 77
) -> dict[str, Any]:
    """Replay finished runs, and run others, in a process of their own."""
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [python, "-W", "ignore", "-m", "tests.workflows.random_bodies"],
        input=json.dumps({"cases": cases, "seeds": [*seeds], "chances": CHANCES}),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=patient(300),
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def interpreter(version: str) -> str:
    """Return a Python of this version that has what Holdfast depends on, in an environment that is made once; skip the
    test, and say why, if there is none.
    """
    made = Path(sys.prefix) / "pythons" / version
    found = made / "bin" / "python"
    if not _works(found):
        plain = _installed(version)
        if plain is None:
            pytest.skip(f"no Python {version} is installed, neither on the path nor by pyenv")
        with tempfile.TemporaryDirectory(dir=_folder(made.parent)) as folder:
            new = Path(folder) / version
            # Without a pip of its own, which takes longer to install than everything else.
            subprocess.run([plain, "-m", "venv", "--without-pip", new], check=True, capture_output=True)
            install = [sys.executable, "-m", "pip", "--python", new / "bin" / "python", "install", "-q", "msgspec"]
            done = subprocess.run(install, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"msgspec cannot be installed for Python {version}: {done.stderr[-300:]}")
            shutil.rmtree(made, ignore_errors=True)
            new.rename(made)  # scripts in it have the old path; the interpreter and its packages do not
    assert _works(found)
    return str(found)


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _works(python: Path) -> bool:
    if not python.exists():
        return False
    tried = subprocess.run([python, "-c", "import msgspec"], capture_output=True, check=False)
    return tried.returncode == 0


def _installed(version: str) -> str | None:
    """Return an interpreter of this version: those of pyenv are not on the path unless it is told so."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [str(path) for path in sorted(versions.glob(f"{version}.*/bin/python"))]
    return (found or [shutil.which(f"python{version}")])[-1]


@pytest.mark.parametrize(("kinds", "is_plain"), [(KINDS, False), (PLAIN_KINDS, True)], ids=["async", "plain"])
def test_programs_use_everything(kinds: tuple[str, ...], is_plain: bool) -> None:
    text = json.dumps([random_program(seed, is_plain=is_plain) for seed in range(100)])
    assert [kind for kind in kinds if f'"{kind}"' not in text] == []


@pytest.mark.parametrize("is_plain", [False, True], ids=["async", "plain"])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    rng=st.randoms(use_true_random=False),
    evict=st.sampled_from([0.0, 0.1, 0.5]),
    crash=st.sampled_from([0.0, 0.1, 0.5]),
    cancel=st.sampled_from([0.0, 0.02, 0.2]),
)
def test_bodies_that_hypothesis_makes(
    is_plain: bool, rng: random.Random, evict: float, crash: float, cancel: float
) -> None:
    """Hypothesis draws program, order of completion, evictions, crashes and cancel, so a failure comes out small. The
    same ones each time: a source that keeps to evictions lets no run end, and such draws took many minutes.
    """
    assert not survives(rng, is_plain=is_plain, evict=evict, crash=crash, cancel=cancel)


def test_every_life_of_a_plain_run_gives_the_same_commands() -> None:
    assert [why for seed in range(100) if (why := survives(seed, is_plain=True, **CHANCES))] == []


def test_every_life_of_a_run_gives_the_same_commands() -> None:
    assert [why for seed in range(150) if (why := survives(seed, **CHANCES))] == []


def test_evictions_and_crashes_change_nothing() -> None:
    """The order of completion is part of the log: a run that is never disturbed replays as one that is."""
    assert [why for seed in range(50) if (why := survives(seed))] == []


def test_a_finished_log_replays_with_another_hash_seed() -> None:
    cases = [finished(seed, **CHANCES) for seed in range(80)]
    assert in_process(sys.executable, cases, hash_seed=4242)["found"] == []


@pytest.mark.faults
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_bodies_on_other_versions(version: str) -> None:
    """New bodies run there, and logs of this version go on: but for `wait_for`, which is another one since 3.12, and
    TaskGroup, since 3.13.
    """
    cases = [finished(seed, without=("wait_for", "group"), **CHANCES) for seed in range(15)]
    answer = in_process(interpreter(version), cases, range(15))
    assert answer == {"python": version, "found": []}


@pytest.mark.faults
@pytest.mark.parametrize("start", range(0, 20_000, 1000))
def test_many_more(start: int) -> None:
    assert [why for seed in range(start, start + 1000) if (why := survives(seed, **CHANCES))] == []


class TestEachRuleIsNeeded:
    """A rule of the loop that is switched off makes random bodies differ."""

    def found(self) -> list[str]:
        return [why for seed in range(40) if (why := survives(seed, **CHANCES))]

    def test_nothing_is_found_with_all_rules(self) -> None:
        assert self.found() == []

    def test_hashes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        numbers = itertools.count(1)

        def by_chance(self: BodyLoop) -> int:
            return next(numbers) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFF  # as addresses do, it differs in each life

        monkeypatch.setattr(BodyLoop, "next_task_hash", by_chance)
        assert self.found()

    def test_names_of_tasks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Named(BodyTask):
            def __init__(self, coroutine: Any, *, name: str | None, **more: Any) -> None:
                super().__init__(coroutine, name=None if (name or "").startswith("Task-") else name, **more)

        monkeypatch.setattr(loop, "BodyTask", Named)
        assert self.found()

    def test_given_up_events_are_dropped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def gave_up(self: Replay, id: str) -> None:
            self.open.pop(id, None)

        monkeypatch.setattr(Replay, "gave_up", gave_up)
        assert any("the log has" in why for why in self.found())

    def test_time_is_that_of_events(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ticks = itertools.count(1)
        time: Callable[[BodyLoop], float] = lambda self: self.now + next(ticks)  # noqa: E731
        monkeypatch.setattr(BodyLoop, "time", time)
        assert self.found()

    def test_generators_are_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A dropped generator is closed by nobody, so what it awaits in its `finally` is not called."""
        monkeypatch.setattr(BodyLoop, "_generator_begun", lambda self, generator: None)
        cases = [finished(seed) for seed in range(40)]
        monkeypatch.undo()
        assert differences(cases)

    def test_the_collector_is_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = gc.get_threshold()
        gc.set_threshold(10)
        try:
            assert self.found() == []
            monkeypatch.setattr(loop, "gc", SimpleNamespace(disable=nothing, enable=nothing, isenabled=gc.isenabled))
            assert self.found()
        finally:
            gc.set_threshold(*before)

    def test_lives_are_kept_until_they_are_evicted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is dropped without an eviction calls the steps in its `finally` for real."""
        refunds: list[str] = []

        async def give_back(order: str) -> None:
            refunds.append(order)

        refund = made_step(give_back, name="refund")

        async def body(order: str) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await refund(order)

        begun(body, "kept")
        gc.collect()
        life.evict_all()
        assert refunds == []
        monkeypatch.setattr(life, "_lives", {})
        begun(body, "forgotten")
        life._lives.clear()
        gc.collect()
        assert refunds == ["forgotten"]


class TestChangedCodeIsNoticed:
    """Each comparison of a recorded call with the one that the code makes is needed."""

    @staticmethod
    def log_of(body: Body) -> list[Event]:
        owner = Owner(body, 1)
        owner.run()
        return owner.log

    @staticmethod
    def replay(body: Body, log: list[Event]) -> object:
        owner = Owner(body, 1, log=list(log))
        try:
            return owner._result(owner.begin())
        finally:
            owner.end()

    def test_kinds_of_timers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def slept() -> str:
            await asyncio.sleep(5)
            return "rested"

        async def limited() -> str:
            try:
                async with asyncio.timeout(5):
                    await asyncio.sleep(1)
            except TimeoutError:
                return "late"
            return "in time"

        log = self.log_of(slept)
        with pytest.raises(Diverged, match="a sleep until"):
            self.replay(limited, log)
        monkeypatch.setattr(loop, "_kind_of", lambda callback: "sleep")
        assert self.replay(limited, log) == "late"  # the recorded sleep has ended the new timeout

    def test_deadlines_of_timers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def sleeps(seconds: float) -> Body:
            async def body() -> str:
                await asyncio.sleep(seconds)
                return "rested"

            return body

        log = self.log_of(sleeps(5))
        with pytest.raises(Diverged, match="a sleep until"):
            self.replay(sleeps(500), log)
        monkeypatch.setattr(rules, "_CLOCK_SECONDS", float("inf"))
        assert self.replay(sleeps(500), log) == "rested"  # after five seconds

    def test_arguments(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As with the order of a set, which another hash seed changes."""

        def charges(*orders: int) -> Body:
            async def body() -> list[int]:
                return [await work(order) for order in orders]

            return body

        log = self.log_of(charges(1, 2))
        with pytest.raises(Diverged, match="other arguments"):
            self.replay(charges(2, 1), log)
        monkeypatch.setattr(Replay, "_compare", lambda self, call, event: "")
        assert self.replay(charges(2, 1), log) == self.replay(charges(1, 2), log)  # each has the result of the other
