"""Everything that the engine reports, one type per kind of happening, with its fields; and the bus that carries it.

The engine emits these and knows no subscriber; `logs.py` turns them into log lines. `why` is a reason in words. What a
store reports to its observer becomes events here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from holdfast.errors import StoreError
from holdfast.model.changes import Change, Verdict
from holdfast.model.names import counted
from holdfast.model.records import InvocationRecord


class Event(msgspec.Struct, frozen=True):
    """Something that happened in the engine."""


class OfInvocation(Event, frozen=True):
    """Something that happened to one invocation; `record` is the invocation before that."""

    record: InvocationRecord
    why: str = ""


class OfInvocations(Event, frozen=True):
    """Something that happened to so many invocations."""

    count: int
    why: str = ""

    @property
    def invocations(self) -> str:
        return counted(self.count, "invocation")


class OfRunner(Event, frozen=True):
    runner: str
    why: str = ""


class OfWorker(Event, frozen=True):
    worker: str
    why: str = ""


class OfDeclaration(Event, frozen=True):
    """Something about a schedule, a trigger or an event that is stored; `area` is the logger, `what` a name."""

    area: str
    what: str
    why: str = ""


class OfStore(Event, frozen=True):
    why: str = ""


# --- the path of an invocation


class Submitted(Event, frozen=True):
    records: tuple[InvocationRecord, ...]


class Claimed(Event, frozen=True):
    worker: str
    records: tuple[InvocationRecord, ...]


class Started(Event, frozen=True):
    """User code is about to be called."""

    records: tuple[InvocationRecord, ...]


class StartedHere(Started, frozen=True):
    """User code is about to be called by its caller, and nothing is stored."""


class Refused(Event, frozen=True):
    """Invocations have ended without a start: they met a limit, and were not to wait."""

    records: tuple[InvocationRecord, ...]


class Settled(Event, frozen=True):
    """A change was written. Failures, retries and returns to the queue have types of their own."""

    record: InvocationRecord
    change: Change


class RanHere(Settled, frozen=True):
    """A caller has tried a call itself. The change is what followed from it, and is not stored."""


class ChangesWritten(Event, frozen=True):
    """The engine has asked the store for these changes, each to its record, and this is what became of them."""

    wanted: Sequence[tuple[InvocationRecord, Change]]
    verdicts: Sequence[Verdict]


class Failed(Settled, frozen=True):
    """The invocation has ended by an error."""


class Retried(Settled, frozen=True):
    """An attempt has failed, and another one will follow."""


class Parked(Settled, frozen=True):
    """The invocation waits for other code."""


class Killed(Settled, frozen=True):
    """User code was ended by its runner, and the invocation went back to the queue."""


class Recovered(Settled, frozen=True):
    """The owner was gone, and the invocation was taken from it."""


class ChangeLost(OfInvocation, frozen=True):
    """A change came too late: another write came first."""

    change: str = ""


class ChangeNotWritten(OfInvocation, frozen=True):
    """The store refuses a change, or stays away while the runner stops."""

    change: str = ""


class Unstoppable(OfInvocation, frozen=True):
    """User code does not end although it was interrupted."""


class ChildrenNotCancelled(OfInvocation, frozen=True):
    """Invocations that a cancelled one has submitted go on."""


class Woken(OfInvocation, frozen=True):
    """A parked invocation went back to the queue, since the code has changed."""


class WorkflowWarning(OfInvocation, frozen=True):
    """A run goes on, but something about it is not as its author may expect."""


class RunSuspended(Settled, frozen=True):
    """A run waits, and has left its worker."""


class NotCalled(OfInvocation, frozen=True):
    """A trigger could not call its task; the invocation was stored as failed."""


class InvocationsExpired(OfInvocations, frozen=True):
    """Invocations were not started in time, and have failed."""


class HandedBack(OfInvocations, frozen=True):
    """A worker gave claimed invocations back to the queue. `has_begun`: their code may go on running."""

    worker: str = ""
    has_begun: bool = False


class LeftToRecovery(OfInvocations, frozen=True):
    """A worker without a runner ended, and invocations are still in its name."""

    worker: str = ""


class WaitersReleased(OfInvocations, frozen=True):
    """The sweep found free slots of limits, and invocations that waited for them."""


class WaitersNotReleased(Event, frozen=True):
    """Slots of limits are free, and no waiter was released; the sweep will do it."""

    limits: str
    why: str


class Removed(OfInvocations, frozen=True):
    """Retention removed what need not be kept longer."""


class Purged(OfInvocations, frozen=True):
    """A user removed ended invocations."""


class StreamsRemoved(Event, frozen=True):
    """The chunks of streams were removed: they need not be kept longer."""

    count: int


class ChunksRefused(Event, frozen=True):
    """Chunks could not be written to a stream: another owner has it, it is damaged, or the store stays away."""

    stream: str
    count: int
    why: str


# --- runners and workers


class RunnerJoined(OfRunner, frozen=True):
    """A runner is on the roster."""


class RunnerLeft(OfRunner, frozen=True):
    """A runner is off the roster. `why`: what kept it from saying so, if something did."""


class RunnerAsked(OfRunner, frozen=True):
    """A user asks a runner to drain or to stop."""


class RunnerDeclaredDead(OfRunner, frozen=True):
    """A runner was silent for too long."""


class RunnerFenced(OfDeclaration, frozen=True):
    """A runner, or its worker, found that the fleet had declared the runner dead."""


class RunnerBroke(Event, frozen=True):
    error: BaseException


class OutageBegan(OfRunner, frozen=True):
    """The store does not answer a runner's heartbeats."""


