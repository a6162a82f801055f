"""Clients of the simulated world: they submit jobs and emit events, again if they have to, and wait for ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.support.simulation.happenings import event_of
from tests.support.simulation.plan import APP, TASK, Emission, Job, id_of
from tests.support.witness import What, digest_of, digest_of_error

from holdfast.errors import InvocationNotFound, StoreError
from holdfast.ids import InvocationId
from holdfast.model.limits import limit_key
from holdfast.model.records import PLAIN, InvocationRecord, Terms, registered
from holdfast.model.retries import Fixed, dump_policy
from holdfast.triggers.outbox import Events

if TYPE_CHECKING:
    from tests.support.simulation.world import World


class Client:
    """Submits jobs, again if it has to, and waits for their ends."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._number = number
        self.process, self._engine, _ = world.process(f"c{number}", lambda process: None)

    async def run(self) -> None:
        plan = self._world.plan
        jobs = [job for job in plan.jobs if self._number < job.times]
        emissions = [each for number, each in enumerate(plan.emissions) if each.key or number % 3 == self._number]
        await asyncio.gather(*map(self._submit, jobs), *map(self._emit, emissions))

    async def _emit(self, emission: Emission) -> None:
        """With a key, again and again, as another event. Without one, once: it may be there or not."""
        await asyncio.sleep(emission.at)
        for _ in range(4 if emission.key else 1):
            engine, now = self._engine, self._world.clock.now()
            try:
                event = await engine.part(Events).emit(event_of(emission, engine.ids.new(), now))
            except StoreError:
                await asyncio.sleep(0.3)
            else:
                self._world.ledger.write(What.EMIT_OK, self.process.pid, id=event.id)
                return

    async def _submit(self, job: Job) -> None:
        ledger = self._world.ledger
        await asyncio.sleep(job.at)
        facts = {"token": job.token, "span": ledger.span(), "idempotency_key": job.token if job.keyed else None}
        ledger.write(What.SUBMIT_INVOKE, self.process.pid, **facts)
        record = self._record(job)
        for _ in range(4):
            try:
                (there,) = await self._engine.submitter.submit([record])
            except StoreError:
                await asyncio.sleep(0.3)
                record = self._record(job) if job.keyed else record  # as if it were another process
            else:
                id = record.id if there is None else there.id
                ledger.write(What.SUBMIT_OK, self.process.pid, **facts, id=id)
                await asyncio.gather(self._see(job, id), self._cancel(job, id))
                return
        ledger.write(What.SUBMIT_UNKNOWN, self.process.pid, **facts)

    async def _cancel(self, job: Job, id: InvocationId) -> None:
        """Ask for its end until the store has heard it."""
        if job.cancel_after is None:
            return
        await asyncio.sleep(job.cancel_after)
        while True:
            try:
                await self._engine.canceller.cancel([id], by=self.process.name, reason="the plan says so")
                return
            except (StoreError, InvocationNotFound):
                await asyncio.sleep(0.5)

    def _record(self, job: Job) -> InvocationRecord:
        world, now = self._world, self._world.clock.now()
        policy = dump_policy(Fixed(job.retries, 0.5)) if job.retries else None
        record = InvocationRecord(
            id=self._engine.ids.new() if job.keyed else id_of(job.token),
            key=job.token if job.keyed else None,
            terms=PLAIN if policy is None else Terms(retries=policy),
            app=APP,
            task=TASK,
            arguments=world.codec.encode_call((job.token,), {}),
            created_at=now,
            due_at=now + job.delay,
            priority=job.priority,
            at_most_once=job.at_most_once,
            limit_key=job.limit_key and limit_key(TASK, job.limit_key),
        )
        return registered(record, operation=self._engine.ids.operation(), at=now)

    async def _see(self, job: Job, id: InvocationId) -> None:
        while True:
            try:
                ended = await self._engine.watcher.ends([id], 20.0)
            except (StoreError, InvocationNotFound):
                await asyncio.sleep(0.5)
                continue
            if id in ended:
                break
            if self._world.healing and self._world.clock.monotonic() > self._world.plan.chaos_seconds + 100:
                return
        record = ended[id]
        digest = None
        if record.error is not None:
            digest = digest_of_error(record.error.message)
        elif record.result is not None:
            digest = digest_of(self._world.codec.decode(record.result), self._world.codec)
        self._world.ledger.write(
            What.RESULT_SEEN, self.process.pid, id=id, token=job.token, digest=digest, status=str(record.status)
        )
