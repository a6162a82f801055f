"""S9: a secret is in no log, command, document, error or dump; arguments with telling names are not shown."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import pickle
import traceback
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.encryption.conftest import key

from holdfast import App, Secret
from holdfast.cli import main
from holdfast.errors import HoldfastError
from holdfast.showing import plain, without_named
from holdfast.web import web_app

CANARY = "canary-9-secret"
TOKEN = "a-token-of-the-tests-0123456789"


@dataclasses.dataclass
class Login:
    user: str
    password: str


def test_no_text_shows_a_secret() -> None:
    secret = Secret(CANARY)
    texts = [repr(secret), str(secret), f"{secret:>10}", f"{[secret]}", json.dumps(plain({"a": secret}))]
    assert [text for text in texts if CANARY in text] == []
    assert secret.reveal() == CANARY
    assert secret == Secret(CANARY) != Secret("x")
    assert len({secret, Secret(CANARY)}) == 1
    assert copy.deepcopy(secret) is secret
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(secret)


def test_names_that_tell_hide_their_values() -> None:
    value = {"user": "ann", "api_key": CANARY, "nested": [{"Authorization": CANARY, "max_tokens": 5}]}
    assert without_named(value) == {
        "user": "ann",
        "api_key": "***",
        "nested": [{"Authorization": "***", "max_tokens": 5}],
    }
    assert CANARY not in repr(without_named([Login("ann", CANARY)]))
    same = [1, {"a": "b"}, Login("ann", "")]
    assert without_named(same) is same


def test_a_secret_goes_through_and_is_shown_nowhere(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    url, seen = f"sqlite:///{tmp_path}/shop.db", []
    caplog.set_level(logging.DEBUG)
    keys = key("k1")
    with App(url, name="shop", api_token=TOKEN, encryption_keys=keys, poll_interval_seconds=0.1) as app:
        app.register(Login)

        @app.task(name="charge")
        def charge(card: Secret[str], login: Login, password: str = "") -> Secret[str]:
            seen.append((card, login))
            raise_it = card.reveal() == "no"
            if raise_it:
                raise ValueError(f"no money on {card}")
            return Secret(card.reveal())

        call = charge.submit(CANARY, Login("ann", CANARY), password=CANARY)  # the bare value, and it is wrapped
        with app.runner():
            assert call.result(timeout=30).reveal() == CANARY
        assert seen == [(Secret(CANARY), Login("ann", CANARY))]
        with TestClient(web_app(app), headers={"Authorization": f"Bearer {TOKEN}"}) as client:
            document = client.get(f"/api/v1/invocations/{call.id}").text
        assert "***" in document
        assert CANARY not in document
        assert CANARY.encode() not in b"".join(each.read_bytes() for each in tmp_path.iterdir() if each.is_file())
    monkeypatch.setenv("HOLDFAST_ENCRYPTION_KEYS", keys)
    for command in (["show", call.id], ["ps"], ["history", call.id], ["show", call.id, "--json"], ["config"]):
        with pytest.raises(SystemExit) as ended:
            main(command if command == ["config"] else [*command, "--url", url, "--name", "shop"])
        assert ended.value.code == 0
    out = capsys.readouterr()
    assert CANARY not in out.out + out.err + caplog.text
    assert keys.partition(":")[2] not in out.out + out.err + caplog.text
    assert "***" in out.out


def test_no_error_about_a_call_shows_its_secrets() -> None:
    with App("memory://", name="shop") as app:

        @app.task(name="charge")
        def charge(card: Secret[str]) -> None: ...

        with pytest.raises(HoldfastError) as raised:
            charge.submit(Secret(CANARY), Secret(CANARY))
        assert CANARY not in "".join(traceback.format_exception(raised.value))
