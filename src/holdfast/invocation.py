"""Handles to invocations: what `submit` returns.

A handle is an id and a way to the store. It keeps no state of its own, so two handles of one invocation, in two
processes, say the same.
"""

from __future__ import annotations

import datetime as dt
import getpass
import math
import os
import socket
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast, overload

from holdfast._bridge import refuse_on_loop
from holdfast.clock import Duration, format_duration, length_of, parse_moment
from holdfast.codec import Codec, Payloads, references
from holdfast.engine.core import Engine
from holdfast.errors import (
    InvocationCancelled,
    InvocationNotFound,
    InvocationRefused,
    InvocationStatusRaceConditionError,
    InvocationStatusTransitionError,
    PayloadLost,
    ResultTimeout,
    TaskFailed,
    UsageError,
)
from holdfast.execution.context import context, here
from holdfast.ids import InvocationId
from holdfast.lifecycle import changes
from holdfast.lifecycle.records import READY, Hint, HistoryEntry, InvocationRecord, kept_text
from holdfast.lifecycle.status import FINAL, Status

if TYPE_CHECKING:
    from holdfast.app import App

R = TypeVar("R", covariant=True)


class Invocation(Generic[R]):
    """One call of a task. Every blocking method has an async sister with an `a` in front."""

    __slots__ = ("_app", "_fresh", "id")

    def __init__(self, app: App, id: str, *, fresh: bool = False) -> None:
        self._app = app
        self.id = InvocationId(id)
        self._fresh = fresh  # submitted here, and nobody has asked for the result yet

    def __repr__(self) -> str:
        return f"<Invocation {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Invocation) and (self.id, self._app) == (other.id, other._app)

    def __hash__(self) -> int:
        return hash(self.id)

    # --- what it is

    def record(self) -> InvocationRecord:
        """Everything that the store knows about it, at this moment. Raises `InvocationNotFound`."""
        return self._app._run(self._record())

    async def arecord(self) -> InvocationRecord:
        return await self._app._arun(self._record())

    async def _record(self) -> InvocationRecord:
        engine = await self._app._engine()
        (record,) = await engine.store.get(engine.app, [self.id])
        if record is None:
            raise InvocationNotFound(f"the store has no invocation {self.id} of the app '{engine.app}'")
        return record

    @property
    def status(self) -> Status:
        """Where it stands now."""
        return self.record().status

    async def astatus(self) -> Status:
        return (await self.arecord()).status

    def history(self) -> Sequence[HistoryEntry]:
        """Every status it has had: when, by whom, in which epoch and why."""
        return self.record().history

    async def ahistory(self) -> Sequence[HistoryEntry]:
        return (await self.arecord()).history

    def explain(self) -> str:
        """What holds it back and what would release it, or how it ended, in a sentence or two."""
        return self._app._run(self._explain())

    async def aexplain(self) -> str:
        return await self._app._arun(self._explain())

    async def _explain(self) -> str:
        return (await self._app._explain(await self._record())).text

    # --- what one can do about it

    def wake(self) -> None:
        """Put it back into the queue if it is parked.

        Raises `InvocationStatusTransitionError` if it is not, and `InvocationStatusRaceConditionError` if somebody
        else was faster.
        """
        self._app._run(self._wake())

    async def awake(self) -> None:
        await self._app._arun(self._wake())

    async def _wake(self) -> None:
        engine, record = await self._app._engine(), await self._record()
        if record.status is not Status.PARKED:
            raise InvocationStatusTransitionError(
                f"{record.task} {self.id} is {record.status}; only what is parked can be woken"
            )
        change = changes.woken(record, operation=engine.ids.operation(), at=engine.store.now(), why="woken by hand")
        (verdict,) = await engine.store.apply([change])
        if isinstance(verdict, changes.Missing):
            raise InvocationNotFound(f"the store has no invocation {self.id} of the app '{engine.app}' any more")
        if isinstance(verdict, changes.Lost):
            raise InvocationStatusRaceConditionError(
                f"{record.task} {self.id} was parked a moment ago and is {verdict.status} now; somebody else woke it"
            )
        engine.hub.send(Hint(READY, (record.lane,)))

    def rerun(
        self, *, at: dt.datetime | float | None = None, delay: Duration | None = None, request: str | None = None
    ) -> Invocation[R]:
        """A new invocation with the same arguments, task and queue, now or later; see `App.rerun`.

        Raises `InvocationStatusTransitionError` if it has not ended, and `PayloadLost` if its arguments are gone.
        """
        return self._app._run(self._rerun(due_time(at, delay), request))

    async def arerun(
        self, *, at: dt.datetime | float | None = None, delay: Duration | None = None, request: str | None = None
    ) -> Invocation[R]:
        return await self._app._arun(self._rerun(due_time(at, delay), request))

    async def _rerun(self, due: tuple[float | None, float], request: str | None) -> Invocation[R]:
        engine, record = await self._app._engine(), await self._record()
        due_at = engine.due_after(due[1]) if due[0] is None else due[0]
        (done,) = await engine.archive.rerun([record], request=request or engine.ids.new(), due_at=due_at)
        if done.id is None:
            kind = PayloadLost if record.status in FINAL else InvocationStatusTransitionError
            raise kind(f"{record.task} {self.id} cannot be run again: {done.why}")
        return Invocation(self._app, done.id)

    def cancel(self, reason: str = "", *, by: str | None = None, children: bool | None = None) -> Status:
        """Ask for its end; nothing happens to what has ended. Returns where it stands then.

        What waits is CANCELLED at once. What runs is CANCELLING: its code is told and has some time to clean up, and
        whether it ended by that or with a result is for `result` to say. What it has submitted is cancelled with it,
        unless `children` is false or its task declares ``cancel_children=False``. `by` and `reason` are kept; without
        `by`, it is the user and the host, or the task, that asks.
        """
        return self._app._run(_cancelled_all(self._app, [self.id], reason, by or asking(), children))[self.id]

    async def acancel(self, reason: str = "", *, by: str | None = None, children: bool | None = None) -> Status:
        work = _cancelled_all(self._app, [self.id], reason, by or asking(), children)
        return (await self._app._arun(work))[self.id]

    # --- how it ends

    def result(self, timeout: float | None = None) -> R:
        """Wait for the end and return the result.

        Raises what the task raised (its class if that is registered with the app, else `TaskFailed`),
        `InvocationCancelled`, `InvocationRefused`, or `ResultTimeout` after `timeout` seconds; the invocation then
        goes on. Raises `BlockingCall` on a thread that runs an event loop.
        """
        refuse_on_loop("result()", "'await invocation' or 'await invocation.aresult(timeout)'")
        return self._outcome(self._app._run(self._end(timeout)))

    async def aresult(self, timeout: float | None = None) -> R:
        return self._outcome(await self._app._arun(self._end(timeout)))

    def _outcome(self, end: End) -> R:
        # Decoded here, on the caller's thread: that may run user code, and take a while.
        return cast(R, self._app._outcome(end))

    def __await__(self) -> Generator[Any, None, R]:
        return self.aresult().__await__()

    async def _end(self, timeout: float | None) -> End:
        engine = await self._app._engine()
        fresh, self._fresh = self._fresh, False
        ended = await engine.watcher.ends([self.id], _patience(timeout), fresh=fresh)
        if self.id not in ended:
            raise ResultTimeout(await self._impatience(timeout))
        return await _end_of(engine, ended[self.id])

    async def _impatience(self, timeout: float | None) -> str:
        record = await self._record()
        return (
            f"no result of {record.task} {self.id} within {format_duration(timeout or 0.0)}; it is {record.status}: "
            f"{(await self._app._explain(record)).text} It stays in the store; ask again later."
        )


