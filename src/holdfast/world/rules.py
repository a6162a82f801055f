"""What a World run is: a fold of its log, and which events may follow. Pure.

`events.create` judges an event on the fold of all pages so far, and appends it behind them. A writer that meets pages it
did not know folds them and judges again, so a guard holds whatever the number of servers, without a transaction. Runs,
steps, hooks and waits are never stored: they are what the fold says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.model.decoding import Count, Moment

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
NEEDS_PAYLOAD = frozenset({RUN_CREATED, RUN_FAILED, STEP_CREATED, STEP_COMPLETED, STEP_FAILED, STEP_RETRYING})
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

MAX_ATTRIBUTES, MAX_KEY, MAX_VALUE_BYTES, MAX_CHANGES_BYTES = 64, 256, 256, 8192
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

    @property
    def name(self) -> str:
        return str(self.facts.get("stepName", ""))


class Placed(msgspec.Struct, frozen=True):
    """An event at its position in the log."""

    position: int
    event: WorldEvent


# --- refusals


class Refusal(msgspec.Struct, frozen=True):
    """Why an event is not written: the class by which cores from 4.2 on recognise it, and the status for older ones."""

    name: str
    status: int
    message: str
    retry_after: float | None = None


WORLD_ERROR = "WorkflowWorldError"


def bad_request(message: str) -> Refusal:
    return Refusal(WORLD_ERROR, 400, message)


def conflict(message: str) -> Refusal:
    return Refusal("EntityConflictError", 409, message)


def expired(message: str) -> Refusal:
    return Refusal("RunExpiredError", 410, message)


def run_not_found(run: str) -> Refusal:
    return Refusal("WorkflowRunNotFoundError", 404, f"the run {run:.80} is not in this store")


def not_found(what: str) -> Refusal:
    return Refusal(WORLD_ERROR, 404, f"{what} is not in this store")


def hook_not_found(what: str) -> Refusal:
    return Refusal("HookNotFoundError", 404, f"the hook {what} is not there, or was disposed of")


def not_supported(spec: int) -> Refusal:
    return Refusal(
        "RunNotSupportedError",
        409,
        f"the run has spec version {spec}, and this World knows those up to {NEWEST_SPEC}; upgrade the server",
    )


def attribute_error(message: str) -> Refusal:
    return Refusal("AttributeValidationError", 400, message)


# --- the fold


class Step(msgspec.Struct):
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
    position: int = 0


class Hook(msgspec.Struct):
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


class Wait(msgspec.Struct):
    id: str
    created_at: float
    updated_at: float
    resume_at: float | None = None
    completed_at: float | None = None
    spec: int = 0
    position: int = 0


class Run(msgspec.Struct):
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
    cancel_reason: str = ""
    created_at: float = 0.0
    updated_at: float = 0.0
    started_at: float | None = None
    completed_at: float | None = None
    attributes: dict[str, str] = {}
    steps: dict[str, Step] = {}
    hooks: dict[str, Hook] = {}
    waits: dict[str, Wait] = {}
    attribute_calls: set[str] = set()
    size: int = 0  # bytes of what it holds, about

    @property
    def exists(self) -> bool:
        return bool(self.status)

    @property
    def is_ended(self) -> bool:
        return self.status in RUN_ENDS.values()

    @property
    def open_hooks(self) -> list[Hook]:
        return [] if self.is_ended else [hook for hook in self.hooks.values() if not hook.is_disposed]

    @property
    def open_waits(self) -> list[Wait]:
        return [wait for wait in self.waits.values() if wait.completed_at is None]

    @property
    def open_steps(self) -> list[Step]:
        return [step for step in self.steps.values() if step.completed_at is None]


def fold(run: Run, log: Iterable[Placed]) -> Run:
    """Add these events to a run, and return it."""
    for placed in log:
        _apply(run, placed.position, placed.event)
        run.tail = placed.position
        run.size += len(placed.event.data) + 200
    return run


def _apply(run: Run, position: int, event: WorldEvent) -> None:
    run.updated_at = event.at
    kind, facts = event.type, event.facts
    if kind == RUN_CREATED:
        run.status, run.spec, run.created_at = "pending", event.spec, event.at
        run.name, run.deployment = str(facts.get("workflowName", "")), str(facts.get("deploymentId", ""))
        run.context, run.input = facts.get("executionContext"), event.data
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
        else:
            run.cancel_reason = str(facts.get("cancelReason", ""))
    elif kind == ATTR_SET:
        run.attributes = changed_attributes(run.attributes, facts.get("changes") or ())
        run.attribute_calls = run.attribute_calls | ({event.call} if event.call else set())
    elif kind in OF_STEPS:
        _apply_to_step(run, position, event)
    elif kind == HOOK_CREATED:
        run.hooks[event.call] = Hook(
            id=event.call,
            token=str(facts.get("token", "")),
            created_at=event.at,
            spec=event.spec,
            metadata=event.data,
            is_webhook=facts.get("isWebhook"),
            is_system=facts.get("isSystem"),
            position=position,
        )
    elif kind == HOOK_RECEIVED and event.call in run.hooks:
        run.hooks[event.call].received += 1
    elif kind == HOOK_DISPOSED and event.call in run.hooks:
        run.hooks[event.call].is_disposed = True
    elif kind == WAIT_CREATED:
        wait = Wait(id=event.call, created_at=event.at, updated_at=event.at, resume_at=event.due, position=position)
        wait.spec = event.spec
        run.waits[event.call] = wait
    elif kind == WAIT_COMPLETED and event.call in run.waits:
        run.waits[event.call].completed_at = run.waits[event.call].updated_at = event.at


def _apply_to_step(run: Run, position: int, event: WorldEvent) -> None:
    if event.type == STEP_CREATED:
        made = Step(id=event.call, name=event.name, created_at=event.at, updated_at=event.at, input=event.data)
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
    else:
        step.status, step.completed_at = STEP_ENDS[event.type], event.at
        if event.type == STEP_COMPLETED:
            step.output = event.data
        else:
            step.error = event.data


def new_run(id: str) -> Run:
    """Return the fold of an empty log."""
    return Run(id=id, steps={}, hooks={}, waits={}, attributes={})


# --- guards


class Accepted(msgspec.Struct, frozen=True):
    """The events that are to be appended, as one page; the last of them is the one that was asked for."""

    events: tuple[WorldEvent, ...]
    step_created: bool = False


class Unchanged(msgspec.Struct, frozen=True):
    """What was asked for is so already: no event is written."""


Judgement = Accepted | Unchanged | Refusal


def judge(run: Run, event: WorldEvent, *, now: float, token_owner: str = "") -> Judgement:
    """Return what becomes of an event. `token_owner` is the other run that has the token of a new hook."""
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


def _of_version(run: Run, event: WorldEvent) -> Refusal | None:
    spec = run.spec if run.exists else event.spec
    if spec > NEWEST_SPEC:
        return not_supported(spec)
    if run.exists and run.spec <= LEGACY_SPEC and event.type not in OF_LEGACY_RUNS | {RUN_CREATED}:
        return conflict(f"the run {run.id} has spec version {run.spec}, and takes no {event.type} any more")
    return None


def _of_run(run: Run, event: WorldEvent) -> Judgement:
    kind = event.type
    if kind == RUN_CREATED:
        return conflict(f"the run {run.id} exists already") if run.exists else Accepted((event,))
    if not run.exists:
        is_created = kind == RUN_STARTED and event.data and event.facts.get("workflowName")
        return _created_and_started(event) if is_created else run_not_found(run.id)
    if kind == RUN_STARTED:
        if run.is_ended:
            return expired(f"the run {run.id} is {run.status}")
        return Unchanged() if run.status == "running" else Accepted((_without_creation(event),))
    if run.is_ended:
        if kind == RUN_CANCELLED and run.status == "cancelled":
            return Unchanged()
        return conflict(f"the run {run.id} is {run.status}, and takes no {kind}")
    if kind == ATTR_SET:
        if event.call and event.call in run.attribute_calls:
            return conflict(f"the attributes of {event.call} are set already")
        return why_no_attributes(run.attributes, event.facts) or Accepted((event,))
    return Accepted((event,))


_OF_CREATION = ("deploymentId", "workflowName", "executionContext", "attributes", "allowReservedAttributes")


def _created_and_started(event: WorldEvent) -> Judgement:
    facts = {name: event.facts[name] for name in _OF_CREATION if name in event.facts}
    created = msgspec.structs.replace(event, type=RUN_CREATED, facts=facts)
    wrong = why_no_attributes({}, {"attributes": facts.get("attributes"), **facts})
    return wrong or Accepted((created, _without_creation(event)))


def _without_creation(event: WorldEvent) -> WorldEvent:
    return msgspec.structs.replace(event, facts={}, data=b"")


def _of_step(run: Run, event: WorldEvent, now: float) -> Judgement:
    step, kind = run.steps.get(event.call), event.type
    if kind == STEP_CREATED:
        if run.is_ended:
            return conflict(f"the run {run.id} is {run.status}, and takes no new step")
        return conflict(f"the step {event.call} exists already") if step else Accepted((event,))
    if step is None:
        if kind != STEP_STARTED or not event.data or not event.name:
            return not_found(f"the step {event.call:.80} of {run.id}")
        if run.is_ended:
            return conflict(f"the run {run.id} is {run.status}, and takes no new step")
        created = msgspec.structs.replace(event, type=STEP_CREATED, facts={"stepName": event.name})
        return Accepted((created, _without_input(event)), step_created=True)
    if step.status in STEP_ENDS.values():
        return conflict(f"the step {step.id} is {step.status}, and takes no {kind}")
    if kind == STEP_STARTED and event.data:
        return conflict(f"the step {step.id} exists already")
    if run.is_ended and step.status != "running":
        return expired(f"the run {run.id} is {run.status}, and its step {step.id} does not run")
    if kind == STEP_STARTED and step.retry_after is not None and step.retry_after > now:
        wait = max(1.0, float(-(-(step.retry_after - now) // 1)))
        return Refusal("TooEarlyError", 425, f"the step {step.id} is to be tried again in {wait:g} s", wait)
    return Accepted((_without_input(event) if kind == STEP_STARTED else event,))


def _without_input(event: WorldEvent) -> WorldEvent:
    return msgspec.structs.replace(event, data=b"")


def _of_hook(run: Run, event: WorldEvent, token_owner: str) -> Judgement:
    hook = run.hooks.get(event.call)
    if event.type == HOOK_CREATED:
        if hook is not None:
            return conflict(f"the hook {hook.id} exists already")
        if run.is_ended:
            return conflict(f"the run {run.id} is {run.status}, and takes no new hook")
        if token_owner:
            facts = {"token": event.facts["token"], "conflictingRunId": token_owner}
            return Accepted((msgspec.structs.replace(event, type=HOOK_CONFLICT, facts=facts, data=b""),))
        return Accepted((event,))
    if hook is None or (run.is_ended and not hook.is_disposed):
        return hook_not_found(f"{event.call:.80}")
    if hook.is_disposed:
        if event.type == HOOK_DISPOSED:
            return conflict(f"the hook {hook.id} was disposed of already")
        return hook_not_found(hook.id)
    return Accepted((event,))


def _of_wait(run: Run, event: WorldEvent) -> Judgement:
    wait = run.waits.get(event.call)
    if event.type == WAIT_CREATED:
        if wait is not None:
            return conflict(f"the wait {wait.id} exists already")
    elif wait is None:
        return not_found(f"the wait {event.call:.80} of {run.id}")
    elif wait.completed_at is not None:
        return conflict(f"the wait {wait.id} is completed already")
    if run.is_ended:
        return conflict(f"the run {run.id} is {run.status}, and takes no {event.type}")
    return Accepted((event,))


# --- attributes


def changed_attributes(before: Mapping[str, str], changes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    after = dict(before)
    for change in changes:
        if change.get("value") is None:
            after.pop(str(change["key"]), None)
        else:
            after[str(change["key"])] = str(change["value"])
    return after


def why_no_attributes(before: Mapping[str, str], facts: Mapping[str, Any]) -> Refusal | None:
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
        if value is not None and (not isinstance(value, str) or _utf8(value) > MAX_VALUE_BYTES):
            return attribute_error(f"the attribute {key!r:.60}: expected a text of up to {MAX_VALUE_BYTES} bytes")
    if sum(_utf8(str(change.get("key"))) + _utf8(str(change.get("value") or "")) for change in changes) > (
        MAX_CHANGES_BYTES * 4
    ):
        return attribute_error(f"the attributes have more than {MAX_CHANGES_BYTES * 4:,} bytes together")
    if len(changed_attributes(before, changes)) > MAX_ATTRIBUTES:
        return attribute_error(f"a run has at most {MAX_ATTRIBUTES} attributes")
    return None


def _utf8(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


# --- runs that nothing is on the way to


def needs_delivery(run: Run, last_delivery: float | None, now: float) -> bool:
    """Return whether a run without a message has to get one. `last_delivery` is when the last one ended.

    A wait that is due, or an event after the last delivery, wants a replay. A run that waits for a hook, or for a later
    time, and has not changed since, does not. One that waits for nothing could go on by nothing else.
    """
    if not run.exists or run.is_ended or run.spec <= LEGACY_SPEC:
        return False
    if any(wait.resume_at is not None and wait.resume_at <= now for wait in run.open_waits):
        return True
    if last_delivery is None or run.updated_at > last_delivery:
        return True
    return not (run.open_hooks or run.open_waits)
