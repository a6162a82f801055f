"""What triggers promise: everything that has happened calls each task that waits for it once.

Judged from the store alone: which triggers there are, what has happened (events, and the ends of invocations), and
which invocations say that they come of it. A happening counts for sure if the trigger was known everywhere by then, and
if it is young enough that what came of it is still there. The conditions that a trigger has as code are not judged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from math import inf

from tests.support.checker.case import Case
from tests.support.checker.evidence import Violation
from tests.support.checker.ticks import KEPT_SECONDS
from tests.support.witness import What

from holdfast.errors import CodecError
from holdfast.model.records import InvocationRecord, Origin, Source
from holdfast.model.status import FINAL, Status
from holdfast.triggers import joins
from holdfast.triggers.dispatch import holding
from holdfast.triggers.rules import DATA, END, Facts, OnEvent, TriggerRecord


def everybody_was_told(case: Case) -> Iterator[Violation]:
    """I10, at rest: no outbox is left, nothing that is complete waits, and no acknowledged event is missing."""
    for record in case.dump.records:
        if record.outbox:
            sentence = f"its end was not told to {', '.join(record.outbox)}"
            yield Violation("I10", record.id, sentence, record.history[-1:])
    for event in case.dump.events:
        if event.outbox:
            yield Violation("I10", event.id, f"the event '{event.name}' was not told to {', '.join(event.outbox)}")
    for join in case.dump.joins:
        if join.firings:
            yield Violation("I10", None, f"all that '{join.trigger}' waits for has happened, and it was not fired")
    there = {event.id for event in case.dump.events}
    for line in case.events(What.EMIT_OK):
        if line.id not in there:
            yield Violation("I10", line.id, "the event was acknowledged, and is not there", (line,))


def one_call_for_each(case: Case) -> Iterator[Violation]:
    """I10: a trigger whose condition holds for something has made one call of it, and else none."""
    evidence = Causes(case)
    for trigger in case.dump.triggers:
        calls = evidence.calls(trigger)
        for source, records in calls.items():
            for task in {record.task for record in records}:
                same = [record for record in records if record.task == task]
                if len(same) > 1:
                    sentence = f"the trigger '{trigger.name}' fired for {_told(source)} before, as {same[0].id}"
                    yield Violation("I10", same[1].id, sentence, (*same[0].history[:1], *same[1].history[:1]))
        if trigger.evaluator:
            yield from _missing(evidence, trigger, calls)
            continue
        for source, records in calls.items():
            if len(source) == 1 and (about := evidence.facts.get(source[0])) and not _alone(trigger, about):
                sentence = f"the trigger '{trigger.name}' fired for {_told(source)}, and its conditions do not hold"
                yield Violation("I10", records[0].id, sentence, records[0].history[:1])
        yield from _missing(evidence, trigger, calls)


def each_happening_is_used_once(case: Case) -> Iterator[Violation]:
    """I10, where a trigger waits for several things: none is used twice, and it fires as often as all have happened."""
    evidence = Causes(case)
    for trigger in case.dump.triggers:
        groups = list(evidence.groups(trigger))
        calls = {sources: records for sources, records in evidence.calls(trigger).items() if len(sources) > 1}
        used: dict[Source, InvocationRecord] = {}
        for sources, (record, *_) in calls.items():
            if evidence.facts.keys() >= set(sources) and not any(group.has(sources) for group in groups):
                sentence = f"'{trigger.name}' put together what does not belong together: {_told(sources)}"
                yield Violation("I10", record.id, sentence, record.history[:1])
            for source in sources:
                before = used.setdefault(source, record)
                if before is not record:
                    sentence = f"{_told((source,))} was used by '{trigger.name}' before, for {before.id}"
                    yield Violation("I10", record.id, sentence, (*before.history[:1], *record.history[:1]))
        for group in groups if not trigger.evaluator else ():
            found = sum(group.has(sources) for sources in calls)
            least, most = group.times(sure=True), group.times(sure=False)
            if not least <= found <= most:
                sentence = f"all that '{trigger.name}' waits for has happened {most} times, and it fired {found} times"
                yield Violation("I10", None, sentence)


Calls = dict[tuple[Source, ...], list[InvocationRecord]]


class Group:
    """What belongs together for one clause of a trigger: by member, what has happened, and what of it counts."""

    def __init__(self, members: int) -> None:
        self._all: list[set[Source]] = [set() for _ in range(members)]
        self._sure: list[set[Source]] = [set() for _ in range(members)]

    def add(self, member: int, source: Source, sure: bool) -> None:
        self._all[member].add(source)
        if sure:
            self._sure[member].add(source)

    def has(self, sources: tuple[Source, ...]) -> bool:
        return all(any(source in member for member in self._all) for source in sources)

    def times(self, *, sure: bool) -> int:
        return min(map(len, self._sure if sure else self._all))


class Causes:
    """What has happened, and what came of it."""

    def __init__(self, case: Case) -> None:
        self._case = case

    @cached_property
    def facts(self) -> dict[Source, Facts]:
        whole = [event.facts_with(self._case.dump.payloads) for event in self._case.dump.events]
        found = {facts.source: facts for facts in whole}
        for record in self._case.dump.records:
            facts = _end_of(record)
            if facts is not None:
                found[facts.source] = facts
        return found

    def calls(self, trigger: TriggerRecord) -> Calls:
        found: Calls = defaultdict(list)
        for record in self._by_trigger.get(trigger.name, ()):
            assert record.origin is not None
            found[record.origin.sources].append(record)
        return found

    @cached_property
    def _by_trigger(self) -> dict[str, list[InvocationRecord]]:
        found: dict[str, list[InvocationRecord]] = defaultdict(list)
        for record in self._case.dump.records:
            if record.origin is not None and record.origin.sources:
                found[record.origin.trigger].append(record)
        return found

    def is_sure(self, trigger: TriggerRecord, facts: Facts) -> bool:
        """Whether whoever wrote it down has to have known the trigger, and what came of it has to be there."""
        since = trigger.created_at + self._case.bounds.subscribed_seconds
        until = inf if trigger.retired_at is None else trigger.retired_at
        return max(since, self._case.dump.at - KEPT_SECONDS) < facts.at < until

    def groups(self, trigger: TriggerRecord) -> Iterator[Group]:
        """By clause and by what happenings have in common. One that counts for two members is nobody's example."""
        found: dict[str, Group] = {}
        for facts in self.facts.values():
            for clause, members in holding(trigger, facts).items():
                size = len(trigger.clauses[clause])
                name = joins.name_of(trigger, clause, facts) if size > 1 else None
                if name is None:
                    continue
                group = found.setdefault(name, Group(size))
                young = facts.at > self._case.dump.at - trigger.within_seconds
                for member in members:
                    group.add(member, facts.source, len(members) == 1 and young and self.is_sure(trigger, facts))
        return iter(found.values())


