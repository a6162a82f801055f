"""Calls in processes of their own: whatever happens to one of them happens to one call."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tests.executors import branch, crew, hooked, library
from tests.support.patience import eventually, patient

from holdfast import App, UsageError
from holdfast.codec import SizeLimits
from holdfast.executors import processes
from holdfast.executors.call import INTERRUPTED, TOO_LATE, Call, Crashed, Outcome, Raised, Returned, Unfit
from holdfast.executors.child_process import CLOSED
from holdfast.executors.loop import LoopThread
from holdfast.executors.processes import ProcessExecutor
from holdfast.telemetry.logs import logging_telemetry

LIMITS = SizeLimits(inline=64 * 2**10, max_bytes=512 * 2**20)
PATIENCE_SECONDS = patient(30.0)


class Rig:
    """Places, and the loop that they deliver to."""

    def __init__(self, size: int, **options: Any) -> None:
        self._thread = LoopThread("test-engine", logging_telemetry())
        self._waiting: dict[str, Future[Outcome]] = {}
        self._number = 0
        made = (size, self._deliver, logging_telemetry())
        self.executor: ProcessExecutor = self.do(lambda: ProcessExecutor(*made, **options))

    def do(self, work: Callable[[], Any]) -> Any:
        """Do this on the loop; so it also shows that the loop is not held up."""

        async def there() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(there(), self._thread.loop).result(PATIENCE_SECONDS)

    def _deliver(self, outcomes: Sequence[tuple[str, Outcome]]) -> None:
        assert threading.current_thread() is self._thread.thread
        for key, outcome in outcomes:
            self._waiting.pop(key).set_result(outcome)

    def call(self, task: Any, *args: Any) -> Call:
        self._number += 1
        codec, known = task._runtime.codec, task.definition
        packed = codec.pack_call(args, {}, (), LIMITS)
        payloads = {payload.digest: payload.data for payload in packed.payloads}
        return Call(
            f"call-{self._number}",
            known.name,
            known.function,
            known.signature,
            packed.data,
            codec,
            LIMITS,
            payloads,
        )

    def start(self, *calls: Call) -> list[Future[Outcome]]:
        futures = [Future[Outcome]() for _ in calls]
        self._waiting.update(zip((call.key for call in calls), futures, strict=True))
        self.do(lambda: self.executor.start(calls))
        return futures

    def submit(self, task: Any, *args: Any) -> tuple[str, Future[Outcome]]:
        call = self.call(task, *args)
        return call.key, self.start(call)[0]

    def outcome(self, task: Any, *args: Any) -> Outcome:
        return self.submit(task, *args)[1].result(PATIENCE_SECONDS)

    def value(self, task: Any, *args: Any) -> Any:
        return decoded(self.outcome(task, *args))

    def interrupt(self, *keys: str) -> None:
        self.do(lambda: self.executor.interrupt(keys))

    def close(self) -> None:
        self.do(self.executor.close)
        self._thread.end()


def decoded(outcome: Outcome) -> Any:
    assert isinstance(outcome, Returned), outcome
    return crew.app.runtime.codec.decode(outcome.result, {payload.digest: payload.data for payload in outcome.payloads})


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """One place, shared by many tests: to start a child takes a while."""
    rig = Rig(1)
    try:
        yield rig
    finally:
        rig.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[Rig]:
    """Two places."""
    rig = Rig(2)
    try:
        yield rig
    finally:
        rig.close()


def noted(folder: Path, name: str = "pid") -> int:
    """A process id that a task has written down."""
    eventually((folder / name).exists, f"a note of {name}")
    return int((folder / name).read_text())


def gone(pid: int) -> bool:
    """Whether that process has ended; one that nobody has waited for yet has."""
    if sys.platform.startswith("linux"):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
    else:
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout or "Z"
    return state[0] in "ZX"


def end(*pids: int) -> None:
    """A test that fails must not leave anything behind."""
    for pid in pids:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


# --- what a call gives


def test_a_call_runs_elsewhere_and_its_child_is_used_again(rig: Rig) -> None:
    first = rig.value(crew.pid)
    assert first != os.getpid()
    assert rig.value(crew.pid) == first
    assert rig.value(crew.thread) is True  # as a program would


def test_classes_of_the_app_are_known_there(rig: Rig) -> None:
    assert rig.value(crew.double, crew.Order(21)) == crew.Order(42)


def test_a_coroutine_runs_there_and_keeps_its_loop(rig: Rig) -> None:
    (pid, loop), again = rig.value(crew.on_a_loop), rig.value(crew.on_a_loop)
    assert pid != os.getpid()
    assert again == (pid, loop)


def test_a_loop_that_is_ended_is_an_error_of_that_call(rig: Rig) -> None:
    outcome = rig.outcome(crew.break_the_loop)
    assert isinstance(outcome, Raised)
    assert outcome.why == "the event loop was ended: SystemExit: 7"
    pid, _ = rig.value(crew.on_a_loop)
    assert pid == rig.value(crew.pid)


def test_an_error_comes_back_as_what_it_was(rig: Rig) -> None:
    outcome = rig.outcome(crew.decline, "no money")
    assert isinstance(outcome, Raised)
    assert outcome.why == "Declined: no money"
    assert "in decline" in outcome.error.traceback
    error = crew.app.runtime.codec.decode_error(outcome.error)
    assert isinstance(error, crew.Declined)
    assert error.args == ("no money",)


def test_the_exit_of_a_plain_function_is_an_error_not_a_crash(rig: Rig) -> None:
    before = rig.value(crew.pid)
    outcome = rig.outcome(crew.leave, 3)
    assert isinstance(outcome, Raised)
    assert outcome.why == "SystemExit: 3"
    assert rig.value(crew.pid) == before


def test_arguments_that_do_not_fit_and_results_that_cannot_be_stored(rig: Rig) -> None:
    unfit = rig.outcome(crew.pid, 1)
    assert isinstance(unfit, Unfit)
    assert "too many positional arguments" in unfit.why
    refused = rig.outcome(crew.unstorable)
    assert isinstance(refused, Raised)
    assert "the result cannot be stored" in refused.why


def test_forty_megabytes_go_there_and_come_back(pair: Rig) -> None:
    size = 40_000_000
    (there, back) = pair.start(pair.call(crew.length, b"a" * size), pair.call(crew.bytes_of, size))
    assert decoded(there.result(PATIENCE_SECONDS)) == size
    assert decoded(back.result(PATIENCE_SECONDS)) == b"x" * size


def test_a_child_that_does_not_read_holds_up_nobody(rig: Rig) -> None:
    """The loop goes on while megabytes wait in front of a child that is stopped."""
    pid = rig.value(crew.pid)
    os.kill(pid, signal.SIGSTOP)
    try:
        _, future = rig.submit(crew.length, b"a" * 4_000_000)
        for _ in range(100):
            rig.do(lambda: None)
        assert not future.done()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert decoded(future.result(PATIENCE_SECONDS)) == 4_000_000


# --- crashes


@pytest.mark.parametrize(
    ("task", "args", "why"),
    [
        (crew.die, (3,), "exit code 3"),
        (crew.kill_yourself, (int(signal.SIGKILL),), "SIGKILL (Killed), which the system sends when memory runs out"),
        (crew.read_nowhere, (), "SIGSEGV (Segmentation fault)"),
        (crew.close_everything, (), f"it lost its connection: {CLOSED}"),
    ],
)
def test_the_death_of_a_child_is_told_in_words(rig: Rig, task: Any, args: tuple[Any, ...], why: str) -> None:
    assert rig.outcome(task, *args) == Crashed(why)


def test_a_crash_is_the_end_of_one_call_only(pair: Rig, tmp_path: Path) -> None:
    key, bystander = pair.submit(crew.hang, str(tmp_path))
    pid = noted(tmp_path)
    assert isinstance(pair.outcome(crew.die, 1), Crashed)
    assert not gone(pid)
    assert not bystander.done()
    assert pair.value(crew.echo, "next") == "next"
    pair.interrupt(key)
    assert bystander.result(PATIENCE_SECONDS) is INTERRUPTED


def test_a_fork_that_outlives_the_child_does_not_hide_its_death(rig: Rig, tmp_path: Path) -> None:
    assert rig.outcome(crew.leave_a_fork_behind, str(tmp_path)) == Crashed("exit code 5")
    grandchild = noted(tmp_path, "grandchild")
    try:
        eventually(lambda: gone(grandchild), "what a dead child has left behind is ended")
    finally:
        end(grandchild)


def test_a_child_that_dies_idle_costs_no_call(rig: Rig) -> None:
    before = rig.value(crew.pid)
    os.kill(before, signal.SIGKILL)
    eventually(lambda: gone(before), "it was killed")
    assert rig.value(crew.pid) != before


def test_a_call_under_a_rate_begins_only_in_a_process_that_is_ready() -> None:
    """Else it would begin together with calls whose starts come later."""
    rig = Rig(1)

    def outcome(number: int, begin_within: float) -> Outcome:
        return rig.start(rig.call(crew.echo, number)._replace(begin_within=begin_within))[0].result(PATIENCE_SECONDS)

    try:
        assert outcome(1, 0.0) is TOO_LATE
        assert decoded(outcome(2, 0.0)) == 2, "its process is ready by now"
        assert isinstance(rig.outcome(crew.die, 3), Crashed)
        assert decoded(outcome(3, PATIENCE_SECONDS)) == 3, "its start comes so seldom that it may wait"
    finally:
        rig.close()


def test_no_process_to_be_had_is_said_so(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = rig.value(crew.pid)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: gone(pid), "it was killed")
    monkeypatch.setattr("holdfast.executors.processes._executable", lambda: "/nowhere/python")
    outcome = rig.outcome(crew.echo, 1)
    assert isinstance(outcome, Crashed)
    assert outcome.why.startswith("no process could be started: ")
    assert "/nowhere/python" in outcome.why


# --- interrupts and ends


def test_an_interrupt_ends_the_child_and_what_it_has_started(rig: Rig, tmp_path: Path) -> None:
    key, future = rig.submit(crew.hang_with_a_program, str(tmp_path))
    pids = [noted(tmp_path), noted(tmp_path, "program")]
    rig.interrupt(key, "unknown")
    assert future.result(PATIENCE_SECONDS) is INTERRUPTED
    try:
        eventually(lambda: all(gone(pid) for pid in pids), "it was interrupted")
    finally:
        end(*pids)
    assert rig.value(crew.echo, 1) == 1


def test_a_child_that_is_stopped_and_does_not_answer_is_ended_all_the_same(rig: Rig, tmp_path: Path) -> None:
    """What a timeout does to a process: it needs no answer."""
    call = rig.call(crew.hang, str(tmp_path), "stopped")
    (future,) = rig.start(call)
    pid = noted(tmp_path, "stopped")
    os.kill(pid, signal.SIGSTOP)
    rig.do(lambda: rig.executor.force([call.key]))
    assert future.result(PATIENCE_SECONDS) is INTERRUPTED
    eventually(lambda: gone(pid), "it was ended")


def test_a_cancel_while_a_process_starts_is_for_that_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has no call yet that could be told. It gets both, and the next call of that process neither."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow(processes._Child):
        def __init__(self) -> None:
            begun.set()
            assert go_on.wait(PATIENCE_SECONDS)
            super().__init__()

    monkeypatch.setattr(processes, "_Child", Slow)
    rig = Rig(1)
    try:
        key, future = rig.submit(crew.wait_to_be_cancelled, PATIENCE_SECONDS)
        assert begun.wait(PATIENCE_SECONDS)
        rig.do(lambda: rig.executor.cancel([key]))
        go_on.set()
        assert decoded(future.result(PATIENCE_SECONDS)) == "cancelled"
        assert rig.value(crew.wait_to_be_cancelled, 0.3) == "done"
    finally:
        rig.close()


def test_an_interrupt_while_a_process_starts_ends_the_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There is no process yet that could be killed: the one that comes is not to have the call."""
    begun, go_on = threading.Event(), threading.Event()
    start = processes.start

    def slow(*command: Any) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE_SECONDS)
        return start(*command)

    monkeypatch.setattr(processes, "start", slow)
    rig = Rig(1)
    try:
        key, future = rig.submit(crew.hang, str(tmp_path), "it ran")
        assert begun.wait(PATIENCE_SECONDS)
        rig.interrupt(key)
        go_on.set()
        assert future.result(PATIENCE_SECONDS) is INTERRUPTED
        assert list(tmp_path.iterdir()) == []
        assert rig.value(crew.echo, 1) == 1
    finally:
        rig.close()


