"""The HTTP client of deliveries against servers of every kind: what it takes for an answer, and what for none."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

import pytest

from holdfast.world.http_client import NoAnswer, NoConnection, Reply, address_of, is_header, post

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def posted(serve: Serve, *, seconds: float = 10, body: bytes = b"{}") -> Reply:
    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                await serve(reader, writer)
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(served, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        return await post(address_of(f"http://127.0.0.1:{port}/app"), "/x", {"x-a": "b"}, body, seconds=seconds)
    finally:
        server.close()
        await asyncio.sleep(0)  # the server's side sees its end


def saying(answer: bytes, got: list[bytes] | None = None) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if got is not None:
            got.append(head + await reader.readexactly(2))
        writer.write(answer)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    return serve


def reply_to(answer: bytes) -> Reply:
    return asyncio.run(posted(saying(answer)))


def test_the_request_is_plain_http() -> None:
    got: list[bytes] = []
    asyncio.run(posted(saying(b"HTTP/1.1 204 No Content\r\n\r\n", got)))
    head, _, body = got[0].partition(b"\r\n\r\n")
    line, *headers = head.decode().split("\r\n")
    assert (line, body) == ("POST /app/x HTTP/1.1", b"{}")
    assert headers[0].startswith("host: 127.0.0.1:")
    assert headers[1:] == ["x-a: b", "content-length: 2", "connection: close"]


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", 200, b"{}"),
        (b"HTTP/1.1 200\r\n\r\nuntil the end", 200, b"until the end"),
        (b"HTTP/1.0 500 Oh\nContent-Length:1\n\nx", 500, b"x"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 200, b""),
        (CHUNKED + b"3;a=b\r\nabc\r\nA\r\n0123456789\r\n0\r\nt: 1\r\n\r\n", 200, b"abc0123456789"),
        (b"HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\n", 204, b""),
    ],
)
def test_whole_answers(answer: bytes, status: int, body: bytes) -> None:
    reply = reply_to(answer)
    assert (reply.status, reply.body) == (status, body)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00\xff\r\n",
        b"SSH-2.0-x\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\nab",
        CHUNKED + b"xyz\r\n",
        CHUNKED + b"2\r\nabc\r\n",
        CHUNKED + b"ffffffff\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 300 + b"\r\n",
        b"HTTP/1.1 200 OK\r\na: " + b"b" * 100_000,
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (2**20 + 1),
    ],
)
def test_what_is_no_answer(answer: bytes) -> None:
    with pytest.raises(NoAnswer):
        reply_to(answer)


def test_an_application_that_hangs_is_given_up_in_time() -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    with pytest.raises(NoAnswer, match="no answer within 50ms"):
        asyncio.run(posted(hang, seconds=0.05))


def test_an_answer_counts_although_the_request_was_not_read() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(100_000)
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        await reader.readexactly(100_000)

    assert asyncio.run(posted(serve, body=b"x" * 5_000_000)).status == 413


def test_what_is_no_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}", "http://no-such-host.invalid", f"https://127.0.0.1:{port}"):
        with pytest.raises(NoConnection):
            asyncio.run(post(address_of(url), "/", {}, b"", seconds=5))


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://localhost", "http://localhost:80"),
        ("https://shop.example/app/", "https://shop.example:443/app"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("HTTP://Shop.Example:3000", "http://shop.example:3000"),
    ],
)
def test_addresses(url: str, address: str) -> None:
    assert str(address_of(url)) == address


@pytest.mark.parametrize(
    "url",
    [
        *("", "localhost", "//localhost", "http:/x", "file:///etc", "http://a b", "http://h:x", "http://h:99999"),
        *("http://h?q", "http://h#f", "http://u@h", "http://h/a b", "http://h/\r\nx: y", "http://h\\@i"),
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|base"):
        address_of(url)


def test_headers_cannot_be_smuggled() -> None:
    assert is_header("x-a", "b ü")
    assert not any(is_header(*each) for each in [("", "b"), ("a b", "c"), ("a", "b\r\nc: d"), ("a\n", "b"), ("a", "ą")])
