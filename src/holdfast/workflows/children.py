"""Children: the end of an invocation that a run has submitted reaches the run by its inbox.

A child has its parent's address from its insert (`reply_to`), and the write of its end names the parent in its outbox,
whichever way it ends. The writer pushes a message at once; the sweep of outboxes pushes what was left. Pushing twice is
pushing once: the message is named by the child.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

import msgspec

from holdfast.codec import MARK, Codec, ErrorRecord
from holdfast.crashpoints import crashpoint
from holdfast.errors import InvocationNotFound, InvocationRefused
from holdfast.model.changes import Applied, Full, Push, Verdict
from holdfast.model.records import INBOX, Hint, InboxEntry, InvocationRecord, work_hint
from holdfast.model.status import FINAL, Status
from holdfast.runtime.engine import Engine
from holdfast.runtime.wait import pages
from holdfast.store.contract import Filter

CHILD_COMPLETED = "child_completed"
CHILD_FAILED = "child_failed"
CHILD_CANCELLED = "child_cancelled"
WAKE = "wake"

_codec = Codec()
_errors = msgspec.msgpack.Decoder(ErrorRecord)


def error_of(body: bytes) -> ErrorRecord:
    """Return the error in the message of a failed child."""
    return _errors.decode(body)


def message_of(child: InvocationRecord) -> InboxEntry:
    """Return the message to the parent of an ended invocation."""
    assert child.reply_to is not None
    kind, body = CHILD_CANCELLED, b""
    if child.status is Status.SUCCESS:
        kind, body = CHILD_COMPLETED, child.result or b""
    elif child.status is not Status.CANCELLED:
        kind, body = CHILD_FAILED, msgspec.msgpack.encode(_failure(child))
    return InboxEntry(
        id=f"child:{child.id}",
        kind=kind,
        at=child.changed_at,
        call=child.reply_to.call,
        generation=child.reply_to.generation,
        body=body,
    )


def _failure(child: InvocationRecord) -> ErrorRecord:
    error = child.error
    if error is None:
        why = f"{child.task} {child.id} met a concurrency limit and was declared not to wait. {child.reason}"
        return _codec.encode_error(InvocationRefused(why, invocation_id=child.id))
    if error.data is not None and error.data[:1] == MARK:  # large values of an error stay with the child
        return msgspec.structs.replace(error, data=None)
    return error


async def notify_parents(engine: Engine, children: Sequence[InvocationRecord]) -> set[str]:
    """Push the ends of children to their parents. Return the ids of children whose parent's inbox is full: their ends
    wait in their outboxes.
    """
    replying = [child for child in children if child.reply_to is not None]
    pushes = [
        Push(
            app=child.app,
            id=child.reply_to.run,
            entry=message_of(child),
            operation=engine.ids.operation(),
            at=engine.store.now(),
            why=f"its child {child.id} has ended: {child.status}",
        )
        for child in replying
        if child.reply_to is not None
    ]
    verdicts = await push_all(engine, pushes)
    crashpoint("child.told")
    return {child.id for child, verdict in zip(replying, verdicts, strict=True) if isinstance(verdict, Full)}


async def end_children(engine: Engine, parents: Sequence[InvocationRecord]) -> Collection[str]:
    """Cancel the children that these ended runs awaited, or that end with them. Return the runs to try again: none."""
    for parent in parents:
        where = Filter(parent=parent.id, statuses=frozenset(Status) - FINAL - {Status.CANCELLING})
        async for found in pages(engine.store, engine.app, where):
            ids = [child.id for child in found if child.reply_to is not None and child.reply_to.ends_with_run]
            if ids:
                with contextlib.suppress(InvocationNotFound):
                    await engine.canceller.cancel(ids, by="its parent", reason=f"its parent {parent.id} has ended")
    return ()


async def push_all(engine: Engine, pushes: Sequence[Push]) -> Sequence[Verdict]:
    """Push messages, and send hints for the runs that were suspended."""
    if not pushes:
        return []
    crashpoint("push.before")
    verdicts = await engine.store.apply(pushes)
    crashpoint("push.after")
    reached = [push.id for push, verdict in zip(pushes, verdicts, strict=True) if isinstance(verdict, Applied)]
    if reached:
        found = await engine.store.get(engine.app, list(dict.fromkeys(reached)))
        ready = [record for record in found if record is not None and record.status is Status.REROUTED]
        hints = [Hint(INBOX, tuple(reached), len(reached))]
        if ready:
            hints.append(work_hint([(record.lane, record.due_at, record.priority) for record in ready]))
        engine.hub.send(*hints)
    return verdicts
