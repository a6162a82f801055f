"""Steps and workflows as they are declared: options, what is refused, the check of the source, the fingerprint."""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import gc
import itertools
import os
import random
import secrets
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from random import choice as pick
from secrets import token_hex
from time import time as t
from typing import Any

import pytest
from tests.workflows.lives import begun

from holdfast import App, UsageError
from holdfast.errors import DuplicateTask, NotDeterministic
from holdfast.executors.sharing import StepPort
from holdfast.model.retries import Never
from holdfast.runtime.definition import ExecutorKind
from holdfast.workflows.api import sleep
from holdfast.workflows.declaring import GRACE_SECONDS, StepDeclaration, body_fingerprint, check_body, step_of


@pytest.fixture
def app() -> App:
    return App("memory://")


def pay(order: str) -> str:
    return order


async def apay(order: str) -> str:
    return order


def step(function: Callable[..., Any] = pay, **options: Any) -> Any:
    return step_of(function, StepDeclaration(**options))


class TestSteps:
    def test_what_is_not_said(self) -> None:
        made = step()
        assert (made.name, made.task, made.executor) == ("pay", "step:pay", ExecutorKind.THREAD)
        assert (made.retries, made.timeout, made.cancel_grace, made.queue, made.tags) == (Never(), None, 10.0, None, ())

    def test_coroutine_functions_run_on_the_loop(self) -> None:
        assert step(apay).executor is ExecutorKind.LOOP

    def test_what_is_said(self) -> None:
        made = step(name="buy", retries=3, timeout="30s", cancel_grace="1m", queue="gpu", tags=["b", "a"])
        assert (made.name, made.timeout, made.cancel_grace) == ("buy", 30.0, 60.0)
        assert (made.queue, made.tags) == ("gpu", ("a", "b"))
        assert made.retries != Never()

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"soft_timeout": 3}, "has no option soft_timeout"),
            ({"repeatable": True, "at_most_once": True}, "contradict"),
            ({"repeatable": True, "transactional": True}, "contradict"),
            ({"transactional": True, "queue": "gpu"}, "own worker"),
            ({"transactional": True, "executor": "process"}, "own worker"),
            ({"at_most_once": True, "retries": 3}, "retries"),
            ({"name": "a#1"}, "'#', '@' and '/'"),
            ({"name": "a@1"}, "'#', '@' and '/'"),
            ({"tags": "gpu"}, r"such as \['gpu'\]"),
            ({"timeout": -1}, "timeout="),
            ({"repeatable": "yes"}, "repeatable"),
        ],
    )
    def test_what_is_refused(self, options: dict[str, Any], said: str) -> None:
        with pytest.raises(UsageError, match=said):
            step(**options)

    def test_generators_are_refused(self) -> None:
        def numbers() -> Iterator[int]:
            yield 1

        async def anumbers() -> AsyncIterator[int]:
            yield 1

        for each in (numbers, anumbers):
            with pytest.raises(UsageError, match="is a generator; a step returns one result"):
                step(each)

    @pytest.mark.parametrize("wrong", [3, str, "pay"])
    def test_only_functions_are_steps(self, wrong: Any) -> None:
        with pytest.raises(UsageError, match="made of a function"):
            step(wrong)

    def test_a_step_of_a_step_or_task_is_refused(self, app: App) -> None:
        task = app.task(name="task")(pay)
        made = app.step(pay)
        for each in (task, made):
            with pytest.raises(UsageError, match="made of a function"):
                app.step(each)

    def test_two_steps_of_one_name(self, app: App) -> None:
        app.step(name="pay")(pay)
        with pytest.raises(DuplicateTask) as raised:
            app.step(name="pay")(apay)
        assert "'step:pay'" in str(raised.value)
        assert str(raised.value).count(f"{__name__}") >= 2 or str(raised.value).count("test_declaring") >= 2

    def test_a_step_called_outside_of_a_workflow_is_a_plain_call(self, app: App) -> None:
        assert app.step(pay)("42") == "42"
        assert asyncio.run(app.step(apay)("42")) == "42"

    def test_a_step_looks_like_its_function(self, app: App) -> None:
        made = app.step(pay)
        assert (made.__name__, made.__module__, repr(made)) == ("pay", __name__, "<Step pay>")  # type: ignore[attr-defined]


