"""Clients: who shares one, when it is closed, what the URL says, and what never leaves it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import AutoReconnect
from tests.store.mongo.tools import Events, database_of, make_store, opened, play, with_options
from tests.support.mongod import Mongod, fresh_database, with_database
from tests.support.patience import patient

from holdfast import App
from holdfast.errors import ConfigurationError, HoldfastError, StoreReadOnly, StoreUnauthorised, StoreUnavailable
from holdfast.model.status import Status
from holdfast.store.mongo import connection
from holdfast.store.mongo.connection import database_name, hosts_of
from holdfast.store.mongo.store import MongoStore
from holdfast.testing.samples import invocation, owned, wish

pytestmark = [
    pytest.mark.xdist_group("mongo"),
    pytest.mark.usefixtures("hasty_driver"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]

HASTILY = {"serverSelectionTimeoutMS": 100, "connectTimeoutMS": 100, "serverMonitoringMode": "poll"}
CANARY = "c4n4ry-p4ssw0rd"
HASTY = "serverMonitoringMode=poll&serverSelectionTimeoutMS=100&connectTimeoutMS=100"


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    assert connection._clients == {}


@pytest.fixture(scope="module", autouse=True)
def untidy_driver() -> Iterator[None]:
    """The driver forgets a socket if it is closed while it connects. It shall be found here, not in another test."""
    yield
    gc.collect()


def dead_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# --- sharing


def test_stores_of_one_url_and_loop_share_a_client(mongo_url: str) -> None:
    async def run() -> None:
        async with opened(mongo_url) as first:
            async with opened(mongo_url) as second, opened(with_options(mongo_url, maxPoolSize=7)) as other:
                assert len(connection._clients) == 2
                assert first._database is not None
                assert second._database is not None
                assert other._database is not None
                assert first._database.client is second._database.client is not other._database.client
                assert first._database.client.options.pool_options.max_pool_size == 100
                assert other._database.client.options.pool_options.max_pool_size == 7
            assert len(connection._clients) == 1
            await first.counts("shop")  # not closed with the second
        assert connection._clients == {}

    asyncio.run(run())


def test_apps_of_a_process_share_a_client(mongo_url: str) -> None:
    with App(mongo_url, name="shop") as shop:
        with App(mongo_url, name="bank") as bank:
            assert shop.invocations() == bank.invocations() == []
            (shared,) = connection._clients.values()
            assert shared.users == 2
        assert shop.invocations() == []
        assert connection._clients
    assert connection._clients == {}


@pytest.mark.parametrize("how", ["close", "forget"])
def test_the_client_outlives_the_app_that_used_it_first(
    mongo_url: str, client: MongoClient[dict[str, Any]], how: str
) -> None:
    """Its monitors and the change stream began on behalf of that app, and go on for the others."""
    first = App(mongo_url, name="first")
    first.task(name="work")(abs).submit(-1)
    with App(mongo_url, name="second", poll_interval_seconds=20) as second:
        work = second.task(name="work")(abs)
        with second.runner():
            with first.runner():
                assert work.submit(-1).result(timeout=patient(20)) == 1
            if how == "close":
                first.close()
            else:
                thread = threading.Thread(target=first.runtime._handle.close)  # type: ignore[union-attr]
                thread.start()
                thread.join()
            stream = second.runtime.ready().store.hints()._stream  # type: ignore[attr-defined,union-attr]
            assert not stream._task.done()
            with contextlib.suppress(AutoReconnect):
                client.admin.command("replSetStepDown", 1, force=True)
            assert work.submit(-2).result(timeout=patient(25)) == 2
            assert not stream._task.done()


def test_each_loop_has_its_own(mongo_url: str) -> None:
    async def run() -> None:
        async with opened(mongo_url):
            await asyncio.to_thread(app.invocations)
            assert len({(shared.loop, shared.client) for shared in connection._clients.values()}) == 2

    with App(mongo_url) as app:
        asyncio.run(run())


def test_closing_twice_and_opening_again(mongo_url: str) -> None:
    async def scenario(store: MongoStore) -> None:
        await store.open()
        await store.close()
        await store.close()
        with pytest.raises(StoreUnavailable, match="not open"):
            await store.counts("shop")
        await store.open()
        await store.counts("shop")

    play(mongo_url, scenario)


def test_an_app_closes_its_client(mongo_url: str) -> None:
    with App(mongo_url) as app:
        assert app.invocations() == []
        assert len(connection._clients) == 1
    assert connection._clients == {}


def test_making_a_store_or_an_app_connects_to_nothing() -> None:
    url = f"mongodb://127.0.0.1:{dead_port()}/x"
    app = App(url)
    make_store(url)
    assert repr(app)
    assert connection._clients == {}


FORKING = """
import os, sys
from holdfast import App
from holdfast.store.mongo import connection

