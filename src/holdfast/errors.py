"""Every error Holdfast raises, as one tree.

::

    HoldfastError
    ├── UsageError                              the call itself is wrong; nothing was written
    │   ├── BlockingCall                        a blocking wait on a running event loop
    │   ├── ArgumentsDoNotBind                  arguments that the task's signature refuses
    │   ├── ArgumentsDoNotFit                   arguments that its annotations refuse; names the path
    │   ├── DuplicateTask                       two tasks with one name
    │   ├── InvalidSchedule                     a cron expression, time zone, interval or instant is wrong
    │   ├── KeyTaken                            its key belongs to a call with other arguments
    │   ├── PayloadDoesNotFit                   a payload is not of the type of its hook; names the path
    │   ├── ScheduleExists                      another schedule has that name
    │   ├── UnknownSchedule                     no schedule has that name
    │   └── UnknownTask                         a name that this app does not declare
    ├── ConfigurationError                      a setting, URL or app reference is wrong
    │   ├── UnknownSetting
    │   ├── InvalidSetting
    │   ├── UnknownStore                        no store for that URL scheme
    │   ├── MissingExtra                        the store or tool needs an optional dependency
    │   └── AppNotFound                         the command line could not find the app
    ├── CodecError
    │   ├── NotEncodable                        a value that cannot be stored; names the path to it
    │   └── NotDecodable                        stored bytes that this code cannot read
    ├── LifecycleError                          the state machine says no
    │   ├── InvocationStatusTransitionError     not an edge of the table
    │   ├── InvocationStatusOwnershipError      an edge, but not for this owner
    │   └── InvocationStatusRaceConditionError  legal when asked, but another writer came first
    ├── StoreError
    │   ├── StoreUnavailable                    cannot be reached or opened; may pass
    │   ├── StoreReadOnly                       can be read, perhaps, but not written
    │   │   └── StoreUnauthorised               this user, its password or its roles are not accepted
    │   ├── StoreFull
    │   ├── UnsupportedFileSystem               a SQLite file on a network file system
    │   ├── UnsafeStore                         other users of the host can write the SQLite file, or replace it
    │   ├── SchemaMismatch                      the store was written by another version, or is foreign
    │   ├── CorruptRecord                       one stored record cannot be read; the others can
    │   └── PayloadLost                         a large value is not in the store any more, or is damaged
    ├── WorkflowError                           a workflow's body, or its log, is not as it has to be
    │   ├── NotDeterministic                    a body did what a replay could not repeat
    │   ├── ReplayMismatch                      the code does not fit the recorded log
    │   ├── InboxFull                           a run is too far behind to take a message
    │   ├── HookConflict                        another hook has the token
    │   ├── HookNotFound                        (also a LookupError) no open hook has the token
    │   ├── StepNotFound                        (also a LookupError) a run has no such step
    │   └── LogEventNotFound                    (also a LookupError) the log of a run has no such event
    ├── StreamError
    │   ├── StreamClosed                        nothing can be written to a stream any more
    │   └── StreamGone                          (also a LookupError) the chunks of a stream were removed
    ├── ImportRefused                           a database of another system is not imported; nothing was written
    ├── SoftTimeout                             raised in a task: its soft_timeout is over, it should come to an end
    ├── CircularWait                            a task waits for what waits for it
    ├── QueueFull                               more calls would wait than max_waiting allows; nothing was stored
    ├── InvocationNotFound
    ├── ResultTimeout                           (also a TimeoutError) no end within the caller's patience
    └── InvocationError                         the invocation ended, but not with a result
        ├── TaskFailed                          user code raised a class that is not registered here
        ├── WorkerLost                          the process that ran it died
        ├── TimedOut                            (also a TimeoutError) an attempt ran longer than its timeout
        ├── Expired                             it was not started in time
        ├── InvocationCancelled
        └── InvocationRefused                   ended as CONCURRENCY_CONTROLLED_FINAL

A message says what happened, why, and what to do. Inside, losing a race is a value
(`holdfast.model.changes.Lost`), never an exception: only a public call that cannot do what it was asked turns it
into one.
"""

from __future__ import annotations

from typing import Any


class HoldfastError(Exception):
    """The base of all errors that Holdfast raises."""


class UsageError(HoldfastError):
    """The call itself is wrong; nothing was written."""


class BlockingCall(UsageError):
    """A blocking wait was asked for on a thread that runs an event loop."""


class ArgumentsDoNotBind(UsageError, TypeError):
    """The arguments do not fit the task's signature."""


