"""Child processes: how worker processes and processes for tasks are started, exchange messages and are ended.

**Start.** A child is a new interpreter, never a fork: a fork of a process with threads inherits locks that no thread
will release. It leads its own process group, so Ctrl-C at the terminal reaches its parent alone, and the programs that
a task has started end with it. It inherits one side of a socket pair, its only connection to its parent. It is not a
child of `multiprocessing`. Such a child may not have children, or delays the end of its parent. It runs the parent's
main module even without tasks there, and another thread may take its exit status.

**Messages.** Either side may send at any time. A message is one frame: the length of a head, the head (a tagged struct
and the sizes of the parts, as MessagePack), then the parts as they are. So large bytes are not copied. `Channel` is for
threads. Its `send` blocks. Its `post` never does: a message that the other side does not take at once waits in a
bounded queue, ahead of later messages. `AsyncChannel` is for event loops. A child that runs user code on its main
thread is interrupted by a signal (`wake`), and reads the messages in the signal's handler.

**End.** A parent asks by a message, or by closing its side; a child that has not ended after a grace is killed, with
its group. A child sees the end of its parent as the end of the stream. For code that never releases the interpreter
lock the kernel does it (Linux only): `end_with_parent`.

**What is atomic, and what a crash leaves.** A message arrives whole or not at all; nothing else is promised.

- Before the child is started: nothing; the sockets end with the process.
- Between the start and the first message: the child reads the end of the stream, and ends.
- In the middle of a message: the receiver reads `EOFError` or `OSError`, never half a message.
- Between a request and its answer: the parent reads the end of the stream. How far the child came is unknown, so the
  call has crashed, or what the worker held is taken back from the store.
- After the answer was sent: it lies in the socket, and is read before the end of the stream.
- A process that the child has forked may hold the stream open: the receiver also looks at the child's exit status.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import msgspec

M = TypeVar("M")
Command = Callable[[int], Sequence[str]]  # of a child, which gets the number of its descriptor

MAX_HEAD_BYTES, MAX_PART_BYTES = 2**26, 2**40
MAX_QUEUED, MAX_QUEUED_BYTES = 1000, 2**20
CLOSED = "its code closed descriptors that are not its own, with os.close or os.closerange say"
LOST_DESCRIPTORS = 213  # the exit code of a process that ends because of that, for its parent
# A new process belongs to its parent's group for a moment, and has no handlers yet. So these wait until it has.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
WAKE = signal.SIGURG  # ignored by default, so it may come before the child expects it
LOOK_SECONDS = 1.0

_LENGTH = struct.Struct(">I")
_TOGETHER_BYTES = 64 * 2**10  # less is worth joining: one system call instead of several
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # a program may have SIGPIPE end it, and a child's death must not
_PR_SET_PDEATHSIG = 1


# --- messages


def frame(message: msgspec.Struct, parts: Sequence[bytes] = ()) -> bytes:
    """Return the bytes before the parts: the length of the head, and the head."""
    packed = msgspec.msgpack.encode((message, [len(part) for part in parts]))
    return _LENGTH.pack(len(packed)) + packed


def _length(head: bytes) -> int:
    (length,) = _LENGTH.unpack(head)
    if length > MAX_HEAD_BYTES:
        raise OSError(f"a message of {length:,} bytes")
    return int(length)


def _decoder(kinds: Any) -> msgspec.msgpack.Decoder[tuple[Any, list[int]]]:
    return msgspec.msgpack.Decoder(tuple[kinds, list[int]])


class Channel(Generic[M]):
    """Send and receive messages over a socket, for threads; messages of the `kinds` arrive. A broken connection is an
    `OSError` or an `EOFError`.
    """

    def __init__(self, connection: socket.socket, kinds: Any) -> None:
        self.connection = connection
        self._decoder = _decoder(kinds)
        self._sending = threading.Lock()
        self._guard = threading.RLock()  # a signal handler may post in the middle of a post
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._rest = b""  # of a message that was sent in part
        self._arrived = b""  # and not decoded yet

    def post(self, message: msgspec.Struct) -> bool:
        """Send a message as soon as the other side takes it, without waiting. Return False if the queue is full."""
        data = frame(message)
        self.flush()  # what is ahead of it, which may make room
        with self._guard:
            if len(self._queue) >= MAX_QUEUED or self._queued_bytes + len(data) > MAX_QUEUED_BYTES:
                return False
            self._queue.append(data)
            self._queued_bytes += len(data)
        self.flush()
        return True

    def flush(self) -> None:
        """Send queued messages, as far as the other side takes them now."""
        # A thread that finds the lock taken leaves its message to the holder, which looks again after the release.
        while (self._rest or self._queue) and self._sending.acquire(blocking=False):
            try:
                self._push(socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:  # the other side is gone, as the next receive will show
                self._queue.clear()
                self._rest, self._queued_bytes = b"", 0
            finally:
                self._sending.release()

    def _push(self, flags: int) -> None:
        while self._rest or self._queue:
            if not self._rest:
                with self._guard:
                    self._rest = self._queue.popleft()
                    self._queued_bytes -= len(self._rest)
            self._rest = self._rest[self.connection.send(self._rest, flags | _NO_SIGNAL) :]

    def send(self, message: msgspec.Struct, parts: Sequence[bytes] = ()) -> None:
        """Send a message, after the queued ones. Waits until the other side has room for it."""
        with self._sending:
            self._push(0)
            pending, size = [frame(message, parts)], 0
            for part in parts:
                size += len(part)
                if size > _TOGETHER_BYTES:
                    self.connection.sendall(b"".join(pending), _NO_SIGNAL)
                    self.connection.sendall(part, _NO_SIGNAL)
                    pending, size = [], 0
                else:
                    pending.append(part)
            if pending:
                self.connection.sendall(b"".join(pending), _NO_SIGNAL)
        self.flush()

    def receive(self) -> tuple[M, list[bytes]]:
        """Wait for the next message. Return it and its parts."""
        message, sizes = self._decoder.decode(self._exactly(_length(self._exactly(_LENGTH.size))))
        return message, [self._exactly(size) for size in sizes]

    def received(self) -> list[M]:
        """Return the messages that have arrived, which have no parts. Never waits."""
        with contextlib.suppress(OSError):  # nothing, or no connection
            self._arrived += self.connection.recv(2**16, socket.MSG_DONTWAIT)
        found = []
        while len(self._arrived) >= _LENGTH.size:
            end = _LENGTH.size + _length(self._arrived[: _LENGTH.size])
            if len(self._arrived) < end:
                break
            message, _ = self._decoder.decode(self._arrived[_LENGTH.size : end])
            self._arrived = self._arrived[end:]
            found.append(message)
        return found

    def _exactly(self, size: int) -> bytes:
        """Return the next `size` bytes: usually in one read, and then without a copy."""
        if size > MAX_PART_BYTES:
            raise OSError(f"a part of {size:,} bytes")
        found, self._arrived = self._arrived[:size], self._arrived[size:]
        pieces, missing = [found] if found else [], size - len(found)
        while missing:
            piece = self.connection.recv(missing, socket.MSG_WAITALL)
            if not piece:
                raise EOFError
            pieces.append(piece)
            missing -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class AsyncChannel(Generic[M]):
    """Send and receive messages without parts over a socket, for an event loop; messages of the `kinds` arrive."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kinds: Any) -> None:
        self._reader, self._writer = reader, writer
        self._decoder = _decoder(kinds)

    @classmethod
    async def open(cls, connection: socket.socket, kinds: Any) -> AsyncChannel[M]:
        return cls(*await asyncio.open_connection(sock=connection), kinds)

    def post(self, message: msgspec.Struct) -> None:
        """Send a message, if the other side is still there, without waiting."""
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    async def drain(self) -> None:
        """Wait until the posted messages are sent, if the other side is still there."""
        if not self._writer.is_closing():
            with contextlib.suppress(OSError):
                await self._writer.drain()

    async def receive(self) -> M | None:
        """Return the next message; None if the other side is gone or sends nonsense."""
        try:
            length = _length(await self._reader.readexactly(_LENGTH.size))
            message: M = self._decoder.decode(await self._reader.readexactly(length))[0]
        except (OSError, EOFError, msgspec.MsgspecError):
            return None
        return message

    def close(self) -> None:
        self._writer.close()


