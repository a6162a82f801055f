"""The World's server over real HTTP: its calls, streams, access, bad requests, and deliveries to a real application."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.patience import eventually, patient
from tests.world.application import Application, Delivered
from tests.world.serving import Client, Served, serving

from holdfast import App
from holdfast.errors import ConfigurationError
from holdfast.world import world_app
from holdfast.world.errors import WorldError
from holdfast.world.reading import ALIVE, CHUNK, CLOSED
from holdfast.world.serving import WorldServer

TOKEN = "a-token-of-the-tests-0123456789"


def add(a: int, b: int = 0) -> int:
    return a + b


def make_app(url: str = "memory://", **settings: Any) -> App:
    app = App(url, name="shop", **settings)
    app.task(name="add")(add)
    return app


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One for all tests of this module, on a store in memory."""
    with make_app() as app, serving(app) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Client:
    return served.client


# --- calls


def test_a_run_from_its_start_to_its_end(client: Client) -> None:
    with Application() as application:
        client.call("start", baseUrl=application.url)
        run = client.run()
        id = client.queue(run, baseUrl=application.url, headers={"x-mine": "1"})
        eventually(lambda: application.got)
        (got,) = application.got
        assert (got.path, got.message) == ("/.well-known/workflow/v1/flow", {"runId": run})
        assert {name: got.headers[name] for name in got.headers if name.startswith("x-")} == {
            "x-vqs-queue-name": "__wkf_workflow_checkout",
            "x-vqs-message-id": id,
            "x-vqs-message-attempt": "1",
            "x-mine": "1",
        }
    assert client.create(run, "run_started")["run"]["status"] == "running"
    assert client.create(run, "run_completed", output=b"devl[1]")["run"]["output"] == b"devl[1]"
    found = client.call("runs.get", runId=run)
    assert found["status"] == "completed"
    assert found["completedAt"] >= found["createdAt"]
    assert "error" not in found
    listed = client.call("runs.list", status=["completed"], pagination={"limit": 1}, resolveData="none")
    assert [each["runId"] for each in listed["data"]] == [run]
    events = client.call("events.list", runId=run)["data"]
    assert [event["eventType"] for event in events] == ["run_created", "run_started", "run_completed"]


def test_health_needs_no_token_and_says_what_is_spoken(client: Client) -> None:
    status, headers, body = client.raw("GET", "/v1/health")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert b'"specVersions":[2,3,4,5,6,7]' in body


def test_a_task_in_python_is_submitted_once(served: Served) -> None:
    first = served.client.call("submit", task="add", args=[1], kwargs={"b": 2}, operationId="once")["id"]
    assert served.client.call("submit", task="add", args=[1], kwargs={"b": 2}, operationId="once")["id"] == first
    keyed = served.client.call("submit", task="add", args=[1], key="k", operationId="other")["id"]
    assert keyed != first
    assert served.app.invocation(first).record().task == "add"
    for wrong, status in (({"task": "nope"}, 404), ({"args": [1], "key": "k", "kwargs": {"b": 1}}, 409)):
        with pytest.raises(WorldError) as refused:
            served.client.call("submit", **{"task": "add", "args": [1], "operationId": "x"} | wrong)
        assert refused.value.status == status
    with pytest.raises(WorldError, match="cannot be called"):
        served.client.call("submit", task="add", args=[], operationId="y")


def test_large_messages_are_delivered_whole(client: Client) -> None:
    with Application() as application:
        client.queue("r", message={"runId": "r", "input": b"x" * 2_000_000}, baseUrl=application.url)
        eventually(lambda: application.got)
        assert len(application.got[0].message["input"]["$b"]) > 2_000_000


@pytest.mark.slow
def test_an_application_that_hangs_is_asked_again_and_that_counts() -> None:
    goes_on = threading.Event()

    def answer(delivered: Delivered) -> tuple[int, bytes]:
        if delivered.attempt == 1:
            goes_on.wait(patient(60))
        return 200, b""

    with make_app(world_delivery_timeout=1) as app, Application(answer) as application, serving(app) as served:
        id = served.client.queue("r", baseUrl=application.url)
        eventually(lambda: app.runtime.run(world_messages(app).get(id)).status == "success")
        assert [each.attempt for each in application.got] == [1, 2]
        assert "no answer within 1s" in app.runtime.run(world_messages(app).get(id)).errors[0].error.message
        goes_on.set()


def test_another_server_of_holdfast_is_no_application(client: Client, served: Served) -> None:
    with make_app() as app, serving(app) as other:
        id = client.queue("r", baseUrl=other.client.url)
        messages = world_messages(served.app)
        eventually(lambda: served.app.runtime.run(messages.get(id)).errors)
        (failure, *_) = served.app.runtime.run(messages.get(id)).errors
        assert "leads to a server of Holdfast" in failure.error.message
        assert "it does not count" in failure.error.message


