"""What chains and groups promise: the end of a link calls the next one, and that of a group calls back once.

Judged from the store alone: a link says what follows it, a group what it calls, and a call what it follows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from tests.support.checker.case import Case
from tests.support.checker.evidence import Violation

from holdfast.groups.records import KIND, GroupRecord
from holdfast.groups.rules import error_id, first_of, link_id, member_ids
from holdfast.ids import InvocationId
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL, Status


def chains_go_on(case: Case) -> Iterator[Violation]:
    """I21: the end of a link has called the next one, or has ended its chain; nothing was called twice."""
    records = {record.id: record for record in case.dump.records}
    called = _following(case, "end")
    for record in records.values():
        follow = record.terms.follow
        if follow is None or record.status not in FINAL:
            continue
        first, wanted = first_of(record), set[str]()
        if record.status is Status.SUCCESS:
            wanted |= {link_id(first, follow.place + 1)} if follow.rest else set()
        else:
            wanted |= {link_id(first, follow.place + len(follow.rest))} if follow.rest else set()
            wanted |= {error_id(first)} if follow.on_error is not None else set()
        there = {each.id for each in called[record.id]}
        for id in sorted(wanted - records.keys()):
            yield Violation("I21", record.id, f"it has ended, and {id}, which follows it, was not called")
        for id in sorted(there - wanted):
            yield Violation("I21", id, f"it was called at the end of {record.id}, and does not follow that")


def groups_call_back_once(case: Case) -> Iterator[Violation]:
    """I21: a group whose members have all ended has called back once, and no other group has."""
    records = {record.id: record for record in case.dump.records}
    called = _following(case, KIND)
    for group in case.dump.groups:
        if not group.is_watched:
            continue
        found, wanted = called[group.id], _expected(group, records)
        if len(found) > wanted:
            why = "was called before" if wanted else "had not ended, or has no callback"
            yield Violation("I21", found[-1].id, f"the group {group.id} {why}", found[-1].history[:1])
        elif len(found) < wanted:
            yield Violation("I21", group.id, "all members of the group have ended, and its callback was not called")
        ended = max((records[id].changed_at for id in _members(group) if id in records), default=0.0)
        for each in found if wanted else ():
            if each.history[0].at < ended - case.slack - case.bounds.tolerance_seconds:
                yield Violation("I21", each.id, f"the group {group.id} had not ended then", each.history[:1])
        if wanted and group.done_at is None:
            yield Violation("I21", group.id, "all members of the group have ended, and it is open")


def _expected(group: GroupRecord, records: Mapping[str, InvocationRecord]) -> int:
    members = [records.get(id) for id in _members(group)]
    if not group.is_whole or any(member is None or member.status not in FINAL for member in members):
        return 0
    has_failed = any(member is not None and member.status is not Status.SUCCESS for member in members)
    return int(group.then is not None or (has_failed and group.on_error is not None))


def _members(group: GroupRecord) -> list[InvocationId]:
    return member_ids(group.id, 0, group.size)


def _following(case: Case, kind: str) -> Mapping[str, list[InvocationRecord]]:
    """The calls that say that they follow something of this kind, and that no trigger has made."""
    found: dict[str, list[InvocationRecord]] = defaultdict(list)
    for record in case.dump.records:
        if record.origin is not None and not record.origin.trigger:
            for source in record.origin.sources:
                if source.kind == kind:
                    found[source.id].append(record)
    return found
