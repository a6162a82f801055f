"""Stop a debugger in the body of a workflow that is replayed: where it waits at the end of the log or at a mismatch,
where it has raised, or where it has returned.

A coroutine that waits has frames, but no stack; so a traceback is made of them. It has the user's frames only: ``up``
and ``down`` go from the body to the function that waits. The body is stopped before it is evicted, so none of its
`finally` blocks has run. A plain body waits in a call of ours, and is stopped when that call has ended it.
"""

from __future__ import annotations

import asyncio
import inspect
import pdb
import sys
import types
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import holdfast
from holdfast.workflows.loop import Evicted

_NOT_OF_THE_USER = tuple(str(Path(module.__file__ or "").parent) for module in (holdfast, asyncio))


class StopInBody:
    """A debugger for one replay. It stops once, at the first place that it finds."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.has_stopped = False

    @property
    def body(self) -> Callable[..., Any]:
        """Return the function to replay instead of the body."""
        return self._coroutine if inspect.iscoroutinefunction(inspect.unwrap(self._function)) else self._plain

    async def _coroutine(self, *args: Any, **kwargs: Any) -> Any:
        return await self._driven(self._function(*args, **kwargs))

    @types.coroutine
    def _driven(self, body: Any) -> Generator[Any, Any, Any]:
        """Drive the body as ``await`` does, and look at it before it is evicted."""
        frame: FrameType = body.cr_frame
        go_on, value = body.send, None
        while True:
            try:
                waits_for = go_on(value)
            except StopIteration as end:
                self._stop([frame])
                return end.value
            except Exception as error:
                self._stop(_frames_of(error.__traceback__), error.__traceback__)
                raise
            try:
                go_on, value = body.send, (yield waits_for)
            except Evicted as eviction:
                self._stop(_suspended(body))
                go_on, value = body.throw, eviction
            except BaseException as error:
                go_on, value = body.throw, error

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        last: list[FrameType] = []
        code = inspect.unwrap(self._function).__code__

        def profile(frame: FrameType, event: str, argument: object) -> None:
            if event == "return" and frame.f_code is code:
                last[:] = [frame]

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            result = self._function(*args, **kwargs)
        except (Exception, Evicted) as error:
            sys.setprofile(before)
            self._stop(_frames_of(error.__traceback__), error.__traceback__)
            raise
        finally:
            sys.setprofile(before)
        self._stop(last)
        return result

    def _stop(self, frames: Iterable[FrameType], traceback: TracebackType | None = None) -> None:
        made = _traceback(frames, traceback)
        if made is None or self.has_stopped:
            return
        self.has_stopped = True
        pdb.post_mortem(made)


def _suspended(body: Any) -> Iterator[FrameType]:
    """Yield the frames of a coroutine that waits, the outermost first."""
    while body is not None:
        frame = getattr(body, "cr_frame", None) or getattr(body, "gi_frame", None)
        if frame is not None:
            yield frame
        body = getattr(body, "cr_await", None) or getattr(body, "gi_yieldfrom", None)


def _frames_of(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _traceback(frames: Iterable[FrameType], known: TracebackType | None) -> TracebackType | None:
    """Return a traceback of the user's frames; None if there is none. Lines are those of a known traceback."""
    places: dict[int, tuple[int, int]] = {}
    while known is not None:
        places[id(known.tb_frame)] = (known.tb_lasti, known.tb_lineno)
        known = known.tb_next
    made: TracebackType | None = None
    for frame in reversed([each for each in frames if not each.f_code.co_filename.startswith(_NOT_OF_THE_USER)]):
        lasti, line = places.get(id(frame), (frame.f_lasti, frame.f_lineno or frame.f_code.co_firstlineno))
        made = TracebackType(made, frame, lasti, line)
    return made
