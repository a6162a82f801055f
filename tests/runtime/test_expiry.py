"""What nobody starts in time fails when its time is over, over a fleet in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.fleet import Fleet, add, virtually

from holdfast.model.records import Terms
from holdfast.model.status import Status


@pytest.mark.parametrize(
    ("known_seconds", "late"), [(7.0, 1.5), (0.0, 6.5)], ids=["the sweep knew of it", "it did not"]
)
def test_an_expiry_is_on_time_if_it_was_known_and_soon_if_not(known_seconds: float, late: float) -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.started(add)
        await asyncio.sleep(61)  # its turn has come
        start_by = fleet.clock.now() + known_seconds + 0.3
        id = await fleet.submit("of nobody here", start_by=start_by, terms=Terms(start_by=start_by))
        ended = await fleet.end(id)
        assert ended.status is Status.FAILED
        assert 0 <= ended.changed_at - start_by <= late

    virtually(scenario)
