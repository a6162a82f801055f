"""The state of a World run, as a fold of its log, and the events that may follow. Pure.

`events.create` judges an event on the fold of all pages so far, and appends it behind them. A writer that meets pages
that it did not know folds them and judges again. So a guard holds whatever the number of servers, without a
transaction. Runs, steps, hooks and waits are never stored: they are the result of the fold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.model.decoding import Count, Moment
from holdfast.world.errors import (
    WorldError,
    attribute_error,
    bad_request,
    conflict,
    event_not_found,
    expired,
    hook_not_found,
    not_supported,
    run_not_found,
    step_not_found,
    too_early,
)

# --- events

RUN_CREATED, RUN_STARTED, RUN_COMPLETED = "run_created", "run_started", "run_completed"
RUN_FAILED, RUN_CANCELLED, ATTR_SET = "run_failed", "run_cancelled", "attr_set"
STEP_CREATED, STEP_STARTED, STEP_COMPLETED = "step_created", "step_started", "step_completed"
STEP_FAILED, STEP_RETRYING = "step_failed", "step_retrying"
HOOK_CREATED, HOOK_RECEIVED = "hook_created", "hook_received"
HOOK_DISPOSED, HOOK_CONFLICT = "hook_disposed", "hook_conflict"
WAIT_CREATED, WAIT_COMPLETED, NOOP = "wait_created", "wait_completed", "noop"

PAYLOAD_FIELDS: Mapping[str, str] = {
    RUN_CREATED: "input",
    RUN_STARTED: "input",
    RUN_COMPLETED: "output",
    RUN_FAILED: "error",
    STEP_CREATED: "input",
    STEP_STARTED: "input",
    STEP_COMPLETED: "result",
    STEP_FAILED: "error",
    STEP_RETRYING: "error",
    HOOK_CREATED: "metadata",
    HOOK_RECEIVED: "payload",
}
"""The field of `eventData` that carries what user code gave; `resolveData: "none"` leaves it out."""
DUE_FIELDS: Mapping[str, str] = {STEP_RETRYING: "retryAfter", WAIT_CREATED: "resumeAt", WAIT_COMPLETED: "resumeAt"}
RUN_ENDS: Mapping[str, str] = {RUN_COMPLETED: "completed", RUN_FAILED: "failed", RUN_CANCELLED: "cancelled"}
STEP_ENDS: Mapping[str, str] = {STEP_COMPLETED: "completed", STEP_FAILED: "failed"}
OF_RUNS = frozenset({RUN_CREATED, RUN_STARTED, *RUN_ENDS, ATTR_SET})
OF_STEPS = frozenset({STEP_CREATED, STEP_STARTED, STEP_RETRYING, *STEP_ENDS})
OF_HOOKS = frozenset({HOOK_CREATED, HOOK_RECEIVED, HOOK_DISPOSED})
OF_WAITS = frozenset({WAIT_CREATED, WAIT_COMPLETED})
CREATABLE = OF_RUNS | OF_STEPS | OF_HOOKS | OF_WAITS
KNOWN = CREATABLE | {HOOK_CONFLICT, NOOP}

OLDEST_SPEC, NEWEST_SPEC, DEFAULT_SPEC, LEGACY_SPEC = 2, 7, 5, 1
STRUCTURED_SPEC = 5  # from which on errors are bytes that user code has made; before, they are JSON
OF_LEGACY_RUNS = frozenset({RUN_CANCELLED, WAIT_COMPLETED, HOOK_RECEIVED})

MAX_ATTRIBUTES, MAX_KEY, MAX_VALUE_BYTES, MAX_CHANGES_BYTES, MAX_CREATION_BYTES = 64, 256, 256, 8192, 32_768
RESERVED = "$"
MAX_ID, MAX_NAME, MAX_TOKEN, MAX_REASON = 256, 1024, 2048, 512
PAST_SECONDS, FUTURE_SECONDS = 86_400.0, 300.0  # around now, in which the id of a new run may have been made


class WorldEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A line of the log. `call` is the correlation id. `facts` are fields of `eventData` as JSON that came, without the
    payload, which is `data`, encoded, and without the time `due`.
    """

    type: str
    at: Moment
    call: str = ""
    spec: Count = 0
    facts: dict[str, Any] = {}
    data: bytes = b""
    due: Moment | None = None
    occurred_at: Moment | None = None
    resume: str = ""  # of hook_received: two with the same are one

    @property
    def name(self) -> str:
        return str(self.facts.get("stepName", ""))


