"""The public face of writing: ``stream("progress").write(value)``.

One object serves both colours. In a plain function its methods wait, and in a coroutine they are awaited. A chunk is in
the buffer when `write` has returned, also without an ``await``; to await it is to wait for room for the next one.
"""

from __future__ import annotations

from collections.abc import Awaitable
from types import TracebackType
from typing import Any, Self

from holdfast.errors import UsageError
from holdfast.executors.call import Call
from holdfast.executors.chunks import CHUNK, CLOSE, ChunkBuffer, Outgoing, waited_for
from holdfast.runtime.app_runtime import running_body
from holdfast.streams.rules import DEFAULT, valid_stream
from holdfast.telemetry.tasks import here


class Stream:
    """A stream of the call that runs here, to write to. Usable as a context manager, which closes it."""

    def __init__(self, name: str) -> None:
        self.name = valid_stream(name)

    def __repr__(self) -> str:
        return f"<Stream {self.name!r}>"

    def write(self, value: object) -> Awaitable[None]:
        """Write a chunk: any value that a task may return; `bytes` stay as they are.

        It returns when the chunk is buffered, and waits if more than 1,000 chunks or 1 MiB are. Raises `NotEncodable`
        with the path to what cannot be stored, and `StreamClosed`.
        """
        if (life := running_body.life) is not None:
            packed = life.codec.pack(value, life.limits, at="chunk")
            written: Awaitable[None] = life.write_stream(Outgoing(self.name, CHUNK, packed.data, packed.payloads))
            return written
        call = _call()
        packed = call.codec.pack(value, call.limits, at="chunk")
        return waited_for(_buffer(call).put(Outgoing(self.name, CHUNK, packed.data, packed.payloads)))

    def close(self) -> Awaitable[None]:
        """Close the stream: its readers end, and to write to it is an error. Doing so again changes nothing."""
        if (life := running_body.life) is not None:
            closed: Awaitable[None] = life.write_stream(Outgoing(self.name, CLOSE))
            return closed
        return waited_for(_buffer(_call()).put(Outgoing(self.name, CLOSE)))

    def flush(self) -> Awaitable[None]:
        """Wait until all chunks of this call are durable. In the body of a workflow they are when `write` returns."""
        if (life := running_body.life) is not None:
            flushed: Awaitable[None] = life.flush_stream()
            return flushed
        return waited_for(_buffer(_call()).flush(self.name))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:  # a call that fails leaves it open: it may run again
            self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            await self.close()


def stream(name: str = DEFAULT) -> Stream:
    """Return a stream of the task, step or workflow that runs here: ``stream("progress").write({"done": 3})``.

    Readers see chunks while the call runs, from any process: ``invocation.stream("progress")``. In a coroutine, await
    its methods: ``await stream().write(token)``. The chunks of a step are in the streams of its workflow.
    """
    return Stream(name)


def _call() -> Call:
    call: Any = here.get()
    if not isinstance(call, Call):
        raise UsageError(
            "stream() writes for the task, step or workflow that runs, and none runs here. To read a stream, use "
            "app.invocation(id).stream(name)"
        )
    return call


def _buffer(call: Call) -> ChunkBuffer:
    if call.chunks is None:
        raise UsageError(f"{call.task} cannot write to a stream here: it runs without a worker")
    return call.chunks(call)
