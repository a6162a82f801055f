"""Many threads, forks and the end of a process: nothing may be lost there, and nothing may hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.patience import patient

from holdfast import App

PROGRAM = """
import os, signal, sys, threading, time
from holdfast import App

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored

app = App(sys.argv[1])

@app.task(name="echo")
def echo(x): return x

@app.task(name="hang")
def hang():
    print("running", flush=True)
    threading.Event().wait()
"""


def program(tmp_path: Path, body: str) -> subprocess.Popen[str]:
    """A program of its own on tmp_path/shop.db, in a process session of its own."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM + body)
    command = [sys.executable, str(script), f"sqlite:///{tmp_path}/shop.db"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=patient(30))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        pytest.fail("the program hangs")


def statuses(tmp_path: Path) -> list[str]:
    with App(f"sqlite:///{tmp_path}/shop.db") as app:
        return [str(record.status) for record in app.invocations(limit=5000)]


@pytest.mark.parametrize("attempt", range(5))
def test_the_first_use_may_come_from_many_threads_at_once(tmp_path: Path, attempt: int) -> None:
    with App(f"sqlite:///{tmp_path}/shop.db") as app:
        echo = app.task(name="echo")(lambda_free)
        together = threading.Barrier(8)

        def submit(number: int) -> str:
            together.wait(timeout=patient(10))
            return echo.submit(number).id

        with ThreadPoolExecutor(8) as pool:
            ids = list(pool.map(submit, range(8), timeout=30))
        assert len(set(ids)) == 8
        assert len(app.invocations()) == 8


def lambda_free(x: int) -> int:
    return x


FORKING = """
echo.submit(-1) if sys.argv[1:] and "warm" == "{warmth}" else None
children = []
for child in range(6):
    pid = os.fork()
    if pid == 0:
        ids = [echo.submit(f"{{child}}-{{n}}").id for n in range(40)]
        os.write(1, ("\\n".join(ids) + "\\n").encode())
        app.close()
        os._exit(0)
    children.append(pid)
for pid in children:
    os.waitpid(pid, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("warmth", ["warm", "cold"])
@pytest.mark.slow
def test_forked_children_never_share_an_id(tmp_path: Path, warmth: str) -> None:
    out, err = finish(program(tmp_path, FORKING.format(warmth=warmth)))
    ids = out.split()
    assert len(ids) == len(set(ids)) == 240, err
    with App(f"sqlite:///{tmp_path}/shop.db") as app:
        assert set(ids) <= {record.id for record in app.invocations(limit=1000)}


@pytest.mark.slow
def test_the_end_of_a_program_hands_back_what_its_runner_was_doing(tmp_path: Path) -> None:
    body = """
app.runner().start()
hang.submit()
echo.submit(1).result(timeout=20)
"""
    _, err = finish(program(tmp_path, body))
    assert err == ""
    assert statuses(tmp_path) == ["success", "rerouted"]


@pytest.mark.slow
def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"it ended and never said {text!r}")


def test_a_second_interrupt_hands_back_instead_of_waiting(tmp_path: Path) -> None:
    body = """
import logging
logging.basicConfig(level="INFO", stream=sys.stdout)
with app.runner():
    hang.submit()
    threading.Event().wait()
"""
    process = program(tmp_path, body)
    assert process.stdout is not None
    try:
        wait_for_line(process, "running\n")
        process.send_signal(signal.SIGINT)
        wait_for_line(process, "waits up to 30 s for 1 invocation")
        process.send_signal(signal.SIGINT)
        finish(process)
    finally:
        process.kill()
    assert statuses(tmp_path) == ["rerouted"]


@pytest.mark.slow
def test_a_runner_complains_when_its_file_is_removed(tmp_path: Path) -> None:
    body = """
import logging
logging.basicConfig(level="WARNING")
with app.runner():
    os.unlink(sys.argv[1].removeprefix("sqlite:///"))
    print("removed", flush=True)
    threading.Event().wait()
"""
    os.environ["HOLDFAST_RUNNER_HEARTBEAT_SECONDS"] = "0.05"
    try:
        process = program(tmp_path, body)
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")  # on a busy machine it may first say that it is not heard
        assert any("was removed or replaced" in line for line in lines)
    finally:
        del os.environ["HOLDFAST_RUNNER_HEARTBEAT_SECONDS"]
        process.kill()
        process.communicate()


CLOSING = """
app = App("memory://")
echo = app.task(name="echo")(echo.definition.function)
echo.submit(0)

def close(*_):
    app.close()
    os._exit(7)

signal.signal(signal.SIGALRM, close)
signal.setitimer(signal.ITIMER_REAL, {seconds})
while True:
    echo.submit(1)
"""


@pytest.mark.parametrize("seconds", [0.02 + 0.003 * number for number in range(8)])
def test_an_app_may_be_closed_by_a_signal_handler(tmp_path: Path, seconds: float) -> None:
    running = program(tmp_path, CLOSING.format(seconds=seconds))
    _, err = finish(running)
    assert (running.returncode, err) == (7, "")


INHERITED = """
with app.runner():
    assert echo.submit(1).result(20) == 1
    pid = os.fork()
    if pid == 0:
        echo.submit(2)
        sys.exit(0)  # and at the end apps are closed
    assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_leaves_its_parents_runner_alone(tmp_path: Path) -> None:
    running = program(tmp_path, INHERITED)
    _, err = finish(running)
    assert (running.returncode, "Error" in err) == (0, False), err
