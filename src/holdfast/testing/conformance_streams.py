"""The part of the conformance suite about streams: logs of several writers, found by position, removed with their
invocation.

Use `holdfast.testing.conformance.StoreConformance`, which includes it.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from holdfast.ids import InvocationId
from holdfast.model import changes
from holdfast.model.changes import APPLIED, APPLIED_AGAIN, MISSING, Lost, StreamMark
from holdfast.model.log import APPENDED, Behind, Fenced
from holdfast.model.records import FOREVER, InvocationRecord, Terms
from holdfast.model.status import Status
from holdfast.store.contract import Ability, Store
from holdfast.testing.conformance_payloads import digest_of, large, put, there
from holdfast.testing.conformance_runs import OVER, log_of, written
from holdfast.testing.samples import REPLY_TO, RUN, START, Stage, delivery, ids, owned, page, the

S = InvocationId("a/tokens")


def marking(record: InvocationRecord, **other: Any) -> StreamMark:
    """Make an owner's mark."""
    given: dict[str, Any] = {"epoch": record.epoch, "actor": record.owner} | other
    return StreamMark(app=record.app, id=record.id, **given)


async def streaming(store: Store, id: str, *, at: float = START, **fields: Any) -> None:
    """Insert an invocation that has two streams, and ended at this time. A task is marked before."""
    record = await owned(store, id, **fields)
    if record.run is None:
        assert list(await store.apply([marking(record)])) == [APPLIED]
        record = await the(store, id)
    await written(store, [page(1, 3, run=f"{id}/tokens"), page(4, run=f"{id}/tokens"), page(1, run=f"{id}/0")])
    end = changes.completed(record, result=b"r", operation=f"end {id}", at=at)
    assert list(await store.apply([end])) == [APPLIED]


