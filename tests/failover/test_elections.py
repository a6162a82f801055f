"""The primary goes while work is submitted and done: a short pause, and nothing else."""

from __future__ import annotations

import asyncio

import pytest
from tests.failover.ledger import UNKNOWN
from tests.failover.load import Load
from tests.store.mongo.tools import nudge, opened, until
from tests.support.mongod import ReplicaSet

from holdfast.model.records import Piece, StoredPayload
from holdfast.testing.samples import ids_of, invocation

pytestmark = [pytest.mark.xdist_group("failover"), pytest.mark.slow]


@pytest.mark.faults
def test_a_primary_that_steps_down(cluster: ReplicaSet, load: Load) -> None:
    resigned = cluster.step_down()
    assert cluster.primary() is not resigned
    load.progress()
    assert load.verdict() == []
    assert load.count(UNKNOWN) == 0


def test_a_primary_that_is_killed(cluster: ReplicaSet, load: Load) -> None:
    killed = cluster.primary()
    killed.kill()
    load.progress()
    killed.start()
    load.progress()
    assert load.verdict() == []
    assert load.count(UNKNOWN) == 0


PAYLOAD = StoredPayload(digest="ab" * 32, size=6, pieces=2, first=Piece(b"abc"))


@pytest.mark.faults
@pytest.mark.parametrize("may_write", [True, False], ids=["a runner", "a monitor"])
def test_what_was_accepted_is_found_after_an_election(cluster: ReplicaSet, may_write: bool) -> None:
    """A new primary may not know yet that the majority has what the old one has acknowledged."""
    new, other = cluster.secondaries()

    async def play() -> None:
        database = f"elections{may_write}"
        async with opened(cluster.url(database)) as store:
            store._may_write = may_write  # as when the server has refused it once
            with new.client() as chosen, other.client() as passed_over:
                chosen.admin.command({"configureFailPoint": "disableSnapshotting", "mode": "alwaysOn"})
                try:
                    assert list(await store.insert([invocation("a")])) == [True]
                    await store.put_piece("shop", PAYLOAD.digest, 1, Piece(b"def"))
                    await store.put_payloads("shop", [PAYLOAD])
                    until(lambda: chosen[database].holdfast_payloads.find_one({}), what="it is copied")
                    passed_over.admin.command("replSetFreeze", 30)
                    cluster.step_up(new)
                    asking = asyncio.gather(
                        store.get("shop", ["a", "none"]),
                        store.get_payload("shop", PAYLOAD.digest),
                        store.get_piece("shop", PAYLOAD.digest, 1),
                    )
                    await asyncio.wait({asking}, timeout=1)
                finally:
                    chosen.admin.command({"configureFailPoint": "disableSnapshotting", "mode": "off"})
                    passed_over.admin.command("replSetFreeze", 0)
                nudge(chosen)
                records, payload, piece = await asking
                assert ids_of(records) == ["a", None]
                assert payload == PAYLOAD
                assert piece == Piece(b"def")

    asyncio.run(play())
