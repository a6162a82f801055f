"""Webhooks without HTTP: from a request to a payload, and from the workflow's answer to a response."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.patience import patient

from holdfast import App, UsageError, hook, sleep
from holdfast.errors import StoreUnavailable
from holdfast.store.memory.store import MemoryStore
from holdfast.webhooks import Response, WebhookRequest, github_signature, stripe_signature
from holdfast.workflows.hooks_records import ANSWER, WEBHOOK, derived
from holdfast.workflows.hooks_requests import MAX_ANSWER_BYTES
from holdfast.workflows.hooks_web import NOT_FOUND, Webhooks

Until = Callable[[Callable[[], object]], None]


@dataclasses.dataclass
class Approval:
    by: str


def post(body: object = None, method: str = "POST", query: str = "", **headers: str) -> WebhookRequest:
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return WebhookRequest(method=method, headers=named, body=data, query=query)


class Site:
    """An app with a runner, and what a web process does with requests."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.webhooks = Webhooks(app.runtime)
        self.urls: list[str] = []
        self.runners = contextlib.ExitStack()

    def run(self) -> None:
        """Start a runner of all that is declared by now."""
        self.runners.enter_context(self.app.runner())

    def start(self, body: Callable[..., Any], **options: Any) -> tuple[Any, str]:
        """Start a run whose body is given its hook. Return the run, and the secret in the URL of the hook."""

        @self.app.workflow(name=f"flow{len(self.urls)}")
        async def flow() -> Any:
            made = hook(**options)
            await self.note(made.url)
            return await body(made)

        self.run()
        count = len(self.urls)
        run = flow.submit()
        deadline = time.monotonic() + patient(20)
        while len(self.urls) == count:
            assert time.monotonic() < deadline, run.explain()
            time.sleep(0.005)
        return run, self.urls[-1].rpartition("/")[2]

    async def note(self, url: str) -> None:
        raise NotImplementedError

    def receive(self, secret: str, request: WebhookRequest, seconds: float = 20.0) -> Response:
        return asyncio.run(self.webhooks.receive(secret, request, answer_seconds=seconds))


async def read(made: Any) -> Any:
    said = await made
    return said.by if isinstance(said, Approval) else said


async def forget(made: Any) -> None:
    await made


