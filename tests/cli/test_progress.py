"""Bars of commands that walk over many records: on a terminal only, and never in the answer."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import App


def purged(folder: Path, *, is_terminal: bool, arguments: tuple[str, ...] = ()) -> tuple[str, str]:
    """Return what the command has written to its stdout and stderr."""
    ours, theirs = pty.openpty() if is_terminal else os.pipe()
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "purge", "--status", "cancelled", "--yes", *arguments],
        cwd=folder,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "HOLDFAST_URL": "sqlite:///shop.db"},
        stdout=subprocess.PIPE,
        stderr=theirs,
        check=True,
        text=True,
    )
    os.close(theirs)
    said = b""
    while part := _read(ours):
        said += part
    os.close(ours)
    return done.stdout, said.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux: the other side of the terminal is closed
        return b""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_terminal", "arguments", "is_shown"), [(True, (), True), (False, (), False), (True, ("--json",), False)]
)
def test_a_bar_is_shown_on_a_terminal(
    folder: Path, is_terminal: bool, arguments: tuple[str, ...], is_shown: bool
) -> None:
    with App("sqlite:///shop.db") as app:
        for invocation in app.task(name="shop:add")(lambda: None).map([{}] * 3):
            invocation.cancel()
    answer, said = purged(folder, is_terminal=is_terminal, arguments=arguments)
    assert ("3 invocations removed" if not arguments else '"removed": 3') in answer
    assert "\x1b" not in answer
    assert ("removing" in said and "3/3" in said) is is_shown
