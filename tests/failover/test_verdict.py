"""The verdict has to find what is wrong: each violation is planted into a load that was sound."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from tests.failover.ledger import ACCEPTED, BEGAN, GONE, SEEN, SUBMITS, UNKNOWN, Event, answer, fails
from tests.failover.verdict import Dump, violations

from holdfast.codec import Codec, ErrorRecord
from holdfast.model import changes
from holdfast.model.changes import apply_to
from holdfast.model.claims import Claim, claimed
from holdfast.model.records import InvocationRecord, registered
from holdfast.store.mongo.documents import to_document

CODEC = Codec()
APP = "load"
OWNER = "runner/0"


def stored(number: int) -> InvocationRecord:
    """A call that was submitted, claimed, run and ended."""
    arguments = CODEC.encode_call((number,), {}, ("number",))
    new = InvocationRecord(id=f"id{number}", app=APP, task="plain", arguments=arguments, created_at=1.0, due_at=1.0)
    record = registered(new, operation=f"insert {number}", at=1.0)
    wish = Claim(app=APP, lanes=(record.lane,), limit=1, owner=OWNER, operation=f"claim {number}", at=2.0)
    record = apply_to(claimed(wish, record), record)
    if fails(number):
        error = ErrorRecord(type_name="x:Refused", message=answer(number), traceback="", data=None)
        return apply_to(changes.failed(record, error=error, operation=f"end {number}", at=3.0), record)
    result = CODEC.encode(answer(number))
    return apply_to(changes.completed(record, result=result, operation=f"end {number}", at=3.0), record)


class Case:
    """The documents and the ledgers of a sound load of three calls, to be spoilt."""

    def __init__(self) -> None:
        self.documents: list[dict[str, Any]] = [to_document(stored(number)) for number in (1, 2, 9)]
        self.events: list[Event] = []
        for number in (1, 2, 9):
            seen = {"error" if fails(number) else "result": answer(number)}
            self.events += [
                {"what": SUBMITS, "numbers": [number]},
                {"what": ACCEPTED, "numbers": [number], "ids": [f"id{number}"]},
                {"what": BEGAN, "number": number},
                {"what": SEEN, "number": number, "id": f"id{number}", **seen},
            ]
        self.runners: list[dict[str, Any]] = [{"id": "runner"}]
        self.quarantine: list[dict[str, Any]] = []
        self.payloads: list[str] = []

    @property
    def first(self) -> dict[str, Any]:
        return self.documents[0]

    @property
    def history(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = self.first["history"]
        return lines

    def add_line(self, status: str, **fields: Any) -> None:
        """Another line of history, and a status that fits it."""
        number = len(self.history) + 1
        self.history.append({"v": number, "s": status, "t": 4.0, "op": f"op {number}", "e": 1} | fields)
        self.first["version"], self.first["status"] = number, status

    def empty(self) -> None:
        self.documents.clear()
        self.events.clear()

    def judged(self, **how: Any) -> list[str]:
        dump = Dump(
            invocations=self.documents, runners=self.runners, quarantine=self.quarantine, payloads=self.payloads
        )
        return violations(dump, self.events, living=["runner"], **how)


def test_a_sound_load() -> None:
    assert Case().judged() == []


def back_in_the_queue(case: Case) -> None:
    del case.history[3:]
    case.add_line("killed")
    case.add_line("rerouted")
    case.first.update(owner=None, result=None, ready=True)


def run_twice(case: Case, epoch: int = 2) -> None:
    """Handed back and run again, by the rules."""
    end = case.history[3]
    back_in_the_queue(case)
    case.add_line("pending", e=epoch, o=OWNER)
    case.add_line("running", e=epoch, o=OWNER)
    case.add_line("success", e=epoch, op=end["op"])
    case.first.update(epoch=epoch, attempt=2, result=CODEC.encode(answer(1)))
    del case.first["ready"]
    case.events.append({"what": BEGAN, "number": 1})


def doubled_submit(case: Case) -> None:
    twin = copy.deepcopy(case.first) | {"id": "twin"}
    case.documents.append(twin)


def of_unknown_outcome(case: Case, *, there: int) -> None:
    case.events += [{"what": SUBMITS, "numbers": [3]}, {"what": UNKNOWN, "numbers": [3]}]
    for number in range(there):
        case.documents.append(to_document(stored(3)) | {"id": f"unknown{number}"})
        case.events.append({"what": BEGAN, "number": 3})


@pytest.mark.parametrize("there", [0, 1])
def test_a_submit_of_unknown_outcome_may_be_there_or_not(there: int) -> None:
    case = Case()
    of_unknown_outcome(case, there=there)
    assert case.judged() == []


def test_a_repeated_run_needs_an_excuse() -> None:
    case = Case()
    run_twice(case)
    assert case.judged(reruns_excused=1) == []
    assert [found[:4] for found in case.judged()] == ["I15 "]


PLANTED: dict[str, tuple[str, Callable[[Case], object]]] = {
    "an accepted invocation is gone": ("I1 ", lambda case: case.documents.pop(0)),
    "an accepted invocation waits": ("I1 ", back_in_the_queue),
    "a client is told that it does not exist": (
        "I1 ",
        lambda case: case.events.append({"what": GONE, "number": 1, "id": "id1"}),
    ),
    "nothing was accepted": ("I1 ", lambda case: case.empty()),
    "a payload is missing": ("I1 ", lambda case: case.first.update(payloads=["ab12"])),
    "a version is missing": ("I2 ", lambda case: case.history.pop(1)),
    "a version comes twice": ("I2 ", lambda case: case.history[2].update(v=2)),
    "the version is not the history's": ("I2 ", lambda case: case.first.update(version=7)),
    "the status is not the history's": ("I2 ", lambda case: case.first.update(status="failed")),
    "it begins in the middle": ("I2 ", lambda case: case.history[0].update(s="rerouted")),
    "an edge that is not in the table": ("I2 ", lambda case: case.history[1].update(s="parked")),
    "a write that was applied twice in a row": (
        "I2 the operation claim 1",
        lambda case: case.history[3].update(op="claim 1", s="running"),
    ),
    "a write that was applied again later": (
        "I2 the operation insert 1",
        lambda case: case.history[3].update(op="insert 1"),
    ),
    "something after the end": ("I3 ", lambda case: case.add_line("running", o=OWNER)),
    "a second end": ("I3 ", lambda case: case.add_line("failed")),
    "a wrong result": ("I3 ", lambda case: case.first.update(result=CODEC.encode("another"))),
    "a result that changed after it was shown": ("I3 ", lambda case: case.events[3].update(result="another")),
    "a result that was shown is gone": ("I3 ", lambda case: case.documents.pop(0)),
    "a failure where there must be a result": (
        "I3 ",
        lambda case: (case.history[3].update(s="failed"), case.first.update(status="failed", result=None)),
    ),
    "a success where there must be a failure": (
        "I3 ",
        lambda case: (
            case.documents[2]["history"][3].update(s="success"),
            case.documents[2].update(status="success", result=CODEC.encode(answer(9))),
        ),
    ),
    "an epoch that does not grow": ("I4 ", lambda case: run_twice(case, epoch=1)),
    "an epoch that grows without a claim": ("I4 ", lambda case: case.history[3].update(e=2)),
    "an epoch that is not the history's": ("I4 ", lambda case: case.first.update(epoch=3)),
    "somebody else writes under the same epoch": ("I4 ", lambda case: case.history[2].update(o="other/0")),
    "an owner after the end": ("I4 ", lambda case: case.first.update(owner=OWNER)),
    "a claim by nobody": ("I4 ", lambda case: case.history[1].pop("o")),
    "one submit, two invocations": ("I7 ", doubled_submit),
    "an unknown submit that is there twice": (
        "I7 ",
        lambda case: of_unknown_outcome(case, there=2),
    ),
    "an invocation that nobody submitted": ("I7 ", lambda case: case.documents.append(to_document(stored(3)))),
    "other arguments than were accepted": (
        "I7 ",
        lambda case: case.first.update(arguments=to_document(stored(2))["arguments"]),
    ),
    "user code ran twice in one run": ("I15 ", lambda case: case.events.append({"what": BEGAN, "number": 1})),
    "user code never ran": ("I15 ", lambda case: case.events.pop(2)),
    "an attempt too many": ("I15 ", lambda case: case.first.update(attempt=2)),
    "an attempt too few": ("I15 ", lambda case: case.first.update(attempt=0)),
    "a repeated run without a fault": ("I15 ", run_twice),
    "user code ran for nothing": ("I15 ", lambda case: case.events.append({"what": BEGAN, "number": 77})),
    "still marked as ready": ("I18 ", lambda case: case.first.update(ready=True)),
    "a runner that has gone is on the roster": ("I18 ", lambda case: case.runners.append({"id": "other"})),
    "a runner that lives is not on the roster": ("I18 ", lambda case: case.runners.clear()),
    "something is in quarantine": ("I18 ", lambda case: case.quarantine.append({"id": "id1", "why": "unreadable"})),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_violation_is_found(what: str) -> None:
    invariant, spoil = PLANTED[what]
    case = Case()
    spoil(case)
    found = case.judged()
    assert [problem for problem in found if problem.startswith(invariant)], f"found only {found}"
