"""The call that user code is part of, for `context()`.

A call is entered into a context variable, so its coroutines, the tasks that they start and functions that they send to
threads by `asyncio.to_thread` know it too. The `Context` is built only on request. A process for tasks is sent the
facts with the call, and a message when the call is cancelled.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from holdfast.errors import InvocationCancelled, NotDecodable, UsageError
from holdfast.ids import InvocationId
from holdfast.model.records import FailedAttempt, InvocationRecord, Origin
from holdfast.model.retries import Forever, load_policy, max_retries
from holdfast.telemetry.tasks import here

cancelled: set[str] = set()
"""The invocations that run in this process and are to end."""


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """The call that runs here.

    `attempt` counts starts, this one included. `is_last_attempt` goes by the retries that were stored with the call:
    None where their number does not decide. `previous_error` is that of the last attempt that failed. `idempotency_key`
    is the same for all attempts: the call's key, or its id if it was given none. `deadline` is when the attempt's
    `timeout` is over, in seconds since the epoch. `origin` is the trigger of the call, if there was one.
    """

    invocation_id: str
    app: str
    task: str
    attempt: int
    epoch: int
    idempotency_key: str
    is_last_attempt: bool | None
    previous_error: FailedAttempt | None = None
    deadline: float | None = None
    origin: Origin | None = None

    @property
    def cancelled(self) -> bool:
        """Return whether a user has cancelled this invocation."""
        return self.invocation_id in cancelled

    def raise_if_cancelled(self) -> None:
        """Raise `InvocationCancelled` if a user has cancelled it: the invocation then ends as cancelled."""
        if self.cancelled:
            raise InvocationCancelled(f"{self.task} {self.invocation_id} is to end", invocation_id=self.invocation_id)

    def remaining(self) -> float | None:
        """Return the seconds until the deadline, 0 when it is over; None without one."""
        return None if self.deadline is None else max(0.0, self.deadline - time.time())


def context() -> Context:
    """Return the call that runs here: which attempt it is, until when it may run, whether it was cancelled.

    Raises `UsageError` outside of a task.
    """
    call = here.get()
    found = None if call is None else context_of(call.about, call.deadline)
    if found is None:
        raise UsageError("context() is about the call that runs, and none runs here; call it inside a task")
    return found


def parent_in(app: str) -> InvocationId | None:
    """Return the invocation of that app that runs here, if any: an invocation that is submitted now is its child."""
    call = here.get()
    about: Any = None if call is None else call.about
    if about is None or about.app != app:
        return None
    return InvocationId(about.invocation_id if isinstance(about, Context) else about.id)


def origin_in(app: str) -> Origin | None:
    """Return how many triggers led here, for invocations and events of this call; None if there were none."""
    call = here.get()
    about: Any = None if call is None else call.about
    if about is None or about.app != app or about.origin is None or not about.origin.depth:
        return None
    return Origin(depth=about.origin.depth, path=about.origin.path)


def context_of(about: InvocationRecord | Context | None, deadline: float | None) -> Context | None:
    if not isinstance(about, InvocationRecord):
        return about
    return Context(
        invocation_id=about.id,
        app=about.app,
        task=about.task,
        attempt=about.attempt,
        epoch=about.epoch,
        idempotency_key=about.key or about.id,
        is_last_attempt=_is_last(about),
        previous_error=about.errors[-1] if about.errors else None,
        deadline=deadline,
        origin=about.origin,
    )


def deadline_in(seconds: float) -> float:
    return time.time() + seconds


def _is_last(record: InvocationRecord) -> bool | None:
    """Return whether this is the last attempt, by the number of failures that its policy forgives. A timetable goes by
    age, and policies of newer versions are unknown: None.
    """
    if record.terms.retries is None:
        return True
    try:
        policy = load_policy(record.terms.retries)
    except NotDecodable:
        return None
    if isinstance(policy, Forever):
        return False
    most = max_retries(policy)
    return None if most is None else record.failures >= most
