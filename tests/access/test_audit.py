"""The audit record: stored before an action, ended after it, read newest first by a bounded number of reads."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import App
from holdfast.access.audit import AUDIT, DONE, FAILED, OUTCOME, Action, AuditFilter, AuditLog, AuditPage, twin_of
from holdfast.errors import StoreUnavailable
from holdfast.model.records import Entry
from holdfast.runtime.engine import Engine

T = TypeVar("T")
PAUSE = Action(
    "ann", "token", "10.0.0.7", "queue.pause", ["mail"], "the printer is on fire", "holdfast queues pause mail"
)


class Log:
    """The audit log of an app, for callers without a loop."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.engine: Engine = app.runtime.ready()
        self.log = self.engine.part(AuditLog)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.app.runtime.run(work)

    def done(self, action: Action) -> str:
        record = self.run(self.log.begin(action))
        self.run(self.log.end(record, DONE))
        return record.id

    def page(self, limit: int = 100, before: str | None = None, **where: Any) -> AuditPage:
        return self.run(self.log.page(AuditFilter(**where), limit, before))


@pytest.fixture
def log(app: App) -> Log:
    return Log(app)


def test_a_record_says_who_did_what_when_from_where_and_why(log: Log) -> None:
    before = log.engine.store.now()
    begun = log.run(log.log.begin(PAUSE))
    (found,) = log.page().records
    assert found == begun
    assert (found.outcome, found.ended_at) == ("begun", None)
    assert before - 0.01 <= found.at <= log.engine.store.now() + 0.01
    facts = (found.who, found.via, found.source, found.action, [found.target], found.reason, found.twin)
    assert facts == tuple(PAUSE)
    log.run(log.log.end(begun, FAILED, "StoreFull: the disk is full"))
    (found,) = log.page().records
    assert (found.outcome, found.detail) == ("failed", "StoreFull: the disk is full")
    assert found.ended_at is not None
    assert found.ended_at >= found.at - 0.01


def test_pages_are_newest_first_and_neither_lose_nor_repeat_a_record(log: Log) -> None:
    made = [log.done(PAUSE._replace(targets=[f"queue-{number}"])) for number in range(25)]
    assert made == sorted(made)
    seen, before = list[str](), None
    while True:
        page = log.page(10, before)
        seen += [record.id for record in page.records]
        log.done(PAUSE)  # what is done meanwhile is on a page before this one
        before = page.before
        if before is None:
            break
    assert seen == made[::-1]


def test_a_filter_finds_by_who_action_target_and_time(log: Log) -> None:
    first = log.done(PAUSE)
    second = log.done(PAUSE._replace(who="bob", name="queue.resume"))
    third = log.done(PAUSE._replace(name="invocation.cancel", targets=["01jd3w4t6xkq8r9v2m5n7p0b1c"]))

    def ids(**where: Any) -> list[str]:
        return [record.id for record in log.page(**where).records]

    assert ids(who="bob") == [second]
    assert ids(who="nobody") == []
    assert ids(action="queue") == [second, first]
    assert ids(action="queue.pause") == [first]
    assert ids(target="mail") == [second, first]
    assert ids(target="mai") == []
    assert ids(target="01jd3w4t6xkq8r9v2m5n7p0b1c", who="ann") == [third]
    at = next(record.at for record in log.page().records if record.id == second)
    assert ids(since=at) == [third, second]
    assert [record.outcome for record in log.page(who="bob").records] == ["done"]


