"""Webhooks over HTTP: delivered once, answered at once or by the workflow, and closed to all without the secret."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.support.patience import eventually, patient
from tests.web.shop import SIGNING, WebShop

from holdfast.store.contract import Store
from holdfast.web import web_app, webhooks
from holdfast.webhooks import Response


@pytest.fixture
def hooks(shop: WebShop) -> Iterator[TestClient]:
    """A client without any token."""
    with TestClient(web_app(shop.app)) as client:
        yield client


def test_a_post_resumes_the_run_and_is_answered_at_once(shop: WebShop, hooks: TestClient) -> None:
    run, path = shop.webhook()
    answer = hooks.post(path, json={"ok": True})
    assert answer.status_code == 202
    assert run.result(timeout=patient(30)) == [{"ok": True}]
    again = hooks.post(path, json={"ok": True})
    assert (again.status_code, again.json()["title"]) == (404, "NotFound")
    assert again.headers["content-type"] == "application/problem+json"


def test_a_get_is_for_hooks_that_take_it(shop: WebShop, hooks: TestClient) -> None:
    run, path = shop.webhook(methods=["GET"])
    assert hooks.post(path).status_code == 405
    assert hooks.get(path, params={"answer": "yes"}).status_code == 202
    assert run.result(timeout=patient(30)) == [{"answer": "yes"}]
    other, path = shop.webhook()
    refused = hooks.get(path)
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    other.cancel()


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "TRACE", "NONSENSE"])
def test_other_methods_are_refused_without_a_look(shop: WebShop, hooks: TestClient, method: str) -> None:
    assert hooks.request(method, "/hooks/unknown").status_code == 405


def test_a_hook_has_a_fixed_answer(shop: WebShop, hooks: TestClient) -> None:
    thanks = Response(status=200, body=b"<p>thank you</p>", headers={"Content-Type": "text/html"})
    run, path = shop.webhook(answer=thanks)
    answer = hooks.post(path, json=1)
    assert (answer.status_code, answer.text) == (200, "<p>thank you</p>")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert run.result(timeout=patient(30)) == [1]


def test_the_workflow_answers(shop: WebShop, hooks: TestClient) -> None:
    run, path = shop.webhook(True, 2)
    for number in (1, 2):
        answer = hooks.post(f"{path}?number={number}", content=b"\x00\xff")
        assert (answer.status_code, answer.json()) == (201, {"number": number})
        assert answer.headers["x-number"] == f"{number}"
    assert run.result(timeout=patient(30)) == [["POST", b"\x00\xff", "number=1"], ["POST", b"\x00\xff", "number=2"]]


def test_without_an_answer_in_time_it_is_202(shop: WebShop, hooks: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "ANSWER_SECONDS", 0.05)
    run, path = shop.webhook(True, 2, False)
    assert [hooks.post(path).status_code for _ in range(2)] == [202, 202]
    assert len(run.result(timeout=patient(30))) == 2


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"content-length": "7", "Connection": "close", "transfer-encoding": "chunked"}, b"more than seven"),
        ({"x-broken\r\nx-forged": "1", "x": "a\r\nb: c", "": "empty", "ü": "é", "x-odd": "\U0001f4a9"}, b"x"),
    ],
)
def test_headers_that_no_server_could_send_are_left_out(
    shop: WebShop, hooks: TestClient, headers: dict[str, str], body: bytes
) -> None:
    answer = webhooks._response(Response(status=200, body=body, headers=headers))
    assert answer.body == body
    assert int(answer.headers["content-length"]) == len(body)
    names = {name.decode() for name, _ in answer.raw_headers} - {"content-length"}
    assert names <= {*webhooks.SAFE_HEADERS}


def test_an_answer_without_a_body_has_none() -> None:
    assert webhooks._response(Response(status=204, body=b"x")).body == b""


# --- size and rate


def test_a_body_beyond_the_limit_is_refused(shop: WebShop, hooks: TestClient) -> None:
    run, path = shop.webhook()
    limit = shop.app.settings.webhook_limit

    def parts() -> Iterator[bytes]:
        for _ in range(limit // 1000 + 1):
            yield b" " * 1000

    for content in (b" " * (limit + 1), parts()):
        answer = hooks.post(path, content=content)
        assert (answer.status_code, answer.json()["title"]) == (413, "TooLarge")
    assert hooks.post(path, content=b"7".rjust(limit)).status_code == 202
    assert run.result(timeout=patient(30)) == [7]


def test_a_rate_holds_for_each_secret_and_for_each_source() -> None:
    with WebShop(webhook_token_rate=0.2, webhook_source_rate=0.5) as shop, TestClient(web_app(shop.app)) as client:
        answers = [client.post("/hooks/one") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [404, 404, 429]
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 5
        others = [client.post(f"/hooks/{number}").status_code for number in range(4)]
        assert others == [404, 404, 429, 429]  # five from one source, and that of the secret counted too
        with TestClient(web_app(shop.app), client=("192.0.2.7", 1)) as elsewhere:
            assert elsewhere.post("/hooks/one").status_code == 404  # the buckets of another web app are its own


def test_behind_a_proxy_each_of_its_clients_is_a_source() -> None:
    with WebShop(webhook_source_rate=0.1, proxy_address="10.0.0.7") as shop:
        for address, statuses in (("10.0.0.7", [404, 404, 429]), ("192.0.2.1", [404, 429, 429])):
            with TestClient(web_app(shop.app), client=(address, 1)) as client:
                behind = [("198.51.100.1", "a"), ("198.51.100.2", "b"), ("203.0.113.9, 198.51.100.2", "c")]
                answers = [client.post(f"/hooks/{path}", headers={"X-Forwarded-For": each}) for each, path in behind]
                assert [answer.status_code for answer in answers] == statuses


def test_too_many_bodies_at_once_are_refused(shop: WebShop, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = webhooks.WebhookEndpoint(shop.app.runtime, lambda request: "a")
    monkeypatch.setattr(webhooks, "_MAX_BYTES_UNDER_WAY", 3 * 2**20)
    with endpoint._room_for("a") as first, endpoint._room_for("b") as second:
        first(2**20)
        second(2**20)
        second(2**20)
        with pytest.raises(webhooks.Problem, match="too many webhooks"):
            first(1)
    with endpoint._room_for("a") as again:
        again(3 * 2**20)
    assert (endpoint._under_way, endpoint._under_way_of) == (0, {})


def test_one_source_does_not_take_the_room_of_all(shop: WebShop, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = webhooks.WebhookEndpoint(shop.app.runtime, lambda request: "a")
    monkeypatch.setattr(webhooks, "_MAX_BYTES_OF_SOURCE", 2**20)
    with endpoint._room_for("a") as first, endpoint._room_for("a") as second, endpoint._room_for("b") as other:
        first(2**19)
        second(2**19)
        with pytest.raises(webhooks.Problem, match="too many webhooks"):
            second(1)
        other(2**20)


# --- who sends


def github(body: bytes, secret: str = SIGNING) -> dict[str, str]:
    return {"X-Hub-Signature-256": f"sha256={hmac.digest(secret.encode(), body, 'sha256').hex()}"}


def stripe(body: bytes, *, age: float = 0.0, secret: str = SIGNING) -> dict[str, str]:
    at = f"{int(time.time() - age)}"
    signature = hmac.digest(secret.encode(), at.encode() + b"." + body, "sha256").hex()
    return {"Stripe-Signature": f"t={at},v1={signature}"}


def test_the_signature_of_github_is_checked(shop: WebShop, hooks: TestClient) -> None:
    run, path = shop.webhook(False, 2, verify="github", resume_id="X-GitHub-Delivery")
    body = b'{"action": "opened"}'
    for headers in ({}, github(body, "another"), github(b"other"), {"X-Hub-Signature-256": "sha256="}):
        assert hooks.post(path, content=body, headers=headers).status_code == 401
    for delivery in ("a", "a", "a", "b"):  # its retries are one delivery
        sent = hooks.post(path, content=body, headers=github(body) | {"X-GitHub-Delivery": delivery})
        assert sent.status_code == 202
    assert run.result(timeout=patient(30)) == [{"action": "opened"}] * 2


def test_the_signature_of_stripe_is_checked_in_its_window_and_once(shop: WebShop, hooks: TestClient) -> None:
    run, path = shop.webhook(False, 2, verify="stripe")
    first, second = b'{"id": "evt_1"}', b'{"id": "evt_2"}'
    for headers in ({}, stripe(first, age=301), stripe(first, age=-400), stripe(first, secret="another")):
        assert hooks.post(path, content=first, headers=headers).status_code == 401
    again = stripe(first)
    assert [hooks.post(path, content=first, headers=again).status_code for _ in range(3)] == [202] * 3
    assert hooks.post(path, content=second, headers=stripe(second)).status_code == 202
    assert run.result(timeout=patient(30)) == [{"id": "evt_1"}, {"id": "evt_2"}]


def test_a_function_of_ones_own_is_asked(shop: WebShop, hooks: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    run, path = shop.webhook(verify="own")
    assert hooks.post(path, json=1).status_code == 401
    assert hooks.post(path, content=b"crash canary").status_code == 401
    assert "canary" not in caplog.text
    assert hooks.post(path, json=1, headers={"X-Password": "open sesame"}).status_code == 202
    assert run.result(timeout=patient(30)) == [1]


# --- what does not lead anywhere


class Calls:
    """The commands that a store was given, without their values."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[Any, ...]] = []
        writes = ("put_entry", "remove_entry", "quarantine_entry", "apply", "insert", "append")
        for name in ("entries", "get", "find", "quarantined", "read_log", *writes):
            monkeypatch.setattr(store, name, self._counted(name, getattr(store, name)))

    def _counted(self, name: str, method: Any) -> Any:
        def count(*given: Any, **options: Any) -> Any:
            shapes = [len(each) if isinstance(each, list | tuple) else type(each).__name__ for each in given]
            self.made.append((name, *[each for each in given[1:2] if isinstance(each, str)], *shapes, *sorted(options)))
            return method(*given, **options)

        return count

    def taken(self) -> list[tuple[Any, ...]]:
        made, self.made = self.made, []
        return made


