"""Happenings that wait for each other: a clause of a trigger with several members.

There is one record for each clause and each value that the happenings have in common (the order's number, say). It is
changed by one writer at a time. A happening is put into the record once: those that were used are remembered for an
hour, which is longer than anybody repeats anything. When there is one for each member, the first of each are taken out
and become a firing, in the same write. A firing stays in the record until its invocation is stored, whose id follows
from what it is made of. What nobody came for within the trigger's time is dropped; that time is between the happenings
themselves, whenever somebody was told of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from holdfast.codec.data import MISSING
from holdfast.ids import derived_id
from holdfast.lifecycle.decoding import Count, JsonDecoder, Moment, ahead, corrupt
from holdfast.lifecycle.records import Entry, Source
from holdfast.lifecycle.triggers import DATA, Facts, TriggerRecord

KIND = "join"
REMEMBERED_SECONDS = 3600.0
SWEPT_AFTER_SECONDS = 2.0
MOST_WAITING = 1000
MOST_REMEMBERED = 5000
LARGEST = 2**20  # bytes that one may bring along
MOST_BYTES = 4 * 2**20  # that all of them may: the record is written anew for each


class Happened(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that waits for the others, with what it gives to the call."""

    source: Source
    at: Moment
    picked: bytes
    depth: Count = 0
    path: tuple[str, ...] = ()


class Join(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What has happened so far for one clause, for one value."""

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
    """The name of the record that a happening belongs to; None if it lacks what they should have in common.

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
    """The record with something new. The same, if it is there or was used."""
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
    while all(groups):
        firing = tuple(group[0] for group in groups)
        oldest = min(firing, key=lambda each: each.at)
        if max(each.at for each in firing) - oldest.at >= within_seconds:
            groups[firing.index(oldest)].pop(0)
            continue
        firings.append(firing)
        used |= {each.source.id: now + REMEMBERED_SECONDS for each in firing}
        groups = [[each for each in group if each.source.id not in used] for group in groups]
    before = sum(map(len, groups))
    groups = [group[-MOST_WAITING:] for group in groups]
    while sum(len(each.picked) for group in groups for each in group) > MOST_BYTES:
        min(filter(None, groups), key=lambda group: group[0].at).pop(0)
    dropped = join.dropped + before - sum(map(len, groups))
    used = dict(list(used.items())[-MOST_REMEMBERED:])
    return replace(join, members=tuple(map(tuple, groups)), firings=tuple(firings), used=used, dropped=dropped)


def tidied(join: Join, within_seconds: float, now: float) -> Join:
    """Without what is too old to wait or to be remembered."""
    members = tuple(tuple(each for each in group if each.at > now - within_seconds) for group in join.members)
    used = {id: until for id, until in join.used.items() if until > now}
    return replace(join, members=members, used=used)


def to_entry(join: Join, within_seconds: float, now: float) -> Entry:
    """Looked at again when something in it is to be stored, or is too old."""
    times = [ahead(each.at, within_seconds) for group in join.members for each in group] + list(join.used.values())
    due_at = now + SWEPT_AFTER_SECONDS if join.firings else min(times, default=now)
    body = msgspec.json.encode(join)
    return Entry(app=join.app, kind=KIND, name=join.name, body=body, version=join.version, due_at=due_at)


def from_entry(entry: Entry) -> Join:
    """Raises `CorruptRecord` for what cannot be read."""
    try:
        return replace(_decoder.decode(entry.body), version=entry.version)
    except Exception as error:
        raise corrupt(KIND, entry.name, error) from error


_decoder = JsonDecoder[Join](Join)