class TestOptionsOfACall:
    def test_they_are_for_one_call(self, app: App) -> None:
        made = app.step(pay)
        other = made.options(key="a", queue="gpu", tags=["x"], timeout="3s", retries=2)
        assert (other._options.key, other._options.queue, other._options.tags) == ("a", "gpu", ("x",))
        assert other._options.timeout == 3.0
        assert made._options.key is None
        assert other.options(queue="cpu")._options.key == "a"

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"repeatable": True}, r"It is declared: @app\.step\(repeatable=…\)"),
            ({"colour": "red"}, "There are: key, queue"),
            ({"key": ""}, "key"),
            ({"tags": "gpu"}, "expected a list"),
        ],
    )
    def test_what_is_refused(self, app: App, options: dict[str, Any], said: str) -> None:
        with pytest.raises(UsageError, match=said):
            app.step(pay).options(**options)

    def test_no_retries_for_what_runs_at_most_once(self, app: App) -> None:
        with pytest.raises(UsageError, match="at most once"):
            app.step(at_most_once=True)(pay).options(retries=2)

    def test_a_transactional_step_stays(self, app: App) -> None:
        with pytest.raises(UsageError, match="own worker"):
            app.step(transactional=True)(pay).options(queue="gpu")


class TestWorkflows:
    @pytest.mark.parametrize(
        ("options", "instead"),
        [
            ({"retries": 3}, "give the steps retries="),
            ({"at_most_once": True}, "give the steps at_most_once=True"),
            ({"executor": "process"}, "give the steps an executor="),
            ({"soft_timeout": 3}, r"asyncio\.timeout"),
        ],
    )
    def test_options_that_make_no_sense(self, app: App, options: dict[str, Any], instead: str) -> None:
        with pytest.raises(UsageError, match=instead):
            app.workflow(**options)(apay)

    def test_options_of_tasks(self, app: App) -> None:
        definition = app.workflow(queue="slow", timeout="1h", priority=3)(apay).definition
        assert (definition.queue, definition.time.timeout, definition.priority) == ("slow", 3600.0, 3)
        assert definition.executor is ExecutorKind.WORKFLOW

    def test_ten_minutes_of_grace(self, app: App) -> None:
        assert app.workflow(apay).definition.time.cancel_grace == GRACE_SECONDS == 600
        assert app.workflow(name="b", cancel_grace="5s")(apay).definition.time.cancel_grace == 5

    def test_a_version_is_another_lane(self, app: App) -> None:
        assert app.workflow(name="pay", version="2")(apay).definition.name == "pay@2"
        assert app.workflow(name="pay")(apay).definition.name == "pay"

    def test_generators_are_refused(self, app: App) -> None:
        async def body() -> AsyncIterator[int]:
            yield 1

        with pytest.raises(UsageError, match="generator"):
            app.workflow(body)

    def test_a_task_called_plainly_in_a_body_is_refused(self, app: App) -> None:
        task = app.task(apay)

        async def body() -> None:
            await task("42")

        life = begun(body)
        assert life.ended is not None
        assert isinstance(life.ended.error, UsageError | NotDeterministic)
        assert "submit" in str(life.ended.error)

    def test_sleep_in_a_task_is_refused(self) -> None:
        with pytest.raises(UsageError, match="waits in the body of a workflow"):
            sleep("1s")


# --- the check of the source


async def reads_the_clock() -> None:
    time.time()


async def reads_it_by_an_alias() -> None:
    t()


async def reads_the_monotonic_clock() -> None:
    time.monotonic_ns()


async def reads_the_date() -> None:
    datetime.now()


async def reads_the_date_of_the_module() -> None:
    dt.datetime.now(dt.UTC)


async def reads_today() -> None:
    dt.date.today()


async def takes_a_chance() -> None:
    random.random()


async def picks() -> None:
    pick([1, 2])


async def makes_a_generator() -> None:
    random.Random()


async def makes_a_secret() -> None:
    secrets.token_hex()


async def makes_a_secret_by_name() -> None:
    token_hex()


async def makes_an_id() -> None:
    uuid.uuid4()


async def asks_the_system() -> None:
    os.urandom(3)


async def opens_a_file() -> None:
    open("x")  # noqa: ASYNC230, SIM115


async def blocks() -> None:
    time.sleep(1)  # noqa: ASYNC251


async def starts_a_thread() -> None:
    await asyncio.to_thread(print)


def runs_steps_on_threads() -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(print, [1, 2]))


