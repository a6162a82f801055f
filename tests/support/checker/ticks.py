"""What schedules promise: a tick fires once at most, nothing fires that is no tick, and none is passed over.

Judged from the store alone. A schedule says which instants are ticks, up to when they are decided, and how many of them
were passed over on purpose; an invocation says of which tick it is. That is true of schedules whose timing was not
changed and that were not paused meanwhile: what a pause skipped is written nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.support.checker.case import Case
from tests.support.checker.evidence import Violation

from holdfast.clock import moment
from holdfast.model.records import InvocationRecord
from holdfast.schedules.records import ScheduleRecord
from holdfast.schedules.rules import begins_after, invocation_id

KEPT_SECONDS = 3600.0  # so long an invocation, or an event, is there for sure
_MOST = 100_000
_EARLY_SECONDS = 1.0  # clocks differ


def no_tick_twice(case: Case) -> Iterator[Violation]:
    """I9, safety: each firing is of a tick, and no other is of the same."""
    for schedule in case.dump.schedules:
        until = max(schedule.through, case.dump.at) + _EARLY_SECONDS
        ticks = {moment(tick): tick for tick in _ticks(schedule, schedule.created_at, until)}
        first: dict[str, InvocationRecord] = {}
        for record in firings(case, schedule):
            said = _tick_of(record)
            before = first.setdefault(said, record)
            if before is not record:
                sentence = f"the tick {said} of the schedule '{schedule.name}' fired before, as {before.id}"
                yield Violation("I9", record.id, sentence, (*before.history[:1], *record.history[:1]))
            elif said not in ticks:
                sentence = f"it is said to be of the tick {said}, which the schedule '{schedule.name}' does not have"
                yield Violation("I9", record.id, sentence, record.history[:1])
            elif record.id != invocation_id(schedule, ticks[said]):
                sentence = f"its id is not that of the tick {said} of the schedule '{schedule.name}'"
                yield Violation("I9", record.id, sentence, record.history[:1])


def no_tick_is_lost(case: Case) -> Iterator[Violation]:
    """I9, the other half: of the ticks up to now, all have fired but those that the schedule counts as passed over. For
    catch-up "all" that is none, up to its cap.
    """
    for schedule in case.dump.schedules:
        there = {event.id for event in case.dump.events} if schedule.call.event else case.records.keys()
        since = max(schedule.created_at, case.dump.at - KEPT_SECONDS)
        ticks = _ticks(schedule, since, schedule.through)
        missing = [tick for tick in ticks if invocation_id(schedule, tick) not in there]
        progress = schedule.progress
        if len(missing) > progress.skipped + progress.missed + len(progress.queued):
            told = ", ".join(moment(tick) for tick in missing[:5])
            sentence = (
                f"{len(missing)} of {len(ticks)} ticks of the schedule '{schedule.name}' did not fire ({told}), and it "
                f"counts {progress.skipped} that were skipped, {progress.missed} missed, {len(progress.queued)} waiting"
            )
            yield Violation("I9", None, sentence)


def firings(case: Case, schedule: ScheduleRecord) -> Iterator[InvocationRecord]:
    """What its ticks made. What somebody asked for beside them says so in its first line."""
    for record in case.dump.records:
        origin = record.origin
        if origin is None or origin.trigger != schedule.name or not record.history:
            continue
        said = f"tick {_tick_of(record)} of the schedule '{schedule.name}'"
        if origin.sources and origin.sources[0].kind == "tick" and record.history[0].why == said:
            yield record


def _tick_of(record: InvocationRecord) -> str:
    return record.origin.sources[0].id if record.origin and record.origin.sources else ""


def _ticks(schedule: ScheduleRecord, after: float, until: float) -> list[float]:
    rules = schedule.rules
    until = until if rules.ends_at is None else min(until, rules.ends_at)
    return list(schedule.timing.ticks(begins_after(rules, after), until, _MOST))
