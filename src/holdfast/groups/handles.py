"""Handles of groups and chains that were submitted. They keep ids and read the store, as `Invocation` does."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar, overload

from holdfast import errors
from holdfast.clock import format_duration
from holdfast.groups import rules
from holdfast.groups.calling import Caller, from_end
from holdfast.groups.ends import EndReader
from holdfast.groups.service import Groups
from holdfast.ids import InvocationId
from holdfast.invocation import End, Handle, Invocation, asking, cancelled_all, end_of, outcome_of, overdue, patience
from holdfast.model.records import Cancellation, InvocationRecord
from holdfast.model.status import FINAL, Status
from holdfast.runtime.app_runtime import AppRuntime, awaited, blocking, refuse_on_loop, running_body
from holdfast.runtime.engine import Engine
from holdfast.runtime.wait import get_all, get_readable, missing
from holdfast.runtime.waiting import await_, wait

R = TypeVar("R", covariant=True)
FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.5, 8.0  # whether what is waited for is not called any more
_EXPECTED = "it is called when all that it follows has ended"
_PAGE = 500
_UNREADABLE = (errors.InvocationNotFound, errors.CorruptRecord)


class ExpectedInvocation(Invocation[R]):
    """A call that follows others: it is stored when they have ended. `result` waits for that, too."""

    __slots__ = ("_group", "_last")
    _is_expected = True

    def __init__(self, runtime: AppRuntime, id: str, *, last: InvocationId | None = None, group: str | None = None):
        super().__init__(runtime, id)
        self._last = last  # the end of its chain: with that, it is not called any more
        self._group = group  # that it follows

    async def _end(self, timeout: float | None) -> End:
        engine, until = await self._runtime.engine(), _Deadline(timeout)
        (id,) = self._waited_for
        end = await self._ended(engine, id, until)
        if self._group and not self._last and end.terms.follow is not None and end.terms.follow.rest:
            last = rules.link_id(self.id, len(end.terms.follow.rest))
            end = await self._ended(engine, last, until)
        return await end_of(engine, end)

    async def _ended(self, engine: Engine, id: InvocationId, until: _Deadline) -> InvocationRecord:
        """Return the final record, or that of the end of its chain if this link is never called."""
        loop, pause = asyncio.get_running_loop(), FIRST_LOOK_SECONDS
        while True:
            end = until.on(loop)
            left = None if end is None else max(0.0, end - loop.time())
            patience = pause if left is None else min(pause, left)
            ended = await engine.watcher.ends([id], patience, expected=True)
            if not ended and (instead := await self._instead(engine, id)) is not None:
                ended = await engine.watcher.ends([id], 0.0, expected=True) or {id: instead}
            if ended:
                return next(iter(ended.values()))
            if left is not None and left <= pause:
                raise errors.ResultTimeout(await self._overdue(engine, until.seconds))
            pause = min(2 * pause, LONGEST_LOOK_SECONDS)

    async def _instead(self, engine: Engine, id: InvocationId) -> InvocationRecord | None:
        """Return how its chain has ended, if it has. Raises `CallNotMade` if its group is done without it."""
        if self._last is not None and self._last != id:
            (last,) = await get_readable(engine.store, engine.app, [self._last])
            if last is not None and last.status in FINAL:
                return last
        group = None if self._group is None else await engine.part(Groups).get(self._group)
        if group is None or group.done_at is None:
            return None
        if (await get_readable(engine.store, engine.app, [rules.done_id(group.id)]))[0]:
            return None
        why = "its submit has died" if group.abandoned else "none of its calls has failed"
        raise errors.CallNotMade(f"nothing follows the group {group.id}: {why}", invocation_id=id)

    async def _overdue(self, engine: Engine, timeout: float | None) -> str:
        try:
            return await super()._overdue(engine, timeout)
        except errors.InvocationNotFound:
            return f"no result of {self.id} within {format_duration(timeout or 0.0)}: {_EXPECTED}"

    async def _record(self, engine: Engine) -> InvocationRecord:
        try:
            return await super()._record(engine)
        except errors.InvocationNotFound as error:
            raise errors.InvocationNotFound(f"{error}: {_EXPECTED}") from None

    async def _cancelled(self, engine: Engine, reason: str, by: str, children: bool | None) -> Status:
        try:
            return await super()._cancelled(engine, reason, by, children)
        except errors.InvocationNotFound as error:
            raise errors.InvocationNotFound(f"{error}: {_EXPECTED}; cancel that") from None


class ChainInvocation(ExpectedInvocation[R]):
    """A chain that was submitted. `id` is its first link, which is stored; the result is that of the last one.

    If a link fails, the chain ends with its error, and the links after it are not called.
    """

    __slots__ = ("size",)

    def __init__(self, runtime: AppRuntime, first: str, size: int, *, group: str | None = None) -> None:
        super().__init__(runtime, first, group=group)
        self.size = size

    def __repr__(self) -> str:
        return f"<Chain of {self.size}, {self.id}>"

    @property
    def ids(self) -> list[InvocationId]:
        """Return the ids of all links, stored or not."""
        return [rules.link_id(self.id, place) for place in range(self.size)]

    @property
    def links(self) -> list[ExpectedInvocation[Any]]:
        ids = self.ids
        return [ExpectedInvocation(self._runtime, id, last=ids[-1], group=self._group) for id in ids]

    @property
    def last(self) -> ExpectedInvocation[R]:
        return self.links[-1]

    @property
    def _waited_for(self) -> list[InvocationId]:
        return self.ids[-1:] if self._group is None else [self.id]  # which of two calls follows it, is known later

    async def _record(self, engine: Engine) -> InvocationRecord:
        """Return the record of the link that the chain has come to."""
        found = [record for record in await get_readable(engine.store, engine.app, self.ids) if record is not None]
        if not found:
            return await super()._record(engine)
        return found[-1]

    async def _cancelled(self, engine: Engine, reason: str, by: str, children: bool | None) -> Status:
        """Ask for the end of the link that waits or runs; no other link is called."""
        await self._close_rest(engine, reason, by)
        found = [record for record in await get_readable(engine.store, engine.app, self.ids) if record is not None]
        alive = [record.id for record in found if record.status not in FINAL]
        ended = await cancelled_all(engine, alive, reason, by, children)
        return list(ended.values())[-1] if ended else (await self._record(engine)).status

    async def _close_rest(self, engine: Engine, reason: str, by: str) -> None:
        """Store the links that are to come as cancelled, the last one first: then none of them is called."""
        (first,) = await get_all(engine.store, engine.app, [self.id])
        follow, caller, now = first.terms.follow, engine.part(Caller), engine.store.now()
        asked = Cancellation(by=by, at=now, until=now, reason=reason)
        if follow is None or not follow.rest:
            return
        origin = from_end(first)
        for place in range(len(follow.rest), 0, -1):
            link = follow.rest[place - 1]
            id = rules.link_id(self.id, place)
            record = caller.record(link, id, link.call.arguments, parent=first.parent_id, origin=origin)
            await caller.submit([caller.ended(record, f"its chain was {asked}", cancellation=asked)])


class InvocationGroup(Handle, Sequence[Invocation[R]]):
    """The invocations of one `group` or `map`, in the order of their arguments."""

    _ours: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("result", "get", "get_results", "wait", "join"), "results(timeout=…)"),
        **dict.fromkeys(("status", "state", "ready", "done", "is_done", "completed_count", "failed"), "counts()"),
        **dict.fromkeys(("revoke", "abort"), "cancel()"),
        **{word: f"group([task.s(…), …]).{word}(…), and submit that" for word in ("then", "on_error")},
    }

    def __init__(
        self,
        runtime: AppRuntime,
        invocations: Sequence[Invocation[R]],
        id: str | None = None,
        callback: ExpectedInvocation[Any] | None = None,
    ) -> None:
        self._runtime = runtime
        self._invocations = tuple(invocations)
        self.id = id
        self.callback = callback  # what `then` or `on_error` calls, with its result
        self._ended: dict[str, Status] = {}

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

    @property
    def ids(self) -> list[InvocationId]:
        return [invocation.id for invocation in self._invocations]

    # --- how it ends

    @overload
    def results(self, timeout: float | None = None, *, progress: bool = False) -> list[R]: ...
    @overload
    def results(
        self, timeout: float | None = None, *, return_exceptions: bool, progress: bool = False
    ) -> list[R | Exception]: ...
    def results(
        self, timeout: float | None = None, *, return_exceptions: bool = False, progress: bool = False
    ) -> list[Any]:
        """Wait for all of them and return their results in order.

        Raises what the first failed one raised, or `ResultTimeout`; the work goes on. With `return_exceptions`, errors
        stand among the results. `progress` draws a bar on a terminal.
        """
        if running_body.life is not None:
            return [_tried(lambda each=each: each.result(timeout), return_exceptions) for each in self]  # type: ignore[misc]
        refuse_on_loop("results()", "'await group' or 'await group.aresults(timeout)'")
        until = _Deadline(timeout)
        if progress and sys.stderr.isatty():
            with contextlib.suppress(*(_UNREADABLE if return_exceptions else ())):
                return self._results_with_bar(until, return_exceptions)
        ends = wait(self._runtime, self.ids, self._all(until, return_exceptions))
        return [_tried(lambda each=each: self._outcome(each, ends), return_exceptions) for each in self]  # type: ignore[misc]

    async def aresults(self, timeout: float | None = None, *, return_exceptions: bool = False) -> list[Any]:
        if running_body.life is not None:
            return [await _atried(each.aresult(timeout), return_exceptions) for each in self]
        ends = await await_(self._runtime, self.ids, self._all(_Deadline(timeout), return_exceptions))
        return [_tried(lambda each=each: self._outcome(each, ends), return_exceptions) for each in self]  # type: ignore[misc]

    def __await__(self) -> Generator[Any, None, list[R]]:
        return self.aresults().__await__()

    def as_completed(self, timeout: float | None = None) -> Completed[R]:
        """Return its invocations as they end, for ``for`` or ``async for``. Raises `ResultTimeout` on the way."""
        return Completed(self._runtime, self._invocations, timeout)

    def _outcome(self, invocation: Invocation[R], ends: Mapping[str, Callable[[], object]]) -> object:
        return ends[invocation.id]()

    async def _all(self, until: _Deadline, return_exceptions: bool) -> dict[str, Callable[[], object]]:
        """Wait for all ends. Return for each what returns its result, or raises its error."""
        engine = await self._runtime.engine()
        ends: dict[str, Callable[[], object]] = {}
        try:
            await self._wait(engine, self.ids, until, ends)
        except _UNREADABLE:
            if not return_exceptions:
                raise
            there = [record.id async for record in self._readable(engine)]
            for id in set(self.ids) - set(there):
                ends[id] = functools.partial(_raise, await missing(engine.store, engine.app, id))
            await self._wait(engine, there, until, ends)
        await self._refuse_missing(engine, ends, until)
        return ends

    async def _wait(
        self, engine: Engine, ids: Sequence[InvocationId], until: _Deadline, ends: dict[str, Callable[[], object]]
    ) -> None:
        fresh = bool(self._invocations) and all(invocation.is_fresh for invocation in self)
        if len(ids) <= _PAGE:
            ended = await engine.watcher.ends(ids, until.left(), fresh=fresh)
            await self._take(engine, list(ended.values()), ends)
            return
        reader = EndReader(engine, ids)
        try:
            while more := await reader.more(until.on(asyncio.get_running_loop())):
                await self._take(engine, more, ends)
        finally:
            reader.close()

    async def _readable(self, engine: Engine) -> AsyncIterator[InvocationRecord]:
        """Yield the members that are stored and can be read."""
        for start in range(0, len(self), _PAGE):
            for record in await get_readable(engine.store, engine.app, self.ids[start : start + _PAGE]):
                if record is not None:
                    yield record

    async def _take(
        self, engine: Engine, ended: Iterable[InvocationRecord], ends: dict[str, Callable[[], object]]
    ) -> None:
        codec = self._runtime.codec
        for record in ended:
            end = await end_of(engine, record)
            self._ended[record.id] = record.status
            ends[record.id] = functools.partial(outcome_of, end, codec)

    async def _refuse_missing(self, engine: Engine, ends: Mapping[str, object], until: _Deadline) -> None:
        missing = [id for id in self.ids if id not in ends]
        if missing:
            said = await overdue(self._runtime, engine, missing[0], until.seconds)
            raise errors.ResultTimeout(f"{len(missing)} of {len(self)} have not ended. {said}")

    def _results_with_bar(self, until: _Deadline, return_exceptions: bool) -> list[Any]:
        from holdfast.groups.progress import bar  # few programs draw one

        found: dict[str, Any] = {}
        with bar(len(self)) as advance:
            for invocation in Completed(self._runtime, self._invocations, until.seconds):
                found[invocation.id] = _tried(invocation.result, True)
                advance()
        failed = [found[id] for id in self.ids if isinstance(found[id], Exception)]
        if failed and not return_exceptions:
            raise failed[0]
        return [found[id] for id in self.ids]

    # --- how it stands

    @blocking
    async def counts(self, engine: Engine) -> Mapping[Status, int]:
        """Return how many of them have each status. A removed one counts as none."""
        open_ids = [id for id in self.ids if id not in self._ended]
        counts = Counter(self._ended.values())
        for start in range(0, len(open_ids), _PAGE):
            for record in await get_readable(engine.store, engine.app, open_ids[start : start + _PAGE]):
                if record is None:
                    continue
                counts[record.status] += 1
                if record.status in FINAL:
                    self._ended[record.id] = record.status
        return dict(counts)

    acounts = awaited(counts)

    @blocking
    def cancel(
        self, engine: Engine, reason: str = "", *, by: str | None = None, children: bool | None = None
    ) -> Coroutine[Any, Any, list[Status]]:
        """Ask for the end of all of them, as `Invocation.cancel` does. Return the status of each then.

        A callback gets that as other failures.
        """
        ids, asked_by = self.ids, by or asking()

        async def cancel() -> list[Status]:
            ends = await cancelled_all(engine, list(dict.fromkeys(ids)), reason, asked_by, children)
            return [ends[id] for id in ids]

        return cancel()

    acancel = awaited(cancel)


class Completed(Generic[R]):
    """Invocations in the order of their ends: an iterator, plain and asynchronous."""

    def __init__(self, runtime: AppRuntime, invocations: Sequence[Invocation[R]], timeout: float | None) -> None:
        self._runtime = runtime
        self._handles = {invocation.id: invocation for invocation in invocations}
        self._until = _Deadline(timeout)
        self._reader: EndReader | None = None

    def __iter__(self) -> Iterator[Invocation[R]]:
        refuse_on_loop("for … in as_completed()", "'async for … in as_completed()'")
        try:
            while ids := wait(self._runtime, self._open, self._more()):
                yield from [self._handles.pop(id) for id in ids]
        finally:
            self._close()

    async def __aiter__(self) -> AsyncIterator[Invocation[R]]:
        try:
            while ids := await await_(self._runtime, self._open, self._more()):
                for id in ids:
                    yield self._handles.pop(id)
        finally:
            self._close()

    @property
    def _open(self) -> list[InvocationId]:
        return list(self._handles)

    async def _more(self) -> list[InvocationId]:
        engine = await self._runtime.engine()
        if not self._handles:
            return []
        if self._reader is None:
            self._reader = EndReader(engine, self._open)
        ended = await self._reader.more(self._until.on(asyncio.get_running_loop()))
        if not ended:
            said = await overdue(self._runtime, engine, self._open[0], self._until.seconds)
            raise errors.ResultTimeout(f"{len(self._handles)} have not ended. {said}")
        return [record.id for record in ended]

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _Deadline:
    """How long to wait in all. It begins with the first look."""

    def __init__(self, timeout: float | None) -> None:
        self.seconds = patience(timeout)
        self._at: float | None = None

    def left(self) -> float | None:
        return self.seconds

    def on(self, loop: asyncio.AbstractEventLoop) -> float | None:
        """Return the end of the wait, by this loop's clock."""
        if self.seconds is not None and self._at is None:
            self._at = loop.time() + self.seconds
        return self._at


def _raise(error: Exception) -> object:
    raise error


def _tried(work: Callable[[], object], return_exceptions: bool) -> Any:
    try:
        return work()
    except Exception as error:
        if not return_exceptions:
            raise
        return error


async def _atried(work: Coroutine[Any, Any, object], return_exceptions: bool) -> Any:
    try:
        return await work
    except Exception as error:
        if not return_exceptions:
            raise
        return error


def handle_of(runtime: AppRuntime, id: str, size: int, group: str) -> ExpectedInvocation[Any]:
    """Return the handle of the last call of a chain behind a group, with this number of links."""
    return ChainInvocation(runtime, id, size, group=group) if size > 1 else ExpectedInvocation(runtime, id, group=group)
