"""Clients of the simulated world: they submit jobs and emit events, again if they have to, and wait for ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace
from tests.support.simulation.groups import submit_party
from tests.support.simulation.happenings import event_of
from tests.support.simulation.plan import APP, TASK, Emission, Job, Party, Trip, id_of
from tests.support.simulation.trips import STREAMS, TRIP, Trips
from tests.support.simulation.trips import id_of as trip_id
from tests.support.witness import What, digest_of, digest_of_error

from holdfast.codec import Codec
from holdfast.errors import HookNotFound, InvocationNotFound, StoreError
from holdfast.ids import InvocationId
from holdfast.model.limits import limit_key
from holdfast.model.rates import rate_key
from holdfast.model.records import PLAIN, InvocationRecord, Terms, registered
from holdfast.model.retries import Fixed, dump_policy
from holdfast.model.status import FINAL
from holdfast.runtime.engine import Engine
from holdfast.streams.reader import Cursor, LogReader
from holdfast.triggers.outbox import Events
from holdfast.workflows.hooks_records import name_of
from holdfast.workflows.hooks_resuming import Sent, resumed

if TYPE_CHECKING:
    from tests.support.simulation.world import World


def _writes(trip: Trip) -> bool:
    return any(leg.kind in ("words", "stutter", "choir", "far words", "said") for leg in trip.legs)


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
        trips = plan.trips[self._number :: 3]
        others = [trip for number, trip in enumerate(plan.trips) if number % 3 != self._number or trip.at > 5]
        await asyncio.gather(
            *map(self._submit, jobs),
            *map(self._emit, emissions),
            *map(self._submit_trip, trips),
            *map(self._submit_party, plan.parties[self._number :: 3]),
            *[self._resume(trip, token) for trip in others for token in Trips.tokens(trip)],
        )

    async def _resume(self, trip: Trip, token: str) -> None:
        """Give the hook two payloads. One of them is sent by other clients too, under the same name."""
        await asyncio.sleep(trip.at)
        for name in ("all", f"only {self._number}"):
            if not await self._send(trip, token, name):
                return

    async def _send(self, trip: Trip, token: str, name: str) -> bool:
        """Send a payload until it is acknowledged. Return False if its run has ended before that."""
        world, engine = self._world, self._engine
        payload = f"{token} {name}"
        facts = {"key": token, "idempotency_key": name, "digest": digest_of(payload, world.codec)}
        while True:
            facts["span"] = world.ledger.span()
            world.ledger.write(What.RESUME_INVOKE, self.process.pid, **facts)
            try:
                await resumed(engine, name_of(token), Sent(engine, payload), name)
            except HookNotFound:
                world.ledger.write(What.RESUME_FAIL, self.process.pid, **facts)
            except StoreError:
                world.ledger.write(What.RESUME_UNKNOWN, self.process.pid, **facts)
            else:
                world.ledger.write(What.RESUME_OK, self.process.pid, **facts)
                return True
            await asyncio.sleep(0.8)
            if await self._is_over(trip_id(trip.token)):
                return False

    async def _is_over(self, id: InvocationId) -> bool:
        """Whether a run has ended, or was never submitted, and there is no more hope of it."""
        try:
            (record,) = await self._engine.store.get(APP, [id])
        except StoreError:
            return False
        if record is not None:
            return record.status in FINAL
        return self._world.healing and self._world.clock.monotonic() > self._world.plan.chaos_seconds + 30

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

    async def _submit_trip(self, trip: Trip) -> None:
        ledger = self._world.ledger
        await asyncio.sleep(trip.at)
        facts = {"token": trip.token, "span": ledger.span()}
        ledger.write(What.SUBMIT_INVOKE, self.process.pid, **facts)
        record, _ = self._world.trips.app.tasks[TRIP].prepared(self._engine, (trip.token,), {})
        record = replace(record, id=trip_id(trip.token))
        for _ in range(4):
            try:
                await self._engine.submitter.submit([record])
            except StoreError:
                await asyncio.sleep(0.3)
            else:
                ledger.write(What.SUBMIT_OK, self.process.pid, **facts, id=record.id)
                reading = [self._follow(record.id, name) for name in STREAMS if _writes(trip)]
                await asyncio.gather(self._see(trip, record.id), self._cancel(trip, record.id), *reading)
                return
        ledger.write(What.SUBMIT_UNKNOWN, self.process.pid, **facts)

    async def _submit_party(self, party: Party) -> None:
        await asyncio.sleep(party.at)
        while True:
            try:
                return await submit_party(self._world, self._engine, party)
            except StoreError:
                await asyncio.sleep(0.3)

    async def _follow(self, id: InvocationId, name: str) -> None:
        """Read a stream to its end; come anew where the store was away."""
        world, span, start = self._world, self._world.ledger.span(), 0
        while True:
            reader, cursor = LogReader(cast(Any, self), id, name, start), Cursor()
            try:
                while not cursor.is_over:
                    for placed in await reader._more(cursor):
                        chunk = reader._chunk(placed, {})
                        digest = digest_of(chunk.value, world.codec) if chunk.kind == "chunk" else chunk.kind
                        facts = {"span": span, "id": id, "key": name, "index": chunk.index, "digest": digest}
                        world.ledger.write(What.CHUNK_READ, self.process.pid, **facts)
                        start = chunk.index + 1
                return
            except StoreError:
                await asyncio.sleep(0.5)

    # What a reader needs of an app:

    async def engine(self) -> Engine:
        return self._engine

    @property
    def codec(self) -> Codec:
        return self._world.codec

    async def _cancel(self, job: Job | Trip, id: InvocationId) -> None:
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
        return record_of(self._world, self._engine, job)

    async def _see(self, job: Job | Trip, id: InvocationId) -> None:
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


def record_of(world: World, engine: Engine, job: Job) -> InvocationRecord:
    """The call that a job is."""
    now = world.clock.now()
    policy = dump_policy(Fixed(job.retries, 0.5)) if job.retries else None
    rated = None if job.rate_key is None else rate_key(TASK, job.rate_key)
    record = InvocationRecord(
        id=engine.ids.new() if job.keyed else id_of(job.token),
        key=job.token if job.keyed else None,
        terms=PLAIN if policy is None and rated is None else Terms(retries=policy, rate_key=rated),
        app=APP,
        task=TASK,
        arguments=world.codec.encode_call((job.token,), {}),
        created_at=now,
        due_at=now + job.delay,
        priority=job.priority,
        at_most_once=job.at_most_once,
        limit_key=rated if job.limit_key is None else limit_key(TASK, job.limit_key),
    )
    return registered(record, operation=engine.ids.operation(), at=now)