# --- the parent's side


@contextlib.contextmanager
def _pair() -> Iterator[tuple[socket.socket, socket.socket, dict[str, Any]]]:
    """Yield both sides of a new connection, and the keywords that start a child with the second side."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            yield ours, theirs, {"pass_fds": [theirs.fileno()], "stdin": subprocess.DEVNULL, "process_group": 0}
        except BaseException:
            ours.close()
            raise


def start(command: Command) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a child for the present thread, with which it ends (Linux). Raises `OSError`."""
    with _pair() as (ours, theirs, options):
        return subprocess.Popen([*command(theirs.fileno())], **options), ours


async def start_async(command: Command, *inherited: int) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """Start a child for the present event loop, which inherits these descriptors. It has `SIGNALS` blocked until it
    unblocks them. Raises `OSError`.
    """
    with _pair() as (ours, theirs, options):
        options["pass_fds"] += inherited
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            return await asyncio.create_subprocess_exec(*command(theirs.fileno()), **options), ours
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # not the mask of before: others start meanwhile


def wake(pid: int) -> None:
    """Have the child read the posted messages, in the middle of user code."""
    with contextlib.suppress(OSError):
        os.kill(pid, WAKE)


def kill_group(pid: int) -> None:
    """Kill the child and the programs that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a dead group
        os.killpg(pid, signal.SIGKILL)


def exit_in_words(status: int) -> str:
    """Return how a child ended, by its exit status."""
    if status == LOST_DESCRIPTORS:
        return f"it lost its connection: {CLOSED}"
    if status >= 0:
        return f"exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
    hint = ", which the system sends when memory runs out" if name == "SIGKILL" else ""
    return f"{name} ({signal.strsignal(-status)}){hint}"


# --- the child's side


def end_with_parent(parent: int, connection: socket.socket | None = None, grace_seconds: float = 0.0) -> None:
    """End this process and the programs in its group after a grace, once its parent (with this id) has ended or closed
    its side of the connection.
    """
    is_helped = _ask_the_kernel(grace_seconds)
    if connection is not None or not is_helped:
        watched = connection and connection.dup()
        every = None if is_helped else LOOK_SECONDS * 1000
        threading.Thread(target=_watch, args=(parent, watched, grace_seconds, every), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before this call


def _watch(parent: int, connection: socket.socket | None, grace_seconds: float, every: float | None) -> None:
    poll = select.poll()
    if connection is not None:
        poll.register(connection, 0)  # the other side's close is reported unasked, and nothing else is
    while os.getppid() == parent and not poll.poll(every):
        pass
    time.sleep(grace_seconds)
    end_group()


def _ask_the_kernel(grace_seconds: float) -> bool:
    """Have Linux end us even if no line of Python runs any more. Return False if it does not.

    Without a grace by SIGKILL, when the parent dies. Else we get SIGTRAP then, and what handles it is the C library's
    ``alarm``, which takes its argument, the number of the signal, for seconds: five. SIGALRM then ends the process.
    (Not SIGQUIT, which would be three: a person or a process manager may send that, to have us drain.)
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        import ctypes

        library = ctypes.CDLL(None)
        if grace_seconds:
            library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
            library.signal.restype = ctypes.c_void_p
            library.signal(signal.SIGTRAP, ctypes.cast(library.alarm, ctypes.c_void_p))
        number = signal.SIGTRAP if grace_seconds else signal.SIGKILL
        return bool(library.prctl(_PR_SET_PDEATHSIG, number) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def end_group() -> NoReturn:
    """End this process, and the programs that its tasks have started: its parent may not be there to do it."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def end_for_lost_descriptors(parent: int) -> NoReturn:
    """End this process so that its parent, with this process id, learns the cause and ends the rest of the group. If
    the parent is gone, end the group from here.
    """
    if os.getppid() != parent:
        end_group()
    os._exit(LOST_DESCRIPTORS)