def test_a_soft_timeout_that_is_over_before_a_process_has_the_call_is_raised_in_it() -> None:
    rig = Rig(0)
    try:
        key, future = rig.submit(crew.give_way)
        rig.do(lambda: rig.executor.raise_soft_timeout([key]))
        rig.do(lambda: rig.executor.make_room(1))
        assert decoded(future.result(PATIENCE_SECONDS)) == "partial"
    finally:
        rig.close()


def test_a_call_that_waits_for_a_place_is_interrupted_without_being_run(pair: Rig, tmp_path: Path) -> None:
    calls = [pair.call(crew.hang, str(tmp_path), name) for name in ("one", "two", "three")]
    one, two, three = pair.start(*calls)
    noted(tmp_path, "one"), noted(tmp_path, "two")
    pair.interrupt(calls[2].key)
    assert three.result(PATIENCE_SECONDS) is INTERRUPTED
    assert not one.done()
    pair.interrupt(calls[0].key, calls[1].key)
    assert {one.result(PATIENCE_SECONDS), two.result(PATIENCE_SECONDS)} == {INTERRUPTED}
    assert pair.value(crew.echo, 1) == 1
    assert not (tmp_path / "three").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signals_to_everybody_are_left_to_the_parent(rig: Rig, number: int) -> None:
    """Ctrl-C, and a service manager that stops every process of a service. What a task starts reacts as usual."""
    assert rig.value(crew.shrug_off, int(number)) == "True"
    assert os.getpgid(rig.value(crew.pid)) != os.getpgid(0)


