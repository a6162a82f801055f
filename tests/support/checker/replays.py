"""I19: a finished run, replayed from its log by the code that ran it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from tests.support.checker.case import Body, Case
from tests.support.checker.evidence import Violation
from tests.support.engines import make_engine
from tests.support.witness import digest_of, digest_of_error

from holdfast.codec import Codec, SizeLimits
from holdfast.errors import HookConflict
from holdfast.executors.call import Call
from holdfast.executors.context import Context
from holdfast.model.records import InvocationRecord
from holdfast.model.status import Status
from holdfast.runtime.definition import signature_of
from holdfast.store.memory.store import MemoryStore
from holdfast.testing import FakeClock
from holdfast.workflows import events as e
from holdfast.workflows.context import BodyPort
from holdfast.workflows.events import Event
from holdfast.workflows.life import AsyncLife, CallAnswer
from holdfast.workflows.rules import Deliver, Finished, Mismatch, Replay

_LIMITS = SizeLimits(inline=1 << 30, max_bytes=1 << 30)


def finished_runs_replay(case: Case) -> Iterator[Violation]:
    """I19: of the runs whose bodies are known, the last generation of each log."""
    for record in case.dump.records:
        body, lines = case.bodies.get(record.task), case.dump.logs.get(record.id)
        if body is None or lines is None or record.run is None or record.status not in (Status.SUCCESS, Status.FAILED):
            continue
        events = [line.event for line in lines if line.generation == record.run.generation]
        digest = case.dump.digests.get(record.id)
        if (why := _replayed(body, record, events, digest)) is not None:
            yield Violation("I19", record.id, why, record.history[-1:])


def _replayed(body: Body, record: InvocationRecord, events: list[Event], digest: str | None) -> str | None:
    """Return how the replay differs from the run; None if it does not."""
    codec = Codec()
    life = _life(body, record, events, codec)
    try:
        life.start(_nothing)
        while not isinstance(following := life.replay.next(), Finished):
            if isinstance(following, Mismatch):
                return f"its log does not replay: {following.why}"
            assert isinstance(following, Deliver), "keyed steps are recorded"
            _deliver(life, following.event, codec)
        return _differs(life, record, codec, digest)
    finally:
        life.evict()


def _differs(life: AsyncLife, record: InvocationRecord, codec: Codec, digest: str | None) -> str | None:
    if life.ended is None:
        if record.status is Status.FAILED:
            return None  # it was ended from outside: by its timeout, or after its last crash
        return "it has a result, and its log ends before its body does"
    value, error = life.ended
    if error is None and record.status is Status.FAILED:
        return "it failed, and its body returns when its log is replayed"
    if error is not None and record.status is Status.SUCCESS:
        return f"it has a result, and its body raises when its log is replayed: {error!r}"
    made = digest_of(value, codec) if error is None else digest_of_error(error)
    if error is None and digest is not None and made != digest:
        return f"its log gives another result: {value!r:.200}"
    return None


def _life(body: Body, record: InvocationRecord, events: list[Event], codec: Codec) -> AsyncLife:
    owner: Any = SimpleNamespace(life=None)
    about = Context(
        invocation_id=record.id,
        app=record.app,
        task=record.task,
        attempt=record.attempt,
        epoch=record.epoch,
        idempotency_key=record.key_of_effects,
        is_last_attempt=None,
        run=BodyPort(owner),
    )
    call = Call(record.id, record.task, body, signature_of(body), record.arguments, codec, _LIMITS, {}, about)
    assert record.run is not None
    code = next((event.code for event in reversed(events) if event.code), "")  # so that other arguments are a mismatch
    replay = Replay(events, code=code, same=lambda recorded, made: False)
    life = AsyncLife(replay, codec, call, generation=record.run.generation, now=_started_at(record), seed=record.seed)
    owner.life = life
    args, kwargs = codec.decode_call(record.arguments)
    life.give(args, kwargs)
    life.engine = make_engine(MemoryStore(FakeClock()), FakeClock(), random.Random(1), app=record.app)
    return life


def _started_at(record: InvocationRecord) -> float:
    assert record.run is not None
    first = next((entry.at for entry in record.history if entry.status is Status.RUNNING), record.changed_at)
    return record.run.started_at or first


def _deliver(life: AsyncLife, event: Event, codec: Codec) -> None:
    life.clock_to(event.at)
    if event.type == e.CANCEL_REQUESTED:
        return life.cancel(_nothing)
    for carried in life.replay.carried.pop(event.call, ()):
        (life.attributes if carried.type == e.ATTRIBUTES_SET else life.data).update(codec.decode(carried.data))
    life.replay.answered(event)
    life.commands.clear()
    if event.type in e.HOOKS:
        return life.answer_hook(event, _answer(event, codec), _nothing)
    life.deliver(event.call, _answer(event, codec), _nothing)


def _answer(event: Event, codec: Codec) -> CallAnswer:
    if event.type == e.HOOK_CONFLICT:
        return CallAnswer(error=HookConflict(event.why, owner=event.child))
    if event.type in (e.STEP_COMPLETED, e.HOOK_RECEIVED):
        return CallAnswer(codec.decode(event.data))
    if event.type == e.STEP_FAILED and event.error is None:
        return CallAnswer(is_cancelled=True)
    if event.type == e.STEP_FAILED and event.error is not None:
        error: Any = codec.decode_error(event.error, {}, invocation_id=event.child)
        return CallAnswer(error=error)
    return CallAnswer()


def _nothing() -> None:
    """Be called when the body is quiet."""
