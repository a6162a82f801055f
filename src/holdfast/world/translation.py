"""Runs of `@workflow-worlds/mongodb` 0.2.x as logs of ours. Pure.

That World wrote an entity before its event, checked nothing while it wrote, and ordered events by the clocks of its
processes. So its log may have an event twice, in the wrong order, or not at all. Events that our guards accept are
taken in their order. An event that they refuse is dropped, as replays did. Then events are appended that only the
entities know of: without them, such a run would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.codec import Codec, Payload, SizeLimits
from holdfast.world import rules
from holdfast.world.errors import WorldError
from holdfast.world.records import invocation_of
from holdfast.world.requests import moment, wanted
from holdfast.world.rules import Accepted, PlacedEvent, WorldEvent, WorldRun, fold, judge, new_run

Document = Mapping[str, Any]

_LATEST = float("inf")  # no event is too early: it has happened
_ENDED = frozenset(rules.RUN_ENDS.values())


class NotImportable(Exception):
    """A run that cannot be imported, with the reason."""


class OriginalRun(msgspec.Struct, frozen=True, kw_only=True):
    """What the database has of a run."""

    run: Document
    events: Sequence[Document] = ()
    steps: Sequence[Document] = ()
    hooks: Sequence[Document] = ()


class Translated(msgspec.Struct, kw_only=True):
    """The log of a run. `dropped` counts events that were there twice or too late, `added` those that were missing."""

    run: WorldRun
    events: list[WorldEvent] = []
    payloads: list[Payload] = []
    dropped: int = 0
    added: int = 0


def translated(found: OriginalRun, codec: Codec, limits: SizeLimits) -> Translated:
    """Return the log of a run. Raises `NotImportable`."""
    name = found.run.get("runId")
    if invocation_of(name) is None:
        raise NotImportable(f"the run {name!r:.80}: its id is not 'wrun_' and a ULID")
    spec = found.run.get("specVersion") or rules.LEGACY_SPEC
    if not isinstance(spec, int) or spec > rules.NEWEST_SPEC:
        raise NotImportable(f"the run {name}: its spec version {spec!r:.20} is newer than {rules.NEWEST_SPEC}")
    log = _Log(str(name), spec, codec, limits)
    try:
        log.take(found)
    except WorldError as error:
        raise NotImportable(f"the run {name}: {error.message}") from error
    return log.done


class _Log:
    def __init__(self, run: str, spec: int, codec: Codec, limits: SizeLimits) -> None:
        self.done = Translated(run=new_run(run), events=[], payloads=[])
        self._spec = spec
        self._codec, self._limits = codec, limits

    def take(self, found: OriginalRun) -> None:
        events = sorted(found.events, key=lambda event: str(event.get("eventId", "")).partition("_")[2])
        self._create(found.run, [event for event in events if event.get("eventType") == rules.RUN_CREATED])
        for event in events:
            if event.get("eventType") != rules.RUN_CREATED:
                self.done.dropped += not self._add(event)
        if self._spec > rules.LEGACY_SPEC:
            self._started(found.run)
            self._ended_steps(found.steps)
            self._hooks(found.hooks)
        self._ended(found.run)

    # --- events

    def _create(self, run: Document, created: Sequence[Document]) -> None:
        """Begin with run_created; of several, the run was made again by the last."""
        self.done.dropped += max(0, len(created) - 1)
        self.done.added += not created
        at = run.get("createdAt")
        names = {name: run.get(name) for name in ("deploymentId", "workflowName", "executionContext", "input")}
        event = {"eventType": rules.RUN_CREATED, "specVersion": self._spec, "eventData": names, "createdAt": at}
        if not self._add(event):
            raise NotImportable(f"the run {self.done.run.id}: it cannot be created")

    def _add(self, document: Document) -> bool:
        """Add an event unless the guards refuse it. Return whether it was added. Raises `WorldError` if it is none."""
        kind = document.get("eventType")
        at = max(moment("createdAt", document.get("createdAt")), self.done.run.updated_at)
        if kind in (rules.HOOK_CONFLICT, rules.NOOP):
            call = str(document.get("correlationId") or "")
            facts = {"token": str((document.get("eventData") or {}).get("token", ""))}
            self._append([WorldEvent(type=str(kind), at=at, call=call, spec=self._spec, facts=facts)])
            return True
        asked = wanted(_clean(document), None, self._codec, self._limits)
        event = msgspec.structs.replace(asked.event, at=at)
        judged = judge(self.done.run, event, now=_LATEST)
        if not isinstance(judged, Accepted):
            return False
        self.done.payloads += asked.payloads
        self._append(judged.events)
        return True

    def _append(self, events: Iterable[WorldEvent]) -> None:
        for event in events:
            self.done.events.append(event)
            fold(self.done.run, [PlacedEvent(len(self.done.events), event)])

    def _missing(self, kind: str, document: Document, call: str | None = None, **data: Any) -> None:
        """Add an event that only an entity knows of."""
        at = document.get("completedAt") or document.get("updatedAt") or document.get("createdAt")
        event: dict[str, Any] = {"eventType": kind, "createdAt": at, "specVersion": self._spec, "eventData": data}
        if call is not None:
            event["correlationId"] = call
        self.done.added += self._add(event)

    # --- what only the entities know

    def _started(self, run: Document) -> None:
        if self.done.run.status == "pending" and run.get("startedAt") is not None:
            self._missing(rules.RUN_STARTED, {"createdAt": run["startedAt"]})

    def _ended_steps(self, steps: Sequence[Document]) -> None:
        for document in steps:
            id, status = str(document.get("stepId", "")), document.get("status")
            step = self.done.run.steps.get(id)
            if status not in rules.STEP_ENDS.values() or (step is not None and step.completed_at is not None):
                continue
            if step is None:
                given = {"input": document["input"]} if "input" in document else {}
                created = {"createdAt": document.get("createdAt")}
                self._missing(rules.STEP_CREATED, created, id, stepName=document.get("stepName"), **given)
            if (document.get("attempt") or 0) > (0 if step is None else step.attempt):
                self._missing(rules.STEP_STARTED, {"createdAt": document.get("startedAt")}, id)
            if status == "completed":
                given = {"result": document["output"]} if "output" in document else {}
                self._missing(rules.STEP_COMPLETED, document, id, **given)
            else:
                self._missing(rules.STEP_FAILED, document, id, **_error(document))

    def _hooks(self, hooks: Sequence[Document]) -> None:
        if self.done.run.is_ended:
            return
        there = {str(document.get("hookId", "")) for document in hooks}
        for document in hooks:
            if document.get("hookId") not in self.done.run.hooks:
                given = {name: document[name] for name in ("token", "metadata") if name in document}
                self._missing(rules.HOOK_CREATED, document, str(document.get("hookId", "")), **given)
        for hook in list(self.done.run.open_hooks):
            if hook.id not in there:
                self._missing(rules.HOOK_DISPOSED, {"createdAt": moment_of(self.done.run.updated_at)}, hook.id)

    def _ended(self, run: Document) -> None:
        status = run.get("status")
        if status not in _ENDED or self.done.run.is_ended:
            return
        kind = next(kind for kind, name in rules.RUN_ENDS.items() if name == status)
        if self._spec <= rules.LEGACY_SPEC:  # our guards let no legacy run end otherwise
            self._append([self._legacy_end(kind, run)])
        elif kind == rules.RUN_COMPLETED:
            self._missing(kind, run, **({"output": run["output"]} if "output" in run else {}))
        else:
            self._missing(kind, run, **(_error(run) if kind == rules.RUN_FAILED else {}))

    def _legacy_end(self, kind: str, run: Document) -> WorldEvent:
        field = rules.PAYLOAD_FIELDS.get(kind)
        value = run.get("output") if field == "output" else run.get("error")
        packed = None if field is None else self._codec.pack(_plain(value), self._limits, at=field)
        self.done.payloads += () if packed is None else packed.payloads
        self.done.added += 1
        at = max(moment("completedAt", run.get("completedAt") or run.get("updatedAt")), self.done.run.updated_at)
        return WorldEvent(type=kind, at=at, spec=self._spec, data=b"" if packed is None else packed.data)


def moment_of(seconds: float) -> float:
    """Return a time as documents of events have it: in milliseconds."""
    return seconds * 1000


def _error(document: Document) -> dict[str, Any]:
    error = document.get("error")
    given = error if isinstance(error, dict) else {"message": error}
    named = {"stack": given.get("stack"), "errorCode": given.get("code")}
    return {
        "error": {"message": str(given.get("message"))},
        **{name: it for name, it in named.items() if it is not None},
    }


def _clean(document: Document) -> dict[str, Any]:
    cleaned: dict[str, Any] = _plain(document)
    return cleaned


def _plain(value: Any) -> Any:
    """Return a value without what only the database has: ids of documents, and bytes of another type."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items() if name != "_id"}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return bytes(value) if isinstance(value, bytes) else value