class InvocationGroup(Sequence[Invocation[R]]):
    """The invocations of one `map`, in the order of their arguments."""

    def __init__(self, app: App, invocations: Sequence[Invocation[R]]) -> None:
        self._app = app
        self._invocations = tuple(invocations)

    def __len__(self) -> int:
        return len(self._invocations)

    @overload
    def __getitem__(self, index: int) -> Invocation[R]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Invocation[R]]: ...
    def __getitem__(self, index: int | slice) -> Invocation[R] | Sequence[Invocation[R]]:
        return self._invocations[index]

    def __iter__(self) -> Iterator[Invocation[R]]:
        return iter(self._invocations)

    def __repr__(self) -> str:
        return f"<InvocationGroup of {len(self)}>"

    def results(self, timeout: float | None = None) -> list[R]:
        """Wait for all of them and return their results in order.

        Raises what the first failed one raised, or `ResultTimeout`.
        """
        refuse_on_loop("results()", "'await group' or 'await group.aresults(timeout)'")
        return [invocation._outcome(end) for invocation, end in self._app._run(self._ends(timeout))]

    async def aresults(self, timeout: float | None = None) -> list[R]:
        return [invocation._outcome(end) for invocation, end in await self._app._arun(self._ends(timeout))]

    def __await__(self) -> Generator[Any, None, list[R]]:
        return self.aresults().__await__()

    def cancel(self, reason: str = "", *, by: str | None = None, children: bool | None = None) -> list[Status]:
        """Ask for the end of all of them, as `Invocation.cancel` does. Returns where each one stands then."""
        ends = self._app._run(_cancelled_all(self._app, self._ids, reason, by or asking(), children))
        return [ends[invocation.id] for invocation in self]

    async def acancel(self, reason: str = "", *, by: str | None = None, children: bool | None = None) -> list[Status]:
        ends = await self._app._arun(_cancelled_all(self._app, self._ids, reason, by or asking(), children))
        return [ends[invocation.id] for invocation in self]

    @property
    def _ids(self) -> list[InvocationId]:
        """Those of a key or twin may be the same ones."""
        return list(dict.fromkeys(invocation.id for invocation in self))

    async def _ends(self, timeout: float | None) -> list[tuple[Invocation[R], End]]:
        engine = await self._app._engine()
        fresh = bool(self._invocations) and all(invocation._fresh for invocation in self)
        ended = await engine.watcher.ends([invocation.id for invocation in self], _patience(timeout), fresh=fresh)
        missing = [invocation for invocation in self if invocation.id not in ended]
        if missing:
            raise ResultTimeout(
                f"{len(missing)} of {len(self)} have not ended. {await missing[0]._impatience(timeout)}"
            )
        return [(invocation, await _end_of(engine, ended[invocation.id])) for invocation in self]


