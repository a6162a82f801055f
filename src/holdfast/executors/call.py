"""One call of user code, from stored arguments to an outcome.

Decoding and encoding happen beside the call, not on the engine's loop: they may run user code too (a model's
validator, a property), and a slow one must not hold up claims and heartbeats. Whatever user code raises becomes a
value here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple, Protocol

from holdfast.clock import parse_duration
from holdfast.codec import Codec, ErrorRecord, Payload, SizeLimits, damage_of
from holdfast.codec.secret import Secret, says_secret
from holdfast.crashpoints import crashpoint
from holdfast.errors import ArgumentsDoNotBind, CodecError, Fatal, HoldfastError, NotEncodable, RetryLater
from holdfast.executors.around import CallAround, ResourceMissing
from holdfast.executors.chunks import ChunkBuffer
from holdfast.executors.context import Context
from holdfast.executors.interrupts import SoftTimeoutInjector
from holdfast.executors.notes import CallNotes
from holdfast.executors.waiting import WaitPort
from holdfast.model.parking import DAMAGED
from holdfast.model.records import InvocationRecord
from holdfast.model.retries import exception_names
from holdfast.telemetry.tasks import here
from holdfast.tracing import CallSpan, PassedSpan


class Within(Protocol):
    """What a call runs inside of: a transaction, say. It runs the call, perhaps again, and returns its outcome."""

    def run(self, call: Call) -> Outcome: ...

    async def run_coroutine(self, call: Call) -> Outcome: ...


class Call(NamedTuple):
    """A call to run. `key` is the caller's own name for it and comes back with the outcome."""

    key: str
    task: str
    function: Callable[..., Any]
    signature: inspect.Signature
    arguments: bytes
    codec: Codec
    limits: SizeLimits
    payloads: dict[str, bytes]  # that the arguments refer to; emptied once they are decoded, to save memory
    about: InvocationRecord | Context | None = None  # for `context()`
    deadline: float | None = None
    has_soft_timeout: bool = False  # `SoftTimeout` may be raised in it
    within: Within | None = None
    mark: str = ""  # its entry in the table of begun calls, and its ticket there; empty: it has none
    ticket: int = 0
    chunks: Callable[[Call], ChunkBuffer] | None = None  # makes its way to streams, when it first writes to one
    waits: WaitPort | None = None  # gets the call's waits for other invocations
    notes: Callable[[Call], CallNotes] | None = None  # returns its notes, which it makes when the call first asks
    around: CallAround | None = None  # middleware and resources
    span: CallSpan | PassedSpan | None = None  # in which its code runs
    begin_within: float | None = None  # seconds in which a new process has to be ready; else the call is `TOO_LATE`
    outer: Call | None = None  # the call whose code runs this call by `try_here`


class Returned(NamedTuple):
    """User code returned, and this is its encoded result."""

    result: bytes
    payloads: tuple[Payload, ...] = ()


class Raised(NamedTuple):
    """User code raised, or returned what cannot be stored."""

    error: ErrorRecord
    why: str
    payloads: tuple[Payload, ...] = ()
    kinds: tuple[str, ...] = ()  # the names of its class and of the bases of that, for retry policies
    retry_after: float | None = None  # it asks for another attempt, after this many seconds
    fatal: bool = False  # it asks for none
    attributes: Mapping[str, str] | None = None  # that the invocation is to have from now on
    trace: str = ""  # the span of the attempt


class Deferred(NamedTuple):
    """The call asks to be made again after this many seconds. That is no failure."""

    seconds: float
    why: str
    attributes: Mapping[str, str] | None = None


class Unfit(NamedTuple):
    """The stored arguments do not fit the code at hand; user code was not called. Or the log of a run does not, which
    `python` wrote.
    """

    why: str
    python: str = ""


class Interrupted(NamedTuple):
    """User code was ended from outside before it was done. `how` is for its history, if it was cancelled."""

    how: str = ""


class Crashed(NamedTuple):
    """The process that ran user code died; `why` is its exit code or signal. How far it came is unknown. A run last
    came further in `progress_epoch`.
    """

    why: str
    progress_epoch: int = 0


class LetGo(NamedTuple):
    """A run has left its worker: it is suspended or back in the queue, or another owner has it. Nothing is to be
    written.
    """

    why: str = ""


Outcome = Returned | Raised | Deferred | Unfit | Interrupted | Crashed | LetGo
INTERRUPTED = Interrupted()
NOT_BEGUN = Interrupted("its code had not begun")
TOO_LATE = Interrupted("its process was not ready when its start under a rate came")
STOPPED = Interrupted("the runner stopped")  # while a cancelled call had time to end by itself


class CallAgain(Exception):
    """Raised by a coroutine of Holdfast itself, whose call is to be made again and has not failed: see `Deferred`."""

    def __init__(self, seconds: float, why: str, attributes: Mapping[str, str]) -> None:
        super().__init__(why)
        self.deferred = Deferred(seconds, why, attributes)


class CallFailed(Exception):
    """Raised by a task of Holdfast itself that decides what follows: another attempt after `seconds`, or none (None).
    `name` is that of the error, `attributes` are those of the invocation from now on.
    """

    def __init__(self, name: str, why: str, seconds: float | None, attributes: Mapping[str, str]) -> None:
        super().__init__(why)
        self.name, self.seconds, self.attributes = name, seconds, attributes


