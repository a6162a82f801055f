"""Release: work that its owner cannot finish goes back to the queue, or ends.

Each invocation is written by one conditional change of its own, fenced by its epoch. A crash in the middle leaves each
either as it was or released, and two releases at once do no harm: one of them is refused.

`change_after` decides what follows a raised exception: another attempt, or the end. The policy is stored with
the invocation at its submit. What the code at hand declares does not matter: a deploy does not change what was
promised. A policy that cannot be read, because a newer version wrote it, parks the invocation: to fail it
would break that promise, and to guess would break another. `RetryLater` is granted each time, whatever exceptions the
policy names, until the attempts of the policy are used up; without a policy they never are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import replace

from holdfast.clock import format_duration
from holdfast.codec import Codec
from holdfast.errors import NotDecodable, WorkerLost
from holdfast.executors.call import Raised
from holdfast.model import changes
from holdfast.model.changes import Applied, Change
from holdfast.model.claims import back_in_queue
from holdfast.model.crashes import last_crash
from holdfast.model.decoding import ahead
from holdfast.model.records import ENDED, Hint, InvocationRecord, work_hint
from holdfast.model.retries import GiveUp, Retry, RetryDecision, as_asked, decide, load_policy
from holdfast.model.status import AVAILABLE, Status
from holdfast.runtime.execute import timed_out
from holdfast.runtime.limits import Limits
from holdfast.telemetry.events import Failed, Recovered

if TYPE_CHECKING:
    from holdfast.runtime.engine import Engine

_KILLED_FOR_IT = "; its worker did not answer and was killed"


class Releaser:
    """Write what becomes of work that its owner cannot finish. `by` is the runner that performs it, which each of its
    lives sets; None: a worker sees to its own work.
    """

    by: str | None = None

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._store = engine.store
        self.max_crashes = engine.settings.max_crash_recoveries
        self._codec = Codec()
        self._limits = Limits(engine)  # of whatever task: as many go on as slots were given back

    # --- one invocation

    def change(self, record: InvocationRecord, why: str, progress_epoch: int = 0) -> Change:
        """Return the change for work whose owner died. A run last came further in `progress_epoch`."""
        last, at = last_crash(record, self.max_crashes, why, progress_epoch), self._store.now()
        change = changes.recovered(
            record,
            by=self.by or record.owner,
            operation=self._engine.ids.operation(),
            at=at,
            why=last or why,
            error=None if last is None else self._codec.encode_error(WorkerLost(last, invocation_id=record.id)),
        )
        # Its owner has begun it, so it was due by the owner's clock. If that was ahead, it is due all the same.
        return replace(change, due_at=at) if record.due_at > at and change.target in AVAILABLE else change

    def ended(self, record: InvocationRecord, why: str) -> Change:
        """Return the change for work that its own runner ended before it was done."""
        final = record.at_most_once and record.status is not Status.PENDING
        if final:
            why = f"{why}; it is to be run at most once"
        return changes.killed(
            record,
            by=self.by,
            operation=self._engine.ids.operation(),
            at=self._store.now(),
            why=why,
            error=self._codec.encode_error(WorkerLost(why, invocation_id=record.id)) if final else None,
        )

    def not_begun(self, record: InvocationRecord, why: str) -> Change:
        """Return the change for work that was marked as RUNNING and never begun: nothing is charged."""
        if record.status is not Status.RUNNING:
            return self.ended(record, why)
        operation, at = self._engine.ids.operation(), self._store.now()
        return changes.handed_back(record, by=self.by, operation=operation, at=at, why=why)

    def timed_out(self, record: InvocationRecord) -> Change:
        """Return the change for work past its time, whose worker was killed for that."""
        return change_after(
            record,
            timed_out(record, self._codec, _KILLED_FOR_IT),
            operation=self._engine.ids.operation(),
            at=self._store.now(),
            random_unit=self._engine.rng.random(),
            fingerprint=None,
        )

    def rescue(self, record: InvocationRecord, progress_epoch: int = 0) -> Change:
        """Return the change for an invocation that was left behind on its way back to the queue."""
        why = "left behind on its way back to the queue"
        last = last_crash(record, self.max_crashes, why, progress_epoch)
        return changes.rescued(
            record,
            by=self.by,
            operation=self._engine.ids.operation(),
            at=self._store.now(),
            why=last or why,
            error=None if last is None else self._codec.encode_error(WorkerLost(last, invocation_id=record.id)),
        )

    # --- many

    async def recover(self, records: Iterable[InvocationRecord], why: str) -> int:
        return await self.apply([(record, self.change(record, why, await self.progress(record))) for record in records])

    async def progress(self, record: InvocationRecord) -> int:
        """Return the epoch in which a run last came further, if its crashes alone would end it; 0 if not, or never."""
        read = self._engine.read_progress
        if record.run is None or read is None or last_crash(record, self.max_crashes, "") is None:
            return 0
        return await read(self._engine, record)

    async def end(self, records: Iterable[InvocationRecord], why: str) -> int:
        return await self.apply([(record, self.ended(record, why)) for record in records])

    async def apply(self, wanted: Sequence[tuple[InvocationRecord, Change]]) -> int:
        """Write these changes. Return how many applied; the others lost to an earlier write."""
        if not wanted:
            return 0
        verdicts = await self._engine.outbox.apply(wanted)
        done = [each for each, verdict in zip(wanted, verdicts, strict=True) if isinstance(verdict, Applied)]
        for record, change in done:
            self._engine.telemetry.emit((Failed if change.target is Status.FAILED else Recovered)(record, change))
        ready = [back_in_queue(record, change) for record, change in done if change.target in AVAILABLE]
        ended = [record.id for record, change in done if change.target not in AVAILABLE]
        hints = [work_hint(ready), Hint(ENDED, tuple(dict.fromkeys(ended)), len(ended))]
        self._engine.hub.send(*[hint for hint in hints if hint.subjects])
        await self._limits.released(record for record, change in done if change.frees)
        return len(done)


def change_after(
    record: InvocationRecord, raised: Raised, *, operation: str, at: float, random_unit: float, fingerprint: str | None
) -> Change:
    """Return the change that this failure means."""
    try:
        decision = _decision(record, raised, at, random_unit)
    except NotDecodable as error:
        why = f"{raised.why}; whether it is to be tried again is not known: {error}"
        return changes.parked(record, fingerprint=fingerprint, operation=operation, at=at, why=why, error=raised.error)
    noted = UNSET if raised.attributes is None else raised.attributes
    if isinstance(decision, Retry):
        change = changes.retried(
            record,
            error=raised.error,
            due_at=ahead(at, decision.wait_seconds),
            queue=decision.queue,
            operation=operation,
            at=at,
            why=f"{raised.why}; {decision.why}",
        )
        if raised.trace and isinstance(change.errors, tuple):
            change = replace(change, errors=(*change.errors[:-1], replace(change.errors[-1], trace=raised.trace)))
        return change if noted is UNSET else replace(change, attributes=noted)
    why = f"{raised.why}; {decision.why}" if decision.why else raised.why
    change = changes.failed(record, error=raised.error, operation=operation, at=at, why=why)
    return change if noted is UNSET else replace(change, attributes=noted)


def _decision(record: InvocationRecord, raised: Raised, at: float, random_unit: float) -> RetryDecision:
    number = record.failures + 1
    if raised.fatal:
        return GiveUp("it is not to be tried again" if record.terms.retries else "")
    wait = raised.retry_after
    if record.terms.retries is None:
        if wait is None:
            return GiveUp("")
        return Retry(wait, None, f"failure {number}; it asks to be tried again in {format_duration(wait)}")
    policy = load_policy(record.terms.retries)
    decision = decide(
        policy if wait is None else as_asked(policy, raised.kinds),
        attempt=number,
        age_seconds=at - record.first_due_at,
        error_types=raised.kinds,
        random_unit=random_unit,
    )
    if wait is None or isinstance(decision, GiveUp):
        return decision
    return Retry(wait, decision.queue, f"{decision.why}, but it asks for {format_duration(wait)}")