async def reads_it_in_a_nested_function() -> None:
    def inner() -> float:
        return time.time()

    inner()


async def imports_the_clock() -> None:
    from time import time as now

    now()


async def imports_the_module() -> None:
    import time as clock

    clock.time()


CAUGHT = [
    (reads_the_clock, "time.time", "context().now()"),
    (reads_it_by_an_alias, "t (time.time)", "context().now()"),
    (reads_the_monotonic_clock, "time.monotonic_ns", "context().now()"),
    (reads_the_date, "datetime.now", "context().now()"),
    (reads_the_date_of_the_module, "dt.datetime.now", "context().now()"),
    (reads_today, "dt.date.today", "context().now()"),
    (takes_a_chance, "random.random", "context().random"),
    (picks, "pick", "context().random"),
    (makes_a_generator, "random.Random", "context().random"),
    (makes_a_secret, "secrets.token_hex", "context().random"),
    (makes_a_secret_by_name, "token_hex", "context().random"),
    (makes_an_id, "uuid.uuid4", "context().uuid4()"),
    (asks_the_system, "os.urandom", "context().random.randbytes"),
    (opens_a_file, "open", "do that in a step"),
    (blocks, "time.sleep", "sleep(…) of holdfast"),
    (starts_a_thread, "asyncio.to_thread", "do that in a step"),
    (runs_steps_on_threads, "ThreadPoolExecutor", "do that in a step"),
    (reads_it_in_a_nested_function, "time.time", "context().now()"),
    (imports_the_clock, "now (time.time)", "context().now()"),
    (imports_the_module, "clock.time", "context().now()"),
]


