"""Replay a stored run against the code at hand: no owner, no effects, nothing is written.

The body runs on the caller's thread with the recorded results, to the end of the log. So it shows whether the code
still fits a run, before a runner tries it. A debugger can stop in the body, and a test finds a body that is not
deterministic.

    stored = await read_run(engine, record)                     # on the engine's loop
    report = replayed(stored, definition, engine)               # where user code may run: no loop is needed
    report.raise_mismatch()

- **fits**: the body makes the recorded calls. An open run stops at the end of its log; a run that has ended must come
  to the same end.
- **diverges**: the log and the code differ. Either this code wrote the log (so it is not deterministic), or the run has
  ended (so it does no harm), or another version of Python wrote the log.
- **needs a patch**: the code has changed, and the run is still open. It would be parked.

A keyed call that the log does not have would have to be performed. The replay ends there, with a warning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

from holdfast.codec import references
from holdfast.errors import ReplayMismatch
from holdfast.executors.call import Call, Returned, Unfit, arguments_of, raised, returned
from holdfast.ids import InvocationId
from holdfast.model.parking import PYTHON
from holdfast.model.records import InvocationRecord, RunState
from holdfast.model.status import FINAL, Status
from holdfast.runtime.definition import TaskDefinition
from holdfast.runtime.engine import Engine
from holdfast.runtime.runs import of_python, of_run
from holdfast.workflows import events as e
from holdfast.workflows.answers import carry, check_whole, deliver, same_values, start_of_log
from holdfast.workflows.context import body_context
from holdfast.workflows.events import Event
from holdfast.workflows.life import AsyncLife, ForegroundLife, Life, RestartRequest
from holdfast.workflows.looking import read
from holdfast.workflows.loop import raised_at
from holdfast.workflows.rules import Deliver, Mismatch, Perform, Replay
from holdfast.workflows.values import references_of


class Verdict(StrEnum):
    FITS = "fits"
    DIVERGES = "diverges"
    NEEDS_PATCH = "needs a patch"


class StoredRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run as the store has it: all that a replay needs."""

    record: InvocationRecord
    events: list[Event]  # of its present generation
    payloads: dict[str, bytes]  # large values


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a replay. `why` names both calls, with file and line; empty if the code fits."""

    id: InvocationId
    task: str
    verdict: Verdict
    why: str = ""
    warnings: tuple[str, ...] = ()  # such as other arguments than the recorded ones, by code that has changed
    events: int = 0  # in the log
    waits_for: tuple[str, ...] = ()  # calls that are open at the end of the log
    has_ended: bool = False  # the body has

    @property
    def fits(self) -> bool:
        return self.verdict is Verdict.FITS

    @property
    def mismatch(self) -> ReplayMismatch | None:
        """Return the error that says how log and code differ; None if the code fits."""
        if self.fits:
            return None
        return ReplayMismatch(f"{self.task} {self.id}: the code does not fit the recorded log: {self.why}")

    def raise_mismatch(self) -> None:
        """Raise `ReplayMismatch` unless the code fits."""
        if (error := self.mismatch) is not None:
            raise error


async def read_run(engine: Engine, record: InvocationRecord) -> StoredRun:
    """Read the log of a run and its large values. Raises `UsageError` for a task, `NotDecodable`, `CorruptRecord`,
    `PayloadLost`.
    """
    generation = 0 if of_python(record).run is None or record.run is None else record.run.generation
    events = [event for _, event in await read(engine, record, generation)]
    check_whole(record, len(events))
    wanted = [*references(record.arguments), *references(record.result or b"")]
    wanted += references_of(events)
    payloads = await engine.payloads.fetch(wanted) if wanted else {}
    return StoredRun(record=record, events=events, payloads=payloads)


def code_of(definition: TaskDefinition) -> str:
    """Return what the log of a run says about the code that writes it."""
    return f"{PYTHON} {definition.fingerprint}"


def replayed(
    stored: StoredRun,
    definition: TaskDefinition,
    engine: Engine,
    *,
    function: Callable[..., Any] | None = None,
    code: str | None = None,
) -> ReplayReport:
    """Replay a run on this thread, and report how it went. Nothing is stored, and no step runs.

    `engine` makes the records of children, which are compared and dropped; its store may be any. `function` takes the
    place of the body: a debugger puts its own around it. `code` is what the log is to say about the code; that of the
    definition, if it is not given.
    """
    return _Replaying(stored, definition, engine, function or definition.function, code or code_of(definition)).report()


class _Replaying:
    """One replay, as its own owner of the body."""

    def __init__(
        self, stored: StoredRun, definition: TaskDefinition, engine: Engine, function: Callable[..., Any], code: str
    ) -> None:
        self._record = record = stored.record
        self._events = stored.events
        self._payloads = dict(stored.payloads)
        self._codec = engine.codec
        self._code = code
        self._replay = Replay(stored.events, code=self._code, same=same_values)
        self._why = ""
        self._warnings: list[str] = []
        self._is_over = False
        self._call = Call(
            record.id,
            definition.name,
            function,
            definition.signature,
            record.arguments,
            engine.codec,
            engine.limits,
            dict(stored.payloads),
            body_context(record, self),
        )
        generation = 0 if record.run is None else record.run.generation
        made = (self._replay, engine.codec, self._call)
        run = of_run(record).run or RunState()
        now = run.started_at or start_of_log(record, run)
        self.life: Life
        if definition.is_coroutine:
            self.life = AsyncLife(*made, generation=generation, now=now, seed=record.seed)
        else:
            self.life = ForegroundLife(*made, generation=generation, now=now, seed=record.seed)
            self.life.pull = self._next
        self.life.engine = engine
        self.life.attributes = dict(record.attributes)

    def report(self) -> ReplayReport:
        life = self.life
        found = arguments_of(self._call)
        if isinstance(found, Unfit):
            return self._reported(found.why)
        assert isinstance(life, AsyncLife | ForegroundLife)
        life.give(*found)
        try:
            life.start(_nothing)
            while self._next():
                pass
            if not self._why and self._is_over:
                self._why = self._at_the_end()
            return self._reported(self._why)
        finally:
            life.evict()

    def _next(self) -> bool:
        """Deliver the next event. Return False if there is none."""
        if self._is_over or self._why or self._warnings:
            return False
        life = self.life
        life.commands.clear()
        following = self._replay.next()
        if isinstance(following, Mismatch):
            self._why = following.why + life.how_ended()
        elif isinstance(following, Perform):
            call = self._replay.open[following.call]
            self._warnings.append(f"{call} is not in the log, and a run would perform it now: the replay ends here")
        elif isinstance(following, Deliver):
            self._deliver(life, following)
            return True
        else:
            self._is_over = True
        return False

    def _deliver(self, life: Life, following: Deliver) -> None:
        event = following.event
        for carried in self._replay.carried.pop(event.call, ()):
            carry(life, carried, self._payloads)
        if not following.keeps_clock:
            life.clock_to(event.at)
        if event.type == e.CANCEL_REQUESTED:
            return life.cancel(_nothing)
        self._replay.answered(event)
        deliver(life, event, self._payloads, _nothing)

    # --- the end of the log

    def _at_the_end(self) -> str:
        """Return how the end of the body differs from that of the run; empty if it does not."""
        record, ended = self._record, self.life.ended
        if ended is None:
            if not self._replay.open:
                return f"the code waits for something that no event can bring:\n{self.life.why_stuck()}"
            if record.status not in FINAL or not _ended_by_body(record):
                return ""
            return f"the log ends there, and the run was {record.status}; the code waits for {self._waits()}"
        if record.status not in FINAL:
            return ""
        if self._replay.unsaid or self.life.said:
            said = ", ".join(sorted({event.type for event in self.life.said})) or "nothing"
            return f"the log has {', '.join(self._replay.unsaid) or 'nothing'} of the body, and the code sets {said}"
        if isinstance(ended.error, RestartRequest):
            return f"the run was {record.status}, and the code restarts it"
        if ended.error is None:
            return self._compare_result(returned(self._call, ended.value))
        if isinstance(ended.error, asyncio.CancelledError) or not _ended_by_body(record):
            return ""  # the run was cancelled, timed out, or ended by its runners
        return self._compare_error(ended.error)

    def _compare_result(self, outcome: object) -> str:
        record = self._record
        if record.status is not Status.SUCCESS:
            return f"the run was {record.status}, and the code returns" if _ended_by_body(record) else ""
        if isinstance(outcome, Returned) and same_values(record.result or b"", outcome.result):
            return ""
        return f"the run returned {self._described(record.result)}, and the code returns another value" + (
            f": {self._described(outcome.result)}" if isinstance(outcome, Returned) else ""
        )

    def _compare_error(self, error: BaseException) -> str:
        recorded, outcome = self._record.error, raised(self._call, error)
        if recorded is not None and recorded.type_name == outcome.error.type_name:
            return ""
        there = "returned" if recorded is None else f"failed with {recorded.type_name.rpartition(':')[2]}"
        return f"the run {there}, and the code raises {outcome.why[:500]}{_at(error)}"

    def _described(self, data: bytes | None) -> str:
        try:
            return f"{self._codec.decode(data or b'', self._payloads, describe=True)!r:.200}"
        except Exception:
            return "a value"

    def _waits(self) -> str:
        return ", ".join(map(str, self._replay.open.values())) or "nothing"

    def _reported(self, why: str) -> ReplayReport:
        verdict = Verdict.FITS
        if why:
            recorded = self._replay.recorded_code
            has_changed = bool(recorded) and recorded != self._code and self._replay.recorded_python == PYTHON
            is_open = self._record.status not in FINAL
            verdict = Verdict.NEEDS_PATCH if has_changed and is_open else Verdict.DIVERGES
        return ReplayReport(
            id=self._record.id,
            task=self._record.task,
            verdict=verdict,
            why=why,
            warnings=(*self._replay.warnings, *self._warnings),
            events=len(self._events),
            waits_for=tuple(map(str, self._replay.open.values())),
            has_ended=self.life.ended is not None,
        )


def _nothing() -> None:
    """Note that the body is quiet."""


def _ended_by_body(record: InvocationRecord) -> bool:
    """Return whether the body, and not a runner, ended the run, as far as its error shows: runners end runs by errors
    of Holdfast.
    """
    if record.status is Status.SUCCESS:
        return True
    return record.status is Status.FAILED and (
        record.error is not None and not record.error.type_name.startswith("holdfast.errors:")
    )


def _at(error: BaseException) -> str:
    return f" at {place}" if (place := raised_at(error)) else ""