class StreamConformance:
    """See the module."""

    # --- writers

    def test_each_writer_is_fenced_by_its_own_later_epochs_alone(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            pages = [
                page(1, run=S, epoch=7),
                page(2, run=S, epoch=1, writer="b"),
                page(3, run=S, epoch=1, writer="c"),
                page(4, run=S, epoch=2, writer="b"),
            ]
            await written(store, pages)
            assert await log_of(store, S) == pages
            (other,) = await store.append([page(2, run=S, epoch=1, writer="c", operation="c again")])
            assert other == Behind(tuple(pages[1:])), "another invocation's epoch does not fence it"
            (zombie,) = await store.append([page(2, run=S, epoch=1, writer="b", operation="b again")])
            assert zombie == Fenced(2)
            (own,) = await store.append([page(2, run=S, epoch=6, operation="own")])
            assert own == Behind(tuple(pages[1:])), "its own later epoch was before"
            (late,) = await store.append([page(1, run=S, epoch=6, operation="late")])
            assert late == Fenced(7)
            assert list(await store.append([pages[3]])) == [APPENDED]
            assert await log_of(store, S) == pages

        stage.play(scenario)

    # --- reading

    def test_the_page_that_has_a_position_is_found(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            pages = [page(1, 3, run=S), page(4, run=S), page(5, 1004, run=S), page(1005, 1006, run=S)]
            await written(store, [*pages, page(1, 9, run="a/tokens2"), page(1, run="a/token")])

            async def having(position: int) -> list[int]:
                return [one.first for one in await log_of(store, S, until=position, limit=1, latest=True)]

            wanted = {0: [], 1: [1], 3: [1], 4: [4], 5: [5], 1004: [5], 1005: [1005], 9_999_999: [1005]}
            assert {position: await having(position) for position in wanted} == wanted
            assert await log_of(store, S, after=1, until=5) == pages[1:3]
            assert await log_of(store, S, after=1, until=5, limit=1) == pages[1:2]
            assert await log_of(store, S, after=1, until=1) == []
            assert await log_of(store, S, until=4) == pages[:2]
            assert await log_of(store, S, until=4, latest=True) == pages[1::-1]

        stage.play(scenario)

    # --- the mark

    def test_an_owner_marks_its_invocation(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            record = await owned(store)
            mark = marking(record)
            wrong = [marking(record, epoch=2), marking(record, actor="runner/2")]
            lost = Lost(Status.RUNNING, "runner/1", 1)
            assert list(await store.apply(wrong)) == [lost, lost]
            assert not (await the(store)).has_streams
            assert list(await store.apply([mark])) == [APPLIED]
            assert list(await store.apply([mark])) == [APPLIED_AGAIN]
            assert await the(store) == replace(record, has_streams=True), "no edge is walked"
            assert list(await store.apply([replace(mark, id=InvocationId("nobody"))])) == [MISSING]
            after = await the(store)
            again = changes.recovered(after, by="runner", operation="recover", at=START, why="it died")
            assert list(await store.apply([again])) == [APPLIED]
            assert (await the(store)).has_streams, "later owners know of it"

        stage.play(scenario)

    def test_the_mark_outlives_the_process(self, stage: Stage) -> None:
        async def write(store: Store) -> None:
            await store.apply([marking(await owned(store))])
            await written(store, [page(1, run=S, writer="b")])

        async def read(store: Store) -> None:
            assert (await the(store)).has_streams
            assert [one.writer for one in await log_of(store, S)] == ["b"]

        stage.play(write, read, needs=Ability.DURABLE)

    # --- removal

    def test_streams_are_removed_with_their_invocation(self, stage: Stage) -> None:
        async def streams(store: Store) -> list[int]:
            return [len(await log_of(store, f"{id}/tokens")) + len(await log_of(store, f"{id}/0")) for id in "abcd"]

        async def scenario(store: Store) -> None:
            await streaming(store, "a")
            await streaming(store, "b", run=RUN, at=START + 1)
            await streaming(store, "c", at=START + 2)
            await streaming(store, "d", terms=Terms(retention={"success": None}))
            await written(store, [page(1, run="ab/tokens"), page(1, run="a0"), page(1, run="a", app="other")])
            assert await streams(store) == [3, 3, 3, 3]
            assert await store.remove_ended("shop", ids("a")) == 1
            assert await streams(store) == [0, 3, 3, 3]
            assert len(await log_of(store, "ab/tokens")) == len(await log_of(store, "a0")) == 1
            assert await store.remove_expired("shop", START + 5, 10) == 0
            assert await store.remove_expired("shop", OVER, 1) == 1
            assert await streams(store) == [0, 0, 3, 3]
            assert await store.remove_expired("shop", FOREVER - 1, 10) == 1
            assert await streams(store) == [0, 0, 0, 3]

        stage.play(scenario)

    def test_an_invocation_with_streams_and_an_outbox_is_kept_with_them(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await streaming(store, "a", reply_to=REPLY_TO)
            assert await store.remove_expired("shop", OVER, 10) == 0
            await store.apply(delivery("a"))
            assert len(await log_of(store, S)) == 2
            assert await store.remove_expired("shop", OVER, 10) == 1
            assert await log_of(store, S) == []

        stage.play(scenario)

    def test_a_stream_is_removed_by_itself(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await streaming(store, "a")
            assert await store.remove_log("shop", S, before=1) == 2
            assert await store.remove_log("shop", S, before=1) == 0
            assert await log_of(store, S) == []
            assert len(await log_of(store, "a/0")) == 1
            await the(store)

        stage.play(scenario)

    def test_payloads_of_chunks_are_kept_until_the_stream_is_removed(self, stage: Stage) -> None:
        async def collect(store: Store) -> list[int]:
            stage.clock.advance(10)
            await store.collect_payloads("shop", store.now(), 100)
            return await there(store, range(1, 6))

        async def scenario(store: Store) -> None:
            await put(store, *range(1, 6))
            record = await owned(store, arguments=large(1).data)
            await store.apply([marking(record)])
            await written(store, [page(1, run=S, payloads=(digest_of(2), digest_of(3)))])
            await written(store, [page(1, run="a/more", payloads=(digest_of(3), digest_of(4)))])
            assert await collect(store) == [1, 2, 3, 4]
            await store.remove_log("shop", S, before=1)
            assert await collect(store) == [1, 3, 4]
            end = changes.completed(await the(store), result=b"", operation="end", at=START)
            await store.apply([end])
            assert await collect(store) == [1, 3, 4]
            assert await store.remove_ended("shop", ids("a")) == 1
            assert await collect(store) == []

        stage.play(scenario)
