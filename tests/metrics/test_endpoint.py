"""Who may read `/metrics`, what health says and to whom, and what is loaded when all is off."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.metrics.promql import scraped

from holdfast import App
from holdfast.errors import ConfigurationError, StoreUnavailable
from holdfast.settings import Settings
from holdfast.web.asgi import WebApp
from holdfast.web.health import LIVE, METRICS, READY, refuse_scrape
from holdfast.web.runner_http import MOST_CONNECTIONS, RunnerHttp, address_of

TOKEN = "a-token-for-the-scrapes"
MakeApp = Callable[..., App]


@pytest.fixture
def make_app() -> Iterator[MakeApp]:
    made: list[App] = []

    def make(**settings: object) -> App:
        made.append(App("memory://", **settings))
        return made[-1]

    yield make
    for app in made:
        app.close()


# --- who may read it


@pytest.mark.parametrize(
    ("headers", "token", "is_local", "status"),
    [
        ({"authorization": f"Bearer {TOKEN}"}, TOKEN, False, None),
        ({"authorization": f"bearer  {TOKEN} "}, TOKEN, True, None),
        ({"authorization": f"Bearer {TOKEN}x"}, TOKEN, True, 401),
        ({"authorization": f"Basic {TOKEN}"}, TOKEN, True, 401),
        ({"host": "127.0.0.1"}, TOKEN, True, 401),
        ({"host": "127.0.0.1:9000"}, "", True, None),
        ({"host": "localhost"}, "", True, None),
        ({"host": "rebound.example"}, "", True, 403),
        ({}, "", True, 403),
        ({"host": "127.0.0.1"}, "", False, 403),
    ],
)
def test_who_may_scrape(headers: dict[str, str], token: str, is_local: bool, status: int | None) -> None:
    refusal = refuse_scrape(headers, token=token, is_local=is_local)
    assert (None if refusal is None else refusal.status) == status


def test_the_web_app_answers_with_the_token_only(make_app: MakeApp) -> None:
    with TestClient(WebApp(make_app(metrics=True, metrics_token=TOKEN, api_token="another-token-here"))) as client:
        assert client.get(METRICS).status_code == 401
        assert client.get(METRICS, headers={"Authorization": "Bearer another-token-here"}).status_code == 401
        answer = client.get(METRICS, headers={"Authorization": f"Bearer {TOKEN}"})
        assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert scraped(answer.text, 0.0).samples["holdfast_store_up"]
        assert client.post(METRICS).status_code == 405


def test_metrics_that_are_off_are_not_there(make_app: MakeApp) -> None:
    with TestClient(WebApp(make_app(metrics_token=TOKEN), is_local=True)) as client:
        assert client.get(METRICS, headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 404


def test_a_mounted_app_without_a_token_refuses(make_app: MakeApp) -> None:
    with TestClient(WebApp(make_app(metrics=True)), base_url="http://127.0.0.1") as client:
        assert client.get(METRICS).status_code == 403
    with TestClient(WebApp(make_app(metrics=True), is_local=True), base_url="http://127.0.0.1") as client:
        assert client.get(METRICS).status_code == 200


def test_a_runner_that_others_reach_needs_a_token(make_app: MakeApp) -> None:
    open_app, closed = make_app(metrics=True), make_app(metrics=True, metrics_token=TOKEN)
    with pytest.raises(ConfigurationError, match="metrics_token is empty"):
        RunnerHttp(open_app.runtime, open_app.runner(), "0.0.0.0", 0)
    for app in (closed, make_app()):  # without metrics, there is only health
        with RunnerHttp(app.runtime, app.runner(), "0.0.0.0", 0):
            pass


@pytest.mark.parametrize("text", ["9000", "127.0.0.1", "a b:9000", "127.0.0.1:http", "http://127.0.0.1:9000"])
def test_an_address_is_a_host_and_a_port(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"such as 127\.0\.0\.1:9000"):
        address_of(Settings(runner_http=text))


def test_addresses() -> None:
    assert address_of(Settings()) is None
    assert address_of(Settings(runner_http="127.0.0.1:9000")) == ("127.0.0.1", 9000)
    assert address_of(Settings(runner_http="[::1]:0")) == ("::1", 0)


# --- health


def asked(address: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_runner_is_ready_while_it_is_heard(make_app: MakeApp) -> None:
    app = make_app(metrics_token=TOKEN)
    runner = app.runner()
    with RunnerHttp(app.runtime, runner, "127.0.0.1", 0) as server:
        assert asked(server.address + LIVE) == (200, "ok\n")
        assert asked(server.address + READY) == (503, "no\n")
        with runner:
            assert asked(f"{server.address}{READY}?x=1") == (200, "ok\n")
            assert asked(server.address + METRICS)[0] == 404
            assert asked(server.address + "/api/v1")[0] == 404
        assert asked(server.address + READY) == (503, "no\n")


def test_strangers_do_not_learn_what_the_store_says(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error may have names of hosts and users."""
    app = make_app(metrics_token=TOKEN)
    runner = app.runner()
    monkeypatch.setattr(type(runner), "why_disconnected", "db7.internal: no user 'ann'")
    for host, headers, tells in [
        ("127.0.0.1", {}, True),
        ("127.0.0.1", {"Host": "rebound.example"}, False),
        ("0.0.0.0", {}, False),
        ("0.0.0.0", {"Authorization": f"Bearer {TOKEN}x"}, False),
        ("0.0.0.0", {"Authorization": f"Bearer {TOKEN}"}, True),
    ]:
        with RunnerHttp(app.runtime, runner, host, 0) as server:
            status, said = asked(server.address.replace("0.0.0.0", "127.0.0.1") + "/health", **headers)
        assert status == 503
        assert "the store does not answer the heartbeats of this runner" in said
        assert ("db7.internal" in said) is tells, (host, headers)