class ArgumentsDoNotFit(UsageError, TypeError):
    """An argument is not of the type of its annotation, and the task or app declares ``validate="submit"``. `path`
    leads to what does not fit, for instance ``order.lines[0].price``.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class DuplicateTask(UsageError):
    """Two tasks of one app share a name."""


class InvalidSchedule(UsageError, ValueError):
    """A cron expression, a time zone, an interval or an instant that no schedule can have."""


class InvalidTrigger(UsageError, ValueError):
    """A condition that cannot be met or decided, or arguments that the task does not take."""


class KeyTaken(UsageError):
    """The idempotency key belongs to another call: the same task, but other arguments. In the body of a workflow: any
    call that the run has not submitted itself.
    """


class PayloadDoesNotFit(UsageError):
    """A payload is not of the type of its hook. `path` leads to what does not fit, for instance ``payload.by``."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class TwinDiffers(UsageError):
    """A call with the same key arguments waits for its start, and other arguments of it differ."""


class ScheduleExists(UsageError):
    """There is a schedule of that name, and it says something else."""


class UnknownSchedule(UsageError):
    """There is no schedule of that name."""


class UnknownTask(UsageError):
    """The app declares no task of that name."""


class ConfigurationError(HoldfastError):
    """A setting, a URL or an app reference is wrong."""


class UnknownSetting(ConfigurationError):
    """A setting of that name does not exist."""


class InvalidSetting(ConfigurationError):
    """A setting's value has the wrong type or is out of range."""


class UnknownStore(ConfigurationError):
    """No store is installed for the URL's scheme."""


class MissingExtra(ConfigurationError):
    """An optional dependency is not installed."""


class AppNotFound(ConfigurationError):
    """The command line could not find the app to work with."""


class CodecError(HoldfastError):
    """A value and its stored form do not fit together."""


class NotEncodable(CodecError, TypeError):
    """A value that cannot be stored. `path` leads to it, for instance ``order.lines[3].price``."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class NotDecodable(CodecError, ValueError):
    """Stored bytes that this code cannot turn back into values."""


class ValueEncrypted(NotDecodable):
    """A stored value that is encrypted with a key which this process lacks."""


class LifecycleError(HoldfastError):
    """The state machine refuses a change."""


class InvocationStatusTransitionError(LifecycleError):
    """The table has no such edge."""


class InvocationStatusOwnershipError(LifecycleError):
    """The edge exists, but only the invocation's owner may take it."""


class InvocationStatusRaceConditionError(LifecycleError):
    """The change was legal when it was asked for, but another writer came first."""


class StoreError(HoldfastError):
    """The store cannot do what was asked."""


class StoreUnavailable(StoreError):
    """The store cannot be reached or opened now. Nothing is said about a write that was under way."""


class EncryptionKeyMissing(StoreError):
    """Something is to be written, or a payload read, that is encrypted with a key which this process lacks."""


class StoreReadOnly(StoreError):
    """The store cannot be written: its medium does not allow it, or this user may not."""


class StoreUnauthorised(StoreReadOnly):
    """The store does not let this user in, or not even look: a wrong password, no user, a missing role.

    It stays so until an operator changes that, so nothing is retried. A kind of `StoreReadOnly`, since code that
    handles that error (by keeping unwritten changes) has to do the same here.
    """


class StoreFull(StoreError):
    """The store's medium has no room left."""


class UnsupportedFileSystem(StoreError):
    """The file lies on a file system whose locks cannot be trusted."""


class UnsafeStore(StoreError):
    """Other users of the host can write to the store's file, or put another one into its place."""


class SchemaMismatch(StoreError):
    """The store was written by another version, or is not a Holdfast store."""


