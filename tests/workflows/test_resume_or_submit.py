"""Resume a hook, or start a run with the payload: no payload is acknowledged that nobody will get, and none is changed
by the way that it takes.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast import hook, sleep
from holdfast.errors import HookNotFound, NotEncodable
from holdfast.testing import Harness, testing_app
from holdfast.workflows.hooks_records import HOOK


@dataclasses.dataclass
class Approval:
    by: str
    at: dt.datetime | None = None


@pytest.fixture
def t() -> Iterator[Harness]:
    with testing_app(start=1_700_000_000.0) as harness:
        harness.app.register(Approval)
        yield harness


@pytest.mark.parametrize(
    "payload", [b"abc", (1, 2), {1: "a"}, {3}, dt.datetime(2026, 1, 31), Approval("me"), {"a": [1, None]}], ids=repr
)
def test_a_payload_comes_as_it_is_whether_it_starts_the_run_or_not(t: Harness, payload: Any) -> None:
    seen: list[Any] = []

    @t.app.workflow(name="any")
    async def any_of() -> None:
        words = hook("x")
        seen.extend([await words, await words, await words])

    t.app.resume_or_submit("x", payload, any_of)  # starts it
    t.app.resume_or_submit("x", payload, any_of)  # finds it by its key
    t.drain()
    t.app.resume_or_submit("x", payload, any_of)  # finds its hook
    t.drain(check=True)
    assert seen[:3] == [payload] * 3
    assert [type(each) for each in seen] == [type(payload)] * len(seen)


@pytest.mark.parametrize(
    "payload", [Approval("me", dt.datetime(2026, 1, 31)), {"by": "me", "at": "2026-01-31T00:00:00"}], ids=repr
)
def test_a_payload_for_a_typed_hook_is_of_its_type(t: Harness, payload: Any) -> None:
    @t.app.workflow(name="typed")
    async def typed() -> list[Approval]:
        approvals = hook("x", Approval)
        return [await approvals, await approvals]

    run = t.app.resume_or_submit("x", payload, typed)
    t.drain()
    t.app.resume_or_submit("x", payload, typed)
    t.drain(check=True)
    assert run.result() == [Approval("me", dt.datetime(2026, 1, 31))] * 2


def test_a_class_that_is_not_registered_can_start_a_run_too(t: Harness) -> None:
    @dataclasses.dataclass
    class Local:
        by: str

    @t.app.workflow(name="local")
    async def local() -> str:
        return (await hook("x", Local)).by

    run = t.app.resume_or_submit("x", Local("me"), local)
    t.drain(check=True)
    assert run.result() == "me"


def test_a_run_that_has_disposed_of_its_hook_takes_no_more(t: Harness) -> None:
    """It was acknowledged, and recorded as a payload that the body did not want any more."""

    @t.app.workflow(name="room")
    async def room() -> list[str]:
        async with hook("room", str) as words:
            heard = [await words]
        await sleep(60)  # it says goodbye
        async with hook("room", str) as words:
            heard.append(await words)
        await sleep(60)
        return heard

    run = t.app.resume_or_submit("room", "a", room, resume_id="0")
    t.drain(until=1)
    assert t.app.resume_or_submit("room", "a", room, resume_id="0") == run  # it has that one
    for _ in range(2):
        with pytest.raises(HookNotFound, match=f"{run.id} has disposed of its hook"):
            t.app.resume_or_submit("room", "lost?", room, resume_id="1")
    t.drain(until=60)
    assert t.app.resume_or_submit("room", "b", room, resume_id="1") == run
    t.drain(until=1)
    with pytest.raises(HookNotFound):
        t.app.resume_or_submit("room", "c", room)
    t.drain(check=True)
    assert run.result() == ["a", "b"]
    assert t.app.resume_or_submit("room", "c", room) != run  # now it is free


def test_what_cannot_be_stored_starts_no_run(t: Harness) -> None:
    @t.app.workflow(name="once")
    async def once() -> None:
        await hook("x")

    with pytest.raises(NotEncodable, match="payload"):
        t.app.resume_or_submit("x", {"a": object()}, once)
    assert t.submitted() == []


def test_a_hook_that_its_run_has_left_behind_refuses_no_payload_by_its_type(t: Harness) -> None:
    """It is removed a moment after the end. What its type was matters to nobody."""

    @t.app.workflow(name="ask")
    async def ask() -> str:
        return (await hook("x", Approval)).by

    first = ask.submit()
    t.drain()

    async def store_again(entries: list[Any]) -> list[Any]:
        store = (await t.app.runtime.engine()).store
        for entry in entries:
            await store.put_entry(entry)
        return list(await store.entries(t.app.name, HOOK))

    entries = t.app.runtime.run(store_again([]))
    t.app.resume_hook("x", Approval("me"))
    t.drain(check=True)
    assert first.result() == "me"
    assert t.app.runtime.run(store_again(entries)) == entries
    with pytest.raises(HookNotFound):
        t.app.resume_hook("x", 7)
    assert t.app.resume_or_submit("x", {"by": 7}, ask) != first