class PlacedEvent(msgspec.Struct, frozen=True):
    """An event at its position in the log."""

    position: int
    event: WorldEvent


# --- the fold


class WorldStep(msgspec.Struct):
    """A step, as the events of a log have left it. `input`, `output` and `error` are encoded payloads."""

    id: str
    name: str
    created_at: float
    updated_at: float
    status: str = "pending"
    attempt: int = 0
    spec: int = 0
    started_at: float | None = None
    completed_at: float | None = None
    retry_after: float | None = None
    input: bytes = b""
    output: bytes = b""
    error: bytes = b""
    stack: str = ""  # of the error, where it is no bytes of user code
    position: int = 0


class WorldHook(msgspec.Struct):
    id: str
    token: str
    created_at: float
    spec: int = 0
    metadata: bytes = b""
    is_webhook: bool | None = None
    is_system: bool | None = None
    is_disposed: bool = False
    received: int = 0
    position: int = 0


class WorldWait(msgspec.Struct):
    id: str
    created_at: float
    updated_at: float
    resume_at: float | None = None
    completed_at: float | None = None
    spec: int = 0
    position: int = 0


class WorldRun(msgspec.Struct):
    """The fold of a log up to `tail`. Its steps, hooks and waits are in the order in which they were created."""

    id: str
    tail: int = 0
    status: str = ""  # empty: there is no run_created yet
    spec: int = 0
    name: str = ""
    deployment: str = ""
    context: Any = None
    input: bytes = b""
    output: bytes = b""
    error: bytes = b""
    error_code: str = ""
    stack: str = ""
    public_key: str = ""
    cancel_reason: str = ""
    created_at: float = 0.0
    updated_at: float = 0.0
    started_at: float | None = None
    completed_at: float | None = None
    attributes: dict[str, str] = {}
    steps: dict[str, WorldStep] = {}
    hooks: dict[str, WorldHook] = {}
    waits: dict[str, WorldWait] = {}
    attribute_calls: set[str] = set()
    resumes: dict[str, int] = {}  # the position of hook_received, by the id of the resume
    cancelled_in: int = 0  # the position of run_cancelled
    woken_at: float = 0.0  # when a hook was last resumed, or a wait cut short: by programs, not by deliveries

    @property
    def exists(self) -> bool:
        return bool(self.status)

    @property
    def is_ended(self) -> bool:
        return self.status in RUN_ENDS.values()

    @property
    def open_hooks(self) -> list[WorldHook]:
        return [] if self.is_ended else [hook for hook in self.hooks.values() if not hook.is_disposed]

    @property
    def open_waits(self) -> list[WorldWait]:
        return [wait for wait in self.waits.values() if wait.completed_at is None]


def fold(run: WorldRun, log: Iterable[PlacedEvent]) -> WorldRun:
    """Add these events to a run, and return it."""
    for placed in log:
        _apply(run, placed.position, placed.event)
        run.tail = placed.position
    return run


