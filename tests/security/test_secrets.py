"""S9: a secret is in no log, command, document, error or dump; arguments with telling names are not shown."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import logging
import pickle
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.encryption.conftest import key
from tests.support.patience import eventually, patient

from holdfast import App, Secret
from holdfast.access.audit import said_of
from holdfast.cli import main
from holdfast.cli.arguments import call_given
from holdfast.errors import ArgumentsDoNotFit, HoldfastError, UsageError
from holdfast.showing import plain, without_named
from holdfast.web import web_app
from holdfast.web.asgi import WebApp
from holdfast.workflows.hooks_records import name_of

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


TILL = f"""
from holdfast import App, hook

app = App("sqlite:///till.db", name="till", api_token="{TOKEN}", poll_interval_seconds=0.1)

@app.task
def child(user: str, password: str) -> str:
    return "ok"

@app.step
def pay(user: str, password: str) -> str:
    return "ok"

@app.workflow
def run(user: str, password: str) -> None:
    pay(user, "{CANARY}")
    child.submit(user, "{CANARY}").result()
    hook("approved").wait()
"""


def test_positional_arguments_and_payloads_from_outside_are_hidden_by_their_names_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "till.py").write_text(TILL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    app: Any = importlib.import_module("till").app
    monkeypatch.delitem(sys.modules, "till")
    with app, app.runner():
        call = app.tasks["till:run"].submit("ann", CANARY)
        eventually(lambda: list(app.hooks()), "the run waits at its hook")
        app.resume_hook("approved", {"password": CANARY})
        call.result(timeout=patient(30))
        event = app.emit("paid", {"user": "ann", "token": CANARY})
        app.schedules.create("nightly", app.tasks["till:child"], ["ann", CANARY], every="1h")
        one = f"/api/v1/invocations/{call.id}"
        paths = [one, *(f"{one}/{part}" for part in ("values", "steps", "steps/pay#1", "events"))]
        paths += ["/api/v1/events", f"/api/v1/events/{event.id}", "/api/v1/schedules/nightly"]
        paths += ["/events", f"/events/{event.id}", "/schedules/nightly", f"/invocations/{call.id}"]
        with TestClient(web_app(app), headers={"Authorization": f"Bearer {TOKEN}"}) as client:
            answers = {path: client.get(path.replace("#", "%23")) for path in paths}
    assert {path: each.status_code for path, each in answers.items()} == dict.fromkeys(paths, 200)
    assert [path for path, each in answers.items() if CANARY in each.text] == []
    for command in (
        ["show", call.id],
        ["workflow", "steps", call.id],
        ["workflow", "steps", call.id, "pay#1"],
        ["workflow", "events", call.id],
        ["workflow", "events", call.id, "--json"],
        ["events"],
        ["events", "show", event.id],
        ["schedules", "show", "nightly"],
    ):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--app", "till:app"])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert CANARY not in shown, command
        assert "***" in shown, command


@pytest.fixture
def desk() -> Iterator[tuple[App, TestClient]]:
    """An app whose task takes secrets, and a client of its pages."""
    with App("memory://", name="desk", poll_interval_seconds=0.1) as app:

        @app.task(name="pay", validate="submit")
        def pay(card: Secret[str], amount: int, password: str = "", pin_token: int = 0) -> int:
            return amount

        headers = {"Authorization": f"Bearer {TOKEN}"}
        with TestClient(WebApp(app, is_local=True), base_url="http://127.0.0.1", headers=headers) as client:
            yield app, client


def test_a_preview_and_a_misfit_show_no_secret(desk: tuple[App, TestClient]) -> None:
    app, client = desk
    old = app.tasks["pay"].submit(CANARY, 1, CANARY)
    with app.runner():
        assert old.result(timeout=patient(30)) == 1
    rerun, submit = f"/api/v1/invocations/{old.id}/rerun", "/api/v1/tasks/pay/submit"
    for path, body in (
        (submit, {"args": [CANARY, 5, CANARY]}),
        (submit, {"args": [CANARY], "kwargs": {"amount": 5, "password": CANARY}}),
        (rerun, {"arguments": [CANARY, 5, CANARY]}),
        (rerun, {"arguments": {"card": CANARY, "amount": 5, "password": CANARY}}),
    ):
        shown = client.post(path, json={**body, "preview": True})
        assert (shown.status_code, CANARY in shown.text, "***" in shown.text) == (200, False, True), shown.text
    wrong = client.post(submit, json={"args": ["c", 5, "", CANARY]})
    assert (wrong.status_code, CANARY in wrong.text, "'pin_token'" in wrong.text) == (400, False, True)
    with pytest.raises(ArgumentsDoNotFit, match=r"pin_token is \*\*\*; expected"):
        app.tasks["pay"].submit("c", 5, "", CANARY)


def test_stars_are_not_stored_in_the_place_of_a_secret(desk: tuple[App, TestClient]) -> None:
    app, client = desk
    old = app.tasks["pay"].submit(CANARY, 1, CANARY)
    with app.runner():
        old.result(timeout=patient(30))
    shown = client.get(f"/api/v1/invocations/{old.id}").json()["arguments"]
    assert shown == {"args": ["***", 1, "***"], "kwargs": {}}
    for arguments in (shown, [CANARY, 2, "***"], {"card": "***", "amount": 2}):
        for preview in (True, False):
            answer = client.post(
                f"/api/v1/invocations/{old.id}/rerun", json={"arguments": arguments, "preview": preview}
            )
            assert (answer.status_code, answer.json()["path"]) == (400, "body.arguments")
    with pytest.raises(UsageError, match="stands for a value that is not shown"):
        call_given(app, old.record(), json.dumps(shown["args"]))
    assert len(app.invocations()) == 1


def test_a_mistake_leaves_no_argument_in_the_audit_record(desk: tuple[App, TestClient]) -> None:
    app, client = desk
    old = app.tasks["pay"].submit("c", 1)
    for path, body in (
        ("/tasks/pay/submit", {"args": ["c", CANARY]}),
        ("/tasks/pay/submit", {"args": ["c"], "kwargs": {"amount": CANARY}}),
        (f"/invocations/{old.id}/rerun", {"arguments": ["c", CANARY]}),
        ("/schedules", {"name": "nightly", "task": "pay", "args": ["c", CANARY], "every": "1h"}),
        (f"/invocations/{old.id}/fork", {"step": "x", "arguments": ["c", CANARY]}),
    ):
        assert client.post(f"/api/v1{path}", json=body).status_code == 400, path
    record = client.get("/api/v1/audit").text
    assert (record.count('"failed"'), CANARY in record) == (5, False)
    assert said_of(UsageError(CANARY), "hook.resume") == "UsageError"
    assert said_of(UsageError("no such queue"), "queue.pause") == "UsageError: no such queue"
    assert said_of(ValueError(CANARY), "queue.pause") == "ValueError"


def test_a_token_that_looks_like_the_name_of_a_hook_is_not_in_the_audit_record(desk: tuple[App, TestClient]) -> None:
    _, client = desk
    token = "0a" * 32  # such as secrets.token_hex(32)
    assert client.post("/api/v1/hooks/resume", json={"token": token}).status_code == 404
    assert client.get("/api/v1/audit", params={"target": name_of(token)}).json()["records"]
    assert token not in client.get("/api/v1/audit").text


def test_the_record_of_a_resumed_hook_has_its_name_and_not_its_token(desk: tuple[App, TestClient]) -> None:
    _, client = desk
    for path, body in (("resume", {"token": CANARY}), (f"{name_of(CANARY)}/resume", {}), (f"{CANARY}/resume", {})):
        assert client.post(f"/api/v1/hooks/{path}", json=body).status_code == 404
    answer = client.get("/api/v1/audit", params={"target": name_of(CANARY)})
    assert [each["action"] for each in answer.json()["records"]] == ["hook.resume"] * 3
    assert CANARY not in client.get("/api/v1/audit").text


def test_a_bare_result_is_wrapped_where_the_function_says_so() -> None:
    with App("memory://", poll_interval_seconds=0.1) as app:

        @app.task(name="plain")
        def plain() -> Secret[str]:
            return CANARY  # type: ignore[return-value]

        @app.task(name="maybe")
        async def maybe(is_there: bool) -> Secret[str] | None:
            return CANARY if is_there else None  # type: ignore[return-value]

        @app.task(name="wrapped")
        def wrapped() -> Secret[str]:
            return Secret(CANARY)

        @app.task(name="list")
        def many() -> list[Secret[str]]:
            return [CANARY]  # type: ignore[list-item]

        @app.step(name="token")
        def token() -> Secret[str]:
            return CANARY  # type: ignore[return-value]

        @app.workflow(name="run")
        def run() -> Secret[str]:
            assert token() == Secret(CANARY)
            return CANARY  # type: ignore[return-value]

        sent = [plain.submit(), maybe.submit(True), maybe.submit(False), wrapped.submit(), many.submit(), run.submit()]
        with app.runner():
            results = [each.result(timeout=patient(30)) for each in sent]
    secret = Secret(CANARY)
    assert results == [secret, secret, None, secret, [CANARY], secret]


def test_no_error_about_a_call_shows_its_secrets() -> None:
    with App("memory://", name="shop") as app:

        @app.task(name="charge")
        def charge(card: Secret[str]) -> None: ...

        with pytest.raises(HoldfastError) as raised:
            charge.submit(Secret(CANARY), Secret(CANARY))
        assert CANARY not in "".join(traceback.format_exception(raised.value))
