"""What has ended is kept as agreed, found again, run again and removed: on every store."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.patience import patient

from holdfast import App, UsageError
from holdfast.archive.retention import remove_expired
from holdfast.errors import Expired, InvocationNotFound, InvocationStatusTransitionError, PayloadLost
from holdfast.model.cancellation import cancel
from holdfast.model.records import FOREVER, Cancellation, digests_in
from holdfast.model.status import Status
from holdfast.runtime.rerun import Rerunner
from holdfast.store.contract import Filter
from holdfast.testing.samples import delivery

HOUR, DAY = 3600.0, 86_400.0


@pytest.fixture(params=["memory", "sqlite", "mongodb"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    url = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/shop.db"}.get(request.param)
    with App(url or request.getfixturevalue("mongo_url"), poll_interval_seconds=0.2, inline_limit=1024) as app:
        yield app


def declare(app: App, **options: Any) -> Any:
    @app.task(name="ship", **options)
    def ship(order: int, label: object = "") -> int:
        if order < 0:
            raise ValueError(f"order {order} is odd")
        return order

    return ship


def run(app: App, *invocations: Any) -> None:
    with app.runner(concurrency=4):
        for invocation in invocations:
            with contextlib.suppress(ValueError):
                invocation.result(timeout=patient(30))


def kept_seconds(invocation: Any) -> float:
    record = invocation.record()
    assert record.retain_until is not None
    return float(record.retain_until - record.changed_at)


# --- retention


def test_each_outcome_is_kept_as_its_task_says(app: App) -> None:
    ship = declare(app, retention={"success": "1d", "failed": None})
    good, bad, keyed = ship.submit(1), ship.submit(-1), ship.options(key="k", key_for="3d").submit(2)
    run(app, good, bad, keyed)
    assert kept_seconds(good) == pytest.approx(DAY)
    assert bad.record().retain_until == FOREVER
    assert kept_seconds(keyed) == pytest.approx(3 * DAY)


def test_the_setting_says_how_long_the_others_are_kept(tmp_path: Path) -> None:
    with App(f"sqlite:///{tmp_path}/shop.db", archive_retention_seconds="2h") as app:
        usual, own = declare(app), app.task(name="own", retention="1d")(lambda: None)
        one, other = usual.submit(1), own.submit()
        run(app, one, other)
        assert kept_seconds(one) == pytest.approx(2 * HOUR)
        assert kept_seconds(other) == pytest.approx(DAY)


def test_a_deploy_does_not_change_what_was_agreed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    with App(url) as before:
        id = declare(before, retention="1d").submit(1).id
    with App(url, archive_retention_seconds="2h") as after:
        declare(after, retention="30d")
        run(after, after.invocation(id))
        assert kept_seconds(after.invocation(id)) == pytest.approx(DAY)


@pytest.mark.parametrize("retention", ["59m", 0, {"success": "1s"}, {"done": "1d"}, "soon"])
def test_a_retention_that_cannot_be_meant_is_refused_where_it_is_declared(retention: Any) -> None:
    with pytest.raises(UsageError, match=r"retention|length of time"):
        declare(App("memory://"), retention=retention)


def test_what_is_over_is_removed_with_what_it_had_apart(app: App) -> None:
    ship = declare(app, retention={"success": "1h"})
    data = os.urandom(5000)
    good, bad = ship.submit(1, data), ship.submit(-1)
    run(app, good, bad)
    (digest,) = digests_in(good.record().arguments)
    store = app.runtime.ready().store

    async def later() -> None:
        assert not await remove_expired(store, app.name, app.runtime.telemetry)
        moment = store.now
        try:
            store.now = lambda: moment() + HOUR + 1  # type: ignore[method-assign]
            assert not await remove_expired(store, app.name, app.runtime.telemetry)
            await store.collect_payloads(app.name, moment() + HOUR, 10)
            assert await store.get_payload(app.name, digest) is None
        finally:
            store.now = moment  # type: ignore[method-assign]

    app.runtime.run(later())
    with pytest.raises(InvocationNotFound):
        good.record()
    assert bad.status is Status.FAILED


# --- searching


def test_the_archive_is_searched_by_what_one_knows(app: App) -> None:
    ship = declare(app)
    tagged = app.task(name="pack", tags=["gpu", "eu"], queue="slow")(lambda: 1)
    good, bad, slow = ship.options(key="order 1").submit(1), ship.submit(-1), tagged.submit()
    ship.options(delay="1h").submit(5)
    with app.runner(tags=["gpu", "eu"]):
        good.result(patient(30))
        slow.result(patient(30))
        with pytest.raises(ValueError, match="odd"):
            bad.result(patient(30))

    def ids(**where: Any) -> set[str]:
        return {record.id for record in app.archive(**where)}

    assert ids() == {good.id, bad.id, slow.id}
    assert ids(status="failed") == ids(error="ValueError") == ids(error="ORDER -1 is") == {bad.id}
    assert ids(error="KeyError") == set()
    assert ids(task=["ship"]) == {good.id, bad.id}
    assert ids(queue="slow") == ids(tag="gpu") == ids(tag=["eu", "gpu"]) == {slow.id}
    assert ids(tag=["gpu", "none"]) == set()
    assert ids(key="order 1") == {good.id}
    end = bad.record().changed_at
    assert bad.id in ids(since=end)
    assert bad.id not in ids(until=end)
    assert ids(until=dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)) == {good.id, bad.id, slow.id}
    everything = [record.id for record in app.archive()]
    assert [record.id for record in app.archive(before=everything[0])] == everything[1:]
    assert [record.id for record in asyncio.run(app.aarchive(limit=1))] == everything[:1]
    with pytest.raises(UsageError, match="ended"):
        app.archive(status="running")


# --- running again


def test_an_ended_one_is_run_again_as_a_new_one_that_knows_what_it_repeats(app: App) -> None:
    ship = declare(app, retries=2, priority=7, tags=["eu"])
    first = ship.options(queue="mail", key="order 7").submit(7, label="x")
    with app.runner(tags=["eu"]):
        first.result(patient(30))
        again = first.rerun()
        assert again.result(patient(30)) == 7
    old, new = first.record(), again.record()
    assert new.rerun_of == old.id
    assert new.history[0].why == f"rerun of {old.id}"
    assert (new.task, new.arguments, new.queue, new.priority, new.tags) == (
        *(old.task, old.arguments, "mail", 7, ("eu",)),
    )
    assert new.terms.retries == old.terms.retries
    assert (new.key, old.key) == (None, "order 7")
    assert [record.id for record in app.invocations()] == [new.id, old.id]  # it sorts by its time


def test_one_that_is_named_twice_is_run_again_and_removed_once(app: App) -> None:
    first = declare(app).submit(1)
    run(app, first)
    done = app.rerun([first.id, first.id])
    assert (len(done.originals), len(done.invocations)) == (1, 1)
    assert app.purge([first.id, first.id]).originals == [first.id]


def test_a_rerun_beyond_the_year_9999_is_refused(app: App) -> None:
    first = declare(app).submit(1)
    run(app, first)
    for again in (first.rerun, lambda delay: app.rerun([first.id], delay=delay)):
        with pytest.raises(UsageError, match=r"^delay=.* leads beyond the year 9999"):
            again(delay=1e12)
        with pytest.raises(UsageError, match=r"^delay=-1 is not a length"):
            again(delay=-1)
    assert len(app.invocations()) == 1


def test_a_rerun_with_other_arguments_is_under_their_limit_and_rate(app: App) -> None:
    @app.task(rate="100/s", rate_by="customer", limit=3, limit_by="customer")
    def call(customer: str) -> str:
        return customer

    with app.runner():
        ann, bob = call.submit("ann"), call.submit("bob")
        assert (ann.result(timeout=patient(30)), bob.result(timeout=patient(30))) == ("ann", "bob")
    other = ann.rerun(arguments={"customer": "bob"})
    keys = [(each.record().limit_key, each.record().terms.rate_key) for each in (ann, bob, other)]
    assert keys[2] == keys[1] != keys[0]


def test_a_rerun_may_wait(app: App) -> None:
    ship = declare(app)
    first = ship.submit(7)
    run(app, first)
    at = dt.datetime(2100, 1, 1, tzinfo=dt.UTC)
    assert first.rerun(at=at).record().due_at == at.timestamp()
    delayed = first.rerun(delay="1h").record()
    assert delayed.due_at - delayed.created_at == pytest.approx(HOUR, abs=5)
    with pytest.raises(UsageError, match="either"):
        first.rerun(at=at, delay="1h")


def test_what_has_not_ended_is_not_run_again(app: App) -> None:
    waiting = declare(app).submit(1)
    with pytest.raises(InvocationStatusTransitionError, match="it is registered; only what has ended"):
        waiting.rerun()
    done = app.rerun([waiting.id])
    assert done.invocations == []
    assert done.refused == [(waiting.id, "it is registered; only what has ended can be run again")]
    with pytest.raises(InvocationNotFound):
        app.rerun(["0" * 26])


def test_all_that_match_are_run_again_once_for_each_request(app: App) -> None:
    ship = declare(app)
    bad, good = [ship.submit(-n) for n in range(1, 6)], ship.submit(1)
    run(app, *bad, good)
    plan = app.rerun(status="failed", dry_run=True)
    assert sorted(plan.originals) == sorted(one.id for one in bad)
    assert len(app.invocations()) == 6
    engine = app.runtime.ready()

    async def cut_short() -> None:
        some = await engine.store.get(app.name, plan.originals[:2])
        await engine.part(Rerunner).rerun([one for one in some if one], request=plan.request, due_at=engine.store.now())

    app.runtime.run(cut_short())
    first = app.rerun(status="failed", request=plan.request)
    assert len(first.invocations) == 5
    assert len(app.invocations()) == 11
    run(app, *first.invocations)  # they fail again, and so match the filter
    second = app.rerun(status="failed", request=plan.request)
    assert {one.id for one in second.invocations} == {one.id for one in first.invocations}
    assert len(app.invocations()) == 11
    repeats = app.runtime.run(engine.store.find(app.name, Filter(rerun_of=bad[0].id), 10))
    assert len(repeats) == 1
    assert len(app.rerun(status="failed").invocations) == 10  # another request


def test_without_ids_or_filter_nothing_is_done(app: App) -> None:
    for do in (app.rerun, app.purge):
        with pytest.raises(UsageError, match="name invocations by ids"):
            do()
        with pytest.raises(UsageError, match="not both"):
            do(["0" * 26], status="failed")


def test_arguments_that_lie_apart_are_shared_and_kept(app: App) -> None:
    ship = declare(app)
    data = os.urandom(5000)
    first = ship.submit(1, data)
    run(app, first)
    again = first.rerun(delay="1h")
    assert app.purge([first.id]).removed == 1
    store = app.runtime.ready().store
    app.runtime.run(store.collect_payloads(app.name, store.now() + 1, 10))
    record = again.record()
    (digest,) = digests_in(record.arguments)
    stored = app.runtime.run(store.get_payload(app.name, digest))
    assert stored is not None


def test_one_whose_arguments_are_lost_is_refused_and_the_others_go_on(app: App) -> None:
    ship = declare(app)
    large = os.urandom(5000)
    lost, too, whole = ship.submit(-1, large), ship.submit(-3, large), ship.submit(-2, os.urandom(5000))
    run(app, lost, too, whole)
    (digest,) = digests_in(lost.record().arguments)
    engine = app.runtime.ready()

    async def damage() -> None:
        stored = await engine.store.get_payload(app.name, digest)
        assert stored is not None
        bad = replace(stored, first=replace(stored.first, data=b"x" * stored.size))
        await engine.store.put_payloads(app.name, [bad])

    app.runtime.run(damage())
    done = app.rerun(status="failed")
    assert [one.record().rerun_of for one in done.invocations] == [whole.id]
    assert {id for id, _ in done.refused} == {lost.id, too.id}
    assert all("its content has changed" in why for _, why in done.refused)
    with pytest.raises(PayloadLost, match="cannot be run again"):
        lost.rerun()


# --- removing


def test_a_purge_removes_what_has_ended_and_keeps_keys_in_their_time(app: App) -> None:
    ship = declare(app)
    good, keyed, waiting = ship.submit(1), ship.options(key="k").submit(2), ship.options(delay="1h").submit(3)
    run(app, good, keyed)
    plan = app.purge(status="success", dry_run=True)
    assert (list(plan.originals), plan.removed) == ([good.id], 0)
    assert plan.kept == [(keyed.id, "its key 'k' is still taken")]
    done = asyncio.run(app.apurge(status="success"))
    assert done.removed == 1
    assert {record.id for record in app.invocations()} == {keyed.id, waiting.id}
    refused = app.purge([waiting.id])
    assert (refused.removed, refused.kept[0][1]) == (0, "it is registered; only ended invocations can be removed")
    assert app.purge([keyed.id], force=True).removed == 1
    assert ship.options(key="k").submit(9).record().key == "k"


def test_what_has_expired_can_be_run_again(app: App) -> None:
    ship = declare(app, expires="1ms")
    late = ship.submit(1)
    while time.time() <= (late.record().start_by or 0.0) + 0.01:
        pass
    with app.runner():
        with pytest.raises(Expired):
            late.result(timeout=patient(30))
        again = late.rerun()
        assert again.result(timeout=patient(30)) == 1
    assert again.record().terms.start_by is None


@pytest.mark.parametrize(
    "where", [{"error": ""}, {"key": ""}, {"task": ""}, {"tag": [""]}, {"status": "failed", "taks": "ship"}]
)
def test_a_filter_that_says_less_than_was_meant_is_refused(app: App, where: dict[str, Any]) -> None:
    ship = declare(app)
    ended = ship.submit(-1)
    run(app, ended)
    for act in (app.archive, app.rerun, app.purge):
        with pytest.raises(UsageError, match="="):
            act(**where)
    assert ended.status is Status.FAILED


def test_a_purge_keeps_what_a_trigger_is_yet_to_be_told_of(app: App) -> None:
    waiting = declare(app).options(delay="1h").submit(1)
    store = app.runtime.ready().store
    told = Cancellation(by="ann", at=store.now(), until=store.now())
    end = cancel(waiting.record(), told, operation="end")
    assert end is not None
    app.runtime.run(store.apply([replace(end, outbox=("t",))]))
    for force in (False, True):
        refused = app.purge([waiting.id], force=force)
        assert (refused.removed, refused.kept) == (0, [(waiting.id, "a trigger is yet to be called for its end")])
    app.runtime.run(store.apply(delivery(waiting.id, app=app.name)))
    assert app.purge([waiting.id]).removed == 1
