"""Recovery: work whose owner died goes back to the queue.

An owner is dead when its runner is no longer on the roster: a runner joins before it claims and leaves after it has
handed everything back, so an owner of work that is not there was declared dead. The owners are read first and the
roster after them; the other way round, a runner that joined in between would look dead.

Each invocation is taken by its own conditional write, fenced by its epoch. A crash in the middle leaves each either as
it was or recovered, and two recoveries at once do no harm: one of them is refused. The time for which the store was
away is no runner's silence: no time counts in which this process could not write itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from holdfast.clock import format_duration
from holdfast.crashpoints import crashpoint
from holdfast.executors.begun import BegunTable
from holdfast.model.crashes import PASSED_THROUGH, collateral
from holdfast.model.names import CORE
from holdfast.model.records import InvocationRecord, RunnerRecord, runner_of
from holdfast.model.status import OWNED, Status
from holdfast.runtime.engine import Engine
from holdfast.runtime.release import Releaser
from holdfast.runtime.wait import pages
from holdfast.store.contract import Filter

_SUPERVISED_SECONDS = 30.0  # a runner sees to its own dead workers; this long no other runner does
AUDIT_SECONDS = 30.0
_PASSING_SECONDS = 5.0  # how long something may stand in a status that is only ever passed through
_WORKING = frozenset({Status.RUNNING, Status.PAUSED, Status.RESUMED})
_MAY_BE_IDLE = frozenset({Status.RUNNING, Status.CANCELLING})


class Recovery(Releaser):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.app = engine.app
        self.max_pending = engine.settings.max_pending_seconds
        self._audit_at = 0.0

    async def held_by(self, owner: str) -> list[InvocationRecord]:
        """Return what this owner holds."""
        where = Filter(runner=runner_of(owner), statuses=OWNED)
        found = pages(self._store, self.app, where, set_aside=False)
        return [record async for page in found for record in page if record.owner == owner]

    async def of_owner(
        self,
        owner: str,
        why: str,
        *,
        ended: bool = False,
        isolated: Collection[str] = (),
        for_seconds: float = 0.0,
        overdue: Mapping[str, int] | None = None,
        for_another: bool = False,
        begun: BegunTable | None = None,
    ) -> int:
        """Take back everything that this owner holds, and has held `for_seconds`: it died, or (`ended`) its runner
        ended it. Return how many.

        Invocations that ran `isolated` ended with it and are not charged. It was ended for invocations that are
        `overdue` (id and epoch), which have timed out. If it was ended `for_another` call, the history of its
        neighbours says so. What its table of `begun` calls lacks is not charged.
        """
        count, not_its_doing = 0, f"{why}; it ran in an isolated process, and is not charged"
        async for found in pages(self._store, self.app, Filter(runner=runner_of(owner), statuses=OWNED)):
            mine = [record for record in found if record.owner == owner and self._lasts(record, for_seconds)]
            crashpoint("recovery.found")
            idle = [] if begun is None else sort_by_begun(mine, begun).idle
            count += await self.give_back(idle, why)
            mine = [record for record in mine if record not in idle]
            if overdue:
                late = [r for r in mine if overdue.get(r.id) == r.epoch and r.status in _WORKING]
                count += await self.apply([(record, self.timed_out(record)) for record in late])
                mine = [record for record in mine if record not in late]
            alone = [record for record in mine if record.id in isolated] if for_another or not ended else []
            rest = [record for record in mine if record not in alone]
            neighbours = [record for record in rest if record.status in _WORKING] if for_another else []
            rest = [record for record in rest if record not in neighbours]
            count += await self.end(alone, not_its_doing)
            count += await self.end(neighbours, collateral(why))
            count += await (self.end if ended else self.recover)(rest, why)
            crashpoint("recovery.written")
        return count

    async def give_back(self, records: Sequence[InvocationRecord], why: str) -> int:
        """Return work that has never begun to the queue, without a charge. Return how much."""
        why = f"{why}; it had not begun, and is not charged"
        return await self.apply([(record, self.not_begun(record, why)) for record in records])

    async def running(self) -> int:
        """Take back everything whose owner is no longer there, and quarantine what could never be recovered. Return how
        many.
        """
        await self._audit()
        owners = await self._store.owners(self.app)
        runners = {runner.id: runner for runner in await self._store.roster(self.app.removesuffix(CORE))}
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
        """Quarantine, now and then, records that hold something and could never be recovered."""
        now = self._store.now()
        if now >= self._audit_at:
            if self._audit_at:
                await self._store.quarantine_hidden(self.app)
            self._audit_at = now + AUDIT_SECONDS

    async def stuck(self) -> list[InvocationRecord]:
        """Return claimed work that was not started, though its owner may be alive."""
        return await self._standing(frozenset({Status.PENDING}), self.max_pending)

    async def still_as_they_were(self, before: Sequence[InvocationRecord]) -> list[InvocationRecord]:
        """Return the records that have not changed since."""
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
        """Rescue invocations in a status that is only ever passed through: no write of ours stops there, but another
        program's may.
        """
        left = await self._standing(PASSED_THROUGH, _PASSING_SECONDS)
        return await self.apply([(record, self.rescue(record, await self.progress(record))) for record in left])

    def _lasts(self, record: InvocationRecord, seconds: float) -> bool:
        """Return whether it was changed so long ago. A stamp that lies ahead means a wrong clock, and counts as old:
        else the work would be out of reach until that time has come.
        """
        return seconds <= 0.0 or abs(self._store.now() - record.changed_at) > seconds

    async def _standing(self, statuses: frozenset[Status], seconds: float) -> list[InvocationRecord]:
        found = pages(self._store, self.app, Filter(statuses=statuses))
        return [record async for page in found for record in page if self._lasts(record, seconds)]


class Begun(NamedTuple):
    """What an owner holds, by how far it has come. `over`: its code has ended, and its end is not in the store."""

    idle: list[InvocationRecord]
    running: list[InvocationRecord]
    over: list[InvocationRecord]


def sort_by_begun(held: Iterable[InvocationRecord], begun: BegunTable) -> Begun:
    """Divide invocations that are RUNNING in the store by whether their code has begun in the worker. The body of a run
    is always taken for begun: its worker may have it in memory.
    """
    marks, sorted_ = begun.marks(), Begun([], [], [])
    for record in held:
        mark = f"{record.id}~{record.epoch}"
        if record.status is Status.PENDING:
            continue
        if marks is None or record.run is not None or record.status not in _MAY_BE_IDLE:
            sorted_.running.append(record)
        elif mark not in marks:
            sorted_.idle.append(record)
        else:
            (sorted_.running if marks[mark] else sorted_.over).append(record)
    return sorted_


def _works_there(owner: str, runner: RunnerRecord) -> bool:
    worker = owner.partition("/")[2]
    return worker == "core" or not runner.workers or worker in {each.id for each in runner.workers}
