"""Telling triggers what has happened: each makes an invocation of it, or puts it where it waits for others.

To fire is to insert an invocation whose id follows from the trigger and from what it fires for, so telling twice does
what telling once does. Whoever calls this writes down afterwards that it was done; a crash before that is made up for
by the services, from the outbox of what happened.

What cannot be called is stored all the same, as an invocation that has failed and says why: an argument that is not in
the event, or a chain of triggers that has become too long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from weakref import WeakValueDictionary

import msgspec
from msgspec.structs import replace

from holdfast.codec import Limits, Payload, references
from holdfast.crashpoints import crashpoint
from holdfast.engine.depot import Depot
from holdfast.engine.schedules import expiring
from holdfast.engine.submit import Submitter
from holdfast.engine.subscriptions import Subscriptions
from holdfast.errors import CorruptRecord, NotDecodable, NotEncodable, PayloadLost, StoreError, TriggerFailed
from holdfast.ids import Ids, InvocationId
from holdfast.lifecycle import joins
from holdfast.lifecycle.changes import apply_to, unowned
from holdfast.lifecycle.events import Caused
from holdfast.lifecycle.joins import Happened, Join
from holdfast.lifecycle.records import Entry, InvocationRecord, Origin, Source, Terms, registered
from holdfast.lifecycle.retries import Exponential, Forever, Only, dump_policy
from holdfast.lifecycle.status import Status
from holdfast.lifecycle.triggers import (
    DATA,
    END,
    TICKS,
    Condition,
    Facts,
    TriggerRecord,
    evaluation_id,
    fired_id,
    longer,
    picked,
    put_together,
)
from holdfast.store.contract import Store

log = logging.getLogger("holdfast.triggers")

MAX_DEPTH = 100
_TRIES = 30
_PAUSE_SECONDS = 0.005
_LATER_SECONDS = 60.0


class Firing(msgspec.Struct, frozen=True, kw_only=True):
    """What a trigger fires for, with what each of it gives to the call."""

    trigger: TriggerRecord
    clause: int
    happened: tuple[Happened, ...]

    @property
    def at(self) -> float:
        return max(each.at for each in self.happened)

    @property
    def id(self) -> InvocationId:
        return fired_id(self.trigger, self.clause, self.sources, self.at)

    @property
    def sources(self) -> tuple[Source, ...]:
        return tuple(dict.fromkeys(each.source for each in self.happened))

    @property
    def origin(self) -> Origin:
        deepest = max(self.happened, key=lambda each: each.depth)
        return Origin(
            trigger=self.trigger.name,
            sources=self.sources,
            depth=deepest.depth + 1,
            path=longer(deepest.path, self.trigger.call.task),
        )


class Teller:
    def __init__(
        self,
        store: Store,
        submitter: Submitter,
        depot: Depot,
        ids: Ids,
        subscriptions: Subscriptions,
        *,
        app: str,
        limits: Limits,
        max_depth: int = MAX_DEPTH,
    ) -> None:
        self._store = store
        self._submitter = submitter
        self._depot = depot
        self._ids = ids
        self._subscriptions = subscriptions
        self._app = app
        self._limits = limits
        self.max_depth = max_depth
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def tell(self, happenings: Sequence[tuple[Facts, Sequence[str]]]) -> list[list[Caused]]:
        """Tell each of these triggers, by name, what has happened. What became of it, for each happening."""
        triggers = await self._subscriptions.get(name for _, names in happenings for name in names)
        records: list[InvocationRecord] = []
        payloads: list[Payload] = []
        answers = []
        for facts, names in happenings:
            caused = []
            for name in names:
                trigger = triggers.get(name)
                if trigger is None:
                    caused.append(Caused(trigger=name, why="the trigger is gone, or cannot be read"))
                elif trigger.evaluator:
                    records.append(self._evaluation(trigger, facts))
                    caused.append(Caused(trigger=name, invocation=records[-1].id, why="its code decides"))
                else:
                    caused += await self._decide(trigger, facts, records, payloads)
            answers.append(caused)
        await self._submitter.submit(records, payloads)
        crashpoint("trigger.fired")
        return answers

    async def _decide(
        self, trigger: TriggerRecord, facts: Facts, records: list[InvocationRecord], payloads: list[Payload]
    ) -> list[Caused]:
        """Append what is to be submitted."""
        caused: dict[str, Caused] = {}
        for clause, members in holding(trigger, facts).items():
            if len(trigger.clauses[clause]) == 1:
                firing = Firing(trigger=trigger, clause=clause, happened=(happened(trigger, facts),))
                if firing.id not in caused:
                    records.append(self.invocation(firing, payloads))
                    caused[firing.id] = Caused(trigger=trigger.name, invocation=firing.id)
            else:
                for each in await self._join(trigger, clause, members, facts):
                    caused[each.invocation or each.why] = each
        return list(caused.values()) or [Caused(trigger=trigger.name, why="its conditions do not hold")]

    # --- one firing

    def invocation(self, firing: Firing, payloads: list[Payload], refused: str = "") -> InvocationRecord:
        """The call that a trigger makes, or what says why it cannot be made; `refused` is a reason known before."""
        call, now, origin = firing.trigger.call, self._store.now(), firing.origin
        arguments, missing = put_together(firing.trigger, [DATA.decode(each.picked) for each in firing.happened])
        try:
            packed = DATA.pack_call((), arguments, (), self._limits)
        except NotEncodable as error:  # beyond what is allowed: it would be so each time
            packed, refused = DATA.pack_call((), {}, (), self._limits), str(error)
        payloads += packed.payloads
        fresh = InvocationRecord(
            id=firing.id,
            app=self._app,
            task=call.task,
            arguments=packed.data,
            queue=call.queue,
            tags=call.tags,
            priority=call.priority,
            at_most_once=call.at_most_once,
            limit_key=call.limit_key,
            twin=call.twin,
            terms=call.terms,
            created_at=now,
            due_at=now,
            origin=origin,
        )
        record = registered(expiring(fresh, call), operation=self._ids.operation(), at=now, why=said(origin))
        if refused:
            return self.failed(record, refused)
        if missing:
            return self.failed(record, f"nothing was found for {', '.join(missing)} in what it was triggered by")
        return self.bounded(record)

    def bounded(self, record: InvocationRecord) -> InvocationRecord:
        """The record, or one that has failed if too many triggers led to it."""
        origin = record.origin
        if origin is None or origin.depth <= self.max_depth:
            return record
        path = " → ".join(origin.path)
        return self.failed(
            record,
            f"{origin.depth} triggers led to it, and {self.max_depth} are allowed (trigger_max_depth): do they go in a "
            f"circle? The last tasks on the way: {path}",
        )

    def failed(self, record: InvocationRecord, why: str) -> InvocationRecord:
        """It has ended by that, and who waits for such an end is told by the services; unless it has gone too far."""
        too_far = record.origin is not None and record.origin.depth > self.max_depth
        outbox = () if too_far else self._subscriptions.of_end(record.task, Status.FAILED)
        error = DATA.encode_error(TriggerFailed(f"{record.task} was not called: {why}", invocation_id=record.id))
        log.error("%s was not called: %s", record.task, why, extra={"invocation": record.id, "task": record.task})
        operation, at = self._ids.operation(), record.created_at
        change = unowned("refused", record, Status.FAILED, frozenset({Status.REGISTERED}), operation, at, why)
        ended = replace(change, error=error)
        return apply_to(replace(ended, outbox=outbox) if outbox else ended, record)

    def _evaluation(self, trigger: TriggerRecord, facts: Facts) -> InvocationRecord:
        """A call of the task that knows the trigger's code."""
        now, source = self._store.now(), facts.source
        record = InvocationRecord(
            id=evaluation_id(trigger, source, facts.at),
            app=self._app,
            task=trigger.evaluator,
            arguments=DATA.encode_call((source.kind, source.id), {}),
            queue=trigger.call.queue,
            tags=trigger.call.tags,
            priority=trigger.call.priority,
            terms=EVALUATION,
            created_at=now,
            due_at=now,
            origin=Origin(trigger=trigger.name, sources=(source,), depth=facts.depth, path=facts.path),
        )
        return registered(record, operation=self._ids.operation(), at=now, why=f"its code decides about {told(source)}")

    # --- what waits for others

    async def _join(self, trigger: TriggerRecord, clause: int, members: Sequence[int], facts: Facts) -> list[Caused]:
        try:
            join = await self.put(trigger, clause, members, facts)
        except TriggerFailed as error:
            one = replace(happened(trigger, facts), picked=DATA.encode({}))
            record = self.invocation(Firing(trigger=trigger, clause=clause, happened=(one,)), [], str(error))
            await self._submitter.submit([record])
            return [Caused(trigger=trigger.name, invocation=record.id, why="it is too large to wait for others")]
        if join is None:
            return [Caused(trigger=trigger.name, why="it lacks what it is correlated by")]
        if not join.firings:
            return [Caused(trigger=trigger.name, why="it waits for the other conditions")]
        return [Caused(trigger=trigger.name, invocation=id) for id in await self._fire(trigger, join)]

    async def put(self, trigger: TriggerRecord, clause: int, members: Sequence[int], facts: Facts) -> Join | None:
        """Put it where it waits for others; None if it says not which. What it has completed is to be fired, and in the
        answer; what others have completed is theirs.

        Raises `TriggerFailed` for what is too large to be kept there.
        """
        name = joins.name_of(trigger, clause, facts)
        if name is None:
            return None
        one = happened(trigger, facts)
        if len(one.picked) > joins.LARGEST:
            raise TriggerFailed(
                f"{told(facts.source)} gives it {len(one.picked):,} bytes, and at most {joins.LARGEST:,} can wait for "
                "other conditions: store it elsewhere and pass its name, or take it with a function for arguments="
            )

        def add(join: Join | None, now: float) -> Join:
            before = join or joins.fresh(trigger, clause, name)
            return joins.added(before, one, members, trigger.within_seconds, now)

        join = await self._change(trigger, name, add)
        crashpoint("trigger.joined")
        if join is None:
            return None
        return replace(join, firings=tuple(each for each in join.firings if one.source in [it.source for it in each]))

    async def _fire(self, trigger: TriggerRecord, join: Join) -> list[InvocationId]:
        """Submit what is complete, then take it out."""
        firings = [Firing(trigger=trigger, clause=join.clause, happened=each) for each in join.firings]
        payloads: list[Payload] = []
        records = [self.invocation(each, payloads) for each in firings]
        await self._submitter.submit(records, payloads)
        crashpoint("trigger.fired")
        await self.clear(trigger, join)
        return [record.id for record in records]

    async def clear(self, trigger: TriggerRecord, join: Join) -> None:
        """Take out what was complete: it is submitted."""
        done = set(join.firings)

        def clear(now_there: Join | None, now: float) -> Join | None:
            if now_there is None:
                return None
            return replace(now_there, firings=tuple(each for each in now_there.firings if each not in done))

        await self._change(trigger, join.name, clear)

    async def _change(
        self, trigger: TriggerRecord, name: str, make: Callable[[Join | None, float], Join | None]
    ) -> Join | None:
        """Read, decide, and write over what was read, until nobody comes in between: a version alone would not tell,
        since what was emptied and begun anew counts from 1 again. In one process they take turns: of a thousand that
        come at once, all but one would read and write for nothing.
        """
        lock = self._turns.setdefault(name, asyncio.Lock())
        async with lock:
            return await self._change_alone(trigger, name, make)

    async def _change_alone(
        self, trigger: TriggerRecord, name: str, make: Callable[[Join | None, float], Join | None]
    ) -> Join | None:
        for turn in range(_TRIES):
            entries = await self._store.entries(self._app, joins.KIND, [name])
            try:
                before = joins.from_entry(entries[0]) if entries else None
            except CorruptRecord as error:
                await self._store.quarantine_entry(entries[0], error)
                continue
            now = self._store.now()
            after: Join | None = make(before, now)
            if after == before or after is None:
                return after
            entry = joins.to_entry(
                replace(after, version=(before.version if before else 0) + 1), trigger.within_seconds, now
            )
            if after.is_empty and before is not None:
                if await self._store.remove_entry(entries[0]):
                    return after
            elif await self._store.put_entry(entry, entries[0] if entries else None):
                return replace(after, version=entry.version)
            await asyncio.sleep(turn * _PAUSE_SECONDS)
        raise StoreError(f"the trigger '{trigger.name}' is written to again and again by others")

    async def tidy(self, entry: Entry) -> None:
        """A service: fire what a crash has left, drop what waited for too long."""
        join = joins.from_entry(entry)
        trigger = (await self._subscriptions.get([join.trigger])).get(join.trigger)
        if trigger is None or join.clause >= len(trigger.clauses):
            await self._store.remove_entry(entry)
        elif join.firings and trigger.evaluator:
            source = Source(kind=joins.KIND, id=join.name)
            facts = Facts(source=source, at=max(each.at for each in join.firings[0]))
            await self._submitter.submit([self._evaluation(trigger, facts)])
            due_at = self._store.now() + _LATER_SECONDS
            await self._store.put_entry(replace(entry, version=entry.version + 1, due_at=due_at), entry)
        elif join.firings:
            await self._fire(trigger, join)
        else:
            within = trigger.within_seconds
            await self._change(trigger, join.name, lambda join, now: join and joins.tidied(join, within, now))

    # --- facts

    async def facts_of(self, record: InvocationRecord) -> Facts:
        """The end of an invocation. What is in it that cannot be read is as if it were not there."""
        origin = record.origin or Origin()
        facts = Facts(
            source=Source(kind=END, id=record.id, name=record.task),
            at=record.changed_at,
            depth=origin.depth,
            path=origin.path or (record.task,),
            status=record.status,
            error=record.error if record.status is Status.FAILED else None,
        )
        try:
            wanted = [*references(record.arguments), *references(record.result)]
            payloads = await self._depot.fetch(wanted) if wanted else {}
            args, kwargs = DATA.decode_call(record.arguments, payloads)
            result = None if record.result is None else DATA.decode(record.result, payloads)
        except (NotDecodable, PayloadLost) as error:
            log.error("what %s was called with, or returned, is not at hand for triggers: %s", record.id, error)
            return facts
        return replace(facts, args=args, kwargs=kwargs, result=result)


