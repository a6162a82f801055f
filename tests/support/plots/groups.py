"""Chains and groups: runs in which they did what they promise, and runs in which they did not."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from tests.support.checker import Dump
from tests.support.plots.material import Plot, claim, ends, fails, left, made, with_line

from holdfast.groups.records import GroupRecord
from holdfast.groups.rules import done_id, error_id, group_id, link_id, member_ids
from holdfast.model.records import Follow, InvocationRecord, NextCall, Origin, Source, StoredCall, Terms
from holdfast.testing.samples import START
from holdfast.triggers.rules import DATA

NEXT = NextCall(call=StoredCall(task="shop:send", arguments=DATA.encode_call((), {})))
FIRST = group_id("first", START)
GROUP = group_id("group", START)
MEMBERS = member_ids(GROUP, 0, 2)


def link(*, fail: bool = False, rest: int = 1, on_error: bool = False) -> InvocationRecord:
    follow = Follow(rest=(NEXT,) * rest, on_error=NEXT if on_error else None)
    record = made(claim(at=1), fails(2) if fail else ends(2), id=FIRST, terms=Terms(follow=follow))
    return replace(record, outbox=())


def member(number: int, end: float = 2.0) -> InvocationRecord:
    record = made(claim(at=1), ends(end), id=MEMBERS[number], terms=Terms(group=GROUP))
    return replace(record, outbox=())


def following(id: str, kind: str, what: str) -> InvocationRecord:
    record = made(claim(at=3), ends(4), id=id, origin=Origin(sources=(Source(kind=kind, id=what),)))
    return with_line(record, 0, at=START + 2.5)


def chained(*records: InvocationRecord) -> Dump:
    return left(*records, at=START + 60)


def grouped(*records: InvocationRecord, **fields: Any) -> Dump:
    group = GroupRecord(app="shop", id=GROUP, size=2, created_at=START, then=NEXT, is_whole=True, done_at=START + 4)
    return left(*records, groups=(replace(group, **fields),), at=START + 60)


BOTH = [member(0), member(1)]
SECOND = following(link_id(FIRST, 1), "end", FIRST)
DONE = following(done_id(GROUP), "group", GROUP)

PLANTED = [
    Plot("the next link was not called", "I21", chained(link())),
    Plot("a link was called twice", "I21", chained(link(), SECOND, following("other", "end", FIRST))),
    Plot("an error that was not told", "I21", chained(link(fail=True, rest=0, on_error=True))),
    Plot("a callback that never came", "I21", grouped(*BOTH)),
    Plot("a group that is open for ever", "I21", grouped(*BOTH, DONE, done_at=None)),
    Plot("a callback that came twice", "I21", grouped(*BOTH, DONE, following("other", "group", GROUP))),
    Plot("a callback before the end", "I21", grouped(BOTH[0], member(1, end=20), DONE)),
]
CLEAN = [
    Plot("a chain that went on", "I21", chained(link(), SECOND)),
    Plot(
        "a chain that failed",
        "I21",
        chained(
            link(fail=True, on_error=True),
            following(link_id(FIRST, 1), "end", FIRST),
            following(error_id(FIRST), "end", FIRST),
        ),
    ),
    Plot("a group that called back", "I21", grouped(*BOTH, DONE)),
    Plot("a group that was given up", "I21", grouped(BOTH[0], is_whole=False, abandoned=True)),
]
