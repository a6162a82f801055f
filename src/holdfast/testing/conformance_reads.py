"""The part of the conformance suite about reading, the roster, apps, odd values and what outlives a process.

Use `holdfast.testing.conformance.StoreConformance`, which includes it.
"""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from holdfast.codec import ErrorRecord
from holdfast.model import changes, claims
from holdfast.model.changes import APPLIED, MISSING, apply_to
from holdfast.model.records import Entry, InvocationRecord, WorkerRecord, lane_of
from holdfast.model.status import Status
from holdfast.store.contract import Ability, Filter, Store
from holdfast.testing.samples import (
    ERROR,
    ODD_NAMES,
    ODD_TEXTS,
    START,
    TASK,
    Stage,
    ids,
    ids_of,
    invocation,
    owned,
    runner,
    the,
    wish,
)

_STATUSES = [frozenset[Status](), {Status.SUCCESS}, {Status.RUNNING}, {Status.FAILED, Status.SUCCESS, Status.PARKED}]
_STATUSES += [{Status.REGISTERED, Status.RUNNING, Status.FAILED}, {Status.CANCELLED}]
_FILTERS = [
    Filter(statuses=frozenset(statuses), tasks=frozenset(tasks), queues=frozenset(queues), before_id=before)
    for statuses, tasks, queues, before in itertools.product(
        _STATUSES, [(), ("t1",), ("t0", "t2", "t9")], [(), ("q1",), ("q0", "q2")], [None, "17"]
    )
]


async def _mixture(store: Store) -> list[InvocationRecord]:
    """Insert 24 invocations in three tasks, three queues and five statuses. Return them newest first."""
    records = [invocation(f"{n:02}", task=f"t{n % 3}", queue=f"q{n // 3 % 3}", due_at=START - n) for n in range(24)]
    await store.insert(records)
    lanes = tuple({record.lane for record in records})
    for record in (await store.claim(wish("some", lanes=lanes, limit=18))).records:
        end, done = f"end {record.id}", int(record.id) % 4
        if done == 0:
            await store.apply([changes.completed(record, result=b"r", operation=end, at=START)])
        elif done == 1:
            await store.apply([changes.failed(record, error=ERROR, operation=end, at=START)])
        elif done == 2:
            await store.apply([changes.parked(record, fingerprint="f", operation=end, at=START, why="w")])
    return [await the(store, f"{n:02}") for n in reversed(range(24))]


def _wanted(where: Filter, record: InvocationRecord) -> bool:
    return (
        (not where.statuses or record.status in where.statuses)
        and (not where.tasks or record.task in where.tasks)
        and (not where.queues or record.queue in where.queues)
        and (where.before_id is None or record.id < where.before_id)
    )


