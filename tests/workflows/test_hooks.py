"""Hooks in bodies: awaited, iterated, disposed of, in conflict; replayed at each wait, on virtual time.

`holdfast.testing` evicts a body at each wait, replays each ended run, and replays it in another process too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
from collections.abc import Iterator
from typing import Any

import msgspec
import pydantic
import pytest

from holdfast import App, Status, UsageError, context, hook, sleep
from holdfast.errors import HookConflict, HookNotFound, InboxFull, NotDecodable, NotEncodable, PayloadDoesNotFit
from holdfast.model.records import RunState
from holdfast.testing import Harness, testing_app
from holdfast.workflows.hooks_records import HOOK, WEBHOOK, hook_entry, name_of, read_hook, webhook_entry
from holdfast.workflows.hooks_store import HookSweep

SECRET, OTHER_SECRET = "s" * 32, "t" * 32


@dataclasses.dataclass
class Approval:
    by: str
    at: dt.datetime | None = None


class Ship(msgspec.Struct):
    order: int


class Form(pydantic.BaseModel):
    name: str


@pytest.fixture
def t() -> Iterator[Harness]:
    with testing_app(start=1_700_000_000.0) as harness:
        yield harness


def harness_of(*, replays: bool = True, **settings: Any) -> Harness:
    return testing_app(App("memory://", name="testing", **settings), start=1_700_000_000.0, replays=replays)


def events_of(run: Any) -> list[str]:
    return [event.type for event in run.events() if not event.type.startswith("run_")]


def entries_of(t: Harness, kind: str) -> list[Any]:
    async def read() -> list[Any]:
        engine = await t.app.runtime.engine()
        return list(await engine.store.entries(t.app.name, kind))

    return t.app.runtime.run(read())


def declare_publish(t: Harness) -> Any:
    @t.app.workflow(name="publish")
    async def publish(article: str) -> str:
        return (await hook(f"approve:{article}", Approval)).by

    return publish


# --- one payload


def test_a_body_waits_for_a_payload_and_costs_no_memory_meanwhile(t: Harness) -> None:
    run = declare_publish(t).submit("42")
    t.drain()
    assert run.status is Status.SUSPENDED
    assert t.app.resume_hook("approve:42", Approval(by="reviewer")).id == run.id
    t.drain(check=True)
    assert run.result() == "reviewer"
    assert events_of(run) == ["hook_created", "hook_received"]
    assert entries_of(t, HOOK) == []


def test_what_is_open_at_the_end_of_a_run_ends_with_it(t: Harness) -> None:
    @t.app.workflow(name="hasty")
    async def hasty() -> None:
        await hook("first", str)
        nap = asyncio.create_task(sleep("1h"))
        await hook("second", str)
        nap.get_name()

    run = hasty.submit()
    for token in ("first", "second"):
        t.drain()
        assert run.step("hook#1").status == "waiting"
        t.app.resume_hook(token, "go on")
    t.drain(check=True)
    hook_, nap = run.step("hook#1"), run.step("wait#1")
    assert (hook_.status, hook_.received, hook_.ended_at) == ("completed", 1, run.record().changed_at)
    assert (nap.status, nap.ended_at) == ("cancelled", run.record().changed_at)


@pytest.mark.parametrize(
    ("type", "payload", "got"),
    [
        (Any, {"a": (1, 2)}, {"a": (1, 2)}),
        (str, "yes", "yes"),
        (int, 3, 3),
        (bool, True, True),
        (dict, {"a": [1]}, {"a": [1]}),
        (list[int], [1, 2], [1, 2]),
        (int | None, None, None),
        (Ship, Ship(order=1), Ship(order=1)),
        (Ship, {"order": 1}, Ship(order=1)),
        (Approval, Approval("me", dt.datetime(2026, 1, 1)), Approval("me", dt.datetime(2026, 1, 1))),
        (Form, Form(name="x"), Form(name="x")),
        (Form, {"name": "x"}, Form(name="x")),
        (list[Form], [Form(name="x")], [Form(name="x")]),
    ],
)
def test_a_payload_comes_as_the_type_of_the_hook(t: Harness, type: Any, payload: object, got: object) -> None:
    seen: list[object] = []

    @t.app.workflow(name="typed")
    async def typed() -> None:
        seen.append(await hook("x", type))

    typed.submit()
    t.drain()
    t.app.resume_hook("x", payload)
    t.drain(check=True)
    assert seen[0] == got


@pytest.mark.parametrize(
    ("payload", "path"),
    [
        ({"by": 3}, "payload.by"),
        ({}, "payload.by"),
        ({"by": "me", "at": "soon"}, "payload.at"),
        ("me", "payload"),
        (None, "payload"),
    ],
)
def test_a_payload_that_does_not_fit_is_refused_with_its_path(t: Harness, payload: object, path: str) -> None:
    run = declare_publish(t).submit("42")
    t.drain()
    before = run.record()
    with pytest.raises(PayloadDoesNotFit) as refused:
        t.app.resume_hook("approve:42", payload)
    assert refused.value.path == path
    assert path in str(refused.value)
    assert isinstance(refused.value, UsageError)
    assert run.record() == before


def test_a_value_that_cannot_be_stored_is_refused(t: Harness) -> None:
    @t.app.workflow(name="any")
    async def anything() -> Any:
        return await hook("x")

    run = anything.submit()
    t.drain()
    with pytest.raises(NotEncodable, match=r"payload\['a'\]"):
        t.app.resume_hook("x", {"a": object()})
    assert run.status is Status.SUSPENDED


def test_a_rule_that_no_schema_tells_is_applied_in_the_body(t: Harness) -> None:
    class Even(pydantic.BaseModel):
        number: int

        @pydantic.field_validator("number")
        @classmethod
        def check(cls, number: int) -> int:
            if number % 2:
                raise ValueError("it is odd")
            return number

    @t.app.workflow(name="even")
    async def even() -> int:
        numbers = hook("x", Even)
        with pytest.raises(NotDecodable, match="it is odd"):
            await numbers
        return (await numbers).number

    run = even.submit()
    t.drain()
    t.app.resume_hook("x", {"number": 3})
    t.app.resume_hook("x", {"number": 4})
    t.drain(check=True)
    assert run.result() == 4


# --- durable, in order, once


def test_a_hook_is_stored_before_the_next_step_begins(t: Harness) -> None:
    seen: list[str] = []

    @t.app.step(name="mail")
    async def mail(token: str) -> None:
        seen.append((await t.app.ahook(token)).token)

    @t.app.step(name="look", repeatable=True)
    async def look(token: str) -> None:
        seen.append((await t.app.ahook(token)).token)

    @t.app.workflow(name="asks")
    async def asks() -> Any:
        approval, other = hook("one"), hook("two")
        await look(approval.token)
        await mail(other.token)
        return await approval

    run = asks.submit()
    t.drain()
    assert seen == ["one", "two"]
    assert events_of(run)[:3] == ["hook_created", "hook_created", "step_created"]


def test_payloads_that_come_before_the_body_waits_are_kept_in_order(t: Harness) -> None:
    @t.app.workflow(name="late")
    async def late() -> list[int]:
        numbers = hook("numbers", int)
        await sleep("1h")
        return [await numbers for _ in range(3)]

    run = late.submit()
    t.drain()
    for number in range(3):
        t.app.resume_hook("numbers", number)
        t.drain()
    t.advance("1h", check=True)
    assert run.result() == [0, 1, 2]


def test_a_large_payload_does_not_change_the_order(t: Harness) -> None:
    large = "x" * 200_000

    @t.app.workflow(name="large")
    async def many() -> list[int]:
        texts = hook("texts", str)
        return [len(await texts) for _ in range(3)]

    run = many.submit()
    t.drain()
    for text in (large, "a", large + "b"):
        t.app.resume_hook("texts", text)
    t.drain(check=True)
    assert run.result() == [200_000, 1, 200_001]


def test_a_resume_id_counts_once_however_late_it_is_repeated(t: Harness) -> None:
    @t.app.workflow(name="pair")
    async def pair() -> list[int]:
        numbers = hook("numbers", int)
        first = await numbers
        await sleep("1h")
        return [first, await numbers]

    run = pair.submit()
    t.drain()
    t.app.resume_hook("numbers", 1, resume_id="a")
    t.app.resume_hook("numbers", 1, resume_id="a")  # it is in the inbox
    t.drain()
    t.app.resume_hook("numbers", 1, resume_id="a")  # it is in the log
    t.advance("2h")
    assert run.status is Status.SUSPENDED
    t.app.resume_hook("numbers", 2, resume_id="b")
    t.drain(check=True)
    assert run.result() == [1, 2]


def test_a_thousand_payloads_behind_is_too_far(t: Harness) -> None:
    @t.app.workflow(name="slow")
    async def slow() -> int:
        numbers = hook("numbers", int)
        return sum([await numbers for _ in range(1000)])

    run = slow.submit()
    t.drain()
    for number in range(1000):
        t.app.resume_hook("numbers", 1, resume_id=str(number))
    with pytest.raises(InboxFull, match="same resume_id"):
        t.app.resume_hook("numbers", 1, resume_id="more")
    t.app.resume_hook("numbers", 1, resume_id="7")  # which is there
    t.drain(check=True)
    assert run.result() == 1000


# --- when there is none


def test_without_an_open_hook_it_is_not_found(t: Harness) -> None:
    @t.app.workflow(name="short")
    async def short() -> None:
        approval = hook("x")
        await approval
        approval.dispose()
        await sleep("1h")

    with pytest.raises(HookNotFound, match="no open hook has the token 'x'"):
        t.app.resume_hook("x", 1)
    run = short.submit()
    with pytest.raises(HookNotFound):
        t.app.resume_hook("x", 1)
    t.drain()
    t.app.resume_hook("x", 1)
    t.drain()
    assert run.status is Status.SUSPENDED
    for call in (t.app.resume_hook, t.app.hook):
        with pytest.raises(HookNotFound):
            call("x")
    t.advance("1h")
    with pytest.raises(HookNotFound):
        t.app.resume_hook("x", 1)


def test_a_secret_token_is_in_no_error(t: Harness) -> None:
    with pytest.raises(HookNotFound) as error:
        t.app.resume_hook("A" * 43, 1)
    assert "AAA" not in str(error.value)


@pytest.mark.parametrize("ending", ["returns", "fails", "cancelled"])
def test_hooks_end_with_their_run_however_it_ends(t: Harness, ending: str) -> None:
    @t.app.workflow(name="ends")
    async def ends() -> None:
        hook("x")
        await hook("y")
        if ending == "fails":
            raise ValueError("no")

    run = ends.submit()
    t.drain()
    assert [each.token for each in t.waiting_hooks()] == ["x", "y"]
    if ending == "cancelled":
        run.cancel()
    else:
        t.app.resume_hook("y")
    t.drain()
    assert run.status is {"returns": Status.SUCCESS, "fails": Status.FAILED}.get(ending, Status.CANCELLED)
    assert entries_of(t, HOOK) == []
    for token in "xy":
        with pytest.raises(HookNotFound):
            t.app.resume_hook(token)


# --- iterating, disposing


def test_a_hook_is_iterated_until_it_is_disposed_of(t: Harness) -> None:
    @t.app.workflow(name="total")
    async def total() -> list[int]:
        seen = []
        async with hook("numbers", int) as numbers:
            async for number in numbers:
                if number == 0:
                    numbers.dispose()
                seen.append(number)
        return seen

    run = total.submit()
    t.drain()
    for number in (3, 4, 0, 5):
        t.app.resume_hook("numbers", number)
    t.drain(check=True)
    assert run.result() == [3, 4, 0]  # what was not read is dropped
    assert events_of(run).count("hook_received") == 4
    assert events_of(run)[-1] == "hook_disposed"


def test_a_token_is_free_after_its_hook_was_disposed_of(t: Harness) -> None:
    @t.app.workflow(name="twice")
    async def twice() -> list[int]:
        found = []
        for _ in range(2):
            async with hook("x", int) as numbers:
                found.append(await numbers)
        return found

    run = twice.submit()
    t.drain()
    t.app.resume_hook("x", 1)
    t.drain()
    t.app.resume_hook("x", 2)
    t.drain(check=True)
    assert run.result() == [1, 2]


def test_a_disposed_hook_gives_nothing(t: Harness) -> None:
    @t.app.workflow(name="gone")
    async def gone() -> str:
        approval = hook("x")
        approval.dispose()
        approval.dispose()
        try:
            await approval
        except UsageError as error:
            return str(error)
        return ""

    run = gone.submit()
    t.drain(check=True)
    assert "hook#1 was disposed of" in run.result()
    assert entries_of(t, HOOK) == []


def test_disposing_wakes_those_who_wait(t: Harness) -> None:
    @t.app.workflow(name="wakes")
    async def wakes() -> list[str]:
        approval, said = hook("x"), list[str]()

        async def iterate() -> None:
            async for each in approval:
                said.append(each)
            said.append("over")

        task = asyncio.create_task(iterate())
        await sleep(1)
        approval.dispose()
        await task
        return said

    run = wakes.submit()
    t.drain()
    t.app.resume_hook("x", "one")
    t.advance("2s", check=True)
    assert run.result() == ["one", "over"]


def test_a_timeout_ends_a_wait_and_the_hook_stays(t: Harness) -> None:
    @t.app.workflow(name="patient")
    async def patient() -> list[str]:
        approval, said = hook("x", str), []
        for _ in range(3):
            try:
                async with asyncio.timeout(3600):
                    said.append(await approval)
            except TimeoutError:
                said.append("late")
        return said

    run = patient.submit()
    t.advance("61m")
    t.app.resume_hook("x", "yes")
    t.advance("2h", check=True)
    assert run.result() == ["late", "yes", "late"]


def test_a_payload_is_not_lost_with_a_waiter_that_is_cancelled_at_the_same_moment(t: Harness) -> None:
    @t.app.workflow(name="unlucky")
    async def unlucky() -> int:
        numbers = hook("x", int)

        async def cancel() -> None:
            await numbers._until(numbers._has_payload)
            tasks[1].cancel()  # it is woken by the same payload, and has not run yet

        tasks = [asyncio.create_task(cancel()), asyncio.create_task(numbers._receive())]
        await asyncio.wait(tasks)
        assert tasks[1].cancelled()
        return await numbers

    run = unlucky.submit()
    t.drain()
    t.app.resume_hook("x", 7)
    t.drain(check=True)
    assert run.result() == 7


def test_several_tasks_of_a_body_share_a_hook(t: Harness) -> None:
    @t.app.workflow(name="crew")
    async def crew() -> list[int]:
        numbers = hook("x", int)

        async def one() -> int:
            return await numbers

        return await asyncio.gather(one(), one(), one())

    run = crew.submit()
    t.drain()
    for number in range(3):
        t.app.resume_hook("x", number)
    t.drain(check=True)
    assert run.result() == [0, 1, 2]


# --- conflicts


def test_a_token_in_use_is_a_conflict_with_the_id_of_its_owner(t: Harness) -> None:
    @t.app.workflow(name="claims")
    async def claims() -> str:
        approval = hook("x")
        try:
            return str(await approval)
        except HookConflict as error:
            return error.owner if "token 'x' belongs to a hook of the run" in str(error) else str(error)

    first, second = claims.submit(), claims.submit()
    t.drain()
    assert second.result() == first.id
    assert events_of(second) == ["hook_conflict"]
    t.app.resume_hook("x", "mine")
    t.drain(check=True)
    assert first.result() == "mine"


def test_a_conflict_is_raised_where_the_block_begins(t: Harness) -> None:
    @t.app.workflow(name="careful")
    async def careful() -> list[str]:
        kept = hook("x")
        said = []
        for make in (lambda: hook("x"), lambda: hook("y")):
            try:
                async with make():
                    said.append("in")
            except HookConflict as error:
                said.append("own" if error.owner == context().invocation_id else error.owner)
        try:
            async for _ in hook("x"):
                pass
        except HookConflict:
            said.append("iterated")
        assert (await kept.ready()) is kept
        return said

    run = careful.submit()
    t.drain(check=True)
    assert run.result() == ["own", "in", "iterated"]


def test_a_conflict_that_nobody_catches_fails_the_run_and_comes_back_with_its_owner(t: Harness) -> None:
    publish = declare_publish(t)
    first, second = publish.submit("42"), publish.submit("42")
    t.drain()
    with pytest.raises(HookConflict) as error:
        second.result()
    assert error.value.owner == first.id


def test_a_token_is_kept_after_the_end_as_long_as_asked_for(t: Harness) -> None:
    @t.app.workflow(name="keeps")
    async def keeps(seconds: float) -> str:
        async with asyncio.timeout(seconds):
            try:
                return str(await hook("x", keep_token="1d"))
            except HookConflict as error:
                return f"{error.owner} {'keep_token' in str(error)}"

    first = keeps.submit(7200.0)
    t.drain()
    t.app.resume_hook("x", "yes")
    t.drain(check=True)
    with pytest.raises(HookNotFound):
        t.app.resume_hook("x", "no")
    assert t.app.hook("x").is_open is False
    second = keeps.submit(7200.0)
    t.drain(check=True)
    assert second.result() == f"{first.id} True"
    t.advance("25h")
    with pytest.raises(HookNotFound):
        t.app.hook("x")
    third = keeps.submit(7200.0)
    t.drain()
    t.app.resume_hook("x", "again")
    t.drain(check=True)
    assert third.result() == "again"


def test_an_entry_of_a_run_that_is_gone_is_in_nobodys_way_and_swept(t: Harness) -> None:
    """A zombie has stored it, after the end of its run."""
    publish = declare_publish(t)
    run = publish.submit("42")
    t.drain()
    (entry,) = entries_of(t, HOOK)
    t.app.resume_hook("approve:42", Approval(by="me"))
    t.drain()

    async def haunt() -> None:
        assert await (await t.app.runtime.engine()).store.put_entry(entry)

    async def sweep() -> None:
        hooks_and_webhooks = HookSweep(await t.app.runtime.engine())
        await hooks_and_webhooks.sweep()
        await hooks_and_webhooks.sweep()

    t.app.runtime.run(haunt())
    with pytest.raises(HookNotFound):
        t.app.resume_hook("approve:42", Approval(by="me"))
    second = publish.submit("42")
    t.drain()
    assert t.app.hook("approve:42").run == second.id
    t.app.runtime.run(sweep())
    assert t.app.hook("approve:42").run == second.id  # which is open
    t.app.resume_hook("approve:42", Approval(by="you"))
    t.drain()
    t.app.runtime.run(haunt())
    t.app.runtime.run(sweep())
    assert entries_of(t, HOOK) == []
    assert run.result() == "me"


def test_what_a_crash_left_of_a_random_token_is_removed_by_the_next_owner() -> None:
    """The log does not have the token yet, so the next owner makes another one. Hooks of other calls stay."""
    with harness_of(replays=False, public_url="https://shop.example") as t:

        @t.app.workflow(name="asks")
        async def asks() -> list[str]:
            first = hook(type=str)
            await sleep("1h")  # another owner goes on after this
            return [await hook(type=str), await first]

        run = asks.submit()
        t.drain()
        (first,) = entries_of(t, HOOK)
        left = msgspec.structs.replace(read_hook(first), call="hook#2", webhook=name_of("of the dead owner"))

        async def leave() -> None:
            store = (await t.app.runtime.engine()).store
            assert await store.put_entry(hook_entry(t.app.name, name_of("lost"), left))
            assert await store.put_entry(webhook_entry(t.app.name, name_of("lost"), left))

        t.app.runtime.run(leave())
        t.advance("1h")
        assert sorted(found.call for found in t.app.hooks(run=run.id)) == ["hook#1", "hook#2"]
        assert name_of("lost") not in [found.name for found in t.app.hooks(run=run.id)]
        assert len(entries_of(t, WEBHOOK)) == 2


# --- plain bodies


def test_a_plain_body_waits_iterates_and_disposes(t: Harness) -> None:
    @t.app.workflow(name="plain")
    def plain() -> list[Any]:
        first = hook("first", Approval)
        said: list[Any] = [first.wait().by]
        with hook("many", int) as many:
            for number in many:
                said.append(number)
                if number == 2:
                    break
        try:
            hook("first")
        except HookConflict as error:
            said.append(error.owner == context().invocation_id)
        try:
            first.wait(timeout="1h")
        except TimeoutError as error:
            said.append(str(error))
        said.append(first.wait("1d").by)
        return said

    run = plain.submit()
    t.drain()
    t.app.resume_hook("first", Approval(by="me"))
    t.drain()
    for number in (1, 2):
        t.app.resume_hook("many", number)
        t.drain()
    t.advance("2h")
    t.app.resume_hook("first", Approval(by="you"))
    t.advance("1h", check=True)
    assert run.result() == ["me", 1, 2, True, "no payload for hook#1 within 1h", "you"]


def test_a_plain_body_that_waits_can_be_cancelled(t: Harness) -> None:
    @t.app.step(name="undo")
    def undo() -> None: ...

    @t.app.workflow(name="plain")
    def plain() -> None:
        approval = hook("x")
        try:
            approval.wait()
        finally:
            undo()

    run = plain.submit()
    t.drain()
    run.cancel()
    report = t.drain()
    assert run.status is Status.CANCELLED
    assert [step.id for step in report.steps] == ["undo#1"]


def test_the_words_of_the_other_kind_of_body_are_refused(t: Harness) -> None:
    @t.app.workflow(name="plain")
    def plain() -> None:
        with pytest.raises(UsageError, match="a plain body does not await"):
            hook("x").__await__().send(None)

    @t.app.workflow(name="coroutine")
    async def coroutine() -> None:
        with pytest.raises(UsageError, match="a coroutine body awaits a hook"):
            hook("y").wait()

    plain.submit()
    coroutine.submit()
    t.drain(check=True)


# --- tokens


def test_a_derived_token_is_the_same_in_each_replay_and_only_its_hash_is_stored() -> None:
    with harness_of(hook_secret=SECRET) as t:
        seen: list[str] = []

        @t.app.workflow(name="derived")
        async def derived() -> Any:
            approval = hook()
            seen.append(approval.token)
            await sleep(1)
            return [await approval, approval.token]

        run = derived.submit()
        t.advance("2s")
        assert len(set(seen)) == 1
        assert len(seen) > 1
        (token,) = set(seen)
        assert len(token) == 43
        (entry,) = entries_of(t, HOOK)
        assert entry.name == name_of(token)
        assert token.encode() not in entry.body
        assert token not in repr([msgspec.structs.asdict(event) for event in run.events()])
        assert t.app.hook(token).origin == "derived"
        assert t.app.hook(token).token == ""
        t.app.resume_hook(token, "yes")
        t.drain(check=True)
        assert run.result() == ["yes", token]


def test_two_hooks_and_two_runs_have_other_tokens() -> None:
    with harness_of(hook_secret=SECRET, public_url="https://shop.example/") as t:

        @t.app.workflow(name="tokens")
        async def tokens() -> list[str]:
            first, second = hook(), hook()
            await sleep(1)
            return [first.token, second.token, first.url, second.url]

        runs = [tokens.submit(), tokens.submit()]
        t.advance("2s", check=True)
        found = [text for run in runs for text in run.result()]
        assert len(set(found)) == 8
        assert all(url.startswith("https://shop.example/hooks/") for url in found[2:4])


def test_a_random_token_lies_in_the_log_and_is_shown_to_nobody(t: Harness) -> None:
    seen: list[str] = []

    @t.app.workflow(name="random")
    async def random() -> Any:
        approval = hook()
        seen.append(approval.token)
        await sleep(1)
        return await approval

    run = random.submit()
    t.advance("2s")
    (token,) = set(seen)
    assert token not in repr(run.events())
    assert token not in repr(t.app.hooks())
    assert t.app.hook(token).origin == "random"
    t.app.resume_hook(token, 1)
    t.drain(check=True)


def test_runs_that_derived_tokens_under_an_older_secret_still_resume() -> None:
    with harness_of(hook_secret=OTHER_SECRET, hook_secret_previous=SECRET) as t:
        seen: list[str] = []

        @t.app.step(name="mail")
        async def mail(token: str) -> None: ...

        @t.app.workflow(name="derived")
        async def derived() -> Any:
            approval = hook()
            seen.append(approval.token)
            await mail(approval.token)
            return await approval

        settings, t.app.runtime.settings = t.app.runtime.settings, App("memory://", hook_secret=SECRET).settings
        run = derived.submit()
        t.drain()
        t.app.runtime.settings = settings
        t.app.close()  # opened again, with the other settings
        t.app.resume_hook(seen[0], 1)
        t.drain(check=True)
        assert run.result() == 1
        assert len(set(seen)) == 1
        fresh = derived.submit()
        t.drain()
        assert seen[-1] != seen[0]
        t.app.resume_hook(seen[-1], 2)
        t.drain(check=True)
        assert fresh.result() == 2


def test_a_lost_secret_parks_a_run_and_says_what_to_set() -> None:
    with harness_of(hook_secret=OTHER_SECRET, replays=False) as t:
        seen: list[str] = []

        @t.app.workflow(name="derived")
        async def derived() -> Any:
            approval = hook()
            seen.append(approval.token)
            return await approval

        settings, t.app.runtime.settings = t.app.runtime.settings, App("memory://", hook_secret=SECRET).settings
        run = derived.submit()
        t.drain()
        t.app.runtime.settings = settings
        t.app.close()
        t.app.resume_hook(seen[0], 1)
        t.drain()
        record = run.record()
        assert record.status is Status.PARKED
        assert "Set hook_secret_previous to that, and wake the run" in record.reason


def test_a_url_stays_as_it_was_when_public_url_changes() -> None:
    with harness_of(hook_secret=SECRET, public_url="https://new.example") as t:

        @t.app.step(name="mail")
        async def mail(url: str) -> None: ...

        @t.app.workflow(name="asks")
        async def asks() -> list[str]:
            approval = hook("x")
            await mail(approval.url)
            await approval
            return [approval.url, hook("y").url]

        settings = t.app.runtime.settings
        t.app.runtime.settings = App("memory://", hook_secret=SECRET, public_url="https://old.example").settings
        run = asks.submit()
        t.drain()
        t.app.runtime.settings = settings
        t.app.close()
        t.app.resume_hook("x")
        t.drain(check=True)
        old, new = run.result()
        assert old.startswith("https://old.example/hooks/")
        assert new.startswith("https://new.example/hooks/")


def test_without_public_url_there_is_no_url_and_no_webhook(t: Harness) -> None:
    @t.app.workflow(name="asks")
    async def asks() -> None:
        approval = hook("x")
        with pytest.raises(UsageError, match="public_url was not set"):
            _ = approval.url
        await approval

    asks.submit()
    t.drain()
    assert entries_of(t, WEBHOOK) == []
    assert t.app.hook("x").has_url is False


# --- restarts, forks


def test_a_restart_keeps_hooks_and_what_was_not_read(t: Harness) -> None:
    @t.app.workflow(name="chat")
    async def chat(total: int, left: int) -> int:
        numbers = hook("numbers", int)
        if not left:
            return total
        number = await numbers
        context().restart(total + number, left - 1)

    run = chat.submit(0, 4)
    t.drain()
    for number in (1, 2):
        t.app.resume_hook("numbers", number, resume_id=str(number))
    t.drain()  # both are in one page: the second one is read in the next generation
    t.app.resume_hook("numbers", 2, resume_id="2")  # repeated after the restart
    t.app.resume_hook("numbers", 3, resume_id="3")
    t.drain()
    t.app.resume_hook("numbers", 4, resume_id="4")
    t.drain(check=True)
    assert run.result() == 10
    assert run.record().run.generation == 4
    assert entries_of(t, HOOK) == []


def test_a_derived_token_outlives_a_restart() -> None:
    with harness_of(hook_secret=SECRET) as t:
        seen: list[str] = []

        @t.app.workflow(name="again")
        async def again(times: int) -> Any:
            approval = hook()
            seen.append(approval.token)
            if times:
                await sleep(1)
                context().restart(times - 1)
            return await approval

        run = again.submit(1)
        t.advance("2s")
        assert len(set(seen)) == 1
        t.app.resume_hook(seen[0], "yes")
        t.drain(check=True)
        assert run.result() == "yes"


def test_a_fork_has_the_payloads_and_the_tokens_of_its_original() -> None:
    with harness_of(hook_secret=SECRET) as t:
        fails = [True]

        @t.app.step(name="send")
        async def send(token: str) -> None: ...

        @t.app.step(name="check")
        async def check(said: list[int]) -> list[int]:
            if fails:
                raise ValueError("no")
            return said

        @t.app.workflow(name="forked")
        async def forked() -> list[int]:
            numbers, _ = hook(type=int), hook("unused")
            await send(numbers.token)
            first = await numbers
            said = await check([first])
            return [*said, await numbers]

        run = forked.submit()
        t.drain()
        token = next(each for each in t.waiting_hooks() if not each.token)
        derived = run.steps()[0].arguments[0][0]
        assert name_of(derived) == token.name
        t.app.resume_hook(derived, 1)
        t.drain()
        assert run.status is Status.FAILED
        fails.clear()
        fork = run.fork("check#1")
        t.drain()
        assert t.app.hook(derived).run == fork.id
        assert t.app.hook("unused").run == fork.id
        t.app.resume_hook(derived, 2)
        t.drain(check=True)
        assert fork.result() == [1, 2]


# --- resume or submit


def test_resume_or_submit_starts_one_run_for_all_and_delivers_each_payload(t: Harness) -> None:
    @t.app.workflow(name="room")
    async def room(name: str) -> list[str]:
        words, said = hook(f"room:{name}", str), []
        while (word := await words) != "bye":
            said.append(word)
        return [name, *said]

    runs = [t.app.resume_or_submit("room:1", word, room, "1", resume_id=word) for word in ("a", "b", "a")]
    assert len({run.id for run in runs}) == 1
    t.drain()
    more = t.app.resume_or_submit("room:1", "c", room, "1")
    t.drain()
    assert t.app.resume_or_submit("room:1", "b", room, "1", resume_id="b").id == runs[0].id
    assert t.app.resume_or_submit("room:1", "bye", room, "1").id == more.id == runs[0].id
    t.drain(check=True)
    assert runs[0].result() == ["1", "a", "b", "c"]
    assert len(t.submitted(room)) == 1


def test_after_the_end_of_its_run_a_token_starts_another_one(t: Harness) -> None:
    keys: list[str] = []

    @t.app.step(name="note")
    async def note() -> None:
        keys.append(context().idempotency_key)

    @t.app.workflow(name="once")
    async def once(name: str) -> str:
        await note()
        return f"{name} {await hook('token', str)}"

    first = t.app.resume_or_submit("token", "a", once, "one")
    t.drain(check=True)
    second = t.app.resume_or_submit("token", "b", once, name="two")
    t.drain(check=True)
    assert [first.result(), second.result()] == ["one a", "two b"]
    assert len(set(keys)) == 2  # effects of another run are other effects


def test_a_run_is_submitted_together_with_its_payload(t: Harness) -> None:
    @t.app.workflow(name="once")
    async def once() -> str:
        return await hook("token", str)

    run = t.app.resume_or_submit("token", "x" * 100_000, once)
    state = run.record().run
    assert isinstance(state, RunState)
    assert [entry.call for entry in state.inbox] == [f"token:{name_of('token')}"]
    t.drain(check=True)
    assert len(run.result()) == 100_000


@pytest.mark.parametrize("what", ["a task", "a function"])
def test_only_a_workflow_can_be_submitted_so(t: Harness, what: str) -> None:
    @t.app.task(name="task")
    def task() -> None: ...

    with pytest.raises(UsageError, match="only workflows have hooks" if what == "a task" else "expected a workflow"):
        t.app.resume_or_submit("x", 1, task if what == "a task" else print)
    assert t.submitted() == []


# --- looking


def test_hooks_are_found_by_token_by_run_and_in_lists(t: Harness) -> None:
    @t.app.workflow(name="asks")
    async def asks(number: int) -> None:
        approval = hook(f"a:{number}", Approval, metadata={"number": number})
        hook(f"b:{number}")
        await approval

    runs = [asks.submit(number) for number in range(3)]
    t.drain()
    found = t.app.hook("a:1")
    assert (found.run, found.task, found.call, found.metadata) == (runs[1].id, "asks", "hook#1", {"number": 1})
    assert found.type.endswith("Approval")
    assert {each.token for each in t.app.hooks(run=runs[2].id)} == {"a:2", "b:2"}
    pages, before = list[str](), None
    while page := t.app.hooks(limit=4, before=before):
        pages += [each.token for each in page]
        before = page[-1].name
    assert sorted(pages) == ["a:0", "a:1", "a:2", "b:0", "b:1", "b:2"]
    assert [each.token for each in t.waiting_hooks()] == ["a:0", "b:0", "a:1", "b:1", "a:2", "b:2"]


def test_a_damaged_hook_is_no_open_one_and_hides_no_other(t: Harness) -> None:
    declare_publish(t).submit("1")
    t.drain()

    async def damage() -> None:
        engine = await t.app.runtime.engine()
        (entry,) = await engine.store.entries(t.app.name, HOOK)
        await engine.store.put_entry(msgspec.structs.replace(entry, name=name_of("bad"), body=b'{"by": 1}'))

    t.app.runtime.run(damage())
    assert [found.token for found in t.app.hooks()] == ["approve:1"]
    with pytest.raises(HookNotFound):
        t.app.resume_hook("bad", 1)
    assert [found.token for found in t.app.hooks()] == ["approve:1"]


def test_a_waiting_run_says_for_which_hook_it_waits(t: Harness) -> None:
    run = declare_publish(t).submit("42")
    t.drain()
    assert "hook#1: a payload for the hook approve:42" in run.explain()
    assert ", since " in run.explain()
    assert "waits for hook#1 (hook approve:42)" in run.record().reason
    with pytest.raises(Exception, match="approve:42"):  # nothing in this test will end it
        run.result()


def test_the_same_is_there_for_coroutines() -> None:
    async def test() -> None:
        async with testing_app() as t:
            publish = declare_publish(t)
            run = await publish.asubmit("42")
            await t.adrain()
            assert [each.token for each in await t.awaiting_hooks()] == ["approve:42"]
            assert (await t.app.ahook("approve:42")).run == run.id
            assert len(await t.app.ahooks(run=run.id)) == 1
            await t.app.aresume_hook("approve:42", Approval(by="me"))
            await t.adrain(check=True)
            assert await run.aresult() == "me"
            other = await t.app.aresume_or_submit("approve:1", Approval(by="you"), publish, "1")
            await t.adrain(check=True)
            assert await other.aresult() == "you"

    asyncio.run(test())


def test_a_step_may_resume_a_hook_inside_of_a_drain(t: Harness) -> None:
    publish = declare_publish(t)

    @t.app.step(name="approve")
    def approve(article: str) -> None:
        t.app.resume_hook(f"approve:{article}", Approval(by="a robot"))

    @t.app.workflow(name="robot")
    async def robot() -> str:
        run = publish.submit("42")
        await sleep(1)
        await approve("42")
        return await run

    run = robot.submit()
    t.advance("2s", check=True)
    assert run.result() == "a robot"


# --- bad input


@pytest.mark.parametrize("token", ["", "x" * 257, 42, "a\nb", b"x"])
def test_a_token_that_is_none_is_refused(t: Harness, token: Any) -> None:
    @t.app.workflow(name="asks")
    async def asks() -> None:
        await hook(token)

    run = asks.submit()
    t.drain()
    with pytest.raises(UsageError, match="token="):
        run.result()
    for call in (t.app.resume_hook, t.app.hook):
        with pytest.raises(UsageError, match="token="):
            call(token)
    assert entries_of(t, HOOK) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"type": 42}, "type=42"),
        ({"type": "str"}, "none of them"),
        ({"type": complex}, "none of them"),
        ({"keep_token": "soon"}, "keep_token"),
        ({"methods": "POST"}, "methods="),
        ({"methods": ["FETCH"]}, "methods="),
        ({"methods": []}, "methods="),
        ({"answer": 200}, "expected a Response"),
        ({"verify": "nobody"}, "declares no such verifier"),
        ({"verify": print}, "declares no such verifier"),
        ({"resume_id": "no header!"}, "the name of a header"),
        ({"metadata": object()}, "metadata= cannot be written as JSON"),
        ({"metadata": "x" * 20_000}, "metadata= has 20,002 bytes"),
    ],
)
def test_options_that_make_no_sense_are_refused(t: Harness, options: dict[str, Any], said: str) -> None:
    @t.app.workflow(name="asks")
    async def asks() -> None:
        await hook("x", **options)

    run = asks.submit()
    t.drain()
    with pytest.raises(UsageError, match=said):
        run.result()
    assert entries_of(t, HOOK) == []
    assert events_of(run) == []


def test_a_hook_in_a_task_or_step_or_program_is_refused(t: Harness) -> None:
    @t.app.task(name="task")
    def task() -> None:
        hook("x")

    @t.app.step(name="step")
    async def step() -> None:
        hook("x")

    @t.app.workflow(name="asks")
    async def asks() -> None:
        await step()

    for run in (task.submit(), asks.submit()):
        t.drain()
        with pytest.raises(UsageError, match="call it from a workflow, or wait for an event by a trigger"):
            run.result()
    with pytest.raises(UsageError, match="for the body of a workflow"):
        hook("x")


@pytest.mark.parametrize("resume_id", ["", "x" * 257, 3, "a\n"])
def test_a_resume_id_that_is_none_is_refused(t: Harness, resume_id: Any) -> None:
    run = declare_publish(t).submit("42")
    t.drain()
    with pytest.raises(UsageError, match="resume_id="):
        t.app.resume_hook("approve:42", Approval(by="me"), resume_id)
    assert run.status is Status.SUSPENDED


@pytest.mark.parametrize("limit", [-1, 10_001, "3", True])
def test_a_limit_that_is_none_is_refused(t: Harness, limit: Any) -> None:
    with pytest.raises(UsageError, match="limit="):
        t.app.hooks(limit=limit)