app = App(sys.argv[1], name="shop")
task = app.task(name="work")(abs)
task.submit(-1)
child = os.fork()
if child == 0:
    task.submit(-2)
    assert {pid for _, _, pid in connection._clients} == {os.getppid(), os.getpid()}
    app.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
task.submit(-3)
app.close()
"""


# A connection that the parent's driver was just letting go of is let go of in the child as well, without being closed.
_STRICT = ("-W", "error", "-W", "ignore::ResourceWarning")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_makes_its_own(mongo_url: str) -> None:
    done = subprocess.run(
        [sys.executable, *_STRICT, "-c", FORKING, mongo_url], capture_output=True, timeout=patient(30)
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")
    with App(mongo_url, name="shop") as app:
        assert len(app.invocations()) == 3


# --- the URL


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("mongodb://h", "holdfast"),
        ("mongodb://h/", "holdfast"),
        ("mongodb://h/?replicaSet=rs0", "holdfast"),
        ("mongodb://h/shop", "shop"),
        ("mongodb://u:p@h:1,i:2/shop?authSource=admin", "shop"),
        ("mongodb+srv://cluster.example.com", "holdfast"),
        ("mongodb+srv://cluster.example.com/", "holdfast"),
        ("mongodb+srv://u:p@cluster.example.com/?retryWrites=true", "holdfast"),
        ("mongodb+srv://u:p@cluster.example.com/shop?tls=true", "shop"),
        ("mongodb+srv://u:p@cluster.example.com/my%2Dshop", "my-shop"),
        ("mongodb+srv://cluster.example.com?tlsCAFile=/etc/ca.pem", "holdfast"),
        ("mongodb://h/shop.invocations", "shop"),
    ],
)
def test_the_url_names_the_database(url: str, name: str) -> None:
    assert database_name(url) == name


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("mongodb://u:p@h:1,i:2/shop?authSource=admin", "h:1,i:2"),
        ("mongodb://h", "h"),
        ("mongodb+srv://u:p@c.example.com/?x=1", "c.example.com"),
        (f"mongodb://h/db?authMechanismProperties=AWS_SESSION_TOKEN:a@{CANARY}", "h"),
    ],
)
def test_messages_name_the_hosts_and_nothing_else(url: str, hosts: str) -> None:
    assert hosts_of(url) == hosts


def test_the_default_database_is_used(replica_set: str, client: MongoClient[dict[str, Any]]) -> None:
    if "holdfast" in client.list_database_names():
        pytest.skip("the server has a database 'holdfast' that is not ours")
    scheme, _, rest = replica_set.partition("://")
    place, _, query = rest.partition("?")
    url = f"{scheme}://{place.partition('/')[0]}/?{query}"
    try:
        play(url, lambda store: store.insert([invocation("a")]))
        assert client.holdfast.holdfast_invocations.count_documents({}) == 1
    finally:
        client.drop_database("holdfast")


@pytest.mark.parametrize("options", ["readPreference=secondary", "readConcernLevel=linearizable", "w=1&journal=false"])
def test_what_is_right_does_not_depend_on_the_url(mongo_url: str, options: str) -> None:
    """A secondary that lags behind would not show a claim what it just took; a weak write could be rolled back."""

    async def scenario(store: MongoStore) -> None:
        assert (await owned(store)).status is Status.RUNNING
        await store.insert([invocation(id) for id in "bcd"])
        assert len((await store.claim(wish("more"))).records) == 3
        assert await store.counts("shop") == {Status.RUNNING: 4}
        assert store._database is not None
        assert store._database.write_concern.document == {"w": "majority", "j": True}

    play(f"{mongo_url}&{options}", scenario, use_change_streams=False)


def test_two_apps_share_a_database_without_seeing_each_other(mongo_url: str) -> None:
    def echoed(number: int) -> int:
        return number

    with App(mongo_url, name="shop") as shop, App(mongo_url, name="mail") as mail:
        mine, theirs = shop.task(name="echo")(echoed), mail.task(name="echo")(echoed)
        theirs.submit(2)
        with shop.runner():
            assert mine.submit(1).result(timeout=patient(10)) == 1
            assert [record.status for record in mail.invocations()] == [Status.REGISTERED]
            assert mail.runners() == []
        assert len(shop.invocations()) == 1


# --- failures


@pytest.mark.slow
def test_a_failed_first_connection_is_not_remembered(tmp_path: Path) -> None:
    server = Mongod(tmp_path / "late")
    url = with_options(server.url("late"), **HASTILY)
    events = Events()

    async def run() -> None:
        store = make_store(url, events, max_retries=1)
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="Is it running"):
            await store.open()
        assert time.monotonic() - began < 2
        assert connection._clients == {}
        await asyncio.to_thread(server.start)
        await store.open()
        assert await store.counts("shop") == {}
        await store.close()

    try:
        asyncio.run(run())
    finally:
        server.stop()
    assert len(events.named("gave_up")) == 1


@pytest.mark.slow
def test_a_server_that_comes_up_meanwhile_is_found(tmp_path: Path) -> None:
    server = Mongod(tmp_path / "late")
    url = with_options(server.url("late"), **HASTILY)
    starting = threading.Thread(target=server.start)
    events = Events()

    async def run() -> None:
        async with opened(url, events, retry_indefinitely=True) as store:
            assert await store.counts("shop") == {}

    try:
        starting.start()
        asyncio.run(run())
    finally:
        starting.join()
        server.stop()
    assert events.named("retry")


@pytest.mark.slow
def test_the_app_recovers_after_a_failed_start_as_well(tmp_path: Path) -> None:
    server = Mongod(tmp_path / "late")
    url = with_options(server.url("late"), **HASTILY)
    with App(url, max_retries=0) as app:
        try:
            with pytest.raises(StoreUnavailable):
                app.invocations()
            server.start()
            assert app.invocations() == []
        finally:
            app.close()
            server.stop()


# --- secrets


def everything_said(error: BaseException | None) -> str:
    """An exception with its notes, causes and what they carry."""
    said = []
    while error is not None:
        said += [repr(error), str(error), repr(error.args)]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(said)


@pytest.mark.parametrize(
    "url",
    [
        f"mongodb://user:{CANARY}@127.0.0.1:PORT/db?{HASTY}",
        f"mongodb://user:{CANARY}%40x@127.0.0.1:PORT/db?{HASTY}&authMechanism=SCRAM-SHA-256",
        f"mongodb://user:{CANARY}@127.0.0.1:PORT/db?{HASTY}&authMechanism=NONSENSE",
        f"mongodb://user:{CANARY}@127.0.0.1:port/db?{HASTY}",
        f"mongodb://user:{CANARY}/x@127.0.0.1:PORT/db?{HASTY}",
        f"mongodb://user:1/{CANARY}@127.0.0.1:PORT/db?{HASTY}",
        f"mongodb://user:x:{CANARY}@127.0.0.1:PORT/db?{HASTY}",
        f"mongodb://user:x@{CANARY}@127.0.0.1:PORT/db?{HASTY}",
        f"mongodb://user:x%{CANARY}@127.0.0.1:PORT/db?{HASTY}",
        f"mongodb://127.0.0.1:PORT/db?{HASTY}&tls=true&tlsCertificateKeyFile=/none&tlsCertificateKeyFilePassword={CANARY}",
        f"mongodb://127.0.0.1:PORT/db?{HASTY}&authMechanismProperties=AWS_SESSION_TOKEN:{CANARY}",
        f"mongodb://u:p@127.0.0.1:PORT/db?{HASTY}&authMechanism=MONGODB-AWS&authMechanismProperties=AWS_SESSION_TOKEN:{CANARY}",
        f"mongodb://127.0.0.1:PORT/db?{HASTY}&authMechanismProperties={CANARY}:x",
        f"mongodb://127.0.0.1:PORT/db?{HASTY}&authMechanismProperties=SERVICE_NAME:x,{CANARY}",
        f"mongodb://127.0.0.1:PORT/db?{HASTY}&tlsCertificateKeyFilePassword=a&{CANARY}=b",
        f"mongodb://user:12?{CANARY}@127.0.0.1:PORT/db",
        f"mongodb://user:12?{CANARY}=x@127.0.0.1:PORT/db",
        f"mongodb://user:12?appName={CANARY}&a=b@127.0.0.1:PORT/db",
        f"mongodb://user:12?readPreference={CANARY}@127.0.0.1:PORT/db",
        f"mongodb://user%3A{CANARY}%40127.0.0.1:PORT/db?{HASTY}",
        f"mongodb://user:{CANARY}%40127.0.0.1:PORT/db?{HASTY}",
        f"mongodb:///user:{CANARY}@127.0.0.1:PORT/db?{HASTY}",
        f"mongodb:/user:{CANARY}@127.0.0.1:PORT/db?{HASTY}",
        f"mongodb//user:{CANARY}@127.0.0.1:PORT/db?{HASTY}",
        f"mongodb+srv://user:{CANARY}@127.0.0.1:PORT/db?{HASTY}",
    ],
)
def test_a_password_stays_in_the_url(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    app = App(url.replace("PORT", str(dead_port())), max_retries=1, retry_base_delay=0.001)
    with app, pytest.raises(HoldfastError) as caught:
        app.invocations()
    said = [everything_said(caught.value), caplog.text, repr(app), repr(app.settings)]
    said += [repr(row) for row in app.settings.explain()]
    assert CANARY not in "\n".join(said)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    password=st.one_of(
        st.text(max_size=20),
        st.text("@/?#:&=;%,. []'\"\\+-!x1", max_size=20),
        st.lists(st.sampled_from(["@h", "/", "?", "#", ":1", "://", "&", "?a=", "&w=1", "%40", "12?w=", " "])).map(
            "".join
        ),
    ),
    in_option=st.booleans(),
)
def test_no_part_of_a_random_password_is_told(caplog: pytest.LogCaptureFixture, password: str, in_option: bool) -> None:
    """Marked at both ends, so that half of it is found as well."""
    secret, port = f"{CANARY}{password}{CANARY}", dead_port()
    hastily = "serverMonitoringMode=poll&serverSelectionTimeoutMS=1&connectTimeoutMS=1"
    if in_option:
        url = f"mongodb://127.0.0.1:{port}/db?{hastily}&authMechanismProperties={secret}"
    else:
        url = f"mongodb://user:{secret}@127.0.0.1:{port}/db?{hastily}"
    caplog.clear()
    with caplog.at_level(logging.DEBUG), App(url, max_retries=0) as app, pytest.raises(HoldfastError) as caught:
        app.invocations()
    assert CANARY not in "\n".join([everything_said(caught.value), caplog.text, repr(app), repr(app.settings)])


# --- options


@pytest.mark.parametrize(
    "url",
    [
        *("mongodb://", "mongodb://h:port", "mongodb://h/a b.c$", "mongodb://h/?tls=true&tlsCAFile=/none"),
        *("mongodb://h/?w", "mongodb://h/?w=1&&tls=true", "mongodb://h/?w=1;tls=true&ssl=true", "mongodb://%41"),
    ],
)
def test_a_url_that_cannot_be_used_is_a_configuration_error(url: str) -> None:
    with App(url) as app, pytest.raises(ConfigurationError, match="this MongoDB URL cannot be used: "):
        app.invocations()


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("replicaSett=rs0", "there is no option replicaSett. Did you mean replicaSet?"),
        ("tsl=true", "there is no option tsl. Did you mean tls?"),
        ("colour=blue", "there is no option colour. There are appname, authMechanism, authMechanismProperties, "),
        ("proxyHost=p", "there is no option proxyHost. "),  # the driver would go on without the proxy
        (
            "maxPoolSize=many",
            "the option maxPoolSize does not take this value: The value of maxPoolSize must be an int",
        ),
        ("retryWrites=yes", "the option retryWrites does not take this value: The value of retryWrites must be 'true'"),
        ("socketTimeoutMS=-1", "the option socketTimeoutMS does not take this value: socketTimeoutMS must be greater"),
        ("readPreference=second", "the option readPreference does not take this value: second is not a valid read"),
        ("authMechanism=NONSENSE", "the option authMechanism does not take this value: authMechanism must be in ("),
        ("tls=true&tlsCAFile=/none", "the option tlsCAFile does not take this value: No such file or directory: /none"),
        ("compressors=zip", "the option compressors does not take this value: Unsupported compressor: zip"),
        ("datetime_conversion=x", "the option datetime_conversion does not take this value: "),
        ("authMechanismProperties=x", "the value of authMechanismProperties is not allowed; it is written NAME:value"),
        ("w=1&W=2", "the option W is given twice"),
        ("tls=true&tlsInsecure=true&tlsAllowInvalidCertificates=true", "cannot be specified simultaneously"),
        ("w=1=2", "options are written name=value, with '&' between them"),
    ],
)
@pytest.mark.parametrize("scheme", ["mongodb", "mongodb+srv"])
def test_an_option_that_the_driver_would_leave_out_is_refused(scheme: str, query: str, said: str) -> None:
    """It warns, at most, and a program that ignores warnings would run without the option."""
    with App(f"{scheme}://me:{CANARY}@h.example.com/db?{query}") as app:
        for _ in range(2):
            with pytest.raises(ConfigurationError) as caught:
                app.invocations()
            assert str(caught.value).startswith("this MongoDB URL cannot be used: ")
            assert said in str(caught.value)
            assert CANARY not in everything_said(caught.value)


def test_options_that_the_driver_takes_are_taken(mongo_url: str) -> None:
    tags = "readPreference=nearest&readPreferenceTags=dc:ny&readPreferenceTags="
    more = "maxPoolSize=7&appName=@shop@&COMPRESSORS=zlib&w=1&ssl=false"
    play(f"{mongo_url}&{tags}&{more}", lambda store: store.counts("shop"))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mongod]:
    """A server that asks for a password, with a user who may only read."""
    server = Mongod(tmp_path_factory.mktemp("guarded") / "db", options=("--auth",))
    server.start()
    try:
        with server.client() as client:
            client.admin.command("createUser", "root", pwd=CANARY, roles=["root"])
        with MongoClient(f"mongodb://root:{CANARY}@{server.address}/?directConnection=true") as client:
            client.admin.command("createUser", "reader", pwd=CANARY, roles=["readAnyDatabase"])
        yield server
    finally:
        server.stop()


@pytest.mark.slow
def test_who_may_not_is_told_so(guarded: Mongod, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = guarded.address

    def fails(user: str, kind: type[StoreReadOnly], advice: str) -> str:
        url = f"mongodb://{user}{server}/shop?directConnection=true&authSource=admin"
        with App(url) as app, pytest.raises(StoreReadOnly, match=advice) as caught:
            app.task(name="x")(print).submit()
        assert type(caught.value) is kind
        return everything_said(caught.value)

    said = [
        fails(f"root:not-{CANARY}@", StoreUnauthorised, "Check the user and its password"),
        fails(f"nobody:{CANARY}@", StoreUnauthorised, "Check the user and its password"),
        fails("", StoreUnauthorised, "the URL has no user"),
        fails(f"reader:{CANARY}@", StoreReadOnly, "Check the user and its roles"),
        caplog.text,
    ]
    assert CANARY not in "\n".join(said)

    url = f"mongodb://root:{CANARY}@{server}/shop?directConnection=true&authSource=admin"
    play(url, lambda store: store.insert([invocation("a")]), use_change_streams=False)
    reader = f"mongodb://reader:{CANARY}@{server}/shop?directConnection=true&authSource=admin"
    with App(reader, name="shop") as app:
        assert len(app.invocations()) == 1, "a reader may look at what is there"
        findings = app.runtime.run(make_store(reader).check(deep=True))
        assert [finding.subject for finding in findings if not finding.ok] == []


@pytest.mark.slow
def test_a_wrong_password_is_wrong_once(guarded: Mongod) -> None:
    """However patient the settings are: it would be wrong the next time too."""
    events = Events()
    url = f"mongodb://root:not-{CANARY}@{guarded.address}/shop?directConnection=true&authSource=admin"
    with pytest.raises(StoreUnauthorised):
        play(url, lambda store: store.counts("shop"), events, retry_indefinitely=True)
    assert events.all == []


def test_nothing_that_is_stored_knows_the_url(mongo_url: str, raw: Database[dict[str, Any]]) -> None:
    marked = with_options(mongo_url, appname=CANARY)
    with App(marked) as app:
        echo = app.task(name="echo")(repr)
        with app.runner():
            echo.submit(1).result(timeout=patient(10))
            stored = [repr(document) for name in raw.list_collection_names() for document in raw[name].find()]
    assert stored
    assert CANARY not in "\n".join(stored)


def test_database_helpers_agree(replica_set: str) -> None:
    with fresh_database(replica_set) as url:
        assert database_name(url) == database_of(url)
        assert database_name(with_database(url, "other")) == "other"