def _missing(evidence: Causes, trigger: TriggerRecord, calls: Calls) -> Iterator[Violation]:
    if trigger.call.dedup_key is not None:
        return  # another one that waits is enough
    for source, facts in evidence.facts.items():
        wanted = _is_asked(trigger, facts) if trigger.evaluator else _alone(trigger, facts)
        if wanted and (source,) not in calls and evidence.is_sure(trigger, facts):
            sentence = f"the trigger '{trigger.name}' did not fire for {_told((source,))}"
            yield Violation("I10", source.id, sentence)


def _alone(trigger: TriggerRecord, facts: Facts) -> bool:
    """Whether this happening is enough."""
    return any(len(trigger.clauses[clause]) == 1 for clause in holding(trigger, facts))


def _is_asked(trigger: TriggerRecord, facts: Facts) -> bool:
    """Whether its code is asked about this."""
    kind, name = facts.source.kind, facts.source.name
    return any(
        kind != END and each.name == name
        if isinstance(each, OnEvent)
        else kind == END and name in each.tasks and facts.status in each.statuses
        for each in trigger.conditions
    )


def _end_of(record: InvocationRecord) -> Facts | None:
    """An end that triggers hear of: what failed before it began, since it could not be called, tells nobody. One whose
    values lie elsewhere is not judged.
    """
    if record.status not in FINAL or (record.status is Status.FAILED and len(record.history) == 2):
        return None
    try:
        args, kwargs = DATA.decode_call(record.arguments)
        result = None if record.result is None else DATA.decode(record.result)
    except CodecError:
        return None
    origin = record.origin or Origin()
    return Facts(
        source=Source(kind=END, id=record.id, name=record.task),
        at=record.changed_at,
        depth=origin.depth,
        status=record.status,
        args=args,
        kwargs=kwargs,
        result=result,
        error=record.error if record.status is Status.FAILED else None,
    )


def _told(sources: tuple[Source, ...]) -> str:
    return " and ".join(f"the {source.kind} of '{source.name}' {source.id}" for source in sources)
