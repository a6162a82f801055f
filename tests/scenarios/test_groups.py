"""Groups, chains and callbacks, on each store: in order, once, and durable when `submit` returns."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.patience import patient

from holdfast import App, InvocationCancelled, ResultTimeout, UsageError, chain, group
from holdfast.errors import CallNotMade, InvocationNotFound, KeyTaken, StoreError
from holdfast.groups import handles
from holdfast.groups.calling import Caller
from holdfast.groups.calls import GroupSubmit
from holdfast.groups.records import KIND, GroupRecord, from_entry
from holdfast.groups.rules import done_id
from holdfast.groups.service import ABANDONED_SECONDS, Groups
from holdfast.model.records import InvocationRecord
from holdfast.testing import testing_app

PATIENCE = patient(30.0)


@pytest.fixture(params=["memory", "sqlite", "mongodb"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    url = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/shop.db"}.get(request.param)
    where = url or request.getfixturevalue("mongo_url")
    with App(where, name="shop", poll_interval_seconds=0.2, inline_limit=2000) as app:
        yield app


@pytest.fixture
def here() -> Iterator[App]:
    """An app whose calls are run where the test waits, for what is no matter of the store."""
    app = App("memory://", name="shop", inline_limit=2000)
    with testing_app(app):
        yield app


class Shop:
    """Tasks of an app."""

    def __init__(self, app: App) -> None:
        self.gate = threading.Event()
        self.said: list[Any] = []

        @app.task
        def add(x: int, y: int = 0) -> int:
            return x + y

        @app.task
        def total(numbers: list[int], plus: int = 0) -> int:
            return sum(numbers) + plus

        @app.task
        def fail(x: int = 0) -> int:
            raise ValueError(f"no {x}")

        @app.task(throttle="1h")
        def rare(x: int) -> int:
            return x

        @app.task
        def tell(about: Any) -> Any:
            self.said.append(about)
            return about

        @app.task
        def hold(x: int = 0) -> int:
            assert self.gate.wait(PATIENCE)
            return x

        @app.task
        def write(size: int) -> bytes:
            return b"x" * size

        @app.task
        def size(of: Any) -> Any:
            return [len(each) for each in of] if isinstance(of, list) else len(of)

        self.add, self.total, self.fail, self.tell, self.hold = add, total, fail, tell, hold
        self.write, self.size, self.rare = write, size, rare


def calls(app: App, task: Any) -> list[InvocationRecord]:
    return app.invocations(task=task.name, limit=10_000)


# --- chains


def test_a_chain_passes_each_result_on(app: App) -> None:
    shop = Shop(app)
    run: Any = chain(shop.add.s(1, 2), shop.add.s(y=10), shop.add.si(100), shop.add).submit()
    assert app.invocations() != []
    with app.runner(concurrency=2):
        assert run.result(PATIENCE) == 100
    assert [link.result(PATIENCE) for link in run.links] == [3, 13, 100, 100]
    assert [record.status for record in calls(app, shop.add)] == ["success"] * 4
    assert all(record.outbox == () for record in calls(app, shop.add)) or app.url.startswith("memory")


def test_a_chain_is_one_write_and_its_calls_are_derived(here: App) -> None:
    shop = Shop(here)
    run: Any = shop.add.s(1).then(shop.add.s(y=1)).then(chain(shop.add.s(y=2), shop.add.s(y=3))).submit()
    (only,) = here.invocations()
    assert (run.id, run.size, run.status) == (only.id, 4, "registered")
    assert run.result() == 7


def test_a_failed_link_ends_its_chain_with_its_error(app: App) -> None:
    shop = Shop(app)
    run: Any = chain(shop.add.s(1), shop.fail, shop.add, shop.add).on_error(shop.tell).submit()
    with app.runner(concurrency=2):
        with pytest.raises(ValueError, match="no 1"):
            run.result(PATIENCE)
        (told,) = wait_for_calls(app, shop.tell, 1)
    assert told["task"] == shop.fail.name
    assert (told["status"], told["type"], told["message"]) == ("failed", "ValueError", "no 1")
    assert told["invocation"] == run.ids[1]
    assert len(calls(app, shop.add)) == 2  # the first, and the last, which says why it was not called
    last = run.last.record()
    assert (last.status, last.attempt) == ("failed", 0)
    assert "link 2 of its chain, ended as failed" in last.reason


def wait_for_calls(app: App, task: Any, number: int) -> list[Any]:
    """Return the results of so many calls of a task, which follow others."""
    end = time.monotonic() + PATIENCE
    while len(found := calls(app, task)) < number:
        assert time.monotonic() < end, f"{len(found)} of {number} calls of {task.name}"
        threading.Event().wait(0.02)
    return [app.invocation(record.id).result(PATIENCE) for record in found]


def test_on_error_of_a_lone_call_and_no_call_after_a_success(app: App) -> None:
    shop = Shop(app)
    with app.runner(concurrency=2):
        failed = shop.fail.s(7).on_error(shop.tell).submit()
        with pytest.raises(ValueError, match="no 7"):
            failed.result(PATIENCE)
        assert [told["message"] for told in wait_for_calls(app, shop.tell, 1)] == ["no 7"]
        assert shop.add.s(1, 2).on_error(shop.tell).submit().result(PATIENCE) == 3
    assert len(calls(app, shop.tell)) == 1


def test_a_cancelled_link_ends_its_chain_as_cancelled(here: App) -> None:
    shop = Shop(here)
    run: Any = chain(shop.add.s(1), shop.add.options(delay="1h").s(), shop.add).submit()
    run.links[0].result()
    assert run.cancel("not wanted") == "cancelled"
    with pytest.raises(InvocationCancelled, match="not wanted"):
        run.result()
    assert [link.status for link in run.links] == ["success", "cancelled", "cancelled"]


def test_on_error_is_called_for_a_chain_that_is_cancelled_between_two_links(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has ended, and the second is not stored yet: no link is there that could be cancelled."""
    shop, follow, gate = Shop(app), Caller.follow, threading.Event()

    async def late(self: Caller, ended: Any) -> Any:
        await asyncio.to_thread(gate.wait, PATIENCE)
        return await follow(self, ended)

    monkeypatch.setattr(Caller, "follow", late)
    with app.runner():
        run: Any = chain(shop.add.s(1), shop.add, shop.add).on_error(shop.tell).submit()
        assert run.links[0].result(PATIENCE) == 1
        run.cancel("not wanted")
        gate.set()
        with pytest.raises(InvocationCancelled, match="not wanted"):
            run.result(PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while not shop.said and time.monotonic() < deadline:
            time.sleep(0.02)
    (told,) = shop.said
    assert (told["invocation"], told["status"]) == (run.links[1].id, "cancelled")
    assert len(calls(app, shop.add)) == 3


def test_a_link_that_was_cancelled_alone_ends_the_chain(here: App) -> None:
    shop = Shop(here)
    run: Any = chain(shop.add.options(delay="1h").s(1), shop.add, shop.add).submit()
    here.invocation(run.id).cancel("no", by="me")
    with pytest.raises(InvocationCancelled, match="no"):
        run.result()
    assert len(calls(here, shop.add)) == 2


def test_a_large_result_is_passed_on_by_reference(app: App) -> None:
    shop = Shop(app)
    with app.runner(concurrency=2):
        assert chain(shop.write.s(50_000), shop.size).submit().result(PATIENCE) == 50_000
        found = group([shop.write.s(50_000), shop.write.s(3), shop.write.s(60_000)]).then(shop.size).submit()
        assert found.callback is not None
        assert found.callback.result(PATIENCE) == [50_000, 3, 60_000]


def test_a_rerun_of_a_link_runs_the_rest_of_its_chain_again(here: App) -> None:
    shop = Shop(here)
    run: Any = chain(shop.add.s(1), shop.add.s(y=1), shop.tell).submit()
    assert run.result() == 2
    run.links[1].rerun().result()
    assert [here.invocation(each.id).result() for each in calls(here, shop.tell)] == [2, 2]
    assert shop.said == [2, 2]


def test_a_chain_with_a_key_is_stored_once(here: App) -> None:
    shop = Shop(here)
    first: Any = chain(shop.add.options(key="one").s(1), shop.add).submit()
    again: Any = chain(shop.add.options(key="one").s(1), shop.add).submit()
    assert (first.id, first.ids) == (again.id, again.ids)
    assert again.result() == 1
    with pytest.raises(KeyTaken, match="other calls follow"):
        chain(shop.add.options(key="one").s(1), shop.tell).submit()
    with pytest.raises(KeyTaken, match="other calls follow"):
        chain(shop.add.options(key="one").s(1), shop.add).on_error(shop.tell).submit()


def test_a_timeout_says_what_the_chain_waits_for(app: App) -> None:
    shop = Shop(app)
    run = chain(shop.add.s(1), shop.add).submit()
    with pytest.raises(ResultTimeout, match="no runner is alive"):
        run.result(0.01)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda shop: chain(), "needs a call"),
        (lambda shop: chain(shop.add.s(1), 3), "is no call"),
        (lambda shop: chain(shop.add.s(1), *[shop.add.s()] * 100), "at most 100 links"),
        (lambda shop: chain(shop.add.s(1), shop.add.s(1, 2)).submit(), "too many positional"),
        (lambda shop: chain(shop.add.s(1), shop.add.s(x=2)).submit(), "multiple values"),
        (lambda shop: chain(shop.add.s(1), shop.add.options(key="k").s()).submit(), "has no key="),
        (lambda shop: chain(shop.add.s(1), shop.rare).submit(), "has unique=, debounce= or throttle="),
        (lambda shop: chain(shop.add.s(1), shop.tell.si("x" * 5000)).submit(), "at most 2,000"),
        (lambda shop: chain(group([shop.add.s(1)]), shop.total), "cannot begin with a group"),
        (lambda shop: shop.add.s(1).then(group([shop.add.s(1)])), "group cannot follow"),
        (lambda shop: shop.add.s(1).on_error(chain(shop.tell.s(), shop.tell.s())), "takes one call"),
        (lambda shop: shop.add.s(1).on_error(shop.tell).on_error(shop.add), "given already"),
        (lambda shop: group([shop.add.s(1)]).on_error(shop.tell).on_error(shop.add), "given already"),
        (lambda shop: group([group([shop.add.s(1)])]), "no call"),
        (lambda shop: group([shop.add.s(1), shop.add]), "no call"),
        (lambda shop: group([shop.add.s(1).then(shop.add)]), "A chain cannot be a member"),
        (lambda shop: group([shop.add.s(1)], on_failure="stop"), "'continue' or 'cancel'"),
        (lambda shop: group([]).submit(), "without calls"),
        (lambda shop: group([shop.add.options(key="k").s(1)]).submit(), "has a key"),
        (lambda shop: group([shop.add.options(session=object()).s(1)]).submit(), "not stored in your transaction"),
        (lambda shop: group([shop.add.s(1)], common_args={"x": 1}).submit(), "multiple values"),
        (lambda shop: group([shop.add.s(x=1)], common_args={"x": 1}).submit(), "give it once"),
        (lambda shop: group([shop.add.s(1)], common_args=[1]).submit(), "dict of keyword"),
        (lambda shop: group([shop.add.s(1)]).then(shop.total.s(plus=object())).submit(), "cannot be stored"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_stored(here: App, make: Any, says: str) -> None:
    shop = Shop(here)
    with pytest.raises((UsageError, TypeError, Exception), match=says):
        make(shop)
    assert here.invocations() == []


# --- groups


def test_a_group_returns_results_in_order_and_calls_back_once(app: App) -> None:
    shop = Shop(app)
    found = group([shop.add.s(number, 1) for number in range(30)]).then(shop.total.s(plus=5)).submit()
    assert (len(found), found.counts()) == (30, {"registered": 30})
    with app.runner(concurrency=4):
        assert found.results(PATIENCE) == list(range(1, 31))
        assert found.callback is not None
        assert found.callback.result(PATIENCE) == sum(range(1, 31)) + 5
        assert found.counts() == {"success": 30}
        assert sorted(each.result(PATIENCE) for each in found.as_completed(PATIENCE)) == list(range(1, 31))
    assert found.callback.id == done_id(found.id or "")
    assert len(calls(app, shop.total)) == 1


def test_the_failures_of_a_group_go_to_on_error(app: App) -> None:
    shop = Shop(app)
    found = group([shop.fail.s(1), shop.add.s(2), shop.fail.s(3)]).then(shop.total).on_error(shop.tell).submit()
    with app.runner(concurrency=2):
        first, second, third = found.results(PATIENCE, return_exceptions=True)
        assert found.callback is not None
        told = found.callback.result(PATIENCE)
    assert (repr(first), second, repr(third)) == ("ValueError('no 1')", 2, "ValueError('no 3')")
    assert [(each["invocation"], each["message"]) for each in told] == [(found[0].id, "no 1"), (found[2].id, "no 3")]
    with pytest.raises(ValueError, match="no 1"):
        found.results(PATIENCE)
    assert calls(app, shop.total) == []


def test_a_callback_for_results_fails_if_a_member_has(here: App) -> None:
    shop = Shop(here)
    found = group([shop.fail.s(1), shop.add.s(2)]).then(chain(shop.total, shop.add)).submit()
    here_result: Any = found.callback
    with pytest.raises(CallNotMade, match="1 of 2 calls of its group did not succeed"):
        here_result.result()
    assert [record.status for record in calls(here, shop.total)] == ["failed"]


def test_a_callback_ends_as_the_chain_that_was_called(here: App) -> None:
    shop = Shop(here)
    long, short = chain(shop.tell, shop.tell.si("long"), shop.tell), shop.tell.s()
    for then, on_error, result in ((long, short, None), (short, long, "long")):
        callback: Any = group([shop.fail.s(1)]).then(then).on_error(on_error).submit().callback
        told = callback.result(PATIENCE)
        assert (told if result else told[0]["message"]) == (result or "no 1")


def test_a_member_that_is_removed_is_an_error_among_the_results(app: App) -> None:
    shop = Shop(app)
    found = group([shop.add.s(n) for n in range(3)]).submit()
    with app.runner(concurrency=2):
        found.results(PATIENCE)
    app.purge([found[1].id])
    again = app.group(found.id or "")
    first, gone, last = again.results(PATIENCE, return_exceptions=True)
    assert (first, type(gone), last) == (0, InvocationNotFound, 2)
    with pytest.raises(InvocationNotFound):
        again.results(PATIENCE)
    assert again.counts() == {"success": 2}


def test_a_wait_for_what_is_not_called_any_more_ends(here: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "FIRST_LOOK_SECONDS", 0.01)
    shop = Shop(here)
    callback: Any = group([shop.add.s(1)]).on_error(shop.tell).submit().callback
    with pytest.raises(CallNotMade, match="none of its calls has failed"):
        callback.result(PATIENCE)
    callback = group([shop.add.s(1)]).on_error(chain(shop.tell, shop.tell.si("more"))).submit().callback
    for link in (*callback.links, callback.last):
        with pytest.raises(CallNotMade, match="none of its calls has failed"):
            link.result(PATIENCE)
    called: Any = group([shop.fail.s(1)]).on_error(chain(shop.tell, shop.tell.si("more"))).submit().callback
    assert called.links[0].result(PATIENCE)[0]["message"] == "no 1"
    run: Any = chain(shop.add.s(1), shop.fail, shop.add, shop.add).submit()
    with pytest.raises(ValueError, match="no 1"):
        run.links[2].result(PATIENCE)


def test_an_empty_group_calls_back_at_once(app: App) -> None:
    shop = Shop(app)
    found = group([]).then(shop.total.s(plus=3)).submit()
    assert found.callback is not None
    assert found.callback.record().status == "registered"
    with app.runner(concurrency=1):
        assert found.results() == []
        assert found.callback.result(PATIENCE) == 3


def test_a_failure_cancels_the_others_if_declared(app: App) -> None:
    shop = Shop(app)
    late = shop.add.options(delay="1h")
    found = group([late.s(1), shop.fail.s(2), late.s(3)], on_failure="cancel").on_error(shop.tell).submit()
    with app.runner(concurrency=2):
        assert found.callback is not None
        told = found.callback.result(PATIENCE)
    assert [each["status"] for each in told] == ["cancelled", "failed", "cancelled"]
    assert "has failed" in (found[0].record().reason)


def test_a_failure_that_cancels_waits_for_members_that_run(app: App) -> None:
    shop = Shop(app)
    found = group([shop.fail.s(1), shop.hold.s(2)], on_failure="cancel").on_error(shop.tell).submit()
    callback: Any = found.callback
    with app.runner(concurrency=3):
        deadline = time.monotonic() + PATIENCE
        while found[1].status != "cancelling":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises((ResultTimeout, InvocationNotFound)):
            callback.result(0.3)
        shop.gate.set()
        assert [each["status"] for each in callback.result(PATIENCE)] == ["failed"]  # what runs may still succeed
    assert found[1].status == "success"


def test_cancelling_a_group_is_a_failure_to_its_callback(here: App) -> None:
    shop = Shop(here)
    found = group([shop.add.options(delay="1h").s(n) for n in range(3)]).then(shop.total).on_error(shop.tell).submit()
    assert found.cancel("enough") == ["cancelled"] * 3
    callback: Any = found.callback
    assert [each["status"] for each in callback.result()] == ["cancelled"] * 3


def test_as_completed_yields_what_ends_first_and_times_out(app: App) -> None:
    shop = Shop(app)
    found = group([shop.hold.s(1), shop.add.s(2), shop.add.s(3)]).submit()
    with app.runner(concurrency=2):
        ended = iter(found.as_completed(PATIENCE))
        assert {next(ended).id, next(ended).id} == {found[1].id, found[2].id}
        with pytest.raises(ResultTimeout, match="1 have not ended"):
            list(found.as_completed(0.05))
        shop.gate.set()
        assert next(ended).result(PATIENCE) == 1


async def _awaited(app: App, shop: Shop) -> list[object]:
    found = await group([shop.add.s(n) for n in range(5)]).then(shop.total).asubmit()
    run: Any = await chain(shop.add.s(1), shop.add.s(y=2)).asubmit()
    seen = sorted([await each async for each in found.as_completed(PATIENCE)])
    assert found.callback is not None
    return [await found, seen, await found.callback, await run, await found.aresults(return_exceptions=True)]


def test_all_of_it_has_an_async_form(app: App) -> None:
    shop = Shop(app)
    with app.runner(concurrency=2):
        assert asyncio.run(_awaited(app, shop)) == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], 10, 3, [0, 1, 2, 3, 4]]


