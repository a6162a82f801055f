"""holdfast monitor: serves the API on loopback, refuses to be open to others, and stops when it is told to."""

from __future__ import annotations

import json
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.patience import patient

if TYPE_CHECKING:
    from tests.cli.processes import Process

    from conftest import Command

Start = Callable[..., "Process"]
TOKEN = "a-token-of-the-tests-0123456789"


def got(url: str, **headers: str) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=patient(30)) as answer:
        return json.loads(answer.read())


def api_of(monitor: Process) -> str:
    return monitor.says("the HTTP API is at ").split()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_on_loopback_until_a_signal(shop: Path, holdfast: Command, start: Start, number: int) -> None:
    id = holdfast("submit", "add", "1", "--app", "shop:app").out.strip()
    monitor = start("monitor", "shop:app", "--port", "0")
    api = api_of(monitor)
    assert api.startswith("http://127.0.0.1:")
    assert got(f"{api}/invocations/{id}")["arguments"] == {"args": [1], "kwargs": {}}
    assert got(f"{api}/invocations")["invocations"][0]["id"] == id
    with pytest.raises(urllib.error.HTTPError, match="403"):
        got(f"{api}/invocations", Host="evil.example")
    monitor.signal(number)
    answer = monitor.ends()
    assert answer.code == 0, answer.err
    assert "serving http://127.0.0.1:" in answer.err


@pytest.mark.slow
def test_it_serves_a_store_without_code(shop: Path, holdfast: Command, start: Start) -> None:
    id = holdfast("submit", "add", "1", "--app", "shop:app").out.strip()
    (shop / "shop.py").write_text("raise SystemExit('not imported')")
    monitor = start("monitor", "--url", f"sqlite:///{shop}/shop.db", "--port", "0", "--json")
    monitor.says("}")
    api = json.loads("".join(monitor.out))["api"]
    assert got(f"{api}/invocations/{id}/why")["reasons"] == ["no_runner"]


def test_another_address_without_a_token_is_refused(
    shop: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast("store", "prepare", "--app", "shop:app")
    for host in ("0.0.0.0", "::", "192.0.2.1", "shop.example"):
        answer = holdfast("monitor", "shop:app", "--host", host, "--port", "0")
        assert answer.code == 1
        assert "neither a token nor a proxy with a login" in answer.err
        assert "holdfast access token create" in answer.err


@pytest.mark.slow
def test_another_address_with_a_token_is_served(shop: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_API_TOKEN", TOKEN)
    start("store", "prepare", "--app", "shop:app").ends()
    monitor = start("monitor", "shop:app", "--host", "0.0.0.0", "--port", "0", "--log-level", "debug")
    api = api_of(monitor).replace("0.0.0.0", "127.0.0.1")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        got(f"{api}/invocations")
    assert got(f"{api}/invocations", Authorization=f"Bearer {TOKEN}", Host="any.example") == {
        "invocations": [],
        "before": None,
    }
    pause = urllib.request.Request(
        f"{api}/queues/default/pause",
        data=b"{}",
        headers={
            "Authorization": f"Bearer {TOKEN}",
            "Content-Type": "application/json",
            "X-Forwarded-For": "203.0.113.9",
        },
    )
    urllib.request.urlopen(pause, timeout=patient(30)).close()
    (record,) = got(f"{api}/audit", Authorization=f"Bearer {TOKEN}")["records"]
    assert record["source"] == "127.0.0.1", "no proxy is named, so no header is believed"
    monitor.signal(signal.SIGTERM)
    answer = monitor.ends()
    assert answer.code == 0
    assert TOKEN not in answer.out + answer.err
    assert "answered GET /api/v1/invocations: 200" in answer.err


def test_a_port_that_is_taken_is_said(shop: Path, holdfast: Command) -> None:
    holdfast("store", "prepare", "--app", "shop:app")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        answer = holdfast("monitor", "shop:app", "--port", taken.getsockname()[1])
    assert answer.code == 1
    assert "another program uses that port" in answer.err


def test_a_store_that_is_missing_is_said(shop: Path, holdfast: Command) -> None:
    answer = holdfast("monitor", "shop:app", "--port", 0)
    assert (answer.code, (shop / "shop.db").exists()) == (1, False)
    assert "there is no store" in answer.err
    assert holdfast("monitor", "shop:app", "--app", "other:app").code == 2


def test_a_missing_extra_is_named(shop: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith(("holdfast.web.serving", "holdfast.web.asgi"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    answer = holdfast("monitor", "shop:app")
    assert answer.code == 1
    assert "pip install 'holdfast[monitor]'" in answer.err
