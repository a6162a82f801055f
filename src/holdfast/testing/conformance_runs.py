"""The part of the conformance suite about runs of workflows: their logs, inboxes and state.

Use `holdfast.testing.conformance.StoreConformance`, which includes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.errors import CorruptRecord
from holdfast.ids import InvocationId
from holdfast.model import cancellation as cancelling
from holdfast.model import changes, run_changes
from holdfast.model.changes import (
    APPLIED,
    APPLIED_AGAIN,
    CHILDREN,
    FULL,
    HOOKS,
    MISSING,
    PARENT,
    Change,
    Lost,
    Push,
    RunUpdate,
    Write,
    apply_to,
)
from holdfast.model.limits import Limit
from holdfast.model.log import APPENDED, MAX_BEHIND, Behind, Fenced, Page
from holdfast.model.records import (
    FOREVER,
    KEPT_LINES,
    LONGEST,
    RETENTION_SECONDS,
    InboxEntry,
    InvocationRecord,
    RunState,
    Terms,
)
from holdfast.model.state_writes import CANCEL_ENTRY, MAX_INBOX_BYTES, MAX_INBOX_ENTRIES, pushed, without_entries
from holdfast.model.status import FINAL, Status
from holdfast.store.contract import Ability, Filter, Order, Store
from holdfast.testing.conformance_payloads import digest_of, large, put, there
from holdfast.testing.samples import (
    CANCELLATION,
    ERROR,
    ODD_NAMES,
    ODD_TEXTS,
    REPLY_TO,
    RUN,
    START,
    TASK,
    Stage,
    delivery,
    ids,
    ids_of,
    in_status,
    invocation,
    owned,
    page,
    pushing,
    suspended,
    the,
    wish,
)

A = InvocationId("a")
OVER = START + RETENTION_SECONDS + 60


async def log_of(store: Store, run: str = "a", *, app: str = "shop", **asked: Any) -> list[Page]:
    return list(await store.read_log(app, InvocationId(run), **({"limit": 10_000} | asked)))


async def written(store: Store, pages: Sequence[Page]) -> None:
    """Append pages, one after another."""
    for one in pages:
        assert list(await store.append([one])) == [APPENDED]


def updating(record: InvocationRecord, run: RunState, **fields: Any) -> RunUpdate:
    """Make an owner's write of the state of its run."""
    seen = record.run.pushed if record.run is not None else 0
    given: dict[str, Any] = {"epoch": record.epoch, "actor": record.owner, "inbox_seen": seen} | fields
    return RunUpdate(app=record.app, id=record.id, run=run, **given)


def inbox_of(record: InvocationRecord) -> list[str]:
    assert record.run is not None
    return [entry.id for entry in record.run.inbox]


async def end_run(store: Store, id: str, *, at: float = START, **fields: Any) -> None:
    """Insert a run that has a log and ended at this time."""
    record = await owned(store, id, run=RUN, **fields)
    await written(store, [page(1, 3, run=id), page(4, run=id), page(1, run=id, generation=3, operation="third")])
    assert list(await store.apply([changes.completed(record, result=b"r", operation=f"end {id}", at=at)])) == [APPLIED]