def _apply(run: WorldRun, position: int, event: WorldEvent) -> None:
    run.updated_at = event.at
    kind, facts = event.type, event.facts
    if kind == RUN_CREATED:
        run.status, run.spec, run.created_at = "pending", event.spec, event.at
        run.name, run.deployment = str(facts.get("workflowName", "")), str(facts.get("deploymentId", ""))
        run.context, run.input = facts.get("executionContext"), event.data
        run.public_key = str(facts.get("encryptionPublicKey", ""))
        run.attributes = {str(key): str(value) for key, value in (facts.get("attributes") or {}).items()}
    elif kind == RUN_STARTED:
        run.status = "running"
        run.started_at = event.at if run.started_at is None else run.started_at
    elif kind in RUN_ENDS:
        run.status, run.completed_at = RUN_ENDS[kind], event.at
        if kind == RUN_COMPLETED:
            run.output = event.data
        elif kind == RUN_FAILED:
            run.error, run.error_code = event.data, str(facts.get("errorCode", ""))
            run.stack = str(facts.get("stack", ""))
        else:
            run.cancel_reason, run.cancelled_in = str(facts.get("cancelReason", "")), position
    elif kind == ATTR_SET:
        run.attributes = changed_attributes(run.attributes, facts.get("changes") or ())
        if event.call:
            run.attribute_calls.add(event.call)
    elif kind in OF_STEPS:
        _apply_to_step(run, position, event)
    elif kind == HOOK_CREATED:
        run.hooks[event.call] = WorldHook(
            id=event.call,
            token=str(facts.get("token", "")),
            created_at=event.at,
            spec=event.spec,
            metadata=event.data,
            is_webhook=facts.get("isWebhook"),
            is_system=facts.get("isSystem"),
            position=position,
        )
    elif kind == HOOK_RECEIVED:
        if event.resume:
            run.resumes[event.resume] = position
        if event.call in run.hooks:
            run.hooks[event.call].received += 1
        run.woken_at = event.at
    elif kind == HOOK_DISPOSED and event.call in run.hooks:
        run.hooks[event.call].is_disposed = True
    elif kind == WAIT_CREATED:
        wait = WorldWait(
            id=event.call, created_at=event.at, updated_at=event.at, resume_at=event.due, position=position
        )
        wait.spec = event.spec
        run.waits[event.call] = wait
    elif kind == WAIT_COMPLETED and event.call in run.waits:
        wait = run.waits[event.call]
        wait.completed_at = wait.updated_at = event.at
        if wait.resume_at is not None and event.at < wait.resume_at:
            run.woken_at = event.at


def _apply_to_step(run: WorldRun, position: int, event: WorldEvent) -> None:
    if event.type == STEP_CREATED:
        made = WorldStep(id=event.call, name=event.name, created_at=event.at, updated_at=event.at, input=event.data)
        made.spec, made.position = event.spec, position
        run.steps[event.call] = made
        return
    step = run.steps.get(event.call)
    if step is None:
        return
    step.updated_at = event.at
    if event.type == STEP_STARTED:
        step.status, step.attempt, step.retry_after = "running", step.attempt + 1, None
        step.started_at = event.at if step.started_at is None else step.started_at
    elif event.type == STEP_RETRYING:
        step.status, step.error, step.retry_after = "pending", event.data, event.due
        step.stack = str(event.facts.get("stack", ""))
    else:
        step.status, step.completed_at = STEP_ENDS[event.type], event.at
        if event.type == STEP_COMPLETED:
            step.output = event.data
        else:
            step.error, step.stack = event.data, str(event.facts.get("stack", ""))


def new_run(id: str) -> WorldRun:
    """Return the fold of the empty log of a run with this run id."""
    return WorldRun(id=id, steps={}, hooks={}, waits={}, attributes={}, attribute_calls=set(), resumes={})


# --- guards


class Accepted(msgspec.Struct, frozen=True):
    """The events to append, as one page; the last is the requested event."""

    events: tuple[WorldEvent, ...]
    step_created: bool = False


class Unchanged(msgspec.Struct, frozen=True):
    """The requested state exists already: no event is written. `position` is that of the event that made it; 0:
    none.
    """

    position: int = 0


Judgement = Accepted | Unchanged | WorldError


def judge(run: WorldRun, event: WorldEvent, *, now: float, token_owner: str = "") -> Judgement:
    """Return the verdict on an event. `token_owner` is the other run that has the token of a new hook."""
    if (refusal := _of_version(run, event)) is not None:
        return refusal
    if event.type in OF_RUNS:
        return _of_run(run, event)
    if not run.exists:
        return run_not_found(run.id)
    if event.type in OF_STEPS:
        return _of_step(run, event, now)
    if event.type in OF_HOOKS:
        return _of_hook(run, event, token_owner)
    return _of_wait(run, event)