# --- bad input


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "no JSON"),
        (b"{]", "no JSON"),
        (b"[]", "no JSON object"),
        (b'{"runId": 5}', "runId: it has the wrong type"),
        (b"{}", "runId: it is missing"),
        (b'{"runId": null}', "runId: it is missing"),
        (b'{"runId": "r", "colour": 1}', "no field 'colour'"),
        (b'{"runId": "r", "pagination": []}', "pagination: it has the wrong type"),
        (b'{"runId": {"$b": "???"}}', "no base64"),
    ],
)
def test_what_is_no_request_is_refused(client: Client, body: bytes, said: str) -> None:
    status, _, answer = client.raw("POST", "/v1/events.list", body)
    assert status == 400
    assert b'"name":"WorkflowWorldError"' in answer
    assert said in answer.decode()


def test_unknown_calls_are_refused(client: Client) -> None:
    for method, path in (("POST", "/v1/nope"), ("GET", "/v1/runs.get"), ("GET", "/"), ("POST", "/v2/runs.get")):
        assert client.raw(method, path, b"{}")[0] == 400
    with pytest.raises(WorldError) as refused:
        client.create(client.run(), "run_exploded")
    assert (refused.value.name, refused.value.status) == ("WorkflowWorldError", 400)


@pytest.mark.parametrize("url", ["localhost:3000", "http://", "http://10.1.2.3", 5])
def test_addresses_that_cannot_be_delivered_to_are_refused(client: Client, url: Any) -> None:
    for call, fields in (
        ("start", {}),
        ("queue", {"queueName": "__wkf_workflow_x", "message": {}, "operationId": "o"}),
    ):
        with pytest.raises(WorldError) as refused:
            client.call(call, baseUrl=url, **fields)
        assert refused.value.status == 400


def test_an_address_that_leads_to_the_server_itself_is_refused(client: Client) -> None:
    port = client.url.rpartition(":")[2]
    for url in (client.url, f"http://localhost:{port}", f"http://[::1]:{port}/app"):
        with pytest.raises(WorldError, match="this server itself"):
            client.call("start", baseUrl=url)


# --- streams


def test_chunks_come_while_they_are_written_and_reading_goes_on_by_index(client: Client) -> None:
    run = client.run()
    client.call("streams.write", runId=run, name="out", chunks=[b"a", "b"], operationId="1")
    client.call("streams.write", runId=run, name="out", chunks=[b"a", "b"], operationId="1")
    with client.stream(run, "out") as frames:
        assert (frames.start, frames.next(), frames.next()) == (0, (CHUNK, b"a"), (CHUNK, b"b"))
        client.call("streams.write", runId=run, name="out", chunks=[b""], operationId="2")
        assert frames.next() == (CHUNK, b"")
        client.call("streams.close", runId=run, name="out", operationId="3")
        assert frames.rest() == [(CLOSED, b"")]
    with client.stream(run, "out", -2) as frames:
        assert (frames.start, frames.rest()) == (1, [(CHUNK, b"b"), (CHUNK, b""), (CLOSED, b"")])
    with client.stream(run, "out", 2) as frames:
        assert (frames.start, frames.rest()) == (2, [(CHUNK, b""), (CLOSED, b"")])
    assert client.call("streams.getInfo", runId=run, name="out") == {"tailIndex": 2, "done": True}


