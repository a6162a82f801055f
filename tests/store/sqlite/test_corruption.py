"""One bad row neither stops a loop nor is lost."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.clock import SystemClock
from holdfast.errors import CorruptRecord, SchemaMismatch, StoreError
from holdfast.ids import InvocationId
from holdfast.model import changes
from holdfast.model.changes import APPLIED, MISSING
from holdfast.model.limits import Release
from holdfast.model.log import APPENDED, Behind, Fenced
from holdfast.model.records import Entry
from holdfast.model.status import Status
from holdfast.store import open_store
from holdfast.store.contract import EntryOrder, Filter, Order, Store
from holdfast.testing.conformance_limits import KEY, bounded, limited
from holdfast.testing.conformance_outbox import end
from holdfast.testing.conformance_payloads import stored as large_value
from holdfast.testing.samples import RUN, START, Stage, delivery, ids_of, invocation, owned, page, pushing, runner, wish

Meddle = Callable[..., list[Any]]

DAMAGES = {
    "broken history": "history = '{\"v\":'",
    "no history": "history = ''",
    "history of another version": "version = 7",
    "history of another status": "status = 'rerouted'",
    "broken error": "error = '{'",
    "history that is not UTF-8": "history = CAST(x'7bff2c' AS TEXT)",
}
ALL_DAMAGES = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())


def spoil(meddle: Meddle, damage: str, id: str = "b") -> None:
    meddle(f"UPDATE holdfast_invocations SET {damage} WHERE id = ?", id)


@ALL_DAMAGES
def test_a_claim_sets_an_unreadable_row_aside_and_takes_the_others(stage: Stage, meddle: Meddle, damage: str) -> None:
    async def scenario(store: Store) -> None:
        await store.insert([invocation(id, arguments=b"\xff") for id in "abc"])
        spoil(meddle, damage)
        assert ids_of((await store.claim(wish("op", limit=2))).records) == ["a", "c"]
        (aside,) = await store.quarantined("shop")
        assert (aside.id, aside.app, aside.at) == ("b", "shop", START)
        assert "b cannot be read" in aside.why
        raw = json.loads(aside.raw)
        assert (raw["id"], raw["task"], raw["arguments"]) == ("b", "shop:send", {"base64": "/w=="})
        assert [facts["id"] for event, facts in stage.reports if event == "quarantine"] == ["b"]
        assert list(await store.get("shop", ["b"])) == [None]
        assert await store.counts("shop") == {Status.RUNNING: 2}

    stage.play(scenario)


@pytest.mark.parametrize("damage", [*DAMAGES.values(), "outbox = 't'", "outbox = '[1]'", "origin = '[]'"])
def test_an_unreadable_end_is_set_aside_and_the_others_are_told(stage: Stage, meddle: Meddle, damage: str) -> None:
    async def scenario(store: Store) -> None:
        for id in "abc":
            await end(store, id)
        spoil(meddle, damage)
        spoil(meddle, damage, "a")
        assert ids_of(await store.find("shop", Filter(), 2, order=Order.OUTBOX, set_aside=True)) == ["c"]
        assert [aside.id for aside in await store.quarantined("shop")] == ["a", "b"]
        assert list(await store.get("shop", ["b"])) == [None]
        await store.apply(delivery("c"))
        assert ids_of(await store.find("shop", Filter(), 2, order=Order.OUTBOX, set_aside=True)) == []

    stage.play(scenario)


@ALL_DAMAGES
def test_get_says_that_a_record_cannot_be_read(stage: Stage, meddle: Meddle, damage: str) -> None:
    async def scenario(store: Store) -> None:
        await store.insert([invocation(id) for id in "abc"])
        spoil(meddle, damage)
        with pytest.raises(CorruptRecord, match="invocation b cannot be read"):
            await store.get("shop", ["a", "b"])
        assert ids_of(await store.get("shop", ["c", "a"])) == ["c", "a"]

    stage.play(scenario)


@ALL_DAMAGES
def test_find_leaves_an_unreadable_row_out_and_reports_it(stage: Stage, meddle: Meddle, damage: str) -> None:
    async def scenario(store: Store) -> None:
        await store.insert([invocation(id) for id in "abc"])
        spoil(meddle, damage)
        assert ids_of(await store.find("shop", Filter(), 9)) == ["c", "a"]
        assert [facts["id"] for event, facts in stage.reports if event == "unreadable"] == ["b"]

    stage.play(scenario)


@ALL_DAMAGES
def test_a_change_to_an_unreadable_row_finds_nothing_and_sets_it_aside(
    stage: Stage, meddle: Meddle, damage: str
) -> None:
    async def scenario(store: Store) -> None:
        await store.insert([invocation("b")])
        spoil(meddle, damage)
        change = changes.completed(replace(invocation("b"), owner="r1/0"), result=b"", operation="op", at=START)
        assert list(await store.apply([change])) == [MISSING]
        assert [aside.id for aside in await store.quarantined("shop")] == ["b"]

    stage.play(scenario)


@ALL_DAMAGES
def test_the_id_of_an_unreadable_row_is_taken(stage: Stage, meddle: Meddle, damage: str) -> None:
    async def scenario(store: Store) -> None:
        await store.insert([invocation("b")])
        spoil(meddle, damage)
        stored = await store.insert([invocation("a"), invocation("b", operation="another"), invocation("c")])
        assert list(stored) == [True, False, True]

    stage.play(scenario)


@ALL_DAMAGES
def test_a_claim_asked_again_sets_aside_what_can_no_longer_be_read(stage: Stage, meddle: Meddle, damage: str) -> None:
    if "status" in damage:
        pytest.skip("it is then a row that was not claimed")

    async def scenario(store: Store) -> None:
        await store.insert([invocation(id) for id in "abc"])
        await store.claim(wish("op", limit=2))
        spoil(meddle, damage)
        assert ids_of((await store.claim(wish("op", limit=3, again=True))).records) == ["a", "c"]
        assert [aside.id for aside in await store.quarantined("shop")] == ["b"]

    stage.play(scenario)


def test_a_status_from_the_future_is_left_alone_by_claims_and_counts(stage: Stage, meddle: Meddle) -> None:
    """It is not in the index of what is ready; whoever asks for the record itself learns about it."""

    async def scenario(store: Store) -> None:
        await store.insert([invocation(id) for id in "abc"])
        spoil(meddle, "status = 'levitating'")
        assert ids_of((await store.claim(wish("op"))).records) == ["a", "c"]
        assert await store.counts("shop") == {Status.RUNNING: 2}
        assert ids_of(await store.find("shop", Filter(), 9)) == ["c", "a"]
        with pytest.raises(CorruptRecord):
            await store.get("shop", ["b"])
        change = changes.started(replace(invocation("b"), owner="r1/0"), operation="op", at=START)
        assert list(await store.apply([change])) == [MISSING]
        assert [aside.id for aside in await store.quarantined("shop")] == ["b"]

    stage.play(scenario)


def test_what_was_set_aside_is_listed_oldest_first(stage: Stage, meddle: Meddle) -> None:
    async def scenario(store: Store) -> None:
        for id in "cab":
            await store.insert([invocation(id)])
            spoil(meddle, "history = ''", id)
            stage.clock.advance(1)
            await store.claim(wish("op"))
        assert [aside.id for aside in await store.quarantined("shop")] == ["c", "a", "b"]
        assert list(await store.quarantined("other")) == []

    stage.play(scenario)


def test_a_deep_check_finds_what_cannot_be_read(stage: Stage, meddle: Meddle) -> None:
    async def scenario(store: Store) -> None:
        await owned(store, "a")
        await store.insert([invocation("b")])
        spoil(meddle, "version = 7", "a")
        assert [finding.subject for finding in await store.check() if not finding.ok] == []
        (bad,) = [finding for finding in await store.check(deep=True) if not finding.ok]
        assert (bad.subject, "2 read, 1 unreadable" in bad.detail) == ("records", True)
        spoil(meddle, "version = 7", "b")
        await store.claim(wish("op"))
        assert [finding.subject for finding in await store.check() if not finding.ok] == ["quarantine"]

    stage.play(scenario)


def test_a_check_notices_a_missing_and_a_changed_index(stage: Stage, meddle: Meddle) -> None:
    async def scenario(store: Store) -> None:
        meddle("DROP INDEX holdfast_task")
        meddle("DROP INDEX holdfast_status")
        meddle("CREATE INDEX holdfast_status ON holdfast_invocations (status)")
        bad = {finding.subject: finding.advice for finding in await store.check() if not finding.ok}
        assert bad.keys() == {"index holdfast_task", "index holdfast_status"}
        assert "CREATE INDEX holdfast_task ON" in bad["index holdfast_task"]

    stage.play(scenario)


@pytest.fixture
def left_open(tmp_path: Path) -> Path:
    """A file as a crash leaves it, its last writes in the log beside it, and a page of it damaged since."""

    async def write() -> None:
        store = open_store(f"sqlite:///{tmp_path}/alive.db", clock=SystemClock())
        await store.open()
        await store.insert([invocation(f"first{n}") for n in range(300)])
        with closing(sqlite3.connect(tmp_path / "alive.db")) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        await store.insert([invocation(f"last{n}") for n in range(20)])
        for suffix in ("", "-wal"):
            shutil.copy(tmp_path / f"alive.db{suffix}", tmp_path / f"shop.db{suffix}")
        await store.close()

    asyncio.run(write())
    path = tmp_path / "shop.db"
    image = bytearray(path.read_bytes())
    for number in range(len(image) // 8192, len(image) // 4096):
        image[number * 4096 : number * 4096 + 64] = b"\xff" * 64
    path.write_bytes(image)
    assert (tmp_path / "shop.db-wal").stat().st_size > 0
    return path


@pytest.mark.parametrize("times", [1, 3])
def test_a_damaged_file_is_refused_and_stays_as_it_was(left_open: Path, times: int) -> None:
    """Log and all: what is in there may be all that is left of it."""
    before = {path.name: path.read_bytes() for path in (left_open, left_open.with_name("shop.db-wal"))}

    async def scenario() -> None:
        store = open_store(f"sqlite:///{left_open}", clock=SystemClock())
        with pytest.raises(StoreError, match="damaged"):
            await store.open()

    for _ in range(times):
        asyncio.run(scenario())
    assert {name: left_open.with_name(name).read_bytes() for name in before} == before


@ALL_DAMAGES
@pytest.mark.parametrize("name", ["key", "dedup_key"])
def test_what_cannot_be_read_takes_no_key_and_no_dedup_key(
    stage: Stage, meddle: Meddle, damage: str, name: str
) -> None:
    async def scenario(store: Store) -> None:
        await store.insert([invocation("b", **{name: "k"})])
        spoil(meddle, damage)
        again = invocation("c", **{name: "k"})
        assert await store.insert([again]) == [False]
        assert await store.find_conflicts([again]) == [None]
        assert await store.insert([again]) == [True]
        assert [aside.id for aside in await store.quarantined("shop")] == ["b"]

    stage.play(scenario)


def test_an_id_stays_taken_by_what_cannot_be_read(stage: Stage, meddle: Meddle) -> None:
    async def scenario(store: Store) -> None:
        await store.insert([invocation("b", key="k")])
        spoil(meddle, DAMAGES["broken history"])
        with pytest.raises(CorruptRecord):
            await store.find_conflicts([invocation("b", key="k")])
        assert await store.quarantined("shop") == []

    stage.play(scenario)


# --- what lies beside the invocations


DEEP = '{"retries":' + '{"a":' * 2000 + "1" + "}" * 2001


def test_terms_nested_very_deep_do_not_stop_a_claim(stage: Stage, meddle: Meddle) -> None:
    async def scenario(store: Store) -> None:
        await store.insert([invocation(id) for id in "abc"])
        meddle("UPDATE holdfast_invocations SET terms = ? WHERE id = 'b'", DEEP)
        assert ids_of((await store.claim(wish())).records) == ["a", "c"]
        assert [(aside.kind, aside.id) for aside in await store.quarantined("shop")] == [("invocation", "b")]

    stage.play(scenario)


@pytest.mark.parametrize(
    "damage", ["body = '{'", "body = ''", "body = CAST(x'7bff2c' AS TEXT)", "heartbeat_at = 9e999"]
)
def test_an_unreadable_roster_entry_hides_nobody(stage: Stage, meddle: Meddle, damage: str) -> None:
    async def scenario(store: Store) -> None:
        for number, id in enumerate("abc"):
            await store.enrol(runner(id, started_at=START + number))
        meddle(f"UPDATE holdfast_runners SET {damage} WHERE id = 'a'")
        found = await store.silent("shop")
        assert [runner.id for runner, _ in found] == ["b", "c"]
        assert [each.id for each in await store.roster("shop")] == ["b", "c"]
        assert [(aside.kind, aside.id) for aside in await store.quarantined("shop")] == [("runner", "a")]
        assert len([event for event, _ in stage.reports if event in ("quarantine", "unreadable")]) == 1

    stage.play(scenario)


@pytest.mark.parametrize("damage", ["body = '{'", "heartbeat_at = 9e999"])
def test_a_runner_whose_roster_entry_cannot_be_read_is_told_that_it_has_none(
    stage: Stage, meddle: Meddle, damage: str
) -> None:
    """It begins anew under another name, as one that was declared dead."""

    async def scenario(store: Store) -> None:
        await store.enrol(runner("a"))
        meddle(f"UPDATE holdfast_runners SET {damage}")
        assert await store.heartbeat("shop", "a") is None
        assert await store.roster("shop") == []
        assert [aside.kind for aside in await store.quarantined("shop")] == ["runner"]

    stage.play(scenario)


@pytest.mark.parametrize(
    "damage", ["body = x'7b22ff'", "body = x''", f"body = CAST('{DEEP}' AS BLOB)", "due_at = 9e999"]
)
def test_an_unreadable_entry_is_set_aside_and_the_others_are_found(stage: Stage, meddle: Meddle, damage: str) -> None:
    async def scenario(store: Store) -> None:
        for name in "abc":
            await store.put_entry(Entry(app="shop", kind="schedule", name=name, body=b"{}", due_at=START))
        meddle(f"UPDATE holdfast_entries SET {damage} WHERE name = 'a'")
        assert [each.name for each in await store.entries("shop", "schedule", order=EntryOrder.DUE, limit=2)] == [
            "b",
            "c",
        ]
        assert [each.name for each in await store.entries("shop", "schedule")] == ["b", "c"]
        assert [(aside.kind, aside.id) for aside in await store.quarantined("shop")] == [("schedule", "a")]
        assert await store.put_entry(Entry(app="shop", kind="schedule", name="a", body=b"{}")), "its name is free"

    stage.play(scenario)


@pytest.mark.parametrize("version", ["-1", "0", "3.5", "", "9" * 5000])
def test_a_file_whose_schema_version_cannot_be_one_is_refused(stage: Stage, meddle: Meddle, version: str) -> None:
    async def nothing(store: Store) -> None:
        pass

    stage.play(nothing)
    meddle("UPDATE holdfast_meta SET value = ? WHERE key = 'schema_version'", version)
    with pytest.raises(SchemaMismatch, match=r"schema's version.*Restore a backup"):
        stage.play(nothing)


def test_the_check_counts_by_kind_what_was_set_aside(stage: Stage, meddle: Meddle) -> None:
    async def scenario(store: Store) -> None:
        await store.insert([invocation(id) for id in "ab"])
        await store.enrol(runner("r"))
        meddle("UPDATE holdfast_invocations SET history = ''")
        meddle("UPDATE holdfast_runners SET body = ''")
        await store.claim(wish())
        await store.roster("shop")
        (bad,) = [finding for finding in await store.check() if not finding.ok]
        assert bad.subject == "quarantine"
        assert "3 records were set aside (2 invocations, 1 runner)" in bad.detail
        assert "holdfast_quarantine" in bad.advice

    stage.play(scenario)


@pytest.mark.parametrize(
    "damage", ["history = ''", "status = 'levitating'", "owner = NULL", "owner = 'nobody'", "terms = '{'", "task = 'x'"]
)
def test_a_damaged_holder_gives_its_slot_back(stage: Stage, meddle: Meddle, damage: str) -> None:
    async def scenario(store: Store) -> None:
        await store.insert([limited(id) for id in "ab"])
        assert ids_of((await store.claim(bounded("first", limit=1))).records) == ["a"]
        spoil(meddle, damage, "a")
        assert ids_of((await store.claim(bounded("second"))).records) == []
        assert await store.quarantine_hidden("shop") == 1
        assert await store.quarantine_hidden("shop") == 0
        assert [aside.id for aside in await store.quarantined("shop")] == ["a"]
        released = await store.release_waiters("shop", [Release(limit_key=KEY)], operation="r", at=START)
        assert ids_of(released) == ["b"]

    stage.play(scenario)


@pytest.mark.parametrize("damage", ["due_at = 9e999", "lane = ''", "lane = 'no|x'", "rank = 9223372036854775807"])
def test_one_that_no_claim_would_find_is_set_aside(stage: Stage, meddle: Meddle, damage: str) -> None:
    async def scenario(store: Store) -> None:
        await store.insert([invocation(id) for id in "abc"])
        spoil(meddle, damage)
        assert ids_of((await store.claim(wish("op"))).records) == ["a", "c"]
        await store.quarantine_hidden("shop")
        assert [aside.id for aside in await store.quarantined("shop")] == ["b"]

    stage.play(scenario)


def test_in_a_users_own_transaction_a_damaged_row_takes_no_key(stage: Stage, meddle: Meddle, path: Path) -> None:
    async def scenario(store: Store) -> None:
        await store.insert([invocation("b", key="k")])
        spoil(meddle, DAMAGES["broken history"])
        with closing(sqlite3.connect(path)) as own:
            assert list(store.joined(own).insert([invocation("c", key="k")], [])) == [None]
            own.commit()
        assert [aside.id for aside in await store.quarantined("shop")] == ["b"]
        assert ids_of(await store.find("shop", Filter(), 9)) == ["c"]

    stage.play(scenario)


@pytest.mark.parametrize(("first", "why"), [(1, "begins with it"), (2, "before it ends at 1")])
def test_a_deep_check_finds_a_missing_page(stage: Stage, meddle: Meddle, first: int, why: str) -> None:
    async def scenario(store: Store) -> None:
        await store.append([page(1, run=run) for run in "abc"])
        await store.append([page(2, 3, run=run) for run in "abc"])
        await store.append([page(4, run=run) for run in "abc"])
        assert [finding.detail for finding in await store.check(deep=True) if not finding.ok] == []
        meddle(f"DELETE FROM holdfast_log WHERE run = 'b' AND first = {first}")
        (bad,) = [finding.detail for finding in await store.check(deep=True) if not finding.ok]
        assert "8 read, 1 unreadable (1 page)" in bad
        assert why in bad

    stage.play(scenario)


PAGE_DAMAGES = ["last = 0", "last = 1", "last = 2", "epoch = -1", "at = 9e999"]


@pytest.mark.parametrize("damage", PAGE_DAMAGES)
def test_a_damaged_page_stops_its_own_log_and_nothing_else(stage: Stage, meddle: Meddle, damage: str) -> None:
    async def scenario(store: Store) -> None:
        await store.append([page(1, run=run) for run in "ab"])
        await store.append([page(2, 3, run=run) for run in "ab"])
        await store.append([page(4, run=run) for run in "ab"])
        meddle(f"UPDATE holdfast_log SET {damage} WHERE run = 'a' AND first = 2")
        with pytest.raises(CorruptRecord, match=r"the page 'a#[24]' cannot be read") as raised:
            await store.read_log("shop", InvocationId("a"), limit=9)
        assert raised.value.kind == "page"
        assert len(await store.read_log("shop", InvocationId("a"), limit=1)) == 1
        assert len(await store.read_log("shop", InvocationId("b"), limit=9)) == 3
        batch = [page(2, run="a", operation="x"), page(2, run="b", operation="x"), page(1, run="c")]
        behind, other, fresh = await store.append(batch)
        assert isinstance(behind, Behind)
        assert len(behind.pages) <= 1
        assert isinstance(other, Behind)
        assert len(other.pages) == 2
        assert fresh == APPENDED
        assert await store.quarantined("shop") == [], "its place would be free"
        assert [finding.subject for finding in await store.check() if not finding.ok] == []
        if damage != "last = 2":  # by itself it is a page
            (bad,) = [finding for finding in await store.check(deep=True) if not finding.ok]
            assert "1 unreadable" in bad.detail
            assert "a#2" in bad.detail
        assert await store.remove_log("shop", InvocationId("a"), before=1) == 3

    stage.play(scenario)


def test_damaged_state_of_a_run_is_quarantined_and_its_log_stays(stage: Stage, meddle: Meddle) -> None:
    async def scenario(store: Store) -> None:
        for id in "abc":
            await owned(store, id, run=RUN)
        await store.append([page(1, run="b")])
        spoil(meddle, "run = '{'")
        assert list(await store.apply([pushing(id) for id in "abc"])) == [APPLIED, MISSING, APPLIED]
        assert [aside.id for aside in await store.quarantined("shop")] == ["b"]
        assert len(await store.read_log("shop", InvocationId("b"), limit=9)) == 1

    stage.play(scenario)


@pytest.mark.parametrize("commits", [True, False])
def test_a_page_is_appended_in_a_users_own_transaction(stage: Stage, meddle: Meddle, path: Path, commits: bool) -> None:
    async def scenario(store: Store) -> None:
        await store.append([page(1)])
        stored = large_value(1)
        with closing(sqlite3.connect(path)) as own:
            own.execute("CREATE TABLE mine (x)")
            own.execute("INSERT INTO mine VALUES (1)")
            second = page(2, payloads=(stored.digest,))
            transaction = store.joined(own)
            assert list(transaction.append([second], [stored])) == [APPENDED]
            assert list(await transaction.aappend([second], [stored])) == [APPENDED], "repeated"
            assert list(transaction.append([page(2, operation="x")], [])) == [Behind((second,))]
            assert list(transaction.append([page(1, epoch=0, operation="y")], [])) == [Fenced(1)]
            assert list(transaction.append([], [])) == []
            assert len(await store.read_log("shop", InvocationId("a"), limit=9)) == 1, "not yet"
            own.commit() if commits else own.rollback()
        there = [second] if commits else []
        assert list(await store.read_log("shop", InvocationId("a"), limit=9, after=1)) == there
        stage.clock.advance(10)
        await store.collect_payloads("shop", store.now(), 10)
        assert (await store.get_payload("shop", stored.digest) is not None) is commits
        if not commits:
            assert list(await store.append([page(2, operation="another")])) == [APPENDED]

    stage.play(scenario)
