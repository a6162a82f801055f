"""What a runner and its child processes say to each other.

A message is a small head and the large bytes as they are: arguments, results and payloads are not copied into a
larger whole, and no value of a user is pickled on the way; they are encoded bytes already, and the child decodes them
with its own codec. Talk is strictly question and answer, so neither side can wait for the other to read first.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from holdfast.codec import ErrorRecord, Limits, Payload
from holdfast.execution.call import Call, Outcome, Raised, Returned, Unfit
from holdfast.execution.context import Context, context_of
from holdfast.execution.declared import Address, Program, this_program

T = TypeVar("T")

# What is said to a child in the middle of a call goes over a connection of its own, and a signal makes it look there.
# By default that signal does nothing, so it may come before the child expects it.
DOORBELL = signal.SIGURG
CANCEL, SOFT = "cancel", "soft"

_LENGTH = struct.Struct(">I")
_TOGETHER_BYTES = 64 * 2**10  # less is worth joining: one system call instead of several
FLAGS = getattr(socket, "MSG_NOSIGNAL", 0)  # a program may have SIGPIPE end it, and a child's death must not


class Hello(msgspec.Struct, array_like=True):
    """The first message: who the parent is. File names are bytes, since they need not be text."""

    pid: int
    argv: list[bytes]
    name: str
    path: bytes

    @property
    def program(self) -> Program | None:
        return Program(self.name, os.fsdecode(self.path)) if self.name or self.path else None


class Question(msgspec.Struct, array_like=True):
    """A call. Its parts are the arguments, then the payloads."""

    key: str
    address: Address
    limits: Limits
    digests: list[str]
    with_hooks: bool = False
    about: Context | None = None


class Answer(msgspec.Struct, array_like=True):
    """An outcome: `why` alone means unfit. Its parts are the result, if there is no error, then the payloads."""

    why: str | None
    error: ErrorRecord | None
    digests: list[str]
    kinds: tuple[str, ...] = ()
    retry_after: float | None = None
    fatal: bool = False


_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(tuple[kind, list[int]])  # type: ignore[valid-type]
    for kind in (Hello, Question, Answer)
}


class Channel:
    """Messages over a socket. Whatever is wrong with the other side is an `OSError` or an `EOFError`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, head: msgspec.Struct, parts: Sequence[bytes] = ()) -> None:
        packed = msgspec.msgpack.encode((head, [len(part) for part in parts]))
        pending = [_LENGTH.pack(len(packed)), packed]
        size = 0
        for part in parts:
            size += len(part)
            if size > _TOGETHER_BYTES:
                self._connection.sendall(b"".join(pending), FLAGS)
                self._connection.sendall(part, FLAGS)
                pending, size = [], 0
            else:
                pending.append(part)
        if pending:
            self._connection.sendall(b"".join(pending), FLAGS)

    def receive(self, kind: type[T]) -> tuple[T, list[bytes]]:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        head, sizes = _DECODERS[kind].decode(self._exactly(length))
        return head, [self._exactly(size) for size in sizes]

    def _exactly(self, size: int) -> bytes:
        """That many bytes: usually in one go, and then without a copy."""
        found = self._connection.recv(size, socket.MSG_WAITALL) if size else b""
        if len(found) == size:
            return found
        pieces, missing = [found], size - len(found)
        while missing:
            if not pieces[-1]:
                raise EOFError
            pieces.append(self._connection.recv(missing, socket.MSG_WAITALL))
            missing -= len(pieces[-1])
        return b"".join(pieces)


def hello() -> Hello:
    program = this_program() or Program("", "")
    return Hello(os.getpid(), [os.fsencode(each) for each in sys.argv], program.name, os.fsencode(program.path))


def question_of(call: Call, address: Address, *, with_hooks: bool = False) -> tuple[Question, list[bytes]]:
    about = context_of(call.about, call.deadline)
    question = Question(call.key, address, call.limits, list(call.payloads), with_hooks, about)
    return question, [call.arguments, *call.payloads.values()]


def answer_of(outcome: Outcome) -> tuple[Answer, list[bytes]]:
    match outcome:
        case Returned(result, payloads):
            return Answer(None, None, _digests(payloads)), [result, *(payload.data for payload in payloads)]
        case Raised(error, why, payloads, kinds, retry_after, fatal):
            head = Answer(_sendable(why), error, _digests(payloads), tuple(map(_sendable, kinds)), retry_after, fatal)
            return head, [payload.data for payload in payloads]
        case Unfit(why):
            return Answer(_sendable(why), None, []), []
        case _:
            raise TypeError(f"a child has no such outcome: {outcome!r}")


def outcome_of(answer: Answer, parts: list[bytes]) -> Outcome:
    if answer.error is not None:
        payloads = _payloads(answer.digests, parts)
        return Raised(answer.error, answer.why or "", payloads, answer.kinds, answer.retry_after, answer.fatal)
    if answer.why is not None:
        return Unfit(answer.why)
    return Returned(parts[0], _payloads(answer.digests, parts[1:]))


def _payloads(digests: list[str], parts: list[bytes]) -> tuple[Payload, ...]:
    return tuple(Payload(digest, data) for digest, data in zip(digests, parts, strict=True))


def _digests(payloads: tuple[Payload, ...]) -> list[str]:
    return [payload.digest for payload in payloads]


def _sendable(text: str) -> str:
    """Text of user code may hold halves of characters."""
    return text.encode("utf-8", "backslashreplace").decode()