def test_every_404_is_the_same_work_and_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = WebShop()
    with shop, TestClient(web_app(shop.app)) as client:
        ended, ended_path = shop.webhook()
        client.post(ended_path, json=1)
        ended.result(timeout=patient(30))
        kept, kept_path = shop.webhook(keep_token="1h")
        client.post(kept_path, json=1)
        kept.result(timeout=patient(30))
        cancelled, cancelled_path = shop.webhook()
        cancelled.cancel()
        eventually(lambda: cancelled.status == "cancelled")
        open_run, open_path = shop.webhook()
        shop.runner.end()  # so that nothing else uses the store
        engine = shop.app.runtime.opened().opened
        assert engine is not None
        calls = Calls(engine.store, monkeypatch)
        known = open_path.removeprefix("/hooks/")
        paths = {
            "unknown": "/hooks/" + "A" * 43,
            "ended": ended_path,
            "expired": kept_path,
            "cancelled": cancelled_path,
            "prefix": open_path[:-1],
            "longer": open_path + "A",
            "case": "/hooks/" + known.swapcase(),
            "slash": open_path + "/",
            "parts": f"/hooks/{known[:20]}/{known[20:]}",
            "empty": "/hooks/",
            "long": "/hooks/" + "A" * 20_000,
            "odd": "/hooks/%00%ff%F0%9F%92%A9",
            "dots": "/hooks/..%2f..",
            "hash": "/hooks/" + hashlib.sha256(known.encode()).hexdigest(),
        }
        seen = {}
        for name, path in paths.items():
            answer = client.post(path, json={"secret": 1})
            headers = {key: value for key, value in answer.headers.items() if key != "date"}
            seen[name] = (answer.status_code, answer.content, headers, calls.taken())
        assert seen["unknown"][0] == 404
        assert [made[:2] for made in seen["unknown"][3]] == [
            ("entries", "webhook"),
            ("entries", "hook"),
            ("get", "str"),
        ]
        for name, each in seen.items():
            assert each == seen["unknown"], name
        open_run.cancel()


# --- nothing of it is logged


def test_a_defect_on_the_way_logs_neither_secret_nor_body(
    shop: WebShop, hooks: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise ValueError("canary of the body, canary of the secret")

    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.WARNING, logger="httpx2")  # the client knows what it sends
    monkeypatch.setattr("holdfast.workflows.hooks_web.Webhooks.receive", broken)
    answer = hooks.post("/hooks/canary", content=b"canary")
    assert (answer.status_code, answer.json()["title"]) == (500, "InternalError")
    assert "canary" not in caplog.text + answer.text
    assert "could not answer POST /hooks/...: ValueError at test_webhooks.py" in caplog.text


def test_a_store_that_is_away_asks_to_come_again(
    shop: WebShop, hooks: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.errors import StoreUnavailable

    async def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr("holdfast.workflows.hooks_web.look_up", away)
    answer = hooks.post("/hooks/unknown", json=json.loads("1"))
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
