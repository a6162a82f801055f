"""The sockets of our servers."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
import uvicorn
from tests.support.patience import eventually, patient

from holdfast import App
from holdfast.web import serving
from holdfast.web.asgi import WebApp
from holdfast.web.serving import HEAD_SECONDS, MOST_WAITING, WaitingConnections, listening


def test_an_answer_in_two_writes_does_not_wait_for_an_acknowledgement() -> None:
    """Clients acknowledge after 40 ms. asyncio turns the wait off only for sockets that name their protocol."""
    with listening("127.0.0.1", 0, "a test") as taken, socket.create_connection(taken.getsockname()):
        accepted, _ = taken.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_connection_waits_for_a_request_for_a_bounded_time() -> None:
    waiting, done = WaitingConnections(), SimpleNamespace(response_complete=True)
    silent, kept, busy = (Connection(cycle) for cycle in (None, done, SimpleNamespace(response_complete=False)))
    assert waiting.late([silent, kept, busy], 100.0) == []
    kept.cycle = SimpleNamespace(response_complete=True)  # another request, between two looks
    assert waiting.late([silent, kept, busy], 99.0 + HEAD_SECONDS) == []
    assert waiting.late([silent, kept, busy], 100.0 + HEAD_SECONDS) == [silent]
    assert waiting.late([kept, busy], 100.0 + HEAD_SECONDS) == []
    assert waiting.late([kept, busy], 99.0 + 2 * HEAD_SECONDS) == [kept]


def test_of_too_many_connections_without_a_request_the_oldest_are_closed() -> None:
    waiting, old = WaitingConnections(), [Connection(None) for _ in range(MOST_WAITING)]
    assert waiting.late(old, 1.0) == []
    assert waiting.late([*old, Connection(None), Connection(None)], 2.0) == old[:2]


def test_a_client_that_still_reads_a_large_answer_is_not_cut_off() -> None:
    waiting, reads = WaitingConnections(), Connection(SimpleNamespace(response_complete=True))
    reads.unsent = 8 * 2**20  # all of it is handed to the transport, and the link is slow
    assert waiting.late([reads], 100.0) == waiting.late([reads], 100.0 + HEAD_SECONDS) == []
    reads.unsent = 0
    assert waiting.late([reads], 100.0 + HEAD_SECONDS) == []
    assert waiting.late([reads], 100.0 + 2 * HEAD_SECONDS) == [reads]


class Connection:
    def __init__(self, cycle: object) -> None:
        self.cycle, self.unsent = cycle, 0
        self.transport = SimpleNamespace(get_write_buffer_size=lambda: self.unsent)


def test_clients_that_send_half_a_head_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "HEAD_SECONDS", 0.0)
    with App("memory://") as app, listening("127.0.0.1", 0, "a test") as taken:
        web = WebApp(app, is_local=True)
        server = serving._Server(uvicorn.Config(web, lifespan="off", ws="none", log_config=None), web)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]})
        thread.start()
        try:
            eventually(lambda: server.started)
            with socket.create_connection(taken.getsockname(), timeout=patient(30)) as half:
                half.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A:")
                with suppress(ConnectionResetError):  # but no timeout
                    assert half.recv(1) == b""
        finally:
            server.should_exit = True
            thread.join()