async def _cancelled_all(
    app: App, ids: Sequence[InvocationId], reason: str, by: str, children: bool | None
) -> dict[str, Status]:
    reason, by = kept_text("reason", reason), kept_text("by", by)
    if children is not None and not isinstance(children, bool):
        raise UsageError(f"children={children!r}: expected True, False or None")
    canceller = (await app._engine()).canceller
    return {one.id: one.status for one in await canceller.cancel(ids, by=by, reason=reason, children=children)}


def due_time(at: dt.datetime | float | None, delay: Duration | None) -> tuple[float | None, float]:
    """The moment, or None and the seconds from now. Raises `UsageError`."""
    if delay is not None and at is not None:
        raise UsageError("give either delay= or at=, not both")
    return None if at is None else parse_moment(at), 0.0 if delay is None else length_of("delay", delay)


def _patience(timeout: float | None) -> float | None:
    """How long to wait. Raises `UsageError`: compared with what is no number, the time would never be over."""
    if timeout is None or (isinstance(timeout, int | float) and not math.isnan(timeout)):
        return timeout
    raise UsageError(f"timeout={timeout!r}: expected seconds, or None to wait until it ends")


class End(NamedTuple):
    """A final record, with what its result or error has apart."""

    record: InvocationRecord
    payloads: Payloads


async def _end_of(engine: Engine, record: InvocationRecord) -> End:
    error = record.error.data if record.error is not None else None
    return End(record, await engine.depot.fetch((*references(record.result), *references(error))))


def outcome_of(end: End, codec: Codec) -> object:
    """The result of a final record, or its error raised."""
    record, payloads = end
    match record.status:
        case Status.SUCCESS:
            return codec.decode(record.result or b"", payloads)
        case Status.FAILED if record.error is not None:
            raise codec.decode_error(record.error, payloads, invocation_id=record.id)
        case Status.FAILED:
            raise TaskFailed("holdfast:Failed", record.reason, invocation_id=record.id)
        case Status.CANCELLED:
            raise _cancelled(record)
        case _:
            assert record.status in FINAL
            why = f"{record.task} {record.id} met a concurrency limit and was declared not to wait. {record.reason}"
            raise InvocationRefused(why, invocation_id=record.id)


def _cancelled(record: InvocationRecord) -> InvocationCancelled:
    asked = record.cancellation
    if asked is None:
        text = f"{record.task} {record.id} was cancelled. {record.reason}"
        return InvocationCancelled(text, invocation_id=record.id)
    text = f"{record.task} {record.id} was {asked}"
    return InvocationCancelled(text, invocation_id=record.id, by=asked.by, reason=asked.reason)


def asking() -> str:
    """Who asks for something here: the invocation that does, or a person and a host."""
    if here.get() is not None:
        return f"invocation {context().invocation_id}"
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in a container
        user = f"user {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


__all__ = ["Invocation", "InvocationGroup"]
