"""The crash points themselves: the list is what is in the code, and they cost nothing where nobody wants a crash."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import timeit
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.cases import MATRIX, ONCE
from tests.faults.stores import STORES
from tests.support.patience import patient

import holdfast
from holdfast import crashpoints
from holdfast.crashpoints import POINTS, crashpoint
from holdfast.errors import ConfigurationError

SOURCE = Path(holdfast.__file__).parent


@pytest.fixture(autouse=True)
def struck(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The points at which this process would have died."""
    names: list[str] = []
    monkeypatch.setattr(crashpoints, "strike", names.append)
    yield names
    crashpoints.arm(None)


def points_in(source: str) -> Iterator[str]:
    """The names that crash points have; one that cannot be read there is shown as it is written."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "crashpoint":
            (name,) = node.args
            yield str(name.value) if isinstance(name, ast.Constant) else ast.unparse(name)


def test_the_list_is_what_is_in_the_code() -> None:
    found = {name for path in SOURCE.rglob("*.py") for name in points_in(path.read_text())}
    assert found == set(POINTS)
    assert all(sentence and not sentence.endswith(".") for sentence in POINTS.values())


def test_a_name_that_cannot_be_read_is_not_overlooked() -> None:
    assert list(points_in("crashpoint('a')\ncrashpoints.crashpoint(name)")) == ["a", "name"]


def test_every_point_is_struck_by_the_fault_tests() -> None:
    """Each story waits until its point was struck, so what is in the list of stories is hit."""
    assert 2 * len(ONCE) >= len(POINTS)
    assert {case.store for case in ONCE} == {case.store for case in MATRIX}
    assert {(case.point, case.store) for case in MATRIX} == {(point, store) for point in POINTS for store in STORES}


def test_nothing_happens_unless_it_is_armed(struck: list[str]) -> None:
    for name in POINTS:
        crashpoint(name)
    crashpoints.arm("claim.after")
    crashpoint("claim.before")
    assert struck == []


def test_it_happens_at_the_point_and_at_the_time_that_the_variable_names(struck: list[str]) -> None:
    crashpoints.arm("claim.after:3")
    for _ in range(5):
        crashpoint("claim.before")
        crashpoint("claim.after")
        crashpoints.arm("claim.after:3")  # a second app of the same process
    assert struck == ["claim.after"]


@pytest.mark.parametrize("wrong", ["claim.aftre", "claim", "claim.after:0", "claim.after:x", "claim.after:", ":3", " "])
def test_a_name_that_is_not_in_the_list_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match="HOLDFAST_CRASH_AT"):
        crashpoints.arm(wrong)
    with pytest.raises(ConfigurationError, match=r"did you mean 'claim\.after'\?"):
        crashpoints.arm("claim.aftre")


def _run(folder: Path, at: str) -> subprocess.CompletedProcess[str]:
    script = "from holdfast import App\nwith App('sqlite:///x.db') as app:\n    app.task(name='t')(print).submit(1)\n"
    environment = os.environ | {crashpoints.VARIABLE: at}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=patient(60))


@pytest.mark.slow
def test_the_variable_kills_a_process_and_a_wrong_one_does_not_let_it_start(tmp_path: Path) -> None:
    assert _run(tmp_path, "claim.after").returncode == 0
    assert _run(tmp_path, "submit.after").returncode == -signal.SIGKILL
    wrong = _run(tmp_path, "submit.aftre")
    assert wrong.returncode == 1
    assert "there is no crash point 'submit.aftre'; did you mean 'submit.after'?" in wrong.stderr


def test_a_point_costs_next_to_nothing_where_it_is_not_armed() -> None:
    """In calls of an empty function, which is what it is measured against on any machine. A task passes two of them,
    and takes some hundred microseconds.
    """

    def empty(name: str) -> None:
        pass

    def best(function: object) -> float:
        return min(timeit.repeat("f('claim.after')", globals={"f": function}, number=20_000, repeat=15))

    assert best(crashpoint) < 5 * best(empty)