def test_common_arguments_are_stored_once(app: App) -> None:
    shop = Shop(app)

    @app.task
    def look(number: int, table: list[int], name: str) -> int:
        return table[number] + len(name)

    table = list(range(1000, 1400))
    for found in (
        group([look.s(n) for n in range(20)], common_args={"table": table, "name": "x"}).submit(),
        look.map(range(20), common_args={"table": table, "name": "x"}),
    ):
        records = [each.record() for each in found]
        assert len({record.payloads for record in records}) == 1
        assert all(len(record.arguments) < 120 for record in records)
        with app.runner(concurrency=2):
            assert found.results(PATIENCE) == [1001 + n for n in range(20)]
    assert shop.add.map([1, 2], common_args={"y": 2}) is not None


def test_a_list_that_is_too_large_fails_the_callback(tmp_path: Path) -> None:
    app = App("memory://", name="shop", inline_limit=1024, payload_limit=1_100_000)
    shop = Shop(app)
    with testing_app(app):
        found = group([shop.write.s(500_000) for _ in range(3)]).then(shop.size).submit()
        callback: Any = found.callback
        with pytest.raises(CallNotMade, match="payload_limit"):
            callback.result()


def test_a_parent_that_waits_for_a_chain_or_callback_gives_its_slot_back(app: App) -> None:
    shop = Shop(app)

    @app.task
    def parent(n: int) -> int:
        run: Any = chain(shop.add.s(n), shop.add.s(y=10)).submit()
        found = group([shop.add.s(i) for i in range(n)]).then(shop.total).submit()
        assert found.callback is not None
        return run.result(PATIENCE) + found.callback.result(PATIENCE)  # type: ignore[no-any-return]

    with app.runner(concurrency=1):
        assert parent.submit(3).result(PATIENCE) == 16
    children = [record for record in app.invocations(limit=100) if record.parent_id is not None]
    assert len(children) == 2 + 3 + 1


