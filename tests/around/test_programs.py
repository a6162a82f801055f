"""Programs as tasks: what the allow-list does not have is refused, and no program outlives its task."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.patience import eventually, patient

from holdfast import App, Fatal, InvocationCancelled, TimedOut, UsageError
from holdfast.around import CommandFailed, CommandResult
from holdfast.around.programs import Programs
from holdfast.around.rules import templates_of

PYTHON = sys.executable


@pytest.fixture
def app() -> Iterator[App]:
    with App("memory://", poll_interval_seconds=0.2) as app:
        yield app


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]
    except (ProcessLookupError, FileNotFoundError):
        return False


def run(allow: dict[str, list[str]], command: str, keep: int = 1000, env: Any = None, **values: Any) -> CommandResult:
    programs = Programs(allow, None, env, keep)
    return asyncio.run(programs.run(command, programs.words_of(command, **values)))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"who": "bob", "path": "/x"}, ["greet", "--to=/x", "bob"]),
        ({"who": "a b; rm -rf / $(id)", "path": "-x"}, ["greet", "--to=-x", "a b; rm -rf / $(id)"]),
        ({"who": ["a", "b"], "path": 3}, ["greet", "--to=3", "a", "b"]),
        ({"who": [], "path": 1.5}, ["greet", "--to=1.5"]),
        ({"who": "{path}", "path": "{who}"}, ["greet", "--to={who}", "{path}"]),
    ],
)
def test_values_are_put_into_their_places_and_read_by_no_shell(values: dict[str, Any], words: list[str]) -> None:
    assert templates_of({"greet": ["greet", "--to={path}", "{who}"]})["greet"].filled(values) == words


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "needs who="),
        ({"who": "a", "other": 1}, "has no place 'other'; it has: who, path"),
        ({"who": "-rf", "path": "x"}, "would be read as an option"),
        ({"who": ["a", "--all"], "path": "x"}, "would be read as an option"),
        ({"who": "x\0y", "path": "x"}, "NUL"),
        ({"who": "x\ud800", "path": "x"}, "half a character"),
        ({"who": True, "path": "x"}, "takes texts and numbers"),
        ({"who": {"a": 1}, "path": "x"}, "takes texts and numbers"),
        ({"who": "a", "path": ["x"]}, "takes texts and numbers"),
        ({"who": "x" * 100_001, "path": "x"}, "longer than"),
    ],
)
def test_values_that_no_command_may_get_are_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        templates_of({"greet": ["greet", "{who}", "--to={path}"]})["greet"].filled(values)


def test_a_value_at_the_beginning_of_a_word_makes_no_option() -> None:
    with pytest.raises(UsageError, match="would be read as an option"):
        templates_of({"copy": ["cp", "{a}{b}", "y"]})["copy"].filled({"a": "", "b": "-r"})


@pytest.mark.parametrize(
    "allow", [{}, [], {"a": "rm -rf"}, {"a": []}, {"a": ["{program}", "x"]}, {"a": [1]}, {1: ["ls"]}, {"a": [""]}]
)
def test_an_allow_list_that_leaves_too_much_open_is_refused(app: App, allow: Any) -> None:
    with pytest.raises(UsageError):
        app.shell_task(allow)


def test_only_what_is_in_the_allow_list_is_stored(app: App) -> None:
    shell = app.shell_task({"echo": ["echo", "{text}"]})
    for call in (("rm",), ("echo", "x"), ({},), ()):
        with pytest.raises(UsageError):
            shell.submit(*call)
    assert app.invocations() == []


def test_the_result_is_what_was_printed_and_another_status_is_an_error(app: App) -> None:
    code = "import sys; print('out'); print('no disk', file=sys.stderr); sys.exit(int(sys.argv[1]))"
    shell = app.shell_task({"end": [PYTHON, "-c", code, "{status}"]}, name="maintain")
    with app.runner():
        assert shell.submit("end", status=0).result(patient(20)) == CommandResult(0, "out\n", "no disk\n")
        with pytest.raises(CommandFailed, match="end: exit status 3: no disk") as raised:
            shell.submit("end", status=3).result(patient(20))
    assert (raised.value.status, raised.value.output, raised.value.errors) == (3, "out\n", "no disk\n")


def test_a_command_that_was_taken_off_the_list_since_fails_for_good() -> None:
    function = Programs({"ls": ["ls"]}, None, None, 10).function()
    with pytest.raises(Fatal, match="not in the allow-list"):
        asyncio.run(function("rm"))


def test_a_program_that_is_not_there_is_an_error() -> None:
    with pytest.raises(CommandFailed, match="there is no program holdfast-none") as raised:
        run({"none": ["holdfast-none"]}, "none")
    assert raised.value.status == 127


def test_the_end_of_much_output_is_kept_and_nothing_waits_for_a_reader() -> None:
    code = "import sys\nfor _ in range(300): sys.stdout.write('x' * 10_000)\nprint('the end \\xff')"
    result = run({"much": [PYTHON, "-c", code]}, "much", keep=20)
    head, _, rest = result.output.partition("\n")
    assert head.startswith("[2,99")
    assert rest.endswith("the end \xff\n")
    assert len(rest) <= 20


def test_an_environment_replaces_the_one_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s")
    code = "import os; print(os.environ.get('SECRET'), os.environ.get('MODE'), bool(os.environ['PATH']))"
    assert run({"show": [PYTHON, "-c", code]}, "show", env={"MODE": "m"}).output == "None m True\n"
    assert run({"show": [PYTHON, "-c", code]}, "show").output == "s None True\n"


def test_what_a_program_leaves_in_its_group_ends_with_it(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/pid; echo done"
    assert run({"leave": ["sh", "-c", script]}, "leave").output == "done\n"
    pid = int((tmp_path / "pid").read_text())
    eventually(lambda: not is_alive(pid), "the program that was left behind ends")


@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_a_cancelled_or_late_task_ends_its_program(app: App, tmp_path: Path, how: str) -> None:
    script = f"trap '' TERM; echo $$ > {tmp_path}/pid; while true; do sleep 0.05; done"  # it does not listen
    options: dict[str, Any] = {"timeout": "300ms"} if how == "timeout" else {"cancel_grace": "300ms"}
    shell = app.shell_task({"hang": ["sh", "-c", script]}, **options)
    with app.runner():
        invocation = shell.submit("hang")

        def runs() -> bool:
            nonlocal invocation
            if invocation.status == "failed":  # its time was over before the program began
                invocation = shell.submit("hang")
            return bool((tmp_path / "pid").exists() and (tmp_path / "pid").read_text())

        eventually(runs, "the program runs")
        if how == "cancel":
            invocation.cancel()
        with pytest.raises(TimedOut if how == "timeout" else InvocationCancelled):
            invocation.result(patient(30))
        pid = int((tmp_path / "pid").read_text() or 0)
        eventually(lambda: not is_alive(pid), "the program ends")


def test_a_program_whose_task_is_cancelled_twice_is_gone_before_its_loop() -> None:
    script = "trap '' TERM; echo ready; while true; do sleep 0.05; done"
    programs = Programs({"hang": ["sh", "-c", script]}, None, None, 1000)
    program = asyncio.Event()

    async def main() -> None:
        started = asyncio.get_running_loop().subprocess_exec
        transports: list[asyncio.SubprocessTransport] = []

        async def noted(*args: Any, **kwargs: Any) -> Any:
            made = await started(*args, **kwargs)
            transports.append(made[0])
            program.set()
            return made

        asyncio.get_running_loop().subprocess_exec = noted  # type: ignore[method-assign]
        running = asyncio.create_task(programs.run("hang", programs.words_of("hang")))
        await program.wait()
        for _ in range(2):
            running.cancel()
            for _ in range(3):
                await asyncio.sleep(0)
        await asyncio.wait({running})
        assert transports[0].get_returncode() is not None

    asyncio.run(main())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other kernels do not tell of a parent's death")
def test_a_program_dies_with_its_worker(tmp_path: Path) -> None:
    script = (
        "import asyncio\nfrom holdfast.around.programs import Programs\n"
        f"programs = Programs({{'hang': ['sh', '-c', 'echo $$ > {tmp_path}/pid; sleep 600']}}, None, None, 10)\n"
        "asyncio.run(programs.run('hang', programs.words_of('hang')))"
    )
    worker = subprocess.Popen([PYTHON, "-c", script])
    try:
        eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the program runs")
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    pid = int((tmp_path / "pid").read_text())
    eventually(lambda: not is_alive(pid), "the program dies")
