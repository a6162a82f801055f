"""Recovery: work whose owner died goes back to the queue.

An owner is dead when its runner is no longer on the roster: a runner joins before it claims and leaves after it has
handed everything back, so whoever owns work and is not there was declared dead. The owners are read first and the
roster after them; the other way round, somebody who joined in between would look dead.

Each invocation is taken by one conditional write of its own, fenced by its epoch. A crash in the middle leaves each
either as it was or recovered, and two recoveries at once do no harm: one of them is refused. The time for which the
store was away is nobody's silence: nothing here counts time in which this process could not write itself.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from holdfast.clock import format_duration
from holdfast.codec import Codec
from holdfast.crashpoints import crashpoint
from holdfast.engine.ends import Ends
from holdfast.engine.failing import change_after
from holdfast.engine.limits import Limits
from holdfast.engine.stopping import timed_out
from holdfast.errors import WorkerLost
from holdfast.ids import Ids
from holdfast.lifecycle import changes
from holdfast.lifecycle.changes import Applied, Change
from holdfast.lifecycle.claims import back_in_queue
from holdfast.lifecycle.crashes import PASSED_THROUGH, beside, last_crash
from holdfast.lifecycle.records import FINAL, Hint, InvocationRecord, RunnerRecord, runner_of, work_hint
from holdfast.lifecycle.status import AVAILABLE, OWNED, Status
from holdfast.store.contract import Filter, Store
from holdfast.wakeup.hub import Hub

log = logging.getLogger("holdfast.recovery")

_AT_ONCE = 500
_SUPERVISED_SECONDS = 30.0  # a runner sees to its own dead workers; this long nobody else does
AUDIT_SECONDS = 30.0
_PASSING_SECONDS = 5.0  # how long something may stand in a status that is only ever passed through
_WORKING = frozenset({Status.RUNNING, Status.RESUMED})
_KILLED_FOR_IT = "; its worker did not answer and was killed"


class Recovery:
    """`by` is the runner that performs it, which each of its lives sets; None: a worker sees to its own work."""

    by: str | None = None

    def __init__(
        self,
        store: Store,
        ends: Ends,
        hub: Hub,
        ids: Ids,
        rng: random.Random,
        *,
        app: str,
        max_crashes: int,
        max_pending: float,
    ) -> None:
        self._store = store
        self.ends = ends
        self._hub = hub
        self._ids = ids
        self._rng = rng
        self.app = app
        self.max_crashes = max_crashes
        self.max_pending = max_pending
        self._codec = Codec()
        self._audit_at = 0.0
        self._limits = Limits(store, hub, ids, app=app)  # of whatever task: as many go on as slots were given back

    # --- one invocation

    def change(self, record: InvocationRecord, why: str) -> Change:
        """What becomes of work whose owner died."""
        last, at = last_crash(record, self.max_crashes, why), self._store.now()
        change = changes.recovered(
            record,
            by=self.by or record.owner,
            operation=self._ids.operation(),
            at=at,
            why=last or why,
            error=None if last is None else self._codec.encode_error(WorkerLost(last, invocation_id=record.id)),
        )
        # Its owner has begun it, so it was due by the owner's clock. If that was ahead, nobody is to wait for it.
        return replace(change, due_at=at) if record.due_at > at and change.target in AVAILABLE else change

    def ended(self, record: InvocationRecord, why: str) -> Change:
        """What becomes of work that its own runner ended before it was done."""
        final = record.at_most_once and record.status is not Status.PENDING
        if final:
            why = f"{why}; it is to be run at most once"
        return changes.killed(
            record,
            by=self.by,
            operation=self._ids.operation(),
            at=self._store.now(),
            why=why,
            error=self._codec.encode_error(WorkerLost(why, invocation_id=record.id)) if final else None,
        )

    def timed_out(self, record: InvocationRecord) -> Change:
        """What becomes of work that was past its time, and whose worker was killed for that."""
        return change_after(
            record,
            timed_out(record, self._codec, _KILLED_FOR_IT),
            operation=self._ids.operation(),
            at=self._store.now(),
            random_unit=self._rng.random(),
            fingerprint=None,
        )

    def rescue(self, record: InvocationRecord) -> Change:
        """What becomes of something that was left behind on its way back to the queue."""
        why = "left behind on its way back to the queue"
        last = last_crash(record, self.max_crashes, why)
        return changes.rescued(
            record,
            by=self.by,
            operation=self._ids.operation(),
            at=self._store.now(),
            why=last or why,
            error=None if last is None else self._codec.encode_error(WorkerLost(last, invocation_id=record.id)),
        )

    # --- many

    async def recover(self, records: Iterable[InvocationRecord], why: str) -> int:
        return await self._apply([(record, self.change(record, why)) for record in records])

    async def end(self, records: Iterable[InvocationRecord], why: str) -> int:
        return await self._apply([(record, self.ended(record, why)) for record in records])

    async def _apply(self, wanted: Sequence[tuple[InvocationRecord, Change]]) -> int:
        """Write these; the number of those that applied. What somebody else was faster with is well."""
        if not wanted:
            return 0
        verdicts = await self.ends.apply(wanted)
        done = [each for each, verdict in zip(wanted, verdicts, strict=True) if isinstance(verdict, Applied)]
        for record, change in done:
            facts = {"invocation": record.id, "task": record.task, "runner": record.owner, "epoch": record.epoch}
            level = logging.ERROR if change.target is Status.FAILED else logging.WARNING
            log.log(level, "%s %s → %s: %s", record.task, record.status, change.target, change.why, extra=facts)
        ready = [back_in_queue(record, change) for record, change in done if change.target in AVAILABLE]
        ended = [record.id for record, change in done if change.target not in AVAILABLE]
        hints = [work_hint(ready), Hint(FINAL, tuple(dict.fromkeys(ended)), len(ended))]
        self._hub.send(*[hint for hint in hints if hint.subjects])
        await self._limits.released(record for record, change in done if change.frees)
        return len(done)

    async def held_by(self, owner: str) -> list[InvocationRecord]:
        """Return what this owner holds."""
        held: list[InvocationRecord] = []
        where = Filter(runner=runner_of(owner), statuses=OWNED)
        while True:
            found = await self._store.find(self.app, where, _AT_ONCE)
            held += [record for record in found if record.owner == owner]
            if len(found) < _AT_ONCE:
                return held
            where = replace(where, before_id=found[-1].id)

    async def of_owner(
        self,
        owner: str,
        why: str,
        *,
        ended: bool = False,
        apart: Collection[str] = (),
        for_seconds: float = 0.0,
        overdue: Mapping[str, int] | None = None,
        for_another: bool = False,
    ) -> int:
        """Everything that this owner holds, and has held `for_seconds`: it died, or (`ended`) its runner ended it.
        Those that ran `apart` from it ended with it, and are not charged. It was ended for those that are `overdue` (id
        and epoch), which have timed out; if it was ended `for_another` call, those that ran beside that are told so.
        """
        count, not_its_doing = 0, f"{why}; it ran apart, so that is not its doing"
        where = Filter(runner=runner_of(owner), statuses=OWNED)
        while True:
            found = await self._store.find(self.app, where, _AT_ONCE, set_aside=True)
            mine = [record for record in found if record.owner == owner and self._lasts(record, for_seconds)]
            crashpoint("recovery.found")
            if overdue:
                late = [r for r in mine if overdue.get(r.id) == r.epoch and r.status in _WORKING]
                count += await self._apply([(record, self.timed_out(record)) for record in late])
                mine = [record for record in mine if record not in late]
            alone = [record for record in mine if record.id in apart] if for_another or not ended else []
            rest = [record for record in mine if record not in alone]
            neighbours = [record for record in rest if record.status in _WORKING] if for_another else []
            rest = [record for record in rest if record not in neighbours]
            count += await self.end(alone, not_its_doing)
            count += await self.end(neighbours, beside(why))
            count += await (self.end if ended else self.recover)(rest, why)
            crashpoint("recovery.written")
            if len(found) < _AT_ONCE:
                return count
            where = replace(where, before_id=found[-1].id)

    async def running(self) -> int:
        """Everything whose owner is no longer there; and what could never be recovered is set aside."""
        await self._audit()
        owners = await self._store.owners(self.app)
        runners = {runner.id: runner for runner in await self._store.roster(roster_of(self.app))}
        count = 0
        for owner in owners:
            runner = runners.get(runner_of(owner))
            if runner is None:
                count += await self.of_owner(owner, f"its owner {owner} is dead")
            elif not _works_there(owner, runner):
                why = f"its worker {owner} is dead"
                count += await self.of_owner(owner, why, for_seconds=_SUPERVISED_SECONDS)
        return count

    async def _audit(self) -> None:
        """Now and then set aside what holds something and could never be recovered."""
        now = self._store.now()
        if now >= self._audit_at:
            if self._audit_at:
                await self._store.quarantine_hidden(self.app)
            self._audit_at = now + AUDIT_SECONDS

    async def stuck(self) -> list[InvocationRecord]:
        """Return claimed work that nobody starts, though its owner may be alive."""
        return await self._standing(frozenset({Status.PENDING}), self.max_pending)

    async def still_as_they_were(self, before: Sequence[InvocationRecord]) -> list[InvocationRecord]:
        """Return those that have not changed since."""
        found = await self._store.get(self.app, [record.id for record in before])
        return [now for was, now in zip(before, found, strict=True) if now is not None and now.version == was.version]

    async def recover_stuck(self, stuck: Sequence[InvocationRecord]) -> int:
        count, now = 0, self._store.now()
        for record in stuck:
            since = max(self.max_pending, now - record.changed_at)
            why = f"{record.owner} claimed it {format_duration(since)} ago and has not started it"
            count += await self.recover([record], why)
        return count

    async def passed_through(self) -> int:
        """What stands where nothing ever stays: no write of ours stops there, but somebody's may."""
        left = await self._standing(PASSED_THROUGH, _PASSING_SECONDS)
        return await self._apply([(record, self.rescue(record)) for record in left])

    def _lasts(self, record: InvocationRecord, seconds: float) -> bool:
        """Return whether it was changed so long ago. A stamp that lies ahead tells of a wrong clock, and counts as old:
        else it would keep work from everybody until that time has come.
        """
        return seconds <= 0.0 or abs(self._store.now() - record.changed_at) > seconds

    async def _standing(self, statuses: frozenset[Status], seconds: float) -> list[InvocationRecord]:
        found: list[InvocationRecord] = []
        where = Filter(statuses=statuses)
        while True:
            page = await self._store.find(self.app, where, _AT_ONCE, set_aside=True)
            found += [record for record in page if self._lasts(record, seconds)]
            if len(page) < _AT_ONCE:
                return found
            where = replace(where, before_id=page[-1].id)


def _works_there(owner: str, runner: RunnerRecord) -> bool:
    worker = owner.partition("/")[2]
    return worker == "core" or not runner.workers or worker in {each.id for each in runner.workers}


CORE = "~core"


def core_app(app: str) -> str:
    """Where an app's core tasks lie: beside its own, so that they are in nobody's lists and counts."""
    return app + CORE


def is_core(app: str) -> bool:
    """Tell whether an app holds core tasks, and no user's."""
    return app.endswith(CORE)


def roster_of(app: str) -> str:
    return app.removesuffix(CORE)
