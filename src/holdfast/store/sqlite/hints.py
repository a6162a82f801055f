"""Hints between the processes that share one SQLite file, by Unix sockets beside it.

A process that listens binds a datagram socket in the store's folder; its name begins with the kind of hint. The sender
writes to every socket of that kind, so hints without listeners cost nothing, there is no server, and no process has to
outlive another. A socket of a dead process refuses the datagram, and the sender removes it. Everything here may fail:
a lost hint costs one polling interval.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from holdfast.model.records import Hint

_LARGEST_DATAGRAM = 32_768
_LONGEST_SOCKET_PATH = 100  # the kernel's limit is 108 on Linux and 104 on macOS, the terminating zero included
_SUFFIX = ".sock"


class SocketHints:
    """See `holdfast.model.records.HintChannel`."""

    trust = 1  # a socket says nothing when it stops working, and to look at a SQLite file is cheap

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sender: socket.socket | None = None
        self._own: dict[str, tuple[socket.socket, asyncio.AbstractEventLoop]] = {}
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(Hint)

    def send(self, hints: Sequence[Hint]) -> None:
        try:
            listeners = [name for name in os.listdir(self._folder) if name.endswith(_SUFFIX) and name not in self._own]
        except OSError:
            return
        if not listeners:
            return
        for hint in hints:
            targets = [name for name in listeners if name.startswith(hint.kind)]
            if targets:
                self._send_to(self._datagram(hint), targets)

    def _datagram(self, hint: Hint) -> bytes:
        message = self._encoder.encode(hint)
        return message if len(message) <= _LARGEST_DATAGRAM else self._encoder.encode(Hint(hint.kind, (), hint.count))

    def _send_to(self, message: bytes, targets: list[str]) -> None:
        if self._sender is None:
            self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._sender.setblocking(False)
        for name in targets:
            path = self._folder / name
            try:
                self._sender.sendto(message, str(path))
            except (ConnectionRefusedError, FileNotFoundError):
                with contextlib.suppress(OSError):
                    path.unlink()  # its process is gone
            except OSError:
                continue  # its buffer is full: it has hints enough to look

    def listen(self, kind: str, receive: Callable[[Hint], None]) -> None:
        name = f"{kind}-{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
        path = str(self._folder / name)
        if len(path) > _LONGEST_SOCKET_PATH:
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            listener.bind(path)
        except OSError:
            listener.close()  # a file system without sockets: polling has to do
            return
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(listener, self._read, listener, receive)
        self._own[name] = (listener, loop)

    def _read(self, listener: socket.socket, receive: Callable[[Hint], None]) -> None:
        while True:
            try:
                message = listener.recv(_LARGEST_DATAGRAM)
            except OSError:
                return
            try:
                hint = self._decoder.decode(message)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue  # every program of this user may write to the socket
            receive(hint)

    async def close(self) -> None:
        for name, (listener, loop) in self._own.items():
            loop.remove_reader(listener)
            listener.close()
            (self._folder / name).unlink(missing_ok=True)
        self._own.clear()
        if self._sender is not None:
            self._sender.close()
            self._sender = None
