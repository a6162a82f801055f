"""Happenings that wait for each other: a clause of a trigger with several members.

There is one record for each clause and correlation value (an order's number, say), changed by one writer at a time. A
happening is put into the record once: used ones are remembered for an hour, longer than any dispatch is repeated. When
every member has its own happening, the first of each become a firing, in the same write. A firing stays in the record
until its invocation is stored, whose id follows from its happenings. A happening that waits longer than the trigger's
`within` is dropped; that time is measured between the happenings, not between their dispatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from holdfast.codec.data import MISSING
from holdfast.ids import derived_id
from holdfast.model.decoding import Count, Moment, ahead
from holdfast.model.records import Entry, Source, digests_in, entry_reader
from holdfast.triggers.rules import DATA, Facts, TriggerRecord

KIND = "join"
REMEMBERED_SECONDS = 3600.0
SWEPT_AFTER_SECONDS = 2.0
MAX_WAITING = 1000
MAX_REMEMBERED = 5000
MAX_BYTES = 4 * 2**20  # that all of them may bring along: the record is rewritten for each


class Happened(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A happening that waits for the others, with what it gives to the call; it may refer to payloads."""

    source: Source
    at: Moment
    picked: bytes
    depth: Count = 0
    path: tuple[str, ...] = ()


class Join(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The happenings so far for one clause and one correlation value."""

    app: str
    name: str
    trigger: str
    clause: Count
    members: tuple[tuple[Happened, ...], ...]
    firings: tuple[tuple[Happened, ...], ...] = ()
    used: Mapping[str, Moment] = {}  # until when it is remembered that this one was used
    dropped: Count = 0
    version: Count = 0

    @property
    def is_empty(self) -> bool:
        return not self.firings and not self.used and not any(self.members)


def name_of(trigger: TriggerRecord, clause: int, facts: Facts) -> str | None:
    """Return the name of a happening's record; None if the happening lacks the correlation value.

    It follows from the conditions, too: under the trigger's name, other code may wait for something else.
    """
    members = trigger.clauses[clause]
    waits_for = repr([[(str(each), each.correlate) for each in member] for member in members])
    condition = next(each for member in members for each in member if each.holds(facts))
    if not condition.correlate:
        return derived_id("join", trigger.name, str(clause), waits_for)
    value = condition.correlation(facts)
    if value is MISSING:
        return None
    return derived_id("join", trigger.name, str(clause), waits_for, DATA.digest({"": value}))


def fresh(trigger: TriggerRecord, clause: int, name: str) -> Join:
    members = ((),) * len(trigger.clauses[clause])
    return Join(app=trigger.app, name=name, trigger=trigger.name, clause=clause, members=members)


def added(join: Join, happened: Happened, members: Sequence[int], within_seconds: float, now: float) -> Join:
    """Return the join with a happening added; unchanged if the happening is there or was used."""
    if happened.source.id in join.used or any(
        each.source == happened.source for group in (*join.members, *join.firings) for each in group
    ):
        return join
    groups = [list(group) for group in join.members]
    for member in members:
        groups[member].append(happened)
        groups[member].sort(key=lambda each: each.at)
    used = {id: until for id, until in join.used.items() if until > now}
    firings = list(join.firings)
    while firing := _distinct(groups):
        oldest = min(firing, key=lambda each: each.at)
        if max(each.at for each in firing) - oldest.at >= within_seconds:
            groups = [[each for each in group if each.source != oldest.source] for group in groups]
            continue
        firings.append(firing)
        used |= {each.source.id: now + REMEMBERED_SECONDS for each in firing}
        groups = [[each for each in group if each.source.id not in used] for group in groups]
    before = sum(map(len, groups))
    groups = [group[-MAX_WAITING:] for group in groups]
    while sum(len(each.picked) for group in groups for each in group) > MAX_BYTES:
        min(filter(None, groups), key=lambda group: group[0].at).pop(0)
    dropped = join.dropped + before - sum(map(len, groups))
    used = dict(list(used.items())[-MAX_REMEMBERED:])
    return replace(join, members=tuple(map(tuple, groups)), firings=tuple(firings), used=used, dropped=dropped)


def _distinct(groups: Sequence[Sequence[Happened]]) -> tuple[Happened, ...]:
    """Return a happening for each member, as old as possible and none of them twice: ``all_of`` of the same event twice
    needs two events. Nothing if there are not enough.
    """
    holds: dict[Source, int] = {}
    chosen: dict[int, Happened] = {}

    def take(member: int, asked: set[Source]) -> bool:
        free = next((each for each in groups[member] if each.source not in holds), None)
        for each in groups[member] if free is None else (free,):
            if each.source in asked:
                continue
            asked.add(each.source)
            if each.source not in holds or take(holds[each.source], asked):  # its holder takes another one
                holds[each.source], chosen[member] = member, each
                return True
        return False

    is_complete = bool(groups) and all(groups) and all(take(member, set()) for member in range(len(groups)))
    return tuple(chosen[member] for member in range(len(groups))) if is_complete else ()


def tidied(join: Join, within_seconds: float, now: float) -> Join:
    """Return the join without happenings that are too old to wait or to be remembered."""
    members = tuple(tuple(each for each in group if each.at > now - within_seconds) for group in join.members)
    used = {id: until for id, until in join.used.items() if until > now}
    return replace(join, members=members, used=used)


def to_entry(join: Join, within_seconds: float, now: float) -> Entry:
    """Return the entry, due when a firing has to be submitted or a happening becomes too old."""
    times = [ahead(each.at, within_seconds) for group in join.members for each in group] + list(join.used.values())
    due_at = now + SWEPT_AFTER_SECONDS if join.firings else min(times, default=now)
    body = msgspec.json.encode(join)
    payloads = digests_in(*[each.picked for group in (*join.members, *join.firings) for each in group])
    return Entry(
        app=join.app, kind=KIND, name=join.name, body=body, version=join.version, due_at=due_at, payloads=payloads
    )


from_entry = entry_reader(Join, KIND)
