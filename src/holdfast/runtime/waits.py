"""Waits of calls in a worker: a call whose code only waits gives its slot back, and takes it again before that goes on.

**Pause.** A wait that lasts is written to the store: RUNNING → PAUSED, with the ids of the awaited invocations. These
are then read once: an awaited invocation in the queue moves up to the place of its parent, and a circle of waits is
refused. Then the slot is given back; a slot of a limit is kept.

**Resume.** When the wait is over, the call first takes a slot, before new work does. Then PAUSED → RESUMED is written,
and only then does its code go on. So a worker never runs more code than it has slots, and no code runs that the store
calls PAUSED. Writes of calls that pause or go on at the same time go out together.

**Circles.** Each wait is written before its call looks for a circle, so the last one sees all of it. Two that close a
circle at the same time both see it: the one with the largest id is refused at once, others only if the circle is still
there at their next look.

**Bounds.** A paused call keeps its thread, its process or its coroutine. Each of these has a bound. Beyond it, or where
other code of the call may run meanwhile, the slot is kept. `why` shows a note about that on the invocation.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from holdfast.crashpoints import crashpoint
from holdfast.errors import CircularWait, InvocationCancelled, StoreError
from holdfast.executors.call import Call
from holdfast.executors.local import Executor
from holdfast.executors.waiting import Wait
from holdfast.ids import InvocationId
from holdfast.model import changes
from holdfast.model.changes import IN_LINE, WORKING, Applied, Change, MoveUp, Verdict, WaitNote
from holdfast.model.records import MAX_WAITED, InvocationRecord, Waiting, work_hint
from holdfast.model.status import AVAILABLE, FINAL, Status
from holdfast.model.waits import Need, find_circle, path_in_words, paused, resumed
from holdfast.runtime.definition import ExecutorKind
from holdfast.runtime.engine import Engine
from holdfast.runtime.outage import Outage, cancel_tasks
from holdfast.runtime.wait import get_readable
from holdfast.store.contract import Filter, Order
from holdfast.telemetry import events as e

if TYPE_CHECKING:
    from holdfast.runtime.execute import Ended
    from holdfast.runtime.worker import Worker

LINGER_SECONDS = 0.02  # a shorter wait is not written down
CROWDED_SECONDS = 0.002  # likewise, while others wait for the slot
AGAIN_SECONDS = 2.0  # after a look that found a circle, or work that waits for a claim
SOON_SECONDS = 0.25  # at least, while what a look has moved up ends before the next one
RUN_SECONDS = 4.0  # after a look that found a run of a workflow: a circle through it closes when it is suspended
LATER_SECONDS = 10.0  # after a look that found that all is well
MAX_LOOKED_AT = 500  # open ids of a wait, and invocations on the way round a circle
_BEFORE = 0.001  # seconds: ahead of what fell due at the same time
_FAR = 86_400.0  # ahead of work that may be older than what waits
_BOUNDS = {ExecutorKind.THREAD: "waiting_threads", ExecutorKind.LOOP: "waiting_coroutines"}
_Write = Change | WaitNote


class _Waiting:
    """A call with waits."""

    def __init__(self, record: InvocationRecord, kind: ExecutorKind) -> None:
        self.id, self.epoch = record.id, record.epoch
        self.record = record
        self.kind = kind
        self.waits: list[Wait] = []
        self.over: set[InvocationId] = set()  # of what it waits for: it was seen to have ended
        self.again = SOON_SECONDS / 2
        self.runs: dict[InvocationId, tuple[int, Need | None]] = {}  # what they need at a version: logs may be long
        self.leaving = 0  # waits that are over, and whose code does not go on yet
        self.timer: asyncio.TimerHandle | None = None
        self.executor: Executor | None = None
        self.is_pausing = False  # its pause has begun
        self.gave = False  # its slot is given back
        self.noted = False  # a note says that it keeps its slot
        self.is_gone = False  # its call has ended, or goes on elsewhere
        self.is_forced = False  # it is ended by force
        self.pausing: asyncio.Task[None] | None = None
        self.looking: asyncio.Task[None] | None = None
        self.resuming: asyncio.Task[None] | None = None
        self.granted: asyncio.Future[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Return whether all code of the call waits: none of the waits that it was seen in has ended since."""
        return bool(self.waits) and self.waits[0].beside == set(self.waits)

    @property
    def ids(self) -> tuple[InvocationId, ...]:
        return tuple(dict.fromkeys(InvocationId(id) for wait in self.waits for id in wait.ids))

    def waiting(self, keeps_slot: str = "") -> Waiting:
        ids = self.ids
        more = max(0, len(ids) - MAX_WAITED)
        return Waiting(ids=ids[:MAX_WAITED], epoch=self.epoch, more=more, keeps_slot=keeps_slot)

    def go_on(self) -> None:
        if self.granted is not None and not self.granted.done():
            self.granted.set_result(None)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class WorkerWaits:
    """The waits of one worker's calls. It is their `WaitPort`."""

    def __init__(self, engine: Engine, worker: Worker, outage: Outage) -> None:
        self._engine = engine
        self._worker = worker
        self._bounds = {kind: getattr(engine.settings, name) for kind, name in _BOUNDS.items()}
        self._bounds |= dict.fromkeys((ExecutorKind.PROCESS, ExecutorKind.ISOLATED), engine.settings.waiting_processes)
        self._writer = _Writer(engine, outage, self._written)
        self.writing = self._writer.busy  # the calls whose waits are written now
        self.calls: dict[str, _Waiting] = {}  # by id
        self._paused: Counter[ExecutorKind] = Counter()
        self._tasks: dict[asyncio.Task[None], None] = {}  # in their order: the order of a set differs in each run
        self.loop: asyncio.AbstractEventLoop | None = None  # of the worker, once that runs
        self.is_off = False  # nothing is paused: for users' tests, where calls run one inside of the other

    @property
    def paused(self) -> int:
        """Return how many calls have given their slots back."""
        return len([call for call in self.calls.values() if call.gave])

    # --- reported by calls

    def runs_on(self, call: Call) -> bool:
        record = call.about
        return isinstance(record, InvocationRecord) and self._worker.executor_of(record).runs_on(call.key)

    def main_task_of(self, call: Call) -> asyncio.Task[Any] | None:
        record = call.about
        return self._worker.executor_of(record).main_task_of(call.key) if isinstance(record, InvocationRecord) else None

    def begin(self, wait: Wait) -> None:
        record = self._record_of(wait)
        if record is None or self.is_off:
            return
        if record.id in wait.ids:
            return wait.refuse(CircularWait(f"{record.task} {record.id} waits for its own end"))
        call = self.calls.get(record.id)
        if call is None:
            call = self.calls[record.id] = _Waiting(record, self._worker.kind_of(record))
        call.waits.append(wait)
        self._consider(call, wait)

    def only_waits(self, waits: frozenset[Wait]) -> None:
        for wait in waits:
            wait.beside, wait.keeps = waits, ""
        for wait in waits:
            if (call := self._call_of(wait)) is not None:
                return self._consider(call, wait)

    def keeps_slot(self, wait: Wait, why: str) -> None:
        wait.beside, wait.keeps = frozenset(), why
        if (call := self._call_of(wait)) is not None:
            self._consider(call, wait)

    def _consider(self, call: _Waiting, wait: Wait) -> None:
        """Set the timer of a call that is to be paused, or noted."""
        if call.is_pausing or call.leaving:
            return
        if call.is_idle:
            call.stop_timer()
            seconds = LINGER_SECONDS if self._worker.has_room else CROWDED_SECONDS
            call.timer = asyncio.get_running_loop().call_later(seconds, self._pause, call)
        elif wait.keeps and not call.noted and call.timer is None:
            call.timer = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._keep, call, wait.keeps)

    async def end(self, wait: Wait) -> None:
        call = self._call_of(wait)
        if call is None:
            return
        call.stop_timer()
        call.leaving += 1
        try:
            if call.is_pausing:
                if call.resuming is None or call.resuming.done():
                    call.resuming = self._spawn(self._resume(call))
                await asyncio.shield(call.resuming)
        finally:
            call.leaving -= 1
            call.waits.remove(wait)
            if not call.waits:
                self._leave(call)

    def begin_elsewhere(self, wait: Wait, refuse: Callable[[str], None]) -> None:
        self._on_loop(functools.partial(self._begin_elsewhere, wait, refuse))

    def _begin_elsewhere(self, wait: Wait, refuse: Callable[[str], None]) -> None:
        wait.refused = asyncio.get_running_loop().create_future()
        wait.refused.add_done_callback(lambda done: None if done.cancelled() else refuse(str(done.result())))
        wait.beside = frozenset({wait})
        self.begin(wait)

    def end_elsewhere(self, wait: Wait, go_on: Callable[[], None]) -> None:
        self._on_loop(lambda: self._spawn(self._end_elsewhere(wait, go_on)))

    async def _end_elsewhere(self, wait: Wait, go_on: Callable[[], None]) -> None:
        try:
            await self.end(wait)
        finally:
            if wait.refused is not None:
                wait.refused.cancel()
            go_on()

    def _on_loop(self, do: Callable[[], object]) -> None:
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # the engine is gone; the call is recovered by others
                self.loop.call_soon_threadsafe(do)

    def _record_of(self, wait: Wait) -> InvocationRecord | None:
        """Return the record of the call that waits; None if this worker does not run it any more."""
        about = wait.call.about
        record = self._worker.record_of(about.id) if isinstance(about, InvocationRecord) else None
        return record if record is not None and about is not None and record.epoch == about.epoch else None

    def _call_of(self, wait: Wait) -> _Waiting | None:
        about = wait.call.about
        call = self.calls.get(about.id) if isinstance(about, InvocationRecord) else None
        return call if call is not None and wait in call.waits else None

    def _leave(self, call: _Waiting) -> None:
        if self.calls.get(call.id) is call:
            del self.calls[call.id]
        if call.looking is not None:
            call.looking.cancel()
        if call.noted and not call.is_gone:
            self._note(call, None)

    # --- reported by the worker

    def forget(self, id: str) -> None:
        """Let the code of a call that has ended go on as it likes."""
        call = self.calls.pop(id, None)
        if call is not None:
            call.is_gone = True
            call.stop_timer()
            self._end_pause(call)
            call.go_on()
            if call.looking is not None:
                call.looking.cancel()

    def forget_all(self) -> None:
        for id in tuple(self.calls):
            self.forget(id)

    def end_by_force(self, id: str) -> None:
        """End the waits of a call that is ended by force, without a slot: its code is not to go on."""
        if (call := self.calls.get(id)) is not None:
            call.is_forced = True
            for wait in call.waits:
                wait.refuse(InvocationCancelled(f"{call.record.task} {id} is to end", invocation_id=id))
            call.go_on()

    def withhold(self, ended: Sequence[Ended]) -> list[Ended]:
        """Return the ends that can be written now. Others follow when their pause is written, which is under way."""
        now = []
        for each in ended:
            if (writing := self._writer.busy.get(each.record.id)) is None:
                now.append(each)
            else:
                self._spawn(self._end_later(each, *writing))
        return now

    async def _end_later(self, ended: Ended, change: Change, written: asyncio.Future[Verdict | None]) -> None:
        await asyncio.wait({written})
        record = ended.record
        if isinstance(written.result(), Applied) and record.status in change.sources:
            record = changes.apply_to(change, record)
        self._worker.end([ended._replace(record=record)])

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda task: self._tasks.pop(task, None))
        return task

    async def close(self) -> None:
        self.forget_all()
        await cancel_tasks(*self._tasks)
        await self._writer.close()

    # --- pausing

    def _pause(self, call: _Waiting) -> None:
        call.timer = None
        record = self._worker.record_of(call.id)
        if call.is_gone or call.leaving or not call.is_idle or record is None or record.epoch != call.epoch:
            return
        if record.status not in WORKING:
            return  # it is to end
        bound = self._bounds.get(call.kind, 0)
        if self._paused[call.kind] >= bound:
            setting = _BOUNDS.get(call.kind, "waiting_processes")
            return self._keep(call, f"its worker has {bound} waiting calls of its kind, the most that {setting} allows")
        call.is_pausing, call.noted = True, False
        call.executor = self._worker.executor_of(record)
        if call.looking is not None:
            call.looking.cancel()
        self._paused[call.kind] += 1
        call.pausing = self._spawn(self._write_pause(call, record))
        call.looking = self._spawn(self._watch(call))

    async def _write_pause(self, call: _Waiting, record: InvocationRecord) -> None:
        if call.is_gone or call.leaving:
            return  # its end is about to be written, or its wait is over
        named = ", ".join(call.ids[:3]) + (f" and {len(call.ids) - 3} more" if len(call.ids) > 3 else "")
        operation, at = self._engine.ids.operation(), self._engine.store.now()
        change = paused(record, call.waiting(), operation=operation, at=at, why=f"it waits for {named}")
        await self._writer.write(record, change)

    def _give_slot(self, call: _Waiting) -> None:
        """Give the slot back. What the call waits for is ahead of new work by then."""
        record = self._worker.record_of(call.id)
        is_paused = record is not None and record.epoch == call.epoch and record.status is Status.PAUSED
        if call.is_pausing and is_paused and not (call.gave or call.leaving or call.is_gone or call.is_forced):
            call.gave = True
            if call.executor is not None:
                call.executor.make_room(1)
            self._worker.give_slots(call.id, 1)

    def _end_pause(self, call: _Waiting) -> None:
        """Note that its code goes on."""
        if call.is_pausing:
            self._paused[call.kind] -= 1
        if call.gave and call.executor is not None:
            call.executor.make_room(-1)
        call.is_pausing = call.gave = False

    def _written(self, record: InvocationRecord, change: Change) -> None:
        """Keep the record of a call as the store has it."""
        mine = self._worker.record_of(record.id)
        if mine is not None and mine.epoch == record.epoch and mine.status in change.sources:
            self._worker.set_record(changes.apply_to(change, mine))

    def _keep(self, call: _Waiting, why: str) -> None:
        call.timer = None
        if not call.is_gone and call.waits and not call.leaving and not call.noted:
            call.noted = True
            self._note(call, call.waiting(why))
            call.looking = call.looking or self._spawn(self._watch(call))

    def _note(self, call: _Waiting, waiting: Waiting | None) -> None:
        record = self._worker.record_of(call.id)
        if record is not None and record.epoch == call.epoch and record.owner is not None:
            note = WaitNote(app=record.app, id=record.id, epoch=record.epoch, actor=record.owner, waiting=waiting)
            call.pausing = self._spawn(self._write_note(record, note))

    async def _write_note(self, record: InvocationRecord, note: WaitNote) -> None:
        await self._writer.write(record, note)

    # --- going on

    async def _resume(self, call: _Waiting) -> None:
        if call.looking is not None:
            call.looking.cancel()
            call.looking = None
        if call.pausing is not None:
            await asyncio.wait({call.pausing})
        if call.gave and not call.is_gone and not call.is_forced:
            call.granted = asyncio.get_running_loop().create_future()
            self._worker.want_slots(call.id, 1, lambda count: call.go_on())
            await call.granted
        self._end_pause(call)
        record = self._worker.record_of(call.id)
        if call.is_gone or record is None or record.epoch != call.epoch or record.status is not Status.PAUSED:
            return  # it is to end, or has ended
        change = resumed(record, operation=self._engine.ids.operation(), at=self._engine.store.now())
        await self._writer.write(record, change)

    # --- looking

    async def _watch(self, call: _Waiting) -> None:
        """Look after what the call waits for, as long as it does."""
        if call.pausing is not None:
            await asyncio.wait({call.pausing})
        is_first = True
        while True:
            pause = AGAIN_SECONDS
            try:
                pause = await self._look(call, is_first)
            except StoreError as error:
                self._engine.telemetry.emit(e.DutyFailed("worker", f"look after what {call.id} waits for", error))
            is_first = False
            self._give_slot(call)
            await asyncio.sleep(pause)

    async def _look(self, call: _Waiting, is_first: bool) -> float:
        """Refuse a circle, and move up what still waits for a claim. Return the seconds until the next look."""
        ids, found = await self._open(call)
        if circle := await self._circle(call, ids, found):
            waiters = [link.id for link in circle if link.limit_key is None]
            if not is_first or call.id == max(waiters):
                way = path_in_words(circle)
                for wait in call.waits:
                    wait.refuse(CircularWait(f"{call.record.task} {call.id} would wait for ever: {way}"))
            return AGAIN_SECONDS
        now = self._engine.store.now()
        in_line = [record for record in found if record.status in IN_LINE and record.due_at <= now]
        if in_line:
            await self._move_up(call.record, in_line)
        if len(ids) == MAX_LOOKED_AT:
            return call.again
        if in_line:
            return AGAIN_SECONDS
        return RUN_SECONDS if any(record.run is not None for record in found) else LATER_SECONDS

    async def _open(self, call: _Waiting) -> tuple[list[InvocationId], list[InvocationRecord]]:
        """Read the first ones of what the call waits for that have not ended. If many have since the last look, the
        next one comes sooner.
        """
        call.again = min(2 * call.again, AGAIN_SECONDS)
        while True:
            ids = list(islice((id for id in call.ids if id not in call.over), MAX_LOOKED_AT))
            found = [record for record in await self._read(ids) if record is not None]
            if len(ids) < MAX_LOOKED_AT:
                return ids, found
            over = set(ids) - {record.id for record in found if record.status not in FINAL}
            call.over |= over
            if 2 * len(over) <= len(ids):
                return ids, found
            call.again = max(call.again / 4, SOON_SECONDS)

    async def _read(self, ids: Sequence[InvocationId]) -> Sequence[InvocationRecord | None]:
        return await get_readable(self._engine.store, self._engine.app, ids)

    async def _move_up(self, parent: InvocationRecord, children: Sequence[InvocationRecord]) -> None:
        moves = [(child, place_for(child, parent)) for child in children]
        moves = [(child, place) for child, place in moves if child.due_at > place]
        if moves:
            app = self._engine.app
            await self._engine.store.apply([MoveUp(app=app, id=child.id, due_at=place) for child, place in moves])
            ready = [(child.lane, place, child.priority) for child, place in moves if child.status in AVAILABLE]
            if ready:
                self._engine.hub.send(work_hint(ready))

    async def _circle(self, call: _Waiting, ids: Sequence[InvocationId], found: Sequence[InvocationRecord]) -> Any:
        """Return the circle of waits that the call stands in."""
        needs: dict[InvocationId, Need] = {call.id: Need(task=call.record.task, awaited=tuple(ids))}
        if len(call.runs) > 2 * MAX_LOOKED_AT:
            call.runs.clear()
        frontier = list(found)
        while frontier and len(needs) < MAX_LOOKED_AT:
            following: dict[InvocationId, None] = {}
            for record in frontier:
                if record.id not in needs and (need := await self._need(call, record)) is not None:
                    needs[record.id] = need
                    following |= dict.fromkeys(other for other in need.others if other not in needs)
            wanted = [id for id in following if id not in needs][:MAX_LOOKED_AT]
            frontier = [record for record in await self._read(wanted) if record is not None] if wanted else []
        return find_circle(call.id, needs) if len(needs) > 1 else ()

    async def _need(self, call: _Waiting, record: InvocationRecord) -> Need | None:
        """Return what an invocation needs to go on; None if it can by itself."""
        if (waiting := record.awaited) is not None:
            return Need(task=record.task, awaited=waiting.ids)
        if record.status is Status.SUSPENDED:
            return await self._need_of_run(call, record)
        key = record.limit_key
        if key is None or record.status not in IN_LINE:
            return None
        task = self._worker.tasks.get(record.task)
        limit = None if task is None else task.limit
        if limit is None and record.status in AVAILABLE:
            return None
        holders = await self._engine.store.find(
            self._engine.app, Filter(limit_key=key), MAX_LOOKED_AT, order=Order.SLOT
        )
        if limit is not None and len(holders) < limit.max_running:
            return None
        return Need(task=record.task, holders=tuple(holder.id for holder in holders), limit_key=key)

    async def _need_of_run(self, call: _Waiting, record: InvocationRecord) -> Need | None:
        """Return the children that a run waits for; None if something else may wake it, or has since it was read."""
        if (read := self._engine.read_waits) is None or record.wake_at is not None:
            return None
        if (known := call.runs.get(record.id)) is not None and known[0] == record.version:
            return known[1]
        children = [InvocationId(wait.child) for wait in await read(self._engine, record)]
        (now,) = await self._read([record.id])
        if now is None or now.version != record.version:
            return None
        need = Need(task=record.task, holders=tuple(children)) if children and all(children) else None
        call.runs[record.id] = record.version, need
        return need


