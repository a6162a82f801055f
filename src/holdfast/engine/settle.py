"""Settle: outcomes become final statuses, in groups.

A group is what gathered while the previous one was being written; nobody lingers to make it larger. An outcome is
never dropped because the store is away: the same changes, with the same operation ids, are tried again until the
store answers for each, so a write whose reply was lost is recognised instead of repeated.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from msgspec.structs import replace

from holdfast.codec import ErrorRecord, Payload
from holdfast.crashpoints import crashpoint
from holdfast.engine.cancel import Canceller
from holdfast.engine.depot import Depot
from holdfast.engine.expiry import expiry
from holdfast.engine.failing import change_after
from holdfast.engine.limits import Limits
from holdfast.engine.patience import Patience
from holdfast.engine.recovery import Recovery, is_core
from holdfast.errors import StoreError, StoreFull, StoreReadOnly, StoreUnavailable
from holdfast.execution.call import Crashed, Interrupted, Outcome, Raised, Returned, Unfit
from holdfast.ids import Ids
from holdfast.lifecycle import changes
from holdfast.lifecycle.cancelling import expired, gave_way
from holdfast.lifecycle.changes import Applied, Change, Lost, Verdict
from holdfast.lifecycle.claims import back_in_queue
from holdfast.lifecycle.decoding import ahead
from holdfast.lifecycle.records import FINAL, Hint, InvocationRecord, work_hint
from holdfast.lifecycle.status import AVAILABLE, Status
from holdfast.lifecycle.status import FINAL as FINAL_STATUSES
from holdfast.store.contract import Store
from holdfast.wakeup.hub import Hub

log = logging.getLogger("holdfast.engine")


Settled = tuple[InvocationRecord, Change]
Large = dict[str, tuple[Payload, ...]]
OnStarted = Callable[[InvocationRecord, Change, bool], None]


class Settler:
    """Writes the ends of invocations for one owner."""

    def __init__(
        self,
        store: Store,
        depot: Depot,
        hub: Hub,
        ids: Ids,
        patience: Patience,
        on_started: OnStarted,
        on_stored: Callable[[], None],
        recovery: Recovery,
        limits: Limits,
        rng: random.Random,
        canceller: Canceller,
    ) -> None:
        self._store = store
        self._ends = recovery.ends
        self._canceller = canceller
        self._rng = rng
        self._depot = depot
        self._hub = hub
        self._ids = ids
        self._patience = patience
        self._on_started = on_started
        self._on_stored = on_stored
        self._recovery = recovery
        self._limits = limits
        self.storing = 0  # large ends whose payloads are being stored
        self._gathered: list[tuple[InvocationRecord, Change]] = []
        self._pump: asyncio.Task[None] | None = None
        self._stubborn: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self._large: Large = {}  # what the changes that are not written yet refer to

    def change_for(self, record: InvocationRecord, outcome: Outcome, fingerprint: str | None) -> Change:
        """The named change that an outcome means."""
        operation, at = self._ids.operation(), self._store.now()
        match outcome:
            case Returned(result, _):
                return changes.completed(record, result=result, operation=operation, at=at)
            case Raised() if record.status is not Status.CANCELLING:
                drawn = self._rng.random()
                return change_after(
                    record, outcome, operation=operation, at=at, random_unit=drawn, fingerprint=fingerprint
                )
            case Raised(error, why):
                return changes.failed(record, error=error, operation=operation, at=at, why=why)
            case Unfit(how) | Interrupted(how) if record.status is Status.CANCELLING:
                return gave_way(record, operation=operation, at=at, how=how)
            case Unfit(why):
                return changes.parked(record, fingerprint=fingerprint, operation=operation, at=at, why=why)
            case Interrupted():
                return self._recovery.ended(record, "the runner stopped before it was done")
            case Crashed(why):
                return self._recovery.change(record, f"the process that ran it died: {why}")

    async def _give_way(self, record: InvocationRecord) -> None:
        """Somebody has cancelled it, and its owner was about to write something else than its end."""

        async def look(again: bool) -> Sequence[InvocationRecord | None]:
            return await self._store.get(record.app, [record.id])

        try:
            (found,) = await self._patience.until_answered(f"reading {record.id}", look)
        except StoreError as error:  # the runner stops, and the store is away: recovery ends it
            log.debug("%s is left to recovery: %s", record.id, error)
            return
        if found is not None and found.status is Status.CANCELLING and found.epoch == record.epoch:
            self.settle([(found, gave_way(found, operation=self._ids.operation(), at=self._store.now()))])

    async def _cancel_children(self, record: InvocationRecord) -> None:
        """It may have submitted some since it was asked to end."""
        asked = record.cancellation
        assert asked is not None
        try:
            await self._canceller.cancel_children(record, asked.by, asked.reason)
        except StoreError as error:
            log.warning("the children of %s were not cancelled: %s", record.id, error, extra=fields(record))

    def expiry_of(self, record: InvocationRecord) -> Change | None:
        """It was to be started before now."""
        at = self._store.now()
        return expired(record, error=expiry(record, at), operation=self._ids.operation(), at=at)

    def start_of(self, record: InvocationRecord) -> Change:
        """Reserved work begins."""
        return changes.started(record, operation=self._ids.operation(), at=self._store.now())

    def return_of(self, record: InvocationRecord, why: str, wait: float = 0.0) -> Change:
        """Work that has not begun goes back to the queue, for at least so long."""
        at = self._store.now()
        change = changes.handed_back(record, operation=self._ids.operation(), at=at, why=why)
        return replace(change, due_at=ahead(at, wait)) if wait else change

    def settle(self, settled: Sequence[Settled], large: Large | None = None) -> None:
        """Take these changes; they are written as soon as the write before them is done.

        Those with payloads (`large`, by operation) follow when their payloads are in the store.
        """
        if large:
            for record, change in settled:
                if change.operation in large:
                    self.storing += 1
                    self._beside(record.id, self._settle_large(record, change, large[change.operation]))
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
                await self._depot.keep(payloads)
            except (StoreUnavailable, StoreFull, StoreReadOnly):
                raise  # it may pass: a full disk may be emptied
            except Exception as error:
                return error
            crashpoint("result.kept")
            return None

        try:
            what = f"storing the {'result' if change.name == 'completed' else 'error'} of {record.id}"
            refusal = await self._patience.until_answered(what, keep)
        except StoreError as error:  # the runner stops, and the store is away
            log.error("'%s' of %s was not written: %s", change.name, record.task, error, extra=fields(record))
            return
        finally:
            self.storing -= 1
            self._on_stored()
        if refusal is None:
            self._large[change.operation] = payloads
            self.settle([(record, change)])
        else:
            log.error("'%s' of %s was not written: %s", change.name, record.task, refusal, extra=fields(record))
            self.settle([(record, self._substitute(record, change, refusal))])

    @property
    def busy(self) -> set[str]:
        """The invocations whose ends are not written yet."""
        return set(self._counts)

    async def finish(self) -> None:
        """Wait until everything taken so far is written, or given up."""
        while (self._pump is not None and not self._pump.done()) or self._stubborn:
            waiting = {task for task in (self._pump, *self._stubborn) if task is not None and not task.done()}
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
            except Exception:  # a defect of ours; those that wait behind this group must not pay for it
                log.exception("after writing the ends of %d invocations", len(group))

    async def _write(self, group: list[Settled]) -> None:
        """Write a group, waiting while the store is away. One that the store refuses must not hold up the others."""

        async def attempt(again: bool) -> Sequence[Verdict]:
            if again:  # the store may have been away for so long that the payloads were collected
                await self._depot.keep([one for _, change in group for one in self._large.get(change.operation, ())])
            crashpoint("settle.before")
            verdicts = await self._ends.apply(group)
            crashpoint("settle.after")
            return verdicts

        try:
            verdicts = await self._patience.until_reached(f"writing the ends of {len(group)} invocations", attempt)
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
        """The store said no to one change, or the runner stops and the store is away."""
        for record, change in group:
            log.error("'%s' of %s was not written: %s", change.name, record.task, error, extra=fields(record))
            if change.name == "started":
                self._on_started(record, change, False)
            elif isinstance(error, StoreFull | StoreReadOnly):
                self._try_on(record, change)
            elif not isinstance(error, StoreUnavailable):
                self._try_on(record, self._substitute(record, change, error))

    def _try_on(self, record: InvocationRecord, change: Change) -> None:
        """Beside the others, and without end: a full disk may be emptied."""

        payloads = self._large.get(change.operation, ())

        async def apply(again: bool) -> Sequence[Verdict]:
            await self._depot.keep(payloads)
            return await self._ends.apply([(record, change)])

        async def attempt() -> None:
            try:
                verdicts = await self._patience.until_answered(f"writing the end of {record.id}", apply)
                self._announce([(record, change)], verdicts)
            except Exception as error:
                log.error("'%s' of %s was given up: %s", change.name, record.task, error, extra=fields(record))

        self._beside(record.id, attempt())

    def _beside(self, id: str, work: Coroutine[Any, Any, None]) -> None:
        """Write this one apart from the others."""
        task = asyncio.get_running_loop().create_task(work)
        self._stubborn.add(task)
        self._counts[id] += 1

        def done(task: asyncio.Task[None]) -> None:
            self._stubborn.discard(task)
            self._counts[id] -= 1
            self._counts = +self._counts

        task.add_done_callback(done)

    def _substitute(self, record: InvocationRecord, change: Change, error: Exception) -> Change:
        """What is written instead of an end that the store will never take: the same end in few and plain words, or
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
        for (record, change), verdict in zip(group, verdicts, strict=True):
            if isinstance(verdict, Applied):
                target = change.path[-1]
                if record.slot is not None and change.frees:
                    freed.append(record)
                if target in FINAL_STATUSES:
                    ended.append(record.id)
                    if record.cancellation is not None and record.cancellation.children:
                        self._beside(record.id, self._cancel_children(record))
                elif target in AVAILABLE:
                    ready.append(back_in_queue(record, change))
                _log_end(record, change)
            else:
                _log_lost(record, change, verdict)
                if isinstance(verdict, Lost) and _is_to_end(record, verdict):
                    self._beside(record.id, self._give_way(record))
        is_awaited = bool(ended) and not is_core(group[0][0].app)  # nobody waits for the end of a core task
        hints = [Hint(FINAL, tuple(dict.fromkeys(ended)), len(ended))] if is_awaited else []
        if ready:
            hints.append(work_hint(ready))
        if hints:
            self._hub.send(*hints)
        if freed:
            self._limits.freed(freed)
        for (record, change), verdict in zip(group, verdicts, strict=True):
            if change.name == "started":
                self._on_started(record, change, isinstance(verdict, Applied))


