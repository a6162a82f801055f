"""Which invocations are meant: by task, key, attribute and time, on every store."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.patience import patient

from holdfast import App, UsageError
from holdfast.errors import UnknownTask
from holdfast.model.records import FOREVER

DAY = 86_400.0


@pytest.fixture(params=["memory", "sqlite", "mongodb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    found = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/shop.db"}.get(request.param)
    return found or str(request.getfixturevalue("mongo_url"))


@pytest.fixture
def app(url: str) -> Iterator[App]:
    with App(url, poll_interval_seconds=0.2) as app:
        yield app


def declare(app: App, name: str, **options: Any) -> Any:
    return app.task(name=name, **options)(lambda a=0: a)


def found(app: App, **where: Any) -> list[str]:
    return [record.id for record in app.invocations(**where)]


def test_a_task_is_named_as_people_do(app: App) -> None:
    send, other = declare(app, "shop:send", aliases=["old:send"]), declare(app, "mail:post")
    second = declare(app, "mail:send_all")
    one, two, three = send.submit(), other.submit(), second.submit()
    for given in (send, "shop:send", "send", "old:send", [send], ("send",)):
        assert found(app, task=given) == [one.id]
    assert found(app, task=[send, "post"]) == [two.id, one.id]
    assert found(app, task=()) == [three.id, two.id, one.id]
    declare(app, "mail:send")
    with pytest.raises(UnknownTask, match="'send' may be mail:send or old:send or shop:send; write the whole name"):
        app.invocations(task="send")


def test_none_means_any_and_what_is_no_filter_is_refused(app: App) -> None:
    one = declare(app, "shop:send").submit()
    assert found(app, task=None, status=None, queue=None, parent=None, attributes=None, key=None) == [one.id]
    assert app.archive(task=None) == []
    for where in ({"task": 7}, {"status": 7}, {"queue": [7]}, {"parent": one}, {"before": one}, {"attributes": "a=b"}):
        with pytest.raises(UsageError, match=f"{next(iter(where))}=.* expected"):
            app.invocations(**where)


def test_statistics_go_by_the_same_names(app: App) -> None:
    send, old = declare(app, "shop:send"), declare(app, "shop:old")
    with app.runner():
        for each in (send, old):
            each.submit(1).result(timeout=patient(20))
    assert [app.stats(task=given).total.ended for given in (send, "send", ["shop:send", old], None)] == [1, 1, 2, 2]
    del app.runtime.tasks["shop:old"]
    assert app.purge(task="shop:old").removed == 1
    assert app.stats(task="shop:old").total.ended == 1  # they outlive what they count
    with pytest.raises(UnknownTask, match="Did you mean 'shop:send'"):
        app.stats(task="sned")


def test_a_name_that_nothing_has_is_refused(app: App) -> None:
    send = declare(app, "shop:send")
    send.submit()
    with pytest.raises(UnknownTask, match=r"no task 'sned'\. Did you mean 'shop:send'\? Declared: shop:send\."):
        app.invocations(task="sned")
    with pytest.raises(UnknownTask):
        app.archive(task="sned")
    with pytest.raises(UnknownTask):
        app.purge(task="sned")
    for wrong in ("", 5, [send, None]):
        with pytest.raises((UsageError, TypeError)):
            app.invocations(task=wrong)  # type: ignore[arg-type]
    with App("memory://") as stranger:
        with pytest.raises(UnknownTask, match="belongs to another app"):
            app.invocations(task=declare(stranger, "strange"))
    with pytest.raises(UsageError, match=r"no filter tsk=; there are limit, status, task"):
        app.invocations(tsk="send")  # type: ignore[call-arg]


def test_work_of_a_task_that_code_no_longer_declares_is_found_by_its_name(app: App) -> None:
    gone = declare(app, "shop:gone").submit()
    app.runtime.tasks.clear()
    assert found(app, task="shop:gone") == [gone.id]
    assert found(app, task="anything") == []
    declare(app, "shop:send")
    assert found(app, task="shop:gone") == [gone.id]
    assert found(app, task="world:checkout") == []
    with pytest.raises(UnknownTask):
        app.invocations(task="gone")


def test_a_call_is_found_by_its_key(app: App) -> None:
    send, other = declare(app, "shop:send"), declare(app, "shop:other", aliases=["shop:older"])
    first, second = send.options(key="k").submit(), other.options(key="k", queue="mail").submit()
    send.options(key="another").submit()
    assert found(app, key="k") == [second.id, first.id]
    assert found(app, key="k", task="send") == [first.id]
    assert found(app, key="k", task="shop:older") == [second.id]
    assert found(app, key="k", queue="mail") == [second.id]
    assert found(app, key="k", status="failed") == found(app, key="none") == []
    assert found(app, key="k", limit=1, until=first.record().created_at + 3600) == [second.id]
    app.runtime.tasks.clear()
    assert found(app, key="k") == [second.id, first.id]
    with pytest.raises(UsageError, match="key='': expected a text that is not empty"):
        app.invocations(key="")


def test_calls_are_found_by_the_time_of_their_submit(app: App) -> None:
    send = declare(app, "send")
    calls = [send.submit() for _ in range(3)]
    times = [each.record().created_at for each in calls]
    assert found(app, since=times[1]) == [calls[2].id, calls[1].id]
    assert found(app, until=times[1]) == [calls[0].id]
    assert found(app, since=dt.datetime.fromtimestamp(times[0], dt.UTC) - dt.timedelta(hours=1), limit=2) == [
        *(calls[2].id, calls[1].id)
    ]
    assert found(app, since=times[0], before=calls[2].id) == [calls[1].id, calls[0].id]
    with pytest.raises(UsageError, match="since"):
        app.invocations(since=dt.datetime.now())  # type: ignore[call-arg]


def test_what_has_ended_is_kept_for_another_time(app: App) -> None:
    @app.task(name="work")
    def work(number: int) -> None:
        if number < 0:
            raise ValueError(number)

    waits = declare(app, "later").options(delay="1h", key="k").submit()
    with app.runner():
        done, failed, keyed = work.submit(1), work.submit(-1), work.options(key="k", key_for="3d").submit(2)
        for each in (done, failed, keyed):
            with contextlib.suppress(ValueError):
                each.result(timeout=patient(20))

    def kept(invocation: Any) -> float:
        record = invocation.record()
        return float(record.retain_until) - record.changed_at if record.retain_until < FOREVER else FOREVER

    plan = app.archive.retain("1d", task=work, dry_run=True)
    assert set(plan.originals) == {done.id, failed.id, keyed.id}
    assert kept(done) == pytest.approx(7 * DAY)
    app.archive.retain({"success": "1d", "failed": None}, task="work")
    assert [kept(each) for each in (done, failed, keyed)] == [pytest.approx(DAY), FOREVER, pytest.approx(3 * DAY)]
    refused = app.archive.retain("forever", [waits.id, done.id])
    assert (refused.originals, refused.refused) == ([done.id], [(waits.id, "it is registered")])
    assert app.archive.retain("forever", [done.id]).originals == []
    with pytest.raises(UsageError, match="retain: name invocations by ids or by a filter"):
        app.archive.retain("1d")
    with pytest.raises(UsageError, match="is too short"):
        app.archive.retain("1m", status="failed")
    new = work.submit(3)
    assert new.record().terms.retention is None
