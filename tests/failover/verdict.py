"""The verdict over a load: is what the store holds what the witnesses saw, and could it have come about legally?

A pure function over the documents as they lie in the database and the lines of the ledgers. It looks at raw documents
and not through the store, so that store and verdict cannot share a mistake. Each violation begins with the number of
the invariant:

I1   nothing lost: what was accepted is there, with all it refers to, and has ended
I2   a history is a legal path, its versions have no gap
I3   final is final; results and errors are what they must be and what clients were shown
I4   one owner at a time; the epoch grows by one at each claim and never else
I7   one submit, one invocation, also if its outcome was unknown
I15  user code ran as often as the history says, and more than once only if a fault is to blame
I18  nothing is left over: flags, quarantine; the roster shows those that live
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from tests.failover.ledger import ACCEPTED, BEGAN, GONE, SEEN, SUBMITS, Event, answer, fails

from holdfast.codec import Codec
from holdfast.model.status import AVAILABLE, FINAL, INITIAL, TABLE, Status

Document = Mapping[str, Any]

_CODEC = Codec()


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """What the database holds when everything is over."""

    invocations: Sequence[Document]
    runners: Sequence[Document] = ()
    quarantine: Sequence[Document] = ()
    payloads: Collection[str] = ()  # the digests of those that are there


def violations(
    dump: Dump, events: Sequence[Event], *, living: Collection[str] = (), reruns_excused: int = 0
) -> list[str]:
    """What is wrong; empty if all is well.

    `living` are the ids of the runners that have not ended.
    `reruns_excused` is how many repeated executions the faults of this run may explain. A fault of the database
    explains none: nobody died, so nothing was to be done again.
    """
    found: list[str] = []
    stored = {document["id"]: document for document in dump.invocations}
    accepted = {
        id: number
        for event in events
        if event["what"] == ACCEPTED
        for id, number in zip(event["ids"], event["numbers"], strict=True)
    }
    found += _lost(stored, accepted, events)
    found += _doubled(dump.invocations, accepted, events)
    for document in dump.invocations:
        for digest in set(document.get("payloads", ())) - set(dump.payloads):
            found.append(f"I1 the payload {digest} of {document['id']} is not there")
        found += [f"{problem} ({document['id']})" for problem in _history(document)]
        found += [f"{problem} ({document['id']})" for problem in _end(document)]
    found += _shown(stored, events)
    found += _executions(dump.invocations, events, reruns_excused)
    roster = {document["id"] for document in dump.runners}
    found += [f"I18 the runner {id} is gone, and still on the roster" for id in roster - set(living)]
    found += [f"I18 the runner {id} is alive, and not on the roster" for id in set(living) - roster]
    found += [f"I18 {document['id']} is in quarantine: {document['why']}" for document in dump.quarantine]
    return found


def number_of(document: Document) -> int:
    """The number of a stored call."""
    args, _ = _CODEC.decode_call(bytes(document["arguments"]), describe=True)
    number: int = args[0]
    return number


def _lost(stored: Mapping[str, Document], accepted: Mapping[str, int], events: Sequence[Event]) -> Iterator[str]:
    for id, number in accepted.items():
        if id not in stored:
            yield f"I1 number {number} was accepted as {id} and is not there"
        elif Status(stored[id]["status"]) not in FINAL:
            document = stored[id]
            yield f"I1 number {number} ({id}) has not ended: {document['status']}, owner {document['owner']}"
    for event in events:
        if event["what"] == GONE:
            yield f"I1 a client was told that number {event['number']} ({event['id']}) does not exist"
    if not accepted:
        yield "I1 nothing was accepted at all, so nothing was tested"


def _doubled(documents: Sequence[Document], accepted: Mapping[str, int], events: Sequence[Event]) -> Iterator[str]:
    submitted = {number for event in events if event["what"] == SUBMITS for number in event["numbers"]}
    ids = defaultdict(list)
    for document in documents:
        number = number_of(document)
        ids[number].append(document["id"])
        if accepted.get(document["id"], number) != number:
            yield f"I7 {document['id']} was accepted as number {accepted[document['id']]} and is number {number}"
        if number not in submitted:
            yield f"I7 number {number} ({document['id']}) was never submitted"
    for number, several in ids.items():
        if len(several) > 1:
            yield f"I7 number {number} was submitted once and is there as {', '.join(several)}"


def _history(document: Document) -> Iterator[str]:
    history = document["history"]
    versions = [line["v"] for line in history]
    if versions != list(range(1, len(history) + 1)) or document["version"] != len(history):
        yield f"I2 versions {versions} up to {document['version']}"
    path = [Status(line["s"]) for line in history]
    if path[:1] != [INITIAL]:
        yield f"I2 it begins as {path[:1]}"
    if path[-1:] != [document["status"]]:
        yield f"I2 it is {document['status']} and its history ends as {path[-1:]}"
    for before, after in itertools.pairwise(path):
        if before in FINAL:
            yield f"I3 {after} came after {before}, which is final"
        elif after not in TABLE[before].next:
            yield f"I2 {before} → {after} is no legal change"
    yield from _operations(history)
    yield from _ownership(document)
    status = Status(document["status"])
    if bool(document.get("ready")) is not (status in AVAILABLE):
        yield f"I18 it is {status} and 'ready' is {document.get('ready')}"


def _operations(history: Sequence[Document]) -> Iterator[str]:
    """A write may leave several lines, one after the other. A second bunch of them means that it was applied twice."""
    bunches = [line["op"] for n, line in enumerate(history) if n == 0 or history[n - 1]["op"] != line["op"]]
    for operation, count in Counter(bunches).items():
        if count > 1:
            yield f"I2 the operation {operation} was applied {count} times"
    for operation in set(bunches):
        statuses = [line["s"] for line in history if line["op"] == operation]
        if len(set(statuses)) < len(statuses):
            yield f"I2 the operation {operation} was applied twice: {statuses}"


def _ownership(document: Document) -> Iterator[str]:
    epoch, owner = 0, None
    for line in document["history"]:
        rule = TABLE[Status(line["s"])]
        epoch += rule.acquires_ownership
        if line.get("e", 0) != epoch:
            yield f"I4 epoch {line.get('e', 0)} at version {line['v']}, where it must be {epoch}"
            epoch = line.get("e", 0)
        holder = line.get("o")
        if rule.acquires_ownership:
            owner = holder
            if holder is None:
                yield f"I4 version {line['v']} is a claim by nobody"
        elif rule.releases_ownership:
            owner = None
        if holder != owner:
            yield f"I4 version {line['v']} was written by {holder}, and the owner was {owner}"
    if (document["epoch"], document["owner"]) != (epoch, owner):
        yield f"I4 epoch {document['epoch']} of {document['owner']}, by its history epoch {epoch} of {owner}"


def _end(document: Document) -> Iterator[str]:
    """What was recorded is what the function must return, or raise."""
    number = number_of(document)
    match document["status"]:
        case Status.SUCCESS:
            result = _CODEC.decode(bytes(document["result"] or b"\xc0"))
            if fails(number) or result != answer(number):
                yield f"I3 number {number} has the result {result!r}, not {answer(number)!r}"
        case Status.FAILED:
            message = (document["error"] or {}).get("message")
            if not fails(number) or message != answer(number):
                yield f"I3 number {number} failed with {message!r}: {document['reason']}"
        case status if Status(status) not in FINAL and (document["result"] or document["error"]):
            yield f"I3 number {number} is {status} and has a result already"


def _shown(stored: Mapping[str, Document], events: Sequence[Event]) -> Iterator[str]:
    """What a client was shown is what is there now."""
    for event in events:
        if event["what"] != SEEN:
            continue
        document, number = stored.get(event["id"]), event["number"]
        now = None if document is None else _recorded(document)
        then = {name: event[name] for name in ("result", "error") if name in event}
        if now != then:
            yield f"I3 a client was shown {then} for number {number} ({event['id']}), and now it is {now}"


def _recorded(document: Document) -> dict[str, Any]:
    match document["status"]:
        case Status.SUCCESS:
            return {"result": _CODEC.decode(bytes(document["result"] or b"\xc0"))}
        case Status.FAILED:
            return {"error": (document["error"] or {}).get("message")}
        case status:
            return {"status": status}


def _executions(documents: Sequence[Document], events: Sequence[Event], excused: int) -> Iterator[str]:
    began = Counter(event["number"] for event in events if event["what"] == BEGAN)
    reruns = []
    for document in documents:
        number = number_of(document)
        path = Counter(line["s"] for line in document["history"])
        runs, attempts = path[Status.RUNNING], document["attempt"]
        if not runs - path[Status.KILLED] <= attempts <= runs:  # an attempt that never began may be taken back
            yield f"I15 number {number} has attempt {attempts} after {runs} runs"
        if began[number] > attempts:
            yield f"I15 number {number} ({document['id']}) was called {began[number]} times in {attempts} attempts"
        if began[number] == 0 and document["status"] in (Status.SUCCESS, Status.FAILED):
            yield f"I15 number {number} ({document['id']}) is {document['status']} and was never called"
        reruns += [number] * (max(attempts, began[number]) - 1)
    if len(reruns) > excused:
        yield f"I15 {len(reruns)} repeated runs, {excused} of them excused by a fault: numbers {sorted(set(reruns))}"
    for number in began.keys() - {number_of(document) for document in documents}:
        yield f"I15 number {number} was called and is not there"