@pytest.fixture(params=["memory"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    urls = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path / 'site.db'}"}
    url = urls.get(request.param) or request.getfixturevalue("mongo_url")
    settings = {
        "poll_interval_seconds": 0.1,
        "workflow_linger_seconds": 0.1,
        "webhook_limit": 2000,
        "hook_secret": "s" * 32,
    }
    app = App(url, name="site", public_url="https://shop.example", **settings)
    made = Site(app)

    @app.step(name="note")
    async def note(url: str) -> None:
        made.urls.append(url)

    made.note = note  # type: ignore[method-assign]
    with app, made.runners:
        yield made


on_every_store = pytest.mark.parametrize("site", ["memory", "sqlite", "mongodb"], indirect=True)


# --- payloads


@on_every_store
def test_a_request_resumes_the_hook_and_is_accepted_at_once(site: Site) -> None:
    run, secret = site.start(read, token="approve:1", type=Approval)
    assert site.urls[-1] == f"https://shop.example/hooks/{secret}"
    assert secret != "approve:1"
    response = site.receive(secret, post({"by": "me"}))
    assert response.status == 202
    assert run.result(patient(20)) == "me"
    assert site.receive(secret, post({"by": "me"})) == NOT_FOUND


@pytest.mark.parametrize(
    ("request_", "got"),
    [
        (post({"by": "me"}), {"by": "me"}),
        (post(), None),
        (post(b"[1]", content_type="text/plain"), [1]),
        (
            post(b"by=me+too&x=", content_type="application/x-www-form-urlencoded; charset=utf-8"),
            {"by": "me too", "x": ""},
        ),
        (post(method="GET", query="by=me"), {"by": "me"}),
    ],
)
def test_a_payload_is_the_json_the_form_or_the_query(site: Site, request_: WebhookRequest, got: object) -> None:
    run, secret = site.start(read, methods=["GET", "POST"])
    assert site.receive(secret, request_).status == 202
    assert run.result(patient(20)) == got


@pytest.mark.parametrize(
    ("request_", "status", "said"),
    [
        (post({"by": 3}), 422, {"error": "payload.by is a number, and string is expected", "path": "payload.by"}),
        (post(b"{"), 422, {"error": "payload is no JSON", "path": "payload"}),
        (post(b"[" * 1999), 422, {"error": "payload is no JSON", "path": "payload"}),
        (post(b"\xff\xfe"), 422, {"error": "payload is no JSON", "path": "payload"}),
        (post(b"x" * 2001), 413, {"error": "the body has more than 2000 bytes"}),
        (post({"by": "me"}, method="PUT"), 405, {"error": "method not allowed"}),
        (
            post(b"&" * 1500, content_type="application/x-www-form-urlencoded"),
            422,
            {"error": "payload has too many fields", "path": "payload"},
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_the_hook_stays(
    site: Site, request_: WebhookRequest, status: int, said: dict[str, str]
) -> None:
    run, secret = site.start(read, type=Approval)
    response = site.receive(secret, request_)
    assert response.status == status
    problem = json.loads(response.body)
    assert problem.pop("status") == status
    assert {name.replace("detail", "error"): problem[name] for name in problem if name != "title"} == said
    assert response.headers.get("allow") == ("POST" if status == 405 else None)
    assert site.receive(secret, post({"by": "me"})).status == 202
    run.result(patient(20))
    assert [event.type for event in run.events()].count("hook_received") == 1


def test_a_repeated_delivery_is_recognised_by_its_header(site: Site) -> None:
    async def two(made: Any) -> list[int]:
        return [await made, await made]

    run, secret = site.start(two, type=int, resume_id="X-Delivery")
    for number, name in ((1, "a"), (1, "a"), (2, "b" * 999)):
        assert site.receive(secret, post(number, x_delivery=name)).status == 202
    assert run.result(patient(20)) == [1, 2]


# --- answers


def test_a_fixed_answer(site: Site) -> None:
    answer = Response(status=201, body=b"thanks", headers={"content-type": "text/plain"})
    run, secret = site.start(read, answer=answer)
    assert site.receive(secret, post(1)) == answer
    assert run.result(patient(20)) == 1


@on_every_store
def test_the_workflow_answers(site: Site) -> None:
    async def answer(made: Any) -> list[Any]:
        said = await made
        await said.respond(200, {"seen": said.json()}, headers={"X-Shop": "1"})
        return [said.method, said.query, said.headers["x-source"], said.body]

    run, secret = site.start(answer, type=WebhookRequest)
    response = site.receive(secret, post([1], query="a=b", X_Source="them"))
    assert (response.status, response.body) == (200, b'{"seen":[1]}')
    assert response.headers == {"content-type": "application/json", "x-shop": "1"}
    assert run.result(patient(20)) == ["POST", "a=b", "them", b"[1]"]
    assert [step.id for step in run.steps()] == ["note#1", "respond#1"]


def test_a_step_answers_and_a_repeated_request_gets_the_same_response(site: Site) -> None:
    asked: list[str] = []

    @site.app.step(name="reply")
    async def reply(said: WebhookRequest) -> None:
        asked.append(said.method)
        await said.respond(200, "first")
        await said.respond(500, "second")

    @site.app.step(name="reply_plainly")
    def reply_plainly(said: WebhookRequest) -> None:
        said.respond(200, b"plain")

    async def answer(made: Any) -> None:
        await reply(await made)
        await reply_plainly(await made)
        await made

    run, secret = site.start(answer, type=WebhookRequest, resume_id="X-Delivery")
    for _ in range(2):
        response = site.receive(secret, post(1, x_delivery="1"))
        assert (response.status, response.body) == (200, b"first")
    assert site.receive(secret, post(1, x_delivery="2")).body == b"plain"
    assert asked == ["POST"]
    assert site.receive(secret, post(1, x_delivery="3"), seconds=0.2).status == 202
    run.result(patient(20))


def test_a_plain_body_answers(site: Site) -> None:
    @site.app.workflow(name="plain")
    def plain() -> str:
        made = hook(type=WebhookRequest)
        site.urls.append(made.url)
        made.wait().respond(202, "plain")
        return "done"

    site.run()
    run = plain.submit()
    while not site.urls:
        time.sleep(0.01)
    assert site.receive(site.urls[0].rpartition("/")[2], post()).body == b"plain"
    assert run.result(patient(20)) == "done"


def test_without_an_answer_in_time_it_is_accepted(site: Site) -> None:
    async def slow(made: Any) -> None:
        said = await made
        await sleep(0.5)
        await said.respond(200, "late")

    run, secret = site.start(slow, type=WebhookRequest)
    assert site.receive(secret, post(), seconds=0.2).status == 202
    run.result(patient(20))


def test_a_run_that_ends_without_an_answer_keeps_nobody_waiting(site: Site) -> None:
    _, secret = site.start(forget, type=WebhookRequest)
    began = time.monotonic()
    assert site.receive(secret, post(), seconds=30).status == 202
    assert time.monotonic() - began < 10


def test_a_replay_answers_nothing_again(site: Site, until: Until) -> None:
    async def answer(made: Any) -> str:
        await (await made).respond(200, "one")
        await sleep(0.4)  # longer than it lingers: it is replayed
        return "done"

    run, secret = site.start(answer, type=WebhookRequest)
    assert site.receive(secret, post()).body == b"one"
    assert run.result(patient(20)) == "done"
    assert [event.type for event in run.events() if event.correlation == "respond#1"].count("step_completed") == 1


@pytest.mark.parametrize(
    ("status", "body", "headers", "said"),
    [
        (99, b"", None, "expected a status"),
        (True, b"", None, "expected a status"),
        (200, object(), None, "nor a JSON value"),
        (200, b"x" * (MAX_ANSWER_BYTES + 1), None, "are allowed"),
        (200, b"", {"x": "a\r\nb: c"}, "no line breaks"),
    ],
)
def test_an_answer_that_cannot_be_sent_is_refused(status: Any, body: Any, headers: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        post().respond(status, body, headers)


def test_an_answer_from_elsewhere_is_refused() -> None:
    with pytest.raises(UsageError, match="in the body of a workflow, or in a step"):
        post().respond(200)


# --- who may not come in


class Counted(MemoryStore):
    """Count the reads, by what they are."""

    reads: list[tuple[str, int]]

    async def entries(self, app: str, kind: str, names: Any = None, **more: Any) -> Any:
        self.reads.append((f"entries {kind}", len(names or ())))
        return await super().entries(app, kind, names, **more)

    async def get(self, app: str, ids: Any) -> Any:
        self.reads.append(("get", len(ids)))
        return await super().get(app, ids)


def test_every_secret_that_leads_nowhere_does_the_same_reads(monkeypatch: pytest.MonkeyPatch, until: Until) -> None:
    app = App("memory://", name="site", public_url="https://shop.example", hook_secret="s" * 32)
    site = Site(app)

    @app.step(name="note")
    async def note(url: str) -> None:
        site.urls.append(url)

    site.note = note  # type: ignore[method-assign]

    async def dispose(made: Any) -> None:
        if await made:
            made.dispose()
            await sleep(60)

    with app, site.runners:
        ended, ended_secret = site.start(dispose)
        site.receive(ended_secret, post(0))
        ended.result(patient(20))
        _, disposed_secret = site.start(dispose)
        site.receive(disposed_secret, post(1))
        kept, kept_secret = site.start(read, token="kept", keep_token="1d")
        site.receive(kept_secret, post(1))
        kept.result(patient(20))
        engine = app.runtime.ready()

        def entries(kind: str) -> list[Any]:
            return list(app.runtime.run(engine.store.entries("site", kind)))

        until(lambda: not entries(WEBHOOK))
        _, open_secret = site.start(read)
    secrets = {
        "unknown": "A" * 43,
        "ended": ended_secret,
        "disposed": disposed_secret,
        "kept": kept_secret,
        "empty": "",
        "long": "x" * 5000,
        "hostile": "../../etc\0\ud800%00'\"",
        "prefix": open_secret[:-1],
        "suffix": f"{open_secret}A",
        "token": "kept",
    }
    with app:
        engine = app.runtime.ready()
        assert isinstance(engine.store, MemoryStore)
        monkeypatch.setattr(engine.store, "__class__", Counted)
        seen = {}
        for name, secret in secrets.items():
            engine.store.reads = []  # type: ignore[attr-defined]
            assert site.receive(secret, post(1)) is NOT_FOUND, name
            seen[name] = tuple(engine.store.reads)  # type: ignore[attr-defined]
        assert set(seen.values()) == {(("entries webhook", 1), ("entries hook", 1), ("get", 1))}, seen


def test_a_webhook_of_another_hook_with_the_same_token_leads_nowhere(site: Site) -> None:
    """The entry of a webhook stays behind, and its hook's token belongs to another run."""
    first, secret = site.start(read, token="x")
    engine = site.app.runtime.ready()
    (entry,) = site.app.runtime.run(engine.store.entries("site", WEBHOOK))
    site.receive(secret, post(1))
    first.result(patient(20))
    second, _ = site.start(read, token="x")
    site.app.runtime.run(engine.store.put_entry(entry))
    assert site.receive(secret, post(2)) == NOT_FOUND
    site.app.resume_hook("x", 3)
    assert second.result(patient(20)) == 3


def test_a_store_that_is_away_asks_to_come_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    _, secret = site.start(read)

    async def away(*args: object, **more: object) -> None:
        raise StoreUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "entries", away)
        response = site.receive(secret, post(1))
    assert response.status == 503
    assert response.headers["retry-after"] == "5"
    assert site.receive(secret, post(1)).status == 202


def test_a_run_that_is_far_behind_asks_to_come_again(site: Site) -> None:
    async def slow(made: Any) -> None:
        await sleep(60)

    run, secret = site.start(slow)
    site.runners.close()
    for number in range(1000):
        site.app.resume_hook(derived("s" * 32, "token", run.id, "hook#1"), number)
    response = site.receive(secret, post(1))
    assert response.status == 503
    assert b"too far behind" in response.body


def test_secrets_and_bodies_are_in_no_log_line(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    def refuse(request: WebhookRequest) -> bool:
        raise ValueError(request.body.decode())

    site.app.verifier(refuse)
    _, secret = site.start(read, type=Approval)
    _, guarded = site.start(read, verify="refuse")
    bodies = [post({"by": "s3cr3t"}), post({"by": ["s3cr3t"]}), post(b"s3cr3t")]
    said = [site.receive(each, body).body for each in (secret, guarded, "B" * 43) for body in bodies]
    assert not any(text in caplog.text for text in ("s3cr3t", secret, guarded, "BBBB"))
    assert not any(b"s3cr3t" in each for each in said)


# --- signatures


def github(body: bytes, secret: str = "topsecret") -> str:
    return f"sha256={hmac.digest(secret.encode(), body, 'sha256').hex()}"


def stripe(body: bytes, at: int, secret: str = "topsecret") -> str:
    return f"t={at},v1={hmac.digest(secret.encode(), f'{at}.'.encode() + body, 'sha256').hex()},v0=old"


def signed(body: bytes = b"{}", at: float = 1000.0, **headers: str) -> WebhookRequest:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return WebhookRequest(method="POST", headers=named, body=body, received_at=at)


def test_githubs_own_example() -> None:
    verify = github_signature("It's a Secret to Everybody")
    signature = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    assert verify(signed(b"Hello, World!", x_hub_signature_256=signature)) is True


@pytest.mark.parametrize(
    "signature", ["", "sha256=", github(b"{}", "other"), github(b"{ }"), "sha256=ä", github(b"{}")[:-1]]
)
def test_a_wrong_signature_of_github_is_refused(signature: str) -> None:
    verify = github_signature("topsecret", "older")
    assert verify(signed(x_hub_signature_256=github(b"{}"))) is True
    assert verify(signed(x_hub_signature_256=github(b"{}", "older"))) is True
    assert verify(signed(x_hub_signature_256=signature)) is False
    assert verify(signed()) is False


@pytest.mark.parametrize(
    "signature",
    [
        stripe(b"{}", 1000, "other"),
        stripe(b"{ }", 1000),
        stripe(b"{}", 699),
        stripe(b"{}", 1301),
        stripe(b"{}", 1000).replace("t=1000", "t=1001"),
        stripe(b"{}", 1000).replace("t=1000", "t=1000,t=1000"),
        stripe(b"{}", 1000).replace("v1", "v0"),
        "t=,v1=",
        "t=1e3,v1=00",
        f"t={'9' * 400},v1=00",
        "",
    ],
)
def test_a_wrong_or_old_signature_of_stripe_is_refused(signature: str) -> None:
    verify = stripe_signature("topsecret", window="5m")
    assert verify(signed(stripe_signature=stripe(b"{}", 1000)))
    assert verify(signed(stripe_signature=signature)) is False


def test_a_delivery_of_stripe_is_named_by_what_is_signed() -> None:
    verify = stripe_signature("topsecret")
    event = b'{"id": "evt_1", "object": "event"}'
    assert verify(signed(event, stripe_signature=stripe(event, 1000))) == "evt_1"
    assert verify(signed(event, stripe_signature=stripe(event, 1001))) == "evt_1"
    once, again = (verify(signed(stripe_signature=stripe(b"{}", at))) for at in (1000, 1001))
    assert once != again
    assert isinstance(once, str)


@pytest.mark.parametrize("secrets", [(), ("",), (None,)])
def test_a_signature_needs_a_secret(secrets: Any) -> None:
    for make in (github_signature, stripe_signature):
        with pytest.raises(UsageError, match="needs a secret"):
            make(*secrets)


def test_a_signed_webhook_takes_what_is_genuine_once(site: Site) -> None:
    site.app.verifier(stripe_signature("topsecret"), name="stripe")

    async def two(made: Any) -> list[Any]:
        return [await made, await made]

    run, secret = site.start(two, verify="stripe", resume_id="X-Delivery")
    now = int(time.time())
    body, other = b'{"n":1}', b'{"n":2}'
    assert site.receive(secret, post(body)).status == 401
    assert site.receive(secret, post(body, stripe_signature=stripe(body, now - 400))).status == 401
    for delivery in ("1", "2"):  # repeated by somebody who has listened, under another name
        request = post(body, stripe_signature=stripe(body, now), x_delivery=delivery)
        assert site.receive(secret, request).status == 202
    assert site.receive(secret, post(other, stripe_signature=stripe(other, now))).status == 202
    assert run.result(patient(20)) == [{"n": 1}, {"n": 2}]


def test_a_function_of_ones_own_verifies(site: Site) -> None:
    @site.app.verifier
    async def ours(request: WebhookRequest) -> bool | str:
        await asyncio.sleep(0)
        assert request.received_at > 1e9
        return request.headers["x-key"] == hashlib.sha256(request.body).hexdigest() and "named"

    async def first(made: Any) -> Any:
        return await made

    run, secret = site.start(first, verify=ours)
    assert site.receive(secret, post(b"1")).status == 401  # it raises
    assert site.receive(secret, post(b"1", x_key="no")).status == 401
    assert site.receive(secret, post(b"1", x_key=hashlib.sha256(b"1").hexdigest())).status == 202
    assert run.result(patient(20)) == 1


def test_a_process_without_the_verifier_asks_to_come_again(site: Site) -> None:
    site.app.verifier(github_signature("topsecret"), name="github")
    _, secret = site.start(read, verify="github")
    del site.app.runtime.verifiers["github"]
    response = site.receive(secret, post(b"1", x_hub_signature_256=github(b"1")))
    assert response.status == 503
    assert b"does not declare the verifier 'github'" in response.body


def test_a_verifier_is_declared_once(site: Site) -> None:
    site.app.verifier(github_signature("a"), name="github")
    with pytest.raises(UsageError, match="two verifiers are named 'github'"):
        site.app.verifier(github_signature("b"), name="github")
    with pytest.raises(UsageError, match="a verifier is a function"):
        site.app.verifier(3)  # type: ignore[type-var]


def test_answers_are_removed_after_a_while(site: Site) -> None:
    async def answer(made: Any) -> None:
        await (await made).respond(200, "one")

    _, secret = site.start(answer, type=WebhookRequest)
    site.receive(secret, post())
    engine = site.app.runtime.ready()
    (entry,) = site.app.runtime.run(engine.store.entries("site", ANSWER))
    assert 500 < entry.keep_until - time.time() < 700