class OutageEnded(OfRunner, frozen=True):
    """The store answers a runner's heartbeats again."""


class StopAsked(OfStore, frozen=True):
    """A signal asked the runner of this process to stop."""


class RestartDue(Event, frozen=True):
    """The process cannot use the store any more: its runner restarts after `seconds`, unless that changes."""

    why: str
    seconds: float


class QueuePaused(Event, frozen=True):
    queue: str


class QueueResumed(Event, frozen=True):
    queue: str


class SlotSkipped(OfRunner, frozen=True):
    """A runner did not use its turn at the services, and is left out for some cycles."""


class ExecutionAbandoned(OfRunner, frozen=True):
    """An execution of the services was reaped. `is_own`: by the runner that had begun it."""

    is_own: bool = False


class DutyFailed(Event, frozen=True):
    """Something that is done again and again could not be done this time: the store is away, or a defect of ours.

    `is_owed`: a service of the fleet, which others rely on.
    """

    area: str
    duty: str
    error: BaseException
    is_owed: bool = False

    @property
    def is_defect(self) -> bool:
        return not isinstance(self.error, StoreError)


class WorkerStarted(OfWorker, frozen=True):
    """A worker looks for work."""


class WorkerNotStarted(OfStore, frozen=True):
    """A worker process could not be started, or ended before it was ready."""


class WorkerBroke(Event, frozen=True):
    """A worker process ended by an error, perhaps before it could start."""

    why: str
    error: Exception


class WorkerDied(OfWorker, frozen=True):
    """A worker process died."""


class WorkerKilled(OfWorker, frozen=True):
    """A runner ended a worker process that did not answer."""


class WorkerUnresponsive(OfWorker, frozen=True):
    """A worker process does not answer."""


class WorkerAnswers(OfWorker, frozen=True):
    """A worker process answers again."""


class WorkerRetires(OfWorker, frozen=True):
    """A worker takes no more work, and another one takes its place."""

    is_too_large: bool = False


class WorkerEnds(OfWorker, frozen=True):
    """A worker ends before its time."""


class WorkerDrains(OfWorker, frozen=True):
    """A worker waits for what it runs, and then ends."""


class WorkNotTakenBack(OfWorker, frozen=True):
    """A dead worker's invocations are still in its name. `is_left`: recovery has to see to them."""

    is_left: bool = False


class HookFailed(Event, frozen=True):
    """A hook at the end of a worker failed, or takes too long."""

    hook: str
    why: str
    error: BaseException | None = None


class ListenerFailed(Event, frozen=True):
    """A user's listener has failed at a stage of an invocation."""

    listener: str
    stage: str
    invocation: str
    why: str
    error: BaseException