class RunConformance:
    """See the module."""

    # --- appending to a log

    def test_a_page_comes_back_as_it_was_appended(self, stage: Stage) -> None:
        odd = [
            page(1, 3, events=bytes(range(256)) * 4, payloads=("d" * 64, "e" * 64)),
            page(4, events=b"", epoch=7, at=START + 0.125),
            page(5, 1004, operation="$set 日本 😀"),
        ]

        async def write(store: Store) -> None:
            await written(store, odd)

        async def read(store: Store) -> None:
            assert await log_of(store) == odd

        stage.play(write, read, needs=Ability.DURABLE)

    def test_logs_of_runs_apps_and_generations_are_apart(self, stage: Stage) -> None:
        pages = [
            page(1),
            page(1, run="b"),
            page(1, run="aa"),
            page(1, app="other"),
            page(1, generation=1),
            page(1, generation=12),
        ]

        async def scenario(store: Store) -> None:
            assert list(await store.append(pages)) == [APPENDED] * len(pages)
            assert await log_of(store) == [pages[0]]
            assert await log_of(store, "b") == [pages[1]]
            assert await log_of(store, "aa") == [pages[2]]
            assert await log_of(store, app="other") == [pages[3]]
            assert await log_of(store, generation=1) == [pages[4]]
            assert await log_of(store, generation=12) == [pages[5]]
            assert await log_of(store, "nobody") == []
            assert await log_of(store, generation=2) == []

        stage.play(scenario)

    def test_runs_and_apps_may_have_any_name(self, stage: Stage) -> None:
        names = [name for name in ODD_NAMES if "|" not in name]

        async def scenario(store: Store) -> None:
            pages = [page(1, run=name, app=app) for name in names for app in ("shop", "日本:😀")]
            assert list(await store.append(pages)) == [APPENDED] * len(pages)
            for one in pages:
                assert await log_of(store, one.run, app=one.app) == [one]

        stage.play(scenario)

    def test_an_append_repeated_is_recognised_by_its_operation(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await written(store, [page(1), page(2, 3), page(4)])
            for again in (page(4), page(2, 3), page(1)):
                assert list(await store.append([again])) == [APPENDED]
            await written(store, [page(5, epoch=2, operation="takeover")])
            assert list(await store.append([page(4)])) == [APPENDED], "it was stored before the takeover"
            assert [one.first for one in await log_of(store)] == [1, 2, 4, 5]

        stage.play(scenario)

    def test_a_writer_that_missed_pages_gets_them(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            pages = [page(1), page(2, 3), page(4)]
            await written(store, pages)
            mine = page(2, operation="mine")
            assert list(await store.append([mine])) == [Behind(tuple(pages[1:]))]
            assert list(await store.append([replace(mine, epoch=2)])) == [Behind(tuple(pages[1:]))]
            assert await log_of(store) == pages
            await written(store, [page(5, operation="mine, behind them")])

        stage.play(scenario)

    def test_a_writer_of_an_earlier_epoch_is_fenced(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await written(store, [page(1), page(2, epoch=3, operation="takeover")])
            assert list(await store.append([page(2, operation="late")])) == [Fenced(3)]
            assert list(await store.append([page(2, 9, epoch=2, operation="late")])) == [Fenced(3)]
            await written(store, [page(3, epoch=3), page(4, epoch=5, operation="takeover")])
            assert list(await store.append([page(2, operation="late")])) == [Fenced(5)]
            assert list(await store.append([page(3, epoch=4, operation="late")])) == [Fenced(5)]
            assert [one.epoch for one in await log_of(store)] == [1, 3, 3, 5]

        stage.play(scenario)

    def test_in_a_batch_each_page_has_its_own_verdict(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            assert list(await store.append([])) == []
            await written(store, [page(1, run="behind"), page(1, run="again"), page(1, run="fenced", epoch=9)])
            batch = [
                page(1, run="fresh"),
                page(1, run="behind", operation="x"),
                page(1, run="again"),
                page(1, run="fenced", operation="x"),
                page(2, run="again"),
            ]
            behind = Behind((page(1, run="behind"),))
            assert list(await store.append(batch)) == [APPENDED, behind, APPENDED, Fenced(9), APPENDED]
            assert len(await log_of(store, "again")) == 2

        stage.play(scenario)

    def test_of_two_writers_at_once_one_wins_each_position_and_positions_are_dense(self, stage: Stage) -> None:
        async def writer(store: Store, name: str) -> list[int]:
            """Append ten pages behind what it knows, as an owner does."""
            tail, mine = 0, list[int]()
            while len(mine) < 10:
                one = page(tail + 1, tail + 1 + len(mine) % 3, operation=f"{name} {len(mine)}", epoch=1)
                (verdict,) = await store.append([one])
                if isinstance(verdict, Behind):
                    tail = verdict.pages[-1].last
                else:
                    assert verdict == APPENDED
                    mine.append(one.first)
                    tail = one.last
            return mine

        async def scenario(store: Store) -> None:
            won = await asyncio.gather(*[writer(store, name) for name in ("w1", "w2", "w3")])
            log = await log_of(store)
            assert sorted(first for each in won for first in each) == [one.first for one in log]
            assert [one.first for one in log] == [1, *(one.last + 1 for one in log[:-1])]

        stage.play(scenario)

    def test_a_writer_far_behind_gets_the_first_pages(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            pages = [page(number) for number in range(1, MAX_BEHIND + 11)]
            await asyncio.gather(*[store.append([one]) for one in pages])
            (verdict,) = await store.append([page(1, operation="x")])
            assert isinstance(verdict, Behind)
            assert list(verdict.pages) == pages[:MAX_BEHIND]

        stage.play(scenario)

    # --- reading and removing a log

    def test_a_log_is_read_from_a_position_on_and_from_its_end(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            pages = [page(first, first + 2) for first in range(1, 60, 3)]
            await written(store, pages)
            assert await log_of(store, after=0) == pages
            assert await log_of(store, after=3) == pages[1:]
            assert await log_of(store, after=4) == pages[2:], "a page that begins at 4 does not begin after 4"
            assert await log_of(store, after=57) == pages[19:]
            assert await log_of(store, after=1000) == []
            assert await log_of(store, limit=3) == pages[:3]
            assert await log_of(store, limit=0) == []
            assert await log_of(store, after=9, limit=2) == pages[3:5]
            assert await log_of(store, latest=True) == pages[::-1]
            assert await log_of(store, latest=True, limit=2) == pages[:-3:-1]
            assert await log_of(store, latest=True, limit=0) == []
            assert await log_of(store, latest=True, after=54) == pages[:-3:-1]

        stage.play(scenario)

    def test_positions_are_ordered_as_numbers(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            pages = [page(1, 8), page(9), page(10, 98), page(99), page(100, 49_999), page(50_000, 1_000_000)]
            await written(store, pages)
            await written(store, [page(1_000_001)])
            assert (await log_of(store))[:-1] == pages
            assert (await log_of(store, latest=True, limit=1))[0].first == 1_000_001
            assert (await log_of(store, after=99, limit=1))[0].first == 100

        stage.play(scenario)

    def test_a_log_with_a_gap_cannot_be_read(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.append([page(1, 2), page(5), page(6)])
            await store.append([page(2, run="late")])
            for asked in ({}, {"latest": True}, {"limit": 2}):
                with pytest.raises(CorruptRecord, match=r"page 'a#5' cannot be read: the page before it ends at 2"):
                    await log_of(store, **asked)
            with pytest.raises(CorruptRecord, match=r"page 'late#2' cannot be read"):
                await log_of(store, "late")
            assert [one.first for one in await log_of(store, after=2)] == [5, 6]
            assert [one.first for one in await log_of(store, limit=1)] == [1]

        stage.play(scenario)

    def test_generations_before_one_are_removed(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            pages = [page(first, generation=generation) for generation in (0, 1, 2, 10) for first in (1, 2)]
            for one in (*pages, page(1, run="b"), page(1, app="other"), page(1, run="aa")):
                await written(store, [one])
            assert await store.remove_log("shop", A, before=0) == 0
            assert await store.remove_log("shop", A, before=2) == 4
            assert await store.remove_log("shop", A, before=2) == 0
            assert [len(await log_of(store, generation=number)) for number in (0, 1, 2, 10)] == [0, 0, 2, 2]
            assert await store.remove_log("shop", A, before=10) == 2
            assert [len(await log_of(store, "b")), len(await log_of(store, app="other"))] == [1, 1]
            assert len(await log_of(store, "aa")) == 1
            assert await store.remove_log("shop", InvocationId("nobody"), before=5) == 0

        stage.play(scenario)

    # --- what an invocation has besides

    @pytest.mark.parametrize("text", ODD_TEXTS[:-1])
    def test_state_inbox_and_reply_address_come_back(self, stage: Stage, text: str) -> None:
        entry = InboxEntry(id=text, kind="child", at=START, call=text, generation=3, body=bytes(range(256)))
        run = replace(RUN, inbox=(entry, InboxEntry(id="plain", kind="wake", at=START)), pushed=9, suspended_in=2)
        reply_to = replace(REPLY_TO, call=text)

        async def write(store: Store) -> None:
            await store.insert([invocation("a", run=run, reply_to=reply_to), invocation("b", run=RunState())])
            assert (await the(store)).run == run

        async def read(store: Store) -> None:
            record = await the(store)
            assert (record.run, record.reply_to, record.wake_at) == (run, reply_to, None)
            assert (await the(store, "b")).run == RunState()
            (claimed, _) = (await store.claim(wish())).records
            assert (claimed.run, claimed.reply_to) == (run, reply_to)

        stage.play(write, read, needs=Ability.DURABLE)

    # --- pushing

    @pytest.mark.parametrize(
        "status",
        [
            *(Status.REGISTERED, Status.CONCURRENCY_CONTROLLED, Status.PENDING, Status.RUNNING, Status.CANCELLING),
            *(Status.PARKED, Status.KILLED, Status.RETRY),
        ],
    )
    def test_a_push_adds_to_the_inbox_and_changes_nothing_else(self, stage: Stage, status: Status) -> None:
        async def scenario(store: Store) -> None:
            before = await in_status(store, status, run=RUN)
            push = pushing("a", "e1", body=b"\x00\xff", call="child#1", generation=2)
            assert list(await store.apply([push])) == [APPLIED]
            after = await the(store)
            assert after == pushed(push, before)
            run = replace(RUN, inbox=(push.entry,), pushed=1)
            assert after == replace(before, run=run)

        stage.play(scenario)

    def test_a_push_wakes_a_suspended_run_in_the_same_write(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            before = await in_status(store, Status.SUSPENDED, run=RUN)
            assert (before.status, before.wake_at, before.owner) == (Status.SUSPENDED, START + 60, None)
            assert await store.lanes("shop") == []
            push = pushing("a", "e1", why="a child has ended")
            assert list(await store.apply([push])) == [APPLIED]
            after = await the(store)
            assert after == pushed(push, before)
            assert (after.status, after.wake_at, after.due_at) == (Status.REROUTED, None, START + 2)
            assert (after.history[-1].operation, after.reason) == (push.operation, "a child has ended")
            assert ids_of(await store.find("shop", Filter(), 10, order=Order.WAKE_AT)) == []
            (claimed,) = (await store.claim(wish("next", at=START + 2))).records
            assert (claimed.id, claimed.epoch) == ("a", 2)
            assert inbox_of(claimed) == ["e1"]
            assert claimed.run is not None
            assert claimed.run.suspended_in == 1

        stage.play(scenario)

    def test_a_push_repeated_is_recognised_by_its_entry(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await in_status(store, Status.SUSPENDED, run=RUN)
            push = pushing("a", "e1", body=b"first")
            assert list(await store.apply([push])) == [APPLIED]
            after = await the(store)
            other = pushing("a", "e1", body=b"other", operation="another")
            assert list(await store.apply([push])) == [APPLIED_AGAIN]
            assert list(await store.apply([other])) == [APPLIED_AGAIN]
            assert await the(store) == after

        stage.play(scenario)

    def test_pushes_of_one_batch_are_taken_in_order(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for id in "ab":
                await in_status(store, Status.SUSPENDED, id, run=RUN)
            ended = await owned(store, "c")
            batch: list[Write] = [
                *[pushing(id, entry) for entry in ("e1", "e2", "e3") for id in "ab"],
                changes.completed(ended, result=b"r", operation="end", at=START),
                *delivery("c"),
            ]
            verdicts = await store.apply(batch)
            assert list(verdicts)[:-1] == [APPLIED] * 7
            for id in "ab":
                assert inbox_of(await the(store, id)) == ["e1", "e2", "e3"]
                assert (await the(store, id)).version == 5, "it is woken once"

        stage.play(scenario)

    def test_pushes_at_once_are_all_there(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await in_status(store, Status.SUSPENDED, run=RUN)
            pushes = [pushing("a", f"e{number}") for number in range(150)]
            verdicts = await asyncio.gather(*[store.apply([push]) for push in pushes])
            assert [list(each) for each in verdicts] == [[APPLIED]] * len(pushes)
            record = await the(store)
            assert sorted(inbox_of(record)) == sorted(push.entry.id for push in pushes)
            assert record.run is not None
            assert (record.run.pushed, record.version) == (len(pushes), 5)

        stage.play(scenario)

    def test_a_full_inbox_takes_a_cancel_and_nothing_else(self, stage: Stage) -> None:
        entries = tuple(InboxEntry(id=f"e{n}", kind="hook", at=START) for n in range(MAX_INBOX_ENTRIES - 1))

        async def scenario(store: Store) -> None:
            run = replace(RUN, inbox=entries, pushed=len(entries))
            await store.insert([invocation("a", run=run)])
            assert list(await store.apply([pushing("a", "last")])) == [APPLIED]
            full = await the(store)
            assert list(await store.apply([pushing("a", "too much")])) == [FULL]
            assert list(await store.apply([pushing("a", "last")])) == [APPLIED_AGAIN]
            assert await the(store) == full
            cancel = pushing("a", CANCEL_ENTRY, kind=CANCEL_ENTRY, cancellation=CANCELLATION)
            assert list(await store.apply([cancel])) == [APPLIED]
            record = await the(store)
            assert (len(inbox_of(record)), record.cancellation) == (MAX_INBOX_ENTRIES + 1, CANCELLATION)

        stage.play(scenario)

    def test_an_inbox_of_a_megabyte_is_full(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("a", run=RUN)])
            half = b"x" * (MAX_INBOX_BYTES // 2 - 1000)
            assert list(await store.apply([pushing("a", "e1", body=half), pushing("a", "e2", body=half)])) == [
                APPLIED,
                APPLIED,
            ]
            assert list(await store.apply([pushing("a", "e3", body=b"x" * 2000)])) == [FULL]
            cancel = pushing("a", CANCEL_ENTRY, kind=CANCEL_ENTRY, body=b"x" * 2000, cancellation=CANCELLATION)
            assert list(await store.apply([cancel, pushing("a", "small")])) == [APPLIED, FULL]
            await store.insert([invocation("b", run=RUN)])
            large = pushing("b", "e1", body=b"x" * (MAX_INBOX_BYTES + 1))
            assert list(await store.apply([large, pushing("b", "e2")])) == [APPLIED, FULL]

        stage.play(scenario)

    def test_what_has_ended_or_is_no_run_takes_no_push(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await end_run(store, "ended")
            plain = await in_status(store, Status.RUNNING, "plain")
            ended = await the(store, "ended")
            batch = [pushing("ended"), pushing("plain"), pushing("nobody"), pushing("ended", app="other")]
            lost = [Lost(Status.SUCCESS, None, 1), Lost(Status.RUNNING, "runner/1", 1)]
            assert list(await store.apply(batch)) == [*lost, MISSING, MISSING]
            assert await the(store, "ended") == ended
            assert await the(store, "plain") == plain

        stage.play(scenario)

    def test_a_long_history_is_cut_by_a_push_as_by_any_change(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("a", run=RUN)])
            for number in range((LONGEST + 70) // 4):
                (record,) = (await store.claim(wish(f"claim {number}", at=START + 9))).records
                sleeps = suspended(record, operation=f"suspend {number}")
                push = pushing("a", f"e{number}")
                assert list(await store.apply([sleeps, push])) == [APPLIED, APPLIED]
                before = apply_to(sleeps, record)
                after = await the(store)
                assert after == pushed(push, before)
            assert len(after.history) < LONGEST
            assert after.version > LONGEST + KEPT_LINES // 8

        stage.play(scenario)

    # --- suspending and waking

    def test_a_suspension_is_refused_if_the_inbox_has_moved(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store, run=RUN)
            assert record.run is not None
            await store.apply([pushing("a", "e1")])
            lost = Lost(Status.RUNNING, "runner/1", 1)
            over = run_changes.handed_over(record, record.run, operation="over", at=START, why="")
            assert list(await store.apply([suspended(record)])) == [lost]
            assert list(await store.apply([over, replace(suspended(record), operation="again", version=None)])) == [
                lost,
                lost,
            ]
            assert (await the(store)).status is Status.RUNNING
            current = await the(store)
            assert current.run is not None
            drained = without_entries(replace(current.run, tail=12), {"e1"})
            sleeps = suspended(replace(current, run=drained), operation="with it")
            assert list(await store.apply([sleeps])) == [APPLIED]
            assert await the(store) == apply_to(sleeps, current)
            assert (await the(store)).run == replace(RUN, tail=12, pushed=1, suspended_in=1)
            assert list(await store.apply([sleeps])) == [APPLIED_AGAIN]

        stage.play(scenario)

    def test_a_push_at_the_moment_of_a_suspension_is_never_stuck(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for number in range(10):
                id = f"r{number}"
                record = await owned(store, id, run=RUN)
                sleeps = suspended(record, wake_at=None, operation=f"suspend {id}")
                (slept,), (told,) = await asyncio.gather(store.apply([sleeps]), store.apply([pushing(id)]))
                assert told == APPLIED
                after = await the(store, id)
                assert inbox_of(after) == ["e1"]
                assert after.status is (Status.REROUTED if slept == APPLIED else Status.RUNNING)

        stage.play(scenario)

    def test_a_run_handed_over_is_in_the_queue_at_once(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store, run=RUN, priority=3)
            assert record.run is not None
            over = run_changes.handed_over(record, record.run, operation="over", at=START + 1, why="the worker drains")
            assert list(await store.apply([over])) == [APPLIED]
            after = await the(store)
            assert after == apply_to(over, record)
            assert [line.status for line in after.history[-2:]] == [Status.SUSPENDED, Status.REROUTED]
            (heir,) = (await store.claim(wish("next", owner="runner/2", at=START + 1))).records
            assert (heir.epoch, heir.run) == (2, replace(RUN, suspended_in=1))

        stage.play(scenario)

    def test_runs_that_sleep_come_by_their_time(self, stage: Stage) -> None:
        async def found(store: Store, limit: int = 10, **where: Any) -> list[str | None]:
            return ids_of(await store.find("shop", Filter(**where), limit, order=Order.WAKE_AT, set_aside=True))

        async def scenario(store: Store) -> None:
            for id, wake_at in (("c", 5.0), ("b", 9.0), ("a", 9.0), ("d", None), ("e", 1.0)):
                record = await owned(store, id, run=RUN, task=TASK)
                moment = None if wake_at is None else START + wake_at
                await store.apply([suspended(record, wake_at=moment, operation=f"suspend {id}")])
            await owned(store, "runs", run=RUN)
            other = invocation("x", app="other", run=RUN)
            await store.insert([other])
            assert await found(store) == ["e", "c", "a", "b"]
            assert await found(store, 2) == ["e", "c"]
            assert await found(store, 0) == []
            assert await found(store, statuses=frozenset({Status.SUSPENDED})) == ["e", "c", "a", "b"]
            assert await found(store, statuses=frozenset({Status.RUNNING})) == []
            assert await found(store, tasks=frozenset({"another"})) == []
            (first,) = await store.find("shop", Filter(), 1, order=Order.WAKE_AT)
            assert first == await the(store, "e")
            wakes = changes.awakened(first, operation="wake", at=START + 1, why="its time has come")
            assert list(await store.apply([wakes])) == [APPLIED]
            assert await found(store) == ["c", "a", "b"]
            assert (await the(store, "e")).wake_at is None

        stage.play(scenario)

    # --- an owner writes the state of its run

    def test_an_owner_replaces_the_state_of_its_run(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store, run=RUN)
            await store.apply([pushing("a", "e1"), pushing("a", "e2")])
            record = await the(store)
            assert record.run is not None
            fresh = replace(without_entries(record.run, {"e1"}), tail=40, generation=2)
            update = updating(record, fresh)
            assert list(await store.apply([update])) == [APPLIED]
            assert await the(store) == replace(record, run=fresh), "no edge is walked, and no line is written"
            assert list(await store.apply([update])) == [APPLIED_AGAIN]

        stage.play(scenario)

    def test_entries_that_were_pushed_since_stay(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await owned(store, run=RUN)
            await store.apply([pushing("a", "e1"), pushing("a", "e2")])
            seen = await the(store)
            await store.apply([pushing("a", "e3")])
            assert seen.run is not None
            update = updating(seen, replace(without_entries(seen.run, {"e1"}), tail=40))
            assert list(await store.apply([update])) == [APPLIED]
            after = await the(store)
            assert after.run is not None
            assert (inbox_of(after), after.run.pushed, after.run.tail) == (["e2", "e3"], 3, 40)
            assert list(await store.apply([update])) == [APPLIED_AGAIN]

        stage.play(scenario)

    def test_nobody_else_does(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store, run=RUN)
            fresh = replace(RUN, tail=99)
            lost = Lost(Status.RUNNING, "runner/1", 1)
            for wrong in ({"epoch": 2}, {"actor": "runner/2"}, {"actor": "runner"}, {"inbox_seen": 1}):
                assert list(await store.apply([updating(record, fresh, **wrong)])) == [lost]
            plain = await owned(store, "plain")
            nobody = replace(updating(plain, fresh), id=InvocationId("nobody"))
            assert list(await store.apply([updating(plain, fresh), nobody])) == [lost, MISSING]
            await end_run(store, "ended")
            ended = replace(await the(store, "ended"), owner="runner/1")
            assert list(await store.apply([updating(ended, fresh)])) == [Lost(Status.SUCCESS, None, 1)]

        stage.play(scenario)

    # --- cancelling a run

    def test_a_run_without_an_owner_gets_the_cancel_by_push_and_keeps_it_over_a_crash(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            asleep = await in_status(store, Status.SUSPENDED, run=RUN)
            cancel = cancelling.cancel(asleep, CANCELLATION, operation="cancel")
            assert isinstance(cancel, Push)
            assert list(await store.apply([cancel])) == [APPLIED]
            woken = await the(store)
            assert (woken.status, woken.cancellation, inbox_of(woken)) == (Status.REROUTED, CANCELLATION, ["cancel"])
            (heir,) = (await store.claim(wish("next", at=START + 9))).records
            asks = cancelling.asked_to_compensate(heir, operation="ask", at=START + 9)
            assert list(await store.apply([asks])) == [APPLIED]
            ending = await the(store)
            assert (ending.status, ending.cancellation) == (Status.CANCELLING, CANCELLATION)
            taken = changes.recovered(ending, by="runner", operation="recover", at=START + 10, why="dead")
            assert list(await store.apply([taken])) == [APPLIED]
            again = await the(store)
            assert (again.status, again.cancellation) == (Status.REROUTED, CANCELLATION)

        stage.play(scenario)

    @pytest.mark.parametrize("status", [Status.PENDING, Status.RUNNING, Status.CANCELLING, Status.PARKED])
    def test_the_push_of_a_cancel_is_refused_once_a_run_has_an_owner(self, stage: Stage, status: Status) -> None:
        """The owner has read the run before, and would not see it: the canceller has to ask it."""

        async def scenario(store: Store) -> None:
            before = await in_status(store, status, run=RUN)
            cancel = pushing("a", CANCEL_ENTRY, kind=CANCEL_ENTRY, cancellation=CANCELLATION)
            assert list(await store.apply([cancel])) == [Lost(status, before.owner, before.epoch)]
            assert pushed(cancel, before) == Lost(status, before.owner, before.epoch)
            assert await the(store) == before

        stage.play(scenario)

    # --- children

    def test_an_end_of_a_run_that_is_not_its_bodys_names_its_children_in_the_outbox(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            done, failed, killed = [await owned(store, id, run=RUN) for id in ("done", "failed", "killed")]
            waiting = await in_status(store, Status.REGISTERED, "never", run=RUN)
            cancel = cancelling.cancel(waiting, CANCELLATION, operation="cancel")
            assert isinstance(cancel, Change)
            ends = [
                changes.completed(done, result=b"r", operation="end", at=START),
                changes.failed(failed, error=ERROR, operation="end", at=START),
                changes.recovered(killed, by="runner", operation="end", at=START, why="dead", error=ERROR),
                cancel,
            ]
            assert list(await store.apply(ends)) == [APPLIED] * 4
            found = await store.find("shop", Filter(), 10, order=Order.OUTBOX)
            assert {record.id: record.outbox for record in found} == {
                "failed": (CHILDREN, HOOKS),
                "killed": (CHILDREN, HOOKS),
            }

        stage.play(scenario)

    def test_every_end_of_a_child_names_its_parent_in_the_outbox(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            limited: dict[str, Any] = {"limit_key": "k", "reply_to": REPLY_TO}
            await store.insert([invocation("first", limit_key="k")])
            limits = {TASK: Limit(1, False)}
            await store.claim(wish("first", ids=("first",), limits=limits))
            await store.insert([invocation("refused", **limited)])
            assert (await store.claim(wish("second", limits=limits))).refused == ("refused",)
            done, failed, killed = [await owned(store, id, reply_to=REPLY_TO) for id in ("done", "failed", "killed")]
            waiting = await in_status(store, Status.REGISTERED, "cancelled", reply_to=REPLY_TO)
            cancel = cancelling.cancel(waiting, CANCELLATION, operation="cancel")
            assert cancel is not None
            ends = [
                changes.completed(done, result=b"r", operation="end", at=START),
                changes.failed(failed, error=ERROR, operation="end", at=START),
                changes.recovered(killed, by="runner", operation="end", at=START, why="dead", error=ERROR),
                cancel,
            ]
            assert list(await store.apply(ends)) == [APPLIED] * 4
            found = await store.find("shop", Filter(), 10, order=Order.OUTBOX)
            assert {record.id for record in found} == {"refused", "done", "failed", "killed", "cancelled"}
            assert {record.outbox for record in found} == {(PARENT,)}
            assert {record.status for record in found} == FINAL
            assert await store.remove_expired("shop", OVER, 10) == 0
            await store.apply(delivery("done", "refused"))
            assert await store.remove_expired("shop", OVER, 10) == 2

        stage.play(scenario)

    # --- removal

    def test_the_log_of_a_run_is_removed_with_it(self, stage: Stage) -> None:
        async def logs(store: Store) -> list[int]:
            return [len(await log_of(store, id)) + len(await log_of(store, id, generation=3)) for id in "abcd"]

        async def scenario(store: Store) -> None:
            await end_run(store, "a")
            await end_run(store, "b", at=START + 1)
            await end_run(store, "c", terms=Terms(retention={"success": None}))
            await owned(store, "d", run=RUN)
            await written(store, [page(1, run="d")])
            assert await logs(store) == [3, 3, 3, 1]
            assert await store.remove_ended("shop", ids("a", "d")) == 1
            assert await logs(store) == [0, 3, 3, 1]
            assert await store.remove_expired("shop", START + 5, 10) == 0
            assert await store.remove_expired("shop", OVER, 10) == 1
            assert await logs(store) == [0, 0, 3, 1]
            assert await store.remove_expired("shop", FOREVER - 1, 10) == 0
            assert ids_of(await store.find("shop", Filter(), 10)) == ["d", "c"]

        stage.play(scenario)

    def test_runs_and_others_are_removed_longest_over_first(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for number in range(6):
                record = await owned(store, f"{number}", run=RUN if number % 2 else None)
                end = changes.completed(record, result=b"r", operation=f"end {number}", at=START + number)
                await store.apply([end])
            await end_run(store, "other", app="shop", at=START + 9)
            removed = []
            for limit in (1, 1, 3, 10):
                before = set(ids_of(await store.find("shop", Filter(), 10)))
                assert await store.remove_expired("shop", OVER, limit) == min(limit, len(before))
                removed.append(sorted(map(str, before - set(ids_of(await store.find("shop", Filter(), 10))))))
            assert removed == [["0"], ["1"], ["2", "3", "4"], ["5", "other"]]

        stage.play(scenario)

    def test_a_run_with_an_outbox_is_kept_with_its_log(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await end_run(store, "a", reply_to=REPLY_TO)
            assert await store.remove_expired("shop", OVER, 10) == 0
            assert await store.remove_ended("shop", ids("a")) == 0
            assert len(await log_of(store)) == 2
            await store.apply(delivery("a"))
            assert len(await log_of(store)) == 2
            assert await store.remove_expired("shop", OVER, 10) == 1
            assert await log_of(store) == []

        stage.play(scenario)

    # --- payloads

    def test_payloads_of_logs_and_inboxes_are_kept_until_the_run_is_removed(self, stage: Stage) -> None:
        async def collect(store: Store) -> list[int]:
            stage.clock.advance(10)
            await store.collect_payloads("shop", store.now(), 100)
            return await there(store, range(1, 7))

        async def scenario(store: Store) -> None:
            await put(store, *range(1, 7))
            record = await owned(store, run=RUN, arguments=large(1).data)
            await written(store, [page(1, payloads=(digest_of(2), digest_of(3))), page(2)])
            assert list(await store.apply([pushing("a", "e1", body=large(4).data)])) == [APPLIED]
            refused = page(2, operation="x", payloads=(digest_of(5),))
            assert isinstance((await store.append([refused]))[0], Behind)
            assert await collect(store) == [1, 2, 3, 4]
            await store.apply([changes.completed(record, result=large(4).data, operation="end", at=START)])
            assert await collect(store) == [1, 2, 3, 4]
            assert await store.remove_ended("shop", ids("a")) == 1
            assert await collect(store) == []

        stage.play(scenario)

    def test_payloads_of_removed_generations_are_collected(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await put(store, *range(1, 6))
            record = await owned(store, run=RUN, arguments=large(1).data)
            await store.apply([pushing("a", "e1", body=large(2).data), pushing("a", "e2", body=large(5).data)])
            await written(store, [page(1, payloads=(digest_of(3), digest_of(4)))])
            await written(store, [page(1, generation=1, payloads=(digest_of(4),))])
            record = await the(store)
            assert record.run is not None
            update = updating(record, without_entries(record.run, {"e2"}))
            assert list(await store.apply([update])) == [APPLIED]
            assert await store.remove_log("shop", A, before=1) == 1
            stage.clock.advance(10)
            await store.collect_payloads("shop", store.now(), 100)
            assert await there(store, range(1, 6)) == [1, 2, 4]

        stage.play(scenario)
