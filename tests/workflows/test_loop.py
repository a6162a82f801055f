"""The loop of a body: what makes it deterministic, what it refuses, and how a body is evicted."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.workflows.lives import CODEC, START, answer, begun, call_of, made_step, new_life, nothing

from holdfast.errors import NotDeterministic, UsageError, WorkflowError
from holdfast.model.decoding import EARLIEST, LATEST
from holdfast.workflows import events as e
from holdfast.workflows.api import sleep
from holdfast.workflows.events import Event
from holdfast.workflows.life import AsyncLife, PlainLife, current_life
from holdfast.workflows.loop import BodyLoop, Evicted
from holdfast.workflows.rules import Replay

HERE = __file__
ROOT = Path(__file__).parents[2]


async def _charge(order: str = "") -> str:
    raise AssertionError("a step ran for real")


charge = made_step(_charge, name="charge")
refund = made_step(_charge, name="refund")


def error_of(life: AsyncLife) -> BaseException:
    assert life.ended is not None
    assert life.ended.error is not None
    return life.ended.error


def line_of(text: str) -> int:
    """Return the line of this file that holds the text and a mark."""
    lines = Path(HERE).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip().endswith(f"# {text}"))


def calls_of(life: AsyncLife) -> list[str]:
    return [command.call.id for command in life.commands]


# --- the same in each process


class TestSameEverywhere:
    def test_hashes_follow_from_the_run(self) -> None:
        async def body() -> list[int]:
            tasks = [asyncio.create_task(asyncio.sleep(0)) for _ in range(3)]
            made = [*tasks, *[asyncio.get_running_loop().create_future() for _ in range(3)]]
            await asyncio.wait(tasks)
            return [hash(each) for each in made]

        first, second, other = begun(body), begun(body), begun(body, run="run-2")
        assert first.ended == second.ended
        assert first.ended != other.ended
        assert first.ended is not None
        assert len(set(first.ended.value)) == 6  # type: ignore[call-overload]

    def test_hashes_do_not_depend_on_the_hash_seed(self) -> None:
        code = "from holdfast.workflows.loop import BodyLoop; print(BodyLoop('r', 0.0, print, print).next_task_hash())"
        said = [
            subprocess.run(
                [sys.executable, "-c", code],
                env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT / "src")},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed in ("1", "2")
        ]
        assert said[0] == said[1] != ""

    def test_tasks_are_named_by_the_body_itself(self) -> None:
        async def body() -> list[str]:
            return [asyncio.create_task(asyncio.sleep(0)).get_name() for _ in range(2)]

        first, second = begun(body), begun(body)
        assert first.ended == second.ended
        for life in (first, second):
            life.evict()

    def test_names_given_by_the_body_are_kept(self) -> None:
        async def body() -> str:
            async with asyncio.TaskGroup() as group:
                return group.create_task(asyncio.sleep(0), name="packing").get_name()

        life = begun(body)
        assert life.ended is not None
        assert life.ended.value == "packing"

    def test_time_is_that_of_the_last_event(self) -> None:
        async def body() -> list[float]:
            loop = asyncio.get_running_loop()
            times = [loop.time()]
            await charge()
            return [*times, loop.time()]

        life = begun(body)
        life.clock_to(START + 5)
        life.clock_to(START + 3)  # never back
        answer(life, "charge#1")
        assert life.ended == ([START, START + 5], None)

    def test_chance_follows_from_the_run(self) -> None:
        async def body() -> Any:
            life = current_life()
            assert life is not None
            return life.random.random(), life.uuid4()

        assert begun(body).ended == begun(body).ended != begun(body, run="run-2").ended

    def test_the_collector_is_off_during_a_drain(self) -> None:
        async def body() -> bool:
            return gc.isenabled()

        assert gc.isenabled()
        assert begun(body).ended == (False, None)
        assert gc.isenabled()

    def test_the_users_loop_is_as_before_after_a_drain(self) -> None:
        async def body() -> None:
            await charge()

        async def main() -> None:
            before = asyncio.get_running_loop(), sys.get_asyncgen_hooks()
            life = begun(body)
            assert (asyncio.get_running_loop(), sys.get_asyncgen_hooks()) == before
            assert current_life() is None
            life.evict()
            assert (asyncio.get_running_loop(), sys.get_asyncgen_hooks()) == before

        asyncio.run(main())

    @pytest.mark.parametrize("at", [float("inf"), -1e300, float("nan")])
    def test_far_timers_fit_into_the_log(self, at: float) -> None:
        async def body() -> None:
            asyncio.get_running_loop().call_at(at, print)

        life = begun(body)
        (command,) = life.commands
        recorded = e.encode([Event(type=e.WAIT_CREATED, at=1.0, call="wait#1", due=command.call.due)])
        assert b"wait_created" in recorded
        assert command.call.due is not None
        assert EARLIEST <= command.call.due <= LATEST
        life.evict()

    def test_far_timers_of_a_plain_body_fit_into_the_log(self) -> None:
        life = PlainLife(
            Replay([], code="code", same=lambda *_: False), CODEC, call_of(nothing), generation=0, now=START
        )
        life._opened_timer("sleep", 9e11)
        assert life.commands[0].call.due == LATEST


class TestGenerators:
    def test_one_that_is_left_open_is_closed_at_the_end_and_its_steps_are_recorded(self) -> None:
        async def numbers() -> AsyncIterator[int]:
            try:
                yield 1
                yield 2
            finally:
                await refund()

        async def body() -> str:
            async for _ in numbers():
                break
            gc.collect()
            return "done"

        life = begun(body)
        assert life.ended is None
        assert calls_of(life) == ["refund#1"]
        answer(life, "refund#1")
        assert life.ended == ("done", None)

    def test_a_failure_while_one_is_closed_does_not_fail_the_run(self) -> None:
        async def numbers() -> AsyncIterator[int]:
            try:
                yield 1
            finally:
                raise KeyError("no")

        async def body() -> str:
            await anext(numbers())
            return "done"

        life = begun(body)
        assert life.ended == ("done", None)
        assert "KeyError" in life.loop.complaints[0]

    def test_exhausted_ones_are_not_kept(self) -> None:
        async def numbers() -> AsyncIterator[int]:
            yield 1

        async def body() -> None:
            for _ in range(1000):
                async for _ in numbers():
                    pass
            await charge()

        life = begun(body)
        assert len(life.loop._generators) <= 64
        life.evict()

    def test_an_evicted_one_runs_its_plain_finally_and_no_step(self) -> None:
        seen = []

        async def numbers() -> AsyncIterator[int]:
            try:
                yield 1
            finally:
                seen.append("closing")
                try:
                    await refund()
                finally:
                    seen.append("closed")

        async def body() -> None:
            await anext(numbers())
            await charge()

        life = begun(body)
        assert life.evict()
        gc.collect()
        assert seen == ["closing", "closed"]


# --- what is refused


class TestRefusals:
    def test_as_completed_of_coroutines(self) -> None:
        async def body() -> None:
            for each in asyncio.as_completed([charge("a"), charge("b")]):  # as completed
                await each

        error = error_of(begun(body))
        assert isinstance(error, NotDeterministic)
        assert "give it tasks" in str(error)
        assert f"{HERE}:{line_of('as completed')}" in str(error)

    def test_as_completed_of_tasks_works(self) -> None:
        async def body() -> list[str]:
            tasks = [asyncio.create_task(charge(each)) for each in "ab"]
            return [await each for each in asyncio.as_completed(tasks)]

        life = begun(body)
        answer(life, "charge#2", "second")
        answer(life, "charge#1", "first")
        assert life.ended == (["second", "first"], None)

    def test_a_step_that_sets_an_event_of_its_body(self) -> None:
        shared: list[asyncio.Event] = []

        async def body() -> None:
            shared.append(asyncio.Event())
            waiting = asyncio.create_task(shared[0].wait())
            await charge()
            await waiting

        life = begun(body)
        with pytest.raises(NotDeterministic, match=f"call_soon .*{HERE}"):
            shared[0].set()
        life.evict()

    def test_a_task_on_its_loop_from_outside(self) -> None:
        life = begun(lambda: charge())
        with pytest.raises(NotDeterministic, match="create_task"):
            life.loop.create_task(asyncio.sleep(0))
        life.evict()

    def test_using_the_loop_after_the_eviction(self) -> None:
        life = begun(lambda: charge())
        life.evict()
        with pytest.raises(NotDeterministic):
            life.loop.call_soon(print)

    def test_a_future_of_another_loop(self) -> None:
        other = asyncio.new_event_loop()

        async def body() -> None:
            await other.create_future()  # foreign

        async def grouped() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(body())

        for each in (body, grouped):
            error = error_of(begun(each))
            assert isinstance(error, NotDeterministic)
            assert f"{HERE}:{line_of('foreign')}" in str(error)
            assert error.__cause__ is not None
        other.close()

    @pytest.mark.parametrize(
        ("call", "said"),
        [
            (lambda: asyncio.open_connection("localhost", 1), "sockets"),
            (lambda: asyncio.to_thread(print), "threads or executors"),
            (lambda: asyncio.get_running_loop().run_in_executor(None, print), "threads or executors"),
            (lambda: asyncio.get_running_loop().getaddrinfo("localhost", 1), "the network"),
            (lambda: asyncio.create_subprocess_exec("true"), "subprocess_exec"),
            (lambda: asyncio.start_server(print, "localhost", 1), ""),
        ],
    )
    def test_the_outside(self, call: Callable[[], Coroutine[Any, Any, Any]], said: str) -> None:
        async def body() -> None:
            await call()  # outside

        error = error_of(begun(body))
        assert isinstance(error, NotDeterministic)
        assert said in str(error)
        assert HERE in str(error)

    def test_other_threads(self) -> None:
        life = begun(lambda: charge())
        with pytest.raises(NotDeterministic, match="other threads"):
            life.loop.call_soon_threadsafe(print)  # type: ignore[call-arg]
        life.evict()

    def test_sys_exit_fails_the_run_and_not_the_users_loop(self) -> None:
        async def body() -> None:
            sys.exit(3)

        async def main() -> str:
            assert isinstance(error_of(begun(body)), WorkflowError)
            await asyncio.sleep(0)
            return "goes on"

        assert asyncio.run(main()) == "goes on"

    def test_sys_exit_in_a_task_of_the_body(self) -> None:
        async def leave() -> None:
            sys.exit(3)

        async def body() -> None:
            task = asyncio.create_task(leave())
            await charge()
            await task

        life = begun(body)
        assert "SystemExit" in str(error_of(life))
        life.evict()

    def test_a_stuck_body_is_named_with_all_its_stacks(self) -> None:
        async def inner() -> None:
            await asyncio.get_running_loop().create_future()  # stuck

        async def body() -> None:
            await asyncio.gather(inner())

        life = begun(body)
        assert not life.replay.open
        assert life.ended is None
        assert f"{HERE}:{line_of('stuck')} in inner" in life.why_stuck()
        assert "body:" in life.why_stuck()
        life.evict()

    def test_a_thread_that_was_wrapped_leaves_the_body_stuck(self) -> None:
        """`wrap_future` cannot be refused: the loop is not asked before the thread ends."""

        async def body() -> None:
            await asyncio.wrap_future(concurrent.futures.Future())

        life = begun(body)
        assert life.ended is None
        assert not life.replay.open
        life.evict()

    def test_a_key_names_one_call(self) -> None:
        async def body() -> None:
            await charge.options(key="a")("1")
            await charge.options(key="a")("2")

        life = begun(body)
        answer(life, "charge@a")
        error = error_of(life)
        assert isinstance(error, UsageError)
        assert "key='a'" in str(error)

    def test_arguments_that_cannot_be_stored_fail_the_step_catchably(self) -> None:
        async def body() -> str:
            try:
                await charge({"lines": [object()]})
            except TypeError as error:
                return str(error)
            return ""

        life = begun(body)
        assert life.ended is not None
        assert "order" in str(life.ended.value)
        assert "['lines'][0]" in str(life.ended.value)
        assert life.commands == []

    def test_a_negative_sleep(self) -> None:
        async def body() -> None:
            await sleep(-1)

        error = error_of(begun(body))
        assert isinstance(error, UsageError)
        assert "sleep=" in str(error)

    def test_a_sleep_outside_of_workflows(self) -> None:
        with pytest.raises(UsageError, match=r"asyncio\.sleep"):
            sleep(1)


# --- calls


class TestCalls:
    def test_a_call_is_named_where_it_is_written(self) -> None:
        async def body() -> None:
            await asyncio.gather(charge("a"), charge("b"))  # gathered

        life = begun(body)
        place = f"{HERE}:{line_of('gathered')}"
        assert [(command.call.id, command.call.where) for command in life.commands] == [
            ("charge#1", place),
            ("charge#2", place),
        ]
        life.evict()

    def test_a_timer_is_named_where_it_is_set(self) -> None:
        async def body() -> None:
            async with asyncio.timeout(5):  # timed
                await asyncio.sleep(1)

        life = begun(body)
        assert [(c.call.id, c.call.name, c.call.due) for c in life.commands] == [
            ("wait#1", "timeout", START + 5),
            ("wait#2", "sleep", START + 1),
        ]
        assert life.commands[0].call.where.startswith(f"{HERE}:")
        life.evict()

    def test_a_cancelled_step_goes_on_until_its_recorded_end(self) -> None:
        async def body() -> str:
            task = asyncio.create_task(charge())
            await asyncio.sleep(0)
            task.cancel()
            task.cancel()
            return await task

        life = begun(body)
        (command,) = life.commands  # asked for once, although it was opened and cancelled twice in one drain
        assert command.is_cancelled
        assert life.ended is None
        answer(life, "charge#1", "charged after all")
        assert life.ended is not None
        assert isinstance(life.ended.error, asyncio.CancelledError)  # the cancel is not lost

    def test_a_timer_that_was_given_up_is_not_asked_for_again(self) -> None:
        async def body() -> str:
            async with asyncio.timeout(5):
                return await charge()

        life = begun(body)
        life.commands.clear()
        answer(life, "charge#1", "x")
        assert [(command.call.id, command.is_cancelled) for command in life.commands] == [("wait#1", True)]
        assert life.replay.open == {}

    def test_a_step_that_raises_stop_iteration(self) -> None:
        async def body() -> None:
            await charge()

        life = begun(body)
        answer(life, "charge#1", error=StopIteration("end"))
        assert isinstance(error_of(life), RuntimeError)

    def test_a_cancel_of_the_run_reaches_the_body(self) -> None:
        async def body() -> str:
            try:
                await sleep("1 day")
            except asyncio.CancelledError:
                await refund()
                raise
            return ""

        life = begun(body)
        life.cancel(nothing)
        assert "refund#1" in life.by_id
        answer(life, "refund#1")
        assert isinstance(error_of(life), asyncio.CancelledError)

    def test_a_patch_that_was_not_taken_once_is_not_taken_later(self) -> None:
        """A loop whose first round took the old path stays on it: the next life could not tell where to turn."""

        async def body() -> list[bool]:
            taken = []
            for _ in range(3):
                life = current_life()
                assert life is not None
                taken.append(life.patched("tax"))
                await charge()
            return taken

        log = [Event(type=e.STEP_COMPLETED, at=START, call="charge#1", data=b"")]
        life = begun(body, events=log)
        life.replay.next()
        for call in ("charge#1", "charge#2", "charge#3"):
            answer(life, call)
        assert life.ended == ([False, False, False], None)
        assert life.said == []

    def test_a_new_run_takes_the_patch_and_says_so_once(self) -> None:
        async def body() -> list[bool]:
            life = current_life()
            assert life is not None
            return [life.patched("tax"), life.patched("tax")]

        life = begun(body)
        assert life.ended == ([True, True], None)
        assert [event.name for event in life.said] == ["tax"]

    def test_data_that_the_log_has_is_not_said_again(self) -> None:
        async def body() -> None:
            life = current_life()
            assert life is not None
            life.set_data("stage", "packed")

        (said,) = begun(body).said
        assert begun(body, events=[said]).said == []


# --- eviction


async def step_wait() -> None:
    await charge()


async def sleep_wait() -> None:
    await asyncio.sleep(5)


async def gather_wait() -> None:
    await asyncio.gather(charge(), charge())


async def group_wait() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(charge())
        group.create_task(charge())


async def group_body_wait() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(charge())
        await charge()


async def timeout_wait() -> None:
    async with asyncio.timeout(5):
        await charge()


async def wait_wait() -> None:
    await asyncio.wait([asyncio.create_task(charge())])


async def wait_for_wait() -> None:
    await asyncio.wait_for(charge(), 5)


async def lock_wait() -> None:
    lock = asyncio.Lock()
    async with lock:
        task = asyncio.create_task(lock.acquire())
        await charge()
        await task


async def queue_wait() -> None:
    await asyncio.Queue[int]().get()


async def event_wait() -> None:
    await asyncio.Event().wait()


async def shield_wait() -> None:
    await asyncio.shield(charge())


WAITS = [
    *(step_wait, sleep_wait, gather_wait, group_wait, group_body_wait, timeout_wait, wait_wait, wait_for_wait),
    *(lock_wait, queue_wait, event_wait, shield_wait),
]


class TestEviction:
    @pytest.mark.parametrize("wait", WAITS)
    def test_a_finally_around_every_wait(self, wait: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Plain code in a `finally` runs; a step in it is not called, not even as a plain function."""
        seen: list[str] = []

        async def body() -> None:
            try:
                await wait()
            except Exception:
                seen.append("an eviction is no error")
            finally:
                seen.append("cleaned up")
                try:
                    await refund()
                    seen.append("refunded")
                finally:
                    seen.append("left")

        life = begun(body)
        assert life.evict()
        gc.collect()
        assert seen == ["cleaned up", "left"]
        assert (life.commands, life.ended, life.loop.stubborn) == ([], None, [])

    def test_a_finally_that_wakes_others_runs_to_its_end(self) -> None:
        seen: list[str] = []

        async def body() -> None:
            event, lock = asyncio.Event(), asyncio.Lock()
            tasks = [asyncio.create_task(event.wait()), asyncio.create_task(lock.acquire())]
            await asyncio.sleep(0)
            try:
                await charge()
            finally:
                event.set()
                lock.release()
                for task in tasks:
                    task.cancel()
                seen.append("to its end")

        assert begun(body).evict()
        assert seen == ["to its end"]

    def test_a_body_that_catches_everything_is_kept(self) -> None:
        """To drop it would spin in the collector."""
        rounds = []

        async def body() -> None:
            while True:
                try:
                    await charge()
                except BaseException:
                    rounds.append(1)

        life = begun(body)
        assert not life.evict()
        caught = len(rounds)
        assert caught <= 2000
        gc.collect()
        assert len(rounds) == caught
        assert not life.evict()  # and stays so

    def test_a_stubborn_task_does_not_keep_its_sisters(self) -> None:
        seen = []

        async def polite() -> None:
            try:
                await charge()
            finally:
                with contextlib.suppress(ValueError):
                    await refund()
                seen.append("never")

        async def stubborn() -> None:
            while True:
                with contextlib.suppress(BaseException):
                    await asyncio.sleep(1)

        async def body() -> None:
            await asyncio.gather(polite(), stubborn())

        life = begun(body)
        assert not life.evict()
        assert len(life.loop.stubborn) == 1
        assert seen == []

    def test_what_a_task_group_makes_of_it_is_clean(self) -> None:
        async def failing() -> None:
            try:
                await charge()
            finally:
                raise KeyError("while it leaves")

        async def body() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(failing())
                await charge()

        assert begun(body).evict()

    def test_nothing_evicted_goes_on_later(self) -> None:
        seen = []

        async def body() -> None:
            await charge()
            seen.append("resumed")

        life = begun(body)
        life.evict()
        life.deliver("charge#1", nothing, nothing)  # type: ignore[arg-type]
        life.cancel(nothing)
        life.loop.drain()
        gc.collect()
        assert seen == []
        assert life.ended is None

    def test_a_body_that_has_returned_leaves_no_task_behind(self) -> None:
        seen = []

        async def child() -> None:
            try:
                await charge()
            finally:
                seen.append("ended")
                await refund()

        async def body() -> None:
            task = asyncio.create_task(child())
            await asyncio.sleep(0)
            assert not task.done()

        life = begun(body)
        assert life.ended is not None
        assert life.evict()
        assert seen == ["ended"]
        assert "refund#1" not in life.by_id

    def test_an_evicted_body_is_not_current(self) -> None:
        async def body() -> None:
            await charge()

        life = begun(body)
        life.evict()
        assert current_life() is None

    def test_evictions_go_through_except_exception(self) -> None:
        assert not issubclass(Evicted, Exception)

    def test_a_process_that_ends_evicts_its_bodies(self) -> None:
        """The interpreter closes coroutines at its end, and a step in a `finally` would be a plain call."""
        code = """
            from tests.workflows.lives import begun, made_step

            async def _refund():
                print("refunded for real", flush=True)

            refund = made_step(_refund, name="refund")

            async def body():
                try:
                    await refund()
                finally:
                    print("plain", flush=True)
                    await refund()

            life = begun(body)
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert (done.stdout, done.stderr) == ("plain\n", "")


def test_a_loop_that_was_never_drained_is_evicted_too() -> None:
    life = new_life(step_wait)
    assert life.evict()
    assert isinstance(life.loop, BodyLoop)