def test_a_fork_of_a_child_can_be_ended_as_usual(rig: Rig) -> None:
    assert rig.value(crew.end_a_fork) == -signal.SIGTERM


def test_there_are_no_more_children_than_places(pair: Rig) -> None:
    futures = pair.start(*[pair.call(crew.pid) for _ in range(12)])
    assert len({decoded(future.result(PATIENCE_SECONDS)) for future in futures}) <= 2


def test_children_are_replaced_after_some_calls_and_end_at_the_close(tmp_path: Path) -> None:
    rig = Rig(1, calls_per_process=2)
    try:
        pids = [rig.value(crew.pid) for _ in range(3)]
        assert pids[0] == pids[1] != pids[2]
        eventually(lambda: gone(pids[0]), "it has run enough")
        _, running = rig.submit(crew.hang, str(tmp_path))
        _, waiting = rig.submit(crew.echo, 1)
        assert noted(tmp_path) == pids[2]
        rig.do(rig.executor.close)
        assert {running.result(PATIENCE_SECONDS), waiting.result(PATIENCE_SECONDS)} == {INTERRUPTED}
        eventually(lambda: gone(pids[2]), "everything ends")
    finally:
        rig.close()


# --- finding tasks


def test_tasks_are_found_however_they_were_declared(rig: Rig) -> None:
    assert rig.value(crew.wrapped, 1) == ["wrapped", 1]
    assert rig.value(crew.app.get_task("wrapped-after"), 1) == 1
    assert rig.value(crew.task_of_plain, 1) == -1
    assert rig.value(branch.triple, 2) == 6
    assert rig.value(branch.quadruple, 2) == 8
    assert vars(crew)["replaced"] is None
    assert rig.value(crew.replaced_task, 1) == 2