def _of_version(run: WorldRun, event: WorldEvent) -> WorldError | None:
    spec = run.spec if run.exists else event.spec
    if spec > NEWEST_SPEC and event.type != RUN_CREATED:
        return not_supported(spec, NEWEST_SPEC)
    if run.exists and spec <= LEGACY_SPEC and event.type not in OF_LEGACY_RUNS | {RUN_CREATED}:
        return conflict(f"{event.type} is not supported for legacy runs: {run.id} has spec version {spec}")
    return None


def _ended(run: WorldRun, what: str) -> WorldError:
    return conflict(f"the run {run.id} takes no {what}: it is a terminal run, in the terminal state '{run.status}'")


def _of_run(run: WorldRun, event: WorldEvent) -> Judgement:
    kind = event.type
    if kind == RUN_CREATED:
        if run.exists:
            return conflict(f"the run {run.id} exists already")
        return why_no_attributes({}, event.facts) or Accepted((event,))
    if not run.exists:
        is_created = kind == RUN_STARTED and event.data and event.facts.get("workflowName")
        return _created_and_started(event) if is_created else run_not_found(run.id)
    if kind == RUN_STARTED:
        if run.is_ended:
            return expired(f"the run {run.id} is in the terminal state '{run.status}'")
        return Unchanged() if run.status == "running" else Accepted((_without_creation(event),))
    if run.is_ended:
        if kind == RUN_CANCELLED and run.status == "cancelled":
            return Unchanged(run.cancelled_in)
        return _ended(run, kind)
    if kind == ATTR_SET:
        if event.call and event.call in run.attribute_calls:
            return conflict(f"the attributes of {event.call} are set already")
        return why_no_attributes(run.attributes, event.facts) or Accepted((event,))
    return Accepted((event,))


_OF_CREATION = (
    *("deploymentId", "workflowName", "executionContext", "attributes", "allowReservedAttributes"),
    "encryptionPublicKey",
)


def _created_and_started(event: WorldEvent) -> Judgement:
    facts = {name: event.facts[name] for name in _OF_CREATION if name in event.facts}
    created = msgspec.structs.replace(event, type=RUN_CREATED, facts=facts)
    return why_no_attributes({}, facts) or Accepted((created, _without_creation(event)))


def _without_creation(event: WorldEvent) -> WorldEvent:
    return msgspec.structs.replace(event, facts={}, data=b"")


