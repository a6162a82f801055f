"""A proxy in front of a MongoDB server that does what networks do.

It understands just enough of the wire protocol to see where a message ends and which command it carries. Untouched,
it forwards everything. On demand it keeps replies to itself, cuts a connection in the middle of a message, delivers a
request after its sender has given up, holds everything up, or lets nobody through.

The members of a replica set can talk to each other through proxies as well (see `tests.support.mongod.ReplicaSet`). A
connection tells in its first message whether a server or a client opened it, and a server names itself in its
heartbeats and when it asks for votes: that is enough to part one member from the others and not from its clients.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from enum import Enum, auto
from types import TracebackType
from typing import Any, Self

import bson

_HEADER = struct.Struct("<iiii")  # length, request id, response to, kind of message
_OP_QUERY, _OP_MSG = 2004, 2013
_SERVERS = frozenset({"NetworkInterfaceTL", "MongoDB Internal Client"})  # the drivers inside mongod
_CONNECT_SECONDS = 5


class Fate(Enum):
    """What becomes of a request, or of its reply. In the end the connection is closed, unless it is swallowed."""

    REPLY_LOST = auto()  # the server has answered, and nobody hears it
    REPLY_SWALLOWED = auto()  # the same, and the connection stays open
    REPLY_NOT_AWAITED = auto()  # closed as soon as the request is sent
    REQUEST_CUT = auto()  # half of the request reaches the server
    REPLY_CUT = auto()  # half of the reply reaches the client
    REQUEST_LATE = auto()  # the client is cut off; the request reaches the server when the rule ends


class Rule:
    """The next `times` commands of that name to that collection meet that fate. Several proxies may share one.

    `database` narrows it down to one of several with that collection.
    """

    def __init__(self, fate: Fate, command: str, collection: str, times: int = 1, database: str | None = None) -> None:
        self.fate = fate
        self._names = (command, collection)
        self._database = database
        self._left = times
        self._lock = threading.Lock()
        self._released = threading.Event()
        self.met = 0  # how many have met it
        self.answered = 0  # of those, how many the server has answered

    def end(self) -> None:
        """No further message meets it, and those that are late arrive."""
        with self._lock:
            self._left = 0
        self._released.set()

    def wait_for_end(self) -> None:
        self._released.wait()

    def count_answer(self) -> None:
        with self._lock:
            self.answered += 1

    def takes(self, body: dict[str, Any]) -> bool:
        with self._lock:
            command, place = next(iter(body.items()))
            if not self._left or self._names != (command, body.get("collection") if command == "getMore" else place):
                return False
            if self._database is not None and self._database != body.get("$db"):
                return False
            self._left -= 1
            self.met += 1
            return True


class Proxy:
    """Listens on a free port of the loopback while it is entered."""

    def __init__(self, address: str) -> None:
        host, _, port = address.partition(":")
        self.target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        host, port_number = self._listener.getsockname()
        self.address = f"{host}:{port_number}"
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._pairs: set[_Pair] = set()
        self._flowing = threading.Event()
        self._flowing.set()
        self._refuses = False
        self._refuses_servers = False
        self._shunned: Shunned | None = None

    # --- one message

    def lose_replies(self, command: str, collection: str, times: int, *, wait: bool = True) -> None:
        """Lose the replies to the next `times` commands of that name to that collection.

        With `wait` the connection is closed when the server has answered; without, as soon as the request is sent.
        """
        self.add(Rule(Fate.REPLY_LOST if wait else Fate.REPLY_NOT_AWAITED, command, collection, times))

    def add(self, rule: Rule) -> None:
        with self._lock:
            self._rules = [*self._rules, rule]

    @property
    def lost(self) -> int:
        """How many messages have met a fate."""
        return sum(rule.met for rule in self._rules)

    def forget(self) -> None:
        """No message meets a fate any more."""
        with self._lock:
            rules, self._rules = self._rules, []
        for rule in rules:
            rule.end()

    # --- all of them

    def cut(self) -> None:
        """Close every connection."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.close()

    def freeze(self) -> None:
        """Nothing passes, nothing is closed, and who connects hears nothing."""
        self._flowing.clear()

    def thaw(self) -> None:
        """Everything that was held up arrives."""
        self._flowing.set()

    def refuse(self) -> None:
        """Nobody gets through: what is connected is cut, and so is whoever connects."""
        self._refuses = True
        self.cut()

    def part(self, shunned: Shunned | None = None) -> None:
        """Let no server through, or not the shunned one. Clients do not notice."""
        self._refuses_servers, self._shunned = shunned is None, shunned
        with self._lock:
            pairs = [pair for pair in self._pairs if pair.of_server]
        for pair in pairs:
            if shunned is None:
                pair.close()

    def heal(self) -> None:
        """Everybody gets through again."""
        self._refuses = self._refuses_servers = False
        self._shunned = None
        self.forget()
        self.thaw()

    # --- inside

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _close(self._listener)
        self.heal()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            if self._refuses:
                _close(client)
            else:
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self.target, timeout=_CONNECT_SECONDS)
        except OSError:
            _close(client)
            return
        server.settimeout(None)
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pair = _Pair(self, client, server)
        with self._lock:
            self._pairs.add(pair)
        threading.Thread(target=pair.replies, daemon=True).start()
        pair.requests()

    def gone(self, pair: _Pair) -> None:
        with self._lock:
            self._pairs.discard(pair)

    def flow(self) -> None:
        """Wait until messages may pass."""
        self._flowing.wait()

    def turns_away(self, pair: _Pair, message: bytes) -> bool:
        if self._refuses:
            return True
        if not pair.of_server or not (self._refuses_servers or self._shunned):
            return False
        return self._refuses_servers or (self._shunned is not None and self._shunned.wrote(message))

    def rule_for(self, message: bytes) -> Rule | None:
        if not self._rules:
            return None
        body = _body(message)
        if body is None:
            return None
        return next((rule for rule in self._rules if rule.takes(body)), None)


