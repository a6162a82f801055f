"""A small client for HTTP/1.1: it posts a body, and returns the answer. For deliveries, on the engine's loop.

Each request has its own connection: the other side may close a kept connection while a request is under way, and then
it is unknown whether the request was delivered. Whether a request reached an application decides what its failure
means. So `NoConnection` is raised as long as no connection was made, and `NoAnswer` after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from holdfast.clock import format_duration

CONNECT_SECONDS = 10.0
MAX_ANSWER = 2**20  # bytes of a body; an application has next to nothing to say
_MAX_HEADERS = 200
_CLOSING_SECONDS = 1.0
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_STATUS = re.compile(rb"HTTP/1\.[01] (?P<status>[1-9][0-9]{2})(?: [^\r\n]*)?")
_HOST = re.compile(r"[0-9A-Za-z._-]+|[0-9A-Fa-f:.]+")


class NoConnection(Exception):
    """No connection was made."""


class NoAnswer(Exception):
    """A connection was made, and no whole answer came."""


class HttpAddress(NamedTuple):
    """Where an application listens: scheme, host, port and the path that its routes begin with."""

    scheme: str
    host: str
    port: int
    path: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


_PORTS = {"http": 80, "https": 443}


def address_of(url: str) -> HttpAddress:
    """Return the address that a base URL means. Raises `ValueError`."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{url:.200} is no URL: {error}") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError(f"{url:.200} is no URL of an application: write http://host:port or https://host")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError("the base URL has a user, a query or a fragment: leave it out")
    if not _HOST.fullmatch(parts.hostname) or not re.fullmatch(r"[\x21-\x7e]*", parts.path):
        raise ValueError(f"{url:.200} is no URL: its host or its path has characters that may not be there")
    return HttpAddress(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], parts.path.rstrip("/"))


def is_header(name: str, value: str) -> bool:
    """Return whether these may be sent as a header."""
    return bool(_NAME.fullmatch(name) and _VALUE.fullmatch(value))


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]  # by names in lower case
    body: bytes


async def post(address: HttpAddress, path: str, headers: Mapping[str, str], body: bytes, *, seconds: float) -> Reply:
    """Post a body, and return the answer, which has to be there in that time. Raises `NoConnection`, `NoAnswer`."""
    reader, writer = await _connected(address)
    answering = asyncio.create_task(_reply(reader))  # it may come, and the connection end, before all is sent
    try:
        async with asyncio.timeout(seconds):
            writer.write(_head(address, path, headers, len(body)))
            writer.write(body)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            return await answering
    except TimeoutError:
        raise NoAnswer(f"no answer within {format_duration(seconds)}") from None
    except (OSError, EOFError, asyncio.LimitOverrunError, ValueError) as error:
        raise NoAnswer(_said(error)) from error
    finally:
        answering.cancel()
        writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CLOSING_SECONDS):
                await writer.wait_closed()


async def _connected(address: HttpAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    secure = ssl.create_default_context() if address.scheme == "https" else None
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(address.host, address.port, ssl=secure)
    except TimeoutError:
        raise NoConnection(f"no connection to {address} within {CONNECT_SECONDS:g} s") from None
    except (OSError, UnicodeError, ValueError) as error:  # TLS and name resolution too
        raise NoConnection(f"no connection to {address}: {_said(error)}") from error
    if (taken := writer.get_extra_info("socket")) is not None:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a delivery may last for an hour
    return reader, writer


def _said(error: BaseException) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _head(address: HttpAddress, path: str, headers: Mapping[str, str], length: int) -> bytes:
    lines = [f"POST {address.path}{path} HTTP/1.1", f"host: {address.authority}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += [f"content-length: {length}", "connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1")


async def _reply(reader: asyncio.StreamReader) -> Reply:
    while True:
        line = await _line(reader)
        if (found := _STATUS.fullmatch(line)) is None:
            raise ValueError("what answers does not speak HTTP/1.1")
        status, headers = int(found["status"]), await _headers(reader)
        if status >= 200:  # below, it only says that it is still there
            return Reply(status, headers, await _body(reader, status, headers))


async def _line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readuntil(b"\n")
    return line.rstrip(b"\r\n")


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    found: dict[str, str] = {}
    for _ in range(_MAX_HEADERS):
        if not (line := await _line(reader)):
            return found
        name, _, value = line.decode("latin-1").partition(":")
        found[name.strip().lower()] = value.strip()
    raise ValueError(f"the answer has more than {_MAX_HEADERS} headers")


async def _body(reader: asyncio.StreamReader, status: int, headers: Mapping[str, str]) -> bytes:
    if status in (204, 304):
        return b""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return await _chunked(reader)
    if (length := headers.get("content-length")) is not None:
        if not (length.isascii() and length.isdigit()) or int(length[:18]) > MAX_ANSWER:
            raise ValueError(f"the answer has a content-length of {length:.30}")
        return await reader.readexactly(int(length))
    body = await reader.read(MAX_ANSWER + 1)
    while len(body) <= MAX_ANSWER and (more := await reader.read(MAX_ANSWER)):
        body += more
    return _within_limit(body)


async def _chunked(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        size = (await _line(reader)).partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9A-Fa-f]{1,8}", size):
            raise ValueError("a chunk of the answer has no length")
        if not (length := int(size, 16)):
            await _headers(reader)  # what follows the last chunk
            return body
        if len(body) + length > MAX_ANSWER:
            _within_limit(b" " * (MAX_ANSWER + 1))
        body += await reader.readexactly(length)
        if await _line(reader):
            raise ValueError("a chunk of the answer is longer than it says")


def _within_limit(body: bytes) -> bytes:
    if len(body) > MAX_ANSWER:
        raise ValueError(f"the answer has more than {MAX_ANSWER:,} bytes")
    return body
