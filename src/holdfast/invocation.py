"""Handles to invocations, which `submit` returns.

A handle is an id and a way to the store. It keeps no state, so two handles of one invocation, in two processes, agree.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import getpass
import math
import os
import socket
from collections.abc import Coroutine, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar, cast

from holdfast import errors
from holdfast.clock import Duration, format_duration, length_of, parse_moment
from holdfast.codec import MARK, Codec, Payloads, damage_of, references
from holdfast.executors.context import context
from holdfast.ids import InvocationId
from holdfast.model import changes
from holdfast.model.notes import NO_NOTES, CallProgress, LogLine, Notes
from holdfast.model.records import READY, Hint, HistoryEntry, InvocationRecord, kept_text
from holdfast.model.status import FINAL, Status
from holdfast.runtime.app_runtime import AppRuntime, awaited, blocking, refuse_on_loop, running_body
from holdfast.runtime.engine import Engine
from holdfast.runtime.rerun import Edited, Rerunner, edited
from holdfast.runtime.runs import LogEvent, RunLooks, StepRecord
from holdfast.runtime.streams import Chunk, StreamInfo, StreamReader, StreamReads, StreamTail
from holdfast.runtime.wait import get_all, missing
from holdfast.runtime.waiting import await_, wait
from holdfast.telemetry.tasks import here

__all__ = [
    "CallProgress",
    "Chunk",
    "HistoryEntry",
    "Invocation",
    "InvocationRecord",
    "LogEvent",
    "LogLine",
    "Notes",
    "StepRecord",
    "StreamInfo",
    "StreamReader",
    "StreamTail",
]

_SLEEPING = frozenset({Status.SUSPENDED, Status.RUNNING, Status.RESUMED, Status.CANCELLING})
R = TypeVar("R", covariant=True)
Moment = dt.datetime | float | None


class Handle:
    """A handle of what was submitted: says our word for what other libraries have on theirs."""

    __slots__ = ()
    _ours: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # else nothing would be known to be missing

        def __getattr__(self, word: str) -> Any:
            said = f"{type(self).__name__!r} object has no attribute {word!r}"
            hint = f": write {self._ours[word]}" if word in self._ours else ""
            raise AttributeError(f"{said}{hint}", name=word, obj=self)


class Invocation(Handle, Generic[R]):
    """One call of a task. Every blocking method has an async sister with an `a` in front."""

    __slots__ = ("_runtime", "id", "is_fresh")
    _ours: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("get", "get_result", "wait", "join", "return_value"), "result(timeout=…)"),
        **dict.fromkeys(("state", "ready", "done", "is_done", "is_complete", "successful", "failed"), "status"),
        **dict.fromkeys(("revoke", "abort", "terminate"), "cancel()"),
        **dict.fromkeys(("info", "meta"), "progress()"),
        **{word: f"task.s(…).{word}(…), and submit that" for word in ("then", "on_error")},
    }
    _is_expected = False  # it may not be stored yet

    def __init__(self, runtime: AppRuntime, id: str, *, fresh: bool = False) -> None:
        self._runtime = runtime
        self.id = InvocationId(id)
        self.is_fresh = fresh  # this submit has stored it, and `result` was not called yet

    def __repr__(self) -> str:
        return f"<Invocation {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Invocation) and (self.id, self._runtime) == (other.id, other._runtime)

    def __hash__(self) -> int:
        return hash(self.id)

    # --- what it is

    @blocking
    async def record(self, engine: Engine) -> InvocationRecord:
        """Return everything that the store knows about it, at this moment.

        Raises `InvocationNotFound`, and `CorruptRecord` if it is damaged or was set aside for that.
        """
        return await self._record(engine)

    arecord = awaited(record)

    async def _record(self, engine: Engine) -> InvocationRecord:
        (record,) = await get_all(engine.store, engine.app, [self.id])
        return record

    @property
    def status(self) -> Status:
        """Return the status of this moment."""
        return self.record().status

    async def astatus(self) -> Status:
        return (await self.arecord()).status

    def history(self) -> Sequence[HistoryEntry]:
        """Return every status it has had: when, in which epoch, by which runner and why."""
        return self.record().history

    async def ahistory(self) -> Sequence[HistoryEntry]:
        return (await self.arecord()).history

    @blocking
    async def explain(self, engine: Engine) -> str:
        """Say what holds it back and what would release it, or how it ended, in a sentence or two."""
        return (await self._runtime.explain(await self._record(engine))).text

    aexplain = awaited(explain)

    # --- what its code says

    @blocking
    async def progress(self, engine: Engine) -> CallProgress | None:
        """Return how far it has come, as its code has last said by ``context().progress(…)``; None if it has not."""
        return ((await self._record(engine)).notes or NO_NOTES).progress

    aprogress = awaited(progress)

    @blocking
    async def log(self, engine: Engine) -> Sequence[LogLine]:
        """Return the last lines that its code has logged, if its task is declared with ``log_lines=``."""
        return ((await self._record(engine)).notes or NO_NOTES).log

    alog = awaited(log)

    # --- what a workflow has done

    @blocking
    async def steps(self, engine: Engine, *, fetch: bool = False) -> list[StepRecord]:
        """Return the steps and children of a workflow, in the order of its log. With `fetch`, large values too.

        A step that runs is seen after a second. Raises `UsageError` for a task.
        """
        return await self._looks.steps(engine, await self._record(engine), fetch=fetch)

    asteps = awaited(steps)

    @blocking
    async def step(self, engine: Engine, id: str, *, fetch: bool = False) -> StepRecord:
        """Return one step, such as ``charge#2``. Raises `StepNotFound`, with the nearest name."""
        return await self._looks.step(engine, await self._record(engine), id, fetch=fetch)

    astep = awaited(step)

    @blocking
    async def events(
        self,
        engine: Engine,
        *,
        correlation: str | None = None,
        generation: int | None = None,
        after: str | None = None,
        limit: int = 1000,
        fetch: bool = False,
    ) -> list[LogEvent]:
        """Return the events of a workflow in order, of all generations of its log or of one.

        `correlation` is a step: only its events. `after` is the `cursor` of the last event of the page before. Raises
        `StepNotFound`, `LogEventNotFound`.
        """
        return await self._looks.events(
            engine,
            await self._record(engine),
            correlation=correlation,
            generation=generation,
            after=after,
            limit=limit,
            fetch=fetch,
        )

    aevents = awaited(events)

    @property
    def _looks(self) -> RunLooks:
        assert self._runtime.looks is not None
        return self._runtime.looks

    @blocking
    def fork(
        self,
        engine: Engine,
        step: str,
        *,
        arguments: tuple[Any, ...] | dict[str, Any] | None = None,
        results: Mapping[str, object] | None = None,
        new_key: bool = False,
    ) -> Coroutine[Any, Any, Invocation[R]]:
        """Start a new run of a workflow that goes on before this step, with all that was recorded until then.

        What was open there is left out. `arguments` are those of the new run, a tuple or a dict of named ones;
        `results` replace recorded ones (``{"pack#1": None}``). Steps have the idempotency keys of the first run, unless
        `new_key`. Raises `StepNotFound`, with the nearest name; then nothing is written.
        """
        forks = self._runtime.forks
        assert forks is not None
        if not isinstance(step, str):
            raise errors.UsageError(f"fork({step!r:.80}): expected the id of a step, such as 'charge#2'")
        if not isinstance(new_key, bool):
            raise errors.UsageError(f"new_key={new_key!r}: expected True or False")

        changed = forks.changed(engine, arguments, results or {})

        async def fork() -> Invocation[R]:
            record = await self._record(engine)
            task = self._runtime.tasks.get(record.task)
            definition = None if task is None else task.definition
            return Invocation(
                self._runtime, await forks.fork(engine, record, step, changed, definition, new_key=new_key)
            )

        return fork()

    afork = awaited(fork)

    # --- what it writes while it runs

    def stream(
        self, name: str = "default", start: int = 0, stop: int | None = None, attempts: str = "all"
    ) -> StreamReader:
        """Return a stream of it, to be read by ``for`` or ``async for``: chunk by chunk, live, until it is closed or
        the invocation has ended.

        `start` is the index of the first item; below 0 it counts from the end. `stop` is that behind the last. To go on
        later, begin at the `index` of the last item + 1. ``attempts="last"`` leaves out what a later attempt has made
        void. Raises `InvocationNotFound`, and `StreamGone` if the chunks were removed.
        """
        return self._streams.reader(self._runtime, self.id, name, start, stop, attempts)

    @blocking
    async def streams(self, engine: Engine) -> list[StreamInfo]:
        """Return its streams, by name."""
        return await self._streams.streams(engine, self.id)

    astreams = awaited(streams)

    @property
    def _streams(self) -> StreamReads:
        assert self._runtime.streams is not None
        return self._runtime.streams

    # --- what one can do about it

    @blocking
    async def wake(self, engine: Engine) -> None:
        """Put it back into the queue if it is parked; end the sleeps of a workflow that is suspended or runs.

        Raises `InvocationStatusTransitionError` if it does not wait, and `InvocationStatusRaceConditionError` if
        another caller was faster.
        """
        record = await self._record(engine)
        if record.run is not None and record.status in _SLEEPING:
            return await self._looks.wake(engine, record)
        if record.status is not Status.PARKED:
            raise errors.InvocationStatusTransitionError(
                f"{record.task} {self.id} is {record.status}; only a parked invocation, or a workflow that sleeps, can "
                "be woken"
            )
        change = changes.woken(record, operation=engine.ids.operation(), at=engine.store.now(), why="woken by hand")
        (verdict,) = await engine.store.apply([change])
        if isinstance(verdict, changes.Missing):
            raise await missing(engine.store, engine.app, self.id)
        if isinstance(verdict, changes.Lost):
            raise errors.InvocationStatusRaceConditionError(
                f"{record.task} {self.id} was parked a moment ago and is {verdict.status} now; another caller woke it"
            )
        engine.hub.send(Hint(READY, (record.lane,)))

    awake = awaited(wake)

    @blocking
    async def rerun(
        self,
        engine: Engine,
        *,
        at: Moment = None,
        delay: Duration | None = None,
        request: str | None = None,
        new_key: bool = False,
        arguments: tuple[Any, ...] | dict[str, Any] | Edited | None = None,
    ) -> Invocation[R]:
        """Store a new invocation with the same task and queue, due now or later; see `App.rerun`. Its arguments are the
        same, or these: a tuple, or a dict of named ones.

        Its effects have the idempotency keys of the first run, unless `new_key`.

        Raises `InvocationStatusTransitionError` if it has not ended, `PayloadLost` if its arguments are gone, and
        `NotDecodable` if they are damaged.
        """
        (moment, seconds), record = due_time(at, delay), await self._record(engine)
        due_at = engine.submitter.due_after(seconds) if moment is None else moment
        wanted = request or engine.ids.new()
        other = arguments if isinstance(arguments, Edited) else None
        if arguments is not None and other is None:
            if not isinstance(arguments, tuple | dict):
                raise errors.UsageError(f"arguments={arguments!r:.80}: expected a tuple, or a dict of named arguments")
            args, kwargs = (arguments, {}) if isinstance(arguments, tuple) else ((), arguments)
            other = await asyncio.to_thread(edited, engine, self._runtime.tasks.get(record.task), record, args, kwargs)
        done = (
            await engine.part(Rerunner).rerun([record], request=wanted, due_at=due_at, new_key=new_key, edited=other)
        )[0]
        if done.id is None:
            raise _why_not(record)(f"{record.task} {self.id} cannot be run again: {done.why}")
        return Invocation(self._runtime, done.id)

    arerun = awaited(rerun)

    @blocking
    def cancel(
        self, engine: Engine, reason: str = "", *, by: str | None = None, children: bool | None = None
    ) -> Coroutine[Any, Any, Status]:
        """Ask for its end; an ended invocation stays as it is. Return the status then.

        A waiting invocation is CANCELLED at once. A running one is CANCELLING: its code has some time to clean up, and
        `result` says whether it ended by that or with a result. Its children are cancelled with it, unless `children`
        is false or its task declares ``cancel_children=False``. `by` and `reason` are stored; the default of `by` is
        the user and host, or the running invocation, that asks.
        """
        return self._cancelled(engine, reason, by or asking(), children)

    acancel = awaited(cancel)

    async def _cancelled(self, engine: Engine, reason: str, by: str, children: bool | None) -> Status:
        return (await cancelled_all(engine, [self.id], reason, by, children))[self.id]

    # --- how it ends

    @property
    def _waited_for(self) -> list[InvocationId]:
        return [self.id]

    def result(self, timeout: float | None = None) -> R:
        """Wait for the end and return the result.

        Raises what the task raised (its class if that is registered with the app, else `TaskFailed`),
        `InvocationCancelled`, `InvocationRefused`, or `ResultTimeout` after `timeout` seconds; the invocation then
        goes on. Raises `BlockingCall` on a thread that runs an event loop.
        """
        if (life := running_body.life) is not None and hasattr(life, "wait_for"):
            if self.id not in life.children:
                raise errors.NotDeterministic(f"the body of a workflow waits for {self.id}, which it has not submitted")
            _refuse_timeout(timeout)
            return cast(R, life.wait_for(life.children[self.id]))
        refuse_on_loop("result()", "'await invocation' or 'await invocation.aresult(timeout)'")
        if here.get() is None:  # outside of tasks
            return self._outcome(self._runtime.run(self._end(timeout)))
        return self._outcome(wait(self._runtime, self._waited_for, self._end(timeout)))

    async def aresult(self, timeout: float | None = None) -> R:
        if (life := running_body.life) is not None:
            _refuse_timeout(timeout)
            return await self._in_body(life)
        return self._outcome(await await_(self._runtime, self._waited_for, self._end(timeout)))

    def _outcome(self, end: End) -> R:
        # Decoded here, on the caller's thread: that may run user code, and take a while.
        return cast(R, outcome_of(end, self._runtime.codec))

    def __await__(self) -> Generator[Any, None, R]:
        return self.aresult().__await__()

    async def _in_body(self, life: Any) -> R:
        """Wait in the body of a workflow, for an invocation that it has submitted."""
        command = life.children.get(self.id)
        if command is None:
            raise errors.NotDeterministic(
                f"the body of a workflow awaits {self.id}, which it has not submitted: await that in a step"
            )
        return cast(R, await life.future_of(command))

    async def _end(self, timeout: float | None) -> End:
        engine = await self._runtime.engine()
        fresh, self.is_fresh = self.is_fresh, False
        ended = await engine.watcher.ends(self._waited_for, patience(timeout), fresh=fresh, expected=self._is_expected)
        if not ended:
            raise errors.ResultTimeout(await self._overdue(engine, timeout))
        return await end_of(engine, next(iter(ended.values())))

    async def _overdue(self, engine: Engine, timeout: float | None) -> str:
        return await overdue(self._runtime, engine, self.id, timeout)


