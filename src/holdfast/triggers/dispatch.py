"""Dispatch: call the triggers of a happening. Each makes an invocation, or puts the happening into a join.

To fire is to insert an invocation. Its id follows from the trigger and its sources, so dispatch is idempotent. The
caller empties the outbox afterwards; after a crash before that, the services dispatch again.

A call that cannot be made is stored as a failed invocation that says why: an argument that is missing in the event, or
a chain of triggers that is too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from weakref import WeakValueDictionary

import msgspec
from msgspec.structs import replace

from holdfast.codec import NO_PAYLOADS, Payload, Payloads, references
from holdfast.crashpoints import crashpoint
from holdfast.errors import CorruptRecord, NotDecodable, NotEncodable, PayloadLost, StoreError, TriggerFailed
from holdfast.ids import InvocationId
from holdfast.model.changes import apply_to, change_of
from holdfast.model.records import Entry, InvocationRecord, Origin, Source, Terms
from holdfast.model.retries import Exponential, Forever, Only, dump_policy
from holdfast.model.status import Status
from holdfast.runtime.engine import Engine
from holdfast.schedules.records import StoredCall, invocation_of
from holdfast.telemetry.events import DeclarationUnreadable, NotCalled, TriggerFired
from holdfast.triggers import joins, rules
from holdfast.triggers.events import Caused
from holdfast.triggers.joins import Happened, Join
from holdfast.triggers.subscriptions import Subscriptions

_TRIES = 30
_PAUSE_SECONDS = 0.005
_LATER_SECONDS = 60.0


class Firing(msgspec.Struct, frozen=True, kw_only=True):
    """The happenings that a trigger fires for, with what each gives to the call."""

    trigger: rules.TriggerRecord
    clause: int
    happened: tuple[Happened, ...]

    @property
    def at(self) -> float:
        return max(each.at for each in self.happened)

    @property
    def id(self) -> InvocationId:
        return rules.fired_id(self.trigger, self.clause, self.sources, self.at)

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
            path=rules.longer(deepest.path, self.trigger.call.task),
        )


class TriggerDispatcher:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._store = engine.store
        self._subscriptions = engine.part(Subscriptions)
        self._app = engine.app
        self.max_depth = engine.settings.trigger_max_depth
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def dispatch(self, happenings: Sequence[tuple[rules.Facts, Sequence[str]]]) -> list[list[Caused]]:
        """Call the named triggers of each happening. Return what they caused, one list for each happening."""
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
        await self._engine.submitter.submit(records, payloads)
        crashpoint("trigger.fired")
        return answers

    async def _decide(
        self, trigger: rules.TriggerRecord, facts: rules.Facts, records: list[InvocationRecord], payloads: list[Payload]
    ) -> list[Caused]:
        """Append the invocations to submit to `records`. Return what the trigger caused."""
        caused: dict[str, Caused] = {}
        for clause, members in holding(trigger, facts).items():
            if len(trigger.clauses[clause]) == 1:
                firing = Firing(trigger=trigger, clause=clause, happened=(happened(trigger, facts),))
                if firing.id not in caused:
                    self._engine.telemetry.emit(TriggerFired(trigger.name, firing.id, trigger.call.task))
                    records.append(self.invocation(firing, payloads))
                    caused[firing.id] = Caused(trigger=trigger.name, invocation=firing.id)
            else:
                for each in await self._join(trigger, clause, members, facts):
                    caused[each.invocation or each.why] = each
        return list(caused.values()) or [Caused(trigger=trigger.name, why="its conditions do not hold")]

    # --- one firing

    async def at_hand(self, firings: Iterable[Sequence[Happened]]) -> Payloads:
        """Fetch the payloads of happenings that waited for each other. Raises `PayloadLost`."""
        wanted = [one for happened in firings for each in happened for one in references(each.picked)]
        return await self._engine.payloads.fetch(wanted) if wanted else {}

    def invocation(
        self, firing: Firing, payloads: list[Payload], refused: str = "", at_hand: Payloads = NO_PAYLOADS
    ) -> InvocationRecord:
        """Return the invocation of a firing, failed if the call cannot be made; `refused` is a reason known before."""
        call, now, origin = firing.trigger.call, self._store.now(), firing.origin
        given = [rules.DATA.decode(each.picked, at_hand) for each in firing.happened]
        arguments, missing = rules.combine(firing.trigger, given)
        try:
            packed = rules.DATA.pack_call((), arguments, (), self._engine.limits)
        except NotEncodable as error:  # too large or too deep: a retry would fail again
            packed, refused = rules.DATA.pack_call((), {}, (), self._engine.limits), str(error)
        payloads += packed.payloads
        record = invocation_of(
            call,
            operation=self._engine.ids.operation(),
            why=describe_origin(origin),
            id=firing.id,
            app=self._app,
            arguments=packed.data,
            created_at=now,
            due_at=now,
            origin=origin,
        )
        if refused:
            return self.failed(record, refused)
        if missing:
            return self.failed(record, f"nothing was found for {', '.join(missing)} in its happenings")
        return self.bounded(record)

    def bounded(self, record: InvocationRecord) -> InvocationRecord:
        """Return the record, failed if more than `trigger_max_depth` triggers led to it."""
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
        """Return the record as failed. The services dispatch triggers of that end, unless the chain is too long."""
        too_far = record.origin is not None and record.origin.depth > self.max_depth
        outbox = () if too_far else self._subscriptions.of_end(record.task, Status.FAILED)
        error = rules.DATA.encode_error(TriggerFailed(f"{record.task} was not called: {why}", invocation_id=record.id))
        self._engine.telemetry.emit(NotCalled(record, why))
        operation, at = self._engine.ids.operation(), record.created_at
        change = change_of(
            "refused", record, (Status.FAILED,), frozenset({Status.REGISTERED}), operation=operation, at=at, why=why
        )
        ended = replace(change, error=error)
        return apply_to(replace(ended, outbox=outbox) if outbox else ended, record)

    def _evaluation(self, trigger: rules.TriggerRecord, facts: rules.Facts) -> InvocationRecord:
        """Return an invocation of the task that has the trigger's code."""
        now, source = self._store.now(), facts.source
        given = trigger.call
        call = StoredCall(
            task=trigger.evaluator,
            arguments=rules.DATA.encode_call((source.kind, source.id), {}),
            queue=given.queue,
            tags=given.tags,
            priority=given.priority,
            terms=EVALUATION,
        )
        return invocation_of(
            call,
            operation=self._engine.ids.operation(),
            why=f"its code decides about {describe_source(source)}",
            id=rules.evaluation_id(trigger, source, facts.at),
            app=self._app,
            created_at=now,
            due_at=now,
            origin=Origin(trigger=trigger.name, sources=(source,), depth=facts.depth, path=facts.path),
        )

    # --- what waits for others

    async def _join(
        self, trigger: rules.TriggerRecord, clause: int, members: Sequence[int], facts: rules.Facts
    ) -> list[Caused]:
        try:
            join = await self.put(trigger, clause, members, facts)
        except TriggerFailed as error:
            one = replace(happened(trigger, facts), picked=rules.DATA.encode({}))
            record = self.invocation(Firing(trigger=trigger, clause=clause, happened=(one,)), [], str(error))
            await self._engine.submitter.submit([record])
            return [Caused(trigger=trigger.name, invocation=record.id, why="it is too large to wait for others")]
        if join is None:
            return [Caused(trigger=trigger.name, why="it lacks the value that it is correlated by")]
        if not join.firings:
            return [Caused(trigger=trigger.name, why="it waits for the other conditions")]
        return [Caused(trigger=trigger.name, invocation=id) for id in await self._fire(trigger, join)]

    async def put(
        self, trigger: rules.TriggerRecord, clause: int, members: Sequence[int], facts: rules.Facts
    ) -> Join | None:
        """Put a happening into its join. Return the join with the firings that it completed; None without a correlation
        value.

        Raises `TriggerFailed` if it is too large to be kept there.
        """
        name = joins.name_of(trigger, clause, facts)
        if name is None:
            return None
        one = await self._put_aside(happened(trigger, facts))

        def add(join: Join | None, now: float) -> Join:
            before = join or joins.fresh(trigger, clause, name)
            return joins.added(before, one, members, trigger.within_seconds, now)

        join = await self._change(trigger, name, add)
        crashpoint("trigger.joined")
        if join is None:
            return None
        return replace(join, firings=tuple(each for each in join.firings if one.source in [it.source for it in each]))

    async def _put_aside(self, one: Happened) -> Happened:
        """Store the arguments of a happening apart, if they are large."""
        if len(one.picked) <= self._engine.limits.inline:
            return one
        try:
            packed = rules.DATA.pack(rules.DATA.decode(one.picked), self._engine.limits, at="arguments")
        except NotEncodable as error:
            raise TriggerFailed(f"{describe_source(one.source)} gives it too much: {error}") from error
        await self._engine.payloads.keep(packed.payloads)
        return replace(one, picked=packed.data)

    async def _fire(self, trigger: rules.TriggerRecord, join: Join) -> list[InvocationId]:
        """Submit the firings of a join, then remove them from it. Return the invocations' ids."""
        firings = [Firing(trigger=trigger, clause=join.clause, happened=each) for each in join.firings]
        payloads: list[Payload] = []
        at_hand = await self.at_hand(join.firings)
        records = [self.invocation(each, payloads, at_hand=at_hand) for each in firings]
        await self._engine.submitter.submit(records, payloads)
        crashpoint("trigger.fired")
        for record in records:
            self._engine.telemetry.emit(TriggerFired(trigger.name, record.id, record.task))
        await self.clear(trigger, join)
        return [record.id for record in records]

    async def clear(self, trigger: rules.TriggerRecord, join: Join) -> None:
        """Remove firings that were submitted from the stored join."""
        done = set(join.firings)

        def clear(now_there: Join | None, now: float) -> Join | None:
            if now_there is None:
                return None
            return replace(now_there, firings=tuple(each for each in now_there.firings if each not in done))

        await self._change(trigger, join.name, clear)

    async def _change(
        self, trigger: rules.TriggerRecord, name: str, make: Callable[[Join | None, float], Join | None]
    ) -> Join | None:
        """Change a join by compare-and-set on its body: versions begin at 1 again after a join was emptied. A lock per
        join keeps concurrent happenings of one process from retrying against each other.
        """
        lock = self._turns.setdefault(name, asyncio.Lock())
        async with lock:
            return await self._change_alone(trigger, name, make)

    async def _change_alone(
        self, trigger: rules.TriggerRecord, name: str, make: Callable[[Join | None, float], Join | None]
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
        """Perform a duty: fire what a crash has left, drop happenings that waited too long."""
        join = joins.from_entry(entry)
        trigger = (await self._subscriptions.get([join.trigger])).get(join.trigger)
        if trigger is None or join.clause >= len(trigger.clauses):
            await self._store.remove_entry(entry)
        elif join.firings and trigger.evaluator:
            source = Source(kind=joins.KIND, id=join.name)
            facts = rules.Facts(source=source, at=max(each.at for each in join.firings[0]))
            await self._engine.submitter.submit([self._evaluation(trigger, facts)])
            due_at = self._store.now() + _LATER_SECONDS
            await self._store.put_entry(replace(entry, version=entry.version + 1, due_at=due_at), entry)
        elif join.firings:
            await self._fire(trigger, join)
        else:
            within = trigger.within_seconds
            await self._change(trigger, join.name, lambda join, now: join and joins.tidied(join, within, now))

    # --- facts

    async def facts_of(self, record: InvocationRecord) -> rules.Facts:
        """Return the facts of an invocation's end. Values that cannot be decoded are left out."""
        origin = record.origin or Origin()
        facts = rules.Facts(
            source=Source(kind=rules.END, id=record.id, name=record.task),
            at=record.changed_at,
            depth=origin.depth,
            path=origin.path or (record.task,),
            status=record.status,
            error=record.error if record.status is Status.FAILED else None,
        )
        try:
            wanted = [*references(record.arguments), *references(record.result)]
            payloads = await self._engine.payloads.fetch(wanted) if wanted else {}
            args, kwargs = rules.DATA.decode_call(record.arguments, payloads)
            result = None if record.result is None else rules.DATA.decode(record.result, payloads)
        except (NotDecodable, PayloadLost) as error:
            self._engine.telemetry.emit(
                DeclarationUnreadable("triggers", f"so triggers get no values of {record.id}", str(error))
            )
            return facts
        return replace(facts, args=args, kwargs=kwargs, result=result)


_AGAIN = Only(Forever(Exponential(attempts=1)), [StoreError])  # what users' code raises is final
EVALUATION = Terms(retries=dump_policy(_AGAIN), retention={"success": 3600.0})


def happened(trigger: rules.TriggerRecord, facts: rules.Facts) -> Happened:
    given = rules.DATA.encode(rules.picked(trigger, facts))
    return Happened(source=facts.source, at=facts.at, picked=given, depth=facts.depth, path=facts.path)


def holding(
    trigger: rules.TriggerRecord, facts: rules.Facts, unmet: Collection[rules.Condition] = ()
) -> dict[int, list[int]]:
    """Return the clauses that hold for these facts, each with its matching members, without conditions in `unmet`."""
    met = {
        clause: [
            number
            for number, member in enumerate(members)
            if any(each not in unmet and each.holds(facts) for each in member)
        ]
        for clause, members in enumerate(trigger.clauses)
    }
    return {clause: numbers for clause, numbers in met.items() if numbers}


def describe_source(source: Source) -> str:
    """Describe a happening in words."""
    match source.kind:
        case "event":
            return f"the event '{source.name}' {source.id}"
        case "run":
            return f"the request at {source.id} to run the schedule '{source.name}' now"
        case "tick":
            return f"tick {source.id} of the schedule '{source.name.removeprefix(rules.TICKS)}'"
        case "group":
            return f"the end of the group {source.id}"
    return f"the end of {source.name} {source.id}" if source.name else "several happenings"


def describe_origin(origin: Origin) -> str:
    """Describe where an invocation comes from."""
    return f"triggered by {' and '.join(describe_source(each) for each in origin.sources)}"
