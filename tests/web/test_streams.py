"""Streams over HTTP: in pages, and as server-sent events that go on where a client was."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.testclient import TestClient
from tests.support.patience import eventually, patient
from tests.web.shop import TOKEN, Following, WebShop, served

from holdfast import Invocation
from holdfast.errors import InvocationNotFound, StreamGone, UsageError
from holdfast.web import sse, stream_response, web_app
from holdfast.web.asgi import WebApp
from holdfast.web.routes import streams
from holdfast.web.sse import EventStreamResponse, OpenStreams, ServerEvent

Get = Any
HOSTILE = 'a\nb\r\ndata: forged\n\nid: 7\u2028"<script>\x00é'


def path_of(run: Invocation[Any], name: str = "words", rest: str = "") -> str:
    return f"/api/v1/invocations/{run.id}/streams/{name}{rest}"


@pytest.fixture(scope="module")
def web(shop: WebShop) -> WebApp:
    return web_app(shop.app)


@pytest.fixture(scope="module")
def address(web: WebApp) -> Iterator[str]:
    with served(web) as address:
        yield address


# --- in pages


def test_streams_are_listed(shop: WebShop, get: Get) -> None:
    run = shop.speak.submit([1, 2])
    run.result(timeout=patient(30))
    (listed,) = get(f"/invocations/{run.id}/streams")["streams"]
    assert (listed["name"], listed["items"], listed["is_closed"]) == ("words", 2, True)
    assert get(f"/invocations/{shop.sum.id}/streams")["streams"] == []


def test_chunks_come_in_pages(shop: WebShop, get: Get) -> None:
    values = [{"n": n} for n in range(25)]
    run = shop.speak.submit(values)
    run.result(timeout=patient(30))
    chunks = f"/invocations/{run.id}/streams/words/chunks"
    page = get(chunks, limit=7)
    items = page["items"]
    while not page["is_closed"]:
        page = get(chunks, limit=7, start=page["next"])
        items += page["items"]
    assert [item["value"] for item in items] == values
    assert [item["index"] for item in items] == list(range(25))
    assert [item["value"]["n"] for item in get(chunks, start=-3)["items"]] == [22, 23, 24]
    assert get(chunks, start=99) | {"items": []} == get(chunks, start=99)
    assert get(f"/invocations/{shop.sum.id}/streams/none/chunks")["items"] == []


def test_bytes_are_base64_and_large_values_are_described(shop: WebShop, get: Get) -> None:
    run = shop.speak.submit([b"\x00\xff", "x" * 200_000])
    run.result(timeout=patient(30))
    small, large = get(f"/invocations/{run.id}/streams/words/chunks")["items"]
    assert (small["encoding"], base64.b64decode(small["value"])) == ("base64", b"\x00\xff")
    assert len(str(large["value"])) < 1000


def test_what_a_later_attempt_made_void_can_be_left_out(shop: WebShop, get: Get) -> None:
    run = shop.again.submit()
    run.result(timeout=patient(30))
    chunks = f"/invocations/{run.id}/streams/default/chunks"
    assert [item["kind"] for item in get(chunks)["items"]] == ["chunk", "restart", "chunk"]
    assert [item["value"] for item in get(chunks, attempts="last")["items"] if item["kind"] == "chunk"] == [2]


@pytest.mark.parametrize(
    ("path", "status", "place"),
    [
        ("/streams/a%2fb/chunks", 400, "path.name"),
        ("/streams/%00/chunks", 400, "path.name"),
        ("/streams/" + "x" * 101, 400, "path.name"),
        ("/streams/words?start=x", 400, "query.start"),
        ("/streams/words?start=--1", 400, "query.start"),
        ("/streams/words?attempts=first", 400, "query.attempts"),
        ("/streams/words/chunks?limit=0", 400, "query.limit"),
        ("/streams/words/chunks?stop=1", 400, "query.stop"),
    ],
)
def test_a_mistake_names_its_place(shop: WebShop, client: TestClient, path: str, status: int, place: str) -> None:
    answer = client.get(f"/api/v1/invocations/{shop.sum.id}{path}")
    assert (answer.status_code, answer.json().get("path", "")) == (status, place)


@pytest.mark.parametrize("given", ["x", "-1", "1.0", "9" * 30, "²"])
def test_a_bad_last_event_id_is_said(shop: WebShop, client: TestClient, given: str) -> None:
    answer = client.get(path_of(shop.sum), headers={"Last-Event-ID": given.encode()})
    assert (answer.status_code, answer.json()["path"]) == (400, "headers.last-event-id")


# --- as events


def test_chunks_are_events_and_the_last_is_the_end(shop: WebShop, client: TestClient) -> None:
    run = shop.speak.submit(["a", {"b": [1, None]}, b"\x00", HOSTILE])
    run.result(timeout=patient(30))
    answer = client.get(path_of(run))
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.text.startswith(": \n\n")
    assert answer.text.isascii()
    events = [dict(line.split(": ", 1) for line in event.splitlines()) for event in answer.text.split("\n\n")[1:-1]]
    assert [event.get("event", "message") for event in events] == ["message", "message", "bytes", "message", "end"]
    assert [event["id"] for event in events] == ["0", "1", "2", "3", "end"]
    assert [json.loads(events[number]["data"]) for number in (0, 1, 3)] == ["a", {"b": [1, None]}, HOSTILE]
    assert base64.b64decode(events[2]["data"]) == b"\x00"


def test_a_client_goes_on_where_it_was(shop: WebShop, client: TestClient) -> None:
    run = shop.speak.submit(list(range(10)))
    run.result(timeout=patient(30))
    whole = client.get(path_of(run)).text
    for last in range(9):
        rest = client.get(path_of(run), headers={"Last-Event-ID": f"{last}"}).text
        assert rest == ": \n\n" + whole[whole.index(f"id: {last + 1}\n") :]
    assert client.get(path_of(run), headers={"Last-Event-ID": "9"}).text.count("id: ") == 1  # only the end
    assert client.get(path_of(run), headers={"Last-Event-ID": "end"}).status_code == 204
    assert "id: 7\n" not in client.get(path_of(run), params={"start": "-2"}).text


def test_a_restart_is_an_event(shop: WebShop, client: TestClient) -> None:
    run = shop.again.submit()
    run.result(timeout=patient(30))
    events = client.get(path_of(run, "default")).text
    assert "event: restart\n" in events
    assert "event: restart\n" not in client.get(path_of(run, "default"), params={"attempts": "last"}).text


def test_chunks_come_while_the_call_runs(shop: WebShop, address: str) -> None:
    run = shop.speak.submit(["first"], True)
    with Following(address, path_of(run)) as client:
        events = client.events()
        assert next(events) == {":": ""}
        assert next(events)["data"] == '"first"'
        for word in ("second", "third"):
            shop.words.put(word)
            assert json.loads(next(events)["data"]) == word
        shop.words.put(None)
        assert next(events)["event"] == "end"
        assert list(events) == []


def test_a_stream_that_does_not_exist_yet_is_waited_for(shop: WebShop, address: str) -> None:
    with Following(address, path_of(shop.later, "default")) as client:
        assert client.status == 200
        assert next(client.events()) == {":": ""}


def test_a_heartbeat_comes_while_nothing_else_does(
    shop: WebShop, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sse.HEARTBEAT_SECONDS == 15
    monkeypatch.setattr(sse, "HEARTBEAT_SECONDS", 0.05)
    run = shop.speak.submit([], True)
    with Following(address, path_of(run)) as client:
        events = client.events()
        assert [next(events) for _ in range(4)] == [{":": ""}] * 4
        shop.words.put("at last")
        found = next(event for event in events if event != {":": ""})
        assert found["data"] == '"at last"'
        shop.words.put(None)
        assert next(event for event in events if event != {":": ""})["event"] == "end"


def test_a_client_that_hangs_up_frees_everything(shop: WebShop, web: WebApp, address: str) -> None:
    run = shop.speak.submit(["first"], True)
    clients = [Following(address, path_of(run)) for _ in range(5)]
    for client in clients:
        events = client.events()
        assert [next(events), next(events)][1]["data"] == '"first"'
    eventually(lambda: len(web.streams) == 5)
    for client in clients[:-1]:
        client.close()
    eventually(lambda: len(web.streams) == 1)  # at once, and not with the next chunk
    shop.words.put("second")
    assert next(clients[-1].events())["data"] == '"second"'
    clients[-1].close()
    eventually(lambda: len(web.streams) == 0)
    bridge = shop.app.runtime.opened().bridge
    eventually(lambda: not bridge._calls)
    shop.words.put(None)
    run.result(timeout=patient(30))


@pytest.mark.slow
def test_a_frozen_client_holds_up_only_itself(shop: WebShop, web: WebApp, address: str) -> None:
    run = shop.speak.submit(["x" * 50_000] * 200, True)
    with Following(address, path_of(run)):  # it reads nothing: 10 MB are more than sockets hold
        with Following(address, path_of(run)) as client:
            events = (event for event in client.events() if event != {":": ""})
            for _ in range(200):
                assert len(next(events)["data"]) == 50_002
            shop.words.put(None)
            assert next(events)["event"] == "end"
        eventually(lambda: len(web.streams) == 1)  # that of the client is over, soon after its last byte
    eventually(lambda: len(web.streams) == 0)


def test_a_server_that_stops_ends_its_streams(shop: WebShop) -> None:
    web = web_app(shop.app)
    run = shop.speak.submit(["first"], True)
    with served(web, timeout_graceful_shutdown=30) as address:
        client = Following(address, path_of(run))
        events = client.events()
        assert [next(events), next(events)][1]["id"] == "0"
        began = time.monotonic()
        web.streams.end()
        assert list(events) == []  # without an end event: the client comes back
    assert time.monotonic() - began < 10
    client.close()
    shop.words.put(None)


def test_a_stream_ends_after_a_time_so_that_rights_are_looked_at_again(
    shop: WebShop, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "LIFE_SECONDS", patient(0.5))
    run = shop.speak.submit(["first"], True)
    with Following(address, path_of(run)) as client:
        assert [event.get("id") for event in client.events()] == [None, "0"], "without an end event: it comes back"
    shop.words.put(None)


@pytest.mark.slow
def test_many_readers_follow_one_stream(shop: WebShop, web: WebApp, address: str) -> None:
    run = shop.speak.submit([], True)
    clients = [Following(address, path_of(run)) for _ in range(200)]
    eventually(lambda: len(web.streams) == 200)
    for number in range(20):
        shop.words.put(number)
    shop.words.put(None)
    run.result(timeout=patient(30))
    for client in clients:
        found = [event for event in client.events() if event != {":": ""}]
        assert [event["data"] for event in found[:-1]] == [f"{number}" for number in range(20)]
        client.close()
    eventually(lambda: len(web.streams) == 0)


# --- where it cannot be read


def test_what_was_removed_is_gone(shop: WebShop, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone(*_: object) -> None:
        raise StreamGone("its time is over")

    monkeypatch.setattr("holdfast.streams.reader.LogReader._check_gone", gone)
    answer = client.get(path_of(shop.sum))
    assert (answer.status_code, answer.json()["title"]) == (410, "StreamGone")


@pytest.mark.parametrize(
    ("error", "title"), [(StreamGone("over"), "StreamGone"), (ZeroDivisionError("canary"), "InternalError")]
)
def test_an_error_in_the_middle_is_an_event(
    shop: WebShop, client: TestClient, monkeypatch: pytest.MonkeyPatch, error: Exception, title: str
) -> None:
    async def broken(*_: object, **__: object) -> Any:
        raise error

    monkeypatch.setattr("holdfast.streams.reader.LogReader._more", broken)
    text = client.get(path_of(shop.run)).text
    problem = json.loads(text.split("event: problem\ndata: ")[1])
    assert problem["title"] == title
    assert "canary" not in text


def test_an_unknown_invocation_is_not_found(client: TestClient) -> None:
    answer = client.get("/api/v1/invocations/" + "0" * 26 + "/streams/words")
    assert (answer.status_code, answer.json()["title"]) == (404, "InvocationNotFound")


# --- for a route of one's own


def test_a_route_of_ones_own_answers_with_a_stream(shop: WebShop) -> None:
    run = shop.speak.submit(["a", "b"])
    run.result(timeout=patient(30))

    async def route(scope: Any, receive: Any, send: Any) -> None:
        last = Request(scope).headers.get("last-event-id")
        await (await stream_response(shop.app, run.id, "words", last_event_id=last))(scope, receive, send)

    client = TestClient(route)
    assert client.get("/").text.count("id: ") == 3
    assert client.get("/", headers={"Last-Event-ID": "0"}).text.count("id: ") == 2


def test_a_route_of_ones_own_gets_errors_of_holdfast(shop: WebShop) -> None:
    with pytest.raises(InvocationNotFound):
        asyncio.run(stream_response(shop.app, "0" * 26))
    with pytest.raises(UsageError, match="slash"):
        asyncio.run(stream_response(shop.app, shop.sum.id, "a/b"))
    with pytest.raises(UsageError, match="Last-Event-ID"):
        asyncio.run(stream_response(shop.app, shop.sum.id, last_event_id="x"))


# --- the format


def test_an_event_is_one_block_whatever_is_in_it() -> None:
    assert ServerEvent("a\nb", id="1", name="x").encoded() == b"id: 1\nevent: x\ndata: a\ndata: b\n\n"
    assert ServerEvent("").encoded() == b"data: \n\n"


def test_a_server_that_cannot_send_closes_the_reader() -> None:
    closed = []

    async def batches() -> Any:
        try:
            yield [ServerEvent("1")]
            await asyncio.sleep(60)
        finally:
            closed.append(True)

    async def receive() -> Any:
        await asyncio.sleep(60)

    sent = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 2:
            raise OSError("the client is gone")

    streams = OpenStreams()
    asyncio.run(EventStreamResponse(batches(), streams)({"type": "http"}, receive, send))
    assert (closed, len(streams)) == ([True], 0)


def test_the_token_is_needed(shop: WebShop) -> None:
    with TestClient(web_app(shop.app)) as client:
        assert client.get(path_of(shop.run)).status_code == 401
        assert client.get(f"{path_of(shop.run)}?token={TOKEN}").status_code == 401