def test_a_task_is_run_with_what_its_own_app_knows(rig: Rig) -> None:
    assert rig.value(crew.reveal_here) == crew.Secret(1)
    refused = rig.outcome(crew.reveal_there)
    assert isinstance(refused, Raised)
    assert "Secret" in refused.why


def test_a_task_that_an_import_does_not_declare_is_not_run(rig: Rig) -> None:
    late = crew.app.task(executor="process", name="late")(library.forgotten)
    outcome = rig.outcome(late)
    assert isinstance(outcome, Unfit)
    assert "declares no task 'late' of the app 'crew'. Declare it at the top level" in outcome.why
    nested = crew.app.task(name="nested")(lambda: None)  # a suspect may be any function
    outcome = rig.outcome(nested)
    assert isinstance(outcome, Unfit)
    assert "is made inside another function" in outcome.why


def test_declaring() -> None:
    app = App("memory://")

    def inner() -> None: ...

    async def wait() -> None: ...

    with pytest.raises(UsageError, match=r'executor="process" needs a function at the top level.*inner'):
        app.task(executor="process")(inner)
    with pytest.raises(UsageError, match="has no name by which another process could find it"):
        app.task(executor="process", name="x")(_Callable())
    with pytest.raises(UsageError, match="'fork': a plain function runs in 'thread', where it runs anyway, or in 'pro"):
        app.task(executor="fork")(library.triple)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="'thread': a coroutine function runs in 'loop'"):
        app.task(executor="thread")(wait)
    assert app.task(executor="thread")(inner).definition.executor == "thread"
    assert app.task(executor="loop")(wait).definition.executor == "loop"
    process = app.task(executor="process")(library.triple)
    assert process.definition.fingerprint != App("memory://").task(library.triple).definition.fingerprint


