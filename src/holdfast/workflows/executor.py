"""The engine's side of runs: it loads logs, appends pages in groups, suspends, submits and cancels children.

It is an executor of a worker like others: it takes calls, and gives outcomes back. In between, it reads and writes for
the runs. Pages of many runs that gather while a write is under way are one `append`. No page is dropped while the store
is away: it is tried again with the same operation id, so a page whose reply was lost is recognised.

A new owner loads a run like this: it reads the log; unless its predecessor has left cleanly, it appends `takeover` at
the tail and reads on until its takeover is in. From then on, the next page of a predecessor that still lives collides
with the takeover: it is fenced.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from holdfast.codec import Packed, Payload, Reference
from holdfast.crashpoints import crashpoint
from holdfast.errors import (
    CodecError,
    CorruptRecord,
    InvocationNotFound,
    KeyTaken,
    PayloadLost,
    StoreError,
    StoreReadOnly,
    StoreUnavailable,
)
from holdfast.executors.call import INTERRUPTED, Call, Crashed, LetGo, Outcome, Unfit
from holdfast.executors.local import Deliver, Executor, InlineExecutor, ThreadExecutor
from holdfast.executors.loop import LoopThread
from holdfast.ids import InvocationId
from holdfast.model import changes, run_changes
from holdfast.model.cancellation import asked_to_compensate
from holdfast.model.changes import Applied, Change, Lost, RunUpdate
from holdfast.model.claims import back_in_queue
from holdfast.model.crashes import crashes_in_a_row, died_since, kills_in_a_row
from holdfast.model.log import Appended, Behind, Fenced, Page
from holdfast.model.parking import GONE
from holdfast.model.records import INBOX, Hint, InvocationRecord, RunState, work_hint
from holdfast.model.state_writes import without_entries
from holdfast.model.status import AVAILABLE, FINAL, Status
from holdfast.runtime.engine import Engine
from holdfast.runtime.execute import STUBBORN_SECONDS, timed_out
from holdfast.runtime.hints import look_after, wait_for
from holdfast.runtime.outage import Outage, cancel_tasks, is_refusal
from holdfast.runtime.wait import get_readable
from holdfast.telemetry.events import DutyFailed, RunSuspended
from holdfast.workflows import events as e
from holdfast.workflows.answers import check_whole, start_of_log
from holdfast.workflows.attempts import Item
from holdfast.workflows.children import message_of
from holdfast.workflows.events import Event
from holdfast.workflows.host import Host, Mailbox
from holdfast.workflows.life import Command
from holdfast.workflows.loaded import Loaded, code_of, life_of
from holdfast.workflows.run import Run
from holdfast.workflows.service import wait_hint
from holdfast.workflows.streaming import RunStreams
from holdfast.workflows.time_limit import ends_by

if TYPE_CHECKING:
    from holdfast.runtime.worker import Worker

T = TypeVar("T")
Work = Callable[[], Awaitable[T]]
_PAGES = 500
_LOOK_SECONDS = 2.0
_WATCH_SECONDS = 0.5
_DEAD_SECONDS = 600.0  # after which no transaction of a dead owner is open
_BURIED_SECONDS = 1.0
_SUSPECT_CRASHES = 2
_SUSPECT_KILLS = 2  # with a worker that was ended for what another call did, or a step of this run


class Writing(msgspec.Struct):
    """A page that is to be appended for a run."""

    key: str
    page: Page
    items: list[Item]


class WorkflowExecutor(Executor):
    """Runs, in one worker. With `coroutines`, bodies and coroutine steps are on that loop, else on the engine's own."""

    host_class: type[Host] = Host

    def __init__(self, engine: Engine, worker: Worker, deliver: Deliver, coroutines: LoopThread | None) -> None:
        self.engine = engine
        self._worker = worker
        self.calls_around = worker.calls_around
        self._deliver = deliver
        self._store = engine.store
        self.concurrency = worker.concurrency
        self.tasks = worker.tasks
        self.begun = worker.begun
        self.streams = RunStreams(self)
        self._outage = Outage(engine.rng, engine.telemetry)
        self.loop = here = asyncio.get_running_loop()
        self._mail = Mailbox(here, is_here=coroutines is None)
        self._is_inline = coroutines is None
        loop = here if coroutines is None else coroutines.loop
        # A worker may claim a run again before it has heard that its last life here is over. So runs are addressed by
        # id and epoch (`life_of`), and by the key of the call only towards the worker.
        self._records: dict[str, InvocationRecord] = {}
        self._calls: dict[str, str] = {}  # lives, by the key of the call
        self._loading: set[str] = set()  # lives whose logs are being read
        self._undelivered: set[str] = set()  # calls ended by force, until their loop knows
        self._ends_by: dict[str, float] = {}  # when the time of a life and its grace are over, if it has a limit
        self.host = self.host_class(self, loop, is_here=coroutines is None)
        self._gathered: list[Writing] = []
        self._pump: asyncio.Task[None] | None = None
        self._changes: list[tuple[str, InvocationRecord, Change]] = []
        self._changing: asyncio.Task[None] | None = None
        self._spawned: set[asyncio.Task[None]] = set()
        self._unsubscribe = engine.hub.on(INBOX, self._hinted)
        self._looking: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._buried: dict[str, float] = {}  # dead owners, and until when not to look for their transactions again
        self.why_leaving = ""
        self._is_closed = False

    # --- as an executor of the worker

    def start(self, calls: Iterable[Call]) -> None:
        for call in calls:
            assert isinstance(call.about, InvocationRecord)
            life = life_of(call.about)
            self._records[life] = call.about
            self._calls[call.key] = life
            self._loading.add(life)
            self.spawn(self._begin(call, life, call.about))
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        if not self._is_inline and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self._watch())

    def interrupt(self, keys: Iterable[str]) -> None:
        for key in keys:
            life = self._calls.get(key, "")
            if life in self._loading:
                self.loop.call_soon(self.run_ended, life, INTERRUPTED)
            else:
                self.to_run(life, Run.interrupt)

    def cancel(self, keys: Iterable[str]) -> None:
        for key in keys:
            record = self._worker.record_of(key)
            asked = None if record is None else record.cancellation
            why = "cancelled" if asked is None else str(asked)
            self.to_run(self._calls.get(key, ""), functools.partial(Run.cancel, why=why))

    def raise_soft_timeout(self, keys: Iterable[str]) -> None:
        """Do nothing: a workflow has no soft timeout."""

    def force(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        self.interrupt(keys)
        if not self._is_inline:
            self._undelivered.update(keys)
            delivered = functools.partial(self._undelivered.difference_update, keys)
            self.host.inbox.post(lambda: self.post(delivered))

    def is_blocked(self, key: str) -> bool:
        return key in self._undelivered

    def let_go(self, why: str) -> None:
        """Hand runs over at their next step boundary: the worker ends."""
        self.why_leaving = why
        self.host.inbox.post(lambda: self.host.leave_all(why))

    def close(self) -> None:
        self._is_closed = True
        self._unsubscribe()
        self._outage.give_up_in(0)
        if self._looking is not None:
            self._looking.cancel()
        if self._watching is not None:
            self._watching.cancel()
        self.host.inbox.post(self.host.close)

    def to_run(self, key: str, do: Callable[[Run], object]) -> None:
        self.host.inbox.post(lambda: self.host.with_run(key, do))

    # --- for the host

    def post(self, function: Callable[[], object]) -> None:
        """Have the engine's loop call this soon. From any thread."""
        self._mail.post(function)

    def may_start(self) -> bool:
        return not self._worker.is_cut_off

    def thread_executor(self, size: int, deliver: Deliver) -> Executor:
        return InlineExecutor(deliver) if self._is_inline else ThreadExecutor(size, deliver)

    def step_given_up(self, key: str, record: InvocationRecord | None) -> None:
        self._worker.on_step_given_up(key, record)

    def given_up_step_ended(self, key: str) -> None:
        self._worker.on_given_up_step_ended(key)

    def want_slots(self, key: str, count: int) -> None:
        if (call := self._call_of(key)) is not None:
            grant = functools.partial(self._grant, key)
            self._worker.want_slots(call, count, grant)

    def _grant(self, key: str, count: int) -> None:
        self.host.inbox.post(lambda: self.host.granted(key, count))

    def give_slots(self, key: str, count: int) -> None:
        if (call := self._call_of(key)) is not None:
            self._worker.give_slots(call, count)

    def _call_of(self, key: str) -> str | None:
        """Return the key of the call of a life; None if the worker has begun another life of that run."""
        record = self._records.get(key)
        calls = () if record is None else (record.id, f"{record.id}~{record.epoch}")
        return next((call for call in calls if self._calls.get(call) == key), None)

    def run_ended(self, key: str, outcome: Outcome, left: Mapping[str, Any] | None = None) -> None:
        """Forget a life and report that to the worker, unless the worker has begun another life of that run."""
        call = self._call_of(key)
        self._records.pop(key, None)
        self._loading.discard(key)
        self._ends_by.pop(key, None)
        if call is None:
            return
        del self._calls[call]
        if left is not None and (record := self._worker.record_of(call)) is not None and record.run is not None:
            self._worker.set_run(call, _left(record, left))
        self._deliver([(call, outcome)])

    # --- loading

    async def _begin(self, call: Call, key: str, record: InvocationRecord) -> None:
        task = self.tasks[record.task]
        try:
            what = f"reading the log of {record.id}"
            loaded = await self._outage.until_answered(what, lambda again: self._load(call, record))
        except StoreError as error:  # the worker stops, and the store is away
            return self.run_ended(key, Crashed(str(error)))
        if not isinstance(loaded, Loaded):
            return self.run_ended(key, loaded)
        if key not in self._records:
            return  # it was interrupted meanwhile
        self._loading.discard(key)
        self._ends_by[key] = ends_by(loaded.record, loaded.first_started_at)
        self.host.inbox.post(lambda: self.host.begin(call, task, loaded))
        if loaded.record.status is Status.CANCELLING and record.status is not Status.CANCELLING:
            self._worker.on_cancelling(loaded.record)
        known = self._worker.record_of(record.id)
        if known is not None and known.epoch == record.epoch and known.status is Status.CANCELLING:
            self.cancel([call.key])  # it may have been asked while there was no body that could hear it

    async def _load(self, call: Call, record: InvocationRecord) -> Loaded | Outcome:
        run = record.run
        if run is None:  # it was submitted as a task, and its function is a workflow now
            return Unfit("it was submitted as a task, and is a workflow in this code: submit it again")
        try:
            found = await self._read(record, run)
            if isinstance(found, LetGo):
                return found
            events, tail, progress = found
            if run.generation > 1 and run.started_at is None:  # the last one stays, for people who look into it
                await self._store.remove_log(record.app, record.id, before=run.generation - 1)
            started_at = run.started_at or start_of_log(record, run)
        except (StoreUnavailable, StoreReadOnly):
            raise
        except (CodecError, CorruptRecord) as error:
            return Unfit(f"its log cannot be read: {error}")
        first_started_at = _first_start(record, run) if run.generation else started_at
        has_blocked = kills_in_a_row(record.history, progress) >= _SUSPECT_KILLS
        if has_blocked and ends_by(record, first_started_at) <= self._store.now():
            return timed_out(
                record, self.engine.codec, "; its body was not cancelled: the event loop of its workers was blocked"
            )
        suspect = has_blocked or crashes_in_a_row(record.history, progress) >= _SUSPECT_CRASHES
        if record.cancellation is not None and record.status in (Status.RUNNING, Status.RESUMED):
            is_said = any(event.type == e.CANCEL_REQUESTED for event in events)
            operation, at = self.engine.ids.operation(), self._store.now()
            change = asked_to_compensate(record, operation=operation, at=at, is_said=is_said)
            (verdict,) = await self.engine.outbox.apply([(record, change)])
            if isinstance(verdict, Applied):
                record = changes.apply_to(change, record)
        return Loaded(
            record=record,
            events=events,
            tail=tail,
            started_at=started_at,
            first_started_at=first_started_at,
            is_suspect=suspect,
            progress_epoch=progress,
        )

    async def _read(self, record: InvocationRecord, run: RunState) -> tuple[list[Event], int, int] | LetGo:
        """Read the log, and take it over if its last owner may still write."""
        events, tail, progress = list[Event](), 0, 0
        is_clean = record.epoch == 1 or run.suspended_in == record.epoch - 1
        takeover = None
        while True:
            pages = await self._store.read_log(
                record.app, record.id, generation=run.generation, after=tail, limit=_PAGES
            )
            for page in pages:
                if page.first != tail + 1:
                    raise CorruptRecord(f"the log of {record.id} has no page at position {tail + 1}")
                if page.epoch > record.epoch:
                    return LetGo(f"another owner took it over in epoch {page.epoch}")
                events += (found := e.decode(page))
                tail = page.last
                progress = page.epoch if e.is_progress(found) else progress
                if takeover is not None and page.operation == takeover.operation:
                    is_clean = True
            if len(pages) == _PAGES:
                continue
            check_whole(record, tail)
            if is_clean:
                return events, tail, progress
            if takeover is None:
                await self._bury(record)
            crashpoint("takeover.before")
            takeover = self._takeover(record, run, tail, takeover)
            (verdict,) = await self._store.append([takeover])
            crashpoint("takeover.after")
            if isinstance(verdict, Fenced):
                return LetGo(f"another owner took it over in epoch {verdict.epoch}")

    async def _bury(self, record: InvocationRecord) -> None:
        """Roll back what dead owners of a run have left open: the place of the next page may be taken there. A worker
        may leave many runs; once in a while is enough for all of them.
        """
        now = self.loop.time()
        died = died_since(record.history, self._store.now() - _DEAD_SECONDS)
        owners = [owner for owner in sorted(died) if now >= self._buried.get(owner, now)]
        self._buried |= dict.fromkeys(owners, now + _BURIED_SECONDS)
        if owners:
            await self._store.abort_transactions(owners)

    def _takeover(self, record: InvocationRecord, run: RunState, tail: int, before: Page | None) -> Page:
        code = code_of(self.tasks[record.task])
        event = Event(type=e.TAKEOVER, at=self._store.now(), epoch=record.epoch, code=code)
        page = self.page(record, tail + 1, run.generation, [event])
        return page if before is None else msgspec.structs.replace(page, operation=before.operation)

    # --- appending

    def append(self, key: str, record: InvocationRecord, tail: int, generation: int, items: list[Item]) -> None:
        """Take a page of a run, from the host's thread."""
        page = self.page(record, tail + 1, generation, [item.event for item in items])
        self.post(functools.partial(self._append, Writing(key, page, items)))

    def _append(self, writing: Writing) -> None:
        self._gathered.append(writing)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._append_groups())

    async def _append_groups(self) -> None:
        while self._gathered:
            group, self._gathered = self._gathered, []
            await self._write_apart(group, self._append_group, self._not_written, "append pages")

    def _not_written(self, writing: Writing, error: Exception) -> None:
        self.to_run(writing.key, functools.partial(Run.lost, why=f"{type(error).__name__}: {error}"))

    async def _write_apart(
        self,
        group: list[T],
        write: Callable[[list[T]], Awaitable[None]],
        refused: Callable[[T, Exception], None],
        what: str,
    ) -> None:
        """Write these pages together. If the store refuses them, write each half: only a page that is refused by itself
        is lost.
        """
        try:
            await write(group)
        except Exception as error:
            if len(group) > 1 and is_refusal(error):
                half = len(group) // 2
                await self._write_apart(group[:half], write, refused, what)
                return await self._write_apart(group[half:], write, refused, what)
            for each in group:
                refused(each, error)
            self.engine.telemetry.emit(DutyFailed("workflows", f"{what} of {len(group)} runs", error))

    async def _append_group(self, group: list[Writing]) -> None:
        payloads = [payload for writing in group for item in writing.items for payload in item.payloads]

        async def attempt(again: bool) -> Sequence[Any]:
            if payloads:
                await self.engine.payloads.keep(payloads)
            crashpoint("append.before")
            answer = await self._store.append([writing.page for writing in group])
            crashpoint("append.after")
            return answer

        what = f"appending pages of {len(group)} runs"
        verdicts = await self._outage.until_accepted(what, attempt)
        answers: list[tuple[str, Callable[[Run], object]]] = []
        for writing, verdict in zip(group, verdicts, strict=True):
            match verdict:
                case Appended():
                    answers.append((writing.key, Run.appended))
                case Fenced(epoch):
                    answers.append((writing.key, functools.partial(Run.fenced, why=f"epoch {epoch} owns the log")))
                case Behind():
                    why = "its log has pages of this epoch that this owner did not write"
                    answers.append((writing.key, functools.partial(Run.lost, why=why)))

        def answer_all() -> None:
            for key, do in answers:
                self.host.with_run(key, do)

        self.host.inbox.post(answer_all)

    # --- letting go

    def suspend(
        self, key: str, record: InvocationRecord, left: Mapping[str, Any], wake_at: float | None, why: str
    ) -> None:
        state = _left(record, left)
        change = run_changes.suspended(
            record,
            state,
            wake_at=wake_at,
            operation=self.engine.ids.operation(),
            at=self._store.now(),
            why=why,
            attributes=left["attributes"],
        )
        self._change(key, record, change)

    def hand_over(self, key: str, record: InvocationRecord, left: Mapping[str, Any], why: str) -> None:
        change = run_changes.handed_over(
            record,
            _left(record, left),
            operation=self.engine.ids.operation(),
            at=self._store.now(),
            why=why,
            attributes=left["attributes"],
        )
        self._change(key, record, change)

    def set_attributes(self, key: str, attributes: Mapping[str, str]) -> None:
        """Have the attributes of a run written with the notes of other calls; its end has them at the latest."""
        if (record := self._records.get(key)) is not None:
            self._worker.notes.set(record, attributes)

    def update(self, key: str, record: InvocationRecord, left: Mapping[str, Any]) -> None:
        self.spawn(self._update(key, record, _left(record, left)))

    async def _update(self, key: str, record: InvocationRecord, state: RunState) -> None:
        assert record.owner is not None
        write = RunUpdate(
            app=record.app,
            id=record.id,
            epoch=record.epoch,
            actor=record.owner,
            run=state,
            inbox_seen=state.pushed,
        )
        after = None
        try:
            what = f"updating the run {record.id}"
            (verdict,) = await self._outage.until_answered(what, lambda again: self._store.apply([write]))
            if isinstance(verdict, Applied):
                after = state
            else:
                await self._refresh([key])
        finally:
            self.to_run(key, functools.partial(_updated, state=after))

    def restart(self, key: str, record: InvocationRecord, left: Mapping[str, Any], packed: Packed) -> None:
        self.spawn(self._restart(key, record, left, packed))

    async def _restart(self, key: str, record: InvocationRecord, left: Mapping[str, Any], packed: Packed) -> None:
        async def keep(again: bool) -> None:
            await self.engine.payloads.keep(packed.payloads)

        try:
            await self._outage.until_accepted(f"storing the arguments of {record.id}", keep)
        except Exception as error:
            return self.to_run(key, functools.partial(Run.lost, why=f"{type(error).__name__}: {error}"))
        state = _left(record, left)
        change = run_changes.restarted(
            record,
            msgspec.structs.replace(state, inbox=(*left["unread"], *state.inbox)),
            arguments=packed.data,
            operation=self.engine.ids.operation(),
            at=self._store.now(),
            attributes=left["attributes"],
        )
        self._change(key, record, change)

    def _change(self, key: str, record: InvocationRecord, change: Change) -> None:
        self._changes.append((key, record, change))
        if self._changing is None or self._changing.done():
            self._changing = asyncio.get_running_loop().create_task(self._write_changes())

    async def _write_changes(self) -> None:
        while self._changes:
            group, self._changes = self._changes, []
            await self._write_apart(group, self._write_group, self._not_changed, "suspend")

    def _not_changed(self, wanted: tuple[str, InvocationRecord, Change], error: Exception) -> None:
        self.to_run(wanted[0], functools.partial(Run.lost, why=str(error)))

    async def _write_group(self, group: list[tuple[str, InvocationRecord, Change]]) -> None:
        async def attempt(again: bool) -> Sequence[Any]:
            crashpoint("suspend.before")
            answer = await self.engine.outbox.apply([(record, change) for _, record, change in group])
            crashpoint("suspend.after")
            return answer

        verdicts = await self._outage.until_accepted(f"suspending {len(group)} runs", attempt)
        ready, soon = [], list[Hint]()
        for (key, record, change), verdict in zip(group, verdicts, strict=True):
            if isinstance(verdict, Applied):
                self.engine.telemetry.emit(RunSuspended(record, change))
                if change.target in AVAILABLE:
                    ready.append(back_in_queue(record, change))
                elif isinstance(change.wake_at, float) and (hint := wait_hint(change.wake_at, change.at)):
                    soon.append(hint)
                self.to_run(key, Run.let_go)
            elif isinstance(verdict, Lost) and (verdict.owner, verdict.epoch) == (record.owner, record.epoch):
                self.spawn(self._refresh([key], is_refused=True))
            else:
                self.to_run(key, functools.partial(Run.fenced, why="another owner has it"))
        if ready:
            self.engine.hub.send(work_hint(ready))
        if soon:
            self.engine.hub.send(min(soon, key=lambda hint: hint.since or 0.0))

    # --- messages

    def _hinted(self, hint: Hint) -> None:
        keys = [life for key in hint.subjects if (life := self._calls.get(key)) is not None]
        if keys := keys if hint.subjects else self._waiting():  # hints may have been lost
            self.spawn(self._refresh(keys))

    def _waiting(self) -> list[str]:
        """Return the lives that may wait for a message."""
        few = len(self._records) < 100
        return [life for key, life in self._calls.items() if few or self._worker.is_waiting(key)]

    async def _look(self) -> None:
        """Look at the inboxes of runs now and then: a hint may be lost."""
        while True:
            await asyncio.sleep(look_after(_LOOK_SECONDS) or _LOOK_SECONDS)
            try:
                if waiting := self._waiting():
                    await self._refresh(waiting)
            except StoreError as error:
                self.engine.telemetry.emit(DutyFailed("workflows", "look into the inboxes of runs", error))

    async def _watch(self) -> None:
        """Leave this worker if the loop of the runs is blocked beyond the time of a step, or of a run: only its process
        can end that. Their timers are on that loop.
        """
        while self._calls:
            await asyncio.sleep(_WATCH_SECONDS)
            first = min([self.host.steps_end_by, *self._ends_by.values()])
            if first < self._store.now() - STUBBORN_SECONDS and not await self._is_answered():
                self._worker.on_runs_blocked()

    async def _is_answered(self) -> bool:
        answer = asyncio.Event()
        self.host.inbox.post(lambda: self.post(answer.set))
        return await wait_for(answer, STUBBORN_SECONDS)

    async def _refresh(self, keys: Sequence[str], *, is_refused: bool = False) -> None:
        """Read runs again, and pass the records to their owners; `is_refused`: the write that lets go of them was
        refused.
        """
        mine_by_id = {record.id: (key, record) for key in keys if (record := self._records.get(key)) is not None}
        ids = list(mine_by_id)

        async def read(again: bool) -> Sequence[InvocationRecord | None]:
            return await get_readable(self._store, self.engine.app, ids)

        found = await self._outage.until_answered(f"reading {len(ids)} runs", read)
        for record in found:
            if record is None:
                continue
            life, mine = mine_by_id[record.id]
            if (record.owner, record.epoch) != (mine.owner, mine.epoch) or record.status in FINAL:
                self.to_run(life, functools.partial(Run.fenced, why=f"it is {record.status} now"))
                continue
            if record.status is Status.CANCELLING:
                self._worker.on_cancelling(record)
            self.to_run(life, functools.partial(Run.take_record, record=record, is_refused=is_refused))

    def fetch(
        self,
        key: str,
        wanted: Sequence[Reference],
        then: Callable[[Mapping[str, bytes]], None],
        *,
        is_recorded: bool = False,
    ) -> None:
        """Fetch large values for a run. It is parked if one of those is gone that its log has (`is_recorded`)."""

        async def fetch(again: bool) -> dict[str, bytes]:
            return await self.engine.payloads.fetch(wanted)

        async def work() -> None:
            try:
                found = await self._outage.until_reached(f"fetching a value for {key}", fetch)
            except PayloadLost as error:
                gone: Outcome = Unfit(f"{GONE}: {error}") if is_recorded else Crashed(str(error))
                self.to_run(key, lambda run: run.end(gone))
            except Exception as error:  # else its entry would never be written, and the run be busy for ever
                self.to_run(key, functools.partial(Run.lost, why=f"{type(error).__name__}: {error}"))
                self.engine.telemetry.emit(DutyFailed("workflows", f"fetch a value for {key}", error))
            else:
                self.to_run(key, lambda run: then(found))

        self.spawn(work())

    def perform(self, key: str, what: str, work: Work[T], then: Callable[[Run, T], object]) -> None:
        """Do an operation for a run, again until the store answers, and pass the outcome to the run."""

        async def perform() -> None:
            try:
                answer = await self._outage.until_answered(what, lambda again: work())
            except Exception as error:
                self.to_run(key, functools.partial(Run.lost, why=f"{type(error).__name__}: {error}"))
                raise
            self.to_run(key, lambda run: then(run, answer))

        self.spawn(perform())

    # --- children

    def submit_child(self, key: str, command: Command) -> None:
        self.spawn(self._submit_child(key, command))

    async def _submit_child(self, key: str, command: Command) -> None:
        child = command.child
        assert child is not None
        refused: Exception | None = None

        async def submit(again: bool) -> Sequence[InvocationRecord | None]:
            return await self.engine.submitter.submit([child], command.payloads)

        try:
            (there,) = await self._outage.until_accepted(f"submitting a child of {key}", submit)
            crashpoint("child.inserted")
            if there is not None and there.id != child.id:
                refused = KeyTaken(
                    f"{child.task} was not submitted: its key {child.key or child.dedup_key!r} belongs to {there.id}. "
                    "A workflow awaits only what it has submitted: use another key, or wait for that one in a step"
                )
        except Exception as error:
            refused = error
        self.to_run(key, lambda run: run.elsewhere.submitted(command, refused))

    def look_at_child(self, key: str, command: Command) -> None:
        """Look whether a child has ended: its message may have been dropped with an earlier log."""
        child = command.child
        assert child is not None

        def found(run: Run, there: Sequence[InvocationRecord | None]) -> None:
            (record,) = there
            if record is not None and record.status in FINAL and record.reply_to is not None and not record.outbox:
                run.take_inbox([message_of(record)])
                run.pump()

        read = functools.partial(get_readable, self._store, self.engine.app, [child.id])
        self.perform(key, f"reading the child {child.id}", read, found)

    def cancel_children(self, key: str, ids: Sequence[str], why: str, then: Callable[[], None]) -> None:
        async def ask(again: bool) -> None:
            with contextlib.suppress(InvocationNotFound):  # its owner died before the insert, or the child is removed
                await self.engine.canceller.cancel([InvocationId(id) for id in ids], by="its parent", reason=why)

        async def work() -> None:
            try:
                await self._outage.until_answered(f"cancelling children of {key}", ask)
            except Exception as error:
                self.engine.telemetry.emit(DutyFailed("workflows", f"cancel {', '.join(ids[:5])}", error))
            self.to_run(key, lambda run: then())

        self.spawn(work())

    # --- transactional steps

    def page(self, record: InvocationRecord, first: int, generation: int, events: Sequence[Event]) -> Page:
        """Return a page of a run. From any thread."""
        return Page(
            app=record.app,
            run=record.id,
            generation=generation,
            first=first,
            last=first + len(events) - 1,
            epoch=record.epoch,
            operation=self.engine.ids.operation(),
            at=events[-1].at,
            events=e.encode(events),
            payloads=e.payloads_of(events),
        )

    async def keep(self, payloads: Sequence[Payload]) -> None:
        await self._outage.until_answered("storing the result of a step", lambda again: self._keep(payloads))

    async def _keep(self, payloads: Sequence[Payload]) -> None:
        await self.engine.payloads.keep(payloads)

    async def page_at(self, page: Page) -> Page | None:
        """Return the stored page at the place of this page."""
        after = page.first - 1

        async def read(again: bool) -> Sequence[Page]:
            return await self._store.read_log(page.app, page.run, generation=page.generation, after=after, limit=1)

        found = await self._outage.until_answered(f"reading the log of {page.run}", read)
        return found[0] if found else None

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this as a background task. It is a coroutine without a wrapper: if a task is cancelled before it begins,
        a wrapped coroutine would never be awaited.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._spawned.add(task)
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._spawned.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.engine.telemetry.emit(DutyFailed("workflows", "serve a run", error))

    async def finish(self) -> None:
        tasks = (self._looking, self._watching, self._pump, self._changing, *self._spawned)
        await cancel_tasks(*[task for task in tasks if task is not None])


def _updated(run: Run, *, state: RunState | None) -> None:
    run.updates.written(state)


def _left(record: InvocationRecord, left: Mapping[str, Any]) -> RunState:
    """Return the state of a run without the messages that its log has."""
    assert record.run is not None
    handled: Collection[str] = left["handled"]
    state = without_entries(record.run, handled)
    first = left["first_started_at"] if state.generation else None  # the history may have been cut
    known = {name: left[name] for name in ("tail", "started_at", "has_hooks")}
    return msgspec.structs.replace(state, first_started_at=first, **known)


def _first_start(record: InvocationRecord, run: RunState) -> float:
    if run.first_started_at is not None:
        return run.first_started_at
    return next((entry.at for entry in record.history if entry.status is Status.RUNNING), record.changed_at)
