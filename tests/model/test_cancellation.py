"""How long a cancelled run may clean up."""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.model.cancellation import asked_to_compensate
from holdfast.model.changes import apply_to
from holdfast.model.records import Cancellation, RunState, Terms
from holdfast.model.status import Status
from holdfast.testing.samples import START, invocation


def test_the_grace_of_a_run_does_not_grow_with_owners_that_die() -> None:
    record = replace(
        invocation("a", run=RunState(), terms=Terms(cancel_grace=10.0)),
        status=Status.RUNNING,
        owner="runner/1",
        epoch=1,
        attempt=1,
        cancellation=Cancellation(by="a test", at=START, until=START + 10),
    )
    for owners in (1, 2, 3):
        at = START + 3600 * owners
        after = apply_to(asked_to_compensate(record, operation=f"{owners}", at=at, is_said=False), record)
        assert after.cancellation is not None
        assert after.cancellation.until == at + 10
        record = replace(after, status=Status.RUNNING)