class TestSourceCheck:
    @pytest.mark.parametrize(("body", "said", "instead"), CAUGHT)
    def test_direct_calls_are_named(self, body: Callable[..., Any], said: str, instead: str) -> None:
        with pytest.raises(UsageError) as raised:
            check_body(body)
        assert f"may not call {said} (" in str(raised.value) or f"may not call {said} " in str(raised.value)
        assert instead in str(raised.value)
        assert "check=False" in str(raised.value)

    def test_the_line_is_named(self, app: App) -> None:
        with pytest.raises(UsageError) as raised:

            @app.workflow(name="timed")
            async def body() -> None:
                pass
                time.time()  # the line

        line = next(
            n
            for n, text in enumerate(Path(__file__).read_text().splitlines(), 1)
            if text.strip().endswith("# the line")
        )
        assert f"{__file__}:{line}" in str(raised.value)

    def test_it_can_be_switched_off(self, app: App) -> None:
        assert app.workflow(check=False)(reads_the_clock).definition.is_workflow

    def test_what_is_allowed(self) -> None:
        async def body(open: Callable[[str], None], door: Any, context: Any) -> None:
            open("x")  # an argument
            door.open()
            random.Random(7).random()
            context().random.random()
            datetime(2024, 1, 1)
            time.strftime("%Y", time.gmtime(0))
            choice = max
            choice([1])
            await asyncio.sleep(1)

        check_body(body)

    def test_calls_in_decorators_and_wrappers_are_not_the_bodys(self) -> None:
        def stamped(at: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
            def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
                @functools.wraps(function)
                async def wrapper() -> Any:
                    return await function()

                return wrapper

            return decorate

        @stamped(time.time())
        async def body() -> None:
            pass

        check_body(body)

    def test_code_without_source_is_not_checked(self) -> None:
        namespace: dict[str, Any] = {"time": time}
        exec("async def body():\n    time.time()", namespace)
        check_body(namespace["body"])
        check_body(functools.partial(reads_the_clock))


# --- the fingerprint


_numbers = itertools.count()


def compiled(source: str, tmp_path: Path) -> Callable[..., Any]:
    """Return the function `body` of a module with this source."""
    name = f"module_{next(_numbers)}"
    path = tmp_path / f"{name}.py"
    path.write_text(source)
    namespace: dict[str, Any] = {"__name__": name, "mark": lambda function: function}
    exec(compile(source, str(path), "exec"), namespace)
    body: Callable[..., Any] = namespace["body"]
    return body


BODY = "async def body(x):\n    y = x + 1\n    return y\n"


class TestFingerprint:
    @pytest.mark.parametrize(
        "same",
        [
            'async def body(x):\n    """Says what it does."""\n    y = x + 1\n    return y\n',
            'async def body(x):\n    ""\n    y = x + 1\n    return y\n',
            "\n\n\nasync def body(x):\n\n    # Why.\n    y = (x +\n        1)\n    return y  # so\n",
            "@mark\nasync def body(x):\n    y = x + 1\n    return y\n",
            "if True:\n    async def body(x):\n        y = x + 1\n        return y\n",
        ],
    )
    def test_docstrings_positions_comments_and_the_declaration_do_not_count(self, same: str, tmp_path: Path) -> None:
        assert body_fingerprint(compiled(same, tmp_path)) == body_fingerprint(compiled(BODY, tmp_path))

    @pytest.mark.parametrize(
        "other",
        [
            "async def body(x):\n    y = x + 2\n    return y\n",
            "async def body(x):\n    return x + 1\n",
            "async def body(x, z=1):\n    y = x + 1\n    return y\n",
            "def body(x):\n    y = x + 1\n    return y\n",
        ],
    )
    def test_code_counts(self, other: str, tmp_path: Path) -> None:
        assert body_fingerprint(compiled(other, tmp_path)) != body_fingerprint(compiled(BODY, tmp_path))

    def test_decorators_of_nested_functions_count(self, tmp_path: Path) -> None:
        plain = "async def body():\n    def inner(): pass\n    return inner\n"
        marked = "async def body():\n    @mark\n    def inner(): pass\n    return inner\n"
        assert body_fingerprint(compiled(plain, tmp_path)) != body_fingerprint(compiled(marked, tmp_path))

    def test_code_without_source_has_one_too(self) -> None:
        made = []
        for number in (1, 1, 2):
            namespace: dict[str, Any] = {}
            exec(f"def body():\n    def inner(): return {number}\n    return inner", namespace)
            made.append(body_fingerprint(namespace["body"]))
        assert made[0] == made[1] != made[2]  # nested code is compared by what it does, not by its address

    def test_the_python_version_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = body_fingerprint(apay)
        monkeypatch.setattr("holdfast.model.parking.PYTHON", "3.99")
        other = body_fingerprint(apay)
        monkeypatch.undo()
        assert before != other

    def test_a_workflow_has_the_fingerprint_of_its_body(self, app: App) -> None:
        assert app.workflow(apay).definition.body == body_fingerprint(apay)


def test_a_body_may_name_what_is_defined_after_it(app: App) -> None:
    async def body() -> str:
        return await later()

    app.workflow(name="early")(body)

    async def later() -> str:
        return "later"


class TestDataOfSteps:
    def test_what_a_step_sets_is_told(self) -> None:
        port = StepPort({"a": 1, "b": [1]}, {})
        port.data["c"] = 2
        port.data["b"].append(2)
        port.set({"stage": "packed"})
        assert port.changes() == ({"b": [1, 2], "c": 2}, {"stage": "packed"})

    def test_data_only_grows(self) -> None:
        port = StepPort({"a": 1}, {})
        for delete in (lambda: port.data.pop("a"), port.data.clear, lambda: port.data.__delitem__("a")):
            with pytest.raises(UsageError, match="only grows"):
                delete()

    def test_attributes_are_few_and_short(self) -> None:
        port = StepPort({}, {f"a{number}": "x" for number in range(64)})
        with pytest.raises(UsageError, match="at most 64"):
            port.set({"one more": "x"})
        with pytest.raises(UsageError, match="1 to 256 characters"):
            port.set({"a1": "x" * 257})
        with pytest.raises(UsageError, match="is a text"):
            port.set({"a1": 3})  # type: ignore[dict-item]

    def test_what_is_for_bodies(self) -> None:
        port = StepPort({}, {})
        for use in (port.now, port.uuid4, lambda: port.random, lambda: port.restart((), {})):
            with pytest.raises(UsageError, match="for the body of a workflow"):
                use()


def test_threads_declare_at_once() -> None:
    """`ast.parse` of Python 3.11 raises SystemError if a collection lets another thread parse meanwhile."""

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            for _ in range(50):
                pass

    def declare() -> None:
        for _ in range(100):
            Garbage()
            check_body(_something_to_parse)

    before, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(10)
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for declared in [pool.submit(declare) for _ in range(4)]:
                declared.result()
    finally:
        gc.set_threshold(*before)
        sys.setswitchinterval(interval)


async def _something_to_parse(a: int) -> object:
    found = [((a + 1) * 2 - 3) for _ in range(3)]
    return {"a": [found, (found, [found, {"b": found}])]}