def _is_to_end(record: InvocationRecord, lost: Lost) -> bool:
    """Whether it is still ours, and was cancelled."""
    return lost.status is Status.CANCELLING and (lost.owner, lost.epoch) == (record.owner, record.epoch)


def _plain(text: str) -> str:
    """Words that any store can take."""
    return text[:_MOST_WORDS].encode("ascii", "backslashreplace").decode().replace("\0", "\\0")


_MOST_WORDS = 500
_NO_RESULT = ErrorRecord(type_name="holdfast.errors:StoreError", message="", traceback="", data=None)


def _plain_error(error: ErrorRecord, refusal: Exception) -> ErrorRecord:
    """The error in words that the store will take, with why they are so few."""
    why = f"the store refuses the {'error' if error is not _NO_RESULT else 'result'}: {refusal}"
    text = f"{error.message} ({why})" if error.message else why
    return ErrorRecord(type_name=_plain(error.type_name), message=_plain(text), traceback="", data=None)


def fields(record: InvocationRecord) -> dict[str, object]:
    """What every log line about an invocation carries."""
    return {"invocation": record.id, "task": record.task, "runner": record.owner, "epoch": record.epoch}


_LOUD: dict[str, Callable[..., None]] = {
    "failed": log.error,
    "parked": log.error,
    "retried": log.warning,
    "killed": log.warning,
    "recovered": log.warning,
}


def _log_end(record: InvocationRecord, change: Change) -> None:
    has_failed = change.path[-1] is Status.FAILED
    write = log.error if has_failed else _LOUD.get(change.name)
    if write is not None:
        error = change.errors[-1].error if change.errors else change.error
        traceback = error.traceback if isinstance(error, ErrorRecord) else ""
        extra = fields(record) | ({"remote_traceback": traceback} if traceback else {})
        became = "failed" if has_failed else change.name
        write("%s %s: %s", record.task, became, change.why, extra=extra)
    elif log.isEnabledFor(logging.DEBUG):
        log.debug("%s %s", record.task, change.name, extra=fields(record))


def _log_lost(record: InvocationRecord, change: Change, verdict: Verdict) -> None:
    found = (
        f"it is {verdict.status}, epoch {verdict.epoch}, owner {verdict.owner or 'nobody'}"
        if isinstance(verdict, Lost)
        else "it is gone"
    )
    log.warning("'%s' of %s was refused: %s", change.name, record.task, found, extra=fields(record))
