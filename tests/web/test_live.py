"""The live feed: one reader for any number of listeners, and nothing that changes is missed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.support.patience import eventually, patient
from tests.web.shop import TOKEN, Following, WebShop, served

from holdfast import App
from holdfast.access.tokens import AccessTokens
from holdfast.errors import StoreUnavailable
from holdfast.web import live, sse, web_app
from holdfast.web.live import LiveFeed
from holdfast.web.problems import Problem
from holdfast.web.reading.topics import TOPICS, TopicReading
from holdfast.web.sse import EventStreamResponse, OpenStreams, ServerEvent


class Stand:
    """A feed whose store and time the test moves."""

    def __init__(self, app: App, **options: Any) -> None:
        self.values: dict[str, int] = {}
        self.error: Exception | None = None
        self.asked: list[list[str]] = []
        self.pauses: list[float] = []
        self.feed = LiveFeed(app.runtime, self.look, pause=self.pause, **options)

    async def look(self, topics: Collection[str]) -> dict[str, int]:
        self.asked.append(list(topics))
        if self.error is not None:
            raise self.error
        return {topic: self.values.get(topic, 0) for topic in topics}

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if seconds == live.LOOK_SECONDS:
            await asyncio.Event().wait()  # the test looks

    async def next(self, batches: live.Batches) -> ServerEvent:
        async with asyncio.timeout(patient(5)):
            (event,) = await anext(batches)
        return event


def topics_of(event: ServerEvent) -> list[str]:
    assert event.name == "changed"
    found: list[str] = json.loads(event.data)["topics"]
    return found


def play(scenario: Callable[[Stand], Awaitable[None]], **options: Any) -> None:
    with App("memory://") as app:
        stand = Stand(app, **options)
        asyncio.run(scenario(stand))  # type: ignore[arg-type]


async def close(*followed: live.Batches) -> None:
    for each in followed:
        await each.aclose()


def test_a_client_is_told_its_topics_once_and_then_what_changes() -> None:
    async def scenario(stand: Stand) -> None:
        mine = stand.feed.follow(["runners", "queues"])
        assert topics_of(await stand.next(mine)) == ["queues", "runners"]
        stand.values |= {"runners": 1, "hooks": 1}
        await stand.feed.look()
        assert topics_of(await stand.next(mine)) == ["runners"]
        await stand.feed.look()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await anext(mine)
        await close(mine)
        assert len(stand.feed) == 0

    play(scenario)


def test_two_hundred_listeners_cost_one_reader_and_are_told_one_after_another() -> None:
    async def scenario(stand: Stand) -> None:
        many = [stand.feed.follow(["runners", f"invocation:{n % 10:026}"]) for n in range(200)]
        told = await asyncio.gather(*[stand.next(each) for each in many])
        assert all(len(topics_of(each)) == 2 for each in told)
        looks = len(stand.asked)
        stand.values["runners"] = 7
        await stand.feed.look()
        assert len(stand.asked) == looks + 1
        assert len(stand.asked[-1]) == 11
        told = await asyncio.gather(*[stand.next(each) for each in many])
        assert all(topics_of(each) == ["runners"] for each in told)
        assert max(stand.pauses) > 5  # spread over ten seconds
        await close(*many)
        assert len(stand.feed) == 0

    play(scenario)


def test_a_slow_listener_keeps_names_and_no_backlog() -> None:
    async def scenario(stand: Stand) -> None:
        mine = stand.feed.follow(["runners", "queues"])
        await stand.next(mine)
        for number in range(1000):
            stand.values = {"runners": number, "queues": number}
            await stand.feed.look()
        assert topics_of(await stand.next(mine)) == ["queues", "runners"]
        await close(mine)

    play(scenario)


def test_a_client_that_comes_back_learns_what_has_changed_since() -> None:
    async def scenario(stand: Stand) -> None:
        other = stand.feed.follow(["runners", "queues"])
        mine = stand.feed.follow(["runners", "queues"])
        await stand.next(other)
        last = (await stand.next(mine)).id
        await close(mine)
        stand.values["queues"] = 1
        await stand.feed.look()
        again = stand.feed.follow(["runners", "queues"], last)
        told = await stand.next(again)
        assert topics_of(told) == ["queues"]
        await close(again)
        once_more = stand.feed.follow(["runners", "queues"], told.id)
        stand.values["runners"] = 1
        waiting = asyncio.create_task(stand.next(once_more))
        await asyncio.sleep(0)
        await stand.feed.look()
        assert topics_of(await waiting) == ["runners"]
        for unknown in ("x", "", f"{told.id}9999999999999999999", "000000000000-1"):
            stranger = stand.feed.follow(["runners"], unknown)
            assert topics_of(await stand.next(stranger)) == ["runners"]
            await close(stranger)
        await close(once_more, other)

    play(scenario)


def test_what_changed_while_nothing_listened_is_told() -> None:
    async def scenario(stand: Stand) -> None:
        mine = stand.feed.follow(["runners", "queues"])
        last = (await stand.next(mine)).id
        await close(mine)
        stand.values["runners"] = 1
        again = stand.feed.follow(["runners", "queues"], last)
        assert topics_of(await stand.next(again)) == ["runners"]
        await close(again)

    play(scenario)


def test_an_outage_is_told_and_does_not_end_the_feed() -> None:
    async def scenario(stand: Stand) -> None:
        mine = stand.feed.follow(["runners"])
        await stand.next(mine)
        stand.error = StoreUnavailable("no answer")
        await stand.feed.look()
        await stand.feed.look()
        told = await stand.next(mine)
        assert (told.name, json.loads(told.data)["status"], told.id) == ("problem", 503, "")
        late = stand.feed.follow(["runners"])
        assert (await stand.next(late)).name == "problem"
        stand.error = None
        await stand.feed.look()
        for each in (mine, late):
            assert topics_of(await stand.next(each)) == ["runners"]
        await close(mine, late)

    play(scenario)


def test_a_feed_ends_after_its_time_and_the_watcher_with_the_last() -> None:
    async def scenario(stand: Stand) -> None:
        mine = stand.feed.follow(["runners"])
        with suppress(StopAsyncIteration):
            while True:
                await stand.next(mine)
        assert len(stand.feed) == 0
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    play(scenario, life_seconds=0.05)


def test_topics_and_listeners_are_bounded() -> None:
    async def scenario(stand: Stand) -> None:
        many = [
            stand.feed.follow([f"invocation:{20 * n + each:026}" for each in range(20)])
            for n in range(live.MOST_TOPICS // 20)
        ]
        await asyncio.gather(*[stand.next(each) for each in many])
        with pytest.raises(Problem, match="in use") as refused:
            stand.feed.asked("runners")
        assert (refused.value.status, refused.value.headers["retry-after"]) == (429, "10")
        assert stand.feed.asked(f"invocation:{0:026}") == [f"invocation:{0:026}"]
        await close(*many)
        later = [stand.feed.follow([f"invocation:{5000 + n:026}"]) for n in range(30)]
        await asyncio.gather(*[stand.next(each) for each in later])
        await stand.feed.look()
        await close(*later)

    play(scenario)


def test_one_principal_does_not_fill_the_feed_or_the_streams(shop: WebShop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token has its share of the topics, whatever number of connections it makes; another one has its own."""
    monkeypatch.setattr(sse, "MOST_OF_ONE", 5)
    monkeypatch.setattr(sse, "MOST_STREAMS", 7)
    tokens = shop.app.runtime.ready().part(AccessTokens)
    _, other = shop.app.runtime.run(tokens.create("other", "viewer", 3_600, "test"))
    run = shop.speak.submit([], True)

    def follow(path: str, token: str) -> Following:
        return opened.enter_context(Following(address, f"/api/v1/{path}", Authorization=f"Bearer {token}"))

    def feed(first: int, many: int, token: str = TOKEN) -> Following:
        return follow("live?topics=" + "+".join(f"invocation:{first + n:026}" for n in range(many)), token)

    def stream(token: str = TOKEN) -> Following:
        return follow(f"invocations/{run.id}/streams/default", token)

    web = web_app(shop.app)
    with served(web) as address, ExitStack() as opened:
        assert [feed(20 * n, 20).status for n in range(3)] == [200] * 3
        refused = feed(60, 1)
        assert (refused.status, refused.headers["retry-after"]) == (429, "10")
        assert feed(0, 20).status == 200, "what it follows already"
        assert feed(100, 20, other).status == 200
        assert [stream().status for _ in range(2)] == [200, 429], "five at once"
        assert [stream(other).status for _ in range(2)] == [200, 429], "seven for all"
    shop.words.put(None)