def bind(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], task: str) -> None:
    """Raise `ArgumentsDoNotBind`, naming the task and its signature, unless the arguments fit."""
    known = _positional.get(id(signature)) or _remember(signature)
    if not kwargs and len(args) in known[1]:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentsDoNotBind(f"{task}{signature} cannot be called so: {error}") from None


_MAX_SIGNATURES = 10_000
_positional: dict[int, tuple[inspect.Signature, range]] = {}  # by identity, which is theirs as long as they are here


def _remember(signature: inspect.Signature) -> tuple[inspect.Signature, range]:
    """Keep how many positional arguments alone are enough: `Signature.bind` takes longer than many a task."""
    kinds = inspect.Parameter
    parameters = signature.parameters.values()
    taken = [each for each in parameters if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    required = [each for each in taken if each.default is kinds.empty]
    keywords = [each for each in parameters if each.kind is kinds.KEYWORD_ONLY and each.default is kinds.empty]
    if len(_positional) >= _MAX_SIGNATURES:
        _positional.clear()
    counts = range(0) if keywords else range(len(required), len(taken) + 1)
    return _positional.setdefault(id(signature), (signature, counts))


def run(call: Call) -> Outcome:
    """Call a plain function. Whatever happens is an outcome: nothing may escape and take the thread with it."""
    entered = here.set(call)
    attached = None if call.span is None else call.span.attach()
    try:
        if call.within is not None:
            return call.within.run(call._replace(within=None))
        arguments = arguments_of(call)
        if isinstance(arguments, Unfit):
            return arguments
        args, kwargs = arguments
        if call.around is None:
            crashpoint("user.before")
            value = call.function(*args, **kwargs)
        else:
            value = call.around.run(call, args, kwargs)
        crashpoint("user.after")
        return returned(call, value)
    except ResourceMissing as missing:
        return Unfit(str(missing))
    except BaseException as error:
        return raised(call, error)
    finally:
        here.reset(entered)
        if call.span is not None:
            call.span.detach(attached)


async def run_coroutine(call: Call, injector: SoftTimeoutInjector | None = None) -> Outcome:
    """Call a coroutine function. Whatever happens is an outcome; the caller recognises a cancellation from outside."""
    here.set(call)
    if call.span is not None:
        call.span.attach()
    try:
        if call.within is not None:
            return await call.within.run_coroutine(call._replace(within=None))
        arguments = arguments_of(call)
        if isinstance(arguments, Unfit):
            return arguments
        args, kwargs = arguments
        if call.around is None:
            crashpoint("user.before")
            coroutine: Coroutine[Any, Any, Any] = call.function(*args, **kwargs)
            value = await (coroutine if injector is None else injector.awaited(coroutine))
        else:
            value = await call.around.run_coroutine(call, args, kwargs, injector)
        crashpoint("user.after")
        return returned(call, value)
    except CallAgain as again:
        return again.deferred
    except ResourceMissing as missing:
        return Unfit(str(missing))
    except BaseException as error:
        return raised(call, error)


def arguments_of(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]] | Unfit:
    """Return the decoded arguments of a call."""
    try:
        args, kwargs = call.codec.decode_call(call.arguments, call.payloads)
        call.payloads.clear()
        if args or kwargs or call.signature.parameters:
            bind(call.signature, args, kwargs, call.task)
        return args, kwargs
    except (CodecError, ArgumentsDoNotBind) as error:
        if damage := damage_of(call.arguments, of_call=True):
            return Unfit(f"{DAMAGED}: {damage}")
        return Unfit(f"the stored arguments do not fit this code: {error}")


def returned(call: Call, value: object) -> Outcome:
    """Return the outcome of a returned value, which is wrapped where the function says that it is a `Secret`."""
    bare, annotation = value is not None and not isinstance(value, Secret), call.signature.return_annotation
    if bare and "Secret" in str(annotation) and says_secret(call.function, annotation):
        value = Secret(value)
    try:
        return Returned(*call.codec.pack(value, call.limits, at="result"))
    except NotEncodable as error:
        return Raised(call.codec.encode_error(error), f"the result cannot be stored: {error}", fatal=True)


def raised(call: Call, error: BaseException) -> Raised:
    """Return the outcome of a raised exception."""
    payloads: tuple[Payload, ...] = ()
    if isinstance(error, CallFailed):
        record = ErrorRecord(type_name=error.name, message=str(error), traceback="", data=None)
        why = f"{error.name}: {error}"
        return Raised(record, why, (), (), error.seconds, fatal=error.seconds is None, attributes=error.attributes)
    try:
        record, payloads = call.codec.pack_error(error, call.limits)
    except BaseException as worse:  # an exception whose own methods raise
        message = f"it cannot be described: describing it raised {type(worse).__name__}"
        record = ErrorRecord(type_name=type(error).__name__, message=message, traceback="", data=None)
    why = f"{record.type_name.rpartition(':')[2]}: {record.message}"
    kinds, fatal = exception_names(type(error)), isinstance(error, Fatal)
    if not isinstance(error, RetryLater):
        return Raised(record, why, payloads, kinds, fatal=fatal)
    try:
        return Raised(record, why, payloads, kinds, retry_after=parse_duration(error.delay))
    except HoldfastError as wrong:
        return Raised(record, f"{why} ({wrong})", payloads, kinds)
