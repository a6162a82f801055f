"""The part of the conformance suite about entries: versions follow one another, and a stale writer is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from holdfast.errors import CorruptRecord
from holdfast.model import changes
from holdfast.model.records import FOREVER, RETENTION_SECONDS, Entry
from holdfast.store.contract import Ability, EntryOrder, Filter, Store
from holdfast.testing.samples import START, Stage, invocation, owned


def entry(name: str = "nightly", **fields: Any) -> Entry:
    given: dict[str, Any] = {"app": "shop", "kind": "schedule", "body": b'{"a": "\xc3\x9f"}'} | fields
    return Entry(name=name, **given)


async def names(store: Store, kind: str = "schedule") -> list[str]:
    return [each.name for each in await store.entries("shop", kind)]


async def due(store: Store, kind: str, limit: int) -> Sequence[Entry]:
    return await store.entries("shop", kind, order=EntryOrder.DUE, limit=limit)


class EntryConformance:
    def test_an_entry_comes_back_as_it_was_put(self, stage: Stage) -> None:
        made = entry(subject="run", due_at=START + 0.123456789, keep_until=START + 86_400.123456789)

        async def write(store: Store) -> None:
            assert await store.put_entry(made)
            assert list(await store.entries("shop", "schedule")) == [made]
            assert list(await store.entries("shop", "schedule", ["nightly", "none"])) == [made]
            assert list(await due(store, "schedule", 5)) == [made]

        async def read(store: Store) -> None:
            assert list(await store.entries("shop", "schedule")) == [made]

        stage.play(write, read, needs=Ability.DURABLE)

    def test_an_entry_belongs_to_its_app_and_kind(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for app, kind in (("shop", "schedule"), ("shop", "trigger"), ("bank", "schedule")):
                assert await store.put_entry(entry(app=app, kind=kind, due_at=START))
            assert await names(store) == ["nightly"]
            assert [each.kind for each in await store.entries("shop", "trigger", order=EntryOrder.DUE, limit=5)] == [
                "trigger"
            ]

        stage.play(scenario)

    def test_entries_are_found_by_what_they_belong_to(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for name, subject in (("a", "one"), ("b", "two"), ("c", "one"), ("d", None)):
                assert await store.put_entry(entry(name, subject=subject))
            assert await store.put_entry(entry("e", kind="trigger", subject="one"))
            assert [each.name for each in await store.entries("shop", "schedule", subject="one")] == ["a", "c"]
            assert [each.name for each in await store.entries("shop", "schedule", subject="one", limit=1)] == ["a"]
            latest = await store.entries("shop", "schedule", order=EntryOrder.LATEST, before="c", subject="one")
            assert [each.name for each in latest] == ["a"]
            assert await store.put_entry(entry("a", version=2, subject=None)), "a change may move it"
            assert [each.name for each in await store.entries("shop", "schedule", subject="one")] == ["c"]

        stage.play(scenario)

    def test_a_version_follows_the_one_before_and_no_other(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            first = entry()
            assert not await store.put_entry(replace(first, version=2)), "there is no version 1"
            assert await store.put_entry(first)
            assert await store.put_entry(first), "again: it is there as it was put"
            assert not await store.put_entry(replace(first, body=b"{}")), "something else is there"
            second = replace(first, version=2, body=b"{}", due_at=START)
            assert await store.put_entry(second)
            assert await store.put_entry(second)
            assert not await store.put_entry(replace(second, body=b"[]")), "another was faster"
            assert not await store.put_entry(replace(second, version=4))
            third = replace(second, version=3, due_at=None)
            assert await store.put_entry(third)
            assert list(await store.entries("shop", "schedule")) == [third]
            assert list(await due(store, "schedule", 5)) == []

        stage.play(scenario)

    def test_an_entry_that_was_removed_and_put_again_is_another(self, stage: Stage) -> None:
        """A version alone does not identify an entry: it begins with 1 each time."""

        async def scenario(store: Store) -> None:
            old, new = entry(body=b'"old"'), entry(body=b'"new"')
            after_old = replace(old, version=2)
            assert not await store.put_entry(after_old, old), "it is not there"
            await store.put_entry(new)
            assert not await store.put_entry(after_old, old)
            assert list(await store.entries("shop", "schedule")) == [new]
            after_new = replace(new, version=2, body=b'"newer"')
            assert await store.put_entry(after_new, new)
            assert await store.put_entry(after_new, new), "again: it is there as it was put"
            assert list(await store.entries("shop", "schedule")) == [after_new]

        stage.play(scenario)

    def test_what_is_due_comes_soonest_first(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for name, due_at in (("c", START), ("a", START + 5), ("b", START), ("never", None)):
                await store.put_entry(entry(name, due_at=due_at))
            assert [each.name for each in await due(store, "schedule", 9)] == [
                "b",
                "c",
                "a",
            ]
            assert [each.name for each in await due(store, "schedule", 2)] == [
                "b",
                "c",
            ]
            assert list(await due(store, "schedule", 0)) == []
            assert await names(store) == ["a", "b", "c", "never"]

        stage.play(scenario)

    def test_an_entry_is_set_aside_if_it_is_as_it_was_read(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            first, other = entry(), entry(name="other")
            assert await store.put_entry(first)
            assert await store.put_entry(other)
            error = CorruptRecord("it says nothing", kind=first.kind, id=first.name)
            assert not await store.quarantine_entry(replace(first, body=b"[]"), error), "it was changed meanwhile"
            assert await store.quarantine_entry(first, error)
            assert not await store.quarantine_entry(first, error)
            assert list(await store.entries(first.app, first.kind)) == [other]
            (aside,) = await store.quarantined(first.app)
            assert list(await store.quarantined(first.app, latest=1)) == [aside]
            assert list(await store.quarantined(first.app, latest=0)) == []
            assert list(await store.quarantined(first.app, first.name)) == [aside]
            assert list(await store.quarantined(first.app, other.name)) == []
            assert (aside.kind, aside.id, "it says nothing" in aside.why) == (first.kind, first.name, True)
            assert await store.put_entry(first), "its name is free"

        stage.play(scenario)

    def test_an_audit_leaves_sound_invocations_alone(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            await owned(store, "a")
            await store.insert([invocation("b", limit_key="k"), invocation("c", due_at=START + 60)])
            assert await store.quarantine_hidden("shop") == 0
            assert len(await store.find("shop", Filter(), 9, set_aside=True)) == 3

        stage.play(scenario)

    def test_only_the_version_that_is_there_is_removed(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            first = entry()
            await store.put_entry(first)
            assert not await store.remove_entry(replace(first, version=2))
            assert not await store.remove_entry(replace(first, body=b'"made anew"'))
            assert await store.remove_entry(first)
            assert not await store.remove_entry(first)
            assert await names(store) == []
            assert await store.put_entry(first), "the name is free again"

        stage.play(scenario)

    def test_the_latest_come_in_pages(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for name in ("a", "é", "b2", "b10", "日本", "B"):
                await store.put_entry(entry(name, kind="event"))
            await store.put_entry(entry("z"))
            await store.put_entry(entry("z", kind="event", app="another"))

            async def page(limit: int, before: str | None = None) -> list[str]:
                return [
                    each.name
                    for each in await store.entries(
                        "shop", "event", order=EntryOrder.LATEST, limit=limit, before=before
                    )
                ]

            assert await page(9) == ["日本", "é", "b2", "b10", "a", "B"]
            assert await page(2) == ["日本", "é"]
            assert await page(2, "é") == ["b2", "b10"]
            assert await page(9, "b11") == ["b10", "a", "B"]
            assert await page(9, "B") == []
            assert await page(0) == []

        stage.play(scenario)

    def test_what_need_not_be_kept_longer_is_removed_in_batches(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            for number in range(5):
                await store.put_entry(entry(f"{number}", keep_until=START - number))
            await store.put_entry(entry("2", version=2, keep_until=START + 9))
            await store.put_entry(entry("3", version=2))
            await store.put_entry(entry("always", keep_until=FOREVER))
            await store.put_entry(entry("4", app="another", keep_until=START))
            assert await store.remove_expired("shop", START - 5, 10) == 0
            assert await store.remove_expired("shop", START, 0) == 0
            assert await store.remove_expired("shop", START, 1) == 1
            assert await names(store) == ["0", "1", "2", "3", "always"]
            assert [await store.remove_expired("shop", START, 1) for _ in range(3)] == [1, 1, 0]
            assert await names(store) == ["2", "3", "always"]
            assert await store.remove_expired("shop", START + 9, 10) == 1
            assert await names(store) == ["3", "always"]
            assert len(await store.entries("another", "schedule")) == 1

        stage.play(scenario)

    def test_a_batch_removes_invocations_first_and_entries_with_what_is_left(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            over = START + RETENTION_SECONDS
            for id in ("a", "b"):
                record = await owned(store, id)
                await store.apply([changes.completed(record, result=b"", operation=f"end {id}", at=START)])
            for number in range(3):
                await store.put_entry(entry(f"{number}", keep_until=START))
            assert await store.remove_expired("shop", over, 3) == 3
            assert (len(await store.find("shop", Filter(), 9)), len(await names(store))) == (0, 2)
            assert await store.remove_expired("shop", over, 3) == 2

        stage.play(scenario)

    def test_of_many_writers_of_one_version_one_wins(self, stage: Stage) -> None:
        async def scenario(store: Store) -> None:
            first = entry()
            await store.put_entry(first)
            changed = [replace(first, version=2, body=f'"{n}"'.encode()) for n in range(8)]
            assert sorted(await asyncio.gather(*map(store.put_entry, changed))) == [False] * 7 + [True]

        stage.play(scenario)
