"""holdfast access token: made once, listed without secrets, revoked; and a monitor that others reach needs one."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.processes import Command, Process
from tests.support.patience import patient


@pytest.fixture
def store(shop: Path, holdfast: Command) -> Path:
    assert holdfast("store", "prepare", "--app", "shop:app").code == 0
    return shop


def test_a_token_is_printed_once(store: Path, holdfast: Command) -> None:
    made = holdfast("access", "token", "create", "ci", "--role", "operator", "--expires", "90d")
    token = made.out.strip()
    assert token.startswith("hf_")
    assert "the token of ci, operator, until " in made.err
    shown = holdfast("access", "token", "list")
    assert ("ci" in shown.out, "operator" in shown.out, "in 90d" in shown.out) == (True, True, True)
    everything = shown.out + holdfast("access", "token", "--json").out + holdfast("audit", "--json").out
    assert token not in everything
    assert token.split("_", 2)[2] not in everything  # which may have more of these signs in it
    assert token.encode() not in (store / "shop.db").read_bytes() + (store / "shop.db-wal").read_bytes()
    (found,) = holdfast("access", "token", "--json").json["tokens"]
    assert (found["name"], found["role"], found["expired"], found["used_at"]) == ("ci", "operator", False, None)
    assert "digest" not in found


def test_the_document_has_the_token(store: Path, holdfast: Command) -> None:
    made = holdfast("access", "token", "create", "ci", "--json").json
    assert (made["name"], made["role"], made["token"][:3]) == ("ci", "viewer", "hf_")


def test_a_token_is_revoked(store: Path, holdfast: Command) -> None:
    holdfast("access", "token", "create", "ci")
    assert holdfast("access", "token", "create", "ci").code == 2
    assert "is revoked; servers refuse it within 5 s" in holdfast("access", "token", "revoke", "ci").out
    assert "there is no token 'ci'" in holdfast("access", "token", "revoke", "ci").err
    assert "no tokens" in holdfast("access", "token").out


def test_the_last_token_leaves_the_monitor_closed_until_a_user_opens_it(store: Path, holdfast: Command) -> None:
    for name in ("ci", "ann"):
        holdfast("access", "token", "create", name)
    assert "last" not in holdfast("access", "token", "revoke", "ci").err
    refused = holdfast("access", "open")
    assert (refused.code, "there are tokens: ann" in refused.err) == (2, True)
    said = holdfast("access", "token", "revoke", "ann").err
    assert "it was the last one" in said
    assert "holdfast access token create" in said
    assert "holdfast access open" in said
    assert "programs of this machine are let in" in holdfast("access", "open").out
    assert holdfast("access", "open").code == 0, "safe to repeat"
    assert holdfast("audit", "--json", "--action", "access.open").json["records"][0]["outcome"] == "done"


def test_a_token_in_the_place_of_its_name_is_not_kept(store: Path, holdfast: Command) -> None:
    token = holdfast("access", "token", "create", "ci").out.strip()
    answer = holdfast("access", "token", "revoke", token)
    assert "there is no token 'hf_" in answer.err
    assert token[12:] not in answer.err + holdfast("audit", "--json").out


@pytest.mark.parametrize(
    "options", [("--role", "root"), ("--expires", "5s"), ("--expires", "11y"), ("--expires", "-1d")]
)
def test_a_wrong_token_is_refused(store: Path, holdfast: Command, options: tuple[str, str]) -> None:
    assert holdfast("access", "token", "create", "ci", *options).code == 2
    assert holdfast("access", "token", "--json").json["tokens"] == []


@pytest.mark.slow
def test_with_a_token_a_monitor_may_be_reached_by_others(
    store: Path, holdfast: Command, start: Callable[..., Process]
) -> None:
    token = holdfast("access", "token", "create", "ci").out.strip()
    monitor = start("monitor", "shop:app", "--host", "0.0.0.0", "--port", "0")
    api = monitor.says("the HTTP API is at ").split()[-1].replace("0.0.0.0", "127.0.0.1")

    def got(**headers: str) -> Any:
        request = urllib.request.Request(f"{api}/invocations", headers=headers)
        with urllib.request.urlopen(request, timeout=patient(30)) as answer:
            return json.loads(answer.read())

    with pytest.raises(urllib.error.HTTPError, match="401"):
        got()
    assert got(Authorization=f"Bearer {token}") == {"invocations": [], "before": None}


def test_with_a_proxy_a_monitor_may_be_reached_by_others(
    store: Path, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = []
    monkeypatch.setattr("holdfast.web.serving._Server.run", lambda self, sockets: served.append(sockets))
    command = ("monitor", "--url", "sqlite:///shop.db", "--host", "0.0.0.0", "--port", "0")
    assert holdfast(*command).code == 1
    monkeypatch.setenv("HOLDFAST_PROXY_ADDRESS", "10.0.0.7")
    assert holdfast(*command).code == 1
    monkeypatch.setenv("HOLDFAST_PROXY_USER_HEADER", "X-User")
    answer = holdfast(*command)
    assert (answer.code, len(served)) == (0, 1), answer.err