class CorruptRecord(StoreError):
    """One stored record cannot be read. It is kept for inspection; the others are not touched.

    `kind` and `id` name the record, `field` and `reason` the damage, as far as it is known.
    """

    def __init__(self, message: str, *, kind: str = "", id: str = "", field: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.kind, self.id, self.field, self.reason = kind, id, field, reason


class PayloadLost(StoreError):
    """A large value that a record refers to is not in the store any more, or is damaged."""


class QueueFull(HoldfastError):
    """More calls of the app would wait than the setting `max_waiting` allows. Nothing was stored; try again later."""


class InvocationNotFound(HoldfastError, LookupError):
    """The store holds no invocation of that id for this app."""


class ResultTimeout(HoldfastError, TimeoutError):
    """The invocation did not end within the caller's patience. It goes on."""


class CircularWait(HoldfastError):
    """The task waits for an invocation that, perhaps through others or a limit's slot, waits for the task itself."""


class InvocationError(HoldfastError):
    """The invocation ended, but not with a result."""

    def __init__(self, message: str, *, invocation_id: str | None = None) -> None:
        super().__init__(message)
        self.invocation_id = invocation_id


class TaskFailed(InvocationError):
    """User code raised an exception whose class is not registered with this app.

    `type_name` is the class as the worker knew it, `message` its text, `remote_traceback` the traceback's text there.
    """

    def __init__(
        self, type_name: str, message: str, remote_traceback: str = "", *, invocation_id: str | None = None
    ) -> None:
        super().__init__(f"{type_name}: {message}" if message else type_name, invocation_id=invocation_id)
        self.type_name = type_name
        self.message = message
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_task_failed, (self.type_name, self.message, self.remote_traceback, self.invocation_id))


def _rebuild_task_failed(type_name: str, message: str, remote: str, invocation_id: str | None) -> TaskFailed:
    return TaskFailed(type_name, message, remote, invocation_id=invocation_id)


class RetryLater(HoldfastError):
    """Raised by a task: this attempt is over, try again after `delay` ("30s", seconds, a timedelta).

    With retries declared, these decide whether there is another attempt; without any, there is.
    """

    def __init__(self, delay: Any, message: str = "") -> None:
        super().__init__(message or f"again in {delay}")
        self.delay = delay


class Fatal(HoldfastError):
    """Raised by a task: this failure is final, whatever its retries say."""


class WorkerLost(InvocationError):
    """The process that ran the invocation died before it was done; how far it came is unknown."""


class EventNotFound(UsageError):
    """No event with this id is in the store."""


class TriggerFailed(InvocationError):
    """A trigger could not make the call that it is for; the invocation says why, and was not run."""


class CallNotMade(InvocationError):
    """A call that was to follow others could not be made, since one of them failed; it says which, and was not run."""


class SoftTimeout(HoldfastError):
    """Raised in a task when its `soft_timeout` is over: it should come to an end."""

    def __init__(self, message: str = "the soft timeout is over") -> None:
        super().__init__(message)


class TimedOut(InvocationError, TimeoutError):
    """An attempt ran for longer than its `timeout` and was ended."""


class Expired(InvocationError):
    """The invocation was not started by the time that `expires` had set."""


class InvocationCancelled(InvocationError):
    """The invocation was cancelled: `by` a user or task, for a `reason`. Never asyncio's CancelledError, which would
    cancel the waiter instead.
    """

    def __init__(self, message: str, *, invocation_id: str | None = None, by: str = "", reason: str = "") -> None:
        super().__init__(message, invocation_id=invocation_id)
        self.by = by
        self.reason = reason


class InvocationRefused(InvocationError):
    """The invocation met a concurrency limit and was declared not to wait for it."""


class WorkflowError(HoldfastError):
    """A workflow's body, or its log, is not as it has to be."""


class NotDeterministic(WorkflowError):
    """A body did what a replay could not repeat: the clock, chance, sockets, threads. That belongs into a step."""


class ReplayMismatch(WorkflowError):
    """The code at hand does not fit the recorded log of a run."""


class InboxFull(WorkflowError):
    """A run is too far behind: its inbox takes no more."""


class HookConflict(WorkflowError):
    """Raised in a body: another hook has this token. `owner` is the id of its run."""

    def __init__(self, message: str, *, owner: str = "") -> None:
        super().__init__(message)
        self.owner = owner


class HookNotFound(WorkflowError, LookupError):
    """No open hook has this token: it was not created yet, was disposed of, or its run has ended."""


class StreamError(HoldfastError):
    """A stream cannot be written or read as it was asked for."""


class StreamClosed(StreamError):
    """Nothing can be written to this stream any more: it was closed, or another worker goes on with the call."""


class StreamGone(StreamError, LookupError):
    """The chunks of a stream were removed: their time to be kept was over (`stream_retention_seconds`)."""


class ImportRefused(HoldfastError):
    """A database of another system is not imported, and nothing was written. `runs` names those that are the reason."""

    def __init__(self, message: str, runs: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.runs = runs


class StepNotFound(WorkflowError, LookupError):
    """A run has no such step."""


class LogEventNotFound(WorkflowError, LookupError):
    """The log of a run has no such event, or no such generation. (`EventNotFound` is about events of the app.)"""
