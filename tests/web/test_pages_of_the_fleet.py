"""The overview, and pages and routes about runners, services and the store; problems as pages; the files of pages."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.support.patience import eventually, patient
from tests.web.entrance import Entrance
from tests.web.shop import HOSTILE, TOKEN, WebShop

from holdfast import App
from holdfast.errors import StoreUnavailable
from holdfast.model.records import Quarantined, RunnerRecord, WorkerRecord
from holdfast.runtime.engine import Engine
from holdfast.web import web_app
from holdfast.web.asgi import WebApp
from holdfast.web.pages.charts import Axes, Series, Slot, cycle, lines, time
from holdfast.web.pages.overview import linked, quoted
from holdfast.web.pages.table import FILES
from holdfast.web.principals import Role
from holdfast.web.reading.health import BAD, GOOD, WARN, AppHealth, HealthSign

Get = Any
PAGE = {"accept": "text/html,application/xhtml+xml"}
ESCAPED = "&lt;script&gt;"


@pytest.fixture
def page(client: TestClient) -> Callable[..., str]:
    def text(path: str, expected: int = 200) -> str:
        answer = client.get(path, headers=PAGE)
        assert answer.status_code == expected, answer.text
        assert "<script>alert" not in answer.text
        assert "style=" not in answer.text
        return answer.text

    return text


def local(app: App, **options: Any) -> TestClient:
    return TestClient(WebApp(app, is_local=True), base_url="http://localhost", headers=PAGE, **options)


def with_store(app: App, work: Callable[[Any], Any]) -> Any:
    async def job() -> Any:
        return await work((await app.runtime.engine()).store)

    return app.runtime.run(job())


def shown(text: str) -> str:
    """Return what a reader sees of a page."""
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text.partition("<main")[2])))


# --- the overview


def test_the_overview_begins_with_the_sentence(page: Callable[..., str], shop: WebShop) -> None:
    def told() -> str:
        return text if "of 3 calls failed" in (text := shown(page("/"))) else ""

    text = eventually(told)
    assert text.index("failed in the last hour") < text.index("Waiting")
    assert text.index("Failures") < text.index("per second")
    assert f"ValueError: {'<script>alert'}" in text


def test_an_empty_store_says_what_to_do_next() -> None:
    with App("memory://", name="shop") as app, local(app) as client:
        text = shown(client.get("/").text)
        assert "Nothing is here yet: no runner, and no call." in text
        assert "holdfast run shop:app" in text
        assert "Failures" not in text


def test_a_pause_is_named_with_its_reason_and_escaped() -> None:
    with App("memory://", name="shop") as app, local(app) as client:
        app.queues.pause("mail", by="ann", reason=HOSTILE[:40])
        text = client.get("/").text
        assert ESCAPED in text
        assert "queue mail is paused by ann" in shown(text)


@pytest.mark.parametrize("span", ["1h", "6h", "24h", "7d"])
def test_the_time_can_be_chosen(page: Callable[..., str], span: str) -> None:
    assert f'href="/?since={span}" aria-current="true"' in page(f"/?since={span}")


def test_another_time_is_refused(page: Callable[..., str]) -> None:
    assert "expected 1h or 6h" in page("/?since=2h", 400)


@pytest.mark.parametrize(
    ("word", "expected"), [("charge", "charge"), ("a b", '"a b"'), ('"', '"\\""'), ("\\", '"\\\\"'), ("", '""')]
)
def test_words_of_a_search_are_quoted(word: str, expected: str) -> None:
    assert quoted(word) == expected


def test_health_is_a_route(get: Get) -> None:
    found = get("/health")
    assert found["level"] in ("good", "warn", "bad", "busy")
    assert found["sentence"].endswith(".")


# --- runners


@pytest.fixture
def fleet() -> Iterator[App]:
    """Three runners that are entries of the roster only: one alive, one silent, one that drains."""
    with App("memory://", name="shop") as app:
        now = with_store(app, _now)
        worker = WorkerRecord(id="w1", pid=7, started_at=now - 60, running=2, unresponsive_since=now - 9)
        facts: dict[str, Any] = {"app": "shop", "pid": 1, "concurrency": 4, "tasks": ("add",), "started_at": now - 60}
        for runner in (
            RunnerRecord(id="alive-1", host=HOSTILE[:30], version="1.0", heartbeat_at=now, workers=(worker,), **facts),
            RunnerRecord(id="silent-1", host="b", version="2.0", heartbeat_at=now - 999, **facts),
            RunnerRecord(id="drains-1", host="c", version="1.0", heartbeat_at=now, draining=True, **facts),
        ):
            with_store(app, lambda store, runner=runner: store.enrol(runner))
        yield app


async def _now(store: Any) -> float:
    return float(store.now())


def test_runners_that_need_attention_come_first(fleet: App) -> None:
    with local(fleet) as client:
        text = client.get("/runners").text
    order = [text.index(f'href="/runners/{id}"') for id in ("silent-1", "alive-1", "drains-1")]
    assert order == sorted(order)
    seen = shown(text)
    assert "no answer w1" in seen
    assert "1.0 on 2" in seen
    assert ESCAPED in text
    assert 'data-action="/runners/silent-1/drain"' in text
    assert "holdfast runners drain silent-1" in text
    assert "<svg" in text


def test_one_runner_has_a_page(fleet: App) -> None:
    with local(fleet) as client:
        seen = shown(client.get("/runners/alive-1").text)
        assert "w1" in seen
        assert "Nothing runs." in seen
        assert client.get("/runners/nobody").status_code == 404
        assert "there is no runner" in shown(client.get("/runners/nobody").text)


def test_what_runs_is_told_with_its_runner(shop: WebShop, page: Callable[..., str]) -> None:
    busy = shop.speak.submit([], True)
    try:
        eventually(lambda: busy.id in page("/runners"))
        (runner,) = with_store(shop.app, lambda store: store.roster("shop"))
        assert busy.id in page(f"/runners/{runner.id}")
    finally:
        shop.words.put(None)
        busy.result(timeout=patient(30))


def test_runners_are_documents_as_the_command_prints_them(fleet: App) -> None:
    with local(fleet) as client:
        found = {each["id"]: each for each in client.get("/api/v1/runners").json()["runners"]}
        assert {id: each["state"] for id, each in found.items()} == {
            "alive-1": "alive",
            "silent-1": "dead",
            "drains-1": "draining",
        }
        one = client.get("/api/v1/runners/alive-1").json()
        assert (one["running"], one["capacity"], one["calls"], one["services"]) == (2, 4, [], "yes")
        assert client.get("/api/v1/runners/x").json()["title"] == "RunnerNotFound"
        services = client.get("/api/v1/services?limit=5").json()
        assert {each["id"]: each["decision"] for each in services["runners"]}["silent-1"] == "silent"


@pytest.mark.parametrize("wish", ["drain", "stop"])
def test_a_runner_is_asked_and_a_preview_asks_nothing(fleet: App, wish: str) -> None:
    with local(fleet) as client:
        path = f"/api/v1/runners/alive-1/{wish}"
        seen = client.post(path, json={"preview": True}).json()
        assert "alive-1" in seen["summary"]
        assert {each.wish for each in with_store(fleet, lambda store: store.roster("shop"))} == {""}
        done = client.post(path, json={"reason": "a new release"}).json()
        assert f"asked to {wish}" in done["summary"]
        wishes = {each.id: each.wish for each in with_store(fleet, lambda store: store.roster("shop"))}
        assert wishes == {"alive-1": wish, "silent-1": "", "drains-1": ""}
        assert "may not get the request" in client.post(f"/api/v1/runners/silent-1/{wish}", json={}).json()["summary"]
        assert client.post(f"/api/v1/runners/nobody/{wish}", json={}).status_code == 404
        assert f"asked to {wish}" in shown(client.get("/runners").text)


def test_slots_are_drawn_on_the_cycle() -> None:
    drawn = cycle("slots", [Slot(0.0, 0.45, "0", "a", "f-busy"), Slot(0.5, 0.95, "1", "b", "f-idle")], 0.25)
    assert [(bar.x, bar.width) for bar in drawn.bars] == [(0.0, 288.0), (320.0, 288.0)]
    assert [mark.x for mark in drawn.marks] == [160.0]


def test_a_value_between_gaps_is_a_dot_and_axes_are_written_in_units() -> None:
    drawn = lines("waits", [0.0, 60.0, 120.0, 180.0], 240.0, [Series("p95", [0.02, None, 0.03, 0.04], "c1")], (), time)
    assert [line.is_dot for line in drawn.lines] == [True, False]
    assert [text for _, text in drawn.grid] == ["0", "25ms", "50ms"]


def test_times_on_an_axis_are_short() -> None:
    assert [time(each) for each in (0.0, 0.0005, 0.5, 2.5, 50.0, 500.0, 1000.0, 50_000.0, 2e6)] == [
        *("0", "0.5ms", "500ms", "2.5s", "50s", "8.3m", "17m", "14h", "23d")
    ]


def test_a_short_span_counts_from_its_start() -> None:
    assert [text for _, text in Axes(1e9, 1e9 + 0.12, 1).ticks()] == ["+20ms", "+40ms", "+60ms", "+80ms", "+100ms"]


def test_each_part_of_the_sentence_is_a_link() -> None:
    signs = [HealthSign(BAD, "1 runner silent", "/runners"), HealthSign(WARN, "1 call is parked", "/invocations")]
    told = linked(AppHealth(BAD, "1 runner silent, 1 call is parked.", signs))
    assert "".join(lead + sign.text for lead, sign in told) == "1 runner silent, 1 call is parked"
    assert [lead for lead, _ in linked(AppHealth(GOOD, "All well: x.", signs[:1]))] == ["All well: "]
    assert linked(AppHealth(GOOD, "All well.", ())) == []


# --- the store


def test_the_store_is_shown_and_checked_when_asked(tmp_path: Path) -> None:
    with App(f"sqlite:///{tmp_path}/shop.db", name="shop") as app, local(app) as client:
        plain = shown(client.get("/store").text)
        assert "No record is set aside." in plain
        assert "every page was read" not in plain
        assert "every page was read" in shown(client.get("/store?check=1").text)
        facts = client.get("/api/v1/store").json()
        assert facts["sizes"].keys() >= {"file"}
        assert client.get("/api/v1/store/check").json()["ok"] in (True, False)


def test_damaged_records_are_shown_cut_and_escaped() -> None:
    with App("memory://", name="shop") as app, local(app) as client:
        with_store(app, _now)
        store: Any = app.runtime.run(app.runtime.engine()).store
        for number in range(25):
            raw = f"{number}{HOSTILE}mongodb://ann:secret@db/ " + "x" * 20_000
            aside = Quarantined(id=f"bad-{number}", app="shop", at=1e9 + number, why=HOSTILE, raw=raw)
            store._quarantine.append(aside)
        found = client.get("/api/v1/store/quarantine?limit=3").json()
        assert [each["id"] for each in found["records"]] == ["bad-24", "bad-23", "bad-22"]
        assert found["has_more"]
        assert len(found["records"][0]["raw"]) <= 10_000
        assert "secret" not in str(found)
        text = client.get("/store").text
        assert ESCAPED in text
        assert "secret@" not in text
        assert "bad-24" in text
        assert "bad-4<" not in text
        assert "there are more" in text
        assert "25 damaged records were set aside" in shown(client.get("/").text)


def test_only_admins_see_what_a_damaged_record_has_in_it() -> None:
    """Its arguments are not decoded, so no secret in it is hidden by its type or name."""
    with Entrance() as entrance:
        store: Any = entrance.app.runtime.ready().store
        store._quarantine.append(Quarantined(id="bad", app="shop", at=1e9, why="torn", raw="card=4711-0815"))
        for role in Role:
            with entrance.known_by("login", role) as client:
                text, answer = client.get("/store").text, client.get("/api/v1/store/quarantine")
            assert "torn" in text
            assert ("4711-0815" in text, answer.status_code == 200) == (role is Role.ADMIN,) * 2


# --- problems


def test_a_problem_of_a_page_is_a_page_in_the_frame(page: Callable[..., str], client: TestClient) -> None:
    text = page("/nothing", 404)
    assert "<nav" in text
    assert "there is nothing at this address" in shown(text)
    assert client.get("/nothing").headers["content-type"] == "application/problem+json"
    api = client.get("/api/v1/nothing", headers=PAGE)
    assert api.headers["content-type"] == "application/problem+json"
    posted = client.post("/runners", headers=PAGE)
    assert (posted.status_code, posted.headers["allow"]) == (405, "GET")
    assert "default-src 'none'" in posted.headers["content-security-policy"]


def test_a_refusal_is_a_page_that_names_no_user(shop: WebShop) -> None:
    with TestClient(web_app(shop.app)) as client:
        refused = client.get("/", headers=PAGE)  # led to the page on which to log in
    assert "token" in refused.text
    assert "shop.db" not in refused.text
    assert TOKEN not in refused.text


def test_a_defect_and_an_outage_say_nothing_of_their_errors(
    shop: WebShop, page: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, status, says in (
        (ZeroDivisionError("a secret detail"), 500, "Its log says why"),
        (StoreUnavailable("a secret host"), 503, "cannot reach its store"),
    ):

        async def broken(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("holdfast.web.reading.health.HealthReading.facts", broken)
        text = page("/", status)
        assert says in shown(text)
        assert "secret" not in text


def test_a_store_that_cannot_be_reached_is_a_page(page: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object) -> Engine:
        raise StoreUnavailable("no answer from a secret host")

    monkeypatch.setattr("holdfast.runtime.app_runtime.AppRuntime.aready", away)
    text = page("/store", 503)
    assert "Load this page again" in shown(text)
    assert "secret" not in text


# --- files


@pytest.mark.parametrize("name", FILES)
def test_files_are_not_sent_twice(client: TestClient, name: str) -> None:
    first = client.get(f"/static/{name}")
    again = client.get(f"/static/{name}", headers={"if-none-match": first.headers["etag"]})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")
    other = client.get(f"/static/{name}", headers={"if-none-match": '"other"'})
    assert other.content == first.content
