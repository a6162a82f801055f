"""The examples do what they say, and so do the README and the first steps."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.processes import Process
from tests.docs.pages import blocks_of
from tests.support.patience import patient

from holdfast.testing import testing_app

ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}


def run(program: str, folder: Path, *arguments: str) -> str:
    command = [sys.executable, program, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=patient(60), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_demo_runs(tmp_path: Path) -> None:
    out = run(str(ROOT / "examples" / "demo.py"), tmp_path)
    assert "2001 success, 1 failed" in out


@pytest.mark.slow
def test_the_shop_runs_with_a_runner_in_another_process(tmp_path: Path) -> None:
    environment = ENVIRONMENT | {"HOLDFAST_URL": f"sqlite:///{tmp_path}/shop.db"}
    runner = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "run", "examples.shop:app"], cwd=tmp_path, env=environment
    )
    try:
        shop = [sys.executable, "-m", "examples.shop"]
        done = subprocess.run(
            shop, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=patient(60), check=True
        )
    finally:
        runner.terminate()
        assert runner.wait(timeout=patient(30)) == 0
    assert "thank you, receipt-1" in done.stdout


@pytest.mark.slow
def test_the_model_loop_survives_the_death_of_its_runner_in_mid_sentence(tmp_path: Path) -> None:
    environment = ENVIRONMENT | {"HOLDFAST_URL": f"sqlite:///{tmp_path}/loop.db"}
    command = [sys.executable, "-m", "examples.model_loop"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=patient(120))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n[think#2 starts over, attempt 2]\n" in done.stdout
    before, _, after = done.stdout.partition("\n[think#2 starts over, attempt 2]\n")
    assert "I will look it up . The moon is about 384,400" in before
    whole = "The moon is about 384,400 km away . That is thirty Earths in a row ."
    assert after.endswith(f"{whole} \n{whole}\n"), "the sentence begins anew and ends, and is the answer"


def first_block(page: str, language: str) -> str:
    """Return the first block of a page in that language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return str(next(block for mark, block in blocks if mark == language))


def commands_of(session: str) -> list[list[str]]:
    lines = [line.removeprefix("$ ").partition("#")[0] for line in session.splitlines() if line.startswith("$ ")]
    return [line.split() for line in lines]


def answer(command: list[str], folder: Path) -> str:
    called = [sys.executable, *(["-m"] if command[0] == "holdfast" else []), *command]
    done = subprocess.run(
        called, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=patient(60), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.contextmanager
def running(command: list[str], folder: Path) -> Iterator[None]:
    """Start the runner of a page, and wait until a worker of it looks for work."""
    runner = Process(folder, *command[1:])
    try:
        runner.says("/1: it serves")
        yield
        runner.signal(signal.SIGTERM)
        assert runner.ends().code == 0
    finally:
        runner.end()


@pytest.mark.slow
def test_the_readme_works_when_it_is_copied(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(first_block("README.md", "python"))
    run, shop = commands_of(first_block("README.md", ""))
    answer(shop[1:], tmp_path)  # a reader may start the shop before the runner
    with running(run, tmp_path):
        id = answer(shop[1:], tmp_path).strip()
        answer(["holdfast", "show", id], tmp_path)
        deadline = time.monotonic() + 60
        while "ended with a result." not in answer(["holdfast", "why", id], tmp_path):
            assert time.monotonic() < deadline
            time.sleep(0.2)
    waiting = answer(shop[1:], tmp_path).strip()
    assert "no runner is alive on this store" in answer(["holdfast", "why", waiting], tmp_path)


@pytest.mark.slow
def test_the_first_steps_work_when_they_are_copied(tmp_path: Path) -> None:
    page = "docs/learn/first-steps.md"
    (tmp_path / "shop.py").write_text(first_block(page, "python"))
    run("shop.py", tmp_path)
    session = (ROOT / page).read_text().partition("In production, ")[2].split("```\n")[1]
    commands = commands_of(session)
    assert [command[1] for command in commands] == ["run", "submit", "ps", "show", "history", "why", "archive", "rerun"]
    with running(commands[0], tmp_path):
        assert answer(commands[1], tmp_path).splitlines() == [session.splitlines()[2]]
        id, task, status, *_ = answer(commands[2], tmp_path).splitlines()[1].split()
        assert (task, status) == ("shop:add", "success")
        for command in commands[3:5]:
            assert "success" in answer([id if word == "ID" else word for word in command], tmp_path)
        assert "ended with a result." in answer([id if word == "ID" else word for word in commands[5]], tmp_path)
        for command in commands[6:]:
            assert id not in answer(command, tmp_path), "nothing has failed"


@pytest.mark.slow
def test_the_shop_of_the_tutorial_can_be_run_again_and_by_a_runner(tmp_path: Path) -> None:
    page = "docs/learn/tutorial.md"
    (tmp_path / "shop.py").write_text("\n\n".join(block.code for block in blocks_of(ROOT / page)))
    run("shop.py", tmp_path)
    prepare, started = commands_of(first_block(page, ""))
    assert "is ready" in answer(prepare, tmp_path)
    port = started.index("--health-port") + 1
    with running([*started[:port], "0"], tmp_path):
        pass
    run("shop.py", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "said"),
    [
        ("orders", ["1: lamp for 1, chair for 1", "out of stock: moon", "  refund#1: completed"]),
        ("documents", ["ONE PAGE / AND ANOTHER / AND THE LAST"]),
        ("campaign", ["welcome to ann@example.org", "an offer to ann@example.org"]),
    ],
)
def test_the_examples_of_workflows_run(example: str, said: list[str], tmp_path: Path) -> None:
    environment = ENVIRONMENT | {"HOLDFAST_URL": f"sqlite:///{tmp_path}/{example}.db"}
    command = [sys.executable, "-m", f"examples.{example}"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=patient(60), check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in said if line not in lines] == []


@pytest.mark.slow
def test_an_approval_by_webhook_with_a_reminder_and_a_deadline(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours = {"HOLDFAST_URL": f"sqlite:///{tmp_path}/approval.db", "HOLDFAST_PUBLIC_URL": f"http://127.0.0.1:{port}"}
    command = [sys.executable, "-m", "examples.approval"]
    done = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT | ours, capture_output=True, text=True, timeout=patient(120), check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    wanted = [
        "may On ships be published?",
        "reminder: may On ships be published?",
        "the link answers 202",
        "On ships: published, approved by Ada",
        "On sharks: no answer",
    ]
    assert [line for line in lines if line in wanted] == wanted


def test_the_approval_counts_in_days() -> None:
    from examples.approval import app, publish

    with testing_app(app) as t:
        run = publish.submit("On whales")
        t.advance("4d12h")
        subjects = [letter.value["subject"] for letter in t.stream(run, "mails")]
        assert subjects == ["may On whales be published?", *["reminder: may On whales be published?"] * 2]
        (waiting,) = t.waiting_hooks()
        assert (waiting.token, waiting.metadata) == ("approve:On whales", {"article": "On whales"})
        app.resume_hook("approve:On whales", {"by": "Ben", "ok": False})
        t.drain(check=True)
        assert run.result() == "refused by Ben"
        late = publish.submit("On eels")
        t.advance("7d")
        assert late.result() == "no answer"
        assert t.waiting_hooks() == []