_AGAIN = Only(Forever(Exponential(attempts=1)), [StoreError])  # what users' code raises is final
EVALUATION = Terms(retries=dump_policy(_AGAIN), retention={"success": 3600.0})


def happened(trigger: TriggerRecord, facts: Facts) -> Happened:
    given = DATA.encode(picked(trigger, facts))
    return Happened(source=facts.source, at=facts.at, picked=given, depth=facts.depth, path=facts.path)


def holding(trigger: TriggerRecord, facts: Facts, unmet: Collection[Condition] = ()) -> dict[int, list[int]]:
    """The clauses that this happening is for, each with the numbers of its members; but for conditions that are known
    not to be met.
    """
    met = {
        clause: [
            number
            for number, member in enumerate(members)
            if any(each not in unmet and each.holds(facts) for each in member)
        ]
        for clause, members in enumerate(trigger.clauses)
    }
    return {clause: numbers for clause, numbers in met.items() if numbers}


def told(source: Source) -> str:
    """A happening in words."""
    match source.kind:
        case "event":
            return f"the event '{source.name}' {source.id}"
        case "run":
            return f"the wish at {source.id} to run the schedule '{source.name}' now"
        case "tick":
            return f"tick {source.id} of the schedule '{source.name.removeprefix(TICKS)}'"
    return f"the end of {source.name} {source.id}" if source.name else "several happenings"


def said(origin: Origin) -> str:
    """Where an invocation comes from, in words."""
    return f"triggered by {' and '.join(told(each) for each in origin.sources)}"