def test_a_quiet_stream_says_that_it_lives(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.world.reading.QUIET_SECONDS", 0.02)
    with client.stream(client.run(), "out") as frames:
        assert frames.next() == (ALIVE, b"")


def test_many_chunks_are_read_whole(client: Client) -> None:
    run, chunk = client.run(), b"x" * 1000
    for number in range(10):
        client.call("streams.write", runId=run, name="out", chunks=[chunk] * 300, operationId=f"{run}{number}")
    client.call("streams.close", runId=run, name="out", operationId=f"{run}c")
    with client.stream(run, "out") as frames:
        assert frames.rest() == [(CHUNK, chunk)] * 3000 + [(CLOSED, b"")]


def test_streams_that_cannot_be_read_are_refused(client: Client) -> None:
    for start in ("x", "1.5", "9" * 20):
        assert client.raw("GET", f"/v1/streams/r/out?start={start}")[0] == 400
    with client.stream(client.run(), "a%2Fb") as frames:
        assert frames.status == 400


def test_readers_that_leave_free_what_is_behind_them(served: Served) -> None:
    run = served.client.run()
    before = len(asyncio.all_tasks(served.app.runtime.opened().bridge._thread.loop))
    for _ in range(20):
        with served.client.stream(run, "out") as frames:
            assert frames.status == 200
    eventually(lambda: len(asyncio.all_tasks(served.app.runtime.opened().bridge._thread.loop)) <= before + 2)


# --- access


def test_a_token_is_asked_for_where_it_is_set() -> None:
    with make_app(world_token=TOKEN) as app, serving(app, TOKEN) as served:
        assert served.client.call("runs.list")["data"] == []
        for authorization in ("", "Bearer", f"Bearer {TOKEN}x", f"Basic {TOKEN}", f"Bearer {TOKEN[:-1]}"):
            status, _, body = served.client.raw("POST", "/v1/runs.list", b"{}", authorization=authorization)
            assert (status, b'"name":"Unauthorized"' in body) == (401, True)
            assert served.client.raw("GET", "/v1/streams/r/n", authorization=authorization)[0] == 401
        assert served.client.raw("POST", "/v1/runs.list", b"{}", authorization=f"bearer {TOKEN}")[0] == 200
        assert served.client.raw("GET", "/v1/health", authorization="")[0] == 200


def test_without_a_token_no_page_of_a_site_is_answered(client: Client) -> None:
    for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}, {"sec_fetch_site": "cross-site"}):
        assert client.raw("POST", "/v1/runs.list", b"{}", **headers)[0] == 401
    with pytest.raises(ConfigurationError, match="world_token is empty"):
        WorldServer(make_app(), "0.0.0.0", 0)


def test_bodies_over_the_limit_are_refused() -> None:
    with make_app(world_body_limit=2048) as app, serving(app) as served:
        with pytest.raises(WorldError) as refused:
            served.client.call("streams.write", runId="r", name="n", chunks=[b"x" * 4000], operationId="o")
        assert (refused.value.name, refused.value.status) == ("PayloadTooLargeError", 413)
        assert served.client.call("streams.list", runId=served.client.run()) == {"names": []}


# --- life


def test_a_child_delivers_nothing_before_start() -> None:
    with make_app() as app, Application() as application, serving(app, is_child=True) as served:
        served.client.queue("r", baseUrl=application.url)
        assert served.client.call("runs.list")["data"] == []
        assert app.runtime.runners == set()
        served.client.call("start", baseUrl=application.url)
        eventually(lambda: application.got)


def test_a_stop_waits_for_a_delivery_that_calls_the_server_until_it_is_done() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def answer(delivered: Delivered) -> tuple[int, bytes]:
        begun.set()
        assert goes_on.wait(patient(30))
        served.client.create(delivered.message["runId"], "run_started")
        return 200, b""

    with make_app() as app, Application(answer) as application, serving(app) as served:
        run = served.client.run()
        id = served.client.queue(run, baseUrl=application.url)
        assert begun.wait(patient(30))
        served.server.stop()
        goes_on.set()
        served.stop()
        messages = world_messages(app)
        assert app.runtime.run(messages.get(id)).status == "success"


def test_a_hurried_stop_releases_deliveries() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def answer(delivered: Delivered) -> tuple[int, bytes]:
        begun.set()
        goes_on.wait(patient(30))
        return 200, b""

    with make_app() as app, Application(answer) as application, serving(app) as served:
        id = served.client.queue("r", baseUrl=application.url)
        assert begun.wait(patient(30))
        served.stop(hurry=True)
        record = app.runtime.run(world_messages(app).get(id))
        assert (record.status, record.owner) == ("rerouted", None)
        goes_on.set()


def test_readers_of_streams_do_not_hold_up_a_stop() -> None:
    with make_app() as app, serving(app) as served:
        with served.client.stream(served.client.run(), "out") as frames:
            served.stop()
            assert frames.next() is None


def test_it_is_mounted_in_another_application() -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount
    from starlette.testclient import TestClient

    with make_app(world_token=TOKEN) as app, Application() as application:
        api = Starlette(routes=[Mount("/world", world_app(app))])
        with TestClient(api, headers={"authorization": f"Bearer {TOKEN}"}) as client:
            assert client.get("/world/v1/health").json()["name"] == "holdfast"
            assert client.post("/world/v1/start", json={"baseUrl": application.url}).json() == {}
            given = {"queueName": "__wkf_workflow_x", "message": {"runId": "r"}, "operationId": "o"}
            assert client.post("/world/v1/queue", json=given).status_code == 200
            eventually(lambda: application.got)
            assert client.post("/world/v1/queue", json={}, headers={"authorization": ""}).status_code == 401


def world_messages(app: App) -> Any:
    from holdfast.world.queue import Messages

    return app.runtime.ready().part(Messages)
