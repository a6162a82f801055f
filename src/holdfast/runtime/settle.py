"""Settle: outcomes become final statuses, in groups.

A group is what gathered while the previous one was being written. An outcome is never dropped because the store is
away: the same changes, with the same operation ids, are tried again until the store answers for each, so a write whose
reply was lost is recognised instead of repeated.

`Expiry` ends invocations that were not started by the time that they were submitted with. A worker looks at that before
it starts one. But there may be no worker that serves it, or it waits for a slot: the sweep finds such invocations. It
knows when the next one is due, and otherwise looks every few seconds, since others submit as well.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from holdfast.codec import Codec, ErrorRecord, Payload
from holdfast.crashpoints import crashpoint
from holdfast.errors import Expired, StoreError, StoreFull, StoreReadOnly, StoreUnavailable, WorkflowError
from holdfast.executors.begun import BegunCalls
from holdfast.executors.call import (
    INTERRUPTED,
    STOPPED,
    Crashed,
    Deferred,
    Interrupted,
    LetGo,
    Outcome,
    Raised,
    Returned,
    Unfit,
)
from holdfast.model import changes
from holdfast.model.cancellation import expired, gave_way, is_too_late, why_expired
from holdfast.model.changes import Applied, Change, Lost, Verdict
from holdfast.model.claims import back_in_queue
from holdfast.model.crashes import has_begun_before
from holdfast.model.decoding import ahead
from holdfast.model.queues import RATE_SECONDS
from holdfast.model.records import ENDED, Hint, InvocationRecord, work_hint
from holdfast.model.status import AVAILABLE, FINAL, Status
from holdfast.runtime.engine import Engine
from holdfast.runtime.limits import Limits
from holdfast.runtime.outage import Outage
from holdfast.runtime.release import Releaser, change_after
from holdfast.store.contract import Filter, Order
from holdfast.telemetry import events as e
from holdfast.telemetry.events import InvocationsExpired

Settled = tuple[InvocationRecord, Change]
Large = dict[str, tuple[Payload, ...]]
OnStarted = Callable[[InvocationRecord, Change, bool], None]

_MAX_TEXT = 500
_NO_RESULT = ErrorRecord(type_name="holdfast.errors:StoreError", message="", traceback="", data=None)
_LOUD = {"parked": e.Parked, "retried": e.Retried, "killed": e.Killed, "recovered": e.Recovered}
IDLE_SECONDS = 5.0
_AT_ONCE = 500
_PORTION_SECONDS = 10.0  # of a count of ended calls


class Settler:
    """Write the ends of invocations for one owner."""

    def __init__(
        self,
        engine: Engine,
        outage: Outage,
        releaser: Releaser,
        limits: Limits,
        begun: BegunCalls,
        on_started: OnStarted,
        on_stored: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._telemetry = engine.telemetry
        self._store = engine.store
        self._payloads = engine.payloads
        self._ids = engine.ids
        self._outage = outage
        self._releaser = releaser
        self._limits = limits
        self._begun = begun
        self._on_started = on_started
        self._on_stored = on_stored
        self.why_interrupted = "the runner stopped before it was done"
        self.storing = 0  # large ends whose payloads are being stored
        self._gathered: list[tuple[InvocationRecord, Change]] = []
        self._pump: asyncio.Task[None] | None = None
        self._spawned: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self._large: Large = {}  # what the changes that are not written yet refer to

    def change_for(self, record: InvocationRecord, outcome: Outcome, fingerprint: str | None) -> Change:
        """Return the named change that an outcome means."""
        operation, at = self._ids.operation(), self._store.now()
        match outcome:
            case Returned(result, _):
                return changes.completed(record, result=result, operation=operation, at=at)
            case Raised() if record.status is not Status.CANCELLING:
                drawn = self._engine.rng.random()
                return change_after(
                    record, outcome, operation=operation, at=at, random_unit=drawn, fingerprint=fingerprint
                )
            case Raised(error, why):
                return changes.failed(record, error=error, operation=operation, at=at, why=why)
            case Deferred() if record.status is Status.CANCELLING:
                return gave_way(record, operation=operation, at=at)
            case Deferred(seconds, why, noted):
                # What is due at once is due by every clock.
                due = ahead(at, seconds) if seconds else at - self._store.clock_error()
                change = changes.deferred(record, due_at=due, operation=operation, at=at, why=why)
                return change if noted is None else replace(change, attributes=noted)
            case Unfit(why) if _is_compensating(record):
                return self._cannot_compensate(record, why)
            case Interrupted() if (outcome is INTERRUPTED or outcome is STOPPED) and _is_compensating(record):
                why = self.why_interrupted if outcome is STOPPED else str(record.cancellation)
                return self._releaser.ended(record, f"{why}; its next owner lets it compensate")
            case Unfit(how) | Interrupted(how) if record.status is Status.CANCELLING:
                return gave_way(record, operation=operation, at=at, how=how)
            case Unfit(why):
                return changes.parked(record, fingerprint=fingerprint, operation=operation, at=at, why=why)
            case Interrupted():
                return self._releaser.ended(record, self.why_interrupted)
            case Crashed(why, progress):
                return self._releaser.change(record, f"the process that ran it died: {why}", progress)
            case LetGo():
                raise AssertionError(f"{record.id} has left its worker, and has no end to write")

    def _cannot_compensate(self, record: InvocationRecord, why: str) -> Change:
        """End a run that is being cancelled, and whose body cannot continue: a person has to check what was left
        undone.
        """
        said = f"it was being cancelled, and could not compensate: {why}"
        error = _codec.encode_error(WorkflowError(f"{record.task} {record.id}: {said}"))
        return changes.failed(record, error=error, operation=self._ids.operation(), at=self._store.now(), why=said)

    async def _end_cancelled(self, record: InvocationRecord, lost: Change) -> None:
        """End an invocation that was cancelled while its owner was about to write something else. A run that was on its
        way back to the queue still goes there: its next owner asks it to compensate.
        """

        async def look(again: bool) -> Sequence[InvocationRecord | None]:
            return await self._store.get(record.app, [record.id])

        try:
            (found,) = await self._outage.until_answered(f"reading {record.id}", look)
        except StoreError as error:  # the runner stops, and the store is away: recovery ends it
            self._telemetry.emit(e.DutyFailed("engine", f"end {record.id}; recovery will", error))
            return
        if found is not None and found.status is Status.CANCELLING and found.epoch == record.epoch:
            is_started = has_begun_before(record) if lost.name == "handed_back" else record.compensates
            if is_started and lost.name == "parked":
                change = self._cannot_compensate(found, lost.why)
            elif is_started and lost.target in AVAILABLE and lost.name != "retried":
                change = self._releaser.ended(found, lost.why)
            else:
                change = gave_way(found, operation=self._ids.operation(), at=self._store.now())
            self.settle([(found, replace(change, attributes=lost.attributes, notes=lost.notes))])

    async def _cancel_children(self, record: InvocationRecord) -> None:
        """Cancel the children of an invocation: it may have submitted some since it was cancelled."""
        asked = record.cancellation
        assert asked is not None
        try:
            await self._engine.canceller.cancel_children(record, asked.by, asked.reason)
        except StoreError as error:
            self._telemetry.emit(e.ChildrenNotCancelled(record, str(error)))

    def expiry_of(self, record: InvocationRecord) -> Change | None:
        """Return the change for an invocation that was to be started before now."""
        at = self._store.now()
        return expired(record, error=expiry(record, at), operation=self._ids.operation(), at=at)

    def start_of(self, record: InvocationRecord) -> Change:
        """Return the change that starts reserved work."""
        return changes.started(record, operation=self._ids.operation(), at=self._store.now())

    def return_of(self, record: InvocationRecord, why: str, wait: float = 0.0) -> Change:
        """Return the change that hands unstarted work back to the queue, due after at least this delay."""
        at = self._store.now()
        change = changes.handed_back(record, operation=self._ids.operation(), at=at, why=why)
        return replace(change, due_at=ahead(at, wait)) if wait else change

    def settle(self, settled: Sequence[Settled], large: Large | None = None) -> None:
        """Take these changes; they are written as soon as the write before them is done.

        Changes with payloads (`large`, by operation) follow when their payloads are in the store.
        """
        if large:
            for record, change in settled:
                if change.operation in large:
                    self.storing += 1
                    self._spawn(record.id, self._settle_large(record, change, large[change.operation]))
            settled = [(record, change) for record, change in settled if change.operation not in large]
        if not settled:
            return
        self._gathered += settled
        self._counts.update([record.id for record, _ in settled])
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._write_groups())

    async def _settle_large(self, record: InvocationRecord, change: Change, payloads: tuple[Payload, ...]) -> None:
        async def keep(again: bool) -> Exception | None:
            try:
                await self._payloads.keep(payloads)
            except (StoreUnavailable, StoreFull, StoreReadOnly):
                raise  # it may pass: a full disk may be emptied
            except Exception as error:
                return error
            crashpoint("result.kept")
            return None

        try:
            what = f"storing the {'result' if change.name == 'completed' else 'error'} of {record.id}"
            refusal = await self._outage.until_answered(what, keep)
        except StoreError as error:  # the runner stops, and the store is away
            self._telemetry.emit(e.ChangeNotWritten(record, str(error), change.name))
            return
        finally:
            self.storing -= 1
            self._on_stored()
        if refusal is None:
            self._large[change.operation] = payloads
            self.settle([(record, change)])
        else:
            self._telemetry.emit(e.ChangeNotWritten(record, str(refusal), change.name))
            self.settle([(record, self._substitute(record, change, refusal))])

    @property
    def busy(self) -> set[str]:
        """Return the invocations whose ends are not written yet."""
        return set(self._counts)

    async def finish(self) -> None:
        """Wait until everything taken so far is written, or given up."""
        while (self._pump is not None and not self._pump.done()) or self._spawned:
            waiting = {task for task in (self._pump, *self._spawned) if task is not None and not task.done()}
            if waiting:
                await asyncio.wait(waiting)
            else:
                await asyncio.sleep(0)  # they have just ended, and are taken off the list in the loop's next turn
        await self._limits.finish()

    async def _write_groups(self) -> None:
        while self._gathered:
            group, self._gathered = self._gathered, []
            try:
                await self._write(group)
                self._counts.subtract([record.id for record, _ in group])
                self._counts = +self._counts
            except Exception as error:  # a defect of Holdfast must not stop the changes that wait behind this group
                self._telemetry.emit(e.DutyFailed("engine", f"announce the ends of {len(group)} invocations", error))

    async def _write(self, group: list[Settled]) -> None:
        """Write a group, waiting while the store is away. A change that the store refuses must not
        hold up the others.
        """

        async def attempt(again: bool) -> Sequence[Verdict]:
            if again:  # the store may have been away for so long that the payloads were collected
                await self._payloads.keep([one for _, change in group for one in self._large.get(change.operation, ())])
            crashpoint("settle.before")
            verdicts = await self._engine.outbox.apply(group)
            crashpoint("settle.after")
            return verdicts

        try:
            verdicts = await self._outage.until_reached(f"writing the ends of {len(group)} invocations", attempt)
        except Exception as error:
            if len(group) > 1 and not isinstance(error, StoreUnavailable):
                for settled in group:
                    await self._write([settled])
            else:
                self._refused(group, error)
        else:
            self._announce(group, verdicts)
        finally:
            for _, change in group:
                self._large.pop(change.operation, None)

    def _refused(self, group: list[Settled], error: Exception) -> None:
        """Deal with changes that the store refuses, or that it stays away for while the runner stops."""
        for record, change in group:
            self._telemetry.emit(e.ChangeNotWritten(record, str(error), change.name))
            if change.name == "started":
                self._on_started(record, change, False)
            elif isinstance(error, StoreFull | StoreReadOnly):
                self._keep_trying(record, change)
            elif not isinstance(error, StoreUnavailable) and change.notes is not UNSET:
                bare = replace(change, attributes=UNSET, notes=UNSET)
                self._spawn(record.id, self._write([(record, bare)]))  # no result is lost for what was noted beside it
            elif not isinstance(error, StoreUnavailable):
                self._keep_trying(record, self._substitute(record, change, error))

    def _keep_trying(self, record: InvocationRecord, change: Change) -> None:
        """Write a change apart from the others, and without end: a full disk may be emptied."""

        payloads = self._large.get(change.operation, ())

        async def apply(again: bool) -> Sequence[Verdict]:
            await self._payloads.keep(payloads)
            return await self._engine.outbox.apply([(record, change)])

        async def attempt() -> None:
            try:
                verdicts = await self._outage.until_answered(f"writing the end of {record.id}", apply)
                self._announce([(record, change)], verdicts)
            except Exception as error:
                self._telemetry.emit(e.ChangeNotWritten(record, str(error), change.name))

        self._spawn(record.id, attempt())

    def _spawn(self, id: str, work: Coroutine[Any, Any, None]) -> None:
        """Do this apart from the groups."""
        task = asyncio.get_running_loop().create_task(work)
        self._spawned.add(task)
        self._counts[id] += 1

        def done(task: asyncio.Task[None]) -> None:
            self._spawned.discard(task)
            self._counts[id] -= 1
            self._counts = +self._counts

        task.add_done_callback(done)

    def _substitute(self, record: InvocationRecord, change: Change, error: Exception) -> Change:
        """Return a change instead of an end that the store will never take: the same end in few and plain words, or
        FAILED for a result, since SUCCESS without its result would be a lie.
        """
        operation, at = self._ids.operation(), self._store.now()
        if change.errors:
            last = replace(change.errors[-1], error=_plain_error(change.errors[-1].error, error))
            change = replace(change, errors=(*change.errors[:-1], last))
        if change.name not in ("completed", "failed"):
            return replace(change, operation=operation, at=at, why=_plain(change.why))
        found = change.error if isinstance(change.error, ErrorRecord) else None
        why = f"the store refuses the {'error' if found else 'result'}: {error}"
        failure = _plain_error(found, error) if found else _plain_error(_NO_RESULT, error)
        return changes.failed(record, error=failure, operation=operation, at=at, why=_plain(why))

    def _announce(self, group: list[tuple[InvocationRecord, Change]], verdicts: Sequence[Verdict]) -> None:
        ended, ready, freed = list[str](), list[tuple[str, float, int]](), list[InvocationRecord]()
        emit, wants_all = self._telemetry.emit, self._telemetry.wants(e.Settled)
        for (record, change), verdict in zip(group, verdicts, strict=True):
            if isinstance(verdict, Applied):
                target = change.path[-1]
                if record.slot is not None and change.frees:
                    freed.append(record)
                if target in FINAL:
                    ended.append(record.id)
                    if record.cancellation is not None and record.cancellation.children:
                        self._spawn(record.id, self._cancel_children(record))
                elif target in AVAILABLE:
                    ready.append(back_in_queue(record, change))
                if wants_all or change.name in _LOUD or target is Status.FAILED:
                    kind = e.Failed if target is Status.FAILED else _LOUD.get(change.name, e.Settled)
                    emit(kind(record, change))
            else:
                emit(e.ChangeLost(record, _found(verdict), change.name))
                if isinstance(verdict, Lost) and _is_to_end(record, verdict):
                    self._spawn(record.id, self._end_cancelled(record, change))
        is_awaited = bool(ended) and not self._engine.is_core  # no caller waits for the end of a core task
        hints = [Hint(ENDED, tuple(dict.fromkeys(ended)), len(ended))] if is_awaited else []
        if ready:
            hints.append(work_hint(ready))
        if hints:
            self._engine.hub.send(*hints)
        if freed:
            self._limits.freed(freed)
        # Not before: an end that is not in the store yet is that of a call that has begun.
        self._begun.remove([f"{record.id}~{record.epoch}" for record, change in group if change.name != "started"])
        for (record, change), verdict in zip(group, verdicts, strict=True):
            if change.name == "started":
                self._on_started(record, change, isinstance(verdict, Applied))


def _is_compensating(record: InvocationRecord) -> bool:
    return record.status is Status.CANCELLING and record.compensates


def _is_to_end(record: InvocationRecord, lost: Lost) -> bool:
    """Return whether the invocation is still ours, and was cancelled."""
    return lost.status is Status.CANCELLING and (lost.owner, lost.epoch) == (record.owner, record.epoch)


def _plain(text: str) -> str:
    """Return the text without characters that a store refuses."""
    return text[:_MAX_TEXT].encode("ascii", "backslashreplace").decode().replace("\0", "\\0")


def _plain_error(error: ErrorRecord, refusal: Exception) -> ErrorRecord:
    """Return a short error that the store accepts, with the reason why it is short."""
    why = f"the store refuses the {'error' if error is not _NO_RESULT else 'result'}: {refusal}"
    text = f"{error.message} ({why})" if error.message else why
    return ErrorRecord(type_name=_plain(error.type_name), message=_plain(text), traceback="", data=None)


def _found(verdict: Verdict) -> str:
    if not isinstance(verdict, Lost):
        return "it is gone"
    return f"it is {verdict.status}, epoch {verdict.epoch}, owner {verdict.owner or 'none'}"


_codec = Codec()


def expiry(record: InvocationRecord, at: float) -> ErrorRecord:
    return _codec.encode_error(Expired(f"{record.task} {record.id} {why_expired(record, at)}", invocation_id=record.id))


class Expiry:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._store = engine.store
        self._next = 0.0

    async def sweep(self) -> bool:
        """Fail invocations that were not started in time. Return True if there may be more."""
        now = self._store.now()
        if now < self._next:
            return False
        found = await self._store.find(self._engine.app, Filter(), _AT_ONCE, order=Order.START_BY, set_aside=True)
        late = [record for record in found if is_too_late(record, now)]
        changes = [
            (record, change)
            for record in late
            if record.owner is None  # its owner ends it
            and (change := expired(record, error=expiry(record, now), operation=self._engine.ids.operation(), at=now))
        ]
        verdicts = await self._engine.outbox.apply(changes) if changes else []
        ended = [
            record.id for (record, _), verdict in zip(changes, verdicts, strict=True) if isinstance(verdict, Applied)
        ]
        if ended and self._engine.telemetry.wants(e.Settled):
            for (record, change), verdict in zip(changes, verdicts, strict=True):
                if isinstance(verdict, Applied):
                    self._engine.telemetry.emit(e.Settled(record, change))
        if ended:
            self._engine.telemetry.emit(InvocationsExpired(len(ended), ", ".join(ended[:5])))
            self._engine.hub.send(Hint(ENDED, tuple(ended), len(ended)))
        coming = [record.start_by for record in found if record.start_by is not None and record.start_by > now]
        self._next = min(coming[0] if coming else now + IDLE_SECONDS, now + IDLE_SECONDS)
        return len(late) == _AT_ONCE


class Throughput:
    """Count the calls of a worker that end, by queue, for its heartbeats."""

    def __init__(self) -> None:
        self._portions: deque[tuple[float, Counter[str]]] = deque()  # with the times when they began

    def current(self, now: float) -> Counter[str]:
        """Return the counter of calls that end now, by queue."""
        if not self._portions or now - self._portions[-1][0] >= _PORTION_SECONDS:
            self._forget(now)
            self._portions.append((now, Counter()))
        return self._portions[-1][1]

    def lately(self, now: float) -> dict[str, int]:
        """Return how many calls have ended within `RATE_SECONDS`."""
        self._forget(now)
        return dict(sum((portion for _, portion in self._portions), Counter[str]()))

    def _forget(self, now: float) -> None:
        while self._portions and now - self._portions[0][0] > RATE_SECONDS:
            self._portions.popleft()
