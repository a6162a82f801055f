"""What a log means to a body: its first moment, the answer of a call, the values that a step has set, equal arguments.

Owners of runs (`holdfast.workflows.run`) and replays without effects (`holdfast.workflows.replaying`) share these: a
body must not see a difference between them.
"""

from __future__ import annotations

from holdfast.codec import Codec, Payloads
from holdfast.codec.data import digest_of
from holdfast.errors import CorruptRecord, HookConflict, NotDecodable
from holdfast.model.records import InvocationRecord, RunState
from holdfast.model.status import Status
from holdfast.workflows import events as e
from holdfast.workflows.events import Event
from holdfast.workflows.life import CallAnswer, Life, Then


def start_of_log(record: InvocationRecord, run: RunState) -> float:
    """Return when the body of this log first began: the owner that restarted the run was one of an earlier log."""
    starts = (entry.at for entry in record.history if entry.status is Status.RUNNING and entry.epoch > run.suspended_in)
    return next(starts, record.changed_at)


def check_whole(record: InvocationRecord, tail: int) -> None:
    """Raise `CorruptRecord` if the log ends before the place that the run knows of: pages are lost, or a fork was not
    finished. To go on would run recorded steps again.
    """
    if record.run is not None and tail < record.run.tail:
        raise CorruptRecord(
            f"the log of {record.id} has {tail} of its {record.run.tail} events; if this run is a fork, it was not "
            "finished: fork again"
        )


def answer_of(event: Event, codec: Codec, payloads: Payloads) -> CallAnswer:
    """Return what the end of a call brings to the body."""
    try:
        if event.type in (e.STEP_COMPLETED, e.HOOK_RECEIVED):
            return CallAnswer(codec.decode(event.data, payloads))
        if event.type == e.STEP_FAILED and event.error is None:
            return CallAnswer(is_cancelled=True)
        if event.error is not None and event.type in (e.STEP_FAILED, e.STREAM_WRITTEN):
            return CallAnswer(error=codec.decode_error(event.error, payloads, invocation_id=event.child))
        if event.type == e.HOOK_CONFLICT:
            return CallAnswer(error=HookConflict(event.why, owner=event.child))
    except NotDecodable as error:
        return CallAnswer(error=error)
    return CallAnswer()


def deliver(life: Life, event: Event, payloads: Payloads, then: Then) -> None:
    """Give an event to the body."""
    answer = answer_of(event, life.codec, payloads)
    if event.type in e.HOOKS:
        life.answer_hook(event, answer, then)
    else:
        life.deliver(event.call, answer, then)


def carry(life: Life, event: Event, payloads: Payloads) -> None:
    """Apply what a step has set, which is part of its end."""
    values = life.codec.decode(event.data, payloads)
    (life.attributes if event.type == e.ATTRIBUTES_SET else life.data).update(values)


def same_values(recorded: bytes, made: bytes) -> bool:
    """Return whether two encoded values are equal: a dict may have been written in another order."""
    if recorded == made:
        return True
    try:
        return digest_of([recorded]) == digest_of([made])
    except Exception:  # of large values only the references are here, and these differ
        return False
