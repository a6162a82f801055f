"""The sockets of our servers."""

from __future__ import annotations

import socket

from holdfast.web.serving import listening


def test_an_answer_in_two_writes_does_not_wait_for_an_acknowledgement() -> None:
    """Clients acknowledge after 40 ms. asyncio turns the wait off only for sockets that name their protocol."""
    with listening("127.0.0.1", 0, "a test") as taken, socket.create_connection(taken.getsockname()):
        accepted, _ = taken.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
