"""The list of planted bugs fits the source: `make planted` says whether they are caught, which takes minutes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.planted.bugs import BUGS

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src" / "holdfast"


def test_the_text_of_every_planted_bug_occurs_once() -> None:
    assert len(BUGS) >= 50
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    assert len({(bug.file, bug.old, bug.new) for bug in BUGS}) == len(BUGS)
    counts = {bug.name: (SOURCE / bug.file).read_text().count(bug.old) for bug in BUGS}
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_a_planted_bug_changes_what_is_executed() -> None:
    for bug in BUGS:
        text = (SOURCE / bug.file).read_text()
        before, after = (compile(each, bug.file, "exec") for each in (text, text.replace(bug.old, bug.new)))
        assert before != after, bug.name


def test_a_planted_bug_uses_names_that_are_there(tmp_path: Path) -> None:
    """Else any test catches it, by a NameError."""
    for number, bug in enumerate(BUGS):
        text = (SOURCE / bug.file).read_text()
        (tmp_path / f"{number}.py").write_text(text.replace(bug.old, bug.new))
    ruff = [Path(sys.executable).with_name("ruff"), "check", "--isolated", "--no-cache", "--select", "F821", "-q"]
    said = subprocess.run([*ruff, tmp_path], capture_output=True, text=True, check=False)
    found = {BUGS[int(number)].name for number in re.findall(r"(\d+)\.py:\d+:\d+", said.stdout)}
    assert (found, said.stderr) == (set(), "")


def test_the_tests_of_every_planted_bug_are_there() -> None:
    missing = []
    for bug in BUGS:
        for test in bug.tests:
            file, _, name = test.partition("::")
            there = TESTS / file
            if not there.exists() or (name and not re.search(rf"def {name}\b", there.read_text())):
                missing.append(f"{bug.name}: {test}")
    assert missing == []