def place_for(child: InvocationRecord, parent: InvocationRecord) -> float:
    """Return the due time that gives a child the place of its parent in the queue. In the queue from which the parent
    was taken, all waiting work fell due later. In another queue, or at a higher priority, older work may wait.
    """
    is_same_line = child.queue == parent.queue and child.priority >= parent.priority
    return parent.due_at - (_BEFORE if is_same_line else _FAR)


class _Writer:
    """Write pauses and their ends in groups. A group is what gathered while the previous one was being written."""

    def __init__(self, engine: Engine, outage: Outage, written: Callable[[InvocationRecord, Change], None]) -> None:
        self._engine = engine
        self._outage = outage
        self._written = written
        self._gathered: list[tuple[InvocationRecord, _Write, asyncio.Future[Verdict | None]]] = []
        self._task: asyncio.Task[None] | None = None
        self.busy: dict[str, tuple[Change, asyncio.Future[Verdict | None]]] = {}  # by id, what is being written

    async def write(self, record: InvocationRecord, write: _Write) -> Verdict | None:
        """Return the verdict; None if the store could not be reached until the worker had to end."""
        done: asyncio.Future[Verdict | None] = asyncio.get_running_loop().create_future()
        self._gathered.append((record, write, done))
        if isinstance(write, Change):
            self.busy[record.id] = write, done
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._write_groups())
        return await asyncio.shield(done)

    async def _write_groups(self) -> None:
        while self._gathered:
            group, self._gathered = self._gathered, []
            verdicts: Sequence[Verdict | None] = [None] * len(group)
            try:
                attempt = functools.partial(self._apply, group)
                verdicts = await self._outage.until_reached(f"writing {len(group)} waits", attempt)
            except Exception as error:
                self._engine.telemetry.emit(e.DutyFailed("worker", f"write {len(group)} waits", error))
            for (record, write, done), verdict in zip(group, verdicts, strict=True):
                if isinstance(write, Change) and isinstance(verdict, Applied):
                    self._written(record, write)  # at once: its end may come in this turn of the loop
                    if self._engine.telemetry.wants(e.Settled):
                        self._engine.telemetry.emit(e.Settled(record, write))
                if self.busy.get(record.id, (None, None))[1] is done:
                    del self.busy[record.id]
                if not done.done():
                    done.set_result(verdict)

    async def _apply(self, group: Sequence[tuple[InvocationRecord, _Write, Any]], again: bool) -> Sequence[Verdict]:
        names = {write.name for _, write, _ in group if isinstance(write, Change)}
        if "paused" in names:
            crashpoint("pause.before")
        if "resumed" in names:
            crashpoint("resume.before")
        verdicts = await self._engine.store.apply([write for _, write, _ in group])
        if "paused" in names:
            crashpoint("pause.after")
        if "resumed" in names:
            crashpoint("resume.after")
        return verdicts

    async def close(self) -> None:
        if self._task is not None:
            await cancel_tasks(self._task)
        for _, _, done in self._gathered:
            if not done.done():
                done.set_result(None)