def test_a_client_that_takes_nothing_is_hung_up_on() -> None:
    async def scenario(stand: Stand) -> None:
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) > 2:
                await asyncio.Event().wait()

        async def receive() -> Any:
            await asyncio.Event().wait()

        streams = OpenStreams()
        response = EventStreamResponse(stand.feed.follow(["runners"]), streams, patience_seconds=0.02)
        async with asyncio.timeout(patient(5)):
            await response({"type": "http"}, receive, send)
        assert (len(streams), len(stand.feed)) == (0, 0)

    play(scenario)


# --- what topics look like


@pytest.fixture(params=["memory", "sqlite"])
def app(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[App]:
    with App("memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/shop.db", name="shop") as app:
        yield app


def test_topics_change_with_what_they_are_about_and_stay_otherwise(app: App) -> None:
    @app.task(name="add")
    def add(a: int) -> int:
        return a

    reading = TopicReading(app.runtime)
    seen = dict[str, Any]()

    def changed(*more: str) -> set[str]:
        now = app.runtime.run(reading.values([*TOPICS, *more]))
        found = {name for name, value in now.items() if name in seen and seen[name] != value}
        seen.update(now)
        return found

    changed()
    assert changed() == set()
    invocation = add.submit(1)
    one = f"invocation:{invocation.id}"
    assert changed(one) == {"invocations", "queues", "hooks"}
    assert changed(one) == set()
    app.queues.pause("mail")
    assert changed(one) == {"queues"}
    app.schedules.create("hourly", add, every="1h", args=(1,))
    assert "schedules" in changed(one)
    app.emit("paid", {"n": 1})
    assert "events" in changed(one)
    changed(one)
    invocation.cancel()
    assert one in changed(one)


# --- over HTTP


@pytest.mark.parametrize(
    ("topics", "status"),
    [
        ("", 400),
        ("nonsense", 400),
        ("invocation:x", 400),
        ("runners,nonsense", 400),
        ("%20,%20", 400),
        ("+".join(f"invocation:{n:026}" for n in range(21)), 400),
    ],
)
def test_wrong_topics_are_refused(client: TestClient, topics: str, status: int) -> None:
    answer = client.get(f"/api/v1/live?topics={topics}")
    assert (answer.status_code, answer.json()["path"]) == (status, "query.topics")


def test_a_real_client_hears_of_a_call(shop: WebShop) -> None:
    web = web_app(shop.app)
    with served(web) as address:
        later = shop.add.options(delay="1h").submit(1)
        path = f"/api/v1/live?topics=invocation:{later.id}+runners"
        with Following(address, path) as following:
            events = (each for each in following.events() if ":" not in each or len(each) > 1)
            first = next(events)
            assert (following.status, first["event"]) == (200, "changed")
            assert set(json.loads(first["data"])["topics"]) == {f"invocation:{later.id}", "runners"}
            later.cancel()
            told = next(each for each in events if f"invocation:{later.id}" in each["data"])
        later = shop.add.options(delay="1h").submit(1)
        with Following(address, path, Last_Event_ID=told["id"]) as following:
            web.streams.end()  # as a server that stops does
            assert [each for each in following.events() if "event" in each] == []
        eventually(lambda: not web.streams)
