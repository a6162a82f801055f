"""Resuming hooks, from any process: ``app.resume_hook``, ``app.resume_or_submit``, and looking at them.

A payload is checked against the schema in the hook's entry, then pushed to its run by one write. After that it is
durable, and its run is on its way. Repeating it with the same `resume_id` changes nothing: while the payload is in the
inbox, the push finds it there; later, the owner of the run finds it in the log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Mapping
from datetime import datetime
from typing import Any, Protocol

import msgspec

from holdfast.codec import Packed
from holdfast.errors import CorruptRecord, HookNotFound, InboxFull, PayloadDoesNotFit, StoreError, UsageError
from holdfast.ids import InvocationId
from holdfast.invocation import Invocation
from holdfast.model.changes import MISSING, Applied, Full, Push, Verdict
from holdfast.model.records import InboxEntry, InvocationRecord, RunState
from holdfast.model.status import FINAL
from holdfast.runtime.app_runtime import AppRuntime, awaited, blocking
from holdfast.runtime.engine import Engine
from holdfast.runtime.wait import get_readable
from holdfast.store.contract import EntryOrder
from holdfast.workflows.children import push_all
from holdfast.workflows.events import HOOK_CREATED, HOOK_RECEIVED
from holdfast.workflows.hooks_records import (
    HOOK,
    PAYLOAD,
    HookEntry,
    address_of,
    answer_name,
    name_of,
    payload_id,
    read_hook,
    valid_resume_id,
    valid_token,
)
from holdfast.workflows.hooks_requests import WebhookRequest
from holdfast.workflows.hooks_store import StoredHook, find
from holdfast.workflows.hooks_types import check, plain
from holdfast.workflows.looking import read

_TRIES = 10
MAX_LISTED = 10_000


class HookRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A hook as it is stored. `token` is empty if it is a secret. `name` is that of its entry, the hash of the token.

    A hook without an end (`ended_at`) is open. Else its run has ended, and its token is kept until `keep_until`.
    """

    name: str
    token: str
    origin: str  # of the token: chosen, derived or random
    run: InvocationId
    task: str
    call: str
    created_at: float
    type: str = ""
    schema: Mapping[str, Any] = {}
    metadata: Any = None
    has_url: bool = False
    methods: tuple[str, ...] = ()
    verify: str = ""
    ended_at: float | None = None
    keep_until: float | None = None

    @property
    def is_open(self) -> bool:
        return self.ended_at is None