class _Callable:
    def __call__(self) -> None: ...


# --- programs


def program(folder: Path, *command: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def output(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=2 * PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"it hangs: {out}\n{err}")
    assert process.returncode == 0, err
    return out


SHOP = """
import dataclasses, os, sys
from holdfast import App
from holdfast.errors import WorkerLost

app = App("sqlite:///" + sys.argv[1], max_crash_recoveries=0)

@dataclasses.dataclass
class Order:
    number: int

@app.task(executor="process")
def double(order: Order) -> Order:
    print("in", "the parent" if "PARENT" in globals() else "a child", flush=True)
    return Order(order.number * 2)

@app.task(executor="process")
def die() -> None:
    os._exit(3)
"""
MAIN = """
if __name__ == "__main__":
    PARENT = True
    with app.runner(concurrency=1):
        print(double.name, double.submit(Order(4)).result(timeout=60))
"""
CRASH = """
if __name__ == "__main__":
    with app.runner(concurrency=1):
        try:
            die.submit().result(timeout=60)
        except WorkerLost as error:
            print(app.invocation(error.invocation_id).status, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "command", "name"),
    [
        ("shop.py", ["shop.py"], "shop"),
        ("shop/__main__.py", ["-m", "shop"], "shop"),
        ("shop-floor", ["shop-floor"], "shop-floor"),  # a file that cannot be imported
    ],
)
def test_a_program_runs_its_own_tasks_in_processes(tmp_path: Path, file: str, command: list[str], name: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(SHOP + MAIN)
    told = output(program(tmp_path, *command, f"{tmp_path}/s.db"))
    assert told == f"in a child\n{name}:double Order(number=8)\n"


@pytest.mark.slow
def test_whoever_waits_for_a_crashed_task_is_told(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP + CRASH)
    told = output(program(tmp_path, "shop.py", f"{tmp_path}/s.db"))
    assert told.startswith("failed the process that ran it died: exit code 3")


@pytest.mark.slow
def test_a_program_without_a_guard_gets_an_explanation_not_a_flood(tmp_path: Path) -> None:
    main = """
with app.runner(concurrency=1):
    inv = double.submit(Order(4))
    while inv.status not in ("parked", "success", "failed"):
        pass
    print(inv.status, inv.explain())
"""
    (tmp_path / "shop.py").write_text(SHOP + main)
    told = output(program(tmp_path, "shop.py", f"{tmp_path}/s.db"))
    assert told.startswith("parked ")
    assert "cannot import the program: UsageError: a runner is started while a process for tasks imports" in told
    with App(f"sqlite:///{tmp_path}/s.db") as app:
        assert len(app.invocations()) == 1


def test_a_prompt_has_no_tasks_for_processes(tmp_path: Path) -> None:
    code = """
import sys
from holdfast import App, UsageError
def f(): pass
try:
    App("memory://").task(executor="process")(f)
except UsageError as error:
    print(error)
"""
    assert "at a prompt, in a notebook" in output(program(tmp_path, "-c", code))


@pytest.mark.slow
def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """One that is idle, and one that never lets go of the interpreter."""
    main = f"""
import sys, threading
sys.path.insert(0, {os.getcwd()!r})
from tests.executors import crew
if __name__ == "__main__":
    with crew.app.runner(concurrency=2):
        crew.spin.submit({str(tmp_path)!r})
        print(crew.pid.submit().result(timeout=60), flush=True)
        threading.Event().wait()
"""
    (tmp_path / "main.py").write_text(main)
    with program(tmp_path, "main.py") as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()), noted(tmp_path)]
        try:
            assert not any(gone(pid) for pid in pids)
            parent.kill()
            eventually(lambda: all(gone(pid) for pid in pids), "children end with their parent")
        finally:
            end(parent.pid, *pids)


def test_where_the_kernel_does_not_help_a_child_watches_its_parent(tmp_path: Path) -> None:
    """The way that is taken on other systems than Linux."""
    watching = f"""
import os, threading
from holdfast.executors import child_process
child_process.LOOK_SECONDS, child_process._ask_the_kernel = 0.01, lambda grace_seconds: False
child_process.end_with_parent(os.getppid())
open({str(tmp_path / "tmp")!r}, "w").write(str(os.getpid()))
os.rename({str(tmp_path / "tmp")!r}, {str(tmp_path / "pid")!r})
threading.Event().wait()
"""
    main = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {watching!r}])"
    with program(tmp_path, "-c", main) as parent:
        pid = noted(tmp_path)
        try:
            parent.kill()
            eventually(lambda: gone(pid), "it watches its parent")
        finally:
            end(parent.pid, pid)


# --- with the hooks of the app


def test_a_process_with_hooks_has_them_around_its_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TEST_CLOSED", str(tmp_path / "closed"))
    rig = Rig(1, with_hooks=True)
    try:
        assert rig.value(hooked.plain) == 1
        assert rig.value(hooked.on_its_loop) is True
        assert not (tmp_path / "closed").exists()
    finally:
        rig.close()
    eventually((tmp_path / "closed").exists, "the end of the lifespan")


def test_without_them_there_are_none(rig: Rig) -> None:
    assert rig.value(hooked.plain) == 0


def test_who_has_hooks_that_fail_there_does_not_begin() -> None:
    rig = Rig(1, with_hooks=True)
    try:
        outcome = rig.outcome(hooked.never)
        assert isinstance(outcome, Unfit)
        assert "the hooks of its app failed in a process for tasks: OSError: no such pool here" in outcome.why
    finally:
        rig.close()
