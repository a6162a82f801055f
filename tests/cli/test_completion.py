"""What a shell is offered, by the protocol that shells speak."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.support.patience import patient

from holdfast import App
from holdfast.cli.completion import SECONDS, in_time

pytestmark = pytest.mark.slow


PATIENT = f"from holdfast.cli import completion, main; completion.SECONDS = {patient(60.0)}; main()"


def answered(folder: Path, words: str, shell: str = "bash", **environment: str) -> list[str]:
    """Return the words that the command writes for a shell whose user has typed this. It has more time than a user,
    unless the store is what takes it.
    """
    program = ["-m", "holdfast"] if environment else ["-c", PATIENT]
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1), "_TYPER_COMPLETE_ARGS": words}
    asked["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    done = subprocess.run(
        [sys.executable, *program],
        cwd=folder,
        env=os.environ | asked | {"_HOLDFAST_COMPLETE": f"complete_{shell}"} | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=patient(60),
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.fixture
def busy(shop: Path) -> tuple[Path, str]:
    """A shop whose code prints, and an id of a call in it."""
    code = (shop / "shop.py").read_text()
    (shop / "shop.py").write_text(f"print('loud')\n{code}")
    with App("sqlite:///shop.db") as app:
        return shop, app.task(name="shop:add")(lambda a: a).options(queue="mail").submit(1).id


def offers(folder: Path, words: str, offered: str, shell: str = "bash") -> bool:
    return offered in "".join(answered(folder, words, shell))


def test_options_and_values_are_offered(busy: tuple[Path, str]) -> None:
    folder, id = busy
    for words, offered in [
        ("holdfast ps --wat", "--watch"),
        ("holdfast ps --status runn", "running"),
        ("holdfast submit ad", "add"),
        (f"holdfast why --app shop:app {id[:8]}", id),
    ]:
        assert offers(folder, words, offered), words


@pytest.mark.parametrize(("shell", "mark"), [("zsh", "compdef"), ("fish", "complete --command holdfast")])
def test_other_shells(busy: tuple[Path, str], shell: str, mark: str) -> None:
    assert offers(busy[0], f"holdfast show {busy[1][:8]}", busy[1], shell)
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "--show-completion", shell],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    )
    assert mark in done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash completes here, and this machine has none")
def test_bash_itself_completes(shop: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "holdfast"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m holdfast "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(holdfast --show-completion bash)"; COMP_WORDS=(holdfast sub); COMP_CWORD=1; '
        "_holdfast_completion holdfast sub holdfast; echo ${COMPREPLY[@]}"
    )
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }
    done = subprocess.run(["bash", "--norc", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "submit"


def test_no_store_is_made_and_no_error_is_shown(shop: Path) -> None:
    assert answered(shop, "holdfast show 01", "bash") == []
    assert answered(shop, "holdfast show 01", "bash", HOLDFAST_CONCURRENCY="nonsense") == []
    assert not (shop / "shop.db").exists()


def test_a_store_that_does_not_answer_holds_nobody_up(shop: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"mongodb://127.0.0.1:{silent.getsockname()[1]}/shop"
        assert answered(shop, "holdfast show 01", "bash", HOLDFAST_URL=url) == []


def test_what_takes_too_long_or_fails_is_not_offered() -> None:
    began = time.monotonic()
    assert in_time(lambda: [(str(threading.Event().wait(600)), "")], 0.01) == []
    assert time.monotonic() - began < patient(30)
    assert in_time(lambda: [("a", "b")], patient(30)) == [("a", "b")]
    assert in_time(lambda: [(str(1 // 0), "")]) == []
    assert SECONDS <= 1.0
