"""The call that user code is part of, for `context()`.

A call is entered into a context variable, so its coroutines, the tasks that they start and functions that they send to
threads by `asyncio.to_thread` know it too. The `Context` is built only on request. A process for tasks is sent the
facts with the call, and a message when the call is cancelled.
"""

from __future__ import annotations

import datetime as dt
import functools
import random
import time
import uuid
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from holdfast.errors import InvocationCancelled, NotDecodable, UsageError
from holdfast.ids import InvocationId
from holdfast.model.records import FailedAttempt, InvocationRecord, Origin
from holdfast.model.retries import Forever, load_policy, max_retries
from holdfast.model.status import Status
from holdfast.telemetry.tasks import here

if TYPE_CHECKING:
    from holdfast.executors.notes import CallNotes

STEP = "step:"  # what the name of a step begins with that is its own invocation
_SHOWN = "its steps show how far it is; for more, set attributes or write to a stream"
_LOGGED = "its log is its checkpoint, and a step that is recorded does not run again"
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
    started_at: float | None = None  # of a step: when its first attempt began
    run: Any = None  # of a workflow: `holdfast.workflows.context`
    noting: Any = None  # of a task: returns its `holdfast.executors.notes.CallNotes`

    @property
    def cancelled(self) -> bool:
        """Return whether a user has cancelled this invocation; in a step, whether its workflow gave up this call."""
        given_up: bool | None = getattr(self.run, "is_cancelled", None)
        return self.invocation_id in cancelled if given_up is None else given_up

    def raise_if_cancelled(self) -> None:
        """Raise `InvocationCancelled` if a user has cancelled it: the invocation then ends as cancelled."""
        if self.cancelled:
            raise InvocationCancelled(f"{self.task} {self.invocation_id} is to end", invocation_id=self.invocation_id)

    # --- what the code says of itself

    def progress(self, current: float, total: float | None = None, message: str = "") -> None:
        """Say how far this call has come: ``context().progress(40, total=100, message="rows")``.

        It costs no round trip: the latest is written about once per second, and in the end.
        """
        if (notes := self._notes("progress()", _SHOWN)) is not None:
            notes.report(current, total, message)

    def checkpoint(self, value: Any) -> None:
        """Keep a value for the next attempt, which finds it as `last_checkpoint`.

        It costs no round trip: the latest is written about once per second, and with the end of this attempt. What a
        crash finds unwritten is lost. Raises `NotEncodable`, and `UsageError` for more than `inline_limit` bytes.
        """
        if (notes := self._notes("checkpoint()", _LOGGED)) is not None:
            notes.keep(value)

    @property
    def last_checkpoint(self) -> Any:
        """Return the last checkpoint of this attempt or an earlier one; None if there is none."""
        notes = self._notes("last_checkpoint", _LOGGED)
        return None if notes is None else notes.kept

    def set(self, /, **attributes: str) -> None:
        """Set attributes, by which the invocation can be found: ``context().set(stage="packed")``. In a workflow, they
        are those of the run.
        """
        if self.run is not None or self.task.startswith(STEP):
            self._in_run("set()").set(attributes)
        elif (notes := self._notes("set()", "")) is not None:
            notes.set(attributes)

    @property
    def attributes(self) -> Mapping[str, str]:
        """Return the attributes of the invocation, as they are here: those given at submit, and those set since."""
        of: Any = self.run if self.run is not None else self._notes("attributes", "")
        return {} if of is None else dict(of.attributes)

    def _notes(self, what: str, instead: str) -> CallNotes | None:
        """Return where this call notes what it says; None where no worker runs it."""
        if self.run is not None:
            raise UsageError(f"context().{what} is for tasks, and {self.task} is a workflow: {instead}")
        notes: CallNotes | None = None if self.noting is None else self.noting()
        return notes

    # --- in workflows

    def now(self) -> dt.datetime:
        """Return the time of the last event that the body of a workflow got: the same in each replay."""
        return dt.datetime.fromtimestamp(self._in_run("now()").now(), dt.UTC)

    @property
    def random(self) -> random.Random:
        """Return a random generator for the body of a workflow: the same numbers in each replay."""
        generator: random.Random = self._in_run("random").random
        return generator

    def uuid4(self) -> uuid.UUID:
        """Return a new UUID for the body of a workflow: the same in each replay."""
        made: uuid.UUID = self._in_run("uuid4()").uuid4()
        return made

    @property
    def data(self) -> MutableMapping[str, Any]:
        """Return the data that the body and the steps of a run share. What a step sets is stored with its end."""
        shared: MutableMapping[str, Any] = self._in_run("data").data
        return shared

    @property
    def session(self) -> Any:
        """Return the transaction of a transactional step: a session of pymongo, or a `sqlite3.Connection`. What is
        written by it is committed together with the end of the step.
        """
        return self._in_run("session").session

    def restart(self, *args: Any, **kwargs: Any) -> NoReturn:
        """End this life of a workflow's body, and start over with these arguments and an empty log."""
        self._in_run("restart()").restart(args, kwargs)
        raise AssertionError("restart() has returned")

    def _in_run(self, what: str) -> Any:
        if self.run is not None:
            return self.run
        if self.task.startswith(STEP):
            raise UsageError(
                f"context().{what}: the step {self.task.removeprefix(STEP)} runs on another queue, as an invocation of "
                "its own, and shares nothing with its workflow. Pass it what it needs, and let it return what the body "
                "is to set"
            )
        raise UsageError(f"context().{what} is for workflows, and {self.task} is a task")

    def remaining(self) -> float | None:
        """Return the seconds until the deadline, 0 when it is over; None without one."""
        return None if self.deadline is None else max(0.0, self.deadline - time.time())


def context() -> Context:
    """Return the call that runs here: which attempt it is, until when it may run, whether it was cancelled.

    Raises `UsageError` outside of a task.
    """
    found = context_in(here.get())
    if found is None:
        raise UsageError("context() is about the call that runs, and none runs here; call it inside a task")
    return found


def context_in(call: Any) -> Context | None:
    """Return the context of a `holdfast.executors.call.Call`, which notes what its code and middleware say."""
    notes = getattr(call, "notes", None)
    noting = None if notes is None else functools.partial(notes, call)
    return None if call is None else context_of(call.about, call.deadline, noting)


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


def context_of(
    about: InvocationRecord | Context | None, deadline: float | None, noting: Callable[[], CallNotes] | None = None
) -> Context | None:
    if not isinstance(about, InvocationRecord):
        return about
    return Context(
        invocation_id=about.id,
        app=about.app,
        task=about.task,
        attempt=about.attempt,
        epoch=about.epoch,
        idempotency_key=about.key_of_effects,
        is_last_attempt=_is_last(about),
        previous_error=about.errors[-1] if about.errors else None,
        deadline=deadline,
        origin=about.origin,
        started_at=_first_start(about) if about.task.startswith(STEP) else None,
        noting=noting,
    )


def _first_start(record: InvocationRecord) -> float | None:
    return next((entry.at for entry in record.history if entry.status is Status.RUNNING), None)


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
    allowed = max_retries(policy)
    return None if allowed is None else record.failures >= allowed