def test_a_rare_record_costs_a_bounded_number_of_reads(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.access.audit._AT_ONCE", 5)
    monkeypatch.setattr("holdfast.access.audit._MOST_LOOKED", 20)
    rare = log.done(PAUSE._replace(who="bob"))
    for _ in range(30):
        log.done(PAUSE)
    page = log.page(who="bob")
    assert page.records == []
    assert page.before is not None, "there may be more"
    page = log.page(who="bob", before=page.before)
    assert ([record.id for record in page.records], page.before) == ([rare], None)


def test_a_record_has_a_time_to_be_kept(url: str) -> None:
    with App(url, name="shop", audit_retention_seconds="2d") as app:
        log = Log(app)
        log.done(PAUSE)
        entries: list[Entry] = []
        for kind in (AUDIT, OUTCOME):
            entries += log.run(log.engine.store.entries("shop", kind))
        at = log.page().records[0].at
        assert [entry.keep_until for entry in entries] == [pytest.approx(at + 2 * 86_400, abs=0.01)] * 2
        log.run(log.engine.store.remove_expired("shop", at + 86_400, 10))
        assert len(log.page().records) == 1
        log.run(log.engine.store.remove_expired("shop", at + 2 * 86_400 + 1, 10))
        assert log.page().records == []
        assert log.run(log.engine.store.entries("shop", OUTCOME)) == []


def test_a_corrupt_record_is_quarantined_and_the_others_are_shown(log: Log) -> None:
    first, second = log.done(PAUSE), log.done(PAUSE)
    store = log.engine.store
    for kind, name in ((AUDIT, first), (OUTCOME, second)):
        (entry,) = log.run(store.entries("shop", kind, [name]))
        assert log.run(store.remove_entry(entry))
        assert log.run(store.put_entry(Entry(app="shop", kind=kind, name=name, body=b'{"at": "noon"}')))
    assert [(record.id, record.outcome) for record in log.page().records] == [(second, "begun")]
    assert len(log.run(store.quarantined("shop"))) == 2


def test_an_outcome_that_cannot_be_stored_leaves_begun(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """The action is done: an error would say that it is not."""
    begun = log.run(log.log.begin(PAUSE))

    async def away(*args: Any) -> bool:
        raise StoreUnavailable("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(log.engine.store, "put_entry", away)
        log.run(log.log.end(begun, DONE))
        with pytest.raises(StoreUnavailable):
            log.run(log.log.begin(PAUSE))
    assert [record.outcome for record in log.page().records] == ["begun"]


@given(st.text(), st.text())
def test_any_text_is_kept_and_shown(target: str, reason: str) -> None:
    with App("memory://") as app:
        log = Log(app)
        log.done(PAUSE._replace(targets=[target + "\ud800" * 600], reason=reason))
        (found,) = log.page().records
        assert len(found.target) <= 2_000
        assert [each.id for each in log.page(target=found.target).records] == [found.id]


def test_passwords_of_urls_are_masked(log: Log) -> None:
    url = "mongodb://ann:canary@db.example/shop"
    log.done(PAUSE._replace(targets=[url], reason=url, twin=f"holdfast world import {url}"))
    (found,) = log.page().records
    assert "canary" not in repr(found)
    assert "mongodb://" in found.target


def test_an_action_on_many_has_all_of_them_and_is_found_by_each(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.access.audit._AT_ONCE", 5)
    monkeypatch.setattr("holdfast.access.audit._MOST_LOOKED", 1_000)
    ids = [f"{number:026d}" for number in range(500)]
    many = Action("ann", "token", "10.0.0.7", "archive.rerun", ids, twin=twin_of("holdfast rerun", ids))
    one = PAUSE._replace(name="invocation.cancel", targets=[ids[300]])
    made = []
    for number in range(24):
        made.append(log.done(one if number % 3 else many))
        log.done(many._replace(targets=["another", "third"]))
    (found,) = log.run(log.log.page(AuditFilter(action="rerun"), 1)).records[:1]
    assert (found.target, found.targets) == ("2 invocations", ("another", "third"))
    seen, before = list[str](), None
    while True:
        page = log.page(7, before, target=ids[300])
        seen += [each.id for each in page.records]
        for each in page.records:
            assert each.targets == (() if each.action == "invocation.cancel" else tuple(ids))
            assert each.target == (ids[300] if each.action == "invocation.cancel" else "500 invocations")
            assert each.twin == PAUSE.twin or each.twin == "holdfast rerun (with 500 names)"
        before = page.before
        if before is None:
            break
    assert seen == made[::-1]
    assert log.page(target="nothing").records == []


def test_the_twin_of_several_is_whole_if_it_fits() -> None:
    assert twin_of("holdfast cancel", ["a b", "c"]) == "holdfast cancel 'a b' c"
    assert len(twin_of("holdfast cancel", ["x" * 30] * 60)) == 15 + 60 * 31
    assert twin_of("holdfast cancel", ["x" * 30] * 70) == "holdfast cancel (with 70 names)"


def test_paging_without_a_filter_goes_on_behind_corrupt_records(log: Log) -> None:
    made = [log.run(log.log.begin(PAUSE)).id for _ in range(500)]
    store = log.engine.store
    for name in (made[470], made[455], made[200]):
        (entry,) = log.run(store.entries("shop", AUDIT, [name]))
        assert log.run(store.remove_entry(entry))
        assert log.run(store.put_entry(Entry(app="shop", kind=AUDIT, name=name, body=b"{}")))
        made.remove(name)
    seen, before, pages = list[str](), None, 0
    while True:
        page, pages = log.page(50, before), pages + 1
        assert len(page.records) <= 50
        seen += [record.id for record in page.records]
        before = page.before
        if before is None:
            break
    assert (seen, pages) == (made[::-1], 10)
