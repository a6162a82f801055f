"""The part of the conformance suite about ended invocations: retention, listing, removal."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.ids import InvocationId
from holdfast.model import changes
from holdfast.model.changes import MISSING, Applied, Lost
from holdfast.model.keeping import Kept
from holdfast.model.limits import Limit
from holdfast.model.records import FOREVER, RETENTION_SECONDS, SHORTEST_SECONDS, InvocationRecord, RunState, Terms
from holdfast.model.status import FINAL, Status
from holdfast.store.contract import Filter, Order, Store
from holdfast.testing.conformance_payloads import digest_of, large, put
from holdfast.testing.samples import (
    ERROR,
    START,
    TASK,
    Stage,
    delivery,
    ids,
    ids_of,
    in_status,
    invocation,
    page,
    raw_change,
    the,
    wish,
)

DAY = 86_400.0
_BY_OUTCOME = Terms(retention={"success": DAY, "failed": None})


async def end(store: Store, id: str, *, at: float = START, fails: bool = False, **fields: Any) -> InvocationRecord:
    """Insert an invocation that ended at this time."""
    await store.insert([invocation(id, **fields)])
    record = await the(store, id)
    (claimed,) = (await store.claim(wish(f"claim {id}", ids=(id,), lanes=(record.lane,), at=START + DAY))).records
    how = {"operation": f"end {id}", "at": at}
    if fails:
        await store.apply([changes.failed(claimed, error=ERROR, **how)])  # type: ignore[arg-type]
    else:
        await store.apply([changes.completed(claimed, result=b"r", **how)])  # type: ignore[arg-type]
    return await the(store, id)


def kept(id: str, until: float) -> Kept:
    return Kept(app="shop", id=InvocationId(id), until=until)


class ArchiveConformance:
    @pytest.mark.parametrize(
        ("fields", "fails", "kept_seconds"),
        [
            ({}, False, RETENTION_SECONDS),
            ({"terms": _BY_OUTCOME}, False, DAY),
            ({"terms": Terms(retention={"failed": DAY})}, False, RETENTION_SECONDS),
            ({"terms": Terms(retention={"success": 1.0})}, False, SHORTEST_SECONDS),
            ({"terms": Terms(retention={"success": DAY}, key_seconds=3 * DAY), "key": "k"}, False, 3 * DAY),
            ({"terms": Terms(retention={"success": DAY}, key_seconds=3 * DAY)}, False, DAY),
            ({"terms": Terms(retention={"success": DAY}, key_until=START + 2 * DAY), "key": "k"}, False, 2 * DAY),
            ({"terms": _BY_OUTCOME}, True, FOREVER - START),
        ],
    )
    def test_with_the_end_it_is_said_how_long_it_is_kept(
        self, stage: Stage, fields: dict[str, Any], fails: bool, kept_seconds: float
    ) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("live", **(fields | {"key": None}))])
            assert (await the(store, "live")).retain_until is None
            ended = await end(store, "a", fails=fails, **fields)
            assert ended.retain_until == START + kept_seconds

        stage.play(scenario)

    @pytest.mark.parametrize("version", [None, 3], ids=["whatever its version", "of that version"])
    def test_every_way_to_end_says_so(self, stage: Stage, version: int | None) -> None:
        async def scenario(store: Store) -> None:
            for status in sorted(FINAL - {Status.CONCURRENCY_CONTROLLED_FINAL}):
                await store.insert([invocation(status)])
                (record,) = (await store.claim(wish(f"claim {status}", ids=(status,)))).records
                path = (Status.CANCELLING, status) if status is Status.CANCELLED else (status,)
                change = raw_change(record, *path, operation=f"end {status}", epoch=1, version=version, at=START)
                await store.apply([change])
                assert (await the(store, status)).retain_until == START + RETENTION_SECONDS

        stage.play(scenario)

    def test_those_that_a_limit_refuses_are_kept_as_agreed_with_each(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            limits, refused = {TASK: Limit(1, waits=False)}, "concurrency_controlled_final"
            await store.insert([invocation("0", limit_key="k")])
            await store.claim(wish("hold", ids=("0",), limits=limits))
            terms = [
                None,
                Terms(retention={refused: DAY}),
                Terms(retention={refused: None}),
                Terms(key_seconds=9 * DAY),
            ]
            for number, each in enumerate(terms):
                more: dict[str, Any] = {"key": "k"} if number == 3 else {}
                more |= {} if each is None else {"terms": each}
                await store.insert([invocation(f"r{number}", limit_key="k", dedup_key=f"t{number}", **more)])
            await store.claim(wish("refuse", limits=limits))
            ends = await store.get("shop", ids("r0", "r1", "r2", "r3"))
            assert {record.status for record in ends if record} == {Status.CONCURRENCY_CONTROLLED_FINAL}
            kept = [record.retain_until for record in ends if record]
            assert kept == [START + RETENTION_SECONDS, START + DAY, FOREVER, START + 9 * DAY]

        stage.play(scenario)

    # --- another time than was agreed

    def test_an_ended_invocation_is_kept_until_another_time(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            short, long = await end(store, "short"), await end(store, "long")
            await store.insert([invocation("open")])
            writes = [kept("short", START + DAY), kept("long", FOREVER), kept("open", START), kept("none", START)]
            verdicts = await store.apply(writes)
            assert [isinstance(verdict, Applied) for verdict in verdicts] == [True, True, False, False]
            assert verdicts[2:] == [Lost(Status.REGISTERED, None, 0), MISSING]
            assert await the(store, "short") == replace(short, retain_until=START + DAY)
            assert await the(store, "long") == replace(long, retain_until=FOREVER)
            assert (await the(store, "open")).retain_until is None
            assert all(isinstance(verdict, Applied) for verdict in await store.apply(writes[:2]))
            assert await store.remove_expired("shop", START + DAY + 60, 10) == 1
            assert ids_of(await store.find("shop", Filter(), 10)) == ["open", "long"]
            await store.apply([kept("long", START + DAY)])
            assert await store.remove_expired("shop", START + DAY + 60, 10) == 1

        stage.play(scenario)

    def test_what_has_an_outbox_or_logs_stays_until_these_are_gone(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation("told"), invocation("run", run=RunState())])
            for record in (await store.claim(wish("op", limit=2))).records:
                change = changes.completed(record, result=b"r", operation=f"end {record.id}", at=START)
                await store.apply([replace(change, outbox=("t",)) if record.id == "told" else change])
            await store.append([page(1, run="run")])
            await store.apply([kept("told", START + DAY), kept("run", START + DAY)])
            assert await store.remove_expired("shop", START + 2 * DAY, 10) == 1
            assert ids_of(await store.find("shop", Filter(), 10)) == ["told"]
            assert list(await store.read_log("shop", ids("run")[0], limit=10)) == []
            await store.apply(delivery("told"))
            assert await store.remove_expired("shop", START + 2 * DAY, 10) == 1

        stage.play(scenario)

    # --- listing

    def test_the_archive_is_listed_by_the_time_of_the_end(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await end(store, "b", at=START + 3)
            await end(store, "a", at=START + 3)
            await end(store, "c", at=START + 1, fails=True)
            await end(store, "d", at=START + 9, task="shop:other")
            await store.insert([invocation("live"), invocation("e", app="another")])
            await in_status(store, Status.PARKED, "parked")

            async def ids(limit: int = 10, **where: Any) -> list[str | None]:
                return ids_of(await store.find("shop", Filter(**where), limit, order=Order.LATEST_END))

            assert await ids() == ["d", "b", "a", "c"]
            assert await ids(2) == ["d", "b"]
            assert await ids(0) == []
            assert await ids(before=(START + 3, "b")) == ["a", "c"]
            assert await ids(before=(START + 3, "a"), statuses=frozenset({Status.SUCCESS})) == []
            assert await ids(statuses=frozenset({Status.FAILED, Status.CANCELLED})) == ["c"]
            assert await ids(since=START + 3) == ["d", "b", "a"]
            assert await ids(since=START + 3, until=START + 9) == ["b", "a"]
            assert await ids(until=START + 3, before=(START + 9, "d")) == ["c"]
            assert await ids(since=START + 4, before=(START + 3, "b")) == []

        stage.play(scenario)

    def test_pages_have_each_once_although_many_ended_at_once(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for number in range(9):
                await end(store, f"{number}", at=START + number // 4, task=f"shop:{number % 2}")
            seen: list[str] = []
            before = None
            while page := await store.find("shop", Filter(before=before), 2, order=Order.LATEST_END):
                seen += [record.id for record in page]
                before = (page[-1].changed_at, page[-1].id)
            assert seen == [*"876543210"]

        stage.play(scenario)

    def test_what_repeats_an_ended_one_is_found(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await end(store, "a")
            await store.insert([invocation("b", rerun_of="a"), invocation("c"), invocation("d", rerun_of="a")])
            await store.insert([invocation("e", rerun_of="b"), invocation("f", rerun_of="a", app="another")])
            assert (await the(store, "b")).rerun_of == "a"
            assert ids_of(await store.find("shop", Filter(rerun_of="a"), 10)) == ["d", "b"]
            assert ids_of(await store.find("shop", Filter(rerun_of="a", before_id="d"), 10)) == ["b"]
            assert ids_of(await store.find("shop", Filter(rerun_of="c"), 10)) == []

        stage.play(scenario)

    # --- removing

    def test_what_need_not_be_kept_longer_is_removed_in_batches(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for number in range(5):
                await end(store, f"{number}", at=START - number)
            await end(store, "forever", terms=_BY_OUTCOME, fails=True)
            await end(store, "longer", terms=Terms(retention={"success": 30 * DAY}))
            await store.insert([invocation("live")])
            over = START + RETENTION_SECONDS
            assert await store.remove_expired("shop", over - 5, 10) == 0
            assert await store.remove_expired("another", over, 10) == 0
            assert await store.remove_expired("shop", over, 0) == 0
            assert await store.remove_expired("shop", over, 2) == 2
            assert set(ids_of(await store.find("shop", Filter(), 10))) == {*"012", "forever", "longer", "live"}
            assert [await store.remove_expired("shop", over, 2) for _ in range(3)] == [2, 1, 0]
            assert set(ids_of(await store.find("shop", Filter(), 10))) == {"forever", "longer", "live"}

        stage.play(scenario)

    def test_what_was_removed_leaves_neither_its_key_nor_its_payloads(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await put(store, 1, 2)
            await end(store, "a", key="order 7", arguments=large(1).data)
            await end(store, "b", arguments=large(2).data)
            assert list(await store.insert([invocation("c", key="order 7")])) == [False]
            assert await store.remove_expired("shop", START + RETENTION_SECONDS, 1) == 1
            assert await store.remove_ended("shop", ids("a", "b")) == 1
            assert list(await store.insert([invocation("c", key="order 7")])) == [True]
            await store.collect_payloads("shop", store.now() + 1, 10)
            assert [await store.get_payload("shop", digest_of(n)) for n in (1, 2)] == [None, None]

        stage.play(scenario)

    def test_only_what_has_ended_is_removed_by_its_id(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await end(store, "a")
            await store.insert([invocation("live"), invocation("a", app="another")])
            assert await store.remove_ended("shop", []) == 0
            assert await store.remove_ended("shop", ids("a", "live", "nobody")) == 1
            assert await store.remove_ended("shop", ids("a", "live")) == 0
            assert ids_of(await store.get("shop", ids("a", "live"))) == [None, "live"]
            assert ids_of(await store.get("another", ids("a"))) == ["a"]

        stage.play(scenario)