async def overdue(runtime: AppRuntime, engine: Engine, id: InvocationId, timeout: float | None) -> str:
    """Return the message of a timeout: what holds the invocation up."""
    (record,) = await get_all(engine.store, engine.app, [id])
    return (
        f"no result of {record.task} {id} within {format_duration(timeout or 0.0)}; it is {record.status}: "
        f"{(await runtime.explain(record)).text} It stays in the store; ask again later."
    )


def _refuse_timeout(timeout: float | None) -> None:
    """Raise `UsageError` for a time limit that would not be recorded."""
    if timeout is not None:
        raise errors.UsageError(
            "in the body of a workflow, the wait for a result has no timeout=: use asyncio.timeout(…) around it, or "
            "submit with options(timeout=…)"
        )


async def cancelled_all(
    engine: Engine, ids: Sequence[InvocationId], reason: str, by: str, children: bool | None
) -> dict[str, Status]:
    """Ask for the end of these. Return their statuses then."""
    reason, by = kept_text("reason", reason), kept_text("by", by)
    if children is not None and not isinstance(children, bool):
        raise errors.UsageError(f"children={children!r}: expected True, False or None")
    cancelled = await engine.canceller.cancel(ids, by=by, reason=reason, children=children)
    return {one.id: one.status for one in cancelled}