class ReadConformance:
    """See the module."""

    # --- get, find, counts

    def test_get_answers_in_the_order_asked(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation(f"{n:04}") for n in range(1200)])
            asked = ids("0003", "none", "0001", "0003", "")
            assert ids_of(await store.get("shop", asked)) == ["0003", None, "0001", "0003", None]
            many = ids(*[f"{n:04}" for n in reversed(range(1200))])
            assert ids_of(await store.get("shop", many)) == many
            assert list(await store.get("shop", [])) == []

        stage.play(scenario)

    def test_find_obeys_every_combination_of_filters_newest_first(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            everything = await _mixture(store)
            for where in _FILTERS:
                expected = [record for record in everything if _wanted(where, record)]
                assert list(await store.find("shop", where, 100)) == expected, where
                assert list(await store.find("shop", where, 2)) == expected[:2], where

        stage.play(scenario)

    @pytest.mark.parametrize("where", [Filter(), Filter(statuses=frozenset({Status.RUNNING, Status.FAILED}))])
    def test_find_goes_on_page_by_page(self, stage: Stage, where: Filter) -> None:
        async def scenario(store: Store) -> None:
            everything = [record.id for record in await _mixture(store) if _wanted(where, record)]
            pages, last = list[str](), None
            while page := await store.find("shop", replace(where, before_id=last), 5):
                pages += [record.id for record in page]
                last = pages[-1]
            assert pages == everything

        stage.play(scenario)

    def test_counts_returns_the_number_in_each_status(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            assert await store.counts("shop") == {}
            everything = await _mixture(store)
            expected = {s: sum(r.status is s for r in everything) for s in Status}
            assert await store.counts("shop") == {status: n for status, n in expected.items() if n}

        stage.play(scenario)

    def test_counts_of_some_are_exact_below_that_number(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await _mixture(store)
            await store.insert([invocation(f"more{n}", app="other") for n in range(9)])
            whole = await store.counts("shop")
            assert max(whole.values()) > 2
            for most in (1, 2, max(whole.values()) + 1):
                some = await store.counts("shop", most)
                assert some.keys() == whole.keys()
                assert all(some[each] == n if n < most else most <= some[each] <= n for each, n in whole.items())
            wanted = {Status.FAILED, Status.RUNNING, Status.CANCELLED}
            part = {status: n for status, n in whole.items() if status in wanted}
            assert await store.counts("shop", among=wanted) == await store.counts("shop", 99, wanted) == part

        stage.play(scenario)

    # --- the roster

    def test_the_roster_lists_by_creation_then_id(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            entries = [runner("b"), runner("c", started_at=START - 1), runner("a")]
            for entry in entries:
                await store.enrol(entry)
            assert list(await store.roster("shop")) == [entries[1], entries[2], entries[0]]
            await store.enrol(replace(entries[0], concurrency=99))
            assert [entry.concurrency for entry in await store.roster("shop")] == [4, 4, 99]

        stage.play(scenario)

    def test_a_heartbeat_refreshes_and_never_creates(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            assert await store.heartbeat("shop", "a") is None
            assert list(await store.roster("shop")) == []
            await store.enrol(runner("a"))
            stage.clock.advance(2)
            workers = (WorkerRecord(id="1", pid=7, started_at=START, running=3),)
            told = await store.heartbeat("shop", "a", workers, ticks=False)
            (entry,) = await store.roster("shop")
            assert entry == told
            assert abs(entry.heartbeat_at - store.now()) < 1
            assert replace(entry, heartbeat_at=START) == runner("a", workers=workers, can_run_atomic_service=False)
            await store.remove_runner("shop", "a")
            await store.remove_runner("shop", "a")
            assert await store.heartbeat("shop", "a") is None
            assert list(await store.roster("shop")) == []

        stage.play(scenario)

    def test_the_runner_with_the_oldest_heartbeat_is_returned(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            assert list(await store.silent("shop")) == []
            now = store.now()
            for id, age in (("a", 3.0), ("b", 10.0), ("c", 5.0)):
                await store.enrol(runner(id, heartbeat_at=now - age))
            await store.enrol(runner("d", app="other", heartbeat_at=now - 99))
            (entry, silence), *others = await store.silent("shop")
            assert entry.id == "b"
            assert 9.5 < silence < 15
            shared = Ability.SHARED_CLOCK in store.abilities
            assert [other.id for other, _ in others] == ([] if shared else ["c", "a"])
            await store.heartbeat("shop", "b")
            (entry, _), *_ = await store.silent("shop")
            assert entry.id == "c"

        stage.play(scenario)

    def test_runners_with_heartbeats_in_the_future_are_returned(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            now = store.now()
            for id, ahead in (("a", -3.0), ("b", 3600.0), ("c", -1.0), ("d", 1800.0)):
                await store.enrol(runner(id, heartbeat_at=now + ahead))
            found = {entry.id: silence for entry, silence in await store.silent("shop")}
            shared = Ability.SHARED_CLOCK in store.abilities
            assert list(found) == (["a", "d", "b"] if shared else ["a", "c", "d", "b"])
            assert -3601 < found["b"] < -3595
            assert (await store.silent("shop"))[-1][0] == next(
                entry for entry in await store.roster("shop") if entry.id == "b"
            )

        stage.play(scenario)

    def test_a_runner_is_declared_dead_once_and_only_while_it_is_silent(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.enrol(runner("a", heartbeat_at=store.now() - 60))
            (seen,) = await store.roster("shop")
            stage.clock.advance(1)
            fresh = await store.heartbeat("shop", "a")
            assert fresh is not None
            assert not await store.remove_runner(seen.app, seen.id, heartbeat_at=seen.heartbeat_at), (
                "it has beaten since"
            )
            assert not await store.remove_runner("other", fresh.id, heartbeat_at=fresh.heartbeat_at)
            assert await store.remove_runner(fresh.app, fresh.id, heartbeat_at=fresh.heartbeat_at)
            assert not await store.remove_runner(fresh.app, fresh.id, heartbeat_at=fresh.heartbeat_at)
            assert await store.heartbeat("shop", "a") is None

        stage.play(scenario)

    def test_a_runner_is_asked_by_its_entry(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            assert not await store.ask_runner("shop", "a", wish="drain")
            await store.enrol(runner("a"))
            assert await store.ask_runner("shop", "a", wish="drain")
            assert await store.ask_runner("shop", "a", sits_out_until=START + 60)
            told = await store.heartbeat("shop", "a")
            assert told is not None
            assert (told.wish, told.sits_out_until) == ("drain", START + 60)

        stage.play(scenario)

    def test_owners_and_what_a_runner_owns(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            assert list(await store.owners("shop")) == []
            await store.insert([invocation(id) for id in "abcde"])
            await store.insert([invocation("x", app="other")])
            for owner in ("r1/1", "r1/2", "r10/1", "r0/1"):
                await store.claim(wish(f"claim {owner}", owner=owner, limit=1, start=owner != "r1/2"))
            assert list(await store.owners("shop")) == ["r0/1", "r1/1", "r1/2", "r10/1"]
            assert sorted(map(str, ids_of(await store.find("shop", Filter(runner="r1"), 9)))) == ["a", "b"]
            pending = Filter(runner="r1", statuses=frozenset({Status.PENDING}))
            assert ids_of(await store.find("shop", pending, 9)) == ["b"]
            assert ids_of(await store.find("shop", Filter(runner="r"), 9)) == []
            (mine,) = await store.find("shop", pending, 9)
            await store.apply([changes.handed_back(mine, operation="back", at=START, why="")])
            assert list(await store.owners("shop")) == ["r0/1", "r1/1", "r10/1"]
            assert list(await store.owners("other")) == []

        stage.play(scenario)

    # --- apps, odd values

    def test_apps_do_not_see_each_other(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            ours, theirs = invocation("a"), invocation("a", app="other", operation="other")
            assert list(await store.insert([ours, theirs])) == [True, True]
            await store.enrol(runner("r"))
            (got,) = (await store.claim(wish("op"))).records
            assert got.app == "shop"
            assert await the(store, app="other") == theirs
            assert await store.counts("other") == {Status.REGISTERED: 1}
            assert await store.counts("shop") == {Status.RUNNING: 1}
            assert list(await store.find("other", Filter(), 9)) == [theirs]
            assert (await store.claim(wish("op", again=True, app="third"))).records == ()
            end = changes.completed(got, result=b"", operation="end", at=START)
            assert list(await store.apply([replace(end, app="third"), end])) == [MISSING, APPLIED]
            assert await the(store, app="other") == theirs
            assert list(await store.get("third", ids("a"))) == [None]
            assert list(await store.roster("other")) == []
            assert await store.heartbeat("other", "r") is None
            await store.remove_runner("other", "r")
            assert len(await store.roster("shop")) == 1
            assert list(await store.quarantined("other")) == []

        stage.play(scenario)

    def test_apps_are_those_with_something_in_the_store(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            assert list(await store.apps()) == []
            await store.insert([invocation("a", app="shop"), invocation("b", app="shop"), invocation("c", app="a~b")])
            await store.put_entry(Entry(app="a", kind="k", name="n", body=b"{}"))
            await store.enrol(runner("r", app="shop-2"))
            assert list(await store.apps()) == ["a", "a~b", "shop", "shop-2"]
            (claimed,) = (await store.claim(wish("op", app="a~b", ids=("c",)))).records
            await store.apply([changes.completed(claimed, result=b"", operation="end", at=START)])
            await store.remove_ended("a~b", [claimed.id])
            assert list(await store.apps()) == ["a", "shop", "shop-2"]

        stage.play(scenario)

    def test_an_invocation_is_found_by_the_end_of_its_id(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            names = ["a-x1", "b-x1", "c.x1", "d-x2", "e-1x"]
            await store.insert([invocation(name, task="t" if name == "b-x1" else TASK) for name in names])
            await store.insert([invocation("z-x1", app="other")])
            assert ids_of(await store.find("shop", Filter(id_ends="x1"), 10)) == ["c.x1", "b-x1", "a-x1"]
            assert ids_of(await store.find("shop", Filter(id_ends="-x1"), 10)) == ["b-x1", "a-x1"]
            assert ids_of(await store.find("shop", Filter(id_ends=".x1"), 10)) == ["c.x1"]
            assert ids_of(await store.find("shop", Filter(id_ends="x1", before_id="c"), 1)) == ["b-x1"]
            assert ids_of(await store.find("shop", Filter(id_ends="x1", tasks=frozenset({"t"})), 10)) == ["b-x1"]
            assert ids_of(await store.find("shop", Filter(id_ends="no"), 10)) == []

        stage.play(scenario)

    def test_names_may_hold_any_character(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for name in ODD_NAMES:
                record = invocation(name, app=name, task=name, queue=name, tags=(name,), operation=name)
                assert list(await store.insert([record, record])) == [True, True]
                claim = wish(f"claim {name}", app=name, lanes=(lane_of(name, name, (name,)),), owner=name)
                (got,) = (await store.claim(claim)).records
                assert got == apply_to(claims.claimed(claim, record), record) == await the(store, name, name)
                where = Filter(statuses=frozenset({Status.RUNNING}), tasks=frozenset({name}), queues=frozenset({name}))
                assert ids_of(await store.find(name, where, 9)) == [name]
                await store.enrol(runner(name, app=name, host=name, queues=(name,)))
                assert await store.heartbeat(name, name) is not None
                assert [entry.host for entry in await store.roster(name)] == [name]

        stage.play(scenario)

    def test_texts_may_hold_any_character(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for number, text in enumerate(ODD_TEXTS):
                record = await owned(store, f"{number}")
                error = ErrorRecord(type_name=text, message=text, traceback=text, data=text.encode())
                end = changes.failed(record, error=error, operation=f"end {number}", at=START, why=text)
                assert list(await store.apply([end])) == [APPLIED]
                after = await the(store, f"{number}")
                assert after == apply_to(end, record)
                assert after.reason == after.history[-1].why == text

        stage.play(scenario)

    def test_arguments_and_results_may_be_large(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            large = bytes(range(256)) * 4096
            await store.insert([invocation("a", arguments=large)])
            (got,) = (await store.claim(wish("op"))).records
            assert got.arguments == large
            await store.apply([changes.completed(got, result=large[::-1], operation="end", at=START)])
            after = await the(store)
            assert (after.arguments, after.result) == (large, large[::-1])

        stage.play(scenario)

    # --- what surrounds it

    def test_a_healthy_store_has_nothing_to_report(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await _mixture(store)
            for deep in (False, True):
                findings = await store.check(deep=deep)
                assert findings
                # The suite's clock stands where it was put, so a store with its own clock rightly reports that.
                assert [found for found in findings if not found.ok and found.subject != "clock"] == []
            assert list(await store.quarantined("shop")) == []
            await store.open()
            assert len(await store.find("shop", Filter(), 99)) == 24
            await store.close()
            await store.close()

        stage.play(scenario)

    def test_a_store_is_looked_at_without_being_opened(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await _mixture(store)
            await store.close()
            for deep in (False, True):
                findings = await store.check(deep=deep)
                assert findings
                assert [found for found in findings if not found.ok and found.subject != "clock"] == []

        stage.play(scenario)

    def test_what_was_acknowledged_is_there_after_a_reopen(self, stage: Stage) -> None:
        kept: list[InvocationRecord] = []

        async def write(store: Store) -> None:
            kept.extend(await _mixture(store))
            await store.enrol(runner("r"))

        async def read(store: Store) -> None:
            assert list(await store.find("shop", Filter(), 99)) == kept
            assert list(await store.roster("shop")) == [runner("r")]
            running = [record for record in kept if record.status is Status.RUNNING]
            end = changes.completed(running[0], result=b"late", operation="late", at=START)
            assert list(await store.apply([end])) == [APPLIED]
            assert list(await store.insert([invocation("00")])) == [True]

        stage.play(write, read, needs=Ability.DURABLE)

    def test_two_openings_see_each_other(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            async with stage.opened() as other:
                await store.insert([invocation("a")])
                (got,) = (await other.claim(wish("op"))).records
                assert await the(store) == got
                await store.apply([changes.completed(got, result=b"r", operation="end", at=START)])
                assert (await the(other)).result == b"r"

        stage.play(scenario, needs=Ability.MULTI_PROCESS)
