"""A proxy in front of a MongoDB server that loses replies.

It understands just enough of the wire protocol to see which command a message carries, and forwards everything. On
demand it lets a request through, keeps the reply to itself and closes the connection: the client cannot know whether
its write was carried out.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType
from typing import Any, Self

import bson

_HEADER = struct.Struct("<iiii")  # length, request id, response to, kind of message
_OP_MSG = 2013


class _Rule:
    def __init__(self, command: str, collection: str, times: int, *, wait: bool) -> None:
        self.command = command
        self.collection = collection
        self.left = times
        self.wait = wait


class Proxy:
    """Listens on a free port of the loopback while it is entered."""

    def __init__(self, address: str) -> None:
        host, _, port = address.partition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._sockets: set[socket.socket] = set()
        self.lost = 0  # replies, so far

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def lose_replies(self, command: str, collection: str, times: int, *, wait: bool = True) -> None:
        """Lose the replies to the next `times` commands of that name to that collection.

        With `wait` the connection is closed when the server has answered; without, as soon as the request is sent.
        """
        with self._lock:
            self._rules.append(_Rule(command, collection, times, wait=wait))

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Close every connection."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for one in sockets:
            _close(one)

    # --- inside

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                server = socket.create_connection(self._target)
            except OSError:
                _close(client)
                continue
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {client, server}
            pair = _Pair(self, client, server)
            threading.Thread(target=pair.requests, daemon=True).start()
            threading.Thread(target=pair.replies, daemon=True).start()

    def rule_for(self, message: bytes) -> _Rule | None:
        body = _body(message)
        if body is None:
            return None
        command, collection = next(iter(body.items()))
        with self._lock:
            for rule in self._rules:
                if rule.left and (rule.command, rule.collection) == (command, collection):
                    rule.left -= 1
                    self.lost += 1
                    return rule
        return None


class _Pair:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._to_lose: set[int] = set()  # ids of requests

    def requests(self) -> None:
        with contextlib.suppress(OSError):
            while (message := _read(self._client)) is not None:
                rule = self._proxy.rule_for(message)
                if rule is not None:
                    self._to_lose.add(_HEADER.unpack_from(message)[1])
                self._server.sendall(message)
                if rule is not None and not rule.wait:
                    break
        self._close()

    def replies(self) -> None:
        with contextlib.suppress(OSError):
            while (message := _read(self._server)) is not None:
                if _HEADER.unpack_from(message)[2] in self._to_lose:
                    break
                self._client.sendall(message)
        self._close()

    def _close(self) -> None:
        _close(self._client)
        _close(self._server)


def _read(source: socket.socket) -> bytes | None:
    """A whole message, or None at the end."""
    header = _read_bytes(source, _HEADER.size)
    if header is None:
        return None
    rest = _read_bytes(source, _HEADER.unpack(header)[0] - _HEADER.size)
    return None if rest is None else header + rest


def _read_bytes(source: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = source.recv(count - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _body(message: bytes) -> dict[str, Any] | None:
    """The command in a message: after the header and four bytes of flags, the first section, if it is a document."""
    if _HEADER.unpack_from(message)[3] != _OP_MSG or message[20] != 0:
        return None
    (length,) = struct.unpack_from("<i", message, 21)
    body: dict[str, Any] = bson.decode(message[21 : 21 + length])
    return body


def _close(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