def due_time(at: Moment, delay: Duration | None) -> tuple[float | None, float]:
    """Return the moment, or None and the seconds from now. Raises `UsageError`."""
    if delay is not None and at is not None:
        raise errors.UsageError("give either delay= or at=, not both")
    return None if at is None else parse_moment(at), 0.0 if delay is None else length_of("delay", delay)


def patience(timeout: float | None) -> float | None:
    """Return how long to wait. Raises `UsageError`: compared with NaN, the time would never be over."""
    if timeout is None or (isinstance(timeout, int | float) and not math.isnan(timeout)):
        return timeout
    raise errors.UsageError(f"timeout={timeout!r}: expected seconds, or None to wait until it ends")


class End(NamedTuple):
    """A final record, with what its result or error has apart."""

    record: InvocationRecord
    payloads: Payloads


async def end_of(engine: Engine, record: InvocationRecord) -> End:
    error = record.error.data if record.error is not None else None
    try:
        apart = [data for data in (record.result, error) if data is not None and data[:1] == MARK]
        wanted = [reference for data in apart for reference in references(data)]
        return End(record, await engine.payloads.fetch(wanted) if wanted else {})
    except errors.PayloadLost as lost:
        raise errors.PayloadLost(_unreadable(record, lost, is_damaged=True)) from lost