class ListenersBehind(Event, frozen=True):
    """A user's listeners are too slow, and events are lost for them."""

    why: str


class LoopDisturbed(Event, frozen=True):
    """User code tried to end an event loop."""

    loop: str
    error: BaseException


class LoopBroken(Event, frozen=True):
    """An event loop can never turn again."""

    loop: str
    why: str


class TaskLogsLost(Event, frozen=True):
    """A process task logged faster than its parent could write."""

    task: str
    count: int


# --- schedules and triggers


class ScheduleFired(Event, frozen=True):
    schedule: str
    ids: tuple[str, ...]


class TicksMissed(Event, frozen=True):
    """`is_wanted`: the schedule's own rules drop ticks that were missed."""

    schedule: str
    why: str
    is_wanted: bool


class TriggerFired(Event, frozen=True):
    trigger: str
    invocation: str
    task: str


class TriggersLoop(OfStore, frozen=True):
    """Triggers call each other in a circle."""


class PutOff(OfDeclaration, frozen=True):
    """A schedule could not fire, or triggers could not be dispatched; it is tried again later."""

    error: Exception | None = None


class DispatchedLater(OfDeclaration, frozen=True):
    """Triggers are called by the services, since the store was away."""


class DeclarationUnreadable(OfDeclaration, frozen=True):
    """Something stored cannot be read; `what` says what follows from that."""


class DeclarationRestored(OfDeclaration, frozen=True):
    """A declaration of the code was gone from the store, and is stored again."""


class DeclarationRetired(OfDeclaration, frozen=True):
    """No code declares a stored schedule or trigger any more."""


class DeclarationShadowed(OfDeclaration, frozen=True):
    """A schedule that was created at run time has the name of a declared one, and is what fires."""


class ChangedMeanwhile(OfDeclaration, frozen=True):
    """Another process has written the same schedule or event."""


class TaskUnknown(OfDeclaration, frozen=True):
    """A schedule or a trigger names a task that is not known."""

    task: str = ""
    is_likely_wrong: bool = True


class TriggersNotPublished(OfStore, frozen=True):
    """This user may not write that there are new triggers; runners will."""


# --- the web app


class RecordsWalked(Event, frozen=True):
    """So many more stored records were looked at, by work that looks at all of a kind."""

    count: int


class WebServing(Event, frozen=True):
    """The server of ``holdfast monitor`` answers at this address."""

    address: str


class WebRequestServed(Event, frozen=True):
    """A request was answered. `route` is a line of the table, never the path: that of a webhook is a secret."""

    method: str
    route: str
    status: int
    milliseconds: float


class WebRequestFailed(Event, frozen=True):
    """A request could not be answered, by a defect of ours or a damaged record. The text of an error may quote the
    request, so that of a webhook has no `error`, and `why` is only its place.
    """

    method: str
    route: str
    why: str
    error: BaseException | None = None


# --- the store


class StoreRetry(Event, frozen=True):
    """The store did not answer, and is asked again."""

    what: str
    where: str
    tries: int
    seconds: float
    why: str


class StoreGaveUp(StoreRetry, frozen=True):
    """The store did not answer any of several tries: its caller gets an error, and says what follows from that."""


class StoreAnswers(Event, frozen=True):
    """The store answers again."""

    what: str
    where: str


class StoreAwaited(Event, frozen=True):
    """The engine waits for the store, and asks again."""

    what: str
    seconds: float
    why: str


class StoreReached(Event, frozen=True):
    """The engine has the answer that it waited for."""

    what: str


class RecordQuarantined(Event, frozen=True):
    """A damaged record was set aside."""

    kind: str
    id: str
    why: str


class RecordUnreadable(RecordQuarantined, frozen=True):
    """A damaged record was left out of an answer."""


class RecordRefused(RecordQuarantined, frozen=True):
    """A damaged record could not be quarantined."""


class StoreDamaged(OfStore, frozen=True):
    """A part of the store is gone."""


class StoreRepaired(OfStore, frozen=True):
    """A part of the store was gone, and was made again."""


class StoreExposed(OfStore, frozen=True):
    """Others may write to the store's files, or stand in for its server."""


class HintsInterrupted(OfStore, frozen=True):
    """The change stream broke; polling takes over."""


