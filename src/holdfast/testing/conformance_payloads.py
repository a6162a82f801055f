"""The part of the conformance suite about payloads: large values beside the records.

Use `holdfast.testing.conformance.StoreConformance`, which includes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from msgspec.structs import replace

from holdfast.codec import Codec, Packed, SizeLimits
from holdfast.ids import InvocationId
from holdfast.model import changes
from holdfast.model.changes import APPLIED, Lost
from holdfast.model.records import Entry, Piece, StoredPayload
from holdfast.model.status import Status
from holdfast.store.contract import Ability, Store
from holdfast.testing.samples import ERROR, ODD_NAMES, START, Stage, invocation, owned, wish

_MANY = 100
_LIMITS = SizeLimits(inline=8, max_bytes=1 << 20)


def large(number: int) -> Packed:
    """Make encoded bytes that refer to one payload, and that payload."""
    return Codec().pack(f"large value {number}", _LIMITS)


def digest_of(number: int) -> str:
    return large(number).payloads[0].digest


def stored(number: int, *, pieces: int = 1) -> StoredPayload:
    (payload,) = large(number).payloads
    return StoredPayload(digest=payload.digest, size=len(payload.data), pieces=pieces, first=Piece(payload.data))


async def put(store: Store, *numbers: int, app: str = "shop", pieces: int = 1) -> None:
    """Put payloads as the payload store does: the further pieces first."""
    for number in numbers:
        for further in range(1, pieces):
            await store.put_piece(app, digest_of(number), further, Piece(b"%d of %d" % (further, number)))
    await store.put_payloads(app, [stored(number, pieces=pieces) for number in numbers])


async def there(store: Store, numbers: Sequence[int], app: str = "shop") -> list[int]:
    """Return which of these payloads are there, without marking them as wanted."""
    return [number for number in numbers if await store.get_payload(app, digest_of(number)) is not None]


async def pieces_there(store: Store, number: int, app: str = "shop", most: int = 4) -> list[int]:
    return [one for one in range(1, most) if await store.get_piece(app, digest_of(number), one) is not None]


class PayloadConformance:
    """See the module."""

    def test_a_payload_comes_back_as_it_was_put(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            odd = bytes(range(256)) * 5
            first = StoredPayload(digest="a" * 64, size=9, pieces=3, first=Piece(odd, packed=True))
            others = [StoredPayload(digest=c * 64, size=0, pieces=1, first=Piece(b"")) for c in "bc"]
            await store.put_piece("shop", "a" * 64, 1, Piece(b"to be replaced", packed=True))
            await store.put_piece("shop", "a" * 64, 1, Piece(odd[::-1]))
            await store.put_piece("shop", "a" * 64, 2, Piece(b"", packed=True))
            assert await store.get_payload("shop", "a" * 64) is None  # its pieces alone are no payload
            await store.put_payloads("shop", [first, *others])
            assert await store.get_payload("shop", "a" * 64) == first
            assert await store.get_piece("shop", "a" * 64, 1) == Piece(odd[::-1])
            assert await store.get_piece("shop", "a" * 64, 2) == Piece(b"", packed=True)
            assert await store.get_piece("shop", "a" * 64, 3) is None
            assert [await store.get_payload("shop", c * 64) for c in "bcd"] == [*others, None]
            again = replace(first, pieces=1, first=Piece(b"in one", packed=False))
            await store.put_payloads("shop", [again])
            assert await store.get_payload("shop", "a" * 64) == again

        stage.play(scenario)

    def test_keep_returns_the_payloads_that_are_there(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            assert list(await store.keep_payloads("shop", [])) == []
            await put(store, 1, 2)
            await store.put_piece("shop", digest_of(3), 1, Piece(b"only a piece"))
            asked = [digest_of(number) for number in (1, 4, 2, 3, 1)]
            assert list(await store.keep_payloads("shop", asked)) == [True, False, True, False, True]
            assert list(await store.keep_payloads("shop", asked[:1])) == [True]
            assert list(await store.keep_payloads("shop", asked[1:2])) == [False]
            assert await there(store, [1, 2, 3, 4]) == [1, 2]

        stage.play(scenario)

    def test_an_unused_payload_is_collected_with_its_pieces(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await put(store, 1, 2, pieces=3)
            await put(store, 3, 4)
            assert await store.collect_payloads("shop", store.now(), _MANY) == (0, False)  # wanted since, by a hair
            stage.clock.advance(10)
            before = store.now()
            await store.keep_payloads("shop", [digest_of(2), digest_of(4)])
            await put(store, 5)
            assert await store.collect_payloads("shop", before, _MANY) == (2, False)
            assert await there(store, range(1, 6)) == [2, 4, 5]
            assert [await pieces_there(store, number) for number in (1, 2)] == [[], [1, 2]]
            assert list(await store.keep_payloads("shop", [digest_of(1)])) == [False]
            await put(store, 1, pieces=3)  # its next life
            assert await store.collect_payloads("shop", before, _MANY) == (0, False)
            assert await pieces_there(store, 1) == [1, 2]

        stage.play(scenario)

    def test_what_an_invocation_refers_to_is_not_collected(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await put(store, *range(1, 8))
            assert list(await store.insert([invocation("a", arguments=large(1).data)])) == [True]
            # Not stored, so it refers to nothing:
            assert list(await store.insert([invocation("a", arguments=large(2).data, operation="x")])) == [False]
            (record,) = (await store.claim(wish("claim a", ids=("a",)))).records
            await store.apply([changes.killed(record, operation="kill a", at=START, why="")])
            (record,) = (await store.claim(wish("again a", ids=("a",)))).records
            failed, done, zombie = record, await owned(store, "b"), await owned(store, "c")
            error = replace(ERROR, data=large(3).data)
            ends = [
                changes.failed(failed, error=error, operation="end a", at=START),
                changes.completed(done, result=large(4).data, operation="end b", at=START),
                # Lost, so it refers to nothing:
                replace(changes.completed(zombie, result=large(5).data, operation="end c", at=START), epoch=7),
            ]
            assert list(await store.apply(ends)) == [APPLIED, APPLIED, Lost(Status.RUNNING, "runner/1", 1)]
            quick = replace(ends[2], result=large(6).data, operation="end of c", epoch=zombie.epoch, version=None)
            assert list(await store.apply([quick])) == [APPLIED]
            for _ in range(3):
                stage.clock.advance(10)
                await store.collect_payloads("shop", store.now(), _MANY)
            assert await there(store, range(1, 8)) == [1, 3, 4, 6]

        stage.play(scenario)

    def test_what_a_removed_invocation_referred_to_is_collected(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await put(store, 1, 2, 3)
            ids = {"a": 1, "b": 1, "c": 2, "d": 3}
            await store.insert([invocation(id, arguments=large(number).data) for id, number in ids.items()])
            for record in (await store.claim(wish("claim", ids=("a", "c")))).records:
                await store.apply([changes.completed(record, result=b"r", operation=f"end {record.id}", at=START)])
            assert await store.remove_ended("shop", [InvocationId("a"), InvocationId("c")]) == 2
            stage.clock.advance(10)
            assert await store.collect_payloads("shop", store.now(), _MANY) == (1, False)
            assert await there(store, [1, 2, 3]) == [1, 3]  # another one refers to the first

        stage.play(scenario)

    def test_what_an_entry_refers_to_stays_as_long_as_the_entry(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            async def left() -> list[int]:
                stage.clock.advance(10)
                await store.collect_payloads("shop", store.now(), _MANY)
                return await there(store, range(1, 6))

            def entry(name: str, *numbers: int, **fields: Any) -> Entry:
                digests = tuple(map(digest_of, numbers))
                return Entry(app="shop", kind="event", name=name, body=b"{}", payloads=digests, **fields)

            await put(store, 1, 2, 3, 4, 5)
            a, b = entry("a", 1, 2), entry("b", 2, 3, keep_until=store.now() + 60)
            assert [await store.put_entry(each) for each in (a, b, entry("a", 4))] == [True, True, False]
            assert list(await store.entries("shop", "event")) == [a, b]
            assert await left() == [1, 2, 3]
            changed = entry("a", 1, version=2)
            assert await store.put_entry(changed, a)
            assert await left() == [1, 2, 3]
            assert await store.remove_expired("shop", b.keep_until or 0.0, 10) == 1
            assert await left() == [1]
            await store.put_entry(Entry(app="other", kind="event", name="a", body=b"{}"))
            assert await store.remove_entry(changed)
            assert await left() == []

        stage.play(scenario)

    def test_the_longest_unwanted_go_first_and_the_referred_to_do_not_stand_in_the_way(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await store.insert([invocation(f"{number}", arguments=large(number).data) for number in range(5)])
            for number in range(9):  # 0 to 4 are the oldest, and referred to
                await put(store, number)
                stage.clock.advance(1)
            await store.keep_payloads("shop", [digest_of(5)])
            stage.clock.advance(1)
            removed, order = 0, list[int]()
            for turn in range(9):
                before = await there(store, range(9))
                count, more = await store.collect_payloads("shop", store.now(), 2)
                removed += count
                gone = [number for number in before if number not in await there(store, range(9))]
                assert len(gone) == count <= 2
                assert more is (turn < 4)  # there are nine to look at
                order += gone
            assert order == [6, 7, 8, 5] or order == [6, 7, 5, 8]  # the last two may go in one call
            assert removed == 4
            assert await there(store, range(9)) == [0, 1, 2, 3, 4]

        stage.play(scenario)

    def test_pieces_without_a_payload_are_collected_and_living_ones_do_not_stand_in_the_way(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for number in (1, 2, 3):
                await put(store, number, pieces=3)
                await store.insert([invocation(f"{number}", arguments=large(number).data)])
            for number in (4, 5):
                for piece in (1, 2):
                    await store.put_piece("shop", digest_of(number), piece, Piece(b"p"))
            stage.clock.advance(10)
            before = store.now()
            await store.put_piece("shop", digest_of(5), 2, Piece(b"p"))  # its writer has not finished
            await store.put_piece("shop", digest_of(6), 1, Piece(b"p"))
            for _ in range(12):
                await store.collect_payloads("shop", before, 2)
            left = {number: await pieces_there(store, number) for number in range(1, 7)}
            assert left == {1: [1, 2], 2: [1, 2], 3: [1, 2], 4: [], 5: [2], 6: [1]}

        stage.play(scenario)

    def test_payloads_of_apps_are_apart(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            apps = ["shop", *ODD_NAMES]
            for app in apps:
                assert list(await store.keep_payloads(app, [digest_of(1)])) == [False]
                assert await store.get_payload(app, digest_of(1)) is None
                await put(store, 1, 2, app=app, pieces=2)
                await store.put_piece(app, digest_of(3), 1, Piece(b"p"))
            await store.insert([invocation("a", app="shop", arguments=large(1).data)])
            stage.clock.advance(10)
            before = store.now()
            await store.keep_payloads(apps[1], [digest_of(2)])
            for app in apps[:3]:
                await store.collect_payloads(app, before, _MANY)
            assert [await there(store, [1, 2], app) for app in apps[:4]] == [[1], [2], [], [1, 2]]
            pieces = [[await pieces_there(store, number, app) for number in (1, 2, 3)] for app in apps[:4]]
            assert pieces == [[[1], [], []], [[], [1], []], [[], [], []], [[1], [1], [1]]]

        stage.play(scenario)

    def test_many_may_put_keep_and_collect_the_same_at_once(self, stage: Stage) -> None:
        """A process that kept or put a payload finds it whole afterwards, whatever others do."""

        async def want(store: Store, number: int) -> None:
            (kept,) = await store.keep_payloads("shop", [digest_of(number)])
            if not kept:
                await put(store, number, pieces=3)

        async def scenario(store: Store) -> None:
            for _ in range(5):
                work: list[Awaitable[object]] = [want(store, number) for number in (1, 2) for _ in range(4)]
                work[4:4] = [store.collect_payloads("shop", store.now(), _MANY) for _ in range(2)]
                await asyncio.gather(*work)
                assert await there(store, [1, 2]) == [1, 2]
                assert [await pieces_there(store, number) for number in (1, 2)] == [[1, 2], [1, 2]]
                stage.clock.advance(10)

        stage.play(scenario)

    def test_payloads_outlive_the_process_and_are_seen_by_others(self, stage: Stage) -> None:
        async def write(store: Store) -> None:
            await put(store, 1, 2, pieces=2)
            await store.insert([invocation("a", arguments=large(1).data)])
            async with stage.opened() as other:
                assert list(await other.keep_payloads("shop", [digest_of(1)])) == [True]
                assert await pieces_there(other, 1) == [1]

        async def read(store: Store) -> None:
            assert await store.get_payload("shop", digest_of(1)) == stored(1, pieces=2)
            stage.clock.advance(10)
            assert await store.collect_payloads("shop", store.now() + 100, _MANY) == (1, False)
            assert await there(store, [1, 2]) == [1]

        stage.play(write, read, needs=Ability.DURABLE | Ability.MULTI_PROCESS)