def test_a_runner_answers_head_as_get(make_app: MakeApp) -> None:
    app = make_app()
    with RunnerHttp(app.runtime, app.runner(), "127.0.0.1", 0) as server:
        for path in (LIVE, READY, METRICS, "/health", "/nothing"):
            status, said = asked(server.address + path)
            connection = http.client.HTTPConnection(server.address.removeprefix("http://"), timeout=30)
            connection.request("HEAD", path)
            answer = connection.getresponse()
            assert (answer.status, answer.headers["Content-Length"]) == (status, str(len(said))), path
            assert answer.read() == b""
            connection.close()


def test_clients_that_wait_do_not_take_all_threads(make_app: MakeApp) -> None:
    app = make_app()
    before = threading.active_count()
    with RunnerHttp(app.runtime, app.runner(), "127.0.0.1", 0) as server, contextlib.ExitStack() as opened:
        host, _, port = server.address.removeprefix("http://").rpartition(":")
        silent = [opened.enter_context(socket.create_connection((host, int(port)), 30)) for _ in range(40)]
        assert asked(server.address + LIVE) == (200, "ok\n"), "a probe gets its answer, with all places taken"
        assert threading.active_count() - before <= MOST_CONNECTIONS + 4  # and those of server and engine
        assert silent[0].recv(1) == b"", "the oldest one was cut"


def test_the_web_app_is_ready_while_the_store_answers(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(api_token="a-token-of-the-api-")
    looks: list[str] = []
    engine = app.runtime.ready()

    async def away(name: str) -> object:
        looks.append(name)
        raise StoreUnavailable("mongodb://user:secret@host is away")

    with TestClient(WebApp(app)) as client:
        assert [client.get(path).text for path in (LIVE, READY)] == ["ok\n", "ok\n"]
        monkeypatch.setattr(engine.store, "roster", away)
    with TestClient(WebApp(app)) as client:
        assert (client.get(READY).status_code, client.get(READY).text) == (503, "no\n")
        assert len(looks) == 2 or len(looks) == 1, "the store is not asked for each request"
        assert client.get(LIVE).text == "ok\n"


def test_a_loop_that_hangs_is_not_live(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app()
    monkeypatch.setattr("holdfast.web.health.SECONDS", 0.05)

    async def hangs(work: object) -> object:
        work.close()  # type: ignore[attr-defined]
        return await asyncio.Event().wait()

    monkeypatch.setattr(app.runtime, "arun", hangs)
    with TestClient(WebApp(app)) as client:
        assert client.get(LIVE).status_code == 503


# --- off

_PROGRAM = """
import sys
from holdfast import App
from holdfast.telemetry.events import ChangesWritten
app = App("memory://"{settings})
@app.task
def add(a): return a
@app.step
def one(a): return a
@app.workflow
def flow(a): return one(a)
with app.runner():
    assert add.submit(1).result() == flow.submit(1).result() == 1
engine = app.runtime.ready()
print(sorted(name for name in ("prometheus_client", "opentelemetry") if name in sys.modules))
wants = engine.telemetry.wants(ChangesWritten)
print(engine.measures is None, engine.tracer is None, "claim" in vars(engine.store), wants)
"""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("", "[]\nTrue True False False\n"),
        (", metrics=True", "[]\nFalse True True True\n"),  # only who answers /metrics needs the library
        (", tracing=True", "['opentelemetry']\nTrue False False False\n"),
    ],
)
def test_nothing_is_loaded_that_is_off(settings: str, said: str, tmp_path: Path) -> None:
    program = _PROGRAM.replace("{settings}", settings)
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == said


@pytest.mark.parametrize(("settings", "extra"), [({"tracing": True}, "otel"), ({"metrics": True}, "metrics")])
def test_a_missing_library_is_named(
    settings: dict[str, object], extra: str, monkeypatch: pytest.MonkeyPatch, make_app: MakeApp
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry" if extra == "otel" else "prometheus_client", None)
    with pytest.raises(ConfigurationError, match=rf"pip install 'holdfast\[{extra}\]'"):
        app = make_app(**settings)
        RunnerHttp(app.runtime, app.runner(), "127.0.0.1", 0)