def _unreadable(record: InvocationRecord, error: Exception, *, is_damaged: bool) -> str:
    what = "result" if record.status is Status.SUCCESS else "error"
    text = f"the {what} of {record.task} {record.id} cannot be read: {error}"
    if not is_damaged:
        return text  # it says what this code lacks
    return f"{text}. Restore it from a backup, or run the call again: holdfast rerun {record.id}"


def _why_not(record: InvocationRecord) -> type[errors.HoldfastError]:
    """Return the class of error for an invocation that cannot be run again."""
    if record.status not in FINAL:
        return errors.InvocationStatusTransitionError
    return errors.NotDecodable if damage_of(record.arguments, of_call=True) else errors.PayloadLost


def outcome_of(end: End, codec: Codec) -> object:
    """Return the result of a final record, or raise its error."""
    record, payloads = end
    match record.status:
        case Status.SUCCESS:
            return _decoded(record, codec, payloads)
        case Status.FAILED if record.error is not None:
            raise codec.decode_error(record.error, payloads, invocation_id=record.id)
        case Status.FAILED:
            raise errors.TaskFailed("holdfast:Failed", record.reason, invocation_id=record.id)
        case Status.CANCELLED:
            raise _cancelled(record)
        case _:
            assert record.status in FINAL
            why = f"{record.task} {record.id} met a concurrency limit and was declared not to wait. {record.reason}"
            raise errors.InvocationRefused(why, invocation_id=record.id)


def _decoded(record: InvocationRecord, codec: Codec, payloads: Payloads) -> object:
    data = record.result or b""
    try:
        return codec.decode(data, payloads)
    except errors.NotDecodable as error:
        raise type(error)(_unreadable(record, error, is_damaged=bool(damage_of(data)))) from error


def _cancelled(record: InvocationRecord) -> errors.InvocationCancelled:
    asked = record.cancellation
    if asked is None:
        text = f"{record.task} {record.id} was cancelled. {record.reason}"
        return errors.InvocationCancelled(text, invocation_id=record.id)
    text = f"{record.task} {record.id} was {asked}"
    return errors.InvocationCancelled(text, invocation_id=record.id, by=asked.by, reason=asked.reason)


def asking() -> str:
    """Return the name of the caller, for the record: the running invocation, or user and host."""
    if here.get() is not None:
        return f"invocation {context().invocation_id}"
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in a container
        user = f"user {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
