"""Names that lead nowhere: a name server that does not answer is waited for, one that says no is believed, and who has
the wrong name for a replica set is told the right one.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import Iterator
from typing import Self

import dns.asyncresolver
import dns.message
import dns.rcode
import pytest
from tests.store.mongo.tools import Events, address_of, make_store

from holdfast.errors import StoreUnavailable

pytestmark = [pytest.mark.xdist_group("mongo")]

URL = "mongodb+srv://user:secret@db.holdfast.test/shop?connectTimeoutMS=150&serverSelectionTimeoutMS=150"
_END = b"end"


class NameServer:
    """Answers each question with the next of these codes; None is silence. The last one goes on."""

    def __init__(self, *codes: dns.rcode.Rcode | None) -> None:
        self._codes = list(codes)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.port: int = self._socket.getsockname()[1]

    def _serve(self) -> None:
        while True:
            asked, who = self._socket.recvfrom(4096)
            if asked == _END:
                return
            code = self._codes.pop(0) if len(self._codes) > 1 else self._codes[0]
            if code is not None:
                answer = dns.message.make_response(dns.message.from_wire(asked))
                answer.set_rcode(code)
                self._socket.sendto(answer.to_wire(), who)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._codes = [None]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waker:
            waker.sendto(_END, ("127.0.0.1", self.port))
        self._thread.join(5)
        self._socket.close()


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> dns.asyncresolver.Resolver:
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers = ["127.0.0.1"]
    monkeypatch.setattr(dns.asyncresolver, "default_resolver", resolver)
    return resolver


def refused(url: str, events: Events) -> str:
    with pytest.raises(StoreUnavailable) as caught:
        asyncio.run(make_store(url, events, max_retries=2).open())
    assert "secret" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("code", [None, dns.rcode.SERVFAIL], ids=["silence", "no nameserver can tell"])
def test_a_name_server_that_is_away_is_asked_again(
    asking: dns.asyncresolver.Resolver, code: dns.rcode.Rcode | None
) -> None:
    events = Events()
    with NameServer(code) as server:
        asking.port = server.port
        assert "was tried 3 times" in refused(URL, events)
    assert len(events.named("retry")) == 2


def test_nobody_listens_where_the_name_server_should_be(asking: dns.asyncresolver.Resolver) -> None:
    events = Events()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        asking.port = probe.getsockname()[1]
    assert "was tried 3 times" in refused(URL, events)
    assert len(events.named("retry")) == 2


def test_a_name_that_does_not_exist_is_final(asking: dns.asyncresolver.Resolver) -> None:
    events = Events()
    with NameServer(dns.rcode.SERVFAIL, dns.rcode.NXDOMAIN) as server:
        asking.port = server.port
        assert "Check the host's name" in refused(URL, events)
    assert len(events.named("retry")) == 1, "the first answer was none"


def test_a_name_without_a_service_is_final(asking: dns.asyncresolver.Resolver) -> None:
    events = Events()
    with NameServer(dns.rcode.NOERROR) as server:
        asking.port = server.port
        assert "Check the host's name" in refused(URL, events)
    assert events.named("retry") == []


# --- of replica sets


@pytest.fixture
def leaky() -> Iterator[None]:
    """The driver forgets the connection by which it watched a server that it has dropped; here, and not in a later
    test, it is collected.
    """
    yield
    gc.collect()


@pytest.mark.usefixtures("leaky")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("more", ["", "&directConnection=true"])
def test_the_wrong_name_of_a_replica_set_is_told(mongo_url: str, more: str) -> None:
    url = f"mongodb://{address_of(mongo_url)}/shop?replicaSet=other&serverSelectionTimeoutMS=50{more}"
    with pytest.raises(StoreUnavailable, match=r"is called rs\w*, and the URL says replicaSet=other\.$"):
        asyncio.run(make_store(url, max_retries=1).open())


@pytest.mark.usefixtures("leaky")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning")
def test_a_standalone_is_no_replica_set(alone_url: str) -> None:
    url = f"mongodb://me:secret@{address_of(alone_url)}/shop?replicaSet=rs0&serverSelectionTimeoutMS=50"
    with pytest.raises(StoreUnavailable, match=r"belongs to no replica set: leave replicaSet=rs0 out") as caught:
        asyncio.run(make_store(url, max_retries=1).open())
    assert "secret" not in str(caught.value)
