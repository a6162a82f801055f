"""Notes of the calls in a worker on their way to the store.

What a call notes stays in memory until its next turn: 20 ms after the first note, then `note_interval_seconds` after
the last write for this call. All calls whose turn has come share a write. The end of an attempt carries all that it has
noted, so it waits for nothing here. While the store is away only the latest is kept, and is tried again with growing
pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from holdfast.crashpoints import crashpoint
from holdfast.errors import StoreFull, StoreReadOnly, StoreUnavailable
from holdfast.executors.call import Call
from holdfast.executors.notes import CallNotes
from holdfast.model.changes import Applied, Change, NoteUpdate, Verdict
from holdfast.model.notes import LogLine
from holdfast.model.records import InvocationRecord
from holdfast.runtime.definition import TaskDefinition
from holdfast.runtime.engine import Engine
from holdfast.runtime.outage import LONGEST_PAUSE_SECONDS, cancel_tasks
from holdfast.telemetry import events as e
from holdfast.telemetry.keeping import LineKeeper

LINGER_SECONDS = 0.02  # before a call's first write: its code may go on to say more, or end
_GROUPS = 5  # in an interval, of one worker
_AT_ONCE = 500


class _Noting:
    """The notes of a call, and when they may be written again."""

    def __init__(self, record: InvocationRecord) -> None:
        self.record = record
        self.notes: CallNotes
        self.next_at = 0.0
        self.is_silent = False  # nothing of it is written any more

    def silence(self) -> None:
        self.is_silent = self.notes.is_over = True

    def update(self) -> NoteUpdate:
        self.notes.is_news = False
        said, record = self.notes.said, self.record
        return NoteUpdate(
            app=record.app,
            id=record.id,
            epoch=record.epoch,
            actor=record.owner or "",
            attributes=said.attributes,
            notes=said.notes,
        )


RecordOf = Callable[[str], InvocationRecord | None]


class NoteWriter:
    """The notes of one worker's calls. All of it happens on the engine's loop, unless the docstring says otherwise.
    `record_of` returns the record of a call that runs.
    """

    def __init__(self, engine: Engine, tasks: Mapping[str, TaskDefinition], record_of: RecordOf) -> None:
        self._engine = engine
        self._tasks = tasks
        self._record_of = record_of
        self._interval = engine.settings.note_interval_seconds
        self.calls: dict[str, _Noting] = {}  # by id and epoch
        self._due: dict[str, _Noting] = {}
        self._news: deque[_Noting] = deque()
        self._is_announced = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._free_at = 0.0  # for the next group
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._failures = 0
        self._keeper = LineKeeper(self.line_of) if any(task.log_lines for task in tasks.values()) else None

    def open(self) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        if self._keeper is not None:
            self._keeper.begin()

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.end()
        self.forget_all()
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            await cancel_tasks(self._writing)

    # --- calls

    def of(self, call: Call) -> CallNotes:
        """Return the notes of a call; of a call that has ended, notes that are never written. From any thread."""
        record = call.about
        assert isinstance(record, InvocationRecord)
        return self._of(record)

    def _of(self, record: InvocationRecord) -> CallNotes:
        mark = _mark(record)
        if (there := self.calls.get(mark)) is not None:
            return there.notes
        noting = _Noting(record)
        task = self._tasks.get(record.task)
        notes = noting.notes = CallNotes(
            self._engine.codec,
            self._engine.limits,
            notes=record.notes,
            attributes=record.attributes,
            attempt=record.attempt,
            lines=0 if task is None else task.log_lines,
            now=self._engine.store.now,
            notify=lambda notes: self._notified(noting),
        )
        notes = self.calls.setdefault(mark, noting).notes
        if not self._runs(record):  # its code has gone on beyond its end
            self.forget(record)
            notes.is_over = True
        return notes

    def set(self, record: InvocationRecord, attributes: Mapping[str, str]) -> None:
        """Note attributes of a run, which its body has checked."""
        self._of(record).add(attributes)

    def _runs(self, record: InvocationRecord) -> bool:
        mine = self._record_of(record.id)
        return mine is not None and mine.epoch == record.epoch

    def line_of(self, invocation: str, attempt: int, line: LogLine) -> None:
        """Keep a log line of a call, if its task has `log_lines`. From any thread."""
        record = self._record_of(invocation)
        if record is None or record.attempt != attempt or record.run is not None:
            return
        task = self._tasks.get(record.task)
        if task is not None and task.log_lines:
            self._of(record).log(replace(line, attempt=attempt))

    def added_to(self, change: Change, record: InvocationRecord) -> Change:
        """Return the change that ends an attempt, with all that its code has noted; and forget the call."""
        noting = self.forget(record)
        if noting is None or noting.is_silent:
            return change
        said = noting.notes.said
        attributes = said.attributes if change.attributes is UNSET else change.attributes
        return replace(change, attributes=attributes, notes=said.notes)

    def forget(self, record: InvocationRecord) -> _Noting | None:
        mark = _mark(record)
        self._due.pop(mark, None)
        if (noting := self.calls.pop(mark, None)) is not None:
            noting.notes.is_over = True
        return noting

    def forget_all(self) -> None:
        for noting in tuple(self.calls.values()):
            self.forget(noting.record)

    # --- from user code to the store

    def _notified(self, noting: _Noting) -> None:
        """Look at the notes of a call soon. From any thread."""
        self._news.append(noting)
        if self._is_announced or self._loop is None:
            return
        self._is_announced = True
        is_here = threading.get_ident() == self._thread
        with contextlib.suppress(RuntimeError):  # the engine is gone
            (self._loop.call_soon if is_here else self._loop.call_soon_threadsafe)(self._look)

    def _look(self) -> None:
        # Cleared first: what comes too late for this visit announces itself again.
        self._is_announced = False
        for noting in [self._news.popleft() for _ in range(len(self._news))]:
            self._put(noting)
        self._plan()

    def _put(self, noting: _Noting) -> None:
        mark = _mark(noting.record)
        if self.calls.get(mark) is noting and not noting.is_silent:
            noting.next_at = noting.next_at or self._now() + LINGER_SECONDS
            self._due[mark] = noting

    def _plan(self) -> None:
        """Set the time of the next group: when the first turn has come, and not too soon after the last group."""
        if not self._due or (self._writing is not None and not self._writing.done()):
            return
        loop = asyncio.get_running_loop()
        at = max(self._free_at, min(noting.next_at for noting in self._due.values()))
        if self._timer is not None:
            if loop.time() < self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = loop.call_at(at, self._begin)

    def _begin(self) -> None:
        self._timer = None
        self._writing = asyncio.get_running_loop().create_task(self._write_group())
        self._writing.add_done_callback(lambda _: self._plan())

    async def _write_group(self) -> None:
        now = self._now()
        group = [noting for noting in self._due.values() if noting.next_at <= now][:_AT_ONCE]
        for noting in group:
            del self._due[_mark(noting.record)]
            noting.next_at = now + self._interval
        self._free_at = now + self._interval / _GROUPS
        if group:
            await self._write(group)

    async def _write(self, group: Sequence[_Noting]) -> None:
        try:
            crashpoint("note.before")
            verdicts = await self._engine.store.apply([noting.update() for noting in group])
            crashpoint("note.after")
        except (StoreUnavailable, StoreFull, StoreReadOnly) as error:
            self._try_again(group, error)
        except Exception as error:
            if len(group) > 1:
                for noting in group:
                    await self._write([noting])
                return
            group[0].silence()
            self._failed(f"write the notes of {group[0].record.id}", error)
        else:
            self._failures = 0
            self._silence_lost(group, verdicts)

    def _try_again(self, group: Sequence[_Noting], error: Exception) -> None:
        """Write the latest of these later: the pauses grow while the store is away."""
        if not self._failures:
            self._failed(f"write the notes of {len(group)} calls; it is tried again", error)
        pause = min(self._interval * 2**self._failures, max(LONGEST_PAUSE_SECONDS, self._interval))
        self._failures = min(self._failures + 1, 10)
        self._free_at = self._now() + pause
        for noting in group:
            self._put(noting)

    def _failed(self, what: str, error: Exception) -> None:
        self._engine.telemetry.emit(e.DutyFailed("worker", what, error))

    def _silence_lost(self, group: Sequence[_Noting], verdicts: Sequence[Verdict]) -> None:
        """Hear no more of calls that have another owner by now, or have ended."""
        for noting, verdict in zip(group, verdicts, strict=True):
            if not isinstance(verdict, Applied):
                noting.silence()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _mark(record: InvocationRecord) -> str:
    return f"{record.id}~{record.epoch}"
