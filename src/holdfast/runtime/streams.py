"""Streams as people look at them, and what the feature of streams does for handles and workers.

`Invocation` and the workers are below that feature, and know it by `StreamReads` and `ChunkPort` alone. The app puts
them in their place.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from holdfast.executors.call import Call, Outcome
from holdfast.executors.chunks import ChunkBuffer
from holdfast.ids import InvocationId

if TYPE_CHECKING:
    from holdfast.runtime.app_runtime import AppRuntime
    from holdfast.runtime.engine import Engine

CHUNK, RESTART, CLOSED = "chunk", "restart", "closed"


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """An item of a stream. Indexes are dense: the item after this one has `index` + 1.

    `kind` is chunk; or restart: the step, or the task, starts over with this `attempt`, and what its earlier attempts
    wrote is void; or closed: an attempt had closed the stream, and a later one has gone on. `step` is the call of a
    workflow's step that wrote it (``draft#1``); empty for a body or a task.
    """

    index: int
    value: Any = None
    kind: str = CHUNK
    attempt: int = 1
    step: str = ""
    at: float = 0.0

    @property
    def is_restart(self) -> bool:
        return self.kind == RESTART


class StreamTail(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a stream: the index of its last item (-1: there is none), and whether there will be no more."""

    index: int
    is_closed: bool


class StreamInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A stream of an invocation. The chunks of a stream that `is_gone` were removed; `items` is how many there were."""

    name: str
    created_at: float
    items: int
    is_closed: bool
    is_gone: bool = False


class StreamReader(Protocol):
    """A stream to be read, for ``for`` and ``async for``. It ends when the stream is closed, or its invocation has
    ended, and not before; each loop begins at the start.
    """

    def __iter__(self) -> Iterator[Chunk]: ...

    def __aiter__(self) -> AsyncIterator[Chunk]: ...

    def values(self) -> StreamValues:
        """Return the same for the values of the chunks alone."""
        ...

    def stored(self) -> StreamReader:
        """Return the same for what is there now: it does not wait for more."""
        ...

    async def astored(self) -> StreamReader: ...

    def tail(self) -> StreamTail:
        """Return the end of the stream, at this moment."""
        ...

    async def atail(self) -> StreamTail: ...


class StreamValues(Protocol):
    """The values of the chunks of a stream, for ``for`` and ``async for``."""

    def __iter__(self) -> Iterator[Any]: ...

    def __aiter__(self) -> AsyncIterator[Any]: ...


class StreamReads(Protocol):
    """What reads streams."""

    def reader(
        self, runtime: AppRuntime, id: InvocationId, name: str, start: int, stop: int | None, attempts: str
    ) -> StreamReader:
        """Return a reader. Raises `UsageError`."""
        ...

    async def streams(self, engine: Engine, id: InvocationId) -> list[StreamInfo]: ...


Deliver = Callable[[str, Outcome, bool], None]
"""Takes a key and an outcome, on the engine's loop, and whether the call was marked as one with streams."""


class ChunkPort(Protocol):
    """What writes the chunks of calls."""

    @property
    def calls(self) -> Collection[str]:
        """Return the keys of the calls that have used streams."""
        ...

    def open(self) -> None:
        """Get ready, on the engine's loop."""
        ...

    def buffer_of(self, call: Call) -> ChunkBuffer:
        """Return the buffer of a call of a task. From any thread."""
        ...

    def begin_again(self, call: Call) -> None:
        """Say in the streams of a task that it starts over."""
        ...

    def hold(self, outcomes: Sequence[tuple[str, Outcome]], deliver: Deliver) -> Sequence[tuple[str, Outcome]]:
        """Keep the outcomes of calls that have written chunks until these are durable, and deliver them then. Return
        the others. From any thread.
        """
        ...

    def cut(self, key: str, why: str) -> bool:
        """Take no more chunks of a call that is given up. Return whether it was marked. From any thread."""
        ...