class StartsRuns(Protocol):
    """A workflow, as `app.workflow` returns it."""

    @property
    def name(self) -> str: ...
    def prepared(self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[InvocationRecord, Any]:
        """Return a call as it would be stored now, and its payloads."""
        ...


class Sent:
    """A payload on its way: as the codec stores it exactly, and as plain values. Made on the caller's thread."""

    def __init__(self, engine: Engine, payload: object) -> None:
        self._engine = engine
        self._payload = payload
        codec, limits = engine.codec, engine.limits
        self._exact: Packed | Exception = _caught(lambda: codec.pack(payload, limits, at="payload"))
        self.values: Any = None
        self._plain: Packed | Exception = _caught(self._packed_plain)
        self._for_others: Any = _caught(lambda: plain(payload, keeps=(bytes, datetime)))

    def _packed_plain(self) -> Packed:
        self.values = plain(self._payload)
        return self._engine.codec.pack(self.values, self._engine.limits, at="payload")

    def fitting(self, hook: HookEntry, answer_to: str) -> Packed:
        """Return the payload as this hook takes it. Raises `PayloadDoesNotFit`, `NotEncodable`, `UsageError`."""
        if hook.is_request:
            return self._request(answer_to)
        if not hook.schema:
            return _or_raise(self._exact)
        packed = _or_raise(self._plain)
        check(self.values, hook.schema)
        return packed

    def for_others(self) -> Any:
        """Return the payload for a hook of another kind of run: JSON types, dates and bytes. Raises `UsageError`."""
        if isinstance(self._for_others, Exception):
            raise self._for_others
        return self._for_others

    def for_any(self) -> Packed:
        """Return the payload for a hook whose type is not known yet: what a hook without a type is to get. The body
        makes plain values of it, if its hook has a type.
        """
        is_plain = isinstance(self._exact, Exception) and not isinstance(self._plain, Exception)
        return _or_raise(self._plain if is_plain else self._exact)

    def _request(self, answer_to: str) -> Packed:
        if not isinstance(self._payload, WebhookRequest):
            raise PayloadDoesNotFit("payload is no WebhookRequest, which this hook takes", path="payload")
        request = msgspec.structs.replace(self._payload, answer_to=answer_to)
        return self._engine.codec.pack(msgspec.structs.asdict(request), self._engine.limits, at="payload")


def _caught(make: Any) -> Any:
    try:
        return make()
    except Exception as error:
        return error


def _or_raise(packed: Packed | Exception) -> Packed:
    if isinstance(packed, Exception):
        raise packed
    return packed


# --- on the engine's loop


async def resumed(engine: Engine, name: str, sent: Sent, resume_id: str | None, token: str = "") -> HookEntry:
    """Give a payload to the open hook of that name, and return the hook.

    Raises `HookNotFound`, `PayloadDoesNotFit`, `InboxFull`.
    """
    there = await find(engine, name)
    if there is None or there.hook.ended_at is not None:
        raise not_found(token)
    verdict = await give(engine, there, sent, resume_id or engine.ids.operation())
    if isinstance(verdict, Full):
        raise _full(there.hook)
    if not isinstance(verdict, Applied):
        raise not_found(token)
    return there.hook


async def give(engine: Engine, there: StoredHook, sent: Sent, resume_id: str) -> Verdict:
    """Push a payload to the run of a hook. Raises `PayloadDoesNotFit`, and then nothing is written."""
    name, run = there.entry.name, there.hook.run
    if there.hook.receiver:
        return await engine.hook_receivers[there.hook.receiver](run, there.hook.call, sent.for_others(), resume_id)
    try:
        packed = sent.fitting(there.hook, answer_name(name, resume_id))
    except PayloadDoesNotFit:
        (record,) = await get_readable(engine.store, engine.app, [run])
        if record is None or record.status in FINAL:  # what its hook took does not count any more
            return MISSING
        raise
    return await _push(engine, run, name, packed, resume_id)


async def _push(engine: Engine, run: InvocationId, name: str, packed: Packed, resume_id: str) -> Verdict:
    if packed.payloads:
        await engine.payloads.keep(packed.payloads)
    entry = _inbox_entry(engine, name, packed, resume_id)
    operation = engine.ids.operation()
    why = "a payload for its hook has come"
    (verdict,) = await push_all(
        engine, [Push(app=engine.app, id=run, entry=entry, operation=operation, at=entry.at, why=why)]
    )
    return verdict


def _inbox_entry(engine: Engine, name: str, packed: Packed, resume_id: str) -> InboxEntry:
    return InboxEntry(
        id=payload_id(name, resume_id),
        kind=PAYLOAD,
        at=engine.store.now(),
        call=address_of(name),
        body=packed.data,
    )


def not_found(token: str) -> HookNotFound:
    # What may be a secret is not repeated: errors end up in logs.
    named = f"the token '{token}'" if token and len(token) < 40 else "this token"
    return HookNotFound(
        f"no open hook has {named}: it was not created yet, was disposed of, or its run has ended. To start a run "
        "where none waits, use resume_or_submit"
    )


def _full(hook: HookEntry) -> InboxFull:
    return InboxFull(
        f"{hook.task} {hook.run} is too far behind: its inbox is full. Try again, with the same resume_id, when the "
        "run has gone on"
    )


async def _submitted(
    engine: Engine, name: str, sent: Sent, resume_id: str, record: InvocationRecord, payloads: Any
) -> InvocationId | None:
    """Insert a run together with a payload for its first hook of that name, or push it to the run that was faster.
    Return the run; None if that has ended, or made the hook, meanwhile. Raises `HookNotFound` if it has disposed of it.
    """
    packed = sent.for_any()
    run = RunState(inbox=(_inbox_entry(engine, name, packed, resume_id),), pushed=1, effects_key=record.id)
    record = msgspec.structs.replace(record, run=run)
    (holder,) = await engine.submitter.submit([record], [*payloads, *packed.payloads])
    if holder is None:
        return record.id
    if (received := await _received(engine, holder, name)) is not None:
        if payload_id(name, resume_id) in received:
            return holder.id  # it is repeated
        await _refuse_disposed(engine, holder, name)
        return None
    verdict = await _push(engine, holder.id, name, packed, resume_id)
    if isinstance(verdict, Full):
        raise InboxFull(f"{holder.task} {holder.id} is too far behind: its inbox is full. Try again later")
    return holder.id if isinstance(verdict, Applied) else None


async def _received(engine: Engine, run: InvocationRecord, name: str) -> set[str] | None:
    """Return the payloads that the log of a run has; None if its body has made no hook of that name."""
    if run.run is None or not run.attempt:
        return None
    events = [event for _, event in await read(engine, run, run.run.generation)]
    if not any(event.type == HOOK_CREATED and event.name == name for event in events):
        return None
    return {event.entry for event in events if event.type == HOOK_RECEIVED}


async def _refuse_disposed(engine: Engine, holder: InvocationRecord, name: str) -> None:
    """Raise `HookNotFound` if a run that had a hook has it no longer, and goes on: nothing would take a payload."""
    there = await find(engine, name)
    (now,) = await get_readable(engine.store, engine.app, [holder.id])
    if there is None and now is not None and now.status not in FINAL:
        raise HookNotFound(
            f"{holder.task} {holder.id} has disposed of its hook of this token, and has not ended. Until it has, or "
            "makes another hook, it takes no payload, and no other run is started. Try again later"
        )


# --- the public face


class HookAccess:
    """Hooks of an app, from outside of its workflows."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime

    @blocking
    def resume_hook(
        self, engine: Engine, token: str, payload: object = None, resume_id: str | None = None
    ) -> Coroutine[Any, Any, Invocation[Any]]:
        """Give a payload to the open hook of this token. Once this returns, the payload survives every crash.

        The payload is an object of the hook's type, or plain values that fit it. With a `resume_id` it is delivered
        once, however often and however late it is repeated. Return the run that the hook belongs to.

        Raises `HookNotFound`; `PayloadDoesNotFit`, with the path; `InboxFull` if the run is a thousand payloads behind.
        """
        name, sent = name_of(valid_token(token)), Sent(engine, payload)
        if resume_id is not None:
            valid_resume_id(resume_id)

        async def resume() -> Invocation[Any]:
            hook = await resumed(engine, name, sent, resume_id, token)
            return Invocation(self._runtime, hook.run)

        return resume()

    aresume_hook = awaited(resume_hook)

    @blocking
    def resume_or_submit(
        self,
        engine: Engine,
        token: str,
        payload: object,
        workflow: StartsRuns,
        /,
        *args: Any,
        resume_id: str | None = None,
        **kwargs: Any,
    ) -> Coroutine[Any, Any, Invocation[Any]]:
        """Give a payload to the open hook of this token; where there is none, submit the workflow with these arguments,
        and leave the payload for its first hook of the token. Return the run.

        Of several callers at once, one submits; all payloads come to that run. The token is the key of the run until
        that ends. Raises `HookNotFound` if the run has disposed of its hook, and has not ended.
        """
        name, sent = name_of(valid_token(token)), Sent(engine, payload)
        if not hasattr(workflow, "prepared"):
            raise UsageError(f"resume_or_submit(…, {workflow!r:.80}): expected a workflow of this app")
        prepared, payloads = workflow.prepared(engine, args, kwargs)
        if prepared.run is None:
            raise UsageError(f"{workflow.name} is a task, and only workflows have hooks")
        terms = msgspec.structs.replace(prepared.terms, key_seconds=0.0, key_until=None)
        record = msgspec.structs.replace(prepared, key=token, dedup_key=None, terms=terms)
        id = engine.ids.operation() if resume_id is None else valid_resume_id(resume_id)

        async def resume() -> Invocation[Any]:
            for _ in range(_TRIES):
                there = await find(engine, name)
                if there is not None and there.hook.ended_at is None:
                    verdict = await give(engine, there, sent, id)
                    if isinstance(verdict, Full):
                        raise _full(there.hook)
                    if isinstance(verdict, Applied):
                        return Invocation(self._runtime, there.hook.run)
                if (run := await _submitted(engine, name, sent, id, record, payloads)) is not None:
                    return Invocation(self._runtime, run)
            raise StoreError(f"runs with the token '{token:.40}' begin and end again and again; try again")

        return resume()

    aresume_or_submit = awaited(resume_or_submit)

    @blocking
    async def hook(self, engine: Engine, token: str) -> HookRecord:
        """Return the hook of this token, with its run and its metadata. Raises `HookNotFound`.

        What is true now may be otherwise a moment later: to resume it, just resume it.
        """
        found = await looked_up(engine, name_of(valid_token(token)))
        if found is None:
            raise not_found(token)
        return found

    ahook = awaited(hook)

    @blocking
    async def hooks(
        self, engine: Engine, *, run: str | None = None, limit: int = 100, before: str | None = None
    ) -> list[HookRecord]:
        """Return stored hooks, or those of a run. Their order is that of their names, which are hashes; `before` is the
        name of the last one of the page before. Unreadable ones are left out.
        """
        if type(limit) is not int or not 0 <= limit <= MAX_LISTED:
            raise UsageError(f"limit={limit!r}: expected a whole number from 0 to {MAX_LISTED:,}")
        entries = await engine.store.entries(
            engine.app, HOOK, order=EntryOrder.LATEST, limit=limit, before=before, subject=run
        )
        found = []
        for entry in entries:
            with contextlib.suppress(CorruptRecord):
                found.append(_record(StoredHook(entry, read_hook(entry))))
        return found

    ahooks = awaited(hooks)


async def looked_up(engine: Engine, name: str) -> HookRecord | None:
    """Return the hook of that name; None if its run has ended, and does not keep it."""
    there = await find(engine, name)
    if there is None:
        return None
    if there.hook.ended_at is None:
        (run,) = await get_readable(engine.store, engine.app, [there.hook.run])
        if run is None or run.status in FINAL:
            return None
    elif there.entry.keep_until is not None and there.entry.keep_until <= engine.store.now():
        return None
    return _record(there)


def _record(there: StoredHook) -> HookRecord:
    entry, hook = there
    return HookRecord(
        name=entry.name,
        token=hook.token,
        origin=hook.origin,
        run=hook.run,
        task=hook.task,
        call=hook.call,
        created_at=hook.created_at,
        type=hook.type,
        schema=hook.schema,
        metadata=hook.metadata,
        has_url=bool(hook.webhook),
        methods=hook.methods if hook.webhook else (),
        verify=hook.verify,
        ended_at=hook.ended_at,
        keep_until=entry.keep_until,
    )
