"""I12: payloads of hooks, in the logs and inboxes of runs, against what their senders were told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from tests.support.checker.case import Case
from tests.support.checker.evidence import LogLine, Violation
from tests.support.witness import Event, What

from holdfast.codec import Codec
from holdfast.model.status import FINAL
from holdfast.workflows import events as e
from holdfast.workflows.hooks_records import name_of, payload_id


class Place(NamedTuple):
    """A payload that a run has: in its log, or unread in its inbox."""

    run: str
    line: LogLine | None


def _places(case: Case) -> dict[str, list[Place]]:
    """Where payloads are, by the id of their inbox entries. An inbox may still have what the log has."""
    found: dict[str, list[Place]] = defaultdict(list)
    for id, lines in case.dump.logs.items():
        for line in lines:
            if line.event.type == e.HOOK_RECEIVED and line.event.entry:
                found[line.event.entry].append(Place(id, line))
    for record in case.dump.records:
        for entry in () if record.run is None else record.run.inbox:
            if entry.kind == "hook" and not any(place.run == record.id for place in found[entry.id]):
                found[entry.id].append(Place(record.id, None))
    return found


def _sent(event: Event) -> str:
    return payload_id(name_of(event.key or ""), event.idempotency_key or "")


def _unknown(case: Case) -> list[Event]:
    """The sends that may have delivered or not: those with an unknown outcome, and those whose sender died."""
    known = {event.span for what in (What.RESUME_OK, What.RESUME_FAIL) for event in case.events(what)}
    return [event for event in case.events(What.RESUME_INVOKE) if event.span not in known]


def payloads_are_delivered_once_or_refused(case: Case) -> Iterator[Violation]:
    """I12: what was acknowledged is in the log of one run once, or unread in its inbox if that has ended; what was
    refused is nowhere.
    """
    places, done = _places(case), set[str]()
    for event in case.events(What.RESUME_OK):
        done.add(sent := _sent(event))
        there = places.get(sent, [])
        if not there:
            yield Violation("I12", None, f"the payload {event.idempotency_key} for '{event.key}' is lost", (event,))
        for place in there:
            if place.line is None and case.records[place.run].status not in FINAL:
                sentence = f"the payload {event.idempotency_key} for '{event.key}' is not taken by its run"
                yield Violation("I12", place.run, sentence, (event,))
    maybe = done | {_sent(event) for event in _unknown(case)}
    for event in case.events(What.RESUME_FAIL):
        if (sent := _sent(event)) not in maybe and places.get(sent):
            sentence = f"the payload {event.idempotency_key} for '{event.key}' was refused, and is there"
            yield Violation("I12", places[sent][0].run, sentence, (event,))
    for sent, there in places.items():
        lines = [place.line for place in there if place.line is not None]
        if len({place.run for place in there}) > 1 or len({line.generation for line in lines}) < len(lines):
            yield Violation("I12", there[0].run, f"the payload {sent} was delivered twice", tuple(lines))


def payloads_come_to_their_own_hook(case: Case) -> Iterator[Violation]:
    """I12: a payload is that of its sender, and its hook has the token that the sender named."""
    tokens = {_sent(event): event for event in (*_unknown(case), *case.events(What.RESUME_OK))}
    for id, lines in case.dump.logs.items():
        made: dict[str, LogLine] = {}
        for line in lines:
            if line.event.type == e.HOOK_CREATED:
                made[line.step] = line
            if line.event.type != e.HOOK_RECEIVED:
                continue
            created, sent = made.get(line.step), tokens.get(line.event.entry)
            if created is None:
                yield Violation("I12", id, f"{line.step} got a payload before it was created", (line,))
            elif sent is not None and Codec().decode(created.event.data)["token"] != sent.key:
                sentence = f"{line.step} got a payload for the token '{sent.key}', which is not its own"
                yield Violation("I12", id, sentence, (created, sent, line))
            if sent is not None and sent.digest is not None and line.digest not in (None, sent.digest):
                yield Violation("I12", id, f"{line.step} got another payload than was sent", (sent, line))


def payloads_come_in_order(case: Case) -> Iterator[Violation]:
    """I12: a payload that was acknowledged before another one was sent comes before it."""
    began, known = dict[str, float](), dict[str, float]()
    for event in case.events(What.RESUME_INVOKE):
        began.setdefault(_sent(event), event.at)
    for event in case.events(What.RESUME_OK):
        known.setdefault(_sent(event), event.at)
    for id, lines in case.dump.logs.items():
        before: dict[str, list[LogLine]] = defaultdict(list)
        for line in lines:
            if line.event.type != e.HOOK_RECEIVED or line.event.entry not in known:
                continue
            for earlier in before[line.step]:
                if known[line.event.entry] < began.get(earlier.event.entry, -inf):
                    sentence = f"{line.step} got its payloads in another order than they were sent in"
                    yield Violation("I12", id, sentence, (earlier, line))
            before[line.step].append(line)


def hooks_end_with_their_runs(case: Case) -> Iterator[Violation]:
    """I12: at rest, no hook is open whose run has ended or is gone; one that is open is in the log of its run."""
    for hook in case.dump.hooks:
        run = case.records.get(hook.run)
        if hook.ended_at is None and (run is None or run.status in FINAL):
            yield Violation("I12", hook.run, f"it is over, and its hook {hook.call} is open")
        elif hook.ended_at is None and not any(
            line.event.type == e.HOOK_CREATED and line.event.call == hook.call
            for line in case.dump.logs.get(hook.run, ())
        ):
            yield Violation("I12", hook.run, f"its hook {hook.call} is stored, and not in its log")
