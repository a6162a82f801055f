"""Fork: a new run whose log is the beginning of another one's.

The new run replays what was copied, without running it again, and goes on from there. What was open at that point is
left out: children and waits of the old run belong to the old run, and the body asks for them again. A hook that has
received payloads is copied with them; if it is open, the new run claims its token, which the old one must not hold.

Recorded times stay as they were: a body computes deadlines from them, and a replay compares those. The new run's own
`timeout` counts from its creation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.codec import Packed, Payload
from holdfast.errors import PayloadLost, StepNotFound, StoreError, UsageError
from holdfast.executors.call import bind
from holdfast.ids import InvocationId
from holdfast.model.changes import Change, ChangeFacts, change_of
from holdfast.model.log import Page
from holdfast.model.records import KEY_SECONDS, InvocationRecord, RunState, registered, work_hint
from holdfast.runtime.definition import TaskDefinition
from holdfast.runtime.engine import Engine
from holdfast.runtime.runs import of_python
from holdfast.workflows import events as e
from holdfast.workflows.answers import start_of_log
from holdfast.workflows.events import Event
from holdfast.workflows.looking import Placed, fold, generation_of, no_step, read
from holdfast.workflows.rules import COPIED

_COPYING_SECONDS = 3600.0  # until a run is due whose log is being copied
FORKED = "forked"
"""Stands for the fingerprint of the code in a changed log: other arguments are a warning then, not an error."""


class Changed(msgspec.Struct, frozen=True):
    """What a fork changes, encoded."""

    given: tuple[tuple[Any, ...], dict[str, Any]] | None  # other arguments, as they were given
    arguments: Packed | None
    results: Mapping[str, Packed]


class Forking:
    """See `holdfast.runtime.runs.RunForks`."""

    def changed(self, engine: Engine, arguments: object, results: Mapping[str, object]) -> Changed:
        if not isinstance(results, Mapping):
            raise UsageError(f"results={results!r:.80}: expected a dict of steps and values, {{'charge#1': 'r-42'}}")
        codec, limits = engine.codec, engine.limits
        packed = {step: codec.pack(value, limits, at=f"results[{step!r}]") for step, value in results.items()}
        if arguments is None:
            return Changed(None, None, packed)
        if not isinstance(arguments, tuple | dict):
            raise UsageError(f"arguments={arguments!r:.80}: expected a tuple, or a dict of named arguments")
        args, kwargs = (arguments, {}) if isinstance(arguments, tuple) else ((), arguments)
        return Changed((args, kwargs), codec.pack_call(args, kwargs, (), limits), packed)

    async def fork(
        self,
        engine: Engine,
        record: InvocationRecord,
        step: str,
        changed: Changed,
        definition: TaskDefinition | None,
        *,
        new_key: bool,
    ) -> InvocationId:
        """Store a new run, and return its id.

        The record is inserted before its log, so that a crash leaves no pages without a record, which nothing would
        collect. It is due only when the log is there. An owner that finds the log shorter than the record says parks
        the run.
        """
        if changed.given is not None and definition is not None:
            bind(definition.signature, *changed.given, definition.name)
        log = await read(engine, of_python(record), generation_of(record))
        events = prefix(record, log, step, {call: packed.data for call, packed in changed.results.items()})
        if changed.arguments is not None or changed.results or _misses_children(_before(log, step), events):
            events = [msgspec.structs.replace(event, code=_as_forked(event.code)) for event in events]
        fresh = _forked(engine, record, step, changed, len(events), new_key=new_key)
        payloads = [payload for packed in changed.results.values() for payload in packed.payloads]
        payloads += [] if changed.arguments is None else changed.arguments.payloads
        await _keep(engine, fresh, events, payloads)
        pages = pages_of(engine, fresh, events)
        early = msgspec.structs.replace(fresh, due_at=fresh.due_at + _COPYING_SECONDS if pages else fresh.due_at)
        await engine.submitter.submit([early], payloads)
        try:
            for page in pages:
                await engine.store.append([page])
            if pages:
                await engine.store.apply([_copied(engine, fresh)])
                engine.hub.send(work_hint([(fresh.lane, fresh.due_at, fresh.priority)]))
        except StoreError:
            with contextlib.suppress(StoreError):
                await engine.canceller.cancel([fresh.id], by="the fork", reason="its log could not be copied")
            raise
        return fresh.id


def _copied(engine: Engine, record: InvocationRecord) -> Change:
    """Return the change by which a run is due whose log is there."""
    operation, status = engine.ids.operation(), record.status
    facts: ChangeFacts = {"operation": operation, "at": engine.store.now(), "why": "its log is copied"}
    facts |= {"due_at": record.due_at, "arguments": record.arguments}
    return change_of("amended", record, (status,), frozenset({status}), **facts)


def prefix(record: InvocationRecord, log: Sequence[Placed], step: str, results: Mapping[str, bytes]) -> list[Event]:
    """Return the events before a step, without calls that were open there, with other results. Pure.

    Raises `StepNotFound` for a step that the log does not have, and for a result of a step that is not before it;
    `UsageError` for a step by which the old run compensates.
    """
    known = [call.record.id for call in fold(log)]
    if step not in known:
        raise no_step(record, step, known)
    before = _before(log, step)
    ended = {event.call for event in before if event.type in e.ENDS - e.HOOKS}
    heard = {event.call for event in before if event.type in e.HOOKS - {e.HOOK_CREATED}}
    if any(event.type == e.CANCEL_REQUESTED for event in before):
        raise UsageError(
            f"{record.task} {record.id} cannot be forked before '{step}': it was asked to end before that, and a new "
            "run is not. Fork it before a step that came earlier"
        )
    for call in results:
        if call not in ended:
            error = no_step(record, call, sorted(ended))
            raise StepNotFound(f"results= of '{call}': it has not ended before '{step}'. {error}")
    return _with_results(_closed(before, ended | heard), results)


def _before(log: Sequence[Placed], step: str) -> list[Event]:
    at = next(position for position, event in log if event.call == step)
    return [event for position, event in log if position < at]


def _closed(before: Iterable[Event], ended: set[str]) -> list[Event]:
    """Return the events without those of open calls and of owners. Each keeps the code that wrote it."""
    kept: list[Event] = []
    code = said = ""
    for event in before:
        code = event.code or code
        if event.type == e.TAKEOVER or (event.call and event.call not in ended):
            continue
        facts = {"code": code if code != said else "", "entry": ""}
        if event.type == e.HOOK_CREATED:  # the new run has to claim its token, if the hook is open there
            facts["why"] = COPIED
        kept.append(msgspec.structs.replace(event, **facts))
        said = code
    return kept


def _misses_children(before: Iterable[Event], kept: Iterable[Event]) -> bool:
    """Return whether a child was left out. Its id may be an argument of a recorded step, and the new run's child has
    another id.
    """
    return bool({event.child for event in before} - {event.child for event in kept} - {""})


def _as_forked(code: str) -> str:
    """Return the mark of a log that no code has written like this."""
    return f"{code.partition(' ')[0]} {FORKED}" if code else ""


def _with_results(events: list[Event], results: Mapping[str, bytes]) -> list[Event]:
    return [
        Event(
            type=e.STEP_COMPLETED,
            at=event.at,
            call=event.call,
            data=results[event.call],
            attempt=event.attempt,
            code=event.code,
        )
        if event.call in results and event.type in e.ENDS
        else event
        for event in events
    ]


def pages_of(engine: Engine, record: InvocationRecord, events: Sequence[Event]) -> list[Page]:
    """Return the pages of a new log. They are of epoch 0: the first owner has epoch 1."""
    pages: list[Page] = []
    done = 0
    while done < len(events):
        some = events[done : done + e.portion(events[done:])]
        pages.append(
            Page(
                app=record.app,
                run=record.id,
                first=done + 1,
                last=done + len(some),
                epoch=0,
                operation=engine.ids.operation(),
                at=some[-1].at,
                events=e.encode(some),
                payloads=e.payloads_of(some),
            )
        )
        done += len(some)
    return pages


def _forked(
    engine: Engine, record: InvocationRecord, step: str, changed: Changed, tail: int, *, new_key: bool
) -> InvocationRecord:
    assert record.run is not None
    now = engine.store.now()
    started = record.run.started_at or start_of_log(record, record.run)
    fresh = InvocationRecord(
        id=engine.ids.new(),
        app=record.app,
        task=record.task,
        arguments=record.arguments if changed.arguments is None else changed.arguments.data,
        queue=record.queue,
        tags=record.tags,
        priority=record.priority,
        limit_key=record.limit_key,
        terms=msgspec.structs.replace(record.terms, key_seconds=KEY_SECONDS, key_until=None, start_by=None),
        attributes=record.terms.attributes or {},
        rerun_of=record.id,
        run=RunState(
            tail=tail,
            started_at=started if tail else None,
            effects_key=None if new_key else record.key_of_effects,
            seed=record.seed if tail else None,
        ),
        created_at=now,
        due_at=now - engine.store.clock_error(),
    )
    why = f"fork of {record.id} before {step}"
    return registered(fresh, operation=engine.ids.operation(), at=now, why=why)


async def _keep(engine: Engine, record: InvocationRecord, events: Sequence[Event], payloads: Sequence[Payload]) -> None:
    """Keep the payloads that the new run refers to. Raises `PayloadLost` for a payload that is gone."""
    await engine.payloads.keep(payloads)
    wanted = [*e.payloads_of(events), *record.payloads]
    there = await engine.store.keep_payloads(engine.app, wanted) if wanted else ()
    if gone := [digest for digest, found in zip(wanted, there, strict=True) if not found]:
        raise PayloadLost(f"the run cannot be forked: the payload {gone[0]}, which its log refers to, is not stored")