class Shunned:
    """A member of a replica set by what it says of itself to the others."""

    def __init__(self, address: str, number: int) -> None:
        self._address = address
        self._number = number

    def wrote(self, message: bytes) -> bool:
        body = _body(message) or {}
        return body.get("from") == self._address or (
            "replSetRequestVotes" in body and body.get("candidateIndex") == self._number
        )


class _Pair:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._rules: dict[int, Rule] = {}  # for replies, by the ids of their requests
        self.of_server = False  # a server opened it, not a client

    def requests(self) -> None:
        first, late = True, False
        with contextlib.suppress(OSError):
            while (message := _read(self._client)) is not None:
                if first:
                    self.of_server, first = _is_from_server(message), False
                if self._proxy.turns_away(self, message):
                    break
                rule = self._proxy.rule_for(message)
                fate = None if rule is None else rule.fate
                self._proxy.flow()
                if rule is not None and fate is Fate.REQUEST_LATE:
                    late = True
                    _close(self._client)
                    rule.wait_for_end()
                if fate is Fate.REQUEST_CUT:
                    self._server.sendall(message[: len(message) // 2])
                    break
                if rule is not None:
                    self._rules[_HEADER.unpack_from(message)[1]] = rule
                self._server.sendall(message)
                if fate is Fate.REPLY_NOT_AWAITED:
                    break
        if not late:  # a late request is on its way, and its reply closes the connection
            self.close()

    def replies(self) -> None:
        with contextlib.suppress(OSError):
            while (message := _read(self._server)) is not None:
                rule = self._rules.get(_HEADER.unpack_from(message)[2])
                self._proxy.flow()
                if rule is not None:
                    rule.count_answer()
                    if rule.fate is Fate.REPLY_SWALLOWED:
                        continue
                    if rule.fate is Fate.REPLY_CUT:
                        self._client.sendall(message[: len(message) // 2])
                    break
                self._client.sendall(message)
        self.close()

    def close(self) -> None:
        self._proxy.gone(self)
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
    """The command in a message: after the header and four bytes of flags, the first section, if it is a document.

    The first message of a connection may have the older form: flags, a name that ends in a zero, two numbers.
    """
    kind = _HEADER.unpack_from(message)[3]
    if kind == _OP_MSG and message[20] == 0:
        start = 21
    elif kind == _OP_QUERY:
        start = message.index(b"\0", 20) + 9
    else:
        return None
    (length,) = struct.unpack_from("<i", message, start)
    body: dict[str, Any] = bson.decode(message[start : start + length])
    return body


def _is_from_server(hello: bytes) -> bool:
    body = _body(hello) or {}
    return "internalClient" in body or body.get("client", {}).get("driver", {}).get("name") in _SERVERS


def _close(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