def test_map_has_all_that_a_group_has(app: App) -> None:
    shop = Shop(app)
    found = shop.add.map([(1, 2), (3, 4), {"x": 5}])
    with app.runner(concurrency=2):
        assert found.results(PATIENCE, return_exceptions=True) == [3, 7, 5]
        assert found.counts() == {"success": 3}
        assert {each.id for each in found.as_completed(PATIENCE)} == set(found.ids)
    assert found.id is None
    assert found.callback is None


def test_more_members_than_are_read_at_once(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/shop.db", name="shop")
    shop = Shop(app)
    with app, app.runner(concurrency=50):
        found = group([shop.add.s(n) for n in range(1200)]).then(shop.total).submit()
        assert found.results(PATIENCE) == list(range(1200))
        assert found.callback is not None
        assert found.callback.result(PATIENCE) == sum(range(1200))
        assert sum(found.counts().values()) == 1200


# --- what the store keeps


def record_of(app: App, id: str | None) -> Any:
    async def read() -> Any:
        engine = await app.runtime.engine()
        entries = await engine.store.entries(engine.app, KIND, [id or ""])
        return from_entry(entries[0]) if entries else None

    return app.runtime.run(read())


def test_a_group_that_is_done_is_closed_and_kept_for_a_while(here: App) -> None:
    shop = Shop(here)
    found = group([shop.add.s(1)]).then(shop.total).submit()
    assert record_of(here, found.id).done_at is None
    callback: Any = found.callback
    callback.result()
    done = record_of(here, found.id)
    assert (done.is_whole, done.floor) == (True, 1)
    assert done.done_at is not None


def test_checking_a_group_again_calls_nothing_again(here: App) -> None:
    shop = Shop(here)
    found = group([shop.add.s(1), shop.add.s(2)]).then(shop.tell).submit()
    callback: Any = found.callback
    assert callback.result() == [1, 2]

    async def again() -> None:
        engine = await here.runtime.engine()
        members = [record for record in await engine.store.get(engine.app, found.ids) if record is not None]
        for _ in range(3):
            await engine.part(Groups).receive(members)

    here.runtime.run(again())
    assert shop.said == [[1, 2]]
    assert len(calls(here, shop.tell)) == 1


def test_a_handle_of_what_is_not_called_yet_says_so(here: App) -> None:
    shop = Shop(here)
    found = group([shop.add.options(delay="1h").s(1)]).then(shop.total).submit()
    callback: Any = found.callback
    for ask in (callback.record, callback.explain, callback.cancel):
        with pytest.raises(InvocationNotFound, match="it is called when all that it follows has ended"):
            ask()
    with pytest.raises(ResultTimeout, match="it is called when all that it follows has ended"):
        callback.result(0.0)


# --- a submit that takes too long


def tend_late(groups: Groups, record: GroupRecord | None) -> Any:
    """Tend a group as a runner does that looks at it long after its submit began."""
    assert record is not None
    return groups.tend(replace(record, created_at=record.created_at - 2 * ABANDONED_SECONDS))


def test_a_submit_that_goes_on_after_its_group_was_closed_says_so(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine slept: the members came too late, and no callback would follow them."""
    shop = Shop(app)
    insert = GroupSubmit._insert

    async def late(self: GroupSubmit) -> None:
        await tend_late(self._groups, await self._groups.get(self._record.id))
        await insert(self)

    monkeypatch.setattr(GroupSubmit, "_insert", late)
    with pytest.raises(StoreError, match="was closed, since storing its 3 calls took over 10 min"):
        group(shop.add.s(number) for number in range(3)).then(shop.total).submit()
    assert [each.status.value for each in app.invocations()] == ["cancelled"] * 3


def test_a_group_that_becomes_whole_while_it_is_closed_goes_on(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(app)
    groups, cancel = app.runtime.ready().part(Groups), Groups.cancel
    whole = group(shop.add.s(number) for number in range(3)).then(shop.total)

    async def slow(self: Groups, record: GroupRecord, **more: Any) -> None:
        """The submit ends meanwhile."""
        await cancel(self, record, **more)
        await self.change(record.id, is_whole=True)

    monkeypatch.setattr(Groups, "cancel", slow)
    monkeypatch.setattr(Groups, "_all_there", lambda *_: asyncio.sleep(0, False))
    monkeypatch.setattr(GroupSubmit, "store", without_mark)
    submitted = whole.submit()
    app.runtime.run(tend_late(groups, app.runtime.run(groups.get(submitted.id))))
    after = app.runtime.run(groups.get(submitted.id))
    assert after is not None
    assert (after.is_whole, after.abandoned) == (True, False)
    with app.runner(), pytest.raises(CallNotMade, match="3 of 3 calls of its group did not succeed"):
        submitted.callback.result(timeout=PATIENCE)


async def without_mark(self: GroupSubmit) -> GroupRecord:
    """Store the group and its members, not that it is whole."""
    await self._groups.put(self._record)
    await self._insert()
    return self._record
