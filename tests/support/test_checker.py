"""Who checks the checker: every invariant has a planted violation that is found, and a close call that is none."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace
from tests.support import checker, witness
from tests.support.checker import Bounds, Dump, Fault, FaultKind, Faults, Ledgers, Violation, check, dead_ends, rest
from tests.support.checker.case import Case
from tests.support.checker.spans import union, without
from tests.support.patience import patient
from tests.support.plots import clean, groups, happenings, hooks, planted, runs, streams
from tests.support.plots.material import (
    ONE,
    Plot,
    S,
    kill,
    saw,
)
from tests.support.witness import Event, What, Witness

from holdfast import App, Invocation
from holdfast.clock import SystemClock
from holdfast.model import changes
from holdfast.model.changes import APPLIED, MISSING, Change, Lost, Verdict, apply_to
from holdfast.model.claims import Claim
from holdfast.model.records import HistoryEntry, InvocationRecord, Piece, StoredPayload, Terms
from holdfast.model.retries import Retries, dump_policy
from holdfast.model.status import TABLE, Rescuer, Rule, Status
from holdfast.store import open_store
from holdfast.store.contract import Store
from holdfast.store.memory.store import MemoryStore
from holdfast.testing import FakeClock
from holdfast.testing.samples import BY_NAME, LANE, START, invocation, runner, wish

PLANTED = [*planted.PLANTED, *happenings.PLANTED, *runs.PLANTED, *streams.PLANTED, *hooks.PLANTED, *groups.PLANTED]
CLEAN = [*clean.CLEAN, *happenings.CLEAN, *runs.CLEAN, *streams.CLEAN, *hooks.CLEAN, *groups.CLEAN]


@pytest.mark.parametrize("plot", PLANTED, ids=lambda plot: f"{plot.breaks.split()[0]} {plot.name}")
def test_a_planted_violation_is_found_under_its_number(plot: Plot) -> None:
    found = plot.judged()
    assert {violation.invariant for violation in found} == set(plot.breaks.split()), "\n".join(map(str, found))


@pytest.mark.parametrize("plot", CLEAN, ids=lambda plot: f"{plot.breaks} {plot.name}")
def test_a_close_call_is_none(plot: Plot) -> None:
    found = plot.judged()
    assert found == [], "\n".join(map(str, found))


NUMBERS = {
    "I1",
    "I2",
    "I3",
    "I4",
    "I5",
    "I6",
    "I7",
    "I8",
    "I9",
    "I10",
    "I11",
    "I12",
    "I13",
    "I14",
    "I15",
    "I16",
    "I18",
    "I19",
    "I20",
    "I21",
}  # I17 is about the table


def test_every_invariant_has_a_planted_violation_and_a_close_call() -> None:
    assert {plot.breaks.split()[0] for plot in PLANTED} == NUMBERS
    assert {plot.breaks for plot in CLEAN} == NUMBERS


def test_every_invariant_is_explained() -> None:
    told = set(re.findall(r"^(I\d+) ", checker.__doc__ or "", re.MULTILINE))
    assert told == NUMBERS | {"I17"}


@pytest.mark.parametrize("judge", checker.CHECKS, ids=lambda judge: judge.__name__)
def test_every_check_finds_something(judge: Callable[[Case], Iterator[Violation]]) -> None:
    if judge is not rest.table_has_no_dead_end:
        assert any(list(judge(plot.case())) for plot in PLANTED)


def test_a_violation_shows_the_least_that_proves_it() -> None:
    (two, *_) = [plot for plot in PLANTED if plot.name == "two under a limit of one"]
    (found,) = two.judged()
    assert found.id == "b"
    assert [event.at for event in found.witness if isinstance(event, Event)] == [1.1, 1.5]
    lines = str(found).splitlines()
    assert lines[0] == "I8 b: 2 hold a slot of 'k' at once, and its limit is 1"
    assert lines[1].strip().startswith("lease.enter at=1.1 pid=1 id=a")
    (life_after, *_) = [plot for plot in PLANTED if plot.name == "a life after the end"]
    (found,) = life_after.judged()
    assert [entry.version for entry in found.witness if isinstance(entry, HistoryEntry)] == [4, 5]
    assert "history 5 failed" in str(found)
    assert "fault kind=kill at=2" in str(Violation("I20", None, "…", (kill(2, owner="r1"),)))


# --- I17: the table


def test_the_table_has_no_dead_end() -> None:
    assert list(dead_ends()) == []
    everywhere = {who: frozenset(status for status, rule in TABLE.items() if rule.rescued_by is who) for who in Rescuer}
    assert list(dead_ends(sweeps=everywhere)) == []


@pytest.mark.parametrize(
    ("status", "fields", "stuck"),
    [
        (S.RUNNING, {"rescued_by": None}, {S.RUNNING}),
        (S.RUNNING, {"next": TABLE[S.RUNNING].next - {S.RUNNING_RECOVERY}}, {S.RUNNING}),
        (S.RUNNING_RECOVERY, {"overrides_ownership": False}, {S.RUNNING, S.PAUSED, S.RESUMED, S.CANCELLING}),
        (S.SUSPENDED, {"next": frozenset()}, {S.SUSPENDED}),
        (S.RETRY, {"available_for_run": False}, {S.RETRY}),
        (S.PENDING_RECOVERY, {"next": frozenset({S.PENDING_RECOVERY})}, {S.PENDING, S.PENDING_RECOVERY}),
    ],
)
def test_a_dead_end_is_found(status: Status, fields: dict[str, Any], stuck: set[Status]) -> None:
    table = dict(TABLE) | {status: TABLE[status]._replace(**fields)}
    found = list(dead_ends(table))
    assert {violation.invariant for violation in found} == {"I17"}
    assert {Status(violation.sentence.split()[0]) for violation in found} == stuck


def test_a_duty_that_skips_one_status_is_a_dead_end() -> None:
    sweeps = {
        who: frozenset(s for s, rule in TABLE.items() if rule.rescued_by is who and s is not S.PAUSED)
        for who in Rescuer
    }
    (found,) = dead_ends(sweeps=sweeps)
    assert found.sentence.startswith("paused ")


def test_a_status_without_owner_that_only_an_owner_may_enter_is_no_way_out() -> None:
    """Even if the table had such an edge, nobody could take it once the owner is dead."""
    rule = Rule("odd", frozenset({S.RUNNING}), releases_ownership=True, rescued_by=Rescuer.WAKE_PARKED)
    (found,) = dead_ends(dict(TABLE) | {S.PARKED: rule})
    assert found.sentence.startswith("parked ")


# --- what the real changes write is legal


class Histories(RuleBasedStateMachine):
    """Named changes by fresh and by stale owners, with operation ids that collide, on the memory store."""

    OPERATIONS = st.sampled_from([f"op{n}" for n in range(20)]) | st.uuids().map(str)
    IDS = st.sampled_from("abc")

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock(START)
        self.store = MemoryStore(self.clock)
        self.seen: list[InvocationRecord] = []
        self.events: list[Event] = []

    @rule(id=IDS, operation=OPERATIONS)
    def insert(self, id: str, operation: str) -> None:
        terms = Terms(retries=dump_policy(Retries("forever")))
        record = invocation(id, operation=operation, terms=terms)
        asyncio.run(self.store.insert([record]))
        self.seen.append(record)

    @rule(owner=st.sampled_from(["r1/0", "r2/0"]), operation=OPERATIONS, start=st.booleans(), again=st.booleans())
    def claim(self, **fields: Any) -> None:
        claim = Claim(app="shop", lanes=(LANE,), limit=2, at=self.clock.now(), **fields)
        self.seen += asyncio.run(self.store.claim(claim)).records

    @rule(data=st.data(), name=st.sampled_from(sorted(BY_NAME)), operation=OPERATIONS, fresh=st.booleans())
    def change(self, data: st.DataObject, name: str, operation: str, fresh: bool) -> None:
        if not self.seen:
            return
        record = data.draw(st.sampled_from(self.seen))
        if fresh:
            (current,) = asyncio.run(self.store.get("shop", [record.id]))
            record = current or record
        _, build = BY_NAME[name]
        epoch = record.epoch + data.draw(st.sampled_from([0, 0, 0, -1, 1]))
        change = build(replace(record, epoch=epoch, owner=record.owner or "a stranger/1"))
        asyncio.run(self.store.apply([replace(change, operation=operation, at=self.clock.now())]))

    @rule()
    def somebody_looks(self) -> None:
        """Whatever a client is shown once has to hold for ever."""
        self.clock.advance(1)
        dump = asyncio.run(checker.dump(self.store, "shop", clock=self.clock))
        for record in dump.records:
            if TABLE[record.status].is_final:
                facts = {"id": record.id, "status": record.status, "digest": dump.digests.get(record.id)}
                self.events.append(saw(What.RESULT_SEEN, self.clock.monotonic(), **facts))

    @invariant()
    def histories_are_legal(self) -> None:
        dump = asyncio.run(checker.dump(self.store, "shop", clock=self.clock))
        found = check(dump, Ledgers(tuple(self.events)))
        wrong = [violation for violation in found if violation.invariant in ("I2", "I3", "I4", "I6", "I14")]
        assert wrong == [], "\n".join(map(str, wrong))


class TestHistoriesAreLegal(Histories.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(stateful_step_count=30)


# --- planted bugs in a store, found by what witnesses saw


class NoFencing(MemoryStore):
    """Takes a write whatever its epoch."""

    def _apply(self, change: Change) -> Verdict:
        record = self._records.get((change.app, change.id))
        if record is None:
            return MISSING
        if record.status not in change.sources:
            return Lost(record.status, record.owner, record.epoch)
        self._put(apply_to(change, record))
        return APPLIED


class Forgetful(MemoryStore):
    """Says that it has stored what it has not."""

    def _insert(self, record: InvocationRecord) -> bool:
        return True


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        pytest.param(MemoryStore, set(), id="no bug"),
        pytest.param(NoFencing, {"I6"}, id="no fencing"),
        pytest.param(Forgetful, {"I1"}, id="forgetful"),
    ],
)
def test_a_zombie_on_a_store_with_a_planted_bug(tmp_path: Path, kind: type[MemoryStore], broken: set[str]) -> None:
    """r1 freezes while it runs; r2 takes over; r1 wakes up, and its end comes before that of r2."""
    clock = FakeClock(START)
    store, log = kind(clock), Witness(tmp_path / "all.jsonl", clock=clock)

    async def submit() -> None:
        with log.submission("t") as accepted_as:
            await store.insert([invocation("a", arguments=b"\x92\x91\xa1t\x80")])
            accepted_as("a")

    async def executed(owner: str, value: int, meanwhile: Callable[[], Any]) -> Change | None:
        got = (await store.claim(wish(f"claim {owner}", owner=owner, at=clock.now()))).records
        if not got:
            return None
        (record,) = got
        with log.execution("t", epoch=record.epoch) as run:
            await meanwhile()
            run.returns(value)
            clock.advance(1)
        result = bytes([value])
        return changes.completed(record, result=result, operation=f"end {owner}", at=clock.now())

    async def story() -> Dump:
        await submit()
        later: list[Change | None] = []

        async def frozen() -> None:
            clock.advance(20)
            (record,) = await store.get("shop", ["a"])
            assert record is not None
            why = changes.recovered(record, by="r", operation="recover", at=clock.now(), why="silent")
            await store.apply([why])
            later.append(await executed("r2/0", 2, awake))

        async def awake() -> None:
            clock.advance(1)

        first = await executed("r1/0", 1, frozen)
        for change in [first, *later]:
            clock.advance(1)
            if change is not None:
                verdicts = await store.apply([change])
                if verdicts != [APPLIED]:
                    log.fenced("a", epoch=change.epoch or 0)
        return await checker.dump(store, "shop", clock=clock)

    left_behind = asyncio.run(story())
    fault = Fault(kind=FaultKind.FREEZE, at=2, until=21, owner="r1")
    found = check(left_behind, witness.read(tmp_path), Faults((fault,)))
    assert {violation.invariant for violation in found} == broken, "\n".join(map(str, found))


# --- the whole way: an app, its runner, and the dump through the contract


@pytest.mark.slow
def test_an_ordinary_run_is_clean(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    app = App(url, name="shop")
    log = Witness(tmp_path / "run.jsonl")

    @app.task(name="work")
    def work(token: str, size: int) -> str:
        with log.execution(token) as run:
            if token == "unlucky":
                raise ValueError("no luck")
            return run.returns(f"{token} {run.stamp} " + "x" * size)

    with app, app.runner(concurrency=4):
        submitted: dict[str, Invocation[str]] = {}
        for token in [*map(str, range(20)), "unlucky"]:
            with log.submission(token) as accepted_as:
                submitted[token] = work.submit(token, 20_000 * len(submitted))  # some lie apart from their records
                accepted_as(submitted[token].id)
        for _ in range(2):
            for token, handle in submitted.items():
                try:
                    log.saw(handle.id, result=handle.result(timeout=patient(60)))
                except ValueError as error:
                    log.saw(token=token, error=error)

    async def look() -> Dump:
        store = open_store(url, clock=SystemClock())
        await store.open()
        try:
            return await checker.dump(store, "shop")
        finally:
            await store.close()

    there = asyncio.run(look())
    assert len(there.records) == len(there.tokens) == len(there.digests) == 21
    assert any(record.payloads for record in there.records)
    ledgers = witness.read(tmp_path)
    assert len(ledgers.of(What.RESULT_SEEN)) == 42
    assert check(there, ledgers) == []
    forged = replace(there, digests={**there.digests, submitted["3"].id: ONE})
    assert {violation.invariant for violation in check(forged, ledgers)} == {"I3", "I6"}


def test_a_dump_reads_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.checker.evidence._PAGE", 3)

    async def story() -> Dump:
        store = MemoryStore(FakeClock(START))
        await store.insert([invocation(f"i{n}") for n in range(10)] + [invocation("foreign", app="other")])
        await store.enrol(runner("r1"))
        return await checker.dump(store, "shop", clock=FakeClock(START), token_of=lambda record: record.id[1:])

    there = asyncio.run(story())
    assert [record.id for record in there.records] == [f"i{n}" for n in range(10)]
    assert there.counts == {S.REGISTERED: 10}
    assert [entry.id for entry in there.runners] == ["r1"]
    assert there.tokens["i7"] == "7"
    assert there.offset == START


# --- arithmetic

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda ab: (min(ab), max(ab))), max_size=6)


@given(span=st.tuples(st.integers(0, 30), st.integers(0, 30)), windows=SPANS)
def test_what_is_left_outside_of_windows(span: tuple[float, float], windows: list[tuple[float, float]]) -> None:
    joined, kept = union(windows), without(span, union(windows))
    assert all(before[1] < after[0] for before, after in pairwise(joined))
    for second in range(30):
        middle = second + 0.5
        in_window = any(a < middle < b for a, b in windows)
        assert any(a < middle < b for a, b in joined) is in_window
        assert any(a < middle < b for a, b in kept) is (span[0] < middle < span[1] and not in_window)


# --- what lies beside the records, on every store


@pytest.mark.parametrize("kind", ["memory", "sqlite", pytest.param("mongo", marks=pytest.mark.xdist_group("mongo"))])
def test_what_nobody_wants_any_more_is_found_until_it_is_collected(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if kind == "mongo":
        url = str(request.getfixturevalue("mongo_url"))
    else:
        url = "memory://" if kind == "memory" else f"sqlite:///{tmp_path}/shop.db"

    async def left_over(store: Store, bounds: Bounds) -> list[str]:
        found = check(await checker.dump(store, "shop"), Ledgers(), bounds=bounds)
        return [each.sentence for each in found if each.invariant == "I18"]

    async def scenario(app: App, store: Store) -> None:
        await app.get_task("ship").asubmit(os.urandom(3 * 2**20))
        await store.put_payloads("shop", [StoredPayload(digest="ab" * 32, size=1, pieces=1, first=Piece(b"x"))])
        await store.put_piece("shop", "cd" * 32, 1, Piece(b"x"))
        found = await checker.dump(store, "shop")
        assert found.stock is not None
        assert sorted(kept.pieces for kept in found.stock.payloads) == [1, 3]
        assert sorted(piece.number for piece in found.stock.pieces) == [1, 1, 2]
        assert await left_over(store, Bounds()) == [], "their time is not over"
        payload, piece = await left_over(store, Bounds(unwanted_seconds=0.0))
        assert "ab" * 32 in payload
        assert "cd" * 32 in piece
        await store.collect_payloads("shop", store.now() + 1, 100)
        assert await left_over(store, Bounds(unwanted_seconds=-9.0)) == []

    with App(url, name="shop", chunk_threshold=2**20) as app:
        app.task(name="ship")(len)

        async def main() -> None:
            await scenario(app, (await app.runtime.engine()).store)

        app.runtime.run(main())