def _of_step(run: WorldRun, event: WorldEvent, now: float) -> Judgement:
    step, kind = run.steps.get(event.call), event.type
    creates = kind == STEP_CREATED or (kind == STEP_STARTED and bool(event.data))
    if step is None:
        if not creates:
            return step_not_found(event.call, run.id)
        if run.is_ended:
            return _ended(run, "new step")
        if kind == STEP_CREATED:
            return Accepted((event,))
        if not event.name:
            return bad_request(f"eventData.stepName is required for {kind} with an input")
        created = msgspec.structs.replace(event, type=STEP_CREATED, facts={"stepName": event.name})
        return Accepted((created, _without_input(event)), step_created=True)
    if creates:
        return _ended(run, "new step") if run.is_ended else conflict(f"the step {step.id} exists already")
    if step.status in STEP_ENDS.values():
        return conflict(f"the step {step.id} takes no {kind}: it is in the terminal state '{step.status}'")
    if run.is_ended and step.status != "running":
        return expired(f"the run {run.id} is in the terminal state '{run.status}', and {step.id} does not run")
    if kind == STEP_STARTED and step.retry_after is not None and step.retry_after > now:
        return too_early(step.id, max(1.0, float(-(-(step.retry_after - now) // 1))))
    return Accepted((event,))


def _without_input(event: WorldEvent) -> WorldEvent:
    return msgspec.structs.replace(event, data=b"")


def _of_hook(run: WorldRun, event: WorldEvent, token_owner: str) -> Judgement:
    hook = run.hooks.get(event.call)
    if event.type == HOOK_CREATED:
        if hook is not None:
            return conflict(f"the hook {hook.id} exists already")
        if run.is_ended:
            return _ended(run, "new hook")
        if token_owner:
            facts = {"token": event.facts["token"], "conflictingRunId": token_owner}
            return Accepted((msgspec.structs.replace(event, type=HOOK_CONFLICT, facts=facts, data=b""),))
        return Accepted((event,))
    if event.resume and (position := run.resumes.get(event.resume)):
        return Unchanged(position)
    if hook is None or run.is_ended:
        is_legacy = run.spec <= LEGACY_SPEC and not run.is_ended
        return Accepted((event,)) if is_legacy else hook_not_found(event.call)
    if hook.is_disposed:
        if event.type == HOOK_DISPOSED:
            return conflict(f"the hook {hook.id} was disposed of already")
        return hook_not_found(hook.id)
    return Accepted((event,))


def _of_wait(run: WorldRun, event: WorldEvent) -> Judgement:
    wait = run.waits.get(event.call)
    if event.type == WAIT_CREATED:
        if wait is not None:
            return conflict(f"the wait {wait.id} exists already")
    elif run.spec <= LEGACY_SPEC:
        return _ended(run, event.type) if run.is_ended else Accepted((event,))
    elif wait is None:
        return event_not_found(f"the wait {event.call:.80} of {run.id}")
    elif wait.completed_at is not None:
        return conflict(f"the wait {wait.id} is completed already")
    return _ended(run, event.type) if run.is_ended else Accepted((event,))


# --- attributes


def changed_attributes(before: Mapping[str, str], changes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    after = dict(before)
    for change in changes:
        if change.get("value") is None:
            after.pop(str(change["key"]), None)
        else:
            after[str(change["key"])] = str(change["value"])
    return after


def why_no_attributes(before: Mapping[str, str], facts: Mapping[str, Any]) -> WorldError | None:
    """Return why attributes, or changes of them, are refused; None if they are not."""
    given = facts.get("attributes")
    changes = facts.get("changes")
    if changes is None:
        changes = [{"key": key, "value": value} for key, value in (given or {}).items()]
    may_be_reserved = facts.get("allowReservedAttributes") is True
    seen: set[str] = set()
    for change in changes:
        key, value = change.get("key"), change.get("value")
        if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY:
            return attribute_error(f"the attribute key {key!r:.60}: expected a text of 1 to {MAX_KEY} characters")
        if key in seen:
            return attribute_error(f"the attribute {key!r:.60} is set twice at once")
        seen.add(key)
        if key.startswith(RESERVED) and not may_be_reserved:
            return attribute_error(f"the attribute {key!r:.60}: keys that begin with {RESERVED} are reserved")
        if (value is not None or given is not None) and (not isinstance(value, str) or _utf8(value) > MAX_VALUE_BYTES):
            return attribute_error(f"the attribute {key!r:.60}: expected a text of up to {MAX_VALUE_BYTES} bytes")
    size = sum(_utf8(str(change["key"])) + _utf8(str(change.get("value") or "")) for change in changes)
    most = MAX_CHANGES_BYTES if given is None else MAX_CREATION_BYTES
    if size > most:
        return attribute_error(f"the attributes have {size:,} bytes, and {most:,} can be set at once: split them")
    if len(changed_attributes(before, changes)) > MAX_ATTRIBUTES:
        return attribute_error(f"a run has at most {MAX_ATTRIBUTES} attributes")
    return None


def _utf8(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


# --- runs that nothing is on the way to


class LastDelivery(msgspec.Struct, frozen=True):
    """When the last message of a run was given to the application, and when it ended."""

    began_at: float
    ended_at: float


def needs_delivery(run: WorldRun, last: LastDelivery | None, now: float) -> bool:
    """Return whether a run without a message has to get one.

    A wait that is due, or an event after the last delivery, wants a replay. So does a program that woke the run during
    that delivery: the application may have read the log before. A run that waits for a hook, or for a later time, and
    has not changed since, does not. A run that waits for nothing could go on by nothing else.
    """
    if not run.exists or run.is_ended or not OLDEST_SPEC <= run.spec <= NEWEST_SPEC:
        return False
    if any(wait.resume_at is not None and wait.resume_at <= now for wait in run.open_waits):
        return True
    if last is None or run.updated_at > last.ended_at or run.woken_at > last.began_at:
        return True
    return not (run.open_hooks or run.open_waits)
