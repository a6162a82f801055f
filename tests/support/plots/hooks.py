"""Payloads of hooks: some that went wrong, and close calls."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from tests.support.checker import LogLine
from tests.support.plots.material import Plot, done, saw
from tests.support.plots.runs import as_run, logged
from tests.support.witness import Event, What, digest_of

from holdfast.codec import Codec
from holdfast.ids import InvocationId
from holdfast.model.records import InboxEntry, InvocationRecord
from holdfast.testing.samples import START, invocation
from holdfast.workflows import events as e
from holdfast.workflows.hooks_records import HookEntry, address_of, name_of, payload_id

_CODEC = Codec()


def made(position: int, token: str = "x", call: str = "hook#1") -> LogLine:
    data = _CODEC.encode({"token": token})
    event = e.Event(type=e.HOOK_CREATED, at=START + position, call=call, name=name_of(token), data=data)
    return LogLine(position=position, epoch=1, event=event)


def got(position: int, name: str, token: str = "x", call: str = "hook#1", **facts: Any) -> LogLine:
    entry = payload_id(name_of(token), name)
    event = e.Event(type=e.HOOK_RECEIVED, at=START + position, call=call, entry=entry, data=_CODEC.encode(name))
    return LogLine(position=position, epoch=1, event=event, digest=digest_of(name), **facts)


def sent(name: str, what: What = What.RESUME_OK, at: float = 1.0, token: str = "x", until: float = 0.1) -> list[Event]:
    facts: dict[str, Any] = {"key": token, "idempotency_key": name, "digest": digest_of(name), "span": f"{name} {at}"}
    return [saw(What.RESUME_INVOKE, at, **facts), saw(what, at + until, **facts)]


def unread(record: InvocationRecord, *names: str) -> InvocationRecord:
    inbox = [
        InboxEntry(id=payload_id(name_of("x"), name), kind="hook", at=START, call=address_of(name_of("x")))
        for name in names
    ]
    return as_run(record, inbox=tuple(inbox))


def stored(**facts: Any) -> HookEntry:
    return HookEntry(run=InvocationId("a"), task="t", call="hook#1", created_at=START, token="x", **facts)


FAIL, UNKNOWN = What.RESUME_FAIL, What.RESUME_UNKNOWN
OPEN = as_run(invocation("a"))

PLANTED = [
    Plot("an acknowledged payload that is nowhere", "I12", logged(made(1)), sent("a")),
    Plot(
        "a payload that its run never takes", "I1 I12", logged(made(1), runs=(unread(invocation("a"), "a"),)), sent("a")
    ),
    Plot("a payload that was refused and delivered", "I12", logged(made(1), got(2, "a")), sent("a", FAIL)),
    Plot(
        "a payload that was refused and lies in the inbox", "I12", logged(runs=(unread(done(), "a"),)), sent("a", FAIL)
    ),
    Plot("a payload that was delivered twice", "I12", logged(made(1), got(2, "a"), got(3, "a")), sent("a")),
    Plot(
        "a payload for another token",
        "I12",
        logged(made(1, "xy"), got(2, "a")),
        sent("a"),
    ),
    Plot("a payload of nobody's hook", "I12", logged(got(1, "a")), sent("a")),
    Plot(
        "another payload than was sent",
        "I12",
        logged(made(1), replace(got(2, "a"), digest=digest_of("b"))),
        sent("a"),
    ),
    Plot(
        "payloads in another order",
        "I12",
        logged(made(1), got(2, "b"), got(3, "a")),
        [*sent("a"), *sent("b", at=2.0)],
    ),
    Plot("a hook that outlives its run", "I12", logged(made(1), hooks=(stored(),))),
    Plot("a hook of no run", "I12", logged(hooks=(stored(), replace(stored(), run=InvocationId("z"))), runs=(done(),))),
    Plot(
        "a hook that its run does not know", "I1 I12", logged(made(1, call="hook#2"), runs=(OPEN,), hooks=(stored(),))
    ),
]

CLEAN = [
    Plot("a payload in the log", "I12", logged(made(1), got(2, "a")), sent("a")),
    Plot("a payload that came too late to be read", "I12", logged(made(1), runs=(unread(done(), "a"),)), sent("a")),
    Plot(
        "a payload in the log that the inbox still has",
        "I12",
        logged(made(1), got(2, "a"), runs=(unread(done(), "a"),)),
        sent("a"),
    ),
    Plot(
        "a payload that was refused at first, then unknown",
        "I12",
        logged(made(1), got(2, "a")),
        [*sent("a", FAIL), *sent("a", UNKNOWN, at=2.0)],
    ),
    Plot(
        "a payload of a sender that died, repeated when the hook was gone",
        "I12",
        logged(made(1), got(2, "a")),
        [*sent("a")[:1], *sent("a", FAIL, at=2.0)],
    ),
    Plot(
        "two at once, in any order", "I12", logged(made(1), got(2, "b"), got(3, "a")), [*sent("a", until=3), *sent("b")]
    ),
    Plot("a token that is kept", "I12", logged(made(1), hooks=(stored(ended_at=START),))),
]
