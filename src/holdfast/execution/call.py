"""One call of user code, from stored arguments to an outcome.

Decoding and encoding happen beside the call, not on the engine's loop: they may run user code too (a model's
validator, a property), and a slow one must not hold up claims and heartbeats. Whatever user code raises becomes a
value here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from holdfast.clock import parse_duration
from holdfast.codec import Codec, ErrorRecord, Limits, Payload
from holdfast.crashpoints import crashpoint
from holdfast.errors import ArgumentsDoNotBind, CodecError, Fatal, HoldfastError, NotEncodable, RetryLater
from holdfast.execution.context import Context, here
from holdfast.execution.throwing import Softly
from holdfast.lifecycle.records import InvocationRecord
from holdfast.lifecycle.retries import exception_names


class Call(NamedTuple):
    """What to run. `key` is the caller's own name for it and comes back with the outcome."""

    key: str
    task: str
    function: Callable[..., Any]
    signature: inspect.Signature
    arguments: bytes
    codec: Codec
    limits: Limits
    payloads: dict[str, bytes]  # that the arguments refer to; emptied once they are decoded, to save memory
    about: InvocationRecord | Context | None = None  # what `context()` tells
    deadline: float | None = None
    softly: bool = False  # it may be told that its time is up


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
    retry_after: float | None = None  # it asks for another attempt, so many seconds later
    fatal: bool = False  # it asks for none


class Unfit(NamedTuple):
    """The stored arguments do not fit the code at hand; user code was not called."""

    why: str


class Interrupted(NamedTuple):
    """User code was ended from outside before it was done. `how`: what is to be said about it, if it was asked to."""

    how: str = ""


class Crashed(NamedTuple):
    """The process that ran user code died; `why` is its exit code or signal. Nobody knows how far it came."""

    why: str


Outcome = Returned | Raised | Unfit | Interrupted | Crashed
INTERRUPTED = Interrupted()
NOT_BEGUN = Interrupted("its code had not begun")


def bind(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], task: str) -> None:
    """Raise `ArgumentsDoNotBind`, naming the task and its signature, unless the arguments fit."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentsDoNotBind(f"{task}{signature} cannot be called so: {error}") from None


def run(call: Call) -> Outcome:
    """Call a plain function. Whatever happens is an outcome: nothing may escape and take the thread with it."""
    entered = here.set(call)
    try:
        arguments = _arguments(call)
        if isinstance(arguments, Unfit):
            return arguments
        args, kwargs = arguments
        crashpoint("user.before")
        value = call.function(*args, **kwargs)
        crashpoint("user.after")
        return _returned(call, value)
    except BaseException as error:
        return raised(call, error)
    finally:
        here.reset(entered)


async def run_coroutine(call: Call, softly: Softly | None = None) -> Outcome:
    """Call a coroutine function. Whatever happens is an outcome; its caller tells a cancellation from outside."""
    here.set(call)
    try:
        arguments = _arguments(call)
        if isinstance(arguments, Unfit):
            return arguments
        args, kwargs = arguments
        crashpoint("user.before")
        coroutine: Coroutine[Any, Any, Any] = call.function(*args, **kwargs)
        value = await (coroutine if softly is None else softly.awaited(coroutine))
        crashpoint("user.after")
        return _returned(call, value)
    except BaseException as error:
        return raised(call, error)


def _arguments(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]] | Unfit:
    try:
        args, kwargs = call.codec.decode_call(call.arguments, call.payloads)
        call.payloads.clear()
        if args or kwargs or call.signature.parameters:
            bind(call.signature, args, kwargs, call.task)
        return args, kwargs
    except (CodecError, ArgumentsDoNotBind) as error:
        return Unfit(f"the stored arguments do not fit this code: {error}")


def _returned(call: Call, value: object) -> Outcome:
    try:
        return Returned(*call.codec.pack(value, call.limits, at="result"))
    except NotEncodable as error:
        return Raised(call.codec.encode_error(error), f"the result cannot be stored: {error}", fatal=True)


def raised(call: Call, error: BaseException) -> Raised:
    """What it means that this was raised."""
    payloads: tuple[Payload, ...] = ()
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
