"""Streams of runs: what steps and bodies write to them.

A step writes as a task does, to the streams of its run. Before its first chunk in a stream the log gets
`stream_opened`: its next attempt starts over in these streams.

What the body writes is a recorded command, which no replay repeats.

A chunk is written first, then the event `stream_written` with its index, and then the body goes on. If the owner dies
in between, the next owner looks for the chunk behind the last one that the log has, by its operation.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from holdfast.errors import StreamClosed, UsageError
from holdfast.executors.call import Call
from holdfast.executors.chunks import ENDED, ChunkBuffer
from holdfast.ids import derived_id
from holdfast.model.records import InvocationRecord
from holdfast.streams.writer import ChunkSource, ChunkWriter
from holdfast.workflows import events as e
from holdfast.workflows.attempts import Item
from holdfast.workflows.events import Event
from holdfast.workflows.life import Command

if TYPE_CHECKING:
    from holdfast.workflows.executor import WorkflowExecutor
    from holdfast.workflows.run import Run


class RunStreams:
    """The ways of runs to the writer of chunks (`chunks`). Methods are of the host's thread, unless they say that they
    are the engine's.
    """

    def __init__(self, there: WorkflowExecutor) -> None:
        self._there = there
        self.chunks = there.engine.part(ChunkWriter)
        self.chunks.open()

    # --- steps

    def of_step(
        self, run: Run, command: Command, attempt: int, earlier: frozenset[str]
    ) -> Callable[[Call], ChunkBuffer]:
        """Return the factory of a step's buffer, which is called at its first chunk. `earlier`: the streams that its
        earlier attempts have written to.
        """
        assert command.step is not None
        if command.step.transactional:
            return _refuse
        id, key = command.call.id, run.key

        def source() -> ChunkSource:
            return ChunkSource(
                invocation=run.id,
                epoch=run.record.epoch,
                owner=run.record.owner,
                call=f"{run.generation}/{id}" if run.generation else id,
                attempt=attempt,
                earlier=earlier,
                before=lambda name: self._declare(key, id, attempt, name),
            )

        def buffer_of(call: Call) -> ChunkBuffer:
            if not run.attempts.is_running(call.key):  # a thread that it has left behind
                raise StreamClosed(ENDED)
            return self.chunks.port_of(call, source).buffer

        return buffer_of

    def step_begins_again(self, call: Call) -> None:
        """Say in the streams of earlier attempts that a step starts over."""
        assert call.chunks is not None
        call.chunks(call)
        self._there.post(functools.partial(self.chunks.step_begins_again, call.key))

    def _declare(self, key: str, call: str, attempt: int, name: str) -> Awaitable[bool]:
        """Have the log of a run say that a step writes to a stream. Return a future of the engine's: whether it may."""
        there = self._there
        declared: asyncio.Future[bool] = there.loop.create_future()

        def answer(may_write: bool) -> None:
            there.post(lambda: None if declared.done() else declared.set_result(may_write))

        def ask() -> None:
            if (run := there.host.run_of(key)) is None:
                return answer(False)
            run.attempts.stream_opened(call, attempt, name, answer)

        there.host.inbox.post(ask)
        return declared

    # --- bodies

    def write(self, run: Run, command: Command, after: int | None) -> None:
        """Write a chunk of a body. `after`: it may be stored already, behind this position."""
        work = functools.partial(self._write, run.key, run.record, run.generation, command, after)
        self._there.post(lambda: self._there.spawn(work()))

    async def _write(
        self, key: str, record: InvocationRecord, generation: int, command: Command, after: int | None
    ) -> None:
        """Write the chunk, on the engine's loop, and report its index to the run."""
        assert command.written is not None
        source = ChunkSource(invocation=record.id, epoch=record.epoch, owner=record.owner)
        operation = derived_id("stream", record.id, str(generation), command.call.id)
        index, refused, why = 0, None, ""
        try:
            index = await self.chunks.write_once(source, command.written, operation, after)
        except StreamClosed as error:
            refused = error
        except Exception as error:  # the runner stops, or the stream is damaged
            why = f"{type(error).__name__}: {error}"
        self._there.to_run(key, lambda run: run.lost(why) if why else run.streams.ended(command, index, refused))


def _refuse(call: Call) -> ChunkBuffer:
    raise UsageError(
        f"{call.task} is transactional, and a stream takes no part in its transaction: write to the stream in the "
        "workflow's body, or in another step"
    )


class BodyStreams:
    """The chunks of one body that are being written, by call."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.writing: dict[str, Command] = {}
        self._last: dict[str, int] = {}  # the position of the last chunk of this body that its log has, by stream

    def note(self, event: Event) -> None:
        """Note what a delivered event says about streams."""
        if event.type == e.STREAM_WRITTEN and event.error is None:
            self._last[event.name] = event.index + 1

    def write(self, command: Command) -> None:
        self.writing[command.call.id] = command
        after = self._last.get(command.call.name, 0) if command.may_be_there else None
        self._run.host.streams.write(self._run, command, after)

    def ended(self, command: Command, index: int, refused: Exception | None) -> None:
        """Record that a chunk is durable, or was refused."""
        run, call = self._run, command.call
        self.writing.pop(call.id, None)
        if run.is_over:
            return
        error = None if refused is None else run.codec.encode_error(refused)
        event = Event(
            type=e.STREAM_WRITTEN,
            at=run.at(),
            call=call.id,
            name=call.name,
            where=call.where,
            data=call.data,
            index=index,
            error=error,
        )
        run.ended_calls.add(call.id)
        run.gather(Item(event))
        run.flush()
        run.pump()