class HintsRestored(OfStore, frozen=True):
    """The change stream is open again."""


class HintLost(OfStore, frozen=True):
    """`is_usual`: hints are batched, and a batch may be given up."""

    is_usual: bool = False


class PollingInstead(OfStore, frozen=True):
    """The server has no change streams, or the user may not read them."""


# --- the bus


class Subscriber(Protocol):
    def wants(self, kind: type[Event]) -> bool:
        """Return whether events of this type are of interest now. Asked often, so it has to be quick.

        A subscriber may have a method `check_for(kind)` too, which is called once: it returns what to call instead of
        `wants`, or None if events of this type are never of interest.
        """
        ...

    def __call__(self, event: Event) -> None:
        """Take an event, on whatever thread it happened. Must not block."""
        ...


class Telemetry:
    """One per engine. A subscriber that raises is reported, and hurts neither the engine nor other subscribers."""

    def __init__(self, *subscribers: Subscriber) -> None:
        self._subscribers = subscribers
        self._checks: dict[type[Event], list[Callable[[], bool]]] = {}

    def subscribe(self, subscriber: Subscriber) -> None:
        self._subscribers = (*self._subscribers, subscriber)
        self._checks = {}

    def wants(self, kind: type[Event]) -> bool:
        """Return whether to make an event of this type. To ask is worthwhile where events are many."""
        checks = self._checks.get(kind)
        if checks is None:
            made = [_check_of(subscriber, kind) for subscriber in self._subscribers]
            checks = self._checks[kind] = [check for check in made if check is not None]
        for check in checks:  # noqa: SIM110 - a generator would cost a call more on the hot path
            if check():
                return True
        return False

    def emit(self, event: Event) -> None:
        for subscriber in self._subscribers:
            try:
                subscriber(event)
            except Exception:
                name = type(event).__name__
                _log.exception("could not report %s: the subscriber %r failed", name, subscriber)


def _check_of(subscriber: Subscriber, kind: type[Event]) -> Callable[[], bool] | None:
    make: Callable[[type[Event]], Callable[[], bool] | None] | None = getattr(subscriber, "check_for", None)
    return partial(subscriber.wants, kind) if make is None else make(kind)


_log = logging.getLogger("holdfast.engine")


def store_observer(telemetry: Telemetry) -> Callable[[str, Mapping[str, Any]], None]:
    """Return the observer of a store: it emits what the store reports. Most reports are for tests, and no event."""

    def observe(kind: str, facts: Mapping[str, Any]) -> None:
        if (make := _REPORTS.get(kind)) is not None:
            telemetry.emit(make({"where": "the store", "why": "", **facts}))

    return observe


Facts = dict[str, Any]
_REPORTS: dict[str, Callable[[Facts], Event]] = {
    "retry": lambda report: StoreRetry(report["what"], report["where"], report["try"], report["delay"], report["why"]),
    "gave_up": lambda report: StoreGaveUp(
        report["what"], report["where"], report["tries"], report["seconds"], report["why"]
    ),
    "recovered": lambda report: StoreAnswers(report["what"], report["where"]),
    "quarantine": lambda report: RecordQuarantined(report["kind"], report["id"], report["why"]),
    "unreadable": lambda report: RecordUnreadable(report["kind"], report["id"], report["why"]),
    "refused": lambda report: RecordRefused("invocation", report["id"], report["why"]),
    "log_lost": lambda report: StoreDamaged(report["why"]),
    "index_missing": lambda report: StoreDamaged(report["why"]),
    "log_renewed": lambda report: StoreRepaired(f"its files were renewed: {report['why']}"),
    "index_made": lambda report: StoreRepaired(f"an index was made again: {report['why']}"),
    "walked": lambda report: RecordsWalked(report["count"]),
    "risk": lambda report: StoreExposed(report["why"]),
    "change_stream_broken": lambda report: HintsInterrupted(report["why"]),
    "change_stream_open": lambda report: HintsRestored(),
    "no_change_streams": lambda report: PollingInstead(report["why"]),
    "hints_not_sent": lambda report: HintLost(report["why"], is_usual=True),
    "hint_not_taken": lambda report: HintLost(report["why"]),
}
